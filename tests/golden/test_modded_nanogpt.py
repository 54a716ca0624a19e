"""Wrappers follow modded-nanogpt step by step; ``make_modded_nanogpt.py`` describes the records."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optzoo
from optzoo.testing import samples

ARRAYS = dict(np.load(pathlib.Path(__file__).with_name("modded_nanogpt.npz")))
META = json.loads(str(ARRAYS.pop("meta")))
CASES = META["cases"]


def of_case(case, key):
    """What was recorded of each matrix, in the layout of JAX, float64."""
    names = [name.split("/") for name in ARRAYS]
    chosen = [n for c, n, k in names if (c, k) == (case, key)]
    return {n: ARRAYS[f"{case}/{n}/{key}"].swapaxes(-1, -2) for n in chosen}


def rates(case, factor=1.0):
    """A schedule with the rates of a case, times a factor."""
    return lambda step: factor * jnp.asarray(CASES[case]["rates"])[step]


def hyperball(inner, case):
    return optzoo.hyperball(inner, rates(case), {".*": (0, 1)})


def muonh(case, *, mu):
    """Its coefficients and steps are in its code; it is indifferent to the rate of Muon."""
    muon = optzoo.muon(
        1.0,
        momentum=mu,
        ns_steps=12,
        ns_coefficients=(2, -1.5, 0.5),
        weight_decay=0.0,
        iteration_dtype="float64",
    )
    return hyperball(muon, case)


def adamh(case, *, betas, eps):
    return hyperball(optax.adam(1.0, *betas, eps=eps), case)


def klsoaph(case, *, beta1, beta2, shampoo_beta, eps, precondition_frequency):
    """It is indifferent to the rate of SOAP, and to its correction of the bias."""
    soap = optzoo.soap(
        1.0, beta1, beta2, shampoo_beta, eps, precondition_frequency, kl_statistics=True
    )
    return hyperball(soap, case)


def cautious(case, *, momentum, weight_decay):
    inner = optzoo.momentum(rates(case), momentum)
    decay = rates(case, weight_decay)
    return optzoo.cautious_weight_decay(inner, weight_decay_per_step=decay)


def ema_nesterov(
    case, *, momentum, lookahead_stepsize, lookahead_ema, prefill_steps, rest_steps, **of_sgd
):
    """The step ahead before the i-th gradient is made at the end of the step before it."""
    rate = rates(case, lookahead_stepsize / CASES[case]["rates"][0])

    def lookahead(step):
        i = step + 1
        return jnp.where((i + 1 > prefill_steps) & (i < rest_steps), rate(step), 0.0)

    return optzoo.ema_nesterov(optzoo.momentum(rates(case), momentum), lookahead, lookahead_ema)


def muloco(case, *, momentum, outer_lr, outer_momentum, sync_interval):
    return optzoo.diloco(
        optzoo.momentum(rates(case), momentum),
        optax.sgd(outer_lr, momentum=outer_momentum, nesterov=True),
        axis_name=None,
        communication_period=sync_interval,
    )


MAKE = {
    "muonh": muonh,
    "adamh": adamh,
    "cautious": cautious,
    "ema_nesterov": ema_nesterov,
    "muloco": muloco,
    "klsoaph": klsoaph,
}


def assert_same(got, want):
    assert got.keys() == want.keys() and want
    for name, x in want.items():
        np.testing.assert_allclose(got[name], x, rtol=0, atol=1e-12, err_msg=name)


@pytest.mark.every_value
@pytest.mark.parametrize("case", CASES)
def test_records(case, x64):
    with x64(True):
        tx = MAKE[case](case, **CASES[case]["kwargs"])
        init = of_case(case, "init")
        if given := of_case(case, "grad"):
            got = samples.trajectory(tx, init, lambda _, g: g, given)
            assert_same(got, of_case(case, "after"))
            return
        curvature, targets = of_case(case, "curvature"), of_case(case, "target")
        grads = lambda x, target: {n: curvature[n] * (x[n] - target[n]) for n in x}
        read, new, evaluated = trajectory(tx, init, grads, targets)
    assert_same(evaluated if case == "ema_nesterov" else new, of_case(case, "after"))
    if case == "ema_nesterov":
        assert_same(read, of_case(case, "read"))


def trajectory(tx, x, grads, xs):
    """The parameters of each gradient, the new ones, and those to evaluate."""

    def body(carry, inputs):
        x, state = samples.step_of(tx)(*carry, grads(carry[0], inputs))
        return (x, state), (carry[0], x, optzoo.eval_params(x, state))

    return jax.jit(lambda: jax.lax.scan(body, (x, tx.init(x)), xs)[1])()
