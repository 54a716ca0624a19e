"""Optimizers of Keras: the values of ``model.fit``, and the rules of every transformation."""

import contextlib
import functools
import sys
import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import optzoo
from optzoo.interop.keras import keras_optimizer
from optzoo.state.sharding import state_sharding
from optzoo.testing.samples import avals, dense_grads, params, row_grads, step, step_of, to_dense

from ..selection import chosen_first

with warnings.catch_warnings():  # of what Keras imports
    warnings.simplefilter("ignore")
    import keras

K, S = keras.optimizers, keras.optimizers.schedules
STEPS, BATCH = 5, 4
X, Y = np.random.default_rng(0).normal(size=(2, STEPS * BATCH, 3)).astype(np.float32)
Y = Y[:, :1]

BUILT_IN = {
    "Adadelta": lambda: K.Adadelta(1.0),
    "Adafactor": lambda: K.Adafactor(0.1),
    "Adagrad": lambda: K.Adagrad(0.1),
    "Adam": lambda: K.Adam(0.1),
    "AdamW": lambda: K.AdamW(0.1, weight_decay=0.1),
    "Adamax": lambda: K.Adamax(0.1),
    "Ftrl": lambda: K.Ftrl(0.1, l1_regularization_strength=0.01, l2_regularization_strength=0.1),
    "Lamb": lambda: K.Lamb(0.1),
    "Lion": lambda: K.Lion(0.01),
    "LossScaleOptimizer": lambda: K.LossScaleOptimizer(K.SGD(0.1, 0.9), dynamic_growth_steps=2),
    "Muon": lambda: K.Muon(0.1, exclude_layers=["out"]),
    "Nadam": lambda: K.Nadam(0.1),
    "RMSprop": lambda: K.RMSprop(0.1),
    "SGD": lambda: K.SGD(0.1),
    "ScheduleFreeAdamW": lambda: K.ScheduleFreeAdamW(0.1, warmup_steps=3),
}
if hasattr(K, "MultiOptimizer"):  # from Keras 3.15 on
    BUILT_IN["MultiOptimizer"] = lambda: K.MultiOptimizer(
        K.OptimizerMap(K.SGD(0.1), {".*kernel": K.Nadam(0.1), ".*out/bias": K.Adam(0.1)})
    )
SETTINGS = {
    "Adam amsgrad": lambda: K.Adam(0.1, amsgrad=True),
    "RMSprop centered": lambda: K.RMSprop(0.1, momentum=0.9, centered=True),
    "SGD momentum": lambda: K.SGD(0.1, momentum=0.9),
    "SGD nesterov": lambda: K.SGD(0.1, momentum=0.9, nesterov=True),
    "clipnorm": lambda: K.SGD(0.1, clipnorm=0.1),
    "clipvalue": lambda: K.SGD(0.1, clipvalue=0.1),
    "global_clipnorm": lambda: K.SGD(0.1, global_clipnorm=0.1),
    "gradient_accumulation_steps": lambda: K.Adam(0.1, gradient_accumulation_steps=2),
    "loss_scale_factor": lambda: K.SGD(0.1, loss_scale_factor=8.0),
    "overflow": lambda: K.LossScaleOptimizer(K.Adam(0.1), initial_scale=3e38),
    "use_ema": lambda: K.Adam(0.1, use_ema=True, ema_momentum=0.5),
    "use_ema, overwriting": lambda: K.SGD(0.1, use_ema=True, ema_overwrite_frequency=2),
    "weight_decay": lambda: without_biases(K.Adam(0.1, weight_decay=0.5)),
}
SCHEDULES = {
    "CosineDecay": lambda: S.CosineDecay(0.1, 4, warmup_target=0.3, warmup_steps=2),
    "CosineDecayRestarts": lambda: S.CosineDecayRestarts(0.1, 2),
    "ExponentialDecay": lambda: S.ExponentialDecay(0.1, 2, 0.5),
    "InverseTimeDecay": lambda: S.InverseTimeDecay(0.1, 2, 0.5),
    "PiecewiseConstantDecay": lambda: S.PiecewiseConstantDecay([1, 3], [0.1, 0.3, 0.05]),
    "PolynomialDecay": lambda: S.PolynomialDecay(0.1, 4, power=2.0),
}
SCHEDULED = {name: lambda make=make: K.SGD(make(), 0.9) for name, make in SCHEDULES.items()}
CASES = BUILT_IN | SETTINGS | SCHEDULED


