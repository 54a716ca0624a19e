"""Row-wise Adagrad whose rate and decay depend on how often a row had a gradient."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from ..core.checks import (
    check_choice,
    check_flags,
    check_not_negative,
    check_positive,
    check_rate,
    check_size,
)
from ..core.numerics import next_count, safe_divide, sqrt
from ..core.optimizer import About, Optimizer, recorded
from ..core.short import short_repr
from ..core.warn import warn
from ..rules.leafwise import leafwise
from ..rules.learning_rate import row_wise
from ..rules.policies import Rule
from ..state.inner import fitting
from ..state.slots import get_slot
from ..state.types import Exact, Sum
from .row_wise import (
    count_for_each_row,
    gap_since,
    of_rows,
    row_means,
    shrunk_and_moved,
    zero_for_each_row,
)

DecayMode = Literal["none", "l2", "decoupled", "adagradw"]
RateMode = Literal["equal", "tail_increase", "tail_decrease", "counter_sgd"]


class CounterSlots(NamedTuple):
    """The slots of row-wise Adagrad with counters."""

    accumulator: Sum  # sum of the mean squares of each row's gradients
    prev_iter: Exact  # the number of the last update of each row, 0 before the first
    row_counter: Exact  # how often each row came


class MaxCounterState(NamedTuple):
    """The state of an optimizer whose rates depend on the largest counter."""

    max_counter: Array
    inner: Any

    __repr__ = short_repr


@recorded
def counter_row_wise_adagrad(
    learning_rate: optax.ScalarOrSchedule = 0.01,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    weight_decay_mode: DecayMode = "none",
    half_life: int = -1,
    start_step: int = 0,
    adjustment_ub: float = 1.0,
    learning_rate_mode: RateMode = "equal",
    tail_threshold: float = 0.0,
    is_ratio: bool = False,
    max_counter_every: int = 1000,
) -> optax.GradientTransformationExtraArgs:
    r"""Row-wise Adagrad with a counter for each row: rare rows decay more.

    .. math::
        n_t &= \begin{cases}
            1 + 2^{-(t - p) / H}\, n_{t-1} & H > 0 \\
            1 & H = 0 \\
            n_{t-1} + 1 & H < 0
        \end{cases} \\
        A_t &= A_{t-1} + \operatorname{mean}(h_t^2), \qquad
            m_t = \frac{\eta_t}{\sqrt{A_t} + \epsilon} \\
        x_t &= c_t\, x_{t-1} - M_t\, g_t

    for each row, where :math:`p` is the last update in which it had a gradient (:math:`t - p` is 1
    at its first) and :math:`h = g`. Without the options below :math:`c = 1` and :math:`M = m`.
    Rows without a gradient keep their parameters and slots (:func:`optzoo.rules.lazy`).

    ======================  =======================================================================
    ``learning_rate_mode``  :math:`M`, for rows with :math:`n` above the threshold
    ======================  =======================================================================
    ``"equal"``             :math:`m`
    ``"tail_increase"``     :math:`m\, \operatorname{clip}((N / (n + 1))^u, 1, 10)`
    ``"tail_decrease"``     :math:`m\, \operatorname{clip}(((n + 1) / N)^u, 0.1, 1)`
    ``"counter_sgd"``       :math:`\eta / (\sqrt{u n} + \epsilon)`
    ======================  =======================================================================

    :math:`N` is the largest counter of all rows plus 1, computed at each update whose number is
    divisible by ``max_counter_every`` (1 before the first), or ``max_counter`` of this ``update``.

    =====================  ========================================================================
    ``weight_decay_mode``  :math:`c`
    =====================  ========================================================================
    ``"none"``             1
    ``"l2"``               :math:`1 - \lambda m H / n`, and :math:`h = g + \lambda x`
    ``"decoupled"``        :math:`1 - \lambda \eta H / n`
    ``"adagradw"``         :math:`z\, (1 - \lambda \eta)` with
                           :math:`z = (1 - \lambda \eta)^{\min(t - p, t - s) - 1}`; :math:`M` is
                           multiplied by :math:`z`. First, it is :math:`m \sqrt n` if
                           :math:`H = -1`, :math:`\min(\eta n, u) / (\sqrt A + \epsilon)` if
                           :math:`H = -2`.
    =====================  ========================================================================

    Counters and numbers of updates of rows are float32, as in FBGEMM, unless the parameter is
    float64: in float32, a counter with :math:`H < 0` stops at ``2**24``, and larger :math:`p` are
    rounded.

    Up to update ``start_step`` both modes are off, but :math:`h` is as above.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.interop.fbgemm.counter_row_wise_adagrad(0.1)
        >>> table = jnp.ones((3, 2))
        >>> gradient = optzoo.SparseRows(jnp.array([2]), jnp.full((1, 2), 5.0), 3)
        >>> updates, state = tx.update(gradient, tx.init(table), table)
        >>> print(optzoo.get_slot(state, "row_counter"))  # how often each row came
        [0. 0. 1.]

    Args:
        learning_rate: :math:`\eta`, a number or a schedule.
        eps: :math:`\epsilon`, at least 0.
        weight_decay: :math:`\lambda`, in all modes multiplied by the learning rate; at least 0.
        weight_decay_mode: ``"none"``, ``"l2"``, ``"decoupled"`` or ``"adagradw"``.
        half_life: :math:`H`, an int, at least -2: the number of updates after which a count is
            halved; 0 sets each counter to 1; -1 and -2 count without forgetting and differ for
            ``"adagradw"`` only. A static argument: it cannot be injected.
        start_step: :math:`s`, an int, at least 0. Also static.
        adjustment_ub: :math:`u`, positive: an exponent, a factor or a bound (see the tables).
        learning_rate_mode: ``"equal"``, ``"tail_increase"``, ``"tail_decrease"`` or
            ``"counter_sgd"``.
        tail_threshold: the counter above which ``learning_rate_mode`` applies, at least 0.
        is_ratio: whether the threshold is a fraction of :math:`N`, rounded down.
        max_counter_every: the number of updates between computations of :math:`N`, each of which
            reads the counters of all rows; an int, at least 1. Also static.

    Raises:
        ValueError: if there is a decay and no params are given to ``update``.

    Warns:
        UserWarning: with ``"l2"`` or ``"decoupled"`` and a negative half-life, as in the original:
            :math:`H / n` is negative, and the rows grow.

    References:
        ``WeightDecayMode.COUNTER`` of `FBGEMM <https://github.com/pytorch/FBGEMM>`_.
    """
    check_rate(learning_rate)
    half_life, start_step = check_size(-2, half_life=half_life), check_size(start_step=start_step)
    every = check_size(1, max_counter_every=max_counter_every)
    check_not_negative(eps=eps, weight_decay=weight_decay, tail_threshold=tail_threshold)
    check_positive(adjustment_ub=adjustment_ub)
    check_flags(is_ratio=is_ratio)
    check_choice(DecayMode, weight_decay_mode=weight_decay_mode)
    check_choice(RateMode, learning_rate_mode=learning_rate_mode)
    if half_life < 0 and weight_decay_mode in ("l2", "decoupled"):
        warn(
            f"half_life={half_life} makes the factor H / n of the decay negative: rows grow, as "
            f"in FBGEMM; weight_decay_mode={weight_decay_mode!r} needs a positive half-life",
        )

    options = _Options(
        eps, weight_decay, weight_decay_mode, half_life, start_step, adjustment_ub,
        learning_rate_mode, tail_threshold, is_ratio,
    )  # fmt: skip
    needs_max = options.needs_max_counter
    tx = leafwise(
        _rule(options),
        slots=counter_slots(),
        scheduled={"learning_rate": learning_rate} | ({"max_counter": 1.0} if needs_max else {}),
        needs_params=weight_decay_mode != "none",
        cycle=every if needs_max else 1,
    )
    return _with_max_counter(tx, every) if needs_max else row_wise(tx)


class _Options(NamedTuple):
    """Arguments of :func:`counter_row_wise_adagrad`."""

    eps: float
    weight_decay: float
    weight_decay_mode: DecayMode
    half_life: int
    start_step: int
    adjustment_ub: float
    learning_rate_mode: RateMode
    tail_threshold: float
    is_ratio: bool

    @property
    def needs_max_counter(self) -> bool:
        """Whether a rate depends on the largest counter."""
        mode = self.learning_rate_mode
        return mode.startswith("tail") or (mode != "equal" and bool(self.is_ratio))


class _Row(NamedTuple):
    """The values of each row that the modes use at this update."""

    n: Array  # its counter
    gap: Array  # updates since its last one
    root: Array  # of its accumulator, plus epsilon
    m: Array  # the rate over that root
    now: Array  # the number of this update
    learning_rate: Array


def _rule(o: _Options) -> Rule:
    """The rule for one array."""
    has_l2 = o.weight_decay_mode == "l2"

    def rule(g, x, s, t, learning_rate, max_counter=None):
        now = t.astype(s.prev_iter.dtype)
        gap = gap_since(s.prev_iter, now)
        n = next_counter(s.row_counter, gap, o.half_life)
        a = s.accumulator + row_means((g + o.weight_decay * x if has_l2 else g) ** 2)
        root = sqrt(a) + o.eps
        m = safe_divide(learning_rate, root, o.eps)
        row = _Row(n, gap, root, m, now, learning_rate)
        M, kept = _decayed(o, row, _rate(o, row, max_counter))
        if o.start_step:
            M, kept = (jnp.where(now > o.start_step, new, old) for new, old in ((M, m), (kept, 1)))
        decays = o.weight_decay_mode != "none"
        u = shrunk_and_moved(x, kept, M, g) if decays else -of_rows(M, g) * g
        return u, CounterSlots(a, jnp.maximum(s.prev_iter, now), n)

    return rule


def _rate(o: _Options, row: _Row, max_counter: Any) -> Array:
    """M, by ``learning_rate_mode``."""
    if o.learning_rate_mode == "equal":
        return row.m
    n, u = row.n, o.adjustment_ub
    if o.learning_rate_mode == "counter_sgd":
        tail = safe_divide(row.learning_rate, sqrt(u * n) + o.eps, o.eps)
    elif o.learning_rate_mode == "tail_increase":
        tail = row.m * jnp.clip((max_counter / (n + 1)) ** u, 1, 10)
    else:
        tail = row.m * jnp.clip(((n + 1) / max_counter) ** u, 0.1, 1)
    low = jnp.floor(o.tail_threshold * max_counter) if o.is_ratio else o.tail_threshold
    return jnp.where(n > low, tail, row.m)


def _decayed(o: _Options, row: _Row, M: Array) -> tuple[Array, Any]:
    """M and c, by ``weight_decay_mode``."""
    if o.weight_decay_mode == "none":
        return M, 1
    if o.weight_decay_mode != "adagradw":
        by = row.m if o.weight_decay_mode == "l2" else row.learning_rate
        return M, 1 - o.half_life / row.n * o.weight_decay * by
    if o.half_life == -1:
        M = row.m * sqrt(row.n)
    elif o.half_life == -2:
        M = safe_divide(jnp.minimum(row.learning_rate * row.n, o.adjustment_ub), row.root, o.eps)
    kept = 1 - o.weight_decay * row.learning_rate
    skipped = kept ** (jnp.minimum(row.gap, row.now - o.start_step) - 1)
    return M * skipped, kept * skipped


def counter_slots() -> CounterSlots:
    """The initializers of the slots."""
    return CounterSlots(zero_for_each_row, count_for_each_row, count_for_each_row)


def next_counter(counter: Array, gap: Array, half_life: int) -> Array:
    """The counter of each row, this update included."""
    if half_life > 0:
        return 1 + jnp.exp2(-gap / half_life) * counter
    return jnp.ones_like(counter) if half_life == 0 else counter + 1


def _with_max_counter(inner: Optimizer, every: int) -> optax.GradientTransformationExtraArgs:
    """Passes the largest counter to the inner update and recomputes it every ``every`` updates."""

    def init(params):
        return MaxCounterState(jnp.ones([], jnp.float32), inner.init(params))

    def update(updates, state, params=None, *, max_counter=None, **extra_args):
        found = jax.lax.cond(
            next_count(state.inner.count, every) % every == 0,
            lambda: _largest(get_slot(state.inner, "row_counter")) + 1,
            lambda: state.max_counter,
        )
        used = found if max_counter is None else max_counter
        updates, new = inner.update(updates, state.inner, params, max_counter=used, **extra_args)
        return updates, MaxCounterState(found, new)

    return fitting(Optimizer(init, update, About(reads=inner.about.reads)))


def _largest(counters: Any) -> Array:
    tops = [jnp.max(a, initial=0).astype(jnp.float32) for a in jax.tree.leaves(counters)]
    return jnp.max(jnp.stack(tops), initial=0) if tops else jnp.zeros([], jnp.float32)
