"""Rules on stored slots: the only callers of ``load`` and ``save``."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ..core.lines import are_lines
from ..core.numerics import saturating_cast_like, upcast
from ..core.rows import is_rows
from ..state.storage import load, read_back, save
from .policies import Rule


def in_float32(rule: Rule) -> Rule:
    """A rule for one array, in at least float32 and on stored slots.

    The update takes the dtype of the gradient, and each slot keeps its own. If the rule gives its
    update as a function of the new slots, the function gets them as they are stored.
    """

    def on_stored(g, x, s, t, **scheduled):
        wide, x, loaded = jax.tree.map(upcast, (g, x, load(s)))
        hyper = {k: jnp.asarray(h).astype(wide.dtype) for k, h in scheduled.items()}
        u, new = rule(wide, x, loaded, t, **hyper)
        saved = save(s, new)
        if callable(u):
            u = u(read_back(saved, new))
        return saturating_cast_like(g, u), saved

    return on_stored


def on_loaded_slots(rule: Callable[..., Any]) -> Callable[..., Any]:
    """A rule for all parameters, as :func:`optzoo.rules.treewise` takes it, on stored slots."""

    def on_stored(leaves, shared, t, **scheduled):
        _check_matrices(leaves)
        loaded = [leaf._replace(slots=load(leaf.slots)) for leaf in leaves]
        done, shared = rule(loaded, shared, t, **scheduled)
        pairs = zip(leaves, done, strict=True)
        return [(u, save(leaf.slots, new)) for leaf, (u, new) in pairs], shared

    return on_stored


def _check_matrices(leaves: Any) -> None:
    """Raises ``ValueError`` for a table in lines, which is not the matrix that it stands for."""
    for leaf in leaves:
        if is_rows(leaf.g) and leaf.x is not None and are_lines(leaf.x, leaf.g.shape):
            raise ValueError(
                f"a table of shape {leaf.g.shape} is in lines, but this optimizer sees whole "
                "parameters: give an array (optzoo.rows.from_lines), or take optzoo.lazy_adam"
            )
