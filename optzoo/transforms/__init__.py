"""Gradient transformations in front of an optimizer: filters, clipping, summaries, checks."""
