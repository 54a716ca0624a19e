"""The command ``optzoo race``."""

import argparse
import contextlib
import dataclasses
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from ..catalog import CATALOG, DISTRIBUTED
from ..core.terminal import until_closed
from ..race import report, session
from .advice import advice
from .entrants import REPLICAS
from .problems import DEFAULT_PROBLEMS, PROBLEMS
from .runner import Settings

# A dense model and embeddings; optimizers of all families.
_QUICK_PROBLEMS = "digits", "words"
_QUICK = (
    "adadelta", "adagrad", "adam", "adamax", "amsgrad", "blocked_shampoo", "ftrl",
    "gradient_descent", "lars", "lazy_adam", "momentum", "nadam", "rmsprop", "row_wise_adagrad",
    "soap", "sparse_adamw",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.list:
        _list()
        return 0
    optimizers = _QUICK if args.quick else CATALOG
    names = _names(args.optimizers or (["adam", *DISTRIBUTED] if args.replicas else optimizers))
    if any(":" in name for name in names):
        sys.path.insert(0, os.getcwd())  # for a module beside the results
    try:
        rates = None if args.rates is None else _rates(args.rates)
    except ValueError as error:
        parser.error(f"argument --rates: {error}")
    settings = Settings(rates=rates, steps=args.steps)
    usual = _QUICK_PROBLEMS if args.quick else DEFAULT_PROBLEMS
    if args.quick:
        settings = dataclasses.replace(settings, num_rates=4, extensions=1, seeds=2)
    given = {"num_rates": args.num_rates, "seeds": args.seeds}
    settings = dataclasses.replace(settings, **{k: v for k, v in given.items() if v})
    try:
        problems, _ = session.check(_names(args.problem or usual), names, settings)
    except ValueError as error:
        parser.error(str(error))
    page = f"{args.out}/index.html"
    screen = _Screen()
    try:
        with _signals_raise(), screen:
            document = session.run(
                problems,
                names,
                settings=settings,
                out=args.out,
                fresh=args.fresh,
                watch=screen.show,
            )
    except BrokenPipeError:  # of the output
        raise
    except OSError as error:
        parser.error(f"--out {args.out} cannot be written: {error}")
    except KeyboardInterrupt as stop:
        print(f"\nstopped; {page} shows the finished runs, and the same command resumes the race")
        return 128 + (stop.number if isinstance(stop, _Stopped) else signal.SIGINT)
    screen.leaderboard(document)
    print(f"\nall ranks, times and metrics are in {args.out}/leaderboard.md")
    if screen.found:
        print(f"runs reused from {args.out}: {screen.found}; --fresh repeats them")
    screen.advice(document)
    print(f"\nthe results are in {page}")
    return 0


class _Stopped(KeyboardInterrupt):
    """A signal that ends a race as Ctrl-C does."""

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """Raises _Stopped at signals that end a process or its terminal, unless they are ignored."""

    def stop(number: int, _: Any) -> None:
        raise _Stopped(number)

    before = {}
    if (
        threading.current_thread() is threading.main_thread()
    ):  # Python allows it in the main thread only
        found = [getattr(signal, name, None) for name in ("SIGTERM", "SIGHUP")]
        before = {s: signal.getsignal(s) for s in found if s is not None}
    before = {s: handler for s, handler in before.items() if handler == signal.SIG_DFL}
    try:
        for number in before:
            signal.signal(number, stop)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="optzoo race",
        description="Compares all optimizers on the same models and real data.",
        epilog="Commas or spaces separate names and rates: --optimizers adam,ftrl --rates 1 0.1",
    )
    many = {"nargs": "+", "metavar": ("NAME", ",NAME")}
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
    rates = parser.add_mutually_exclusive_group()
    rates.add_argument(
        "--rates",
        nargs="+",
        metavar=("RATE", ",RATE"),
        help="the learning rates to try, such as 1,0.1,0.01, instead of a grid around the default "
        "of each optimizer; write a single integer rate with a point, such as 3.0",
    )
    rates.add_argument("--num-rates", type=_count, metavar="N", help="size of that grid (5)")
    parser.add_argument("--seeds", type=_count, metavar="N", help="runs for each rate (3)")
    parser.add_argument("--steps", type=_count, metavar="N", help="steps of each run")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="4 rates, 2 seeds, and by default the problems digits and words and 16 optimizers",
    )
    parser.add_argument("--out", default="race", help="folder for the results (race)")
    parser.add_argument(
        "--fresh", action="store_true", help="repeat the finished runs found in --out"
    )
    parser.add_argument("--list", action="store_true", help="list problems and optimizers and exit")
    return parser


