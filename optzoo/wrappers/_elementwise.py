"""Proves from its operations that an optimizer does to a stack what it does to its members.

The update is traced, abstractly, on the tree and on the tree with stacks. Every value gets a
number, the same for the same expression of the same inputs of one parameter. Operations on what
belongs to a parameter must be element-wise and keep to that parameter. If then updates and slots of
all members have the numbers of their stack, it becomes what they would: whatever tells parameters
from each other, by name, place or shape, shows as other numbers.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.source_info_util import summarize

from ..core.paths import is_masked, path_name
from ..sparse.rowwise_check import ELEMENTWISE
from ..state.slots import map_slot_trees
from ..state.stacks import Layout, places, stack

# As good as their bodies.
_CALLING = """
    closed_call core_call custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr jit pjit
"""
# Element-wise where they leave the shape as it is; of a number they make it many times.
_RESHAPING = """
    broadcast_in_dim copy reshape
"""
_CALLS, _RESHAPES = frozenset(_CALLING.split()), frozenset(_RESHAPING.split())


@dataclasses.dataclass(frozen=True)  # a leaf, for labels stand in trees
class _Label:
    """What a leaf is: of which parameter (None for the optimizer's own), and what of it."""

    owner: int | None
    what: Any


class _Value(NamedTuple):
    """What is known of a variable of a program."""

    number: int  # of the expression
    owner: int | None  # the place of the parameter it belongs to, None if to none
    uniform: bool  # a number, or one number everywhere


def check_elementwise(
    inner: optax.GradientTransformationExtraArgs,
    updates: Any,
    params: Any,
    extra_args: dict[str, Any],
    layout: Layout,
) -> None:
    """Raises unless the optimizer does to stacks what it does to their members.

    Args:
        inner: the optimizer.
        updates: its gradients, without stacks.
        params: its parameters or None.
        extra_args: of its update.
        layout: which leaves are stacked.

    Raises:
        ValueError: if it does not.
    """
    gs, treedef = places(updates)
    # Something must take the place of the parameters in the state.
    xs = gs if params is None else places(params)[0]
    heads = {i: members[0] for members in layout for i in members}
    only = lambda nodes: treedef.unflatten(
        [_struct(a) if i in heads else optax.MaskedNode() for i, a in enumerate(nodes)]
    )
    gs, xs, known = only(gs), only(xs), dict[Any, int]()
    trace = lambda g, x: _trace(inner, g, x, params is not None, extra_args, known)
    stacks = trace(stack(gs, layout), stack(xs, layout))
    for label, number in trace(gs, xs).items():
        head = label if label.owner is None else _Label(heads[label.owner], label.what)
        if stacks.get(head) != number:
            raise _refusal(f"it treats {_name(gs, label.owner)} otherwise when stacked")


def _trace(
    inner: optax.GradientTransformationExtraArgs,
    updates: Any,
    params: Any,
    has_params: bool,
    extra_args: dict[str, Any],
    known: dict[Any, int],
) -> dict[_Label, int]:
    """The numbers of all that ``init`` and ``update`` make, by their labels."""
    walk = _Walk(known, updates)

    def run(f, labels, *trees):
        # They go in and come out flat, for JAX itself asks for the names of arguments.
        leaves, treedef = jax.tree.flatten(trees)
        results = []

        def flat(*leaves):
            results.append(f(*treedef.unflatten(leaves)))
            return jax.tree.leaves(results[0])

        with _annotate_errors():
            jaxpr, structs = jax.make_jaxpr(flat, return_shape=True)(*leaves)
        inputs = map(walk.input, labels, jaxpr.in_avals)
        values = walk.outputs(jaxpr.jaxpr, jaxpr.consts, list(inputs))
        return jax.tree.structure(results[0]).unflatten(structs), values

    owners = [i for i, g in enumerate(places(updates)[0]) if not is_masked(g)]
    of = lambda what: [_Label(owner, what) for owner in owners]
    state, started = run(inner.init, of("x"), params)
    of_state = _of_state(inner, state, params)
    update = lambda g, s, x: inner.update(g, s, x if has_params else None, **extra_args)
    labels = [*of("g"), *of_state, *of("x")]
    (us, after), updated = run(update, labels, updates, state, params)
    if jax.tree.structure((us, after)) != jax.tree.structure((updates, state)):
        raise _refusal("its updates or its state change their structure")

    made = [("init", of_state, started), ("update", [*of("u"), *of_state], updated)]
    numbers = dict[_Label, int]()
    for when, labels, values in made:
        for label, value in zip(labels, values, strict=True):
            if value.owner != label.owner and not (value.owner is None and value.uniform):
                raise _refusal(f"its {when} gives parameters what is not their own")
            numbers[_Label(label.owner, (when, label.what))] = value.number
    return numbers


def _of_state(inner: optax.GradientTransformation, state: Any, params: Any) -> list[_Label]:
    """A label for each array of the state."""
    slots, shared = itertools.count(), itertools.count()
    xs, treedef = places(params)
    shapes = lambda tree: [a.shape for a in jax.tree.leaves(tree)]

    def of_slot(tree):
        what = "slot", next(slots)
        with _annotate_errors():
            parts = treedef.flatten_up_to(tree)
        for i, (slot, x) in enumerate(zip(parts, xs, strict=True)):
            if shapes(slot) != shapes(x):
                raise _refusal(
                    f"it does not keep an array of the same shape for {_name(params, i)}"
                )
            parts[i] = jax.tree.map(lambda _, i=i: _Label(i, what), slot)
        return treedef.unflatten(parts)

    with _annotate_errors():
        of_shared = lambda _: _Label(None, ("shared", next(shared)))
        labels = map_slot_trees(inner, of_slot, state, of_shared)
    return jax.tree.leaves(labels)


class _Walk:
    """Numbers the values of programs; of programs that share ``known``, alike."""

    def __init__(self, known: dict[Any, int], tree: Any):
        self.known, self.tree = known, tree

    def number(self, *expression: Any) -> int:
        return self.known.setdefault(expression, len(self.known))

    def input(self, label: _Label, aval: Any) -> _Value:
        uniform = label.owner is None and aval.ndim == 0
        return _Value(self.number("input", label.what, aval.dtype), label.owner, uniform)

    def outputs(self, jaxpr: Any, consts: Any, inputs: list[_Value]) -> list[_Value]:
        """What is known of the results of a program."""
        values = dict(zip(jaxpr.invars, inputs, strict=True))
        values |= zip(jaxpr.constvars, map(self._constant, consts), strict=True)
        read = lambda v: self._constant(v.val) if hasattr(v, "val") else values[v]
        for eqn in jaxpr.eqns:
            values |= zip(eqn.outvars, self._results(eqn, list(map(read, eqn.invars))), strict=True)
        return list(map(read, jaxpr.outvars))

    def _constant(self, c: Any) -> _Value:
        # Numbers are told by what they are; the rest, such as those of a trace around, by identity.
        is_number = not isinstance(c, jax.core.Tracer) and isinstance(jnp.result_type(c), np.dtype)
        what = np.asarray(c).tobytes() if is_number and jnp.ndim(c) == 0 else id(c)
        return _Value(self.number("constant", what, jnp.result_type(c)), None, jnp.ndim(c) == 0)

    def _results(self, eqn: Any, operands: list[_Value]) -> list[_Value]:
        name = eqn.primitive.name
        owners = sorted({v.owner for v in operands if v.owner is not None})
        if name in _CALLS:
            body = next(p for p in eqn.params.values() if hasattr(p, "jaxpr"))
            return self.outputs(body.jaxpr, body.consts, operands)
        if name in _RESHAPES and (operands[0].uniform or _keeps_shape(eqn)):
            return operands[:1]
        if not owners and not (name in ELEMENTWISE and all(v.uniform for v in operands)):
            # Of the optimizer as a whole: as it is.
            what = name, str(eqn.params), *(v.number for v in operands)
            what += tuple(v.aval.shape for v in eqn.invars)
            ranks = [v.aval.ndim for v in eqn.outvars]
            return [_Value(self.number(*what, i), None, n == 0) for i, n in enumerate(ranks)]
        apart = len(owners) <= 1 and all(v.uniform or v.owner is not None for v in operands)
        if not apart or name not in ELEMENTWISE:
            names = " and ".join(_name(self.tree, i) for i in owners[:2])
            line = summarize(eqn.source_info)
            raise _refusal(f"`{name}` of {names} is not element-wise ({line})")
        owner = owners[0] if owners else None
        number = self.number(name, str(eqn.params), *(v.number for v in operands))
        return [_Value(number, owner, owner is None)]


def _keeps_shape(eqn: Any) -> bool:
    return eqn.invars[0].aval.shape == eqn.outvars[0].aval.shape


def _struct(a: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(jnp.shape(a), jnp.result_type(a))


def _name(tree: Any, place: int | None) -> str:
    if place is None:
        return "its own state"
    nodes, treedef = places(tree)
    path, _ = jax.tree_util.tree_leaves_with_path(treedef.unflatten(range(len(nodes))))[place]
    return f"parameter '{path_name(path)}'"


@contextlib.contextmanager
def _annotate_errors() -> Iterator[None]:
    """Errors of the optimizer itself say what it was called with."""
    try:
        yield
    except Exception as error:
        if _HINT not in str(error):
            error.add_note(f"(optzoo.stacked tried the optimizer on stacks of parameters. {_HINT})")
        raise


_HINT = (
    "What looks at a parameter as a whole or at its name belongs around it or in front of it, as "
    "in optax.chain(optax.clip_by_global_norm(1.0), optzoo.stacked(optimizer))"
)


def _refusal(reason: str) -> ValueError:
    return ValueError(f"optzoo.stacked cannot stack parameters here: {reason}. {_HINT}.")
