"""Finds the rows in the state of an optimizer, and verifies that it treats each independently.

The optimizer is traced, abstractly, on tables whose numbers of rows are primes that occur nowhere
else, and that equal no product of other sizes. Shapes then show which arrays have rows, also in
loops and branches. If every operation computes its ``i``-th rows only from the ``i``-th rows of its
operands, no row depends on another. A second trace with other numbers of rows must give the same
program, so that no row depends on the number of rows.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ..core.paths import flatten_with_path, path_name
from ..core.rows import SparseRows, is_rows, is_sparse_or_none, rows_tree
from .graph import Graph, Operation
from .primitives import CALLS, Kind

# They are row-wise, but the gradient of a row takes effect in a later step, when the row may be
# absent. No operation shows it, so they are known by their states.
_DEFERRING = optax.MultiStepsState, optax.ApplyEvery, optax.LookaheadState, optax.contrib.SAMState


class RowsOfState(NamedTuple):
    """The leaves of a state with a row for each row of a table."""

    state_def: Any  # the tree structure of the state
    owners: list[int | None]  # for each of its leaves the position of the gradient of its rows


def rows_of_state(
    inner: optax.GradientTransformationExtraArgs,
    updates: Any,
    state: Any,
    params: Any,
    extra_args: dict[str, Any],
    *,
    check: bool = True,
) -> RowsOfState:
    """Finds the rows in the state of an optimizer, and verifies that it treats each independently.

    Args:
        inner: the optimizer.
        updates: its gradients, some of which are SparseRows.
        state: its state.
        params: its parameters or None.
        extra_args: extra args of its update.
        check: whether to verify it; otherwise only ``inner.init`` is traced.

    Raises:
        ValueError: if the optimizer is not row-wise, or if the check does not support a primitive;
            also without the check, if an array of the state has rows in an axis other than 0.
    """
    if check:
        _refuse_deferring(state)
    # Near the two sizes that occur, to see what is chosen by size, such as what to factorize.
    sizes: list[Callable[[SparseRows], int]] = [lambda g: g.num_rows, lambda g: g.indices.shape[0]]
    taken = {d for leaf in jax.tree.leaves((updates, state, params)) for d in jnp.shape(leaf)}
    found, operations = [], []
    for size in sizes:
        tables = _resized(updates, params, size, taken)
        rows, abstract_state = _init(inner, tables)
        found.append(rows)
        if check:
            operations.append(_operations_of_update(inner, tables, abstract_state, extra_args))
    if found[0] != found[1]:
        raise NotRowWise("its state depends on the number of rows")
    if check and operations[0] != operations[1]:
        raise NotRowWise("its update depends on the number of rows")
    return found[0]


def _refuse_deferring(state: Any) -> None:
    defers = lambda s: isinstance(s, _DEFERRING)
    for part in filter(defers, jax.tree.leaves(state, is_leaf=defers)):
        raise NotRowWise(f"{type(part).__name__} applies a gradient to its row in a later step")


# Abstract tables


class _Tables(NamedTuple):
    """Abstract gradients and parameters, with tables of given numbers of rows."""

    updates: Any
    params: Any
    has_params: bool  # whether ``params`` are given, or the gradients stand in for them
    positions: dict[int, int]  # among the gradients, by the number of rows
    names: dict[int, str]  # of the parameters, by the number of rows


def _resized(
    updates: Any, params: Any, size: Callable[[SparseRows], int], taken: set[int]
) -> _Tables:
    """Tables of about ``size`` rows, whose numbers are not in ``taken`` and are added to it."""
    given, treedef = flatten_with_path(updates, is_leaf=is_sparse_or_none)
    paths, gs = zip(*given, strict=True)
    num_rows = dict[int, int]()  # of each table, by its position
    for i, g in enumerate(gs):
        if is_rows(g):
            # Not the small numbers that an optimizer makes up, such as the two of a pair.
            num_rows[i] = next(p for p in primes(max(size(g), 10)) if p not in taken)
            taken.add(num_rows[i])

    def abstract(i, a):
        shape, dtype = (a.shape, a.dtype) if is_rows(a) else (jnp.shape(a), jnp.result_type(a))
        if i in num_rows:
            table = gs[i].shape if gs[i].in_lines(a) else shape
            shape = (num_rows[i], *table[1:])
        return jax.ShapeDtypeStruct(shape, dtype)

    abstract_tree = lambda i, tree: rows_tree.map(lambda a: abstract(i, a), tree)
    # Gradients stand in for parameters, a number for a missing gradient.
    instead = [0.0 if g is None else g for g in gs]
    xs = instead if params is None else treedef.flatten_up_to(params)
    return _Tables(
        updates=treedef.unflatten(itertools.starmap(abstract_tree, enumerate(gs))),
        params=treedef.unflatten(itertools.starmap(abstract_tree, enumerate(xs))),
        has_params=params is not None,
        positions={rows: i for i, rows in num_rows.items()},
        names={rows: path_name(paths[i]) for i, rows in num_rows.items()},
    )


def primes(start: int) -> Iterator[int]:
    """The primes from ``start``."""
    return (p for p in itertools.count(start) if all(p % d for d in range(2, math.isqrt(p) + 1)))


# The state


def _init(inner: optax.GradientTransformationExtraArgs, tables: _Tables) -> tuple[RowsOfState, Any]:
    """The leaves of the state that have rows, and the abstract state."""
    with _annotate_errors(tables):
        state = jax.eval_shape(inner.init, tables.params)
    slots, state_def = flatten_with_path(state)
    owners = [_owner(path, slot.shape, tables) for path, slot in slots]
    return RowsOfState(state_def, owners), state


def _owner(path: Any, shape: tuple[int, ...], tables: _Tables) -> int | None:
    """The index of the gradient with the rows of an array of the state."""
    axes = [axis for axis, size in enumerate(shape) if size in tables.positions]
    if axes not in ([], [0]):
        name = path_name(path)
        raise NotRowWise(f"its state '{name}' of shape {shape} has rows in an axis other than 0")
    return tables.positions[shape[0]] if axes else None


# The update


def _operations_of_update(
    inner: optax.GradientTransformationExtraArgs,
    tables: _Tables,
    state: Any,
    extra_args: dict[str, Any],
) -> list[Any]:
    """The operations of the update in order; raises an error unless it is row-wise."""
    update = lambda g, s, x: inner.update(g, s, x, **extra_args)
    params = tables.params if tables.has_params else None
    with _annotate_errors(tables):
        traced = jax.make_jaxpr(update, return_shape=True)
        jaxpr, after = traced(tables.updates, state, params)
    found = list[Any]()
    for op, top, *_ in Graph.of(jaxpr.jaxpr, jaxpr.consts).walk():
        check_operation(op, tables.names, top.line)
        numbers = [str(v.literal) for v in op.ins if v.literal is not None and not v.shape]
        found.append((op.name, numbers))
    check_shapes((tables.updates, state), after, tables.names)
    return found


def check_shapes(before: Any, after: Any, names: dict[int, str]) -> None:
    """Raises an error unless arrays with rows have the same shapes in a tree of results."""
    is_none = lambda a: a is None
    leaves, treedef = jax.tree.flatten(before, is_leaf=is_none)
    for old, new in zip(leaves, treedef.flatten_up_to(after), strict=True):
        if old is not None and row_axes(old, names) and old.shape != new.shape:
            raise NotRowWise(
                f"it returns an array of shape {new.shape} for one of shape {old.shape}"
            )


def check_operation(op: Operation, names: dict[int, str], line: str, rows: str = "rows") -> None:
    """Raises an error unless each row of the results depends only on the same rows of operands."""
    operands = [size for v in op.ins for size in row_axes(v, names)]
    results = [row_axes(v, names) for v in op.outs]
    sizes = [*operands, *itertools.chain(*results)]
    if not sizes:
        return
    rows = f"the {rows} of parameter '{names[sizes[0]]}'"
    if any(row_axes(v, names) for v in op.ins if v.literal is not None):
        raise NotRowWise(f"it has a constant with {rows}")
    if op.kind is None or op.kind is Kind.MAP:
        raise NotRowWise(
            f"`{op.name}` ({line}) is not supported by its check, and may mix {rows}",
            _CHECK_HINT,
        )
    if not _is_row_wise(op, operands, results, names):
        hint = _CHECK_HINT if op.kind in _MIXING else _HINT
        raise NotRowWise(f"`{op.name}` may mix {rows} ({line})", hint)


# They can mix rows, and the check does not look for the cases in which they do not.
_MIXING = {Kind.MIX, Kind.GATHER, Kind.SCATTER, Kind.COLLECTIVE}


def _is_row_wise(
    op: Operation, operands: list[int], results: list[list[int]], names: dict[int, str]
) -> bool:
    """Whether a known operation is row-wise, given the numbers of rows of its arrays."""
    if op.kind is Kind.SAME:
        return True
    if op.kind in CALLS:
        return op.turns not in names  # otherwise a scan over rows
    # What treats one axis unlike the others has lost it.
    if op.kind in _MIXING or any(len(axes) != 1 for axes in results):
        return False
    if not operands:  # rows that are made of none
        if op.name == "iota":
            return op.params["shape"][op.params["dimension"]] not in names
        return op.name == "broadcast_in_dim"
    if op.name == "reshape":
        in_front = lambda v: math.prod(v.shape[: v.shape.index(operands[0])])
        moves = op.params["dimensions"] is not None
        return not moves and in_front(op.ins[0]) == in_front(op.outs[0])
    return op.kind is not Kind.MAKE


def row_axes(a: Any, names: dict[int, str]) -> list[int]:
    """The sizes of the axes of an array or value that are numbers of rows."""
    return [size for size in a.shape if size in names]


# Errors

_HINT = "Put optzoo.rows.densify() before an optimizer that does not treat each row independently."
_CHECK_HINT = (
    "If the optimizer treats each row independently, use optzoo.on_rows(..., check=False); "
    "otherwise put optzoo.rows.densify() before it."
)


@contextlib.contextmanager
def _annotate_errors(tables: _Tables) -> Iterator[None]:
    """Adds a note with the arguments to an error of the optimizer itself."""
    try:
        yield
    except Exception as error:
        rows = ", ".join(f"{n} rows of parameter '{name}'" for n, name in tables.names.items())
        error.add_note(f"(optzoo.on_rows traced the optimizer on {rows}. {_HINT})")
        raise


class NotRowWise(ValueError):
    """An optimizer cannot run row by row, for a reason."""

    def __init__(self, reason: str, hint: str = _HINT):
        super().__init__(f"optzoo.on_rows cannot run this optimizer row by row: {reason}. {hint}")
        self.reason = reason
