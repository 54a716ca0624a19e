"""``OptzooUpdater`` in the place of the updater of RETURNN's JAX backend."""

import io

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import returnn.frontend as rf
from returnn.config import Config
from returnn.frontend import _backend
from returnn.jax import updater
from returnn.log import log
from returnn.tensor import Dim

import optzoo
from optzoo.interop.returnn import OptzooUpdater
from optzoo.testing import samples

NAMES = ["encoder.weight", "encoder.bias", "norm.scale", "norm.bias", "embedding.weight", "loose"]
PARAMS = [
    *(jnp.ones((2, 3)), jnp.array([0.5, -1, 2]), jnp.array([3.0, 1, 0.1])),
    *(jnp.array([0.1, 0.2, -1]), jnp.full((2, 3), 0.3, jnp.float32), jnp.array([3.0, 1])),
]
RATES = np.array([0.1, 0.05, 0.1, 0.02], np.float32)


def train(made, rate, steps=4):
    """As the engine does it: compiled, with the rate as an argument, buffers donated."""
    step = jax.jit(
        lambda x, s, rate: made.step(
            params=x, grads=[jnp.cos(a) for a in x], opt_state=s, learning_rate=rate
        ),
        donate_argnums=(0, 1),
    )
    x = [jnp.copy(a) for a in PARAMS]
    state = made.init(x)
    for k in range(steps):
        x, state = step(x, state, np.float32(rate / (1 + k)))
    return x


@pytest.fixture(scope="module")
def model():
    """A model of RETURNN's frontend, with a module of each kind."""
    backend, x64 = _backend.global_backend.__class__, jax.config.jax_enable_x64
    _backend.select_backend_jax()  # it also enables float64
    try:
        inner, outer = Dim(2, name="inner"), Dim(3, name="outer")
        model = rf.Module()
        model.encoder = rf.Linear(inner, outer)
        model.norm = rf.LayerNorm(outer)
        model.embedding = rf.Embedding(inner, outer)
        model.loose = rf.Parameter([inner])
        return model
    finally:
        _backend.global_backend.__class__ = backend
        jax.config.update("jax_enable_x64", x64)


DECAY = {"class": "adamw", "weight_decay": 0.1}
MODULES, CHECK = "weight_decay_modules_blacklist", "weight_decay_custom_include_check"
SGD, MOMENTUM = {"class": "sgd"}, {"class": "sgd", "momentum": 0.9}
BOTH_TAKE = {
    "nothing": {},
    "no_class": {"optimizer": {"b1": 0.5}},
    "adam": {"optimizer": {"class": "Adam"}},
    "betas": {"optimizer": {"class": "adam", "betas": (0.8, 0.95), "epsilon": 0.1}},
    "optax_names": {"optimizer": {"class": "adam", "b1": 0.8, "eps_root": 0.1, "nesterov": True}},
    "adamw": {"optimizer": {"class": "adamw", "epsilon": 1e-16}},
    "decay": {"optimizer": DECAY},
    "norms": {"optimizer": {**DECAY, MODULES: ["rf.LayerNorm"]}},
    "modules": {"optimizer": {**DECAY, MODULES: ["rf.LayerNorm", rf.Embedding]}},
    "all_modules": {"optimizer": {**DECAY, MODULES: ["rf.Module"]}},
    "no_decay": {"optimizer": {"class": "adamw", "weight_decay": 0, MODULES: ["rf.LayerNorm"]}},
    "modules_alone": {"optimizer": {"class": "adamw", MODULES: ["rf.Linear"]}},
    "sgd": {"optimizer": SGD},
    "momentum": {"optimizer": MOMENTUM},
    "nesterov": {"optimizer": {**MOMENTUM, "nesterov": True}},
    "clip": {"optimizer": SGD, "gradient_clip_global_norm": 0.5},
    "clip_in_dict": {"optimizer": {**SGD, "gradient_clip_global_norm": 0.5}},
    "two_clips": {
        "optimizer": {**SGD, "gradient_clip_global_norm": 0.5},
        "gradient_clip_global_norm": 2.0,
    },
    "accumulate": {"optimizer": MOMENTUM, "accum_grad_multiple_step": 2},
    "accumulate_clip": {
        "optimizer": DECAY,
        "accum_grad_multiple_step": 2,
        "gradient_clip_global_norm": 1.0,
    },
    "accumulate_clip_sgd": {
        "optimizer": SGD,
        "accum_grad_multiple_step": 2,
        "gradient_clip_global_norm": 1.0,
    },
    "variables": {
        "optimizer": SGD,
        "adam": True,
        "momentum": 0.9,
        "L2": 0.1,
        "weight_decay": 0.1,
        "debug_add_check_numerics_on_output": True,
        "learning_rate_piecewise_steps": [1, 2],
    },
}


# Whether the engine gives the model matters for these alone.
CASES = [(name, True) for name in BOTH_TAKE] + [("decay", False), ("norms", False)]


