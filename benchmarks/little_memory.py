"""8-bit slots and 24-bit weights: the quality of training, the cost of a step, the memory.

    .venv/bin/python benchmarks/little_memory.py quality [--seeds 8] [--problems text] [--save]
    .venv/bin/python benchmarks/little_memory.py cost [--rounds 25] [--save]
    .venv/bin/python benchmarks/little_memory.py bytes [--save]

Quality: the loss on held-out data after a run with each seed, for five optimizers in each form of
slots and weights; the rates are those of the catalogue, and for the text the best of two or three
rates tried with one seed. All forms have the same seeds and batches. Cost: contenders run in turns
in random order, on one core, with donated arguments. With ``--save``: ``little_memory_<part>.json``
in ``results``.
"""

import argparse
import pathlib
import sys

import harness

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("part", choices=("quality", "cost", "bytes"))
parser.add_argument("--seeds", type=int, default=8)
parser.add_argument("--problems", nargs="+", default=["digits", "words", "text"])
parser.add_argument("--rounds", type=int, default=25)
parser.add_argument("--save", action="store_true")
args = parser.parse_args()
harness.pin(1)
DEVICES = 8  # of the sharded choice

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

import optzoo  # noqa: E402
from optzoo.race.problems import PROBLEMS  # noqa: E402

jax.config.update("jax_num_cpu_devices", DEVICES if args.part == "bytes" else 1)

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples"))
from papers import flashoptim  # noqa: E402

OPTIMIZERS = ("adamw", "momentum", "row_wise_lamb", "row_wise_adagrad", "ftrl")
RATES = {
    "adamw": 1e-3,
    "momentum": 0.03,
    "row_wise_lamb": 0.01,
    "row_wise_adagrad": 0.03,
    "ftrl": 0.1,
}


def optimizer(problem, name):
    """An optimizer with its rate for a problem."""
    if problem != "text":
        return optzoo.CATALOG[name].make()
    decay = {"weight_decay_per_step": 0.01 * RATES[name]} if name == "adamw" else {}
    return optzoo.CATALOG[name].make(RATES[name], **decay)


def in_8_bits(tx):
    """An optimizer with 8-bit slots."""
    return optzoo.slots_dtype(tx, "int8")


def in_32_bits(params, tx):
    """The start of a run with float32 parameters."""
    return params, tx.init(params)


def as_bfloat16(tree):
    """A tree with its floating-point arrays converted to bfloat16."""
    narrow = lambda x: x.astype(jnp.bfloat16) if jnp.issubdtype(x.dtype, jnp.floating) else x
    return jax.tree.map(narrow, tree)


def in_16_bits(params, tx):
    """The start of a run with bfloat16 parameters."""
    return in_32_bits(as_bfloat16(params), tx)


# By the words of the table: what is done to the optimizer, and how its parameters start.
FORMS = {
    "float32": (lambda tx: tx, in_32_bits),
    "slots bfloat16": (
        lambda tx: optzoo.slots_dtype(tx, "bfloat16", stochastic=True),
        in_32_bits,
    ),
    "slots int8": (in_8_bits, in_32_bits),
    "weights 24 bits": (optzoo.master_weights, optzoo.split_params),
    "slots int8, weights 24 bits": (
        lambda tx: optzoo.master_weights(in_8_bits(tx)),
        optzoo.split_params,
    ),
    "slots linear in 8 bits": (flashoptim.linear_slots, in_32_bits),
    "weights bfloat16": (lambda tx: tx, in_16_bits),
}


def two_sided(t, freedom):
    """The probability that a Student's t has at least this magnitude."""
    return float(jax.scipy.special.betainc(freedom / 2, 0.5, freedom / (freedom + t**2)))


def compared(losses, reference):
    """Mean, deviation, Welch's test of equal means, and the test of the differences by seed."""
    a, b = (np.asarray(x, np.float64) for x in (losses, reference))
    if not np.isfinite(a).all():
        return {"losses": [x if np.isfinite(x) else None for x in losses]}
    found = {"losses": losses, "mean": a.mean(), "deviation": a.std(ddof=1)}
    if losses is reference:
        return found
    va, vb = (x.var(ddof=1) / len(x) for x in (a, b))
    freedom = (va + vb) ** 2 / (va**2 / (len(a) - 1) + vb**2 / (len(b) - 1))
    found["p"] = two_sided((a - b).mean() / np.sqrt(va + vb), freedom)
    error = (a - b).std(ddof=1) / np.sqrt(len(a))
    return found | {"p of pairs": two_sided((a - b).mean() / error, len(a) - 1)}


