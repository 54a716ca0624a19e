"""The page of a race: one HTML file with all data and with Plotly, usable offline."""

import base64
import importlib.resources
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .. import advice, report, summary
from ..colours import HUES

# The largest number of points that are drawn for a curve.
_POINTS = 61
_DIGITS = 5


def write(document: Mapping[str, Any], pictures: Mapping[str, bytes]) -> str:
    """The page as HTML text.

    Args:
        document: the results of a race.
        pictures: PNG files to show, by name.
    """
    import jinja2  # which, like Plotly's 5 MB, only this function needs
    from plotly.offline import get_plotlyjs

    read = lambda name: importlib.resources.files(__name__).joinpath(name).read_text("utf-8")
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False}
    done = len(document["results"]) + len(document["skipped"])
    return environment.from_string(read("page.html")).render(
        style=read("page.css"),
        script=read("page.js"),
        plotly=get_plotlyjs(),
        data=data(document),
        done=done,
        planned=document.get("planned", done),
        advice=advice.advice(document),
        basis=advice.basis(document),
        interval=f"{summary.INTERVAL:.0%}",
        problems=[_section(document, problem) for problem in document["problems"]],
        skipped=report.skipped(document),
        merged=_merged(document),
        tolerance=f"{summary.TOLERANCE:g}",
        unequal=summary.unequal_arguments(document),
        explanation=report.explanation(document),
        pictures={name: base64.b64encode(png).decode() for name, png in pictures.items()},
    )


def _section(document: Mapping[str, Any], problem: str) -> dict[str, Any]:
    """The section of the page about a problem."""
    return {
        "name": problem,
        "headline": report.headline(document, problem),
        "rows": report.table(document, problem),
        "counted": report.counted(document, problem),
        "has_target": document["problems"][problem]["target"] is not None,
    }


def _merged(document: Mapping[str, Any]) -> dict[str, list[str]]:
    """The optimizers with equal curves, by problem."""
    label = lambda group: summary.label([r["optimizer"] for r in group])
    groups = {problem: summary.coinciding(document, problem) for problem in document["problems"]}
    labels = {p: [label(group) for group in found if len(group) > 1] for p, found in groups.items()}
    return {problem: found for problem, found in labels.items() if found}


def data(document: Mapping[str, Any]) -> dict[str, Any]:
    """The data of the figures of the page, for JSON."""
    families = {r["optimizer"]: r["family"] for r in document["results"]}
    known = [name for name in HUES if name in families.values()]
    others = sorted(set(families.values()) - HUES.keys())
    return {
        "optimizers": [{"name": name, "family": family} for name, family in families.items()],
        "families": [{"name": name, "hue": HUES.get(name, 0)} for name in known + others],
        "problems": [_problem(document, problem) for problem in document["problems"]],
        "ranks": _rank_rows(document),
        "profile": {by: _profile(document, by) for by in ("steps", "seconds")},
    }


def _problem(document: Mapping[str, Any], problem: str) -> dict[str, Any]:
    groups = summary.coinciding(document, problem)
    lines = [_line(group) for group in groups]
    return {
        "name": problem,
        "target": document["problems"][problem]["target"],
        "range": _range([line["mean"] for line in lines]),
        "lines": lines,
    }


def _line(group: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One line for optimizers that coincide: curve and losses of one of them, times of all."""
    first = group[0]
    curve, seconds = first["curve"], float(np.median([r["seconds per step"] for r in group]))
    kept = _thinned(len(curve["steps"]))
    reached = [v for v in first["steps to target by seed"] if v is not None]
    return {
        "names": [r["optimizer"] for r in group],
        "rate": _short(first["rate"]),
        "diverged": first["diverged"],
        "steps": [curve["steps"][i] for i in kept],
        **{key: [_short(curve[key][i]) for i in kept] for key in ("mean", "low", "high")},
        "seconds": _short(seconds),
        "seconds from": _short(min(r["seconds per step from"] for r in group)),
        "seconds to": _short(max(r["seconds per step to"] for r in group)),
        "seeds": len(first["steps to target by seed"]),
        "reached": reached,
        "rates": [_rate(rate) for rate in first["rates"]],
    }


def _rate(rate: Mapping[str, Any]) -> dict[str, Any]:
    finite = [v for v in rate["losses"] if v is not None]
    return {
        "rate": _short(rate["rate"]),
        "mean": _short(rate["loss"]),
        "low": _short(min(finite, default=None)),
        "high": _short(max(finite, default=None)) if len(finite) == len(rate["losses"]) else None,
        "diverged": len(rate["losses"]) - len(finite),
    }


def _range(curves: Sequence[Sequence[float | None]]) -> list[float]:
    """The range of losses to show, without losses far above their start, which diverge."""
    values = [v for curve in curves for v in curve if v is not None]
    starts = [curve[0] for curve in curves if curve and curve[0] is not None]
    top = min(max(values, default=1.0), 2 * max(starts, default=1.0))
    bottom = min(values, default=0.0)
    return [_short(bottom), _short(max(top, bottom))]


def _rank_rows(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    found = summary.ranks(document)
    rows = []
    for names, mean, resampled in zip(found.contenders, found.mean, found.resampled, strict=True):
        low, high = summary.interval(resampled)
        rows.append(
            {"names": names, "mean": _short(mean), "low": _short(low), "high": _short(high)}
        )
    return sorted(rows, key=lambda row: row["mean"])


def _profile(document: Mapping[str, Any], by: str) -> list[dict[str, Any]]:
    """The profiles, the largest area under the curve first."""
    rows = [row for row in summary.profile(document, by) if row["runs"]]
    end = max((v for row in rows for v in row["ratios"]), default=1.0)
    rows.sort(key=lambda row: -sum(math.log(2 * end / v) for v in row["ratios"]))
    return [row | {"ratios": [_short(v) for v in row["ratios"]]} for row in rows]


def _thinned(number: int) -> list[int]:
    """Indices of the points of a curve to draw: the ends, and evenly spaced points between."""
    return sorted({round(i) for i in np.linspace(0, number - 1, min(number, _POINTS))})


def _short(value: float | None) -> Any:
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{_DIGITS}g}")
