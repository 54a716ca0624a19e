"""Steps that preserve the norms of parameters, around any optimizer."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from ..core.checks import check_params, check_rate
from ..core.gradients import check_gradients
from ..core.numerics import next_count, safe_divide
from ..core.optimizer import About, Optimizer, recorded
from ..core.paths import is_masked, leaves_with_path, path_name
from ..core.schedules import at_step
from ..core.short import short_repr
from ..state.deferred import has_deferred
from ..state.inner import fitting, inner_transformation
from ._dims import axes_of, check_dims, norms, update_to, with_axes


class HyperballState(NamedTuple):
    """The number of updates, and the state of the inner optimizer."""

    count: Array
    inner: Any

    __repr__ = short_repr


@recorded
def hyperball(
    inner: optax.GradientTransformation, learning_rate: optax.ScalarOrSchedule, dims: Any
) -> optax.GradientTransformationExtraArgs:
    r"""Keeps the norms of parameters constant, with steps of a given size relative to them.

    .. math::
        x' &= x_{t-1} + \eta_t\, \lVert x_{t-1} \rVert \frac{u_t}{\lVert u_t \rVert} \\
        x_t &= x' \cdot \frac{\lVert x_{t-1} \rVert}{\lVert x' \rVert}

    where :math:`u_t` is the update of ``inner``, of which only the direction is used, and the norm
    is over the given axes: ``(0, 1)`` for a matrix, ``(1, 2)`` for each matrix of a stack of
    layers, ``(1,)`` for each row of a table. With :func:`optzoo.muon` this is MuonH, with Adam it
    is AdamH. The constant norm replaces weight decay.

    Parameters without axes, and those without a gradient, are updated by ``inner``. If a gradient
    is row-sparse, the update contains the rows that ``inner`` moves, or the whole parameter if the
    axes include axis 0. If the update or the parameter is zero, the parameter does not move.

    The wrapper must be the last transformation of a chain, since it uses the parameters plus this
    update.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.hyperball(optzoo.gradient_descent(1.0), 0.75, {"kernel": (0, 1)})
        >>> params = {"kernel": jnp.array([[4.0], [0.0]]), "bias": jnp.zeros(1)}
        >>> gradients = {"kernel": jnp.array([[0.0], [-9.0]]), "bias": jnp.ones(1)}
        >>> updates, state = tx.update(gradients, tx.init(params), params)
        >>> print(params["kernel"] + updates["kernel"])  # the norm is 4, as before
        [[3.2]
         [2.4]]

    Args:
        inner: a complete optimizer without weight decay for these parameters; its learning rate
            affects other parameters only, and must not be zero. For separate schedules, use
            :func:`optzoo.param_groups`.
        learning_rate: :math:`\eta`, the size of a step relative to the norm, a number or a schedule
            called with the number of updates before this one (or with ``update(...,
            global_step=)``). ``update(..., learning_rate=)`` replaces the rates of this wrapper and
            of ``inner``.
        dims: a dict from patterns to axes, such as ``{".*/kernel": (0, 1)}``, by patterns of
            names (:func:`optzoo.param_groups`); or a tree like the parameters with a tuple of axes,
            or None, for each.

    Raises:
        ValueError: if ``learning_rate`` is not finite, if no params are given to ``update``, if a
            pattern matches no parameter, if two patterns with different axes match the same
            parameter, if a parameter has no such axis, or if ``inner`` has deferred rows; in
            ``init`` outside ``jit``, if all elements of a parameter with axes are zero.

    References:
        Wen et al., `From Weight Decay to Hyperball Optimization
        <https://whenwen.github.io/wd_blog/public/hyperball-part-1.html>`_, 2025; ``MuonH`` and
        ``AdamH`` of `modded-nanogpt <https://github.com/KellerJordan/modded-nanogpt>`_

    Differences from the original:
        The original shortens steps whose direction has a norm below 1e-10.
    """
    inner = inner_transformation(inner=inner)
    check_rate(learning_rate)
    check_dims(dims)

    def init(params):
        _check_not_zero(dims, params)
        return HyperballState(jnp.zeros([], jnp.int32), inner.init(params))

    def update(updates, state, params=None, **extra_args):
        check_params(params)
        check_gradients(updates, params)
        if has_deferred(state):
            raise ValueError(
                "hyperball is incompatible with the deferred rows of optzoo.caught_up: give each "
                "its own parameters by optzoo.param_groups"
            )
        directions, new = inner.update(updates, state.inner, params, **extra_args)
        step = extra_args.get("global_step")
        step = state.count if step is None else step
        rate = at_step("learning_rate", step, learning_rate, extra_args.get("learning_rate"))

        def turn(g, u, x, axes):
            """The update that rotates the parameter without a change of its norm."""

            def turned(u, x):
                radius, length = norms(g, axes, x, u)
                new = x + u * safe_divide(jnp.asarray(rate, x.dtype) * radius, length)
                [norm] = norms(g, axes, new)
                return new * safe_divide(radius, norm)

            return update_to(turned, g, u, x, axes)

        updates = with_axes(turn, dims, updates, directions, params)
        return updates, HyperballState(next_count(state.count), new)

    about = About(reads=inner.about.reads).reading("global_step", "learning_rate")
    return fitting(Optimizer(init, update, about), moves="hyperball")


def _check_not_zero(dims: Any, params: Any) -> None:
    """Raises ``ValueError`` if a concrete parameter that must keep its norm is zero."""
    axes = jax.tree.structure(params).flatten_up_to(axes_of(dims, params))
    for (path, x), of_x in zip(leaves_with_path(params), axes, strict=True):
        if of_x is None or is_masked(x) or not isinstance(x, jax.Array) or x.size == 0:
            continue
        if isinstance(x, jax.core.Tracer) or not x.is_fully_addressable:
            continue
        with jax.ensure_compile_time_eval():  # an array that jit closes over is known
            is_zero = not jnp.any(x)
        if is_zero:
            raise ValueError(
                f"dims: parameter '{path_name(path)}' is zero, and its norm would stay zero: give "
                "it other initial values, or leave it out"
            )
