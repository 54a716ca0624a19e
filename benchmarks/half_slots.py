"""Adam with 16-bit slots: time, bytes and final losses compared with float32.

    .venv/bin/python benchmarks/half_slots.py [--size 25000000] [--leaves 1] [--rows 1000000]
        [--rounds 25] [--seeds 8] [--skip losses] [--save]

Dense: parameters in leaves of equal size, compared with optax.adam. Rows: a table of width 64 and
4,096 ids per step, compared with lazy_adam; and row-wise Adagrad compared with Adagrad. The
contenders run in turns in random order, on one core, with donated arguments; ratios are of the
least times and of the medians. Losses: two problems of the race at the rate of the catalogue, mean
and standard deviation over the seeds. With ``--save``: ``half_slots.json`` in ``results``.
"""

import argparse

import harness

PARTS = ("dense", "rows", "losses")
parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
for name, default in {"size": 25_000_000, "leaves": 1, "rows": 1_000_000}.items():
    parser.add_argument(f"--{name}", type=int, default=default)
for name, default in {"rounds": 25, "seeds": 8}.items():
    parser.add_argument(f"--{name}", type=int, default=default)
parser.add_argument("--skip", nargs="+", choices=PARTS, default=[])
parser.add_argument("--save", action="store_true")
args = parser.parse_args()
harness.pin(1)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

import optzoo  # noqa: E402
from optzoo.race.problems import PROBLEMS  # noqa: E402

OPTIONS = {
    "to the nearest": {},
    "at random": {"stochastic": True},
    "packed": {"packed": True},
    "packed, at random": {"packed": True, "stochastic": True},
}


def in_16_bits(tx):
    """An optimizer with its slots in bfloat16, for each of ``OPTIONS``."""
    return {name: optzoo.slots_dtype(tx, "bfloat16", **o) for name, o in OPTIONS.items()}


def compare(contenders, params, grads):
    """Times and bytes; ratios are to the first contender."""
    runs = {name: harness.contender(tx, params, grads) for name, tx in contenders.items()}
    seconds = harness.take_turns({name: run for name, (run, _) in runs.items()}, args.rounds)
    first = seconds[next(iter(seconds))]
    return {
        name: {
            "least ms": 1e3 * min(times),
            "median ms": 1e3 * float(np.median(times)),
            "ratio of least": min(times) / min(first),
            "ratio of medians": float(np.median(times) / np.median(first)),
            "state bytes per parameter": runs[name][1]["state bytes per parameter"],
            "temporaries MB": runs[name][1]["temporaries MB"],
        }
        for name, times in seconds.items()
    }


def dense():
    """Adam on arrays."""
    params = {i: jnp.zeros(args.size // args.leaves) for i in range(args.leaves)}
    normal = lambda k: jax.random.normal(jax.random.key(k), params[0].shape)
    grads = [{i: normal(k) for i in params} for k in range(2)]
    plain = {"optax.adam": optax.adam(1e-3), "adam": optzoo.adam(1e-3)}
    return compare(plain | in_16_bits(optzoo.adam(1e-3)), params, grads)


def rows():
    """A table with few ids per step."""
    rng, table = np.random.default_rng(0), jnp.zeros((args.rows, 64))
    values = jnp.asarray(rng.normal(size=(4096, 64)), jnp.float32)
    ids = (jnp.asarray(rng.integers(0, args.rows, 4096), jnp.int32) for _ in range(64))
    grads = [optzoo.SparseRows(i, values, args.rows) for i in ids]
    lazy, packed = optzoo.lazy_adam(1e-3), ("packed", "packed, at random")
    in_words = {k: tx for k, tx in in_16_bits(lazy).items() if k in packed}
    adagrads = {"adagrad": optzoo.adagrad(0.1), "row_wise_adagrad": optzoo.row_wise_adagrad(0.1)}
    return compare(adagrads, table, grads), compare({"lazy_adam": lazy} | in_words, table, grads)


def losses(name):
    """The final losses of all seeds on a problem of the race."""
    problem, adam = PROBLEMS[name](), optzoo.CATALOG["adam"].make()
    train, valid = jax.tree.map(jnp.asarray, (problem.train, problem.valid))
    shape = (args.seeds, problem.steps, problem.batch_size)
    examples = len(jax.tree.leaves(train)[0])
    batches = jnp.asarray(np.random.default_rng(0).integers(examples, size=shape), jnp.int32)
    keys = jax.random.split(jax.random.key(0), args.seeds)

    def final(tx):
        def run(key, batches):
            def step(carry, ids):
                params, state = carry
                batch = jax.tree.map(lambda a: a[ids], train)
                _, grads = optzoo.value_and_grad(problem.loss)(params, batch)
                updates, state = tx.update(grads, state, params)
                return (optax.apply_updates(params, updates), state), None

            params = problem.init(key)
            (params, _), _ = jax.lax.scan(step, (params, tx.init(params)), batches)
            return problem.loss(params, valid)

        seeds = np.asarray(jax.jit(jax.vmap(run))(keys, batches), np.float64)
        return {"mean": seeds.mean(), "deviation": seeds.std(ddof=1)}

    wanted = ("to the nearest", "packed, at random")
    others = {k: tx for k, tx in in_16_bits(adam).items() if k in wanted}
    return {k: final(tx) for k, tx in ({"float32": adam} | others).items()}


def main():
    """Runs and prints."""
    result = {}
    if "dense" not in args.skip:
        result[f"dense, {args.size:,} in {args.leaves}"] = dense()
    if "rows" not in args.skip:
        result["row-wise"], result["rows"] = rows()
    if "losses" not in args.skip:
        result |= {f"final loss, {name}": losses(name) for name in ("digits", "words")}
    for part, table in result.items():
        print(part)
        for name, values in table.items():
            print(
                f"  {name:18}", *(f"{key} {value:.4g}" for key, value in values.items()), sep="  "
            )
    if args.save:
        harness.save("half_slots", result)


if __name__ == "__main__":
    main()
