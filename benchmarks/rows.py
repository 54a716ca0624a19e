"""An embedding table: our row-sparse steps beside optax.adam on the dense gradient, in one run.

    .venv/bin/python benchmarks/rows.py [--rows 1000000] [--width 64] [--ids 4096] [--rounds 15]

The contenders take turns, with donated arguments and other ids in every round. Prints the median
and the least time of each, and the ratio of the medians to that of optax.adam.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optzoo


def contenders():
    """Name -> (optimizer, whether it gets the dense gradient)."""
    return {
        "optax.adam, dense gradient": (optax.adam(1e-3), True),
        "lazy_adam": (optzoo.lazy_adam(1e-3), False),
        "adagrad": (optzoo.adagrad(0.1), False),
        "momentum": (optzoo.momentum(0.1, 0.9), False),
        "ftrl": (optzoo.ftrl(0.1), False),
        "gradient_descent": (optzoo.gradient_descent(0.1), False),
    }


def compiled_step(tx, dense, num_rows):
    """One donated update of the table."""

    def step(table, state, ids, values):
        grad = optzoo.SparseRows(ids, values, num_rows)
        updates, state = tx.update(grad.to_dense() if dense else grad, state, table)
        return optax.apply_updates(table, updates), state

    return jax.jit(step, donate_argnums=(0, 1))


def main():
    """Runs and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, usual in {"rows": 1_000_000, "width": 64, "ids": 4096, "rounds": 15}.items():
        parser.add_argument(f"--{name}", type=int, default=usual)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    ids = [jnp.asarray(rng.integers(0, args.rows, args.ids), jnp.int32) for _ in range(16)]
    values = jnp.asarray(rng.normal(size=(args.ids, args.width)), jnp.float32)
    running = {}
    for name, (tx, dense) in contenders().items():
        table = jnp.zeros((args.rows, args.width))
        running[name] = compiled_step(tx, dense, args.rows), table, tx.init(table)
    seconds = {name: [] for name in running}
    for turn in range(args.rounds + 1):
        for name, (step, table, state) in running.items():
            begin = time.perf_counter()
            done = jax.block_until_ready(step(table, state, ids[turn % 16], values))
            seconds[name].append(time.perf_counter() - begin)
            running[name] = step, *done
    usual = np.median(next(iter(seconds.values()))[1:])
    print(f"{args.rows:,} x {args.width}, {args.ids:,} ids, {jax.devices()[0].device_kind}")
    for name, times in seconds.items():
        median, least = np.median(times[1:]), min(times[1:])  # the first one compiles
        print(
            f"{name:28} {1e3 * median:9.3f} ms  least {1e3 * least:9.3f} ms  1/{usual / median:.1f}"
        )


if __name__ == "__main__":
    main()
