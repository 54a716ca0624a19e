"""Shampoo as a transformation: its slots, and the parts of a step in order."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from ...core.numerics import (
    common_cycle,
    is_number,
    next_count,
    saturating_cast,
    slot_dtype,
    upcast,
    wide_dtype,
)
from ...core.rows import SparseRows, is_rows
from ...rules.frame import Leaf
from ...rules.leafwise import zeros
from ...rules.treewise import treewise
from ...state.tf1_names import TF1Names
from ...state.types import Exact, Signed, Slot
from ..owned import in_stacks, with_owners
from .blocks import Blocks, as_stack
from .grafting import match_norm, simple_step
from .options import RootOptions, ShampooOptions, StepValues, UpdateOptions
from .products import gram, multiply, others
from .refresh import is_due, refresh
from .roots import BY_EIGENVALUES, METHODS

# Arrays for some of the dimensions of some parameters: by the parameter's place, and dimension.
ByDimension = dict[tuple[int, int], Array]


class ShampooSlots(NamedTuple):
    """The slots of Shampoo; ``Gbar`` and ``H`` are tuples over the dimensions of a parameter."""

    gbar: Signed  # weighted sum of the gradients
    Gbar: Exact  # weighted sums of their second moments; for large dimensions the diagonals only
    H: Slot  # inverse roots of the matrices among them; () for a diagonal
    graft: Slot  # mean or sum of the squared gradient, where grafting needs one
    momentum: Signed  # decaying sum of the steps, where there is momentum

    tf1 = TF1Names(
        order=("gbar", ("H", "Gbar"), "graft", "momentum"),
        optional=("H",),
        not_in_tf1={"num_failed_roots": None},
    )


class ShampooParameter(NamedTuple):
    """One parameter during an update, in at least float32."""

    leaf: Leaf  # as it came
    blocks: Blocks
    rows: SparseRows | None  # where g and the slots are those of the listed rows only
    g: Array
    gathered: ShampooSlots  # in the shapes of the state
    slots: ShampooSlots  # with an axis for all blocks


def shampoo_transformation(options: ShampooOptions) -> optax.GradientTransformationExtraArgs:
    """The direction of :func:`optzoo.shampoo`."""
    has_matrices = lambda shape: any(full for _, full, _ in options.cutting.blocks(shape).factors)
    make = functools.partial(_direction, options)
    return with_owners(options.owners, make, has_matrices)


def _direction(options: ShampooOptions, stacked: bool) -> Any:
    """The transformation of parameters, or of stacks of them."""
    none, given = lambda x: (), options.scheduled
    cycle = common_cycle(given.preconditioner_interval, given.statistics_interval)
    slots = ShampooSlots(
        gbar=zeros,
        Gbar=functools.partial(_zero_statistics, options),
        H=functools.partial(_identity_roots, options),
        graft=zeros if options.update.needs_squares else none,
        momentum=none if options.update.momentum is None else zeros,
    )
    return treewise(
        functools.partial(_update, options, stacked=stacked),
        slots=in_stacks(slots) if stacked else slots,
        shared=lambda: {"num_failed_roots": jnp.zeros([], jnp.int32)},
        shared_varies=not stacked,  # of stacks it is summed over the owners
        scheduled={"T": lambda k: next_count(k, cycle), **vars(given)},
        cycle=cycle,
    )


def _zero_statistics(options: ShampooOptions, x: Any) -> tuple[Any, ...]:
    blocks = options.cutting.blocks(jnp.shape(x))
    dtype = wide_dtype(x)  # which a root needs
    zeros = lambda *shape: jnp.zeros(blocks.stack(*shape), dtype)
    return tuple(
        zeros(d, d) if full else zeros(d) if diagonal else ()
        for d, full, diagonal in blocks.factors
    )


def _identity_roots(options: ShampooOptions, x: Any) -> tuple[Any, ...]:
    blocks, dtype = options.cutting.blocks(jnp.shape(x)), slot_dtype(x)
    eye = lambda d: jnp.broadcast_to(jnp.eye(d, dtype=dtype), blocks.stack(d, d))
    return tuple(eye(d) if full else () for d, full, _ in blocks.factors)


def _update(
    options: ShampooOptions,
    leaves: list[Leaf],
    shared: dict[str, Array],
    t: Array,
    *,
    stacked: bool,
    T: Any,
    alpha: Any,
    **scheduled: Any,
) -> tuple[list[tuple[Any, Any]], dict[str, Array]]:
    """The rule for :func:`treewise`: all parameters at once, as roots come in batches."""
    works = [_begin(options, leaf, stacked) for leaf in leaves if leaf.g is not None]
    wide = wide_dtype(*(work.g for work in works))
    values = {name: jnp.asarray(v, wide) for name, v in scheduled.items()}
    now = StepValues(t=t, T=T, alpha=alpha, **values)
    used, kept = _statistics(options, now, works)
    roots, num_failed = _roots(options, now, works, used)
    parts = (_by_parameter(works, arrays) for arrays in (used, kept, roots))
    finished = iter([_finish(options, now, *part) for part in zip(works, *parts, strict=True)])
    done = [(None, leaf.slots) if leaf.g is None else next(finished) for leaf in leaves]
    return done, {"num_failed_roots": shared["num_failed_roots"] + num_failed}


def _by_parameter(works: Sequence[ShampooParameter], arrays: ByDimension) -> list[tuple[Any, ...]]:
    """For each parameter a tuple over its dimensions, with () for a dimension without an array."""
    return [
        tuple(arrays.get((j, i), ()) for i in range(len(work.slots.Gbar)))
        for j, work in enumerate(works)
    ]


# Begin


def _begin(options: ShampooOptions, leaf: Leaf, stacked: bool) -> ShampooParameter:
    """Rows or an array, in at least float32, and the slots in blocks."""
    g, _, s = leaf
    blocks, rows = options.cutting.blocks(g.shape[1:] if stacked else g.shape), None
    if is_rows(g) and options.allows_rows and _has_diagonal_rows(blocks):
        rows = g.coalesce()
        g, s = rows.values, _map_rows(SparseRows.gather, rows, s)
        blocks = blocks.of_rows(len(g))
    elif is_rows(g):
        g = g.to_dense()
    g, s = jax.tree.map(upcast, (g, s))
    return ShampooParameter(leaf, blocks, rows, g, s, _in_blocks(blocks, s))


def _has_diagonal_rows(blocks: Blocks) -> bool:
    """Whether the first dimension has only a diagonal, and was not merged with others."""
    unmerged = blocks.dims[:1] == blocks.shape[:1]
    return blocks.preconditioned and blocks.diagonal[0] and unmerged


# Statistics


def _statistics(
    options: ShampooOptions, now: StepValues, works: Sequence[ShampooParameter]
) -> tuple[ByDimension, ByDimension]:
    """The second moments to use at this step, and those to store."""
    is_split = lambda work: work.blocks.preconditioned
    gs = [work.blocks.split(work.g) if is_split(work) else work.g for work in works]

    def accumulate(old):
        pairs = {
            (j, i): _average(
                a,
                _second_moment(options, now, works[j], gs[j], i),
                now.mat_gbar_decay,
                options.scheduled.mat_gbar_decay,
            )
            for (j, i), a in old.items()
        }
        return tuple({key: pair[k] for key, pair in pairs.items()} for k in (0, 1))

    def old(kinds):
        return {
            (j, i): work.slots.Gbar[i]
            for j, work in enumerate(works)
            for i, is_kept in enumerate(kinds(work.blocks))
            if is_kept and work.blocks.preconditioned
        }

    matrices, diagonals = old(lambda blocks: blocks.full), old(lambda blocks: blocks.diagonal)
    due = is_due(now.T, _interval(options, now, "statistics_interval"))
    if due is True:
        full = accumulate(matrices)
    else:
        full = jax.lax.cond(due, accumulate, lambda old: (old, old), matrices)
    used, kept = (a | b for a, b in zip(full, accumulate(diagonals), strict=True))
    return used, kept


def _second_moment(
    options: ShampooOptions, now: StepValues, work: ShampooParameter, g: Array, i: int
) -> Array:
    """The second moment of the gradient, in blocks, along dimension ``i``."""
    if options.roots.kl_statistics:
        for j, h in enumerate(work.slots.H):
            g = _multiply(g, h, j) if j != i and work.blocks.full[j] else g
    if work.blocks.full[i]:
        return now.mat_gbar_weight * now.statistics_interval * gram(g, i)
    n = 1 if work.rows is not None or work.blocks.rank == 1 else g.shape[1 + i]
    return now.mat_gbar_weight * _squares(g, i) / n


def _interval(options: ShampooOptions, now: StepValues, name: str) -> Any:
    """A number of steps: a given int unchanged, so that it is static, or the value at this step."""
    given = getattr(options.scheduled, name)
    if is_number(given, 1):
        return 1
    return given if isinstance(given, int) else getattr(now, name)


# Roots


def _roots(
    options: ShampooOptions, now: StepValues, works: Sequence[ShampooParameter], used: ByDimension
) -> tuple[ByDimension, Array]:
    """The roots of the matrices, refreshed where due, and the number of unusable ones."""
    keys = [(j, i) for j, i in used if works[j].blocks.full[i]]
    new, num_failed = refresh(
        [used[key] for key in keys],
        [works[j].slots.H[i] for j, i in keys],
        [works[j].blocks.rank for j, _ in keys],
        functools.partial(_root, options.roots, now.alpha),
        step=now.T,
        interval=_interval(options, now, "preconditioner_interval"),
        stagger=options.roots.stagger,
        axis_name=options.roots.axis_name,
    )
    return dict(zip(keys, new, strict=True)), num_failed


def _root(options: RootOptions, alpha: Any, a: Array, rank: int) -> tuple[Array, Array]:
    """The inverse roots of a stack of matrices, and a mask of the usable ones."""
    order = _order(rank, alpha, options.method)
    method = METHODS[options.method]
    a = a if options.kl_statistics else a / a.shape[-1]
    return method(a, order, options.eps, options.relative_eps)


def _order(rank: int, alpha: Any, method: str) -> Any:
    """The order of the root for each dimension: the power is ``-alpha / rank``."""
    order = rank / alpha
    if method in BY_EIGENVALUES:
        return order
    step = 2 if method == "two_iterations" else 1
    if abs(order / step - round(order / step)) > 1e-9:
        raise ValueError(
            f"alpha must make rank / alpha a multiple of {step} for root={method!r}, got "
            f"{alpha!r}: rank / alpha is {order} for a parameter of rank {rank}"
        )
    return round(order)


# The step of one parameter


def _finish(
    options: ShampooOptions,
    now: StepValues,
    work: ShampooParameter,
    used: tuple[Array, ...],
    kept: tuple[Array, ...],
    roots: tuple[Any, ...],
) -> tuple[Any, ShampooSlots]:
    """The update and the new slots of a parameter."""
    b, gbar = _sum_of_gradients(options, now, work)
    p, v = d, _ = simple_step(options.update, now, b, work.g, work.slots.graft)
    if work.blocks.preconditioned:
        p = _preconditioned(work.blocks, b, used, roots, now.alpha)
        if options.update.grafting is not None:
            p = jax.vmap(match_norm)(p, d.reshape(p.shape))
        p = p.reshape(d.shape)
    p = _warm_up(options.update, now, p, d)
    p, m = _momentum(options.update, p, work.slots.momentum)
    return _end(work, p, ShampooSlots(gbar, kept, roots, v, m))


def _sum_of_gradients(
    options: ShampooOptions, now: StepValues, work: ShampooParameter
) -> tuple[Array, Array]:
    """The weighted sum of the gradients: to use, and to store. For rows it is the gradient."""
    if work.rows is not None:
        return work.g, work.slots.gbar
    weighted = now.gbar_weight * work.g
    return _average(work.slots.gbar, weighted, now.gbar_decay, options.scheduled.gbar_decay)


def _preconditioned(
    blocks: Blocks, b: Array, used: Sequence[Array], roots: Sequence[Any], alpha: Any
) -> Array:
    """``b``, in a stack, times a root or the power of a diagonal along each dimension."""
    p, power = blocks.split(b), -alpha / blocks.rank
    for i, (q, h) in enumerate(zip(used, roots, strict=True)):
        if blocks.full[i]:
            p = _multiply(p, h, i)
        elif blocks.diagonal[i]:
            h = jnp.where(q > 0, jnp.where(q > 0, q, 1) ** power, 0)
            p = p * jnp.expand_dims(h, others(p, i))
    return blocks.join(p)


def _warm_up(options: UpdateOptions, now: StepValues, p: Array, d: Array) -> Array:
    """The simpler step ``d`` up to the step ``start_step``, then ``p``."""
    if is_number(options.start_step, 0):
        return p
    return jnp.where(options.start_step < now.T, p, d)


def _momentum(options: UpdateOptions, p: Array, m: Any) -> tuple[Array, Any]:
    """The decaying sum of the steps, or Nesterov's step, and the sum to store."""
    if options.momentum is None:
        return p, m
    m = options.momentum * m + p
    return (p + options.momentum * m if options.nesterov else m), m


