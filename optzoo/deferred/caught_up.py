"""Dense semantics for row-sparse gradients, at the cost of the touched rows."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax

from ..core.checks import check_flags, check_size, check_transformation
from ..core.optimizer import About, Optimizer, about_of, recorded
from ..core.paths import check_mask
from ..state.fit import StateError, kind_of
from ..state.inner import fitting
from .optimizer import DeferredOptimizer, deferral_of
from .state import CaughtUpState
from .tables import all_current


@recorded
def caught_up(
    inner: optax.GradientTransformation,
    *,
    mask: Any = None,
    dense: bool = False,
    horizon: int = 1 << 14,
) -> optax.GradientTransformationExtraArgs:
    r"""Updates of all rows of a table at the cost of the rows that a step reads.

    ``tf.train.AdamOptimizer`` decays the slots of *all* rows of an embedding table in each step,
    and moves all rows; :func:`optzoo.adam` does the same, and :func:`optzoo.lazy_adam`, which does
    not, trains differently. This wrapper defers the updates of a row until a batch reads it, and
    then catches it up in closed form. A row deferred for :math:`K` steps from step :math:`l`:

    .. math::
        m_{l+K} &= \beta_1^K m_l, \qquad v_{l+K} = \beta_2^K v_l \\
        x_{l+K} &= x_l - m_l \sum_{k=1}^{K} a_{l+k}
                   \frac{\beta_1^k}{\sqrt{v_l}\, \beta_2^{k/2} + \hat\epsilon}, \qquad
        a_t = \eta_t \frac{\sqrt{1 - \beta_2^t}}{1 - \beta_1^t}

    The sum is evaluated as a polynomial whose coefficients are shared by all rows of one age, with
    a relative error of 2e-8 in float32 and 1e-14 in float64, for any schedule of the rate. Each row
    that is read equals that of ``inner`` up to rounding.

    :func:`optzoo.minimize` finds the ids of all lookups, catches up their rows, and updates them.
    If the loss also uses a table in another way (tied weights, a norm), each step catches up all
    its rows, with a :class:`optzoo.DenseGradientWarning`. In a chain or in
    :func:`optzoo.param_groups`, each row is read and written twice; the wrapper must be the last of
    a chain, since the update includes the movement of swept rows. :func:`optzoo.sharded_minimize`
    supports tables sharded by rows. In a loop of your own, call :func:`optzoo.rows.catch_up` before
    the loss reads rows, and without ids before any other use; :func:`optzoo.eval_params` returns
    parameters without deferred rows. ``optzoo.get_slot`` and ``optzoo.save_tf1_state`` raise an
    error while rows are deferred.

    Invalid rows become NaN: rows that are updated without being caught up, rows deferred while a
    decay, epsilon or the weight decay changed, and rows deferred for longer than the clock records.
    The last case occurs only with a state assembled by hand: each step sweeps (catches up) a few
    rows, so that no row is deferred for more than ``horizon`` steps.

    Tables may be 16-bit with float32 slots, and slots may be bfloat16 with stochastic rounding
    (:func:`optzoo.slots_dtype`). A row is then rounded once when it is caught up; ``inner`` rounds
    it in each step.

    The step count is limited to ``2**31 - 1``: rows that are read later become NaN.

    Supported optimizers, which have a decay rule: adam, adamw, nadam, add_sign and power_sign; with
    ``dense`` also momentum, momentumw, rmsprop, amsgrad and adamax, and all rows of adamw and
    nadam.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> params = {"table": jnp.ones((6, 2))}
        >>> loss = lambda p, ids: jnp.sum(optzoo.lookup(p["table"], ids) ** 2)
        >>> tx = optzoo.caught_up(optzoo.adam(0.1), mask="table")
        >>> step, state = optzoo.minimize(loss, tx), tx.init(params)
        >>> for ids in [0, 3], [1, 1], [2, 3]:
        ...     params, state, value = step(params, state, jnp.array(ids))
        >>> params, state = optzoo.rows.catch_up(params, state)
        >>> [round(float(x), 2) for x in params["table"][:, 0]]
        [0.78, 0.87, 0.94, 0.75, 1.0, 1.0]

    Args:
        inner: a complete optimizer, including its learning rate, unchanged or in
            :func:`optzoo.slots_dtype`, which is fastest for tables with ``packed=True``. It may
            also be in :func:`optzoo.moving_average`, whose averages are caught up, too.
        mask: the parameters whose rows may be deferred (:func:`optzoo.param_groups`); None for
            those of at least 4096 rows. All others are updated by ``inner``.
        dense: whether the result equals ``inner`` with the dense gradient
            (:func:`optzoo.rows.densify`) rather than with the row-sparse gradient. For adam both
            are equal.
        horizon: the largest number of steps for which a row is deferred. The clock has about
            ``4 * horizon + 1000`` numbers for Adam in float32.

    Raises:
        TypeError: if ``inner`` is not a transformation, or has no decay rule for rows without a
            gradient; in ``init``, if the dtype of tables or slots does not support deferred rows.
        ValueError: if ``inner`` does not change rows without a gradient; if its decays do not
            support deferral (Adam: unless :math:`\beta_1 < \sqrt{\beta_2}`); in ``update`` if no
            params are given, if a table has no gradient, or if the decay rule of the state is not
            that of ``inner``.

    References:
        Kingma and Ba, `Adam: A Method for Stochastic Optimization
        <https://arxiv.org/abs/1412.6980>`_, 2015.
    """
    check_transformation(inner=inner)
    check_mask(mask=mask)
    check_flags(dense=dense)
    deferred = DeferredOptimizer(
        optax.with_extra_args_support(inner),
        deferral_of(inner, bool(dense)),
        mask,
        bool(dense),
        check_size(1, horizon=horizon),
    )
    deferred.motion(np.float32)  # raises if the decays allow no deferral
    about = About(reads=about_of(inner).reads, deferred=deferred)
    return fitting(Optimizer(deferred.init, deferred.update, about))


def take_over(tx: optax.GradientTransformation, params: Any, inner_state: Any) -> CaughtUpState:
    """The state of ``caught_up(inner)`` with which training resumes from a state of ``inner``.

    Conversely, after :func:`optzoo.rows.catch_up`, ``state.inner`` is a state of ``inner``. Use
    both to change settings during training.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> inner = optzoo.adam(0.1)
        >>> table = jnp.ones((3, 2))
        >>> state = optzoo.rows.take_over(optzoo.caught_up(inner), table, inner.init(table))
        >>> print(type(state).__name__)
        CaughtUpState

    Args:
        tx: an optimizer made by :func:`optzoo.caught_up`.
        params: the parameters.
        inner_state: the state of the optimizer in ``tx``, after any number of updates.

    Raises:
        TypeError: if ``tx`` is not made by :func:`optzoo.caught_up`.
        StateError: if the state does not match the optimizer in ``tx``.
    """
    deferred = about_of(tx).deferred
    if deferred is None:
        raise TypeError(f"tx must be made by optzoo.caught_up, got {tx!r}")
    state = deferred.init(params)
    kinds = lambda tree: list(map(kind_of, jax.tree.leaves(tree)))
    pairs = [(jax.tree.structure(state.inner), jax.tree.structure(inner_state))]
    if pairs[0][0] == pairs[0][1]:
        pairs = zip(kinds(state.inner), kinds(inner_state), strict=True)
    for expected, got in pairs:
        if expected != got:
            raise StateError(
                "inner_state is not a state of the optimizer in tx for these parameters: expected "
                f"{expected}, got {got}"
            )
    return all_current(state._replace(inner=inner_state))
