"""Native calls in a JAX program: one primitive, which contains the operations that it replaces.

On CPUs it is lowered to a call of the native function, on TPUs rows are lowered to a Pallas kernel.
Otherwise, under ``vmap`` and in derivatives, it is lowered to the operations.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ..core.compat import (
    can_partition,
    make_replaceable,
    number_of_partitions,
    partitioned_by_first,
)
from ..core.marks import NATIVE
from ..jaxprs.graph import Operation, Value
from .engine import problem, warn_once
from .groups import Group, LeafGroup, Unsupported, reductions
from .norms import SumGroup
from .rows_groups import RowsGroup
from .scratch import of_rows, of_sums


class Call:
    """One native call for rows, leaves or sums that share their operations and scalars.

    Args:
        parts: the rows, the leaves or the sums.
        required: whether it is an error if XLA computes it.
    """

    def __init__(self, parts: Sequence[Group], required: bool = False):
        self.parts, self.required, first = parts, required, parts[0]
        ns = len(first.scalars) if isinstance(first, LeafGroup) else 0
        arrays, many = len(first.ins) - ns, len(first.outs)
        self.shared = ns
        self.ins = [*first.ins[:ns], *(v for part in parts for v in part.ins[ns:])]
        self.outs = [v for part in parts for v in part.outs]
        self.aliases = {
            k * arrays + i: k * many + o for k, p in enumerate(parts) for i, o in p.aliases.items()
        }
        self.operations: list[Operation] = [op for part in parts for op in part.operations]

    @property
    def tables(self) -> dict[int, int]:
        """For outputs that are tables with changed rows, the inputs that they replace, by index."""
        is_rows = isinstance(self.parts[0], RowsGroup)
        return {o: i for i, o in self.aliases.items()} if is_rows else {}

    def run(self, known: dict[Value, Any]) -> None:
        """Computes the outputs from known values, and adds them."""
        args = [jnp.asarray(known[v] if v.literal is None else v.literal) for v in self.ins]
        known.update(zip(self.outs, _native_p.bind(*args, call=self), strict=True))

    def reference(self, *args: Array) -> tuple[Array, ...]:
        """The outputs by the operations themselves."""
        known = dict(zip(self.ins, args, strict=True))
        for op in self.operations:
            op.run(known)
        return tuple(known[v] for v in self.outs)

    def on_cpu(self, ctx: Any) -> Callable[..., tuple[Array, ...]]:
        """The function for CPUs, in a lowered program."""
        if reason := problem():
            return self._without(reason)
        is_divided, first = number_of_partitions(ctx) > 1, self.parts[0]
        is_whole = isinstance(first, RowsGroup | SumGroup) or _in_groups(first)
        if is_divided and (is_whole or not can_partition(ctx)):
            _check_plain("of arrays that it divides over devices", self)
            return self.reference  # XLA would gather the arrays on every device
        try:
            _ = self.name
        except Exception as error:  # whatever LLVM says: XLA can do the same
            return self._without(f"native code cannot be compiled: {type(error).__name__}: {error}")
        if not is_divided:
            return self._native
        arrays = [len(p.arrays) for p in self.parts if isinstance(p, LeafGroup)]
        shapes = [p.ins[-1].shape for p in self.parts]
        outs = [len(p.outs) for p in self.parts]
        f, ns = partitioned_by_first(self._native, self.shared, shapes, arrays, outs), self.shared
        return lambda *args: f(*(jnp.reshape(x, ()) for x in args[:ns]), *args[ns:])

    def on_tpu(self, ctx: Any) -> Callable[..., tuple[Array, ...]]:
        """The function for TPUs; for other leaves XLA makes one loop each."""
        first = self.parts[0]
        has_kernel = isinstance(first, RowsGroup) or _has_codes(first)
        if number_of_partitions(ctx) > 1:
            _check_plain("of arrays that it divides over devices", self)
        if not has_kernel or number_of_partitions(ctx) > 1:
            return self.reference
        from .tpu_kernel import tpu_kernel
        from .tpu_leaf_kernel import tpu_leaf_kernel

        try:
            if isinstance(first, RowsGroup):
                return tpu_kernel(first)
            return self._each([tpu_leaf_kernel(p) for p in self.parts if isinstance(p, LeafGroup)])
        except Unsupported as error:
            if self.required:
                raise RuntimeError(f"native code is required, but {error}") from error
            return self.reference

    def _each(
        self, kernels: Sequence[Callable[..., tuple[Array, ...]]]
    ) -> Callable[..., tuple[Array, ...]]:
        """One function for each part."""
        many = len(self.parts[0].ins) - self.shared

        def call(*args):
            scalars, arrays = args[: self.shared], args[self.shared :]
            found = [
                kernel(*scalars, *arrays[k * many : (k + 1) * many])
                for k, kernel in enumerate(kernels)
            ]
            return tuple(x for each in found for x in each)

        return call

    def _without(self, reason: str) -> Callable[..., tuple[Array, ...]]:
        """The operations themselves, if native code for CPUs cannot run."""
        if self.required:
            raise RuntimeError(f"native code is required: {reason}")
        warn_once(reason)
        return self.reference

    @functools.cached_property
    def name(self) -> str:
        """The name of the compiled native function for CPUs."""
        from . import machine
        from .call_frame import version_of_jaxlib
        from .leaf_kernel import leaf_kernel
        from .rows_kernel import rows_kernel
        from .sum_kernel import sum_kernel

        part, version = self.parts[0], version_of_jaxlib()
        if isinstance(part, RowsGroup):
            return machine.register(lambda name: rows_kernel(name, part, version))
        if isinstance(part, SumGroup):
            return machine.register(lambda name: sum_kernel(name, part, version))
        assert isinstance(part, LeafGroup)
        return machine.register(lambda name: leaf_kernel(name, part, version))

    def _native(self, *args: Array) -> tuple[Array, ...]:
        """The call, for arrays of one device."""
        part, many = self.parts[0], len(self.parts[0].outs)
        if isinstance(part, RowsGroup | SumGroup) or _in_groups(part):
            shapes = [v.shape for v in self.outs]
        else:  # those of this device, which may be a part
            arrays = len(part.ins) - self.shared
            shapes = [args[self.shared + k // many * arrays].shape for k in range(len(self.outs))]
        results = [
            jax.ShapeDtypeStruct(shape, v.aval.dtype)
            for shape, v in zip(shapes, self.outs, strict=True)
        ]
        scratch = of_rows(part) if isinstance(part, RowsGroup) else []
        if isinstance(part, SumGroup):
            sums = (p for p in self.parts if isinstance(p, SumGroup))
            scratch = of_sums([math.prod(p.arrays[0].shape) for p in sums], many)
        call = jax.ffi.ffi_call(self.name, [*results, *scratch], input_output_aliases=self.aliases)
        return tuple(call(*args))[: len(results)]


def _in_groups(part: Group) -> bool:
    """Whether some arrays of leaves have one element for each group of elements of others."""
    return isinstance(part, LeafGroup) and part.length > 0


def _has_codes(part: Group) -> bool:
    """Whether the groups share a scale of 8-bit slots, rather than being rows."""
    return _in_groups(part) and all(
        op.ins[0].dtype == "int32" for op in reductions(part.operations)
    )


def _types(*avals: Any, call: Call) -> list[Any] | None:
    same = list(avals) == [v.aval for v in call.ins]
    return [v.aval for v in call.outs] if same else None


def _check_plain(where: str, call: Call) -> None:
    if call.required:
        raise RuntimeError(
            f"native code is required, but XLA computes the update {where}: native code supports "
            "CPUs and TPUs, outside of vmap and derivatives"
        )


_NATIVE_ON = {
    "cpu": lambda ctx, call: call.on_cpu(ctx),
    "tpu": lambda ctx, call: call.on_tpu(ctx),
}
_native_p = make_replaceable(
    NATIVE,
    lambda *args, call: call.reference(*args),
    types=_types,
    on=_NATIVE_ON,
    check_plain=_check_plain,
)
