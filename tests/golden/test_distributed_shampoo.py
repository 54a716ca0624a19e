"""Shampoo follows torch's; ``make_distributed_shampoo.py`` describes the records."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optzoo
from optzoo.testing import samples

ARRAYS = dict(np.load(pathlib.Path(__file__).with_name("distributed_shampoo.npz")))
CASES = json.loads(str(ARRAYS.pop("meta")))["cases"]
COMMON = {
    "block_size": 8,
    "root": "pseudo_inverse",
    "preconditioner_interval": 1,
    "start_step": 0,
    "grafting": "sgd",
    "grafting_b2": 0.75,
    "grafting_eps": 2**-7,
}


def of_case(case, key):
    """What was recorded of each parameter."""
    names = [name.split("/")[1] for name in ARRAYS if name.startswith(f"{case}/")]
    return {name: ARRAYS[f"{case}/{name}/{key}"] for name in dict.fromkeys(names)}


def follow(case, **more):
    """The parameters after each step."""
    tx = optzoo.blocked_shampoo(0.125, 0.875, 0.9375, **COMMON | CASES[case]["ours"] | more)
    init = jax.tree.map(jnp.asarray, of_case(case, "init"))
    return samples.trajectory(tx, init, lambda _, g: g, of_case(case, "grad"))


@pytest.mark.every_value
@pytest.mark.parametrize("case", CASES)
def test_records(case, x64):
    with x64(True):
        got = follow(case)
    for name, want in of_case(case, "param").items():
        np.testing.assert_allclose(got[name], want, rtol=0, atol=1e-11, err_msg=name)
