"""Work on many matrices, divided over the devices of a mesh: each matrix has one owner."""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from ..core.checks import check_floating
from ..core.compat import gather_invarying, group_shardings, varying
from ..core.meshes import automatically, check_axes, devices_along, mesh_of, spec_of
from ..core.numerics import saturating_cast

# work(stack) -> a stack of the same shape: something of each matrix by itself
Work = Callable[[Array], Array]


class Owners(NamedTuple):
    """Over which mesh axes matrices are divided, and in which dtype they are sent."""

    axes: tuple[str, ...]
    dtype: Any = None  # None: that of the matrices

    @classmethod
    def of(cls, owners: Any, exchange_dtype: DTypeLike | None) -> Owners | None:
        """The owners that an optimizer was asked for; None if there are none.

        Raises:
            TypeError: if an argument is of another kind than described.
            ValueError: if ``exchange_dtype`` is given without owners, or an axis twice.
        """
        if exchange_dtype is not None:
            check_floating(" or None", exchange_dtype=exchange_dtype)
            if owners is None:
                raise ValueError(
                    f"exchange_dtype={exchange_dtype!r} is that of matrices on their way to their "
                    "owners: give owners=, too"
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

    def apply(self, work: Work, arrays: Sequence[Array]) -> list[Array]:
        """The results of ``work`` for some arrays, each computed by one device.

        Arrays of one shape and dtype are sent together: the program has as many collectives for a
        hundred layers as for one. On automatic and explicit axes the arrays may be divided in any
        way, and each result is divided as its array is. Inside of ``shard_map`` each device has
        them whole: it computes its share of them, and gets those of the others.

        Args:
            work: of a stack of shape ``(n, *shape)``, of whose arrays each is treated alike.
            arrays: of floating-point numbers.

        Raises:
            ValueError: if the arrays are on no mesh, or on one without these axes.
        """
        classes = collections.defaultdict[Any, list[int]](list)
        for i, x in enumerate(arrays):
            classes[x.shape, x.dtype, spec_of(x), varying(x)].append(i)
        results = list(arrays)
        for members in classes.values():
            of_class = self._of_class(work, [arrays[i] for i in members])
            for i, result in zip(members, of_class, strict=True):
                results[i] = result
        return results

    def _of_class(self, work: Work, arrays: list[Array]) -> list[Array]:
        """As :meth:`apply`, for arrays of one shape."""
        mesh = self._mesh(arrays)
        if _is_manual(mesh, self.axes):
            return self._by_shares(work, arrays)
        divide = automatically(
            functools.partial(self._by_constraints, work), lambda _, *xs: list(map(spec_of, xs))
        )
        return divide(*arrays)

    def _mesh(self, arrays: list[Array]) -> Any:
        mesh = mesh_of(arrays)
        mesh = jax.sharding.get_abstract_mesh() if mesh.empty else mesh
        if mesh.empty:
            raise ValueError(
                f"owners={self.axes} needs a mesh with these axes: put the parameters on it, or "
                "call jax.set_mesh before"
            )
        check_axes(mesh, self.axes, "owners= one of these")
        return mesh

    def _by_constraints(self, work: Work, *arrays: Array) -> list[Array]:
        """On automatic axes, of which XLA alone knows how they divide an array.

        The stack is divided along its first axis, by one mesh axis after the other, which XLA does
        by one all-to-all each; and back in the same stages, as it was before.
        """
        mesh, dtype, number = self._mesh([*arrays]), arrays[0].dtype, len(arrays)
        missing = -number % devices_along(mesh, self.axes)
        padding = [jnp.zeros_like(arrays[0])] * missing
        stack = _cast(jnp.stack([*arrays, *padding]), self.dtype or dtype)
        along = functools.partial(_divided, mesh=mesh)
        stages = [along(stack, self.axes[:0])]
        for i in range(1, len(self.axes)):
            stages.append(along(stages[-1], self.axes[-i:]))
        mine = along(stages[-1], self.axes, whole=True)
        spec = PartitionSpec(self.axes)
        on_device = lambda x: _cast(work(_cast(x, dtype)), x.dtype)
        done = jax.shard_map(on_device, mesh=mesh, in_specs=spec, out_specs=spec)(mine)
        for i, stage in reversed([*enumerate(stages)]):
            done = group_shardings(along(done, self.axes[len(self.axes) - i :]), stage)
        return [_cast(x, dtype) for x in jnp.unstack(done)[:number]]

    def _by_shares(self, work: Work, arrays: list[Array]) -> list[Array]:
        """Inside of ``shard_map``, where each device has all arrays."""
        dtype, number = arrays[0].dtype, len(arrays)
        devices = jax.lax.axis_size(self.axes)
        size = math.ceil(number / devices)
        padding = [jnp.zeros_like(arrays[0])] * (size * devices - number)
        start = jax.lax.axis_index(self.axes) * size
        mine = jax.lax.dynamic_slice_in_dim(jnp.stack([*arrays, *padding]), start, size)
        done = _cast(work(mine), self.dtype or dtype)
        kept = varying(arrays[0])
        if kept.isdisjoint(self.axes):
            done = gather_invarying(done, self.axes)
        else:  # a type that varies stays one
            done = jax.lax.all_gather(done, self.axes, tiled=True)
        return [_cast(x, dtype) for x in jnp.unstack(done)[:number]]


def _is_manual(mesh: Any, axes: tuple[str, ...]) -> bool:
    """Whether these are axes of a ``shard_map`` that one is in; all of them, or none."""
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    manual = [kinds[name] == AxisType.Manual for name in axes]
    if any(manual) and not all(manual):
        raise ValueError(
            f"owners={axes} are in part axes of the shard_map around the update: give axes of one "
            "kind"
        )
    return all(manual)


def _divided(x: Array, axes: tuple[str, ...], *, mesh: Any, whole: bool = False) -> Array:
    """A stack divided along its first axis; along the others as XLA likes, unless ``whole``."""
    free = () if whole else (PartitionSpec.UNCONSTRAINED,) * (x.ndim - 1)
    spec = PartitionSpec(axes or None, *free)
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def _cast(x: Array, dtype: Any) -> Array:
    return saturating_cast(x, dtype)
