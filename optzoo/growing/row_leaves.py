"""The arrays of a state that have the rows of a table."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from ..core.boxes import Boxes, unboxed
from ..core.gradients import check_leaves
from ..core.lines import from_lines
from ..core.paths import is_masked, leaves_with_path, map_with_path, path_name
from ..deferred.state import CaughtUpState
from ..state.fit import difference, misfit
from ..state.stacks import is_stack
from ..state.types import AccumulateState, RowsOfCycle, map_nodes, nodes_of
from .arguments import names_of, placed


def without_ages(state: Any) -> Any:
    """The state without the step counts of the rows of :func:`optzoo.caught_up`."""
    return map_nodes(CaughtUpState, lambda node: node._replace(last=()), state)


def with_ages(state: Any, params: Any, like: Any) -> Any:
    """The state with all rows current.

    Args:
        state: a result of :func:`without_ages`.
        params: the parameters; step counts are sharded like their rows.
        like: a state, possibly abstract, with step counts for these parameters.
    """
    boxes, others = Boxes(params, none=False), iter(nodes_of(CaughtUpState, like))

    def change(node):
        other = next(others)
        [clock] = node.clock.values()
        now = lambda a, x: jnp.full(a.shape, clock.count, a.dtype, device=_place_of_rows(x))
        lasts = zip(boxes.slots(other.last), boxes.contents, strict=True)
        all_now = [a if is_masked(a) else now(a, x) for a, x in lasts]
        return node._replace(last=boxes.refilled(other.last, all_now))

    return map_nodes(CaughtUpState, change, state)


def _place_of_rows(x: Any) -> Sharding | None:
    """The sharding of an array with a number for each row of a table."""
    sharding = placed(x)
    if not isinstance(sharding, NamedSharding):
        return sharding
    return sharding.update(spec=PartitionSpec(*sharding.spec[:1]))


def row_axes(
    tx: optax.GradientTransformation, params: Any, state: Any, sizes: Mapping[str, int]
) -> list[int | None]:
    """For each array of a state, the axis of the rows of some tables; None without such an axis.

    Compares the shapes of ``tx.init`` for several numbers of rows: the present ones, more than
    twice as many, and the new ones.

    Args:
        tx: the transformation.
        params: the parameters.
        state: the state of ``tx`` for them.
        sizes: the new numbers of rows, by the names of the tables.

    Returns:
        One entry for each array of ``without_ages(state)``.

    Raises:
        TypeError: if a leaf of them is not an array.
        StateError: if the state is not a state of ``tx`` for these parameters.
        ValueError: if an array depends on the number of rows other than by its first axis.
    """
    check_leaves(params=params, state=state)
    params, state = jax.eval_shape(lambda pair: from_lines(pair), (params, without_ages(state)))
    names, (xs, treedef) = names_of(params), jax.tree.flatten(params)

    def init(rows):
        like = (_like(x, rows[n]) if n in sizes else x for x, n in zip(xs, names, strict=True))
        return unboxed(without_ages(jax.eval_shape(tx.init, treedef.unflatten(like))))

    old = {name: x.shape[0] for x, name in zip(xs, names, strict=True) if name in sizes}
    now, more = init(old), {name: 2 * n + 1 for name, n in old.items()}
    _check(now, unboxed(state))  # boxes may state the sizes
    axes = _axes(now, init(more), {(old[n], more[n]) for n in sizes})
    _axes(now, init(sizes), {(old[n], sizes[n]) for n in sizes})
    return axes


_ARRANGED = (
    "tx arranges its state by the number of rows (such as in blocks, or in stacks of parameters "
    "of one shape), so these tables cannot be resized: use another optimizer for them by "
    "optzoo.param_groups, or keep them out of stacks"
)


def _axes(now: Any, then: Any, rows: set[tuple[int, int]]) -> list[int | None]:
    if jax.tree.structure(now) != jax.tree.structure(then):
        raise ValueError(_ARRANGED)
    first = jax.tree.map(_first_axis, now, is_leaf=is_stack)
    paths, *columns = leaves_with_path(now), *map(jax.tree.leaves, (then, first))
    found = list[int | None]()
    for (path, a), b, axis in zip(paths, *columns, strict=True):
        found.append(None if a.shape == b.shape else axis)
        if a.shape != b.shape and not _grows(a.shape, b.shape, axis, rows):
            raise ValueError(
                f"the state of tx has an array of shape {a.shape} at '{path_name(path)}', which "
                "depends on all rows of a table, so the table cannot be resized: use an "
                "optimizer whose slots have the rows of the table, by optzoo.param_groups"
            )
    return found


def _grows(a: tuple[int, ...], b: tuple[int, ...], axis: int, rows: set[tuple[int, int]]) -> bool:
    """Whether two shapes differ by the number of rows of a table only."""
    without = lambda shape: (*shape[:axis], *shape[axis + 1 :])
    return len(a) == len(b) > axis and (a[axis], b[axis]) in rows and without(a) == without(b)


def _like(x: Any, rows: int) -> Any:
    return jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype)


def _first_axis(node: Any) -> Any:
    """For each array of a node, the axis that is the first axis of its parameter."""
    return jax.tree.map(lambda _: int(is_stack(node)), node)


def _check(expected: Any, state: Any) -> None:
    """Raises ``StateError`` unless a state has the expected arrays."""
    if found := difference(expected, state):
        raise misfit(*found)
    wanted, got = (
        {path_name(path): f"shape {jnp.shape(a)}" for path, a in leaves_with_path(tree)}
        for tree in (expected, state)
    )
    for name in sorted(wanted.keys() | got.keys()):
        words = wanted.get(name, "nothing"), got.get(name, "nothing")
        if words[0] != words[1]:
            raise misfit(f"{words[0]} at '{name}'", words[1])
    if jax.tree.structure(expected) != jax.tree.structure(state):
        raise misfit(jax.tree.structure(expected), jax.tree.structure(state))


def forget_rows(state: Any, is_gone: Mapping[str, Any]) -> Any:
    """Drops the gradients of some rows that :func:`optzoo.accumulate` has collected.

    Args:
        state: any state.
        is_gone: by the name of a table, a function of ids that is true for the rows to drop.
    """

    def of_table(path, rows):
        gone = is_gone.get(path_name(path))
        if gone is None or not isinstance(rows, RowsOfCycle):
            return rows
        ids: Array = rows.indices
        return rows._replace(indices=jnp.where(gone(ids), jnp.iinfo(ids.dtype).max, ids))

    is_leaf = lambda x: isinstance(x, RowsOfCycle)

    def change(node):
        sums = map_with_path(of_table, node.sums, is_leaf=is_leaf)
        return node._replace(sums=sums, inner=forget_rows(node.inner, is_gone))

    return map_nodes(AccumulateState, change, state)
