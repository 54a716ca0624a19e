"""States divided over data-parallel devices (ZeRO)."""

from __future__ import annotations

from typing import Any

import jax
import optax

from ..core.checks import check_size
from ..core.gradients import check_gradients
from ..core.optimizer import Optimizer, recorded
from ..core.paths import check_mask
from ..state.device_shares import init_shares, update_shares
from ..state.division import Division, is_traced, kept
from ..state.inner import fitting, inner_transformation
from ..state.sharding import state_sharding

MIN_SIZE = (
    2**14
)  # elements of a parameter whose slots are divided: a collective costs more than less


@recorded
def divide_states(
    inner: optax.GradientTransformation,
    axis: str | tuple[str, ...],
    *,
    specs: Any = None,
    mask: Any = None,
    min_size: int = MIN_SIZE,
) -> optax.GradientTransformationExtraArgs:
    r"""Divides the state of any transformation over data-parallel devices, as in ZeRO.

    The slots of each parameter that is replicated along the mesh axis ``axis`` are sharded along
    it: in the largest dimension that is divisible by the number of devices and not sharded by
    another mesh axis; in the last dimension only if there is no other. ``update`` reshards
    gradients and parameters in this way, each device computes its share of the update, and the
    updates are resharded like the parameters:

    .. math::
        (u_d, s_d) = \mathrm{inner}(g_d, s_d, x_d), \qquad u = (u_1, \dots, u_n)

    The values, the structure of the state and its checkpoints are those of ``inner``: a checkpoint
    can be restored on any number of devices, and without this wrapper.

    Slots are not divided if their parameter is already sharded along ``axis`` (FSDP; they have its
    sharding), has fewer than ``min_size`` elements, or has no such dimension.
    :func:`optzoo.state_sharding` returns the shardings of the state, and
    :meth:`optzoo.compiled.CompileReport.require` checks that a compiled step preserves them.

    This wrapper must be the outermost transformation, around chains and other wrappers. In
    ``optzoo.minimize(..., mesh=mesh)`` each device receives its share of the mean gradients by a
    reduce-scatter, over one axis after the other.

    Inside ``jax.shard_map`` over ``axis``, parameters and gradients are replicated, and the state
    is the share of this device. Give ``shard_map`` the specs of :func:`optzoo.state_sharding` for
    the state. Here ``inner`` may compute each element from corresponding elements, and from sums,
    maxima and minima over all, such as the global norm; other programs are an error.

    Example:
        >>> import jax, jax.numpy as jnp, optzoo
        >>> from jax.sharding import NamedSharding, PartitionSpec
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> whole = NamedSharding(mesh, PartitionSpec())
        >>> params = {"w": jax.device_put(jnp.ones((128, 256)), whole)}
        >>> state = optzoo.divide_states(optzoo.adam(1e-3), "data").init(params)
        >>> print(optzoo.get_slot(state, "m")["w"].sharding.spec[0])
        data

    Args:
        inner: the transformation.
        axis: the mesh axis, or axes, of data-parallel devices. The mesh is that of the parameters,
            or of ``jax.set_mesh``.
        specs: the sharding of the parameters on automatic axes, a tree of ``PartitionSpec`` like
            them; None if they are replicated, or on explicit axes.
        mask: the parameters whose slots are divided: patterns of names, a tree of bools, or a
            function (:func:`optzoo.param_groups`); None for all.
        min_size: the smallest number of elements of a parameter whose slots are divided, at least
            0.

    Raises:
        TypeError: if an argument is of the wrong kind.
        ValueError: if the mesh has no such axis; if a parameter that is sharded over automatic axes
            has no spec; in ``update``, if a gradient is row-sparse; inside ``shard_map``, if the
            result for a share depends on other shares in another way, if a gradient differs among
            devices, or if the state is not the share of this device.

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
    division = Division(tuple(axes), specs, mask, check_size(min_size=min_size))
    divide = lambda params: division.plan(params).shapes(params)

    def init(params):
        if not jax.tree.leaves(params):  # a placeholder, for all parameters
            return inner.init(params)
        plan = division.plan(params)
        shares, places = plan.divided(params), state_sharding(inner, plan.shapes(params))
        if is_traced(params):
            return kept(inner.init(shares), places)
        return jax.jit(inner.init, out_shardings=places)(shares)

    def update(updates, state, params=None, **extra_args):
        check_gradients(updates, params)
        like = updates if params is None else params
        plan = division.plan(like)
        xs = None if params is None else plan.divided(params)
        news, state = inner.update(plan.divided(updates), state, xs, **extra_args)
        if is_traced(like):
            state = kept(state, state_sharding(inner, plan.shapes(like)))
        return plan.whole(news), state

    outside = fitting(Optimizer(init, update, inner.about._replace(divide=divide)))

    def init_anywhere(params):
        if division.is_on_device(params):
            return init_shares(inner, division.plan(params), params)
        return outside.init(params)

    def update_anywhere(updates, state, params=None, **extra_args):
        like = updates if params is None else params
        if division.is_on_device(like):
            check_gradients(updates, params)
            plan = division.plan(like)
            return update_shares(inner, plan, updates, state, params, extra_args)
        return outside.update(updates, state, params, **extra_args)

    return Optimizer(init_anywhere, update_anywhere, outside.about)
