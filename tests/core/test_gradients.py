"""Gradients and parameters that no optimizer takes are refused by name."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optzoo
from optzoo.core.gradients import check_gradients

FIXES = {
    "int32": "freeze the parameter",
    "bool": "freeze the parameter",
    "complex64": "split_real_and_imaginary",
    "float8_e4m3fn": "keep the parameter in bfloat16 or float32",
}
STATELESS = {
    "scale": optzoo.transforms.scale(0.1),
    "scale_by_schedule": optzoo.transforms.scale_by_schedule(lambda step: 0.1),
    "clip_by_norm": optzoo.transforms.clip_by_norm(1.0),
    "clip_by_average_norm": optzoo.transforms.clip_by_average_norm(1.0),
    "clip_by_global_norm": optzoo.clip_by_global_norm(1.0),
    "zero_if_norm_exceeds": optzoo.transforms.zero_if_norm_exceeds(1.0),
    "gradient_nan_inf_filter": optzoo.transforms.gradient_nan_inf_filter(),
    "gradient_summaries": optzoo.transforms.gradient_summaries(),
    "check_numerics": optzoo.transforms.check_numerics(),
    "global_norm": optax.stateless(lambda updates, _: optzoo.rows.global_norm(updates)),
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


def test_gradients_of_integers():
    """``jax.grad`` gives float0 with ``allow_int``."""
    params = {"layer": {"w": jnp.ones(3), "n": jnp.arange(3)}}
    loss = lambda p: jnp.sum(p["layer"]["w"] * p["layer"]["n"])
    grads = jax.grad(loss, allow_int=True)(params)
    message = r"'layer/n' has dtype int32: freeze the parameter with a gradient of None"
    tx = optzoo.adam()
    with pytest.raises(TypeError, match=message):
        tx.update(grads, tx.init(params), params)


BOXES = {
    "Lines": optzoo.rows.to_lines,
    "Partitioned": lambda x: nn.Partitioned(x, ("vocab", "embed")),
}


@pytest.mark.parametrize("kind", BOXES)
def test_a_gradient_outside_of_the_box_of_its_parameter(kind):
    x, tx = np.ones((16, 6), "float32"), optzoo.lazy_adam(0.1)
    params = {"w": BOXES[kind](x)}
    for g in (x, optzoo.SparseRows(np.arange(2), x[:2], 16)):
        with pytest.raises(ValueError, match=f"'w' is in a {kind}, but its gradient is not"):
            tx.update({"w": g}, tx.init(params), params)


@pytest.mark.parametrize("name", STATELESS)
def test_gradients_alone_of_dtypes_without_arithmetic(name):
    tx, float0 = STATELESS[name], np.zeros(3, jax.dtypes.float0)
    for g, message in (
        (float0, "dtype float0: freeze the parameter with a gradient of None"),
        (jax.random.key(0), "dtype key<fry>: keep random keys out of the parameters"),
    ):
        grads = {"layer": {"w": jnp.ones(3), "n": g}}
        with pytest.raises(TypeError, match=f"^array 'layer/n' has {message}"):
            tx.update(grads, tx.init(grads), grads)


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
