"""FTRL for embeddings: which L2, and what happens to initial values."""

import warnings

import jax.numpy as jnp
import optax

import optzoo

ASKED = ["meta-pytorch/torchrec/pull/4710", "NVIDIA/recsys-examples/pull/487"]
ASKED += ["pytorch/FBGEMM/pull/6295"]
ANSWERED = "yes: `ftrl_from`, and a warning. DynamicEmb has FTRL since v26.10 (November 2026)"


def with_optax():
    """There is none."""
    return "FTRL exists" if hasattr(optax, "ftrl") else "no FTRL"


def with_optzoo():
    """DynamicEmb's l2 is twice TensorFlow's; an accumulator of 0.1 discards initial values."""
    x, g = jnp.array([1.0, -2.0]), jnp.array([0.5, 0.25])
    step = lambda tx, g=g: tx.update(g, tx.init(x), x)[0]
    theirs = optzoo.ftrl_from("dynamicemb", learning_rate=0.1, l2_reg=0.2)
    halved = optzoo.ftrl(0.1, initial_accumulator_value=0.0, l2_regularization_strength=0.1)
    equal = bool(jnp.allclose(step(theirs), step(halved)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", optzoo.InitialValueWarning)
        tx = optzoo.ftrl_from("dynamicemb", learning_rate=1e-9, initial_accumulator_value=0.1)
        kept = 1 + step(tx, jnp.full(2, 0.01))[0] / x[0]
    warned = any(w.category is optzoo.InitialValueWarning for w in caught)
    return (
        f"l2 of DynamicEmb halved gives the same: {equal}; with an accumulator of 0.1 the "
        f"first update by 0.01 keeps {100 * float(kept):.2f} % of the value; a warning: {warned}"
    )


if __name__ == "__main__":
    print("optax: ", with_optax(), "\noptzoo:", with_optzoo())
