"""Norms and other statistics of each gradient, stored in the state for logging."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from ..core.gradients import check_arrays
from ..core.norms import norm, over_shards
from ..core.numerics import upcast
from ..core.optimizer import recorded
from ..core.paths import leaves_with_path, path_name
from ..core.rows import is_rows, update_tree
from ..core.short import short_repr


class Summary(NamedTuple):
    """The statistics of one gradient."""

    norm: Any
    largest: Any  # absolute value
    nonfinite: Any  # how many elements are NaN or infinite


class GradientSummariesState(NamedTuple):
    """The statistics of the last step; each field is a tree of scalars like the params."""

    leaves: Summary

    __repr__ = short_repr


class Summaries(NamedTuple):
    """The result of :func:`read_summaries`."""

    leaves: dict[str, dict[str, Array]]  # by path: norm, largest, nonfinite
    global_norm: Array


@recorded
def gradient_summaries() -> optax.GradientTransformation:
    """Stores the norm, the largest element and the number of non-finite elements of each gradient.

    Gradients are returned unchanged. The state has three scalars for each parameter, those of the
    last step; :func:`read_summaries` finds them in the state of any optimizer. A step reads each
    gradient once more. The statistics of a row-sparse gradient are computed after rows that share
    an index are summed; those of a missing gradient are zero.

    Example:
        >>> import jax.numpy as jnp, optax, optzoo
        >>> tx = optax.chain(optzoo.transforms.gradient_summaries(), optzoo.adam(0.1))
        >>> params = {"w": jnp.ones(2)}
        >>> updates, state = tx.update({"w": jnp.array([3.0, 4.0])}, tx.init(params), params)
        >>> print(optzoo.transforms.read_summaries(state).leaves["w"]["norm"])
        5.0

    References:
        ``returnn.tf.updater``, option ``debug_grad_summaries``.
    """

    def init(params):
        zeros = lambda dtype: jax.tree.map(lambda _: jnp.zeros([], dtype), params)
        return GradientSummariesState(
            Summary(zeros(jnp.float32), zeros(jnp.float32), zeros(jnp.int32))
        )

    def update(updates, state, params=None):
        del params
        check_arrays(updates)
        gs, treedef = update_tree.flatten(updates)
        done = [_summary(g) for g in gs]
        columns = [[getattr(d, name) for d in done] for name in Summary._fields]
        return updates, GradientSummariesState(Summary(*map(treedef.unflatten, columns)))

    return optax.GradientTransformation(init, update)


def read_summaries(state: Any) -> Summaries:
    """The statistics of :func:`gradient_summaries`, found anywhere in the state of an optimizer.

    The groups of a partition are merged; if a chain contains two, the last one is returned.

    Example:
        >>> import jax.numpy as jnp, optax, optzoo
        >>> tx = optax.chain(optzoo.transforms.gradient_summaries(), optzoo.adam(0.1))
        >>> params = {"w": jnp.ones(2)}
        >>> updates, state = tx.update({"w": jnp.array([3.0, -4.0])}, tx.init(params), params)
        >>> found = optzoo.transforms.read_summaries(state)
        >>> print(found.global_norm, found.leaves["w"]["largest"], found.leaves["w"]["nonfinite"])
        5.0 4.0 0

    Args:
        state: the state of an optimizer, or any tree that contains it.

    Raises:
        ValueError: if the state has no ``gradient_summaries``.
    """
    is_one = lambda node: isinstance(node, GradientSummariesState)
    found = [node for node in jax.tree.leaves(state, is_leaf=is_one) if is_one(node)]
    if not found:
        raise ValueError(
            "the state has no gradient_summaries: add optzoo.transforms.gradient_summaries() to "
            "the chain"
        )
    by_path = {}
    for one in found:
        columns = [leaves_with_path(tree) for tree in one.leaves]
        for row in zip(*columns, strict=True):
            by_path[path_name(row[0][0])] = {
                name: value for name, (_, value) in zip(Summary._fields, row, strict=True)
            }
    squares = [values["norm"] ** 2 for values in by_path.values()]
    return Summaries(by_path, jnp.sqrt(sum(squares, jnp.zeros([], jnp.float32))))


def _summary(g: Any) -> Summary:
    if g is None:
        zero = jnp.zeros([], jnp.float32)
        return Summary(zero, zero, jnp.zeros([], jnp.int32))
    g = g.coalesce() if is_rows(g) else g
    values = upcast(g.values if is_rows(g) else jnp.asarray(g))
    [largest] = over_shards([g], [jnp.max(jnp.abs(values), initial=0)], lax.pmax)
    [nonfinite] = over_shards([g], [jnp.sum(~jnp.isfinite(values), dtype=jnp.int32)], lax.psum)
    return Summary(norm(g).astype(jnp.float32), largest.astype(jnp.float32), nonfinite)
