"""Checks for integers that JAX would truncate to 32 bits."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from .paths import leaves_with_path, path_name


def check_integers(batch: Sequence[Any]) -> None:
    """Raises ``OverflowError`` if JAX would truncate an integer to 32 bits."""
    is_kept = jax.dtypes.canonicalize_dtype(np.int64) == np.int64
    if is_kept or not any(map(_loses_bits, jax.tree.leaves(batch))):
        return
    leaves = leaves_with_path(batch)
    path, x = next((path, x) for path, x in leaves if _loses_bits(x))
    name = f"batch[{path[0].idx}]" + (f" '{path_name(path[1:])}'" if path[1:] else "")
    raise OverflowError(
        f"{name} has the integer {max(np.min(x), np.max(x), key=abs)}, which JAX would truncate "
        "to 32 bits: take ids modulo the number of rows, assign rows by "
        "optzoo.growing.Vocabulary, or set jax_enable_x64"
    )


def _loses_bits(x: Any) -> bool:
    """Whether ``x`` is of NumPy or Python, and has an integer that exceeds 32 bits."""
    if isinstance(x, int):
        return not -(2**31) <= x < 2**31
    if not isinstance(x, np.ndarray | np.generic) or x.dtype.kind not in "iu" or not x.size:
        return False
    kept = np.iinfo(np.int32 if x.dtype.kind == "i" else np.uint32)
    return x.dtype.itemsize > 4 and bool(x.min() < kept.min or x.max() > kept.max)
