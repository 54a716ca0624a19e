"""By name and from a config. tests/golden shows that the values are those of the originals."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optzoo
from optzoo import CATALOG, create, registry
from optzoo.__main__ import main
from optzoo.catalog import DISTRIBUTED, WRAPPERS
from optzoo.registry import accepts, names, register
from optzoo.testing import samples

# The keys of RETURNN's registry under TensorFlow 1.15, and what each needs beside a rate.
ADAM = {"class": "adam"}
PLAIN = [
    "adadelta", "adagrad", "adagradda", "adam", "adamax", "adamgs", "addsign", "amsgrad",
    "customadam", "customgradientdescent", "ftrl", "ggt", "gradientdescent", "gradvariancescaled",
    "lars", "lazyadam", "lazyadamgs", "nadam", "nadamkeras", "neuraloptimizer1", "normalizedsgd",
    "powersign", "proximaladagrad", "proximalgradientdescent", "regadagrad", "rmsprop", "sgd",
    "shampoo",
]  # fmt: skip
REGISTRY = {name: {} for name in PLAIN} | {
    "adamw": {"weight_decay": 0.01},
    "agn": {"optimizer": ADAM, "num_worker": 2, "custom_getter": None},
    "dropstalegradient": {"opt": ADAM, "staleness": 1},
    "elasticaverage": {"opt": ADAM, "num_worker": 2, "ea_custom_getter": None},
    "modelaverage": {"opt": ADAM, "num_worker": 2, "is_chief": True, "ma_custom_getter": None},
    "momentum": {"momentum": 0.9, "use_nesterov": True},
    "momentumw": {"momentum": 0.9, "weight_decay": 0.01},
    "movingaverage": {"opt": ADAM},
    "syncreplicas": {"opt": ADAM, "replicas_to_aggregate": 2, "variable_averages": None},
    "variableclipping": {"opt": ADAM, "vars_to_clip_dims": {"table": [1]}, "max_norm": 1.0},
}
WITHOUT_SUFFIX = {"neuraloptimizer1", "normalizedsgd", "nadamkeras", "sgd"}


# What projects call classes of TensorFlow, and what they give to these where it is not the default.
LINGVO_RMSPROP = {"decay": 0.9, "momentum": 0.9, "epsilon": 1.0}
T2T_ADAFACTOR = "tensor2tensor.utils.adafactor.AdafactorOptimizer"
T2T_ADAM = {"beta1": 0.85, "beta2": 0.997, "epsilon": 1e-6}
OF_PROJECTS = [
    ("lingvo.AdaDelta", "tf.train.AdadeltaOptimizer", {"rho": 0.95, "epsilon": 1e-8}),
    ("lingvo.Adagrad", "tf.train.AdagradOptimizer", {"initial_accumulator_value": 1.0}),
    ("lingvo.Adam", "tf.train.AdamOptimizer", {"epsilon": 1e-6}),
    ("lingvo.Momentum", "tf.train.MomentumOptimizer", {"momentum": 0.9}),
    ("lingvo.RMSProp", "tf.train.RMSPropOptimizer", LINGVO_RMSPROP),
    ("lingvo.SGD", "tf.train.GradientDescentOptimizer", {}),
    ("mesh_tensorflow.Adafactor", T2T_ADAFACTOR, {"min_dim_size_to_factor": 128}),
    ("mesh_tensorflow.AdamWeightDecayOptimizer", "bert.AdamWeightDecayOptimizer", {}),
    ("object_detection.adam_optimizer", "tf.train.AdamOptimizer", {}),
    ("object_detection.momentum_optimizer", "tf.train.MomentumOptimizer", {"momentum": 0.9}),
    ("object_detection.rms_prop_optimizer", "tf.train.RMSPropOptimizer", LINGVO_RMSPROP),
    ("t5.Adafactor", T2T_ADAFACTOR, {"min_dim_size_to_factor": 128}),
    ("tensor2tensor.adagrad", "tf.train.AdagradOptimizer", {}),
    ("tensor2tensor.adam", "tf.contrib.opt.LazyAdamOptimizer", T2T_ADAM),
    ("tensor2tensor.adam_w", "tf.contrib.opt.AdamWOptimizer", T2T_ADAM | {"weight_decay": 1e-6}),
    ("tensor2tensor.ftrl", "tf.train.FtrlOptimizer", {}),
    ("tensor2tensor.momentum", "tf.train.MomentumOptimizer", {"momentum": 0.9}),
    ("tensor2tensor.rms_prop", "tf.train.RMSPropOptimizer", {}),
    ("tensor2tensor.sgd", "tf.train.GradientDescentOptimizer", {}),
    ("tensor2tensor.true_adam", "tf.train.AdamOptimizer", T2T_ADAM),
]


# Optimizers of projects that are several of this library together.
OF_SEVERAL = [
    "tensor2tensor.multistep_adam",
    *(f"opennmt.{name}" for name in ("Adam", "AdamW", "LazyAdam", "SGD", "SGDW")),
]


@pytest.mark.parametrize("name", REGISTRY)
def test_names_of_returnns_registry(name):
    suffix = "" if name in WITHOUT_SUFFIX else "Optimizer"
    config = {"class": name.upper() + suffix, "learning_rate": 0.1, "name": "x", "use_locking": 1}
    tx = create({**config, **REGISTRY[name]})
    assert jax.eval_shape(tx.init, samples.params()) is not None


def test_registry_is_whole():
    """All names of RETURNN, except its base class for new ones, and this library's beside them."""
    keys = {n.replace("_", "") for name, others in names().items() for n in [name, *others]}
    tables = {**CATALOG, **WRAPPERS, **DISTRIBUTED}
    ours = {name.replace("_", "") for name in tables}
    of_functions = {"multitaskoptimizerwrapper", "extendwithdecoupledweightdecay"}
    fbgemms = {key for key in keys if key.lower().startswith("emboptimtype.")} | {
        "emainplacerowwiseadagrad", "ensemblerowwiseadagrad", "exactadagrad",
        "exactrowwiseadagrad", "exactsgd", "larssgd", "rowwisermspropar",
    }  # fmt: skip
    of_projects = {name.replace("_", "") for name, _, _ in OF_PROJECTS} | {"keras.optimizers.Ftrl"}
    of_projects |= {name.replace("_", "") for name in OF_SEVERAL}
    assert keys == set(REGISTRY) | ours | of_functions | fbgemms | of_projects


