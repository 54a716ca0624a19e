"""Whether a state, the parameters and a transformation belong together.

All of it is checked when an update is traced. Types and shapes are enough, so that a state may be
restored in any dtype.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from ..core.checks import check_transformation, check_update_arguments
from ..core.compat import used_inputs
from ..core.paths import path_name
from ..core.reads import unread
from ..core.rows import is_rows, is_sparse_or_none
from .packing import is_packed
from .types import LeafwiseState

_FIX = (
    "Pass the state of this transformation: state = tx.init(params), or a checkpoint of one that "
    "was made by the same transformation for the same parameters"
)


_SWAPPED = (
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


def fitting(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """The same transformation, whose update raises a clear error if the state does not fit.

    If the update fails, or returns a state of another structure or of other shapes, the state is
    compared with that of ``init``; so nothing is traced where all is right.

    Raises:
        StateError: in ``update``, if the state does not fit the transformation and the parameters.
    """
    tx = optax.with_extra_args_support(tx)

    def update(updates, state, params=None, **extra_args):
        with explained(tx, updates, state, params):
            new_updates, new = tx.update(updates, state, params, **extra_args)
        changed = _kinds(new) != _kinds(state)
        if changed and (found := find_misfit(tx, updates, state, params)) is not None:
            raise found
        _check_shapes(updates, new_updates)
        return new_updates, new

    return optax.GradientTransformationExtraArgs(tx.init, update)


def _check_shapes(updates: Any, new: Any) -> None:
    """Raises ``ValueError`` if an update has another shape than its gradient: it was broadcast."""
    gs, us = (jax.tree.leaves(tree, is_leaf=is_sparse_or_none) for tree in (updates, new))
    if len(gs) != len(us):
        return
    for i, (g, u) in enumerate(zip(gs, us, strict=True)):
        if g is not None and u is not None and jnp.shape(g) != jnp.shape(u):
            path, _ = _paths(updates)[i]
            raise ValueError(
                f"parameter '{path_name(path)}' has a gradient of shape {jnp.shape(g)}, which its "
                f"update, of shape {jnp.shape(u)}, does not have: it must be the parameter's"
            )


@contextlib.contextmanager
def explained(tx: Any, updates: Any, state: Any, params: Any) -> Iterator[None]:
    """If what is done here fails and the state does not fit, that is the error."""
    try:
        yield
    except Exception as error:
        found = find_misfit(tx, updates, state, params)
        # The error of a transformation inside says more, but not that of arguments in wrong order.
        if found is None or (isinstance(error, StateError) and str(found) != _SWAPPED):
            raise
        raise found from error


def inner_transformation(**arguments: Any) -> optax.GradientTransformationExtraArgs:
    """The transformation that a wrapper was given as an argument, with its mistakes as errors.

    Raises:
        TypeError: if it is no transformation; in ``update``, as
            :func:`optzoo.core.checks.check_update_arguments`, or if nothing in it reads the
            ``learning_rate`` that is given, and it changes parameters.
        StateError: in ``update``, as :func:`fitting`.
    """
    check_transformation(**arguments)
    [(name, tx)] = arguments.items()
    tx = fitting(tx)
    proved = set[Any]()  # so that each structure is traced once

    def update(updates, state, params=None, **extra_args):
        check_update_arguments(extra_args)
        rate = extra_args.get("learning_rate")
        if rate is not None and (key := jax.tree.structure((updates, params))) not in proved:
            call = lambda gs, rate: tx.update(
                gs, state, params, **{**extra_args, "learning_rate": rate}
            )
            _check_rate_is_read(name, call, updates, rate)
            proved.add(key)
        return tx.update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(tx.init, update)


def _check_rate_is_read(name: str, update: Any, updates: Any, rate: Any) -> None:
    """Raises ``TypeError`` if the updates of the parameters do not depend on the rate."""
    names, _ = unread(lambda learning_rate: update(updates, learning_rate), {"learning_rate": rate})
    if not names:
        return
    jaxpr = jax.make_jaxpr(lambda gs: update(gs, rate)[0])(updates)
    if any(used_inputs(jaxpr.jaxpr)):  # otherwise the parameters are frozen
        raise TypeError(
            f"update got a learning_rate, but nothing in {name} reads it: take an optimizer of "
            f"optzoo, or make {name} optax.chain(direction, optzoo.scale_by_learning_rate(rate)), "
            "such as with optax.scale_by_adam() as the direction"
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
        self.known = dict[Any, list[Any]]()  # what each slot is, by shape and dtype of a parameter

    def check_types(self, state: Any, params: Any) -> None:
        """Raises ``StateError`` unless a state has slots of this type, and these shared arrays."""
        wanted = slots_words(self.slots)
        if not isinstance(state, LeafwiseState):
            if isinstance(params, LeafwiseState):
                raise StateError(_SWAPPED)
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
            like = g if x is None else x
            if like is not None and columns:
                self._check(row, like, updates, i)
        return rows

    def _check(self, row: Any, like: Any, updates: Any, i: int) -> None:
        """Raises unless the slots of a parameter have its shapes."""
        shape, dtype = jnp.shape(like), like.dtype if is_rows(like) else jnp.result_type(like)
        if (shape, dtype) not in self.known:
            x = jax.ShapeDtypeStruct(shape, dtype)
            self.known[shape, dtype] = [_abstract(initializer, x) for initializer in self.slots]
        packed = is_packed(row)
        for name, wanted, slot in zip(row._fields, self.known[shape, dtype], row, strict=True):
            expected, got = (_arrays(tree, packed) for tree in (wanted, slot))
            if wanted is None or expected == got or (packed and got == _NO_ARRAY):
                continue
            path, _ = _paths(updates)[i]
            of = f"the slot '{name}' of parameter '{path_name(path)}', which has shape {shape}"
            raise misfit(f"{expected} as {of}", got)


_NO_ARRAY = "no array"


def _arrays(slot: Any, packed: bool) -> str:
    """The arrays of a slot of one parameter in words, which are equal if they fit."""
    # Packed slots have other dtypes, and there is one array for two of them.
    of = lambda a: "" if packed or jnp.issubdtype(a.dtype, jnp.floating) else f" of {a.dtype}"
    arrays = (f"shape {jnp.shape(a)}{of(a)}" for a in jax.tree.leaves(slot))
    return " and ".join(arrays) or _NO_ARRAY


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
            return StateError(_SWAPPED)
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
    return jnp.shape(a), jnp.issubdtype(dtype, jnp.inexact)


def _kinds(state: Any) -> Any:
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
        kind = "numbers" if jnp.issubdtype(state.dtype, jnp.inexact) else str(state.dtype)
        return f"an array of {kind} of shape {jnp.shape(state)}"
    return f"{type(state).__name__}" if jax.tree.leaves(state) else repr(state)


def _has_states(part: Any) -> bool:
    is_state = lambda node: hasattr(node, "_fields")
    return any(map(is_state, jax.tree.leaves(part, is_leaf=is_state)))


def _few(names: list[Any]) -> str:
    return repr(names[:5])[:-1] + (", ...]" if len(names) > 5 else "]")
