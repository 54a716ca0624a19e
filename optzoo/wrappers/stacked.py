"""Many small parameters, updated as a few arrays."""

import itertools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ..core.checks import check_size
from ..core.paths import check_mask, path_name, resolve_mask
from ..core.rows import is_rows
from ..state.slots import map_slot_trees
from ..state.stacks import Layout, layout_of, places, stack, unstack
from ._elementwise import check_elementwise


def stacked(
    inner: optax.GradientTransformation,
    which: Any = None,
    *,
    max_size: int = 256,
    max_members: int = 16,
) -> optax.GradientTransformationExtraArgs:
    """Keeps and updates small parameters of equal shape and dtype as one array.

    With a thousand small parameters an optimizer spends its time on calling kernels, and XLA its
    own on compiling them. Here up to ``max_members`` parameters of equal shape and dtype share one
    array in each slot and one kernel in each operation. The numbers are those of ``inner``, to the
    rounding of the compiler. It pays for hundreds of parameters: the stacks of gradients are
    copies, and compiling one takes longer than compiling the update of a few parameters.

    The state is that of ``inner`` with stacks in its trees, so :func:`optzoo.get_slot` and
    ``optax.tree.map_params`` work on it. Which parameters are stacked follows from shapes and from
    the arguments here, which are a part of the format of checkpoints.

    ``inner`` must be element-wise, and may not tell parameters from each other by name or shape.
    This is read off the operations of the update when it is traced, with no cost at run time;
    without ``jit``, once for each set of shapes. Norms, clipping and masks go around it or in
    front of it, and so does :func:`optzoo.slots_dtype` with its options.

    A parameter whose gradient is missing, row-sparse or of another dtype than those of its stack
    leaves the stack for this update: right, but slow.

    Example:
        >>> import jax, jax.numpy as jnp, optax, optzoo
        >>> params = {"a": jnp.ones(3), "b": jnp.zeros(3), "table": jnp.ones((1000, 50))}
        >>> state = optzoo.stacked(optax.adam(1e-3)).init(params)
        >>> [m.shape for m in jax.tree.leaves(state[0].mu)]
        [(2, 3), (1000, 50)]
        >>> optzoo.get_slot(state, "mu")["b"].shape
        (3,)

    Args:
        inner: an element-wise optimizer, ours or another.
        which: which parameters may be stacked: a tree of bools, or a tuple of fragments of their
            paths; None for all. Those that are sharded over devices must not be.
        max_size: how many elements a stacked parameter has at most, at least 0. Copying large ones
            costs more than is gained.
        max_members: how many parameters a stack has at most, at least 1. The time of compilation
            grows with it.

    Raises:
        TypeError: if ``which`` is something else, or a size is no int.
        ValueError: if a size is out of its range; by ``init``, if a parameter to be stacked is
            sharded; by ``update`` when it is traced, if ``inner`` is not element-wise.
    """
    check_mask(which=which)
    max_size, max_members = check_size(max_size=max_size), check_size(1, max_members=max_members)
    inner = optax.with_extra_args_support(inner)
    proved = set[Any]()  # a memory, not a state: the same shapes would prove the same again

    def layout_by_shape(tree):
        if not jax.tree.leaves(tree):
            return ()
        nodes, _ = places(tree)
        marks, _ = places(resolve_mask(True if which is None else which, tree))
        kinds = [_kind(a) if mark is True else None for mark, a in zip(marks, nodes, strict=True)]
        small = lambda kind: kind is not None and kind[0] <= max_size
        return _grouped(range(len(nodes)), [k if small(k) else None for k in kinds], max_members)

    def init(params):
        layout = layout_by_shape(params)
        _check_not_sharded(params, layout)
        return inner.init(stack(params, layout))

    def update(updates, state, params=None, **extra_args):
        own = layout_of(state)
        kinds = _kinds(updates, params)
        # Without slots every layout is as good, for it leaves no trace.
        layout = own or layout_by_shape(updates if params is None else params)
        layout = tuple(m for members in layout for m in _grouped(members, kinds, max_members))
        flags = {k: v if isinstance(v, bool | str) else None for k, v in extra_args.items()}
        case = layout, jax.tree.structure(updates), tuple(kinds), *sorted(flags.items())
        if layout and case not in proved:
            check_elementwise(inner, updates, params, extra_args, layout)
            proved.add(case)
        params = None if params is None else stack(params, layout)
        state = _restacked(inner, state, layout)
        updates, state = inner.update(stack(updates, layout), state, params, **extra_args)
        return unstack(updates), _restacked(inner, state, own)

    return optax.GradientTransformationExtraArgs(init, update)


def _kind(a: Any) -> Any:
    """What the members of a stack have in common; None for what does not go into any."""
    if a is None or is_rows(a) or isinstance(a, optax.MaskedNode):
        return None
    a = jax.typeof(a) if not isinstance(a, jax.ShapeDtypeStruct) else a
    # Of weakly typed arrays a stack would be another type.
    stackable = jnp.issubdtype(a.dtype, jnp.inexact) and not a.weak_type
    return (a.size, a.shape, a.dtype) if stackable else None


def _kinds(updates: Any, params: Any) -> list[Any]:
    """Of each gradient and its parameter."""
    gs, _ = places(updates)
    xs = gs if params is None else places(params)[0]
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


def _check_not_sharded(params: Any, layout: Layout) -> None:
    nodes, treedef = places(params)
    paths = jax.tree_util.tree_leaves_with_path(treedef.unflatten(range(len(nodes))))
    for i in itertools.chain(*layout):
        x = nodes[i]
        sharding = None if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None)
        if sharding is not None and not sharding.is_fully_replicated:
            raise ValueError(
                f"parameter '{path_name(paths[i][0])}' is sharded over devices, {sharding}: keep "
                "it out of the stacks of optzoo.stacked with `which` or a smaller max_size"
            )
