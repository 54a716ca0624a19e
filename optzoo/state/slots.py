"""What an optimizer keeps for each parameter, by name."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ..core.paths import is_masked, path_name
from .stacks import layout_of, stack, unstack
from .storage import pack_like, unpack
from .types import LeafwiseState, ReplicaState

# A path to a slot: indices of chains, fields, keys; the name of the slot last.
SlotPath = tuple[Any, ...]

# Fields of states that hold trees, but not of slots.
_NO_SLOTS = {"hyperparams", "hyperparams_states", "rng_key", "variables"}
# Fields of a ReplicaState that are named tuples of more fields.
_REPLICA_PARTS = {"replicated", "per_replica", "method"}


def slot_names(state: Any) -> tuple[str, ...]:
    """The slots in a state, by the names that :func:`optzoo.get_slot` takes.

    Args:
        state: the state of any optax transformation. In the states of this library slots are
            those of the original, under its names (``m`` and ``v`` of Adam, ``momentum``,
            ``accum`` and ``linear`` of FTRL); elsewhere they are the fields that hold more than a
            number (``mu`` and ``nu`` of ``optax.adam``, ``trace``, ``acc_grads`` of
            ``optax.MultiSteps``).

    Returns:
        The names in the order of the state. Where a name stands for several slots of a
        parameter, as in a chain of two optimizers, each has its path in front: ``0/m``, ``1/m``.
    """
    places = _places(state)
    names = dict.fromkeys(path[-1] for path in places)
    found = []
    for name in names:
        paths = [path for path in places if path[-1] == name]
        found += [name] if _merged(places, paths) is not None else map(_written, paths)
    return tuple(found)


def get_slot(state: Any, name: str) -> Any:
    """A slot of all parameters, as ``tf.train.Optimizer.get_slot`` gives it for one.

    .. code-block:: python

        optzoo.get_slot(state, "m")["encoder"]["kernel"]

    Args:
        state: the state of any optax transformation: chains, masks, partitions, ``MultiSteps``,
            ``inject_hyperparams`` and wrappers are looked into.
        name: one of :func:`optzoo.slot_names`, or the end of its path that tells it from others.

    Returns:
        A tree like the parameters. Of the groups of ``optax.partition`` it has all that have this
        slot; a parameter without it has ``optax.MaskedNode()`` there.

    Raises:
        ValueError: if there is no such slot, or several: the message has their names.
    """
    places = _places(state)
    return _merged(places, _find(state, places, name))


def set_slot(state: Any, name: str, value: Any) -> Any:
    """A state with other values in a slot.

    Args:
        state: as for :func:`optzoo.get_slot`.
        name: as for :func:`optzoo.get_slot`.
        value: a tree as :func:`optzoo.get_slot` gives it. The slot keeps its dtypes.

    Returns:
        The new state; the old one is as it was.

    Raises:
        ValueError: as for :func:`optzoo.get_slot`, or if the value has another structure or the
            slot of a parameter another shape: the message has its path.
    """
    paths = _find(state, _places(state), name)
    return map_slots(
        state, lambda path, tree: _filled(name, tree, value) if path in paths else tree
    )


def map_slots(state: Any, f: Callable[[SlotPath, Any], Any]) -> Any:
    """The state with ``f(path, tree)`` in the place of each slot; ``f`` sees no stacks."""

    def of_slot(path, tree):
        layout = layout_of(tree)
        return stack(f(path, unstack(tree)), layout) if layout else f(path, tree)

    return _mapped(state, (), of_slot)


def are_slots(inner: optax.GradientTransformation, state: Any) -> Any:
    """A tree like a state of ``inner``: whether each array is a slot of a parameter.

    The others (counts, powers, hyper-parameters) belong to the optimizer as a whole.
    """
    mark = lambda slots: jax.tree.map(lambda _: True, slots)
    return map_slot_trees(inner, mark, state, lambda _: False)


def map_slot_trees(
    inner: optax.GradientTransformation,
    f: Callable[[Any], Any],
    state: Any,
    others: Callable[[Any], Any] | None = None,
) -> Any:
    """A state of ``inner`` with ``f`` of each tree of slots, and ``others`` of every other array.

    Unlike :func:`map_slots` it finds them by ``inner``, whatever the state is made of, and shows
    them as they are.
    """
    everything = lambda _: True  # a whole tree at once
    return optax.tree.map_params(
        inner.init, f, state, transform_non_params=others, is_leaf=everything
    )


def _mapped(node: Any, path: SlotPath, f: Callable[[SlotPath, Any], Any]) -> Any:
    if isinstance(node, LeafwiseState):
        names, given = getattr(node.slots, "_fields", ()), unpack(node.slots)
        slots = [f((*path, k), tree) for k, tree in zip(names, given, strict=True)]
        return node._replace(slots=pack_like(node.slots, slots))
    if isinstance(node, ReplicaState):
        return _mapped_parts(node, path, f)
    if _is_state(node):
        return type(node)(**_mapped_fields(node._asdict(), path, f))
    if isinstance(node, dict):
        return {k: _mapped(part, (*path, k), f) for k, part in node.items()}
    if isinstance(node, tuple | list) and not hasattr(node, "_fields"):
        return type(node)(_mapped(part, (*path, i), f) for i, part in enumerate(node))
    return node


def _mapped_fields(fields: dict[str, Any], path: SlotPath, f: Any) -> dict[str, Any]:
    def of_one(name, value):
        if name in _NO_SLOTS or not jax.tree.leaves(value):
            return value
        if name == "slots":
            return {k: f((*path, k), tree) for k, tree in value.items()}
        if any(map(_is_state, jax.tree.leaves(value, is_leaf=_is_state))):
            return _mapped(value, (*path, name), f)
        # A number alone is a count or a rate of the optimizer as a whole.
        is_number = jax.tree.structure(value).num_nodes == 1 and jnp.ndim(value) == 0
        return value if is_number else f((*path, name), value)

    return {name: of_one(name, value) for name, value in fields.items()}


def _mapped_parts(part: Any, path: SlotPath, f: Any) -> Any:
    """A ReplicaState, or one of the named tuples that it is made of."""

    def of_one(name, value):
        if name not in _REPLICA_PARTS:
            return _mapped_fields({name: value}, path, f)[name]
        return _mapped_parts(value, (*path, name), f) if value else value

    return type(part)(*map(of_one, part._fields, part))


def _is_state(node: Any) -> bool:
    """By the convention of optax: a named tuple whose type is called so."""
    return hasattr(node, "_fields") and type(node).__name__.endswith("State")


def _places(state: Any) -> dict[SlotPath, Any]:
    places = {}
    map_slots(state, lambda path, tree: places.setdefault(path, tree))
    return places


def _written(path: SlotPath) -> str:
    return "/".join(map(str, path))


def _find(state: Any, places: dict[SlotPath, Any], name: str) -> list[SlotPath]:
    """The paths of the slot of this name: several where they complete one another."""
    paths = [path for path in places if f"/{_written(path)}".endswith(f"/{name}")]
    if not paths:
        known = ", ".join(slot_names(state)) or "none"
        raise ValueError(f"no slot is called {name!r}; there are: {known}")
    if _merged(places, paths) is None:
        candidates = ", ".join(map(_written, paths))
        raise ValueError(f"the slot {name!r} is one of several; say which: {candidates}")
    return paths


def _merged(places: dict[SlotPath, Any], paths: list[SlotPath]) -> Any:
    """One tree from those of several groups, or None if they overlap."""
    merged = places[paths[0]]
    for path in paths[1:]:
        try:
            merged = _merge(merged, places[path])
        except _OverlapError:
            return None
    return merged


class _OverlapError(Exception):
    """Both trees have a slot of the same parameter."""


def _merge(a: Any, b: Any) -> Any:
    if is_masked(a) or is_masked(b):
        return b if is_masked(a) else a
    if jax.tree_util.all_leaves([a]) or jax.tree_util.all_leaves([b]):
        raise _OverlapError
    children, treedef = jax.tree.flatten(a, is_leaf=lambda x: x is not a)
    others = treedef.flatten_up_to(b)
    return treedef.unflatten(map(_merge, children, others))


def _filled(name: str, tree: Any, value: Any) -> Any:
    """The tree with the arrays of the value, where it has any of its own."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_masked)
    try:
        others = treedef.flatten_up_to(value)
    except ValueError as error:
        raise ValueError(f"value must be a tree like the slot {name!r}: {error}") from error
    return treedef.unflatten(_checked(name, leaves, others))


def _checked(name: str, leaves: list[Any], others: list[Any]) -> Iterator[Any]:
    for (path, old), new in zip(leaves, others, strict=True):
        if is_masked(old):
            yield old
        elif not jax.tree_util.all_leaves([new]) or jnp.shape(new) != jnp.shape(old):
            raise ValueError(
                f"value must have shape {jnp.shape(old)} at '{path_name(path)}' for the slot "
                f"{name!r}, got {getattr(new, 'shape', new)}"
            )
        else:
            yield jnp.asarray(new, jnp.result_type(old))
