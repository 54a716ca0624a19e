"""Elementwise JAX operations: each element depends on the same element of the operands."""

from typing import Any

import numpy as np

from ..jaxprs.graph import Operation, Value

SIZES = {
    "bool": 8,
    "int8": 8,
    "uint8": 8,
    "uint16": 16,
    "bfloat16": 16,
    "float16": 16,
    "int64": 64,
    "uint64": 64,
}
SIZES |= {"float64": 64, "float32": 32, "int32": 32, "uint32": 32}  # in bits
DTYPES = {*SIZES}
NARROW = {"bfloat16", "float16"}
UNSIGNED = {"bool", "uint8", "uint16", "uint32", "uint64"}
INTEGERS = {"int8", "int32", "int64", *UNSIGNED}
SAME = {"after", "copy", "copy_p", "pcast", "pvary"}  # "after": see optzoo/proximal/ftrl.py
_REPEATS = {*SAME, "broadcast_in_dim", "convert_element_type"}
COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
_FLOATS = {*NARROW, "float32", "float64"}
_ARITHMETIC = {"add", "add_any", "sub", "mul", "max", "min"}
_OF_FLOATS = {"div", "sqrt", "rsqrt", "integer_pow", "is_finite", "sign", "abs", "floor"}
_OF_FLOATS |= {"exp", "log"}
_BITS = {"and", "or", "xor"}
_SHIFTS = {"shift_left", "shift_right_logical", "shift_right_arithmetic"}
_ELEMENTWISE = {*SAME, *COMPARISONS, *_ARITHMETIC, *_OF_FLOATS, *_BITS, *_SHIFTS, "square"}
_ELEMENTWISE |= {
    "pow",
    "rem",
    "neg",
    "not",
    "select_n",
    "clamp",
    "convert_element_type",
    "bitcast_convert_type",
}


def is_elementwise(op: Operation) -> bool:
    """Whether an operation is elementwise and supported by the native engine."""
    name, kinds = op.name, [v.dtype for v in op.ins]
    if name not in _ELEMENTWISE or not {*kinds, *(v.dtype for v in op.outs)} <= DTYPES:
        return False
    kind, out = kinds[0], op.outs[0].dtype
    if name in SAME:
        return True
    if name == "rem":
        by = number_of(op.ins[1])
        return kind in INTEGERS - {"bool"} and by is not None and int(by) > 0
    if name in _SHIFTS:  # by less than the bits that there are
        amount = number_of(op.ins[1])
        return amount is not None and 0 <= int(amount) < SIZES[kind]
    if name == "convert_element_type":
        if (kind, out) == ("float64", "float16"):  # a call of a library on x86-64
            return False
        return not (kind in _FLOATS and out in INTEGERS and out != "bool")
    if name == "bitcast_convert_type":
        return SIZES[kind] == SIZES[out] and "bool" not in (kind, out)
    if name in _ARITHMETIC or name == "clamp":
        return kind != "bool"
    if name in _OF_FLOATS:
        return kind in _FLOATS
    if name == "pow":  # computed in float64, which is not enough for its own powers
        return kind == kinds[1] and kind in _FLOATS - {"float64"}
    if name in _BITS or name == "not":
        return kind in INTEGERS
    if name in ("neg", "square"):
        return kind not in UNSIGNED
    return name != "select_n" or (len(kinds) == 3 and kind == "bool")


def number_of(value: Value) -> Any:
    """The known number that all elements of a value equal; None if unknown."""
    op = value.maker
    if value.literal is not None or op is None or op.name not in _REPEATS:
        return value.literal if not value.shape else None
    found = number_of(op.ins[0])
    return None if found is None else np.asarray(found).astype(value.dtype)


def uses_half(op: Operation) -> bool:
    """Whether an operation needs float16."""
    return any(v.dtype == "float16" for v in (*op.ins, *op.outs))
