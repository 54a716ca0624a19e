"""Parameters in bfloat16 whose lower bits are stored in the state."""

from __future__ import annotations

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax

from ..core.checks import check_choice, check_params
from ..core.compat import custom_jvp
from ..core.donation import unshared
from ..core.gradients import check_gradients
from ..core.optimizer import Optimizer, recorded
from ..core.paths import is_masked
from ..core.rows import is_rows
from ..state.fit import StateError
from ..state.inner import fitting, inner_transformation
from ..state.stacks import is_stack
from ..state.types import MasterWeightsState, map_nodes, nodes_of

_DTYPES = {24: jnp.int8, 32: jnp.int16}
_UPPER, _SIGN = np.uint32(16), np.uint32(0x80000000)
_INFINITY, _GREATEST = np.uint32(0x7F800000), np.uint32(0x7F7F0000)
_NAN = np.asarray(np.nan, jnp.bfloat16)  # of NumPy, so that it may be made where NaN is an error


@recorded
def master_weights(
    inner: optax.GradientTransformation, bits: Literal[24, 32] = 24
) -> optax.GradientTransformationExtraArgs:
    r"""Parameters in bfloat16 that train as if they had 24 or 32 bits.

    A parameter :math:`x` has the upper 16 bits of a number, and the state has a correction
    :math:`c` of 8 or 16 bits. ``inner`` reads and updates their sum, in float32:

    .. math::
        w_{t-1} &= x_{t-1} + c_{t-1}\, \frac{\Delta(x_{t-1})}{2^b}, \qquad b = 8, 16 \\
        w_t &= w_{t-1} + u_t(g_t, w_{t-1}) \\
        x_t &= \operatorname{bfloat16}(w_t)

    where :math:`\Delta(x)` is the distance from :math:`x` to the next number in bfloat16 on the
    side of the correction. With 16 bits the sum is a float32; with 8 bits its last 8 bits are zero,
    and its relative resolution is :math:`2^{-16}` (bfloat16: :math:`2^{-8}`). A parameter needs 3
    or 4 bytes of memory, of which the model reads 2. Ties are rounded away from zero.

    If a parameter is changed outside the optimizer, by a checkpoint or a projection, the sum is the
    new value up to half of its last place. Parameters of other dtypes have no correction and are
    passed to ``inner`` unchanged. ``inner`` receives gradients in float32. The cost of a table
    update scales with the rows that a batch touches, if ``inner`` is lazy.

    The wrapper must be the last transformation of a chain. Its updates are float32, such that
    adding them gives :math:`x_t`: add them unchanged, and row-sparse updates by
    ``optax.apply_updates`` in the same traced function. ``optax.apply_if_finite`` expects updates
    of the gradients' dtype, so put it inside: ``master_weights(optax.apply_if_finite(tx, 5))``.

    Example:
        >>> import jax, jax.numpy as jnp, optax, optzoo
        >>> tx = optzoo.master_weights(optzoo.gradient_descent(1e-3))
        >>> params = jnp.ones(1, jnp.bfloat16)
        >>> state = tx.init(params)
        >>> for _ in range(4):  # bfloat16 has no number between 1 and 0.996
        ...     updates, state = tx.update(jnp.ones(1, jnp.bfloat16), state, params)
        ...     params = optax.apply_updates(params, updates)
        >>> print(params, optzoo.wide_params(params, state))
        [0.996094] [0.996]

    Args:
        inner: a complete optimizer, including its learning rate.
        bits: 24, with corrections in int8, or 32, in int16.

    Raises:
        TypeError: if ``inner`` is not a transformation; if an update is differentiated.
        ValueError: if ``bits`` is not 24 or 32; in ``init``, if no parameter is bfloat16; in
            ``update``, if no params are given.

    References:
        Ortiz et al., `FlashOptim: Optimizers for Memory Efficient Training
        <https://arxiv.org/abs/2602.23349>`_, 2026. The paper's correction has 255 values between
        minus and plus half of the distance; here it has 256, and the sum is a number of 24 bits.
    """
    inner = inner_transformation(inner=inner)
    check_choice(_DTYPES, bits=bits)
    dtype = _DTYPES[bits]

    def init(params):
        zeros = lambda x: jnp.zeros_like(x, dtype=dtype) if _is_split(x) else ()
        corrections = jax.tree.map(zeros, params)
        if jax.tree.leaves(params) and not jax.tree.leaves(corrections):
            raise ValueError(
                "params: no parameter is bfloat16, so master_weights has nothing to correct; "
                "split float32 parameters with optzoo.split_params, or leave master_weights out"
            )
        return MasterWeightsState(inner.init(_wide(params, corrections)), corrections)

    def update(updates, state, params=None, **extra_args):
        check_params(params)
        gs, xs, treedef = check_gradients(updates, params)
        cs = treedef.flatten_up_to(state.corrections)
        widened = [
            g if g is None or not _is_split(x) else g.astype(jnp.float32)
            for g, x in zip(gs, xs, strict=True)
        ]
        us, inner_state = inner.update(
            treedef.unflatten(widened), state.inner, _wide(params, state.corrections), **extra_args
        )
        us = treedef.flatten_up_to(us)
        pairs = [_step(u, x, c) for u, x, c in zip(us, xs, cs, strict=True)]
        updates, cs = (treedef.unflatten(each) for each in zip(*pairs, strict=True))
        return updates, MasterWeightsState(inner_state, cs)

    return fitting(Optimizer(init, update, inner.about._replace(deferral=None)))


