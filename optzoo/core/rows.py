"""A gradient that touches only some rows of its parameter."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.tree_util import GetAttrKey
from jax.typing import DTypeLike

from .merge import merge
from .numerics import upcast

_HINT = (
    "If a transformation does not support `SparseRows`, put `optzoo.densify()` before it or wrap "
    "it in `optzoo.on_values`."
)
_DROP = {"mode": "drop", "wrap_negative_indices": False}


class _HintInErrors(type):
    # JAX prints the class when a foreign transformation maps over rows and arrays together, so this
    # puts the hint into the error.
    def __repr__(cls) -> str:
        return f"<class 'optzoo.{cls.__name__}'> (a row-sparse gradient. {_HINT})"


@dataclasses.dataclass(frozen=True, eq=False)
class SparseRows(metaclass=_HintInErrors):
    """Rows ``values[i]`` with the ids ``indices[i]``, of an array of ``num_rows`` rows.

    The counterpart of ``tf.IndexedSlices``. Rows that share an index are summed. The index
    ``num_rows`` marks padding; it, and any other index outside ``[0, num_rows)``, is ignored.

    ``params + rows`` scatters the rows, so ``optax.apply_updates`` works unchanged.

    A transformation that maps over all leaves gets ``indices`` as a leaf. Floating-point
    arithmetic on it raises an error; integer arithmetic cannot be distinguished from a legitimate
    copy (``optax.sign``, ``optax.clip(1)``): use :func:`optzoo.on_values` there, and
    :func:`optzoo.clip_by_global_norm` instead of optax's.

    Attributes:
        indices: integers of shape ``(n,)``.
        values: shape ``(n, *row_shape)``.
        num_rows: a Python int, static under ``jit``.
        coalesced: whether every index but padding is known to occur once, and padding to have
            zero values. A hint for the transformations of a chain, not part of the tree: any
            tree operation drops it.

    Raises:
        TypeError: if the indices are not integers or ``num_rows`` is not a Python int.
        ValueError: if ``indices`` and ``values`` differ in length.
    """

    indices: Array
    values: Array
    num_rows: int
    coalesced: bool = False

    __array_ufunc__ = None  # lets `numpy_array + rows` reach __radd__

    def __post_init__(self):
        if not isinstance(self.num_rows, int):
            raise TypeError(
                "SparseRows.num_rows must be a Python int (it is part of the type under jit), "
                f"got {self.num_rows!r}"
            )
        dtype = getattr(self.indices, "dtype", None)  # a pytree may hold any object here
        if dtype is None:
            return
        if jnp.issubdtype(dtype, jnp.inexact):
            raise TypeError(
                f"SparseRows.indices must be integers, got {dtype}: perhaps a transformation "
                f"treated them as part of the gradient. {_HINT}"
            )
        shape, values_shape = jnp.shape(self.indices), getattr(self.values, "shape", None)
        if values_shape is not None and values_shape[: len(shape)] != shape:
            raise ValueError(
                "SparseRows needs one row of values for each index, got indices of shape "
                f"{shape} and values of shape {values_shape}"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole array."""
        return (self.num_rows, *self.values.shape[1:])

    @property
    def dtype(self) -> Any:
        """The dtype of the values."""
        return self.values.dtype

    def astype(self, dtype: DTypeLike) -> "SparseRows":
        """The same rows with values of another dtype."""
        return self.with_values(self.values.astype(dtype))

    def with_values(self, values: Array) -> "SparseRows":
        """Other values with the same indices."""
        return dataclasses.replace(self, values=values)

    def __add__(self, other: Any) -> Any:
        """``other`` with the rows added to it; the sum of rows and rows is rows."""
        if jnp.shape(other) != self.shape:
            raise ValueError(f"rows of an array of shape {self.shape} do not fit {other.shape}")
        if is_rows(other):
            if other.indices is self.indices:
                return self.with_values(self.values + other.values)
            indices, values = (
                jnp.concatenate(pair)
                for pair in ((self.indices, other.indices), (self.values, other.values))
            )
            return SparseRows(indices, values, self.num_rows)
        dense = jnp.asarray(other)
        target = dense.at[self._wide_indices()]
        return target.add(self.values.astype(dense.dtype), **_DROP, unique_indices=self.coalesced)

    __radd__ = __add__

    def to_dense(self) -> Array:
        """The whole array, zero where no row is listed."""
        wide = upcast(self.values)
        return (jnp.zeros(self.shape, wide.dtype) + self.with_values(wide)).astype(self.dtype)

    def gather(self, dense: Array) -> Array:
        """The rows of ``dense`` at ``indices``; at padding, some row of it."""
        if self.num_rows == 0:
            return jnp.zeros((*self.indices.shape, *dense.shape[1:]), dense.dtype)
        return jnp.take(dense, self._wide_indices(), axis=0, mode="clip")

    def scatter(self, dense: Array, rows: Array) -> Array:
        """``dense`` with the rows at ``indices`` replaced; for coalesced rows."""
        rows = rows.astype(dense.dtype)
        return dense.at[self._wide_indices()].set(rows, **_DROP, unique_indices=True)

    def drop_padding(self) -> "SparseRows":
        """The same rows with zero values at padding."""
        real = self._row_ids() < self.num_rows
        real = real.reshape(real.shape + (1,) * (self.values.ndim - 1))
        return self.with_values(jnp.where(real, self.values, 0))

    def coalesce(self, *, deterministic: bool = False) -> "SparseRows":
        """Sums the rows that share an index; the positions that are left become padding.

        Sums in at least float32. On an accelerator the order of the sums is not fixed;
        with ``deterministic`` it is, by a sort and a scan, and results repeat bit by bit.
        """
        if self.coalesced:
            return self
        values = upcast(self.values)
        ids, values = merge(self._row_ids(), values, self.num_rows, deterministic)
        return SparseRows(ids, values.astype(self.dtype), self.num_rows, coalesced=True)

    def _wide_indices(self) -> Array:
        """The indices in a dtype wide enough for ``num_rows``."""
        i = jnp.asarray(self.indices)
        return i.astype(jax.dtypes.canonicalize_dtype(jnp.promote_types(i.dtype, jnp.int32)))

    def _row_ids(self) -> Array:
        """The indices; those out of range are replaced by that of padding."""
        i = self._wide_indices()
        return jnp.where((i >= 0) & (i < self.num_rows), i, self.num_rows)


