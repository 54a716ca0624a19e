"""Short texts of trees, with types in place of arrays."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np


def short(value: Any, of: Callable[[Any], str] | None = None) -> str:
    """A tree as one line: ``float32[8,64]`` for an array, and the value of a scalar.

    Args:
        value: any object; objects other than containers and arrays are shown by ``repr``.
        of: a function that shows the parts of a container; None for this function.
    """
    of = of or short
    if isinstance(value, tuple) and hasattr(value, "_fields") and _is_plain(type(value)):
        fields = (f"{name}={of(x)}" for name, x in zip(value._fields, value, strict=True))
        return f"{type(value).__name__}({', '.join(fields)})"
    if type(value) in (tuple, list):
        inside = ", ".join(map(of, value))
        if type(value) is list:
            return f"[{inside}]"
        return f"({inside},)" if len(value) == 1 else f"({inside})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {of(x)}" for key, x in value.items()) + "}"
    if isinstance(value, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)):
        return aval(value)
    return repr(value)


def aval(x: Any) -> str:
    """The type of an array; the value of a scalar that is available and not a key."""
    is_here = isinstance(x, np.ndarray) or (
        isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x.is_fully_addressable
    )
    is_number = not jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended)
    if is_here and is_number and not x.shape and not getattr(x, "is_deleted", bool)():
        return str(np.asarray(x))
    return f"{x.dtype}[{','.join(map(str, x.shape))}]"


def _is_plain(kind: type) -> bool:
    """Whether a named tuple has the repr of this module, or no custom one."""
    return kind.__repr__ is short_repr or kind.__repr__.__module__ != kind.__module__


def short_repr(self: Any) -> str:
    """The ``__repr__`` of a state."""
    return short(self)