def both(config, model):
    """The parameters after each step, of ours and of RETURNN's own, in rows."""
    config = Config({"backend": "jax", **config})

    def follow(cls):
        made = cls(config=config, model=model, param_names=NAMES)

        def step(carry, rate):
            x, state = carry
            grads = [jnp.cos(a) for a in x]
            x, state = made.step(params=x, grads=grads, opt_state=state, learning_rate=rate)
            return (x, state), jnp.concatenate([a.ravel() for a in x])

        return jax.lax.scan(step, (PARAMS, made.init(PARAMS)), RATES)[1]

    run = lambda: (follow(OptzooUpdater), follow(updater.Updater))
    # Small programs: to optimize them takes longer than to run them.
    return jax.device_get(jax.jit(run, compiler_options={"xla_backend_optimization_level": 0})())


@pytest.mark.every_value
@pytest.mark.parametrize(("name", "has_model"), CASES)
def test_equals_returnns_own(name, has_model, model):
    ours, theirs = both(BOTH_TAKE[name], model if has_model else None)
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    assert np.max(np.abs(np.diff(ours, axis=0))) > 0.01


def test_equals_returnns_own_with_float64(x64, model):
    """RETURNN's engine enables it; parameters are float32 all the same."""
    with x64(True):
        ours, theirs = both(BOTH_TAKE["accumulate_clip"], model)
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_options_of_the_command_line():
    """RETURNN keeps them elsewhere; the config has one of them, too."""
    words = ["++gradient_clip_global_norm", "0.5", "++accum_grad_multiple_step", "2"]
    words += ["++L2", "3", "++log_grad_norm", "True"]
    configs = [Config({"optimizer": SGD, "L2": 1}) for _ in range(2)]
    configs[0].parse_cmd_args(words)
    configs[1].typed_dict |= {"gradient_clip_global_norm": 0.5, "accum_grad_multiple_step": 2}
    given, written = (OptzooUpdater(config=config, param_names=NAMES) for config in configs)
    theirs = updater.Updater(config=configs[0], param_names=NAMES)
    assert given.log_grad_norm_p == theirs.log_grad_norm_p == 2 and written.log_grad_norm_p is None
    ends = [np.concatenate(list(map(np.ravel, train(made, 0.1)))) for made in (given, written)]
    np.testing.assert_array_equal(*ends)
    np.testing.assert_allclose(
        ends[0], np.concatenate(list(map(np.ravel, train(theirs, 0.1)))), rtol=1e-6
    )


@pytest.mark.full
def test_no_two_configs_mean_the_same(model):
    """But for those that should."""
    paths = {}
    for name, has_model in CASES:
        ours, _ = both(BOTH_TAKE[name], model if has_model else None)
        paths.setdefault(ours.tobytes(), []).append(f"{name}, {has_model}")
    assert sorted(names for names in paths.values() if len(names) > 1) == [
        ["adam, True", "all_modules, True", "no_decay, True"],
        ["clip, True", "clip_in_dict, True", "two_clips, True"],
        ["decay, False", "norms, False"],  # no modules, no mask
        ["nothing, True", "adamw, True", "modules_alone, True"],
        ["sgd, True", "variables, True"],
    ]


def test_another_backend_of_the_config_is_followed():
    """As RETURNN reads it: here momentum whose velocity contains the rate."""
    config = {"optimizer": MOMENTUM, "backend": "tensorflow"}
    made = OptzooUpdater(config=Config(config), param_names=["w"])
    x, state, after = [jnp.zeros(1)], made.init([jnp.zeros(1)]), []
    for rate in (0.1, 0.01, 0.01):
        new, state = made.step(params=x, grads=[jnp.ones(1)], opt_state=state, learning_rate=rate)
        after.append(float((x[0] - new[0])[0]))
        x = new
    np.testing.assert_allclose(after, [0.1, 0.1, 0.1], rtol=1e-5)


def test_what_it_does_not_know_works():
    """Also where the rate is no factor; and options of layers."""
    config = Config(
        {
            "optimizer": {"class": "ftrl", "l1_regularization_strength": 0.01},
            "gradient_clip_norm": 1.0,
            "updater_layers": {"encoder": {"L2": 0.1}},
            "backend": "jax",
        }
    )
    with pytest.raises(NotImplementedError):
        updater.Updater(config=config, param_names=NAMES)
    got = train(OptzooUpdater(config=config, param_names=NAMES), 0.1)
    tx = optax.chain(
        optzoo.transforms.clip_by_norm(1.0), optzoo.ftrl(0.1, l1_regularization_strength=0.01)
    )
    x = dict(zip(NAMES, PARAMS, strict=True))
    state = tx.init(x)
    l2 = {name: 0.2 if name.startswith("encoder") else 0.0 for name in NAMES}
    for k in range(4):
        grads = {name: jnp.cos(a) + l2[name] * a for name, a in x.items()}
        x, state = samples.step(tx, grads, x, state, learning_rate=0.1 / (1 + k))
    for name, a in zip(NAMES, got, strict=True):
        np.testing.assert_allclose(a, x[name], rtol=1e-5)


