"""Flax: train states, tables with sparse rows, sharded states, checkpoints."""

import functools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import optzoo
from optzoo.core.paths import path_name
from optzoo.interop.nnx import as_pure
from optzoo.state.sharding import state_sharding
from optzoo.testing import samples
from optzoo.wrappers.param_groups import param_groups

IDS = jnp.array([[1, 5, 1], [3, 5, 5]])  # of a table of 8 rows; 2 batches
Y = jnp.array([[1.0, -1.0, 0.5], [0.0, 2.0, 1.0]])
SEEN = np.isin(np.arange(8), IDS)


# The same model three times: in linen, in nnx, by hand.


class LinenRows(nn.Embed):
    """An embedding whose gradient is row-sparse."""

    def __call__(self, inputs):
        return optzoo.lookup(self.embedding, inputs)


class LinenModel(nn.Module):
    embed: type = LinenRows

    @nn.compact
    def __call__(self, ids):
        return nn.Dense(1, name="out")(self.embed(8, 2, name="embed")(ids))[..., 0]


class NnxRows(nnx.Embed):
    """An embedding whose gradient is row-sparse."""

    def __call__(self, inputs):
        return optzoo.lookup(self.embedding, inputs)


class NnxModel(nnx.Module):
    def __init__(self, rngs, embed=NnxRows):
        self.embed, self.out = embed(8, 2, rngs=rngs), nnx.Linear(2, 1, rngs=rngs)

    def __call__(self, ids):
        return self.out(self.embed(ids))[..., 0]


def by_hand(params, ids):
    rows = optzoo.lookup(params["embed"]["embedding"], ids)
    return (rows @ params["out"]["kernel"] + params["out"]["bias"][None])[..., 0]


def start():
    return {
        "embed": {"embedding": jnp.arange(16.0).reshape(8, 2) / 10},
        "out": {"kernel": jnp.array([[1.0], [-0.5]]), "bias": jnp.zeros(1)},
    }


def loss(model, params, ids, y):
    return jnp.mean((model(params, ids) - y) ** 2)


def make(rate=0.1):
    return param_groups(
        {"(.*/)?embed/.*": optzoo.lazy_adam(rate), "kernel|bias": optzoo.adam(rate)}
    )


def hand_loop(steps, tx=None, sparse=True):
    """Parameters and state after some steps from the start."""
    tx, params = tx or make(), start()
    differentiate = optzoo.value_and_grad if sparse else jax.value_and_grad

    @jax.jit
    def step(params, state, ids, y):
        _, grads = differentiate(functools.partial(loss, by_hand))(params, ids, y)
        return samples.step(tx, grads, params, state)

    state = tx.init(params)
    for i in range(steps):
        params, state = step(params, state, IDS[i % 2], Y[i % 2])
    return params, state


@functools.cache
def after(steps):
    return hand_loop(steps)


def close(got, want):
    chex.assert_trees_all_close(got, want, rtol=1e-5, atol=1e-6)


def same(got, want):
    """To the bit, whatever functions the train states hold."""
    chex.assert_trees_all_equal(*(jax.device_get(jax.tree.leaves(tree)) for tree in (got, want)))


# linen


def linen_state(tx=None, params=None):
    params = {"params": start() if params is None else params}
    return TrainState.create(apply_fn=LinenModel().apply, params=params, tx=tx or make())


@jax.jit
def linen_step(train, ids, y):
    of = optzoo.value_and_grad(functools.partial(loss, train.apply_fn))
    _, grads = of(train.params, ids, y)
    return train.apply_gradients(grads=grads)


def run(train, steps, first=0):
    for i in range(first, first + steps):
        train = linen_step(train, IDS[i % 2], Y[i % 2])
    return train


def test_linen_train_state():
    train = run(linen_state(), 3)
    close(train.params["params"], after(3)[0])
    close(*map(jax.tree.leaves, (train.opt_state, after(3)[1])))


def test_linen_rows_are_sparse():
    """The gradient is rows; rows that no batch touched are unchanged, their slots too."""
    train = linen_state()
    of = optzoo.value_and_grad(functools.partial(loss, train.apply_fn))
    _, grads = jax.jit(of)(train.params, IDS[0], Y[0])
    table = grads["params"]["embed"]["embedding"]
    assert isinstance(table, optzoo.SparseRows) and table.values.shape == (3, 2)
    train = run(train, 2)
    m = train.opt_state.inner_states["group_0"].inner_state[0].slots.m
    np.testing.assert_array_equal(m["params"]["embed"]["embedding"].any(axis=1), SEEN)
    moved = train.params["params"]["embed"]["embedding"] != start()["embed"]["embedding"]
    np.testing.assert_array_equal(moved.any(axis=1), SEEN)


