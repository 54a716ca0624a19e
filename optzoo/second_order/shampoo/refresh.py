"""When, where and in which batches the roots of many matrices are computed."""

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

# root(a, rank=n) -> the roots of a stack of matrices, and for each whether it can be used
Root = Callable[..., tuple[Array, Array]]

CHUNK = 2**24  # elements whose roots are computed at once: 64 matrices of 512 x 512


def is_due(step: Any, interval: Any) -> Any:
    """Whether ``step`` (1, 2, ...) is a multiple of ``interval``; the bool True if always."""
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
    """The roots of stacks of matrices, refreshed where due; and how many could not be used.

    All matrices of one size and rank form one batch: the compiled program computes the roots of
    each batch in one place, however many parameters there are.

    Args:
        matrices: stacks of shape ``(n, d, d)``.
        old: their roots so far, which are kept where no refresh is due or the new root is unusable.
        ranks: for each stack the rank of its parameter.
        root: computes the roots of a batch.
        step: the number of this step: 1, 2, ...
        interval: steps between two refreshes of a root; an int if ``stagger``.
        stagger: whether each step refreshes a share of the roots, instead of one step all of them.
        axis_name: the mesh axis of replicas with equal matrices, each of which computes a share.
    """
    batches = defaultdict[tuple[int, int], list[int]](list)
    for i, (a, rank) in enumerate(zip(matrices, ranks, strict=True)):
        batches[a.shape[-1], rank].append(i)

    def roots(old):
        new, unusable, turns = list(old), jnp.zeros([], jnp.int32), 0
        for (_, rank), members in batches.items():
            compute = functools.partial(
                _over_replicas, root=functools.partial(root, rank=rank), axis_name=axis_name
            )
            # One batch after the other: jaxlib 0.10 may deadlock where three run eigh at the same
            # time on the CPU. This is zero, but XLA cannot know it.
            zero = jnp.where(unusable < 0, 1, 0)
            stacks = [matrices[i] + zero.astype(matrices[i].dtype) for i in members]
            replace = functools.partial(_replace, stacks, compute=compute)
            olds = [old[i] for i in members]
            if stagger:
                number = sum(map(len, stacks))
                size = math.ceil(number / interval)
                # A batch of few matrices has no share in some steps: batches begin one after the
                # other, so that those steps differ.
                start = jnp.mod(step - 1 - turns, interval) * size
                turns += math.ceil(number / size)
                share = functools.partial(replace, share=(start, size))
                olds, missed = jax.lax.cond(start < number, share, _nothing, olds)
            else:
                olds, missed = replace(olds)
            unusable += missed
            for i, h in zip(members, olds, strict=True):
                new[i] = h
        return new, unusable

    due = True if stagger else is_due(step, interval)
    if due is True:
        return roots(list(old))
    return jax.lax.cond(due, roots, _nothing, list(old))


def _nothing(old):
    return old, jnp.zeros([], jnp.int32)


def _replace(matrices, old, *, compute, share=None):
    """New roots where they can be used, and how many cannot; all, or those of ``(start, size)``."""
    a = jnp.concatenate(matrices)
    fresh = jnp.ones(len(a), bool)
    if share is None:
        new, ok = compute(a)
    else:
        start, size = share
        padded = _pad(a, math.ceil(len(a) / size) * size)
        part, ok = compute(jax.lax.dynamic_slice_in_dim(padded, start, size))
        place = lambda x: _place(x, start, len(padded))[: len(a)]
        new, ok, fresh = place(part), place(ok), place(jnp.ones_like(ok))
    ends = list(itertools.accumulate(map(len, old)))
    replaced = [
        jnp.where(ok[end - len(h) : end, None, None], new[end - len(h) : end].astype(h.dtype), h)
        for h, end in zip(old, ends, strict=True)
    ]
    return replaced, jnp.sum(fresh & ~ok, dtype=jnp.int32)


def _over_replicas(a, *, root, axis_name):
    """The roots of a stack, of which each replica computes a share."""
    if axis_name is None:
        return _in_chunks(a, root)
    replicas = jax.lax.psum(1, axis_name)
    size = math.ceil(len(a) / replicas)
    start = jax.lax.axis_index(axis_name) * size
    padded = _pad(a, replicas * size)
    new, ok = _in_chunks(jax.lax.dynamic_slice_in_dim(padded, start, size), root)
    # A sum of disjoint shares gathers them, and for JAX its result is replicated.
    shares = _place(new, start, len(padded)), _place(ok.astype(jnp.int32), start, len(padded))
    new, ok = jax.lax.psum(shares, axis_name)
    return new[: len(a)], ok[: len(a)] > 0


def _in_chunks(a, root):
    """The roots of a stack, computed in pieces so that the temporaries stay small."""
    pieces = math.ceil(a.size / CHUNK)
    if pieces <= 1:
        return root(a)
    size = math.ceil(len(a) / pieces)
    chunks = _pad(a, pieces * size).reshape(pieces, size, *a.shape[1:])
    new, ok = jax.lax.map(root, chunks)
    return new.reshape(-1, *a.shape[1:])[: len(a)], ok.reshape(-1)[: len(a)]


def _place(part, start, number):
    """An array of ``number`` items: ``part`` from ``start`` on, and zeros elsewhere."""
    nothing = jnp.zeros((number, *part.shape[1:]), part.dtype)
    return jax.lax.dynamic_update_slice_in_dim(nothing, part, start, axis=0)


def _pad(a, number):
    """The stack with identities appended, so that it has ``number`` matrices."""
    missing = number - len(a)
    if not missing:
        return a
    identity = jnp.eye(a.shape[-1], dtype=a.dtype)
    return jnp.concatenate([a, jnp.broadcast_to(identity, (missing, *a.shape[1:]))])
