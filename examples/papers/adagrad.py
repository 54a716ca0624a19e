"""Adagrad on rare features, against gradient descent.

Adagrad divides the rate of each weight by the root of the sum of its squared gradients, so the
weight of a rare feature learns fast when its feature appears. Logistic regression in one pass, each
method at the best of a grid of rates, on two problems:

- ``text``: do words end here? (``stream.py``), judged by the test loss;
- ``known``: feature j is 1 with probability ``2 / j^1.2``, all independent; the labels are drawn
  with known weights of 1/2 and -1/2 in turn: the error of the weights, by how often a feature is 1.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optzoo

from . import ftrl, stream

PAPER = "Duchi et al. 2011, [Adagrad](https://jmlr.org/papers/v12/duchi11a.html)"
CLAIM = (
    "on sparse data, a rate for each feature learns rare features that one rate for all does not"
)
PUBLISHED = "lower test errors than non-adaptive methods on news texts (table 1)"

METHODS = {
    "gradient descent, constant rate": lambda rate: optzoo.gradient_descent(rate),
    "gradient descent, rate / sqrt(t)": lambda rate: optzoo.gradient_descent(
        lambda count: rate / jnp.sqrt(count + 1.0)
    ),
    "Adagrad": lambda rate: optzoo.adagrad(rate),
}
FEATURES, EXAMPLES_OF_A_STEP = 500, 200


def text(rates, **sizes):
    """The test losses of each method, for each rate."""
    data, losses = stream.word_ends(**sizes), {}
    for name, make in METHODS.items():
        train = ftrl.trained(data, lambda rate, l1, steps, make=make: make(rate))
        weights = train(jnp.array(rates), jnp.zeros(len(rates)))
        scores = np.asarray(jax.vmap(lambda w: stream.logit(w, data.test_ids))(weights), np.float64)
        losses[name] = (np.logaddexp(0, scores) - data.test_labels * scores).mean(axis=1).tolist()
    return losses


def known_weights():
    """The probabilities of the features, and the weights."""
    j = np.arange(1, FEATURES + 1)
    return np.minimum(2 / j**1.2, 0.5), np.where(j % 2, 0.5, -0.5)


def errors(rates, steps):
    """The root mean square errors of the weights of each method, by feature, for each rate."""
    probability, truth = (jnp.asarray(a, jnp.float32) for a in known_weights())

    def batch(t):
        keys = jax.random.split(jax.random.fold_in(jax.random.key(0), t))
        shape = (EXAMPLES_OF_A_STEP, FEATURES)
        x = jax.random.bernoulli(keys[0], probability[None], shape).astype(jnp.float32)
        return x, jax.random.bernoulli(keys[1], jax.nn.sigmoid(x @ truth)).astype(jnp.float32)

    def loss(weights, x, labels):
        s = x @ weights
        return jnp.sum(jnp.logaddexp(0.0, s) - labels * s)

    def all_rates(make):
        def step(carry, t):
            x, labels = batch(t)  # the same for all rates

            def one(rate, weights, state):
                grads = jax.grad(loss)(weights, x, labels)
                updates, state = make(rate).update(grads, state, weights)
                return optax.apply_updates(weights, updates), state

            return jax.vmap(one)(rates, *carry), None

        start = jnp.zeros((len(rates), FEATURES))
        state = jax.vmap(lambda rate, weights: make(rate).init(weights))(rates, start)
        (weights, _), _ = jax.lax.scan(step, (start, state), jnp.arange(steps))
        return jnp.abs(weights - truth[None])

    rates = jnp.array(rates)
    return {name: np.asarray(jax.jit(lambda m=m: all_rates(m))()) for name, m in METHODS.items()}


def run(rates=tuple(10.0 ** (e / 2) for e in range(-6, 4)), steps=1000, **sizes):
    """The test loss on text, and the errors of known weights, of each method at its best rates."""
    found, probability = errors(rates, steps), known_weights()[0]
    times = steps * EXAMPLES_OF_A_STEP * probability  # that a feature is 1
    cuts = np.searchsorted(-times, [-1e4, -1e3])
    result = {"rates": [*rates], "examples": steps * EXAMPLES_OF_A_STEP, "methods": {}}
    mean = lambda e: float(np.sqrt(np.mean(np.square(e))))
    for name, losses in text(rates, steps=steps, **sizes).items():
        # The best rate for the prediction: errors count as often as their features.
        excess = np.nan_to_num(np.square(found[name]) @ probability, nan=np.inf)
        best = int(np.argmin(excess))
        groups = np.split(found[name][best], cuts)
        result["methods"][name] = {
            "text: rate": rates[int(np.nanargmin(losses))],
            "text: loss": float(np.nanmin(losses)),
            "text: loss by rate": losses,
            "known: rate": rates[best],
            "known: error": [mean(group) for group in groups],
            "known: error by feature": found[name][best].tolist(),
        }
    result["times"] = times.tolist()
    return result


def _others(result, key):
    """What Adagrad has, and the best of the others."""
    found = {name: r[key] for name, r in result["methods"].items()}
    adagrad = found.pop("Adagrad")
    return adagrad, np.min([*found.values()], axis=0)


def holds(result):
    """Whether Adagrad has the lower loss on text, and the smaller error where features are rare."""
    (loss, other), (error, others) = (_others(result, k) for k in ("text: loss", "known: error"))
    return bool(loss < other and error[-1] < others[-1])


def here(result):
    """One line about the result."""
    loss, other = _others(result, "text: loss")
    error, others = _others(result, "known: error")
    groups = ("more than 10,000 times", "1,000 to 10,000", "less")
    by_group = "; ".join(
        f"{group}: {e:.2f} against {o:.2f}"
        for group, e, o in zip(groups, error, others, strict=True)
    )
    return (
        f"text: test loss {loss:.3f} against {other:.3f}; error of known weights of 0.5, by how "
        f"often their feature is seen: {by_group}"
    )


def draw(result, figure):
    """Loss against the rate, and the error of each weight."""
    left, right = figure.subplots(1, 2)
    for name, r in result["methods"].items():
        left.semilogx(result["rates"], r["text: loss by rate"], "o-", label=name)
        error = np.convolve(np.square(r["known: error by feature"]), np.ones(25) / 25, "valid")
        right.loglog(result["times"][12:-12], np.sqrt(error), label=name)
    left.set(xlabel="rate", ylabel="text: test loss", ylim=(0.17, 0.4))
    left.legend(fontsize=8)
    right.set(xlabel="times the feature was seen", ylabel="error of its known weight (25 features)")
