"""Small parameters, gradients and trajectories for tests."""

import contextlib
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optzoo import SparseRows
from optzoo.core.meshes import beside
from optzoo.core.rows import map_rows
from optzoo.state import LeafwiseState
from optzoo.state.types import nodes_of


def params():
    """Two unlike tables, one of them with one row, and two dense parameters."""
    return {
        "table": jnp.arange(1.0, 11).reshape(5, 2) / 10,
        "layer": (jnp.ones(3), jnp.ones(())),
        "one_row": jnp.array([[0.5, -0.25, 2.0]]),
    }


def dense_grads(like):
    return jax.tree.map(lambda x: jnp.cos(x + 1), like)


def row_grads(like):
    """Dense gradients; for the tables rows 1 (twice), 3 and padding, and padding and row 0."""
    values = jnp.array([[1.0, 2], [3, 4], [5, 6], [7, 8]])
    rows = {
        "table": SparseRows(jnp.array([1, 3, 1, 5]), values, 5),
        "one_row": SparseRows(jnp.array([1, 0]), jnp.array([[9.0, 9, 9], [-1, 0, 3]]), 1),
    }
    return {name: rows.get(name, g) for name, g in dense_grads(like).items()}


@contextlib.contextmanager
def strict_settings():
    """JAX settings that turn likely mistakes into errors."""
    with (
        jax.numpy_dtype_promotion("strict"),
        jax.numpy_rank_promotion("raise"),
        jax.debug_nans(True),
        jax.debug_infs(True),
    ):
        yield


def in_numpy(tree):
    """A tree with NumPy arrays in place of JAX arrays, also in rows."""
    is_rows = lambda g: isinstance(g, SparseRows)
    of_rows = lambda g: SparseRows(np.asarray(g.indices), np.asarray(g.values), g.num_rows)
    convert = lambda a: of_rows(a) if is_rows(a) else np.asarray(a)
    return jax.tree.map(convert, tree, is_leaf=is_rows)


def to_dense(tree):
    """A tree with dense arrays in place of rows."""
    return map_rows(lambda g: g.to_dense(), tree)


def plain(tree):
    """A tree with rows as plain arrays, which can be compared."""
    return map_rows(lambda g: (g.indices, g.values), tree)


class CountedState(NamedTuple):
    """A step count and the state of an optimizer."""

    count: jax.Array
    inner: optax.OptState


def with_global_step(factory):
    """Adds a step count to an optimizer that needs a global step."""

    @functools.wraps(factory)
    def counting(*args, **kwargs):
        inner = factory(*args, **kwargs)

        def update(updates, state, params=None, *, global_step=None, **extra_args):
            step = state.count if global_step is None else global_step
            updates, new = inner.update(
                updates, state.inner, params, global_step=step, **extra_args
            )
            return updates, CountedState(state.count + 1, new)

        def init(params):
            return beside(params, CountedState(jnp.zeros([], jnp.int32), inner.init(params)))

        return optax.GradientTransformationExtraArgs(init, update)

    return counting


def factory(entry):
    """The factory of an optimizer, with a step count if it needs one."""
    return with_global_step(entry.factory) if entry.needs_global_step else entry.factory


def make(entry, *args, **kwargs):
    """An optimizer of the catalogue, with a step count if it needs one."""
    return entry._replace(factory=factory(entry)).make(*args, **kwargs)


def step_of(tx):
    """One update, as a function like ``optzoo.native_step(tx)``."""

    def step(params, state, grads, **extra_args):
        updates, state = tx.update(grads, state, params, **extra_args)
        return optax.apply_updates(params, updates), state

    return step


def step(tx, grads, x, state=None, **extra_args):
    """The parameters and the state after one update, the first one without a state."""
    return step_of(tx)(x, tx.init(x) if state is None else state, grads, **extra_args)


def trajectory(tx, x, grads, xs):
    """The parameters after every step, where ``grads(x, xs[i])`` is the i-th gradient."""

    def body(carry, inputs):
        x, state = step_of(tx)(*carry, grads(carry[0], inputs))
        return (x, state), x

    return jax.jit(lambda: jax.lax.scan(body, (x, tx.init(x)), xs)[1])()


def run(tx, grads, params=None, **extra_args):
    """The updates and the states after each gradient, in one program.

    Gradients, extra arguments and results are stacked over the steps. The parameters are ones by
    default, and are not updated.
    """
    if params is None:
        params = jax.tree.map(lambda g: np.ones(g.shape[1:], g.dtype), grads)
    # NumPy's arrays, so that no program is compiled to look at one step.
    return jax.device_get(_run(tx, params, grads, extra_args))


@functools.partial(jax.jit, static_argnums=0)
def _run(tx, params, grads, extra_args):
    def body(state, inputs):
        g, extra_args = inputs
        updates, state = tx.update(g, state, params, **extra_args)
        return state, (updates, state)

    return jax.lax.scan(body, tx.init(params), (grads, extra_args))[1]


def last(stacked):
    """Stacked values after the last step."""
    return jax.tree.map(lambda a: a[-1], stacked)


def side_by_side(txs):
    """One optimizer that returns the updates of several, by name, as one program."""

    def update(updates, states, params=None, **extra_args):
        done = {
            name: optax.with_extra_args_support(tx).update(
                updates, states[name], params, **extra_args
            )
            for name, tx in txs.items()
        }
        return tuple({name: part[i] for name, part in done.items()} for i in range(2))

    init = lambda params: {name: tx.init(params) for name, tx in txs.items()}
    return optax.GradientTransformationExtraArgs(init, update)


def slots(state):
    """The slot trees of all transformations of a chain."""
    return [tree for node in nodes_of(LeafwiseState, state) for tree in node.slots]


def avals(tree):
    """Shape, dtype and weak type of each leaf."""
    describe = lambda a: (a.shape, a.dtype, getattr(a, "weak_type", False))
    return jax.tree.map(describe, jax.eval_shape(lambda t: t, tree))
