"""The command ``optzoo race``."""

import argparse
import dataclasses
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from ..catalog import CATALOG, DISTRIBUTED
from ..race import report, session
from .entrants import REPLICAS
from .problems import DEFAULT_PROBLEMS, PROBLEMS
from .runner import Settings


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.list:
        _list()
        return 0
    problems = _names(args.problem or DEFAULT_PROBLEMS)
    optimizers = _names(args.optimizers or (["adam", *DISTRIBUTED] if args.replicas else CATALOG))
    if any(":" in name for name in optimizers):
        sys.path.insert(0, os.getcwd())  # for a module beside the results
    try:
        session.check(problems, optimizers)
    except ValueError as error:
        parser.error(str(error))
    settings = Settings(rates=args.rates and tuple(args.rates), steps=args.steps)
    if args.quick:
        settings = dataclasses.replace(settings, num_rates=4, extensions=1, seeds=2)
    if args.seeds:
        settings = dataclasses.replace(settings, seeds=args.seeds)
    screen = _Screen()
    try:
        with screen:
            document = session.run(
                problems,
                optimizers,
                settings=settings,
                out=args.out,
                fresh=args.fresh,
                watch=screen.show,
            )
    except OSError as error:
        parser.error(f"--out {args.out} cannot be written: {error}")
    except KeyboardInterrupt:
        print(f"\nstopped; finished runs are kept in {args.out}, and the same command resumes")
        return 130
    screen.leaderboard(document)
    if screen.found:
        print(f"\nfinished runs found in {args.out}: {screen.found}; --fresh repeats them")
    print(f"\nthe results are in {args.out}/index.html")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="optzoo race",
        description="Compares all optimizers on the same models and real data.",
    )
    many = {"nargs": "+", "metavar": "NAME"}
    parser.add_argument("--problem", **many, help="these problems instead of the default ones")
    parser.add_argument(
        "--optimizers",
        **many,
        help="only these optimizers; also optax.adamw, optax.contrib.muon, module:factory",
    )
    parser.add_argument(
        "--replicas",
        action="store_true",
        help=f"distributed methods around adam, {REPLICAS} simulated replicas, and adam alone",
    )
    parser.add_argument(
        "--rates",
        type=_rate,
        nargs="+",
        metavar="RATE",
        help="learning rates to try, instead of a grid around the default of each optimizer",
    )
    parser.add_argument("--seeds", type=_count, metavar="N", help="runs for each rate (3)")
    parser.add_argument("--steps", type=_count, metavar="N", help="steps of each run")
    parser.add_argument("--quick", action="store_true", help="fewer rates and seeds")
    parser.add_argument("--out", default="race", help="folder of the results (race)")
    parser.add_argument(
        "--fresh", action="store_true", help="repeat the finished runs found in --out"
    )
    parser.add_argument("--list", action="store_true", help="list problems and optimizers and exit")
    return parser


def _rate(text: str) -> float:
    rate = float(text)
    if not 0 < rate < float("inf"):
        raise argparse.ArgumentTypeError(f"a learning rate must be positive, got {text}")
    return rate


def _count(text: str) -> int:
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"must be a positive whole number, got {text}")
    return int(text)


def _names(given: Iterable[str]) -> list[str]:
    """Names that are separated by commas or spaces, each once."""
    return list(dict.fromkeys(part for name in given for part in name.split(",") if part))


def _list() -> None:
    print("problems")
    for name, make in PROBLEMS.items():
        when = "" if name in DEFAULT_PROBLEMS else " Only if named."
        print(f"  {name:20} {(make.__doc__ or '').splitlines()[0]}{when}")
    for title, names in (("optimizers", CATALOG), ("with --replicas, or if named", DISTRIBUTED)):
        print(title)
        for name, entry in names.items():
            print(f"  {name:20} {entry.original or ''}".rstrip())


class _Screen:
    """A progress bar: current optimizer and time left; plain lines without a terminal."""

    def __init__(self):
        self.console = Console(width=None if sys.stdout.isatty() else 140)
        self.bar = Progress(
            TextColumn("{task.description:32}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}"),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self.found = 0
        self.task = self.bar.add_task("compiling", total=None, left="")

    def __enter__(self):
        self.bar.start()
        return self

    def __exit__(self, *unused):
        self.bar.stop()

    def show(self, progress: session.Progress) -> None:
        self.found = progress.found
        left = "" if progress.seconds_left is None else f"{_minutes(progress.seconds_left)} left"
        at = f"{progress.optimizer} on {progress.problem}" if progress.optimizer else "done"
        self.bar.update(
            self.task, completed=progress.done, total=progress.total, description=at, left=left
        )
        if not self.console.is_terminal:
            print(f"[{progress.done}/{progress.total}] {at} {left}".rstrip(), flush=True)

    def leaderboard(self, document: Any) -> None:
        for problem in document["problems"]:
            rows = report.table(document, problem)
            if not rows:
                continue
            caption = escape(report.headline(document, problem))
            table = Table(title=escape(problem), caption=caption, title_justify="left")
            for name in rows[0]:
                table.add_column(escape(name), justify="left" if name == "optimizer" else "right")
            for row in rows:
                table.add_row(*map(escape, row.values()))
            self.console.print(table)
        for line in report.skipped(document):
            self.console.print(f"skipped: {line}", markup=False)


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


if __name__ == "__main__":
    sys.exit(main())
