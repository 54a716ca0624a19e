"""The assignment of the rows of a table to devices."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from ..core.checks import check_size
from ..core.lines import is_lines
from ..core.numerics import promote_types
from ..core.paths import leaves_with_path, path_name, value_by_name
from ..core.row_ids import as_ids
from ..core.rows import Shard

Partition = Literal["mod", "div"]


@dataclasses.dataclass(frozen=True)
class RowSharding:
    """The distribution of the rows of a table over a mesh axis, as in ``tf.nn.embedding_lookup``.

    Device ``i % num_shards`` owns row ``i`` with ``"mod"``; with ``"div"`` each device owns
    consecutive rows. Frequent ids are often small (as of words sorted by frequency); ``"mod"``
    gives them different owners.

    The array of a table has ``stored_rows`` rows, the rows of the first device first. This is more
    than ``num_rows``, since all devices have the same number of rows. ``stored_rows`` does not
    depend on ``num_shards`` if ``num_shards`` divides the root of ``multiple`` (with ``"mod"``) or
    ``multiple`` (with ``"div"``). By default, a checkpoint of 64 devices can be restored on 1, 2,
    4, ..., 64 (:func:`optzoo.sharded.in_order_of_ids`).

    Example:
        >>> import numpy as np, optzoo
        >>> sharding = optzoo.sharded.RowSharding(10, 4, multiple=1)
        >>> sharding.stored_rows, sharding.rows_per_shard
        (16, 4)
        >>> sharding.places_of(np.array([0, 1, 4, 5])).tolist()
        [0, 4, 1, 5]

    Args:
        num_rows: the number of ids, ``0 .. num_rows - 1``. The id ``num_rows`` is padding.
        num_shards: the size of the mesh axis, or the product of the sizes of several.
        partition: ``"mod"`` or ``"div"``.
        axis_name: the name of the mesh axis, or a tuple of names.
        multiple: a divisor of ``stored_rows``.

    Raises:
        TypeError: if a number is not an integer.
        ValueError: if a number is not positive; if ``partition`` or ``axis_name`` has another
            value; if the table has 2**31 rows or more and x64 is off.
    """

    num_rows: int
    num_shards: int
    partition: Partition = "mod"
    axis_name: str | tuple[str, ...] = "shard"
    multiple: int = 4096

    def __post_init__(self):
        for name in ("num_rows", "num_shards", "multiple"):
            check_size(1, **{name: getattr(self, name)})
        if self.partition not in get_args(Partition):
            known = list(get_args(Partition))
            raise ValueError(f"partition must be one of {known}, got {self.partition!r}")
        if not self.axes or not all(isinstance(name, str) for name in self.axes):
            raise ValueError(
                f"axis_name must be a name or a tuple of names, got {self.axis_name!r}"
            )
        if self.stored_rows >= 2**31 - 1 and _dtype_of_ids(jnp.int64) != jnp.int64:
            raise ValueError(
                f"num_rows={self.num_rows} needs 64-bit ids: call "
                "jax.config.update('jax_enable_x64', True) first"
            )

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the mesh axes."""
        return (self.axis_name,) if isinstance(self.axis_name, str) else tuple(self.axis_name)

    @property
    def stored_rows(self) -> int:
        """The number of rows of the array of all shards."""
        # With "mod" each shard must be divisible by their number, for all-to-all between the two
        # orders of the rows.
        shards = self.num_shards if self.partition == "div" else self.num_shards**2
        unit = math.lcm(shards, self.multiple)
        return -(-self.num_rows // unit) * unit

    @property
    def rows_per_shard(self) -> int:
        """The number of rows of each shard."""
        return self.stored_rows // self.num_shards

    @property
    def spec(self) -> PartitionSpec:
        """The partition spec of the table and its slots."""
        return PartitionSpec(self.axis_name)

    @property
    def shard(self) -> Shard:
        """The ``Shard`` of rows of a device."""
        return Shard(self.axes, self.num_rows, False)

    def places_of(self, ids: Any) -> Any:
        """The row of the stored array for each id; the owner is ``place // rows_per_shard``.

        Padding has the place ``stored_rows``, ids out of range ``stored_rows + 1``. The ids are
        NumPy or JAX integers.
        """
        xp, ids = np if isinstance(ids, np.ndarray) else jnp, as_ids(ids)
        if not jnp.issubdtype(ids.dtype, jnp.integer):
            raise TypeError(f"ids must be integers, got dtype {ids.dtype}")
        ids = ids.astype(_dtype_of_ids(ids.dtype))
        place = ids
        if self.partition == "mod":
            place = ids % self.num_shards * self.rows_per_shard + ids // self.num_shards
        place = xp.where(ids == self.num_rows, self.stored_rows, place)
        return xp.where((ids < 0) | (ids > self.num_rows), self.stored_rows + 1, place)

    def ids_of(self, places: Any) -> Any:
        """The id of each row of the stored array; at least ``num_rows`` for padding of a shard."""
        if self.partition == "div":
            return places
        return places % self.rows_per_shard * self.num_shards + places // self.rows_per_shard

    def required_capacity(self, ids: Any) -> int:
        """The largest number of distinct ids per owner among the ids of one device; on the host."""
        places = np.unique(self.places_of(np.asarray(ids).reshape(-1)))
        owners = places[places < self.stored_rows] // self.rows_per_shard
        return int(np.bincount(owners, minlength=1).max())

    def capacity(self, num_ids: int, factor: float | None, *, repeated: bool = False) -> int:
        """The number of rows that one device requests from each owner at once.

        Args:
            num_ids: the number of ids of one device.
            factor: the multiple of the average number of ids per owner; None, as always with one
                shard: sufficient for any ids.
            repeated: whether a row may be requested more than once, as always with one shard.
        """
        repeated = repeated or self.num_shards == 1
        enough = max(1, num_ids if repeated else min(num_ids, self.rows_per_shard))
        if factor is None or self.num_shards == 1:
            return enough
        average = num_ids / self.num_shards
        needed = max(1, math.ceil(factor * average + SPREAD * math.sqrt(average)))
        return min(enough, _by_eights(needed))


def measured_capacity(s: RowSharding, num_ids: int, most: int) -> int:
    """The number of rows that one device requests from each owner at once, by the ids of a batch.

    It slightly exceeds the need of the batch, and is limited to the capacities of the factors 0.25,
    as the batch may be unusual, and 1.0, which suffices for random ids.

    Args:
        s: the sharding of the table.
        num_ids: the number of ids of one device.
        most: the largest number of distinct ids per owner among them.
    """
    least, greatest = s.capacity(num_ids, 0.25), s.capacity(num_ids, 1.0)
    return min(max(least, _by_eights(math.ceil(most + 2 * math.sqrt(most)))), greatest)


def _by_eights(rows: int) -> int:
    """A multiple of 8, the group in which a TPU stores rows: the rows of owners are contiguous."""
    return rows + -rows % 8 if rows > 128 else rows


# Ids at random are Poisson distributed over the owners, with a standard deviation of the root of
# their average number. In benchmarks/sharded.py random ids fit into one round.
SPREAD = 4.5


def _dtype_of_ids(dtype: Any) -> Any:
    # There is no integer type for both uint64 and int32.
    wide = jnp.int64 if dtype == jnp.uint64 else promote_types(dtype, jnp.int32)
    return jax.dtypes.canonicalize_dtype(wide)


Tables = Mapping[str, RowSharding] | RowSharding


def by_pattern(tables: Tables, tree: Any) -> Mapping[str, RowSharding]:
    """Shardings by patterns, or one for one array; raises ``TypeError`` for other types."""
    if isinstance(tables, RowSharding) and jax.tree_util.all_leaves([tree]):
        return {"": tables}
    if not isinstance(tables, Mapping):
        raise TypeError(
            "tables must be a dict from patterns to shardings, as in optzoo.sharded_minimize, such "
            f"as {{'.*/embedding': sharding}}, or one sharding for one array, got {tables!r}"
        )
    return tables


def shardings_by_leaf(tables: Mapping[str, RowSharding], params: Any) -> list[RowSharding | None]:
    """The sharding of each parameter, None for replicated parameters.

    Args:
        tables: a dict from patterns of names (:func:`optzoo.param_groups`) to shardings.
        params: arrays, or their shapes.

    Raises:
        ValueError: if a pattern matches no parameter, if two patterns match the same one, or if a
            parameter does not have the rows of its sharding.
    """
    by_name = value_by_name("tables", tables, params)
    found = []
    for path, x in leaves_with_path(params, is_leaf=is_lines):
        found.append(sharding := by_name.get(path_name(path)))
        if sharding is not None and jnp.shape(x)[:1] != (sharding.stored_rows,):
            raise ValueError(
                f"parameter '{path_name(path)}' must have the {sharding.stored_rows} stored rows "
                f"of its sharding, got shape {jnp.shape(x)}: create it by "
                "optzoo.sharded.create_table, or add rows to a whole table by "
                "optzoo.growing.resize_table before optzoo.sharded.from_order_of_ids"
            )
    return found
