"""A small transformer trained by AdamW, Muon, SOAP and Shampoo: loss, steps and time.

    .venv/bin/python benchmarks/second_order.py [--steps 300] [--seeds 8] [--save]

The text is the source code of Python's standard library, as bytes; every twentieth file is for
validation. The model has six layers of width 128, 1.2M parameters, and reads 16 windows of 64 bytes
per step. The contenders train the matrices of the layers; AdamW trains the embedding and the last
layer, at one rate for all. Rates rise for 20 steps, and fall to a tenth. The rate of each contender
is searched from a first one by factors of two, until no further factor is better, on a seed that is
not evaluated; then all train on the same seeds.

A difference of losses is significant as in track 3 of modded-nanogpt: by a one-sided z-test with p
< 0.001, where the standard deviation is that of the seeds, shared by all contenders. The target is
the mean last loss of AdamW; steps to it are interpolated. Times are of contenders in turns of
twenty steps each.

The curve of each run is a line of ``results/second_order.jsonl``. Runs in this file are not
repeated: delete it for a new measurement.
"""

import argparse
import functools
import itertools
import json
import pathlib
import statistics
import sysconfig
import time

import harness

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
for option, default in {"steps": 300, "seeds": 8, "rounds": 5, "cores": 2}.items():
    parser.add_argument(f"--{option}", type=int, default=default)
parser.add_argument("--only", nargs="*")
parser.add_argument("--save", action="store_true")
args = parser.parse_args()
harness.pin(args.cores)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

import optzoo  # noqa: E402

LAYERS, WIDTH, HEADS, LENGTH, BATCH, SYMBOLS, EVERY = 6, 128, 4, 64, 16, 128, 20
RUNS = harness.RESULTS / "second_order.jsonl"
PROVEN = 3.09  # standard deviations, of p < 0.001 on one side
# A first rate of each for the matrices, and the optimizer.
CONTENDERS = {
    "AdamW": (0.012, lambda rate: optax.adamw(rate, 0.9, 0.95, weight_decay=0.1)),
    "Muon": (0.08, lambda rate: optzoo.muon(rate, weight_decay=0.1)),
    "SOAP, every 10 steps": (0.012, lambda rate: optzoo.soap(rate, weight_decay=0.1)),
    "SOAP, every step": (
        0.012,
        lambda rate: optzoo.soap(rate, preconditioner_interval=1, weight_decay=0.1),
    ),
    "blocked_shampoo": (6e-3, lambda rate: optzoo.blocked_shampoo(rate, weight_decay=0.1)),
}


def texts():
    """The bytes for training and for validation."""
    folder = pathlib.Path(sysconfig.get_path("stdlib"))
    files = sorted(folder.glob("*.py")) + sorted((folder / "asyncio").glob("*.py"))
    parts = [], []
    for i, path in enumerate(files):
        found = np.frombuffer(path.read_bytes(), np.uint8)
        parts[i % 20 == 0].append(np.minimum(found, SYMBOLS - 1))
    return [np.concatenate(part).astype(np.int32) for part in parts]


def windows(text, rng, number):
    """Random windows, one byte longer than the input of the model."""
    starts = rng.integers(0, len(text) - LENGTH - 1, number)
    return text[starts[:, None] + np.arange(LENGTH + 1)[None]]


def new_params(seed):
    """The embedding, the layers and the last layer; layers are initialized with small outputs."""
    keys = map(jax.random.fold_in, itertools.repeat(jax.random.key(seed)), itertools.count())
    normal = lambda m, n, scale=1.0: scale * jax.random.normal(next(keys), (m, n)) / m**0.5
    layer = lambda: {
        "qkv": normal(WIDTH, 3 * WIDTH),
        "out": normal(WIDTH, WIDTH, 0.1),
        "up": normal(WIDTH, 4 * WIDTH),
        "down": normal(4 * WIDTH, WIDTH, 0.1),
    }
    return {
        "embedding": jax.random.normal(next(keys), (SYMBOLS + LENGTH, WIDTH)),
        "layers": {f"layer_{i}": layer() for i in range(LAYERS)},
        "last": normal(WIDTH, SYMBOLS),
    }


def loss(params, batch):
    """The mean cross-entropy of each next byte."""
    unit = lambda x: x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)
    table = params["embedding"]
    x = table[batch[:, :-1]] + table[None, SYMBOLS:]
    for layer in params["layers"].values():
        heads = (unit(x) @ layer["qkv"]).reshape(*x.shape[:2], 3, HEADS, -1)
        q, k, v = (heads[:, :, i] for i in range(3))
        mixed = jax.nn.dot_product_attention(unit(q), unit(k), v, is_causal=True)
        x = x + mixed.reshape(x.shape) @ layer["out"]
        x = x + jax.nn.relu(unit(x) @ layer["up"]) ** 2 @ layer["down"]
    logits = unit(x) @ params["last"]
    each = optax.losses.softmax_cross_entropy_with_integer_labels
    return each(logits, batch[:, 1:]).mean()


evaluate = jax.jit(loss)


