"""The ids of a batch as one array, and their places in the structure of the ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np


def joined(ids: Any, name: str) -> tuple[np.ndarray, Callable[[np.ndarray], Any]]:
    """The concatenated ids of a table, and a function that restores their structure for places.

    Args:
        ids: an array, or a tuple or dict of arrays; a list is converted to an array.
        name: the name of the table, for errors.
    """
    leaves, treedef = jax.tree.flatten(ids, is_leaf=lambda x: isinstance(x, list))
    for leaf in leaves:
        if not hasattr(leaf, "shape") and not isinstance(leaf, list):
            raise TypeError(
                f"ids of '{name}' must be arrays, or a tuple or dict of arrays, got {leaf!r}"
            )
    arrays = [np.asarray(leaf) for leaf in leaves]
    ends = np.cumsum([a.size for a in arrays])[:-1]

    def form(places):
        parts = np.split(places, ends) if len(arrays) > 1 else [places][: len(arrays)]
        shaped = [part.reshape(a.shape) for part, a in zip(parts, arrays, strict=True)]
        return treedef.unflatten(shaped)

    flat = [a.reshape(-1) for a in arrays]
    if len(flat) == 1:
        return flat[0], form
    return np.concatenate(flat) if flat else np.zeros(0, np.int32), form


def check_ids(ids: np.ndarray, rows: int, name: str) -> np.ndarray:
    """The ids; raises an error unless they are integers in ``[0, rows]``; ``rows`` is padding."""
    if ids.size == 0:
        return np.zeros(0, np.int32)
    if not np.issubdtype(ids.dtype, np.integer):
        raise TypeError(f"ids of '{name}' must be integers, got dtype {ids.dtype}")
    low, high = ids.min(), ids.max()
    if low < 0 or high > rows:
        raise ValueError(
            f"ids of '{name}' must be in [0, {rows}), or {rows} for padding, got "
            f"{low if low < 0 else high}: give a table with more rows, or map ids to rows by "
            "vocabulary="
        )
    return ids


def by_table(ids: Any, names: list[str], single: bool, argument: str) -> Mapping[str, Any]:
    """The values for each table, by name."""
    if single:
        return {names[0]: ids}
    if not isinstance(ids, Mapping) or set(ids) != set(names):
        got = sorted(ids) if isinstance(ids, Mapping) else type(ids).__name__
        raise ValueError(f"{argument} must be a dict with the names {sorted(names)}, got {got}")
    return ids
