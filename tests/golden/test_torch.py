"""What docs/from_torch.md says of torch, by its record; ``make_torch.py`` describes it."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optzoo
from optzoo.testing import samples

ARRAYS = dict(np.load(pathlib.Path(__file__).with_name("torch.npz")))
META = json.loads(str(ARRAYS.pop("meta")))
TABLE = ARRAYS["table"]

SAME = {
    "Adagrad": optzoo.adagrad_eps(0.1, eps=1e-10),
    "Adagrad, start": optzoo.adagrad_eps(0.1, eps=0.1, initial_accumulator_value=0.3),
    "Adagrad, lr_decay": optzoo.adagrad_eps(lambda count: 0.1 / (1 + 0.2 * count), eps=1e-10),
    "SGD": optzoo.gradient_descent(0.1),
    "SGD, momentum": optax.chain(optzoo.rows.densify(), optzoo.momentum(0.1, 0.9)),
    "SGD, nesterov": optax.chain(optzoo.rows.densify(), optzoo.momentum(0.1, 0.9, nesterov=True)),
    "SGD, weight_decay": optax.chain(optax.add_decayed_weights(0.2), optzoo.momentum(0.1, 0.9)),
    "Adam": optax.adam(0.1, eps=0.1),
    "Adam, weight_decay": optax.chain(optax.add_decayed_weights(0.2), optax.adam(0.1, eps=0.1)),
    "AdamW": optax.adamw(0.1, eps=0.1, weight_decay=0.01),
    "RMSprop": optax.rmsprop(0.1, 0.99, eps=0.1, eps_in_sqrt=False),
    "RMSprop, centered": optax.rmsprop(
        0.1, 0.99, eps=0.1, eps_in_sqrt=False, centered=True, momentum=0.9
    ),
    "Adadelta": optzoo.adadelta(0.5, b2=0.9, eps=0.1),
    "Adamax": optax.adamax(0.1, eps=0.1),
}
# The largest difference of a parameter over the largest distance that one has moved.
NEAR = {
    # Here the powers of the betas are float32, as in TensorFlow, and some schedules.
    "SparseAdam": (optzoo.lazy_adam(0.01), 1e-5),
    "SparseAdam, eps": (optzoo.lazy_adam(0.1, 0.5, 0.75, eps=0.1), 1e-7),
    "ASGD": (
        optax.chain(
            optax.add_decayed_weights(1e-4),
            optzoo.gradient_descent(lambda count: 0.1 / (1 + 1e-5 * count) ** 0.75),
        ),
        1e-7,
    ),
    "RAdam": (optax.radam(0.1), 1e-7),  # another place of epsilon, which is small
}
# And of what is not the same, the least.
OTHER = {
    "SparseAdam, eps": (optzoo.sparse_adamw(0.1, 0.5, 0.75, eps=0.1), 0.02),
    "SGD, momentum": (optzoo.momentum(0.1, 0.9), 0.1),
    "SGD, nesterov": (optzoo.momentum(0.1, 0.9, nesterov=True), 0.1),
    "Adagrad": (optzoo.adagrad(0.1), 0.1),
    "Adam": (optzoo.adam(0.1, eps=0.1), 0.1),
    "Adam, amsgrad": (optax.amsgrad(0.1, 0.9, 0.8, eps=0.1), 0.1),
    "RMSprop": (optzoo.rmsprop(0.1, 0.99, eps=0.1), 0.1),
    "Adamax": (optzoo.adamax(0.1, eps=0.1), 1e-5),
    "NAdam": (optax.nadam(0.1, eps=0.1), 0.1),
    "RAdam, eps": (optax.radam(0.1, eps=0.1), 0.01),
    "Rprop": (optax.rprop(0.1), 0.1),
}


def follow(tx, name):
    """The table after each step."""
    is_sparse = name in META["sparse"]
    factors = ARRAYS["sparse factors" if is_sparse else "dense factors"]

    def step(carry, inputs):
        (table, state), (ids, factors) = carry, inputs
        read = lambda table: optzoo.lookup(table, ids) if is_sparse else table
        loss = lambda table: jnp.sum(read(table) * factors)
        _, gradient = optzoo.value_and_grad(loss)(table)
        table, state = samples.step(tx, gradient, table, state)
        return (table, state), table

    return jax.lax.scan(step, (TABLE, tx.init(TABLE)), (ARRAYS["ids"], factors))[1]


def differences(cases):
    """For each case, the largest difference over the largest distance that a parameter moved."""
    paths = jax.jit(lambda: {name: follow(tx, name) for name, tx in cases.items()})()
    found = {}
    for name, path in paths.items():
        want = ARRAYS[f"{name}/table"]
        found[name] = np.max(np.abs(path - want)) / np.max(np.abs(want - TABLE))
    return found


def test_optimizers(x64):
    with x64(True):
        same = differences(SAME)
        near = differences({name: tx for name, (tx, _) in NEAR.items()})
        other = differences({name: tx for name, (tx, _) in OTHER.items()})
    assert max(same.values()) < 1e-14, same
    assert all(near[name] < most for name, (_, most) in NEAR.items()), near
    assert all(other[name] > least for name, (_, least) in OTHER.items()), other


def test_all_of_the_record_is_compared():
    assert {*META["sparse"], *META["dense"]} == SAME.keys() | NEAR.keys() | OTHER.keys()


def largest(table, ids, segments, number):
    """``mode="max"``, by what the page names."""
    rows = optzoo.lookup(table, ids)
    rows = jnp.where((ids == len(table))[:, None], -jnp.inf, rows)
    most = jax.ops.segment_max(rows, segments, number)
    return jnp.where(most == -jnp.inf, 0, most)


def bag(table, weights, kwargs, ids, offsets=None):
    """What torch's layer gives, by ``lookup_sparse``."""
    ids = jnp.where(ids == kwargs.get("padding_idx"), len(table), jnp.asarray(ids))
    segments = number = None
    if offsets is not None:
        number = len(offsets) - kwargs.get("include_last_offset", False)
        segments = jnp.searchsorted(offsets, jnp.arange(len(ids)), side="right") - 1
    if kwargs["mode"] == "max":
        if offsets is None:
            number, length = ids.shape
            ids, segments = ids.ravel(), jnp.repeat(jnp.arange(number), length)
        return largest(table, ids, segments, number)
    return optzoo.lookup_sparse(
        table, ids, segments, number, weights=weights, combiner=kwargs["mode"]
    )


