"""Native calls in a JAX program: one primitive, which contains the operations that it replaces.

It is lowered to a kernel of the platform, if one matches. Otherwise, under ``vmap`` and in
derivatives, it is lowered to the operations.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

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

    Attributes:
        required: None if XLA may compute it.
    """

    def __init__(self, parts: Sequence[Group]):
        super().__init__(parts)
        self.required: Required | None = None

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


class Required(NamedTuple):
    """The calls of a step, none of which XLA may compute."""

    calls: Sequence[Call]
    names: Mapping[Value, str]  # of the results of the step

    def error(self, kernels: Sequence["Kernel"]) -> RuntimeError:
        """The error for all calls without a kernel."""
        reasons = dict[Value, str]()
        for call in self.calls:
            try:
                if kernel := _kernel_of(call, kernels):
                    kernel.lower(call)
            except Exception as error:
                reasons.update(dict.fromkeys(call.outs, _reason_of(error)))
        of_branches = {v: v.aval.str_short() for v in reasons if v not in self.names}
        names = {**self.names, **of_branches}
        return RuntimeError(listed({name: reasons[v] for v, name in names.items() if v in reasons}))


def require(calls: Sequence[Call], names: Mapping[Value, str]) -> None:
    """Makes it an error if XLA computes one of the calls of a step."""
    required = Required(calls, names)
    for call in calls:
        call.required = required


def listed(reasons: Mapping[str, Any]) -> str:
    """The text of an error: arrays that XLA updates, and why."""
    few = "; ".join(f"'{name}': {why}" for name, why in list(reasons.items())[:5])
    return f"native code is required, but XLA updates {len(reasons)} arrays: {few}"


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
    kernel = _kernel_of(call, kernels)
    is_divided = number_of_partitions(ctx) > 1
    if is_divided and not (kernel and kernel.divides and can_partition(ctx)):
        _check_plain("of arrays that it divides over devices", call)
        return call.reference  # XLA would gather the arrays on every device
    if kernel is None:
        return call.reference
    try:
        f = kernel.lower(call)
    except Exception as error:  # whatever LLVM says: XLA can do the same
        if call.required is not None:
            raise call.required.error(kernels) from error
        if not isinstance(error, Unsupported):
            warn_once(_reason_of(error))
        return call.reference
    return _of_each_device(call, f) if is_divided else f


def _kernel_of(call: Call, kernels: Sequence[Kernel]) -> Kernel | None:
    return next((kernel for kernel in kernels if kernel.match(call.parts[0])), None)


def _reason_of(error: Exception) -> str:
    if isinstance(error, Unsupported):
        return str(error)
    return f"native code cannot be compiled: {type(error).__name__}: {error}"


def _of_each_device(call: Call, f: Callable[..., Any]) -> Callable[..., tuple[Array, ...]]:
    """Applies ``f`` to the parts of the arrays on each device."""
    ns, shapes = call.shared, [p.ins[-1].shape for p in call.parts]
    arrays, outs = [len(p.ins) - ns for p in call.parts], [len(p.outs) for p in call.parts]
    f = partitioned_by_first(f, ns, shapes, arrays, outs)
    return lambda *args: f(*(jnp.reshape(x, ()) for x in args[:ns]), *args[ns:])


def _check_plain(where: str, call: Call, **_: Any) -> None:
    if call.required is not None:
        raise RuntimeError(
            f"native code is required, but XLA computes the update {where}: native code supports "
            "CPUs and TPUs, outside of vmap and derivatives"
        )


def _on_cpu(ctx: Any, call: Call, **_: Any) -> Callable[..., tuple[Array, ...]]:
    if reason := problem():  # on this machine
        if call.required is not None:
            raise RuntimeError(f"native code is required: {reason}")
        warn_once(reason)
        return call.reference
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