def optimizer(make, steps):
    """The optimizer of the whole model; the peak rate of the matrices is in the state."""
    schedule = lambda peak: optax.join_schedules(
        [
            optax.linear_schedule(0.0, peak, 20),
            optax.linear_schedule(peak, peak / 10, max(steps - 20, 1)),
        ],
        [20],
    )
    of_layers = optax.inject_hyperparams(lambda peak: make(schedule(peak)))(peak=0.0)
    rest = optax.adamw(schedule(3e-3), 0.9, 0.95, weight_decay=0.1)
    return optzoo.param_groups({"layers/.*": of_layers, ".*": rest})


@functools.cache
def trainer(name):
    """The compiled step of a contender, and its initial parameters and state."""
    tx = optimizer(CONTENDERS[name][1], args.steps)
    step = optzoo.minimize(loss, tx)
    init = jax.jit(tx.init)

    def start(rate, seed):
        params = new_params(seed)
        return params, optax.tree.set(init(params), peak=jnp.float32(rate))

    return step, start


def curve(name, rate, seed, text, valid):
    """The losses on the validation data, at regular steps; stored in the file of runs."""
    run = {"name": name, "rate": rate, "seed": seed, "steps": args.steps}
    for line in RUNS.read_text().splitlines() if RUNS.exists() else ():
        if run.items() <= (kept := json.loads(line)).items():
            return kept["losses"]
    step, start = trainer(name)
    rng, (params, state) = np.random.default_rng(seed), start(rate, seed)
    held_out = jnp.asarray(windows(valid, np.random.default_rng(99), 128))
    found = []
    for t in range(1, args.steps + 1):
        params, state, _ = step(params, state, jnp.asarray(windows(text, rng, BATCH)))
        if t % EVERY == 0:
            found.append(float(evaluate(params, held_out)))
    with RUNS.open("a") as file:
        file.write(json.dumps(run | {"losses": found}) + "\n")
    return found


def steps_to(target, losses):
    """The step at which a curve reaches the target, interpolated; None if it does not."""
    for i, (before, after) in enumerate(itertools.pairwise(losses), 1):
        if after <= target:
            return float(EVERY * (i + (before - target) / max(before - after, 1e-9)))
    return None


def tuned(first, last_loss):
    """The losses by rate, from the first one up and down until they rise."""
    tried = {rate: last_loss(rate) for rate in (first / 2, first, first * 2)}
    while (best := min(tried, key=tried.get)) in (low := min(tried), high := max(tried)):
        rate = best / 2 if best == low else high * 2
        tried[rate] = last_loss(rate)
    return tried


def turns(chosen, text):
    """The median seconds of a step of each contender."""
    rng, runs = np.random.default_rng(7), {}
    for name, rate in chosen.items():
        step, start = trainer(name)
        carry = start(rate, 0)

        def run(k, step=step, carry=carry, kept={}):  # noqa: B006
            params, state = kept.get("now", carry)
            for _ in range(20):
                params, state, value = step(params, state, jnp.asarray(windows(text, rng, BATCH)))
            jax.block_until_ready(value)
            kept["now"] = params, state

        runs[name] = run
    seconds = harness.take_turns(runs, args.rounds)
    return {name: statistics.median(found) / 20 for name, found in seconds.items()}


def main():
    """Chooses rates, trains, times, prints and saves."""
    (text, valid), table, begun = texts(), {}, time.time()
    names = args.only or list(CONTENDERS)
    chosen, curves = {}, {}
    for name in names:
        last_loss = lambda rate, name=name: curve(name, rate, 100, text, valid)[-1]
        tried = tuned(CONTENDERS[name][0], last_loss)
        chosen[name] = min(tried, key=tried.get)
        print(f"{name}: {tried}", flush=True)
    for name in names:
        curves[name] = [curve(name, chosen[name], s, text, valid) for s in range(args.seeds)]
        last = [losses[-1] for losses in curves[name]]
        print(f"{name}: {np.mean(last):.4f} after {time.time() - begun:.0f} s", flush=True)
    last = {name: [losses[-1] for losses in found] for name, found in curves.items()}
    sigma = float(np.sqrt(np.mean([np.var(found, ddof=1) for found in last.values()])))
    target, seconds = float(np.mean(last[names[0]])), turns(chosen, text)
    for name in names:
        means = np.mean([losses for losses in curves[name]], axis=0)
        difference = target - np.mean(last[name])
        needed = steps_to(target, means)
        table[name] = {
            "rate": chosen[name],
            "loss": float(np.mean(last[name])),
            "deviations": float(difference / sigma / (2 / args.seeds) ** 0.5),
            "steps": needed,
            "seconds of a step": seconds[name],
            "time": needed and needed * seconds[name] / (args.steps * seconds[names[0]]),
        }
        print(f"{name}: {table[name]}")
    print(f"sigma {sigma:.4f}; proven from {PROVEN} deviations on")
    if args.save:
        about = {"steps": args.steps, "seeds": args.seeds, "sigma": sigma, "target": target}
        harness.save("second_order", {"contenders": table, "about": about})


if __name__ == "__main__":
    main()
