"""Muon for the hidden layers, AdamW for the rest, in one optimizer: the next character of a text.

    python examples/muon.py

The text is a module of Python's standard library. The model reads eight characters. It has an
embedding, two hidden layers of different shapes and a last layer; only the kernels of the hidden
layers are for Muon.
"""

import inspect
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optzoo

LENGTH, WIDTH, HIDDEN, BATCH = 8, 16, 128, 256

TX = optzoo.param_groups(
    {
        "hidden/.*/kernel": optzoo.muon(optax.linear_schedule(0.02, 0.0, 300), weight_decay=0.1),
        ".*": optax.adamw(3e-3),  # the embedding, the last layer, and all biases
    }
)


def text():
    """The characters as numbers, and how many there are."""
    symbols, ids = np.unique(list(inspect.getsource(textwrap)), return_inverse=True)
    return ids.astype(np.int32), len(symbols)


def new_params(symbols, seed=0):
    """Embedding, hidden layers and the last layer; kernels have the outputs in the last axis."""
    normal = jax.nn.initializers.lecun_normal()
    layer = lambda key, inputs, outputs: {
        "kernel": normal(key, (inputs, outputs)),
        "bias": jnp.zeros(outputs),
    }
    keys = jax.random.split(jax.random.key(seed), 4)
    return {
        "embedding": jax.random.normal(keys[0], (symbols, WIDTH)),
        "hidden": {
            "in": layer(keys[1], LENGTH * WIDTH, HIDDEN),
            "out": layer(keys[2], HIDDEN, WIDTH),
        },
        "last": layer(keys[3], WIDTH, symbols),
    }


def loss(params, windows):
    """The mean cross-entropy of the last character of each window."""
    apply = lambda layer, x: x @ layer["kernel"] + layer["bias"]
    x = params["embedding"][windows[:, :-1]].reshape(len(windows), -1)
    for name in ("in", "out"):
        x = jax.nn.relu(apply(params["hidden"][name], x))
    logits = apply(params["last"], x)
    return optax.losses.softmax_cross_entropy_with_integer_labels(logits, windows[:, -1]).mean()


def train(tx=TX, steps=300, seed=0):
    """The losses of some steps."""
    ids, symbols = text()
    windows = np.lib.stride_tricks.sliding_window_view(ids, LENGTH + 1)
    rng, params = np.random.default_rng(seed), new_params(symbols, seed)
    step, state = optzoo.minimize(loss, tx), tx.init(params)
    losses = []
    for _ in range(steps):
        batch = jnp.asarray(windows[rng.integers(0, len(windows), BATCH)])
        params, state, value = step(params, state, batch)
        losses.append(value)
    return np.array(losses)


if __name__ == "__main__":
    for name, tx in {"Muon and AdamW": TX, "AdamW alone": optax.adamw(3e-3)}.items():
        losses = train(tx)
        print(f"{name}: loss {losses[0]:.2f} at first, {losses[-20:].mean():.2f} in the end")