def test_the_schedule_stays_with_the_engine():
    """It is applied once: by the engine, which hands on the rate."""
    halved = lambda learning_rate, epoch, **_: learning_rate / 2
    config = {"optimizer": {"class": "sgd"}, "dynamic_learning_rate": halved, "log_grad_norm": True}
    made = OptzooUpdater(config=Config(config), param_names=NAMES)
    rate = made.get_effective_learning_rate(learning_rate=1.0, global_train_step=3, epoch=1)
    assert rate == 0.5 and made.log_grad_norm_p == 2
    moved, _ = made.step(
        params=PARAMS, grads=PARAMS, opt_state=made.init(PARAMS), learning_rate=rate
    )
    np.testing.assert_allclose(moved[1], 0.5 * PARAMS[1], rtol=1e-6)


def test_a_dict_as_schedule():
    """As ``returnn_updater`` computes it, but on the host."""
    config = {"optimizer": {"class": "sgd"}, "dynamic_learning_rate": {"interval": 3, "decay": 0.5}}
    made = OptzooUpdater(config=Config(config), param_names=NAMES)
    rate = lambda step: made.get_effective_learning_rate(
        learning_rate=1.0, global_train_step=step, epoch=1, epoch_continuous=0.5
    )
    assert [rate(step) for step in range(5)] == [1, 0.5, 0.25, 1, 0.5]
    plain = {"optimizer": {"class": "sgd"}, "log_grad_norm": False}
    plain = OptzooUpdater(config=Config(plain), param_names=NAMES)
    assert plain.log_grad_norm_p is None
    assert plain.get_effective_learning_rate(learning_rate=0.3, global_train_step=9, epoch=2) == 0.3


def logged(config, monkeypatch):
    monkeypatch.setattr(log, "v3", io.StringIO())
    OptzooUpdater(config=Config(config), param_names=NAMES)
    return log.v3.getvalue().splitlines()


def test_the_log_names_what_runs(monkeypatch):
    """All optimizers, each once, and what RETURNN's own updater does not have."""
    assert logged({"optimizer": {"class": "Adam", "epsilon": 0.1}}, monkeypatch) == [
        "JAX updater: optax.adam({'eps': 0.1})"
    ]
    config = {
        "optimizer": {"class": "nadam"},
        "optimizer_epsilon": 1e-6,
        "gradient_clip_norm": 1.0,
        "gradient_clip_avg_norm": 0.0,
        "accum_grad_multiple_step": 2,
        "dynamic_learning_rate": {"interval": 2, "decay": 0.5},
        "updater_layers": {
            "encoder": {"updater_opts": {"optimizer": {"class": "ftrl"}}},
            "norm": {"updater_opts": {"optimizer": {"class": "adamw", "b1": 0.5}}},
            "embedding": {"updater_opts": {"gradient_clip": 1.0}},
        },
    }
    assert logged(config, monkeypatch) == [
        "JAX updater: optzoo.create({'class': 'nadam', 'epsilon': 1e-06})",
        "JAX updater: optzoo.create({'class': 'ftrl'})",
        "JAX updater: optax.adamw({'b1': 0.5})",
        "JAX updater: not in RETURNN's own: the class nadam, the class ftrl, gradient_clip_norm, "
        "updater_layers, dynamic_learning_rate as a dict",
    ]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"log_grad_norm": "2"}, TypeError, "log_grad_norm must be .*got '2': it is True or"),
        ({"log_grad_norm": -1}, ValueError, "log_grad_norm must be .*got -1"),
        ({"dynamic_learning_rate": 0.5}, TypeError, "dynamic_learning_rate must be a dict or a"),
        ({"dynamic_learning_rate": lambda epoch: epoch}, TypeError, "must take \\*\\*kwargs"),
        ({"dynamic_learning_rate": lambda network, **_: 1}, ValueError, "which need TensorFlow"),
        ({"dynamic_learning_rate": {"decay": 0.5}}, ValueError, "keys interval and decay"),
        ({"grad_clip": 1.0}, ValueError, "gradient_clip"),
        ({"optimizer_epsilon": 1e-8}, ValueError, "ignored by RETURNN's JAX backend: write eps"),
        ({"optimizer": {**DECAY, MODULES: ["rf.Linnear"]}}, ValueError, "got 'rf.Linnear'"),
        ({"optimizer": {**DECAY, MODULES: ["torch.nn.LayerNorm"]}}, ValueError, "got 'torch"),
        ({"optimizer": {**DECAY, MODULES: [int]}}, ValueError, "got <class 'int'>"),
        ({"optimizer": {**SGD, "weight_decay": 0.1}}, TypeError, "has no argument 'weight_decay'"),
        ({"optimizer": {**DECAY, CHECK: len}}, TypeError, f"has no argument '{CHECK}'"),
        ({"optimizer": {**DECAY, CHECK: len}, "backend": "torch"}, ValueError, "torch modules"),
    ],
    ids=lambda value: str(next(iter(value))) if isinstance(value, dict) else "",
)
def test_bad_options(options, error, message, model):
    with pytest.raises(error, match=message):
        OptzooUpdater(config=Config({"optimizer": SGD, **options}), model=model, param_names=NAMES)
