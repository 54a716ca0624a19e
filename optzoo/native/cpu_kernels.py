"""The kernels for CPUs, in the order in which they are tried: functions that LLVM compiles."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax import Array

from . import machine
from .call_frame import version_of_jaxlib
from .groups import AlikeGroups, Group, LeafGroup, has_lengths, is_a
from .leaf_kernel import leaf_kernel
from .norms import SumGroup
from .rows_groups import RowsGroup
from .rows_kernel import rows_kernel
from .scratch import of_rows, of_sums
from .sum_kernel import sum_kernel


class CpuKernel(NamedTuple):
    """A native function, which XLA calls.

    Args:
        match: whether it computes groups of this kind.
        write: ``write(name, group, version)`` returns its text in LLVM IR, which is the same for
            all groups of a call.
        scratch: the temporary arrays of a call with these groups.
        divides: whether it computes on the parts of arrays that XLA divides over devices.
    """

    match: Callable[[Group], bool]
    write: Callable[[str, Any, tuple[int, int]], str]
    scratch: Callable[[Sequence[Any]], list[jax.ShapeDtypeStruct]] = lambda groups: []
    divides: bool = False

    def text(self, call: AlikeGroups, name: str) -> str:
        """The function of a call."""
        return self.write(name, call.parts[0], version_of_jaxlib())

    def lower(self, call: AlikeGroups) -> Callable[..., tuple[Array, ...]]:
        """The function of the arguments of a call, of arrays of one device."""
        name = machine.register(lambda name: self.text(call, name))

        def run(*args):
            shapes = [v.shape for v in call.outs]
            if self.divides:  # the arrays of a group have one shape: here the part of a device
                first, many = call.parts[0], len(call.parts[0].outs)
                arrays = len(first.ins) - call.shared
                shapes = [
                    args[call.shared + k // many * arrays].shape for k in range(len(call.outs))
                ]
            types = zip(shapes, call.outs, strict=True)
            results = [jax.ShapeDtypeStruct(shape, v.aval.dtype) for shape, v in types]
            results += self.scratch(call.parts)
            f = jax.ffi.ffi_call(name, results, input_output_aliases=call.aliases)
            return tuple(f(*args))[: len(call.outs)]

        return run


def _scratch_of_sums(groups: Sequence[SumGroup]) -> list[jax.ShapeDtypeStruct]:
    sizes = [math.prod(group.arrays[0].shape) for group in groups]
    return of_sums(sizes, len(groups[0].outs))


KERNELS = (
    CpuKernel(is_a(RowsGroup), rows_kernel, scratch=lambda groups: of_rows(groups[0])),
    CpuKernel(is_a(SumGroup), sum_kernel, scratch=_scratch_of_sums),
    CpuKernel(has_lengths, leaf_kernel),
    CpuKernel(is_a(LeafGroup), leaf_kernel, divides=True),
)
