"""Statistics of a race over all problems, computed from its results."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

Document = Mapping[str, Any]

# Two runs coincide if their rates are equal and no loss of their curves differs more, relatively.
TOLERANCE = 1e-3
RESAMPLES = 1000
# The interval of the ranks, and the least share of resamples in which a contender must be ahead of
# the best one to be called not told apart from it.
INTERVAL = 0.9
NOT_APART = (1 - INTERVAL) / 2


class Ranks(NamedTuple):
    """The mean rank of each contender over the problems, by the final validation loss.

    Attributes:
        contenders: groups of names that coincide on all problems.
        mean: the mean rank over all problems.
        resampled: the mean rank in each resample of the seeds, of shape (contenders, resamples).
        complete: whether a contender has a run on every problem.
        of_problem: by problem, the rank of each contender; NaN without a run.
    """

    contenders: list[tuple[str, ...]]
    mean: np.ndarray
    resampled: np.ndarray
    complete: np.ndarray
    of_problem: dict[str, np.ndarray]


def ranking(document: Document, problem: str) -> list[dict[str, Any]]:
    """The results on a problem, best loss first, diverged runs last."""
    mine = [r for r in document["results"] if r["problem"] == problem]
    return sorted(mine, key=lambda r: math.inf if r["diverged"] else r["loss"]["mean"])


def coinciding(document: Document, problem: str) -> list[list[dict[str, Any]]]:
    """The results on a problem in the order of the ranking, grouped by equal curves.

    Two results coincide if their best rates are equal, and mean, smallest and largest loss of the
    seeds at each evaluation are equal up to :data:`TOLERANCE`. Diverged results never coincide.
    """
    groups: list[list[dict[str, Any]]] = []
    for result in ranking(document, problem):
        for group in groups:
            if _coincide(group[0], result):
                group.append(result)
                break
        else:
            groups.append([result])
    for group in groups:
        group.sort(key=_by_name)
    return groups


def places(document: Document, problem: str) -> dict[str, int]:
    """The rank of each optimizer on a problem; optimizers that coincide share a rank."""
    found: dict[str, int] = {}
    for group in coinciding(document, problem):
        found |= dict.fromkeys((r["optimizer"] for r in group), len(found) + 1)
    return found


def contenders(document: Document) -> list[tuple[str, ...]]:
    """The optimizers with results, grouped by equal curves on all problems."""
    together: dict[str, list[Any]] = {}
    for problem in document["problems"]:
        for i, group in enumerate(coinciding(document, problem)):
            for result in group:
                together.setdefault(result["optimizer"], []).append((problem, i))
    groups: dict[Any, list[str]] = {}
    for name, places in together.items():
        groups.setdefault(tuple(places), []).append(name)
    return [tuple(sorted(names, key=lambda n: (len(n), n))) for names in groups.values()]


def ranks(document: Document, resamples: int = RESAMPLES) -> Ranks:
    """Mean ranks, with a bootstrap over the seeds.

    In each resample the seeds are drawn with replacement, equally for all contenders, and each
    contender has its best rate for these seeds. A diverged run has the last rank.
    """
    names = contenders(document)
    results = {(r["problem"], r["optimizer"]): r for r in document["results"]}
    rng = np.random.default_rng(0)
    resampled, count = np.zeros((len(names), resamples)), np.zeros(len(names))
    of_problem: dict[str, np.ndarray] = {}
    problems = [p for p in document["problems"] if any(key[0] == p for key in results)]
    for problem in problems:
        here = [i for i, group in enumerate(names) if (problem, group[0]) in results]
        losses = [_losses(results[problem, names[i][0]]) for i in here]
        seeds = min(each.shape[1] for each in losses)
        draws = rng.integers(seeds, size=(resamples, seeds))
        of_problem[problem] = np.full(len(names), np.nan)
        of_problem[problem][here] = _ranks(np.array([x.mean(axis=1).min() for x in losses]))
        best = np.array([each[:, draws].mean(axis=2).min(axis=0) for each in losses])
        resampled[here] += _ranks(best)
        count[here] += 1
    mean = np.nanmean(list(of_problem.values()), axis=0) if names else count
    return Ranks(names, mean, resampled / count[:, None], count == len(problems), of_problem)


def costs(document: Document, by: str) -> tuple[list[tuple[str, ...]], np.ndarray]:
    """The cost of reaching the targets, of shape (contenders, runs); infinite if not reached.

    Args:
        document: the results.
        by: ``"steps"`` or ``"seconds"``.

    Returns:
        The contenders, and their costs on each problem with a target, for each seed.
    """
    names = contenders(document)
    results = {(r["problem"], r["optimizer"]): r for r in document["results"]}
    columns = []
    for problem, facts in document["problems"].items():
        mine = [results.get((problem, group[0])) for group in names]
        if facts["target"] is None or not any(mine):
            continue
        seeds = max(len(r["steps to target by seed"]) for r in mine if r)
        for seed in range(seeds):
            columns.append([_cost(r, seed, by) for r in mine])
    return names, np.array(columns).reshape(len(columns), len(names)).T


def profile(document: Document, by: str) -> list[dict[str, Any]]:
    """A performance profile: the sorted ratios of each contender's costs to the smallest cost.

    The fraction of runs that a contender finishes within a factor is the fraction of its ratios
    below it. Runs that no contender finishes are excluded.
    """
    names, cost = costs(document, by)
    finished = np.isfinite(cost).any(axis=0)
    cost = np.maximum(cost[:, finished], np.finfo(float).tiny)
    ratios = cost / cost.min(axis=0) if cost.size else cost
    return [
        {
            "names": list(group),
            "ratios": sorted(float(x) for x in row if math.isfinite(x)),
            "runs": len(row),
        }
        for group, row in zip(names, ratios, strict=True)
    ]


def widths(document: Document) -> dict[tuple[str, ...], float]:
    """The mean width, in decades, of the range of rates with which a contender reaches the target.

    For each problem with a target, the range is the longest series of neighbouring rates whose mean
    final loss is at most the target.
    """
    results = {(r["problem"], r["optimizer"]): r for r in document["results"]}
    found: dict[tuple[str, ...], list[float]] = {}
    for group in contenders(document):
        for problem, facts in document["problems"].items():
            if facts["target"] is not None and (r := results.get((problem, group[0]))):
                found.setdefault(group, []).append(_width(r["rates"], facts["target"]))
    return {group: float(np.mean(each)) for group, each in found.items()}


def unequal_arguments(document: Document) -> list[dict[str, Any]]:
    """The arguments that several optimizers share, with different values in this race."""
    seen: dict[str, dict[str, list[Any]]] = {}
    for r in document["results"]:
        for name, value in r["arguments"].items():
            values = seen.setdefault(name, {}).setdefault(r["optimizer"], [])
            if _text(value) not in values:
                values.append(_text(value))
    unequal = []
    for name, by_optimizer in sorted(seen.items()):
        groups: dict[str, list[str]] = {}
        for optimizer, values in by_optimizer.items():
            groups.setdefault(" or ".join(values), []).append(optimizer)
        if len(groups) > 1:
            ordered = sorted(groups.items(), key=lambda item: -len(item[1]))
            values = [{"value": value, "optimizers": names} for value, names in ordered]
            unequal.append({"argument": name, "values": values})
    return unequal


def label(names: Sequence[str]) -> str:
    """The name of a contender: all names of the optimizers that coincide."""
    return " = ".join(names)


def interval(resampled: np.ndarray) -> tuple[float, float]:
    """The central interval of a bootstrap distribution with the probability :data:`INTERVAL`."""
    tail = (1 - INTERVAL) / 2
    low, high = np.quantile(resampled, [tail, 1 - tail])
    return float(low), float(high)


# ------------------------------------------------------------------------------- the parts
def _by_name(result: Mapping[str, Any]) -> tuple[int, str]:
    return len(result["optimizer"]), result["optimizer"]


def _coincide(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    if a["diverged"] or b["diverged"] or not math.isclose(a["rate"], b["rate"], rel_tol=1e-6):
        return False
    curves = [
        np.array([[np.nan if v is None else v for v in r["curve"][k]] for k in _CURVES], float)
        for r in (a, b)
    ]
    return curves[0].shape == curves[1].shape and np.allclose(
        *curves, rtol=TOLERANCE, atol=0, equal_nan=True
    )


_CURVES = "mean", "low", "high"


def _losses(result: Mapping[str, Any]) -> np.ndarray:
    """The final losses by rate and seed; infinite if the run diverged."""
    rows = [rate["losses"] for rate in result["rates"]]
    return np.array([[math.inf if v is None else v for v in row] for row in rows])


def _ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 1 along the first axis; equal values have the mean of their ranks."""
    less = (values[None] < values[:, None]).sum(axis=1)
    equal = (values[None] == values[:, None]).sum(axis=1)
    return less + (equal + 1) / 2


def _cost(result: Mapping[str, Any] | None, seed: int, by: str) -> float:
    steps = result["steps to target by seed"][seed] if result else None
    if result is None or steps is None:
        return math.inf
    return steps * (result["seconds per step"] if by == "seconds" else 1)


def _width(rates: Sequence[Mapping[str, Any]], target: float) -> float:
    longest, begin = 0.0, None
    for rate in sorted(rates, key=lambda r: r["rate"]):
        if rate["loss"] is None or rate["loss"] > target:
            begin = None
            continue
        begin = begin or rate["rate"]
        longest = max(longest, math.log10(rate["rate"] / begin))
    return longest


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
