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


def gather_invarying(tree: Any, axes: str | tuple[str, ...]) -> Any:
    """The arrays of all places along mesh axes joined, typed as the same everywhere."""
    if hasattr(lax, "pcast"):
        return lax.all_gather(tree, axes, tiled=True, to="invarying")
    from jax._src.lax.parallel import all_gather_invariant  # has no other name in JAX 0.7

    return all_gather_invariant(tree, axes, tiled=True)
