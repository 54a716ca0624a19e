"""The division of parameters over a mesh, and of the slots by ``divide_states``."""

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
    """A parameter by its name, its division, and that of its slots."""

    name: str
    given: PartitionSpec
    share: PartitionSpec

    @property
    def dimension(self) -> int | None:
        """The dimension of which only the slots are divided; None without one."""
        pairs = enumerate(itertools.zip_longest(self.given, self.share))
        return next((i for i, (given, share) in pairs if given != share), None)


class Plan(NamedTuple):
    """The placement of parameters, gradients and slots; None for unchanged ones."""

    mesh: Any
    axes: tuple[str, ...]
    treedef: Any
    places: list[Place | None]

    @property
    def is_on_device(self) -> bool:
        """Whether the code is in a ``shard_map``, where a device has its own share of each slot."""
        return is_manual(self.mesh, self.axes)

    @property
    def number(self) -> int:
        """The number of shares."""
        return devices_along(self.mesh, self.axes)

    def divided(self, tree: Any) -> Any:
        """Arrays like the parameters, divided like their slots."""
        if self.is_on_device:
            return self._map(self._share, tree)
        move = lambda x, place: constrained(x, self.mesh, place.share)
        return self._map(move, tree)

    def whole(self, tree: Any) -> Any:
        """Arrays like the parameters, divided like the parameters."""
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
        """The share of this device."""
        if (i := place.dimension) is None:
            return x
        if differs := varying(x).intersection(self.axes):
            raise ValueError(
                f"parameter '{place.name}' or its gradient varies over {sorted(differs)}: give "
                "all devices the same, such as jax.lax.pmean(grads, axis)"
            )
        size = x.shape[i] // self.number
        return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(self.axes) * size, size, i)

    def _joined(self, x: Any, place: Place) -> Any:
        """Joins the shares of all devices."""
        return x if (i := place.dimension) is None else gather_invarying(x, self.axes, i)

    def shapes(self, params: Any) -> Any:
        """The shapes of parameters divided like their slots."""
        of = lambda x, place: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(self.mesh, place.share)
        )
        return self._map(of, params)

    def _map(self, f: Callable[[Any, Place], Any], tree: Any) -> Any:
        found = []
        for x, place in zip(self.treedef.flatten_up_to(tree), self.places, strict=True):
            if is_rows(x) and place is not None and place.share != place.given:
                raise ValueError(
                    f"parameter '{place.name}' has a row-sparse gradient, but divide_states "
                    "supports only dense ones: exclude this parameter by mask="
                )
            found.append(x if x is None or place is None or is_rows(x) else f(x, place))
        return self.treedef.unflatten(found)


class Division(NamedTuple):
    """The parameters whose slots are divided, and the mesh axes."""

    axes: tuple[str, ...]
    specs: Any
    mask: Any
    min_size: int

    def is_on_device(self, params: Any) -> bool:
        """Whether the code is in a ``shard_map`` over one of the axes."""
        mesh = mesh_of(params)
        mesh = jax.sharding.get_abstract_mesh() if mesh.empty else mesh
        return any(
            kind == AxisType.Manual and name in self.axes
            for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        )

    def plan(self, params: Any) -> Plan:
        """The plan for parameters, or gradients in their place, and their slots."""
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
        """The mesh of the parameters, or of ``jax.set_mesh``."""
        known = (x.sharding for x in leaves if hasattr(x, "sharding") and not is_traced(x))
        mesh = next((s.mesh for s in known if isinstance(s, NamedSharding)), mesh_of(leaves))
        mesh = mesh_with(self.axes, mesh, "axis")
        kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
        mine = {kinds[name] for name in self.axes}
        if AxisType.Manual in mine:
            if not is_manual(mesh, self.axes):
                raise ValueError(
                    f"some of axis={self.axes} are axes of the shard_map around the update: map "
                    "over all of them, or over none"
                )
            return mesh
        if mine != {AxisType.Explicit} and explicit_axes(mesh):
            raise ValueError(
                f"axis={self.axes} is automatic, but other axes of the mesh are explicit: give "
                "all axes one type (axis_types= of jax.make_mesh)"
            )
        return mesh

    def _given(self, name: str, x: Any, mesh: Any, spec: Any) -> PartitionSpec:
        """The division of a parameter."""
        if spec is not None:
            return spec
        if explicit_axes(mesh) and not isinstance(x, jax.ShapeDtypeStruct):
            return spec_of(x)
        known = None if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None)
        spec = known.spec if isinstance(known, NamedSharding) else PartitionSpec()
        if not explicit_axes(mesh) and self.specs is None and any(jax.tree.leaves(tuple(spec))):
            raise ValueError(
                f"parameter '{name}' is divided as {spec}, which is unknown in a compiled update "
                "on automatic axes: give specs=, a tree of PartitionSpec like the parameters"
            )
        return spec

    def _share(self, shape: tuple[int, ...], given: PartitionSpec, size: int) -> PartitionSpec:
        """The division of the slots of a parameter."""
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
    """Whether all of these mesh axes are axes of the enclosing ``shard_map``."""
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return all(kinds[name] == AxisType.Manual for name in axes)


def is_traced(params: Any) -> bool:
    """Whether a program with these parameters is being traced."""
    return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(params))


def kept(state: Any, places: Any) -> Any:
    """A state in its shardings, on automatic axes; on explicit axes its types have them."""

    def place(x, sharding):
        if explicit_axes(sharding.mesh):
            return x
        return jax.lax.with_sharding_constraint(x, sharding)

    return jax.tree.map(place, state, places)
