"""SOAP: Adam in the eigenbasis of Shampoo's statistics."""

import math

import jax
import jax.numpy as jnp
import optax
import optax.contrib

import optzoo

ASKED = ["google-deepmind/optax/issues/1580", "google-deepmind/optax/pull/1692"]
ASKED += ["google-deepmind/optax/pull/1617"]
ANSWERED = "yes: `soap`"


def loss_after(tx, steps=200):
    """A quadratic of a matrix, ill-conditioned in rotated coordinates; it begins at 1."""
    keys = jax.random.split(jax.random.key(0), 2)
    left, right = (jnp.linalg.qr(jax.random.normal(k, (16, 16)))[0] for k in keys)
    scales = jnp.logspace(-1.5, 0, 16)

    def loss(x):
        y = left.T @ x @ right
        return jnp.sum((scales[:, None] * (y - 1) * scales) ** 2)

    def step(carry, _):
        x, state = carry
        updates, state = tx.update(jax.grad(loss)(x), state, x)
        return (x + updates, state), None

    x = jnp.zeros((16, 16))
    (x_end, _), _ = jax.lax.scan(step, (x, tx.init(x)), length=steps)
    return float(loss(x_end) / loss(x))


def with_optax():
    """The pull requests are open; Adam is what there is."""
    has = hasattr(optax.contrib, "soap")
    best = min(loss_after(optax.adam(rate)) for rate in (0.01, 0.03, 0.1))
    power = round(math.log10(best))
    return f"{'' if has else 'no SOAP; '}`adam`, best of three rates: loss about 1e{power}"


def with_optzoo():
    """The same rates."""
    best = min(loss_after(optzoo.soap(rate)) for rate in (0.01, 0.03, 0.1))
    return f"`soap`, best of three rates: loss about 1e{round(math.log10(best))}"


if __name__ == "__main__":
    print("optax: ", with_optax(), "\noptzoo:", with_optzoo())
