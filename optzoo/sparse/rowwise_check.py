"""Proves from its operations that an optimizer treats each row of a table on its own.

The update is traced, abstractly, on tables whose numbers of rows occur nowhere else. So the
shapes alone tell which arrays carry rows, in loops and branches too. If every operation on such
arrays makes its ``i``-th rows of nothing but the ``i``-th rows of its operands, no row can know
of another. A second trace with another number of rows must give the same program: so no row
can know how many there are.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.extend.source_info_util import summarize

from ..core.paths import is_sparse_or_none, path_name
from ..core.rows import SparseRows, is_rows

# By name, for the primitives differ among the versions of JAX. What is not listed is refused.
_ELEMENTWISE = """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp
    clz complex conj convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp
    exp2 expm1 floor ge gt igamma igammac imag integer_pow is_finite le lgamma log log1p logistic lt
    max min mul mulhi ne neg nextafter not or pcast polygamma population_count pow pvary real
    reduce_precision regularized_incomplete_beta rem round rsqrt select_n shift_left
    shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh
    xor zeta
"""
# They may treat one axis unlike the others, but where it is the row axis, the result has lost it.
_KEEPING_AXES = """
    argmax argmin bitcast_convert_type broadcast_in_dim concatenate dot_general dynamic_slice
    expand_dims iota reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor
    reshape slice split squeeze stack tile transpose unstack
"""
# As good as their bodies.
_CALLING = """
    checkpoint closed_call cond core_call custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr jit
    pjit remat remat2 scan while
