"""Transformations in ``fit`` of Keras: the values of a plain loop, states that are saved."""

import contextlib
import subprocess
import sys
import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optzoo
from optzoo import CATALOG
from optzoo.catalog import DISTRIBUTED
from optzoo.interop.keras import for_fit
from optzoo.testing import samples

with warnings.catch_warnings():  # of what Keras imports
    warnings.simplefilter("ignore")
    import keras

STEPS, BATCH = 4, 8
X = np.random.default_rng(0).normal(size=(STEPS * BATCH, 3)).astype(np.float32)
Y = np.tanh(X @ np.float32([[1], [-2], [0.5]]))
ADAM = {"class": "adam", "learning_rate": 0.1}


@pytest.fixture(autouse=True)
def keras_alone():
    """Keras relies on what is forbidden here."""
    with jax.numpy_rank_promotion("allow"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def model(optimizer=None, seed=0, dtype=None, **how):
    keras.utils.set_random_seed(seed)
    hidden = keras.layers.Dense(4, "tanh", name="hidden", dtype=dtype)
    out = keras.layers.Dense(1, name="out", dtype=dtype)
    net = keras.Sequential([keras.Input((3,)), hidden, out], name="net")
    if optimizer is not None:
        net.compile(optimizer=optimizer, loss="mse", **how)
    return net


def fit(net, first=0, last=STEPS, **how):
    part = slice(first * BATCH, last * BATCH)
    return net.fit(X[part], Y[part], batch_size=BATCH, shuffle=False, verbose=0, **how)


def values(net):
    # Keras leaves the name of the model out of the paths of a model that is loaded.
    path = lambda v: v.path if v.path.startswith("net/") else f"net/{v.path}"
    return {path(v): np.asarray(v.value.astype("float32")) for v in net.trainable_variables}


def loop(tx, rates=(), steps=STEPS):
    """The same training without Keras."""
    net = model()
    params = {v.path: jnp.asarray(v.value) for v in net.trainable_variables}

    def loss(params, x, y):
        hidden = jnp.tanh(x @ params["net/hidden/kernel"] + params["net/hidden/bias"])
        out = hidden @ params["net/out/kernel"] + params["net/out/bias"]
        return jnp.mean((out - y) ** 2)

    @jax.jit
    def step(params, state, x, y, extra):
        updates, state = tx.update(jax.grad(loss)(params, x, y), state, params, **extra)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for i in range(steps):
        batch = slice(i * BATCH, (i + 1) * BATCH)
        extra = {"learning_rate": jnp.float32(rates[i])} if len(rates) else {}
        params, state = step(params, state, X[batch], Y[batch], extra)
    return params, state


def assert_close(got, want, tolerance=2e-6):
    assert got.keys() == want.keys()
    for name, value in want.items():
        value = np.asarray(value, np.float32)
        np.testing.assert_allclose(got[name], value, rtol=tolerance, atol=tolerance, err_msg=name)


TRANSFORMATIONS = {
    "adam": lambda: optzoo.adam(0.1),
    "optax": lambda: optax.adamw(0.1),
    "noise": lambda: optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(3)), optax.sgd(0.1)),
    "accumulate": lambda: optzoo.accumulate(optzoo.adam(0.1), 2, use_mean=True),
    "averages": lambda: optzoo.moving_average(optzoo.momentum(0.1, 0.9), 0.5),
    "schedule": lambda: optzoo.ftrl(optax.exponential_decay(0.5, 1, 0.5)),
    "eight bits": lambda: optzoo.slots_dtype(optzoo.adam(0.1), "int8"),
    "shampoo": lambda: optzoo.shampoo(0.1),
    "of names": lambda: optax.partition(
        {"slow": optax.sgd(0.01), "fast": optzoo.rmsprop(0.1)},
        lambda params: {name: "slow" if "bias" in name else "fast" for name in params},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_equals_a_loop_and_can_be_resumed(name, tmp_path):
    """Also from the weights of a file, saved in the middle."""
    optimizer = for_fit(TRANSFORMATIONS[name]())
    net = model(optimizer)
    fit(net)
    want, state = loop(TRANSFORMATIONS[name]())
    assert_close(values(net), want)
    for got, leaf in zip(jax.tree.leaves(optimizer.state), jax.tree.leaves(state), strict=True):
        assert got.dtype == leaf.dtype and got.shape == leaf.shape
    assert int(optimizer.iterations) == STEPS

    half = model(for_fit(TRANSFORMATIONS[name]()))
    fit(half, last=2)
    half.save_weights(tmp_path / "half.weights.h5")
    again = model(for_fit(TRANSFORMATIONS[name]()), seed=1)
    again.optimizer.build(again.trainable_variables)
    again.load_weights(tmp_path / "half.weights.h5")
    chex.assert_trees_all_equal(*[jax.tree.map(bits, net.optimizer.state) for net in (half, again)])
    fit(again, first=2)
    assert_close(values(again), values(net), 0)


def bits(leaf):
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


def variables(dtype):
    keras.utils.set_random_seed(3)
    made = [keras.Variable(np.ones((6, 2)), dtype="float32", name="table")]
    return [*made, keras.Variable(np.ones(3), dtype=dtype, name="bias")]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CATALOG)
