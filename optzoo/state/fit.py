"""Checks that a state matches a transformation and parameters.

The check runs when an update is traced. It compares types and shapes, so a state may be restored in
any dtype.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from ..core.boxes import Boxes, unboxed
from ..core.gradients import check_gradients
from ..core.lines import are_lines, doubled, is_lines, shape_of_lines
from ..core.paths import leaves_with_path, path_name
from ..core.rows import is_rows, is_sparse_or_none, update_tree
from .slots import has_states
from .storage.codes import is_coded, shape_of
from .storage.packing import is_mark, is_packed
from .types import LeafwiseState


class StateError(ValueError):
    """A state that does not match the transformation or the parameters."""


def misfit(expected: Any, got: Any) -> StateError:
    """The error for a state, from descriptions of the expected and the given state."""
    return StateError(
        f"the state does not match this transformation: expected {expected}, got {got}. Pass "
        "tx.init(params), or a checkpoint of the same transformation and parameters"
    )


SWAPPED = (
    "the state and the parameters are swapped: call update(updates, state, params), or "
    "step(params, state, ...) for a step of optzoo.minimize"
)


def refuse_swapped(params: Any) -> None:
    """Raises ``StateError`` if there are states among the parameters."""
    # In an update of optax.lookahead the parameters are a named tuple of optax.
    if not isinstance(params, optax.LookaheadParams) and has_states(params):
        raise StateError(SWAPPED)


# Slots


class SlotShapes:
    """The slots of :func:`optzoo.rules.frame.frame`, to check a state at each update.

    Args:
        slots: the named tuple of initializers.
        shared: a function that returns the arrays shared by all parameters.
    """

    def __init__(self, slots: Any, shared: Callable[[], dict[str, Array]]):
        self.slots = slots
        self.make_shared = shared
        self.known = dict[Any, list[Any]]()  # of each slot, by the shape and dtype of a parameter

    @functools.cached_property
    def shared(self) -> Any:
        """The shapes of the arrays shared by all parameters."""
        return jax.eval_shape(self.make_shared)

    def check_types(self, state: Any, params: Any) -> None:
        """Raises ``StateError`` unless a state has slots of this type, and the shared arrays."""
        words = slots_words(self.slots)
        wanted = f"LeafwiseState with {words}"
        if not isinstance(state, LeafwiseState) or slots_words(state.slots) != words:
            refuse_swapped(params)
            raise misfit(wanted, _words(state))
        if found := difference(self.shared, state.shared):
            raise misfit(f"{wanted} and, as shared arrays, {found[0]}", found[1])

    def of_each(
        self, state: Any, updates: Any, gs: list[Any], xs: list[Any], boxes: Boxes
    ) -> list[Any]:
        """The slots of each parameter.

        Args:
            state: the LeafwiseState.
            updates: the tree of gradients.
            gs: the leaves of ``updates``.
            xs: the parameters, or None for each.
            boxes: the boxes of the gradients.

        Raises:
            StateError: if the slots are those of other parameters.
        """
        make = type(self.slots)._make
        try:
            columns = list(map(boxes.slots, state.slots))
        except ValueError as error:
            names, others = (
                [path_name(path) for path, _ in leaves_with_path(tree, is_sparse_or_none)]
                for tree in (updates, state.slots[0])
            )
            raise misfit(f"slots of the parameters {_few(names)}", _few(others)) from error
        rows = list(map(make, zip(*columns, strict=True))) if columns else [self.slots] * len(gs)
        for i, (row, g, x) in enumerate(zip(rows, gs, xs, strict=True)):
            like = g if x is None or is_rows(g) else x
            if like is not None and columns:
                self._check(row, like, updates, i)
        return rows

    def _check(self, row: Any, like: Any, updates: Any, i: int) -> None:
        """Raises ``StateError`` unless the slots of a parameter have the expected shapes."""
        shape, dtype = jnp.shape(like), like.dtype if is_rows(like) else jnp.result_type(like)
        if (shape, dtype) not in self.known:
            x = jax.ShapeDtypeStruct(shape, dtype)
            self.known[shape, dtype] = [_kinds(jax.eval_shape(init, x)) for init in self.slots]
        for name, expected, slot in zip(row._fields, self.known[shape, dtype], row, strict=True):
            got = _kinds(slot, shape if is_rows(like) and like.lines else None)
            if expected == got or (is_packed(row) and _is_half(slot, expected, got)):
                continue
            path, _ = leaves_with_path(updates, is_sparse_or_none)[i]
            of = f"the slot '{name}' of parameter '{path_name(path)}', which has shape {shape}"
            raise misfit(f"{_written(expected)} as {of}", _written(got))


def _kinds(slot: Any, of: tuple[int, ...] | None = None) -> list[Any]:
    """The kinds of the arrays of a slot.

    Args:
        slot: a tree of arrays.
        of: the shape of a table in lines, whose slots may be in lines, too.
    """
    arrays = jax.tree.leaves(slot, is_leaf=is_coded)
    kinds = list(map(kind_of, arrays))
    if of is None:
        return kinds
    pairs = zip(arrays, kinds, strict=True)
    return [(of if _is_in_lines(a, shape, of) else shape, numbers) for a, (shape, numbers) in pairs]


def _is_in_lines(a: Any, shape: tuple[int, ...], of: tuple[int, ...]) -> bool:
    """Whether an array of a slot has the lines of a table, or of its shard on this device."""
    if is_coded(a) and is_lines(lines := a.codes):
        wanted = shape_of_lines((of[0], *lines.shape[1:]))
        return shape[1:] == of[1:] and lines.value.shape == wanted
    return are_lines(jax.ShapeDtypeStruct(shape, jnp.float32), of)


def _is_half(slot: Any, expected: list[Any], got: list[Any]) -> bool:
    """Whether a packed slot matches: an array of two has other words or is twice as wide.

    The second slot has marks in place of the arrays that are packed.
    """
    marks = list(map(is_mark, jax.tree.leaves(slot, is_leaf=is_mark)))
    if len(marks) != len(expected):
        return False
    arrays = [kind for kind, mark in zip(expected, marks, strict=True) if not mark]
    fits = lambda kind, of: of[0] == kind[0] or of == (doubled(kind[0]), kind[1])
    return all(map(fits, arrays, got))


def _written(kinds: list[Any]) -> str:
    return " and ".join(f"{numbers} of shape {shape}" for shape, numbers in kinds) or "none"


# States compared


class KnownStates:
    """Shapes of parameters and of the states that ``init`` returned for them, for errors.

    Args:
        init: traced for an error about parameters of which no state is recorded.
    """

    def __init__(self, init: Callable[[Any], Any]):
        self.init = init
        self.of = dict[Any, tuple[Any, Any]]()

    def add(self, params: Any, state: Any) -> None:
        """Records the shapes of parameters and of their state."""
        struct = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype) if _is_array(a) else a
        self.of[_key(params)] = jax.tree.map(struct, (params, state))

    def mistake(self, updates: Any, state: Any, params: Any) -> Exception | None:
        """A description of arguments of ``update`` that do not match; None if nothing is known."""
        try:
            refuse_swapped(params)
            key = _key(updates if params is None else params)
            _, expected = self.of.get(key, (None, state))
            if found := difference(expected, state):
                return misfit(*found)
            for (names, *_), (others, of_others) in self.of.items():
                if difference(of_others, state):
                    continue
                if params is None and names == key[0]:
                    params = others  # of which the state is
                elif key not in self.of and (found := difference(params, others)):
                    return misfit(f"a state of parameters with {found[0]}", found[1])
            check_gradients(updates, params, allow_complex=True)
        except (TypeError, ValueError) as error:
            return error
        if params is None or key in self.of:
            return None
        try:
            expected = jax.eval_shape(self.init, params)
        except Exception:  # it may need what is known elsewhere alone, such as a mesh
            return None
        found = difference(expected, state)
        return misfit(*found) if found else None


def _key(params: Any) -> Any:
    leaves, structure = update_tree.flatten(unboxed(params))
    return structure, *map(kind_of, leaves)


def difference(expected: Any, tree: Any) -> tuple[str, str] | None:
    """Describes how two trees differ in types, structure and shapes; None if they do not.

    For a :class:`LeafwiseState` only the type of its slots is compared; its update checks the rest.
    Boxes are not compared, since Flax NNX passes variables to ``init`` and arrays to ``update``.
    """
    if _are_alike(expected, tree):
        return None
    expected, tree = unboxed(expected), unboxed(tree)
    is_leaf = lambda node: isinstance(node, LeafwiseState) or is_rows(node)
    if _are_alike(expected, tree, is_leaf):
        return None
    if _words(expected) != _words(tree):
        return _words(expected), _words(tree)
    wanted, got = (
        {path_name(path): _words(a) for path, a in leaves_with_path(t, is_leaf)}
        for t in (expected, tree)
    )
    for name in sorted(wanted.keys() | got.keys()):
        words = wanted.get(name, "nothing"), got.get(name, "nothing")
        if words[0] != words[1]:
            return f"{words[0]} at '{name}'", words[1]
    structure, other = (str(jax.tree.structure(t, is_leaf)) for t in (expected, tree))
    return structure, other


def _are_alike(a: Any, b: Any, is_leaf: Callable[[Any], bool] | None = None) -> bool:
    """Whether two trees have the same structure and leaves of the same kinds."""
    (ours, structure), (theirs, other) = jax.tree.flatten(a, is_leaf), jax.tree.flatten(b, is_leaf)
    return structure == other and list(map(kind_of, ours)) == list(map(kind_of, theirs))


def change(state: Any, new: Any) -> StateError | None:
    """An error if an update has changed the shape of an array of a state, otherwise None."""
    if _are_alike(state, new) or jax.tree.structure(state) != jax.tree.structure(new):
        return None
    return misfit(*(difference(new, state) or ("slots of these parameters", "others")))


def slots_words(slots: Any) -> str:
    """The type and the names of slots, ``AdamSlots(m, v)``."""
    return f"{type(slots).__name__}({', '.join(getattr(slots, '_fields', ()))})"


def _is_array(a: Any) -> bool:
    return hasattr(a, "dtype") and hasattr(a, "shape")


def kind_of(a: Any) -> Any:
    """The properties that matching arrays of states share; for slots, their type."""
    if isinstance(a, jax.Array):
        return a.shape, _kind_of_dtype(a.dtype)
    if isinstance(a, LeafwiseState):
        return slots_words(a.slots)
    if is_coded(a):
        return shape_of(a), "real numbers"
    if is_rows(a) or _is_array(a):
        return a.shape, _kind_of_dtype(a.dtype)
    is_number = isinstance(a, int | float | complex)
    return (), _kind_of_dtype(jnp.result_type(a)) if is_number else type(a).__name__


@functools.cache
def _kind_of_dtype(dtype: Any) -> str:
    if jnp.issubdtype(dtype, jnp.floating):
        return "real numbers" if jnp.finfo(dtype).bits >= 16 else str(dtype)
    if jnp.issubdtype(dtype, jnp.integer):
        return "integers"
    return "complex numbers" if jnp.issubdtype(dtype, jnp.complexfloating) else str(dtype)


def _words(state: Any) -> str:
    """A short description of a state: its types, without the arrays of parameters."""
    if isinstance(state, LeafwiseState):
        return f"LeafwiseState with {slots_words(state.slots)}"
    if hasattr(state, "_fields"):
        parts = [_words(part) for part in state if has_states(part)]
        return f"{type(state).__name__}" + (f"({', '.join(parts)})" if parts else "")
    if isinstance(state, tuple | list) and len(state) < 10:
        return f"({', '.join(map(_words, state))}{',' * (len(state) == 1)})"
    if isinstance(state, dict):
        if has_states(state):
            return "{" + ", ".join(f"{k!r}: {_words(v)}" for k, v in state.items()) + "}"
        return f"a dict with the keys {_few(list(state))}"
    if _is_array(state):
        return f"an array of {_kind_of_dtype(state.dtype)} of shape {state.shape}"
    return f"{type(state).__name__}" if jax.tree.leaves(state) else repr(state)


def _few(names: list[Any]) -> str:
    return repr(names[:5])[:-1] + (", ...]" if len(names) > 5 else "]")
