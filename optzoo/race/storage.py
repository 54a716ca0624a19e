"""Reads, checks and writes the results in a folder that several races may share."""

import contextlib
import json
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..core.locks import locked
from ..core.warn import warn

RESULTS = "results.json"
Key = tuple[str, str, str]  # problem, optimizer, fingerprint
Runs = dict[Key, Any]


@contextlib.contextmanager
def alone_in(folder: pathlib.Path) -> Iterator[None]:
    """Locks the folder: other races wait before they read or write it."""
    with locked(folder / ".lock"):
        yield


def read_runs(folder: pathlib.Path) -> Runs:
    """All runs in ``results.json``; call it inside :func:`alone_in`.

    A file that is damaged, or of another format, is renamed, and its valid runs are kept.

    Raises:
        OSError: if the file cannot be read.

    Warns:
        UserWarning: if a file is damaged.
    """
    file = folder / RESULTS
    if file.is_dir():
        _set_aside(file, "it is a folder")
        return {}
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        _set_aside(file, str(error))
        return {}
    lists = [document.get(k) if isinstance(document, dict) else None for k in _LISTS]
    found = [run for runs in lists if isinstance(runs, list) for run in runs]
    good = [run for run in found if _is_run(run)]
    if len(good) < len(found) or not all(isinstance(runs, list) for runs in lists):
        _set_aside(file, f"its {len(good)} complete runs of {len(found)} are kept")
        write_text(file, json.dumps({"results": [], "skipped": [], "others": good}))
    return {(r["problem"], r["optimizer"], r["fingerprint"]): r for r in good}


def read_problems(folder: pathlib.Path, header: Mapping[str, Any]) -> dict[str, Any]:
    """The problems in ``results.json`` if it has this header; call it after read_runs."""
    try:
        document = json.loads((folder / RESULTS).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    problems = document.get("problems")
    if any(document.get(k) != v for k, v in header.items()) or not isinstance(problems, dict):
        return {}
    return {name: facts for name, facts in problems.items() if _is_problem(facts)}


def write_text(path: pathlib.Path, text: str) -> None:
    """Writes a file atomically, so that an interruption preserves the old one."""
    fresh = path.with_suffix(path.suffix + ".part")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(path)


_LISTS = "results", "skipped", "others"


def _set_aside(file: pathlib.Path, reason: str) -> None:
    number = 1
    while (aside := file.with_name(f"{file.stem}.damaged-{number}{file.suffix}")).exists():
        number += 1
    file.rename(aside)
    warn(f"{file} is damaged ({reason}); it was renamed to {aside.name}")


# ------------------------------------------------------------------------------ the format
Check = Callable[[Any], bool]


def _is_run(run: Any) -> bool:
    """Whether a run has all values that the report and the figures read."""
    if not (
        isinstance(run, Mapping)
        and all(_is_text(run.get(name)) for name in _NAMES)
        and _is_shallow(run, 4)
    ):
        return False
    if "skipped" in run:
        return _is_text(run["skipped"])
    if "seconds per dense step" in run and not _is_number(run["seconds per dense step"]):
        return False
    complete = all(name in run and check(run[name]) for name, check in _FIELDS.items())
    return complete and (run["diverged"] or _is_number(run["loss"]["mean"]))


def _is_shallow(x: Any, levels: int) -> bool:
    """Whether a value can be written again, which fails for deeply nested JSON."""
    inside = x.values() if isinstance(x, Mapping) else x if isinstance(x, list) else ()
    return levels >= 0 and all(_is_shallow(y, levels - 1) for y in inside)


def _is_text(x: Any) -> bool:
    """Whether a value is a string without surrogates, which cannot be encoded."""
    return isinstance(x, str) and not any("\ud800" <= c <= "\udfff" for c in x)


def _is_number(x: Any) -> bool:
    is_number = isinstance(x, int | float) and not isinstance(x, bool)
    return is_number and -math.inf < x < math.inf and abs(x) < 1e308


def _optional(check: Check) -> Check:
    return lambda x: x is None or check(x)


def _list_of(check: Check) -> Check:
    return lambda x: isinstance(x, list) and all(map(check, x))


def _is_spread(x: Any) -> bool:
    return (
        isinstance(x, Mapping)
        and all(name in x and _optional(_is_number)(x[name]) for name in ("mean", "std"))
        and (x["mean"] is None or x["std"] is not None)
    )


def _is_curve(x: Any) -> bool:
    names = "steps", "mean", "low", "high"
    if not (isinstance(x, Mapping) and all(_VALUES(x.get(name)) for name in names)):
        return False
    return None not in x["steps"] and len({len(x[name]) for name in names}) == 1


def _is_track(x: Any) -> bool:
    points = _list_of(_VALUES)(x)
    return points and all(x) and len({len(point) for point in x}) <= 1


def _are_metrics(x: Any) -> bool:
    return isinstance(x, Mapping) and all(_is_text(k) and _is_spread(v) for k, v in x.items())


def _is_rate(x: Any) -> bool:
    return (
        isinstance(x, Mapping)
        and all(name in x and check(x[name]) for name, check in _RATE.items())
        and len(x["losses"]) > 0
    )


def _are_arguments(x: Any) -> bool:
    is_value = lambda v: v is None or isinstance(v, bool) or _is_text(v) or _is_number(v)
    return isinstance(x, Mapping) and all(_is_text(k) and is_value(v) for k, v in x.items())


def _is_problem(x: Any) -> bool:
    return isinstance(x, Mapping) and all(k in x and check(x[k]) for k, check in _FACTS.items())


_VALUES = _list_of(_optional(_is_number))
_RATE: dict[str, Check] = {
    "rate": lambda x: _is_number(x) and x > 0,
    "loss": _optional(_is_number),
    "losses": _VALUES,
}
_FACTS: dict[str, Check] = {
    "about": _is_text,
    "target": _optional(_is_number),
    "embeddings": lambda x: isinstance(x, bool),
    "fingerprint": _is_text,
}
_NAMES = "problem", "optimizer", "fingerprint"
_FIELDS: dict[str, Check] = {
    "rate": _is_number,
    "diverged": lambda x: isinstance(x, bool),
    "loss": _is_spread,
    "metrics": _are_metrics,
    "steps to target": _optional(lambda x: _is_spread(x) and x["mean"] is not None),
    "steps to target by seed": _VALUES,
    "rates": _list_of(_is_rate),
    "family": _is_text,
    "arguments": _are_arguments,
    "curve": _is_curve,
    "track": _optional(_is_track),
    "seconds per step": _is_number,
    "seconds per step from": _is_number,
    "seconds per step to": _is_number,
    "state bytes per parameter": _is_number,
}
