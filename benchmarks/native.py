"""Native steps on the CPU, compared with those of XLA and of torch.

    .venv/bin/python benchmarks/native.py rows [--case "1M x 64"] [--only adagrad] [--save]
    .venv/bin/python benchmarks/native.py dense [--only adam ftrl] [--save]
    .venv/bin/python benchmarks/native.py training|compile|threads [--case ...] [--save]

All contenders run in turns in random order (``--rounds 15``), on one core, with donated arguments.
Prints the least and median time of each, and the ratio of the native step to it. torch is included
if installed.

``rows``: steps on some rows of a table. ``dense``: all first-order optimizers on ResNet-50; the
roof is that of ``dense.py``, for the bytes of the optimizer. ``training``: whole training steps, by
:func:`optzoo.minimize`, and by hand with all arrays or only the slots in place. ``compile``:
seconds to trace, lower and compile, each in a new process, after a first small step. ``threads``:
the same programs on one core and on two, each in its own process; with a copy of as many bytes as a
dense step in float32 reads and writes, as the limit of the memory.
"""

import argparse
import concurrent.futures
import importlib.util
import itertools
import multiprocessing
import random
import statistics
import sys
import time

import harness

harness.pin(2 if "threads" in sys.argv else 1)  # the processes of `threads` pin themselves

import dense as dense_benchmark  # noqa: E402 (JAX and torch start their threads on the cores they find)
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import rows as rows_benchmark  # noqa: E402

import optzoo  # noqa: E402


def compared(seconds):
    """Least and median seconds of each contender, and the ratios of the native step to them."""
    result = {}
    for kind, of_all in {"least": min, "median": statistics.median}.items():
        found = result[f"{kind} s"] = {who: of_all(times) for who, times in seconds.items()}
        ratios = {who: found["native"] / s for who, s in found.items() if who != "native"}
        result[f"ratios of {kind}"] = ratios
    return result


def show(title, result):
    """Prints times and ratios."""
    print(title)
    for who, least in result["least s"].items():
        ratios = [result[f"ratios of {kind}"].get(who) for kind in ("least", "median")]
        to = "" if ratios[0] is None else "native / this {:.2f} ({:.2f})".format(*ratios)
        median = 1e3 * result["median s"][who]
        print(f"  {who:28} least {1e3 * least:9.3f} ms  median {median:9.3f} ms  {to}", flush=True)


# Rows

# Rows, width, ids, whether by Zipf's law.
TABLES = {
    "1M x 64": (1_000_000, 64, 4096, False),
    "4M x 32": (4_000_000, 32, 4096, False),
    "1M x 64, 65,536 ids, Zipf": (1_000_000, 64, 65_536, True),
}
# Ours, and name and arguments of torch's optimizer for sparse gradients. torch's SGD with momentum
# is no peer: each step updates all rows that any step has seen.
LAZY = {
    "lazy_adam": (optzoo.lazy_adam(1e-3), ("SparseAdam", {"lr": 1e-3})),
    "lazy_adam, packed": (
        optzoo.slots_dtype(optzoo.lazy_adam(1e-3), "float32", packed=True),
        ("SparseAdam", {"lr": 1e-3}),
    ),
    "lazy_adam, 16 bits": (
        optzoo.slots_dtype(optzoo.lazy_adam(1e-3), "bfloat16", stochastic=True, packed=True),
        ("SparseAdam", {"lr": 1e-3}),
    ),
    "adagrad": (optzoo.adagrad(0.1), ("Adagrad", {"lr": 0.1})),
    "ftrl": (optzoo.ftrl(0.1), None),
    "momentum": (optzoo.momentum(0.1, 0.9), None),
    "row_wise_adagrad": (optzoo.row_wise_adagrad(0.1), None),
    "gradient_descent": (optzoo.gradient_descent(0.1), ("SGD", {"lr": 0.1})),
}


def xla_and_native(tx, params, grads):
    """The two contenders, by name."""
    make = lambda native: harness.contender(tx, params, grads, native=native)[0]
    return {"XLA": make(False), "native": make(True)}


def measure_rows(case, name, rounds):
    """One optimizer on one table."""
    many, width, ids, zipf = TABLES[case]
    batches, values, grads = rows_benchmark.gradients(many, width, ids, zipf)
    tx, peer = LAZY[name]
    runs = xla_and_native(tx, jnp.zeros((many, width)), grads)
    if peer and importlib.util.find_spec("torch"):
        kind, kwargs = peer
        runs["torch"] = rows_benchmark.of_torch(kind, batches, values, many, **kwargs)
    return compared(harness.take_turns(runs, rounds))


