"""Common parts of the benchmarks: pinned cores, memory settings, contenders run in turns.

Must be imported before jax.
"""

import datetime
import itertools
import json
import os
import pathlib
import platform
import random
import sys
import time

RESULTS = pathlib.Path(
    os.environ.get("BENCHMARK_RESULTS", pathlib.Path(__file__).with_name("results"))
)

# The first access to new memory is slow, above all on virtual machines, and glibc returns arrays
# above 32 MB to the system each time: the time of a program with large temporaries would then be
# that of its page faults. Keep freed memory in one heap. The C library reads these settings when a
# process starts, so start the process again.
_KEEP = {"MALLOC_MMAP_MAX_": "0", "MALLOC_ARENA_MAX": "1"}
_KEEP |= {"MALLOC_TRIM_THRESHOLD_": "1000000000000"}
if not _KEEP.keys() <= os.environ.keys():
    os.execve(sys.executable, sys.orig_argv, {**_KEEP, **os.environ})


# Those of the first process: one that it starts has only the cores that it was pinned to.
if hasattr(os, "sched_getaffinity"):
    os.environ.setdefault("BENCHMARK_CORES", ",".join(map(str, sorted(os.sched_getaffinity(0)))))


def pin(cores: int) -> None:
    """Pins the process to this number of cores; call it before JAX starts its threads."""
    if hasattr(os, "sched_setaffinity"):
        known = os.environ["BENCHMARK_CORES"].split(",")
        os.sched_setaffinity(0, [int(core) for core in known[-cores:]])


def compile_timed(function, *args):
    """Compiles a function, with its first two arguments donated; also returns the times."""
    import jax

    times = [time.perf_counter()]
    traced = jax.jit(function, donate_argnums=(0, 1)).trace(*args)
    times.append(time.perf_counter())
    lowered = traced.lower()
    times.append(time.perf_counter())
    program = lowered.compile()
    times.append(time.perf_counter())
    trace, lower, compile_ = (b - a for a, b in itertools.pairwise(times))
    return program, {"trace s": trace, "lower s": lower, "compile s": compile_}


def compiled(tx, params, grads, native=False):
    """A compiled update with donated arguments, its compile times and memory; accepts shapes.

    With ``native`` it is the update of ``optzoo.native_step``.
    """
    import jax
    import optax

    import optzoo

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.eval_shape(tx.init, params)
    step = optzoo.native_step(tx, required=True) if native else step
    program, took = compile_timed(step, params, state, grads)
    return program, took | {
        "temporaries MB": program.memory_analysis().temp_size_in_bytes / 1e6,
        "state bytes per parameter": size(state) / count(params),
    }


def contender(tx, params, grads, native=False):
    """``run(k)`` for the k-th turn of an optimizer, and the properties of its program."""
    import jax

    program, about = compiled(tx, params, grads[0], native)
    carry = jax.tree.map(lambda x: x.copy(), (params, tx.init(params)))

    def run(k):
        nonlocal carry
        carry = jax.block_until_ready(program(*carry, grads[k % len(grads)]))

    return run, about


def of_torch(kind, params, grads, **kwargs):
    """``run(k)`` of a torch optimizer on lists of arrays; on the GPU if JAX uses one."""
    import jax
    import torch

    torch.set_num_threads(1)
    device = "cuda" if jax.default_backend() == "gpu" else "cpu"
    xs = [torch.nn.Parameter(torch.tensor(x, device=device)) for x in params]
    for x, g in zip(xs, grads, strict=True):
        x.grad = torch.tensor(g, device=device)
    optimizer = getattr(torch.optim, kind)(xs, lr=1e-3, **kwargs)

    def run(k):
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()

    return run


def size(tree) -> int:
    """The size of all arrays in bytes."""
    import jax

    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(tree))


def count(tree) -> int:
    """The number of elements of all arrays."""
    import jax

    return sum(a.size for a in jax.tree.leaves(tree))


def take_turns(contenders, rounds, before=lambda: None):
    """Seconds of every run of each contender, in a new order each round, after a warm-up round.

    ``before`` is called before each run, outside of the measured time.
    """
    seconds = {name: [] for name in contenders}
    for k in range(rounds + 1):
        for name in random.Random(k).sample(list(contenders), len(contenders)):
            before()
            begin = time.perf_counter()
            contenders[name](k)
            seconds[name].append(time.perf_counter() - begin)
    return {name: times[1:] for name, times in seconds.items()}


def machine() -> dict[str, str]:
    """The date, the machine and the versions of a measurement."""
    import jax
    import jaxlib
    import numpy
    import optax

    import optzoo

    model = platform.processor() or platform.machine()
    info = pathlib.Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        model = names[0].partition(":")[2].strip() if names else model
    versions = {m.__name__: m.__version__ for m in (jax, jaxlib, numpy, optax, optzoo)}
    torch = sys.modules.get("torch")
    versions |= {} if torch is None else {"torch": torch.__version__}
    return {
        "date": datetime.date.today().isoformat(),
        "device": jax.devices()[0].device_kind,
        "processor": model,
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0),
        "python": platform.python_version(),
        **versions,
    }


def save(name: str, result) -> None:
    """Writes ``results/<name>.json``."""
    RESULTS.mkdir(exist_ok=True)
    document = {"machine": machine(), **result}
    (RESULTS / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
