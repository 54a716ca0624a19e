"""Parameters, gradients and optimizers for the tests of tables that grow."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import optzoo
from optzoo.testing import samples

from ..sharded.cases import mesh_of

ROWS, MORE, WIDTH = 5, 8, 2


def rows_of(ids):
    """The rows of new ids."""
    return jnp.cos(ids[:, None] + jnp.arange(1.0, 1 + WIDTH)[None])


def params(rows=ROWS):
    """A table, and a parameter of its shape that is none."""
    table = lambda n: jnp.sin(jnp.arange(1.0, 1 + WIDTH * n)).reshape(n, WIDTH)
    emb = jnp.concatenate([table(ROWS), rows_of(jnp.arange(ROWS, MORE))])[:rows]
    return {"emb": emb, "mlp": {"w": table(ROWS), "b": jnp.ones(())}}


def gradients(seed, rows=ROWS, ids=(1, 2, 1), dense=False):
    """Rows for the table, some twice; or the same as an array."""
    draw = np.random.default_rng(seed).normal
    values = jnp.asarray(draw(size=(len(ids), WIDTH)), jnp.float32)
    emb = optzoo.SparseRows(jnp.array(ids), values, rows)
    w = jnp.asarray(draw(size=(ROWS, WIDTH)), jnp.float32)
    return {"emb": emb.to_dense() if dense else emb, "mlp": {"w": w, "b": jnp.ones(())}}


def trained(tx, rows=ROWS, steps=2, dense=False):
    """Parameters and state after some steps."""
    x, state = params(rows), tx.init(params(rows))
    for seed in range(steps):
        x, state = samples.step(tx, gradients(seed, rows, dense=dense), x, state)
    return x, state


def bits(a):
    """Of an array, so that zeros of both signs differ, and NaN is NaN."""
    a = np.asarray(a)
    return a.shape, str(a.dtype), a.tobytes()


def same(got, want):
    """Asserts that two trees are equal, bit by bit."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    paths = jax.tree_util.tree_leaves_with_path(got)
    for (path, a), b in zip(paths, jax.tree.leaves(want), strict=True):
        assert bits(a) == bits(b), (jax.tree_util.keystr(path), a, b)


def check_resized(before, after, fresh, kept):
    """Asserts that arrays of the table are old rows, then fresh ones, and others as they were.

    Args:
        before: parameters and state.
        after: the same, resized.
        fresh: new parameters, with the state of ``tx.init``.
        kept: the number of old rows.

    Returns:
        The number of arrays of the table.
    """
    assert samples.avals(after) == samples.avals(fresh)
    paths = jax.tree_util.tree_leaves_with_path(before)
    columns = jax.tree.leaves(after), jax.tree.leaves(fresh)
    resized = 0
    for (path, old), new, start in zip(paths, *columns, strict=True):
        name = jax.tree_util.keystr(path)
        if old.shape == new.shape:
            assert bits(new) == bits(old), name
            continue
        assert "emb" in name
        resized += 1
        assert bits(new[:kept]) == bits(old[:kept]), name
        assert bits(new[kept:]) == bits(start[kept:]), name
    return resized


def arrays_of_the_table(tx):
    """How many arrays have the rows of the table, with the table itself."""
    paths = jax.tree_util.tree_leaves_with_path(tx.init(params()))
    is_slot = lambda path, a: "emb" in jax.tree_util.keystr(path) and a.shape[:1] == (ROWS,)
    return 1 + sum(is_slot(path, a) for path, a in paths)