def wide_params(params: Any, state: Any) -> Any:
    """The parameters with their corrections, in float32, for evaluation or a checkpoint.

    Outside ``jit`` the arrays are copies, so they remain valid when a step donates its arguments.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.master_weights(optzoo.adam(0.1))
        >>> params, state = optzoo.split_params(jnp.array([0.1, 1.0]), tx)
        >>> print(params.dtype, optzoo.wide_params(params, state))
        bfloat16 [0.1 1. ]

    Args:
        params: the parameters of the model.
        state: a state that contains that of :func:`optzoo.master_weights`.

    Raises:
        ValueError: if the state does not contain exactly one such state, or if it belongs to other
            parameters.
    """
    return unshared(_wide(params, _state_of(state).corrections), params)


def split_params(wide: Any, tx: optax.GradientTransformation) -> tuple[Any, Any]:
    """Splits float32 parameters into bfloat16 parameters and a new state with the other bits.

    To continue a float32 run, or a checkpoint of TensorFlow 1, insert the state of the inner
    optimizer: ``state._replace(inner=loaded)``.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.master_weights(optzoo.adam(0.1), bits=32)
        >>> params, state = optzoo.split_params(jnp.array([0.1]), tx)
        >>> print(params, optzoo.wide_params(params, state))
        [0.100098] [0.1]

    Args:
        wide: parameters; those in float32 are split.
        tx: :func:`optzoo.master_weights`, or a transformation that contains it.

    Raises:
        ValueError: if the state of ``tx`` does not contain exactly one state of
            :func:`optzoo.master_weights`.
    """
    is_wide = lambda x: jnp.result_type(x) == jnp.float32
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if is_wide(x) else x, wide)
    state = tx.init(params)
    leaves, treedef = jax.tree.flatten(wide)
    cs = treedef.flatten_up_to(_state_of(state).corrections)
    pairs = [_split(x, c.dtype) if is_wide(x) else (x, c) for x, c in zip(leaves, cs, strict=True)]
    params, corrections = (treedef.unflatten(each) for each in zip(*pairs, strict=True))
    change = lambda node: node._replace(corrections=corrections)
    return unshared(params, wide), map_nodes(MasterWeightsState, change, state)


def _state_of(state: Any) -> MasterWeightsState:
    found = nodes_of(MasterWeightsState, state)
    if len(found) != 1:
        raise StateError(f"state must contain one state of optzoo.master_weights, got {len(found)}")
    is_no_array = lambda c: is_masked(c) or is_stack(c)
    if any(map(is_no_array, jax.tree.leaves(found[0].corrections, is_leaf=is_no_array))):
        raise StateError(
            "state: master_weights is inside groups, a mask or optzoo.stacked, so that its "
            "corrections do not match the parameters: put master_weights around them"
        )
    return found[0]


def _is_split(x: Any) -> bool:
    return jnp.result_type(x) == jnp.bfloat16


def _wide(params: Any, corrections: Any) -> Any:
    leaves, treedef = jax.tree.flatten(params)
    cs = treedef.flatten_up_to(corrections)
    joined = [_joined(x, c) if _is_split(x) else x for x, c in zip(leaves, cs, strict=True)]
    return treedef.unflatten(joined)


def _step(u: Any, x: Any, c: Any) -> tuple[Any, Any]:
    """The update of a parameter, and its new correction."""
    if u is None or not _is_split(x):
        return u, c
    if not is_rows(u):
        new, c = _split(_joined(x, c) + u, c.dtype)
        return new.astype(jnp.float32) - x.astype(jnp.float32), c
    u = u.coalesce()
    old = u.gather(x)
    new, few = _split(_joined(old, u.gather(c)) + u.values, c.dtype)
    moved = u.with_values(new.astype(jnp.float32) - old.astype(jnp.float32))
    return moved, u.scatter(c, few)


def _joined(x: Array, c: Array) -> Array:
    """The number with these upper 16 bits and this correction."""
    upper = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) << _UPPER
    magnitude = upper & ~_SIGN
    # Zero has no smaller magnitude, and what is not finite has no correction.
    c = jnp.where(magnitude == 0, jnp.maximum(c, 0), jnp.where(magnitude < _INFINITY, c, 0))
    units = c.astype(jnp.int32) << (16 - 8 * c.dtype.itemsize)
    return lax.bitcast_convert_type(upper + units.astype(jnp.uint32), jnp.float32)


@functools.partial(custom_jvp, nondiff_argnums=(1,))
def _split(wide: Array, dtype: Any) -> tuple[Array, Array]:
    """The inverse: the upper 16 bits, rounded to nearest, and the correction."""
    pattern = lax.bitcast_convert_type(wide.astype(jnp.float32), jnp.uint32)
    sign, magnitude = pattern & _SIGN, pattern & ~_SIGN
    info = jnp.iinfo(dtype)
    dropped = np.uint32(16 - info.bits)
    units = (magnitude + (np.uint32(1) << dropped >> np.uint32(1))) >> dropped
    upper = (units + np.uint32(info.max + 1)) >> np.uint32(info.bits) << _UPPER
    # A finite number stays finite.
    upper = jnp.where(magnitude < _INFINITY, jnp.minimum(upper, _GREATEST), magnitude)
    c = units.astype(jnp.int32) - (upper >> dropped).astype(jnp.int32)
    c = jnp.where(magnitude < _INFINITY, jnp.clip(c, info.min, info.max), 0)
    x = lax.bitcast_convert_type(((sign | upper) >> _UPPER).astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isnan(wide), _NAN, x), c.astype(dtype)


@_split.defjvp
def _(dtype, primals, tangents):
    raise TypeError(
        "optzoo.master_weights computes with bits, which have no derivative: differentiate the "
        "update of its inner optimizer instead"
    )
