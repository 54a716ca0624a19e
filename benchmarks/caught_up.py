"""A train step with dense semantics at the cost of the touched rows, compared with its peers.

    .venv/bin/python benchmarks/caught_up.py [--rounds 15] [--rows 1000000] [--save]

The table has 1,000,000 x 64 elements in float32; a step looks up 4,096 ids with a Zipf distribution
of exponent 1 in a random order of the rows. Whole steps of ``optzoo.minimize`` run in turns in
random order, on one core, with donated arguments. Prints the least and median time of each, and the
ratio of its median to that of ``lazy_adam`` in the same layout; for native steps, to that of the
same step by XLA.
"""

import argparse
import statistics

import harness

harness.pin(1)

import jax  # noqa: E402 (JAX starts its threads on the cores it finds)
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import optzoo  # noqa: E402

WIDTH, IDS, BATCHES, STEPS_IN_A_TURN = 64, 4096, 64, 6


def packed(tx):
    """The fastest layout of the slots."""
    return optzoo.slots_dtype(tx, "float32", packed=True)


CONTENDERS = {
    "lazy_adam": optzoo.lazy_adam(1e-3),
    "lazy_adam, packed": packed(optzoo.lazy_adam(1e-3)),
    "caught_up": optzoo.caught_up(optzoo.adam(1e-3)),
    "caught_up, packed": optzoo.caught_up(packed(optzoo.adam(1e-3))),
    "adam, dense": optzoo.adam(1e-3),
}
NATIVE = {f"{name}, native": tx for name, tx in CONTENDERS.items() if "dense" not in name}
PEER = {
    "caught_up, packed": "lazy_adam, packed",
    "lazy_adam, native": "lazy_adam",
    "lazy_adam, packed, native": "lazy_adam, packed",
    "caught_up, native": "caught_up",
    "caught_up, packed, native": "caught_up, packed",
}


def loss(params, ids, target):
    """A squared distance of the rows."""
    return 0.5 * jnp.sum((optzoo.lookup(params, ids) - target) ** 2)


def contender(tx, rows, batches, target, native):
    """``run(k)`` for the k-th turn, and the properties of the program."""
    x = jnp.zeros((rows, WIDTH))
    state = tx.init(x)
    step = optzoo.minimize(loss, tx, native=native)
    program = step.lower(x, state, batches[0], target).compile()
    about = {
        "temporaries MB": program.memory_analysis().temp_size_in_bytes / 1e6,
        "state bytes per row": harness.size(state) / rows,
    }
    carry, number = (x, state), 0

    def run(k, steps):
        nonlocal carry, number
        for _ in range(steps):
            *carry, _ = program(*carry, batches[number % BATCHES], target)
            number += 1
        jax.block_until_ready(carry)

    return run, about


def main():
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    p = 1 / np.arange(1, args.rows + 1)
    order = rng.permutation(args.rows)
    draw = lambda: jnp.asarray(order[rng.choice(args.rows, IDS, p=p / p.sum())], jnp.int32)
    batches = [draw() for _ in range(BATCHES)]
    target = jnp.asarray(rng.normal(size=(IDS, WIDTH)), jnp.float32)
    runs, abouts = {}, {}
    for name, tx in (CONTENDERS | NATIVE).items():
        steps = 1 if "dense" in name else STEPS_IN_A_TURN
        run, abouts[name] = contender(tx, args.rows, batches, target, name in NATIVE)
        runs[name] = lambda k, run=run, steps=steps: run(k, steps)
    seconds = harness.take_turns(runs, args.rounds)
    for name, times in seconds.items():
        steps = 1 if "dense" in name else STEPS_IN_A_TURN
        abouts[name]["ms"] = [1e3 * t / steps for t in times]
    for name, about in abouts.items():
        median = statistics.median(about["ms"])
        ratio = median / statistics.median(abouts[PEER.get(name, "lazy_adam")]["ms"])
        print(
            f"{name:25} least {min(about['ms']):8.3f} ms, median {median:8.3f} ms, {ratio:6.2f} of "
            f"{PEER.get(name, 'lazy_adam')}; state {about['state bytes per row']:.1f} bytes a row, "
            f"temporaries {about['temporaries MB']:.1f} MB"
        )
    if args.save:
        harness.save("caught_up", {"rows": args.rows, "contenders": abouts})


if __name__ == "__main__":
    main()
