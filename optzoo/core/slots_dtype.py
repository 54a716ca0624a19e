"""Slots in another dtype than the parameters."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from .treewise import LeafwiseState


def slots_dtype(
    inner: optax.GradientTransformation, dtype: DTypeLike
) -> optax.GradientTransformationExtraArgs:
    """Keeps the slots of any optimizer of this library in ``dtype``.

    Half the memory with ``slots_dtype(adam(1e-3), "bfloat16")``; exact sums for parameters in 16
    bits with ``slots_dtype(adagrad(0.1), "float32")``. The arithmetic is in float32 at least
    either way, and updates keep the gradient's dtype.

    On the CPU, XLA scatters rows of 16 bits by way of a float32 copy of the whole array: there a
    row-sparse update of such slots costs what the table costs.

    A mean with a slow decay cannot live in 16 bits: with ``b2=0.999`` a step changes it by a
    thousandth, less than the 1/256 that bfloat16 resolves. Choose a faster decay. The average of
    :func:`optzoo.moving_average` stays in float32 at least.

    Args:
        inner: an optimizer made by :func:`optzoo.leafwise`, alone or within optax's chains,
            masks and wrappers.
        dtype: a floating-point dtype.

    Raises:
        TypeError: if ``dtype`` is not a floating-point dtype.
        ValueError: by ``init``, if ``inner`` has no slots of this library.
    """
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"dtype must be a floating-point dtype, got {dtype!r}")
    inner = optax.with_extra_args_support(inner)
    is_ours = lambda s: isinstance(s, LeafwiseState)

    def init(params):
        state = inner.init(params)
        if not any(map(is_ours, jax.tree.leaves(state, is_leaf=is_ours))):
            raise ValueError(
                "slots_dtype finds no slots of optzoo in this state; "
                "for an optimizer of optax see its own arguments, such as mu_dtype"
            )
        # Only the start needs a cast: a rule gives each slot back in the dtype it came in.
        wanted = inner.init(jax.tree.map(lambda x: _astype(x, dtype), params))
        return jax.tree.map(_with_slots_of, state, wanted, is_leaf=is_ours)

    return optax.GradientTransformationExtraArgs(init, inner.update)


def _astype(x: Any, dtype: DTypeLike) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, dtype)
    return jnp.asarray(x, dtype)


def _with_slots_of(state: Any, wanted: Any) -> Any:
    """The state with slots in the wanted dtypes, rounded once: 0.1 in float32 is not a bfloat16."""
    if not isinstance(state, LeafwiseState):
        return state
    finer = lambda a, b: jnp.promote_types(a.dtype, b.dtype) == a.dtype
    of_both = lambda a, b: a.astype(b.dtype) if finer(a, b) else b
    return state._replace(slots=jax.tree.map(of_both, state.slots, wanted.slots))
