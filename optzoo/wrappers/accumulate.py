"""Gradient accumulation around any optimizer."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.dtypes import canonicalize_dtype

from ..core.boxes import without_boxes
from ..core.checks import check_flags, check_params, check_size, check_update_arguments
from ..core.compat import TracedOnce
from ..core.gradients import check_gradients
from ..core.lines import in_lines, is_lines
from ..core.meshes import mesh_of, placed, placed_as, spec_of
from ..core.numerics import is_trainable, next_count, saturating_cast, wide_dtype
from ..core.optimizer import About, Optimizer, recorded
from ..core.paths import map_with_path, path_name, value_by_name
from ..core.rows import SparseRows, is_rows, is_sparse_or_none, update_tree, zeros_like_update
from ..core.schedules import at_step
from ..state.averages import wide_zeros_like
from ..state.came import has_come, late, leave_out, none_came
from ..state.inner import check_not_around_replicas, fitting, inner_transformation
from ..state.types import AccumulateState, Cycle, RowsOfCycle


@recorded
def accumulate(
    inner: optax.GradientTransformation,
    every: int | optax.Schedule,
    *,
    use_mean: bool = False,
    max_rows: Mapping[str, int] | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Sums the gradients of several steps, as in RETURNN's ``accum_grad_multiple_step``.

    .. math::
        a_t &= \begin{cases} g_t & \text{if } t \bmod n = 0 \\
            a_{t-1} + g_t & \text{otherwise} \end{cases} \\
        x_{t+1} &= \begin{cases} x_t + u(a_t) & \text{if } t \bmod n = n - 1 \\
            x_t & \text{otherwise} \end{cases}

    where :math:`u` is the update of ``inner``, which runs in the last step of a cycle only: in
    other steps its slots and its step count are unchanged, and updates are exactly zero, even if a
    gradient is NaN (``optax.MultiSteps`` multiplies by zero, which keeps a NaN).

    Row-sparse gradients become dense, unless ``max_rows`` bounds the number of rows in a step: then
    the state stores the rows of a cycle instead of a sum of the size of the table, their ids are
    merged at the end of the cycle, and ``inner`` receives rows.

    A cycle begins when the number :math:`t` of steps before this one is a multiple of :math:`n`.
    ``update(..., global_step=)`` sets :math:`t`; by default the wrapper counts steps. ``inner``
    receives ``global_step // every``, the number of its updates.

    ``update(..., end_cycle=True)``, a Python or traced bool, makes this step the last one of its
    cycle, for example at the end of an epoch or before a checkpoint. The mean is then over the
    steps of the shortened cycle.

    ``every`` may be a schedule, a function of the number of updates before this cycle. A cycle then
    ends with the first step after which it has at least ``every(updates)`` steps; the value need
    not be an integer or at least 1. The function is called in each step, with an int32 that
    saturates at ``2**31 - 1``. ``optax.MultiSteps`` has the same schedules, but takes the mean.

    A parameter whose gradient is None in a step keeps its sum. If all of its gradients in a cycle
    are None, the parameter and its slots are unchanged. Exclude frozen parameters with
    ``optax.masked``, to save the memory of their sums.

    To skip micro-steps with NaN or infinities, put ``zero_if_norm_exceeds(math.inf)`` before this
    wrapper in the chain.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.accumulate(optzoo.gradient_descent(0.1), 2)
        >>> params = jnp.zeros(2)
        >>> state = tx.init(params)
        >>> for _ in range(2):
        ...     updates, state = tx.update(jnp.array([1.0, 3.0]), state, params)
        ...     print(updates + 0)
        [0. 0.]
        [-0.2 -0.6]

    Args:
        inner: a complete optimizer, including its learning rate.
        every: :math:`n`, the number of steps in a cycle, at least 1, or a schedule of it.
        use_mean: divide the sum by the number of steps of the cycle, as ``optax.MultiSteps`` does.
        max_rows: for tables with row-sparse gradients, a dict from a pattern of names
            (:func:`optzoo.param_groups`) to the largest number :math:`k` of rows in the gradient of
            one step (the number of ids looked up, with repeats). The state stores :math:`n k` rows,
            so :math:`n` must be a number.

    Raises:
        TypeError: if ``every`` or a number of rows is not an int, or ``max_rows`` is not a dict; in
            ``update``, if the gradient of a table in ``max_rows`` is dense, if a schedule does not
            return a number, or if an integer parameter has a gradient.
        ValueError: if one of these numbers is below 1; if ``max_rows`` is given with a schedule; in
            ``init``, if a pattern matches no parameter, if two patterns match one parameter, or if
            ``inner`` is a method for replicas; in ``update``, if a gradient has more rows than
            ``max_rows`` allows, if a gradient is None and the slots of ``inner`` cannot be assigned
            to parameters, if ``global_step`` is given with ``end_cycle`` or a schedule, or if a
            schedule returns an array with axes.

    References:
        ``returnn.tf.updater`` of `RETURNN <https://github.com/rwth-i6/returnn>`_, option
        ``accum_grad_multiple_step``.
    """
    inner = inner_transformation(inner=inner)
    every = every if callable(every) else check_size(1, every=every)
    check_flags(use_mean=use_mean)
    if max_rows is not None and not isinstance(max_rows, Mapping):
        raise TypeError(
            "max_rows must be a dict of the largest number of rows by pattern, such as "
            f"{{'.*table': 64}}, got {max_rows!r}"
        )
    if max_rows and callable(every):
        raise ValueError(
            f"max_rows={dict(max_rows)!r}: the state stores the rows of a cycle, whose length a "
            "schedule does not bound; give every as a number, or leave max_rows out: then rows "
            "become dense"
        )
    sizes = {pattern: check_size(1, max_rows=k) for pattern, k in (max_rows or {}).items()}

    def init(params):
        sums, came = ((), ()) if every == 1 else (_zeros(sizes, every, params), none_came(params))
        zero = lambda: jnp.zeros([], jnp.int32)
        cycle = Cycle(zero(), zero()) if callable(every) else ()
        of_inner = inner.init(params)
        if every != 1:
            why = "which must run in every step"
            check_not_around_replicas("accumulate", why, of_inner)
        return AccumulateState(zero(), sums, came, of_inner, cycle)

    def update(updates, state, params=None, *, global_step=None, end_cycle=None, **extra_args):
        _, xs, treedef = check_gradients(updates, params)
        check_update_arguments({"global_step": global_step, **extra_args})
        if end_cycle is not None and global_step is not None:
            raise ValueError(
                f"end_cycle={end_cycle!r}: a cycle cannot end early with global_step, which "
                "determines where cycles begin; leave global_step out"
            )
        if callable(every) and global_step is not None:
            raise ValueError(
                f"global_step={global_step!r}: it does not determine where a cycle begins if "
                "every is a schedule; leave global_step out"
            )
        updates = _densify_others(sizes, updates, updates if every == 1 else state.sums)
        if global_step is not None:
            extra_args["global_step"] = global_step // every
        if every == 1:
            updates, new = inner.update(updates, state.inner, params, **extra_args)
            return updates, AccumulateState(next_count(state.count), (), (), new)

        if callable(every):
            position, is_last, count, cycle = _scheduled(state, every, end_cycle)
        else:
            position, is_last, count = _counted(state.count, every, global_step, end_cycle)
            cycle = ()
        plus = lambda g, a: _plus(g, a, position, every)
        sums = update_tree.map(plus, updates, state.sums)
        came = has_come(
            updates, jax.tree.map(lambda c: jnp.where(position == 0, False, c), state.came)
        )

        is_known = isinstance(every, int) and end_cycle is None
        scale = 1 / (every if is_known else position + 1) if use_mean else 1

        @TracedOnce
        def apply():
            gs, of_gs = treedef.flatten_up_to(updates), treedef.flatten_up_to(sums)
            columns = zip(gs, of_gs, xs, _tables(updates, params), strict=True)
            totals = treedef.unflatten([_total(*leaf, scale) for leaf in columns])
            us, new = inner.update(totals, state.inner, params, **extra_args)
            return leave_out(inner, late(updates, came), us, new, state.inner)

        wait = lambda: (zeros_like_update(apply.types[0]), state.inner)
        updates, new = lax.cond(is_last, apply, wait)
        return updates, AccumulateState(count, sums, came, new, cycle)

    about = About(reads=inner.about.reads).reading("global_step", "end_cycle")
    tx = Optimizer(init, update, about)
    return fitting(without_boxes(tx) if max_rows else tx)


