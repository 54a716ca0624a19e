"""Follows what RETURNN's own updaters did with each option (``tests/golden/README.md``)."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optzoo import SparseRows
from optzoo.interop.returnn.updater import returnn_updater
from optzoo.testing import samples

FILE = pathlib.Path(__file__).parents[2] / "golden" / "returnn.npz"
with np.load(FILE) as file:
    ARRAYS = {name: file[name] for name in file.files}
META = json.loads(str(ARRAYS.pop("meta")))
CASES = META["cases"]


def in_jax(value):
    """What stands for a function becomes one."""
    match value:
        case {"$inverse_root": _}:
            return lambda learning_rate, global_train_step, **_: (
                learning_rate / jnp.sqrt(global_train_step + 1.0)
            )
        case {"$clip": c}:
            return lambda var: jnp.clip(var, -c, c)
        case {"$grad": factor}:
            return lambda var, grad: var + factor * grad
        case dict():
            return {name: in_jax(inner) for name, inner in value.items()}
    return value


def spoilt(gradients):
    """As in the generator."""
    gradients = {name: array.copy() for name, array in gradients.items()}
    for name, array in gradients.items():
        if name.startswith("grad_val/"):
            array.reshape(META["steps"], -1)[2, 0] = np.nan
    gradients["grad/first/bias"][2, 0] = np.nan
    gradients["grad/first/kernel"][4, 1, 1] = np.inf
    gradients["grad/last/conv"][4, 0, 0, 0] = np.nan
    gradients["grad/last/scalar"][6] = -np.inf
    return gradients


def follow(case):
    """Our parameters after each step, in a row as in the records."""
    names = case["variables"]
    params = {name: jnp.asarray(ARRAYS[f"init/{name}"]) for name in names}
    fed = {k: v for k, v in ARRAYS.items() if k.startswith("grad")}
    fed = spoilt(fed) if case.get("bad") else fed
    fed = {k: v for k, v in fed.items() if k.partition("/")[2] in names}
    rates = np.asarray(case.get("rates", [0.1] * META["steps"]), np.float32)
    config = in_jax(case["config"]) | {"learning_rate": case.get("initial_rate", 1.0)}
    tx = returnn_updater(config, layers=case["layers"], returnn_version=case["era"])

    def gradients(fed, params):
        some = {}
        for name, x in params.items():
            if f"grad/{name}" in fed:
                some[name] = fed[f"grad/{name}"]
                if case.get("quadratic"):
                    some[name] += ARRAYS[f"quadratic/{name}"] * x
            else:
                listed = fed[f"grad_idx/{name}"], fed[f"grad_val/{name}"]
                some[name] = SparseRows(*listed, len(x))
        return some

    def step(carry, inputs):
        params, state = carry
        fed, rate = inputs
        grad_fn = lambda params: gradients(fed, params)
        extra = {"learning_rate": rate, "grad_fn": grad_fn}
        params, state = samples.step(tx, grad_fn(params), params, state, **extra)
        return (params, state), jnp.concatenate([params[name].ravel() for name in names])

    run = lambda params, inputs: jax.lax.scan(step, (params, tx.init(params)), inputs)[1]
    # Small programs: to optimize them takes longer than to run them.
    fast = {"xla_backend_optimization_level": 0}
    return jax.device_get(jax.jit(run, compiler_options=fast)(params, (fed, rates)))


@pytest.mark.every_value
@pytest.mark.parametrize("name", CASES)
def test_follows_returnn(name):
    want, got = ARRAYS[f"param/{name}"], follow(CASES[name])
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want))
    error = np.abs(got - want) / np.maximum(np.abs(want), 1)
    assert np.max(error[np.isfinite(error)]) < 2e-5
    assert np.max(np.abs(np.diff(want, axis=0))) > 0


def test_records_show_what_their_options_do():
    """No two of them go the same way, but for those that should."""
    paths = {}
    for name in sorted(CASES):
        paths.setdefault(ARRAYS[f"param/{name}"].tobytes(), []).append(name)
    assert sorted(names for names in paths.values() if len(names) > 1) == [
        ["accum1", "old_momentum"],
        ["class_adagrad", "old_adagrad"],
        ["class_lazyadam", "epsilon"],
        ["noise_zero", "nothing"],
    ]