def test_linen_rows_equal_the_usual_embedding():
    variables = {"params": start()}
    usual = LinenModel(nn.Embed)
    np.testing.assert_array_equal(LinenModel().apply(variables, IDS), usual.apply(variables, IDS))
    chex.assert_trees_all_equal_structs(
        LinenModel().init(jax.random.key(0), IDS), usual.init(jax.random.key(0), IDS)
    )


def test_minimize_on_linen_variables():
    tx, params = make(), {"params": jax.tree.map(jnp.array, start())}
    step = optzoo.minimize(functools.partial(loss, LinenModel().apply), tx)
    state = tx.init(params)
    for i in range(3):
        params, state, _ = step(params, state, IDS[i % 2], Y[i % 2])
    close(params["params"], after(3)[0])


# nnx


def nnx_model():
    model = NnxModel(nnx.Rngs(0))
    nnx.update(model, jax.tree.map(jnp.array, start()))
    return model


@nnx.jit
def nnx_step(model, optimizer, ids, y):
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    predict = lambda params, ids: nnx.merge(graphdef, params, rest, copy=True)(ids)
    _, grads = optzoo.value_and_grad(functools.partial(loss, predict))(params, ids, y)
    optimizer.update(model, grads)


def test_nnx_optimizer_with_rows():
    model = nnx_model()
    optimizer = nnx.Optimizer(model, make(), wrt=nnx.Param)
    for i in range(3):
        nnx_step(model, optimizer, IDS[i % 2], Y[i % 2])
    close(nnx.to_pure_dict(nnx.state(model, nnx.Param)), after(3)[0])
    m = optimizer.opt_state.inner_states["group_0"].inner_state[0].slots.m
    np.testing.assert_array_equal(m["embed"]["embedding"][...].any(axis=1), SEEN)


@pytest.mark.parametrize("array_of", [lambda v: v, lambda v: v[...]], ids=["variable", "array"])
def test_the_variable_or_its_array(array_of):
    graphdef, params = nnx.split(nnx_model().embed, nnx.Param)

    def loss(params):
        return jnp.sum(optzoo.lookup(array_of(nnx.merge(graphdef, params).embedding), IDS) ** 2)

    _, grads = optzoo.value_and_grad(loss, sparse="require")(params)
    [table] = jax.tree.leaves(grads, is_leaf=lambda g: isinstance(g, optzoo.SparseRows))
    np.testing.assert_allclose(table.to_dense()[1], 4 * start()["embed"]["embedding"][1])


def test_linen_boxes():
    """Such as those of ``nn.with_partitioning``."""
    box = nn.Partitioned(start()["embed"]["embedding"], names=("rows", None))
    loss = lambda box: jnp.sum(optzoo.lookup(box, IDS) ** 2)
    _, grads = optzoo.value_and_grad(loss, sparse="require")(box)
    assert isinstance(grads.value, optzoo.SparseRows)
    np.testing.assert_allclose(grads.value.to_dense(), jax.grad(loss)(box).value, rtol=1e-6)


def test_nnx_optimizer_with_the_usual_gradients():
    """Of ``nnx.grad``, dense ones."""
    model, tx = nnx_model(), optzoo.adam(0.1)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, ids, y):
        optimizer.update(model, nnx.grad(lambda model: jnp.mean((model(ids) - y) ** 2))(model))

    for i in range(3):
        step(model, optimizer, IDS[i % 2], Y[i % 2])
    want, _ = hand_loop(3, tx, sparse=False)
    close(nnx.to_pure_dict(nnx.state(model, nnx.Param)), want)


def test_nnx_model_with_other_variables():
    """What the merged copy of a model changes comes back as ``aux``."""

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.embed, self.norm = NnxRows(8, 2, rngs=rngs), nnx.BatchNorm(2, rngs=rngs)

        def __call__(self, ids):
            return self.norm(self.embed(ids)).sum(axis=-1)

    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optzoo.lazy_adam(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, ids, y):
        graphdef, params, rest = nnx.split(model, nnx.Param, ...)

        def loss(params):
            model = nnx.merge(graphdef, params, rest, copy=True)
            value = jnp.mean((model(ids) - y) ** 2)
            return value, nnx.state(model, nnx.Not(nnx.Param))

        (value, others), grads = optzoo.value_and_grad(loss, has_aux=True)(params)
        optimizer.update(model, grads)
        nnx.update(model, others)
        return value

    before = jnp.array(model.embed.embedding[...])
    with jax.numpy_rank_promotion("allow"):  # for Flax' own
        step(model, optimizer, IDS[0], Y[0])
    np.testing.assert_allclose(
        model.norm.mean[...], 0.01 * before[IDS[0]].mean(axis=0), rtol=1e-4, atol=1e-7
    )
    moved = (model.embed.embedding[...] != before).any(axis=1)
    np.testing.assert_array_equal(moved, np.isin(np.arange(8), IDS[0]))


