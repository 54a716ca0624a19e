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
    r"""Updates that move all rows of a table, at the cost of the rows that a step reads.

    ``tf.train.AdamOptimizer`` decays the slots of *all* rows of an embedding table in each step,
    and moves all rows; :func:`optzoo.adam` does the same, and :func:`optzoo.lazy_adam`, which does
    not, trains differently. Here the updates of a row are deferred while no id names it; it is
    caught up in closed form when it is read. A row deferred for :math:`K` steps from step
    :math:`l`:

    .. math::
        m_{l+K} &= \beta_1^K m_l, \qquad v_{l+K} = \beta_2^K v_l \\
        x_{l+K} &= x_l - m_l \sum_{k=1}^{K} a_{l+k}
                   \frac{\beta_1^k}{\sqrt{v_l}\, \beta_2^{k/2} + \hat\epsilon}, \qquad
        a_t = \eta_t \frac{\sqrt{1 - \beta_2^t}}{1 - \beta_1^t}

    The sum is evaluated as a polynomial whose coefficients are the same for all rows of one age, to
    2e-8 of the movement in float32 and to 1e-14 in float64, for any schedule of the rate. So the
    result is that of ``inner`` up to rounding, at each row that is read.

    :func:`optzoo.minimize` finds the ids of all lookups, catches their rows up, and updates them.
    If the loss uses a table in another way too (tied weights, a norm), all rows of it are caught up
    in each step, with a :class:`optzoo.DenseGradientWarning`. It does so in a chain or in
    :func:`optzoo.param_groups` too, where each row is read and written twice; nothing may follow in
    the chain, since the update includes how swept rows moved. :func:`optzoo.sharded_minimize` does
    the same with tables sharded by rows. In a loop of your own, call :func:`optzoo.rows.catch_up`
    before the loss reads rows, and without ids for all other readers; :func:`optzoo.eval_params`
    gives parameters without deferred rows. ``optzoo.get_slot`` and ``optzoo.save_tf1_state`` raise
    an error while rows are deferred.

    What cannot be right becomes NaN, so that it is noticed: the update of a row that was not caught
    up, rows deferred while a decay, epsilon or the weight decay changed, and rows deferred for
    longer than the clock remembers. The last happens only to a state that was put together by hand,
    since in each step a few rows are swept, so that no row is deferred for longer than ``horizon``
    steps.

    A table may be in 16 bits, with slots in float32; and slots in bfloat16 that are rounded at
    random (:func:`optzoo.slots_dtype`). A row is then rounded once when it is caught up, where
    ``inner`` rounds it in each step.

    The steps are counted up to ``2**31 - 1``: rows that are read after one more become NaN.

    The optimizers with a decay rule: adam, adamw, nadam, add_sign and power_sign; with ``dense``
    also momentum, momentumw, rmsprop, amsgrad and adamax, and all rows of adamw and nadam.

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
        inner: a complete optimizer, including its learning rate, as it is made by its function, or
            by :func:`optzoo.slots_dtype` with ``packed=True`` around it: the fastest for tables. A
            :func:`optzoo.moving_average` may be around it too; its averages are caught up as well.
        mask: which parameters have rows that may be deferred (:func:`optzoo.param_groups`); None
            for those of at least 4096 rows. All others are updated as by ``inner``.
        dense: what to equal: False for ``inner`` given the row-sparse gradient; True for ``inner``
            given the same gradient as an array (:func:`optzoo.rows.densify`). For adam they are
            equal.
        horizon: the number of steps after which a row is swept at the latest. The clock has
            ``4 * horizon`` numbers for Adam in float32, and about 1,000 more.

    Raises:
        TypeError: if ``inner`` is no transformation, or has no decay rule for rows without a
            gradient; by ``init`` if tables or slots are in a dtype in which rows cannot be
            deferred.
        ValueError: if the rows without gradient do not change anyway; if the decays allow no
            deferral (Adam: unless :math:`\beta_1 < \sqrt{\beta_2}`); in ``update`` if no params are
            given, if a table has no gradient, or if the decay rule of the state is not that of
            ``inner``.

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

    The other direction: after :func:`optzoo.rows.catch_up`, ``state.inner`` is a state of
    ``inner``. Both serve to change settings during training, too.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> inner = optzoo.adam(0.1)
        >>> table = jnp.ones((3, 2))
        >>> state = optzoo.rows.take_over(optzoo.caught_up(inner), table, inner.init(table))
        >>> print(type(state).__name__)
        CaughtUpState

    Args:
        tx: made by :func:`optzoo.caught_up`.
        params: the parameters.
        inner_state: the state of the optimizer in ``tx``, after any number of updates.

    Raises:
        TypeError: if ``tx`` is not made by :func:`optzoo.caught_up`.
        StateError: if the state is not of the optimizer in ``tx``.
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
