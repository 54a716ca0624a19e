"""Recommendations of optimizers as text, computed from the results."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from .summary import (
    NOT_APART,
    Document,
    Ranks,
    label,
    places,
    profile,
    ranking,
    ranks,
    widths,
)

# Descriptions of the models of problems without and with embedding tables.
_MODELS = {False: "dense models", True: "models with embedding tables"}
# A rank in the last quarter of a table is mentioned with a recommendation.
_AMONG_THE_LAST = 3 / 4
# So is a step time above this multiple of that of the best optimizer in the table.
_SLOW = 2


def advice(document: Document) -> list[list[str]]:
    """A paragraph for dense models and one for embeddings; the main result comes first."""
    if all(r["diverged"] for r in document["results"]):
        return [["No run has finished with a finite loss: there is no recommendation."]]
    if len({r["optimizer"] for r in document["results"]}) == 1:
        return [["Only one optimizer ran: there is nothing to compare."]]
    return [
        _paragraph(document, problems, models)
        for has_tables, models in _MODELS.items()
        if (problems := _problems(document, has_tables))
    ]


def basis(document: Document) -> str:
    """The data on which the recommendations are based; empty without a result."""
    results = document["results"]
    if not results:
        return ""
    problems = {has_tables: _problems(document, has_tables) for has_tables in _MODELS}
    kinds = [f"{_listed(found)} ({_MODELS[has]})" for has, found in problems.items() if found]
    missing = [f" No problem has {_MODELS[has]}." for has, found in problems.items() if not found]
    rates = [len(r["rates"]) for r in results]
    number = f"{min(rates)}" + (f" to {max(rates)}" if max(rates) > min(rates) else "")
    return (
        f"This is based on {' and '.join(kinds)}, with {_counted(_seeds(document), 'seed')} and "
        f"{number} learning rates for each optimizer.{''.join(missing)} Ranks are by the final "
        "validation loss, which also selected the rates. Optimizers with equal curves share a "
        "rank and are counted once in averages. Results may differ for other models, data or "
        "numbers of steps."
    )


# ------------------------------------------------------------------------------- sentences
def _paragraph(document: Document, problems: Sequence[str], models: str) -> list[str]:
    part: Document = {
        **document,
        "problems": {p: document["problems"][p] for p in problems},
        "results": [r for r in document["results"] if r["problem"] in problems],
    }
    found, where = ranks(part), _listed(problems)
    all_of_them = f"all of {where}" if problems[1:] else where
    diverged = {r["optimizer"] for r in part["results"] if r["diverged"]}
    able = [
        i
        for i, names in enumerate(found.contenders)
        if found.complete[i] and not diverged & set(names)
    ]
    if not able:
        return [f"For {models} no optimizer has a finite loss on {all_of_them}."]
    if len(found.contenders) == 1:
        return [f"For {models} there is nothing to compare: all curves on {where} are equal."]
    best = min(able, key=lambda i: found.mean[i])
    name, *equal = found.contenders[best]
    place = {p: places(part, p) for p in problems}
    of_problem = _listed([f"{place[p][name]} of {len(place[p])} on {p}" for p in problems])
    average = "Its ranks are the best on average" if problems[1:] else "Its rank"
    sentences = [
        f"For {models} start with {name}{_drawbacks(document, name)}.",
        f"{average}: {of_problem}. {_rates_of(part, name)}",
    ]
    if equal:
        sentences.append(f"Equal to it on {where}: {_listed(equal)}.")
    sentences.append(_chance(document, found, best, able))
    if absent := sum(map(len, itertools.compress(found.contenders, ~found.complete))):
        sentences.append(
            f"{_counted(absent, 'optimizer')} without a run on {all_of_them} not included."
        )
    return [*sentences, *_by_time(document, part), *_by_width(document, part)]


def _problems(document: Document, has_tables: bool) -> list[str]:
    """The problems of one kind that have a result."""
    raced = {r["problem"] for r in document["results"]}
    facts = document["problems"]
    return [p for p in facts if p in raced and facts[p]["embeddings"] == has_tables]


def _drawbacks(document: Document, name: str) -> str:
    """A clause with the problems on which the optimizer ranks low; empty if there is none."""
    clauses = []
    for problem in document["problems"]:
        found = places(document, problem)
        if name in found and found[name] > _AMONG_THE_LAST * len(found):
            is_last = found[name] == max(found.values())
            place = "the last" if is_last else f"number {found[name]}"
            slowness = _slowness(document, problem, name)
            clauses.append(f"{place} of {len(found)} on {problem}{slowness}")
    return f", but it is {_listed(clauses)}" if clauses else ""


def _slowness(document: Document, problem: str, name: str) -> str:
    """A clause with the step time relative to the best optimizer's, if it is much longer."""
    seconds = {r["optimizer"]: r["seconds per step"] for r in ranking(document, problem)}
    first = next(iter(places(document, problem)))
    times = seconds[name] / seconds[first]
    return f", where a step takes {_times(times)} as long as with {first}" if times >= _SLOW else ""


def _rates_of(part: Document, name: str) -> str:
    rates = [r["rate"] for r in part["results"] if r["optimizer"] == name]
    if max(rates) > min(rates):
        return f"Its best learning rates: {min(rates):.2g} to {max(rates):.2g}."
    return f"Its best learning rate: {min(rates):.2g}."


def _chance(document: Document, found: Ranks, best: int, able: Sequence[int]) -> str:
    """The other optimizers that may be as good, by a bootstrap over the seeds."""
    if _seeds(document) < 2:
        return "One seed cannot show whether differences are significant."
    share = (found.resampled <= found.resampled[best]).mean(axis=1)
    near = sorted(
        (i for i in able if i != best and share[i] > NOT_APART), key=found.mean.__getitem__
    )
    if near:
        names = _listed([label(found.contenders[i]) for i in near])
        return f"With these seeds, the difference from {names} is not significant."
    return (
        f"It is better than every other optimizer in at least {1 - NOT_APART:.0%} of the "
        "resamples of seeds."
    )


def _by_time(document: Document, part: Document) -> list[str]:
    rows = [row for row in profile(part, "seconds") if row["ratios"]]
    if not rows:
        return []

    def average(row: Any) -> float:
        return float(np.exp(np.mean(np.log(row["ratios"]))))

    best = max(rows, key=lambda row: (len(row["ratios"]), -average(row)))
    name, times = best["names"][0], average(best)
    reached = f"{len(best['ratios'])} of {_counted(best['runs'], 'run')}"
    return [
        f"For the shortest time to the target loss: {name}{_drawbacks(document, name)}. It "
        f"reaches the target in {reached}, the most of all optimizers, and "
        + (
            "is the fastest in these."
            if times < 1.05
            else f"takes on average {_times(times)} as long as the fastest optimizer of each run."
        )
    ]


def _by_width(document: Document, part: Document) -> list[str]:
    found = widths(part)
    if not found or max(found.values()) == 0:
        return []
    name = max(found, key=lambda group: found[group])
    return [
        f"If the learning rate cannot be tuned: {name[0]}{_drawbacks(document, name[0])}. It "
        "reaches the target loss with the widest range of rates: the largest is on average "
        f"{_times(10 ** found[name])} the smallest."
    ]


def _listed(names: Sequence[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def _times(factor: float) -> str:
    return f"{factor:,.0f} times" if factor >= 10 else f"{factor:.2g} times"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" + "s" * (number != 1)


def _seeds(document: Document) -> int:
    return min(len(rate["losses"]) for r in document["results"] for rate in r["rates"])
