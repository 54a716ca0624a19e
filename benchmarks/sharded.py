"""Tables sharded by rows: bytes sent, temporaries, time of a step, rounds.

    .venv/bin/python benchmarks/sharded.py [traffic rounds one many processes large] [--save]

``traffic``: the compiled step of ``lazy_adam`` on 1,048,576 x 64 rows, 4,096 ids per device, on 8
to 64 devices of one process: the bytes that a device sends (by ring algorithms; for
``sharded_minimize`` in the first round), the bytes that have to be sent (distinct rows of other
owners and their gradients), and temporaries. ``auto`` is ``optzoo.minimize`` under plain ``jit``
with a sharded table.

``rounds``: the number of rounds for random ids, by NumPy.

``one``: one device, compared with ``optzoo.minimize``. ``many``: 26 tables, compared with one table
of all their rows.

``processes``: 2 processes of this machine with gloo, each pinned to a core, compared with plain
``jit``.

``large``: trains a table that exceeds the memory limit of one process (``ulimit -v``) on 4.

Contenders run in turns in one process. With ``--save``: ``sharded.json`` in ``results``.
"""

import argparse
import json
import os
import pathlib
import re
import resource
import socket
import subprocess
import sys
import time

SECTIONS = "traffic", "rounds", "one", "many", "processes", "large"
parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("sections", nargs="*", metavar="section", default=list(SECTIONS))
parser.add_argument("--rounds", type=int, default=15, help="turns of each contender")
parser.add_argument("--save", action="store_true")
parser.add_argument("--worker", nargs="*", help=argparse.SUPPRESS)
args = parser.parse_args()
if args.worker and args.worker[0] == "process" and hasattr(os, "sched_setaffinity"):
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, [cores[-1 - int(args.worker[1]) % len(cores)]])

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import AxisType, NamedSharding, PartitionSpec  # noqa: E402

import optzoo  # noqa: E402
from optzoo.compiled.hlo import Program  # noqa: E402

ROWS, WIDTH, IDS = 1 << 20, 64, 4096
KINDS = ["all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute"]


def mesh_of(n):
    """A mesh of all devices."""
    return jax.make_mesh((n,), ("shard",), axis_types=(AxisType.Auto,))


def loss(params, ids, y):
    """The loss of a table and a vector."""
    return jnp.mean((optzoo.lookup(params["table"], ids) @ params["w"] - y) ** 2)


def sent_by_a_device(text, n, in_loops=True):
    """The bytes that a device sends, from the collectives of a compiled program."""
    total, share = 0, (n - 1) / n
    factor = {"all-reduce": 2 * share, "collective-permute": 1, "reduce-scatter": n * share}
    for operation, in_loop in Program(text).operations():
        kind = operation.opcode.removesuffix("-start")
        if kind in KINDS and (in_loops or not in_loop):
            total += factor.get(kind, share) * sum(operation.sizes)
    return int(total)


def steps(mesh, tables=None):
    """The contenders: functions of parameters, state and a batch."""
    tx, n = optzoo.lazy_adam(1e-3), mesh.size
    s = optzoo.sharded.RowSharding(ROWS, n)
    return tx, {
        "auto": optzoo.minimize(loss, tx),
        "any ids": optzoo.sharded_minimize(loss, tx, mesh, {"table": s}, capacity_factor=None),
        "rounds": optzoo.sharded_minimize(loss, tx, mesh, {"table": s}),
    }


def traffic_of(n):
    """The results for one number of devices, in its own process."""
    mesh = mesh_of(n)
    on = lambda shape, dtype, *spec: jax.ShapeDtypeStruct(
        shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec))
    )
    params = {"table": on((ROWS, WIDTH), "float32", "shard"), "w": on((WIDTH,), "float32")}
    batch = on((IDS * n,), "int32", "shard"), on((IDS * n,), "float32", "shard")
    tx, contenders = steps(mesh)
    place = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    state = jax.eval_shape(tx.init, params)
    state = jax.tree.map(place, state, optzoo.state_sharding(tx, params))
    ids = [np.unique(part) for part in np.random.default_rng(0).integers(0, ROWS, (n, IDS))]
    others = np.mean([np.sum(part % n != i) for i, part in enumerate(ids)])
    # Ids are sent once, rows and their gradients.
    out = {"has to be sent": int(others * (2 * WIDTH + 1) * 4)}
    for name, step in contenders.items():
        program = step.lower(params, state, *batch).compile()
        temporaries = program.memory_analysis().temp_size_in_bytes
        # All random ids fit into the first round, and the loop of further ones has no turn.
        sent = sent_by_a_device(program.as_text(), n, in_loops=name != "rounds")
        out[name] = {"sent": sent, "temporaries": temporaries}
        out[name]["sent x"] = sent / out["has to be sent"]
        # The rows that a device asks for, and those that it is asked for.
        out[name]["temporaries x"] = temporaries / (2 * IDS * WIDTH * 4)
    return out