def is_refused(problem, tx):
    """Whether an optimizer has no slot that can be 8-bit."""
    try:
        jax.eval_shape(lambda key: in_8_bits(tx).init(problem.init(key)), jax.random.key(0))
    except ValueError:
        return True
    return False


def quality(save):
    """The losses of all forms, optimizers and problems; saved as they are computed."""
    found = {}
    for name in args.problems:
        problem = flashoptim.model() if name == "text" else PROBLEMS[name]()
        found[name] = {}
        for form, (change, start) in FORMS.items():
            for kind in OPTIMIZERS:
                forms = found[name].setdefault(kind, {})
                if "8" in form and is_refused(problem, optimizer(name, kind)):
                    forms[form] = "refused"
                    continue
                tx = change(optimizer(name, kind))
                losses, _ = flashoptim.runs(problem, tx, args.seeds, start)
                reference = forms["float32"]["losses"] if forms else losses
                forms[form] = compared(losses, reference)
                shown = {k: v for k, v in forms[form].items() if k != "losses"}
                print(name, kind, form, *(f"{k} {v:.4g}" for k, v in shown.items()), flush=True)
                save(found)


def times(runs):
    """Least times and medians of contenders run in turns, and ratios to ``float32``."""
    seconds = harness.take_turns({name: run for name, (run, _) in runs.items()}, args.rounds)
    least = {name: min(s) for name, s in seconds.items()}
    medians = {name: float(np.median(s)) for name, s in seconds.items()}
    kept = ("state bytes per parameter", "temporaries MB")
    found = {}
    for name, (_, about) in runs.items():
        found[name] = {"least ms": 1e3 * least[name], "median ms": 1e3 * medians[name]}
        found[name]["ratio of least"] = least[name] / least["float32"]
        found[name]["ratio of medians"] = medians[name] / medians["float32"]
        found[name] |= {key: about[key] for key in kept}
        print(f"  {name:28}", *(f"{key} {value:.4g}" for key, value in found[name].items()))
    return found


def steps(tx, others, params, grads, native=False):
    """The steps of an optimizer in all forms, and of others."""
    forms = {
        "float32": tx,
        "slots bfloat16": optzoo.slots_dtype(tx, "bfloat16", stochastic=True),
        "slots bfloat16, packed": optzoo.slots_dtype(tx, "bfloat16", stochastic=True, packed=True),
        "slots int8": in_8_bits(tx),
    }
    runs = {k: harness.contender(t, params, grads) for k, t in (forms | others).items()}
    in_16 = as_bfloat16(params), as_bfloat16(grads)
    for name, inner in {
        "weights 24 bits": tx,
        "slots int8, weights 24 bits": in_8_bits(tx),
    }.items():
        runs[name] = harness.contender(optzoo.master_weights(inner), *in_16)
    for name in ("float32", "slots int8") if native else ():
        try:
            runs[f"{name}, native"] = harness.contender(forms[name], params, grads, native=True)
        except ValueError as error:
            print(f"  {name}, native: {error}")
    return times(runs)


def dense(leaves, shape):
    """AdamW on matrices."""
    params = {i: jnp.zeros(shape) for i in range(leaves)}
    normal = lambda k: jax.random.normal(jax.random.key(k), shape)
    grads = [{i: normal(leaves * k + i) for i in params} for k in range(2)]
    tx = optzoo.adamw(1e-3, weight_decay_per_step=1e-5)
    return steps(tx, {"optax.adamw": optax.adamw(1e-3, weight_decay=1e-2)}, params, grads, True)


def momentum(leaves, shape):
    """Momentum on matrices."""
    params = {i: jnp.zeros(shape) for i in range(leaves)}
    grads = [jax.tree.map(lambda x: jax.random.normal(jax.random.key(0), x.shape), params)]
    tx = optzoo.momentum(0.01, 0.9)
    runs = {"float32": tx, "slots int8": in_8_bits(tx)}
    return times({k: harness.contender(t, params, grads) for k, t in runs.items()})


def rows(number, width, ids):
    """Lazy Adam on a table with few ids per step."""
    rng, table = np.random.default_rng(0), jnp.zeros((number, width))
    values = jnp.asarray(rng.normal(size=(ids, width)), jnp.float32)
    places = (jnp.asarray(rng.integers(0, number, ids), jnp.int32) for _ in range(64))
    grads = [optzoo.SparseRows(i, values, number) for i in places]
    return steps(optzoo.lazy_adam(1e-3), {}, table, grads, native=True)


