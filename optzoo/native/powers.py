"""Exponentials, logarithms and real powers of doubles, in LLVM's language.

They are written out, because calls of a library would keep LLVM from computing several elements at
once. Integers are made by adding a large number, whose last place is 1, for the same reason.
"""

import math
from typing import Any

import numpy as np
from llvmlite import ir

I64, F64 = ir.IntType(64), ir.DoubleType()
_INF, _NAN = F64(math.inf), F64(math.nan)
# The logarithm of 2 in two parts: the product of the first one and an exponent is exact.
_LN2_HIGH, _LN2_LOW = 0.6931471675634384, 1.2996506893889889e-08
_MAGIC = 3 * 2.0**51  # its last place is 1
_BITS_OF_MAGIC = int(np.array(_MAGIC).view(np.int64))
_CONTRACT = ("contract",)


def exponential(b: ir.IRBuilder, x: Any) -> Any:
    """``exp(x)``: 2 to an integer times the Taylor series of what is left, to the 13th power."""
    x = _select(b, "<", x, F64(-746.0), F64(-746.0), x)  # all of these are 0
    x = _select(b, ">", x, F64(710.0), F64(710.0), x)  # and these infinite
    shifted = _plus(b, _times(b, x, F64(1 / math.log(2))), F64(_MAGIC))
    whole = b.fsub(shifted, F64(_MAGIC))
    rest = _plus(b, _times(b, whole, F64(-_LN2_HIGH)), x)
    rest = _plus(b, _times(b, whole, F64(-_LN2_LOW)), rest)
    series = _polynomial(b, rest, [1 / math.factorial(k) for k in range(14)])
    power = b.sub(b.bitcast(shifted, I64), I64(_BITS_OF_MAGIC))
    half = b.ashr(power, I64(1))  # two factors, since one alone may be too small or too large
    for factor in (half, b.sub(power, half)):
        bits = b.shl(b.add(factor, I64(1023)), I64(52))
        series = b.fmul(series, b.bitcast(bits, F64))
    return series


def logarithm(b: ir.IRBuilder, x: Any) -> Any:
    """``log(x)``: of a power of 2, and of what is left by the series of ``atanh``."""
    is_tiny = b.fcmp_ordered("<", x, F64(2.0**-1022))
    normal = b.select(is_tiny, b.fmul(x, F64(2.0**54)), x)
    bits = b.bitcast(normal, I64)
    exponent = b.or_(b.lshr(bits, I64(52)), I64(0x433 << 52))
    exponent = b.fsub(b.bitcast(exponent, F64), F64(2.0**52 + 1022))
    exponent = b.select(is_tiny, b.fsub(exponent, F64(54.0)), exponent)
    bits = b.or_(b.and_(bits, I64((1 << 52) - 1)), I64(1022 << 52))
    m = b.bitcast(bits, F64)  # in [1/2, 1)
    is_low = b.fcmp_ordered("<", m, F64(math.sqrt(0.5)))
    m = b.select(is_low, b.fmul(m, F64(2.0)), m)
    exponent = b.select(is_low, b.fsub(exponent, F64(1.0)), exponent)
    # log(1 + f) = f - s (f - r) with s = f / (2 + f) and s r = 2 atanh s - 2 s, or f^2/2 added
    # and taken away, which loses fewer places; |s| < 0.172.
    f = b.fsub(m, F64(1.0))
    s, square = b.fdiv(f, b.fadd(f, F64(2.0))), b.fmul(b.fmul(f, f), F64(0.5))
    z = b.fmul(s, s)
    r = b.fmul(z, _polynomial(b, z, [2 / (2 * k + 3) for k in range(11)]))
    low = _plus(b, _times(b, s, b.fadd(square, r)), _times(b, exponent, F64(_LN2_LOW)))
    rest = b.fsub(b.fsub(square, low), f)
    found = b.fsub(b.fmul(exponent, F64(_LN2_HIGH)), rest)
    found = _select(b, "==", x, _INF, _INF, found)
    found = _select(b, "==", x, F64(0.0), F64(-math.inf), found)
    is_number = b.fcmp_ordered(">=", x, F64(0.0))
    return b.select(is_number, found, _NAN)


def power(b: ir.IRBuilder, x: Any, y: Any) -> Any:
    """``x**y``, as C defines it, to the precision of float32."""
    size = _intrinsic(b, "fabs", x)
    found = exponential(b, b.fmul(y, logarithm(b, size)))
    half, floor = b.fmul(y, F64(0.5)), lambda v: _intrinsic(b, "floor", v)
    is_whole = b.fcmp_ordered("==", floor(y), y)
    is_odd = b.and_(is_whole, b.fcmp_ordered("!=", floor(half), half))
    is_negative = b.icmp_signed("<", b.bitcast(x, I64), I64(0))  # the bits tell -0 from 0
    found = b.select(b.and_(is_negative, is_odd), b.fneg(found), found)
    is_finite = b.fcmp_ordered("<", size, _INF)
    has_none = b.and_(b.and_(b.fcmp_ordered("<", x, F64(0.0)), is_finite), b.not_(is_whole))
    found = b.select(has_none, _NAN, found)
    is_one = b.and_(
        b.fcmp_ordered("==", size, F64(1.0)),
        b.fcmp_ordered("==", _intrinsic(b, "fabs", y), _INF),
    )
    found = b.select(is_one, F64(1.0), found)
    found = _select(b, "==", x, F64(1.0), F64(1.0), found)
    return _select(b, "==", y, F64(0.0), F64(1.0), found)


def _polynomial(b: ir.IRBuilder, x: Any, factors: list[float]) -> Any:
    """By Horner's rule, the factor of the lowest power first."""
    found = F64(factors[-1])
    for factor in reversed(factors[:-1]):
        found = _plus(b, _times(b, found, x), F64(factor))
    return found


def _times(b: ir.IRBuilder, x: Any, y: Any) -> Any:
    return b.fmul(x, y, flags=_CONTRACT)


def _plus(b: ir.IRBuilder, x: Any, y: Any) -> Any:
    return b.fadd(x, y, flags=_CONTRACT)


def _select(b: ir.IRBuilder, how: str, x: Any, y: Any, yes: Any, no: Any) -> Any:
    return b.select(b.fcmp_ordered(how, x, y), yes, no)


def _intrinsic(b: ir.IRBuilder, name: str, x: Any) -> Any:
    function = b.module.declare_intrinsic(f"llvm.{name}", [F64], ir.FunctionType(F64, [F64]))
    return b.call(function, [x])
