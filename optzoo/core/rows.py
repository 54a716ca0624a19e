"""Row-sparse gradients."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.tree_util import GetAttrKey
from jax.typing import DTypeLike

from .checks import check_transformation
from .lines import Lines, add_rows, are_lines, is_lines, put_rows, take_rows
from .marked_rows import add_rows_to, gather_rows, merge_rows, scatter_rows
from .merge import in_range
from .meshes import place_of, zeros_of
from .numerics import has_16_bits, promote_types, upcast
from .optimizer import About, Optimizer, about_of, recorded
from .row_ids import HINT, is_protected, plain, protect
from .short import short
from .trees import Trees


class _HintInErrors(type):
    # JAX prints the class when a foreign transformation maps over rows and arrays together, so this
    # puts the hint into the error.
    def __repr__(cls) -> str:
        # Optax calls a function that makes masks or labels on the gradients, too.
        return (
            f"<class 'optzoo.{cls.__name__}'> (a row-sparse gradient. Masks and labels must be "
            "trees that were made from the parameters, not functions; optzoo.param_groups takes "
            f"patterns of names. {HINT})"
        )


class Shard(NamedTuple):
    """The sharded table of rows, if each device has the gradients of its own rows only.

    It is static, and part of the tree structure of :class:`SparseRows`.
    """

    axes: tuple[str, ...]  # the mesh axes over which the rows of the table are divided
    num_rows: int  # of the whole table
    is_round: bool  # whether other rows of the gradient come in other rounds of the step


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class SparseRows(metaclass=_HintInErrors):
    """A row-sparse gradient: rows ``values[i]`` with the ids ``indices[i]``, of ``num_rows`` rows.

    The counterpart of ``tf.IndexedSlices``. Rows with the same index are summed. The index
    ``num_rows`` is padding; all indices outside ``[0, num_rows)`` are ignored.

    ``params + rows`` scatters the rows, so ``optax.apply_updates`` supports them.

    A transformation that maps over all leaves gets ``values`` and ``ids``. The dtype of ids does
    not allow arithmetic, so a transformation that changes them raises an error when it is traced.
    Use :func:`optzoo.rows.densify` or :func:`optzoo.rows.on_values` around it, and
    :func:`optzoo.clip_by_global_norm` instead of optax's. ``optax.tree.zeros_like`` of rows is
    padding. Code that saves arrays or converts them to NumPy raises an error for ids: use
    ``indices`` and ``values``.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> rows = optzoo.SparseRows(jnp.array([2, 2]), jnp.array([[1.0], [3.0]]), 4)
        >>> print((jnp.zeros((4, 1)) + rows).ravel())  # rows that share an index are summed
        [0. 0. 4. 0.]

    Attributes:
        indices: integers of shape ``(n,)``, stored as int32; under x64, those that exceed 32 bits
            as int64.
        values: an array of shape ``(n, *row_shape)``.
        num_rows: a Python int, static under ``jit``.
        coalesced: whether all indices except padding are known to be distinct, and values of
            padding zero. It is a hint for the transformations of a chain, dropped by tree
            operations.
        lines: whether the table is in lines; set by :class:`optzoo.rows.Lines`. It is static, and
            part of the tree structure.
        shard: for a table divided by :func:`optzoo.sharded_minimize`, the properties shared by its
            shards; None for all other rows.
        squares: the sum of squares of the whole gradient of such a table, if it is known, for norms
            over the rows of all devices and all rounds.

    Raises:
        TypeError: if the indices are not integers, if only one of indices and values is an array,
            or if ``num_rows`` is not a Python int.
        ValueError: if ``indices`` and ``values`` differ in length, or ``num_rows`` is negative.
    """

    indices: Array  # a property: see below
    values: Array
    num_rows: int
    coalesced: bool = False
    shard: Shard | None = None
    squares: Array | None = None
    lines: bool = False

    __array_ufunc__ = None  # lets `numpy_array + rows` reach __radd__

    def __post_init__(self):
        if not isinstance(self.num_rows, int) or isinstance(self.num_rows, bool):
            raise TypeError(
                "SparseRows.num_rows must be a Python int (it is part of the type under jit), "
                f"got {self.num_rows!r}"
            )
        if self.num_rows < 0:
            raise ValueError(f"SparseRows.num_rows must be at least 0, got {self.num_rows}")
        # A tree of specifications or axes has no arrays, but then neither here nor there.
        parts = {"indices": self.ids, "values": self.values}
        others = {name: x for name, x in parts.items() if not hasattr(x, "dtype")}
        if len(others) == 1:
            [(name, x)] = others.items()
            raise TypeError(f"SparseRows.{name} must be an array, got {x!r}")
        _check_lengths(self.ids, self.values)

    def __repr__(self) -> str:
        ids = self.indices if is_protected(self.ids) else self.ids
        values = f"indices={short(ids)}, values={short(self.values)}"
        if not hasattr(self.values, "shape"):  # a tree of specifications
            return f"SparseRows({values}, num_rows={self.num_rows})"
        return f"SparseRows({values}, shape={self.shape})"

    def __reduce__(self) -> tuple[Any, ...]:
        # Files of pickle hold plain integers, which every version of JAX can read.
        fields = self.indices, self.values, self.num_rows, self.coalesced
        return SparseRows, (*fields, self.shard, self.squares, self.lines)

    @property
    def ids(self) -> Any:
        """The indices as stored in the tree, in a dtype that does not allow arithmetic."""
        return self.__dict__["_ids"]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole array."""
        return (self.num_rows, *self.values.shape[1:])

    @property
    def dtype(self) -> Any:
        """The dtype of the values."""
        return self.values.dtype

    def astype(self, dtype: DTypeLike) -> SparseRows:
        """The same rows with values of another dtype."""
        return self._same(self.values.astype(dtype))

    def with_values(self, values: Array) -> SparseRows:
        """Other values with the same indices."""
        return self._same(values, squares=None)

    def with_rows(self, indices: Any, values: Array, *, coalesced: bool = False) -> SparseRows:
        """Other rows of the same table."""
        return self._same(values, ids=protect(indices), coalesced=coalesced, squares=None)

    def with_squares(self, squares: Array | None) -> SparseRows:
        """The same rows, with the sum of squares of the whole gradient."""
        return self._same(self.values, squares=squares)

    def of_lines(self) -> SparseRows:
        """The same rows, of a table in lines."""
        return self if self.lines else self._same(self.values, lines=True)

    def in_lines(self, x: Any) -> bool:
        """Whether an array is in the lines of the table, or of two of its slots."""
        return self.lines and are_lines(x, self.shape)

    def _same(self, values: Any, **changed: Any) -> SparseRows:
        """A copy with changed fields, without the hints of the sum."""
        fields: dict[str, Any] = {
            "ids": self.ids,
            "coalesced": self.coalesced,
            "shard": self.shard,
            "squares": self.squares,
            "lines": self.lines,
        }
        return _make(values=values, num_rows=self.num_rows, **{**fields, **changed})

    @property
    def size(self) -> int:
        """The number of elements of the whole array; for a sharded table, of all shards."""
        num_rows = self.num_rows if self.shard is None else self.shard.num_rows
        return num_rows * math.prod(self.values.shape[1:])

    def __add__(self, other: Any) -> Any:
        """``other`` with the rows added to it; the sum of two SparseRows is SparseRows."""
        if not fits(self, other):
            self._refuse_shape(other)
        if is_rows(other):
            if other.ids is self.ids:
                return self.with_values(self.values + other.values)
            dtype = promote_types(self.indices.dtype, other.indices.dtype)
            indices = jnp.concatenate([self.indices.astype(dtype), other.indices.astype(dtype)])
            values = jnp.concatenate([self.values, other.values])
            total = (other if self.shard is None else self).with_rows(indices, values)
            return total.of_lines() if self.lines else total
        dense = jnp.asarray(other)
        is_wider = promote_types(self.dtype, dense.dtype) != dense.dtype
        if has_16_bits(dense.dtype) and (is_wider or not self.coalesced):
            # Repeated rows, one after the other, would be lost in the rounding of the sum; and rows
            # of more bits would be rounded twice.
            wide = self.astype(promote_types(self.dtype, jnp.float32)).coalesce()
            return wide.scatter(dense, upcast(wide.gather(dense)) + wide.values)
        values = self.values.astype(dense.dtype)
        if self.in_lines(dense):
            return add_rows(dense, self.indices, values, self.shape)
        return add_rows_to(dense, self.indices, values, unique=self.coalesced)

    __radd__ = __add__

    def __neg__(self) -> SparseRows:
        return self._same(-self.values)

    def __sub__(self, other: Any) -> Any:
        return self + -other

    def __rsub__(self, other: Any) -> Any:
        return other + -self

    def __mul__(self, number: Any) -> SparseRows:
        """The rows times a number, in their dtype; multiplied in float32 at least."""
        if is_rows(number) or jnp.ndim(number) != 0:
            self._refuse()
        squares = None if self.squares is None else self.squares * number**2
        return self._same((upcast(self.values) * number).astype(self.dtype), squares=squares)

    __rmul__ = __mul__

    def __truediv__(self, number: Any) -> SparseRows:
        """The rows divided by a number, in their dtype; in float32 at least."""
        if is_rows(number) or jnp.ndim(number) != 0:
            self._refuse()
        squares = None if self.squares is None else self.squares / number**2
        return self._same((upcast(self.values) / number).astype(self.dtype), squares=squares)

    def _refuse(self, *_: Any) -> Any:
        raise TypeError(f"rows can be added, and multiplied or divided by a number, only. {HINT}")

    __abs__ = __pow__ = __rpow__ = __rtruediv__ = _refuse
    __matmul__ = __rmatmul__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse

    def to_dense(self, like: Any = None) -> Array:
        """The whole array, zero where no row is listed; in lines and divided like ``like``."""
        wide = upcast(self.values)
        shape, sharding = self.shape, None
        if like is not None and not is_rows(like) and fits(self, like):
            shape, sharding = jnp.shape(like), place_of(like) or jax.typeof(like).sharding
        zeros = zeros_of(jax.ShapeDtypeStruct(shape, wide.dtype, sharding=sharding))
        return (zeros + self.with_values(wide)).astype(self.dtype)

    def gather(self, dense: Any) -> Array:
        """The rows of ``dense`` at ``indices``; arbitrary rows at padding."""
        if is_lines(dense):
            return take_rows(dense.value, self.indices, dense.shape)
        if self.num_rows == 0:
            return jnp.zeros((*self.ids.shape, *dense.shape[1:]), dense.dtype)
        if self.in_lines(dense):
            return take_rows(dense, self.indices, self.shape)
        self._check_rows_of(dense)
        return gather_rows(dense, self.indices)

    def scatter(self, dense: Any, rows: Array) -> Any:
        """``dense`` with the rows at ``indices`` replaced; for coalesced rows."""
        if is_lines(dense):
            new = put_rows(dense.value, self.indices, rows.astype(dense.dtype), dense.shape)
            return Lines(new, dense.shape)
        if self.in_lines(dense):
            return put_rows(dense, self.indices, rows.astype(dense.dtype), self.shape)
        self._check_rows_of(dense)
        return scatter_rows(dense, self.indices, rows.astype(dense.dtype))

    def _check_rows_of(self, dense: Any) -> None:
        if jnp.shape(dense)[:1] < (self.num_rows,):
            self._refuse_shape(dense)

    def _refuse_shape(self, x: Any) -> None:
        raise ValueError(
            f"rows of an array of shape {self.shape} do not match an array of shape {jnp.shape(x)}"
        )

    def rows_if(self, wanted: Array) -> SparseRows:
        """The same rows if a condition holds, otherwise only padding."""
        ids = jnp.where(wanted, self.indices, self.num_rows)
        return self._same(jnp.where(wanted, self.values, 0), ids=protect(ids))

    def drop_padding(self) -> SparseRows:
        """The same rows with zero values at padding."""
        real = self._row_ids() < self.num_rows
        real = real.reshape(real.shape + (1,) * (self.values.ndim - 1))
        return self._same(jnp.where(real, self.values, 0))

    def coalesce(self, *, deterministic: bool = False) -> SparseRows:
        """Sums rows with the same index; the remaining positions become padding.

        Sums in at least float32. On accelerators the order of the sums is not fixed, unless
        ``deterministic``: a sort and a scan then make results bit-reproducible.
        """
        if self.coalesced:
            return self
        values = upcast(self.values)
        ids, values = merge_rows(
            self._row_ids(), values, num_rows=self.num_rows, deterministic=deterministic
        )
        return self._same(values.astype(self.dtype), ids=protect(ids), coalesced=True)

    def _row_ids(self) -> Array:
        """The indices, with padding in place of indices out of range."""
        return in_range(self.indices, self.num_rows)


