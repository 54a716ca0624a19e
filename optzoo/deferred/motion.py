"""Rows caught up in closed form, and the clock that records the movements of past steps."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ..core.marked_rows import gather_rows
from ..core.numerics import safe_divide, sqrt
from ..state.decay_rule import DecayRule, Form
from .series import Series, geometric, rational, rest

_TOLERANCE = {"float32": 2e-8, "float64": 1e-14}
_BITS = 8  # of an exponent, whose powers are in one table


class Numbers(NamedTuple):
    """The numbers of a decay rule, which programs read from the state."""

    powers: Array  # (bases, ...): of each base the powers below 256, then those of base**256
    centers: Array  # (blocks,): of the series
    eps: Array  # ()


class Clock(NamedTuple):
    """For each past step, the movement of the rows deferred since then."""

    count: Array  # updates so far
    young: Array  # (window, features): entry j is for the rows last updated j steps ago
    ring: Array  # (horizon, features): entry l % horizon is for those of step l, final
    numbers: Numbers
    since: Array  # all updates from this one on had these numbers

    left_to_xla = True  # of a native step: it is small, and no part of it belongs to a row

    @property
    def longest(self) -> int:
        """The largest age of a row that can be caught up."""
        return len(self.ring) + len(self.young) - 1

    def power(self, form: Form, name: str, age: Array) -> Array:
        """A base of the form to the power of an age: the product of two rounded powers."""
        powers = self.numbers.powers[form.powers.index(name)]
        low, high = powers[: 1 << _BITS], powers[1 << _BITS :]
        return gather_rows(low, age & (1 << _BITS) - 1) * gather_rows(high, age >> _BITS)


class Motion(NamedTuple):
    """A decay rule and everything that is constant over steps."""

    rule: DecayRule
    series: Series
    start: Clock  # before the first update, of NumPy arrays

    def has_numbers(self, clock: Clock) -> Array:
        """Whether a clock of this shape contains the numbers of the decay rule."""
        same = jax.tree.map(lambda a, b: jnp.all(a == b), self.start.numbers, clock.numbers)
        return functools.reduce(jnp.logical_and, same)

    def padded(self, entries: np.ndarray) -> np.ndarray:
        """The entries of a clock of an old version, whose blocks differ in the number of terms."""
        number = self.start.young.shape[1]
        if entries.shape[1] == number:
            return entries
        real = np.ones(number, bool)
        sums = (2 if self.rule.form.average else 1) * self.series.weights.shape[1]
        real[:sums] = np.resize(self.series.weights.any(0), sums)
        padded = np.zeros((len(entries), number), entries.dtype)
        padded[:, real] = entries
        return padded


@functools.cache
def make_motion(rule: DecayRule, dtype: Any, horizon: int) -> Motion:
    """The motion of rows in a dtype.

    Raises:
        ValueError: if the decay rule does not support deferral.
    """
    dtype = np.dtype(dtype)
    rounded = lambda decay: float(dtype.type(decay))  # what a step really multiplies by
    decays = tuple((name, rounded(decay)) for name, decay in rule.decays)
    average = rule.average if rule.average is None else rounded(rule.average)
    rule = rule._replace(decays=decays, shrink=rounded(rule.shrink), average=average)
    by_name, tolerance = dict(decays), _TOLERANCE[dtype.name]
    if rule.moves is None:
        series = rest()
    elif rule.over is None:
        series = geometric(by_name[rule.moves], tolerance)
    else:
        q = by_name.get(rule.over, 1.0)
        series = rational(by_name[rule.moves], math.sqrt(q) if rule.root else q, tolerance)
    window, number = series.weights.shape
    horizon = max(horizon, 2 * window)
    bases: dict[str, Any] = {**by_name, "shrink": 1 - rule.shrink, "average": average}
    powers = [_powers(bases[name], horizon + window - 1) for name in rule.form.powers]
    array: Any = lambda a: np.asarray(a, dtype)
    zero: Any = np.int32(0)
    numbers = Numbers(*map(array, (powers, series.centers, rule.eps)))
    sums, kept = number * (2 if rule.form.average else 1), 2 * rule.varies
    # Of current rows: the sums of the series; with an average, those of how far it is
    # behind; and if its decay varies, what is left of it: the product of the decays until the
    # sums are final, and of those after.
    start: Any = np.repeat(array([[0.0] * sums + [1.0] * kept]), horizon, 0)
    return Motion(rule, series, Clock(zero, start[:window], start, numbers, zero))


def restarted(clock: Clock, count: Any) -> Clock:
    """The clock after ``count`` updates, for rows that are all current.

    Args:
        clock: the clock of any step; it restarts with current rows only.
        count: the number of updates.
    """
    count, since = jnp.array(count, jnp.int32), jnp.array(count, jnp.int32)  # both are donated
    current = lambda a: jnp.tile(clock.young[:1], (len(a), 1))
    # On explicit axes the result of a product has the type that a step gives.
    numbers = jax.tree.map(lambda a: jnp.asarray(a) * 1, clock.numbers)
    return Clock(count, current(clock.young), current(clock.ring), numbers, since)


def tick(motion: Motion, clock: Clock, size: Any, decay: Any = None) -> Clock:
    """The clock after an update of size ``a_t``, with the decay of a varying average."""
    rule, dtype, horizon = motion.rule, motion.start.ring.dtype, len(clock.ring)
    weights, number = motion.series.weights.astype(dtype), motion.series.weights.shape[1]
    # The oldest entry is final. It replaces that of horizon steps before, which no row needs.
    oldest = (clock.count - len(clock.young) + 1) % horizon
    ring = clock.ring.at[oldest].set(clock.young[-1])
    older = clock.young[:-1]
    if rule.varies:
        decay = jnp.asarray(decay, dtype)
        ring = ring.at[:, -1].multiply(decay)
        older = older.at[:, -2].multiply(decay)
    young = jnp.concatenate([motion.start.young[:1], older])
    sums, kept = (young[:, : 2 * number], young[:, 2 * number :]) if rule.varies else (young, None)
    if rule.shrink:
        sums = sums * (1 - jnp.asarray(rule.shrink, dtype))
    if rule.average is None:
        sums = sums + jnp.asarray(size, dtype) * weights
    else:  # beside each sum that of how far the average is behind, which decays
        sums = sums + jnp.asarray(size, dtype) * jnp.concatenate([weights, weights], 1)
        factor = decay if rule.varies else rule.average
        sums = sums * _behind(number, jnp.full((1, 1), factor, dtype))
    young = sums if kept is None else jnp.concatenate([sums, kept], 1)
    is_same = motion.has_numbers(clock)
    since = jnp.where(is_same, clock.since, clock.count)
    # A choice, so that they are in the same place on a mesh as before.
    numbers = jax.tree.map(
        lambda old, new: jnp.where(is_same, old, new), clock.numbers, motion.start.numbers
    )
    return Clock(clock.count + 1, young, ring, numbers, since)


def caught_up_rows(
    form: Form, clock: Clock, x: Array, slots: dict[str, Array], last: Array
) -> tuple[Array, dict[str, Array]]:
    """Catches up rows and their slots from step ``last`` to the present step.

    A row that cannot be caught up becomes NaN, and so does its average. Such a row was deferred for
    longer than the ring of the clock, or when the numbers of the decay rule changed, or ``last`` is
    in the future.

    Args:
        form: the form of the decay rule.
        clock: the clock of all tables.
        x: the rows.
        slots: their slots by name, including those of the decay rule.
        last: for each row, the step to which it is current.
    """
    age = clock.count - last
    is_known = (age >= 0) & (age <= clock.longest) & (last >= clock.since)
    age = jnp.clip(age, 0, clock.longest)
    wide = lambda a: a.reshape(a.shape + (1,) * (x.ndim - 1))
    current = dict(slots)
    for name in form.decays:
        s = slots[name]
        current[name] = s * wide(clock.power(form, name, age))
        if name != form.moves:  # a power may be 0, and the square of a large gradient infinite
            current[name] = jnp.where(s < jnp.inf, current[name], s)
    new = x
    if form.shrink:
        new = new * wide(clock.power(form, "shrink", age))
    features = list[Array]()
    if form.moves is not None or form.varies:
        features = [wide(f) for f in _features(form, clock, last, age)]
    if form.moves is not None:
        new = new - slots[form.moves] * _moved(form, clock, features, slots)
    if form.average:
        kept = features[-1] if form.varies else wide(clock.power(form, "average", age))
        e = slots["average"]
        e = e + (1 - kept) * (x - e)
        if form.moves is not None:  # the part of the movement that the average follows
            number = _number(form, clock)
            behind = features[number : 2 * number]
            known = [f - b for f, b in zip(features[:number], behind, strict=True)]
            e = e - slots[form.moves] * _moved(form, clock, known, slots)
        current["average"] = jnp.where(wide(is_known), e, jnp.nan)
    return jnp.where(wide(is_known), new, jnp.nan), current


def _number(form: Form, clock: Clock) -> int:
    """The number of sums in the series."""
    return (clock.young.shape[1] - 2 * form.varies) // (2 if form.average else 1)


def _features(form: Form, clock: Clock, last: Array, age: Array) -> list[Array]:
    """The sums of the series for rows of an age, followed by the product of a varying decay."""
    window, horizon, number = len(clock.young), len(clock.ring), _number(form, clock)
    final_for = jnp.maximum(age - window + 1, 0)
    old = gather_rows(clock.ring, lax.rem(last, np.int32(horizon)))
    if form.shrink:
        old = old * clock.power(form, "shrink", final_for)[:, None]
    young = gather_rows(clock.young, jnp.minimum(age, window - 1))
    if form.varies:  # what is left of the average in all, and since the sums are final
        later = old[:, -1:]
        old = jnp.concatenate([old[:, :-2] * _behind(number, later), old[:, -2:-1] * later], 1)
        young = young[:, :-1]
    elif form.average:
        old = old * _behind(number, clock.power(form, "average", final_for)[:, None])
    features = jnp.where((age < window)[:, None], young, old)
    return [features[:, n] for n in range(features.shape[1])]


def _behind(number: int, factor: Array) -> Array:
    """One for the sums, and a factor of shape ``(n, 1)`` for those of the average."""
    return jnp.where(np.arange(2 * number)[None] < number, jnp.ones_like(factor), factor)


def _moved(form: Form, clock: Clock, features: list[Array], slots: dict[str, Array]) -> Array:
    """The distance by which rows have moved, in the unit of their numerator."""
    if form.over is None:
        return features[0]
    w = sqrt(slots[form.over]) if form.root else slots[form.over]
    moved, numbers = jnp.zeros_like(w), clock.numbers
    blocks = len(numbers.centers)
    terms = _number(form, clock) // blocks
    for block in range(blocks):
        wc = w * numbers.centers[block]
        unit = jnp.ones_like(wc)
        # A denominator with an eps is never 0.
        inverse = unit / (wc + numbers.eps) if form.eps else safe_divide(unit, wc)
        rho = 1 - numbers.eps * inverse  # not w c / (w c + eps): w may be infinite
        first, *others = features[block * terms : (block + 1) * terms]
        moved = moved + functools.reduce(lambda total, f: total * rho + f, others, first) * inverse
    return moved


def _powers(base: float, top: int) -> np.ndarray:
    """``base**k`` for k below 256, then ``base**(256 k)`` as far as powers up to ``top`` need."""
    number = 1 << _BITS
    with np.errstate(under="ignore"):
        low = np.power(base, np.arange(number, dtype=np.float64))
        high = np.power(base, float(number) * np.arange(top // number + 1))
    return np.concatenate([low, high])