def without_biases(optimizer):
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


def public_classes(module, base):
    kinds = [v for v in vars(module).values() if isinstance(v, type) and issubclass(v, base)]
    return {kind.__name__ for kind in kinds if kind is not base}


def test_all_built_in_optimizers_and_schedules_are_tried():
    assert public_classes(K, K.Optimizer) == set(BUILT_IN)
    assert public_classes(S, S.LearningRateSchedule) == set(SCHEDULES)


@contextlib.contextmanager
def keras_alone():
    """Keras relies on what is forbidden here."""
    with jax.numpy_rank_promotion("allow"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def weights(net):
    return {layer.name: {v.name: np.array(v.value) for v in layer.weights} for layer in net.layers}


@functools.cache
def model():
    """Also its loss as a function of its variables, and these at the start."""
    with keras_alone():
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Dense(4, "tanh", name="hidden"), keras.layers.Dense(1, name="out")]
        net = keras.Sequential([keras.Input((3,)), *layers])

    def loss(params, x, y):
        hidden = jnp.tanh(x @ params["hidden"]["kernel"] + params["hidden"]["bias"][None])
        out = hidden @ params["out"]["kernel"] + params["out"]["bias"][None]
        return jnp.mean((out - y) ** 2)

    return net, weights(net), loss


def fit(optimizer):
    """What Keras' own training makes of the variables and of the optimizer."""
    net, start, _ = model()
    with keras_alone():
        for layer in net.layers:
            for v in layer.weights:
                v.assign(start[layer.name][v.name])
        net.compile(optimizer=optimizer, loss="mse")
        net.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0)
    return weights(net)


def train(optimizer):
    """The same by the transformation."""
    _, start, loss = model()
    tx = keras_optimizer(optimizer)

    def one(carry, batch):
        params, state = carry
        factor = state.variables.get("dynamic_scale", optimizer.loss_scale_factor or 1.0)
        scaled = lambda params: factor * loss(params, *batch)
        return step(tx, jax.grad(scaled)(params), params, state), None

    @jax.jit
    def run(params):
        batches = X.reshape(STEPS, BATCH, 3), Y.reshape(STEPS, BATCH, 1)
        return jax.lax.scan(one, (params, tx.init(params)), batches)[0]

    params, state = run(start)
    return state.slots.get("model_variables_moving_average", params), state


def worst(got, want):
    error = lambda a, b: np.max(np.abs(a - b)) / max(np.max(np.abs(b)), 1e-30)
    return max(jax.tree.leaves(jax.tree.map(error, jax.device_get(got), want)))


@pytest.mark.parametrize("name", chosen_first(CASES, [*BUILT_IN, "weight_decay"]))
def test_equals_fit(name):
    theirs, ours = CASES[name](), CASES[name]()
    want = fit(theirs)
    got, state = train(ours)
    chex.assert_trees_all_equal_structs(jax.tree.map(np.asarray, got), want)
    assert worst(got, want) < 2e-6
    assert worst(want, model()[1]) > 1e-3  # it did move
    for name in state.variables.keys() & {"dynamic_scale", "step_counter"}:
        assert np.array(getattr(theirs, name).value) == state.variables[name]
    assert int(theirs._iterations) == state.variables["iterations"]
    assert not ours.built and int(ours._iterations) == 0  # it is a template only


# The rules of a transformation

ALL_OF_THEM = pytest.mark.parametrize("name", BUILT_IN)


@ALL_OF_THEM
def test_init(name):
    """Concrete and abstract, of a state that maps over its parameters."""
    tx, x = keras_optimizer(BUILT_IN[name]()), params()
    state = tx.init(x)
    chex.assert_trees_all_equal_shapes_and_dtypes(jax.eval_shape(tx.init, x), state)
    chex.assert_trees_all_equal_structs(tx.init(jax.eval_shape(lambda: x)), state)
    slots = optax.tree.map_params(tx.init, lambda a: a, state, transform_non_params=lambda _: None)
    assert len(jax.tree.leaves(slots)) == len(jax.tree.leaves(state.slots))