def test_every_optimizer(name, dtype):
    """Two steps, with the state stored in between, are those of the update."""
    tx, vs = CATALOG[name].make(), variables(dtype)
    keys = [jax.random.key(i) for i in range(2)]
    grads = [
        [jax.random.normal(key, v.shape, v.dtype) for v in vs] for key in keys
    ]  # fmt: skip
    params = {v.path: v.value for v in vs}
    state = tx.init(params)
    got, store = [v.value for v in vs], None
    for gs in grads:
        by_name = {v.path: g for v, g in zip(vs, gs, strict=True)}
        of_step = {"global_step": 0 if store is None else 1} if name.endswith("_gs") else {}
        params, state = samples.step(tx, by_name, params, state, **of_step)
        optimizer = for_fit(tx)
        optimizer.build(vs)
        if store is not None:
            optimizer.load_own_variables(store)
        numbers = [v.value for v in optimizer.variables]
        got, numbers = jax.jit(optimizer.stateless_apply)(numbers, gs, got)
        for v, number in zip(optimizer.variables, numbers, strict=True):
            v.assign(number)
        store = {}
        optimizer.save_own_variables(store)
    for x, v in zip(got, vs, strict=True):
        want = params[v.path]
        assert x.dtype == want.dtype
        np.testing.assert_allclose(*map(np.float32, (x, want)), rtol=2e-6, atol=1e-6)


def test_variables_of_the_state_have_its_names():
    optimizer = for_fit(optzoo.momentum(0.1, 0.9))
    optimizer.build(variables("float32"))
    names = {"iteration", "0_count", "0_slots_momentum_table", "0_slots_momentum_bias"}
    assert {v.name for v in optimizer.variables} == names


def test_a_file_of_the_whole_model(tmp_path):
    config = {"class": "MovingAverage", "average_decay": 0.5, "opt": ADAM}
    whole, half = (model(for_fit(config, name="mine")) for _ in range(2))
    fit(whole)
    fit(half, last=2)
    half.save(tmp_path / "half.keras")
    again = keras.models.load_model(tmp_path / "half.keras")
    assert again.optimizer.get_config() == half.optimizer.get_config()
    assert again.optimizer.name == "mine"
    fit(again, first=2)
    assert_close(values(again), values(whole), 0)

    net = model(for_fit(optzoo.adam(0.1)))
    fit(net)
    with pytest.raises(ValueError, match=r"has no config.*made from a transformation.*save_weigh"):
        net.save(tmp_path / "net.keras")
    with pytest.raises(ValueError, match=r"has no config.*not JSON serializable"):
        for_fit({"class": "adam", "learning_rate": lambda step: 0.1}).get_config()


