"""Optimizers of matrices that have owners: each device keeps and updates its own."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from ..core.boxes import without_boxes
from ..core.checks import check_update_arguments
from ..core.compat import vary
from ..core.gradients import check_gradients
from ..core.meshes import (
    as_typed,
    automatically,
    constrained,
    devices_along,
    place_of,
    spec_of,
)
from ..core.numerics import is_trainable, saturating_cast
from ..core.optimizer import Optimizer, about_of
from ..core.rows import is_rows
from ..state.fit import StateError, misfit
from ..state.inner import fitting
from ..state.stacks import (
    axes_of_owners,
    flatten_with_stacks,
    hidden,
    is_stack,
    members,
    stack_of,
    stacks_in,
    value,
)
from ..state.storage.stored import ROUNDING, STREAM
from ..state.types import LeafwiseState, OwnersState
from .owners import Owners

WHOLE = PartitionSpec()

# The positions of the matrices of one shape among all parameters.
Members = tuple[int, ...]


def with_owners(
    owners: Owners | None,
    make: Callable[[bool], optax.GradientTransformationExtraArgs],
    has_owner: Callable[[tuple[int, ...]], bool],
) -> optax.GradientTransformationExtraArgs:
    """An optimizer in which each matrix, with all its slots, is stored on one device.

    All matrices of one shape form a stack, sharded along its first axis. A step sends their
    gradients to the owners, each device updates its own matrices, and the updates are sent back.

    Args:
        owners: the axes over which matrices are divided; None for no owners.
        make: returns the optimizer of single parameters, or, given True, of stacks whose members
            are independent. Updates depend on gradients only, not on parameters.
        has_owner: whether a parameter of a shape has an owner.
    """
    if owners is None:
        return make(False)
    divided = _Divided(owners, make(True), make(False), has_owner)
    about = about_of(divided.on_others)
    return fitting(without_boxes(Optimizer(divided.init, divided.update, about)))


def in_stacks(slots: Any) -> Any:
    """Initializers of slots for stacks of parameters, from those for single parameters."""

    def of_stack(init):
        def make(x):
            one = init(jax.ShapeDtypeStruct(x.shape[1:], x.dtype))
            return jax.tree.map(lambda a: jnp.broadcast_to(a, (len(x), *a.shape)), one)

        return make

    return type(slots)._make(map(of_stack, slots))


@dataclasses.dataclass(frozen=True)
class _Divided:
    """Two optimizers: one of the stacks of matrices, one of the other parameters."""

    owners: Owners
    on_stacks: Any
    on_others: optax.GradientTransformationExtraArgs
    has_owner: Callable[[tuple[int, ...]], bool]

    def init(self, params: Any) -> OwnersState:
        if not jax.tree.leaves(params):  # a placeholder, for all parameters
            return OwnersState(self.on_stacks.init(params), self.on_others.init(params))
        nodes, treedef = flatten_with_stacks(params)
        classes = self._classes(nodes)
        others = self.on_others.init(treedef.unflatten(hidden(nodes, {*itertools.chain(*classes)})))
        if not classes:
            return OwnersState(self.on_stacks.init(self._in_stacks(nodes, treedef, {})), others)
        mesh = self.owners.mesh(nodes)
        is_manual = self.owners.are_manual(mesh)

        def make():
            stacks = {}
            for of_class in classes:
                x = nodes[of_class[0]]
                zeros = jnp.zeros((self._here(len(of_class), mesh), *x.shape), x.dtype)
                stacks[of_class] = vary(zeros, self.owners.axes) if is_manual else zeros
            return self.on_stacks.init(self._in_stacks(nodes, treedef, stacks))

        return OwnersState(make() if is_manual else self._on_mesh(make, mesh, nodes), others)

    def update(
        self, updates: Any, state: OwnersState, params: Any = None, **extra_args: Any
    ) -> tuple[Any, OwnersState]:
        check_update_arguments(extra_args)
        check_gradients(updates, params)
        if not isinstance(state, OwnersState):
            raise misfit("OwnersState(matrices, others)", type(state).__name__)
        nodes, treedef = flatten_with_stacks(updates)
        classes = self._classes_of(state, len(nodes))
        matrices = {*itertools.chain(*classes)}
        hide = lambda tree: treedef.unflatten(hidden(treedef.flatten_up_to(tree), matrices))
        of_others = None if params is None else hide(params)
        others, new = self.on_others.update(hide(updates), state.others, of_others, **extra_args)
        done, of_matrices = self._step(nodes, treedef, classes, state.matrices, extra_args)
        done = dict(enumerate(treedef.flatten_up_to(others))) | done
        return treedef.unflatten(list(done.values())), OwnersState(of_matrices, new)

    def _step(
        self,
        nodes: Sequence[Any],
        treedef: Any,
        classes: Sequence[Members],
        state: LeafwiseState,
        extra_args: Any,
    ) -> tuple[dict[int, Any], LeafwiseState]:
        """The updates of the matrices, by position, and their new state."""
        given = {m: [nodes[i] for i in m] for m in classes}
        dense = {m: grads for m, gs in given.items() if (grads := _dense(gs))}
        names = {*about_of(self.on_stacks).reads, ROUNDING} & {*extra_args}
        extra = {name: extra_args[name] for name in sorted(names)}
        if not dense:
            masked = self._in_stacks(nodes, treedef, dict.fromkeys(classes))
            _, state = self.on_stacks.update(masked, state, **extra)
            return dict.fromkeys(itertools.chain(*classes)), state
        mesh = self.owners.mesh((dense, state))
        self._check_devices(state, mesh)
        spec = PartitionSpec(self.owners.axes)

        def on_device(stacks, state, extra):
            extra = self._apart(extra)
            gs = {m: self.owners.unpacked(x, dense[m][0].dtype) for m, x in stacks.items()}
            tree = self._in_stacks(nodes, treedef, {m: gs.get(m) for m in classes})
            updates, new = self.on_stacks.update(tree, state, **extra)
            of_class = {members(node): value(node) for node in stacks_in(updates)}
            # Counts of this device.
            count = lambda old, new: old + jax.lax.psum(new - old, self.owners.axes)
            shared = jax.tree.map(count, state.shared, new.shared)
            slots = self._where_given(given, state.slots, new.slots)
            packed = {m: self.owners.packed(of_class[m]) for m in stacks}
            return packed, new._replace(slots=slots, shared=shared)

        def step(dense, state, extra):
            sent = {m: self.owners.send([g[None] for g in gs], mesh) for m, gs in dense.items()}
            stacks = {m: each.stack for m, each in sent.items()}
            of_state = LeafwiseState._make((WHOLE, spec, WHOLE))
            call = self.owners.on_devices(
                on_device, mesh, (spec, of_state, WHOLE), (spec, of_state)
            )
            done, state = call(stacks, state, extra)
            return {m: [x[0] for x in sent[m].back(done[m])] for m in dense}, state

        specs = lambda _, dense, state, extra: jax.tree.map(spec_of, (dense, state))
        done, state = automatically(step, specs)(dense, state, extra)
        updates = dict[int, Any].fromkeys(itertools.chain(*classes))
        for of_class, results in done.items():
            for i, g, u in zip(of_class, given[of_class], results, strict=True):
                updates[i] = None if g is None else saturating_cast(u, g.dtype)
        return updates, state

    def _where_given(self, given: Any, old: Any, new: Any) -> Any:
        """The new slots, and the old ones of matrices without a gradient."""
        missing = {m: [g is None for g in gs] for m, gs in given.items()}
        devices = jax.lax.axis_size(self.owners.axes)

        def choose(old, new):
            arrays = jax.tree.leaves(old)
            if not is_stack(old) or not any(missing[members(old)]) or not arrays:
                return new
            here = len(arrays[0])
            all_missing = np.zeros(here * devices, bool)
            all_missing[: len(missing[members(old)])] = missing[members(old)]
            start = jax.lax.axis_index(self.owners.axes) * here
            mine = jax.lax.dynamic_slice_in_dim(jnp.asarray(all_missing), start, here)
            pick = lambda a, b: jnp.where(mine.reshape(here, *[1] * (a.ndim - 1)), a, b)
            return jax.tree.map(pick, old, new)

        return jax.tree.map(choose, old, new, is_leaf=is_stack)

    def _apart(self, extra: Any) -> Any:
        """The keywords of an update; each device rounds with different random bits."""
        if ROUNDING not in extra:
            return extra
        index = jax.lax.axis_index(self.owners.axes).astype(jnp.uint32)
        rounding = extra[ROUNDING]
        seed = rounding.seed + index * np.uint32(STREAM)
        return {**extra, ROUNDING: rounding._replace(seed=seed)}

    # Which matrices belong together

    def _classes(self, nodes: Sequence[Any]) -> list[Members]:
        """The matrices of each shape and dtype."""
        classes = collections.defaultdict[Any, list[int]](list)
        for i, x in enumerate(nodes):
            is_array = hasattr(x, "shape") and not is_rows(x)
            if is_array and is_trainable(x) and self.has_owner(jnp.shape(x)):
                classes[jnp.shape(x), jnp.result_type(x)].append(i)
        return [tuple(positions) for positions in classes.values()]

    def _classes_of(self, state: OwnersState, number: int) -> list[Members]:
        """The same classes, read from the state of ``number`` parameters."""
        classes = dict[Members, None]()
        for node in stacks_in(state.matrices):
            if axes_of_owners(node) != self.owners.axes or members(node)[-1] >= number:
                raise misfit(
                    f"matrices with owners={self.owners.axes}, of {number} parameters",
                    f"the matrices {members(node)} with owners={axes_of_owners(node)}",
                )
            classes[members(node)] = None
        return [*classes]

    def _here(self, number: int, mesh: Any) -> int:
        """The number of matrices of one shape in an array of a state, with padding."""
        devices = devices_along(mesh, self.owners.axes)
        return -(-number // devices) * (1 if self.owners.are_manual(mesh) else devices)

    def _check_devices(self, state: LeafwiseState, mesh: Any) -> None:
        """Raises ``StateError`` if a state is divided over a different number of devices."""
        for node in stacks_in(state):
            here = self._here(len(members(node)), mesh)
            for array in jax.tree.leaves(node):
                if len(array) != here:
                    raise StateError(
                        f"the state has {len(array)} places for {len(members(node))} matrices, "
                        f"but {devices_along(mesh, self.owners.axes)} owners need {here}: convert "
                        "a state of another number of devices with optzoo.state.slots_like; in a "
                        "shard_map, divide it as optzoo.state_sharding says"
                    )

    def _in_stacks(self, nodes: Sequence[Any], treedef: Any, stacks: dict[Members, Any]) -> Any:
        """A tree of stacks, made of their arrays."""
        made = {m[0]: stack_of(m, x, self.owners.axes) for m, x in stacks.items()}
        return treedef.unflatten([made.get(i, optax.MaskedNode()) for i in range(len(nodes))])

    def _on_mesh(self, make: Callable[[], LeafwiseState], mesh: Any, nodes: Any) -> LeafwiseState:
        """A new state, divided over the owners."""
        shapes, spec = jax.eval_shape(make), PartitionSpec(self.owners.axes)
        tree = jax.tree.map(lambda _: WHOLE, shapes)
        specs = tree._replace(slots=jax.tree.map(lambda _: spec, shapes.slots))
        if any(isinstance(x, jax.core.Tracer) for x in nodes):
            place = lambda x, spec: x if spec == WHOLE else constrained(x, mesh, spec)
            return jax.tree.map(place, make(), specs)
        meshes = (getattr(place_of(x), "mesh", None) for x in nodes)
        mesh = next(filter(None, meshes), None) or jax.sharding.get_mesh()
        place = lambda x, spec: as_typed(NamedSharding(mesh, spec), x.ndim)
        return jax.jit(make, out_shardings=jax.tree.map(place, shapes, specs))()


def _dense(gs: Sequence[Any]) -> list[Array]:
    """Gradients of one shape in one dtype, with zeros for missing ones; None if all are missing."""
    arrays = [g.to_dense() if is_rows(g) else g for g in gs]
    some = [g for g in arrays if g is not None]
    if not some:
        return []
    dtype = jnp.result_type(*some)
    return [(jnp.zeros_like(some[0]) if g is None else g).astype(dtype) for g in arrays]
