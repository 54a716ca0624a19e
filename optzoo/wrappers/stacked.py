"""Stacks of many small parameters, updated as a few arrays."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ..core.boxes import without_boxes
from ..core.checks import check_flags, check_size, check_update_arguments
from ..core.gradients import check_gradients
from ..core.optimizer import Optimizer, recorded
from ..core.paths import check_mask, resolve_mask
from ..core.rows import is_rows
from ..state.inner import fitting, inner_transformation
from ..state.slots import map_slot_trees
from ..state.stacks import (
    Layout,
    flatten_with_stacks,
    is_stack,
    layout_of,
    name_at,
    stack,
    stacks_in,
    unstack,
)
from ..state.storage.stored import ROUNDING
from ._stack_check import check_same_operations


@recorded
def stacked(
    inner: optax.GradientTransformation,
    mask: Any = None,
    *,
    max_size: int = 256,
    max_members: int = 16,
    check: bool = True,
) -> optax.GradientTransformationExtraArgs:
    """Stores and updates small parameters of equal shape and dtype as one array.

    With a thousand small parameters, most of the time is spent on compiling and launching kernels.
    Here up to ``max_members`` parameters of equal shape and dtype share one array in each slot and
    one kernel in each operation. The values are those of ``inner``, up to the rounding of the
    compiler. This is useful for hundreds of parameters, as gradients are copied into the stacks.

    The state is that of ``inner`` with stacks in its trees, so :func:`optzoo.get_slot` and
    ``optax.tree.map_params`` work on it. The shapes of the parameters and the arguments determine
    the stacks, and with them the format of checkpoints.

    ``inner`` must be element-wise and must treat all parameters of a shape equally: a new element
    depends on the same element of the gradient, the parameter and the slots, and on scalars of the
    optimizer, by a rule that does not depend on the name, the shape or the rank of the parameter.
    Put norms, clipping, noise, masks and :func:`optzoo.slots_dtype` with its options around
    ``stacked`` or in front of it.

    With ``check``, common violations raise an error when the update is traced, without a cost at
    run time: norms, sums over axes, random numbers, and dependence on shapes, ranks or names. The
    check compares the first two members and the last of each stack; it does not find element-wise
    sums of different parameters, nor rules for names of other members.
    ``optzoo.testing.check_stacked`` finds these too, by comparing values on given parameters.

    A parameter whose gradient is missing, row-sparse or of another dtype than its stack is updated
    outside the stack, with the same result but slowly.

    Example:
        >>> import jax, jax.numpy as jnp, optax, optzoo
        >>> params = {"a": jnp.ones(3), "b": jnp.zeros(3), "table": jnp.ones((1000, 50))}
        >>> state = optzoo.stacked(optax.adam(1e-3)).init(params)
        >>> [m.shape for m in jax.tree.leaves(state[0].mu)]
        [(2, 3), (1000, 50)]
        >>> optzoo.get_slot(state, "mu")["b"].shape
        (3,)

    Args:
        inner: an element-wise optimizer, of this library or another.
        mask: the parameters that may be stacked (:func:`optzoo.param_groups`); None for all.
            Exclude parameters that are sharded over devices.
        max_size: the largest number of elements of a stacked parameter, at least 0. Copying larger
            parameters costs more time than stacks save.
        max_members: the largest number of parameters in a stack, at least 1. Compile time grows
            with it.
        check: whether ``update`` compares, at trace time, the operations on stacks with those on
            single parameters. Set it to False if the check refuses an ``inner`` that is correct
            with stacks, for example one with a norm of all parameters together.

    Raises:
        ValueError: in ``init``, if a parameter to be stacked is sharded or has a slot of another
            shape; in ``update``, at trace time, if ``check`` finds different operations.
    """
    inner = inner_transformation(inner=inner)
    check_mask(mask=mask)
    check_flags(check=check)
    max_size, max_members = check_size(max_size=max_size), check_size(1, max_members=max_members)
    checked = set[Any]()  # so that without jit each set of shapes is traced once

    def layout_by_shape(tree):
        if not jax.tree.leaves(tree):
            return ()
        nodes, _ = flatten_with_stacks(tree)
        marks, _ = flatten_with_stacks(resolve_mask(True if mask is None else mask, tree))
        kinds = [_kind(a) if mark is True else None for mark, a in zip(marks, nodes, strict=True)]
        small = lambda kind: kind is not None and kind[0] <= max_size
        return _grouped(range(len(nodes)), [k if small(k) else None for k in kinds], max_members)

    def init(params):
        if any(map(is_stack, jax.tree.leaves(params, is_leaf=is_stack))):
            raise ValueError(
                "optzoo.stacked is inside optzoo.stacked, which is not supported: use only one"
            )
        layout = layout_by_shape(params)
        _check_not_sharded(params, layout)
        in_stacks = stack(params, layout)
        state = inner.init(in_stacks)
        _check_slot_shapes(state, in_stacks)
        return state

    def update(updates, state, params=None, **extra_args):
        check_update_arguments(extra_args)
        check_gradients(updates, params, allow_complex=True)
        own = layout_of(state)
        kinds = _kinds(updates, params)
        # Without slots any layout is valid, as the state has none.
        layout = own or layout_by_shape(updates if params is None else params)
        layout = tuple(m for members in layout for m in _grouped(members, kinds, max_members))
        flags = {k: v if isinstance(v, bool | str) else None for k, v in extra_args.items()}
        case = layout, jax.tree.structure(updates), tuple(kinds), *sorted(flags.items())
        if check and layout and case not in checked:
            # Random bits differ from one parameter to the next.
            exact = {k: v for k, v in extra_args.items() if k != ROUNDING}
            check_same_operations(inner, updates, params, exact, layout)
            checked.add(case)
        params = None if params is None else stack(params, layout)
        state = _restacked(inner, state, layout)
        updates, state = inner.update(stack(updates, layout), state, params, **extra_args)
        return unstack(updates), _restacked(inner, state, own)

    about = inner.about._replace(deferral=None)
    return fitting(without_boxes(Optimizer(init, update, about)))


def _kind(a: Any) -> Any:
    """The shape and dtype that members of a stack share; None for leaves that are not stacked."""
    if a is None or is_rows(a) or isinstance(a, optax.MaskedNode):
        return None
    a = jax.typeof(a) if not isinstance(a, jax.ShapeDtypeStruct) else a
    # A stack of weakly typed arrays would have another type.
    stackable = jnp.issubdtype(a.dtype, jnp.inexact) and not a.weak_type
    return (a.size, a.shape, a.dtype) if stackable else None


def _kinds(updates: Any, params: Any) -> list[Any]:
    """The kind of each gradient and its parameter."""
    gs, _ = flatten_with_stacks(updates)
    xs = gs if params is None else flatten_with_stacks(params)[0]
    about = lambda x: (jnp.shape(x), jnp.result_type(x))
    kinds = zip(map(_kind, gs), xs, strict=True)
    return [kind and (kind, about(x)) for kind, x in kinds]


def _grouped(members: Iterable[int], kinds: list[Any], size: int) -> Layout:
    """The members of each kind, at most ``size`` together and at least two."""
    of_kind = dict[Any, list[int]]()
    for i in members:
        if kinds[i] is not None:
            of_kind.setdefault(kinds[i], []).append(i)
    batches = (m[k : k + size] for m in of_kind.values() for k in range(0, len(m), size))
    return tuple(sorted(tuple(batch) for batch in batches if len(batch) > 1))


def _restacked(inner: optax.GradientTransformation, state: Any, layout: Layout) -> Any:
    if layout_of(state) == layout:
        return state
    restack = lambda tree: stack(unstack(tree), layout)
    return map_slot_trees(inner, restack, state)


def _check_slot_shapes(state: Any, params: Any) -> None:
    """Raises ``ValueError`` unless each stack in the state has the shape of its parameters."""
    nodes, _ = flatten_with_stacks(params)
    shapes = {(*node.arrays,): (i, _shapes(node)) for i, node in enumerate(nodes) if is_stack(node)}
    for slot in stacks_in(state):
        if (*slot.arrays,) not in shapes:
            raise ValueError(
                "optzoo.stacked is around an optimizer with owners, which makes its own stacks: "
                "use optzoo.param_groups, and put stacked around the optimizer of the other "
                "parameters only"
            )
        i, shape = shapes[(*slot.arrays,)]
        if _shapes(slot) != shape:
            raise ValueError(
                "optzoo.stacked cannot stack parameters here: inner has a slot whose shape is not "
                f"that of parameter '{name_at(params, i)}': keep it out of the stacks with `mask`"
            )


def _shapes(tree: Any) -> list[tuple[int, ...]]:
    return list(map(jnp.shape, jax.tree.leaves(tree)))


def _check_not_sharded(params: Any, layout: Layout) -> None:
    nodes, _ = flatten_with_stacks(params)
    for i in itertools.chain(*layout):
        x = nodes[i]
        sharding = None if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None)
        if sharding is not None and not sharding.is_fully_replicated:
            raise ValueError(
                f"parameter '{name_at(params, i)}' is sharded over devices, {sharding}: keep "
                "it out of the stacks of optzoo.stacked with `mask` or a smaller max_size"
            )
