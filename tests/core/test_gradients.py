"""Gradients and parameters that no optimizer takes are refused by name."""

import jax.numpy as jnp
import pytest

import optzoo
from optzoo.core.gradients import check_gradients

FIXES = {
    "int32": "freeze the parameter",
    "bool": "freeze the parameter",
    "complex64": "split_real_and_imaginary",
    "float8_e4m3fn": "keep the parameter in bfloat16 or float32",
}
G = {"layer": {"w": jnp.ones(3), "none": None}}


@pytest.mark.parametrize("dtype", FIXES)
def test_dtypes(dtype):
    params = {"layer": {"w": jnp.ones(3, dtype), "none": jnp.ones(3, dtype)}}
    with pytest.raises(
        TypeError, match=rf"^parameter 'layer/w' has dtype {dtype}: .*{FIXES[dtype]}"
    ):
        check_gradients(G, params)
    message = rf"^parameter 'layer/w' has a gradient of dtype {dtype}: .*{FIXES[dtype]}"
    with pytest.raises(TypeError, match=message):
        check_gradients({"layer": {"w": params["layer"]["w"]}})


def test_a_parameter_without_gradient_may_have_any_dtype():
    params = {"layer": {"w": jnp.ones(3), "none": jnp.ones(2, int)}}
    gs, xs, _ = check_gradients(G, params)
    assert gs[0] is None and gs[1] is G["layer"]["w"] and len(xs) == 2
    tx = optzoo.adam()
    updates, _ = tx.update(G, tx.init(params), params)
    assert updates["layer"]["none"] is None


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_floating_point_passes(dtype):
    check_gradients(G, {"layer": {"w": jnp.ones(3, dtype), "none": 1}})
