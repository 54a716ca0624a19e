r"""The movement of a deferred row as a sum that does not depend on the row.

A deferred row for K steps from step l on moves by

.. math::
    m \sum_{k=1}^K a_{l+k} \frac{p^k}{w q^k + \epsilon}

where :math:`p` is the decay of :math:`m` and :math:`q` that of :math:`w`, such as
:math:`\sqrt{v}`. Only :math:`w` differs between the elements of a row, but :math:`w` and k do not
separate. With :math:`y = q^k`, a center c and :math:`\rho = w c / (w c + \epsilon)`, in [0, 1]:

.. math::
    \frac{1}{w y + \epsilon} = \frac{1}{w c + \epsilon} \cdot \frac{1}{1 - \rho (1 - y / c)}

The last factor is smooth in :math:`\rho`, so it is a polynomial :math:`\sum_n C_n(y) \rho^n`,
interpolated at Chebyshev nodes. Exchanging the sums, the sum over k does not depend on the element:
the *features* :math:`\sum_k a_{l+k} p^k C_n(q^k)`. Before y / c becomes small, a new block starts,
with its own center. Since p < q, the terms vanish after a number of steps, the *window*.
"""

import math
from typing import NamedTuple

import numpy as np

_LONGEST = 1 << 15  # steps of a window
_MOST_FEATURES = 256
_MOST_TERMS = 10  # of one polynomial: with more of them, rounding grows faster than they help


class Series(NamedTuple):
    """The expansion of the movement of a deferred row.

    Each block of steps has its own polynomial, all with the same number of terms.
    """

    centers: np.ndarray  # of each block
    weights: np.ndarray  # (window, blocks * terms): what a step adds for rows deferred for j steps
    error: float  # a bound, relative to the movement at a constant rate


def rest() -> Series:
    """The series of a row that does not move."""
    return Series(np.ones(1), np.zeros((2, 1)), 0.0)


def geometric(p: float, tolerance: float) -> Series:
    """The series of a row that moves by a single slot: the denominator is one."""
    if not 0 <= p < 1:
        raise ValueError(
            f"the decay of the slot that moves a deferred row must be in [0, 1), got {p}"
        )
    if p == 0:
        return rest()
    k = np.arange(_window(math.log(p), tolerance) + 1)
    return Series(np.ones(1), np.where(k == 0, 0, p**k)[:, None], tolerance / 10)


def rational(p: float, q: float, tolerance: float) -> Series:
    """The series of a row that moves by the ratio of two slots.

    Args:
        p: the decay of the numerator.
        q: the decay of ``w`` in the denominator ``w + eps``.
        tolerance: the relative tolerance of the sum, at a constant rate, for all w and eps.

    Raises:
        ValueError: unless p is below q, and not too close to it.
    """
    if not p < q:
        raise ValueError(
            "the mean must decay faster than the denominator (of Adam, b1 below the square root "
            f"of b2), got {p} and {q}: otherwise the steps of a row without a gradient grow"
        )
    if p == 0:
        return rest()
    window = _window(math.log(p) - math.log(q), tolerance)
    k = np.arange(1, window + 1)
    y, mean = np.exp(k * math.log(q)), np.exp(k * math.log(p))
    # Of z = eps / w: 1 / (y + z) in the unit of 1 / w; and in that of 1 / eps, for large z.
    z = np.concatenate([[0], np.logspace(-16, 4, 201)])
    exact = mean[:, None] / (y[:, None] + z)
    total = exact.sum(0)
    # Each step may err by its share, evenly, or by its part of the sum.
    allowed = 0.5 * tolerance * (total / window + exact)
    centers, columns, error, start = [], [], np.zeros_like(z), 0
    while start < window:
        length, terms, coefficients, off = _best_block(start, y, mean, z, exact, allowed)
        if not length or sum(c.shape[1] for c in columns) + terms > _MOST_FEATURES:
            raise ValueError(
                f"rows cannot be deferred with the decays {p} and {q}: a sum with this precision "
                f"has more than {_MOST_FEATURES} terms. Increase the decay of the denominator"
            )
        here = slice(start, start + length)
        column = np.zeros((window + 1, terms))
        column[1:][here] = mean[here, None] * coefficients[:length]
        centers.append(y[start])
        columns.append(column)
        error += off[:length].sum(0)
        start += length
    bound = float((error / total).max()) + tolerance / 10
    most = max(c.shape[1] for c in columns)
    padded = [np.pad(c, ((0, 0), (most - c.shape[1], 0))) for c in columns]  # highest first
    return Series(np.array(centers), np.concatenate(padded, 1), bound)


def _window(log_ratio: float, tolerance: float) -> int:
    """The number of steps after which the remaining geometric sum is below tolerance / 10."""
    window = math.ceil(math.log(tolerance / 10 * -math.expm1(log_ratio)) / log_ratio)
    if window > _LONGEST:
        raise ValueError(
            f"rows without a gradient move for {window} steps, too long to defer: the decay of "
            "their movement is too close to one, or to that of their denominator"
        )
    return window


def _best_block(start, y, mean, z, exact, allowed):
    """The length, the number of terms, the coefficients and the errors of the next block."""
    best, c = None, y[start]
    for terms in range(1, _MOST_TERMS + 1):
        nodes = (1 + np.cos(np.pi * (np.arange(terms) + 0.5) / terms)) / 2
        values = 1 / (1 - nodes * (1 - y[start:, None] / c))
        coefficients = np.linalg.solve(np.vander(nodes, terms), values.T).T  # highest first
        fit = (coefficients @ np.vander(c / (c + z), terms).T) / (c + z)
        off = np.abs(fit * mean[start:, None] - exact[start:])
        bad = (off > allowed[start:]).any(1)
        length = int(bad.argmax()) if bad.any() else len(y) - start
        score = length / (terms + 1)
        if best is None or score > best[0]:
            best = score, length, terms, coefficients, off
    assert best is not None
    return best[1:]