def test_minimize_on_an_nnx_state():
    tx, model = make(), nnx_model()
    graphdef, params = nnx.split(model, nnx.Param)
    params = as_pure(params)
    step = optzoo.minimize(functools.partial(loss, lambda p, i: nnx.merge(graphdef, p)(i)), tx)
    state = tx.init(params)
    for i in range(3):
        params, state, _ = step(params, state, IDS[i % 2], Y[i % 2])
    nnx.update(model, params)
    close(nnx.to_pure_dict(nnx.state(model, nnx.Param)), after(3)[0])


# What is told by the names of parameters, and states with several arrays for one of them.

NAMED = {
    "accumulate": lambda: optzoo.accumulate(
        optzoo.lazy_adam(0.1), 2, max_rows={"embed/embedding": 3}
    ),
    "variable_clipping": lambda: optzoo.variable_clipping(
        optzoo.lazy_adam(0.1), {"embed/embedding": (1,)}, 0.5
    ),
    "hyperball": lambda: optzoo.hyperball(optzoo.lazy_adam(0.1), 0.1, {"embed/embedding": (1,)}),
    "mask of a decay": lambda: optzoo.cautious_weight_decay(
        optzoo.lazy_adam(0.1), weight_decay_per_step=0.1, mask=("embed/.*", "bias")
    ),
    "mask of slots": lambda: optzoo.ema_nesterov(
        optzoo.lazy_adam(0.1), 0.5, mask=("embed/.*", "bias")
    ),
    "mask": lambda: optzoo.decoupled_weight_decay(
        optzoo.lazy_adam(0.1), weight_decay_per_step=0.1, mask=("embed/.*", "bias")
    ),
    "skip": lambda: optzoo.lars(0.1, skip=("out/bias",)),
    "stacked": lambda: optzoo.param_groups(
        {"embed/.*": optzoo.lazy_adam(0.1), ".*": optzoo.stacked(optzoo.adam(0.1), "out/.*")}
    ),
    "multitask": lambda: optzoo.multitask(optzoo.shampoo(0.1)),
    "soap": lambda: optzoo.soap(0.1),
}


@pytest.mark.parametrize("name", NAMED)
def test_nnx_trains_as_a_dict_does(name):
    """``nnx.Optimizer`` gives ``init`` its variables and ``update`` their arrays."""
    tx, model = NAMED[name](), nnx_model()
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    for i in range(3):
        nnx_step(model, optimizer, IDS[i % 2], Y[i % 2])
    params, state = hand_loop(3, tx)
    close(nnx.to_pure_dict(nnx.state(model, nnx.Param)), params)
    close(*map(jax.tree.leaves, (as_pure(optimizer.opt_state), state)))


def test_nnx_stacks():
    """A stack, in the place of its first member, is no variable."""

    class Two(nnx.Module):
        def __init__(self):
            self.a, self.b = nnx.Param(jnp.ones(2)), nnx.Param(jnp.arange(2.0))

    tx, model, x = optzoo.stacked(optzoo.adam(0.1)), Two(), {"a": jnp.ones(2), "b": jnp.arange(2.0)}
    optimizer, state = nnx.Optimizer(model, tx, wrt=nnx.Param), tx.init(x)
    assert len(jax.tree.leaves(state[0].slots.m)) == 1
    for _ in range(2):
        optimizer.update(model, nnx.grad(lambda m: jnp.sum(m.a[...] ** 2 + 3 * m.b[...]))(model))
        updates, state = tx.update({"a": 2 * x["a"], "b": jnp.full(2, 3.0)}, state, x)
        x = optax.apply_updates(x, updates)
    close(nnx.to_pure_dict(nnx.state(model, nnx.Param)), x)
    of_b = lambda state: optzoo.get_slot(state, "m")["b"]
    close(of_b(as_pure(optimizer.opt_state)), of_b(state))