def _set_indices(rows: Any, indices: Any) -> None:
    rows.__dict__["_ids"] = protect(indices)


# The constructor of the dataclass protects the indices, and who reads them gets integers.
_INDICES = property(lambda rows: plain(rows.ids), _set_indices, doc="The ids of the rows.")
setattr(SparseRows, "indices", _INDICES)  # noqa: B010 (unknown to the type checker)


def _check_lengths(ids: Any, values: Any) -> None:
    # A pytree may hold objects that have no shape.
    shape, values_shape = getattr(ids, "shape", ()), getattr(values, "shape", None)
    if values_shape is not None and values_shape[: len(shape)] != shape:
        raise ValueError(
            "SparseRows needs one row of values for each index, got indices of shape "
            f"{shape} and values of shape {values_shape}"
        )


def _make(
    ids: Any,
    values: Any,
    num_rows: int,
    *,
    coalesced: bool,
    shard: Shard | None,
    squares: Any,
    lines: bool,
) -> SparseRows:
    """Rows with protected ids; or with any objects, as in a tree of shapes."""
    _check_lengths(ids, values)
    rows = object.__new__(SparseRows)
    rows.__dict__.update(
        _ids=ids,
        values=values,
        num_rows=num_rows,
        coalesced=coalesced,
        shard=shard,
        squares=squares,
        lines=lines,
    )
    return rows


