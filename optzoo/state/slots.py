"""The slots of an optimizer, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ..core.numerics import is_real, saturating_cast
from ..core.paths import flatten_with_path, is_masked, leaves_with_path, out_of_box, path_name
from .deferred import Deferred, check_current
from .of_nnx import refuse_nnx
from .stacks import is_stack, layout_of, restack, unstack
from .storage.packing import pack_like, unpack
from .types import LeafwiseState, SkipSpikesState, SlotsByName

# The path of a slot: indices of chains, fields and keys, with the name of the slot at the end.
SlotPath = tuple[Any, ...]

_INJECTED = optax.InjectStatefulHyperparamsState, optax.InjectHyperparamsState


def slot_names(state: Any) -> tuple[str, ...]:
    """The names of the slots in a state, for :func:`optzoo.get_slot`.

    Example:
        >>> import jax.numpy as jnp, optax, optzoo
        >>> tx = optax.chain(optax.clip(1.0), optzoo.adam(0.1))
        >>> print(optzoo.slot_names(tx.init(jnp.ones(2))))
        ('m', 'v')

    Args:
        state: the state of any optax transformation. In states of this library, slots have the
            names of the original (``m`` and ``v`` of Adam, ``momentum``, ``accum`` and ``linear``
            of FTRL). In other states, slots are the fields with more than a scalar (``mu`` and
            ``nu`` of ``optax.adam``, ``trace``, ``acc_grads`` of ``optax.MultiSteps``).

    Returns:
        The names in the order of the state. If a parameter has several slots with the same name, as
        in a chain of two optimizers, they are listed with their paths: ``0/m``, ``1/m``.
    """
    by_path = _slots_by_path(state)
    names = dict.fromkeys(path[-1] for path in by_path)
    found = []
    for name in names:
        paths = [path for path in by_path if path[-1] == name]
        found += [name] if _merged(by_path, paths) is not None else map(_written, paths)
    return tuple(found)


def get_slot(state: Any, name: str) -> Any:
    """A slot of all parameters, as ``tf.train.Optimizer.get_slot`` returns it for one.

    .. code-block:: python

        optzoo.get_slot(state, "m")["encoder"]["kernel"]

    Example:
        >>> import jax.numpy as jnp, optax, optzoo
        >>> tx = optax.chain(optax.clip(1.0), optzoo.adam(0.1))
        >>> state = tx.init({"w": jnp.ones(2)})
        >>> print(optzoo.get_slot(state, "m")["w"])
        [0. 0.]

    Args:
        state: the state of any optax transformation: chains, masks, partitions, ``MultiSteps``,
            ``inject_hyperparams`` and wrappers are searched.
        name: one of :func:`optzoo.slot_names`, or the end of its path if that is unambiguous.

    Returns:
        A tree like the parameters. The groups of ``optax.partition`` are merged; parameters without
        this slot have ``optax.MaskedNode()``. The arrays are those of the state: copy them by
        ``jnp.copy`` to keep them after a step that donates the state.

    Raises:
        TypeError: if the state is an ``nnx.State`` or ``nnx.Optimizer`` (:func:`optzoo.nnx_split`).
        ValueError: if there is no such slot, or if the name is ambiguous; the message lists the
            candidates.
    """
    check_current(state, "get_slot")
    by_path = _slots_by_path(state)
    return _merged(by_path, _find(state, by_path, name))


def set_slot(state: Any, name: str, value: Any) -> Any:
    """A copy of a state with other values of a slot.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.momentum(0.1, 0.9)
        >>> state = tx.init({"w": jnp.ones(2)})
        >>> state = optzoo.set_slot(state, "momentum", {"w": jnp.array([1.0, 2.0])})
        >>> print(optzoo.get_slot(state, "momentum")["w"])
        [1. 2.]

    Args:
        state: as in :func:`optzoo.get_slot`.
        name: as in :func:`optzoo.get_slot`.
        value: a tree as returned by :func:`optzoo.get_slot`. The slot keeps its dtypes.

    Returns:
        The new state; the old one is unchanged.

    Raises:
        ValueError: as in :func:`optzoo.get_slot`, or if the value has another structure, or another
            shape for a parameter; the message names its path.
    """
    check_current(state, "set_slot")
    paths = _find(state, _slots_by_path(state), name)
    return map_slots(
        state, lambda path, tree: _filled(name, tree, value) if path in paths else tree
    )


def map_slots(state: Any, f: Callable[[SlotPath, Any], Any]) -> Any:
    """The state with each slot replaced by ``f(path, tree)``; ``f`` gets unstacked slots."""

    def of_slot(path, tree):
        return restack(f(path, unstack(tree)), tree) if layout_of(tree) else f(path, tree)

    return _mapped(state, (), of_slot)


def are_slots(inner: optax.GradientTransformation, state: Any) -> Any:
    """A tree like a state of ``inner``: True for each array of a slot, False for others.

    The others are shared by all parameters: counts, powers, hyper-parameters.
    """
    mark = lambda slots: jax.tree.map(lambda _: True, slots)
    return map_slot_trees(inner, mark, state, lambda _: False)


def map_slot_trees(
    inner: optax.GradientTransformation,
    f: Callable[[Any], Any],
    state: Any,
    others: Callable[[Any], Any] | None = None,
) -> Any:
    """A state of ``inner`` with ``f`` applied to each tree of slots and ``others`` to other arrays.

    Unlike :func:`map_slots`, it finds the slots by ``inner``, for any type of state, and passes
    them in stored form.

    Raises:
        ValueError: if ``inner`` reads the parameters in its ``init``, so that slots cannot be
            identified.
    """

    def init(placeholder):
        try:
            return inner.init(placeholder)
        except (TypeError, ValueError, AttributeError, LookupError) as error:
            raise ValueError(
                "optax.tree.map_params does not find the slots in the state of an optimizer "
                "whose init reads the parameters, such as a line search of optax. Put the line "
                "search outside, such as optax.chain(optzoo.multitask(optimizer), line_search)"
            ) from error

    everything = lambda _: True  # a whole tree of slots at once
    return optax.tree.map_params(init, f, state, transform_non_params=others, is_leaf=everything)


def _mapped(node: Any, path: SlotPath, f: Callable[[SlotPath, Any], Any]) -> Any:
    """A state, or a container of states, with ``f`` applied to its slots."""
    if isinstance(node, LeafwiseState):
        names, given = getattr(node.slots, "_fields", ()), unpack(node.slots)
        slots = [f((*path, k), tree) for k, tree in zip(names, given, strict=True)]
        return node._replace(slots=pack_like(node.slots, slots))
    if hasattr(node, "_fields"):
        fields = zip(node._fields, node, strict=True)
        return type(node)(*(_mapped_field(node, name, value, path, f) for name, value in fields))
    if isinstance(node, dict):
        return {k: _mapped(part, (*path, k), f) for k, part in node.items()}
    if isinstance(node, tuple | list):
        return type(node)(_mapped(part, (*path, i), f) for i, part in enumerate(node))
    return node


def _mapped_field(state: Any, name: str, value: Any, path: SlotPath, f: Any) -> Any:
    if isinstance(state, _INJECTED) and name != "inner_state":  # hyper-parameters
        return value
    if isinstance(state, Deferred) and name != "inner":  # the clock and the ages of rows
        return value
    if isinstance(state, SkipSpikesState) and name != "inner":  # the window
        return value
    if isinstance(state, SlotsByName):
        if name != "slots":
            return value
        return {k: f((*path, k), tree) for k, tree in value.items()}
    if name.startswith("inner") or has_states(value):
        return _mapped(value, (*path, name), f)
    return f((*path, name), value) if _is_slot(value) else value


def _is_slot(value: Any) -> bool:
    """Whether a field has an array for each parameter: not a count, a rate or a random key."""
    paths = leaves_with_path(value)
    is_scalar = [(out_of_box(path), jnp.ndim(a)) for path, a in paths] == [((), 0)]
    return not is_scalar and any(jnp.issubdtype(a.dtype, jnp.inexact) for _, a in paths)


def is_state(node: Any) -> bool:
    """Whether ``node`` in the field of a state is a state, not a tree of parameters.

    Parameters may be named tuples, too. States are those of optax and of this library. The state of
    any other transformation is recognized at the top, in a chain, or, by the convention of optax,
    in a field ``inner...`` of a wrapper.
    """
    if not getattr(node, "_fields", ()) or is_stack(node):
        return False
    return type(node).__module__.partition(".")[0] in ("optax", "optzoo")


def has_states(tree: Any) -> bool:
    """Whether a node of a tree is a state."""
    return any(map(is_state, jax.tree.leaves(tree, is_leaf=is_state)))


def _slots_by_path(state: Any) -> dict[SlotPath, Any]:
    refuse_nnx(state, variables=True)
    by_path = {}
    map_slots(state, lambda path, tree: by_path.setdefault(path, tree))
    return by_path


def _written(path: SlotPath) -> str:
    return "/".join(map(str, path))


def _find(state: Any, by_path: dict[SlotPath, Any], name: str) -> list[SlotPath]:
    """The paths of the slot with this name: several if they belong to different parameters."""
    paths = [path for path in by_path if f"/{_written(path)}".endswith(f"/{name}")]
    if not paths:
        known = ", ".join(slot_names(state)) or "none"
        raise ValueError(f"no slot has the name {name!r}; the slots are: {known}")
    if _merged(by_path, paths) is None:
        candidates = ", ".join(map(_written, paths))
        raise ValueError(f"the slot {name!r} is ambiguous; choose one of: {candidates}")
    return paths


def _merged(by_path: dict[SlotPath, Any], paths: list[SlotPath]) -> Any:
    """Merges the trees of several groups; None if they overlap."""
    merged = by_path[paths[0]]
    for path in paths[1:]:
        try:
            merged = _merge(merged, by_path[path])
        except _OverlapError:
            return None
    return merged


class _OverlapError(Exception):
    """Both trees have a slot of the same parameter."""


def _merge(a: Any, b: Any) -> Any:
    if _is_hidden(a) or _is_hidden(b):
        return b if _is_hidden(a) else a
    if jax.tree_util.all_leaves([a]) or jax.tree_util.all_leaves([b]):
        raise _OverlapError
    children, treedef = jax.tree.flatten(a, is_leaf=lambda x: x is not a)
    others = treedef.flatten_up_to(b)
    return treedef.unflatten(map(_merge, children, others))


def _is_hidden(tree: Any) -> bool:
    """Whether all leaves are masked, such as the leaf of a Flax variable; False for ()."""
    is_leaf = lambda x: is_masked(x) or (isinstance(x, tuple) and not x)
    return all(map(is_masked, jax.tree.leaves(tree, is_leaf=is_leaf)))


def _filled(name: str, tree: Any, value: Any) -> Any:
    """The tree with the arrays of the value, except at masked leaves."""
    leaves, treedef = flatten_with_path(tree, is_leaf=is_masked)
    try:
        others = treedef.flatten_up_to(value)
    except ValueError as error:
        raise ValueError(f"value must be a tree like the slot {name!r}: {error}") from error
    return treedef.unflatten(_checked(name, leaves, others))


def _is_array(x: Any) -> bool:
    return jax.tree_util.all_leaves([x]) and not isinstance(x, jax.ShapeDtypeStruct)


def _checked(name: str, leaves: list[Any], others: list[Any]) -> Iterator[Any]:
    for (path, old), new in zip(leaves, others, strict=True):
        if is_masked(old):
            yield old
        elif not _is_array(new) or jnp.shape(new) != jnp.shape(old):
            raise ValueError(
                f"value must have shape {jnp.shape(old)} at '{path_name(path)}' for the slot "
                f"{name!r}, got {getattr(new, 'shape', new)}"
            )
        else:
            new, dtype = jnp.asarray(new), jnp.result_type(old)
            if not is_real(new) and new.dtype != dtype:
                raise ValueError(
                    f"value must have dtype {dtype} at '{path_name(path)}' for the slot {name!r}, "
                    f"got {new.dtype}"
                )
            is_inexact = jnp.issubdtype(dtype, jnp.inexact)
            yield saturating_cast(new, dtype) if is_inexact else new.astype(dtype)
