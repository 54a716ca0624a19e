"""Rules on stored slots: the only callers of ``load`` and ``save``."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ..core.meshes import automatically, spec_of
from ..core.numerics import cast, saturating_cast_like, upcast
from ..core.rows import is_rows
from ..state.storage.stored import StoredSlots, load, read_back, save
from .policies import Rule


def in_float32(rule: Rule) -> Rule:
    """A rule for one array, in at least float32 and on stored slots.

    The update has the dtype of the gradient, and each slot keeps its own. If the rule returns its
    update as a function of the new slots, the function gets them in stored form.
    """

    def on_stored(g, x, s, t, **scheduled):
        wide, x, loaded = jax.tree.map(upcast, (g, x, load(s)))
        u, new = _checked(rule(wide, x, loaded, t, **in_dtype(scheduled, wide.dtype)), loaded)
        saved = save(s, new)
        if callable(u):
            u = u(read_back(saved, new))
        return saturating_cast_like(g, u), saved

    def on_any_mesh(g, x, s, t, **scheduled):
        if not isinstance(s, StoredSlots):
            return on_stored(g, x, s, t, **scheduled)
        # Codes and pairs have other axes than their parameter. So have the rows of a gradient, of
        # which a linear rule is given the whole table.
        like = g if x is None or x.shape != g.shape else x
        call = lambda g, x, s, t, scheduled: on_stored(g, x, s, t, **scheduled)
        specs = lambda _, g, x, s, *more: (spec_of(like), jax.tree.map(spec_of, s))
        return automatically(call, specs)(g, x, s, t, scheduled)

    return on_any_mesh


def _checked(result: Any, slots: Any) -> tuple[Any, Any]:
    """The result of a rule; raises ``TypeError`` unless it is an update and new slots."""
    is_pair = type(result) in (tuple, list) and len(result) == 2  # and no slots alone
    if is_pair and jax.tree.structure(result[1]) == jax.tree.structure(slots):
        return result
    fields = ", ".join(getattr(slots, "_fields", ()))
    name = lambda x: "an array" if isinstance(x, jax.Array) else type(x).__name__
    got = f"{name(result[1])} for new_slots" if is_pair else name(result)
    raise TypeError(
        "the rule must return (update, new_slots), where new_slots is "
        f"{type(slots).__name__}({fields}), got {got}"
    )


def in_dtype(scheduled: Mapping[str, Any], dtype: Any) -> dict[str, Any]:
    """Hyper-parameters in the dtype in which the rule for an array computes."""
    arrays = {k: h if isinstance(h, jax.Array) else jnp.asarray(h) for k, h in scheduled.items()}
    return {k: cast(h, dtype) for k, h in arrays.items()}


def on_loaded_slots(rule: Callable[..., Any]) -> Callable[..., Any]:
    """A rule for all parameters, as for :func:`optzoo.rules.treewise`, on stored slots."""

    def on_stored(leaves, shared, t, **scheduled):
        _check_matrices(leaves)
        loaded = [leaf._replace(slots=load(leaf.slots)) for leaf in leaves]
        call = lambda leaves, shared, t, scheduled: rule(leaves, shared, t, **scheduled)
        done, shared = automatically(call, _specs)(loaded, shared, t, scheduled)
        pairs = zip(leaves, done, strict=True)
        return [(u, save(leaf.slots, new)) for leaf, (u, new) in pairs], shared

    return on_stored


def _specs(results: Any, leaves: Any, shared: Any, t: Any, scheduled: Any) -> Any:
    """An update is divided like its parameter, slots keep their division, others are replicated."""
    del shared, t, scheduled
    done, new_shared = results
    whole = lambda x: PartitionSpec()

    def of_leaf(leaf, u):
        like = leaf.like_update(u)
        of_update = jax.tree.map(whole, u) if like is None else spec_of(like)
        return of_update, jax.tree.map(spec_of, leaf.slots)

    pairs = zip(leaves, done, strict=True)
    return [of_leaf(leaf, u) for leaf, (u, _) in pairs], jax.tree.map(whole, new_shared)


def _check_matrices(leaves: Any) -> None:
    """Raises ``ValueError`` for a table in lines, whose shape is not that of the table."""
    for leaf in leaves:
        if is_rows(leaf.g) and leaf.x is not None and leaf.g.in_lines(leaf.x):
            raise ValueError(
                f"a table of shape {leaf.g.shape} is in lines, but this optimizer needs whole "
                "parameters: give an array (optzoo.rows.from_lines), or use optzoo.lazy_adam"
            )
