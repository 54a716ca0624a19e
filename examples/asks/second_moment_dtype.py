"""The second moment in bfloat16 (`nu_dtype`)."""

import inspect

import jax
import jax.numpy as jnp
import optax

import optzoo

ASKED = ["AI-Hypercomputer/maxtext/pull/2546", "AI-Hypercomputer/maxtext/pull/1437"]
ANSWERED = "yes, for all slots of all optimizers, with stochastic rounding"
STEPS = 1000


def after_steps(tx):
    """Bytes of state for each parameter, and v after 1000 gradients of one (right: 0.63)."""
    x = jnp.zeros(128)

    def step(state, _):
        return tx.update(jnp.ones(128), state, x)[1], None

    state, _ = jax.lax.scan(step, tx.init(x), length=STEPS)
    slots = [a for a in jax.tree.leaves(state) if a.shape == (128,)]
    v = slots[-1].astype(jnp.float32).mean()
    return f"{sum(a.dtype.itemsize for a in slots)} bytes, v {float(v):.2f}"


def with_optax():
    """There is `mu_dtype` alone."""
    no = "nu_dtype" not in inspect.signature(optax.adam).parameters
    found = after_steps(optax.adam(1e-3, mu_dtype=jnp.bfloat16))
    return f"`adam(mu_dtype=bfloat16)`: {found}{'; no `nu_dtype`' * no}"


def with_optzoo():
    """Rounded to the nearest, v stays far too small: a step changes it by less than 1/256."""
    nearest = after_steps(optzoo.slots_dtype(optzoo.adam(1e-3), "bfloat16"))
    random = after_steps(optzoo.slots_dtype(optzoo.adam(1e-3), "bfloat16", stochastic=True))
    return f'`slots_dtype(adam, "bfloat16")`: {nearest}; with `stochastic=True`: {random}'


if __name__ == "__main__":
    print("optax: ", with_optax(), "\noptzoo:", with_optzoo())
