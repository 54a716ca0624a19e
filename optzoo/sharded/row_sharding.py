"""Which device owns which row of a table."""

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
    """How the rows of a table are distributed over a mesh axis, as ``tf.nn.embedding_lookup`` does.

    Device ``i % num_shards`` owns row ``i`` with ``"mod"``; with ``"div"`` each device owns
    consecutive rows. Frequent ids are often small (words sorted by frequency): with ``"mod"`` they
    have different owners.

    The array of a table has ``stored_rows`` rows, the rows of the first device first. It has more
    than ``num_rows`` rows, since all devices must have the same number. ``stored_rows`` depends on
    ``num_shards`` only if this does not divide the root of ``multiple`` (with ``"mod"``) or
    ``multiple`` (with ``"div"``), so a checkpoint of 64 devices can be restored on 1, 2, 4, ...,
    64 by default (:func:`optzoo.sharded.in_order_of_ids`).

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
        axis_name: of the mesh axis, or a tuple of several.
        multiple: ``stored_rows`` is a multiple of it.

    Raises:
        TypeError: if a number is not an integer.
        ValueError: if a number is not positive; if ``partition`` or ``axis_name`` is neither of
            the above; if the table has 2**31 rows or more and x64 is off.
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
                f"num_rows={self.num_rows} needs ids of 64 bits: call "
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
        """The partition spec of the table and of all its slots."""
        return PartitionSpec(self.axis_name)

    @property
    def shard(self) -> Shard:
        """What the rows of a device know of the table."""
        return Shard(self.axes, self.num_rows, False)

    def places_of(self, ids: Any) -> Any:
        """The row of the stored array for each id, where ``owner = place // rows_per_shard``.

        It is ``stored_rows`` for padding and ``stored_rows + 1`` for ids out of range. The ids are
        integers of NumPy or JAX.
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
        """The id of each row of the stored array; ``num_rows`` or more if it only fills a shard."""
        if self.partition == "div":
            return places
        return places % self.rows_per_shard * self.num_shards + places // self.rows_per_shard

    def required_capacity(self, ids: Any) -> int:
        """The most distinct ids that one owner has, of the ids of one device; on the host."""
        places = np.unique(self.places_of(np.asarray(ids).reshape(-1)))
        owners = places[places < self.stored_rows] // self.rows_per_shard
        return int(np.bincount(owners, minlength=1).max())

    def capacity(self, num_ids: int, factor: float | None, *, repeated: bool = False) -> int:
        """The number of rows that one device asks of each owner at once.

        Args:
            num_ids: the ids of one device.
            factor: a multiple of their average number for an owner; None: enough for any ids, as
                always with one shard.
            repeated: whether the same row may be asked more than once, as always of one shard.
        """
        repeated = repeated or self.num_shards == 1
        enough = max(1, num_ids if repeated else min(num_ids, self.rows_per_shard))
        if factor is None or self.num_shards == 1:
            return enough
        average = num_ids / self.num_shards
        needed = max(1, math.ceil(factor * average + SPREAD * math.sqrt(average)))
        return min(enough, _by_eights(needed))


def measured_capacity(s: RowSharding, num_ids: int, most: int) -> int:
    """The number of rows that one device asks of each owner at once, by the ids of a batch.

    It is a little more than that batch needs, at most the capacity of a factor of 1.0, which random
    ids need, and at least that of a factor of 0.25: the batch may be an unusual one.

    Args:
        s: of the table.
        num_ids: the ids of one device.
        most: the most distinct ids that one owner has of them.
    """
    least, greatest = s.capacity(num_ids, 0.25), s.capacity(num_ids, 1.0)
    return min(max(least, _by_eights(math.ceil(most + 2 * math.sqrt(most)))), greatest)


def _by_eights(rows: int) -> int:
    """A TPU stores rows by eights: the rows of all owners then lie one after the other."""
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
    """Shardings by patterns; raises ``TypeError`` unless they are, or are one for one array."""
    if isinstance(tables, RowSharding) and jax.tree_util.all_leaves([tree]):
        return {"": tables}
    if not isinstance(tables, Mapping):
        raise TypeError(
            "tables must be a dict of shardings by patterns, as for optzoo.sharded_minimize, such "
            f"as {{'.*/embedding': sharding}}, got {tables!r}; one sharding is for one array"
        )
    return tables


def shardings_by_leaf(tables: Mapping[str, RowSharding], params: Any) -> list[RowSharding | None]:
    """For each parameter its sharding, None for those that are replicated.

    Args:
        tables: by a pattern of names (:func:`optzoo.param_groups`) its sharding.
        params: arrays, or their shapes.

    Raises:
        ValueError: if a pattern matches no parameter or two match one, or if a parameter does not
            have the rows of its sharding.
    """
    by_name = value_by_name("tables", tables, params)
    found = []
    for path, x in leaves_with_path(params, is_leaf=is_lines):
        found.append(sharding := by_name.get(path_name(path)))
        if sharding is not None and jnp.shape(x)[:1] != (sharding.stored_rows,):
            raise ValueError(
                f"parameter '{path_name(path)}' must have the {sharding.stored_rows} stored rows "
                f"of its sharding, got shape {jnp.shape(x)}: make it by "
                "optzoo.sharded.create_table, or add rows to a whole table by "
                "optzoo.growing.resize_table before optzoo.sharded.from_order_of_ids"
            )
    return found
