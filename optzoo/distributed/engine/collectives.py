"""Collectives across replicas."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ...core.checks import check_size
from ...core.compat import cast_varying, gather_invarying, varying
from ...core.meshes import axis_size
from ...core.numerics import from_words, upcast, words_of
from ...core.paths import leaves_with_path, path_name
from ...core.rows import SparseRows, is_rows, is_sparse_or_none, map_rows, update_tree

AxisName = str | tuple[str, ...] | None

# Leaves up to this size are sent as one array: benchmarks/replicas.py measures it.
BUCKET_BYTES = 1 << 20
# XLA takes seconds to compile a concatenation of a thousand arrays.
BUCKET_LEAVES = 128


@dataclasses.dataclass(frozen=True)
class Replicas:
    """The replicas along a named axis, seen from one of them.

    Attributes:
        axis_name: an axis of ``vmap``, ``pmap`` or a mesh; None for a single replica.
        bucket_bytes: arrays up to this size are sent together; None sends each separately.
        num_workers: the expected number of replicas; None for any.
    """

    axis_name: AxisName = "replica"
    bucket_bytes: int | None = BUCKET_BYTES
    num_workers: int | None = None

    def __post_init__(self):
        if self.bucket_bytes is not None:
            check_size(bucket_bytes=self.bucket_bytes)
        if self.num_workers is not None:
            check_size(1, num_workers=self.num_workers)

    @property
    def size(self) -> int:
        """The number of replicas.

        Raises:
            NameError: if there is no such axis.
            ValueError: if the number is not ``num_workers``.
        """
        fix = (
            "call update inside vmap, shard_map or pmap with that axis "
            "(optzoo.replicas.map_over_replicas does), or pass axis_name=None for a single replica"
        )
        size = 1 if self.axis_name is None else axis_size(self.axis_name, fix)
        if self.num_workers not in (None, size):
            raise ValueError(
                f"num_workers must be the size of the axis {self.axis_name!r}, {size}, got "
                f"{self.num_workers}: leave it out, or give another axis_name"
            )
        return size

    def check_at_most(self, **numbers: int) -> None:
        """Raises ``ValueError`` if the argument is above the number of replicas."""
        for name, number in numbers.items():
            if number > self.size:
                raise ValueError(
                    f"{name} must be at most the size of the axis {self.axis_name!r}, {self.size}, "
                    f"got {number}"
                )

    @property
    def index(self) -> Array:
        """The rank of this replica."""
        if self.axis_name is None:
            return jnp.zeros([], jnp.int32)
        _ = self.size  # raises a clearer error
        return lax.axis_index(self.axis_name)

    @property
    def ranks(self) -> Array:
        """The ranks of all replicas, in the dtype of :attr:`index`."""
        return jnp.arange(self.size, dtype=jnp.int32)

    def sum(self, tree: Any) -> Any:
        """The sum over all replicas: one message for each dtype and each large array."""
        if self.axis_name is None:
            return tree
        leaves, treedef = jax.tree.flatten(tree)
        buckets = self.buckets(leaves)
        sums = lax.psum([join([leaves[i] for i in bucket]) for bucket in buckets], self.axis_name)
        for bucket, joined in zip(buckets, sums, strict=True):
            for i, part in zip(bucket, split(joined, [leaves[i] for i in bucket]), strict=True):
                leaves[i] = part
        return treedef.unflatten(leaves)

    def sum_where(self, mask: Any, tree: Any) -> Any:
        """The sum over the replicas where ``mask`` is true; others may have NaN."""
        return self.sum(zero_unless(mask, tree))

    def any(self, mask: Any) -> Array:
        """Whether ``mask`` is true on a replica."""
        return self.sum(jnp.asarray(mask, jnp.int32)) > 0

    def gather(self, tree: Any) -> Any:
        """The arrays of all replicas joined along the first axis."""
        if self.axis_name is None:
            return tree
        if not self._is_checked():
            return lax.all_gather(tree, self.axis_name, tiled=True)
        return gather_invarying(tree, self.axis_name)

    def exchange(self, tree: Any) -> Any:
        """The parts for this replica, from all replicas, of arrays with a part for each replica."""
        if self.axis_name is None:
            return tree
        swap = lambda a: lax.all_to_all(a, self.axis_name, 0, 0, tiled=True)
        return jax.tree.map(swap, tree)

    def sum_gradients(self, updates: Any, mask: Any, more: Any = ()) -> tuple[Any, Any]:
        """The sums of gradients and of ``more`` over the replicas where ``mask`` is true.

        Rows are gathered as rows, in the order of the replicas; arrays are summed in at least
        float32.
        """
        gs, treedef = update_tree.flatten(updates)
        dense = {i: upcast(jnp.asarray(g)) for i, g in enumerate(gs) if not is_sparse_or_none(g)}
        dense, more = self.sum((zero_unless(mask, dense), more))
        gs = [self.gather_rows(g, mask) if is_rows(g) else g for g in gs]
        return treedef.unflatten([dense.get(i, g) for i, g in enumerate(gs)]), more

    def mean_gradients(self, updates: Any, mask: Any) -> tuple[Any, Array]:
        """The mean over the replicas where ``mask`` is true, and whether there are any.

        The results have the type of values that vary between replicas.
        """
        sums, number = self.sum_gradients(updates, mask, jnp.asarray(mask, jnp.int32))
        mean = divide_gradients(sums, jnp.maximum(number, 1), updates)
        return self.vary((mean, number > 0))

    def spread_gradients(self, updates: Any, mask: Any) -> tuple[Any, Array]:
        """The gradients of this replica, in arrays of the shapes of :meth:`mean_gradients`."""
        del mask

        def spread(g):
            places = (self.size - 1) * len(g.indices)
            pad = lambda a, value: jnp.concatenate(
                [a, jnp.full((places, *a.shape[1:]), value, a.dtype)]
            )
            return g.with_rows(pad(g.indices, g.num_rows), pad(g.values, 0))

        return map_rows(spread, updates), self.vary(jnp.asarray(True))

    def gather_rows(self, g: SparseRows, mask: Any) -> SparseRows:
        """The rows of the replicas where ``mask`` is true, and padding for the other replicas."""
        indices = jnp.where(mask, jnp.asarray(g.indices), g.num_rows)
        values = zero_unless(mask, upcast(g.values))
        indices, values = self.gather((indices, values))
        return g.with_rows(indices, values)

    def vary(self, tree: Any) -> Any:
        """The same values, with the type of values that vary between replicas.

        This has an effect only in a ``shard_map`` with ``check_vma``.
        """
        if not self._is_checked():
            return tree

        def vary(a):
            missing = tuple(name for name in self._names if name not in varying(a))
            return cast_varying(a, missing) if missing else a

        return jax.tree.map(vary, tree)

    def vary_new(self, state: Any) -> Any:
        """The new state of a replica, cast by :meth:`vary`; unchanged outside the axis."""
        try:
            return self.vary(state)
        except NameError:
            return state

    def check_per_replica(self, updates: Any) -> None:
        """Raises ``ValueError`` if a gradient is known to be equal on all replicas.

        JAX has then already summed it over the replicas, because the parameters were replicated.
        """
        if not self._is_checked():
            return
        for path, g in leaves_with_path(updates):
            if missing := set(self._names) - varying(g):
                raise ValueError(
                    f"the gradient of '{path_name(path)}' is the same along {sorted(missing)}: "
                    "under check_vma, jax.grad with respect to replicated parameters has already "
                    "summed it over the replicas. Differentiate with respect to "
                    "optzoo.replicas.per_replica(params, axis_name)"
                )

    def check_replicated(self, params: Any) -> None:
        """Raises ``ValueError`` if a parameter is known to differ between replicas."""
        for path, x in leaves_with_path(params):
            if axes := set(self._names) & varying(x):
                raise ValueError(
                    f"parameter '{path_name(path)}' may differ along {sorted(axes)}, but this "
                    "method shares one copy between all replicas: pass it to shard_map with "
                    "in_specs of PartitionSpec() (optzoo.replicas.map_over_replicas does)"
                )

    def shared_arguments(self, mask: Any, extra_args: Mapping[str, Any]) -> dict[str, Any]:
        """The extra arguments of an update that all replicas share.

        ``value``, the loss of a replica, becomes the mean over the replicas where ``mask`` is true.
        """
        if (value := extra_args.get("value")) is None:
            return {**extra_args}
        terms = upcast(jnp.asarray(value)), jnp.ones([], jnp.int32)
        total, number = self.sum_where(mask, terms)
        return {**extra_args, "value": total / jnp.maximum(number, 1).astype(total.dtype)}

    def buckets(self, leaves: list[Array]) -> list[list[int]]:
        """The positions of leaves that are sent as one array: small leaves of one dtype."""
        buckets, filling = list[list[int]](), dict[Any, list[int]]()
        for i, leaf in enumerate(leaves):
            if leaf.nbytes > (self.bucket_bytes or 0):
                buckets.append([i])
                continue
            if len(filling.get(leaf.dtype, ())) in (0, BUCKET_LEAVES):
                filling[leaf.dtype] = []
                buckets.append(filling[leaf.dtype])
            filling[leaf.dtype].append(i)
        return buckets

    @property
    def _names(self) -> tuple[str, ...]:
        name = self.axis_name
        return () if name is None else (name,) if isinstance(name, str) else tuple(name)

    def _is_checked(self) -> bool:
        return self.axis_name is not None and bool(varying(self.index))


def divide_gradients(sums: Any, number: Any, like: Any) -> Any:
    """Sums of gradients divided by a number, in the dtypes of ``like``."""

    def safe_divide(total, g):
        if total is None:
            return None
        if is_rows(total):
            return total.with_values(safe_divide(total.values, g.values))
        return (total / number.astype(total.dtype)).astype(jnp.result_type(g))

    return update_tree.map(safe_divide, sums, like)


def zero_unless(condition: Any, tree: Any) -> Any:
    """The tree where ``condition`` is true, otherwise zeros, even where the tree has NaN."""
    zero = lambda a: jnp.zeros([], jnp.result_type(a))
    return jax.tree.map(lambda a: jnp.where(condition, a, zero(a)), tree)


def all_finite(tree: Any) -> Array:
    """Whether no element of any array is NaN or infinite."""
    each = [jnp.all(jnp.isfinite(a)) for a in jax.tree.leaves(tree)]
    return functools.reduce(jnp.logical_and, each, jnp.asarray(True))


def per_replica(tree: Any, axis_name: AxisName = "replica") -> Any:
    """Marks parameters as varying between replicas, for gradients of each replica's own loss.

    Inside ``shard_map`` with ``check_vma``, ``jax.grad`` with respect to replicated parameters
    silently sums the gradients over the replicas. With respect to ``per_replica(params)`` each
    replica obtains the gradient of its own loss. Under ``vmap`` and ``pmap`` this has no effect.

    Example:
        >>> import jax, jax.numpy as jnp, optzoo
        >>> loss = lambda params, x: jnp.sum(optzoo.replicas.per_replica(params, "replica") * x)
        >>> both = jax.vmap(jax.grad(loss), in_axes=(None, 0), axis_name="replica")
        >>> print(both(jnp.ones(1), jnp.array([[1.0], [3.0]])).ravel())
        [1. 3.]

    Args:
        tree: parameters, or other arrays.
        axis_name: the axis, or axes, of the replicas; None for a single replica.

    Raises:
        NameError: if there is no such axis.
    """
    return Replicas(axis_name).vary(tree)


def broadcast(tree: Any, axis_name: AxisName = "replica") -> Any:
    """Copies the arrays of replica 0 to all replicas, so that all start from the same values.

    Call it inside the mapped function, before ``init``. It corresponds to TensorFlow's init ops
    that copy the chief's variables to the workers.

    Example:
        >>> import jax, jax.numpy as jnp, optzoo
        >>> copy = lambda x: optzoo.replicas.broadcast(x, "replica")
        >>> print(jax.vmap(copy, axis_name="replica")(jnp.array([5.0, 7.0])))
        [5. 5.]

    Args:
        tree: parameters, or other arrays.
        axis_name: the axis, or axes, of the replicas.
    """
    replicas = Replicas(axis_name)
    tree = jax.tree.map(jnp.asarray, tree)
    sums = replicas.sum_where(replicas.index == 0, jax.tree.map(_numeric, tree))
    return jax.tree.map(from_sum, tree, sums)


def from_sum(a: Any, total: Array) -> Array:
    """A sum of one array and zeros, computed on words of keys, in the dtype of ``a``."""
    return from_words(a)(total.astype(words_of(a).dtype))


def _numeric(a: Array) -> Array:
    a = words_of(a)
    return a.astype(jnp.int32) if a.dtype == bool else a


def join(leaves: list[Array]) -> Array:
    """The leaves of a bucket as one array."""
    return leaves[0] if len(leaves) == 1 else jnp.concatenate([leaf.ravel() for leaf in leaves])


def split(joined: Array, like: list[Array]) -> list[Array]:
    """The parts of a joined array, in the shapes of the leaves."""
    if len(like) == 1:
        return [joined]
    ends = list(itertools.accumulate(leaf.size for leaf in like))
    parts = jnp.split(joined, ends[:-1])
    return [part.reshape(leaf.shape) for part, leaf in zip(parts, like, strict=True)]
