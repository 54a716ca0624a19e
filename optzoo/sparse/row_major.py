"""Tables and slots whose rows a step changes keep each row in one piece of memory."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from ..core.compat import CALLS, in_row_major, inner_jaxprs, is_literal, scan_sizes
from ..core.marks import WRITES, mark_of
from ..native.engine import NAME

_SCATTERS = {"scatter", "scatter-add", "scatter_add"}
_SAME = {"copy", "copy_p", "layout_constraint", "optimization_barrier", "pcast", "pvary"}
_SAME |= {"sharding_constraint"}


def row_major(step: Callable[..., Any]) -> Callable[..., Any]:
    """The same step, where the arrays of which it changes some rows come out row-major.

    On a TPU an array is stored by columns unless the width of its rows is 1 or a multiple of 128.
    Rows are gathered and scattered row-major, so a step would copy such a table, and each slot of
    it, to that layout and back. The results of this function are row-major: the first step converts
    them, and each later step costs what the rows of its gradients cost. The price is memory: a row
    takes a multiple of 128 elements.

    :func:`optzoo.minimize` and :func:`optzoo.sharded_minimize` do this already. It is for a step of
    your own, inside of its ``jit``. On CPUs and GPUs all arrays are row-major, and nothing changes.
    Before JAX 0.11.1 nothing changes either: there a result whose layout is demanded cannot take
    the memory of a donated argument.

    Example:
        >>> import jax, jax.numpy as jnp, optax, optzoo
        >>> tx = optzoo.lazy_adam(0.1)
        >>> def step(params, state, grads):
        ...     updates, state = tx.update(grads, state, params)
        ...     return optax.apply_updates(params, updates), state
        >>> step = jax.jit(optzoo.row_major(step), donate_argnums=(0, 1))
        >>> params = jnp.ones((3, 2))
        >>> grads = optzoo.SparseRows(jnp.array([2]), jnp.ones((1, 2)), 3)
        >>> params, state = step(params, tx.init(params), grads)
        >>> print(params[2])
        [0.9 0.9]

    Args:
        step: a function of trees of arrays, which returns such a tree.

    Raises:
        TypeError: if ``step`` is not a function.
    """
    if not callable(step):
        raise TypeError(f"step must be a function, got {step!r}")
    inner = jax.jit(step)

    @functools.wraps(step)
    def wrapped(*args, **kwargs):
        leaves, treedef = jax.tree.flatten(inner(*args, **kwargs))
        program = jax.make_jaxpr(inner)(*args, **kwargs)  # the step is not traced again
        return treedef.unflatten(map(_in_rows, leaves, changed_rows(program.jaxpr)))

    return wrapped


def _in_rows(x: Any, has_changed_rows: bool) -> Any:
    return in_row_major(x) if has_changed_rows and can_be_row_major(x) else x


def can_be_row_major(x: Any) -> bool:
    """Whether an array has rows of several elements, and a TPU has such elements.

    Those of 64 bits are split by the compiler for TPUs, which takes no demand of a layout there.
    """
    return x.ndim > 1 and x.size > len(x) and x.dtype.itemsize <= 4


def changed_rows(jaxpr: Any) -> list[bool]:
    """For each result whether it is an argument in which rows are replaced, or added to.

    This may happen in calls, loops and branches.
    """
    return [origin is not None and origin.is_changed for origin in _origins(jaxpr)]


class _Origin(NamedTuple):
    """The input that a variable is but for some rows."""

    position: int
    is_changed: bool  # whether some rows may differ


def _origins(jaxpr: Any) -> list[_Origin | None]:
    """For each result of a jaxpr the input that it comes from, or None."""
    makers = {made: eqn for eqn in jaxpr.eqns for made in eqn.outvars}
    inputs = {v: i for i, v in enumerate(jaxpr.invars)}
    of_bodies = functools.cache(_origins)  # a call has several results

    def follow(v):
        is_changed = False
        while not is_literal(v) and v in makers:
            origin = _before(makers[v], makers[v].outvars.index(v), of_bodies)
            if origin is None:
                return None
            is_changed |= origin.is_changed
            v = makers[v].invars[origin.position]
        return None if is_literal(v) or v not in inputs else _Origin(inputs[v], is_changed)

    return [follow(v) for v in jaxpr.outvars]


def _before(eqn: Any, k: int, of_bodies: Callable[[Any], list[_Origin | None]]) -> _Origin | None:
    """The input of an equation that its ``k``-th output comes from, or None."""
    name = mark_of(eqn) or eqn.primitive.name
    if name in WRITES:
        return _Origin(0, True)
    if name in _SCATTERS:
        is_by_rows = eqn.params["dimension_numbers"].scatter_dims_to_operand_dims == (0,)
        is_one_row = eqn.invars[1].aval.ndim == 1  # XLA writes it in any layout
        return _Origin(0, not is_one_row) if is_by_rows else None
    if name in _SAME:
        return _Origin(k, False)
    if name == NAME:
        table = eqn.params["call"].tables.get(k)
        return None if table is None else _Origin(table, True)
    if name not in CALLS and name != "shard_map":
        return None
    bodies, first, carry = _bodies(eqn)
    origins = [of_bodies(body)[k] for body in bodies]
    found = [(first + o.position, o.is_changed) for o in origins if o is not None]
    positions = {position for position, _ in found}
    # What a loop carries has to come back to its place.
    expected = positions if carry is None else {carry + k}
    if len(found) < len(bodies) or len(positions) != 1 or positions != expected:
        return None
    return _Origin(positions.pop(), any(is_changed for _, is_changed in found))


def _bodies(eqn: Any) -> tuple[list[Any], int, int | None]:
    """What an equation runs, where its inputs begin among those of the equation, and its carry."""
    bodies = list(inner_jaxprs(eqn))
    if eqn.primitive.name == "cond":
        return bodies, 1, None
    if eqn.primitive.name == "while":
        first = eqn.params["cond_nconsts"]
        return [eqn.params["body_jaxpr"].jaxpr], first, first + eqn.params["body_nconsts"]
    if eqn.primitive.name == "scan":
        return bodies, 0, scan_sizes(eqn)[0]
    # Of custom derivatives the first is the function itself. Constants come first.
    return bodies[:1], len(eqn.invars) - len(bodies[0].invars), None