def rows(args):
    """Rows of tables."""
    cases = {}
    for case in args.case or TABLES:
        cases[case] = {}
        for name in args.only or LAZY:
            cases[case][name] = measure_rows(case, name, args.rounds)
            show(f"{name}, {case}", cases[case][name])
    return {"cases": cases}


# Dense


def measure_dense(name, params, grads, rounds):
    """One optimizer on ResNet-50; raises ``ValueError`` if XLA updates a part of it."""
    peers = dense_benchmark.PEERS.get(name)
    tx, torchs = (peers[0], peers[2]) if peers else (dense_benchmark.without_peer(name), None)
    on_device = [list(map(jnp.asarray, arrays)) for arrays in (params, grads)]
    runs, programs = {"roof": dense_benchmark.roof(params, grads)}, {}
    for who, native in {"native": True, "XLA": False}.items():
        runs[who], programs[who] = harness.contender(tx, on_device[0], on_device[1:], native)
    if torchs is not None and importlib.util.find_spec("torch"):
        kind, kwargs = torchs
        for how in ("foreach", "fused"):
            if how == "foreach" or kind in dense_benchmark.FUSED:
                run = harness.of_torch(kind, params, grads, **{how: True}, **kwargs)
                runs[f"torch {how}"] = run
    seconds = harness.take_turns(runs, rounds)
    moved = 3 * 4 + 2 * programs["XLA"]["state bytes per parameter"]
    roof = [s * moved / dense_benchmark.ROOF_BYTES for s in seconds["roof"]]
    result = compared({**seconds, "roof": roof})
    return {"bytes per parameter": moved, "programs": programs, **result}


def dense(args):
    """All arrays of a tree, element by element."""
    shapes = dense_benchmark.CASES["resnet50"]
    params, grads = (dense_benchmark.arrays(shapes, seed) for seed in (0, 1))
    results, left_out = {}, {}
    for name in args.only or {**dense_benchmark.PEERS, **dense_benchmark.OF_CATALOG}:
        try:
            results[name] = measure_dense(name, params, grads, args.rounds)
        except ValueError as error:
            left_out[name] = str(error)
            print(f"{name}: {error}"[:200], flush=True)
        else:
            moved = f"{results[name]['bytes per parameter']:.0f} bytes per parameter"
            show(f"{name}, ResNet-50, {moved}", results[name])
    size = sum(x.size for x in params)
    return {"parameters": size, "optimizers": results, "updated by XLA": left_out}


# Training


def layers(rng, widths):
    """Weights and biases of dense layers."""
    return [
        (rng.normal(size=(m, n)).astype(np.float32) / m**0.5, np.zeros(n, np.float32))
        for m, n in itertools.pairwise(widths)
    ]


def outputs(layers, x):
    """The outputs of dense layers, with rectified linear units between them."""
    *hidden, (w, b) = layers
    for v, c in hidden:
        x = jax.nn.relu(x @ v + c)
    return x @ w + b


def bags_and_layers():
    """Means of 4 to 8 rows of a table, and two dense layers; ``lazy_adam`` for all."""
    rng, many, bags, most = np.random.default_rng(0), 1_000_000, 1024, 8
    table = 0.01 * rng.standard_normal((many, 64), np.float32)
    params = {"table": table, "layers": layers(rng, (64, 256, 1))}

    def batch():
        ids, lengths = rng.integers(0, many, (bags, most)), rng.integers(4, most + 1, (bags, 1))
        ids = np.where(np.arange(most) < lengths, ids, many)  # many: padding
        return ids.astype(np.int32), rng.normal(size=(bags, 1)).astype(np.float32)

    def loss(params, ids, targets):
        x = optzoo.lookup_sparse(params["table"], ids)
        return jnp.mean((outputs(params["layers"], x) - targets) ** 2)

    return optzoo.lazy_adam(1e-3), loss, params, [batch() for _ in range(rows_benchmark.BATCHES)]


def dense_layers(batch_size):
    """Eight dense layers of 1,024; ``adam``."""
    rng, width = np.random.default_rng(0), 1024
    params = layers(rng, (width,) * 9)
    batch = lambda: tuple(rng.standard_normal((2, batch_size, width), np.float32))
    loss = lambda params, x, targets: jnp.mean((outputs(params, x) - targets) ** 2)
    return optzoo.adam(1e-3), loss, params, [batch() for _ in range(2)]


