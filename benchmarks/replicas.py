"""The distributed methods: bytes sent, time per step, and validation loss by bytes sent.

    .venv/bin/python benchmarks/replicas.py [processes buckets one bytes]
        [--rounds 9] [--save]

``processes``: 10 MB of parameters in 10 arrays, on 2 and on 4 local processes that communicate by
gloo, each pinned to one core. ``gradient_descent`` on a quadratic, whose gradient is cheap, so that
the optimizer and its messages are measured. All contenders run in turns in random order, after a
barrier; the time of a turn is that of the slowest process. In the *step* form an exchange is
conditional, in the *round* form (``optzoo.replicas.scan_local_steps``) it ends each round. Bytes
are the outputs of all collectives in the compiled program, divided by the period; a ring of n
processes sends 2 (n - 1) / n times as much.

``buckets``: the mean over the replicas of 10 MB in few and in many arrays, in place, for several
maximum sizes of arrays that are sent together.

``one``: wrappers with ``axis_name=None`` around ``adam``, four matrices of 1000 x 1000, one
core, donated: the step form, the local step (``exchange=False``) and whole rounds.

``bytes``: a perceptron on digits, 8 and 64 replicas on one device, each with its own batches:
validation loss against the bytes sent by a replica. The rate of each method is the best of a grid,
by the mean of the last losses over three seeds; the means are shown.

With ``--save``: ``replicas.json`` and ``replicas_bytes.png`` in ``results``.
"""

import argparse
import functools
import json
import os
import re
import socket
import subprocess
import sys
import time

import harness

# The sections, and the numbers of processes that each runs on.
SECTIONS = {"processes": (2, 4), "buckets": (2, 4), "one": (1,), "bytes": (1,)}
REPLICAS = 8, 64
parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("sections", nargs="*", metavar="section", default=list(SECTIONS))
parser.add_argument("--rounds", type=int, default=9)
parser.add_argument("--save", action="store_true")
parser.add_argument("--number", type=int, help=argparse.SUPPRESS)
parser.add_argument("--process", type=int, help=argparse.SUPPRESS)
parser.add_argument("--coordinator", help=argparse.SUPPRESS)
args = parser.parse_args()
if args.process is not None and hasattr(os, "sched_setaffinity"):
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, [cores[-1 - args.process % len(cores)]])

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from jax.experimental import multihost_utils  # noqa: E402
from jax.sharding import AxisType, NamedSharding, PartitionSpec  # noqa: E402

import optzoo  # noqa: E402
from optzoo import race  # noqa: E402
from optzoo.distributed.engine import collectives  # noqa: E402

PERIODS = 1, 4, 16, 64
MEGABYTE = 250_000  # floats


def summary(seconds, steps=1, to=None):
    """Median and least time of a step, from the times of turns; also as ratios to ``to``."""
    ms = 1e3 * np.array(seconds) / steps
    row = {"median ms": float(np.median(ms)), "least ms": float(min(ms))}
    if to is not None:
        row["median x"] = row["median ms"] / to["median ms"]
        row["least x"] = row["least ms"] / to["least ms"]
    return row


