"""JAX operations on single elements, in LLVM IR.

A value of a dtype is an LLVM value; bfloat16 is represented by its bits.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir

from ..jaxprs.graph import Operation
from .elementwise import COMPARISONS, INTEGERS, NARROW, SAME, SIZES, UNSIGNED
from .powers import exponential, logarithm, power

BOOL, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F16, F32, F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()
TYPES = {
    "bool": BOOL, "int8": I8, "uint8": I8, "uint16": I16,
    "int32": I32, "uint32": I32, "int64": I64, "uint64": I64,
    "bfloat16": I16, "float16": F16, "float32": F32, "float64": F64,
}  # fmt: skip
# XLA contracts products and sums on the CPU, too: only so are the results equal to the bit.
_CONTRACT = ("contract",)
_BITS = {"and": "and_", "or": "or_", "xor": "xor"}
_OF_DOUBLES = {"log": logarithm, "pow": power}
_OF_BOOLS = {"reduce_and": "and_", "reduce_or": "or_"}
_SHIFTS = {"shift_left": "shl", "shift_right_logical": "lshr", "shift_right_arithmetic": "ashr"}


def constant(dtype: str, value: Any) -> Any:
    """A constant of a dtype."""
    if dtype == "bfloat16":
        return I16(int(np.asarray(value, np.float32).view(np.uint32)) >> 16)
    return TYPES[dtype](int(value) if dtype in INTEGERS else float(value))


def compute(b: ir.IRBuilder, op: Operation, args: Sequence[Any]) -> Any:
    """The result of an elementwise operation on elements."""
    kind, out = op.ins[0].dtype, op.outs[0].dtype
    if op.name in SAME:
        return args[0]
    if op.name == "select_n":
        return b.select(args[0], args[2], args[1])
    if op.name == "convert_element_type":
        return convert(b, args[0], kind, out)
    if op.name == "bitcast_convert_type":
        return args[0] if TYPES[kind] == TYPES[out] else b.bitcast(args[0], TYPES[out])
    if op.name in _SHIFTS:
        return getattr(b, _SHIFTS[op.name])(*args)
    if op.name == "not":
        return b.not_(args[0])
    if op.name in _BITS:
        return getattr(b, _BITS[op.name])(*args)
    if kind in INTEGERS:
        return _of_integers(b, op.name, kind, args)
    # As XLA does, in float32, rounded after each operation.
    wide = "float32" if kind in NARROW else kind
    args = [convert(b, a, kind, wide) for a in args]
    made = _of_floats(b, op, wide, args)
    return made if out == "bool" else convert(b, made, wide, out)


def add(b: ir.IRBuilder, dtype: str, x: Any, y: Any) -> Any:
    """The sum of two elements of a dtype."""
    if dtype in INTEGERS:
        return b.add(x, y)
    wide = "float32" if dtype in NARROW else dtype
    x, y = (convert(b, a, dtype, wide) for a in (x, y))
    return convert(b, b.fadd(x, y, flags=_CONTRACT), wide, dtype)


def smaller(b: ir.IRBuilder, x: Any, y: Any) -> Any:
    """The smaller of two signed integers."""
    return b.select(b.icmp_signed("<", x, y), x, y)


def larger(b: ir.IRBuilder, x: Any, y: Any) -> Any:
    """The larger of two signed integers."""
    return b.select(b.icmp_signed(">", x, y), x, y)


def neutral(name: str, dtype: str) -> Any:
    """The start value of a reduction."""
    if dtype == "bool":
        return BOOL(name == "reduce_and")
    if dtype in INTEGERS:
        last = 2 ** (SIZES[dtype] - 1)
        return TYPES[dtype](-last if name == "reduce_max" else last - 1)
    return TYPES[dtype]({"reduce_sum": 0.0, "reduce_max": -math.inf, "reduce_min": math.inf}[name])


def reduced(b: ir.IRBuilder, name: str, total: Any, x: Any) -> Any:
    """A step of a reduction, in any order."""
    if name in _OF_BOOLS:
        return getattr(b, _OF_BOOLS[name])(total, x)
    if isinstance(x.type, ir.IntType):  # with a sign
        return (larger if name == "reduce_max" else smaller)(b, total, x)
    if name == "reduce_sum":
        return b.fadd(total, x, flags=("reassoc", "contract"))
    return (_larger if name == "reduce_max" else _smaller)(b, total, x)


def _of_integers(b: ir.IRBuilder, name: str, kind: str, args: Sequence[Any]) -> Any:
    compare = b.icmp_unsigned if kind in UNSIGNED else b.icmp_signed
    larger = lambda x, y: b.select(compare(">=", x, y), x, y)
    smaller = lambda x, y: b.select(compare("<=", x, y), x, y)
    if name in COMPARISONS:
        return compare(COMPARISONS[name], *args)
    if name == "square":
        return b.mul(args[0], args[0])
    if name == "rem":
        return (b.urem if kind in UNSIGNED else b.srem)(*args)
    if name == "clamp":
        return smaller(larger(args[0], args[1]), args[2])
    plain = {"add": b.add, "add_any": b.add, "sub": b.sub, "mul": b.mul, "neg": b.neg}
    return (plain | {"max": larger, "min": smaller})[name](*args)


def _of_floats(b: ir.IRBuilder, op: Operation, kind: str, args: Sequence[Any]) -> Any:
    name, x, t = op.name, args[0], TYPES[kind]
    if name in COMPARISONS:
        compare = b.fcmp_unordered if name == "ne" else b.fcmp_ordered
        return compare(COMPARISONS[name], *args)
    if name == "is_finite":
        return b.fcmp_ordered("<", _intrinsic(b, "fabs", x), t(float("inf")))
    if name == "integer_pow":
        return _integer_power(b, x, op.eqn.params["y"], t)
    if name in _OF_DOUBLES:
        doubles = [convert(b, a, kind, "float64") for a in args]
        return convert(b, _OF_DOUBLES[name](b, *doubles), "float64", kind)
    if name == "sign":
        one = _intrinsic(b, "copysign", t(1.0), x)
        return b.select(b.fcmp_ordered("!=", x, t(0.0)), one, x)
    if name == "clamp":
        return _smaller(b, _larger(b, args[0], args[1]), args[2])
    times = lambda x, y: b.fmul(x, y, flags=_CONTRACT)
    return {
        "add": lambda x, y: b.fadd(x, y, flags=_CONTRACT),
        "add_any": lambda x, y: b.fadd(x, y, flags=_CONTRACT),
        "sub": lambda x, y: b.fsub(x, y, flags=_CONTRACT),
        "mul": times,
        "square": lambda x: times(x, x),
        "div": lambda x, y: b.fdiv(x, y),
        "neg": lambda x: b.fneg(x),
        "abs": lambda x: _intrinsic(b, "fabs", x),
        "sqrt": lambda x: _intrinsic(b, "sqrt", x),
        "exp": lambda x: exponential(b, x),
        "floor": lambda x: _intrinsic(b, "floor", x),
        "rsqrt": lambda x: b.fdiv(t(1.0), _intrinsic(b, "sqrt", x)),
        "max": lambda x, y: _larger(b, x, y),
        "min": lambda x, y: _smaller(b, x, y),
    }[name](*args)


def _larger(b: ir.IRBuilder, x: Any, y: Any) -> Any:
    """NaN if either operand is NaN; 0 of 0 and -0."""
    return _intrinsic(b, "maximum", x, y)


def _smaller(b: ir.IRBuilder, x: Any, y: Any) -> Any:
    """NaN if either operand is NaN; -0 of 0 and -0."""
    return _intrinsic(b, "minimum", x, y)


def _integer_power(b: ir.IRBuilder, x: Any, y: int, t: Any) -> Any:
    """By repeated squaring, like JAX."""
    result, n = None, abs(y)
    while n:
        if n & 1:
            result = x if result is None else b.fmul(result, x, flags=_CONTRACT)
        n >>= 1
        if n:
            x = b.fmul(x, x, flags=_CONTRACT)
    result = t(1.0) if result is None else result
    return b.fdiv(t(1.0), result) if y < 0 else result


def _intrinsic(b: ir.IRBuilder, name: str, *args: Any) -> Any:
    t = args[0].type
    function = b.module.declare_intrinsic(f"llvm.{name}", [t], ir.FunctionType(t, [t] * len(args)))
    return b.call(function, args)


def convert(b: ir.IRBuilder, x: Any, kind: str, out: str) -> Any:
    """An element in another dtype, rounded to nearest."""
    if kind == out:
        return x
    if kind == "bfloat16":
        wide = b.bitcast(b.shl(b.zext(x, I32), I32(16)), F32)
        return convert(b, wide, "float32", out)
    if out == "bfloat16":
        return _to_bfloat16(b, convert(b, x, kind, "float32"))
    if out == "bool":
        if kind in INTEGERS:
            return b.icmp_unsigned("!=", x, TYPES[kind](0))
        return b.fcmp_unordered("!=", x, TYPES[kind](0.0))
    t = TYPES[out]
    if kind in INTEGERS and out in INTEGERS:
        if kind == "bool":  # one bit in a register
            return b.zext(x, t)
        if SIZES[kind] == SIZES[out]:
            return x
        if SIZES[kind] > SIZES[out]:
            return b.trunc(x, t)
        return b.zext(x, t) if kind in UNSIGNED else b.sext(x, t)
    if kind in INTEGERS:
        return b.uitofp(x, t) if kind in UNSIGNED else b.sitofp(x, t)
    return b.fpext(x, t) if SIZES[kind] < SIZES[out] else b.fptrunc(x, t)


def _to_bfloat16(b: ir.IRBuilder, x: Any) -> Any:
    """The upper half of the bits, rounded to nearest even; keeps NaN."""
    bits = b.bitcast(x, I32)
    upper = b.lshr(bits, I32(16))
    rounded = b.lshr(b.add(b.add(bits, I32(0x7FFF)), b.and_(upper, I32(1))), I32(16))
    is_nan = b.fcmp_unordered("uno", x, x)
    return b.trunc(b.select(is_nan, b.or_(upper, I32(0x40)), rounded), I16)


# In memory


def stored_type(dtype: str) -> Any:
    """The type of an element in memory."""
    return I8 if dtype == "bool" else TYPES[dtype]


def element(b: ir.IRBuilder, dtype: str, pointer: Any, at: Any) -> Any:
    """The place of the element at an index of an array."""
    return b.gep(pointer, [at], source_etype=stored_type(dtype))


def load(b: ir.IRBuilder, dtype: str, pointer: Any, at: Any) -> Any:
    """The element at an index of an array."""
    t = stored_type(dtype)
    x = b.load(element(b, dtype, pointer, at), typ=t)
    return b.icmp_unsigned("!=", x, I8(0)) if dtype == "bool" else x


def store(b: ir.IRBuilder, dtype: str, pointer: Any, at: Any, x: Any) -> None:
    """Writes the element at an index of an array."""
    x = b.zext(x, I8) if dtype == "bool" else x
    b.store(x, element(b, dtype, pointer, at))


def bytes_of(dtype: str) -> int:
    """The bytes of an element in memory."""
    width = {ir.HalfType: 16, ir.FloatType: 32, ir.DoubleType: 64}
    t = stored_type(dtype)
    bits = t.width if isinstance(t, ir.IntType) else width[type(t)]
    return bits // 8
