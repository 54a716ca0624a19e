"""The number of updates from a power such as ``beta1_power``."""

import math
from typing import Any

import numpy as np


def estimate_exponent(power: Any, base: Any) -> float | None:
    """The ``n`` of ``power = base ** n``, both in float32; None if it cannot be known.

    So it is where the power is 0 or not normal, or the base not between 0 and 1.
    """
    power, base = float(power), float(base)
    if not (0 < base < 1 and np.finfo(np.float32).tiny < power <= 1):
        return None
    exponent = math.log(power) / math.log(base)
    return exponent if exponent < 1e5 else None


def is_integer_exponent(exponent: float) -> bool:
    """Whether it is a positive integer, up to the rounding of the power."""
    # Of 0.9999 it is off by 0.13 after 200,000 steps; of 0.999 by 0.01 before the power is zero.
    return exponent > 0.5 and abs(exponent - round(exponent)) < 1e-3 + 1e-6 * exponent