def _end(work: ShampooParameter, p: Array, new: ShampooSlots) -> tuple[Any, ShampooSlots]:
    """The update in the gradient's form and dtype, and the slots as the state stores them."""
    g, _, s = work.leaf
    u = saturating_cast(p, g.dtype)
    new = jax.tree.map(lambda a, b: b.reshape(a.shape), work.gathered, new)
    if work.rows is not None:
        u = work.rows.with_values(u).drop_padding()
        new = _map_rows(SparseRows.scatter, work.rows, s, new)
    return u, jax.tree.map(lambda a, b: saturating_cast(b, a.dtype), s, new)


# Arithmetic of arrays of shape (blocks, *sizes)


def _average(x: Array, new: Array, decay: Array, given: Any) -> tuple[Array, Array]:
    """The weighted sum: to use, and to store. Without decay nothing is stored."""
    if is_number(given, 0):
        return new, x
    total = x + new if is_number(given, 1) else decay * x + new
    return total, total


def _squares(x: Array, i: int) -> Array:
    """The diagonal of :func:`gram`."""
    return jnp.sum(x**2, axis=others(x, i))


def _multiply(x: Array, h: Array, i: int) -> Array:
    """Each block times its symmetric matrix along axis ``i``."""
    return multiply(x, h, i, axis=1 if i == 0 else 0)