def test_nnx_deferred_rows():
    """``catch_up`` takes the names of the tables."""
    tx, model = optzoo.caught_up(optzoo.adam(0.1), mask="embed/.*"), nnx_model()
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, ids, y):
        params, state = map(as_pure, (nnx.state(model, nnx.Param), optimizer.opt_state))
        params, state = optzoo.rows.catch_up(params, state, {"embed/embedding": ids})
        nnx.update(model, params)
        nnx.update(optimizer.opt_state, nnx.state(state))
        nnx_step(model, optimizer, ids, y)

    for i in range(3):
        step(model, optimizer, IDS[i % 2], Y[i % 2])
    params, state = map(as_pure, (nnx.state(model, nnx.Param), optimizer.opt_state))
    got = nnx.to_pure_dict(optzoo.eval_params(params, state))
    close(got, hand_loop(3, optzoo.adam(0.1), sparse=False)[0])


def test_nnx_tables_sharded_by_rows():
    graphdef, params = nnx.split(nnx_model(), nnx.Param)
    mesh = Mesh(np.array(jax.devices()[:1]), ("shard",))
    tables = {"embed/embedding": optzoo.sharded.RowSharding(8, 1, multiple=1)}
    tx, predict = optzoo.lazy_adam(0.1), lambda params, ids: nnx.merge(graphdef, params)(ids)
    step = optzoo.sharded_minimize(functools.partial(loss, predict), tx, mesh, tables)
    described = optzoo.describe(tx, params, tables=tables, ids={"embed/embedding": 3}).tables
    assert [(t.parameter, t.kept) for t in described] == [("embed/embedding", 3 * 64)]
    params, _, _ = step(params, tx.init(params), IDS[0], Y[0])
    close(nnx.to_pure_dict(params), hand_loop(1, tx)[0])


@pytest.mark.parametrize("name", ["stacked", "multitask"])
def test_names_of_nnx_are_those_of_a_dict(name):
    """In the variables that ``init`` sees and in the state that it makes."""
    tx, x = NAMED[name](), nnx.state(nnx_model(), nnx.Param)
    opt_state, state = nnx.Optimizer(nnx_model(), tx, wrt=nnx.Param).opt_state, tx.init(start())
    assert optzoo.slot_names(opt_state) == optzoo.slot_names(state)
    for slot in optzoo.slot_names(state):
        names_of = lambda s, slot=slot: names(optzoo.get_slot(s, slot))
        assert names_of(opt_state) == names_of(state)
    assert optzoo.describe(tx, x).slots == optzoo.describe(tx, start()).slots
    optimizers = {"embed/.*": "Embed", "out/.*": "Out"} if name == "stacked" else "Shampoo"
    variables = lambda *of: sorted(optzoo.interop.tf1.tf1_variables(*of, optimizer_name=optimizers))
    assert variables(x, opt_state) == variables(start(), state)


def names(tree):
    return [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def test_names_in_messages():
    """Of rows, of masks, of NaN: what an error calls a parameter is what a pattern matches."""
    x = nnx.state(nnx_model(), nnx.Param)
    known = r"\['embed/embedding', 'out/bias', 'out/kernel'\]"
    with pytest.raises(ValueError, match=known):
        optzoo.accumulate(optzoo.lazy_adam(0.1), 2, max_rows={"embed": 3}).init(x)
    clip = optzoo.variable_clipping(optzoo.adam(0.1), {"embed": (1,)}, 1.0)
    with pytest.raises(ValueError, match=known):
        clip.update(x, clip.init(x), x)
    with pytest.raises(ValueError, match=known):
        optzoo.lars(0.1, skip="norm").update(x, optzoo.lars(0.1).init(x), x)


def test_scalars_of_an_nnx_state_are_no_slots():
    """A variable around a scalar is none, as the scalar is none."""
    tx = optax.contrib.schedule_free_adamw(0.1)
    optimizer = nnx.Optimizer(nnx_model(), tx, wrt=nnx.Param)
    assert optzoo.slot_names(optimizer.opt_state) == optzoo.slot_names(tx.init(start()))


def test_a_state_of_nnx_variables_is_sharded_as_they_are(sharded):
    """Also where the state has arrays without variables."""
    of_params = lambda x: [s.spec for s in jax.tree.leaves(optzoo.state_sharding(tx, x))]
    tx = optzoo.accumulate(optzoo.lazy_adam(0.1), 2, max_rows={"embedding": 3})
    x = sharded.params["params"]
    assert of_params(nnx.State(jax.tree.map(nnx.Param, x))) == of_params(x)
    assert of_params(x).count(PartitionSpec("d")) == 2


# Sharded


def sharding_of(path, mesh):
    is_table = "embedding" in jax.tree_util.keystr(path)
    return NamedSharding(mesh, PartitionSpec("d") if is_table else PartitionSpec())


@pytest.fixture
def sharded():
    """A train state made where it belongs: every device has a row of the table and its slots."""
    mesh = Mesh(np.array(jax.devices()), ("d",))
    place = lambda path, x: jax.device_put(x, sharding_of(path, mesh))
    params = jax.tree_util.tree_map_with_path(place, {"params": start()})
    tx = make()
    state = jax.jit(tx.init, out_shardings=state_sharding(tx, params))(params)
    step = jax.device_put(jnp.zeros([], jnp.int32), NamedSharding(mesh, PartitionSpec()))
    return TrainState(step, LinenModel().apply, params, tx, state)


def test_sharded_train_state(sharded):
    shardings = lambda train: [x.sharding for x in jax.tree.leaves(train)]
    assert {len(x.sharding.device_set) for x in jax.tree.leaves(sharded)} == {8}
    parts = [x.addressable_shards[0].data.shape for x in jax.tree.leaves(sharded) if x.ndim == 2]
    assert parts.count((1, 2)) == 3  # the table, m and v
    pinned = jax.jit(linen_step, out_shardings=jax.tree.map(lambda x: x.sharding, sharded))
    train = sharded
    for i in range(3):
        train = pinned(train, IDS[i % 2], Y[i % 2])
    close(train.params["params"], after(3)[0])
    assert shardings(train) == shardings(sharded)


# Checkpoints


def abstract(tree):
    """Its shapes, dtypes and shardings."""
    return jax.tree.map(ocp.utils.to_shape_dtype_struct, tree)


def schedule(rate):
    """What ``rate`` is, until step 4; a tenth from there on."""
    return optax.piecewise_constant_schedule(rate, {4: 0.1})


def test_standard_checkpointer_goes_on(tmp_path):
    train = run(linen_state(), 3)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "train", train)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "train", jax.eval_shape(linen_state))
    same(restored, train)
    same(run(restored, 3, first=3), run(train, 3, first=3))


