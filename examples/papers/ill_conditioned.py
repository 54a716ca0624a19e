"""GGT and Shampoo where the axes of the problem are not those of the parameters.

Least squares for a matrix: ``|A (W - W*) B|^2 / 2`` with A and B rotated at random, and singular
values from 1 to 0.03, which gives a condition number of 10^6. Diagonal methods scale the axes of
the parameters; GGT (a matrix for all parameters) and Shampoo (one for each side) find the axes of
the problem. Exact gradients, rates that fall linearly to zero, each method at the best of a grid;
the loss is relative to that at the start.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optzoo

PAPER = (
    "Agarwal et al. 2018, [GGT](https://arxiv.org/abs/1806.02958), and Gupta et al. 2018, "
    "[Shampoo](https://arxiv.org/abs/1802.09568)"
)
CLAIM = "with full-matrix or Kronecker preconditioning, ill-conditioned problems take fewer steps"
PUBLISHED = "lower loss after the same steps than diagonal methods (figures)"

METHODS = {
    "gradient descent": lambda rate: optzoo.gradient_descent(rate),
    "momentum": lambda rate: optzoo.momentum(rate, 0.9),
    "Adagrad": lambda rate: optzoo.adagrad(rate),
    "Adam": lambda rate: optzoo.adam(rate),
    "GGT": lambda rate: optzoo.ggt(rate, window=20),
    "Shampoo": lambda rate: optzoo.shampoo(rate),
}
SECOND_ORDER = ("GGT", "Shampoo")


def problem(rows=16, columns=8, smallest=0.03):
    """The loss, which is 1 at zero."""
    random = np.random.RandomState(0)

    def factor(size):
        left, right = (np.linalg.qr(random.normal(size=(size, size)))[0] for _ in range(2))
        return left @ np.diag(np.geomspace(1, smallest, size)) @ right

    a, b, solution = factor(rows), factor(columns), random.normal(size=(rows, columns))
    scale = 1 / np.sum((a @ solution @ b) ** 2)
    a, b, solution = (jnp.asarray(x, jnp.float32) for x in (a, b, solution))
    loss = lambda w: scale * jnp.sum((a @ (w - solution) @ b) ** 2)
    return loss, jnp.zeros((rows, columns))


def curve(loss, start, tx, steps):
    """The losses of a run."""

    def step(carry, _):
        w, state = carry
        value, grads = jax.value_and_grad(loss)(w)
        updates, state = tx.update(grads, state, w)
        return (optax.apply_updates(w, updates), state), value

    return jax.lax.scan(step, (start, tx.init(start)), length=steps)[1]


def run(methods=tuple(METHODS), steps=500, rates=tuple(10.0 ** (e / 2) for e in range(-4, 7))):
    """The losses of each method at its best rate."""
    loss, start = problem()
    result = {}
    for name in methods:

        def one(rate, make=METHODS[name]):
            return curve(loss, start, make(lambda count: rate * (1 - count / steps)), steps)

        curves = np.asarray(jax.jit(jax.vmap(one))(jnp.array(rates)))
        last = np.where(np.isfinite(curves[:, -1]), curves[:, -1], np.inf)
        best = int(np.argmin(last))
        result[name] = {
            "rate": rates[best],
            "at the edge": best in (0, len(rates) - 1),
            "loss": float(last[best]),
            "curve at half": float(curves[best, steps // 2]),
            "curve": curves[best].tolist(),
        }
    return {"steps": steps, "methods": result}


def holds(result):
    """Whether GGT and Shampoo both end below all others."""
    last = {name: r["loss"] for name, r in result["methods"].items()}
    second = [last.pop(name) for name in SECOND_ORDER]
    return max(second) < min(last.values())


def here(result):
    """One line about the result."""
    last = sorted((r["loss"], name) for name, r in result["methods"].items())
    losses = ", ".join(f"{name} {loss:.1e}" for loss, name in last)
    half = {name: r["curve at half"] for name, r in result["methods"].items()}
    best = min(set(half) - set(SECOND_ORDER), key=half.get)
    return (
        f"loss after {result['steps']} steps: {losses}. Halfway, where the rate is still large: "
        f"GGT {half['GGT']:.0e}, Shampoo {half['Shampoo']:.0e}, {best} {half[best]:.0e}"
    )


def draw(result, figure):
    """The losses."""
    axes = figure.subplots()
    for name, r in result["methods"].items():
        axes.semilogy(r["curve"], label=f"{name}, rate {r['rate']:.2g}")
    axes.set(xlabel="step", ylabel="loss")
    axes.legend(fontsize=8)
