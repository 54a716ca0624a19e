"""What the library needs of JAX beyond its stable public API, one small function for each.

``tests/core/test_compat.py`` checks every one of them against the installed version of JAX.
"""

from collections.abc import Hashable, Iterator
from typing import Any

import jax
from jax import Array, lax
from jax.interpreters import partial_eval

try:
    from jax.extend.core import get_opaque_trace_state  # pyrefly: ignore
except ImportError:  # an older JAX
    from jax.core import get_opaque_trace_state  # pyrefly: ignore


# Traces and tracers


def trace_state() -> Hashable:
    """Equal to another trace state if, and only if, both were taken in the same trace.

    The body of a loop, a ``jit`` or a ``vmap`` is a trace of its own: arrays that are made in it
    cannot be used outside.
    """
    return get_opaque_trace_state()


def is_batched(x: Any) -> bool:
    """Whether ``x`` is a tracer of the innermost ``vmap``."""
    return type(x).__name__ == "BatchTracer"  # JAX does not export the class


# Jaxprs


def used_inputs(jaxpr: Any) -> list[bool]:
    """For each input of a jaxpr whether the outputs depend on it."""
    # Exported by JAX, but without documentation or a promise to keep it.
    _, used = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    return used


def inner_jaxprs(eqn: Any) -> Iterator[Any]:
    """The jaxprs inside an equation, such as the branches of a ``cond`` or the body of a loop."""
    # By what they look like: the names of the parameters differ among primitives and versions.
    for param in eqn.params.values():
        for value in param if isinstance(param, tuple | list) else [param]:
            jaxpr = getattr(value, "jaxpr", value)
            if hasattr(jaxpr, "eqns"):
                yield jaxpr


# Types of arrays inside shard_map


def varying(x: Any) -> frozenset[str]:
    """The mesh axes along which ``x`` may differ inside a checked ``shard_map``."""
    # An attribute of the type: `manual_axis_type` in new versions of JAX, `vma` in older ones.
    aval = jax.typeof(x)
    kind = getattr(aval, "manual_axis_type", None)
    return frozenset(kind.varying if kind is not None else getattr(aval, "vma", ()))


def cast_varying(x: Array, axes: tuple[str, ...]) -> Array:
    """The same values, typed as different along mesh axes along which they were the same."""
    # JAX 0.7 has `pvary` alone, which went away later.
    if hasattr(lax, "pcast"):
        return lax.pcast(x, axes, to="varying")
    return getattr(lax, "pvary")(x, axes)  # noqa: B009 (unknown to the type checker)


def gather_invarying(tree: Any, axes: str | tuple[str, ...]) -> Any:
    """The arrays of all devices along mesh axes joined, typed as the same on all of them."""
    # JAX 0.7 has it only as a function without a public name.
    if hasattr(lax, "pcast"):
        return lax.all_gather(tree, axes, tiled=True, to="invarying")
    from jax._src.lax.parallel import all_gather_invariant

    return all_gather_invariant(tree, axes, tiled=True)