def _counted(
    count: Array, every: int, global_step: Any, end_cycle: Any
) -> tuple[Array, Array, Array]:
    """The position of a step in its cycle, whether it is the last, and the count after it."""
    position = (count if global_step is None else global_step) % every
    is_last, after = position == every - 1, next_count(count, every)
    if end_cycle is not None:
        is_last |= jnp.asarray(end_cycle, bool)
        # The next cycle begins at a multiple; where the integers end, at that of this cycle.
        begin = count - position
        ahead = jnp.where(begin > jnp.iinfo(jnp.int32).max - every, 0, every)
        after = jnp.where(is_last, begin + ahead, after)
    return position, is_last, after


def _scheduled(
    state: AccumulateState, every: optax.Schedule, end_cycle: Any
) -> tuple[Array, Array, Array, Cycle]:
    """The results of ``_counted`` and the next cycle, where a schedule gives its length."""
    position, updates = state.cycle
    length, steps = at_step("every", updates, every), next_count(position)
    is_last = jnp.logical_not(steps < length)  # also if it is NaN
    if end_cycle is not None:
        is_last |= jnp.asarray(end_cycle, bool)
    after = jnp.where(is_last, 0, steps), jnp.where(is_last, next_count(updates), updates)
    return position, is_last, next_count(state.count), Cycle(*after)


