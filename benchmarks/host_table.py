"""A table on the host with a cache on the device, compared with an ordinary table, on one core.

    .venv/bin/python benchmarks/host_table.py [--steps 45] [--cores 1]
    .venv/bin/python benchmarks/host_table.py --hits
    .venv/bin/python benchmarks/host_table.py --memory

The first command measures the time of a step, in turns with the ordinary table; the second the hits
of a filled cache, and the time of a plan; the third the memory of a table of ten times the size of
its cache, in files. The figures are in ``docs/tasks/larger_than_the_device.md``.
"""

import argparse
import itertools
import pathlib
import re
import tempfile
import time

import harness

parser = argparse.ArgumentParser()
parser.add_argument("--hits", action="store_true")
parser.add_argument("--memory", action="store_true")
parser.add_argument("--steps", type=int, default=45)
parser.add_argument("--cores", type=int, default=1)
args = parser.parse_args()
harness.pin(args.cores)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import optzoo  # noqa: E402
from optzoo.host.cache_map import CacheMap  # noqa: E402

ROWS, WIDTH, IDS, FEATURES = 1_000_000, 32, 65_536, 32
STATUS = pathlib.Path("/proc/self/status")
rng = np.random.default_rng(0)


def zipf(exponent, rows):
    """Batches of ids with a Zipf distribution, in random order."""
    total = np.cumsum(np.arange(1, rows + 1) ** -exponent)
    while True:
        ranks = np.searchsorted(total, rng.random(IDS) * total[-1])
        yield (ranks * 2654435761 % rows).astype(np.int32)


