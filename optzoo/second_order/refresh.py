"""When, where and in which batches the roots of many matrices are computed."""

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

# root(a, rank) -> the roots of a stack of matrices, and which of them can be used
Root = Callable[[Array, int], tuple[Array, Array]]


def is_due(step: Any, interval: Any) -> Any:
    """Whether ``step`` (1, 2, ...) is a multiple of ``interval``; plain True if always."""
    return True if isinstance(interval, int) and interval == 1 else jnp.mod(step, interval) < 1


def refresh(
    matrices: Sequence[Array],
    old: Sequence[Array],
    ranks: Sequence[int],
    root: Root,
    *,
    step: Any,
    interval: Any,
    stagger: bool = False,
    axis_name: str | None = None,
) -> tuple[list[Array], Array]:
    """The roots of stacks of matrices, new where it is time; and how many could not be used.

    All matrices of one size and rank make one batch: the compiled program computes the roots of
    each batch at one place, however many parameters there are.

    Args:
        matrices: stacks of shape ``(n, d, d)``.
        old: their roots so far, which stay where it is not time or where the new ones are unusable.
        ranks: of the parameter that each stack belongs to.
        root: computes the roots of a batch.
        step: the number of this step: 1, 2, ...
        interval: steps between two refreshes of a root; an int if ``stagger``.
        stagger: whether each step refreshes a share of the roots, rather than one step all.
        axis_name: of replicas with equal matrices, each of which computes a share of the roots.
    """
    batches = defaultdict(list)
    for i, (a, rank) in enumerate(zip(matrices, ranks, strict=True)):
        batches[a.shape[-1], rank].append(i)
    compute = functools.partial(_over_replicas, root=root, axis_name=axis_name)

    def roots(old):
        new, unusable, turns = list(old), jnp.zeros([], jnp.int32), 0
        for (_, rank), members in batches.items():
            a, h = (jnp.concatenate([xs[i] for i in members]) for xs in (matrices, old))
            if stagger:
                size = math.ceil(len(a) / interval)
                # Small batches take their turns one after the other.
                turn = jnp.mod(step - 1 - turns, interval)
                turns += math.ceil(len(a) / size)
                h, missed = _one_share(a, h, rank, turn, size, compute)
            else:
                h, missed = compute(a, h, rank)
            unusable += missed
            ends = [*_running_sum(len(old[i]) for i in members)]
            for i, end in zip(members, ends, strict=True):
                new[i] = h[end - len(old[i]) : end]
        return new, unusable

    due = True if stagger else is_due(step, interval)
    if due is True:
        return roots(list(old))
    nothing = lambda old: (old, jnp.zeros([], jnp.int32))
    return jax.lax.cond(due, roots, nothing, list(old))


def _running_sum(numbers):
    total = 0
    for n in numbers:
        total += n
        yield total


def _one_share(a, h, rank, turn, size, compute):
    """The ``turn``-th share of ``size`` roots, if there are so many."""

    def work(h):
        share = lambda x: jax.lax.dynamic_slice_in_dim(x, turn * size, size)
        new, unusable = compute(share(a), share(h), rank)
        return jax.lax.dynamic_update_slice_in_dim(h, new, turn * size, axis=0), unusable

    nothing = lambda h: (h, jnp.zeros([], jnp.int32))
    return jax.lax.cond(turn * size < len(a), work, nothing, h)


def _over_replicas(a, h, rank, *, root, axis_name):
    """All roots; each replica computes its share."""
    if axis_name is None:
        return _usable(a, h, rank, root)
    replicas = jax.lax.psum(1, axis_name)
    size = math.ceil(len(a) / replicas)
    start = jax.lax.axis_index(axis_name) * size
    fill = jnp.eye(a.shape[-1], dtype=a.dtype)
    fill = jnp.broadcast_to(fill, (replicas * size - len(a), *fill.shape))
    share = lambda x: jax.lax.dynamic_slice_in_dim(
        jnp.concatenate([x, fill.astype(x.dtype)]), start, size
    )
    mine, unusable = _usable(share(a), share(h), rank, root)
    none = jnp.zeros((replicas * size, *a.shape[1:]), mine.dtype)
    shares = jax.lax.dynamic_update_slice_in_dim(none, mine, start, axis=0)
    # A sum of disjoint shares gathers them, and JAX knows that it is the same on all replicas.
    return jax.lax.psum((shares[: len(a)], unusable), axis_name)


def _usable(a, h, rank, root):
    new, ok = root(a, rank)
    return jnp.where(ok[:, None, None], new.astype(h.dtype), h), jnp.sum(~ok, dtype=jnp.int32)
