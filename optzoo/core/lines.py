"""Tables with several rows in each line of 128 lanes, which TPUs do not pad."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec
from jax.tree_util import GetAttrKey

from .checks import is_array
from .merge import add, elect, segment_sum
from .meshes import automatically, devices_along, like_first, mesh_of, spec_of
from .numerics import has_keys
from .trees import Trees

_LANES = 128
_WASTE = 1.15  # how much larger than its rows a line may be
_FIELD = GetAttrKey("value")  # as the field of a box of Flax: it is in no name of a parameter


@dataclasses.dataclass(frozen=True, eq=False)
class Lines:
    """A table in lines, made by :func:`optzoo.rows.to_lines` and read by :func:`optzoo.lookup`.

    If a table is gathered and scattered by rows, a TPU pads each row to a multiple of 128 lanes. A
    line has several rows side by side, with little padding: row ``i`` is part ``i % k`` of line
    ``i // k``.

    It is a pytree with one leaf, the array of lines, in whose place the gradient has SparseRows,
    which ``Lines`` marks as rows of lines.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> table = optzoo.rows.to_lines(jnp.ones((1000, 16)))
        >>> table.shape, table.value.shape
        ((1000, 16), (125, 128))

    Attributes:
        value: the array, of shape ``(number of lines, lanes)``; for two slots side by side
            ``(number of lines, 2 * lanes)``; a slot with one number for each row is unchanged.
            Integers with rows of another width are in lines of their own.
        shape: the shape of the table, ``(num_rows, *row_shape)``.
    """

    value: Any
    shape: tuple[int, ...]

    def __post_init__(self):
        # Rows say of themselves that they are of lines: no array is taken for lines by its shape.
        if hasattr(self.value, "of_lines"):
            object.__setattr__(self, "value", self.value.of_lines())

    @property
    def dtype(self) -> Any:
        """The dtype of the rows."""
        return self.value.dtype

    def astype(self, dtype: Any) -> Lines:
        """The same table in another dtype."""
        return Lines(self.value.astype(dtype), self.shape)

    def __len__(self) -> int:
        return self.shape[0]


jax.tree_util.register_pytree_with_keys(
    Lines,
    lambda lines: ([(_FIELD, lines.value)], lines.shape),
    lambda shape, children: Lines(next(iter(children)), shape),
    lambda lines: ([lines.value], lines.shape),
)


def is_lines(x: object) -> bool:
    """Whether ``x`` is a table in lines."""
    return isinstance(x, Lines)


param_tree = Trees(is_lines)  # in which tables in lines are leaves


def has_lines(tree: Any) -> bool:
    """Whether a table in a tree is in lines."""
    return any(map(is_lines, param_tree.leaves(tree)))


def rows_per_line(row_shape: Sequence[int]) -> int:
    """The number of rows in a line, for rows of this shape."""
    width = math.prod(row_shape)
    return max(1, _lanes(width) // max(1, width))


def shape_of_lines(shape: Sequence[int]) -> tuple[int, int]:
    """The shape of the array of lines of a table of this shape."""
    return -(-shape[0] // rows_per_line(shape[1:])), _lanes(math.prod(shape[1:]))


def _lanes(width: int) -> int:
    lanes = _LANES
    while width and lanes // width * width * _WASTE < lanes:
        lanes += _LANES
    return lanes


def to_lines(table: Any, like: Any = None) -> Any:
    """Converts a table to lines; or those arrays of a tree that are in lines in another tree.

    On a TPU, tables of narrow rows need several times less memory in lines: a row of 16 numbers
    uses 16 lanes, not 128. The compiler estimates that a step of Adam takes 1.4 times as many
    cycles as with padded rows, and 3.4 times as many at width 100
    (benchmarks/accelerator_facts.md).

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> params = {"table": optzoo.rows.to_lines(jnp.ones((1000, 16)))}
        >>> params["table"].value.shape
        (125, 128)
        >>> loss = lambda p, ids: jnp.sum(optzoo.lookup(p["table"], ids) ** 2)
        >>> tx = optzoo.lazy_adam(0.1)
        >>> step, state = optzoo.minimize(loss, tx), tx.init(params)
        >>> params, state, value = step(params, state, jnp.array([0, 3]))
        >>> optzoo.rows.from_lines(params)["table"].shape
        (1000, 16)

    Args:
        table: an array of shape ``(num_rows, *row_shape)``; or a tree, such as a state for plain
            arrays.
        like: a tree with :class:`Lines` in place of some of the arrays.

    Raises:
        TypeError: if the table is not an array of numbers, and ``like`` is not given.
        ValueError: if the table is a scalar, or an array does not have the shape of its table.
    """
    if like is None:
        if not jax.tree_util.all_leaves([table]):
            raise TypeError(
                f"table must be an array, got a {type(table).__name__}: for a tree give like=, the "
                "same tree with some of its tables in lines"
            )
        is_abstract = isinstance(table, jax.ShapeDtypeStruct)
        if is_abstract or not is_array(table) or has_keys(getattr(table, "dtype", None)):
            fix = ": use jax.eval_shape(optzoo.rows.to_lines, table)" * is_abstract
            raise TypeError(f"table must be an array of numbers, got {table!r}{fix}")
        if not jnp.ndim(table):
            raise ValueError(f"table must have at least one axis, got {table!r}")
        if not math.prod(jnp.shape(table)):
            raise ValueError(
                f"table of shape {jnp.shape(table)} has no elements, and so no lines: keep it as "
                "an array"
            )
        return as_lines(jnp.asarray(table), jnp.shape(table))
    return param_tree.map(_like, like, table)


def from_lines(tree: Any) -> Any:
    """Converts tables in lines to plain arrays, for checkpoints and other uses.

    A state becomes a state for plain arrays; :func:`optzoo.rows.to_lines` with ``like`` is the
    inverse.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> table = optzoo.rows.to_lines(jnp.ones((1000, 16)))
        >>> optzoo.rows.from_lines({"table": table, "w": jnp.ones(3)})["table"].shape
        (1000, 16)

    Args:
        tree: parameters, a state, or any tree.
    """
    if not has_lines(tree):
        return tree
    return param_tree.map(lambda x: plain(x) if is_lines(x) else x, tree)


def _like(old: Any, x: Any) -> Any:
    if not is_lines(old):
        return x
    made = as_lines(x, old.shape)
    given, wanted = ([jnp.shape(a) for a in jax.tree.leaves(t)] for t in (made, old))
    if given != wanted:
        raise ValueError(
            f"table: arrays of shapes {[jnp.shape(a) for a in jax.tree.leaves(x)]} do not match a "
            f"table of shape {old.shape} in `like`: give a tree for the same tables"
        )
    return made


def to_lines_of(like: Any, tx: Any, pair: tuple[Any, Any]) -> tuple[Any, Any]:
    """Parameters and a state of ``tx``, in lines where the parameters ``like`` are."""
    return to_lines(pair, like=(like, jax.eval_shape(tx.init, like))) if has_lines(like) else pair


def plain(table: Lines) -> Any:
    """The array itself."""
    return jax.tree.map(lambda a: _parted(a, table.shape), table.value, is_leaf=_has_shape)


def in_lines(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Extends a function of arrays to tables in lines, whose results are in lines, too."""
    # What optax masks has no array.
    return lambda x: as_lines(jax.tree.map(f, plain(x)), x.shape) if is_lines(x) else f(x)