def sent(program):
    """The bytes of the outputs of all collectives in a compiled program, each counted once."""
    width = {"f64": 8, "s64": 8, "f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2, "pred": 1}
    kinds = re.findall(r"= (.*?) (?:all-reduce|all-gather)(?:-start)?\(", program.as_text())
    arrays = [a for kind in kinds for a in re.findall(r"(\w+)\[([\d,]*)\]", kind)]
    return sum(width[t] * int(np.prod([int(n) for n in s.split(",") if n])) for t, s in arrays)


def mesh(number):
    """The first devices, one for each replica."""
    auto = (AxisType.Auto,)
    return jax.make_mesh((number,), ("replica",), auto, devices=jax.devices()[:number])


def start(section, number):
    """The result of a section from process 0, run on this number of processes."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [sys.executable, __file__, section, f"--rounds={args.rounds}", f"--number={number}"]
    command.append(f"--coordinator=127.0.0.1:{port}")
    devices = str(max(REPLICAS)) if section == "bytes" else "1"
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": devices}
    # Otherwise the C library maps arrays above 32 MB anew each time, in spite of harness.py.
    env |= {"MALLOC_MMAP_MAX_": "0", "MALLOC_ARENA_MAX": "1"}
    processes = [
        subprocess.Popen([*command, f"--process={i}"], env=env, stdout=subprocess.PIPE)
        for i in range(number)
    ]
    try:
        outs = [process.communicate(timeout=3600)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return json.loads(outs[0].splitlines()[-1])


# Several processes.


class Cluster:
    """All processes, controlled by one of them."""

    def __init__(self):
        jax.distributed.initialize(args.coordinator, args.number, args.process)
        self.size = args.number
        self.mesh = mesh(self.size)

    def train(self, tx, params, steps=None, **static):
        """``run(k)`` and the compiled program of a step, or of a round of ``steps`` steps."""

        def step(params, state, target, **chosen):
            grads = jax.tree.map(lambda x: x - target, optzoo.replicas.per_replica(params))
            updates, state = tx.update(grads, state, params, **static, **chosen)
            return optax.apply_updates(params, updates), state

        step = step if steps is None else optzoo.replicas.scan_local_steps(step)
        shape = (self.size,) if steps is None else (self.size, steps)
        sharding = NamedSharding(self.mesh, PartitionSpec("replica"))
        targets = jax.jit(lambda: jnp.ones(shape), out_shardings=sharding)()
        carry = optzoo.replicas.replicate(params, tx.init(params), self.size, mesh=self.mesh)
        train = jax.jit(
            optzoo.replicas.map_over_replicas(step, mesh=self.mesh), donate_argnums=(0, 1)
        )
        program = train.lower(*carry, targets).compile()

        def run(times):
            nonlocal carry
            for _ in range(times):
                carry = program(*carry, targets)
            jax.block_until_ready(carry)

        return run, program

    def sum(self, tree, bucket_bytes):
        """``run(k)`` and the compiled program of a mean over the replicas, in place."""
        replicas, spec = collectives.Replicas("replica", bucket_bytes), PartitionSpec("replica")
        mean = lambda tree: jax.tree.map(lambda a: replicas.vary(a / self.size), replicas.sum(tree))
        mapped = jax.shard_map(mean, mesh=self.mesh, in_specs=spec, out_specs=spec)
        spread = lambda: jax.tree.map(lambda a: jnp.ones(self.size * len(a)), tree)
        carry = jax.jit(spread, out_shardings=NamedSharding(self.mesh, spec))()
        program = jax.jit(mapped, donate_argnums=0).lower(carry).compile()

        def run(k):
            nonlocal carry
            carry = jax.block_until_ready(program(carry))

        return run, program

    def take_turns(self, runs):
        """Seconds of every turn of each contender, in the slowest process."""
        barrier = functools.partial(multihost_utils.sync_global_devices, "turn")
        seconds = harness.take_turns(runs, args.rounds, before=barrier)
        slowest = np.max(multihost_utils.process_allgather(np.array(list(seconds.values()))), 0)
        return dict(zip(runs, slowest, strict=True))


def processes():
    """Time and bytes of a step, by method and period."""
    cluster = Cluster()
    inner = optzoo.gradient_descent(0.01)
    params = [jnp.full(MEGABYTE, float(i)) for i in range(10)]
    methods = {
        "elastic_average": lambda p: optzoo.elastic_average(
            inner, cluster.size, communication_period=p
        ),
        "model_average": lambda p: optzoo.model_average(inner, interval_steps=p),
        "diloco": lambda p: optzoo.diloco(inner, communication_period=p),
    }
    runs, steps, table = {}, {}, {}

    def enter(name, tx, period, in_turn, rounds_of=None, **static):
        run, program = cluster.train(tx, params, rounds_of, **static)
        calls = in_turn // (rounds_of or 1)
        runs[name], steps[name] = lambda k: run(calls), in_turn
        temporaries = program.memory_analysis().temp_size_in_bytes / 1e6
        table[name] = {"MB per step": sent(program) / period / 1e6, "temporaries MB": temporaries}

    enter("sync_replicas", optzoo.sync_replicas(inner, cluster.size), 1, 16)
    enter("local steps only", methods["model_average"](10), 1, 16, exchange=False)
    for name, make in methods.items():
        for period in PERIODS:
            in_turn = max(16, period)
            enter(f"{name} {period}, step", make(period), period, in_turn)
            enter(f"{name} {period}, round", make(period), period, in_turn, rounds_of=period)
    seconds = cluster.take_turns(runs)
    base = summary(seconds["sync_replicas"], steps["sync_replicas"])
    for name, row in table.items():
        row |= summary(seconds[name], steps[name], base)
    return table


def buckets():
    """A sum of few and of many arrays, for several maximum sizes of joined arrays."""
    cluster = Cluster()
    sizes = {"none": None, "64 kB": 1 << 16, "1 MB": 1 << 20, "16 MB": 1 << 24}
    trees = {
        "3 of 3.3 MB": (3, 833_333),
        "10 of 1 MB": (10, MEGABYTE),
        "100 of 100 kB": (100, 25_000),
        "1000 of 10 kB": (1000, 2_500),
    }
    result = {}
    for tree, (number, size) in trees.items():
        contenders = {name: (nbytes, collectives.BUCKET_LEAVES) for name, nbytes in sizes.items()}
        if number == 1000:
            contenders |= {f"1 MB, up to {n} arrays": (1 << 20, n) for n in (32, 512)}
        runs, table = {}, {}
        for name, (nbytes, leaves) in contenders.items():
            usual, collectives.BUCKET_LEAVES = collectives.BUCKET_LEAVES, leaves
            begin = time.perf_counter()
            runs[name], program = cluster.sum([jnp.ones(size)] * number, nbytes)
            collectives.BUCKET_LEAVES = usual
            table[name] = {
                "s to compile": time.perf_counter() - begin,
                "temporaries MB": program.memory_analysis().temp_size_in_bytes / 1e6,
            }
        seconds = cluster.take_turns(runs)
        base = summary(seconds["1 MB"])
        result[tree] = {name: {**table[name], **summary(seconds[name], 1, base)} for name in runs}
        if args.process == 0:
            print(args.number, tree, result[tree], file=sys.stderr, flush=True)
    return result


# One replica.


def with_exchange(tx, exchange):
    """The same transformation with a fixed argument ``exchange``."""
    return optax.GradientTransformation(tx.init, functools.partial(tx.update, exchange=exchange))


def rounds(tx, params, grads, length, exchange=True):
    """``run(k)``: a round of ``length`` steps as one program, or a scan without an exchange."""

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def program(params, state, grads):
        def step(params, state, _, **chosen):
            updates, state = tx.update(grads, state, params, **chosen)
            return optax.apply_updates(params, updates), state

        if exchange:
            return optzoo.replicas.scan_local_steps(step)(params, state, jnp.zeros(length))
        return jax.lax.scan(lambda c, _: (step(*c, _), None), (params, state), length=length)[0]

    carry = jax.tree.map(lambda x: x.copy(), (params, tx.init(params)))
    program = program.lower(*carry, grads[0]).compile()

    def run(k):
        nonlocal carry
        carry = jax.block_until_ready(program(*carry, grads[k % len(grads)]))

    return run


def one():
    """Wrappers around adam, compared with adam."""
    adam, alone = optzoo.adam(1e-3), {"axis_name": None}
    normal = lambda seed: list(jax.random.normal(jax.random.key(seed), (4, 1000, 1000)))
    params, grads = normal(9), [normal(k) for k in range(2)]
    periodic = {
        "elastic_average": lambda p: optzoo.elastic_average(
            adam, 1, communication_period=p, **alone
        ),
        "agn": lambda p: optzoo.agn(adam, communication_period=p, **alone),
        "model_average": lambda p: optzoo.model_average(adam, interval_steps=p, **alone),
        "diloco": lambda p: optzoo.diloco(adam, communication_period=p, **alone),
    }
    masked = lambda tx: optax.GradientTransformation(
        tx.init, lambda g, s, p: tx.update(g, s, p, arrived=jnp.isfinite(g[0][0, 0]))
    )
    single = {
        "adam": adam,
        "optax.adam": optax.adam(1e-3),
        "sync_replicas": optzoo.sync_replicas(adam, 1, **alone),
        "sync_replicas, hold=False": optzoo.sync_replicas(adam, 1, hold=False, **alone),
        "sync_replicas, arrived": masked(optzoo.sync_replicas(adam, 1, **alone)),
        "sync_replicas, hold=False, arrived": masked(
            optzoo.sync_replicas(adam, 1, hold=False, **alone)
        ),
        "drop_stale_gradient": optzoo.drop_stale_gradient(adam, 0, **alone),
    }
    runs, steps, about = {}, {}, {}

    def enter(name, run, in_turn, known=None):
        runs[name], steps[name], about[name] = run, in_turn, known or {}

    def repeated(name, tx, in_turn):
        run, known = harness.contender(tx, params, grads)
        keep = ("temporaries MB", "state bytes per parameter")
        known = {key: known[key] for key in keep}
        enter(name, lambda k: [run(k + i) for i in range(in_turn)], in_turn, known)

    for name, tx in single.items():
        repeated(name, tx, 10)
    for length in (10, 100):
        enter(f"adam, scan of {length}", rounds(adam, params, grads, length, False), length)
    for name, make in periodic.items():
        repeated(f"{name}, local step", with_exchange(make(10), False), 10)
        repeated(f"{name} 10, step", make(10), 10)
        for period in (10, 100):
            run = rounds(make(period), params, grads, period)
            enter(f"{name} {period}, round", run, period)
    seconds = harness.take_turns(runs, args.rounds)
    base = summary(seconds["adam"], 10)
    table = {n: {**summary(times, steps[n], base), **about[n]} for n, times in seconds.items()}
    for name, row in table.items():
        if name.endswith("round"):
            scan = summary(seconds[f"adam, scan of {steps[name]}"], steps[name])
            row["median x scan"] = row["median ms"] / scan["median ms"]
            row["least x scan"] = row["least ms"] / scan["least ms"]
    return table


# Loss against bytes.

STEPS, BATCH, EVERY, SEEDS = 512, 8, 4, 3
RATES = 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0


def methods(n):
    """Name -> optimizer of n replicas, steps between exchanges, collectives in an exchange."""
    inner = optzoo.momentum(0.1, 0.9)
    backup = n - n // 4
    found = {
        "sync_replicas": (optzoo.sync_replicas(inner, n), 1, 1),
        "sync_replicas, 3/4": (optzoo.sync_replicas(inner, backup, n), 1, 1),
        "drop_stale_gradient, 3": (optzoo.drop_stale_gradient(inner, 3), 1, 4),
        "drop_stale_gradient, all": (optzoo.drop_stale_gradient(inner, n - 1), 1, n),
    }
    for p in (4, 16, 64):
        elastic = optzoo.elastic_average(inner, n, communication_period=p, moving_rate=0.9 / n)
        found[f"elastic_average {p}"] = elastic, p, 1
        found[f"agn {p}"] = optzoo.agn(inner, communication_period=p), p, 1
        found[f"model_average {p}"] = optzoo.model_average(inner, interval_steps=p), p, 1
        found[f"diloco {p}"] = optzoo.diloco(inner, communication_period=p), p, 1
    return found


def learner(problem, tx, n):
    """``learn(rate, seed)``, the validation losses; and the program of a step on n devices."""
    train, valid = (jax.tree.map(jnp.asarray, a) for a in (problem.train, problem.valid))

    def step(params, state, batch, rate=1.0):
        grads = jax.grad(problem.loss)(optzoo.replicas.per_replica(params), batch)
        updates, state = tx.update(grads, state, params, learning_rate=rate)
        return optax.apply_updates(params, updates), state

    def draw(key, tick):
        keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.fold_in(key, tick), jnp.arange(n))
        ids = jax.vmap(lambda key: jax.random.randint(key, (BATCH,), 0, len(train[0])))(keys)
        return jax.tree.map(lambda a: a[ids], train)

    def begin(seed):
        params = problem.init(jax.random.key(seed))
        return optzoo.replicas.replicate(params, tx.init(params), n)

    @jax.jit
    def learn(rate, seed):
        simulated = optzoo.replicas.map_over_replicas(functools.partial(step, rate=rate))

        def tick(carry, t):
            return simulated(*carry, draw(jax.random.key(1000 + seed), t)), None

        def ticks(carry, ts):
            carry, _ = jax.lax.scan(tick, carry, ts)
            return carry, problem.loss(optzoo.eval_params(*carry), valid)

        _, losses = jax.lax.scan(ticks, begin(seed), jnp.arange(STEPS).reshape(-1, EVERY))
        first = problem.loss(problem.init(jax.random.key(seed)), valid)
        return jnp.concatenate([first[None], losses])

    really = jax.jit(optzoo.replicas.map_over_replicas(step, mesh=mesh(n)))
    shapes = jax.eval_shape(lambda: (*begin(0), draw(jax.random.key(0), 0)))
    return learn, really.lower(*shapes).compile()


def bytes_():
    """Validation losses, and the bytes sent."""
    problem, result = race.PROBLEMS["digits"](), {}
    for n in REPLICAS:
        result[f"{n} replicas"] = table = {}
        for name, (tx, period, times) in methods(n).items():
            learn, program = learner(problem, tx, n)
            curves = {r: np.array([learn(r, seed) for seed in range(SEEDS)]) for r in RATES}
            last = {rate: np.nan_to_num(c[:, -1], nan=np.inf) for rate, c in curves.items()}
            best = min(RATES, key=lambda rate: last[rate].mean())
            table[name] = row = {
                "rate": best,
                "loss": float(last[best].mean()),
                "losses": last[best].tolist(),
                "kB per exchange": times * sent(program) / 1e3,
                "period": period,
                "curve": [round(float(v), 5) for v in curves[best].mean(0)],
                "losses by rate": {str(r): str(v.mean().round(4)) for r, v in last.items()},
            }
            row["MB sent"] = row["kB per exchange"] * (STEPS // period) / 1e3
            print(n, name, best, row["loss"], row["MB sent"], file=sys.stderr, flush=True)
    return result


def draw(result):
    """The figure of the section ``bytes``."""
    from matplotlib.figure import Figure

    colours = {
        "sync_replicas": "#000000",
        "drop_stale_gradient": "#7f3c8d",
        "elastic_average": "#0072b2",
        "agn": "#d55e00",
        "model_average": "#009e73",
        "diloco": "#cc79a7",
    }
    dashes = {1: "-", 4: "-", 16: (0, (4, 1.5)), 64: (0, (1, 1.2))}
    figure = Figure(figsize=(11, 5.2), layout="constrained")
    panels = figure.subplots(1, len(result), sharey=True)
    for axes, (title, table) in zip(panels, result.items(), strict=True):
        for name, row in table.items():
            every = max(row["period"], EVERY)
            losses = row["curve"][:: every // EVERY][1:]
            at = [(i + 1) * every // row["period"] for i in range(len(losses))]
            dash = (0, (4, 1.5)) if name.endswith(("3/4", ", 3")) else dashes[row["period"]]
            sent = np.array(at) * row["kB per exchange"] / 1e3
            style = {"color": colours[re.split("[, ]", name)[0]], "linestyle": dash}

            axes.plot(sent, losses, marker="." if len(losses) < 10 else "", label=name, **style)
        axes.set(title=title, xscale="log", yscale="log", xlabel="MB sent by a replica")
        axes.grid(alpha=0.25, which="both")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("validation loss")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def show(table, indent=""):
    """Prints a table of rows, or of tables."""
    for name, row in table.items():
        if any(isinstance(v, dict) for v in row.values()) and "curve" not in row:
            print(f"{indent}{name}")
            show(row, indent + "  ")
        else:
            values = {k: v for k, v in row.items() if isinstance(v, float | int)}
            print(f"{indent}{name:36}", "   ".join(f"{k} {v:.3g}" for k, v in values.items()))


def main():
    """Runs the sections, prints and saves; or runs a section in one of the processes."""
    if args.process is not None:
        of = {"processes": processes, "buckets": buckets, "one": one, "bytes": bytes_}
        print(json.dumps(of[args.sections[0]]()))
        return
    for section in args.sections:
        results = {number: start(section, number) for number in SECTIONS[section]}
        result = {f"{number} processes": result for number, result in results.items()}
        result = results.get(1, result)
        print(f"\n{section}")
        show(result)
        if args.save:
            path = harness.RESULTS / "replicas.json"
            before = json.loads(path.read_text()) if path.exists() else {}
            harness.save("replicas", {**before, section: {"machine": harness.machine(), **result}})
            if section == "bytes":
                draw(result).savefig(harness.RESULTS / "replicas_bytes.png", dpi=150)


if __name__ == "__main__":
    main()
