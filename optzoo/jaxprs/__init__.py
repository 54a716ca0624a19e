"""Programs of JAX: read, proved and changed."""