LAZY = lambda: optzoo.lazy_adam(0.1)
WRAPPED = {
    "chain": lambda: optax.chain(
        optzoo.clip_by_global_norm(1.0), LAZY(), optzoo.transforms.scale(1.0)
    ),
    "groups": lambda: optzoo.param_groups({"emb": LAZY(), "mlp/.*": optzoo.momentum(0.1, 0.9)}),
    "masked": lambda: optax.chain(
        optax.masked(LAZY(), {"emb": True, "mlp": False}),
        optax.masked(optax.sgd(0.1), {"emb": False, "mlp": True}),
    ),
    "moving_average": lambda: optzoo.moving_average(LAZY(), 0.9),
    "slots_dtype": lambda: optzoo.slots_dtype(LAZY(), "bfloat16"),
    "packed": lambda: optzoo.slots_dtype(LAZY(), "bfloat16", packed=True),
    "packed-float32": lambda: optzoo.slots_dtype(LAZY(), "float32", packed=True),
    "decoupled_weight_decay": lambda: optzoo.decoupled_weight_decay(
        LAZY(), weight_decay_per_step=0.1
    ),
    "variable_clipping": lambda: optzoo.variable_clipping(LAZY(), {"emb": (1,)}, 0.8),
    "cautious_weight_decay": lambda: optzoo.cautious_weight_decay(
        LAZY(), weight_decay_per_step=0.1
    ),
    "ema_nesterov": lambda: optzoo.ema_nesterov(LAZY(), 0.5),
    "hyperball": lambda: optzoo.hyperball(LAZY(), 0.1, {"emb": (1,)}),
    "ema_in_place": lambda: optzoo.interop.fbgemm.ema_in_place(LAZY(), 3),
    "ensemble": lambda: optzoo.interop.fbgemm.ensemble(LAZY(), 2, 3),
    "multitask": lambda: optzoo.multitask(LAZY()),
    "skip_spikes": lambda: optzoo.skip_spikes(LAZY(), on="norm"),
    "accumulate": lambda: optzoo.accumulate(LAZY(), 3),
    "accumulate-rows": lambda: optzoo.accumulate(LAZY(), 3, max_rows={"emb": 3}),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optzoo.lazy_adam)(0.1),
    "on_rows": lambda: optzoo.on_rows(optax.adam(0.1)),
    "elastic_average": lambda: optzoo.elastic_average(
        LAZY(), 1, axis_name=None, communication_period=2
    ),
    "drop_stale_gradient": lambda: optzoo.drop_stale_gradient(LAZY(), 0, axis_name=None),
    "sync_replicas": lambda: optzoo.sync_replicas(LAZY(), 1, axis_name=None),
    "diloco": lambda: optzoo.diloco(LAZY(), axis_name=None, communication_period=2),
}
OF_OPTAX = {
    "optax.adam": lambda: optax.adam(0.1),
    "optax.MultiSteps": lambda: optax.MultiSteps(optax.adam(0.1), 3).gradient_transformation(),
    "optax.multi_transform": lambda: optax.multi_transform(
        {"a": optax.adam(0.1), "b": optax.sgd(0.1)}, {"emb": "a", "mlp": "b"}
    ),
}
IN_LINES = {
    "plain": LAZY,
    "packed-float32": WRAPPED["packed-float32"],
    "accumulate-rows": WRAPPED["accumulate-rows"],
}


# Their state has arrays that depend on all rows of a table.
REFUSED = ["blocked_shampoo", "ggt", "shampoo", "soap"]
by_rows = pytest.mark.parametrize("name", sorted(optzoo.CATALOG.keys() - REFUSED))
DEFERRED = {
    "alone": lambda: optzoo.caught_up(optzoo.adam(0.1), mask="emb", horizon=4),
    "moving_average": lambda: optzoo.caught_up(
        optzoo.moving_average(optzoo.adam(0.1), 0.9), mask="emb", horizon=4
    ),
    "packed": lambda: optzoo.caught_up(
        optzoo.slots_dtype(optzoo.adam(0.1), "float32", packed=True), mask="emb", horizon=4
    ),
    "groups": lambda: optzoo.param_groups(
        {
            "emb": optzoo.caught_up(optzoo.adam(0.1), mask="emb", horizon=4),
            ".*": optzoo.momentum(0.1, 0.9),
        }
    ),
}


def loss(p, ids):
    return jnp.sum(jnp.cos(optzoo.lookup(p["emb"], ids))) + jnp.sum(p["mlp"]["w"] ** 2)


@functools.cache
def deferred(name):
    tx = DEFERRED[name]()
    step = optzoo.minimize(loss, tx)
    x, state = params(), tx.init(params())
    for ids in ([0, 1, 4], [2, 2, 0]):
        x, state, _ = step(x, state, jnp.array(ids))
    return tx, step, (x, state)


@functools.cache
def placed(old, dtype=jnp.float32):
    """Parameters and a state of lazy_adam, of which every element is another number."""
    mesh, tx = mesh_of(2), LAZY()
    specs = {"emb": old.spec, "mlp": PartitionSpec()}
    shapes = {"emb": (old.stored_rows, WIDTH), "mlp": (old.stored_rows, WIDTH)}
    x = {
        name: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, specs[name]))
        for name, shape in shapes.items()
    }
    state = jax.eval_shape(tx.init, x)
    places = jax.tree.map(lambda a: a.sharding, x), optzoo.state_sharding(tx, x)
    draw = np.random.default_rng(0)
    values = lambda a: jnp.asarray(draw.normal(size=a.shape) * 9, a.dtype)
    return tx, jax.device_put(jax.tree.map(values, (x, state)), places)
