"""A complete race: every optimizer on every problem; each result is saved immediately."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
import pathlib
import platform
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent import futures
from typing import Any

import jax
import numpy as np

from ..catalog import CATALOG
from ..jaxprs.equations import text_of
from . import page, plots, report, storage
from .entrants import Entrant, Factory, find, unknown
from .problem import Problem
from .problems import DEFAULT_PROBLEMS, PROBLEMS
from .runner import Settings, Start, Unsuited, prepare, run_one, times, traced
from .timing import DISTURBED

VERSION = importlib.metadata.version("optzoo")


@dataclasses.dataclass(frozen=True)
class Progress:
    """The argument of ``watch``: the progress of a race before each run, and at its end."""

    done: int
    found: int  # how many of the done ones were found in the folder
    total: int
    problem: str
    optimizer: str
    seconds_left: float  # an estimate, before the first run from the races of the past


def check(
    problems: Sequence[Problem | str], optimizers: Sequence[str | Factory], settings: Settings
) -> tuple[list[Problem], dict[str, Entrant]]:
    """The problems, and the optimizers by name, after checks.

    Raises:
        ValueError: as :func:`run`.
    """
    for problem in problems:
        if isinstance(problem, str) and problem not in PROBLEMS:
            raise unknown("problem", problem, PROBLEMS)
    contenders = find(optimizers)
    for what, given in (("problem", problems), ("optimizer", contenders)):
        if not given:
            raise ValueError(f"a race needs at least one {what}, got none")
    chosen = [PROBLEMS[p]() if isinstance(p, str) else p for p in problems]
    for p in chosen:
        if p.batches:
            p.batches(settings.seeds - 1, settings.steps or p.steps)
    return chosen, contenders


def run(
    problems: Sequence[Problem | str] = tuple(DEFAULT_PROBLEMS),
    optimizers: Sequence[str | Factory] = tuple(CATALOG),
    *,
    settings: Settings | None = None,
    out: str | os.PathLike[str] | None = None,
    fresh: bool = False,
    watch: Callable[[Progress], None] | None = None,
) -> dict[str, Any]:
    """Runs optimizers on problems; the results are saved in ``out`` after each run.

    Example:
        >>> import jax.numpy as jnp
        >>> from optzoo.race import Problem, Settings, run
        >>> x = jnp.linspace(-1.0, 1.0, 8)
        >>> data = {"x": x, "y": 3 * x}
        >>> problem = Problem(
        ...     name="line",
        ...     init=lambda key: {"w": jnp.zeros(())},
        ...     loss=lambda params, batch: jnp.mean((params["w"] * batch["x"] - batch["y"]) ** 2),
        ...     train=data,
        ...     valid=data,
        ...     evaluations=1,
        ... )
        >>> settings = Settings(rates=(0.1,), seeds=1, steps=2, timed_steps=1)
        >>> results = run([problem], ["gradient_descent"], settings=settings)["results"]
        >>> print([(r["optimizer"], r["rate"]) for r in results])
        [('gradient_descent', 0.1)]

    Args:
        problems: names of built-in problems, or :class:`Problem` objects.
        optimizers: names in the catalogue; names of distributed methods, which train 8 replicas
            with ``adam``, each on its part of the batch; names in optax (``"optax.adamw"``,
            ``"optax.contrib.muon"``); ``"module:factory"``; or factories of the learning rate, such
            as ``optax.adamw``. Optimizers of other libraries receive dense gradients.
        settings: rates, seeds and steps; None for the defaults.
        out: a folder for ``results.json``, ``leaderboard.md``, the figures and ``index.html``; None
            to write nothing. Runs found there with the same settings are not repeated. Several
            races may use one folder, also at the same time: its files contain the runs of all. Runs
            with other settings, or of a problem that has changed, are in ``results.json`` only.
        fresh: repeat the runs found in ``out``; each is replaced when its repetition is finished.
        watch: called before each run and once at the end.

    Returns:
        A dict that can be written as JSON, as in ``results.json``. Numbers that are not finite are
        None.

        - ``version`` of the format, ``settings`` and ``machine``, dicts.
        - ``problems``: by name ``about``, ``target``, ``embeddings`` and ``fingerprint``, a hash of
          all inputs of the runs.
        - ``results``: a dict for each finished run, see below.
        - ``skipped``: for each optimizer that does not suit a problem ``problem``, ``optimizer``,
          ``fingerprint`` and ``skipped``, the reason.
        - ``others``: all other runs in ``out``, which later races may use.

        A result has, for the best rate:

        - ``problem``, ``optimizer``, ``family``, ``rows`` (the policy for row-sparse gradients),
          ``arguments`` (a dict) and ``fingerprint``.
        - ``rate``; ``diverged``, whether no rate gave a finite loss; ``loss``, the final one, with
          ``mean`` and ``std`` over the seeds; ``metrics``, the same for each metric by its name.
        - ``rates``: for each rate ``rate``, ``loss`` (the mean), ``losses`` (of the seeds) and
          ``diverged``.
        - ``steps to target``: ``mean`` and ``std`` if all seeds reached the target of the problem,
          otherwise None; ``steps to target by seed``, None for seeds that did not reach it.
        - ``curve``: ``steps``, and the ``mean``, ``low`` and ``high`` loss at each.
        - ``track``: the results of ``Problem.track`` at these steps; None without it.
        - ``state bytes per parameter``; ``seconds per step``, the minimum over several stretches,
          and ``seconds per step from`` and ``seconds per step to``, the range; for problems with
          embeddings ``seconds per dense step``, except for optimizers of other libraries and
          methods with replicas.
        - ``published``: published results, if the problem has them.

    Raises:
        OSError: before the first run, if ``out`` cannot be written.
        ValueError: before the first run, if a problem or an optimizer is unknown (the message
            suggests similar names), if a factory cannot be called with only a rate, or if a problem
            has fewer seeds.

    Warns:
        UserWarning: if ``results.json`` is damaged. It is renamed, and its valid runs are kept.
    """
    settings = settings or Settings()
    # Check all arguments before the first run.
    chosen, contenders = check(problems, optimizers, settings)
    folder = _writable(out) if out is not None else None
    prints = {p.name: _fingerprint(p, settings) for p in chosen}
    facts = {p.name: _facts(p) | {"fingerprint": prints[p.name]} for p in chosen}
    header = _header(settings)
    todo = _todo(chosen, contenders, prints)
    stored = _found_in(folder) if folder else {}
    known = {key: r for key, r in stored.items() if not (fresh and key in todo)}
    found = frozenset(known.keys() & todo.keys())
    clock, by_name = _Clock(chosen, settings), {p.name: p for p in chosen}
    start_of = functools.cache(lambda name: prepare(by_name[name], settings))

    def notify(problem="", optimizer=""):
        left = [key[0] for key in todo if key not in known]
        done, seconds = len(todo) - len(left), clock.left(left)
        if watch:
            watch(Progress(done, len(found), len(todo), problem, optimizer, seconds))

    def save(*, publish: bool) -> dict[str, Any]:
        """Merges the race with results that others have written to the folder in the meantime."""
        mine = {key: known[key] for key in todo if key in known}
        if not folder:
            return _document(header, facts, mine, {})
        with storage.alone_in(folder):
            stored = storage.read_runs(folder) | known
            others = {key: run for key, run in stored.items() if key not in mine}
            all_facts = facts | (storage.read_problems(folder, header) | facts)  # mine first
            shown = mine | _comparable(others, all_facts, {key[:2] for key in todo})
            hidden = {key: run for key, run in stored.items() if key not in shown}
            complete = _document(header, all_facts, shown, hidden)
            complete["planned"] = len(shown) + len(todo) - len(mine)
            storage.write_text(folder / storage.RESULTS, json.dumps(complete, indent=1))
            if publish:
                _publish(folder, complete)
        return _document(header, facts, mine, others)

    try:
        left = {key: p for key, p in todo.items() if key not in known}
        entrants = ((start_of(p.name), contenders[key[1]]) for key, p in left.items())
        with contextlib.closing(_programs(entrants)) as programs:
            for key, p in left.items():
                notify(p.name, key[1])
                begin = time.perf_counter()
                known[key] = _result(start_of(p.name), key, contenders[key[1]], next(programs))
                clock.took(p.name, time.perf_counter() - begin)
                save(publish=False)
        for key in _doubtful_times({key: known[key] for key in todo}):
            if key not in found:
                known[key] = _timed_again(known[key], start_of(key[0]), contenders[key[1]])
    except BaseException:  # also after Ctrl-C, a signal or an error
        save(publish=True)
        raise
    notify()
    return save(publish=True)


def _comparable(runs: storage.Runs, facts: Any, asked: set[tuple[str, str]]) -> storage.Runs:
    """The runs of other races for the same page: same problem and settings, each name once."""
    found: dict[tuple[str, str], storage.Key] = {}
    for key in runs:
        problem, optimizer, fingerprint = key
        is_same = problem in facts and _is_of(fingerprint, facts[problem]["fingerprint"])
        if is_same and (problem, optimizer) not in asked:
            found.setdefault((problem, optimizer), key)
    return {key: runs[key] for key in found.values()}


def _todo(
    problems: list[Problem], contenders: dict[str, Entrant], prints: dict[str, str]
) -> dict[storage.Key, Problem]:
    """The runs of a race: all problems of one optimizer, then those of the next."""
    return {
        (p.name, name, _fingerprint_of(entrant, p, prints[p.name])): p
        for name, entrant in contenders.items()
        for p in problems
    }


def _programs(
    entrants: Iterable[tuple[Start, Entrant]],
) -> Generator[futures.Future[Any]]:
    """The program of each run; a thread compiles it during the previous run."""
    compiler = futures.ThreadPoolExecutor(1)
    try:
        begun = (_begun(compiler, start, entrant) for start, entrant in entrants)
        following = next(begun, None)
        while following is not None:
            program, following = following, next(begun, None)
            yield program
    finally:
        compiler.shutdown(cancel_futures=True)


def _begun(compiler: futures.Executor, start: Start, entrant: Entrant) -> futures.Future[Any]:
    """Starts the compilation of a run's program, traced with the settings of this thread."""
    try:
        return compiler.submit(traced(start, entrant))
    except Unsuited as reason:
        refused = futures.Future[Any]()
        refused.set_exception(reason)
        return refused


