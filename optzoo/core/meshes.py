"""Meshes with explicit axes, on which the sharding of an array is a part of its type."""

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
        names: of its axes: a string, or a tuple of them.
        fix: what names the axis otherwise, for the error.

    Raises:
        TypeError: if it is no mesh.
        ValueError: if the mesh has no such axis.
    """
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(f"mesh must be a jax.sharding.Mesh, got {mesh!r}: jax.make_mesh makes one")
    for name in jax.tree.leaves(names):
        if name not in mesh.shape:
            raise ValueError(
                f"mesh has no axis {name!r}, its axes are {dict(mesh.shape)}: give {fix}, or "
                "another mesh"
            )
    return devices_along(mesh, names)


def mesh_with(axes: tuple[str, ...], mesh: Any, argument: str) -> Any:
    """A mesh, or that of ``jax.set_mesh`` in the place of an empty one, which has some axes.

    Args:
        axes: their names.
        mesh: the mesh, such as :func:`mesh_of` finds.
        argument: what names the axes, for the errors.

    Raises:
        ValueError: if there is none, or if it does not have these axes.
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
    """The number of devices along some axes of a mesh: one along none."""
    return math.prod(mesh.shape[name] for name in jax.tree.leaves(names))


def axis_size(
    axis_name: Any,
    fix: str = "call update inside shard_map or vmap with that axis, or leave axis_name out",
) -> int:
    """The size of a named axis, or axes, inside of a map.

    Raises:
        NameError: if there is none.
    """
    try:
        return jax.lax.axis_size(axis_name)
    except NameError as error:
        raise NameError(f"no axis is named axis_name={axis_name!r} here: {fix}") from error


def shard_map(
    f: Callable[..., Any], mesh: Any, in_specs: Any, out_specs: Any, *, check_vma: bool = True
) -> Callable[..., Any]:
    """``jax.shard_map`` for all types of axes, and for arguments with any sharding.

    The types of the results have the shardings of ``out_specs``.

    Raises:
        ValueError: at trace time, if ``f`` uses an array from outside that is on explicit axes.
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
    """``f`` of trees of arrays, computed as if explicit axes were automatic.

    So XLA places what is computed. ``specs(results, *args)`` gives for each result the
    ``PartitionSpec`` of its type. Arrays that ``f`` has captured, such as hyper-parameters of
    ``optax.inject_hyperparams``, are as its arguments.
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
    """``f`` of arrays, on all types of axes: its result is divided as its first argument."""
    call = automatically(f, lambda _, first, *others: spec_of(first))
    return lambda first, *others: placed_as(call(first, *others), first)


def zeros_of(kind: Any) -> Array:
    """Zeros of a type: a ``ShapeDtypeStruct`` with a sharding and axes that vary."""
    zeros, sharding = jnp.zeros(kind.shape, kind.dtype), kind.sharding
    if isinstance(sharding, NamedSharding):
        zeros = placed(zeros, sharding.mesh, sharding.spec)
    return vary(zeros, varying(kind))


def zeros_of_rows(x: Any, dtype: Any) -> Array:
    """A zero for each row of an array, or of its shape, divided as the rows."""
    return zeros_without(x, range(1, jnp.ndim(x)), dtype)


def zeros_without(x: Any, axes: Iterable[int], dtype: Any) -> Array:
    """Zeros of the shape of an array, or of its shape, without some axes; divided as the others."""
    axes = tuple(axes)
    if isinstance(x, jax.ShapeDtypeStruct):
        return jnp.zeros([size for axis, size in enumerate(x.shape) if axis not in axes], dtype)
    # Computed from the array: zeros made from a shape alone would be on one device. A maximum needs
    # no copy of a table, and overflows in no dtype.
    return jnp.zeros_like(jnp.max(x, axis=axes, initial=0), dtype)


def beside(params: Any, state: Any) -> Any:
    """A new state with its arrays on the devices of the parameters: counts, and what is whole.

    JAX makes an array from a shape alone on one device. A step would then be compiled twice.
    """
    meshes = {getattr(place_of(x), "mesh", None) for x in jax.tree.leaves(params)}
    mesh = next(iter(meshes)) if len(meshes) == 1 else None
    if mesh is None or (mesh.size == 1 and not explicit_axes(mesh)):
        return state
    is_apart = lambda x: isinstance(place_of(x), SingleDeviceSharding)
    whole = lambda x: as_typed(NamedSharding(mesh, EVERYWHERE), x.ndim)
    return jax.tree.map(lambda x: jax.device_put(x, whole(x)) if is_apart(x) else x, state)


def as_typed(sharding: Any, ndim: int) -> Any:
    """A sharding on explicit axes as a step gives it, with an entry for each axis of a type.

    To jit the forms with fewer entries are others, for which it compiles again.
    """
    if not isinstance(sharding, NamedSharding) or not explicit_axes(sharding.mesh):
        return sharding
    missing = (None,) * (ndim - len(sharding.spec))
    return sharding.update(spec=PartitionSpec(*sharding.spec, *missing)) if missing else sharding


