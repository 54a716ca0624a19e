"""Many small parameters: optimizers with and without stacks, compared with optax.adam.

    .venv/bin/python benchmarks/small_leaves.py [--case "1,000 of 10 x 10"] [--rounds 21]
        [--steps 20] [--members 16] [--save]

The contenders are compiled in turns, three times each, and run in turns in random order, on one
core, with donated arguments; fewer parameters have more rounds. There are two programs: a single
update, with all parameters and gradients as arguments and results, and ``--steps`` training steps
in a scan, which computes the gradients. Prints medians, and their ratios to those of optax.adam.
The single update is also compared with torch's Adam, if it is installed, and with ``optax.sgd``,
whose time is mostly that of passing arrays.
"""

import argparse
import importlib.util

import harness

harness.pin(1)

import random  # noqa: E402 (JAX starts its threads on the cores it finds)

import jax  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

import optzoo  # noqa: E402
from optzoo.wrappers.stacked import stacked  # noqa: E402

USUAL = "optax.adam"
COMPILATIONS = 3
CASES = {"1,000 of 10 x 10": (1000, (10, 10)), "100 of 10": (100, (10,))}


def contenders(members):
    """The optimizers by name."""
    return {
        USUAL: lambda: optax.adam(1e-3),
        "stacked optax.adam": lambda: stacked(optax.adam(1e-3), max_members=members),
        "adam": lambda: optzoo.adam(1e-3),
        "stacked adam": lambda: stacked(optzoo.adam(1e-3), max_members=members),
        "optax.sgd": lambda: optax.sgd(1e-3),
    }


def update_alone(tx, steps):
    """One update."""
    del steps

    def run(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return run


def training(tx, steps):
    """Steps in a scan, with a cheap gradient that differs between steps."""

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
    """The compiled program, and the times of tracing, lowering and compilation."""
    jax.clear_caches()
    tx = make()
    state = jax.eval_shape(tx.init, params)
    compiled, took = harness.compile_timed(program(tx, steps), params, state, grads)
    carry = jax.tree.map(lambda x: x.copy(), (params, tx.init(params)))

    def run(_):
        nonlocal carry
        carry = jax.block_until_ready(compiled(*carry, grads))

    return run, list(took.values()), len(jax.tree.leaves(state))


def measure(program, args, params, grads):
    """Prints a table for a program."""
    makers = contenders(args.members)
    seconds, runs, arrays = {name: [] for name in makers}, {}, {}
    for k in range(COMPILATIONS):
        for name in random.Random(k).sample(list(makers), len(makers)):
            built = build(makers[name], program, args.steps, params, grads)
            runs[name], took, arrays[name] = built
            seconds[name].append(took)
    torchs = {}
    if program is update_alone and importlib.util.find_spec("torch"):
        arrays_of = [list(map(np.asarray, tree.values())) for tree in (params, grads)]
        for how in ("foreach", "fused"):
            torchs[f"torch {how}"] = harness.of_torch("Adam", *arrays_of, **{how: True})
    rounds = args.rounds * max(1, 1000 // len(params))
    steps = harness.take_turns(runs | torchs, rounds)
    results = {}
    for name, times in steps.items():
        result = results[name] = {"run s": float(np.median(times)), "least run s": min(times)}
        if name in seconds:
            trace, lower, compile_ = np.median(seconds[name], axis=0)
            total = float(np.median(np.sum(seconds[name], axis=1)))
            result |= {"trace s": trace, "lower s": lower, "compile s": compile_, "all s": total}
            result |= {"arrays of state": arrays[name]}
    print(f"\n{program.__doc__.splitlines()[0]}")
    for name, result in results.items():
        keys = {"all s": "compilation", "run s": "run", "least run s": "least run"}
        usual = results[USUAL]
        result["ratios"] = {to: result[k] / usual[k] for k, to in keys.items() if k in result}
        numbers = {k: v for k, v in result.items() if k != "ratios"} | result["ratios"]
        print(f"{name:20}", *(f"{k} {v:.4g}" for k, v in numbers.items()), sep="  ", flush=True)
    return results


def main():
    """Runs and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, usual in {"rounds": 21, "steps": 20, "members": 16}.items():
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--case", choices=CASES, nargs="+", default=[*CASES])
    parser.add_argument("--save", action="store_true", help="write results/small_leaves.json")
    args = parser.parse_args()
    cases = {}
    for case in args.case:
        leaves, shape = CASES[case]
        rng = np.random.default_rng(0)
        draw = lambda n, shape, rng: {
            f"layer{k}": jax.device_put(rng.normal(size=shape).astype(np.float32)) for k in range(n)
        }
        params, grads = draw(leaves, shape, rng), draw(leaves, shape, rng)
        print(f"\n{case}, {jax.devices()[0].device_kind}")
        cases[case] = {
            p.__name__: measure(p, args, params, grads) for p in (update_alone, training)
        }
    if args.save:
        harness.save("small_leaves", {"cases": cases})


if __name__ == "__main__":
    main()
