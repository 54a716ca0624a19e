"""Wrappers around any optax transformation."""
