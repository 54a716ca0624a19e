"""Updates of wrappers that move all rows before the update of the inner optimizer."""

from typing import Any

from ..core.numerics import upcast


def moved_update(u: Any, moved: Any, x: Any) -> Any:
    """The dense total change of a parameter; None for a missing gradient.

    Args:
        u: the update of the inner optimizer.
        moved: the parameter given to ``inner``, in at least float32, or ``x`` if it was not moved.
        x: the parameter before the step.
    """
    if moved is x or u is None:
        return u
    new = moved + upcast(u)
    return (new - upcast(x)).astype(u.dtype)  # the sum is then rounded as the new parameters
