"""What the library needs of JAX and optax beyond their stable public API, by one name for each.

``tests/core/test_compat.py`` checks every one of them against the installed versions.
"""

import re
from collections.abc import Hashable, Iterator
from typing import Any

import jax
from jax import Array, lax
from jax.extend import random as extend_random
from jax.extend.core import Literal
from jax.extend.source_info_util import summarize
from jax.interpreters import partial_eval
from optax._src.base import NO_PARAMS_MSG as NO_PARAMS_MSG  # the message that users know

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


def literals(eqn: Any) -> list[str]:
    """The constants among the operands of an equation, as text."""
    return [str(v.val) for v in eqn.invars if isinstance(v, Literal)]


def line_of(eqn: Any) -> str:
    """The line of the user's program that an equation comes from: ``model.py:12:4 (loss)``."""
    return summarize(eqn.source_info)


def text_of(program: Any) -> str:
    """The text of what ``jax.make_jaxpr`` returned, equal in every process."""
    # Without terminal colours and addresses of functions.
    return re.sub(r"0x[0-9a-f]+", "", program.pretty_print(use_color=False, width=100))


def turns(eqn: Any) -> int | None:
    """How often a ``scan`` runs its body; None for any other equation."""
    return eqn.params["length"] if eqn.primitive.name == "scan" else None


# Names of primitives, in all versions of JAX


CALLS = {"checkpoint", "closed_call", "cond", "core_call", "custom_jvp_call", "custom_vjp_call"}
CALLS |= {"custom_vjp_call_jaxpr", "jit", "pjit", "remat", "remat2", "scan", "while"}
COLLECTIVES = {"all_gather", "all_gather_invariant", "all_to_all", "pmax", "pmin", "ppermute"}
COLLECTIVES |= {"psum", "psum2", "psum_invariant", "psum_scatter", "reduce_scatter"}


# Types of arrays that refuse arithmetic


def opaque_dtype(name: str, words: int, tag: str) -> Any:
    """A dtype of elements of some words of 32 bits; all transformations of JAX let it pass.

    ``jax.random.wrap_key_data(words, impl=...)`` and ``jax.random.key_data`` reinterpret the bits.
    Arithmetic raises a TypeError or ValueError with the ``tag``.
    """

    # JAX lets libraries define dtypes of random keys, and no others.
    def refuse(*_: Any) -> Any:
        raise TypeError(f"{name} is not a random key: {tag}")

    return extend_random.define_prng_impl(
        key_shape=(words,),
        seed=refuse,
        split=refuse,
        random_bits=refuse,
        fold_in=refuse,
        name=name,
        tag=tag,
    )


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
    # Before JAX 0.10 it is only a function without a public name.
    if jax.__version_info__ >= (0, 10):
        return lax.all_gather(tree, axes, tiled=True, to="invarying")
    from jax._src.lax.parallel import all_gather_invariant

    return all_gather_invariant(tree, axes, tiled=True)
