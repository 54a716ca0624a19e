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
    "put optzoo.densify() in front of a transformation that does not know rows, "
    "or wrap a stateless one in optzoo.on_values"
)
_DROP = {"mode": "drop", "wrap_negative_indices": False}


class _SpeaksInErrors(type):
    # JAX prints the class when a foreign transformation maps over rows and arrays together,
    # so this is where the user meets the way out.
    def __repr__(cls) -> str:
        return f"<class 'optzoo.{cls.__name__}'> (a row-sparse gradient: {_HINT})"


@dataclasses.dataclass(frozen=True, eq=False)
class SparseRows(metaclass=_SpeaksInErrors):
    """Rows ``values[i]`` at the places ``indices[i]`` of an array of ``num_rows`` rows.

    The counterpart of ``tf.IndexedSlices``. Rows that share an index sum. The index
    ``num_rows`` marks padding; it, and any other index outside ``[0, num_rows)``, is ignored.

    ``params + rows`` scatters the rows, so ``optax.apply_updates`` takes them unchanged.

    A transformation that maps over all leaves meets ``indices`` as a leaf. Floating-point
    arithmetic on it is refused with an error; integer arithmetic cannot be told from a
    legitimate copy (``optax.sign``, ``optax.clip(1)``): use :func:`optzoo.on_values` there, and
    :func:`optzoo.clip_by_global_norm` for optax's.

    Attributes:
        indices: integers of shape ``(n,)``.
        values: shape ``(n, *row_shape)``.
        num_rows: a Python int, static under ``jit``.
        coalesced: whether every index but padding is known to occur once, and padding to have
            zero values. A hint for the links of a chain, not part of the tree: any tree
            operation forgets it.

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
                f"took them for a part of the gradient; {_HINT}"
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
        """Other values at the same places."""
        return dataclasses.replace(self, values=values)

    def __add__(self, other: Any) -> Any:
        """``other`` with the rows added in place; rows with rows are rows."""
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
        places = dense.at[self._integers()]
        return places.add(self.values.astype(dense.dtype), **_DROP, unique_indices=self.coalesced)

    __radd__ = __add__

    def to_dense(self) -> Array:
        """The whole array, zero where no row is listed."""
        wide = upcast(self.values)
        return (jnp.zeros(self.shape, wide.dtype) + self.with_values(wide)).astype(self.dtype)

    def gather(self, dense: Array) -> Array:
        """The rows of ``dense`` at ``indices``; at padding, some row of it."""
        if self.num_rows == 0:
            return jnp.zeros((*self.indices.shape, *dense.shape[1:]), dense.dtype)
        return jnp.take(dense, self._integers(), axis=0, mode="clip")

    def scatter(self, dense: Array, rows: Array) -> Array:
        """``dense`` with the rows at ``indices`` replaced; for coalesced rows."""
        rows = rows.astype(dense.dtype)
        return dense.at[self._integers()].set(rows, **_DROP, unique_indices=True)

    def drop_padding(self) -> "SparseRows":
        """Zero values wherever the index is padding, whatever stood there."""
        real = self._places() < self.num_rows
        real = real.reshape(real.shape + (1,) * (self.values.ndim - 1))
        return self.with_values(jnp.where(real, self.values, 0))

    def coalesce(self, *, deterministic: bool = False) -> "SparseRows":
        """Sums the rows that share an index; the places left over become padding.

        Sums in at least float32. On an accelerator the order of the sums is not fixed;
        ``deterministic`` costs a sort and a scan, and repeats to the bit everywhere.
        """
        if self.coalesced:
            return self
        values = upcast(self.values)
        places, values = merge(self._places(), values, self.num_rows, deterministic)
        return SparseRows(places, values.astype(self.dtype), self.num_rows, coalesced=True)

    def _integers(self) -> Array:
        """The indices in a dtype wide enough for ``num_rows``."""
        i = jnp.asarray(self.indices)
        return i.astype(jax.dtypes.canonicalize_dtype(jnp.promote_types(i.dtype, jnp.int32)))

    def _places(self) -> Array:
        """The indices, with all that is out of range moved to the padding slot."""
        i = self._integers()
        return jnp.where((i >= 0) & (i < self.num_rows), i, self.num_rows)


def _unflatten(num_rows: int, data: Iterable[Any]) -> SparseRows:
    indices, values = data
    return SparseRows(indices, values, num_rows)


# By hand: register_dataclass of JAX 0.7 does not understand its drop_fields.
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
    """Whether ``g`` is the gradient of one parameter though no array: missing, or rows."""
    return g is None or is_rows(g)


def map_rows(f: Callable[[SparseRows], Any], updates: Any) -> Any:
    """``f`` of every SparseRows in a tree; the arrays stay as they are."""
    return jax.tree.map(lambda g: f(g) if is_rows(g) else g, updates, is_leaf=is_rows)


def zeros_like_update(shapes: Any) -> Any:
    """An update of these shapes that changes nothing."""
    array = lambda a: jnp.zeros(a.shape, a.dtype)

    def zeros(a):
        if not is_rows(a):
            return array(a)
        places = jnp.full(a.indices.shape, a.num_rows, a.indices.dtype)
        return SparseRows(places, array(a.values), a.num_rows)

    return jax.tree.map(zeros, shapes, is_leaf=is_rows)


def coalesce(*, deterministic: bool = False) -> optax.GradientTransformation:
    """Merges repeated indices of all SparseRows gradients, once for the rest of a chain.

    Args:
        deterministic: sum in a fixed order on every backend, so that a run repeats to the bit.
    """
    merged = lambda g: g.coalesce(deterministic=deterministic)
    return optax.stateless(lambda updates, _: map_rows(merged, updates))


def densify() -> optax.GradientTransformation:
    """Turns every SparseRows gradient into an array; put it in front of what knows no rows.

    In front, too, of a wrapper that needs updates of the gradient's own structure, such as
    ``optax.apply_if_finite``, around an optimizer whose rows are dense (:func:`optzoo.adam`).
    """
    return optax.stateless(lambda updates, _: map_rows(SparseRows.to_dense, updates))


def on_values(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Shows a stateless transformation, such as clipping, only the values of the rows.

    Repeated indices are summed first, so an element-wise ``inner`` gives what it gives on the
    dense gradient, but for the untouched rows, which it never sees.

    Args:
        inner: keeps no params-shaped state and reads no parameters.
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