def _flatten_with_keys(g: SparseRows) -> tuple[Any, Any]:
    children, kind = _flatten(g)
    return [
        (GetAttrKey(k), x) for k, x in zip(("values", "ids", "squares"), children, strict=False)
    ], kind


def _flatten(g: SparseRows) -> tuple[Any, Any]:
    squares = () if g.shard is None else (g.squares,)
    # Values come first: optax.inject_hyperparams before 0.2.8 takes the dtype of the first leaf.
    return (g.values, g.ids, *squares), (g.num_rows, g.shard, g.lines)


def _unflatten(kind: Any, data: Iterable[Any]) -> SparseRows:
    (num_rows, shard, lines), (values, ids, *squares) = kind, data
    summed = squares[0] if squares else None
    return _make(ids, values, num_rows, coalesced=False, shard=shard, squares=summed, lines=lines)


# Not by register_dataclass: `squares` is a child only of rows that have a shard.
jax.tree_util.register_pytree_with_keys(SparseRows, _flatten_with_keys, _unflatten, _flatten)


def is_rows(g: object) -> bool:
    """Whether ``g`` is a row-sparse gradient."""
    return isinstance(g, SparseRows)


def fits(g: Any, x: Any) -> bool:
    """Whether an array has the shape of a gradient, or its lines for rows of a table in lines."""
    return jnp.shape(x) == jnp.shape(g) or (is_rows(g) and g.in_lines(x))


