"""Native steps on the CPU, compared with those of XLA and of torch.

    .venv/bin/python benchmarks/native.py rows|dense|training|compile [--only adam] [--rounds 15]
        [--case "1M x 64"] [--save]

All contenders of an optimizer take turns in one run, in a new order each round, on one core, with
donated arguments. Prints the least time and the median of each, and ratios. torch is included if it
is installed.
"""

import argparse
import importlib.util

import harness

harness.pin(1)

import jax  # noqa: E402 (JAX and torch start their threads on the cores they find)
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import rows as rows_benchmark  # noqa: E402

import optzoo  # noqa: E402

BATCHES = 16
# Rows, width, ids, whether by Zipf's law.
TABLES = {
    "1M x 64": (1_000_000, 64, 4096, False),
    "4M x 32": (4_000_000, 32, 4096, False),
    "1M x 64, 65,536 ids, Zipf": (1_000_000, 64, 65_536, True),
}
LAZY = {  # ours, and name and arguments of torch's optimizer for sparse gradients
    "lazy_adam": (optzoo.lazy_adam(1e-3), ("SparseAdam", {"lr": 1e-3})),
    "lazy_adam, packed": (
        optzoo.slots_dtype(optzoo.lazy_adam(1e-3), "float32", packed=True),
        ("SparseAdam", {"lr": 1e-3}),
    ),
    "lazy_adam, 16 bits": (
        optzoo.slots_dtype(optzoo.lazy_adam(1e-3), "bfloat16", stochastic=True, packed=True),
        None,
    ),
    "adagrad": (optzoo.adagrad(0.1), ("Adagrad", {"lr": 0.1})),
    "ftrl": (optzoo.ftrl(0.1), None),
    "momentum": (optzoo.momentum(0.1, 0.9), None),
    "row_wise_adagrad": (optzoo.row_wise_adagrad(0.1), None),
    "gradient_descent": (optzoo.gradient_descent(0.1), ("SGD", {"lr": 0.1})),
}


def summary(seconds):
    """Least and median seconds of each contender."""
    return {
        name: {"least s": min(times), "median s": float(np.median(times))}
        for name, times in seconds.items()
    }


def show(title, found, base="XLA"):
    """Prints times and ratios to those of a contender."""
    print(title)
    for name, times in found.items():
        least, median = (times[key] / found[base][key] for key in ("least s", "median s"))
        print(
            f"  {name:28} least {1e3 * times['least s']:9.3f} ms  median"
            f" {1e3 * times['median s']:9.3f} ms  / {base} {least:.2f} ({median:.2f})",
            flush=True,
        )


def measure_rows(case, name, rounds):
    """One optimizer on one table."""
    many, width, ids, zipf = TABLES[case]
    rng = np.random.default_rng(0)
    values = rng.normal(size=(ids, width)).astype(np.float32)
    draw = lambda: np.minimum(rng.zipf(1.2, ids), many) - 1 if zipf else rng.integers(0, many, ids)
    batches = [draw().astype(np.int64) for _ in range(BATCHES)]
    grads = [optzoo.SparseRows(jnp.int32(i), jnp.asarray(values), many) for i in batches]
    table = jnp.zeros((many, width))
    tx, peer = LAZY[name]
    runs = {
        "XLA": harness.contender(tx, table, grads)[0],
        "native": harness.contender(tx, table, grads, native=True)[0],
    }
    if peer and importlib.util.find_spec("torch"):
        kind, kwargs = peer
        runs["torch"] = rows_benchmark.of_torch(kind, batches, values, many, **kwargs)
    return summary(harness.take_turns(runs, rounds))


def rows(args):
    """Rows of tables."""
    results = {}
    for case in args.case or TABLES:
        for name in args.only or LAZY:
            found = results[f"{name}, {case}"] = measure_rows(case, name, args.rounds)
            show(f"{name}, {case}", found)
    return results


def main():
    """Runs, prints and saves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["rows"])
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--case", nargs="+")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    results = {"rows": rows}[args.what](args)
    if args.save:
        harness.save(f"native_{args.what}", results)


if __name__ == "__main__":
    main()
