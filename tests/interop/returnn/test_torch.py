"""A config with ``backend = "torch"``, by the record of RETURNN's updater for torch."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optzoo.interop.returnn import returnn_updater
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
