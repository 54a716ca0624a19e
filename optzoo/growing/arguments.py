"""Arguments of the functions of this folder: patterns, functions of ids, shardings."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Sharding

from ..core.checks import check_function, is_array
from ..core.initial_values import InitialValueWarning
from ..core.lines import from_lines, is_lines, param_tree
from ..core.numerics import is_real, promote_types, saturating_cast
from ..core.paths import leaves_with_path, path_name, value_by_name
from ..core.warn import warn
from ..sharded.row_sharding import RowSharding
from ..state.stacks import unstack
from ..state.storage.packing import unpack
from ..state.types import LeafwiseState, nodes_of

# The rows of an array of ids.
RowsOf = Callable[[Array], Array]


def names_of(params: Any) -> list[str]:
    """The path of each parameter."""
    paths = leaves_with_path(params, is_leaf=is_lines)
    return [path_name(path) for path, _ in paths]


def placed(x: Any) -> Sharding | None:
    """The sharding of an array, if it is known and over several devices."""
    x = x.value if is_lines(x) else x
    sharding = None if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None)
    return sharding if isinstance(sharding, Sharding) and sharding.num_devices > 1 else None


def check_tables(argument: str, params: Any, tables: Mapping[str, Any]) -> None:
    """Raises ``ValueError`` if a parameter in ``tables``, by its name, has no rows."""
    leaves = param_tree.leaves(params)
    of_name = dict(zip(names_of(params), leaves, strict=True))
    for name in tables:
        if not getattr(x := of_name.get(name), "shape", ()):
            kind = "a number" if is_array(x) else "None" if x is None else f"a {type(x).__name__}"
            raise ValueError(
                f"{argument}: parameter '{name}' is {kind} and has no rows: give patterns that "
                "match tables only"
            )


def check_whole(name: str, x: Any, example: str) -> None:
    """Raises ``ValueError`` if the rows of a table are known to be on several devices."""
    sharding, shape = placed(x), jnp.shape(x.value if is_lines(x) else x)
    if sharding is not None and sharding.shard_shape(shape)[0] != shape[0]:
        raise ValueError(
            f"parameter '{name}' is sharded by rows: give shardings={{{name!r}: {example}}} with "
            "its optzoo.sharded.RowSharding"
        )


def check_stored(name: str, x: Any, sharding: RowSharding) -> None:
    """Raises ``ValueError`` unless a table has the rows of its sharding."""
    if x.shape[0] != sharding.stored_rows:
        raise ValueError(
            f"shardings: parameter '{name}' has {x.shape[0]} rows, but its sharding stores "
            f"{sharding.stored_rows}: give the sharding with which it was created"
        )


def check_by_pattern(argument: str, values: Any, example: str) -> None:
    """Raises ``TypeError`` unless an argument is a dict from patterns."""
    if not isinstance(values, Mapping):
        raise TypeError(
            f"{argument} must be a dict from patterns, such as {example}, got {values!r}"
        )


def init_by_name(init: Any, params: Any) -> dict[str, RowsOf]:
    """For each parameter with a function of ids, its name and the function."""
    if init is None:
        return {}
    functions = init if isinstance(init, Mapping) else {".*": init}
    for function in functions.values():
        check_function("a function of ids or a dict of such functions", init=function)
    return value_by_name("init", functions, params)


def warn_of_zeros(state: Any, names: Iterable[str], rows_of: Mapping[str, RowsOf]) -> None:
    """Warns if tables get rows of zeros that their optimizer never updates.

    The slots of such an optimizer have the mark ``zero_rows_stay``.
    """
    stay = set[str]()
    for node in nodes_of(LeafwiseState, state):
        if getattr(node.slots, "zero_rows_stay", False):
            first = lambda slots: unstack(unpack(from_lines(slots))[0])
            stay |= {*names_of(jax.eval_shape(first, node.slots))}
    for name in names:
        if name in stay and name not in rows_of:
            warn(
                f"new rows of parameter '{name}' are zero without init, and its optimizer never "
                "updates a row of zeros, since a step is proportional to the norm of the row. "
                f"Give init={{{name!r}: optzoo.sharded.uniform_rows(key, width)}}",
                InitialValueWarning,
            )


def rows_for(name: str, x: Any, ids: Array, rows_of: Mapping[str, RowsOf]) -> Array:
    """The new rows of some ids of a table.

    Raises:
        TypeError: if the function does not return real numbers.
        ValueError: if it returns rows of another shape.
    """
    shape = *jnp.shape(ids), *x.shape[1:]
    rows = rows_of[name](ids) if name in rows_of else jnp.zeros(shape, x.dtype)
    if jnp.shape(rows) != shape:
        raise ValueError(
            f"init must return rows of shape {shape} for {shape[0]} ids of parameter '{name}', "
            f"got {jnp.shape(rows)}: give a dict of functions by pattern if tables differ"
        )
    rows = jnp.asarray(rows)
    if not is_real(rows) and rows.dtype not in (jnp.bool_, x.dtype):
        raise TypeError(
            f"init must return rows of real numbers for parameter '{name}' of dtype {x.dtype}, "
            f"got {rows.dtype}"
        )
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return rows.astype(x.dtype)
    return saturating_cast(rows.astype(promote_types(rows.dtype, jnp.float32)), x.dtype)