"""
ELEMENTWISE = frozenset(_ELEMENTWISE.split())
_ROWWISE, _CALLS = ELEMENTWISE | frozenset(_KEEPING_AXES.split()), frozenset(_CALLING.split())
# Row-wise, but what a row is given takes effect in a later step, when the row may be absent. No
# operation shows it, so they are known by name.
_DEFERRING = optax.MultiStepsState, optax.ApplyEvery, optax.LookaheadState, optax.contrib.SAMState


class RowsOfState(NamedTuple):
    """Which leaves of a state hold a row for each row of a table."""

    state_def: Any  # the tree structure of the state
    owners: list[int | None]  # for each of its leaves, the place of the gradient of its rows


def rows_of_state(
    inner: optax.GradientTransformationExtraArgs,
    updates: Any,
    state: Any,
    params: Any,
    extra_args: dict[str, Any],
) -> RowsOfState:
    """Finds the rows in the state of an optimizer, and that it treats each on its own.

    Args:
        inner: the optimizer.
        updates: its gradients, of which some are SparseRows.
        state: its state.
        params: its parameters or None.
        extra_args: of its update.

    Raises:
        ValueError: if the optimizer is not row-wise.
    """
    defers = lambda s: isinstance(s, _DEFERRING)
    for part in filter(defers, jax.tree.leaves(state, is_leaf=defers)):
        raise _refusal(f"{type(part).__name__} lets a gradient act on its row in a later step")
    taken = {d for leaf in jax.tree.leaves((updates, state, params)) for d in jnp.shape(leaf)}
    trace = lambda size: _trace(inner, updates, params, extra_args, size, taken)
    # Near the two sizes that matter, to see what is chosen by size: what to mask, say.
    whole = trace(lambda g: g.num_rows)
    if whole != trace(lambda g: g.indices.shape[0]):
        raise _refusal("its update depends on the number of rows")
    return whole[0]


def _trace(
    inner: optax.GradientTransformationExtraArgs,
    updates: Any,
    params: Any,
    extra_args: dict[str, Any],
    size: Callable[[SparseRows], int],
    taken: set[int],
) -> tuple[RowsOfState, list[Any]]:
    """The rows of the state and the operations of the update, for tables of about ``size``.

    Their numbers of rows are none of those ``taken``, and are added to them.
    """
    given, treedef = jax.tree_util.tree_flatten_with_path(updates, is_leaf=is_sparse_or_none)
    tables = dict[int, int]()  # the place of each SparseRows by its number of rows in this trace
    for i, (_, g) in enumerate(given):
        if is_rows(g):
            # Not the small numbers that an optimizer makes up, such as the two of a pair.
            rows = next(p for p in _primes(max(size(g), 10)) if p not in taken)
            tables[rows] = i
            taken.add(rows)
    names = {rows: path_name(given[i][0]) for rows, i in tables.items()}
    resized = {i: (rows,) for rows, i in tables.items()}

    def abstract(i, tree):
        rows = resized.get(i, ())
        kind = lambda a: (a.shape, a.dtype) if is_rows(a) else (jnp.shape(a), jnp.result_type(a))
        struct = lambda shape, dtype: jax.ShapeDtypeStruct((*rows, *shape[len(rows) :]), dtype)
        return jax.tree.map(lambda a: struct(*kind(a)), tree, is_leaf=is_rows)

    gs = [abstract(i, g) for i, (_, g) in enumerate(given)]
    if params is None:  # something must take the place of a missing gradient in the state
        xs = [abstract(i, 0.0 if g is None else g) for i, (_, g) in enumerate(given)]
    else:
        xs = [abstract(i, x) for i, x in enumerate(treedef.flatten_up_to(params))]
    xs = treedef.unflatten(xs)

    with _annotate_errors(names):
        state = jax.eval_shape(inner.init, xs)
    slots, state_def = jax.tree_util.tree_flatten_with_path(state)
    owners = [_owner(path, slot.shape, tables) for path, slot in slots]
    with _annotate_errors(names):
        update = lambda g, s, x: inner.update(g, s, x, **extra_args)
        traced = jax.make_jaxpr(update, return_shape=True)
        jaxpr, (us, state) = traced(treedef.unflatten(gs), state, None if params is None else xs)
    operations = list(_operations(jaxpr.jaxpr, names))

    before = [*gs, *(slot for _, slot in slots)]
    after = [*treedef.flatten_up_to(us), *state_def.flatten_up_to(state)]
    for old, new in zip(before, after, strict=True):
        if old is not None and set(old.shape) & set(tables) and old.shape != new.shape:
            raise _refusal(f"it makes an array of shape {new.shape} of one of shape {old.shape}")
    return RowsOfState(state_def, owners), operations


def _primes(start: int) -> Iterator[int]:
    """From ``start`` on: none is the product of other sizes."""
    return (p for p in itertools.count(start) if all(p % d for d in range(2, math.isqrt(p) + 1)))


def _owner(path: Any, shape: tuple[int, ...], tables: dict[int, int]) -> int | None:
    axes = [axis for axis, size in enumerate(shape) if size in tables]
    if axes not in ([], [0]):
        name = path_name(path)
        raise _refusal(f"its state '{name}' of shape {shape} has rows elsewhere than in axis 0")
    return tables[shape[0]] if axes else None


def _operations(jaxpr: Any, names: dict[int, str], outermost: Any = None) -> Iterator[Any]:
    """The names and the constants of all operations in turn; raises at one that may mix rows."""
    if baked := [size for v in jaxpr.constvars for size in _row_axes(v, names)]:
        raise _refusal(f"it holds a constant with the rows of parameter '{names[baked[0]]}'")
    for eqn in jaxpr.eqns:
        name, top = eqn.primitive.name, outermost or eqn
        for body in bodies(eqn) if name in _CALLS else ():
            yield from _operations(body, names, top)
        if not _keeps_rows_apart(eqn, names):
            rows = [size for v in (*eqn.invars, *eqn.outvars) for size in _row_axes(v, names)]
            # The line of the outermost call: JAX reuses bodies, and with them the lines of
            # their first call.
            raise _refusal(
                f"`{name}` may mix the rows of parameter '{names[rows[0]]}' "
                f"({summarize(top.source_info)})"
            )
        yield name, [str(v.val) for v in eqn.invars if hasattr(v, "val")]


def _keeps_rows_apart(eqn: Any, names: dict[int, str]) -> bool:
    name = eqn.primitive.name
    operands = [size for v in eqn.invars for size in _row_axes(v, names)]
    results = [_row_axes(v, names) for v in eqn.outvars]
    if not operands and not any(results):
        return True
    if name in _CALLS:
        return eqn.params.get("length") not in names  # else a scan over rows
    if any(len(axes) != 1 for axes in results):
        return False
    if not operands:  # rows out of nothing
        if name == "iota":
            return eqn.params["shape"][eqn.params["dimension"]] not in names
        return name == "broadcast_in_dim"
    if name == "reshape":
        in_front = lambda v: math.prod(v.aval.shape[: v.aval.shape.index(operands[0])])
        moves = eqn.params["dimensions"] is not None
        return not moves and in_front(eqn.invars[0]) == in_front(eqn.outvars[0])
    return name in _ROWWISE


def _row_axes(v: Any, names: dict[int, str]) -> list[int]:
    return [size for size in getattr(v.aval, "shape", ()) if size in names]


def bodies(eqn: Any) -> Iterator[Any]:
    """The programs inside an operation, such as the branches of a ``cond``."""
    for param in eqn.params.values():
        for body in param if isinstance(param, tuple | list) else [param]:
            body = getattr(body, "jaxpr", body)
            if hasattr(body, "eqns"):
                yield body


@contextlib.contextmanager
def _annotate_errors(names: dict[int, str]) -> Iterator[None]:
    """Errors of the optimizer itself say what it was called with."""
    try:
        yield
    except Exception as error:
        tables = ", ".join(f"{rows} rows of parameter '{name}'" for rows, name in names.items())
        error.add_note(f"(optzoo.on_rows tried the optimizer on {tables}. {_HINT})")
        raise


_HINT = "An optimizer that does not treat each row on its own needs optzoo.densify() in front of it"


def _refusal(reason: str) -> ValueError:
    return ValueError(f"optzoo.on_rows cannot run this optimizer row by row: {reason}. {_HINT}.")
