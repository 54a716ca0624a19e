"""Work on many matrices, divided over the devices of a mesh: each matrix has one owner."""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from ..core.checks import check_floating
from ..core.compat import gather_invarying, group_shardings, vary_as, varying
from ..core.meshes import (
    automatically,
    devices_along,
    explicit_axes,
    mesh_of,
    mesh_with,
    spec_of,
)
from ..core.numerics import saturating_cast

# work(stack) -> a stack of the same shape (n, *shape), computed for each matrix independently
Work = Callable[[Array], Array]


class Owners(NamedTuple):
    """The mesh axes over which matrices are divided, and the dtype in which they are sent."""

    axes: tuple[str, ...]
    dtype: Any = None  # None: that of the matrices

    @classmethod
    def of(cls, owners: Any, exchange_dtype: DTypeLike | None) -> Owners | None:
        """The owners given by an optimizer's arguments, or None.

        Raises:
            TypeError: if an argument is of the wrong kind.
            ValueError: if ``exchange_dtype`` is given without owners, or if an axis is repeated.
        """
        if exchange_dtype is not None:
            check_floating(" or None", exchange_dtype=exchange_dtype)
            if owners is None:
                raise ValueError(
                    f"exchange_dtype must be None without owners, got {exchange_dtype!r}: it is "
                    "the dtype in which matrices are sent to their owners"
                )
        if owners is None:
            return None
        axes = (owners,) if isinstance(owners, str) else owners
        if not isinstance(axes, tuple | list) or not all(isinstance(a, str) for a in axes):
            raise TypeError(
                f"owners must be the name of a mesh axis, or a tuple of names, got {owners!r}"
            )
        if not axes or len({*axes}) < len(axes):
            raise ValueError(f"owners must be different mesh axes, at least one, got {owners!r}")
        return cls(tuple(axes), None if exchange_dtype is None else jnp.dtype(exchange_dtype))

    def apply(self, work: Work, stacks: Sequence[Array]) -> list[Array]:
        """The results of ``work`` for some stacks of matrices, each computed by one device.

        Stacks of one shape and dtype are sent together: the number of collectives does not depend
        on the number of layers. On automatic and explicit axes the stacks may have any sharding,
        and each result has the sharding of its stack. Inside ``shard_map`` the stacks are
        replicated: each device computes its share of the matrices and receives the others.

        Args:
            work: a function of a stack of any number of independent matrices.
            stacks: floating-point arrays of shape ``(n, *shape)``. ``n`` is 1 for a single matrix,
                which may have any number of axes.

        Raises:
            ValueError: if the stacks are not on a mesh with these axes.
        """
        classes = collections.defaultdict[Any, list[int]](list)
        for i, x in enumerate(stacks):
            classes[x.shape, x.dtype, spec_of(x), varying(x)].append(i)
        results = list(stacks)
        for members in classes.values():
            of_class = self._apply(work, [stacks[i] for i in members])
            for i, result in zip(members, of_class, strict=True):
                results[i] = result
        return results

    def _apply(self, work: Work, stacks: list[Array]) -> list[Array]:
        """:meth:`apply` for stacks of one shape."""
        mesh, [along_first, *_] = self.mesh(stacks), spec_of(stacks[0])
        is_divided = {*self.axes} <= {*jax.tree.leaves(along_first)}
        on_device = lambda x: self.packed(work(self.unpacked(x, stacks[0].dtype)))

        def apply(*stacks):
            sent = self.send(stacks, mesh, is_divided=is_divided)
            spec = PartitionSpec(self.axes)
            return sent.back(self.on_devices(on_device, mesh, spec, spec)(sent.stack))

        return automatically(apply, lambda _, *xs: list(map(spec_of, xs)))(*stacks)

    def mesh(self, arrays: Any) -> Any:
        """The mesh of some arrays, or that of ``jax.set_mesh``.

        Raises:
            ValueError: if there is no mesh, or if it does not have these axes.
        """
        return mesh_with(self.axes, mesh_of(arrays), "owners")

    def are_manual(self, mesh: Any) -> bool:
        """Whether these are axes of the surrounding ``shard_map``.

        Raises:
            ValueError: if only some of them are.
        """
        kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
        manual = [kinds[name] == AxisType.Manual for name in self.axes]
        if any(manual) and not all(manual):
            raise ValueError(
                f"owners={self.axes} mixes axes of the shard_map around the update with other "
                "axes: give axes of one kind"
            )
        return all(manual)

    def on_devices(self, f: Callable[..., Any], mesh: Any, in_specs: Any, out_specs: Any) -> Any:
        """``f`` applied on each device; ``f`` itself inside a ``shard_map`` over these axes."""
        if self.are_manual(mesh):
            return f
        mesh = jax.sharding.get_abstract_mesh() if explicit_axes(mesh) else mesh
        return jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs)

    def send(self, stacks: Sequence[Array], mesh: Any, *, is_divided: bool = False) -> Sent:
        """Sends stacks of one shape to the owners of their matrices; inside :func:`automatically`.

        Args:
            stacks: arrays of shape ``(n, *shape)``.
            mesh: the mesh that :meth:`mesh` returns.
            is_divided: whether each stack is already sharded along its first axis.
        """
        if self.are_manual(mesh):
            return self._by_shares(stacks)
        mesh = jax.sharding.get_abstract_mesh() if explicit_axes(mesh) else mesh
        return self._by_constraints(stacks, mesh, is_divided)

    def _by_constraints(self, stacks: Sequence[Array], mesh: Any, is_divided: bool) -> Sent:
        """On automatic axes, where only XLA knows the sharding of an array.

        All matrices in one array are divided along its first axis, by one mesh axis after the
        other. XLA emits one all-to-all for each axis, and one for each on the way back.
        """
        first, along = stacks[0], functools.partial(_divided, mesh=mesh)
        # Where a size does not divide a larger one, XLA crashes: then all devices get all matrices.
        sizes = itertools.pairwise(sorted(mesh.shape.values()))
        in_stages = len(self.axes) == 1 or not any(large % small for small, large in sizes)
        if is_divided:
            stages = [self.packed(jnp.stack(stacks, axis=1))]
            apart = lambda done: jnp.unstack(done, axis=1)
        else:
            padded = _padded(stacks, devices_along(mesh, self.axes))
            stages = [along(self.packed(padded), self.axes[:0], whole=not in_stages)]
            apart = lambda done: jnp.split(done[: len(stacks) * len(first)], len(stacks))
        for i in range(1, len(self.axes) if in_stages else 1):
            stages.append(along(stages[-1], self.axes[-i:]))
        mine = along(stages[-1], self.axes, whole=True)

        def back(done):
            done = done.reshape(mine.shape)
            for i, stage in reversed([*enumerate(stages)]):
                if not is_divided:
                    done = along(done, self.axes[len(self.axes) - i :], whole=not in_stages)
                done = group_shardings(done, stage)
            results = apart(self.unpacked(done, first.dtype))
            return list(map(group_shardings, results, stacks))

        return Sent(mine.reshape(-1, *first.shape[1:]), back)

    def _by_shares(self, stacks: Sequence[Array]) -> Sent:
        """Inside ``shard_map``, where each device has all matrices."""
        first, devices = stacks[0], jax.lax.axis_size(self.axes)
        together = _padded(stacks, devices)
        size = len(together) // devices
        start = jax.lax.axis_index(self.axes) * size

        def back(done):
            done = gather_invarying(done, self.axes)
            done = vary_as(self.unpacked(done, first.dtype), first)
            return jnp.split(done[: len(stacks) * len(first)], len(stacks))

        return Sent(jax.lax.dynamic_slice_in_dim(together, start, size), back)

    def packed(self, x: Array) -> Array:
        """An array in the dtype in which it is sent, as integers, since XLA moves conversions."""
        if self.dtype in (None, x.dtype):
            return x
        return jax.lax.bitcast_convert_type(saturating_cast(x, self.dtype), self._integers)

    def unpacked(self, x: Array, dtype: Any) -> Array:
        """The array that :meth:`packed` was given, rounded, in its original dtype."""
        if x.dtype == dtype:
            return x
        return saturating_cast(jax.lax.bitcast_convert_type(x, self.dtype), dtype)

    @property
    def _integers(self) -> Any:
        return jnp.dtype(f"uint{8 * self.dtype.itemsize}")


class Sent(NamedTuple):
    """Matrices of one shape at their owners, and the function that returns them."""

    stack: Array  # of all, divided along its first axis, with padding; for Owners.unpacked
    back: Callable[[Array], list[Array]]  # of results in such a stack, as the matrices came


def _padded(stacks: Sequence[Array], devices: int) -> Array:
    """All matrices in one array, with zeros appended until the devices divide it."""
    missing = -len(stacks) * len(stacks[0]) % devices
    padding = [jnp.zeros_like(stacks[0], shape=(missing, *stacks[0].shape[1:]))] * bool(missing)
    return jnp.concatenate([*stacks, *padding])


def _divided(x: Array, axes: tuple[str, ...], *, mesh: Any, whole: bool = False) -> Array:
    """A stack divided along its first axis; along the others as XLA decides, unless ``whole``."""
    free = () if whole else (PartitionSpec.UNCONSTRAINED,) * (x.ndim - 1)
    spec = PartitionSpec(axes or None, *free)
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
