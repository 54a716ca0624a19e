"""A config with ``backend = "torch"``, by the record of RETURNN's updater for torch."""

import fractions
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optzoo.interop.returnn import returnn_updater
from optzoo.interop.returnn.torch_adams import length_of_mean
from optzoo.testing import samples

RECORD = json.loads((pathlib.Path(__file__).parents[2] / "golden/returnn_torch.json").read_text())
CASES = RECORD["cases"]
INIT = {name: np.asarray(x, np.float32) for name, x in RECORD["init"].items()}
GRADS = {name: np.asarray(x, np.float32) for name, x in RECORD["grads"].items()}
# What the modules say of decay, where it is not that biases have none.
BY_DEFAULT, WITHOUT_LINEAR = "linear.weight", ("norm.weight", "embedding.weight")
MASKS = {"adamw_all_modules": None, "adamw_without_linear": WITHOUT_LINEAR}


def follow(name):
    """Our parameters after each step, in a row as in the record."""
    case = CASES[name]
    config = {**case["config"], "backend": "torch"}
    tx = returnn_updater(config, decay_mask=MASKS.get(name, BY_DEFAULT))

    def step(carry, inputs):
        grads, rate = inputs
        grads = {name: case["factor"] * g for name, g in grads.items()}
        params, state = samples.step(tx, grads, *carry, learning_rate=rate)
        return (params, state), jnp.concatenate([params[name].ravel() for name in INIT])

    inputs = GRADS, np.asarray(RECORD["rates"], np.float32)
    run = lambda params, inputs: jax.lax.scan(step, (params, tx.init(params)), inputs)[1]
    # Small programs: to optimize them takes longer than to run them.
    fast = {"xla_backend_optimization_level": 0}
    return jax.device_get(jax.jit(run, compiler_options=fast)(INIT, inputs))


@pytest.mark.every_value
@pytest.mark.parametrize("name", CASES)
def test_follows_returnn(name):
    np.testing.assert_allclose(follow(name), CASES[name]["params"], rtol=0, atol=2e-6)


def test_records_show_what_their_options_do():
    """No two of them go the same way, by much more than our distance from them."""
    paths = {name: np.asarray(case["params"]) for name, case in CASES.items()}
    for name, path in paths.items():
        for other in paths.keys() - {name}:
            assert np.max(np.abs(path - paths[other])) > 1e-3, (name, other)


@pytest.mark.parametrize("b2", [0.5, 0.9, 0.98, 0.999, 0.9999])
def test_length_of_radam_is_exact_enough(b2):
    """Its terms cancel in float32 in the first steps, in which it is compared with 5."""
    steps = [*range(1, 40), 100, 500, 1000, 1999, 2001, 3000, 10_000, 30_000]
    exact = []
    for t in steps:
        b = fractions.Fraction(round(b2 * 10**4), 10**4)
        power = fractions.Fraction(float(b) ** t) if t > 40 else b**t
        exact.append(float(2 / (1 - b) - 1 - 2 * t * power / (1 - power)))
    ours = jax.jit(lambda t: length_of_mean(b2, t))(jnp.asarray(steps, jnp.int32))
    np.testing.assert_allclose(ours, exact, rtol=3e-6)


@pytest.mark.parametrize("name", ["radam", "nadam"])
def test_many_steps_of_radam_and_nadam(name):
    """Against torch's formulas in float64."""
    rng = np.random.default_rng(0)
    x, m, v, product = rng.normal(size=4), np.zeros(4), np.zeros(4), 1.0
    grads = rng.normal(size=(400, 4)).astype(np.float32) + np.float32(0.3)
    tx = returnn_updater({"backend": "torch", "optimizer": {"class": name}, "learning_rate": 0.01})
    step = jax.jit(lambda carry, g: (samples.step(tx, g, *carry), 0))
    params = jnp.asarray(x, jnp.float32)
    (params, _), _ = jax.lax.scan(step, (params, tx.init(params)), grads)
    for t, g in enumerate(grads.astype(np.float64), 1):
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        correction = 1 - 0.999**t
        if name == "radam":
            length = 1999 - 2 * t * 0.999**t / correction
            u = m / (1 - 0.9**t)
            if length > 5:
                ratio = (length - 4) * (length - 2) * 1999 / (1995 * 1997 * length)
                u *= np.sqrt(ratio * correction) / (np.sqrt(v) + 1e-8)
        else:
            now, ahead = (0.9 * (1 - 0.5 * 0.96 ** (0.004 * s)) for s in (t, t + 1))
            product *= now
            u = (1 - now) / (1 - product) * g + ahead / (1 - product * ahead) * m
            u /= np.sqrt(v / correction) + 1e-8
        x = x - 0.01 * u
    np.testing.assert_allclose(params, x, rtol=0, atol=2e-5)
