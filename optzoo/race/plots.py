"""The figures of a race: loss curves of every problem, and trajectories in the valley."""

import hashlib
import inspect
import io
import json
import math
import pathlib
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator

from . import colours
from .summary import coinciding, contenders, label, ranking

# With more contenders each family has a row of panels of its own.
_TOGETHER = 8
# With three colours, 18 lines of a family can be told apart.
_DASHES: list[Any] = [
    "-",
    (0, (4, 1.5)),
    (0, (1, 1.2)),
    (0, (6, 1.5, 1, 1.5)),
    (0, (9, 2)),
    (0, (9, 1.5, 1, 1.5, 1, 1.5)),
]
_SOURCE = "optzoo source"  # the name of a hash in a picture

Group = Sequence[str]


def draw(document: Mapping[str, Any], folder: pathlib.Path) -> dict[str, bytes]:
    """Writes ``curves.png`` and, if the valley was run, ``valley.png``; returns them as bytes."""
    figures = {"curves.png": curves(document)}
    if any(r["track"] for r in document["results"]):
        figures["valley.png"] = valley(document)
    pictures = {}
    for name, figure in figures.items():
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=120, metadata={_SOURCE: source(document)})
        pictures[name] = buffer.getvalue()
        (folder / name).write_bytes(pictures[name])
    return pictures


def source(document: Mapping[str, Any]) -> str:
    """A hash of the results and of the code that draws them; each picture carries it."""
    code = [inspect.getsource(module) for module in (sys.modules[__name__], colours)]
    results = json.dumps([document["problems"], document["results"]], sort_keys=True)
    return hashlib.sha256("".join([results, *code]).encode()).hexdigest()


def source_of(picture: pathlib.Path) -> str | None:
    """The hash that a picture carries."""
    from PIL import Image

    with Image.open(picture) as image:
        return image.info.get(_SOURCE)