# Slots


def _in_blocks(blocks: Blocks, slots: ShampooSlots) -> ShampooSlots:
    """The slots of a parameter, or of a stack, with an axis for all blocks."""
    core = [2 if full else 1 for full in blocks.full]
    unite = lambda arrays: tuple(
        a if isinstance(a, tuple) else as_stack(a, n) for a, n in zip(arrays, core, strict=False)
    )
    return slots._replace(Gbar=unite(slots.Gbar), H=unite(slots.H))


def _map_rows(f: Callable[..., Array], rows: SparseRows, *slots: ShampooSlots) -> ShampooSlots:
    """``f(rows, *)`` applied to slots with rows; the other slots are those of the last argument."""
    new, of_rows = slots[-1], functools.partial(f, rows)
    return ShampooSlots(
        gbar=slots[0].gbar,
        Gbar=(_map_diagonal(f, rows, *(s.Gbar[0] for s in slots)), *new.Gbar[1:]),
        H=new.H,
        graft=jax.tree.map(of_rows, *(s.graft for s in slots)),
        momentum=jax.tree.map(of_rows, *(s.momentum for s in slots)),
    )


def _map_diagonal(f: Callable[..., Array], rows: SparseRows, *diagonals: Array) -> Array:
    """``f(rows, *)`` applied to vectors over all rows, or to stacks of a vector per block."""
    if diagonals[0].ndim == 1:
        return f(rows, *diagonals)
    # With the same ids for all blocks XLA would transpose, and so copy, the stack.
    of_block = lambda ids, *xs: f(dataclasses.replace(rows, indices=ids), *xs)
    ids = jnp.broadcast_to(rows.indices, (len(diagonals[0]), *rows.indices.shape))
    return jax.vmap(of_block)(ids, *diagonals)