def test_names_of_layers_do_not_matter(tmp_path):
    """Here they sort in another order: those that Keras makes differ between processes."""

    def named(*names):
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Dense(3, "tanh", name=name) for name in names]
        net = keras.Sequential([keras.Input((3,)), *layers])
        net.compile(optimizer=for_fit(TRANSFORMATIONS["of names"]()), loss="mse")
        return net

    net, again = named("dense_8", "dense_9"), named("dense_9", "dense_10")
    fit(net)
    net.save_weights(tmp_path / "net.weights.h5")
    again.optimizer.build(again.trainable_variables)
    again.load_weights(tmp_path / "net.weights.h5")
    for one in (net, again):
        fit(one)
    for a, b in zip(net.trainable_variables, again.trainable_variables, strict=True):
        np.testing.assert_array_equal(a.value, b.value)


def test_the_rate_is_that_of_keras():
    """A number, which callbacks change, or a schedule; it is saved with the state."""
    halve = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
    for tx in (ADAM, {**ADAM, "learning_rate": 7.0}, optzoo.adam(0.5)):
        net = model(for_fit(tx, None if tx is ADAM else 0.1))
        assert float(net.optimizer.learning_rate) == np.float32(0.1)
        for i in range(STEPS):
            fit(net, i, i + 1, callbacks=[halve])
        assert_close(values(net), loop(optzoo.adam(3.0), 0.1 / 2 ** np.arange(1, STEPS + 1))[0])
        assert float(net.optimizer.learning_rate) == np.float32(0.1 / 2**STEPS)
    assert float(for_fit("adam").learning_rate) == np.float32(0.001)
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    net = model(for_fit("adam", schedule))
    fit(net)
    assert_close(values(net), loop(optzoo.adam(3.0), 0.1 / 2 ** np.arange(STEPS))[0])
    remade = type(net.optimizer).from_config(net.optimizer.get_config())
    assert remade.learning_rate == np.float32(0.1)
    with pytest.raises(TypeError, match="hence its learning rate is not settable"):
        net.optimizer.learning_rate = 0.1


def test_a_plateau():
    net = model(for_fit(ADAM))
    plateau = keras.callbacks.ReduceLROnPlateau("loss", 0.1, patience=1, min_delta=100.0)
    fit(net, epochs=3, callbacks=[plateau])
    np.testing.assert_allclose(float(net.optimizer.learning_rate), 0.001, rtol=1e-6)


def test_a_rate_inside_of_the_transformation():
    net = model(for_fit(optzoo.adam(0.1)))
    for use in (lambda o: o.learning_rate, lambda o: setattr(o, "learning_rate", 0.5)):
        with pytest.raises(AttributeError, match=r"use for_fit\(..., learning_rate=0.001\)"):
            use(net.optimizer)
    plateau = keras.callbacks.ReduceLROnPlateau("loss")
    with pytest.raises(AttributeError, match="the learning rate is inside"):
        fit(net, callbacks=[plateau])


def test_averages():
    tx = optzoo.moving_average(optzoo.gradient_descent(0.1), 0.5)
    net = model(for_fit(tx))
    fit(net)
    params, state = loop(tx)
    assert_close(values(net), params)
    net.optimizer.assign_eval_params()
    assert_close(values(net), optzoo.eval_params(params, state))
    assert not np.allclose(values(net)["net/out/kernel"], params["net/out/kernel"])


@pytest.mark.parametrize(
    "how",
    [{"run_eagerly": True}, {"jit_compile": False}, {"steps_per_execution": 2}],
    ids=lambda how: next(iter(how)),
)
def test_ways_to_compile(how):
    net = model(for_fit(optzoo.adam(0.1)), **how)
    fit(net)
    assert_close(values(net), loop(optzoo.adam(0.1))[0], 1e-5)