def cost(save):
    """The times of a step."""
    cases = {
        "AdamW, 24 leaves of 1,024 x 1,024": lambda: dense(24, (1024, 1024)),
        "AdamW, 16 leaves of 256 x 256": lambda: dense(16, (256, 256)),
        "Momentum, 24 leaves of 1,024 x 1,024": lambda: momentum(24, (1024, 1024)),
        "lazy Adam, 1,000,000 x 64, 4,096 ids": lambda: rows(1_000_000, 64, 4096),
    }
    found = {}
    for case, measure in cases.items():
        print(case, flush=True)
        found[case] = measure()
        save(found)


ADAM = "optzoo.lazy_adam(1e-3)"
# What is chosen, the line of code, and how the parameters start.
CHOICES = {
    "slots in 32 bits": (ADAM, in_32_bits),
    "slots in 16 bits": (
        f'optzoo.slots_dtype({ADAM}, "bfloat16", stochastic=True, packed=True)',
        in_32_bits,
    ),
    "slots in 8 bits": (f'optzoo.slots_dtype({ADAM}, "int8")', in_32_bits),
    "weights in 32 bits, the model reads 16": (
        f"optzoo.master_weights({ADAM}, bits=32)",
        optzoo.split_params,
    ),
    "weights in 24 bits, the model reads 16": (
        f"optzoo.master_weights({ADAM})",
        optzoo.split_params,
    ),
    "weights in 16 bits": (ADAM, in_16_bits),
    "weights in 24 bits, slots in 8": (
        f'optzoo.master_weights(optzoo.slots_dtype({ADAM}, "int8"))',
        optzoo.split_params,
    ),
    "a second moment for each row": ("optzoo.partial_row_wise_adam(1e-3)", in_32_bits),
    "the same, slots in 8 bits": (
        'optzoo.slots_dtype(optzoo.partial_row_wise_adam(1e-3), "int8")',
        in_32_bits,
    ),
    "one sum for each row": ("optzoo.row_wise_adagrad(0.1)", in_32_bits),
    "the same, weights in 24 bits": (
        "optzoo.master_weights(optzoo.row_wise_adagrad(0.1))",
        optzoo.split_params,
    ),
    "dense semantics, slots in 16 bits": (
        'optzoo.caught_up(optzoo.slots_dtype(optzoo.adam(1e-3), "bfloat16", stochastic=True, '
        "packed=True))",
        in_32_bits,
    ),
}
SHARDED = "weights in 24 bits, slots in 8"


def kept(save):
    """The bytes of parameters and state, and of a whole step, for each choice."""
    shapes = {"table": (100_000, 64), "hidden": (64, 1024), "next": (1024, 1024), "out": (1024, 8)}

    def loss(p, ids):
        h = optzoo.lookup(p["table"], ids).astype(jnp.float32)
        for name in ("hidden", "next", "out"):
            h = jax.nn.relu(h @ p[name].astype(jnp.float32))
        return jnp.mean(h)

    ids, found = jnp.arange(256), {}
    model = lambda: {name: jnp.zeros(shape) for name, shape in shapes.items()}
    size = harness.count(model())
    for name, (code, start) in CHOICES.items():
        tx = eval(code)
        params, state = start(model(), tx)
        memory = optzoo.minimize(loss, tx).lower(params, state, ids).compile().memory_analysis()
        found[name] = {
            "code": code,
            "weights": harness.size(params) / size,
            "state": harness.size(state) / size,
            "temporaries": memory.temp_size_in_bytes / size,
        }
        print(name, {k: v for k, v in found[name].items() if k != "code"}, flush=True)
    mesh = jax.sharding.Mesh(jax.devices(), ("d",))
    by_rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
    code, start = CHOICES[SHARDED]
    tx = eval(code)
    params, state = start(jax.device_put(model(), by_rows), tx)
    state = jax.device_put(state, optzoo.state_sharding(tx, params))
    of_one = lambda tree: sum(a.addressable_shards[0].data.nbytes for a in jax.tree.leaves(tree))
    found[f"the same, on {DEVICES} devices: on one of them"] = {
        "code": "jax.jit(tx.init, out_shardings=optzoo.state_sharding(tx, params))(params)",
        "weights": of_one(params) / size,
        "state": of_one(state) / size,
    }
    print(found[f"the same, on {DEVICES} devices: on one of them"])
    save({"choices": found})


def main():
    """Runs the part."""
    save = lambda found: args.save and harness.save(f"little_memory_{args.part}", found)
    {"quality": quality, "cost": cost, "bytes": kept}[args.part](save)


if __name__ == "__main__":
    main()