def _result(
    start: Start, key: storage.Key, entrant: Entrant, program: futures.Future[Any]
) -> dict[str, Any]:
    _, name, fingerprint = key
    try:
        result = run_one(start, name, entrant, program.result())
    except Unsuited as reason:
        result = {"problem": start.problem.name, "optimizer": name, "skipped": str(reason)}
    return result | {"fingerprint": fingerprint}


def _timed_again(result: dict[str, Any], start: Start, entrant: Entrant) -> dict[str, Any]:
    again = times(start, entrant, result["rate"])
    return min(result, result | again, key=lambda r: r["seconds per step"])


def _doubtful_times(runs: storage.Runs) -> list[storage.Key]:
    """The runs whose step time differs from the median of their problem by a factor above 10."""
    seconds: dict[str, dict[storage.Key, float]] = {}
    for key, run in runs.items():
        if "skipped" not in run:
            seconds.setdefault(key[0], {})[key] = run["seconds per step"]
    doubtful = []
    for of_problem in seconds.values():
        usual = float(np.median(list(of_problem.values())))
        doubtful += [
            key
            for key, each in of_problem.items()
            if not usual / DISTURBED <= each <= usual * DISTURBED
        ]
    return doubtful


def _publish(folder: pathlib.Path, complete: dict[str, Any]) -> None:
    """Writes the reports; the caller must hold the lock of the folder."""
    storage.write_text(folder / "leaderboard.md", report.markdown(complete))
    pictures = plots.draw(complete, folder)
    pictures.pop("curves.png")  # the page has them as figures
    storage.write_text(folder / "index.html", page.write(complete, pictures))


