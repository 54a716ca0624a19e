"""The results as text: leaderboards for the terminal, in Markdown and in HTML."""

import base64
import html as escape
import re
from collections.abc import Mapping
from typing import Any

Row = dict[str, str]


def ranking(document: Mapping[str, Any], problem: str) -> list[dict[str, Any]]:
    """The results on a problem, best loss first, diverged runs last."""
    mine = [r for r in document["results"] if r["problem"] == problem]
    return sorted(mine, key=lambda r: float("inf") if r["diverged"] else r["loss"]["mean"])


def table(document: Mapping[str, Any], problem: str) -> list[Row]:
    """One row of text cells for each optimizer, in the order of the ranking."""
    rows = []
    has_published = any("published" in r for r in ranking(document, problem))
    for rank, r in enumerate(ranking(document, problem), start=1):
        row = {
            "#": "-" if r["diverged"] else str(rank),
            "optimizer": r["optimizer"],
            "rate": f"{r['rate']:.2g}",
            "loss": "diverged" if r["diverged"] else _spread(r["loss"]),
        }
        row |= {name: _spread(value) for name, value in r["metrics"].items()}
        if has_published:
            row |= _published(r.get("published"))
        reached = r["steps to target"]
        if document["problems"][problem]["target"] is not None:
            row["steps to target"] = f"{reached['mean']:.0f}" if reached else "-"
        row["µs/step"] = _micro(r["seconds per step"])
        if "seconds per dense step" in r:
            row["µs/step, dense"] = _micro(r["seconds per dense step"])
        row["state B/param"] = f"{r['state bytes per parameter']:.3g}"
        rows.append(row)
    return rows


def headline(document: Mapping[str, Any], problem: str) -> str:
    """One line about the problem and its target."""
    facts = document["problems"][problem]
    target = "" if facts["target"] is None else f"; target loss {facts['target']:g}"
    return f"{facts['about']}{target}"


def skipped(document: Mapping[str, Any]) -> list[str]:
    """The optimizers that were skipped on a problem, with the reason."""
    return [f"{r['optimizer']} on {r['problem']}: {r['skipped']}" for r in document["skipped"]]


def explanation(document: Mapping[str, Any]) -> str:
    """How to read the tables."""
    settings, machine = document["settings"], document["machine"]
    rates = (
        f"{len(settings['rates'])} given rates"
        if settings["rates"]
        else f"a grid of {settings['num_rates']} rates half a decade apart, extended if the "
        "best one was at its edge"
    )
    return (
        f"Each optimizer was tuned over {rates}, with {settings['seeds']} seeds; the best mean "
        "validation loss decides. Values are means ± standard deviations over the seeds. A step "
        "is one compiled training step of one run, dispatch included; its time is the median. "
        f"{machine['device']}, {machine['cores']} cores, JAX {machine['jax']}, "
        f"optzoo {document['version']}."
    )


def markdown(document: Mapping[str, Any]) -> str:
    """The whole leaderboard in Markdown."""
    parts = ["# Leaderboard", _markdown_text(explanation(document))]
    for problem in document["problems"]:
        rows = table(document, problem)
        title = f"## {_markdown_text(problem)}"
        parts += [title, _markdown_text(headline(document, problem))]
        if rows:
            texts = [[*map(_markdown_text, cells)] for cells in (rows[0], *map(dict.values, rows))]
            lines = [texts[0], ["---"] * len(rows[0]), *texts[1:]]
            parts.append("\n".join("| " + " | ".join(cells) + " |" for cells in lines))
    if document["skipped"]:
        lines = [f"- {_markdown_text(line)}" for line in skipped(document)]
        parts += ["## Skipped", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


def html(document: Mapping[str, Any], pictures: Mapping[str, bytes]) -> str:
    """The whole leaderboard as one HTML page, with embedded figures."""
    body = [f"<p>{_text(explanation(document))}</p>"]
    body += [_picture(name, data) for name, data in pictures.items()]
    for problem in document["problems"]:
        body += [f"<h2>{_text(problem)}</h2><p>{_text(headline(document, problem))}</p>"]
        rows = table(document, problem)
        if rows:
            head = "".join(f"<th>{_text(cell)}</th>" for cell in rows[0])
            lines = "".join(
                "<tr>" + "".join(f"<td>{_text(c)}</td>" for c in r.values()) + "</tr>" for r in rows
            )
            body.append(f"<div><table><tr>{head}</tr>{lines}</table></div>")
    if document["skipped"]:
        lines = "".join(f"<li>{_text(line)}</li>" for line in skipped(document))
        body.append(f"<h2>Skipped</h2><ul>{lines}</ul>")
    return _PAGE.replace("BODY", "\n".join(body))


def _picture(name: str, png: bytes) -> str:
    data = base64.b64encode(png).decode()
    return f'<img alt="{_text(name)}" src="data:image/png;base64,{data}">'


def _markdown_text(value: str) -> str:
    """One line of Markdown that shows this text."""
    line = " ".join(value.split())
    line = re.sub(r"([\\`*_\[\]{}<>|~#&$!])", r"\\\1", line)
    line = re.sub(r"^([-+](?=[-+ ]))", r"\\\1", line)  # no list, no rule
    return re.sub(r"^(\d+)(?=[.)] )", r"\1\\", line)


def _text(value: str) -> str:
    return escape.escape(value)


def _spread(value: Mapping[str, float | None]) -> str:
    if value["mean"] is None:
        return "-"
    return f"{value['mean']:.4g} ± {value['std']:.1g}"


def _published(facts: Mapping[str, Any] | None) -> Row:
    """The loss of published runs, with their settings, and ours with the same settings."""
    if facts is None:
        return {"published": "-", "replayed": "-"}
    return {
        "published": f"{facts['published']:.6g} ({facts['settings']})",
        "replayed": f"{facts['here']:.6g} (differs by {facts['difference']:.0e})",
    }


def _micro(seconds: float) -> str:
    return f"{1e6 * seconds:,.0f}"


_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>optzoo race</title>
<meta name="viewport" content="width=device-width">
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem;
       color: #222; background: #fff }
img { max-width: 100%; display: block; margin: 1.5rem 0 }
div { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
td, th { padding: .25rem .8rem; border-bottom: 1px solid #ddd; text-align: right;
         white-space: nowrap }
th { border-bottom: 2px solid #888; cursor: pointer }
td:nth-child(2), th:nth-child(2) { text-align: left; font-weight: 600 }
</style>
<h1>The race</h1>
BODY
<script>
// A click on a heading sorts the table by its column; cells without a number come last.
for (const th of document.querySelectorAll("th")) th.onclick = () => {
  const table = th.closest("table"), column = th.cellIndex;
  const number = row => parseFloat(row.cells[column].textContent.replaceAll(",", ""));
  const text = row => row.cells[column].textContent;
  const sign = th.dataset.up === "1" ? -1 : 1;
  th.dataset.up = sign === 1 ? "1" : "";
  const order = (a, b) => {
    const x = number(a), y = number(b);
    if (isNaN(x) && isNaN(y)) return sign * text(a).localeCompare(text(b));
    return isNaN(x) ? 1 : isNaN(y) ? -1 : sign * (x - y);
  };
  for (const row of [...table.rows].slice(1).sort(order)) row.parentNode.append(row);
};
</script></html>
"""
