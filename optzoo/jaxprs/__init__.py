"""Analysis, verification and transformation of JAX programs."""
