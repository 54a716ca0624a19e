"""Steps and time to a target loss at tuned rates, compared with Adam.

    .venv/bin/python benchmarks/training.py [adam blocked_shampoo shampoo ggt]
        [--problems digits characters] [--rates 0.01] [--seeds 3] [--out FOLDER] [--rounds 9]
        [--cores 1] [--save [NAME]]

The race tunes and runs each named optimizer of the catalogue: its grid of rates, or the given ones.
With ``--out`` the finished runs of a race in this folder are used. Steps to target are the mean
over the seeds of the first evaluation, one every 10 steps, at or below the target; the target is
not reached if one seed does not reach it. Seconds per step are the mean of 40 consecutive steps, so
that periodic work is included, and the median over rounds in which the optimizers take turns; time
to target is the product. Ratios are to the optimizer named first.

With ``--save``: ``training.json``, ``training_steps.png`` and ``training_time.png`` in ``results``,
or files with another prefix.
"""

import argparse

import harness

PROBLEMS = ["digits", "characters"]
parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
defaults = ["adam", "blocked_shampoo", "shampoo", "ggt"]
parser.add_argument("optimizers", nargs="*", metavar="optimizer", default=defaults)
parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=PROBLEMS)
parser.add_argument("--rounds", type=int, default=9)
parser.add_argument("--cores", type=int, default=1)
parser.add_argument("--rates", nargs="+", type=float)
parser.add_argument("--seeds", type=int, default=3)
parser.add_argument("--out", help="a folder of optzoo race")
parser.add_argument("--save", nargs="?", const="training", metavar="NAME")
args = parser.parse_args()
harness.pin(args.cores)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import optzoo  # noqa: E402
from optzoo import race  # noqa: E402
from optzoo.race import plots, report  # noqa: E402

STRETCH = 40


def stretch(problem, name, rate):
    """``run(k)``: the k-th 40 steps of an optimizer."""
    examples = len(jax.tree.leaves(problem.train)[0])
    draws = np.random.default_rng(0).integers(examples, size=(STRETCH, problem.batch_size))
    batches = [jax.tree.map(lambda a, ids=ids: jnp.asarray(a[ids]), problem.train) for ids in draws]
    tx = optzoo.CATALOG[name].make(rate)
    step, params = optzoo.minimize(problem.loss, tx), problem.init(jax.random.key(0))
    state = tx.init(params)

    def run(k):
        nonlocal params, state
        for i, batch in enumerate(batches):
            params, state, _ = step(params, state, batch, global_step=k * STRETCH + i)
        jax.block_until_ready(params)

    return run


def time_steps(problem, results, rounds):
    """Replaces seconds per step in the results; keeps those of the race under another key."""
    runs = {r["optimizer"]: stretch(problem, r["optimizer"], r["rate"]) for r in results}
    seconds = harness.take_turns(runs, rounds)
    for r in results:
        r["seconds of the median step"] = r["seconds per step"]
        r["seconds per step"] = float(np.median(seconds[r["optimizer"]])) / STRETCH


def compare(results):
    """Adds time to target, and the ratios to the first."""
    for r in results:
        steps = r["steps to target"]
        r["seconds to target"] = steps and steps["mean"] * r["seconds per step"]
    of = {
        "steps to target": lambda r: r["steps to target"] and r["steps to target"]["mean"],
        "seconds per step": lambda r: r["seconds per step"],
        "seconds to target": lambda r: r["seconds to target"],
    }
    ratio = lambda a, b: a / b if a is not None and b else None
    for r in results:
        r["ratios"] = {name: ratio(f(r), f(results[0])) for name, f in of.items()}


def table(results):
    """The lines of a Markdown table."""
    yield "| optimizer | rate | final loss | steps to target | ms per step | seconds to target |"
    yield "|---|---|---|---|---|---|"
    for r in results:
        loss, steps, x = r["loss"], r["steps to target"], r["ratios"]
        times = lambda name, x=x: "" if x[name] is None else f" ({x[name]:.2f}x)"
        cells = [
            r["optimizer"],
            f"{r['rate']:.2g}",
            "diverged" if r["diverged"] else f"{loss['mean']:.3f} ± {loss['std']:.3f}",
            f"{steps['mean']:.0f}{times('steps to target')}" if steps else "not reached",
            f"{1e3 * r['seconds per step']:.2f}{times('seconds per step')}",
            f"{r['seconds to target']:.3g}{times('seconds to target')}" if steps else "not reached",
        ]
        yield "| " + " | ".join(cells) + " |"


def main():
    """Runs, prints and saves."""
    if unknown := [name for name in args.optimizers if name not in optzoo.CATALOG]:
        parser.error(f"not in the catalogue: {', '.join(unknown)}")
    watch = lambda p: print(f"[{p.done}/{p.total}] {p.optimizer} {p.problem}", flush=True)
    settings = race.Settings(rates=args.rates and tuple(args.rates), seeds=args.seeds)
    names = args.problems, args.optimizers
    document = race.run(*names, settings=settings, out=args.out, watch=watch)
    for name in args.problems:
        results = [r for r in document["results"] if r["problem"] == name]
        time_steps(race.PROBLEMS[name](), results, args.rounds)
        compare(results)
        print(f"\n{name}: {report.headline(document, name)}\n")
        print(*table(results), sep="\n")
    for line in report.skipped(document):
        print(f"skipped: {line}")
    if args.save:
        left_out = "machine", "others"
        harness.save(args.save, {k: v for k, v in document.items() if k not in left_out})
        for against in ("steps", "time"):
            figure = plots.curves(document, time=against == "time")
            figure.savefig(harness.RESULTS / f"{args.save}_{against}.png", dpi=150)


if __name__ == "__main__":
    main()
