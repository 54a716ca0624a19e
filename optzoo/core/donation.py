"""Arrays of which a step that donates its arguments deletes no other."""

from typing import Any

import jax
import jax.numpy as jnp


def unshared(tree: Any, *others: Any) -> Any:
    """A tree with copies of the arrays that are in other trees, too; without them under ``jit``."""
    shared = {id(x) for x in jax.tree.leaves(others) if not isinstance(x, jax.core.Tracer)}
    copied = lambda x: jnp.copy(x) if id(x) in shared and isinstance(x, jax.Array) else x
    return jax.tree.map(copied, tree)
