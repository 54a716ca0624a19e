"""Meshes with explicit axes, with which the type of an array includes its sharding."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    SingleDeviceSharding,
    reshard,
)

from .captured import captured
from .compat import group_shardings, vary, varying

EVERYWHERE = PartitionSpec()


def explicit_axes(mesh: Any) -> tuple[str, ...]:
    """The names of the explicit axes."""
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, kind in types if kind == AxisType.Explicit)


def check_axes(mesh: Any, names: Any, fix: str) -> int:
    """The number of devices along some axes of a mesh.

    Args:
        mesh: the mesh.
        names: the names of its axes: a string, or a tuple of strings.
        fix: the argument that names the axis, for the error.

    Raises:
        TypeError: if ``mesh`` is not a mesh.
        ValueError: if the mesh has no such axis.
    """
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(f"mesh must be a jax.sharding.Mesh, such as of jax.make_mesh, got {mesh!r}")
    for name in jax.tree.leaves(names):
        if name not in mesh.shape:
            raise ValueError(
                f"mesh has no axis {name!r}, its axes are {dict(mesh.shape)}: give {fix}, or "
                "another mesh"
            )
    return devices_along(mesh, names)


def mesh_with(axes: tuple[str, ...], mesh: Any, argument: str) -> Any:
    """A mesh with some axes: the given one, or that of ``jax.set_mesh`` if it is empty.

    Args:
        axes: the names of the axes.
        mesh: the mesh, such as of :func:`mesh_of`.
        argument: the argument that names the axes, for errors.

    Raises:
        ValueError: if there is no mesh, or it does not have these axes.
    """
    mesh = jax.sharding.get_abstract_mesh() if mesh.empty else mesh
    if mesh.empty:
        raise ValueError(
            f"{argument}={axes} needs a mesh with these axes: put the parameters on it, or call "
            "jax.set_mesh before"
        )
    check_axes(mesh, axes, f"{argument}= one of these")
    return mesh


def devices_along(mesh: Any, names: Any) -> int:
    """The number of devices along some axes of a mesh; one without axes."""
    return math.prod(mesh.shape[name] for name in jax.tree.leaves(names))


def axis_size(
    axis_name: Any,
    fix: str = "call update inside shard_map or vmap with that axis, or omit axis_name",
) -> int:
    """The size of a named axis, or axes, inside of a map.

    Raises:
        NameError: if there is no such axis.
    """
    try:
        return jax.lax.axis_size(axis_name)
    except NameError as error:
        raise NameError(
            f"axis_name={axis_name!r} is not an axis of the enclosing map: {fix}"
        ) from error


def shard_map(
    f: Callable[..., Any], mesh: Any, in_specs: Any, out_specs: Any, *, check_vma: bool = True
) -> Callable[..., Any]:
    """``jax.shard_map`` for all types of axes, and for arguments with any sharding.

    The types of the results have the shardings of ``out_specs``.

    Raises:
        ValueError: at trace time, if ``f`` captures an array that is on explicit axes.
    """
    if not (names := explicit_axes(mesh)):
        return jax.shard_map(
            f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma
        )
    mapped = jax.shard_map(
        _without_others(f),
        mesh=automatic(mesh),
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=check_vma,
    )
    outs = jax.tree.map(lambda spec: NamedSharding(mesh, only_along(names, spec)), out_specs)
    # It takes no device from its arguments unless it is compiled.
    return jax.jit(jax.sharding.auto_axes(mapped, axes=names, out_sharding=outs), inline=True)


def automatically(f: Callable[..., Any], specs: Callable[..., Any]) -> Callable[..., Any]:
    """Applies ``f`` to trees of arrays as if explicit axes were automatic.

    XLA then chooses shardings. ``specs(results, *args)`` returns the ``PartitionSpec`` of the type
    of each result. Arrays captured by ``f``, such as hyper-parameters of
    ``optax.inject_hyperparams``, are treated like its arguments.
    """

    @functools.wraps(f)
    def wrapped(*args):
        mesh = mesh_of(args)
        if not (names := explicit_axes(mesh)):
            return f(*args)
        inside = mesh.update_axis_types(dict.fromkeys(names, AxisType.Auto))
        others = tuple(name for name in mesh.axis_names if name not in names)
        place = lambda x: NamedSharding(inside, only_along(others, spec_of(x)))
        enter = lambda x: reshard(x, place(x)) if isinstance(x, jax.Array) else x
        arrays, with_others = captured(f)
        entered = jax.tree.map(enter, args)
        call = with_others([enter(x) if _is_explicit(x) else x for x in arrays])
        with jax.sharding.use_abstract_mesh(inside):
            results = call(*entered)
        leave = lambda x, spec: reshard(x, NamedSharding(mesh, spec))
        return jax.tree.map(leave, results, specs(results, *args))

    return wrapped


def _is_explicit(x: Array) -> bool:
    """Whether the type of an array has explicit axes."""
    return bool(explicit_axes(jax.typeof(x).sharding.mesh))


def like_first(f: Callable[..., Array]) -> Callable[..., Array]:
    """Applies ``f`` on all types of axes; the result is divided like the first argument."""
    call = automatically(f, lambda _, first, *others: spec_of(first))
    return lambda first, *others: placed_as(call(first, *others), first)


def zeros_of(kind: Any) -> Array:
    """Zeros of a type: a ``ShapedArray``, or a ``ShapeDtypeStruct`` with its sharding and axes."""
    zeros, sharding = jnp.zeros(kind.shape, kind.dtype), kind.sharding
    if isinstance(sharding, NamedSharding):
        zeros = placed(zeros, sharding.mesh, sharding.spec)
    return vary(zeros, varying(kind))


def zeros_of_rows(x: Any, dtype: Any) -> Array:
    """A zero for each row of an array, or of its shape, divided like the rows."""
    return zeros_without(x, range(1, jnp.ndim(x)), dtype)


def zeros_without(x: Any, axes: Iterable[int], dtype: Any) -> Array:
    """Zeros with the shape of an array, or a shape, without some axes; divided like the others."""
    axes = tuple(axes)
    if isinstance(x, jax.ShapeDtypeStruct):
        return jnp.zeros([size for axis, size in enumerate(x.shape) if axis not in axes], dtype)
    # Computed from the array: zeros made from a shape alone would be on one device. A maximum needs
    # no copy of a table, and overflows in no dtype.
    return jnp.zeros_like(jnp.max(x, axis=axes, initial=0), dtype)


def beside(params: Any, state: Any) -> Any:
    """A new state with counts and replicated arrays on the devices of the parameters.

    JAX creates arrays from shapes on one device, so that a step would be compiled twice.
    """
    meshes = {getattr(place_of(x), "mesh", None) for x in jax.tree.leaves(params)}
    mesh = next(iter(meshes)) if len(meshes) == 1 else None
    if mesh is None or (mesh.size == 1 and not explicit_axes(mesh)):
        return state
    is_apart = lambda x: isinstance(place_of(x), SingleDeviceSharding)
    whole = lambda x: as_typed(NamedSharding(mesh, EVERYWHERE), x.ndim)
    return jax.tree.map(lambda x: jax.device_put(x, whole(x)) if is_apart(x) else x, state)


def as_typed(sharding: Any, ndim: int) -> Any:
    """A sharding on explicit axes in the form of a step's results: with an entry for each axis.

    For ``jit``, forms with fewer entries are different, and are compiled again.
    """
    if not isinstance(sharding, NamedSharding) or not explicit_axes(sharding.mesh):
        return sharding
    missing = (None,) * (ndim - len(sharding.spec))
    return sharding.update(spec=PartitionSpec(*sharding.spec, *missing)) if missing else sharding


def place_of(x: Any) -> Any:
    """The sharding of an array; None for traced arrays and other objects."""
    is_known = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
    return x.sharding if is_known else None


def where_it_was(new: Any, old: Any) -> Any:
    """An array on the devices of the one that it replaces, and committed to them if that one is.

    A step on a mesh accepts uncommitted arrays, and refuses arrays committed to other devices.
    """
    place = place_of(old)
    stays = place is not None and (old.committed or getattr(new, "committed", False))
    return jax.device_put(new, place) if stays else new


def placed(x: Any, mesh: Any, spec: PartitionSpec) -> Any:
    """An array in the types of a mesh; unchanged if these have no shardings."""
    return reshard(x, NamedSharding(mesh, spec)) if explicit_axes(mesh) else x


def constrained(x: Any, mesh: Any, spec: PartitionSpec) -> Any:
    """An array divided over mesh axes, which are automatic or explicit."""
    sharding, names = NamedSharding(mesh, spec), explicit_axes(mesh)
    if names and {*jax.tree.leaves(tuple(spec))} <= {*names}:
        return reshard(x, sharding)
    return jax.lax.with_sharding_constraint(x, sharding)


def placed_as(new: Any, like: Any) -> Any:
    """A tree divided over automatic mesh axes like another one of the same shapes.

    XLA chooses the shardings of results. A state with another sharding would compile the next step
    again. This still happens in a ``shard_map`` over some of the axes, where XLA fails to group
    arrays.
    """

    def place(new, like):
        mesh = mesh_of(like)
        kinds = {*mesh.axis_types}
        divides = mesh.size > 1 and AxisType.Auto in kinds and AxisType.Manual not in kinds
        is_array = isinstance(new, jax.Array) and new.ndim > 0
        return group_shardings(new, like) if divides and is_array else new

    return new if mesh_of(like).empty else jax.tree.map(place, new, like)


def whole_along_last(sharding: NamedSharding, ndim: int) -> NamedSharding:
    """The sharding of an array of ``ndim`` axes with its last axis undivided."""
    entries = tuple(sharding.spec[: ndim - 1])
    while entries and entries[-1] is None:
        entries = entries[:-1]
    return as_typed(sharding.update(spec=PartitionSpec(*entries)), ndim)


def in_mesh(x: Any, mesh: Any) -> Any:
    """An array in the types of a mesh that may differ only in the types of its axes."""
    of_x = mesh_of(x)
    if of_x.empty or mesh.empty or of_x == mesh:
        return x
    return reshard(x, NamedSharding(mesh, EVERYWHERE))


def mesh_of(tree: Any) -> Any:
    """The mesh in the types of arrays; empty if there is none."""
    for x in jax.tree.leaves(tree):
        if isinstance(x, jax.Array) and not (mesh := jax.typeof(x).sharding.mesh).empty:
            return mesh
    return NO_MESH


def spec_of(x: Any) -> PartitionSpec:
    """The partition spec in the type of an array."""
    return jax.typeof(x).sharding.spec


def spec_of_rows(table: Any, ids: Any) -> PartitionSpec:
    """The partition spec of rows: of the ids, then along their own axes of the table."""
    of_ids, (_, *of_row) = spec_of(ids), spec_of(table)
    used = set(jax.tree.leaves(tuple(of_ids)))
    free = lambda entry: entry if used.isdisjoint(jax.tree.leaves(entry)) else None
    return PartitionSpec(*of_ids, *map(free, of_row))


NO_MESH = AbstractMesh((), ())


def _without_others(f: Callable[..., Any]) -> Callable[..., Any]:
    """``f``, with a clear error for captured arrays in place of that of JAX."""

    @functools.wraps(f)
    def wrapped(*args):
        try:
            return f(*args)
        except NotImplementedError as error:
            if "Closing over" not in str(error):
                raise
            [shape] = re.findall("with shape (.*)", str(error))
            raise ValueError(
                f"a function that runs on each device captures an array {shape} on explicit axes "
                "of the mesh: pass it as an argument, or make it a constant by numpy.asarray"
            ) from error

    return wrapped


@functools.cache
def automatic(mesh: Mesh) -> Mesh:
    """The mesh with automatic axes in place of explicit ones."""
    now = {AxisType.Explicit: AxisType.Auto}
    types = tuple(now.get(kind, kind) for kind in mesh.axis_types)
    return Mesh(mesh.devices, mesh.axis_names, axis_types=types)


def only_along(names: tuple[str, ...], spec: PartitionSpec) -> PartitionSpec:
    """The spec without mesh axes that are not in ``axes``."""

    def kept(entry):
        if isinstance(entry, tuple):
            return tuple(name for name in entry if name in names)
        return entry if entry in names else None

    return PartitionSpec(*map(kept, spec))
