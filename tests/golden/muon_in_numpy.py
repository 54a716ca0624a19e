"""Newton-Schulz steps in bfloat16 as torch and the author round them, by float64 of NumPy."""

import numpy as np

JORDAN = (3.4445, -4.7750, 2.0315)


class Near(Exception):
    """A number that another order of sums in float32 may round to another one."""


def to_bfloat16(x, error=None):
    """Rounded to bfloat16; raises ``Near`` if ``error`` may change one."""
    mantissa, exponent = np.frexp(x)
    scaled = np.ldexp(mantissa, 8)
    if error is not None:
        from_tie = np.abs(scaled - np.floor(scaled) - 0.5)
        if np.any(np.ldexp(from_tie, exponent - 8) <= error):
            raise Near
    return np.ldexp(np.rint(scaled), exponent - 8)


def of_torch(g, error, coefficients=JORDAN, steps=5, eps=1e-7):
    """The steps on one matrix, where no order of sums in float32 changes a rounding.

    The error of a sum of n terms in float32 is below n 2^-24 times the sum of their magnitudes.

    Args:
        g: the matrix, which has an error of ``error`` or less.
        error: of each element.
        coefficients: a, b, c.
        steps: the number of steps.
        eps: the least norm.
    """
    a, b, c = coefficients
    unit, (size, short) = 2.0**-24, (g.size, min(g.shape))
    x = to_bfloat16(g, error)
    x = x.T if g.shape[0] > g.shape[1] else x
    norm = np.sqrt(np.sum(x**2))
    norm = max(to_bfloat16(norm, (size + 2) * unit * norm), to_bfloat16(eps))
    x = to_bfloat16(x / norm, 2 * unit * np.abs(x / norm))
    for _ in range(steps):
        y = np.abs(x)
        gram = to_bfloat16(x @ x.T, max(g.shape) * unit * (y @ y.T))
        z, sums = np.abs(gram), (short + 3) * unit
        polynomial = b * gram + c * (gram @ gram)
        polynomial = to_bfloat16(polynomial, sums * (abs(b) * z + abs(c) * (z @ z)))
        new = a * x + polynomial @ x
        x = to_bfloat16(new, sums * (abs(a) * y + np.abs(polynomial) @ y))
    return x.T if g.shape[0] > g.shape[1] else x


def of_author(g):
    """The author's steps, which round after each product and each sum."""
    a, b, c = JORDAN
    x = to_bfloat16(g)
    x = x.T if g.shape[0] > g.shape[1] else x
    norm = to_bfloat16(np.sqrt(np.sum(x**2)))
    x = to_bfloat16(x / to_bfloat16(norm + 1e-7))
    for _ in range(5):
        gram = to_bfloat16(x @ x.T)
        square = to_bfloat16(to_bfloat16(c * gram) @ gram)
        polynomial = to_bfloat16(to_bfloat16(b * gram) + square)
        x = to_bfloat16(to_bfloat16(a * x) + to_bfloat16(polynomial @ x))
    return x.T if g.shape[0] > g.shape[1] else x
