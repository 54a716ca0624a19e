"""``OptzooUpdater`` in the place of the updater of RETURNN's JAX backend."""

import io

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from returnn.config import Config
from returnn.jax import updater
from returnn.log import log

import optzoo
from optzoo.interop.returnn import OptzooUpdater
from optzoo.testing import samples

NAMES = ["encoder.weight", "encoder.bias", "a_first.weight"]
PARAMS = [jnp.ones((2, 3)), jnp.array([0.5, -1, 2]), jnp.array([3.0, 1])]


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


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_what_returnn_knows_stays_the_same(name):
    """Adam's epsilon enters in another place, so it is small."""
    options = {"class": name} if name == "sgd" else {"class": name, "epsilon": 1e-16}
    config = Config({"optimizer": options, "gradient_clip_global_norm": 2.0})
    theirs = train(updater.Updater(config=config, param_names=NAMES), 0.1)
    ours = train(OptzooUpdater(config=config, param_names=NAMES), 0.1)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


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


def test_the_log_names_what_runs(monkeypatch):
    """All optimizers, each once, with what ``optimizer_epsilon`` adds."""
    config = {
        "optimizer": {"class": "nadam"},
        "optimizer_epsilon": 1e-6,
        "updater_layers": {
            "encoder": {"updater_opts": {"optimizer": {"class": "ftrl"}}},
            "a_first": {"updater_opts": {"gradient_clip": 1.0}},
        },
    }
    monkeypatch.setattr(log, "v3", io.StringIO())
    OptzooUpdater(config=Config(config), param_names=NAMES)
    assert log.v3.getvalue().splitlines() == [
        "JAX updater: optzoo.create({'class': 'nadam', 'epsilon': 1e-06})",
        "JAX updater: optzoo.create({'class': 'ftrl'})",
    ]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"log_grad_norm": "2"}, TypeError, "log_grad_norm must be .*got '2': it is True or"),
        ({"log_grad_norm": -1}, ValueError, "log_grad_norm must be .*got -1"),
        ({"dynamic_learning_rate": 0.5}, TypeError, "dynamic_learning_rate must be a dict or a"),
        ({"dynamic_learning_rate": lambda epoch: epoch}, TypeError, "must take \\*\\*kwargs"),
        ({"dynamic_learning_rate": lambda network, **_: 1}, ValueError, "which only TensorFlow"),
        ({"dynamic_learning_rate": {"decay": 0.5}}, ValueError, "keys interval and decay"),
        ({"grad_clip": 1.0}, ValueError, "gradient_clip"),
    ],
    ids=["norm-text", "norm", "rate", "kwargs", "network", "keys", "unknown"],
)
def test_bad_options(options, error, message):
    with pytest.raises(error, match=message):
        OptzooUpdater(config=Config({"optimizer": {"class": "sgd"}, **options}), param_names=NAMES)