def test_loss_scaling():
    """A step with infinities changes nothing; scales that are powers of two cancel."""
    plain = {"class": "GradientDescent", "learning_rate": 0.1}
    optimizer = for_fit(plain)
    scaled = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=np.inf)
    net = model(scaled)
    start = values(net)
    fit(net, last=1)
    assert int(optimizer.iterations) == 0
    assert_close(values(net), start, 0)
    scaled.dynamic_scale.assign(4.0)
    fit(net)
    assert_close(values(net), loop(optzoo.gradient_descent(0.1))[0])
    net = model(for_fit(plain, loss_scale_factor=8.0))
    fit(net)
    assert_close(values(net), loop(optzoo.gradient_descent(0.1))[0])


def test_mixed_precision(tmp_path):
    """In float16 Keras scales the loss itself; in bfloat16 all variables have 16 bits."""
    keras.config.set_dtype_policy("mixed_float16")
    try:
        net = model(for_fit(ADAM))
        assert isinstance(net.optimizer, keras.optimizers.LossScaleOptimizer)
        fit(net)
    finally:
        keras.config.set_dtype_policy("float32")
    assert_close(values(net), loop(optzoo.adam(0.1))[0], 2e-2)
    half, whole = (model(for_fit(ADAM), dtype="bfloat16") for _ in range(2))
    fit(whole)
    fit(half, last=2)
    half.save(tmp_path / "half.keras")
    again = keras.models.load_model(tmp_path / "half.keras")
    fit(again, first=2)
    assert again.trainable_variables[0].dtype == "bfloat16"
    assert_close(values(again), values(whole), 0)


@contextlib.contextmanager
def distribution(made):
    before = keras.distribution.distribution()
    keras.distribution.set_distribution(made)
    try:
        yield
    finally:
        keras.distribution.set_distribution(before)


def meshes():
    devices = keras.distribution.list_devices()[:4]
    one = keras.distribution.DataParallel(devices=devices)
    mesh = keras.distribution.DeviceMesh((2, 2), ["batch", "model"], devices)
    layouts = keras.distribution.LayoutMap(mesh)
    layouts["net/hidden/kernel"] = (None, "model")
    yield one
    yield keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch")


@pytest.mark.parametrize("kind", [0, 1], ids=["data", "model"])
def test_distributed(kind):
    """Over batches, and over the parts of a kernel, whose slots are sharded like it."""
    with distribution(list(meshes())[kind]):
        net = model(for_fit(optzoo.adam(0.1)))
        fit(net)
        assert_close(values(net), loop(optzoo.adam(0.1))[0])
        slot = optzoo.get_slot(net.optimizer.state, "m")["net/hidden/kernel"]
        kernel = net.trainable_variables[0].value
        assert slot.sharding.is_equivalent_to(kernel.sharding, 2)
        assert len(slot.sharding.device_set) == 4
        assert slot.addressable_shards[0].data.shape == ((3, 4), (3, 2))[kind]


def test_gradients_of_an_embedding_are_dense():
    """So a lazy optimizer decays the slots of all rows: its momentum moves the others, too."""
    net = keras.Sequential([keras.Input((1,)), keras.layers.Embedding(5, 2, name="table")])
    net.compile(optimizer=for_fit(optzoo.lazy_adam(0.1)), loss="mse")
    before = values(net)
    net.fit(np.array([[1]]), np.ones((1, 1, 2), np.float32), verbose=0)
    net.fit(np.array([[3]]), np.ones((1, 1, 2), np.float32), verbose=0)
    slot = jax.tree.leaves(optzoo.get_slot(net.optimizer.state, "m"))[0]
    [table] = before.values()
    decayed = 0.9 * 0.1 * 2 * (table[1] - 1) / 2
    np.testing.assert_allclose(slot[1], decayed, rtol=1e-5)


def test_a_variable_without_gradient():
    v, w = (keras.Variable(np.ones(2), name=name) for name in "vw")
    optimizer = for_fit(optzoo.adam(0.1))
    optimizer.apply([jnp.ones(2), None], [v, w])
    np.testing.assert_array_equal(w.value, 1)
    np.testing.assert_allclose(v.value, 0.9, rtol=1e-5)
    np.testing.assert_array_equal(optzoo.get_slot(optimizer.state, "m")["w"], 0)


