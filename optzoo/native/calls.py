"""Native calls in a JAX program: one primitive, which contains the operations that it replaces.

It is lowered to a kernel of the platform, if one matches. Otherwise, under ``vmap`` and in
derivatives, it is lowered to the operations.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax.numpy as jnp
from jax import Array

from ..core.compat import (
    can_partition,
    make_replaceable,
    number_of_partitions,
    partitioned_by_first,
)
from ..jaxprs.graph import Value
from .engine import problem, warn_once
from .groups import AlikeGroups, Group, Unsupported


class Call(AlikeGroups):
    """One native call.

    Args:
        parts: the groups.
        required: whether it is an error if XLA computes it.
    """

    def __init__(self, parts: Sequence[Group], required: bool = False):
        super().__init__(parts)
        self.required = required

    def run(self, known: dict[Value, Any]) -> None:
        """Computes the outputs from known values, and adds them."""
        args = [jnp.asarray(known[v] if v.literal is None else v.literal) for v in self.ins]
        rows = {o: i for i, o in self.aliases.items()} if self.parts[0].changes_rows else {}
        outs = _native_p.bind(*args, call=self, changed_rows=tuple(rows.items()))
        known.update(zip(self.outs, outs, strict=True))

    def reference(self, *args: Array) -> tuple[Array, ...]:
        """The outputs by the operations themselves."""
        known = dict(zip(self.ins, args, strict=True))
        for op in self.operations:
            op.run(known)
        return tuple(known[v] for v in self.outs)


class Kernel(Protocol):
    """What computes calls of one kind of groups on one platform.

    To add one, write it in a file of its own, and list it in ``cpu_kernels.py`` or
    ``tpu_kernels.py``. Of several that match, the first is used; of none, XLA computes the call.
    """

    @property
    def divides(self) -> bool:
        """Whether it computes on the parts of arrays that XLA divides over devices."""
        ...

    @property
    def match(self) -> Callable[[Group], bool]:
        """Whether it computes groups of this kind."""
        ...

    def lower(self, call: AlikeGroups) -> Callable[..., tuple[Array, ...]]:
        """The function of the arguments of a call.

        Raises ``Unsupported`` with the reason if there is none.
        """
        ...


def lower(ctx: Any, call: Call, kernels: Sequence[Kernel]) -> Callable[..., tuple[Array, ...]]:
    """The function that computes a call in a lowered program."""
    kernel = next((kernel for kernel in kernels if kernel.match(call.parts[0])), None)
    is_divided = number_of_partitions(ctx) > 1
    if is_divided and not (kernel and kernel.divides and can_partition(ctx)):
        _check_plain("of arrays that it divides over devices", call)
        return call.reference  # XLA would gather the arrays on every device
    if kernel is None:
        return call.reference
    try:
        f = kernel.lower(call)
    except Unsupported as error:
        _check_required(call, error)
        return call.reference
    except Exception as error:  # whatever LLVM says: XLA can do the same
        return _without(call, f"native code cannot be compiled: {type(error).__name__}: {error}")
    return _of_each_device(call, f) if is_divided else f


def _of_each_device(call: Call, f: Callable[..., Any]) -> Callable[..., tuple[Array, ...]]:
    """Applies ``f`` to the parts of the arrays on each device."""
    ns, shapes = call.shared, [p.ins[-1].shape for p in call.parts]
    arrays, outs = [len(p.ins) - ns for p in call.parts], [len(p.outs) for p in call.parts]
    f = partitioned_by_first(f, ns, shapes, arrays, outs)
    return lambda *args: f(*(jnp.reshape(x, ()) for x in args[:ns]), *args[ns:])


def _without(call: Call, reason: str) -> Callable[..., tuple[Array, ...]]:
    """The operations themselves, if native code cannot run on this machine."""
    _check_required(call, reason)
    warn_once(reason)
    return call.reference


def _check_required(call: Call, reason: Any) -> None:
    if call.required:
        raise RuntimeError(f"native code is required: {reason}")


def _check_plain(where: str, call: Call, **_: Any) -> None:
    if call.required:
        raise RuntimeError(
            f"native code is required, but XLA computes the update {where}: native code supports "
            "CPUs and TPUs, outside of vmap and derivatives"
        )


def _on_cpu(ctx: Any, call: Call, **_: Any) -> Callable[..., tuple[Array, ...]]:
    if reason := problem():
        return _without(call, reason)
    from .cpu_kernels import KERNELS

    return lower(ctx, call, KERNELS)


def _on_tpu(ctx: Any, call: Call, **_: Any) -> Callable[..., tuple[Array, ...]]:
    from .tpu_kernels import KERNELS

    return lower(ctx, call, KERNELS)


def _types(*avals: Any, call: Call, **_: Any) -> list[Any] | None:
    same = list(avals) == [v.aval for v in call.ins]
    return [v.aval for v in call.outs] if same else None


# ``changed_rows`` has pairs of an output and the input in which it replaces rows.
_native_p = make_replaceable(
    "optzoo_native",
    lambda *args, call, changed_rows: call.reference(*args),
    types=_types,
    on={"cpu": _on_cpu, "tpu": _on_tpu},
    check_plain=_check_plain,
)
