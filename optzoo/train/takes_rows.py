"""Whether an optimizer takes rows as the gradients of some parameters."""

import traceback
from collections.abc import Callable, Set
from typing import Any

import jax
import jax.numpy as jnp

from ..core.lines import is_lines
from ..core.rows import SparseRows

# Of optax: they pass gradients to others, of which it is not known what they are called.
_PASSING = ("chain", "named_chain", "with_extra_args_support")


def takes_rows(
    update: Callable[[Any], Any], params: Any, given: Set[int], asked: Set[int]
) -> tuple[set[int], str]:
    """Those of the parameters asked for whose gradients may be rows: the update raises no error.

    And what refuses those of the others: ``'optax.clip'``, or ``'a transformation'`` if it is not
    known which.

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

    refusing = "a transformation"

    def runs(rows):
        nonlocal refusing

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
        except Exception as error:
            refusing = _innermost(error) or refusing
            return False
        return True

    if not asked or runs(given | asked):
        return set(asked), refusing
    alone = {i for i in asked if runs(given | {i})}
    found, by = bool(alone), refusing
    return (alone if found or runs(given) else set(asked)), by


def _innermost(error: Exception) -> str | None:
    """The transformation whose update raised an error: that of the innermost such function.

    Functions in functions have the name of the outer one, which is the factory.
    """
    for frame, _ in reversed([*traceback.walk_tb(error.__traceback__)]):
        factory, _, update = frame.f_code.co_qualname.partition(".<locals>.")
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if update.startswith("update") and package not in ("jax", "optzoo"):
            return None if factory in _PASSING else f"{package}.{factory}".removeprefix("__main__.")
    return None