def traffic():
    """Weak scaling."""
    return {str(n): worker("traffic", n, devices=n) for n in (8, 16, 32, 64)}


def draws(kind, rng, size):
    """Random ids."""
    if kind == "uniform":
        return rng.integers(0, ROWS, size)
    weights = np.cumsum(1 / np.arange(1, ROWS + 1) ** float(kind.split()[1]))
    return np.searchsorted(weights / weights[-1], rng.random(size)).clip(0, ROWS - 1)


def rounds():
    """The rounds of an update, at the default capacity, for 20 batches."""
    out = {}
    for n in (2, 8, 64):
        s = optzoo.sharded.RowSharding(ROWS, n)
        for per in (256, 4096):
            capacity = s.capacity(per, 1.0)
            for kind in ("uniform", "zipf 1.05", "zipf 1.2", "zipf 1.4"):
                rng, needed = np.random.default_rng(0), []
                for _ in range(20 if n < 64 else 5):
                    parts = [np.unique(p) for p in draws(kind, rng, (n, per))]
                    most = max(np.bincount(p % n, minlength=n).max() for p in parts)
                    needed.append(int(-(-most // capacity)))
                out[f"{n} devices, {per} ids, {kind}"] = {
                    "capacity": capacity, "most": max(needed), "mean": float(np.mean(needed))
                }  # fmt: skip
    return out


def take_turns(contenders, batches, turns):
    """Times of a step of each contender: least, median, and the median ratio to the first."""
    times = {name: [] for name in contenders}
    for turn in range(turns + 1):
        for name, entry in contenders.items():
            step, params, state = entry
            begin = time.perf_counter()
            for batch in batches[name]:
                params, state, value = step(params, state, *batch)
            jax.block_until_ready((params, value))
            if turn:
                times[name].append(1e3 * (time.perf_counter() - begin) / len(batches[name]))
            entry[1:] = params, state
    first = np.array(next(iter(times.values())))
    return {
        name: {
            "least ms": float(min(t)),
            "median ms": float(np.median(t)),
            "ratio": float(np.median(np.array(t) / first)),
        }
        for name, t in times.items()
    }


def place(mesh, x, *spec):
    """An array on a mesh, given the whole array on each process."""
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def entry(mesh, tx, step, tables):
    """A contender of :func:`take_turns`, with tables of zeros."""
    zeros = lambda shape: jax.jit(
        lambda: jnp.zeros(shape), out_shardings=NamedSharding(mesh, PartitionSpec("shard"))
    )()
    params = {**{name: zeros(shape) for name, shape in tables.items()}}
    params["w"] = place(mesh, np.ones(WIDTH, np.float32))
    placed = optzoo.state_sharding(tx, params)
    return [step, params, jax.jit(tx.init, out_shardings=placed)(params)]


def compare(mesh, kind, names):
    """The contenders of :func:`steps` on ids with a distribution."""
    rng, n = np.random.default_rng(1), mesh.size
    tx, contenders = steps(mesh)
    per = 2 * IDS
    batches = [
        (
            place(mesh, draws(kind, rng, per * n).astype(np.int32), "shard"),
            place(mesh, rng.normal(size=per * n).astype(np.float32), "shard"),
        )
        for _ in range(4)
    ]
    entries = {k: entry(mesh, tx, contenders[k], {"table": (ROWS, WIDTH)}) for k in names}
    return take_turns(entries, dict.fromkeys(names, batches), args.rounds)


def one():
    """One device."""
    return {k: compare(mesh_of(1), k, ["auto", "rounds"]) for k in ("uniform", "zipf 1.2")}


def many():
    """26 tables of 40,000 rows, and one of all these rows; 4 devices of one process."""
    return worker("many", devices=4)


def many_of():
    """The results of :func:`many`, in its own process."""
    mesh, tables, each, width = mesh_of(4), 26, 40_000, 16
    tx, rng = optzoo.lazy_adam(1e-3), np.random.default_rng(0)
    sharding = optzoo.sharded.RowSharding(each, 4)
    together = optzoo.sharded.RowSharding(each * tables, 4)

    def apart(params, ids):
        rows = [optzoo.lookup(params[f"t{i}"], ids[:, i]) for i in range(tables)]
        return jnp.mean(jnp.concatenate(rows, 1) ** 2) + 0 * jnp.sum(params["w"])

    def joined(params, ids):
        ids = ids + each * jnp.arange(tables)[None]
        return jnp.mean(optzoo.lookup(params["t"], ids) ** 2) + 0 * jnp.sum(params["w"])

    batches = [
        (place(mesh, rng.integers(0, each, (IDS, tables)).astype(np.int32), "shard"),)
        for _ in range(4)
    ]
    names = [f"t{i}" for i in range(tables)]
    one = entry(
        mesh, tx, optzoo.sharded_minimize(joined, tx, mesh, {"t": together}),
        {"t": (together.stored_rows, width)},
    )  # fmt: skip
    split = entry(
        mesh, tx, optzoo.sharded_minimize(apart, tx, mesh, {"t.*": sharding}),
        dict.fromkeys(names, (sharding.stored_rows, width)),
    )  # fmt: skip
    contenders = {"one table": one, "26 tables": split}
    return take_turns(contenders, dict.fromkeys(contenders, batches), args.rounds)


def processes():
    """Two processes."""
    return several(2, "process")


def process_of(i, number, address):
    """The results of :func:`processes`, in one of the processes."""
    jax.distributed.initialize(address, number, i)
    names = ["auto", "any ids", "rounds"]
    return {k: compare(mesh_of(number), k, names) for k in ("uniform", "zipf 1.2")}


def large():
    """A table of 1 GiB with its two slots, 3 GiB in total, with a limit of 2 GiB per process."""
    return {"1 process": several(1, "large", check=False), "4 processes": several(4, "large")}


def large_of(i, number, address):
    """The results of :func:`large`, in one of the processes."""
    limit = 2 << 30
    if number > 1:
        jax.distributed.initialize(address, number, i)
    mesh = mesh_of(number)
    used = int(
        re.search(r"VmData:\s*(\d+)", pathlib.Path("/proc/self/status").read_text()).group(1)
    )
    resource.setrlimit(resource.RLIMIT_DATA, (limit + used * 1024,) * 2)
    rows, tx = 1 << 22, optzoo.lazy_adam(1e-3)
    s = optzoo.sharded.RowSharding(rows, number)
    step = optzoo.sharded_minimize(loss, tx, mesh, {"table": s})
    table = optzoo.sharded.create_table(
        s, mesh, optzoo.sharded.uniform_rows(jax.random.key(0), WIDTH)
    )
    params = {"table": table, "w": place(mesh, np.ones(WIDTH, np.float32))}
    placed = optzoo.state_sharding(tx, params)
    state = jax.jit(tx.init, out_shardings=placed)(params)
    rng, losses = np.random.default_rng(0), []
    for _ in range(5):
        ids = rng.integers(0, rows, number * IDS).astype(np.int32)
        y = np.ones(number * IDS, np.float32)
        params, state, value = step(params, state, *(place(mesh, x, "shard") for x in (ids, y)))
        losses.append(float(value))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {"losses": losses, "peak GiB": peak, "table and slots GiB": 3 * rows * WIDTH * 4 / 2**30}


WORKERS = {"traffic": traffic_of, "many": many_of, "process": process_of, "large": large_of}


def worker(*call, devices=1):
    """The result of a worker in its own process."""
    return _run([["--worker", *map(str, call)]], devices)


def several(number, name, *, check=True):
    """The result of process 0 of several processes."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{s.getsockname()[1]}"
    calls = [["--worker", name, str(i), str(number), address] for i in range(number)]
    return _run(calls, 1, check)


def _run(calls, devices, check=True):
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
    command = [sys.executable, __file__, f"--rounds={args.rounds}"]
    running = [
        subprocess.Popen([*command, *c], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for c in calls
    ]
    outs = [p.communicate() for p in running]
    if running[0].returncode == 0:
        return json.loads(outs[0][0].splitlines()[-1])
    last = outs[0][1].decode().strip().splitlines()[-1:]
    if check:
        raise SystemExit(outs[0][1].decode())
    return {"failed": last}


def main():
    """Runs the sections, or is a worker of one."""
    if args.worker:
        name, *rest = args.worker
        print(json.dumps(WORKERS[name](*(int(x) if x.isdigit() else x for x in rest))))
        return
    results = pathlib.Path(
        os.environ.get("BENCHMARK_RESULTS", pathlib.Path(__file__).parent / "results")
    )
    file = results / "sharded.json"
    done = json.loads(file.read_text()) if args.save and file.exists() else {}
    for section in args.sections:
        done[section] = globals()[section]()
        print(section, json.dumps(done[section], indent=1), flush=True)
    if args.save:
        file.write_text(json.dumps(done, indent=1) + "\n")


if __name__ == "__main__":
    main()