def test_states_are_equal_before_and_after():
    tx, x = keras_optimizer(K.Nadam(use_ema=True, gradient_accumulation_steps=2)), params()
    state = tx.init(x)
    one = jax.jit(step_of(tx), donate_argnums=(0, 1))
    grads, before = dense_grads(x), avals(state)
    for _ in range(2):
        x, state = one(x, state, grads)
    assert one._cache_size() == 1 and avals(state) == before
    assert state.variables["iterations"] == 2
    tx.init(params())  # the donated state was not the pattern's own


def test_slots_by_name():
    x = {"a": {"kernel": jnp.ones((2, 3))}, "b": jnp.ones(2)}
    state = keras_optimizer(K.Muon()).init(x)
    assert state.slots["momentums"]["a"]["kernel"].shape == (2, 3)
    assert optzoo.get_slot((state,), "momentums") is state.slots["momentums"]
    assert state.slots["adam_velocities"]["a"]["kernel"] == optax.MaskedNode()
    assert state.slots["adam_velocities"]["b"].shape == (2,)


def test_by_name_with_all_arguments():
    theirs = keras.optimizers.Nadam(0.1, beta_1=0.5, beta_2=0.7, epsilon=0.1)
    ours = optzoo.create("nadam_keras", learning_rate=0.1, b1=0.5, b2=0.7, eps=0.1)
    x = params()

    def two_steps(tx):
        moved, state = step(tx, dense_grads(x), x)
        return step(tx, dense_grads(x), moved, state)[0]

    chex.assert_trees_all_equal(two_steps(ours), two_steps(keras_optimizer(theirs)))


def test_a_rate_is_no_state():
    trees = [keras_optimizer(K.Adam(rate)).init(params()) for rate in (0.1, S.CosineDecay(1.0, 9))]
    chex.assert_trees_all_equal(*trees)


def test_a_schedule_of_optax():
    """And a function that no config can hold."""
    x, at = {"w": jnp.zeros(2)}, optax.exponential_decay(0.5, 1, 0.5)
    ones = jax.tree.map(jnp.ones_like, x)
    tx = keras_optimizer(K.SGD(eval("lambda step: 2 * at(step) / 2", {"at": at})))
    state = tx.init(x)
    for rate in (0.5, 0.25):
        updates, state = tx.update(ones, state, x)
        np.testing.assert_allclose(updates["w"], -rate)
    tx = keras_optimizer(K.SGD(lambda step: jnp.ones(2)))
    with pytest.raises(ValueError, match="the schedule of learning_rate must return a scalar"):
        tx.update(ones, tx.init(x), x)


@pytest.mark.parametrize("rate", [0.5, S.ExponentialDecay(0.5, 1, 0.1), lambda: 0.5])
def test_the_rate_of_one_update(rate):
    tx, x = keras_optimizer(K.SGD(rate, 0.9)), params()
    want, after = keras_optimizer(K.SGD(0.01, 0.9)).update(dense_grads(x), tx.init(x), x)
    got, state = tx.update(dense_grads(x), tx.init(x), x, learning_rate=0.01)
    chex.assert_trees_all_equal((got, state), (want, after))
    as_usual, _ = tx.update(dense_grads(x), tx.init(x), x)
    assert worst(as_usual, jax.device_get(got)) > 0.1


def test_missing_gradients():
    tx, x = keras_optimizer(K.AdamW(0.1, weight_decay=0.1)), params()
    state = tx.init(x)
    grads = {**dense_grads(x), "table": None}
    updates, new = tx.update(grads, state, x)
    assert updates["table"] is None and not new.slots["momentums"]["table"].any()
    rest = {k: v for k, v in x.items() if k != "table"}
    alone, _ = tx.update({k: grads[k] for k in rest}, tx.init(rest), rest)
    chex.assert_trees_all_equal({k: updates[k] for k in rest}, alone)
    nothing = jax.tree.map(lambda _: None, x)
    chex.assert_trees_all_equal(tx.update(nothing, state, x), (nothing, state))


def test_rows_count_as_dense():
    tx, x = keras_optimizer(K.Adam(0.1)), params()
    got = step(tx, row_grads(x), x)
    chex.assert_trees_all_equal(got, step(tx, to_dense(row_grads(x)), x))