MODELS = {
    "bags and two layers, batch 1,024": bags_and_layers,
    "8 layers of 1,024, batch 16": lambda: dense_layers(16),
    "8 layers of 1,024, batch 256": lambda: dense_layers(256),
}


def measure_training(case, rounds):
    """Whole training steps of one model, and the gradients alone."""
    tx, loss, params, batches = MODELS[case]()
    batches = [tuple(map(jnp.asarray, batch)) for batch in batches]
    params = jax.tree.map(jnp.asarray, params)
    differentiate = optzoo.value_and_grad(loss)

    def by_hand(in_place):
        update = optzoo.native_step(tx, in_place=in_place, required=True)

        def step(params, state, *batch):
            value, grads = differentiate(params, *batch)
            return *update(params, state, grads), value

        return jax.jit(step, donate_argnums=(0, 1))

    steps = {
        "XLA": optzoo.minimize(loss, tx),
        "native": optzoo.minimize(loss, tx, native="require"),
        "all in place": by_hand("all"),
        "slots in place": by_hand("slots"),
    }

    def contender(step):
        carry = jax.tree.map(lambda x: x.copy(), (params, tx.init(params)))

        def run(k):
            nonlocal carry
            carry = jax.block_until_ready(step(*carry, *batches[k % len(batches)]))[:2]

        return run

    gradient = jax.jit(differentiate)
    runs = {name: contender(step) for name, step in steps.items()}
    runs["gradients alone"] = lambda k: jax.block_until_ready(
        gradient(params, *batches[k % len(batches)])
    )
    return compared(harness.take_turns(runs, rounds))


def training(args):
    """Whole training steps."""
    cases = {}
    for case in args.case or MODELS:
        cases[case] = measure_training(case, args.rounds)
        show(case, cases[case])
    return {"cases": cases}


# Compilation


def tables(heights, width=64, ids=4096):
    """Shapes of tables and of their gradients."""
    params = [jax.ShapeDtypeStruct((h, width), jnp.float32) for h in heights]
    grads = lambda: [
        optzoo.SparseRows(jnp.zeros(ids, jnp.int32), jnp.zeros((ids, width)), h) for h in heights
    ]
    return params, jax.eval_shape(grads)


def leaves(shapes):
    """The shapes of parameters and of their gradients."""
    params = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return params, params


PROGRAMS = {
    "`lazy_adam`, a table": lambda: (optzoo.lazy_adam(1e-3), *tables([1_000_000])),
    "`lazy_adam`, 26 tables": lambda: (
        optzoo.lazy_adam(1e-3),
        *tables([int(100 * 1.4**k) for k in range(26)]),
    ),
    "`adam`, ResNet-50": lambda: (
        optzoo.adam(1e-3),
        *leaves(dense_benchmark.CASES["resnet50"]),
    ),
    "`adam`, 1,000 leaves of 10 x 10": lambda: (optzoo.adam(1e-3), *leaves([(10, 10)] * 1000)),
}


def compile_once(case, native):
    """Seconds of one compilation, in a process that has compiled a small step before."""
    jax.config.update("jax_enable_compilation_cache", False)
    begin = time.perf_counter()
    small = jax.ShapeDtypeStruct((3,), jnp.float32)
    harness.compiled(optzoo.momentum(0.1, 0.9), small, small, native)
    first = time.perf_counter() - begin
    tx, params, grads = PROGRAMS[case]()
    took = harness.compiled(tx, params, grads, native)[1]
    parts = {part: took[part] for part in ("trace s", "lower s", "compile s")}
    return {**parts, "all s": sum(parts.values()), "first small step s": first}


def in_new_process(function, *args):
    """The result of a function in its own process."""
    new = {"mp_context": multiprocessing.get_context("spawn")}
    with concurrent.futures.ProcessPoolExecutor(1, **new) as pool:
        return pool.submit(function, *args).result()


def compile_(args):
    """Compilation."""
    cases = {}
    for case in args.case or PROGRAMS:
        seconds = {"XLA": [], "native": []}
        for k in range(args.compilations):
            for who in random.Random(k).sample(list(seconds), 2):
                seconds[who].append(in_new_process(compile_once, case, who == "native"))
        found = cases[case] = {
            who: {part: statistics.median(t[part] for t in times) for part in times[0]}
            for who, times in seconds.items()
        }
        for who, parts in found.items():
            print(f"{case}, {who}:", *(f"{part} {s:.3f}" for part, s in parts.items()), flush=True)
        found["ratios"] = {part: s / found["XLA"][part] for part, s in found["native"].items()}
        print(f"{case}: native / XLA {found['ratios']['all s']:.2f}", flush=True)
    return {"cases": cases}


