"""States as versions before 28 November 2026 had them, with other keys and boxes.

It was run by that version: ``PYTHONPATH=old python tests/state/make_old_states.py states.npz``.
"""

import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import optzoo

NAMES = {"table": ("vocab", "embed"), "kernel": ("embed", "out"), "bias": ("out",)}


def plain():
    values = lambda *shape: jnp.cos(jnp.arange(1.0, 1 + np.prod(shape))).reshape(shape)
    return {"table": values(8, 4), "kernel": values(4, 4), "bias": values(4)}


def boxed():
    return {name: nn.Partitioned(x, NAMES[name]) for name, x in plain().items()}


def groups():
    return optzoo.param_groups(
        {"table": optzoo.row_wise_adagrad(0.1), "kernel": optzoo.adam(0.1), ".*": optzoo.ggt(0.1)}
    )


# The transformation and its parameters.
CASES = {
    "groups": (groups, plain),
    "stacked": (lambda: optzoo.stacked(optzoo.adam(0.1)), lambda: {**plain(), "b": jnp.ones(4)}),
    "caught_up": (lambda: optzoo.caught_up(optzoo.adam(0.1), mask="table"), plain),
    "boxed groups": (groups, boxed),
    "boxed caught_up": (lambda: optzoo.caught_up(optzoo.adam(0.1), mask="table"), boxed),
    "boxed soap": (lambda: optzoo.soap(0.1), boxed),
    "boxed shampoo": (lambda: optzoo.shampoo(0.1), boxed),
    "boxed int8": (lambda: optzoo.slots_dtype(optzoo.adam(0.1), "int8"), boxed),
    "boxed packed": (
        lambda: optzoo.slots_dtype(optzoo.adam(0.1), "float32", packed=True),
        boxed,
    ),
    "boxed accumulate": (lambda: optzoo.accumulate(optzoo.row_wise_adagrad(0.1), 3), boxed),
}


def step(tx, params, state):
    updates, state = tx.update(params, state, params)
    return jax.tree.map(jnp.add, params, updates), state


def named(tree):
    """The arrays of a tree by the keys on their paths, as Orbax names them."""
    keys = lambda path: "|".join(jax.tree_util.keystr((k,), simple=True) for k in path)
    return {keys(path): np.asarray(a) for path, a in jax.tree_util.tree_leaves_with_path(tree)}


if __name__ == "__main__":
    arrays = {}
    for name, (make, params) in CASES.items():
        tx, x = make(), params()
        x, state = step(tx, *step(tx, x, tx.init(x)))
        found = {"params": x, "state": state}
        found["after"], _ = step(tx, x, state)
        arrays |= {f"{name}|{k}": a for k, a in named(found).items()}
    np.savez_compressed(sys.argv[1], **arrays)
