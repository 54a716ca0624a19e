"""Shampoo."""
