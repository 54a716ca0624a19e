"""The results as text: leaderboards for the terminal and in Markdown."""

import re
from collections.abc import Mapping
from typing import Any

from .advice import advice, basis
from .summary import coinciding, places, ranking

Row = dict[str, str]


def table(document: Mapping[str, Any], problem: str) -> list[Row]:
    """One row of text cells for each optimizer, in the order of the ranking."""
    rows, place = [], places(document, problem)
    has_published = any("published" in r for r in ranking(document, problem))
    for r in ranking(document, problem):
        row = {
            "#": "-" if r["diverged"] else str(place[r["optimizer"]]),
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
        row["from - to"] = " - ".join(
            _micro(r[f"seconds per step {end}"]) for end in ("from", "to")
        )
        if "seconds per dense step" in r:
            row["µs/step, dense"] = _micro(r["seconds per dense step"])
        row["state B/param"] = f"{r['state bytes per parameter']:.3g}"
        rows.append(row)
    return rows


def counted(document: Mapping[str, Any], problem: str) -> str:
    """The number of rows of the table, and of different curves."""
    rows, curves = (len(f(document, problem)) for f in (ranking, coinciding))
    optimizers = f"{rows} optimizer" + "s" * (rows != 1)
    return optimizers if curves == rows else f"{optimizers}, {curves} different curves"


def headline(document: Mapping[str, Any], problem: str) -> str:
    """One line about the problem and its target."""
    facts = document["problems"][problem]
    target = "" if facts["target"] is None else f"; target loss {facts['target']:g}"
    return f"{facts['about']}{target}"


def skipped(document: Mapping[str, Any]) -> list[str]:
    """The optimizers that were skipped on a problem, with the reason."""
    return [f"{r['optimizer']} on {r['problem']}: {r['skipped']}" for r in document["skipped"]]


def explanation(document: Mapping[str, Any]) -> str:
    """An explanation of the tables."""
    settings, machine = document["settings"], document["machine"]
    rates = (
        f"{len(settings['rates'])} given rates"
        if settings["rates"]
        else f"a grid of {settings['num_rates']} rates half a decade apart, extended if the best "
        "rate was at its edge"
    )
    return (
        f"Each optimizer was tuned over {rates}, with {settings['seeds']} seeds, by the best mean "
        "validation loss. Values are means ± standard deviations over the seeds. A step is one "
        "compiled training step of one run, including dispatch; its time is the minimum over "
        f"{settings['timed_stretches']} stretches of {settings['timed_steps']} steps after a "
        f"warm-up, with the range. {machine['device']}, {machine['cores']} cores, JAX "
        f"{machine['jax']}, optzoo {document['version']}."
    )


def markdown(document: Mapping[str, Any]) -> str:
    """The whole leaderboard in Markdown."""
    parts = ["# Leaderboard"]
    for first, *others in advice(document):
        parts.append(" ".join([f"**{_markdown_text(first)}**", *map(_markdown_text, others)]))
    parts += filter(None, map(_markdown_text, [basis(document), explanation(document)]))
    for problem in document["problems"]:
        rows = table(document, problem)
        title = f"## {_markdown_text(problem)}"
        parts += [title, _markdown_text(headline(document, problem))]
        if rows:
            parts.append(f"{counted(document, problem)}. Equal curves share a rank.")
            texts = [[*map(_markdown_text, cells)] for cells in (rows[0], *map(dict.values, rows))]
            lines = [texts[0], ["---"] * len(rows[0]), *texts[1:]]
            parts.append("\n".join("| " + " | ".join(cells) + " |" for cells in lines))
    if document["skipped"]:
        lines = [f"- {_markdown_text(line)}" for line in skipped(document)]
        parts += ["## Skipped", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


def _markdown_text(value: str) -> str:
    """One line of Markdown with this text, escaped."""
    line = " ".join(value.split())
    line = re.sub(r"([\\`*_\[\]{}<>|~#&$!])", r"\\\1", line)
    line = re.sub(r"^([-+](?=[-+ ]))", r"\\\1", line)  # no list, no rule
    return re.sub(r"^(\d+)(?=[.)] )", r"\1\\", line)


def _spread(value: Mapping[str, float | None]) -> str:
    if value["mean"] is None:
        return "-"
    return f"{value['mean']:.4g} ± {value['std']:.1g}"


def _published(facts: Mapping[str, Any] | None) -> Row:
    """The loss of published runs, and of this library with the same settings."""
    if facts is None:
        return {"published": "-", "replayed": "-"}
    return {
        "published": f"{facts['published']:.6g} ({facts['settings']})",
        "replayed": f"{facts['here']:.6g} (differs by {facts['difference']:.0e})",
    }


def _micro(seconds: float) -> str:
    return f"{1e6 * seconds:,.0f}"