@pytest.mark.parametrize("name", [*CATALOG, *WRAPPERS, *DISTRIBUTED])
def test_names_of_the_library_and_of_the_original(name):
    entry = {**CATALOG, **WRAPPERS, **DISTRIBUTED}[name]
    for known in filter(None, (name, name.title(), entry.original)):
        with pytest.raises(TypeError, match=f"^{name} has no argument 'no_such'"):
            create(known, no_such=1)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("keras.optimizers.Nadam", "nadam_keras"),
        ("tf.keras.optimizers.Nadam", "nadam_keras"),
        ("tensorflow.keras.optimizers.legacy.SGD", "sgd"),
        ("tf.contrib.opt.NadamOptimizer", "nadam"),
        ("nadam", "nadam"),
        ("tf.compat.v1.train.AdamOptimizer", "adam"),
        ("tensorflow.compat.v1.train.adam_optimizer", "adam"),
        ("tensorflow.python.training.adam.AdamOptimizer", "adam"),
        ("tensorflow.contrib.opt.python.training.ggt.GGTOptimizer", "ggt"),
        ("returnn.tf.updater.CustomGradientDescentOptimizer", "gradient_descent"),
        ("TFUpdater.AMSGradOptimizer", "amsgrad"),
        ("optzoo.lazy_adam", "lazy_adam"),
        ("fbgemm_gpu.split_embedding_configs.EmbOptimType.ADAM", "EmbOptimType.ADAM"),
        ("emboptimtype.adam", "EmbOptimType.ADAM"),
    ],
)
def test_a_module_says_whose_class_is_meant(name, meant):
    whose = f"keras.optimizers.{name.rpartition('.')[2]}" if "keras" in name else meant
    with pytest.raises(TypeError, match=f"^{whose} has no argument 'no_such'"):
        create(name, no_such=1)
    assert registry.factory_of(name) == registry.factory_of(meant)


X = {"w": np.array([1, -2], "float32")}
GRADS = {"w": np.array([[0.1, 0.2], [0.3, 0.6], [-0.2, -0.4]], "float32")}


