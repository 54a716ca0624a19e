"""NaN in float16, where the epsilon of 1e-8 is zero."""

import jax.numpy as jnp
import optax

import optzoo

ASKED = ["google-deepmind/optax/issues/1789", "google-deepmind/optax/issues/1754"]
ANSWERED = "yes, for the optimizers of optzoo; it has no Adan and no NovoGrad"


def updates(library, names):
    """The first update of each optimizer, by a gradient of zero."""
    x = jnp.zeros(4, jnp.float16)
    found = {}
    for name in names:
        tx = getattr(library, name)(1e-3)
        found[name] = float(tx.update(x, tx.init(x), x)[0].max())
    return ", ".join(f"`{name}` {abs(value):g}" for name, value in found.items())


def with_optax():
    """The update is 0 / 0."""
    return updates(optax, ["adam", "adamax", "rmsprop", "adan", "novograd"])


def with_optzoo():
    """Rules compute in float32, whatever the dtypes are."""
    return updates(optzoo, ["adam", "adamax", "rmsprop", "nadam", "amsgrad"])


if __name__ == "__main__":
    print("optax: ", with_optax(), "\noptzoo:", with_optzoo())
