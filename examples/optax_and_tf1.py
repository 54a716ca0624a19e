"""Measures where optax's optimizers differ from TensorFlow 1's, and prints a table.

``optzoo.create`` stands for TensorFlow 1: it follows recorded trajectories of the original
(``tests/golden``). Both optimizers get the same gradients for six steps. The difference is relative
to the largest distance of TensorFlow's parameters from their start.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optzoo

STEPS, SHAPE = 6, (4, 3)
RATE = 0.1


def gradients():
    """Gradients with magnitudes from 0.001 to 1, and both signs."""
    random = np.random.RandomState(0)
    sizes = 10.0 ** random.uniform(-3, 0, (STEPS, *SHAPE))
    return jnp.asarray(sizes * random.choice([-1.0, 1.0], sizes.shape), jnp.float32)


def displacement(tx):
    """How far each parameter is from its start after each step."""
    start = jnp.linspace(-1.0, 1.0, 12, dtype=jnp.float32).reshape(SHAPE)

    def step(carry, g):
        x, state = carry
        update, state = tx.update(g, state, x)
        return (x + update, state), x + update - start

    return jax.lax.scan(step, (start, tx.init(start)), gradients())[1]


def difference(ours, theirs):
    """The largest difference, relative to the largest displacement of the first."""
    a, b = displacement(ours), displacement(theirs)
    return float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(a)))


def tf(name, **kwargs):
    """The optimizer of TensorFlow 1."""
    return optzoo.create(name, learning_rate=RATE, **kwargs)


def decayed_momentum(weight_decay):
    """MomentumW as a chain of optax."""
    return optax.chain(optax.sgd(RATE, 0.9), optax.add_decayed_weights(-weight_decay))


# The calls in TensorFlow and in optax, each with its optimizer, and the cause of the difference.
CASES = [
    ("GradientDescent", tf("GradientDescent"), "sgd", optax.sgd(RATE), ""),
    ("Momentum", tf("Momentum", momentum=0.9), "sgd(momentum=.9)", optax.sgd(RATE, 0.9), ""),
    (
        "Momentum(use_nesterov)",
        tf("Momentum", momentum=0.9, use_nesterov=True),
        "sgd(momentum=.9, nesterov)",
        optax.sgd(RATE, 0.9, nesterov=True),
        "",
    ),
    (
        "Adagrad",
        tf("Adagrad"),
        "adagrad",
        optax.adagrad(RATE),
        "optax adds 1e-7 inside the root, which is negligible compared to the initial "
        "accumulator of 0.1",
    ),
    (
        "Adagrad(initial_accumulator_value=1e-6)",
        tf("Adagrad", initial_accumulator_value=1e-6),
        "adagrad(initial_accumulator_value=1e-6)",
        optax.adagrad(RATE, 1e-6),
        "optax adds 1e-7 under the root; `eps=0` makes them equal",
    ),
    (
        "Adam",
        tf("Adam"),
        "adam",
        optax.adam(RATE),
        "TensorFlow's epsilon is added before the correction of the bias (epsilon hat)",
    ),
    (
        "Adam(epsilon=.1)",
        tf("Adam", epsilon=0.1),
        "adam(eps=.1)",
        optax.adam(RATE, eps=0.1),
        "the same, with the epsilon that is often set for stability",
    ),
    (
        "Adadelta",
        tf("Adadelta"),
        "adadelta(rate, rho=.95, eps=1e-8)",
        optax.adadelta(RATE, 0.95, 1e-8),
        "",
    ),
    (
        "Adadelta",
        tf("Adadelta"),
        "adadelta(rate)",
        optax.adadelta(RATE),
        "defaults: rho 0.95 and 0.9, epsilon 1e-8 and 1e-6",
    ),
    (
        "RMSProp",
        tf("RMSProp"),
        "rmsprop(eps=1e-10, initial_scale=1)",
        optax.rmsprop(RATE, eps=1e-10, initial_scale=1.0),
        "",
    ),
    (
        "RMSProp",
        tf("RMSProp"),
        "rmsprop",
        optax.rmsprop(RATE),
        "TensorFlow's mean of squares begins at 1, optax's at 0",
    ),
    (
        "RMSProp(centered, momentum=.9)",
        tf("RMSProp", centered=True, momentum=0.9),
        "rmsprop(eps=1e-10, initial_scale=1, centered, momentum=.9)",
        optax.rmsprop(RATE, eps=1e-10, initial_scale=1.0, centered=True, momentum=0.9),
        "",
    ),
    ("AdaMax", tf("AdaMax"), "adamax", optax.adamax(RATE), ""),
    (
        "AdaMax(epsilon=.1)",
        tf("AdaMax", epsilon=0.1),
        "adamax(eps=.1)",
        optax.adamax(RATE, eps=0.1),
        "TensorFlow adds epsilon to the decaying maximum, optax to the new gradient in it",
    ),
    (
        "Nadam",
        tf("Nadam"),
        "nadam",
        optax.nadam(RATE),
        "optax corrects the bias of the look-ahead with the power of the next step",
    ),
    (
        "AdamW(weight_decay=.01)",
        tf("AdamW", weight_decay=0.01),
        "adamw(weight_decay=.01)",
        optax.adamw(RATE, weight_decay=0.01),
        "optax multiplies the decay by the rate",
    ),
    (
        "AdamW(weight_decay=.001)",
        tf("AdamW", weight_decay=0.001),
        "adamw(weight_decay=.01)",
        optax.adamw(RATE, weight_decay=0.01),
        "the same decay: .01 times the rate",
    ),
    (
        "MomentumW(weight_decay=.01)",
        tf("MomentumW", momentum=0.9, weight_decay=0.01),
        "chain(sgd(momentum=.9), add_decayed_weights(-.01))",
        decayed_momentum(0.01),
        "",
    ),
    (
        "LARS(weight_decay=0)",
        tf("LARS", weight_decay=0.0, eeta=0.1),
        "lars(weight_decay=0)",
        optax.lars(RATE, 0.0, trust_coefficient=0.1),
        "",
    ),
    (
        "LARS(weight_decay=.1)",
        tf("LARS", weight_decay=0.1, eeta=0.1),
        "lars(weight_decay=.1)",
        optax.lars(RATE, 0.1, trust_coefficient=0.1),
        "optax divides by the norm of the gradient plus decay, the original by the sum of both "
        "norms",
    ),
    (
        "LAMB(weight_decay_rate=.01)",
        tf("LAMB", weight_decay_rate=0.01),
        "lamb(weight_decay=.01)",
        optax.lamb(RATE, weight_decay=0.01),
        "",
    ),
    (
        "AdamWeightDecay",
        tf("AdamWeightDecay"),
        "adam(eps=1e-6)",
        optax.adam(RATE, eps=1e-6),
        "BERT's Adam does not correct the bias of its means",
    ),
    (
        "Adafactor",
        tf("Adafactor"),
        "adafactor(min_dim_size_to_factor=2)",
        optax.adafactor(RATE, min_dim_size_to_factor=2),
        "",
    ),
    (
        "Adafactor",
        tf("Adafactor"),
        "adafactor",
        optax.adafactor(RATE),
        "optax factors from 128 rows and columns on, tensor2tensor every matrix",
    ),
]


def table():
    """What docs/differences.md shows: the pairs that are equal, and a table of the others."""
    equal = []
    lines = ["| TensorFlow 1 | optax | difference | why |", "|---|---|---|---|"]
    for name, ours, call, theirs, why in CASES:
        found = difference(ours, theirs)
        if found < 2e-6:
            equal.append(f"- `{name}` and `{call}`{' (' + why + ')' if why else ''}")
        else:
            lines.append(f"| `{name}` | `{call}` | {found:.1g} | {why} |")
    return "\n".join(["These are equal:", "", *equal, "", "These differ:", "", *lines, ""])


if __name__ == "__main__":
    print(table(), end="")
