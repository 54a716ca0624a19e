"""Row-sparse steps: the bandwidth of the bytes that must move, relative to that of the memory.

    .venv/bin/python benchmarks/bandwidth.py [--rows 10000000] [--ids 1000000] [--peak 4800]
        [--native]

A step must read the gradient of each id, and read and write the row of the table and of each slot
for each distinct id. These bytes divided by the time of the step are its bandwidth, printed
relative to that of an in-place axpy on the same device, and with ``--peak`` (GB/s, from the data
sheet) relative to the peak. For comparison, TorchRec reports 26.5 % of the peak for the fused
backward pass and optimizer of FBGEMM on a GPU, which also computes the gradients of rows from those
of bags (September 2026). Steps run in turns, with donated arguments and new ids in each round.
"""

import argparse

import harness

harness.pin(1)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from rows import gradients  # noqa: E402

import optzoo  # noqa: E402

OPTIMIZERS = {
    "gradient_descent": lambda: optzoo.gradient_descent(0.1),
    "row_wise_adagrad": lambda: optzoo.row_wise_adagrad(0.1),
    "adagrad": lambda: optzoo.adagrad(0.1),
    "lazy_adam": lambda: optzoo.lazy_adam(1e-3),
}


def bytes_of_step(tx, table, ids):
    """The minimum number of bytes that a step moves, for each batch of ids."""
    slots = [a for a in jax.tree.leaves(tx.init(table)) if a.shape[:1] == table.shape[:1]]
    of_row = sum(a.nbytes // len(table) for a in (table, *slots))
    of_gradient = table.nbytes // len(table) + 4  # and its id
    return [2 * len(np.unique(i)) * of_row + len(i) * of_gradient for i in ids]


def axpy(elements):
    """``run(k)`` of ``x += a * y`` in place, and its bytes."""
    step = jax.jit(lambda x, y: x + 0.5 * y, donate_argnums=0)
    carry, y = [jnp.zeros(elements)], jnp.ones(elements)

    def run(k):
        del k
        carry[0] = jax.block_until_ready(step(carry[0], y))

    return run, 12 * elements


def main():
    """Runs and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--ids", type=int, default=65_536)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--peak", type=float, help="GB/s, from the data sheet")
    parser.add_argument("--native", action="store_true")
    args = parser.parse_args()
    print(f"{args.rows:,} x {args.width}, {args.ids:,} ids, {jax.devices()[0].device_kind}")
    for name in ("uniform", "Zipf"):
        ids, _, grads = gradients(args.rows, args.width, args.ids, name == "Zipf")
        table = jnp.zeros((args.rows, args.width))
        txs = {optimizer: make() for optimizer, make in OPTIMIZERS.items()}
        moved = {n: np.mean(bytes_of_step(tx, table, ids)) for n, tx in txs.items()}
        runs = {n: harness.contender(tx, table, grads, args.native)[0] for n, tx in txs.items()}
        runs["axpy"], moved["axpy"] = axpy(table.size)
        seconds = harness.take_turns(runs, args.rounds)
        speed = {n: moved[n] / np.median(times) for n, times in seconds.items()}
        for n, times in seconds.items():
            share = f"{speed[n] / speed['axpy']:6.1%} of axpy"
            share += f"  {speed[n] / args.peak / 1e9:6.1%} of the peak" if args.peak else ""
            print(
                f"  {name:8} {n:18} median {1e3 * np.median(times):9.3f} ms  least "
                f"{1e3 * min(times):9.3f} ms  {speed[n] / 1e9:8.1f} GB/s  {share}",
                flush=True,
            )


if __name__ == "__main__":
    main()
