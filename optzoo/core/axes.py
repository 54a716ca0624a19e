"""Types that mapped functions give to arrays."""

from typing import Any

import jax
from jax import Array, lax


def varying(x: Any) -> frozenset[str]:
    """The mesh axes along which ``x`` may differ inside a checked shard_map."""
    aval = jax.typeof(x)
    kind = getattr(aval, "manual_axis_type", None)
    return frozenset(kind.varying if kind is not None else getattr(aval, "vma", ()))


def cast_varying(x: Array, axes: tuple[str, ...]) -> Array:
    """The same values, typed as what may differ along mesh axes along which it did not."""
    if hasattr(lax, "pcast"):
        return lax.pcast(x, axes, to="varying")
    return getattr(lax, "pvary")(x, axes)  # noqa: B009 (gone after JAX 0.7)