def curves(document: Mapping[str, Any], *, time: bool = False) -> Figure:
    """Validation loss against the step: a column for each problem, a row for each family.

    A row shows the other families in grey. Few optimizers share one row. Optimizers that coincide
    on all problems are one line. With ``time`` the x axis is the duration of the steps in seconds,
    without the evaluations.
    """
    groups = sorted(contenders(document))
    problems = [p for p in document["problems"] if ranking(document, p)]
    families = _families(document, groups)
    one = len(groups) <= _TOGETHER
    rows = [groups] if one else list(families.values())
    styles = {
        group: {
            "color": colours.colour(family, place),
            "linestyle": _DASHES[place // 3 % len(_DASHES)],
        }
        for family, members in families.items()
        for place, group in enumerate(members)
    }
    if one:
        styles = {group: {"color": colours.APART[i]} for i, group in enumerate(groups)}
    width, height = (4.2 if one else 2.75), (3.8 if one else 2.3)
    columns, legend = max(1, len(problems)), 2.6
    figure = _figure(width * columns + legend, height * max(1, len(rows)) + 0.5)
    grid = figure.add_gridspec(
        max(1, len(rows)),
        columns,
        left=0.55 / figure.get_figwidth(),
        right=1 - legend / figure.get_figwidth(),
        top=1 - 0.35 / figure.get_figheight(),
        bottom=0.5 / figure.get_figheight(),
        hspace=0.16,
        wspace=0.22,
    )
    for j, problem in enumerate(problems):
        for i, row in enumerate(rows):
            axes = figure.add_subplot(grid[i, j])
            lines = _curves_of(axes, document, problem, row, groups, styles, time)
            if i == 0:
                axes.set_title(f"{problem}: validation loss", fontsize=10, loc="left")
            if i == len(rows) - 1:
                axes.set_xlabel("seconds" if time else "step")
            else:
                axes.tick_params(labelbottom=False)
            if j == columns - 1:
                title = None if one else next(f for f, g in families.items() if g == row)
                axes.legend(
                    *lines,
                    title=title,
                    alignment="left",
                    loc="upper left",
                    bbox_to_anchor=(1.02, 1.03),
                    frameon=False,
                    fontsize=8,
                    title_fontproperties={"size": 9, "weight": "bold"},
                    handlelength=2.6,
                    labelspacing=0.2,
                )
    return figure


def _families(document: Mapping[str, Any], groups: Sequence[Group]) -> dict[str, list[Any]]:
    """The contenders by family, in the order of the families."""
    family = {r["optimizer"]: r["family"] for r in document["results"]}
    order = [*colours.HUES, *sorted(set(family.values()) - colours.HUES.keys())]
    members = {name: [g for g in groups if family[g[0]] == name] for name in order}
    return {name: found for name, found in members.items() if found}


def _wrapped(names: Group, width: int = 34) -> str:
    """The names of a contender, in as many lines as they need."""
    return "\n".join(textwrap.wrap(label(names), width, break_long_words=False))


def _curves_of(
    axes: Any,
    document: Mapping[str, Any],
    problem: str,
    row: Sequence[Group],
    groups: Sequence[Group],
    styles: Any,
    time: bool,
) -> tuple[list[Any], list[str]]:
    """Draws the contenders of a row, the others in grey; returns the lines and their labels.

    The best one is drawn last, above the others.
    """
    results = {r["optimizer"]: r for r in ranking(document, problem)}
    place = {name: i for i, name in enumerate(results)}
    lines, shown = {}, []
    key = lambda group: (group in row, -place.get(group[0], len(place)))
    for group in sorted(groups, key=key):
        r = results.get(group[0])
        if r is None and group not in row:
            continue
        style = styles[group] if group in row else {"color": "#d4d4d4", "linewidth": 0.7}
        at, mean, low, high = _points(r, time)
        [line] = axes.plot(at, mean, **{"linewidth": 1.6, **style})
        shown.append(mean[np.isfinite(mean)])
        if group in row:
            lines[group] = line
            if len(groups) <= _TOGETHER:  # more bands would hide the lines
                axes.fill_between(at, low, high, color=style["color"], alpha=0.12, linewidth=0)
    _scale(axes, shown)
    return [lines[group] for group in row], [_wrapped(group) for group in row]


def _points(r: Mapping[str, Any] | None, time: bool) -> list[np.ndarray]:
    """The x values of a curve, and mean, least and greatest loss; empty without a result."""
    if r is None:
        return [np.empty(0)] * 4
    at = np.array(r["curve"]["steps"], float) * (r["seconds per step"] if time else 1)
    losses = [[np.nan if v is None else v for v in r["curve"][k]] for k in ("mean", "low", "high")]
    return [at, *np.array(losses, float)]


def _scale(axes: Any, shown: Sequence[np.ndarray]) -> None:
    values = np.concatenate(shown) if shown else np.ones(1)
    starts = [v[0] for v in shown if len(v)]
    axes.set_yscale("log")
    # A loss far above its start diverges: do not scale the axis to it.
    top = 2 * max(starts, default=1.0)
    bottom = max(min(values, default=1.0), 1e-8)
    highest = max(values, default=1.0)
    axes.set_ylim(bottom * 0.9, max(top if highest > top else highest * 1.1, bottom * 1.2))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    decades = np.log10(axes.get_ylim()[1] / axes.get_ylim()[0])
    between = (1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 8) if decades < 0.5 else (2, 3, 4, 6)
    axes.yaxis.set_minor_locator(LogLocator(subs=between if decades < 2 else ()))
    axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}")
    axes.tick_params(which="both", labelsize=8)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def valley(document: Mapping[str, Any]) -> Figure:
    """Trajectories on Rosenbrock's function, a panel for each, best first; equal ones share one."""
    groups = [g for p in document["problems"] for g in coinciding(document, p) if g[0]["track"]]
    columns = min(5, len(groups))
    rows = math.ceil(len(groups) / columns)
    figure = _figure(2.3 * columns + 0.3, 2.3 * rows + 0.5)
    x, y = np.meshgrid(np.linspace(-1.8, 1.8, 300), np.linspace(-0.9, 2.4, 300))
    height = np.log10((1 - x) ** 2 + 100 * (y - x**2) ** 2 + 1e-3)
    for i, (r, *others) in enumerate(groups):
        axes = figure.add_subplot(rows, columns, i + 1)
        axes.contourf(x, y, height, levels=24, cmap="Greys", alpha=0.55)
        path = np.array([[np.nan if v is None else v for v in point] for point in r["track"]])
        axes.plot(*path.T, color="#d55e00", linewidth=1.3)
        axes.plot(*path[0], "o", color="#0072b2", markersize=5)
        axes.plot(1, 1, "*", color="#009e73", markersize=10)
        loss = "diverged" if r["diverged"] else f"{r['loss']['mean']:.2g}"
        names = _wrapped([r["optimizer"], *(other["optimizer"] for other in others)])
        axes.set_title(f"{names}\nrate {r['rate']:.2g}, loss {loss}", fontsize=8.5)
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
