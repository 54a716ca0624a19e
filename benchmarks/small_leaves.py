"""Many small parameters: optimizers as they are and in stacks, beside optax.adam, in one run.

    .venv/bin/python benchmarks/small_leaves.py [--leaves 1000] [--shape 10,10] [--rounds 21]
        [--steps 20] [--members 16]

The contenders are compiled in turns, three times each, and take turns in a new order each round,
on one core, with donated arguments. Two programs: an update alone, which passes all parameters and
gradients in and out, and ``--steps`` training steps in a scan, in which the gradients are made.
Prints medians, and their ratios to those of optax.adam.
"""

import argparse

import harness

harness.pin(1)

import itertools  # noqa: E402 (JAX starts its threads on the cores it finds)
import random  # noqa: E402
import time  # noqa: E402

import jax  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

import optzoo  # noqa: E402
from optzoo.wrappers.stacked import stacked  # noqa: E402

USUAL = "optax.adam"
COMPILATIONS = 3


def contenders(members):
    """Name -> optimizer."""
    return {
        USUAL: lambda: optax.adam(1e-3),
        "stacked optax.adam": lambda: stacked(optax.adam(1e-3), max_members=members),
        "adam": lambda: optzoo.adam(1e-3),
        "stacked adam": lambda: stacked(optzoo.adam(1e-3), max_members=members),
    }


def update_alone(tx, steps):
    """One update."""
    del steps

    def run(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return run


def training(tx, steps):
    """Steps in a scan; the gradient is cheap, and other at every step."""

    def run(params, state, targets):
        loss = lambda x: sum(
            ((a - b) ** 2).sum() for a, b in zip(*map(jax.tree.leaves, (x, targets)), strict=True)
        )

        def body(carry, _):
            params, state = carry
            return update_alone(tx, 1)(params, state, jax.grad(loss)(params)), None

        return jax.lax.scan(body, (params, state), length=steps)[0]

    return run


def build(make, program, steps, params, grads):
    """The compiled program, and the seconds that tracing, lowering and compiling took."""
    jax.clear_caches()
    tx = make()
    state = jax.eval_shape(tx.init, params)
    times = [time.perf_counter()]
    traced = jax.jit(program(tx, steps), donate_argnums=(0, 1)).trace(params, state, grads)
    times.append(time.perf_counter())
    lowered = traced.lower()
    times.append(time.perf_counter())
    compiled = lowered.compile()
    times.append(time.perf_counter())
    carry = jax.tree.map(lambda x: x.copy(), (params, tx.init(params)))

    def run(_):
        nonlocal carry
        carry = jax.block_until_ready(compiled(*carry, grads))

    return run, [b - a for a, b in itertools.pairwise(times)], len(jax.tree.leaves(state))


def measure(program, args, params, grads):
    """Prints a table for a program."""
    makers = contenders(args.members)
    seconds, runs, arrays = {name: [] for name in makers}, {}, {}
    for k in range(COMPILATIONS):
        for name in random.Random(k).sample(list(makers), len(makers)):
            built = build(makers[name], program, args.steps, params, grads)
            runs[name], took, arrays[name] = built
            seconds[name].append(took)
    steps = harness.take_turns(runs, args.rounds)
    rows = {
        name: [
            *np.median(seconds[name], axis=0),
            np.median(np.sum(seconds[name], axis=1)),
            np.median(steps[name]),
            min(steps[name]),
        ]
        for name in makers
    }
    print(f"\n{program.__doc__.splitlines()[0]}")
    print(f"{'':20} arrays   trace   lower compile   total           run ms   least")
    for name, (trace, lower, compile_, total, run, least) in rows.items():
        usual = rows[USUAL]
        print(
            f"{name:20} {arrays[name]:6} {trace:7.2f} {lower:7.2f} {compile_:7.2f} {total:7.2f} "
            f"({total / usual[3]:.2f}) {1e3 * run:9.2f} {1e3 * least:7.2f} "
            f"({run / usual[4]:.2f}, {least / usual[5]:.2f})"
        )
    columns = ("trace s", "lower s", "compile s", "total s", "run s", "least s")
    usual = rows[USUAL]
    by_usual = lambda row: {
        "compilation": row[3] / usual[3], "run": row[4] / usual[4], "least run": row[5] / usual[5]
    }  # fmt: skip
    return {
        name: {**dict(zip(columns, row, strict=True)), "ratios": by_usual(row)}
        for name, row in rows.items()
    }


def main():
    """Runs and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, usual in {"leaves": 1000, "rounds": 21, "steps": 20, "members": 16}.items():
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--shape", type=lambda s: tuple(map(int, s.split(","))), default=(10, 10))
    parser.add_argument("--save", action="store_true", help="write results/small_leaves.json")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    draw = lambda: {
        f"layer{k}": jax.device_put(rng.normal(size=args.shape).astype(np.float32))
        for k in range(args.leaves)
    }
    params, grads = draw(), draw()
    print(f"{args.leaves} parameters of {args.shape}, {jax.devices()[0].device_kind}")
    results = {p.__name__: measure(p, args, params, grads) for p in (update_alone, training)}
    if args.save:
        harness.save("small_leaves", {"arguments": vars(args), "results": results})


if __name__ == "__main__":
    main()
