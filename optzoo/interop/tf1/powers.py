"""The number of updates from a power such as ``beta1_power``."""

import math
from typing import Any

import numpy as np

_TINY = float(np.finfo(np.float32).tiny)


def estimate_exponent(power: Any, base: Any) -> float | None:
    """The ``n`` of ``power = base ** n``, both in float32; None if it cannot be determined.

    This is the case if the power is 0 or subnormal, or the base is not between 0 and 1.
    """
    power, base = float(power), float(base)
    if not (0 < base < 1 and _TINY < power <= 1):
        return None
    exponent = math.log(power) / math.log(base)
    return exponent if exponent < 1e5 else None


def is_integer_exponent(exponent: float) -> bool:
    """Whether ``n`` is a positive integer, up to the rounding of the power."""
    # Of 0.9999 it is off by 0.13 after 200,000 steps; of 0.999 by 0.01 before the power is zero.
    return exponent > 0.5 and abs(exponent - round(exponent)) < 1e-3 + 1e-6 * exponent


def can_be_power(power: Any, base: Any) -> bool:
    """Whether ``base ** n`` may be this value in float32, for any positive integer ``n``.

    After many steps the power is 0 or subnormal.
    """
    power, base = float(power), float(base)
    if not 0 < base < 1:
        return power == base
    exponent = estimate_exponent(power, base)
    return 0 <= power <= 1 if exponent is None else is_integer_exponent(exponent)


def is_lost_before(power: Any, base: Any, exponent: float) -> bool:
    """Whether a power is 0 or subnormal, although ``base ** exponent`` is normal."""
    rounding = 0.1 + 1e-7 * exponent  # which may add up over the steps
    is_lost = 0 < float(base) < 1 and 0 <= float(power) <= _TINY
    return is_lost and exponent * math.log(float(base)) >= math.log(_TINY) + rounding
