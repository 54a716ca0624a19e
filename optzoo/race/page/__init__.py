"""The page of a race: one file with all data and with Plotly, which needs no network."""

import base64
import html
import importlib.resources
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .. import advice, report, summary
from ..colours import HUES

# At most so many points of a curve are drawn.
_POINTS = 61
_DIGITS = 5


def write(document: Mapping[str, Any], pictures: Mapping[str, bytes]) -> str:
    """The page as text.

    Args:
        document: the results of a race.
        pictures: PNG files to show, by name.
    """
    from plotly.offline import get_plotlyjs  # 5 MB, which only this function needs

    parts = {name: _part(name) for name in ("page.html", "page.css", "page.js")}
    values = {
        "STYLE": parts["page.css"],
        "ADVICE": _advice(document),
        "STATUS": _status(document),
        "INTERVAL": f"{summary.INTERVAL:.0%}",
        "EXPLANATION": _text(report.explanation(document)),
        "SECTIONS": "".join(_section(document, problem) for problem in document["problems"]),
        "MERGED": _merged(document),
        "DEFAULTS": _defaults(document),
        "SKIPPED": _skipped(document),
        "PICTURES": "".join(_picture(name, data) for name, data in pictures.items()),
        # Text in a script ends at its end tag, whatever the script is.
        "DATA": json.dumps(data(document), allow_nan=False).replace("<", "\\u003c"),
        "SCRIPT": parts["page.js"],
        "PLOTLY": get_plotlyjs(),
    }
    pieces = parts["page.html"].split("@@")  # text, name, text, name, ...
    pieces[1::2] = [values[name] for name in pieces[1::2]]
    return "".join(pieces)


def data(document: Mapping[str, Any]) -> dict[str, Any]:
    """What the figures of the page show, for JSON."""
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
    """Optimizers that coincide: their curve and losses are those of one, their times all."""
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
    """The losses to show: a loss far above its start diverges, the axis does not follow it."""
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
    rows = summary.profile(document, by)
    return [row | {"ratios": [_short(v) for v in row["ratios"]]} for row in rows if row["runs"]]


def _thinned(number: int) -> list[int]:
    """Indices of the points of a curve to draw: the ends, and even steps between."""
    return sorted({round(i) for i in np.linspace(0, number - 1, min(number, _POINTS))})


def _short(value: float | None) -> Any:
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{_DIGITS}g}")


# ---------------------------------------------------------------------------------- HTML
def _advice(document: Mapping[str, Any]) -> str:
    paragraphs = [
        f"<p><b>{_text(first)}</b> {_text(' '.join(others))}</p>"
        for first, *others in advice.advice(document)
    ]
    return "".join(paragraphs) + f"<p class=quiet>{_text(advice.basis(document))}</p>"


def _section(document: Mapping[str, Any], problem: str) -> str:
    i = list(document["problems"]).index(problem)
    head = f"<h2>{_text(problem)}</h2><p>{_text(report.headline(document, problem))}</p>"
    rows = report.table(document, problem)
    if not rows:
        return f"<section>{head}<p>No optimizer has a result here.</p></section>"
    plots = [
        ("loss", "Validation loss", "mean over the seeds; click a line to isolate it"),
        ("rates", "Sensitivity to the rate", "final loss; with up to 8 lines, bars over the seeds"),
    ]
    if document["problems"][problem]["target"] is not None:
        about = "mean of the seeds; bars: from the least to the greatest; best first"
        plots.append(("target", "Effort to reach the target", about))
    figures = "".join(
        f'<figure class="{kind}"><figcaption><b>{title}</b> <span>{about}</span></figcaption>'
        f'<div class="plot" id="{kind}-{i}" data-kind="{kind}" data-problem="{i}"></div></figure>'
        for kind, title, about in plots
    )
    table = _table(rows, f"Table: {report.counted(document, problem)}")
    return f"<section>{head}<div class=plots>{figures}</div>{table}</section>"


def _table(rows: Sequence[Mapping[str, str]], title: str) -> str:
    head = "".join(f"<th><button>{_text(cell)}</button></th>" for cell in rows[0])
    lines = "".join(
        f'<tr data-name="{_text(row["optimizer"])}">'
        + "".join(f"<td>{_text(cell)}</td>" for cell in row.values())
        + "</tr>"
        for row in rows
    )
    return (
        f"<details><summary>{title}</summary><div class=scroll><table>"
        f"<thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div></details>"
    )


def _merged(document: Mapping[str, Any]) -> str:
    lines = []
    for problem in document["problems"]:
        groups = [group for group in summary.coinciding(document, problem) if len(group) > 1]
        names = "; ".join(
            f"<b>{_text(summary.label([r['optimizer'] for r in group]))}</b>" for group in groups
        )
        lines += [f"<li>{_text(problem)}: {names}</li>"] if groups else []
    if not lines:
        return "<p>No two optimizers have the same curve on a problem.</p>"
    return (
        "<p>These have equal best rates, and losses that differ by at most "
        f"{summary.TOLERANCE:g} of themselves at every evaluation. The figures show each group as "
        f"one line.</p><ul>{''.join(lines)}</ul>"
    )


def _defaults(document: Mapping[str, Any]) -> str:
    unequal = summary.unequal_arguments(document)
    if not unequal:
        return "<p>All arguments that several optimizers have are equal.</p>"
    rows = []
    for each in unequal:
        values = "<br>".join(
            f"<b>{_text(v['value'])}</b>: {_text(', '.join(v['optimizers']))}"
            for v in each["values"]
        )
        rows.append(f"<tr><th>{_text(each['argument'])}</th><td>{values}</td></tr>")
    return (
        "<p>Each optimizer ran with the defaults of its function, and with the values that the "
        "race gives to arguments without a default. These differ:</p>"
        f'<div class="scroll defaults"><table>{"".join(rows)}</table></div>'
    )


def _skipped(document: Mapping[str, Any]) -> str:
    lines = "".join(f"<li>{_text(line)}</li>" for line in report.skipped(document))
    return f"<section><h2>Skipped</h2><ul>{lines}</ul></section>" if lines else ""


def _status(document: Mapping[str, Any]) -> str:
    done = len(document["results"]) + len(document["skipped"])
    planned = document.get("planned", done)
    if done >= planned:
        return ""
    return f"<p class=note>Interrupted: {done} of {planned} runs are finished.</p>"


def _picture(name: str, png: bytes) -> str:
    encoded = base64.b64encode(png).decode()
    return f'<img alt="{_text(name)}" loading="lazy" src="data:image/png;base64,{encoded}">'


def _part(name: str) -> str:
    return importlib.resources.files(__name__).joinpath(name).read_text("utf-8")


def _text(value: str) -> str:
    return html.escape(value)
