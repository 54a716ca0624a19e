"""States divided over data-parallel devices (ZeRO)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ..core.checks import check_size
from ..core.gradients import check_gradients
from ..core.lines import is_lines
from ..core.meshes import check_axes, constrained, explicit_axes, mesh_of, spec_of
from ..core.optimizer import Optimizer
from ..core.paths import check_mask, flatten_with_path, path_name, resolve_mask
from ..core.rows import is_rows
from ..state.inner import fitting, inner_transformation
from ..state.sharding import state_sharding

MIN_SIZE = (
    2**14
)  # elements of a parameter whose slots are divided: a collective costs more than less


def divide_states(
    inner: optax.GradientTransformation,
    axis: str | tuple[str, ...],
    *,
    specs: Any = None,
    mask: Any = None,
    min_size: int = MIN_SIZE,
) -> optax.GradientTransformationExtraArgs:
    r"""Divides the state of any transformation over data-parallel devices, as in ZeRO.

    Each parameter that is whole along the mesh axis ``axis`` has slots that are divided along it: in
    the largest dimension that the number of devices divides and no other mesh axis does, the last
    dimension only if there is no other. ``update`` brings gradients and parameters into this sharding, so that each device
    computes its share of the update, and the updates back into the sharding of the parameters:

    .. math::
        (u_d, s_d) = \mathrm{inner}(g_d, s_d, x_d), \qquad u = (u_1, \dots, u_n)

    The values are those of ``inner``, and so are the structure of the state and its checkpoints: a
    state that was saved divided is restored on any number of devices, and without this wrapper.

    Not divided are the slots of parameters that ``axis`` divides already (FSDP), which have their
    sharding; of those with fewer than ``min_size`` elements; and of those without such a dimension.
    :func:`optzoo.state_sharding` says where everything is, and
    :meth:`optzoo.compiled.CompileReport.require` checks that a compiled step keeps it there.

    It must be the outermost transformation, around chains and other wrappers.

    Example:
        >>> import jax, jax.numpy as jnp, optzoo
        >>> from jax.sharding import NamedSharding, PartitionSpec
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> whole = NamedSharding(mesh, PartitionSpec())
        >>> params = {"w": jax.device_put(jnp.ones((128, 256)), whole)}
        >>> state = optzoo.divide_states(optzoo.adam(1e-3), "data").init(params)
        >>> print(optzoo.get_slot(state, "m")["w"].sharding.spec)
        PartitionSpec(None, 'data')

    Args:
        inner: the transformation.
        axis: the mesh axis, or axes, of data-parallel devices. The mesh is that of the parameters,
            or of ``jax.set_mesh``.
        specs: how the parameters are divided, a tree of ``PartitionSpec`` like them. On automatic
            axes their types do not say it; None there means that they are whole. On explicit axes
            it is None.
        mask: of which parameters the slots are divided: patterns of names, a tree of bools, or a
            function (:func:`optzoo.param_groups`); None for all.
        min_size: of how many elements a parameter must be, at least 0.

    Raises:
        TypeError: if an argument is of the wrong kind.
        ValueError: if the mesh has no such axis; if a parameter that is divided over automatic axes
            has no spec; in ``update``, if a gradient is row-sparse, or within ``shard_map``.

    References:
        Rajbhandari et al., `ZeRO: Memory Optimizations Toward Training Trillion Parameter Models
        <https://arxiv.org/abs/1910.02054>`_, 2020 (stages 1 and 2).
    """
    inner = inner_transformation(inner=inner)
    check_mask(mask=mask)
    axes = (axis,) if isinstance(axis, str) else axis
    is_axes = isinstance(axes, tuple | list) and all(isinstance(name, str) for name in axes)
    if not is_axes or not axes:
        raise TypeError(f"axis must be the name of a mesh axis, or a tuple of names, got {axis!r}")
    division = _Division(tuple(axes), specs, mask, check_size(min_size=min_size))
    divide = lambda params: division.plan(params).shapes(params)

    def init(params):
        if not jax.tree.leaves(params):  # a placeholder, for all parameters
            return inner.init(params)
        plan = division.plan(params)
        shares, places = plan.divided(params), state_sharding(inner, plan.shapes(params))
        if _is_traced(params):
            return _constrained_state(inner.init(shares), places)
        return jax.jit(inner.init, out_shardings=places)(shares)

    def update(updates, state, params=None, **extra_args):
        check_gradients(updates, params)
        like = updates if params is None else params
        plan = division.plan(like)
        xs = None if params is None else plan.divided(params)
        news, state = inner.update(plan.divided(updates), state, xs, **extra_args)
        if _is_traced(like):
            state = _constrained_state(state, state_sharding(inner, plan.shapes(like)))
        return plan.whole(news), state

    return fitting(Optimizer(init, update, inner.about._replace(divide=divide)))


class _Division(NamedTuple):
    """Which parameters have slots that are divided, and over which axes."""

    axes: tuple[str, ...]
    specs: Any
    mask: Any
    min_size: int

    def plan(self, params: Any) -> _Plan:
        """How the parameters, or gradients in their place, are divided, and how their slots."""
        is_leaf = lambda x: x is None or is_lines(x)
        leaves, treedef = flatten_with_path(params, is_leaf)
        mesh = self._mesh([x for _, x in leaves])
        size = check_axes(mesh, self.axes, "axis= one of these")
        specs = [None] * len(leaves) if self.specs is None else treedef.flatten_up_to(self.specs)
        marks = [True] * len(leaves)
        if self.mask is not None:
            marks = treedef.flatten_up_to(resolve_mask(self.mask, params))
        places = list[_Place | None]()
        for (path, x), spec, mark in zip(leaves, specs, marks, strict=True):
            if is_leaf(x):
                places.append(None)
                continue
            given = self._given(path_name(path), x, mesh, spec)
            share = self._share(jnp.shape(x), given, size) if mark else given
            places.append(_Place(path_name(path), given, share))
        return _Plan(mesh, treedef, places)

    def _mesh(self, leaves: Sequence[Any]) -> Any:
        """That of the parameters, or of ``jax.set_mesh``."""
        of_shapes = (
            getattr(getattr(x, "sharding", None), "mesh", None)
            for x in leaves
            if not isinstance(x, jax.core.Tracer)
        )
        mesh = next(filter(None, of_shapes), None) or mesh_of(leaves)
        mesh = jax.sharding.get_abstract_mesh() if mesh.empty else mesh
        if mesh.empty:
            raise ValueError(
                f"axis={self.axes} needs a mesh with these axes: put the parameters on it, or call "
                "jax.set_mesh before"
            )
        check_axes(mesh, self.axes, "axis= one of these")
        kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
        mine = {kinds[name] for name in self.axes}
        if AxisType.Manual in mine:
            raise ValueError(
                f"axis={self.axes} is an axis of the shard_map around the update, in which each "
                "device has arrays of its own: call init and update outside of it"
            )
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


class _Place(NamedTuple):
    """A parameter by its name, how it is divided, and how its slots are."""

    name: str
    given: PartitionSpec
    share: PartitionSpec


class _Plan(NamedTuple):
    """Where parameters, gradients and slots are; None for those that are left alone."""

    mesh: Any
    treedef: Any
    places: list[_Place | None]

    def divided(self, tree: Any) -> Any:
        """Arrays like the parameters, as their slots are divided."""

        def move(x, place):
            if is_rows(x):
                raise ValueError(
                    f"parameter '{place.name}' has a row-sparse gradient: divide_states is for "
                    "dense ones, so leave this parameter out by mask="
                )
            return constrained(x, self.mesh, place.share)

        return self._map(move, tree)

    def whole(self, tree: Any) -> Any:
        """The same, as the parameters are divided."""
        return self._map(lambda x, place: constrained(x, self.mesh, place.given), tree)

    def shapes(self, params: Any) -> Any:
        """The shapes of parameters that are divided as their slots."""
        of = lambda x, place: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(self.mesh, place.share)
        )
        return self._map(of, params)

    def _map(self, f: Callable[[Any, _Place], Any], tree: Any) -> Any:
        pairs = zip(self.treedef.flatten_up_to(tree), self.places, strict=True)
        return self.treedef.unflatten(
            [x if x is None or place is None else f(x, place) for x, place in pairs]
        )


def _is_traced(params: Any) -> bool:
    return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(params))


def _constrained_state(state: Any, places: Any) -> Any:
    """A state that is computed in a program, on automatic axes; on others its types say it."""

    def place(x, sharding):
        if explicit_axes(sharding.mesh):
            return x
        return jax.lax.with_sharding_constraint(x, sharding)

    return jax.tree.map(place, state, places)
