"""Copies of arrays, so that donating one tree does not delete arrays of another."""

from typing import Any

import jax
import jax.numpy as jnp


def unshared(tree: Any, *others: Any) -> Any:
    """A tree with copies of the arrays shared with other trees; unchanged under ``jit``."""
    shared = {id(x) for x in jax.tree.leaves(others) if not isinstance(x, jax.core.Tracer)}
    copied = lambda x: jnp.copy(x) if id(x) in shared and isinstance(x, jax.Array) else x
    return jax.tree.map(copied, tree)
