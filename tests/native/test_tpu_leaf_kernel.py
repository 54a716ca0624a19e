"""The kernel of arrays with slots in 8 bits on TPUs, interpreted on the CPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optzoo
from optzoo.native.groups import Unsupported
from optzoo.native.tpu_kernels import KERNELS
from optzoo.native.tpu_leaf_kernel import tpu_leaf_kernel
from optzoo.testing import samples

from ..selection import chosen_first
from .guarded import native_calls

in_8_bits = lambda tx, **how: optzoo.slots_dtype(tx, "int8", **how)
# Several blocks of rows, of which the last one is not full; several of columns; three axes.
CASES = {
    "adam": (in_8_bits(optzoo.adam(0.1)), (33, 256)),
    "adamw": (in_8_bits(optzoo.adamw(0.1, weight_decay_per_step=0.01)), (1, 384)),
    "momentum, columns": (in_8_bits(optzoo.momentum(0.1, 0.9)), (3, 8192)),
    "random": (in_8_bits(optzoo.adam(0.1), stochastic=True), (32, 256)),
    "three axes": (in_8_bits(optzoo.adamax(0.1)), (2, 32, 256)),
    "clipped": (optax.chain(optax.clip(0.5), in_8_bits(optzoo.adam(0.1))), (40, 256)),
}


def draw(shape, seed):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def call_of(tx, shape):
    """The native call, and what gives its arguments and results."""
    probe, calls = native_calls(optax.with_extra_args_support(tx), draw(shape, 0), draw(shape, 1))
    assert calls[-1].parts[0].length == 32
    return probe, calls[-1]


@pytest.mark.unique
@pytest.mark.parametrize("name", chosen_first(CASES, {"three axes"}))
def test_it_computes_what_xla_does(name):
    tx, shape = CASES[name]
    probe, call = call_of(tx, shape)
    kernel = jax.jit(tpu_leaf_kernel(call.parts[0], interpret=True))
    params, state = draw(shape, 0), tx.init(draw(shape, 0))
    for seed in range(1, 4):
        args, expected = probe(params, state, draw(shape, seed))[-1]
        for a, b in zip(expected, kernel(*args), strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            np.testing.assert_allclose(
                np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=1e-6, atol=1e-7
            )
        params, state = samples.step(tx, draw(shape, seed), params, state)


@pytest.mark.unique
def test_arrays_of_one_shape_have_a_kernel_each():
    """They are one call, with scalars that all of them read."""
    tx, two = in_8_bits(optzoo.adam(lambda t: 0.1 / t)), [draw((1, 384), seed) for seed in (0, 1)]
    gradients = [draw((1, 384), seed) for seed in (2, 3)]
    probe, calls = native_calls(optax.with_extra_args_support(tx), two, gradients)
    assert len(calls[-1].parts) == 2 and calls[-1].shared
    [kernel] = [k for k in KERNELS if k.match(calls[-1].parts[0])]
    interpreted = kernel._replace(make=functools.partial(tpu_leaf_kernel, interpret=True))
    args, expected = probe(two, tx.init(two), gradients)[-1]
    for a, b in zip(expected, jax.jit(interpreted.lower(calls[-1]))(*args), strict=True):
        np.testing.assert_allclose(
            np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=1e-6, atol=1e-7
        )


@pytest.mark.unique
def test_products_are_of_16_bits():
    """As the matrix unit takes them: others would be several passes, or be converted for each."""
    _, call = call_of(in_8_bits(optzoo.adam(0.1)), (1, 384))
    avals = [jax.ShapeDtypeStruct(v.shape, v.aval.dtype) for v in call.ins]
    program = jax.make_jaxpr(tpu_leaf_kernel(call.parts[0], interpret=True))(*avals)
    [kernel] = [e.params["jaxpr"] for e in program.eqns if e.primitive.name == "pallas_call"]
    products = [e for e in kernel.eqns if e.primitive.name == "dot_general"]
    assert {v.aval.dtype.name for e in products for v in e.invars} == {"bfloat16"}


def test_rows_have_none():
    tx, x = optzoo.row_wise_lamb(0.1), draw((32, 256), 0)
    step = jax.jit(optzoo.native_step(tx, required=True)).trace(x, tx.init(x), x)
    assert "tpu_custom_call" not in step.lower(lowering_platforms=("tpu",)).as_text()


@pytest.mark.unique
@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ((3, 160), "a multiple of 128"),
        ((1, 4224), "or of 4096"),
        ((2, 3, 128), "not a multiple of 32"),
    ],
)
def test_other_arrays_have_none(shape, reason):
    _, call = call_of(in_8_bits(optzoo.adam(0.1)), shape)
    with pytest.raises(Unsupported, match=reason):
        tpu_leaf_kernel(call.parts[0])