def are_equal(one, other):
    """Whether two optimizers give the same updates, to the bit."""
    txs = {"one": one, "other": other}
    updates, _ = samples.run(samples.side_by_side(txs), GRADS, X)
    return np.array_equal(updates["one"]["w"], updates["other"]["w"])


@pytest.mark.parametrize(("name", "original", "values"), OF_PROJECTS)
def test_names_of_projects(name, original, values):
    theirs = create(original, learning_rate=0.1, **values)
    assert are_equal(create(name, learning_rate=0.1), theirs)
    assert registry.factory_of(name) == registry.factory_of(original)


def test_arguments_by_the_names_of_projects():
    momentum = create("momentum", learning_rate=0.1, momentum=0.5)
    assert are_equal(
        create("lingvo.core.optimizer.Momentum", learning_rate=0.1, alpha=0.5), momentum
    )
    adadelta = create("adadelta", learning_rate=0.1, rho=0.5)
    assert are_equal(create("lingvo.AdaDelta", learning_rate=0.1, decay=0.5), adadelta)
    name = "object_detection.momentum_optimizer"
    assert are_equal(create(name, learning_rate=0.1, momentum_optimizer_value=0.5), momentum)
    with pytest.raises(TypeError, match="momentum has no argument 'alpha'"):
        create("momentum", learning_rate=0.1, alpha=0.5)
    assert not are_equal(create("tensor2tensor.adam"), create("tensor2tensor.adam", beta1=0.9))


PROTO = {"momentum_optimizer_value": 0.5, "decay": 0.8, "epsilon": 0.1}
RMSPROP = {"class": "tf.train.RMSPropOptimizer", "momentum": 0.5, "decay": 0.8, "epsilon": 0.1}


@pytest.mark.parametrize(
    ("beside", "average_decay"),
    [
        ({}, 0.9999),
        ({"moving_average_decay": 0.5}, 0.5),
        ({"use_moving_average": False, "moving_average_decay": 0.5}, None),
    ],
)
def test_messages_of_object_detection(beside, average_decay):
    rate = {"constant_learning_rate": {"learning_rate": 0.1}}
    theirs = create({"rms_prop_optimizer": {**PROTO, "learning_rate": rate}, **beside})
    config = {"class": "MovingAverage", "average_decay": average_decay, "opt": RMSPROP}
    ours = create(RMSPROP if average_decay is None else config, learning_rate=0.1)
    x = jax.tree.map(jnp.asarray, X)
    ends = [samples.step(tx, x, x, tx.init(x)) for tx in (theirs, ours)]
    jax.tree.map(np.testing.assert_array_equal, *ends)
    assert are_equal(create({"rms_prop_optimizer": PROTO, **beside}, learning_rate=0.1), ours)


def test_messages_that_are_refused():
    rate = {"constant_learning_rate": {}, "cosine_decay_learning_rate": {}}
    with pytest.raises(TypeError, match=r"learning_rate must be a number, a schedule or a dict"):
        create({"adam_optimizer": {"learning_rate": rate}})
    with pytest.raises(TypeError, match=r"'adam_optimizer' and also \['momentum_optimizer', 'us"):
        create({"adam_optimizer": {}, "momentum_optimizer": {}, "use": 1})


def adam_in_numpy(gradients, rates, b1, b2, eps, decay=0.0):
    """Adam as in TensorFlow; before each update the decay, which the rate does not multiply."""
    x, m, v, path = np.array([1.0, -2.0]), 0.0, 0.0, []
    for t, (g, rate) in enumerate(zip(gradients, rates, strict=True), 1):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        x = x - decay * x
        x = x - rate * np.sqrt(1 - b2**t) / (1 - b1**t) * m / (np.sqrt(v) + eps)
        path.append(x)
    return np.array(path)


def path_of(tx, gradients):
    x, path = jnp.array([1.0, -2.0]), []
    state = tx.init(x)
    for g in gradients:
        x, state = samples.step(tx, jnp.asarray(g, jnp.float32), x, state)
        path.append(x)
    return np.array(path)


GRADIENTS = np.random.default_rng(5).normal(size=(6, 2))