# Threads


def one_table(cores):
    """``lazy_adam`` and torch's SparseAdam on a table; 4,096 ids per step."""
    many, width, ids, zipf = TABLES["1M x 64"]
    batches, values, grads = rows_benchmark.gradients(many, width, ids, zipf)
    runs = xla_and_native(optzoo.lazy_adam(1e-3), jnp.zeros((many, width)), grads)
    if importlib.util.find_spec("torch"):
        runs["torch"] = rows_benchmark.of_torch("SparseAdam", batches, values, many, lr=1e-3)
        threads_of_torch(cores)
    return runs


def more_tables(many, rows, ids, zipf=False):
    """``lazy_adam`` on several tables."""
    each = [rows_benchmark.gradients(rows, 64, ids, zipf, seed=k)[2] for k in range(many)]
    grads = [list(g) for g in zip(*each, strict=True)]
    return xla_and_native(optzoo.lazy_adam(1e-3), [jnp.zeros((rows, 64))] * many, grads)


def dense_arrays(case, cores, slots="float32"):
    """``adam``, torch's fused Adam, and the copy of as many bytes, on the arrays of a model."""
    params, grads = (dense_benchmark.arrays(dense_benchmark.CASES[case], seed) for seed in (0, 1))
    on_device = [list(map(jnp.asarray, arrays)) for arrays in (params, grads)]
    tx = optzoo.slots_dtype(optzoo.adam(1e-3), slots)
    runs = xla_and_native(tx, on_device[0], on_device[1:])
    if slots != "float32":
        runs["float32, native"] = xla_and_native(optzoo.adam(1e-3), *on_device[:1], on_device[1:])[
            "native"
        ]
    if importlib.util.find_spec("torch"):
        runs["torch"] = harness.of_torch("Adam", params, grads, fused=True)
        threads_of_torch(cores)
    # Reads and writes 28 bytes per parameter, as the step does, by NumPy on each core.
    size = sum(x.size for x in params)
    parts = [np.zeros(size * 14 // cores, np.uint8) for _ in range(2 * cores)]
    pool = concurrent.futures.ThreadPoolExecutor(cores)
    pairs = [(parts[2 * k], parts[2 * k + 1]) for k in range(cores)]
    runs["copy"] = lambda k: list(pool.map(lambda pair: np.copyto(*pair), pairs))
    return runs


def threads_of_torch(cores):
    """Sets the number of threads of torch."""
    import torch

    torch.set_num_threads(cores)


ON_CORES = {
    "`lazy_adam`, 1M x 64, 4,096 ids": one_table,
    "`lazy_adam`, two tables, 16,384 ids": lambda cores: more_tables(2, 500_000, 16_384),
    "`lazy_adam`, 26 tables, 4,096 ids": lambda cores: more_tables(26, 100_000, 4096),
    "`lazy_adam`, 1M x 64, 65,536 ids, Zipf": lambda cores: more_tables(1, 1_000_000, 65_536, True),
    "`adam`, ResNet-50": lambda cores: dense_arrays("resnet50", cores),
    "`adam`, transformer": lambda cores: dense_arrays("transformer", cores),
    "`adam`, transformer, slots in 8 bits": lambda cores: dense_arrays(
        "transformer", cores, "int8"
    ),
}


def measure_threads(case, cores, rounds):
    """One program in a process on this number of cores."""
    harness.pin(cores)
    return compared(harness.take_turns(ON_CORES[case](cores), rounds))


def threads(args):
    """The same programs on one core and on two."""
    cases = {}
    for case in args.case or ON_CORES:
        cases[case] = {}
        for cores in (1, 2):
            result = in_new_process(measure_threads, case, cores, args.rounds)
            cases[case][str(cores)] = result
            show(f"{case}, cores: {cores}", result)
    return {"cases": cases}


PARTS = {
    "rows": rows,
    "dense": dense,
    "training": training,
    "compile": compile_,
    "threads": threads,
}


def main():
    """Runs, prints and saves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=PARTS)
    parser.add_argument("--only", nargs="+", help="optimizers of rows and dense")
    parser.add_argument("--case", nargs="+", help="cases, except of dense")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--compilations", type=int, default=3)
    parser.add_argument("--save", action="store_true", help="write results/native_<what>.json")
    args = parser.parse_args()
    results = PARTS[args.what](args)
    if args.save:
        harness.save(f"native_{args.what}", results)


if __name__ == "__main__":
    main()