def test_a_state_that_is_the_parameters():
    """Keras donates both, so they must not be one array."""
    plain = optax.sgd(0.1)
    tx = optax.GradientTransformation(
        lambda params: params, lambda g, s, p=None: (plain.update(g, plain.init(p))[0], p)
    )
    net = model(for_fit(tx))
    arrays = lambda: [v.value for v in (*net.trainable_variables, *net.optimizer.variables)]
    net.optimizer.build(net.trainable_variables)
    pointers = [a.unsafe_buffer_pointer() for a in arrays()]
    assert len({*pointers}) == len(pointers)
    fit(net)
    assert_close(values(net), loop(optzoo.gradient_descent(0.1))[0])


def test_a_file_in_another_process(tmp_path):
    net = model(for_fit(ADAM))
    fit(net, last=1)
    net.save(tmp_path / "net.keras")
    code = f"""
import optzoo.interop.keras_fit, keras
print(keras.models.load_model({str(tmp_path / "net.keras")!r}).optimizer.iterations.value)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip().endswith("1"), done.stderr


def test_a_constraint():
    v = keras.Variable(np.ones(2), name="v")
    v.constraint = keras.constraints.MaxNorm(0.5)
    for_fit(optzoo.gradient_descent(0.1)).apply([jnp.ones(2)], [v])
    np.testing.assert_allclose(np.linalg.norm(v.value), 0.5, rtol=1e-5)


# Bad input


@pytest.mark.parametrize("name", DISTRIBUTED)
@pytest.mark.parametrize("axis_name", [None, "replica"])
def test_refuses_methods_for_replicas(name, axis_name):
    with pytest.raises(ValueError, match="tx is a method for replicas, but fit has one model"):
        for_fit(DISTRIBUTED[name].make(optzoo.adam(), 4, axis_name=axis_name))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: for_fit(3), TypeError, "tx must be an optax transformation"),
        (lambda: for_fit("adaam"), ValueError, "no optimizer is called 'adaam'"),
        (lambda: for_fit(optax.lbfgs()), ValueError, "needs 'value', 'grad', and 'value_fn'"),
        (
            lambda: for_fit(optax.chain(optax.sgd(1.0), optax.contrib.reduce_on_plateau())),
            ValueError,
            "the update of tx needs 'value', which fit does not pass",
        ),
        (lambda: for_fit(optzoo.caught_up(optzoo.adam())), ValueError, "tx is optzoo.caught_up"),
        (lambda: for_fit(optax.adam(0.1), 0.1), ValueError, "nothing in tx reads it: leave it out"),
        (
            lambda: for_fit(optzoo.accumulate(optax.adam(0.1), 2), 0.1),
            ValueError,
            "nothing in tx reads it: leave it out",
        ),
        (lambda: for_fit("adam", lambda step: 0.1), TypeError, "or a Keras schedule, got"),
        (
            lambda: keras.saving.get_registered_object("optzoo>FitOptimizer")("adam", clipnorm=1),
            TypeError,
            "no argument 'clipnorm', got 1: put optzoo.transforms.clip_by_norm before it",
        ),
    ],
)  # fmt: skip
def test_refuses(make, error, message):
    for_fit("adam")  # the class is registered
    with pytest.raises(error, match=message):
        make()


def test_refuses_what_only_the_model_shows():
    """A transformation for other shapes; two variables of one path."""
    only = optax.GradientTransformation(lambda p: p["other"], lambda g, s, p=None: (g, s))
    with pytest.raises(KeyError, match="other"):
        for_fit(only).build([keras.Variable(np.ones(2), name="v")])
    vs = [keras.Variable(np.ones(2), name="v") for _ in range(2)]
    with pytest.raises(ValueError, match="two variables of the model have the path 'v'"):
        for_fit(optzoo.adam()).build(vs)