def test_checkpoint_manager_goes_on_with_a_schedule(tmp_path):
    """As if the rate had been the schedule from the start: the state does not know the rate."""
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    with ocp.CheckpointManager(tmp_path, options=options) as manager:
        train = linen_state()
        for i in range(3):
            train = run(train, 1, first=i)
            manager.save(i + 1, args=ocp.args.StandardSave(train))
        manager.wait_until_finished()
        assert manager.all_steps() == [2, 3]
        target = jax.eval_shape(functools.partial(linen_state, make(schedule(0.1))))
        restored = manager.restore(manager.latest_step(), args=ocp.args.StandardRestore(target))
    got = run(restored, 3, first=3)
    scheduled = run(linen_state(make(schedule(0.1))), 6)
    close(got.params, scheduled.params)
    assert not np.allclose(
        got.params["params"]["out"]["kernel"],
        run(train, 3, first=3).params["params"]["out"]["kernel"],
    )


def test_restore_to_where_it_belongs(sharded, tmp_path):
    """To the devices, from a state that was on one of them."""
    train = run(linen_state(), 3)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "train", train)
        checkpointer.wait_until_finished()
        params = abstract(sharded.params)
        place = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        state = jax.eval_shape(sharded.tx.init, params)
        state = jax.tree.map(place, state, state_sharding(sharded.tx, params))
        target = TrainState(abstract(sharded.step), sharded.apply_fn, params, sharded.tx, state)
        restored = checkpointer.restore(tmp_path / "train", target)
    same(restored, train)
    for got, want in zip(jax.tree.leaves(restored), jax.tree.leaves(sharded), strict=True):
        assert got.sharding == want.sharding


def test_nnx_checkpoint_goes_on_with_a_schedule(tmp_path):
    def steps(model, optimizer, first, number):
        for i in range(first, first + number):
            nnx_step(model, optimizer, IDS[i % 2], Y[i % 2])

    def new(rate):
        model = nnx_model()
        return model, nnx.Optimizer(model, make(rate), wrt=nnx.Param)

    pair = new(0.1)
    steps(*pair, 0, 3)
    pair_of_schedule = new(schedule(0.1))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "pair", nnx.state(pair))
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "pair", abstract(nnx.state(pair_of_schedule)))
    nnx.update(pair_of_schedule, restored)
    chex.assert_trees_all_equal(nnx.state(pair_of_schedule), nnx.state(pair))
    steps(*pair_of_schedule, 3, 3)
    want, _ = hand_loop(6, make(schedule(0.1)))
    close(nnx.to_pure_dict(nnx.state(pair_of_schedule[0], nnx.Param)), want)