def pooled():
    """For each case of a bag what was recorded of it."""
    found = {}
    for name, (kwargs, inputs) in META["bags"].items():
        given = {key: jnp.asarray(x) for key, x in inputs.items()}
        weights = given.pop("weights", None)

        def loss(table, weights, kwargs=kwargs, given=given):
            out = bag(table, weights, kwargs, **given)
            return jnp.sum(out * ARRAYS["bag factors"][: len(out)]), out

        argnums = (0,) if weights is None else (0, 1)
        (_, out), gradients = optzoo.value_and_grad(loss, argnums, has_aux=True)(TABLE, weights)
        assert isinstance(gradients[0], optzoo.SparseRows)
        found |= {f"{name}/out": out, f"{name}/table": gradients[0].to_dense()}
        if weights is not None:
            found[f"{name}/weights"] = gradients[1]
    return found


def test_bags(x64):
    with x64(True):
        got = jax.jit(pooled)()
    assert len(got) == 2 * len(META["bags"]) + 1
    for name, x in got.items():
        np.testing.assert_allclose(x, ARRAYS[name], rtol=1e-14, atol=1e-15, err_msg=name)


@pytest.mark.parametrize("read", [optzoo.lookup, optzoo.lookup_sparse])
def test_padding_by_another_number(read):
    """One way for all functions; without it -1 is an error, or NaN where it is traced."""
    table, ids = jnp.asarray(TABLE, jnp.float32), jnp.array([[-1, 2, -1]])
    with pytest.raises(IndexError, match=r"got -1: jnp.where\(ids < 0, 7, ids\)"):
        read(table, ids)
    traced = jax.jit(lambda ids: (read(table, ids), read(table, jnp.where(ids < 0, 7, ids))))
    with jax.debug_nans(False):
        unknown, padded = traced(ids)
    assert jnp.isnan(unknown).any()
    want = jnp.stack([jnp.zeros(3), table[2], jnp.zeros(3)])[None]
    np.testing.assert_array_equal(padded, want if read is optzoo.lookup else table[2:3])