def on_plain(rule: Callable[..., Any], shape: tuple[int, ...]) -> Callable[..., Any]:
    """Applies a rule ``rule(g, x, slots, ...) -> (update, slots)`` to a table in lines.

    The rule gets plain arrays, and its results are converted to lines.
    """

    def on_arrays(g, x, slots, *args, **kwargs):
        if not any(are_lines(a, shape) for a in jax.tree.leaves((x, slots))):
            return rule(g, x, slots, *args, **kwargs)
        x, slots = plain(Lines((x, slots), shape))
        return as_lines(rule(g, x, slots, *args, **kwargs), shape).value

    return on_arrays


def are_lines(x: Any, shape: tuple[int, ...]) -> bool:
    """Whether an array has the shape of the lines of a table, or of two slots in lines."""
    lines = shape_of_lines(shape)
    return lines != shape and jnp.shape(x) in (lines, doubled(lines))


def doubled(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of two arrays of this shape, side by side."""
    return (*shape[:-1], 2 * shape[-1]) if shape else shape


def _each(f: Callable[[Array], Array], x: Array, number: int) -> Array:
    """Applies ``f`` to each of ``number`` arrays side by side; the results are side by side."""
    if number == 1:
        return f(x)
    return jnp.concatenate([f(part) for part in jnp.split(x, number, axis=-1)], axis=-1)


def _widths(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The shapes of a row of a table, of two rows side by side, and of a line."""
    lines = shape_of_lines(shape)
    return [shape[1:], doubled(shape)[1:], lines[1:], doubled(lines)[1:]]


def _has_shape(x: Any) -> bool:
    return hasattr(x, "shape")


def as_lines(tree: Any, shape: tuple[int, ...]) -> Lines:
    """Converts arrays of a table to lines if they have its shape."""
    return Lines(jax.tree.map(lambda a: _joined(a, shape), tree), shape)


def _joined(x: Any, shape: tuple[int, ...]) -> Any:
    """Converts an array of the shape of the table to lines.

    Integers with rows of another width are in lines of their own; other arrays are unchanged.
    """
    of_x = jnp.shape(x)
    if len(of_x) > 1 and of_x[0] == shape[0] and of_x[1:] not in _widths(shape):
        # What is floating-point may be a matrix of which the first axis is as long by chance.
        return as_lines(x, of_x) if jnp.issubdtype(x.dtype, jnp.integer) else x
    (lines, lanes), width = shape_of_lines(shape), math.prod(shape[1:])
    if shape == (lines, lanes):
        return x
    if len(shape) > 1 and jnp.shape(x) == doubled(shape):
        return _each(lambda half: _joined(half, shape), x, 2)
    if jnp.shape(x) != shape:
        if are_lines(x, shape):
            raise ValueError(
                f"an array of shape {of_x} belongs to a table of shape {shape}, whose lines have "
                "the same shape, so it is ambiguous: keep the table as an array"
            )
        return x
    per_line = lanes // width

    def join(x):
        rows = jnp.pad(x.reshape(-1, width), ((0, lines * per_line - shape[0]), (0, 0)))
        return jnp.pad(rows.reshape(lines, -1), ((0, 0), (0, lanes - per_line * width)))

    return automatically(join, _by_rows)(x)


def _parted(x: Any, shape: tuple[int, ...]) -> Array:
    """The inverse of :func:`_joined`."""
    if is_lines(x):
        return plain(x)
    if not are_lines(x, shape):
        return x
    if (number := _side_by_side(x, shape)) > 1:
        return _each(lambda half: _parted(half, shape), x, number)
    width = math.prod(shape[1:])
    part = lambda x: x[:, : x.shape[1] // width * width].reshape(-1, *shape[1:])[: shape[0]]
    return automatically(part, _by_rows)(x)


def _by_rows(new: Array, x: Array) -> PartitionSpec:
    """Divides lines like rows, and rows like lines, where possible; lanes are not divided."""
    first = spec_of(x)[0]
    return PartitionSpec(None if len(new) % devices_along(mesh_of(x), first) else first)


def take_rows(lines: Array, ids: Array, shape: tuple[int, ...]) -> Array:
    """The rows of some ids; arbitrary rows for ids out of range.

    Args:
        lines: the array of lines.
        ids: integers of shape ``(n,)``.
        shape: the shape of the table.
    """

    def take(lines, ids):
        line, part, per_line, width = _places(lines, ids, shape)
        is_mine = _one_hot(part, per_line)

        def rows_of(found):
            found = found[:, : per_line * width].reshape(-1, per_line, width)
            # A sum of one row and zeros: quicker on a TPU than to gather it.
            rows = jnp.sum(jnp.where(is_mine[..., None], found, 0), axis=1, dtype=lines.dtype)
            return rows.reshape(-1, *shape[1:])

        found = jnp.take(lines, line, axis=0, mode="clip")
        return _each(rows_of, found, _side_by_side(lines, shape))

    return automatically(take, lambda rows, lines, ids: spec_of(ids))(lines, ids)


def put_rows(lines: Array, ids: Array, rows: Array, shape: tuple[int, ...]) -> Array:
    """The lines with the rows of some ids replaced; ids in range must be distinct."""
    put = functools.partial(_put_rows, shape=shape)
    return like_first(put)(lines, ids, rows)


def _put_rows(lines: Array, ids: Array, rows: Array, shape: tuple[int, ...]) -> Array:
    line, part, per_line, width = _places(lines, ids, shape)
    # All new rows of a line come together at one of their positions.
    elected, count = elect(line), len(ids)
    own = segment_sum(_in_lanes(rows, part, lines, shape), elected, count)
    is_new = segment_sum(_one_hot(part, per_line).astype(jnp.int32), elected, count) > 0
    is_new = _padded(jnp.repeat(is_new, width, axis=1), shape)
    is_new = jnp.tile(is_new, (1, _side_by_side(lines, shape)))
    new = jnp.where(is_new, own, jnp.take(lines, line, axis=0, mode="clip"))
    is_elected = elected == jnp.arange(count, dtype=elected.dtype)
    to = jnp.where(is_elected, line, len(lines))
    return lines.at[to].set(new, mode="drop", unique_indices=True)


def add_rows(lines: Array, ids: Array, rows: Array, shape: tuple[int, ...]) -> Array:
    """The lines with rows added at some ids, which may repeat."""

    def put(lines, ids, rows):
        line, part, _, _ = _places(lines, ids, shape)
        return add(lines, line, _in_lanes(rows, part, lines, shape))

    return like_first(put)(lines, ids, rows)


def _side_by_side(lines: Array, shape: tuple[int, ...]) -> int:
    """The number of lines side by side: two for two slots, otherwise one."""
    return lines.shape[1] // shape_of_lines(shape)[1]


def _places(lines: Array, ids: Array, shape: tuple[int, ...]) -> tuple[Array, Array, int, int]:
    """For each id, its line and its part of the line; and the number and the width of parts."""
    width = math.prod(shape[1:])
    per_line = shape_of_lines(shape)[1] // width
    is_in = (ids >= 0) & (ids < shape[0])
    return jnp.where(is_in, ids // per_line, len(lines)), ids % per_line, per_line, width


def _in_lanes(rows: Array, part: Array, lines: Array, shape: tuple[int, ...]) -> Array:
    """A line for each row, with the row in its part and zeros elsewhere."""
    is_mine = _one_hot(part, shape_of_lines(shape)[1] // math.prod(shape[1:]))

    def line_of(rows):
        rows = rows.reshape(len(rows), 1, -1)
        found = jnp.where(is_mine[..., None], rows, 0)
        return _padded(found.reshape(len(rows), -1).astype(lines.dtype), shape)

    return _each(line_of, rows, _side_by_side(lines, shape))


def _one_hot(part: Array, per_line: int) -> Array:
    return part[:, None] == jnp.arange(per_line)[None]


def _padded(x: Array, shape: tuple[int, ...]) -> Array:
    return jnp.pad(x, ((0, 0), (0, shape_of_lines(shape)[1] - x.shape[1])))
