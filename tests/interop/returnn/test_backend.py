"""The recipe of ``docs/returnn.md`` in the place of the updater of RETURNN's JAX backend."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from returnn.config import Config
from returnn.jax import updater

import optzoo

PAGE = pathlib.Path(__file__).parents[3] / "docs" / "returnn.md"
NAMES = ["encoder.weight", "encoder.bias", "a_first.weight"]
PARAMS = [jnp.ones((2, 3)), jnp.array([0.5, -1, 2]), jnp.array([3.0, 1])]


@pytest.fixture(scope="module")
def recipe():
    """The class as the page has it."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    [code] = [block for block in blocks if "class OptzooUpdater" in block]
    names = {}
    exec(compile(code, PAGE.name, "exec"), names)
    return names["OptzooUpdater"]


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
def test_what_returnn_knows_stays_the_same(recipe, name):
    """Adam's epsilon enters in another place, so it is small."""
    options = {"class": name} if name == "sgd" else {"class": name, "epsilon": 1e-16}
    config = Config({"optimizer": options, "gradient_clip_global_norm": 2.0})
    theirs = train(updater.Updater(config=config, param_names=NAMES), 0.1)
    ours = train(recipe(config=config, param_names=NAMES), 0.1)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_what_it_does_not_know_works(recipe):
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
    got = train(recipe(config=config, param_names=NAMES), 0.1)
    tx = optax.chain(optzoo.clip_by_norm(1.0), optzoo.ftrl(0.1, l1_regularization_strength=0.01))
    x = dict(zip(NAMES, PARAMS, strict=True))
    state = tx.init(x)
    l2 = {name: 0.2 if name.startswith("encoder") else 0.0 for name in NAMES}
    for k in range(4):
        grads = {name: jnp.cos(a) + l2[name] * a for name, a in x.items()}
        updates, state = tx.update(grads, state, x, learning_rate=0.1 / (1 + k))
        x = optax.apply_updates(x, updates)
    for name, a in zip(NAMES, got, strict=True):
        np.testing.assert_allclose(a, x[name], rtol=1e-5)


def test_the_schedule_stays_with_the_engine(recipe):
    """It is applied once: by the engine, which hands on the rate."""
    halved = lambda learning_rate, epoch, **_: learning_rate / 2
    config = {"optimizer": {"class": "sgd"}, "dynamic_learning_rate": halved, "log_grad_norm": True}
    made = recipe(config=Config(config), param_names=NAMES)
    rate = made.get_effective_learning_rate(learning_rate=1.0, global_train_step=3, epoch=1)
    assert rate == 0.5 and made.log_grad_norm_p == 2
    moved, _ = made.step(
        params=PARAMS, grads=PARAMS, opt_state=made.init(PARAMS), learning_rate=rate
    )
    np.testing.assert_allclose(moved[1], 0.5 * PARAMS[1], rtol=1e-6)
