"""Of which parameters an optimizer takes no rows as gradients."""

import traceback
from collections.abc import Callable, Mapping, Set
from typing import Any

import jax
import jax.numpy as jnp

from ..core.lines import is_lines
from ..core.paths import leaves_with_path, path_name
from ..core.rows import SparseRows, is_rows

# Of optax: they pass gradients to others, of which it is not known what they are called.
_PASSING = ("chain", "named_chain", "with_extra_args_support")


def refused_rows(
    update: Callable[[Any], Any], params: Any, given: Set[int], asked: Set[int]
) -> dict[int, str]:
    """Those of the parameters asked for whose gradients may not be rows: the update then fails.

    For each of them what refuses rows: ``'optax.clip'``, or ``'a transformation'`` if it is not
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
    """Raises ``ValueError`` if an update failed because of gradients that are rows."""
    update = lambda grads: tx.update(grads, state, params, **extra_args)
    leaves = leaves_with_path(grads, is_leaf=is_rows)
    rows = {i: path_name(path) for i, (path, g) in enumerate(leaves) if is_rows(g)}
    for i, what in refused_rows(update, params, frozenset(), rows.keys()).items():
        raise ValueError(
            f"{what} in tx takes no rows, but the gradient of parameter '{rows[i]}' is "
            "row-sparse, by optzoo.lookup or sparse='require'. Use a transformation of optzoo, "
            "optzoo.on_rows(tx) or optzoo.rows.on_values(tx); optzoo.rows.densify() before it "
            "makes the gradient dense"
        ) from error


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
