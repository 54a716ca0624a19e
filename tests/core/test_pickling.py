"""Transformations and steps in a pickle of cloudpickle, by which other processes get them."""

import copy
import functools
import pickle
import subprocess
import sys

import chex
import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import optzoo
from optzoo import SparseRows
from optzoo.core.rows import Shard
from optzoo.testing import samples
from optzoo.testing.samples import params, plain, row_grads

ACCUMULATED = {"table": 4}
WRAPPERS = {
    "moving_average": lambda tx: optzoo.moving_average(tx, 0.9),
    "variable_clipping": lambda tx: optzoo.variable_clipping(tx, {"table": (1,)}, 0.8),
    "decoupled_weight_decay": lambda tx: optzoo.decoupled_weight_decay(
        tx, weight_decay_per_step=0.1
    ),
    "cautious_weight_decay": lambda tx: optzoo.cautious_weight_decay(tx, weight_decay_per_step=0.1),
    "ema_nesterov": lambda tx: optzoo.ema_nesterov(tx, 0.5),
    "hyperball": lambda tx: optzoo.hyperball(tx, 0.1, {"table": (1,)}),
    "ema_in_place": lambda tx: optzoo.interop.fbgemm.ema_in_place(tx, 3),
    "ensemble": lambda tx: optzoo.interop.fbgemm.ensemble(tx, 2, 3),
    "multitask": optzoo.multitask,
    "skip_spikes": lambda tx: optzoo.skip_spikes(tx, on="norm"),
    "param_groups": lambda tx: optzoo.param_groups(
        {"table|one_row": tx, "0|1|other": optax.sgd(0.1)}
    ),
    "stacked": optzoo.stacked,
    "accumulate": lambda tx: optzoo.accumulate(tx, 2, max_rows=ACCUMULATED),
    "int8": lambda tx: optzoo.slots_dtype(tx, "int8"),
    "caught_up": lambda tx: optzoo.caught_up(optzoo.adam(0.1)),
    "on_rows": lambda tx: optzoo.on_rows(optax.adam(0.1)),
    "agn": lambda tx: optzoo.agn(tx, axis_name=None),
    "diloco": lambda tx: optzoo.diloco(tx, axis_name=None),
    "drop_stale_gradient": lambda tx: optzoo.drop_stale_gradient(tx, 0, axis_name=None),
    "elastic_average": lambda tx: optzoo.elastic_average(tx, 1, axis_name=None),
    "model_average": lambda tx: optzoo.model_average(tx, axis_name=None),
    "sync_replicas": lambda tx: optzoo.sync_replicas(tx, 1, axis_name=None),
    "master_weights": optzoo.master_weights,
}


def copied(x):
    return cloudpickle.loads(cloudpickle.dumps(x))


@pytest.mark.parametrize("name", [*optzoo.CATALOG, *WRAPPERS])
def test_transformations(name):
    """Before and after they are used."""
    if name in WRAPPERS:
        tx = WRAPPERS[name](optzoo.lazy_adam(0.1))
    else:
        tx = samples.make(optzoo.CATALOG[name])
    dtype = "bfloat16" if name == "master_weights" else "float32"
    x = {**params(), "other": jnp.ones(3)}  # of which there is a stack
    x = jax.tree.map(lambda a: a.astype(dtype), x)
    if name == "ema_in_place":
        del x["one_row"]  # its rows have no halves
    grads = row_grads(x)
    state, before = tx.init(x), copied(tx)
    with jax.disable_jit():
        want = plain(tx.update(grads, state, x))
        for other in (before, copied(tx)):
            chex.assert_trees_all_equal(plain(other.update(grads, state, x)), want)


@pytest.mark.unique
def test_rules_for_derivatives_that_were_traced():
    """They are parts of what a transformation does, and JAX's compiled functions have no pickle."""
    root = optzoo.core.numerics.sqrt
    want = jax.jit(jax.grad(root))(2.0)
    assert jax.jit(jax.grad(copied(root)))(2.0) == want == np.float32(0.5) / np.sqrt(np.float32(2))


def loss(p, ids):
    return jnp.sum(optzoo.lookup(p["table"], ids) ** 2) + jnp.sum(p["w"])


def start(tx):
    x = {"table": optzoo.rows.to_lines(jnp.ones((6, 2))), "w": jnp.ones(2)}
    return x, tx.init(x)


IDS = np.array([1, 3, 1])


def test_steps_also_in_another_process(tmp_path):
    """With a table in lines, whose class is in what a transformation remembers."""
    tx = optzoo.moving_average(optzoo.lazy_adam(0.1), 0.9)
    step = optzoo.minimize(loss, tx)
    want = jax.tree.leaves(step(*start(tx), IDS))
    chex.assert_trees_all_equal(jax.tree.leaves(copied(step)(*start(tx), IDS)), want)

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        run = functools.partial(lambda step, tx: step(*start(tx), IDS), step, tx)
        (tmp_path / "run").write_bytes(cloudpickle.dumps(run))
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    program = (
        "import pickle, sys, jax; run = pickle.load(open(sys.argv[1] + '/run', 'rb'));"
        "leaves = jax.device_get(jax.tree.leaves(run()));"
        "pickle.dump(leaves, open(sys.argv[1] + '/got', 'wb'))"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)
    got = pickle.loads((tmp_path / "got").read_bytes())
    chex.assert_trees_all_close(got, want, rtol=1e-6)


def test_nnx_steps():
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optzoo.adam(0.1), wrt=nnx.Param)
    step = optzoo.nnx_minimize(lambda model, x: jnp.sum(model(x) ** 2))
    first = step(model, optimizer, jnp.ones((1, 2)))
    assert copied(step)(model, optimizer, jnp.ones((1, 2))) < first


def test_states():
    """A state, with the ids of rows that an update has."""
    tx = optzoo.lazy_adam(0.1)
    state = tx.init(params())
    with jax.disable_jit():
        updates, state = tx.update(row_grads(params()), state, params())
    got = pickle.loads(pickle.dumps((updates, state)))
    chex.assert_trees_all_equal(plain(got), plain((updates, state)))
    assert isinstance(got[0]["table"], SparseRows)


@pytest.mark.parametrize("copied", [copied, copy.deepcopy])
def test_rows_of_a_shard(copied):
    """With what the shards have in common, by which norms are those of the whole gradient."""
    shard = Shard(("shard",), 10, False)
    rows = SparseRows(np.array([1, 2]), np.ones((2, 2)), 6, True, shard, np.float32(3))
    got = copied(rows)
    assert (got.shard, got.squares, got.coalesced, got.size) == (shard, 3, True, 20)
    np.testing.assert_array_equal(got.indices, [1, 2])
