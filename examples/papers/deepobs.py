"""Published runs of TensorFlow 1 on the quadratic problem of DeepOBS, followed by ours.

The problem, the runs and their replay are in ``optzoo.race.published``.
"""

import numpy as np

from optzoo.race import published

PAPER = "Schneider et al. 2019, [DeepOBS](https://arxiv.org/abs/1903.05499), `quadratic_deep`"
CLAIM = "our optimizers take the steps of TensorFlow 1"
PUBLISHED = "train and test loss after each of 100 epochs, 15 runs; the last losses of 2 more"


def run(optimizers=None):
    """The published losses and ours, by optimizer."""
    runs = published.published_runs()
    result = {}
    for name in optimizers or sorted({run.optimizer for run in runs}):
        mine = [run for run in runs if run.optimizer == name]
        ours = published.replay(mine)
        pairs = zip(mine, ours, strict=True)
        result[name] = {
            "runs": len(mine),
            "difference": max(published.difference(run, losses) for run, losses in pairs),
            "published": [float(run.test[-1]) for run in mine],
            "here": ours[:, -1, 1].tolist(),
            "curve": ours[0, :, 1].tolist(),
            "published curve": mine[0].test.tolist(),
        }
    return {"optimizers": result}


def holds(result):
    """Whether no loss differs by more than one part in a million."""
    return all(r["difference"] < 1e-6 for r in result["optimizers"].values())


def here(result):
    """One line about the result."""
    cells = [
        f"`{name}` {r['difference']:.0e} ({r['runs']} run{'s' * (r['runs'] > 1)})"
        for name, r in result["optimizers"].items()
    ]
    return f"largest relative difference: {', '.join(cells)}"


def draw(result, figure):
    """The test loss of the first run of each optimizer."""
    axes = figure.subplots()
    for i, (name, r) in enumerate(result["optimizers"].items()):
        axes.semilogy(r["curve"], color=f"C{i}", label=name)
        last = len(r["published curve"])
        epochs = np.arange(101)[-last:] if last == 1 else np.arange(last)
        axes.semilogy(epochs, r["published curve"], "o", color=f"C{i}", fillstyle="none", ms=4)
    axes.set(xlabel="epoch", ylabel="test loss; circles: published")
    axes.legend()
