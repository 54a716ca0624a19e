"""The figures of a race: loss curves of every problem, and trajectories in the valley."""

import io
import math
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator

from .summary import ranking

# Ten colours that most readers can tell apart, times four dash patterns: forty optimizers.
_COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00"]
_COLOURS += ["#56b4e9", "#7f3c8d", "#666666", "#8c564b", "#b5bd00"]
_DASHES: list[Any] = ["-", (0, (4, 1.5)), (0, (1, 1.2)), (0, (6, 1.5, 1, 1.5))]


def draw(document: Mapping[str, Any], folder: pathlib.Path) -> dict[str, bytes]:
    """Writes ``curves.png`` and, if the valley was run, ``valley.png``; returns them as bytes."""
    figures = {"curves.png": curves(document)}
    if any(r["track"] for r in document["results"]):
        figures["valley.png"] = valley(document)
    pictures = {}
    for name, figure in figures.items():
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=150)
        pictures[name] = buffer.getvalue()
        (folder / name).write_bytes(pictures[name])
    return pictures


def curves(document: Mapping[str, Any], *, time: bool = False) -> Figure:
    """Validation loss against the step: a panel for each problem, one style for each optimizer.

    With ``time`` the x axis is the duration of the steps in seconds, without the evaluations.
    """
    names = list(dict.fromkeys(r["optimizer"] for r in document["results"]))
    problems = [p for p in document["problems"] if ranking(document, p)]
    styles = {
        name: {"color": _COLOURS[i % 10], "linestyle": _DASHES[i // 10 % 4]}
        for i, name in enumerate(names)
    }
    columns = min(2, max(1, len(problems)))
    rows = max(1, math.ceil(len(problems) / columns))
    legend_columns = 5
    legend_inches = 0.3 + 0.24 * math.ceil(len(names) / legend_columns)
    height = (3.8 if len(names) <= 12 else 5.5) * rows + legend_inches
    figure = _figure(11, height)
    grid = figure.add_gridspec(
        rows,
        columns,
        left=0.07,
        right=0.985,
        top=1 - 0.35 / height,
        bottom=(legend_inches + 0.5) / height,
        hspace=0.32,
        wspace=0.17,
    )
    for i, problem in enumerate(problems):
        axes = figure.add_subplot(grid[i // columns, i % columns])
        _curves_of(axes, document, problem, styles, time)
    figure.legend(
        [Line2D([], [], linewidth=1.8, **styles[n]) for n in names],
        names,
        loc="lower center",
        ncols=legend_columns,
        frameon=False,
        fontsize=9,
        handlelength=3,
    )
    return figure


def _curves_of(
    axes: Any, document: Mapping[str, Any], problem: str, styles: Any, time: bool
) -> None:
    ranked = ranking(document, problem)
    shown = []
    for rank, r in enumerate(ranked):
        at = np.array(r["curve"]["steps"], float) * (r["seconds per step"] if time else 1)
        mean, low, high = (
            np.array([np.nan if v is None else v for v in r["curve"][k]], float)
            for k in ("mean", "low", "high")
        )
        style = styles[r["optimizer"]]
        width = 2.2 if rank < 3 else 1.3
        axes.plot(at, mean, linewidth=width, zorder=100 - rank, **style)
        if len(ranked) <= 12:  # more bands would hide the lines
            axes.fill_between(at, low, high, color=style["color"], alpha=0.12, linewidth=0)
        shown.append(mean[np.isfinite(mean)])
    values = np.concatenate(shown) if shown else np.ones(1)
    starts = [v[0] for v in shown if len(v)]
    axes.set_title(f"{problem}: validation loss", fontsize=11, loc="left")
    axes.set_xlabel("seconds" if time else "step")
    axes.set_yscale("log")
    # A loss far above its start diverges: do not scale the axis to it.
    top = 2 * max(starts, default=1.0)
    bottom = max(min(values, default=1.0), 1e-8)
    axes.set_ylim(bottom * 0.9, max(top if max(values) > top else max(values) * 1.1, bottom * 1.2))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    few = np.log10(axes.get_ylim()[1] / axes.get_ylim()[0]) < 2
    axes.yaxis.set_minor_locator(LogLocator(subs=(2, 3, 4, 6) if few else ()))
    axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}")
    axes.tick_params(axis="y", which="both", labelsize=8)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def valley(document: Mapping[str, Any]) -> Figure:
    """The trajectory of each optimizer on Rosenbrock's function, one panel each, best first."""
    ranked = [r for p in document["problems"] for r in ranking(document, p) if r["track"]]
    columns = min(5, len(ranked))
    rows = math.ceil(len(ranked) / columns)
    figure = _figure(2.3 * columns + 0.3, 2.15 * rows + 0.5)
    x, y = np.meshgrid(np.linspace(-1.8, 1.8, 300), np.linspace(-0.9, 2.4, 300))
    height = np.log10((1 - x) ** 2 + 100 * (y - x**2) ** 2 + 1e-3)
    for i, r in enumerate(ranked):
        axes = figure.add_subplot(rows, columns, i + 1)
        axes.contourf(x, y, height, levels=24, cmap="Greys", alpha=0.55)
        path = np.array([[np.nan if v is None else v for v in point] for point in r["track"]])
        axes.plot(*path.T, color="#d55e00", linewidth=1.3)
        axes.plot(*path[0], "o", color="#0072b2", markersize=5)
        axes.plot(1, 1, "*", color="#009e73", markersize=10)
        loss = "diverged" if r["diverged"] else f"{r['loss']['mean']:.2g}"
        axes.set_title(f"{r['optimizer']}\nrate {r['rate']:.2g}, loss {loss}", fontsize=8.5)
        axes.set_xlim(-1.8, 1.8)
        axes.set_ylim(-0.9, 2.4)
        axes.xaxis.set_major_locator(MaxNLocator(3))
        axes.yaxis.set_major_locator(MaxNLocator(3))
        axes.tick_params(labelsize=7)
    figure.tight_layout(rect=(0, 0, 1, 0.97 if rows > 1 else 0.94))
    figure.suptitle(
        "Rosenbrock's valley: start (blue), minimum (green), the path of the best rate", fontsize=10
    )
    return figure


def _figure(width: float, height: float) -> Figure:
    """A figure without pyplot, which would choose a backend for the whole process."""
    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    return figure
