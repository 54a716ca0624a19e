"""GGT compared with a full Gram matrix in each step, optax.adam and memory bandwidth.

    .venv/bin/python benchmarks/ggt.py [--windows 10 50] [--rounds 15] [--cores 1] [--save]

Six matrices of 1000 x 1000. The contenders run in turns in random order, with donated arguments.
*Whole Gram* is the algorithm of the original with a ring buffer for its window: the product of the
window with itself, in one piece or, faster on the CPU, in blocks of 1000 columns.

A step must read the window twice and parameter, gradient and moment once: (8 window + 12) bytes per
parameter. *At the speed of p += s g* is the time to move them at the bandwidth of this axpy, which
moves 12 bytes per parameter, with a part of its arrays in the cache. *Reading the window twice* is
the time of two calls of numpy.dot of an array of the size of the window with itself: the read
bandwidth of a core.
"""

import argparse

import harness

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--windows", type=int, nargs="+", default=[10, 50])
parser.add_argument("--save", action="store_true")
for name, default in {"rounds": 15, "cores": 1}.items():
    parser.add_argument(f"--{name}", type=int, default=default)
args = parser.parse_args()
harness.pin(args.cores)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

from optzoo.second_order.ggt import ggt  # noqa: E402

LEAVES, WIDTH = 6, 1000
SIZE = LEAVES * WIDTH**2


def normal(seed):
    """A list of matrices."""
    keys = jax.random.split(jax.random.key(seed), LEAVES)
    return [jax.random.normal(key, (WIDTH, WIDTH)) for key in keys]


def at_once(rows):
    """The Gram matrix in one product."""
    return rows @ rows.T


def in_blocks(rows):
    """The Gram matrix, in blocks of columns."""

    def add(i, gram):
        block = jax.lax.dynamic_slice_in_dim(rows, i * WIDTH, WIDTH, 1)
        return gram + block @ block.T

    return jax.lax.fori_loop(0, rows.shape[1] // WIDTH, add, jnp.zeros((len(rows),) * 2))


def whole_gram(window, product, rate=1e-3, b1=0.9, eps=1e-4, svd_eps=1e-6, sigma_eps=1e-2):
    """The formula of the original, for a list of matrices."""

    def init(params):
        moments = [jnp.zeros(x.size) for x in params]
        return jnp.zeros([], int), moments, [jnp.zeros((window, x.size)) for x in params]

    def update(updates, state, params=None):
        del params
        t, moments, windows = state
        moments = [b1 * m + (1 - b1) * g.ravel() for m, g in zip(moments, updates, strict=True)]
        pushed = zip(windows, moments, strict=True)
        windows = [w.at[t % window].set(m) for w, m in pushed]
        n = jnp.minimum(t + 1, window)
        gram = sum(map(product, windows)) / n
        sigma, u = jnp.linalg.eigh(gram + svd_eps * jnp.eye(window))
        root = jnp.sqrt(jnp.maximum(sigma, 0))
        pairs = list(zip(windows, moments, strict=True))
        c = u.T @ sum(w @ m for w, m in pairs)
        tail = jnp.where(root[0] > eps, 1 / root[0], 0)
        y = u @ (c * ((root + sigma_eps) ** -3 - tail / sigma)) / n
        steps = [-rate * (y @ w + tail * m) for w, m in pairs]
        updates = [s.reshape(g.shape) for s, g in zip(steps, updates, strict=True)]
        return updates, (t + 1, moments, windows)

    return optax.GradientTransformation(init, update)


def optimizers(window):
    """The optimizers by name."""
    return {
        "ggt": ggt(1e-3, window=window),
        "ggt, bfloat16 window": ggt(1e-3, window=window, window_dtype="bfloat16"),
        "whole Gram at once": whole_gram(window, at_once),
        "whole Gram in blocks": whole_gram(window, in_blocks),
        "optax.adam": optax.adam(1e-3),
        "p += s g": optax.sgd(1e-3),
    }


def measure(window):
    """The results for one window."""
    grads = [normal(k) for k in range(4)]
    runs, about = {}, {}
    for name, tx in optimizers(window).items():
        runs[name], about[name] = harness.contender(tx, normal(9), grads)
    as_much = np.ones(window * SIZE, np.float32)
    runs["reading the window twice"] = lambda k: [as_much.dot(as_much) for _ in range(2)]
    times = harness.take_turns(runs, args.rounds)
    times["at the speed of p += s g"] = np.multiply(times["p += s g"], (8 * window + 12) / 12)
    ours = float(np.median(times["ggt"]))
    return {
        name: {
            "median ms": 1e3 * float(np.median(t)),
            "least ms": 1e3 * float(min(t)),
            "ggt x": ours / float(np.median(t)),
            **about.get(name, {}),
        }
        for name, t in times.items()
    }


def main():
    """Runs, prints, and saves."""
    result = {f"window {window}": measure(window) for window in args.windows}
    for window, table in result.items():
        print(f"{window}, {SIZE:,} parameters, {args.cores} core(s)")
        for name, row in table.items():
            print(f"{name:26}", "   ".join(f"{k} {v:.3g}" for k, v in row.items()))
    if args.save:
        harness.save("ggt", {"measured": result})


if __name__ == "__main__":
    main()