def _facts(problem: Problem) -> dict[str, Any]:
    """The facts about a problem in the report."""
    return {name: getattr(problem, name) for name in ("about", "target", "embeddings")}


def _header(settings: Settings) -> dict[str, Any]:
    """The values that are equal in all runs of one page, as in JSON."""
    return {"version": VERSION, "settings": json.loads(json.dumps(dataclasses.asdict(settings)))}


def _document(
    header: dict[str, Any], facts: dict[str, Any], runs: storage.Runs, others: storage.Runs
) -> dict[str, Any]:
    return header | {
        "machine": {
            "device": jax.devices()[0].device_kind,
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "jax": jax.__version__,
        },
        "problems": facts,
        "results": [r for r in runs.values() if "skipped" not in r],
        "skipped": [r for r in runs.values() if "skipped" in r],
        "others": list(others.values()),
    }


def _fingerprint_of(entrant: Entrant, problem: Problem, fingerprint: str) -> str:
    """Adds a hash of the code of an optimizer of another library to the fingerprint."""
    if not entrant.is_foreign:
        return fingerprint
    params = jax.eval_shape(problem.init, jax.random.key(0))
    tx = entrant.entry.make(entrant.entry.rate)

    def update(params):
        return tx.update(params, tx.init(params), params, global_step=0)

    try:
        code = text_of(jax.make_jaxpr(update)(params))
    except Exception as error:  # the run skips it, with the reason
        code = type(error).__name__
    return f"{fingerprint}-{hashlib.sha256(code.encode()).hexdigest()[:16]}"


