"""Compares an optimizer's operations on a stack with those on a single parameter.

The programs of an element-wise update differ in shapes only. The update is traced abstractly on the
stacks and on one parameter of each, and the operations are counted without their shapes. A norm
reduces different axes of a stack, and a rule that depends on ranks, sizes or names has different
operations.

This check finds common mistakes but does not prove correctness: only the second and the last
parameter of each stack are compared with the stack, which has the name of the first.
``optzoo.testing.check_stacked`` compares values.
"""

import collections
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ..jaxprs.graph import Graph, Operation
from ..jaxprs.primitives import CALLS, Kind
from ..state.stacks import Layout, flatten_with_stacks, name_at, stack


def check_same_operations(
    inner: optax.GradientTransformationExtraArgs,
    updates: Any,
    params: Any,
    extra_args: dict[str, Any],
    layout: Layout,
) -> None:
    """Raises if the operations of an update differ between stacks and their members.

    Args:
        inner: the optimizer.
        updates: the gradients, without stacks.
        params: the parameters or None.
        extra_args: further arguments of the update.
        layout: which leaves are stacked.

    Raises:
        ValueError: if the operations differ.
    """
    gs, treedef = flatten_with_stacks(updates)
    # The state needs placeholders for the parameters.
    xs = gs if params is None else flatten_with_stacks(params)[0]

    def update(gs, state, xs):
        return inner.update(gs, state, None if params is None else xs, **extra_args)

    def operations(groups):
        """The operations on some stacks; a group of one is a single parameter."""
        chosen = set(itertools.chain(*groups))
        struct = lambda a: jax.ShapeDtypeStruct(jnp.shape(a), jnp.result_type(a))
        tree = lambda nodes: treedef.unflatten(
            [struct(a) if i in chosen else optax.MaskedNode() for i, a in enumerate(nodes)]
        )
        stacks = tuple(group for group in groups if len(group) > 1)
        gs_of, xs_of = (stack(tree(nodes), stacks) for nodes in (gs, xs))
        # The state is an argument: zeros of a scalar would be constants, but not those of a stack.
        init, state = jax.make_jaxpr(inner.init, return_shape=True)(xs_of)
        jaxprs = init, jax.make_jaxpr(update)(gs_of, state, xs_of)
        return collections.Counter(itertools.chain(*map(_operations, jaxprs)))

    try:
        of_stacks = operations(layout)
        second, last = (tuple((members[k],) for members in layout) for k in (1, -1))
        for singles in dict.fromkeys([second, last]):
            of_singles = operations(singles)
            if of_singles == of_stacks:
                continue
            pairs = zip(layout, singles, strict=True)
            differing = (one for many, one in pairs if operations([many]) != operations([one]))
            [position] = next(differing, singles[0])
            names = {name for name, *_ in (of_singles - of_stacks) | (of_stacks - of_singles)}
            raise ValueError(
                "optzoo.stacked cannot stack parameters here: the operations on parameter "
                f"'{name_at(updates, position)}' and on its stack differ in "
                f"{', '.join(sorted(names))}"
            )
        # The same along the first axis, which is that of the stack.
        if along := sorted({name for name, _, is_along, *_ in of_stacks if is_along}):
            raise ValueError(
                "optzoo.stacked cannot stack parameters here: inner has operations along the "
                f"first axis ({', '.join(along)}), which in a stack is the axis of its members"
            )
    except Exception as error:
        error.add_note(_HINT)
        raise


def _operations(jaxpr: Any) -> Iterator[tuple[Any, ...]]:
    """The operations of a program, each with its options and constants.

    The third entry of each operation is whether it reduces along the first axis.
    """
    for op, *_ in Graph.of(jaxpr).walk({*CALLS, Kind.MAP}):
        # A scalar is broadcast to the shape of a stack, but not to that of another scalar.
        if not op.bodies and op.name != "broadcast_in_dim":
            constants = [str(v.literal) for v in op.ins if v.literal is not None]
            yield op.name, str(op.params), _is_along_first_axis(op), *constants


def _is_along_first_axis(op: Operation) -> bool:
    if op.kind is not Kind.REDUCE and op.name not in _ALONG_AXIS:
        return False
    axis = op.params.get("axis", op.params.get("dimension"))
    return 0 in op.params.get("axes", (axis,))


_ALONG_AXIS = {"cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum", "sort"}
_HINT = (
    "(Put operations that depend on a whole parameter or its name around optzoo.stacked or in "
    "front of it, as in optax.chain(optax.clip_by_global_norm(1.0), optzoo.stacked(optimizer)), "
    "or keep the parameter out of the stacks with `mask`)"
)