def place_of(x: Any) -> Any:
    """Where an array is; None of what is none, or is traced."""
    is_known = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
    return x.sharding if is_known else None


def where_it_was(new: Any, old: Any) -> Any:
    """An array on the devices of the one that it replaces; committed to them only if that is.

    A step on a mesh accepts an array that is not committed, and refuses one of another device.
    """
    place = place_of(old)
    stays = place is not None and (old.committed or getattr(new, "committed", False))
    return jax.device_put(new, place) if stays else new


def placed(x: Any, mesh: Any, spec: PartitionSpec) -> Any:
    """An array in the types of a mesh; as it is where these have no shardings."""
    return reshard(x, NamedSharding(mesh, spec)) if explicit_axes(mesh) else x


def constrained(x: Any, mesh: Any, spec: PartitionSpec) -> Any:
    """An array divided over axes of a mesh, which are automatic or explicit."""
    sharding, names = NamedSharding(mesh, spec), explicit_axes(mesh)
    if names and {*jax.tree.leaves(tuple(spec))} <= {*names}:
        return reshard(x, sharding)
    return jax.lax.with_sharding_constraint(x, sharding)


def placed_as(new: Any, like: Any) -> Any:
    """A tree divided over automatic axes of a mesh as another one with arrays of its shapes.

    XLA chooses where a result is. A state in another place would compile the next step again.
    In a ``shard_map`` over some of the axes it does: XLA fails to group arrays there.
    """

    def place(new, like):
        mesh = mesh_of(like)
        kinds = {*mesh.axis_types}
        divides = mesh.size > 1 and AxisType.Auto in kinds and AxisType.Manual not in kinds
        is_array = isinstance(new, jax.Array) and new.ndim > 0
        return group_shardings(new, like) if divides and is_array else new

    return jax.tree.map(place, new, like)


def whole_along_last(sharding: NamedSharding, ndim: int) -> NamedSharding:
    """The same of an array with some axes, of which the last one is not divided."""
    entries = tuple(sharding.spec[: ndim - 1])
    while entries and entries[-1] is None:
        entries = entries[:-1]
    return as_typed(sharding.update(spec=PartitionSpec(*entries)), ndim)


def in_mesh(x: Any, mesh: Any) -> Any:
    """An array in the types of a mesh, which may be the same with other types of axes."""
    of_x = mesh_of(x)
    if of_x.empty or mesh.empty or of_x == mesh:
        return x
    return reshard(x, NamedSharding(mesh, EVERYWHERE))


def mesh_of(tree: Any) -> Any:
    """The mesh in the types of arrays; an empty one if there is none."""
    arrays = (x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array))
    meshes = (jax.typeof(x).sharding.mesh for x in arrays)
    return next((mesh for mesh in meshes if not mesh.empty), NO_MESH)


def spec_of(x: Any) -> PartitionSpec:
    """How the type of an array divides its axes."""
    return jax.typeof(x).sharding.spec


def spec_of_rows(table: Any, ids: Any) -> PartitionSpec:
    """How the rows of a table are divided: as the ids, and along their own axes as the table."""
    of_ids, (_, *of_row) = spec_of(ids), spec_of(table)
    used = set(jax.tree.leaves(tuple(of_ids)))
    free = lambda entry: entry if used.isdisjoint(jax.tree.leaves(entry)) else None
    return PartitionSpec(*of_ids, *map(free, of_row))


NO_MESH = AbstractMesh((), ())


def _without_others(f: Callable[..., Any]) -> Callable[..., Any]:
    """``f``; an error of JAX about arrays from outside says what they are."""

    @functools.wraps(f)
    def wrapped(*args):
        try:
            return f(*args)
        except NotImplementedError as error:
            if "Closing over" not in str(error):
                raise
            [shape] = re.findall("with shape (.*)", str(error))
            raise ValueError(
                f"a function that runs on each device uses an array {shape} from outside, which "
                "lies on explicit axes of the mesh: pass it as an argument, or make it a constant "
                "by numpy.asarray"
            ) from error

    return wrapped


@functools.cache
def automatic(mesh: Mesh) -> Mesh:
    """The mesh with automatic axes in the place of the explicit ones."""
    now = {AxisType.Explicit: AxisType.Auto}
    types = tuple(now.get(kind, kind) for kind in mesh.axis_types)
    return Mesh(mesh.devices, mesh.axis_names, axis_types=types)


def only_along(names: tuple[str, ...], spec: PartitionSpec) -> PartitionSpec:
    """The spec without the axes of a mesh that are not among some."""

    def kept(entry):
        if isinstance(entry, tuple):
            return tuple(name for name in entry if name in names)
        return entry if entry in names else None

    return PartitionSpec(*map(kept, spec))
