"""Optimizers for many replicas."""