def _unflatten(num_rows: int, data: Iterable[Any]) -> SparseRows:
    indices, values = data
    return SparseRows(indices, values, num_rows)


# Not by register_dataclass, whose drop_fields do not work in JAX 0.7.
jax.tree_util.register_pytree_with_keys(
    SparseRows,
    lambda g: (((GetAttrKey("indices"), g.indices), (GetAttrKey("values"), g.values)), g.num_rows),
    _unflatten,
    lambda g: ((g.indices, g.values), g.num_rows),
)


def is_rows(g: object) -> bool:
    """Whether ``g`` is a row-sparse gradient."""
    return isinstance(g, SparseRows)


def is_sparse_or_none(g: object) -> bool:
    """Whether ``g`` is a gradient of one parameter that is not an array: SparseRows or None."""
    return g is None or is_rows(g)


def map_rows(f: Callable[[SparseRows], Any], updates: Any) -> Any:
    """``f`` of every SparseRows in a tree; arrays are unchanged."""
    return jax.tree.map(lambda g: f(g) if is_rows(g) else g, updates, is_leaf=is_rows)


def zeros_like_update(shapes: Any) -> Any:
    """An update of zeros, with rows that are all padding, of the given shapes."""
    array = lambda a: jnp.zeros(a.shape, a.dtype)

    def zeros(a):
        if not is_rows(a):
            return array(a)
        padding = jnp.full(a.indices.shape, a.num_rows, a.indices.dtype)
        return SparseRows(padding, array(a.values), a.num_rows)

    return jax.tree.map(zeros, shapes, is_leaf=is_rows)


def coalesce(*, deterministic: bool = False) -> optax.GradientTransformation:
    """Merges repeated indices of all SparseRows gradients, once for the rest of a chain.

    Args:
        deterministic: sum in a fixed order on every backend, so that a run repeats bit by bit.
    """
    merged = lambda g: g.coalesce(deterministic=deterministic)
    return optax.stateless(lambda updates, _: map_rows(merged, updates))


def densify() -> optax.GradientTransformation:
    """Turns every SparseRows gradient into an array: for transformations that do not support rows.

    Put it before such a transformation in a chain. Put it also before a wrapper that needs updates
    of the gradient's structure, such as ``optax.apply_if_finite``, around an optimizer that makes
    dense updates of rows (:func:`optzoo.adam`).
    """
    return optax.stateless(lambda updates, _: map_rows(SparseRows.to_dense, updates))


def on_values(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Applies a stateless transformation, such as clipping, to the values of rows alone.

    Repeated indices are summed first, so an element-wise ``inner`` computes what it computes from
    the dense gradient, except for the untouched rows, which it does not see.

    Args:
        inner: a transformation without params-shaped state that reads no parameters.
    """
    inner = optax.with_extra_args_support(inner)

    def update(updates, state, params=None, **extra_args):
        del params  # a row has no parameter of its own shape
        updates = map_rows(SparseRows.coalesce, updates)
        values = map_rows(lambda g: g.values, updates)
        values, state = inner.update(values, state, None, **extra_args)
        rebuild = lambda g, v: g.with_values(v).drop_padding() if is_rows(g) else v
        return jax.tree.map(rebuild, updates, values, is_leaf=is_rows), state

    return optax.GradientTransformationExtraArgs(inner.init, update)
