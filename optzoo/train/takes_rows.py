"""Whether an optimizer takes rows as the gradients of some parameters."""

from collections.abc import Callable, Set
from typing import Any

import jax
import jax.numpy as jnp

from ..core.lines import is_lines
from ..core.rows import SparseRows


def takes_rows(
    update: Callable[[Any], Any], params: Any, given: Set[int], asked: Set[int]
) -> set[int]:
    """Those of the parameters asked for whose gradients may be rows: the update raises no error.

    The update is traced with rows, which costs nothing at run time. If it raises an error without
    them, too, they are not the reason, and nothing is refused.

    Args:
        update: a function of the gradients.
        params: the parameters.
        given: the positions of those whose gradients are rows in any case.
        asked: the positions of others.
    """
    treedef = jax.tree.structure(params)
    tables = jax.tree.leaves(params, is_leaf=is_lines)

    def runs(rows):
        def gradient(i, x):
            if i not in rows:
                return jnp.zeros_like(x)
            num_rows, *of_row = tables[i].shape
            values = jnp.zeros_like(x, shape=(1, *of_row))
            return SparseRows(jnp.zeros(1, jnp.int32), values, num_rows)

        def run():
            leaves = enumerate(jax.tree.leaves(params))
            return update(treedef.unflatten(gradient(i, x) for i, x in leaves))

        try:
            jax.eval_shape(run)
        except Exception:
            return False
        return True

    if not asked or runs(given | asked):
        return set(asked)
    alone = {i for i in asked if runs(given | {i})}
    return alone if alone or runs(given) else set(asked)
