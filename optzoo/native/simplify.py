"""Removes computations whose results are known."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from ..core.numerics import promote_types
from ..jaxprs.graph import Graph, Operation, Value
from .elementwise import number_of
from .order import in_order


def simplify(program: Graph) -> None:
    """Removes additions of zeros, as XLA does, and duplicate additions of rows."""
    same, added = dict[Value, Value](), _rows_added(program)

    def replace(op):
        op.ins = [same.get(v, v) for v in op.ins]
        for each in op.inside:
            replace(each)

    for op in program.operations:
        replace(op)
        found = _unchanged(op) or _added_elsewhere(op, added)
        if found is not None and found.aval == op.outs[0].aval:
            same[op.outs[0]] = found
    program.results = [same.get(v, v) for v in program.results]
    operations = [op for op in program.operations if not same.keys() & {*op.outs}]
    program.operations = in_order(operations, program.results)


def _rows_added(program: Graph) -> dict[Any, Value]:
    """The results of additions of rows, by their operands."""
    return {tuple(op.ins): op.outs[0] for op in program.operations if op.name == "rows_add"}


def _added_elsewhere(op: Operation, added: Mapping[Any, Value]) -> Value | None:
    """The sum of an array and of rows in an array of zeros, if the rows are also added to it."""
    if op.name not in ("add", "add_any"):
        return None
    for v, w in (op.ins, op.ins[::-1]):
        rows = w.maker
        if rows is not None and rows.name == "rows_add" and _is_zero(rows.ins[0]):
            return added.get((v, *rows.ins[1:]))
    return None


def _unchanged(op: Operation) -> Value | None:
    """The operand that equals the result, if there is one."""
    if op.name == "optzoo_placed_as":  # results of native code are where its operands are
        return op.ins[0]
    if op.name in ("add", "add_any"):
        return next((v for v, w in (op.ins, op.ins[::-1]) if _is_zero(w)), None)
    if op.name == "reduce_sum" and not op.params["axes"]:
        return op.ins[0]
    if op.name == "rows_add":
        return op.ins[0] if _is_zero(op.ins[2]) else None
    if op.name == "convert_element_type":  # back, after nothing was added
        middle = op.ins[0]
        if middle.maker is not None and middle.maker.name == op.name:
            first = middle.maker.ins[0]
            return first if _holds_all(middle.aval.dtype, first.aval.dtype) else None
    return None


def _holds_all(wide: Any, dtype: Any) -> bool:
    """Whether one dtype can represent every number of another."""
    if promote_types(dtype, wide) != wide:
        return False
    if not (jnp.issubdtype(dtype, jnp.integer) and jnp.issubdtype(wide, jnp.floating)):
        return True
    numbers = jnp.iinfo(dtype)
    return numbers.bits - (numbers.min < 0) <= jnp.finfo(wide).nmant + 1


def _is_zero(v: Value) -> bool:
    """Whether all elements of a value are known to be zero."""
    number = number_of(v)
    return number is not None and v.aval.dtype.kind in "iuf" and number == 0
