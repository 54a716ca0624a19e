"""FTRL's sparsity at equal AUC, against other ways to use an L1 penalty.

One pass over a stream of sparse examples (``stream.py``), logistic regression, all with the rates
of Adagrad, each at its best rate without a penalty. Then the penalty grows:

- ``FTRL``: it sums the gradients, and solves for the parameters anew at each step;
- ``RDA``: dual averaging, centered at zero;
- ``FOBOS``: a gradient step, then a shrinkage towards zero;
- ``subgradient``: the penalty's sign is added to the gradient.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optzoo

from . import stream

PAPER = (
    "McMahan 2011, [FTRL-Proximal](https://proceedings.mlr.press/v15/mcmahan11b.html), and "
    "McMahan et al. 2013, [Ad click prediction](https://doi.org/10.1145/2487575.2488200)"
)
CLAIM = "at about the same AUC, FTRL needs fewer nonzero weights than gradient descent with L1"
PUBLISHED = "nonzero weights, relative to FTRL: RDA +3 %, FOBOS +38 %, gradient descent +216 %"

METHODS = {
    "FTRL": lambda rate, l1, steps: optzoo.ftrl(rate, l1_regularization_strength=l1),
    "RDA": lambda rate, l1, steps: optzoo.adagrad_da(rate, l1_regularization_strength=l1 / steps),
    "FOBOS": lambda rate, l1, steps: optzoo.proximal_adagrad(
        rate, l1_regularization_strength=l1 / steps
    ),
    "subgradient": lambda rate, l1, steps: optax.chain(
        optax.stateless(lambda g, x: jax.tree.map(lambda g, x: g + l1 / steps * jnp.sign(x), g, x)),
        optzoo.adagrad(rate),
    ),
}


def trained(data, make):
    """``trained(rates, l1s)``: the weights after one pass, for each pair."""
    steps = len(data.ids)

    def one(rate, l1):
        tx = make(rate, l1, steps)

        def step(carry, batch):
            weights, state = carry
            grads = jax.grad(stream.loss)(weights, *batch)
            updates, state = tx.update(grads, state, weights)
            return (optax.apply_updates(weights, updates), state), None

        weights = jnp.zeros(data.size)
        batches = jnp.asarray(data.ids), jnp.asarray(data.labels)
        return jax.lax.scan(step, (weights, tx.init(weights)), batches)[0][0]

    return jax.jit(jax.vmap(one))


def judged(data, weights):
    """AUC and number of nonzero weights for each row of weights."""
    scores = np.asarray(jax.vmap(lambda w: stream.logit(w, data.test_ids))(weights))
    aucs = np.array([stream.auc(s, data.test_labels) for s in scores])
    return aucs, np.count_nonzero(weights, axis=1)


def run(rates=(0.03, 0.1, 0.3, 1.0), l1s=(0.1, 0.3, 1, 3, 10, 30), slack=0.002, **sizes):
    """AUC and sparsity along the penalties, and the nonzero weights at an AUC that all reach.

    That is ``slack`` below the best AUC of the worst method; between two penalties, the number of
    nonzero weights is interpolated.
    """
    data = stream.word_ends(**sizes)
    methods = {}
    for name, make in METHODS.items():
        train = trained(data, make)
        aucs, full = judged(data, train(jnp.array(rates), jnp.zeros(len(rates))))
        best = int(np.argmax(aucs))
        found, nonzero = judged(
            data, train(jnp.full(len(l1s), rates[best]), jnp.array(l1s, jnp.float32))
        )
        methods[name] = {
            "rate": rates[best],
            "auc": [float(aucs[best]), *map(float, found)],
            "nonzero": [int(full[best]), *map(int, nonzero)],
        }
    equal = min(max(r["auc"]) for r in methods.values()) - slack
    for r in methods.values():
        aucs, nonzero = (np.array(r[key][::-1]) for key in ("auc", "nonzero"))
        rising = np.maximum.accumulate(aucs) == aucs
        r["at equal AUC"] = float(np.interp(equal, aucs[rising], nonzero[rising]))
    sizes = {"features": data.size, "examples": data.labels.size}
    return {**sizes, "l1": [0.0, *l1s], "equal AUC": equal, "methods": methods}


def holds(result):
    """Whether FTRL needs fewer nonzero weights than FOBOS and than the subgradient."""
    needs = {name: r["at equal AUC"] for name, r in result["methods"].items()}
    return needs["FTRL"] < min(needs["FOBOS"], needs["subgradient"])


def here(result):
    """One line about the result."""
    needs = {name: r["at equal AUC"] for name, r in result["methods"].items()}
    more = [f"{name} {n / needs['FTRL'] - 1:+.0%}" for name, n in needs.items() if name != "FTRL"]
    return (
        f"AUC {result['equal AUC']:.3f}, {result['examples']:,} examples: FTRL "
        f"{needs['FTRL']:,.0f} of {result['features']:,}; {', '.join(more)}".replace("%", " %")
    )


def draw(result, figure):
    """AUC against the number of nonzero weights."""
    axes = figure.subplots()
    for name, r in result["methods"].items():
        axes.semilogx(r["nonzero"], r["auc"], "o-", label=name)
    axes.axhline(result["equal AUC"], color="gray", linestyle=":")
    axes.set(xlabel="nonzero weights", ylabel="AUC")
    axes.legend()
