"""An embedding table: our row-sparse steps beside optax.adam on the dense gradient, in one run.

    .venv/bin/python benchmarks/rows.py [--rows 1000000] [--width 64] [--ids 4096] [--rounds 15]

The contenders take turns in a new order each round, with donated arguments and other ids. Prints
the median and the least time of each, and the ratio of the medians to that of optax.adam.
"""

import argparse

import harness
import jax
import jax.numpy as jnp
import numpy as np
import optax

import optzoo

USUAL = "optax.adam, dense gradient"


def contenders():
    """Name -> optimizer."""
    return {
        USUAL: optax.chain(optzoo.densify(), optax.adam(1e-3)),
        "lazy_adam": optzoo.lazy_adam(1e-3),
        "adagrad": optzoo.adagrad(0.1),
        "momentum": optzoo.momentum(0.1, 0.9),
        "ftrl": optzoo.ftrl(0.1),
        "gradient_descent": optzoo.gradient_descent(0.1),
    }


def main():
    """Runs and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, usual in {"rows": 1_000_000, "width": 64, "ids": 4096, "rounds": 15}.items():
        parser.add_argument(f"--{name}", type=int, default=usual)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    values = jnp.asarray(rng.normal(size=(args.ids, args.width)), jnp.float32)
    ids = (jnp.asarray(rng.integers(0, args.rows, args.ids), jnp.int32) for _ in range(16))
    grads = [optzoo.SparseRows(i, values, args.rows) for i in ids]
    table = jnp.zeros((args.rows, args.width))
    runs = {name: harness.contender(tx, table, grads)[0] for name, tx in contenders().items()}
    seconds = harness.take_turns(runs, args.rounds)
    usual = np.median(seconds[USUAL])
    print(f"{args.rows:,} x {args.width}, {args.ids:,} ids, {jax.devices()[0].device_kind}")
    for name, times in seconds.items():
        median, least = np.median(times), min(times)
        print(
            f"{name:28} {1e3 * median:9.3f} ms  least {1e3 * least:9.3f} ms  1/{usual / median:.1f}"
        )


if __name__ == "__main__":
    main()
