"""Rows caught up in closed form, and the clock that knows how far past steps have moved them."""

import functools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ..core.marked_rows import gather_rows
from ..core.numerics import safe_divide, sqrt
from ..state.law import Law
from .series import Series, geometric, rational, rest
from .state import Clock

_TOLERANCE = {"float32": 2e-8, "float64": 1e-14}
_BITS = 8  # of an exponent, whose powers are in one table


class Motion(NamedTuple):
    """A law with all that does not change from step to step."""

    law: Law
    dtype: np.dtype
    series: Series
    horizon: int  # no row sleeps much longer

    @property
    def window(self) -> int:
        """After so many steps a row does not move any more."""
        return len(self.series.weights)

    def decay(self, base: float, age: Array) -> Array:
        """``base**age``: the product of two numbers from tables, each rounded once."""
        low, high = map(jnp.asarray, _powers(base, self.horizon + self.window, self.dtype))
        return gather_rows(low, age & (1 << _BITS) - 1) * gather_rows(high, age >> _BITS)


@functools.cache
def make_motion(law: Law, dtype: Any, horizon: int) -> Motion:
    """The motion of rows in a dtype.

    Raises:
        ValueError: if the law allows no sleep.
    """
    dtype = np.dtype(dtype)
    rounded = lambda decay: float(dtype.type(decay))  # what a step really multiplies by
    decays = tuple((name, rounded(decay)) for name, decay in law.decays)
    average = law.average if law.average is None else rounded(law.average)
    law = law._replace(decays=decays, shrink=rounded(law.shrink), average=average)
    by_name, tolerance = dict(decays), _TOLERANCE[dtype.name]
    if law.moves is None:
        series = rest()
    elif law.over is None:
        series = geometric(by_name[law.moves], tolerance)
    else:
        q = by_name.get(law.over, 1.0)
        series = rational(by_name[law.moves], math.sqrt(q) if law.root else q, tolerance)
    return Motion(law, dtype, series, max(horizon, 2 * len(series.weights)))


def start_clock(motion: Motion, count: Any) -> Clock:
    """A clock after ``count`` updates, of rows that are all awake."""
    start = lambda rows: jnp.tile(_start(motion), (rows, 1))
    return Clock(jnp.array(count, jnp.int32), start(motion.window), start(motion.horizon))


def _start(motion: Motion) -> Array:
    """The entry of rows that are awake.

    The sums of the series; with an average, those of how far it is behind; and if its decay varies,
    what is left of it: the product of the decays until the sums are final, and of those after.
    """
    number, law = motion.series.weights.shape[1], motion.law
    sums = number * (1 if law.average is None else 2)
    return jnp.asarray([[0.0] * sums + [1.0] * 2 * law.varies], motion.dtype)


def tick(motion: Motion, clock: Clock, size: Any, decay: Any = None) -> Clock:
    """The clock after an update of a size ``a_t``; with the decay of an average that varies."""
    law, number = motion.law, motion.series.weights.shape[1]
    weights = motion.series.weights.astype(motion.dtype)
    # The oldest entry is final. It replaces that of horizon steps before, which no row needs.
    oldest = (clock.count - motion.window + 1) % motion.horizon
    ring = clock.ring.at[oldest].set(clock.young[-1])
    older = clock.young[:-1]
    if law.varies:
        decay = jnp.asarray(decay, motion.dtype)
        ring = ring.at[:, -1].multiply(decay)
        older = older.at[:, -2].multiply(decay)
    young = jnp.concatenate([_start(motion), older])
    young, kept = young[:, : 2 * number], young[:, 2 * number :]
    if law.shrink:
        young = young * (1 - jnp.asarray(law.shrink, motion.dtype))
    if law.average is None:
        young = young + jnp.asarray(size, motion.dtype) * weights
    else:  # beside each sum that of how far the average is behind, which decays
        young = young + jnp.asarray(size, motion.dtype) * jnp.concatenate([weights, weights], 1)
        factor = decay if law.varies else law.average
        young = young * _behind(motion, jnp.full((1, 1), factor, motion.dtype))
    return Clock(clock.count + 1, jnp.concatenate([young, kept], 1), ring)


