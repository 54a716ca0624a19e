"""Whether a state is that of a transformation and of these parameters.

It is checked when an update is traced. Types and shapes are enough, so that a state may be
restored in any dtype.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ..core.lines import are_lines, doubled
from ..core.paths import path_name
from ..core.rows import is_rows, is_sparse_or_none
from .packing import is_packed
from .types import LeafwiseState

_FIX = (
    "Pass the state of this transformation: state = tx.init(params), or a checkpoint of one that "
    "was made by the same transformation for the same parameters"
)
SWAPPED = (
    "the state and the parameters are swapped: it is update(updates, state, params), and "
    "step(params, state, ...) for the step of optzoo.minimize"
)


class StateError(ValueError):
    """A state that is not that of a transformation, or of other parameters."""


def misfit(expected: Any, got: Any) -> StateError:
    """The error about a state, given what was expected and what came, in words."""
    return StateError(
        f"the state does not fit this transformation: expected {expected}, got {got}. {_FIX}"
    )


# Slots


class SlotShapes:
    """The slots of :func:`optzoo.rules.frame.frame`, for the check of a state at each update.

    Args:
        slots: the named tuple of initializers.
        shared: makes the arrays that belong to no parameter.
    """

    def __init__(self, slots: Any, shared: Callable[[], dict[str, Array]]):
        self.slots, self.shared = slots, shared
        self.of_shared: dict[str, Any] | None = None
        self.known = dict[Any, list[Any]]()  # of each slot, by the shape and dtype of a parameter

    def check_types(self, state: Any, params: Any) -> None:
        """Raises ``StateError`` unless a state has slots of this type, and these shared arrays."""
        wanted = slots_words(self.slots)
        if not isinstance(state, LeafwiseState):
            if isinstance(params, LeafwiseState):
                raise StateError(SWAPPED)
            raise misfit(f"LeafwiseState with {wanted}", _words(state))
        if slots_words(state.slots) != wanted:
            raise misfit(f"LeafwiseState with {wanted}", _words(state))
        shapes = lambda arrays: {name: jnp.shape(a) for name, a in arrays.items()}
        if self.of_shared is None:
            self.of_shared = shapes(jax.eval_shape(self.shared))
        if self.of_shared != shapes(state.shared):
            expected = f"LeafwiseState with {wanted} and shared arrays of shapes {self.of_shared}"
            raise misfit(expected, str(shapes(state.shared)))

    def of_each(
        self, state: Any, updates: Any, gs: list[Any], xs: list[Any], treedef: Any
    ) -> list[Any]:
        """The slots of each parameter.

        Args:
            state: the LeafwiseState.
            updates: the tree of gradients.
            gs: its leaves.
            xs: the parameters, or None for each.
            treedef: the structure of the gradients.

        Raises:
            StateError: if they are those of other parameters.
        """
        make = type(self.slots)._make
        try:
            columns = [treedef.flatten_up_to(tree) for tree in state.slots]
        except ValueError as error:
            names = [path_name(path) for path, _ in _paths(updates)]
            others = [path_name(path) for path, _ in _paths(state.slots[0])]
            raise misfit(f"slots of the parameters {_few(names)}", _few(others)) from error
        rows = list(map(make, zip(*columns, strict=True))) if columns else [self.slots] * len(gs)
        for i, (row, g, x) in enumerate(zip(rows, gs, xs, strict=True)):
            like = g if x is None or is_rows(g) else x
            if like is not None and columns:
                self._check(row, like, updates, i)
        return rows

    def _check(self, row: Any, like: Any, updates: Any, i: int) -> None:
        """Raises unless the slots of a parameter have its shapes."""
        shape, dtype = jnp.shape(like), like.dtype if is_rows(like) else jnp.result_type(like)
        if (shape, dtype) not in self.known:
            x = jax.ShapeDtypeStruct(shape, dtype)
            self.known[shape, dtype] = [_arrays(_abstract(init, x)) for init in self.slots]
        packed = is_packed(row)
        for name, expected, slot in zip(row._fields, self.known[shape, dtype], row, strict=True):
            got = _arrays(slot, shape if is_rows(like) else None)
            if expected is None or expected == got or (packed and _is_half(expected, got)):
                continue
            path, _ = _paths(updates)[i]
            of = f"the slot '{name}' of parameter '{path_name(path)}', which has shape {shape}"
            raise misfit(f"{_written(expected)} as {of}", _written(got))


def _arrays(slot: Any, of: tuple[int, ...] | None = None) -> list[Any] | None:
    """The kinds of the arrays of a slot; None if it is unknown.

    Args:
        slot: a tree of arrays.
        of: the shape of a table that has sparse gradients; its slots may be in lines.
    """
    if slot is None:
        return None
    in_lines = lambda a: of is not None and are_lines(a, of)
    return [(of, _kind(a)[1]) if in_lines(a) else _kind(a) for a in jax.tree.leaves(slot)]


def _is_half(expected: list[Any], got: list[Any] | None) -> bool:
    """Whether packed slots fit: an array of two has other words or is twice as wide.

    The second slot is empty.
    """
    shapes = lambda kinds: [shape for shape, _ in kinds]
    twice = [(doubled(shape), numbers) for shape, numbers in expected]
    return not got or shapes(got) == shapes(expected) or got == twice


def _written(kinds: list[Any] | None) -> str:
    return " and ".join(f"{numbers} of shape {shape}" for shape, numbers in kinds or []) or "none"


def _paths(tree: Any) -> list[Any]:
    return jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_sparse_or_none)


# States compared


def find_misfit(tx: Any, updates: Any, state: Any, params: Any) -> StateError | None:
    """What is wrong with the state given to an update; None if nothing is, or nothing is known."""
    like = params
    if params is None:
        gs, treedef = jax.tree.flatten(updates, is_leaf=is_sparse_or_none)
        if any(g is None for g in gs):  # of its parameter no shape is known
            return None
        like = treedef.unflatten(
            [jax.ShapeDtypeStruct(g.shape, g.dtype) if is_rows(g) else g for g in gs]
        )
    expected = _abstract(tx.init, like)
    found = None if expected is None else compare(expected, state)
    if (found or expected is None) and params is not None:
        of_state = _abstract(tx.init, state)
        if of_state is not None and compare(of_state, params) is None:
            return StateError(SWAPPED)
    return found


def compare(expected: Any, state: Any) -> StateError | None:
    """The difference of two states in types, structure and shapes as an error; None if equal.

    Of a :class:`LeafwiseState` only its slots' type is compared: its own update does the rest.
    """
    (paths, structure), (others, other) = (_flatten(tree) for tree in (expected, state))
    if structure != other:
        words = _words(expected), _words(state)
        if words[0] != words[1]:
            return misfit(*words)
        names = [{path_name(path) for path, _ in leaves} for leaves in (paths, others)]
        missing, more = sorted(names[0] - names[1]), sorted(names[1] - names[0])
        if missing or more:
            expected = f"arrays at {_few(missing)}" if missing else f"no arrays at {_few(more)}"
            return misfit(expected, "a state of other parameters")
        return misfit(str(structure), str(other))
    for (path, a), (_, b) in zip(paths, others, strict=True):
        if _kind(a) != _kind(b):
            return misfit(f"{_words(a)} at '{path_name(path)}'", _words(b))
    return None


def slots_words(slots: Any) -> str:
    """The type and the names of slots, ``AdamSlots(m, v)``."""
    return f"{type(slots).__name__}({', '.join(getattr(slots, '_fields', ()))})"


def _abstract(init: Callable[[Any], Any], params: Any) -> Any:
    """The shapes of what ``init`` makes; None if it cannot be traced on these parameters."""
    try:
        return jax.eval_shape(init, params)
    except Exception:
        return None


def _is_leafwise(node: Any) -> bool:
    return isinstance(node, LeafwiseState)


def _flatten(state: Any) -> Any:
    return jax.tree_util.tree_flatten_with_path(state, is_leaf=_is_leafwise)


def _kind(a: Any) -> Any:
    """What two arrays of states that fit have in common; of slots their type."""
    if _is_leafwise(a):
        return slots_words(a.slots)
    dtype = getattr(a, "dtype", None) or jnp.result_type(a)
    return jnp.shape(a), _kind_of_dtype(dtype)


@functools.cache
def _kind_of_dtype(dtype: Any) -> str:
    if jnp.issubdtype(dtype, jnp.floating):
        return "real numbers" if jnp.finfo(dtype).bits >= 16 else str(dtype)
    if jnp.issubdtype(dtype, jnp.integer):
        return "integers"
    return "complex numbers" if jnp.issubdtype(dtype, jnp.complexfloating) else str(dtype)


def kinds_of(state: Any) -> Any:
    """What must not change from one state to the next: structure, shapes and kinds of dtypes."""
    leaves, structure = jax.tree.flatten(state)
    return structure, [_kind(a) if hasattr(a, "dtype") else None for a in leaves]


def _words(state: Any) -> str:
    """A state in a few words: its types, without the arrays of parameters."""
    if _is_leafwise(state):
        return f"LeafwiseState with {slots_words(state.slots)}"
    if hasattr(state, "_fields"):
        parts = [_words(part) for part in state if _has_states(part)]
        return f"{type(state).__name__}" + (f"({', '.join(parts)})" if parts else "")
    if isinstance(state, tuple | list) and len(state) < 10:
        return f"({', '.join(map(_words, state))}{',' * (len(state) == 1)})"
    if isinstance(state, dict):
        if any(map(_has_states, state.values())):
            return "{" + ", ".join(f"{k!r}: {_words(v)}" for k, v in state.items()) + "}"
        return f"a dict with the keys {_few(list(state))}"
    if hasattr(state, "dtype"):
        return f"an array of {_kind_of_dtype(state.dtype)} of shape {jnp.shape(state)}"
    return f"{type(state).__name__}" if jax.tree.leaves(state) else repr(state)


def _has_states(part: Any) -> bool:
    is_state = lambda node: hasattr(node, "_fields")
    return any(map(is_state, jax.tree.leaves(part, is_leaf=is_state)))


def _few(names: list[Any]) -> str:
    return repr(names[:5])[:-1] + (", ...]" if len(names) > 5 else "]")