@pytest.mark.parametrize("rate", [0.1, lambda step: 0.1 / (1.0 + step)])
def test_multistep_adam_of_tensor2tensor(rate):
    """The mean of two gradients, and the rate of the second step."""
    tx = create("tensor2tensor.multistep_adam", learning_rate=rate, n=2, beta1=0.9)
    rates = [rate(k) if callable(rate) else rate for k in (1, 3, 5)]
    means = GRADIENTS.reshape(3, 2, 2).mean(axis=1)
    want = adam_in_numpy(means, rates, 0.9, 0.997, 1e-6)
    got = path_of(tx, GRADIENTS)
    np.testing.assert_allclose(got[1::2], want, rtol=1e-5)
    np.testing.assert_array_equal(got[2::2], got[1:-1:2])
    with pytest.raises(TypeError, match=r"tensor2tensor.multistep_adam needs n$"):
        create("tensor2tensor.multistep_adam", learning_rate=0.1)


@pytest.mark.parametrize("name", ["Adam", "AdamW", "LazyAdam"])
@pytest.mark.parametrize("decay", [None, 0.1])
def test_adam_of_opennmt(name, decay):
    if decay is None and name == "AdamW":
        with pytest.raises(TypeError, match=r"opennmt\.AdamW needs weight_decay"):
            create("opennmt.AdamW", learning_rate=0.1)
        return
    given = {} if decay is None else {"weight_decay": decay}
    tx = create(f"opennmt.{name}", learning_rate=0.1, beta_2=0.98, epsilon=0.01, **given)
    want = adam_in_numpy(GRADIENTS, [0.1] * 6, 0.9, 0.98, 0.01, decay or 0.0)
    np.testing.assert_allclose(path_of(tx, GRADIENTS), want, rtol=2e-5)


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_of_opennmt(nesterov):
    x, v, path = np.array([1.0, -2.0]), 0.0, []
    for g in GRADIENTS:
        x, v = x - 0.1 * x, 0.5 * v - 0.2 * g
        x = x + (0.5 * v - 0.2 * g if nesterov else v)
        path.append(x)
    given = {"learning_rate": 0.2, "momentum": 0.5, "nesterov": nesterov, "weight_decay": 0.1}
    for name in ("SGD", "SGDW"):
        got = path_of(create(f"opennmt.{name}", **given), GRADIENTS)
        np.testing.assert_allclose(got, path, rtol=2e-5)


def test_hyper_parameters_are_those_of_float32():
    theirs = create("Adam", learning_rate=1.1, beta2=0.999)
    f32 = lambda x: float(np.float32(x))
    rounded = optzoo.adam(f32(1.1), f32(0.9), f32(0.999), f32(1e-8))
    assert are_equal(theirs, rounded) and not are_equal(theirs, optzoo.adam(1.1))


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [("lars", {"momentum": 0.7, "weight_decay": 0.3}), ("AMSGrad", {"b2": 0.999})],
)
def test_some_originals_do_not_round(name, kwargs):
    renamed = {"weight_decay": "l2_weight_decay"}
    ours = CATALOG[name.lower()].factory(0.1, **{renamed.get(k, k): v for k, v in kwargs.items()})
    assert are_equal(create(name, learning_rate=0.1, **kwargs), ours)


def test_a_schedule_gives_float32(x64):
    with x64(True):
        tx = create("GradientDescent", learning_rate=lambda step: jnp.float64(0.1) / (1 + step))
        x = jnp.ones((), jnp.float64)
        update, _ = tx.update(x, tx.init(x))
        assert update == -np.float64(np.float32(0.1))


def test_both_names_of_an_argument():
    for kwargs in ({"beta1": 0.5, "epsilon": 0.1}, {"b1": 0.5, "eps": 0.1}):
        assert are_equal(create("adam", **kwargs), create("adam", b1=0.5, eps=0.1))
    with pytest.raises(TypeError, match="adam: b1 is given twice, also as beta1"):
        create("adam", b1=0.5, beta1=0.5)
    with pytest.raises(
        TypeError, match=r"\['eps'\] are given both in the config and as keyword arguments"
    ):
        create({"class": "adam", "eps": 0.1}, eps=0.1)