def _is_of(fingerprint: str, problem: str) -> bool:
    """Whether a run has the fingerprint of a problem, with or without that of its optimizer."""
    return fingerprint.split("-")[0] == problem


def _fingerprint(problem: Problem, settings: Settings) -> str:
    """A hash of all inputs of the results: code of the model, data, settings."""
    key = jax.random.key(0)
    params = jax.eval_shape(problem.init, key)
    batch = jax.tree.map(lambda a: np.asarray(a[:1]), problem.train)
    metrics = lambda params, valid: {k: f(params, valid) for k, f in problem.metrics.items()}
    traced = [
        jax.make_jaxpr(problem.init)(key),
        jax.make_jaxpr(problem.loss)(params, batch),
        jax.make_jaxpr(metrics)(params, problem.valid),
        jax.make_jaxpr(problem.track or (lambda params: ()))(params),
    ]
    functions = {"init", "loss", "metrics", "track", "about", "batches", "published"}
    plain = {f.name: getattr(problem, f.name) for f in dataclasses.fields(problem)}
    plain = {k: v for k, v in plain.items() if k not in functions | {"train", "valid"}}
    digest = hashlib.sha256()
    names = list(problem.metrics)
    digest.update(repr((VERSION, dataclasses.asdict(settings), plain, names)).encode())
    for jaxpr in traced:
        digest.update(text_of(jaxpr).encode())
    constants = [jaxpr.consts for jaxpr in traced]
    batches = problem.batches and problem.batches(
        settings.seeds - 1, settings.steps or problem.steps
    )
    for array in jax.tree.leaves((problem.train, problem.valid, constants, batches)):
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:16]


def _found_in(folder: pathlib.Path) -> storage.Runs:
    with storage.alone_in(folder):
        return storage.read_runs(folder)


def _writable(out: str | os.PathLike[str]) -> pathlib.Path:
    folder = pathlib.Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        return folder


# Seconds of a run with the default settings on two CPU cores that do nothing else. Most of it is
# compilation, which does not depend on the number of steps.
_USUAL = {
    "digits": 1.6,
    "breast_cancer": 0.75,
    "words": 2.5,
    "valley": 0.3,
    "characters": 16.0,
    "quadratic_deep": 0.8,
}


class _Clock:
    """Estimates the time left, from the runs so far on each problem or from the usual time."""

    def __init__(self, problems: Sequence[Problem], settings: Settings):
        self.seconds: dict[str, list[float]] = {}
        self.usual = {p.name: _usual_seconds(p, settings) for p in problems}

    def took(self, problem: str, seconds: float) -> None:
        self.seconds.setdefault(problem, []).append(seconds)

    def left(self, problems: list[str]) -> float:
        mean = {p: float(np.mean(s)) for p, s in self.seconds.items()}
        pace = sum(mean.values()) / sum(self.usual[p] for p in mean) if mean else 1.0
        return sum(mean.get(p, pace * self.usual[p]) for p in problems)


def _usual_seconds(problem: Problem, settings: Settings) -> float:
    usual, work = Settings(), lambda s: len(s.grid(1.0)) * s.seeds * (s.steps or problem.steps)
    return _USUAL.get(problem.name, 2.0) * (2 + work(settings) / work(usual)) / 3
