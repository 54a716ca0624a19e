"""Stops at the first gradient that is not finite, and says which."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax

from ..core.paths import path_name
from ..core.rows import is_rows, is_sparse_or_none

_KINDS = ("finite", "infinite", "NaN")


class CheckNumericsState(NamedTuple):
    """How many steps were checked."""

    count: Array


def check_numerics(what: str = "gradient") -> optax.GradientTransformationExtraArgs:
    """Raises at NaN or infinity, as ``tf.check_numerics`` and RETURNN's option for it do.

    The error is a ``FloatingPointError`` that names the first bad leaf by its path, what is in it
    and the step. From compiled code it comes as the text of a ``jax.errors.JaxRuntimeError``, when
    the step is run or, at the latest, when a result of it is waited for. Works under ``jit``,
    ``scan`` and ``vmap``. Numbers pass unchanged.

    It costs a pass over all leaves. The host is called on bad steps only, but under ``vmap`` on
    all of them. A program with it is not kept in JAX's compilation cache.

    Args:
        what: the word for the leaves in the error: a check behind the optimizer is one of the
            ``"update"``.

    References:
        ``tf.check_numerics``; ``returnn.tf.updater``, option ``debug_add_check_numerics_ops``.
    """

    def init(params):
        del params
        return CheckNumericsState(jnp.zeros([], jnp.int32))

    def update(updates, state, params=None, *, global_step=None, **extra_args):
        del params, extra_args
        raise_if_bad(updates, what, state.count if global_step is None else global_step)
        return updates, CheckNumericsState(jnp.asarray(optax.safe_increment(state.count)))

    return optax.GradientTransformationExtraArgs(init, update)


def raise_if_bad(updates: Any, what: str, step: Any) -> None:
    """The check itself."""
    leaves = jax.tree_util.tree_leaves_with_path(updates, is_leaf=is_sparse_or_none)
    named = {path_name(path): g for path, g in leaves if g is not None}
    if not named:
        return
    kinds = jnp.stack([_kind(g) for g in named.values()])

    def report(kinds, step):
        if np.any(kinds):  # under vmap all steps come here
            i = int(np.argmax(kinds > 0))
            raise FloatingPointError(
                f"the {what} of parameter '{list(named)[i]}' is {_KINDS[kinds[i]]} at step {step}; "
                f"{np.count_nonzero(kinds)} of {len(kinds)} leaves are not finite"
            )

    if not isinstance(kinds, jax.core.Tracer) and not isinstance(step, jax.core.Tracer):
        return report(np.asarray(kinds), step)
    # Of JAX's callbacks this is the one that raises under a conditional in a vmap as well.
    tell = lambda: jax.debug.callback(report, kinds, jnp.asarray(step))
    lax.cond(jnp.any(kinds > 0), tell, lambda: None)


def _kind(g: Any) -> Array:
    values = g.drop_padding().values if is_rows(g) else jnp.asarray(g)
    has_nan, has_bad = jnp.any(jnp.isnan(values)), ~jnp.all(jnp.isfinite(values))
    return has_nan.astype(jnp.int8) + has_bad.astype(jnp.int8)
