"""The parameters for which an optimizer does not support row-sparse gradients."""

import traceback
from collections.abc import Callable, Mapping, Set
from typing import Any

import jax
import jax.numpy as jnp

from ..core.lines import param_tree
from ..core.paths import leaves_with_path, path_name
from ..core.rows import SparseRows, is_rows

# Of optax: they pass gradients to others, of which it is not known what they are called.
_PASSING = ("chain", "named_chain", "with_extra_args_support")


def refused_rows(
    update: Callable[[Any], Any], params: Any, given: Set[int], asked: Set[int]
) -> dict[int, str]:
    """By index, which of ``asked`` have an update that fails for row-sparse gradients, and why.

    The values name the transformation that raised the error, such as ``'optax.clip'``, or
    ``'a transformation'`` if its name is unknown.

    The update is traced with SparseRows, which adds no run time. If it also fails without them,
    the result is empty, as SparseRows are not the reason.

    Args:
        update: a function of the gradients.
        params: the parameters.
        given: the indices of parameters whose gradients are SparseRows in any case.
        asked: the indices of the parameters to test.
    """
    treedef = jax.tree.structure(params)
    tables = param_tree.leaves(params)

    def error_of(rows):
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
            return error
        return None

    if not asked or error_of(given | asked) is None:
        return {}
    errors = {i: error for i in asked if (error := error_of(given | {i})) is not None}
    if len(errors) == len(asked) and error_of(given) is not None:
        return {}
    return {i: _innermost(error) or "a transformation" for i, error in errors.items()}


def check_rows(
    tx: Any, grads: Any, state: Any, params: Any, extra_args: Mapping[str, Any], error: Exception
) -> None:
    """Raises ``ValueError`` if an update failed because of row-sparse gradients."""
    update = lambda grads: tx.update(grads, state, params, **extra_args)
    leaves = leaves_with_path(grads, is_leaf=is_rows)
    rows = {i: path_name(path) for i, (path, g) in enumerate(leaves) if is_rows(g)}
    for i, what in refused_rows(update, params, frozenset(), rows.keys()).items():
        raise ValueError(
            f"{what} in tx does not support row-sparse gradients, but optzoo.lookup or "
            f"sparse='require' gives one to parameter '{rows[i]}'. Use a transformation of "
            "optzoo, optzoo.on_rows(tx) or optzoo.rows.on_values(tx); optzoo.rows.densify() "
            "before it makes the gradient dense; masks and labels must be trees, not functions"
        ) from error


def _innermost(error: Exception) -> str | None:
    """The name of the transformation whose update raised an error: the innermost one.

    A nested function has the name of the outer one, which is the factory.
    """
    for frame, _ in reversed([*traceback.walk_tb(error.__traceback__)]):
        factory, _, update = frame.f_code.co_qualname.partition(".<locals>.")
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if update.startswith("update") and package not in ("jax", "optzoo"):
            return None if factory in _PASSING else f"{package}.{factory}".removeprefix("__main__.")
    return None
