"""Effect of epsilon, rate and b1 of Adam on a small network: benchmarks/results/epsilon.md."""

import jax
import jax.numpy as jnp
import optax
from sklearn.datasets import load_digits

import optzoo

SIZES, STEPS, BATCH, SEEDS = (64, 64, 64, 10), 300, 64, 3
RATES, B1S, EPSILONS = (
    (1e-3, 3e-3, 1e-2, 3e-2, 1e-1),
    (0.0, 0.5, 0.9, 0.99),
    (1e-16, 1e-8, 1e-3, 0.1),
)


def start(key):
    """Initial kernels and biases of three layers."""
    keys = jax.random.split(key, len(SIZES) - 1)
    shapes = zip(keys, SIZES[:-1], SIZES[1:], strict=True)
    return [(jax.random.normal(k, (a, b)) / a**0.5, jnp.zeros(b)) for k, a, b in shapes]


def loss(params, x, y):
    """Cross entropy."""
    *hidden, (kernel, bias) = params
    for w, b in hidden:
        x = jax.nn.relu(x @ w + b)
    logits = x @ kernel + bias
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def main():
    """Trains with all settings in one program and prints the tables."""
    x, y = load_digits(return_X_y=True)
    x, y = jnp.asarray(x / 16, jnp.float32), jnp.asarray(y)
    batches = len(x) // BATCH
    xs = x[: batches * BATCH].reshape(batches, BATCH, -1)
    ys = y[: batches * BATCH].reshape(batches, BATCH)

    def final(eps, rate, b1, seed):
        tx = optzoo.adam(rate, b1=b1, eps=eps)
        params = start(jax.random.key(seed))

        def step(carry, k):
            params, state = carry
            grads = jax.grad(loss)(params, xs[k % batches], ys[k % batches])
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        (params, _), _ = jax.lax.scan(step, (params, tx.init(params)), jnp.arange(STEPS))
        return loss(params, x, y)

    over = jax.vmap(final, (None, None, None, 0))
    over = jax.vmap(jax.vmap(over, (None, None, 0, None)), (None, 0, None, None))
    run = jax.jit(over)
    for eps in EPSILONS:
        means = run(eps, jnp.array(RATES), jnp.array(B1S), jnp.arange(SEEDS)).mean(-1)
        print(f"\n| eps = {eps:g} | " + " | ".join(f"b1 = {b:g}" for b in B1S) + " |")
        print("|---" * (len(B1S) + 1) + "|")
        for rate, row in zip(RATES, means, strict=True):
            print(f"| rate {rate:g} | " + " | ".join(f"{v:.2f}" for v in row) + " |")


if __name__ == "__main__":
    main()
