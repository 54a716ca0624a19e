"""Checks of the arguments of a store."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from ..core.checks import check_function
from ..core.lines import is_lines
from ..core.meshes import check_axes
from ..growing.vocabulary import Vocabulary
from ..sharded.create_table import check_mesh
from ..sharded.row_sharding import RowSharding

NAME = "table"  # of a table that is given alone


def rows_by_name(rows: Any, in_memory: bool) -> dict[str, Any]:
    """The tables by their names: arrays that the store may use, or shapes."""
    rows = rows if isinstance(rows, Mapping) else {NAME: rows}
    if not rows:
        raise ValueError("rows must have a table, got an empty dict")
    return {name: _table(name, x, in_memory) for name, x in rows.items()}


def _table(name: str, x: Any, in_memory: bool) -> Any:
    if is_lines(x):
        raise TypeError(
            f"rows: table '{name}' is in lines, which a cache does not support: give the array, "
            "optzoo.rows.from_lines(table)"
        )
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise TypeError(f"rows: table '{name}' must be an array or a shape, got {x!r}")
    if not x.shape or not x.shape[0] or not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(
            f"rows: table '{name}' must have rows of real numbers, got shape {x.shape} and dtype "
            f"{x.dtype}"
        )
    if isinstance(x, jax.ShapeDtypeStruct):
        return x
    if isinstance(x, jax.Array):
        return np.array(x) if in_memory else np.asarray(x)
    if in_memory and not x.flags.writeable:
        raise ValueError(
            f"rows: table '{name}' is a read-only array, but the store changes it in place: give "
            "a copy, or a folder"
        )
    return np.asarray(x)


def per_table(argument: str, value: Any, names: list[str]) -> dict[str, Any]:
    """The values for each table, by name; one value that is not a dict applies to all tables."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        return dict.fromkeys(names, value)
    if unknown := sorted(set(value) - set(names)):
        raise ValueError(
            f"{argument} has the names {unknown}, but rows has the tables {sorted(names)}"
        )
    return dict(value)


def exactly(name: str) -> str:
    """A pattern that matches this name only."""
    return f"{re.escape(name)}(/){{0}}"  # with a / it is compared with whole names


def check_table(
    name: str, like: Any, places: int, sharding: Any, mesh: Any, init: Any, vocabulary: Any
) -> None:
    """Raises an error unless the arguments of a table match."""
    if init is not None:
        check_function("a function of ids or a dict of such functions", init=init)
    if vocabulary is not None:
        if not isinstance(vocabulary, Vocabulary):
            raise TypeError(
                f"vocabulary must be an optzoo.growing.Vocabulary, or a dict of them, got "
                f"{vocabulary!r}"
            )
        if vocabulary.capacity != like.shape[0]:
            raise ValueError(
                f"vocabulary has {vocabulary.capacity} rows, but table '{name}' has "
                f"{like.shape[0]}: they must be equal"
            )
    if sharding is None:
        return
    if not isinstance(sharding, RowSharding):
        raise TypeError(f"sharding must be an optzoo.sharded.RowSharding, got {sharding!r}")
    if mesh is None:
        raise ValueError("sharding needs a mesh: give mesh=, too")
    check_mesh(mesh, sharding)
    if sharding.num_rows != places:
        raise ValueError(
            f"sharding of the cache of '{name}' has num_rows={sharding.num_rows}, but cache_rows "
            f"is {places}: they must be equal"
        )


def of_one_process(mesh: Any) -> Mesh | None:
    """The mesh; raises ``ValueError`` if it has devices of several processes."""
    if mesh is None:
        return None
    check_axes(mesh, (), "")
    if len({device.process_index for device in mesh.devices.flat}) > 1:
        raise ValueError(
            "mesh has devices of several processes, but HostTable supports one process only. "
            "Shard the table over the processes instead (optzoo.sharded)"
        )
    return mesh
