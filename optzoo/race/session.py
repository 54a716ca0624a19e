"""A whole race: every optimizer on every problem; each result is saved at once."""

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import pathlib
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from ..catalog import CATALOG
from ..core.compat import text_of
from . import page, plots, report, storage
from .entrants import Entrant, Factory, find, unknown
from .problem import Problem
from .problems import DEFAULT_PROBLEMS, PROBLEMS
from .runner import Settings, Start, Unsuited, prepare, run_one, times
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
    seconds_left: float | None


def check(
    problems: Sequence[Problem | str], optimizers: Sequence[str | Factory]
) -> dict[str, Entrant]:
    """The optimizers by name, if all names are known.

    Raises:
        ValueError: as :func:`run`.
    """
    for problem in problems:
        if isinstance(problem, str) and problem not in PROBLEMS:
            raise unknown("problem", problem, PROBLEMS)
    return find(optimizers)


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
        optimizers: names in the catalogue; of distributed methods, which train 8 replicas with
            ``adam``, each on its part of the batch; in optax (``"optax.adamw"``,
            ``"optax.contrib.muon"``); ``"module:factory"``; or factories of the learning rate, such
            as ``optax.adamw``. Those of other libraries get dense gradients.
        settings: rates, seeds and steps; None for the defaults.
        out: a folder for ``results.json``, ``leaderboard.md``, the figures and ``index.html``; None
            to write nothing. Runs found there with the same settings are not repeated. Several
            races may use one folder at the same time: ``results.json`` has the runs of all, the
            other files show the race that ended last.
        fresh: repeat the runs found in ``out``; each is replaced when its repetition is finished.
        watch: called before each run and once at the end.

    Returns:
        The contents of ``results.json``: ``results`` and ``skipped``, a list of dicts each, and
        ``others``, runs in ``out`` with other settings, which a later race may use.

    Raises:
        OSError: before the first run, if ``out`` cannot be written.
        ValueError: if a problem or an optimizer is unknown (the message has similar names), or a
            factory makes no optimizer from a rate alone; before the first run, if a problem has not
            as many seeds.

    Warns:
        UserWarning: if ``results.json`` is damaged. It gets another name, its good runs are kept.
    """
    settings = settings or Settings()
    # Check all arguments before the first run.
    contenders = check(problems, optimizers)
    chosen = [PROBLEMS[p]() if isinstance(p, str) else p for p in problems]
    folder = _writable(out) if out is not None else None
    todo = _todo(chosen, contenders, settings)
    stored = _found_in(folder) if folder else {}
    known = {key: r for key, r in stored.items() if not (fresh and key in todo)}
    found = frozenset(known.keys() & todo.keys())
    clock, starts = _Clock(), dict[str, Start]()

    def notify(problem="", optimizer=""):
        left = [key[0] for key in todo if key not in known]
        done, seconds = len(todo) - len(left), clock.left(left)
        if watch:
            watch(Progress(done, len(found), len(todo), problem, optimizer, seconds))

    def document(stored):
        mine = [known[key] for key in todo if key in known]
        others = [r for key, r in (stored | known).items() if key not in todo.keys() & known.keys()]
        return _document(chosen, settings, mine, others) | {"planned": len(todo)}

    try:
        for key, p in todo.items():
            if key in known:
                continue
            notify(p.name, key[1])
            begin = time.perf_counter()
            if p.name not in starts:
                starts[p.name] = prepare(p, settings)
            known[key] = _result(starts[p.name], key, contenders[key[1]])
            clock.took(p.name, time.perf_counter() - begin)
            if folder:
                _save(folder, document)
        for key in _doubtful_times({key: known[key] for key in todo}):
            if key not in found:
                known[key] = _timed_again(known[key], starts[key[0]], contenders[key[1]])
    except KeyboardInterrupt:
        if folder:
            _publish(folder, _save(folder, document))
        raise
    notify()
    return _publish(folder, _save(folder, document)) if folder else document({})


def _todo(
    problems: list[Problem], contenders: dict[str, Entrant], settings: Settings
) -> dict[storage.Key, Problem]:
    """The runs of a race: all problems of one optimizer, then those of the next."""
    prints = {p.name: _fingerprint(p, settings) for p in problems}
    return {
        (p.name, name, _fingerprint_of(entrant, p, prints[p.name])): p
        for name, entrant in contenders.items()
        for p in problems
    }


def _result(start: Start, key: storage.Key, entrant: Entrant) -> dict[str, Any]:
    _, name, fingerprint = key
    try:
        result = run_one(start, name, entrant)
    except Unsuited as reason:
        result = {"problem": start.problem.name, "optimizer": name, "skipped": str(reason)}
    return result | {"fingerprint": fingerprint}


def _timed_again(result: dict[str, Any], start: Start, entrant: Entrant) -> dict[str, Any]:
    again = times(start, entrant, result["rate"])
    return min(result, result | again, key=lambda r: r["seconds per step"])


def _doubtful_times(runs: storage.Runs) -> list[storage.Key]:
    """The runs whose step took over 10 times as long, or short, as the median of their problem."""
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


def _save(folder: pathlib.Path, document: Callable[[storage.Runs], dict[str, Any]]) -> Any:
    """Merges a race with what others have written to the folder in the meantime."""
    with storage.alone_in(folder):
        complete = document(storage.read_runs(folder))
        storage.write_text(folder / storage.RESULTS, json.dumps(complete, indent=1))
    return complete


def _publish(folder: pathlib.Path, complete: dict[str, Any]) -> dict[str, Any]:
    with storage.alone_in(folder):
        storage.write_text(folder / "leaderboard.md", report.markdown(complete))
        pictures = plots.draw(complete, folder)
        pictures.pop("curves.png")  # the page has them as figures
        storage.write_text(folder / "index.html", page.write(complete, pictures))
    return complete


def _document(
    problems: list[Problem], settings: Settings, mine: list[Any], others: list[Any]
) -> dict[str, Any]:
    return {
        "version": VERSION,
        "machine": {
            "device": jax.devices()[0].device_kind,
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "jax": jax.__version__,
        },
        "settings": dataclasses.asdict(settings),
        "problems": {p.name: {"about": p.about, "target": p.target} for p in problems},
        "results": [r for r in mine if "skipped" not in r],
        "skipped": [r for r in mine if "skipped" in r],
        "others": others,
    }


def _fingerprint_of(entrant: Entrant, problem: Problem, fingerprint: str) -> str:
    """With the code of an optimizer of another library, which the version does not determine."""
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
    return hashlib.sha256(f"{fingerprint} {code}".encode()).hexdigest()[:16]


def _fingerprint(problem: Problem, settings: Settings) -> str:
    """A hash of all that the results depend on: code of the model, data, settings."""
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


class _Clock:
    """Estimates the time left from the runs so far on each problem."""

    def __init__(self):
        self.seconds: dict[str, list[float]] = {}

    def took(self, problem: str, seconds: float) -> None:
        self.seconds.setdefault(problem, []).append(seconds)

    def left(self, problems: list[str]) -> float | None:
        if not self.seconds:
            return None
        mean = {p: float(np.mean(s)) for p, s in self.seconds.items()}
        overall = float(np.mean(list(mean.values())))
        return sum(mean.get(p, overall) for p in problems)
