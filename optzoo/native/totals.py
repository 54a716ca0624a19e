"""Reductions over the elements of a loop, in LLVM IR."""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from ..jaxprs.graph import Operation
from .loops import variable
from .operations import TYPES, neutral, reduced


class Totals:
    """A total for each reduction, with its start value."""

    def __init__(self, b: ir.IRBuilder, reductions: Sequence[Operation]):
        self.b = b
        self._of = {op: variable(b, TYPES[op.outs[0].dtype]) for op in reductions}
        for op, total in self._of.items():
            b.store(neutral(op.name, op.outs[0].dtype), total)

    def add(self, element_of: Callable[[Operation], Any]) -> None:
        """Adds the element ``element_of`` returns to the total of each reduction."""
        for op, total in self._of.items():
            self.b.store(reduced(self.b, op.name, self.get(op), element_of(op)), total)

    def get(self, op: Operation) -> Any:
        """The current total of a reduction."""
        return self.b.load(self._of[op], typ=TYPES[op.outs[0].dtype])
