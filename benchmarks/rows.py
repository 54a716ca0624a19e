"""Row-sparse steps on an embedding table, compared with optax and torch.

    .venv/bin/python benchmarks/rows.py [--case "1M x 64"] [--rounds 15] [--save]

A case is a table and a number of ids per step, with a uniform distribution or a Zipf distribution
with exponent 1.2. The contenders run in turns in random order, on one core, with donated arguments
and other ids in each round; ids may repeat. Prints the least and median time of each, and the ratio
of the least times to that of ``lazy_adam``. torch is included if installed.
"""

import argparse
import importlib.util

import harness

harness.pin(1)

import jax  # noqa: E402 (JAX and torch start their threads on the cores they find)
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

import optzoo  # noqa: E402

BATCHES = 16
# Rows, width, ids, whether by Zipf's law, and which other contenders to include.
CASES = {
    "1M x 64": (1_000_000, 64, 4096, False, "all"),
    "4M x 32": (4_000_000, 32, 4096, False, "peers"),
    "1M x 64, Zipf": (1_000_000, 64, 16384, True, "none"),
    **{f"{n:,} x 32": (n, 32, 4096, False, "none") for n in (100_000, 400_000, 1_000_000)},
    **{f"1M x 64, {k:,} ids": (1_000_000, 64, k, False, "none") for k in (256, 1024, 16384, 65536)},
}
MINE = "lazy_adam"


def ours(others):
    """Our optimizers and those of optax, by name."""
    found = {
        MINE: optzoo.lazy_adam(1e-3),
        "adagrad": optzoo.adagrad(0.1),
        "row_wise_adagrad": optzoo.row_wise_adagrad(0.1),
    }
    if others != "none":
        found["lazy_adam, packed"] = optzoo.slots_dtype(
            optzoo.lazy_adam(1e-3), "float32", packed=True
        )
        found["optax.adam, dense"] = optax.chain(optzoo.rows.densify(), optax.adam(1e-3))
    if others == "all":
        found |= {
            "momentum": optzoo.momentum(0.1, 0.9),
            "ftrl": optzoo.ftrl(0.1),
            "gradient_descent": optzoo.gradient_descent(0.1),
            "lazy_adam, 16 bits": optzoo.slots_dtype(
                optzoo.lazy_adam(1e-3), "bfloat16", stochastic=True, packed=True
            ),
            "optax.adagrad, dense": optax.chain(optzoo.rows.densify(), optax.adagrad(0.1)),
        }
    return found


def of_torch(kind, ids, values, rows, **kwargs):
    """``run(k)`` of a torch optimizer on sparse gradients."""
    import torch

    torch.set_num_threads(1)
    torch.sparse.check_sparse_tensor_invariants.disable()
    x = torch.nn.Parameter(torch.zeros(rows, values.shape[1]))
    values = torch.tensor(values)
    grads = [torch.sparse_coo_tensor(torch.tensor(i)[None], values, x.shape) for i in ids]
    optimizer = getattr(torch.optim, kind)([x], **kwargs)

    def run(k):
        x.grad = grads[k % len(grads)]
        optimizer.step()

    return run


def gradients(rows, width, ids, zipf=False, seed=0):
    """The ids of each batch, their values, and the gradients."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(ids, width)).astype(np.float32)
    draw = lambda: np.minimum(rng.zipf(1.2, ids), rows) - 1 if zipf else rng.integers(0, rows, ids)
    batches = [draw().astype(np.int64) for _ in range(BATCHES)]
    shared = jnp.asarray(values)
    return batches, values, [optzoo.SparseRows(jnp.int32(i), shared, rows) for i in batches]


def measure(rows, width, ids, zipf, others, rounds):
    """Least and median seconds of each contender."""
    batches, values, grads = gradients(rows, width, ids, zipf)
    table = jnp.zeros((rows, width))
    runs = {name: harness.contender(tx, table, grads)[0] for name, tx in ours(others).items()}
    if importlib.util.find_spec("torch"):
        runs["torch SparseAdam"] = of_torch("SparseAdam", batches, values, rows, lr=1e-3)
        runs["torch Adagrad, sparse"] = of_torch("Adagrad", batches, values, rows, lr=0.1)
    seconds = harness.take_turns(runs, rounds)
    return {
        name: {"least s": min(times), "median s": float(np.median(times))}
        for name, times in seconds.items()
    }


def main():
    """Runs, prints and saves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=[*CASES, "all"], nargs="+", default=["1M x 64"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    results = {}
    for case in CASES if "all" in args.case else args.case:
        rows, width, ids, zipf, others = CASES[case]
        found = results[case] = measure(rows, width, ids, zipf, others, args.rounds)
        print(f"{case}: {rows:,} x {width}, {ids:,} ids, {jax.devices()[0].device_kind}")
        mine = found[MINE]["least s"]
        for name, times in found.items():
            least, median = times["least s"], times["median s"]
            times["ratio of lazy_adam to it"] = mine / least
            print(
                f"  {name:24} least {1e3 * least:9.3f} ms  median {1e3 * median:9.3f} ms"
                f"  lazy_adam / it {mine / least:.3f}",
                flush=True,
            )
    if args.save:
        harness.save("rows", {"cases": results})


if __name__ == "__main__":
    main()