def loss(p, ids, y):
    """The loss of a network over 32 rows per example."""
    x = optzoo.lookup(p["table"], ids).reshape(IDS // FEATURES, -1)
    for w in p["net"]:
        x = jax.nn.relu(x @ w)
    return jnp.mean((x[:, 0] - y) ** 2)


def net():
    """The weights of the network."""
    sizes = [WIDTH * FEATURES, 512, 256, 128]
    keys = jax.random.split(jax.random.key(0), len(sizes))
    pairs = zip(keys, itertools.pairwise(sizes), strict=False)
    return {"net": [jax.random.normal(k, (a, b)) / a**0.5 for k, (a, b) in pairs]}


def clock():
    """The time, and the CPU time of all threads, in seconds."""
    return time.perf_counter(), time.process_time()


def speed():
    """The time of a step for several numbers of hits."""
    y, tx = np.zeros(IDS // FEATURES, np.float32), optzoo.adagrad(0.01)
    start = rng.normal(size=(ROWS, WIDTH)).astype(np.float32) / 100
    step = optzoo.minimize(loss, tx)
    print(
        f"{ROWS:,} rows of {WIDTH}, {IDS:,} ids, Adagrad, {args.cores} core(s); medians of "
        f"{args.steps} steps, the first third left out, in turns with the ordinary table\n"
        "| Zipf | cache | hits of distinct ids | rows in | ordinary, ms | cached, ms | ratio "
        "| of CPU | waited, ms |\n|---|---|---|---|---|---|---|---|---|"
    )

    def ordinary(batches):
        params = {"table": jnp.asarray(start), **net()}
        state = tx.init(params)
        for ids in batches:
            begun = clock()
            params, state, value = step(params, state, ids, y)
            jax.block_until_ready(value)
            yield [b - a for a, b in zip(begun, clock(), strict=True)]

    def cached(batches, store, notes):
        params, state = store.init(net())
        step, begun, before = store.minimize(loss), clock(), store.stats()
        for places, _ in store.ahead(batches, ids=lambda batch: batch):
            params, state, value = step(*store.swap(params, state), places, y)
            jax.block_until_ready(value)
            now = store.stats()
            distinct = now.distinct - before.distinct
            notes.append(
                (
                    (now.hits - before.hits) / distinct,
                    now.rows_in - before.rows_in,
                    now.seconds_waited - before.seconds_waited,
                )
            )
            took = [b - a for a, b in zip(begun, clock(), strict=True)]
            yield took
            begun, before = clock(), now  # what the ordinary table took in between is left out

    for exponent, share in ((1.05, 0.05), (1.05, 0.1), (1.05, 0.2), (1.2, 0.05), (0.8, 0.4)):
        ids = zipf(exponent, ROWS)
        batches = [next(ids) for _ in range(args.steps)]
        store, notes = optzoo.host.HostTable(start.copy(), tx, int(ROWS * share)), []
        both = zip(ordinary(batches), cached(batches, store, notes), strict=True)
        pairs = np.array(list(both))[args.steps // 3 :]
        (a, a_cpu), (b, b_cpu) = np.median(pairs, 0)
        hits, rows, waited = np.median(notes[args.steps // 3 :], 0)
        print(
            f"| {exponent} | {share:.0%} | {hits:.0%} | {rows:,.0f} | {a * 1e3:.0f} "
            f"| {b * 1e3:.0f} | {b / a:.2f} | {b_cpu / a_cpu:.2f} | {waited * 1e3:.1f} |",
            flush=True,
        )


def hits():
    """The number of ids in a filled cache."""
    rows, steps = 5_000_000, 150
    print(
        f"{rows:,} rows, {IDS:,} ids, medians of the last 30 of {steps} steps\n"
        "| Zipf | distinct ids | cache | policy | hits of these | of all ids | rows from the host "
        "| plan, ms of one core |\n|---|---|---|---|---|---|---|---|"
    )
    for exponent in (0.8, 1.05, 1.2):
        total = np.cumsum(np.arange(1, rows + 1) ** -exponent)
        for share, policy in itertools.product((0.02, 0.1), ("lru", "lfu")):
            m, found = CacheMap(rows, int(rows * share), policy), []
            for _ in range(steps):
                ids = np.searchsorted(total, rng.random(IDS) * total[-1]).astype(np.int32)
                cached = np.mean(m.find(ids) >= 0)
                begun = time.thread_time()
                moves = m.plan(ids)
                took = time.thread_time() - begun
                missing = len(moves.missing)
                found.append((moves.distinct, 1 - missing / moves.distinct, cached, missing, took))
            distinct, of_distinct, of_all, missing, took = np.median(found[-30:], 0)
            print(
                f"| {exponent} | {distinct:,.0f} | {share:.0%} | {policy} | {of_distinct:.0%} "
                f"| {of_all:.0%} | {missing:,.0f} | {took * 1e3:.1f} |",
                flush=True,
            )


def memory():
    """The bytes on the device and in the process for a table of ten caches in files."""
    rows, cache = 4_000_000, 400_000
    tx = optzoo.lazy_adam(0.01)
    shape = jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32)
    ids = zipf(1.05, rows)
    batches = [next(ids) for _ in range(20)]
    # Without files that are mapped.
    of_process = lambda: int(re.search(r"RssAnon:\s+(\d+)", STATUS.read_text())[1]) * 1024
    params, before = net(), of_process()
    with tempfile.TemporaryDirectory(dir=pathlib.Path.cwd()) as folder:
        store = optzoo.host.HostTable(shape, tx, cache, folder=folder)
        params, state = store.init(params)
        y, step = np.zeros(IDS // FEATURES, np.float32), store.minimize(loss)
        for places, _ in store.ahead(batches, ids=lambda batch: batch):
            params, state, value = step(*store.swap(params, state), places, y)
        jax.block_until_ready(value)
        arrays, own = sum(a.nbytes for a in jax.live_arrays()), of_process() - before
        print(
            f"a table of {rows:,} rows of {WIDTH} with two slots: {3 * rows * WIDTH * 4 / 1e6:,.0f}"
            f" MB in files; a cache of {cache:,} rows\narrays of JAX {arrays / 1e6:,.0f} MB; the "
            f"process {own / 1e6:,.0f} MB more than before, with programs and the map of "
            f"{4 * rows / 1e6:,.0f} MB"
        )


hits() if args.hits else memory() if args.memory else speed()
