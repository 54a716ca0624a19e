"""Gradient transformations applied before an optimizer: filters, clipping, summaries, checks."""
