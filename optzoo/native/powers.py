"""Exponentials, logarithms and real powers, in LLVM IR.

They are implemented here, since calls of a library would prevent vectorization by LLVM. For the
same reason numbers are rounded to integers by adding a large number whose last place is 1.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir

I32, I64 = ir.IntType(32), ir.IntType(64)
F32, F64 = ir.FloatType(), ir.DoubleType()
_INF, _NAN = F64(math.inf), F64(math.nan)
_CONTRACT = ("contract",)


class _Format(NamedTuple):
    """Constants of an exponential for a floating-point type."""

    integer: Any  # of as many bits
    places: int  # of the mantissa
    bias: int  # of the exponent
    least: float  # below it the exponential is 0
    most: float  # above it it is infinite
    # The logarithm of 2 in two parts: the product of the first one and an exponent is exact.
    high: float
    low: float
    terms: int  # of the Taylor series

    def magic(self) -> float:
        """A number whose last place is 1."""
        return 1.5 * 2.0**self.places


_LN2_HIGH, _LN2_LOW = 0.6931471675634384, 1.2996506893889889e-08
_FORMATS = {
    F32: _Format(I32, 23, 127, -105.0, 89.0, 0.693359375, -2.1219444005469057e-4, 8),
    F64: _Format(I64, 52, 1023, -746.0, 710.0, _LN2_HIGH, _LN2_LOW, 14),
}


def exponential(b: ir.IRBuilder, x: Any) -> Any:
    """``exp(x)``: a power of 2 times the Taylor series of the rest."""
    t, form = x.type, _FORMATS[x.type]
    x = _select(b, "<", x, t(form.least), t(form.least), x)
    x = _select(b, ">", x, t(form.most), t(form.most), x)
    shifted = _plus(b, _times(b, x, t(1 / math.log(2))), t(form.magic()))
    whole = b.fsub(shifted, t(form.magic()))
    rest = _plus(b, _times(b, whole, t(-form.high)), x)
    rest = _plus(b, _times(b, whole, t(-form.low)), rest)
    series = _polynomial(b, rest, [1 / math.factorial(k) for k in range(form.terms)])
    bits = (
        np.dtype(f"float{form.integer.width}").type(form.magic()).view(f"int{form.integer.width}")
    )
    power = b.sub(b.bitcast(shifted, form.integer), form.integer(int(bits)))
    half = b.ashr(power, form.integer(1))  # one factor alone may be too small or too large
    for factor in (half, b.sub(power, half)):
        exponent = b.add(factor, form.integer(form.bias))
        scale = b.bitcast(b.shl(exponent, form.integer(form.places)), t)
        series = b.fmul(series, scale)
    return series


def logarithm(b: ir.IRBuilder, x: Any) -> Any:
    """``log(x)``: of a power of 2, plus the series of ``atanh`` for the rest."""
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
    """A polynomial by Horner's rule, with coefficients in ascending order."""
    found = x.type(factors[-1])
    for factor in reversed(factors[:-1]):
        found = _plus(b, _times(b, found, x), x.type(factor))
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
