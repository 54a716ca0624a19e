"""Schedules and batches the computation of roots or eigenvectors of many matrices."""

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ...core.compat import vary_as, varying
from ...core.meshes import axis_size

# root(a, rank=n) -> the roots of a stack of matrices, and for each whether it can be used
Root = Callable[..., tuple[Any, Array]]

CHUNK = 2**24  # elements whose roots are computed at once: 64 matrices of 512 x 512


def is_due(step: Any, interval: Any) -> Any:
    """Whether ``step`` (1, 2, ...) is a multiple of ``interval``; the bool True if it always is."""
    if isinstance(interval, int) and interval == 1:
        return True
    interval = jnp.asarray(interval)
    if jnp.issubdtype(interval.dtype, jnp.integer):
        return jnp.mod(jnp.asarray(step, interval.dtype), interval) < 1
    # In two parts, because float32 has no odd number of steps above 2**24.
    low = step % 4096
    rests = (jnp.mod(jnp.asarray(a, interval.dtype), interval) for a in (step - low, low))
    return jnp.mod(sum(rests), interval) < 1


def refresh(
    matrices: Sequence[Any],
    old: Sequence[Any],
    ranks: Sequence[int],
    root: Root,
    *,
    step: Any,
    interval: Any,
    stagger: bool = False,
    axis_name: str | None = None,
) -> tuple[list[Any], Array]:
    """The roots of stacks of matrices, refreshed where due, and the number of unusable roots.

    All matrices of one size and rank form one batch: the size of the compiled program does not
    depend on the number of parameters.

    If a root has several arrays for each matrix as input or output, ``matrices`` and ``old`` are
    lists of tuples of stacks.

    Args:
        matrices: stacks of shape ``(n, d, d)``.
        old: the previous roots, kept where no refresh is due or the new root is unusable.
        ranks: for each stack the rank of its parameter.
        root: computes the roots of a batch.
        step: the number of this step: 1, 2, ...
        interval: steps between two refreshes of a root; an int if ``stagger``.
        stagger: whether each step refreshes a share of the roots, instead of all in one step.
        axis_name: the mesh axis of replicas with equal matrices, each of which computes a share.
    """
    batches = defaultdict[tuple[int, int, frozenset[str]], list[int]](list)
    for i, (a, rank) in enumerate(zip(matrices, ranks, strict=True)):
        batches[_first(a).shape[-1], rank, varying(_first(a))].append(i)
    # Each batch depends on the previous ones, so batches that are equal on all devices come first.
    in_order = sorted(batches.items(), key=lambda item: len(item[0][-1]))

    def roots(old):
        new, unusable, turns = list(old), jnp.zeros([], jnp.int32), 0
        for (_, rank, _), members in in_order:
            compute = functools.partial(
                _over_replicas, root=functools.partial(root, rank=rank), axis_name=axis_name
            )
            # One batch after the other: jaxlib 0.10 may deadlock where three run eigh at the same
            # time on the CPU. This is zero, but XLA cannot know it.
            zero = jnp.where(unusable < 0, 1, 0)
            add_zero = lambda a, zero=zero: a + zero.astype(a.dtype)
            stacks = [jax.tree.map(add_zero, matrices[i]) for i in members]
            replace = functools.partial(_replace, stacks, compute=compute)
            olds = [old[i] for i in members]
            if stagger:
                number = sum(map(_length, stacks))
                size = math.ceil(number / interval)
                # A batch of few matrices has no share in some steps: batches begin one after the
                # other, so that those steps differ.
                start = jnp.mod(step - 1 - turns, interval) * size
                turns += math.ceil(number / size)
                share = functools.partial(replace, share=(start, size))
                olds, missed = jax.lax.cond(start < number, share, keep_old, olds)
            else:
                olds, missed = replace(olds)
            unusable += missed
            for i, h in zip(members, olds, strict=True):
                new[i] = h
        return new, unusable

    due = True if stagger else is_due(step, interval)
    if due is True:
        return roots(list(old))
    return jax.lax.cond(due, roots, keep_old, list(old))


def keep_old(old):
    """The old roots or bases, and 0, the number of unusable ones."""
    return old, vary_as(jnp.zeros([], jnp.int32), old)


def _first(stacks):
    """The first of several stacks, or the only one."""
    return jax.tree.leaves(stacks)[0]


def _length(stacks):
    """The number of matrices."""
    return len(_first(stacks))


def _replace(matrices, old, *, compute, share=None):
    """New roots where usable, and the number of unusable ones; of all, or of ``(start, size)``."""
    a = jax.tree.map(lambda *stacks: jnp.concatenate(stacks), *matrices)
    number = _length(a)
    fresh = jnp.ones(number, bool)
    if share is None:
        new, ok = compute(a)
    else:
        start, size = share
        padded = math.ceil(number / size) * size
        part, ok = compute(_share(_pad(a, padded), start, size))
        place = lambda x: _place(x, start, padded)[:number]
        new, ok, fresh = jax.tree.map(place, (part, ok, jnp.ones_like(ok)))
    ends = itertools.accumulate(map(_length, old))

    def choose(h, end):
        here = slice(end - _length(h), end)
        usable = lambda h: ok[here].reshape(-1, *[1] * (h.ndim - 1))
        pick = lambda h, new: jnp.where(usable(h), new[here].astype(h.dtype), h)
        return jax.tree.map(pick, h, new)

    return list(map(choose, old, ends)), vary_as(jnp.sum(fresh & ~ok, dtype=jnp.int32), old)


def _over_replicas(a, *, root, axis_name):
    """The roots of a stack, of which each replica computes a share."""
    if axis_name is None:
        return _in_chunks(a, root)
    replicas, number = axis_size(axis_name), _length(a)
    size = math.ceil(number / replicas)
    start, padded = jax.lax.axis_index(axis_name) * size, replicas * size
    new, ok = _in_chunks(_share(_pad(a, padded), start, size), root)
    # A sum of disjoint shares gathers them, and for JAX its result is replicated.
    place = lambda x: _place(x, start, padded)
    shares = jax.tree.map(place, (new, ok.astype(jnp.int32)))
    new, ok = jax.tree.map(lambda x: x[:number], jax.lax.psum(shares, axis_name))
    return new, ok > 0


def _in_chunks(a, root):
    """The roots of a stack, computed in pieces so that the temporaries stay small."""
    pieces = math.ceil(_first(a).size / CHUNK)
    if pieces <= 1:
        return root(a)
    number = _length(a)
    size = math.ceil(number / pieces)
    split = lambda a: a.reshape(pieces, size, *a.shape[1:])
    join = lambda a: a.reshape(-1, *a.shape[2:])[:number]
    return jax.tree.map(join, jax.lax.map(root, jax.tree.map(split, _pad(a, pieces * size))))


def _share(a, start, size):
    """``size`` of the matrices from ``start`` on."""
    return jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, start, size), a)


def _place(part, start, number):
    """An array of ``number`` items: ``part`` from ``start`` on, and zeros elsewhere."""
    nothing = jnp.zeros((number, *part.shape[1:]), part.dtype)
    return jax.lax.dynamic_update_slice_in_dim(nothing, part, start, axis=0)


def _pad(a, number):
    """The stacks with identities appended, so that they have ``number`` matrices."""
    missing = number - _length(a)
    if not missing:
        return a

    def pad(a):
        identity = jnp.eye(a.shape[-1], dtype=a.dtype)
        return jnp.concatenate([a, jnp.broadcast_to(identity, (missing, *a.shape[1:]))])

    return jax.tree.map(pad, a)
