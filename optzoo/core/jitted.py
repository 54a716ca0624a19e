"""Compiled steps that refuse integers of which JAX would keep the lower 32 bits."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from .paths import leaves_with_path, path_name


class Jitted:
    """``jax.jit`` of ``step(params, state, *batch, **extra_args)``, which donates the first two.

    Without x64, JAX keeps the lower 32 bits of integers of 64, such as hashes: ids of other rows.

    Raises:
        OverflowError: when called, if the batch has an integer of NumPy or Python that has no 32
            bits, and x64 is off.
    """

    def __init__(self, step: Callable[..., Any]):
        functools.update_wrapper(self, step)
        self._jit: Any = jax.jit(step, donate_argnums=(0, 1))

    def __call__(self, params: Any, state: Any, *batch: Any, **extra_args: Any) -> Any:
        """A step."""
        check_integers(batch)
        return self._jit(params, state, *batch, **extra_args)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """As that of ``jax.jit``."""
        return self._jit.trace(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """As that of ``jax.jit``."""
        return self._jit.lower(*args, **kwargs)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """As that of ``jax.jit``."""
        return self._jit.eval_shape(*args, **kwargs)

    def clear_cache(self) -> None:
        """As that of ``jax.jit``."""
        self._jit.clear_cache()

    def _cache_size(self) -> int:
        return self._jit._cache_size()


def check_integers(batch: Sequence[Any]) -> None:
    """Raises ``OverflowError`` if JAX would keep the lower 32 bits of an integer alone."""
    is_kept = jax.dtypes.canonicalize_dtype(np.int64) == np.int64
    if is_kept or not any(map(_loses_bits, jax.tree.leaves(batch))):
        return
    leaves = leaves_with_path(batch)
    path, x = next((path, x) for path, x in leaves if _loses_bits(x))
    name = f"batch[{path[0].idx}]" + (f" '{path_name(path[1:])}'" if path[1:] else "")
    raise OverflowError(
        f"{name} has the integer {max(np.min(x), np.max(x), key=abs)}, of which JAX would keep the "
        "lower 32 bits: take ids modulo the number of rows, give them rows by "
        "optzoo.growing.Vocabulary, or set jax_enable_x64"
    )


def _loses_bits(x: Any) -> bool:
    """Whether it is of NumPy or Python, and has an integer of more than 32 bits."""
    if isinstance(x, int):
        return not -(2**31) <= x < 2**31
    if not isinstance(x, np.ndarray | np.generic) or x.dtype.kind not in "iu" or not x.size:
        return False
    kept = np.iinfo(np.int32 if x.dtype.kind == "i" else np.uint32)
    return x.dtype.itemsize > 4 and bool(x.min() < kept.min or x.max() > kept.max)
