"""The kernels for TPUs, in the order in which they are tried, written in Pallas.

There is none for other arrays: XLA makes one loop for each.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from jax import Array

from .groups import AlikeGroups, Group, has_lengths, is_a, reductions
from .rows_groups import RowsGroup
from .tpu_kernel import tpu_kernel
from .tpu_leaf_kernel import tpu_leaf_kernel


class TpuKernel(NamedTuple):
    """A Pallas kernel for each group of a call.

    Args:
        match: whether it computes groups of this kind.
        make: ``make(group)`` returns the function from its inputs to its outputs; it raises
            ``Unsupported`` with the reason if there is none.
    """

    match: Callable[[Group], bool]
    make: Callable[[Any], Callable[..., tuple[Array, ...]]]
    divides = False  # of arrays that XLA divides over devices, it computes none

    def lower(self, call: AlikeGroups) -> Callable[..., tuple[Array, ...]]:
        """The function of the arguments of a call."""
        return call.each([self.make(group) for group in call.parts])


def _has_codes(group: Group) -> bool:
    """Whether groups of elements share the scale of 8-bit slots, rather than being rows."""
    over = reductions(group.operations)
    return has_lengths(group) and all(op.ins[0].dtype == "int32" for op in over)


KERNELS = (
    TpuKernel(is_a(RowsGroup), tpu_kernel),
    TpuKernel(_has_codes, tpu_leaf_kernel),
)