def test_a_config_in_a_config():
    config = {
        "class": "MovingAverage",
        "average_decay": 0.99,
        "opt": {"class": "Momentum", "momentum": 0.9, "learning_rate_multiplier": 0.5},
    }
    tx, f32 = create(config, learning_rate=0.1), np.float32
    params = {"w": jnp.array([1.0, -2.0])}
    state = tx.init(params)
    updates, state = tx.update(params, state, params)
    np.testing.assert_array_equal(updates["w"], -(f32(0.1) * f32(0.5)) * params["w"])
    new = optax.apply_updates(params, updates)
    decay = 1 - float(1 - f32(0.99))
    average = decay * params["w"] + (1 - decay) * new["w"]
    np.testing.assert_allclose(optzoo.eval_params(new, state)["w"], average, rtol=1e-6)
    updates, _ = tx.update(params, tx.init(params), params, learning_rate=0.2)
    np.testing.assert_array_equal(updates["w"], -(f32(0.2) * f32(0.5)) * params["w"])


def test_a_multiplier_of_a_schedule():
    rate = lambda step: 0.1 / (1.0 + step)
    tx = create("GradientDescent", learning_rate=rate, learning_rate_multiplier=0.5)
    x = jnp.array([1.0, -2.0])
    first, state = tx.update(x, tx.init(x))
    second, _ = tx.update(x, state)
    np.testing.assert_allclose((first, second), (-0.05 * x, -0.025 * x), rtol=1e-6)


def test_a_decay_has_the_name_of_the_original():
    """It is not rounded either: the original keeps it in double precision."""
    rate, size = float(np.float32(0.1)), float(np.float32(0.9))
    ours = optzoo.momentumw(rate, size, weight_decay_per_step=0.3)
    for name in ("weight_decay", "weight_decay_per_step"):
        theirs = create({"class": "MomentumW", "momentum": 0.9, name: 0.3}, learning_rate=0.1)
        assert are_equal(theirs, ours)
    assert accepts("AdamW", "weight_decay")
    assert not accepts("Adam", "weight_decay")
    with pytest.raises(TypeError, match="weight_decay_per_step is given twice, also as weight_de"):
        create("AdamW", weight_decay=0.1, weight_decay_per_step=0.1)


def test_a_transformation_in_a_config():
    tx = create("extend_with_decoupled_weight_decay", base_optimizer=optax.sgd(0.1), weight_decay=0)
    assert are_equal(tx, optax.sgd(0.1))
    with pytest.raises(TypeError, match="learning_rate belongs to the inner optimizer"):
        create("multitask", inner=optax.sgd(0.1), learning_rate=0.1)
    # This one has a rate itself, beside that of the inner optimizer.
    tx = create("hyperball", inner=optax.sgd(0.1), learning_rate=0.75, dims={".*": (0,)})
    x = jnp.array([4.0, 0.0])
    updates, _ = tx.update(jnp.array([0.0, -9.0]), tx.init(x), x)
    np.testing.assert_allclose(x + updates, [3.2, 2.4], rtol=1e-6)


@pytest.mark.parametrize("kind", ["linear", "linear_sign_decay", "get_linear_decay_fn"])
def test_sign_decay_from_a_config(kind):
    tx = create("AddSign", sign_decay_fn={"class": kind, "decay_steps": 10})
    f32 = lambda x: float(np.float32(x))
    ours = optzoo.add_sign(f32(0.1), b1=f32(0.9), sign_decay=optzoo.linear_sign_decay(10))
    assert are_equal(tx, ours)
    with pytest.raises(ValueError, match="sign_decay must be one of linear, cosine, restart"):
        create("AddSign", sign_decay_fn="exponential")


def test_keras_sgd_has_the_rate_inside_its_momentum():
    rates, x, v = [0.1, 0.2, 0.3], 1.0, 0.0
    tx = create("sgd", learning_rate=lambda k: jnp.array(rates)[k], momentum=0.5)
    params = jnp.float32(x)
    state = tx.init(params)
    for rate in rates:
        params, state = samples.step(tx, params, params, state)
        v = 0.5 * v - rate * x
        x = x + v
        np.testing.assert_allclose(params, x, rtol=1e-6)


