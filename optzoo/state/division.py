"""How parameters are divided over a mesh, and how the slots that ``divide_states`` divides."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ..core.compat import gather_invarying, varying
from ..core.lines import is_lines
from ..core.meshes import (
    constrained,
    devices_along,
    explicit_axes,
    mesh_of,
    mesh_with,
    spec_of,
)
from ..core.paths import flatten_with_path, path_name, resolve_mask
from ..core.rows import is_rows


class Place(NamedTuple):
    """A parameter by its name, how it is divided, and how its slots are."""

    name: str
    given: PartitionSpec
    share: PartitionSpec

    @property
    def dimension(self) -> int | None:
        """The one along which the slots are divided and the parameter is not; None if none."""
        pairs = enumerate(itertools.zip_longest(self.given, self.share))
        return next((i for i, (given, share) in pairs if given != share), None)


class Plan(NamedTuple):
    """Where parameters, gradients and slots are; None for those that are left alone."""

    mesh: Any
    axes: tuple[str, ...]
    treedef: Any
    places: list[Place | None]

    @property
    def is_on_device(self) -> bool:
        """Whether it is in a ``shard_map``, where a device has its own share of each slot."""
        return is_manual(self.mesh, self.axes)

    @property
    def number(self) -> int:
        """That of the shares."""
        return devices_along(self.mesh, self.axes)

    def divided(self, tree: Any) -> Any:
        """Arrays like the parameters, as their slots are divided."""
        if self.is_on_device:
            return self._map(self._share, tree)
        move = lambda x, place: constrained(x, self.mesh, place.share)
        return self._map(move, tree)

    def whole(self, tree: Any) -> Any:
        """The same, as the parameters are divided."""
        if self.is_on_device:
            return self._map(self._joined, tree)
        return self._map(lambda x, place: constrained(x, self.mesh, place.given), tree)

    def resized(self, tree: Any, resize: Callable[[str, int], int]) -> Any:
        """Abstract arrays like the parameters, with other sizes where their slots are divided."""

        def of(x, place):
            shape = list(jnp.shape(x))
            if (i := place.dimension) is not None:
                shape[i] = resize(place.name, shape[i])
            return jax.ShapeDtypeStruct(tuple(shape), jnp.result_type(x))

        return self._map(of, tree)

    def _share(self, x: Any, place: Place) -> Any:
        """That of this device."""
        if (i := place.dimension) is None:
            return x
        if differs := varying(x).intersection(self.axes):
            raise ValueError(
                f"parameter '{place.name}' or its gradient differs along {sorted(differs)}: give "
                "all devices the same, such as jax.lax.pmean(grads, axis)"
            )
        size = x.shape[i] // self.number
        return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(self.axes) * size, size, i)

    def _joined(self, x: Any, place: Place) -> Any:
        """The shares of all devices."""
        return x if (i := place.dimension) is None else gather_invarying(x, self.axes, i)

    def shapes(self, params: Any) -> Any:
        """The shapes of parameters that are divided as their slots."""
        of = lambda x, place: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(self.mesh, place.share)
        )
        return self._map(of, params)

    def _map(self, f: Callable[[Any, Place], Any], tree: Any) -> Any:
        found = []
        for x, place in zip(self.treedef.flatten_up_to(tree), self.places, strict=True):
            if is_rows(x) and place is not None and place.share != place.given:
                raise ValueError(
                    f"parameter '{place.name}' has a row-sparse gradient: divide_states is for "
                    "dense ones, so leave this parameter out by mask="
                )
            found.append(x if x is None or place is None or is_rows(x) else f(x, place))
        return self.treedef.unflatten(found)


class Division(NamedTuple):
    """Which parameters have slots that are divided, and over which axes."""

    axes: tuple[str, ...]
    specs: Any
    mask: Any
    min_size: int

    def is_on_device(self, params: Any) -> bool:
        """Whether it is inside of a ``shard_map`` over one of the axes."""
        mesh = mesh_of(params)
        mesh = jax.sharding.get_abstract_mesh() if mesh.empty else mesh
        return any(
            kind == AxisType.Manual and name in self.axes
            for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        )

    def plan(self, params: Any) -> Plan:
        """How the parameters, or gradients in their place, are divided, and how their slots."""
        is_leaf = lambda x: x is None or is_lines(x)
        leaves, treedef = flatten_with_path(params, is_leaf)
        mesh = self._mesh([x for _, x in leaves if not is_leaf(x)])
        size = devices_along(mesh, self.axes)
        specs = [None] * len(leaves) if self.specs is None else treedef.flatten_up_to(self.specs)
        marks = [True] * len(leaves)
        if self.mask is not None:
            marks = treedef.flatten_up_to(resolve_mask(self.mask, params))
        places = list[Place | None]()
        for (path, x), spec, mark in zip(leaves, specs, marks, strict=True):
            if is_leaf(x):
                places.append(None)
                continue
            given = self._given(path_name(path), x, mesh, spec)
            share = self._share(jnp.shape(x), given, size) if mark else given
            places.append(Place(path_name(path), given, share))
        return Plan(mesh, self.axes, treedef, places)

    def _mesh(self, leaves: Sequence[Any]) -> Any:
        """That of the parameters, or of ``jax.set_mesh``."""
        known = (x.sharding for x in leaves if hasattr(x, "sharding") and not is_traced(x))
        mesh = next((s.mesh for s in known if isinstance(s, NamedSharding)), mesh_of(leaves))
        mesh = mesh_with(self.axes, mesh, "axis")
        kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
        mine = {kinds[name] for name in self.axes}
        if AxisType.Manual in mine:
            if not is_manual(mesh, self.axes):
                raise ValueError(
                    f"axis={self.axes} are in part axes of the shard_map around the update: map "
                    "over all of them, or over none"
                )
            return mesh
        if mine != {AxisType.Explicit} and explicit_axes(mesh):
            raise ValueError(
                f"axis={self.axes} is automatic, and other axes of the mesh are explicit: make all "
                "of them of one kind (axis_types= of jax.make_mesh)"
            )
        return mesh

    def _given(self, name: str, x: Any, mesh: Any, spec: Any) -> PartitionSpec:
        """How a parameter is divided."""
        if spec is not None:
            return spec
        if explicit_axes(mesh) and not isinstance(x, jax.ShapeDtypeStruct):
            return spec_of(x)
        known = None if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None)
        spec = known.spec if isinstance(known, NamedSharding) else PartitionSpec()
        if not explicit_axes(mesh) and self.specs is None and any(jax.tree.leaves(tuple(spec))):
            raise ValueError(
                f"parameter '{name}' is divided as {spec}, which a compiled update cannot see on "
                "automatic axes: give specs=, a tree of PartitionSpec like the parameters"
            )
        return spec

    def _share(self, shape: tuple[int, ...], given: PartitionSpec, size: int) -> PartitionSpec:
        """How the slots of a parameter are divided."""
        entries = [*given, *[None] * (len(shape) - len(given))]
        is_divided = not {*self.axes}.isdisjoint(jax.tree.leaves(tuple(given)))
        free = [i for i, n in enumerate(shape) if entries[i] is None and n and n % size == 0]
        if is_divided or not free or math.prod(shape) < self.min_size:
            return given
        # Parts of the last axis would be narrow rows, in 8 bits with parts of groups.
        chosen = max(free, key=lambda i: (i < len(shape) - 1, shape[i]))
        entries[chosen] = self.axes if self.axes[1:] else self.axes[0]
        while entries[-1] is None:  # to jit a spec with more entries is another one
            entries.pop()
        return PartitionSpec(*entries)


def is_manual(mesh: Any, axes: tuple[str, ...]) -> bool:
    """Whether all of these axes of a mesh are axes of the ``shard_map`` around."""
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return all(kinds[name] == AxisType.Manual for name in axes)


def is_traced(params: Any) -> bool:
    """Whether a program is traced that has these parameters."""
    return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(params))


def kept(state: Any, places: Any) -> Any:
    """A state in its shardings, on automatic axes; on explicit ones its types have them."""

    def place(x, sharding):
        if explicit_axes(sharding.mesh):
            return x
        return jax.lax.with_sharding_constraint(x, sharding)

    return jax.tree.map(place, state, places)
