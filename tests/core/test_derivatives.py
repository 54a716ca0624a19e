"""Derivatives of derivatives through updates: in every order, inside and outside of loops.

JAX 0.10 forgets the rules of ``jax.custom_jvp`` in some of them (``core/compat.py``).
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import optzoo
from optzoo.core import compat

STEPS = 2


def one_by_one(body, carry):
    for k in range(STEPS):
        carry = body(carry, k)
    return carry


LOOPS = {
    "no loop": one_by_one,
    "jit": lambda body, carry: one_by_one(jax.jit(body), carry),
    "checkpoint": lambda body, carry: one_by_one(jax.checkpoint(body), carry),
    "cond": lambda body, carry: one_by_one(
        lambda c, k: lax.cond(jnp.sum(c[0]) < 1e9, body, lambda c, k: c, c, k), carry
    ),
    "scan": lambda body, carry: lax.scan(lambda c, k: (body(c, k), None), carry, jnp.arange(STEPS))[
        0
    ],
    "scan of checkpoint": lambda body, carry: lax.scan(
        lambda c, k: (jax.checkpoint(body)(c, k), None), carry, jnp.arange(STEPS)
    )[0],
    "fori_loop": lambda body, carry: lax.fori_loop(0, STEPS, lambda k, c: body(c, k), carry),
    "while_loop": lambda body, carry: lax.while_loop(
        lambda c: c[1] < STEPS, lambda c: (body(*c), c[1] + 1), (carry, 0)
    )[0],
}
MODES = {"forward": jax.jacfwd, "reverse": jax.jacrev}
CASES = [  # a while_loop has no derivative in reverse
    (loop, first, second)
    for loop, first, second in itertools.product(LOOPS, MODES, MODES)
    if loop != "while_loop" or first == second == "forward"
]


def twice(f, first, second):
    return MODES[second](MODES[first](f))


@pytest.mark.parametrize(("loop", "first", "second"), CASES)
def test_a_rule_is_never_forgotten(loop, first, second):
    """That of a function which says that it is its own derivative, as the sine is not.

    With a function inside that JAX 0.12 lowers in a step of its own.
    """
    f = compat.custom_jvp(lambda x: jnp.ldexp(jnp.sin(x), 0))
    f.defjvp(lambda primals, tangents: (f(*primals), tangents[0] * f(*primals)))

    def after(x):
        [y] = LOOPS[loop](lambda c, k: (jnp.where(k == 0, f(c[0]), 2 * c[0]),), (x,))
        return y

    f_twice = twice(after, first, second)
    alone, batch = jax.jit(lambda x: (f_twice(x), jax.vmap(f_twice)(x * jnp.ones(2))))(0.3)
    np.testing.assert_allclose([alone, *batch], 2 * np.sin(0.3), rtol=1e-6)


def after(tx, loop, scale):
    """A smooth function of a factor of the gradients, of which one is 0."""
    x = jnp.ones((2, 3))

    def body(carry, k):
        x, state = carry
        g = jnp.array([[0.0, 1.0, 2.0], [0.5, 2.0, -1.0]]) * scale * jnp.cos(x + k)
        u, state = tx.update(g, state, x)
        return x + u, state

    return jnp.sum(jnp.sin(LOOPS[loop](body, (x, tx.init(x)))[0]))


TWICE = {
    "adam": optzoo.adam(0.1),
    "ftrl": optzoo.ftrl(0.1, learning_rate_power=-0.3, l1_regularization_strength=0.01),
    "normalized_sgd": optzoo.normalized_sgd(0.1),
    "row_wise_adagrad": optzoo.row_wise_adagrad(0.1),
}


@pytest.mark.parametrize("name", TWICE)
def test_second_derivatives_of_updates(x64, name):
    with x64(True):
        for loop in ("no loop", "scan"):
            f = jax.jit(functools.partial(after, TWICE[name], loop))
            h = 1e-4
            want = (f(0.3 + h) - 2 * f(0.3) + f(0.3 - h)) / h**2
            for first in MODES:
                got = jax.jit(twice(f, first, "forward"))(0.3)
                np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


REFUSED = {
    "blocked_shampoo": optzoo.blocked_shampoo(0.1),
    "ggt": optzoo.ggt(0.1, window=3),
    "shampoo": optzoo.shampoo(0.1),
    "soap": optzoo.soap(0.1),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_second_derivative_is_refused(name):
    """In the loop in which JAX 0.10 forgets rules; all loops are above."""
    f = functools.partial(after, REFUSED[name], "scan")
    for second in MODES:
        with pytest.raises(NotImplementedError, match="first derivatives only"):
            jax.eval_shape(twice(f, "reverse", second), 0.3)
