"""Row ids that do not allow arithmetic: integers in an array of an extended dtype of JAX.

The ids of rows are a leaf of a pytree, and code that maps over all leaves would compute with them:
``-g``, ``optax.scale``, ``optax.tree.add``, ``psum``. An array of an extended dtype, like that of
random keys, passes through all transformations of JAX, and raises an error for arithmetic when it
is traced. The error contains the name of the dtype, which is the hint. Protecting ids reinterprets
their bits, at no cost in compiled programs.

The complement of each id is stored: ``zeros_like`` and ``ones_like`` of protected ids are negative
ids, which are out of range of every table and therefore ignored.
"""

import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from .compat import opaque_dtype
from .marks import marked
from .numerics import promote_types

HINT = (
    "If a transformation does not support `SparseRows`, put `optzoo.rows.densify()` before it or "
    "wrap it in `optzoo.rows.on_values`; `optzoo.accumulate(..., max_rows=...)` replaces "
    "`optax.MultiSteps`, and `optzoo.clip_by_global_norm` that of optax."
)


_TAG = f"row ids of optzoo.SparseRows, which allow no arithmetic. {HINT}"
_IMPLS = {
    "int32": opaque_dtype("optzoo_row_ids_32", 1, _TAG),
    "int64": opaque_dtype("optzoo_row_ids_64", 2, _TAG),
}


@marked("rows_protect")
@functools.partial(jax.jit, inline=True)
def _wrap(ids: Array) -> Array:
    words = lax.bitcast_convert_type(~ids, jnp.uint32)
    words = words[..., None] if ids.dtype == jnp.int32 else words
    return jax.random.wrap_key_data(words, impl=_IMPLS[ids.dtype.name])


@marked("rows_plain")
@functools.partial(jax.jit, inline=True)
def _unwrap(protected: Array) -> Array:
    words = jax.random.key_data(protected)
    is_narrow = words.shape[-1] == 1
    words = words[..., 0] if is_narrow else words
    return ~lax.bitcast_convert_type(words, jnp.int32 if is_narrow else jnp.int64)


@functools.cache
def _dtypes() -> dict[Any, Any]:
    """The dtypes of plain ids, by those of protected ids."""
    wrap = lambda impl: functools.partial(jax.random.wrap_key_data, impl=impl)
    words = lambda n: jax.ShapeDtypeStruct((n,), jnp.uint32)
    impls = enumerate(_IMPLS.items(), 1)
    return {
        jax.eval_shape(wrap(impl), words(n)).dtype: jnp.dtype(name) for n, (name, impl) in impls
    }


def is_protected(ids: Any) -> bool:
    """Whether ``ids``, or the array of an abstract value, are protected."""
    return getattr(ids, "dtype", None) in _dtypes()


def protect(ids: Any) -> Any:
    """Protects integers as ids of rows; leaves protected ids and other objects unchanged.

    Ids that exceed 32 bits are kept under x64. Without it they become negative, and so are ignored.

    Args:
        ids: integers: an array, a list, a tuple, or an abstract value.

    Raises:
        TypeError: if ids are not integers.
    """
    if type(ids) in (list, tuple):
        ids = as_ids(ids)
    dtype = getattr(ids, "dtype", None)
    if dtype is None or is_protected(ids):
        return ids
    if not jnp.issubdtype(dtype, jnp.integer):
        raise TypeError(
            f"SparseRows.indices must be integers, got {dtype}: perhaps a transformation "
            f"treated them as part of the gradient. {HINT}"
        )
    # There is no integer type for both uint64 and int32.
    wide = jnp.int64 if dtype == jnp.uint64 else promote_types(dtype, jnp.int32)
    wide = jax.dtypes.canonicalize_dtype(wide)
    if isinstance(ids, jax.ShapeDtypeStruct):
        [protected] = [key for key, dtype in _dtypes().items() if dtype == wide]
        return jax.ShapeDtypeStruct(ids.shape, protected, sharding=ids.sharding)
    return _wrap(jnp.asarray(as_ids(ids), wide))


def as_ids(ids: Any) -> Any:
    """Converts Python or NumPy integers to NumPy integers of JAX; -1 for ids with more bits.

    No row has the id -1. Other objects, and JAX arrays, are unchanged.
    """
    if isinstance(ids, int | list | tuple):
        if any(isinstance(i, jax.Array) for i in jax.tree.leaves(ids)):
            return jnp.asarray(ids)
        ids = np.asarray(ids)
        if ids.dtype == object:  # integers of more than 64 bits
            ids = np.where((ids >= -(2**63)) & (ids < 2**63), ids, -1).astype(np.int64)
    if not isinstance(ids, np.ndarray | np.generic) or ids.dtype.kind not in "iu":
        return ids
    kept = np.iinfo(jax.dtypes.canonicalize_dtype(np.int64))
    ids = cast(np.ndarray[Any, np.dtype[np.integer]], np.asarray(ids))
    fits = (ids >= kept.min) & (ids <= kept.max)
    is_wide = ids.dtype.itemsize > 4 or not np.all(fits)
    return np.where(fits, ids.astype(kept.dtype), -1) if is_wide else ids


def integer_ids(ids: Any, name: str = "ids") -> Array:
    """Ids of rows as an array of integers, by :func:`as_ids`.

    Raises:
        TypeError: if ids are not integers; the error names ``name``.
    """
    try:
        array = jnp.asarray(as_ids(ids))
    except (TypeError, ValueError) as error:
        must = "integers: an array, a number or a nested list of equal lengths"
        raise TypeError(f"{name} must be {must}, got a {type(ids).__name__}") from error
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{name} must be integers, got dtype {array.dtype}")
    return array


def plain(ids: Any) -> Any:
    """The integers of protected ids, int32 or int64; objects that are not arrays are unchanged.

    Raises:
        TypeError: if ids are an unprotected array.
    """
    if isinstance(ids, jax.ShapeDtypeStruct) and is_protected(ids):
        return jax.ShapeDtypeStruct(ids.shape, _dtypes()[ids.dtype], sharding=ids.sharding)
    if is_protected(ids):
        return _unwrap(ids)
    if hasattr(ids, "dtype"):
        raise TypeError(
            f"an operation on a tree replaced the row ids of SparseRows by {ids.dtype}. Make rows "
            f"with SparseRows(indices, values, num_rows). {HINT}"
        )
    return ids