def wake(
    motion: Motion, clock: Clock, x: Array, slots: dict[str, Array], last: Array
) -> tuple[Array, dict[str, Array]]:
    """Rows and their slots as of step ``last`` as of now.

    A row that cannot be caught up becomes NaN, and so does its average: it was asleep for longer
    than the ring of the clock goes back, or is of a time to come.

    Args:
        motion: of the optimizer.
        clock: of all tables.
        x: rows.
        slots: their slots by name, those of the law at least.
        last: for each row the step that it is as of.
    """
    law, age = motion.law, clock.count - last
    longest = motion.horizon + motion.window - 1
    is_known = (age >= 0) & (age <= longest)
    age = jnp.clip(age, 0, longest)
    wide = lambda a: a.reshape(a.shape + (1,) * (x.ndim - 1))
    awake = dict(slots)
    for name, decay in law.decays:
        s = slots[name]
        awake[name] = s * wide(motion.decay(decay, age))
        if name != law.moves:  # a power may be 0, and the square of a large gradient infinite
            awake[name] = jnp.where(s < jnp.inf, awake[name], s)
    new = x
    if law.shrink:
        new = new * wide(motion.decay(1 - law.shrink, age))
    features = list[Array]()
    if law.moves is not None or law.varies:
        features = [wide(f) for f in _features(motion, clock, last, age)]
    if law.moves is not None:
        new = new - slots[law.moves] * _moved(motion, features, slots)
    if law.average is not None:
        kept = features[-1] if law.varies else wide(motion.decay(law.average, age))
        e = slots["average"]
        e = e + (1 - kept) * (x - e)
        if law.moves is not None:  # the part of the movement that the average follows
            number = motion.series.weights.shape[1]
            behind = features[number : 2 * number]
            known = [f - b for f, b in zip(features[:number], behind, strict=True)]
            e = e - slots[law.moves] * _moved(motion, known, slots)
        awake["average"] = jnp.where(wide(is_known), e, jnp.nan)
    return jnp.where(wide(is_known), new, jnp.nan), awake


def _features(motion: Motion, clock: Clock, last: Array, age: Array) -> list[Array]:
    """The sums of the series for rows of an age; if a decay varies, its product comes last."""
    window = motion.window
    old = gather_rows(clock.ring, lax.rem(last, np.int32(motion.horizon)))
    if motion.law.shrink:
        old = old * motion.decay(1 - motion.law.shrink, jnp.maximum(age - window + 1, 0))[:, None]
    young = gather_rows(clock.young, jnp.minimum(age, window - 1))
    if motion.law.varies:  # what is left of the average in all, and since the sums are final
        later = old[:, -1:]
        old = jnp.concatenate([old[:, :-2] * _behind(motion, later), old[:, -2:-1] * later], 1)
        young = young[:, :-1]
    elif motion.law.average is not None:
        kept = motion.decay(motion.law.average, jnp.maximum(age - window + 1, 0))
        old = old * _behind(motion, kept[:, None])
    features = jnp.where((age < window)[:, None], young, old)
    return [features[:, n] for n in range(features.shape[1])]


def _behind(motion: Motion, factor: Array) -> Array:
    """One for the sums, and a factor of shape ``(n, 1)`` for those of the average."""
    number = motion.series.weights.shape[1]
    return jnp.where(np.arange(2 * number)[None] < number, jnp.ones_like(factor), factor)


def _moved(motion: Motion, features: list[Array], slots: dict[str, Array]) -> Array:
    """How far rows have moved, in the unit of their numerator."""
    law = motion.law
    if law.over is None:
        return features[0]
    w = sqrt(slots[law.over]) if law.root else slots[law.over]
    moved, first = jnp.zeros_like(w), 0
    for center, terms in motion.series.blocks:
        wc = w * jnp.asarray(center, motion.dtype)
        inverse = safe_divide(jnp.ones_like(wc), wc + law.eps, law.eps)
        rho = 1 - law.eps * inverse  # not w c / (w c + eps): w may be infinite
        total = features[first]
        for n in range(first + 1, first + terms):
            total = total * rho + features[n]
        moved = moved + total * inverse
        first += terms
    return moved


@functools.cache
def _powers(base: float, top: int, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """``base**k`` for k below 256, and ``base**(256 k)`` as far as the product needs them."""
    number = 1 << _BITS
    with np.errstate(under="ignore"):
        low = np.power(base, np.arange(number, dtype=np.float64))
        high = np.power(base, float(number) * np.arange(top // number + 1))
    return low.astype(dtype), high.astype(dtype)