def _rates(given: Sequence[str]) -> tuple[float, ...]:
    """The learning rates.

    Raises:
        ValueError: if a rate is invalid, or a single integer, which may be meant as a number of
            rates.
    """
    texts = _names(given)
    rates = tuple(map(float, texts))
    for text, rate in zip(texts, rates, strict=True):
        if not 0 < rate < float("inf"):
            raise ValueError(f"a learning rate must be positive, got {text}")
    if not rates:
        raise ValueError("--rates needs at least one learning rate")
    if len(texts) == 1 and texts[0].isdecimal():
        raise ValueError(
            f"--rates {texts[0]} is ambiguous: write --rates {texts[0]}.0 for this learning rate, "
            f"or --num-rates {texts[0]} for {texts[0]} rates"
        )
    return rates


def _count(text: str) -> int:
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text}")
    return int(text)


def _names(given: Iterable[str]) -> list[str]:
    """Names that are separated by commas or spaces, without duplicates."""
    return list(dict.fromkeys(part for name in given for part in name.split(",") if part))


def _list() -> None:
    print("problems")
    for name, make in PROBLEMS.items():
        when = "" if name in DEFAULT_PROBLEMS else " Only if named."
        print(f"  {name:20} {(make.__doc__ or '').splitlines()[0]}{when}")
    for title, names in (("optimizers", CATALOG), ("with --replicas, or by name", DISTRIBUTED)):
        print(title)
        for name, entry in names.items():
            print(f"  {name:20} {entry.original or ''}".rstrip())


class _Screen:
    """A progress bar with the optimizer and the time left; plain lines without a terminal."""

    def __init__(self):
        self.console = Console(highlight=False)
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}"),
            console=self.console,
            expand=True,
            disable=not self.console.is_terminal,
        )
        self.found = 0
        self.task = self.bar.add_task("compiling", total=None, left="")
        self.is_announced = False

    def __enter__(self):
        self.bar.start()
        return self

    def __exit__(self, *unused):
        self.bar.stop()

    def show(self, progress: session.Progress) -> None:
        if not self.is_announced:
            self.is_announced = True
            self._announce(progress)
        self.found = progress.found
        left = f"{_minutes(progress.seconds_left)} left" if progress.optimizer else ""
        at = f"{progress.optimizer} on {progress.problem}" if progress.optimizer else "done"
        self.bar.update(
            self.task, completed=progress.done, total=progress.total, description=at, left=left
        )
        if not self.console.is_terminal:
            print(f"[{progress.done}/{progress.total}] {at} {left}".rstrip(), flush=True)

    def _announce(self, progress: session.Progress) -> None:
        """Prints the estimated time, and how to stop, resume and shorten the race."""
        if runs := progress.total - progress.done:
            self._print(
                f"{runs} runs, estimated time {_minutes(progress.seconds_left)} minutes on two "
                f"idle cores, up to {_minutes(_BUSY * progress.seconds_left)} on busy ones. "
                "Ctrl-C keeps finished runs, and the same command resumes the race. To shorten "
                "it, use --quick, or fewer names after --problem and --optimizers."
            )

    def leaderboard(self, document: Any) -> None:
        """Prints the best optimizers on each problem, with the columns that fit."""
        for problem in document["problems"]:
            rows = report.table(document, problem)
            if not rows:
                continue
            columns = _fitting(rows, self.console.width)
            shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
            for name in columns:
                justify = "left" if name == "optimizer" else "right"
                shown.add_column(escape(name), justify=justify, overflow="fold")
            for row in rows[:_ROWS]:
                shown.add_row(*(escape(row[name]) for name in columns))
            self._print(f"\n{problem}: {report.headline(document, problem)}")
            self.console.print(shown)
            if len(rows) > _ROWS:
                self._print(f"and {len(rows) - _ROWS} more")
        for line in report.skipped(document):
            self._print(f"skipped: {line}")

    def advice(self, document: Any) -> None:
        for first, *others in advice(document):
            self.console.print()
            self._print(first, style="bold")
            if others:
                self._print(" ".join(others))

    def _print(self, text: str, **more: Any) -> None:
        self.console.print(text, markup=False, **more)


# The number of rows of a table that are shown in a terminal.
_ROWS = 6
# A race of 5:45 minutes on quiet cores took 15 to 20 minutes on busy ones.
_BUSY = 3.5
# The columns of a narrow terminal, the most important one first; then all others.
_FIRST = "#", "optimizer", "loss", "rate", "µs/step", "steps to target"


def _fitting(rows: Sequence[report.Row], width: int) -> list[str]:
    """The columns that fit into the width, in the order of the table."""
    names, chosen = list(rows[0]), set()
    for name in sorted(names, key=lambda n: _FIRST.index(n) if n in _FIRST else len(_FIRST)):
        needed = max(cell_len(text) for text in (name, *(row[name] for row in rows[:_ROWS])))
        if needed <= width or name in _FIRST[:2]:
            chosen.add(name)
            width -= needed + 2
    return [name for name in names if name in chosen]


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


if __name__ == "__main__":
    sys.exit(until_closed(main))