def _plus(g: Any, a: Any, position: Array, every: Any) -> Any:
    """The sum, or the rows, of the cycle with the gradient of the step at this position."""
    if a is None:
        if g is not None:
            raise TypeError(
                "a parameter has a gradient but no sum in the state, because it had an integer "
                "dtype in init: give None as its gradient"
            )
        return None
    if not isinstance(a, RowsOfCycle):
        now = jnp.where(position == 0, 0, a)
        return now if g is None else placed_as(now + jnp.asarray(g).astype(a.dtype), a)
    size, outside = len(a.indices) // every, jnp.iinfo(a.indices.dtype).max  # never a row
    ids, values = a.indices[:0], a.values[:0]
    if g is not None:
        ids, values = jnp.asarray(g.indices), g.values
    free = size - len(ids)
    ids = jnp.pad(ids.astype(a.indices.dtype), (0, free), constant_values=outside)
    values = jnp.pad(values.astype(a.values.dtype), [(0, free), *[(0, 0)] * (values.ndim - 1)])
    before = jnp.where(position == 0, outside, a.indices)
    as_in = lambda old, new: placed(new, mesh_of(old), spec_of(old))
    ids, values = as_in(before, ids), as_in(a.values, values)
    return RowsOfCycle(
        lax.dynamic_update_slice_in_dim(before, ids, position * size, 0),
        lax.dynamic_update_slice_in_dim(a.values, values, position * size, 0),
    )


def _tables(updates: Any, params: Any) -> list[Any]:
    """The parameters of the gradients, with packed tables unchanged."""
    is_leaf = lambda u: is_lines(u) or is_sparse_or_none(u)
    treedef = jax.tree.structure(updates, is_leaf=is_leaf)
    none = [None] * treedef.num_leaves
    return none if params is None else treedef.flatten_up_to(params)


def _total(g: Any, a: Any, x: Any, table: Any, scale: Any) -> Any:
    """The gradient for the inner optimizer, like ``g``, or like the parameter if ``g`` is None."""
    if a is None:
        return None
    if not isinstance(a, RowsOfCycle):
        like = g if g is not None else a if x is None else x
        return saturating_cast(a * scale, jnp.result_type(like))
    if g is None:
        check_params(x)
        g = SparseRows(a.indices[:0], a.values[:0].astype(x.dtype), len(table))
    rows = g.with_rows(a.indices, a.values).coalesce()
    return rows.with_values(saturating_cast(rows.values * scale, g.dtype))


def _zeros(sizes: Mapping[str, int], every: Any, params: Any) -> Any:
    """The sums, or the rows, before the first step."""
    size_of = value_by_name("max_rows", sizes, params)

    def zeros(path, x):
        if not is_trainable(x):
            return None
        size = size_of.get(path_name(path))
        if size is None:
            return wide_zeros_like(x)
        dtype = canonicalize_dtype(jnp.int64)
        ids = jnp.full(every * size, jnp.iinfo(dtype).max, dtype)
        return RowsOfCycle(ids, jnp.zeros((every * size, *jnp.shape(x)[1:]), wide_dtype(x)))

    of_each = lambda path, x: in_lines(functools.partial(zeros, path))(x)
    return map_with_path(of_each, params, is_leaf=is_lines)


def _densify_others(sizes: Mapping[str, int], updates: Any, sums: Any) -> Any:
    """The gradients, dense except those of tables in ``max_rows``, which are checked."""
    size_of = value_by_name("max_rows", sizes, updates)

    def convert(path, g, a):
        size = size_of.get(path_name(path))
        if size is None:
            return g.to_dense(a) if is_rows(g) else g
        name = f"parameter '{path_name(path)}'"
        if g is not None and not is_rows(g):
            raise TypeError(
                f"{name} is in max_rows but has a dense gradient: compute it with "
                "optzoo.value_and_grad and optzoo.lookup, or leave the parameter out of max_rows"
            )
        if g is not None and g.shard is not None:
            raise ValueError(
                f"{name} is sharded by rows, which max_rows does not support: leave it out of "
                "max_rows; its sum then has the shape of the table"
            )
        if g is not None and len(g.indices) > size:
            raise ValueError(
                f"{name} has a gradient of {len(g.indices)} rows, more than its max_rows of "
                f"{size}: increase max_rows"
            )
        return g

    return map_with_path(convert, updates, sums, is_leaf=is_sparse_or_none)
