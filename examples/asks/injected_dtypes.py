"""`inject_hyperparams` changes the dtype of moments in bfloat16."""

import jax
import jax.numpy as jnp
import optax

import optzoo

ASKED = ["google/tunix/pull/1880", "google-deepmind/optax/pull/1445"]
ANSWERED = "yes: dtypes of slots never change"


def dtypes(tx):
    """The dtypes of the moments before and after an update, and that of the update."""
    x = jnp.ones(4, jnp.bfloat16)
    state = tx.init(x)
    update, after = tx.update(x, state, x)
    moments = lambda s: "/".join(str(a.dtype) for a in jax.tree.leaves(s) if a.shape == (4,))
    return f"moments {moments(state)}, after an update {moments(after)}; update {update.dtype}"


def with_optax():
    """In the dtype of the parameters b2 would be 1, so hyper-parameters are float32."""
    inject = optax.inject_hyperparams(optax.adam, hyperparam_dtype=jnp.float32)
    return dtypes(inject(learning_rate=1e-3))


def with_optzoo():
    """The same around an optimizer of optzoo, whose slots are in bfloat16."""

    def adam(learning_rate, b1, b2):
        return optzoo.slots_dtype(optzoo.adam(learning_rate, b1, b2), "bfloat16")

    inject = optax.inject_hyperparams(adam, hyperparam_dtype=jnp.float32)
    return dtypes(inject(learning_rate=1e-3, b1=0.9, b2=0.999))


if __name__ == "__main__":
    print("optax: ", with_optax(), "\noptzoo:", with_optzoo())