def test_on_rows_makes_it_lazy():
    table = jnp.arange(12.0).reshape(6, 2)
    rows = optzoo.SparseRows(jnp.array([4, 1]), jnp.ones((2, 2)), 6)
    tx = optzoo.on_rows(keras_optimizer(K.Adam(0.1)))
    updates, state = tx.update(rows, tx.init(table), table)
    assert isinstance(updates, optzoo.SparseRows)
    dense, _ = keras_optimizer(K.Adam(0.1)).update(rows, tx.init(table), table)
    np.testing.assert_allclose(updates.to_dense(), dense, rtol=1e-6)
    np.testing.assert_array_equal(state.slots["momentums"].any(axis=1), [0, 1, 0, 0, 1, 0])


def test_within_others():
    """Chains, masks, vmap, 16 bits, sharded parameters, a bare array."""
    x, tx = params(), keras_optimizer(K.RMSprop(0.1, momentum=0.9))
    chained = optax.chain(optax.clip(0.1), tx)
    updates, _ = chained.update(dense_grads(x), chained.init(x), x)
    want, _ = tx.update(jax.tree.map(lambda g: g.clip(-0.1, 0.1), dense_grads(x)), tx.init(x), x)
    chex.assert_trees_all_close(updates, want, rtol=1e-6)

    masked = optax.masked(tx, jax.tree.map(lambda a: a.ndim == 2, x))
    updates, _ = masked.update(dense_grads(x), masked.init(x), x)
    alone, _ = tx.update(dense_grads(x)["table"], tx.init(x["table"]), x["table"])
    np.testing.assert_allclose(updates["table"], alone, rtol=1e-6)

    many = jax.tree.map(lambda a: jnp.stack([a, 2 * a]), (x, dense_grads(x)))
    lanes, _ = jax.vmap(lambda x, g: tx.update(g, tx.init(x), x))(*many)
    chex.assert_trees_all_close(
        jax.tree.map(lambda a: a[0], lanes), tx.update(dense_grads(x), tx.init(x), x)[0], rtol=1e-6
    )

    half = {"w": jnp.ones((3, 2), jnp.bfloat16)}
    updates, state = tx.update(half, tx.init(half), half)
    assert updates["w"].dtype == state.slots["velocities"]["w"].dtype == jnp.bfloat16

    mesh = Mesh(np.array(jax.devices()), ("d",))
    sharded = jax.device_put({"w": jnp.ones((16, 4))}, NamedSharding(mesh, PartitionSpec("d")))
    state = tx.init(sharded)
    assert state.slots["velocities"]["w"].sharding == sharded["w"].sharding
    assert state_sharding(tx, sharded).slots["velocities"]["w"] == sharded["w"].sharding
    _, state = jax.jit(tx.update)(sharded, state, sharded)
    assert state.slots["velocities"]["w"].sharding == sharded["w"].sharding


def test_orbax_round_trip(tmp_path):
    x, tx = params(), keras_optimizer(K.Nadam(0.1))
    _, state = step(tx, dense_grads(x), x)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        target = jax.eval_shape(keras_optimizer(K.Nadam(S.CosineDecay(0.1, 9))).init, x)
        restored = checkpointer.restore(tmp_path / "state", target)
    chex.assert_trees_all_equal(restored, state)


@keras.saving.register_keras_serializable("optzoo_tests")
class Own(K.Optimizer):
    """Of your own: slots in a list, other variables in a dict, a setting in the config."""

    def __init__(self, learning_rate=0.1, power=1.0, **kwargs):
        super().__init__(learning_rate, **kwargs)
        self.power = power

    def build(self, variables):
        super().build(variables)
        self.sums = [self.add_variable_from_reference(v, "sum") for v in variables]
        self.numbers = {"updates": self.add_variable((), name="updates")}

    def update_step(self, gradient, variable, learning_rate):
        total = self.sums[self._get_variable_index(variable)]
        self.assign_add(total, gradient)
        self.assign_add(self.numbers["updates"], 1.0)
        self.assign_sub(variable, learning_rate * self.power * total)

    def get_config(self):
        return {**super().get_config(), "power": self.power}


def test_an_optimizer_of_ones_own():
    tx, x = keras_optimizer(Own(0.1, power=2.0)), params()
    state = tx.init(x)
    for _ in range(2):
        updates, state = tx.update(dense_grads(x), state, x)
    want = jax.tree.map(lambda g: -0.1 * 2 * 2 * g, dense_grads(x))
    chex.assert_trees_all_close(updates, want, rtol=1e-5)
    assert state.variables == {"iterations": 2, "variables/0": 2 * len(jax.tree.leaves(x))}


