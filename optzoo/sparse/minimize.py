"""The whole train step of a plain loop."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ..core.checks import check_transformation
from ..core.optimizer import about_of
from ..core.paths import path_name
from ..core.reads import check_all_read
from ..native.step import Native, apply_natively, check_native
from ..state.fit import refuse_swapped
from ..state.inner import fitting
from ..state.sleeping.tables import check_no_guard, has_sleepers
from .lookup import Sparse, check_differentiable, value_and_aux, value_and_grad
from .row_major import row_major
from .sleepers import Sleepers, final_update
from .sleepers_step import catch_up_for, train_step


def minimize(
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    has_aux: bool = False,
    *,
    sparse: Sparse = "warn",
    native: Native = False,
) -> Callable[..., Any]:
    """A compiled train step: the counterpart of TensorFlow's ``Optimizer.minimize``.

    Gradients of tables read by :func:`optzoo.lookup` are SparseRows. Parameters and state are
    donated: the step updates them in place, and the arrays passed in must not be used again.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> params = {"table": jnp.ones((6, 2))}
        >>> loss = lambda p, ids: jnp.sum(optzoo.lookup(p["table"], ids) ** 2)
        >>> tx = optzoo.lazy_adam(0.1)
        >>> step, state = optzoo.minimize(loss, tx), tx.init(params)
        >>> params, state, value = step(params, state, jnp.array([0, 3]))
        >>> float(value)
        4.0

    Args:
        loss_fn: ``loss_fn(params, *batch)`` returns a scalar, or ``(scalar, aux)``.
        tx: any optax transformation; put :func:`optzoo.densify` before one that does not support
            SparseRows.
        has_aux: whether ``loss_fn`` returns auxiliary data too.
        sparse: what to do where rows of a table are read and its gradient is dense: ``"warn"``,
            ``"require"`` (an error) or ``"allow"``, as in :func:`optzoo.value_and_grad`.
        native: whether the optimizer runs as native loops on the CPU, as in
            :func:`optzoo.native_step`; with ``"require"`` it is an error if not all of it does.

    Raises:
        TypeError: if ``tx`` is no transformation; at trace time, if nothing in ``tx`` reads one
            of the extra args.
        ValueError: as :func:`optzoo.value_and_grad`; if ``native`` is none of these; at trace time,
            if ``state`` is not one of ``tx`` for these parameters, if something in ``tx`` changes
            an update of :func:`optzoo.caught_up`, or if native code is required and XLA updates
            some arrays.
        RuntimeError: at trace time, if native code is required and cannot run.

    Returns:
        ``step(params, state, *batch, **extra_args) -> (params, state, loss)``, with ``aux`` as a
        fourth if ``has_aux``. The extra args, trees of arrays, go to ``tx.update``,
        which must read them.
    """
    check_transformation(tx=tx)
    check_native(native)
    differentiate = value_and_grad(loss_fn, has_aux=has_aux, sparse=sparse)

    def call(batch):
        return lambda params: value_and_aux(loss_fn(params, *batch), has_aux)

    if sleepers := about_of(tx).sleepers:
        check_native_sleepers(native)
        return _step_of_sleepers(call, sleepers, tx, has_aux, sparse)
    tx, apply = fitting(tx), applied(native)

    def step(params, state, *batch, **extra_args):
        check_all_differentiable(params)
        check_no_guard(state)
        if has_sleepers(state):
            params, state = catch_up_for(call(batch), params, state, sparse)
        out, grads = differentiate(params, *batch)
        params, grads = _in_this_order(params, grads)
        check_all_read(tx, functools.partial(tx.update, grads, state, params), extra_args)
        # In the order of the donated arguments: JAX pairs buffers by order, and a wrong pair
        # costs a copy of each table.
        params, state = apply(tx, params, state, grads, extra_args)
        return (params, state, *out) if has_aux else (params, state, out)

    return jax.jit(row_major(step), donate_argnums=(0, 1))


def _in_this_order(params: Any, grads: Any) -> tuple[Any, Any]:
    """The same; on GPUs all gradients are computed before a parameter changes.

    XLA for GPUs would repeat the gather of a lookup inside of the gradient of another parameter,
    after the update of the table, and copy the table for that. On TPUs this costs cycles.
    """
    barrier = jax.lax.optimization_barrier
    return jax.lax.platform_dependent(
        (params, grads), cuda=barrier, rocm=barrier, default=lambda both: both
    )


def check_all_differentiable(params: Any) -> None:
    """Raises ``TypeError`` if a parameter has no gradient; or ``StateError`` if it is a state."""
    refuse_swapped(params)
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        check_differentiable(x, lambda path=path: f"parameter '{path_name(path)}'")


def applied(native: Native) -> Callable[..., tuple[Any, Any]]:
    """``apply(tx, params, state, grads, extra_args) -> (params, state)``, whose update is final."""

    def apply(tx, params, state, grads, extra_args):
        updates, state = final_update(tx, grads, state, params, extra_args)
        return optax.apply_updates(params, updates), state

    if not native:
        return apply
    return functools.partial(apply_natively, apply, in_place="all", required=native == "require")


def check_native_sleepers(native: Native) -> None:
    """Raises ``ValueError`` if the update of :func:`optzoo.caught_up` must be native."""
    if native == "require":
        raise ValueError("native='require': XLA updates the rows of optzoo.caught_up; use True")


def _step_of_sleepers(
    call: Callable[[Any], Callable[[Any], tuple[Any, Any]]],
    sleepers: Sleepers,
    tx: optax.GradientTransformation,
    has_aux: bool,
    sparse: Sparse,
) -> Callable[..., Any]:
    """The step of :func:`optzoo.caught_up`."""

    def step(params, state, *batch, **extra_args):
        check_all_differentiable(params)
        zeros = lambda: jax.tree.map(jnp.zeros_like, params)
        update = lambda **extra_args: tx.update(zeros(), state, params, **extra_args)
        check_all_read(tx, update, extra_args)
        params, state, value, aux = train_step(
            sleepers, call(batch), params, state, extra_args, sparse
        )
        return (params, state, value, aux) if has_aux else (params, state, value)

    return jax.jit(row_major(step), donate_argnums=(0, 1))