@pytest.mark.parametrize(("momentum", "shapes"), [(0.0, []), (0.5, [(3,)]), (1.0, [(3,)])])
def test_keras_sgd_has_a_slot_only_with_momentum(momentum, shapes):
    state = create("sgd", momentum=momentum).init(jnp.ones(3))
    assert [a.shape for a in jax.tree.leaves(state) if a.ndim] == shapes


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ("adaam", ValueError, "no optimizer is called 'adaam'; the nearest are adam, "),
        ("xyz", ValueError, "no optimizer is called 'xyz'$"),
        ("adam.", ValueError, "no optimizer is called 'adam.'"),
        ("os.system", ValueError, "no optimizer is called 'os.system'$"),
        ("param_groups", ValueError, ": call optzoo.param_groups with the optimizers that create"),
        ({"class": "CaughtUp", "opt": "adam"}, ValueError, ": call optzoo.caught_up with the opt"),
        ("torch.optim.AdamW", ValueError, "docs/from_torch.md lists the equivalents"),
        (
            "opennmt.RMSprop",
            ValueError,
            "the supported optimizers of OpenNMT-tf are Adam, AdamW, LazyAdam, SGD and SGDW",
        ),
        ("optax.adamw", ValueError, "called 'optax.adamw': call the function of optax; optzoo"),
        ("optax.contrib.muon", ValueError, "call the function of optax; optzoo accepts"),
        ("keras.optimizers.Adaam", ValueError, r": give keras.optimizers.Adaam\(...\) to optzoo"),
        ("tf.keras.optimizers.MultiOptimizer", ValueError, ": give keras.optimizers.MultiOptim"),
        ({"class": "keras.optimizers.Adam", "beta1": 0.9}, TypeError, "the nearest are beta_1"),
        (
            {"class": "of.the.kind.Adam"},
            ValueError,
            "; available are .*, tf.train.AdamOptimizer, optax.",
        ),
        ("tf.train.LazyAdam", ValueError, "opennmt.LazyAdam, tf.contrib.opt.LazyAdamOptimizer$"),
        ("tf.train.Adaam", ValueError, "; the nearest are adam, adagrad, adadelta"),
        ("EmbOptimType.ADAMM", ValueError, "; the nearest are adam, "),
        ("optax.adafactor", ValueError, "called 'optax.adafactor': call the function of optax; "),
        ("optax.lamb", ValueError, "called 'optax.lamb': call the function of optax; optzoo"),
        ("lion", ValueError, "; available are optax.lion$"),
        ("sophia", ValueError, "; available are optax.contrib.sophia$"),
        (
            "tfa.optimizers.LAMB",
            ValueError,
            "; available are fbgemm_gpu.EmbOptimType.LAMB, nvidia.LAMBOptimizer, optax.lamb$",
        ),
        (
            "trax.optimizers.Adafactor",
            ValueError,
            "; available are mesh_tensorflow.Adafactor, t5.*, tensor2tensor.*, optax.adafactor$",
        ),
        ("tensor2tensor.true_adamm", ValueError, "; the nearest are trueadam, "),
        ("yellow_fin", ValueError, "; tensor2tensor.utils.yellowfin needs TensorFlow 1"),
        ("SparseAdam", ValueError, "; use optzoo.lazy_adam, which is torch's"),
        ("BaseCustomOptimizer", ValueError, "use optzoo.rules.leafwise"),
        ("momentum", TypeError, "momentum needs learning_rate, momentum"),
        ("moving_average", TypeError, "moving_average needs 'opt'"),
        ({"momentum": 0.9}, TypeError, "a dict with its name under 'class'"),
        (optzoo.adam, TypeError, "must be the name of an optimizer or a dict"),
        ({"class": optzoo.adam}, TypeError, "the name of an optimizer must be a string"),
        (
            {"class": "adam", "beta3": 1},
            TypeError,
            "no argument 'beta3'; the nearest are beta[12], beta[12]",
        ),
        ({"class": "adam", "global_step": 0}, TypeError, "no argument 'global_step'"),
        ({"class": "GGT", "epsilon": 0}, TypeError, "no argument 'epsilon'; the nearest are eps"),
        ({"class": "adam", "beta1": 2.0}, ValueError, "b1 must be in"),
        (
            {"class": "SyncReplicas", "opt": "adam", "variable_averages": 1},
            TypeError,
            "no argument 'variable_averages'",
        ),
    ],
)
def test_errors_name_the_fix(given, error, message):
    with pytest.raises(error, match=message):
        create(given)


def test_accepts_what_the_original_takes():
    assert accepts("RMSProp", "epsilon") and accepts("lars", "momentum")
    assert not accepts("ggt", "epsilon") and not accepts("adam", "momentum")
    assert not accepts("adam", "use_locking")


@pytest.fixture
def catalog():
    before = dict(CATALOG)
    yield CATALOG
    CATALOG.clear()
    CATALOG.update(before)


