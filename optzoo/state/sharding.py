"""The sharding of the state of an optimizer with sharded parameters."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec, Sharding

from ..core.boxes import axes_of, lengthened, taken, with_sizes
from ..core.lines import doubled, is_lines, param_tree, rows_per_line, shape_of_lines
from ..core.meshes import NO_MESH, as_typed
from ..core.optimizer import about_of
from ..core.paths import leaves_with_path, map_with_path, out_of_box, path_name
from .slots import map_slot_trees
from .stacks import owners_in
from .storage.codes import divides_groups, is_coded, shape_of, sharding_of_codes, warn_of_whole

_HINT = (
    "Its init does not map over the parameters, as in optax.flatten: use the shardings of the "
    "arrays in tx.init(params)"
)


def state_sharding(tx: optax.GradientTransformation, params: Any) -> Any:
    """The sharding of each array of ``tx.init(params)``.

    A slot with the shape of its parameter has the same sharding, and so do two packed slots
    (:func:`optzoo.slots_dtype`). A slot of another shape, such as one with a value for each row or
    a window of gradients, is sharded along the axes that it shares with the parameter; these are
    found by comparing the states of parameters of several lengths. The matrices of an optimizer
    with ``owners`` are divided over these mesh axes. All other arrays, such as counts and other
    matrices of Shampoo, are replicated.

    Use it in ``jax.jit(tx.init, out_shardings=optzoo.state_sharding(tx, params))``, with which each
    device creates only its own part, and in the abstract state for restoring a checkpoint. Nothing
    is computed, so parameters may be abstract. For states with a replica axis use
    :func:`optzoo.replicas.replica_specs`.

    Example:
        >>> import jax, jax.numpy as jnp, optzoo
        >>> from jax.sharding import NamedSharding, PartitionSpec
        >>> mesh = jax.make_mesh((1,), ("d",))
        >>> rows = NamedSharding(mesh, PartitionSpec("d"))
        >>> params = {"w": jax.ShapeDtypeStruct((16, 4), jnp.float32, sharding=rows)}
        >>> tx = optzoo.momentum(0.1, 0.9)
        >>> placed = optzoo.state_sharding(tx, params)
        >>> state = jax.jit(tx.init, out_shardings=placed)({"w": jnp.ones((16, 4))})
        >>> tuple(state[0].slots.momentum["w"].sharding.spec)
        ('d', None)

    Args:
        tx: any optax transformation whose ``init`` maps over the parameters, as
            ``optax.tree.map_params`` requires.
        params: arrays on devices, or ``jax.ShapeDtypeStruct`` with a sharding.

    Raises:
        TypeError: if a parameter has no sharding.
        ValueError: if there is no parameter, if the parameters are on different devices, or if the
            shards of a table in lines are not a multiple of the lines of an 8-bit slot.

    Warns:
        UserWarning: if a parameter is sharded along its last axis but its 8-bit slots cannot be, so
        that each device has all of them, always or within each step.
    """
    if (divide := about_of(tx).divide) is not None:
        params = divide(params)
    paths = leaves_with_path(params, is_leaf=is_lines)
    owners = {out_of_box(path): x for path, x in paths}
    everywhere = _everywhere(owners)
    obstacles, undivided = list[str | None](), dict[str, None]()
    axes = _Axes(tx, params, getattr(everywhere, "mesh", None))

    def place(path, slot, number):
        if is_coded(slot):
            whole = place(path, jax.ShapeDtypeStruct(shape_of(slot), jnp.float32), number)
            if divides_groups(whole, slot):
                undivided[f"'{path_name(path)}'"] = None
            if (x := owners.get(out_of_box(path))) is not None:
                obstacles.append(_obstacle(x, whole, slot))
            return sharding_of_codes(whole, slot)
        if (divided := owners_in(path)) and isinstance(everywhere, NamedSharding):
            return everywhere.update(spec=PartitionSpec(divided))
        # If a parameter has several arrays in one slot, their paths are longer: replicate them.
        x = owners.get(out_of_box(path))
        return everywhere if x is None else like(x, slot.shape, number) or everywhere

    def like(x, shape, number):
        """The sharding of the parameter; None if they share no axes."""
        sharding = _sharding(x)
        stored = shape_of_lines(x.shape) if is_lines(x) else x.shape
        if shape in (x.shape, stored, doubled(stored)):
            return sharding
        if not isinstance(sharding, NamedSharding) or (found := axes.of(number, x)) is None:
            return None
        return sharding.update(spec=PartitionSpec(*taken(sharding.spec, found)))

    numbers = itertools.count()
    try:
        state = jax.eval_shape(tx.init, params)
        place_next = lambda path, slot: place(path, slot, next(numbers))
        of_slots = lambda slots: map_with_path(place_next, slots, is_leaf=is_coded)
        places = map_slot_trees(tx, of_slots, state, lambda _: everywhere)
        placed = jax.tree.map(lambda a, sharding: as_typed(sharding, a.ndim), state, places)
    except Exception as error:
        error.add_note(f"(optzoo.state_sharding found no slots by optax.tree.map_params. {_HINT})")
        raise
    if found := list(filter(None, obstacles)):
        raise ValueError(found[0])
    warn_of_whole(undivided)
    return placed


def _everywhere(owners: dict[Any, Any]) -> Sharding:
    """The sharding of arrays that are replicated over the devices of the parameters."""
    if not owners:
        raise ValueError(
            "params must contain an array, on whose devices the state is placed; got none"
        )
    shardings = dict[str, Sharding]()
    for path, x in owners.items():
        sharding = _sharding(x)
        if not isinstance(sharding, Sharding):
            raise TypeError(
                f"parameter '{path_name(path)}' has no sharding: give an array on devices, or "
                f"jax.ShapeDtypeStruct(..., sharding=...), not {type(x).__name__}"
            )
        shardings[path_name(path)] = sharding
    (first, one), *_ = shardings.items()
    for name, other in shardings.items():
        if _devices(other) != _devices(one):
            raise ValueError(
                f"parameters '{first}' and '{name}' are on different devices, {one} and {other}: "
                "put all on one mesh with jax.device_put(params, shardings)"
            )
    meshes = [s.mesh for s in shardings.values() if isinstance(s, NamedSharding)]
    return NamedSharding(meshes[0], PartitionSpec()) if meshes else one


class _Axes:
    """Maps the axes of slots to axes of their parameters.

    They are found by ``init``: if a parameter is longer along one axis, slots with this axis are
    longer, too.
    """

    def __init__(self, tx: optax.GradientTransformation, params: Any, mesh: Any):
        self._tx, self._params = tx, params
        # An init may ask for it.
        self._mesh = NO_MESH if mesh is None else mesh.abstract_mesh
        self._shapes = dict[int | None, list[tuple[int, ...]]]()  # by the axis that is longer

    def of(self, number: int, x: Any) -> tuple[int | None, ...] | None:
        """The axes of a slot of this parameter, by its index among all; None if unknown."""
        now, *longer = (self._slots(axis) for axis in (None, *range(len(x.shape))))
        if any(len(shapes) != len(now) for shapes in longer):
            return None
        return axes_of(now[number], x.shape, [shapes[number] for shapes in longer])

    def _slots(self, axis: int | None) -> list[tuple[int, ...]]:
        """The shapes of all slots, for parameters that are longer along this axis."""
        if axis not in self._shapes:
            longer = lambda x: lengthened(x, axis if axis in range(len(x.shape)) else None)
            params = with_sizes(param_tree.map(longer, self._params))
            shapes = self._shapes[axis] = list[tuple[int, ...]]()
            note = lambda _, slot: shapes.append(shape_of(slot) if is_coded(slot) else slot.shape)
            of_slots = lambda slots: map_with_path(note, slots, is_leaf=is_coded)
            with jax.sharding.use_abstract_mesh(self._mesh):
                state = jax.eval_shape(self._tx.init, params)
            map_slot_trees(self._tx, of_slots, state, lambda _: None)
        return self._shapes[axis]


def _obstacle(x: Any, whole: Any, slot: Any) -> str | None:
    """The reason why the lines of an 8-bit slot cannot be sharded like the table."""
    rows = whole.shard_shape(shape_of(slot))[0]
    of_lines: list[Any] = [part for part in slot if is_lines(part)]
    for part in of_lines:
        per_line = rows_per_line(part.shape[1:])
        if rows < len(part) and rows % per_line:
            return (
                f"params has a table of shape {x.shape} in lines with {rows} rows in a shard, not "
                f"a multiple of the {per_line} rows of a line of an 8-bit slot: give RowSharding "
                f"a multiple= of {per_line} times the number of shards, or the table as an array"
            )
    return None


def _devices(sharding: Any) -> Any:
    """The devices of a sharding; for a sharding in a traced program, its mesh."""
    mesh = getattr(sharding, "mesh", None)
    return mesh if isinstance(mesh, AbstractMesh) else sharding.device_set


def _sharding(x: Any) -> Any:
    """The sharding of a parameter, which may be a table in lines."""
    return getattr(x.value if is_lines(x) else x, "sharding", None)
