"""Raises an error that names the first gradient that is not finite."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax

from ..core.checks import check_update_arguments
from ..core.gradients import check_arrays
from ..core.norms import over_shards
from ..core.numerics import next_count
from ..core.optimizer import About, Optimizer, recorded
from ..core.paths import leaves_with_path, path_name
from ..core.rows import is_rows, is_sparse_or_none
from ..core.short import short_repr
from ..distributed.engine.collectives import AxisName
from ..jaxprs.reads import note_reads

_KINDS = ("finite", "infinite", "NaN")


class CheckNumericsState(NamedTuple):
    """The number of steps checked so far."""

    count: Array

    __repr__ = short_repr


@recorded
def check_numerics(
    what: str = "gradient", *, axis_name: AxisName = "replica"
) -> optax.GradientTransformationExtraArgs:
    """Raises an error at NaN or infinity, as ``tf.check_numerics``.

    The error is a ``FloatingPointError`` with the path of the first leaf that is not finite, the
    kind of its value, the step and, with several replicas, the index of one that has it. In
    compiled code its text is part of a ``jax.errors.JaxRuntimeError``, raised when the step is run
    or, at the latest, when the program waits for one of its results. The check works under ``jit``,
    ``scan`` and ``vmap``. Gradients are returned unchanged.

    The check reads all leaves once more. The host is called only if a value is not finite, but
    under ``vmap`` in every step. JAX does not store programs with this check in its compilation
    cache.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.transforms.check_numerics()
        >>> try:
        ...     tx.update({"w": jnp.array([1.0, jnp.nan])}, tx.init(None))
        ... except FloatingPointError as error:
        ...     print(error)
        the gradient of parameter 'w' is NaN at step 0; 1 of 1 leaves are not finite

    Args:
        what: the word for the leaves in the error, such as ``"update"`` for a check after the
            optimizer.
        axis_name: the axis, or axes, of the replicas; without such an axis, the error names no
            replica. Inside :func:`optzoo.sync_replicas` and :func:`optzoo.drop_stale_gradient` the
            gradients of all replicas are equal: put the check before them.

    References:
        ``tf.check_numerics``; ``returnn.tf.updater``, option ``debug_add_check_numerics_ops``.
    """
    reads = frozenset({"global_step"})

    def init(params):
        del params
        return CheckNumericsState(jnp.zeros([], jnp.int32))

    def update(updates, state, params=None, *, global_step=None, **extra_args):
        check_update_arguments({"global_step": global_step, **extra_args})
        note_reads(extra_args, reads)
        del params
        step = state.count if global_step is None else global_step
        check_arrays(updates)
        raise_if_bad(updates, what, step, axis_name)
        return updates, CheckNumericsState(next_count(state.count))

    return Optimizer(init, update, About(reads=reads))


def raise_if_bad(updates: Any, what: str, step: Any, axis_name: AxisName = None) -> None:
    """Raises the error of :func:`check_numerics`, in eager or compiled code."""
    leaves = leaves_with_path(updates, is_leaf=is_sparse_or_none)
    named = {path_name(path): g for path, g in leaves if g is not None}
    if not named:
        return
    gs = list(named.values())
    kinds = jnp.stack(over_shards(gs, list(map(_kind, gs)), lax.pmax))

    def report(kinds, step, *replica):
        if np.any(kinds):  # under vmap every step calls this
            i = int(np.argmax(kinds > 0))
            where = "".join(f" on replica {index}" for index in replica)
            raise FloatingPointError(
                f"the {what} of parameter '{list(named)[i]}' is {_KINDS[kinds[i]]} at step {step}"
                f"{where}; {np.count_nonzero(kinds)} of {len(kinds)} leaves are not finite"
            )

    if not isinstance(kinds, jax.core.Tracer) and not isinstance(step, jax.core.Tracer):
        return report(np.asarray(kinds), step)
    # The only callback of JAX that raises under a conditional in a vmap, too.
    replica = _replica(axis_name)
    call_report = lambda: jax.debug.callback(report, kinds, jnp.asarray(step), *replica)
    lax.cond(jnp.any(kinds > 0), call_report, lambda: None)


def _replica(axis_name: AxisName) -> list[Array]:
    """The number of this replica, if there are any."""
    try:
        return [] if axis_name is None else [lax.axis_index(axis_name)]
    except NameError:
        return []


def _kind(g: Any) -> Array:
    values = g.drop_padding().values if is_rows(g) else jnp.asarray(g)
    has_nan, has_bad = jnp.any(jnp.isnan(values)), ~jnp.all(jnp.isfinite(values))
    return has_nan.astype(jnp.int8) + has_bad.astype(jnp.int8)
