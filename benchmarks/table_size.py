"""The time of a training step by table size: dense and row-sparse gradients, on one core.

    .venv/bin/python benchmarks/table_size.py [--rounds 9] [--save]

The loss reads 4,096 rows of 64 floats. *Dense* is ``optax.adam`` on the gradient of ``jax.grad``,
which has the size of the table; *rows* is ``optzoo.lazy_adam`` in ``optzoo.minimize``; *native* is
the same with ``native=True``. All are compiled, with donated arguments, and run in turns, with new
ids in each step. ``--save`` stores the medians in ``results/table_size.json`` and draws
``docs/images/table_size.svg``, for light and dark pages.
"""

import argparse
import json
import pathlib
import statistics
import time

import harness

harness.pin(1)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

import optzoo  # noqa: E402

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "table_size.json"
PICTURE = ROOT / "docs" / "images" / "table_size.svg"
WIDTH, IDS = 64, 4096
ROWS = (10_000, 30_000, 100_000, 300_000, 1_000_000, 3_000_000)
LABELS = {
    "dense": "optax.adam, dense",
    "rows": "lazy_adam, rows",
    "native": "in native code",
}
# Where a label is: from the end of its line to the left, in points above it.
ABOVE = {"dense": (-14, -4), "rows": (0, 8), "native": (0, -29)}
# Each can be read on white and on black.
COLOURS = {"dense": "#e5534b", "rows": "#2f9e6e", "native": "#3b82d6"}
GREY = "#7d8590"


def loss(params, ids, y):
    """Reads rows of the table."""
    return jnp.mean((params["table"][ids] @ params["w"] - y) ** 2)


def dense_step(tx):
    """The usual step of JAX and optax."""

    def step(params, state, ids, y):
        value, grads = jax.value_and_grad(loss)(params, ids, y)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return jax.jit(step, donate_argnums=(0, 1))


def contenders():
    """Each optimizer with its step."""
    adam, lazy = optax.adam(1e-3), optzoo.lazy_adam(1e-3)
    return {
        "dense": (adam, dense_step(adam)),
        "rows": (lazy, optzoo.minimize(loss, lazy)),
        "native": (lazy, optzoo.minimize(loss, lazy, native=True)),
    }


def measure(rows, rounds):
    """Median seconds of a step of each contender."""
    rng = np.random.default_rng(0)
    y = jnp.ones(IDS)
    made = {}
    for name, (tx, step) in contenders().items():
        params = {"table": jnp.zeros((rows, WIDTH)), "w": jnp.ones(WIDTH)}
        made[name] = [step, params, tx.init(params)]
    seconds = {name: [] for name in made}
    for turn in range(rounds + 2):
        for name in rng.permutation([*made]):
            step, params, state = made[name]
            ids = jnp.asarray(rng.integers(rows, size=IDS), jnp.int32)
            begin = time.perf_counter()
            params, state, _ = jax.block_until_ready(step(params, state, ids, y))
            if turn > 1:  # the first ones compile and warm up
                seconds[name].append(time.perf_counter() - begin)
            made[name][1:] = params, state
    return {name: statistics.median(found) for name, found in seconds.items()}


def draw(stored):
    """Draws the figure: a dense step grows with the table, a row-sparse step does not."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "table_size", "font.size": 11})
    figure, axes = plt.subplots(figsize=(5.2, 3.6))
    rows = [int(n) for n in stored["seconds"]]
    for name, label in LABELS.items():
        ms = [1e3 * stored["seconds"][str(n)][name] for n in rows]
        axes.plot(rows, ms, color=COLOURS[name], linewidth=2.5, marker="o", markersize=5)
        axes.annotate(
            f"{label}: {ms[-1]:.3g} ms", (rows[-1], ms[-1]), ABOVE[name], ha="right",
            textcoords="offset points", color=COLOURS[name], fontweight="bold", fontsize=10,
        )  # fmt: skip
    axes.set(xscale="log", yscale="log")
    axes.set_xlabel(f"rows of the table ({WIDTH} floats each)", color=GREY)
    axes.set_ylabel("ms for a training step", color=GREY)
    axes.set_title(
        f"A step that reads {IDS:,} rows of a table, one CPU core", color=GREY, loc="left"
    )
    axes.set_yticks([1, 10, 100], ["1", "10", "100"])
    axes.set_ylim(bottom=0.3)
    axes.set_xticks(rows, [f"{n:,}" for n in rows], fontsize=8.5)
    axes.minorticks_off()
    axes.tick_params(colors=GREY)
    axes.grid(color=GREY, alpha=0.25)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(GREY)
    figure.savefig(PICTURE, transparent=True, bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)


def stored():
    """The stored results."""
    return json.loads(RESULTS.read_text())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    found = {}
    for number in ROWS:
        found[str(number)] = measure(number, arguments.rounds)
        shown = "  ".join(f"{name} {1e3 * s:8.2f} ms" for name, s in found[str(number)].items())
        print(f"{number:>9,} rows: {shown}", flush=True)
    if arguments.save:
        RESULTS.write_text(json.dumps({"machine": harness.machine(), "seconds": found}, indent=1))
        draw(stored())