def axes_of_rows(g: SparseRows) -> tuple[str, ...]:
    """The mesh axes over which the rows of the table are divided; empty if it is not divided."""
    return () if g.shard is None else g.shard.axes


def is_sparse_or_none(g: object) -> bool:
    """Whether ``g`` is a gradient of one parameter that is not an array: SparseRows or None."""
    return g is None or is_rows(g)


rows_tree = Trees(is_rows)  # in which SparseRows are leaves
update_tree = Trees(is_sparse_or_none)  # in which SparseRows and None are leaves


def map_rows(f: Callable[[SparseRows], Any], updates: Any) -> Any:
    """Applies ``f`` to every SparseRows in a tree; arrays are unchanged."""
    return rows_tree.map(lambda g: f(g) if is_rows(g) else g, updates)


def map_not_none(f: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Applies ``f`` to leaves; None where the first tree has None."""
    apply = lambda x, *xs: None if x is None else f(x, *xs)
    return update_tree.map(apply, tree, *rest)


def apply_not_none(params: Any, updates: Any) -> Any:
    """``optax.apply_updates``; parameters without an update are unchanged."""
    add = lambda u, x: (x + u).astype(x.dtype)
    return replace_not_none(params, map_not_none(add, updates, params))


def replace_not_none(old: Any, new: Any) -> Any:
    """The leaves of ``new``, or those of ``old`` where ``new`` has None."""
    return jax.tree.map(lambda a, b: a if b is None else b, old, new)


def as_arrays(tree: Any) -> Any:
    """The tree with JAX arrays in place of NumPy arrays and Python numbers.

    ``jax.jit`` does this to arguments. Without it, an update may get a state restored as NumPy
    arrays, or Python floats as parameters.
    """
    if not any(map(_is_foreign, jax.tree.leaves(tree))):
        return tree

    def convert(x):
        values = x.values if is_rows(x) else x
        if not _is_foreign(values):
            return x
        return x._same(jnp.asarray(values)) if is_rows(x) else jnp.asarray(values)

    return rows_tree.map(convert, tree)


def _is_foreign(x: Any) -> bool:
    """Whether ``x`` is a number, or an array of numbers, that is not of JAX."""
    if isinstance(x, np.ndarray | np.generic):
        return jnp.issubdtype(x.dtype, jnp.number) or x.dtype == jnp.bool_
    return isinstance(x, int | float | complex)


def zeros_like_update(types: Any) -> Any:
    """An update of zeros, with only padding in rows, of the given types."""
    # Zeros of the dtype of protected ids are padding.
    return jax.tree.map(zeros_of, types)


@recorded
def coalesce(*, deterministic: bool = False) -> optax.GradientTransformation:
    """Merges repeated indices of all SparseRows gradients, once for the rest of a chain.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.rows.coalesce()
        >>> rows = optzoo.SparseRows(jnp.array([2, 2]), jnp.array([[1.0], [3.0]]), 4)
        >>> updates, state = tx.update(rows, tx.init(None))
        >>> print(updates.indices, updates.values.ravel())  # 4, the number of rows, is padding
        [4 2] [0. 4.]

    Args:
        deterministic: whether to sum in a fixed order on every backend, for bit-reproducible runs.
    """
    merged = lambda g: g.coalesce(deterministic=deterministic)
    return optax.stateless(lambda updates, _: map_rows(merged, updates))


@recorded
def densify() -> optax.GradientTransformation:
    """Converts SparseRows gradients to arrays, for transformations that do not support rows.

    Put it before such a transformation in a chain, and before a wrapper that needs updates with the
    structure of the gradient, such as ``optax.apply_if_finite``, around an optimizer with dense
    updates for rows (:func:`optzoo.adam`).

    Example:
        >>> import jax.numpy as jnp, optax, optzoo
        >>> tx = optax.chain(optzoo.rows.densify(), optax.scale_by_adam())
        >>> rows = optzoo.SparseRows(jnp.array([2]), jnp.ones((1, 2)), 3)
        >>> updates, state = tx.update(rows, tx.init(jnp.zeros((3, 2))))
        >>> print(updates)
        [[0. 0.]
         [0. 0.]
         [1. 1.]]
    """

    def densified(updates, params):
        like = updates if params is None else params
        dense = lambda g, x: g.to_dense(x) if is_rows(g) else g
        return update_tree.map(dense, updates, like)

    return optax.stateless(densified)


@recorded
def on_values(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Applies a stateless transformation, such as clipping, to the values of rows only.

    Rows with repeated indices are summed first, so an element-wise ``inner`` gives the result of
    the dense gradient, except for untouched rows, to which it is not applied.

    Example:
        >>> import jax.numpy as jnp, optax, optzoo
        >>> tx = optzoo.rows.on_values(optax.clip(1.0))
        >>> rows = optzoo.SparseRows(jnp.array([2]), jnp.array([[5.0, 0.5]]), 3)
        >>> updates, state = tx.update(rows, tx.init(jnp.zeros((3, 2))))
        >>> print(updates.values)
        [[1.  0.5]]

    Args:
        inner: a transformation that has no params-shaped state and does not use parameters.
    """
    check_transformation(inner=inner)
    reads, inner = about_of(inner).reads, optax.with_extra_args_support(inner)

    def update(updates, state, params=None, **extra_args):
        del params  # a row has no parameter of its own shape
        updates = map_rows(SparseRows.coalesce, updates)
        values = map_rows(lambda g: g.values, updates)
        values, state = inner.update(values, state, None, **extra_args)
        rebuild = lambda g, v: g.with_values(v).drop_padding() if is_rows(g) else v
        return rows_tree.map(rebuild, updates, values), state

    return Optimizer(inner.init, update, About(reads=reads))