def test_a_factory_may_take_arguments_of_any_name(catalog):
    given = {}
    register("mine", lambda learning_rate, **others: given.update(others) or optax.sgd(0.1))
    create("mine", learning_rate=0.1)
    assert given == {}
    create({"class": "mine", "momentum": 0.9, "epsilon": 0.5}, learning_rate=0.1)
    assert given == {"momentum": 0.9, "epsilon": 0.5}


def test_register(catalog):
    register("half_sgd", lambda learning_rate=0.3: optax.sgd(learning_rate / 2), rate=0.2)
    assert are_equal(create("HalfSGDOptimizer", learning_rate=0.3), optax.sgd(0.15))
    assert are_equal(catalog["half_sgd"].make(), optax.sgd(0.1))
    taken = (
        r"name 'HalfSGD' is already used by half_sgd: remove it with del optzoo.CATALOG\['half_sgd"
    )
    with pytest.raises(ValueError, match=taken):
        register("HalfSGD", optax.sgd)
    with pytest.raises(
        ValueError, match=r"name 'MovingAverage' is already used by moving_average$"
    ):
        register("MovingAverage", optax.adam)
    with pytest.raises(ValueError, match=r"rows must be one of lazy, .*, got 'lazzy'"):
        register("mine", optax.sgd, rows="lazzy")
    register("mine.adam", optax.adam, original="tf.train.AdamOptimizer")
    assert registry.factory_of("Mine.Adam") == optax.adam
    assert registry.factory_of("tf.train.AdamOptimizer") == optzoo.adam
    with pytest.raises(TypeError, match="factory must be a function"):
        register("mine", optax.sgd(0.1))


def test_slots_in_8_bits_of_a_registered_optimizer(catalog):
    register("mine", optzoo.lazy_adam, rows="lazy")
    config = {"class": "slots_dtype", "dtype": "int8", "opt": {"class": "Mine", "beta1": 0.5}}
    tx = create(config, learning_rate=0.3)
    assert tx == optzoo.slots_dtype(optzoo.lazy_adam(0.3, b1=0.5), "int8")


def test_list_shows_arguments_and_defaults(capsys):
    assert main(["list"]) == 0
    printed = capsys.readouterr().out
    for name, entry in {**CATALOG, **WRAPPERS, **DISTRIBUTED}.items():
        assert f"{name}({next(iter(inspect.signature(entry.factory).parameters))}" in printed
    assert "adam(learning_rate=0.001, b1=0.9, b2=0.999, eps=1e-08)" in printed
    assert max(map(len, printed.splitlines())) <= 100
    assert main(["list", "Prox"]) == 0
    only = capsys.readouterr().out
    assert "proximal_adagrad(" in only and "adam(" not in only
    assert main(["list", "tf.train.AdamOptimizer"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("adam(") and "\nlingvo.Adam(" in printed and "lazy" not in printed


@pytest.mark.parametrize(
    ("argv", "status"),
    [([], 2), (["-h"], 0), (["--help"], 0), (["zzz"], 2), (["list", "a", "b"], 2)],
)
def test_usage(argv, status, capsys):
    """Asked for, it is no error."""
    assert main(argv) == status
    printed = capsys.readouterr()
    shown, other = (printed.err, printed.out) if status else (printed.out, printed.err)
    assert shown.startswith("usage: optzoo race") and other == ""


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"optzoo {optzoo.__version__}\n"


def test_list_of_an_unknown_name(capsys):
    assert main(["list", "ftlr"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "no name contains 'ftlr'; the nearest are ftrl" in err
    assert main(["list", "zzz"]) == 2
    assert "no name contains 'zzz'; leave it out to list all names" in (capsys.readouterr().err)


@pytest.mark.parametrize("name", ["RMSprop", "Nadam", "AdamW"])
def test_legacy_names_of_keras_are_those_with_its_old_formulas(name):
    with pytest.raises(ValueError, match=f"{name} of Keras 3 has another formula"):
        optzoo.create(f"tf.keras.optimizers.legacy.{name}", learning_rate=0.1)
    for same in ("tf.keras.optimizers.legacy.SGD", "tf.optimizers.SGD", "keras.optimizers.SGD"):
        assert optzoo.registry.factory_of(same) is optzoo.registry.factory_of("keras.SGD")