@keras.saving.register_keras_serializable("optzoo_tests")
class WithoutConfig(K.SGD):
    """One that does not override ``get_config``."""

    def __init__(self, learning_rate=0.1, factor=1.0, **kwargs):
        super().__init__(learning_rate, **kwargs)
        self._factor = factor


# Bad input


def test_settings_that_a_copy_would_not_have():
    message = r"WithoutConfig.get_config\(\) does not return 'factor', .* has 1.0 instead of 5.0"
    for optimizer in (
        WithoutConfig(0.1, factor=5.0),
        K.LossScaleOptimizer(WithoutConfig(0.1, factor=5.0)),
    ):
        with pytest.raises(ValueError, match=message):
            keras_optimizer(optimizer)
    keras_optimizer(WithoutConfig(0.1, factor=1.0, momentum=0.9, nesterov=True))


def test_refuses():
    with pytest.raises(TypeError, match="optimizer must be an instance"):
        keras_optimizer("adam")
    with pytest.raises(ValueError, match="is already built for a model"):
        used = K.LossScaleOptimizer(K.SGD(0.1))
        used.inner_optimizer.build([])
        keras_optimizer(used)
    with pytest.raises(ValueError, match="var_names"):
        excluding = K.AdamW(0.1)
        excluding.exclude_from_weight_decay(var_list=[keras.Variable(jnp.ones(2))])
        keras_optimizer(excluding)
    tx, x = keras_optimizer(K.SGD(0.1)), params()
    with pytest.raises(ValueError, match="params"):
        tx.update(dense_grads(x), tx.init(x))
    with pytest.raises(ValueError, match="has shape"):
        tx.update({**dense_grads(x), "table": jnp.ones(3)}, tx.init(x), x)


def test_refuses_another_backend(monkeypatch):
    from optzoo.interop import keras as module

    module.import_keras.cache_clear()
    monkeypatch.setattr(keras.config, "backend", lambda: "torch")
    with pytest.raises(ImportError, match="KERAS_BACKEND=jax"):
        keras_optimizer(K.SGD(0.1))
    module.import_keras.cache_clear()


def test_without_keras(monkeypatch):
    from optzoo.interop import keras as module

    module.import_keras.cache_clear()
    monkeypatch.setitem(sys.modules, "keras", None)
    with pytest.raises(ImportError, match=r"pip install 'optzoo\[keras\]'"):
        keras_optimizer(K.SGD(0.1))
    module.import_keras.cache_clear()


# By name

SCHEDULE = S.CosineDecay(0.1, 9, warmup_target=0.2, warmup_steps=2)
COMMON = {
    "clipnorm": {"clipnorm": 0.1},
    "clipvalue": {"clipvalue": 0.01},
    "global_clipnorm": {"global_clipnorm": 0.1},
    "gradient_accumulation_steps": {"gradient_accumulation_steps": 2},
    "schedule": {"learning_rate": SCHEDULE},
    "use_ema": {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2},
    "weight_decay": {"weight_decay": 0.2},
}
OWN = {
    "Adadelta": {"rho": 0.7, "epsilon": 1e-3},
    "Adafactor": {"beta_2_decay": -0.5},
    "Adagrad": {"initial_accumulator_value": 0.3},
    "Adam": {"beta_1": 0.5, "beta_2": 0.7, "amsgrad": True},
    "AdamW": {"beta_1": 0.5, "epsilon": 1e-3},
    "Adamax": {"beta_2": 0.7},
    "Ftrl": {"l1_regularization_strength": 0.01, "beta": 0.5},
    "Lamb": {"beta_1": 0.5},
    "Lion": {"beta_1": 0.5},
    "Muon": {"momentum": 0.5},
    "Nadam": {"beta_1": 0.5},
    "RMSprop": {"rho": 0.5, "momentum": 0.5, "centered": True},
    "SGD": {"momentum": 0.5, "nesterov": True},
    "ScheduleFreeAdamW": {"warmup_steps": 2},
}
NAMED = [(name, how) for name in OWN for how in ("own", *COMMON)]


def steps_of_keras(optimizer, number=3):
    """What Keras' own ``apply`` makes of the variables."""
    x = params()
    with keras_alone():
        vs = [keras.Variable(a, name=name) for name, a in leaves(x)]
        for i in range(1, number + 1):
            optimizer.apply([i * g for _, g in leaves(dense_grads(x))], vs)
        return jax.tree.unflatten(jax.tree.structure(x), [np.array(v.value) for v in vs])


