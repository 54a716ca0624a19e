"""Around any optax transformation."""
