"""Whether a state is that of a transformation and of these parameters.

It is checked when an update is traced. Types and shapes are enough, so that a state may be
restored in any dtype.
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
from ..core.rows import is_rows, is_sparse_or_none
from .eight_bits import is_coded, shape_of
from .packing import is_packed
from .slots import has_states
from .types import LeafwiseState


class StateError(ValueError):
    """A state that is not that of a transformation, or of other parameters."""


def misfit(expected: Any, got: Any) -> StateError:
    """The error about a state, given what was expected and what came, in words."""
    return StateError(
        f"the state does not fit this transformation: expected {expected}, got {got}. "
        "Pass tx.init(params), or a checkpoint of the same transformation and parameters"
    )


SWAPPED = (
    "the state and the parameters are swapped: it is update(updates, state, params), and "
    "step(params, state, ...) for the step of optzoo.minimize"
)


def refuse_swapped(params: Any) -> None:
    """Raises ``StateError`` if there are states among the parameters."""
    # In an update of optax.lookahead the parameters are a named tuple of optax.
    if not isinstance(params, optax.LookaheadParams) and has_states(params):
        raise StateError(SWAPPED)


# Slots


class SlotShapes:
    """The slots of :func:`optzoo.rules.frame.frame`, for the check of a state at each update.

    Args:
        slots: the named tuple of initializers.
        shared: makes the arrays that belong to no parameter.
    """

    def __init__(self, slots: Any, shared: Callable[[], dict[str, Array]]):
        self.slots = slots
        self.make_shared = shared
        self.known = dict[Any, list[Any]]()  # of each slot, by the shape and dtype of a parameter

    @functools.cached_property
    def shared(self) -> Any:
        """The shapes of the arrays that belong to no parameter."""
        return jax.eval_shape(self.make_shared)

    def check_types(self, state: Any, params: Any) -> None:
        """Raises ``StateError`` unless a state has slots of this type, and these shared arrays."""
        wanted = f"LeafwiseState with {slots_words(self.slots)}"
        if _words(state) != wanted:
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
            gs: its leaves.
            xs: the parameters, or None for each.
            boxes: those of the gradients.

        Raises:
            StateError: if they are those of other parameters.
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
        """Raises unless the slots of a parameter have its shapes."""
        shape, dtype = jnp.shape(like), like.dtype if is_rows(like) else jnp.result_type(like)
        if (shape, dtype) not in self.known:
            x = jax.ShapeDtypeStruct(shape, dtype)
            self.known[shape, dtype] = [_kinds(jax.eval_shape(init, x)) for init in self.slots]
        packed = is_packed(row)
        for name, expected, slot in zip(row._fields, self.known[shape, dtype], row, strict=True):
            got = _kinds(slot, shape if is_rows(like) and like.lines else None)
            if expected == got or (packed and _is_half(expected, got)):
                continue
            path, _ = leaves_with_path(updates, is_sparse_or_none)[i]
            of = f"the slot '{name}' of parameter '{path_name(path)}', which has shape {shape}"
            raise misfit(f"{_written(expected)} as {of}", _written(got))


def _kinds(slot: Any, of: tuple[int, ...] | None = None) -> list[Any]:
    """The kinds of the arrays of a slot.

    Args:
        slot: a tree of arrays.
        of: the shape of a table in lines; its slots may be in lines, too.
    """

    def kind(a):
        shape, numbers = kind_of(a)
        return (of if of is not None and _is_in_lines(a, shape, of) else shape), numbers

    return list(map(kind, jax.tree.leaves(slot, is_leaf=is_coded)))


def _is_in_lines(a: Any, shape: tuple[int, ...], of: tuple[int, ...]) -> bool:
    """Whether an array of a slot has the lines of a table, or of the shard that is here."""
    if is_coded(a) and is_lines(lines := a.codes):
        wanted = shape_of_lines((of[0], *lines.shape[1:]))
        return shape[1:] == of[1:] and lines.value.shape == wanted
    return are_lines(jax.ShapeDtypeStruct(shape, jnp.float32), of)


def _is_half(expected: list[Any], got: list[Any]) -> bool:
    """Whether packed slots fit: an array of two has other words or is twice as wide.

    The second slot is empty.
    """
    shapes = lambda kinds: [shape for shape, _ in kinds]
    twice = [(doubled(shape), numbers) for shape, numbers in expected]
    return not got or shapes(got) == shapes(expected) or got == twice


def _written(kinds: list[Any]) -> str:
    return " and ".join(f"{numbers} of shape {shape}" for shape, numbers in kinds) or "none"


# States compared


class KnownStates:
    """What an ``init`` has made of which parameters: all that is needed to word an error.

    Args:
        init: it is traced for an error about parameters of which it has made no state.
    """

    def __init__(self, init: Callable[[Any], Any]):
        self.init = init
        self.of = dict[Any, tuple[Any, Any]]()

    def add(self, params: Any, state: Any) -> None:
        """Remembers the shapes of parameters and of their state."""
        struct = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype) if _is_array(a) else a
        self.of[_key(params)] = jax.tree.map(struct, (params, state))

    def mistake(self, updates: Any, state: Any, params: Any) -> Exception | None:
        """What does not belong together in a call of ``update``; None if nothing is known."""
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
    leaves, structure = jax.tree.flatten(unboxed(params), is_leaf=is_sparse_or_none)
    return structure, *map(kind_of, leaves)


def difference(expected: Any, tree: Any) -> tuple[str, str] | None:
    """Where two trees differ in types, structure and shapes, in words; None if they do not.

    Of a :class:`LeafwiseState` only its slots' type is compared: its own update does the rest.
    Boxes are not compared: Flax NNX gives ``init`` variables and ``update`` arrays.
    """
    expected, tree = unboxed(expected), unboxed(tree)
    is_leaf = lambda node: isinstance(node, LeafwiseState) or is_rows(node)
    (ours, structure), (theirs, other) = (jax.tree.flatten(t, is_leaf) for t in (expected, tree))
    if structure == other and list(map(kind_of, ours)) == list(map(kind_of, theirs)):
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
    return str(structure), str(other)


def change(state: Any, new: Any) -> StateError | None:
    """The error of a state of which an update has changed the shape of an array, or None."""
    (old, structure), (leaves, other) = map(jax.tree.flatten, (state, new))
    kinds = zip(map(kind_of, old), map(kind_of, leaves), strict=False)
    if structure != other or all(a == b for a, b in kinds):
        return None
    return misfit(*(difference(new, state) or ("slots of these parameters", "others")))


def slots_words(slots: Any) -> str:
    """The type and the names of slots, ``AdamSlots(m, v)``."""
    return f"{type(slots).__name__}({', '.join(getattr(slots, '_fields', ()))})"


def _is_array(a: Any) -> bool:
    return hasattr(a, "dtype") and hasattr(a, "shape")


def kind_of(a: Any) -> Any:
    """What two arrays of states that fit have in common; of slots their type."""
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
    """A state in a few words: its types, without the arrays of parameters."""
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