def leaves(tree):
    paths = jax.tree_util.tree_leaves_with_path(tree)
    return [(jax.tree_util.keystr(path, simple=True), leaf) for path, leaf in paths]


def steps_by_name(tx, number=3):
    x, grads = params(), dense_grads(params())
    state = tx.init(x)
    for i in range(1, number + 1):
        x, state = step(tx, jax.tree.map(lambda g, i=i: i * g, grads), x, state)
    return x


@pytest.mark.parametrize(("name", "how"), NAMED)
def test_names_have_the_arguments_of_keras(name, how):
    """As plain arguments, and as what Keras' serialize returns."""
    given = {"learning_rate": 0.1} | (OWN[name] if how == "own" else COMMON[how])
    theirs = getattr(K, name)(**given)
    with keras_alone():
        config = keras.optimizers.serialize(theirs)
    want = steps_of_keras(theirs)
    for tx in (optzoo.create(f"tf.keras.optimizers.{name}", **given), optzoo.create(config)):
        assert worst(steps_by_name(tx), want) < 2e-6


@pytest.mark.parametrize("name", OWN)
def test_names_have_the_defaults_of_keras(name):
    want = steps_of_keras(getattr(K, name)())
    assert worst(steps_by_name(optzoo.create(f"keras.optimizers.{name}")), want) < 2e-6


def test_all_names_are_tried():
    around = {"LossScaleOptimizer", "MultiOptimizer"}  # others; Keras 3.14 has one of them
    assert public_classes(K, K.Optimizer) - around == {*OWN}


def test_names_of_this_library_take_rows():
    """If it computes the same and has all arguments."""

    def gives_rows(name, **given):
        tx, x = optzoo.create(f"keras.optimizers.{name}", **given), params()
        return isinstance(tx.update(row_grads(x), tx.init(x), x)[0]["table"], optzoo.SparseRows)

    with keras_alone():
        schedule = keras.optimizers.schedules.serialize(SCHEDULE)
    for name, own in {"SGD": {"momentum": 0.5}, "Ftrl": {"beta": 0.1}}.items():
        assert gives_rows(name, **own)
        assert not gives_rows(name, **own, clipnorm=1.0)
        assert not gives_rows(name, **own, learning_rate=schedule)


def test_configs_in_configs():
    inner = K.SGD(SCHEDULE, momentum=0.5)
    with keras_alone():
        config = keras.optimizers.serialize(K.LossScaleOptimizer(inner, initial_scale=1.0))
    want = steps_of_keras(K.SGD(SCHEDULE, momentum=0.5))
    assert worst(steps_by_name(optzoo.create(config)), want) < 2e-6
    averaged = {"class": "MovingAverage", "average_decay": 0.5, "opt": "keras.optimizers.Adam"}
    state = optzoo.create(averaged, learning_rate=0.1).init(params())
    assert optzoo.get_slot(state, "velocities")["table"].shape == params()["table"].shape


def test_configs_of_an_old_keras():
    config = {"learning_rate": 0.1, "decay": 0.0, "is_legacy_optimizer": False, "jit_compile": True}
    tx = optzoo.create({"class_name": "Adam", "config": config})
    assert worst(steps_by_name(tx), steps_of_keras(K.Adam(0.1))) < 2e-6
    with pytest.raises(ValueError, match="InverseTimeDecay"):
        optzoo.create({"class_name": "Adam", "config": {**config, "decay": 0.1}})
    with pytest.raises(ValueError, match=r"names os.path.join, which is not in Keras"):
        optzoo.create({"class_name": "join", "module": "os.path", "config": {}})
    rate = {"class_name": "join", "module": "os.path", "config": {}}
    with pytest.raises(ValueError, match="Keras has no schedule 'join'"):
        optzoo.create("keras.optimizers.Adam", learning_rate=rate)


def test_names_without_keras(monkeypatch):
    from optzoo.interop import keras as module

    module.import_keras.cache_clear()
    monkeypatch.setitem(sys.modules, "keras", None)
    assert optzoo.create("keras.optimizers.SGD", momentum=0.9)
    with pytest.raises(ImportError, match=r"pip install 'optzoo\[keras\]'"):
        optzoo.create("keras.optimizers.SGD", clipnorm=0.9)
    module.import_keras.cache_clear()
