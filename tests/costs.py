"""The cost of a test run: the programs that XLA compiles, and CPU seconds, by file.

The number of programs does not depend on the load of the machine. ``make costs`` runs all tests and
records the seconds of each test function in ``costs.json``, which ``selection.py`` and
``progress.py`` read. ``make costs FILES=...`` records only the tests of these files.
"""

import collections
import functools
import json
import os
import pathlib
import re
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

RECORD = pathlib.Path(__file__).with_name("costs.json")
_UNKNOWN = 0.1  # seconds of a case of a test that is not in the record
_COMPILED = "/jax/core/compile/backend_compile_duration"  # with those that are stored
_STORED = "/jax/compilation_cache/cache_hits"
_MOST = 10  # files that are listed


class Cost(NamedTuple):
    """The cost of a test, of a file, or of all."""

    programs: int = 0
    stored: int = 0  # of these, those that were read from the compilation cache
    seconds: float = 0.0  # of CPU, with those of the processes that a test starts

    def plus(self, other: "Cost", sign: int = 1) -> "Cost":
        """The sum or difference of two costs."""
        return Cost(*(a + sign * b for a, b in zip(self, other, strict=True)))


# The record


def function_of(name: str) -> str:
    """The test function of a case. A test of optax has a class for each optimizer."""
    return re.sub(r"::([A-Za-z0-9]+Test)_\w+::", r"::\1::", name.partition("[")[0])


@functools.cache
def _recorded() -> dict:
    return json.loads(RECORD.read_text())


def expected(name: str) -> float:
    """The recorded CPU seconds of a case, including the compilation of programs."""
    return _recorded()["cases"].get(function_of(name), _UNKNOWN)


def speed() -> float:
    """The speed of tracing a small program in this process, relative to the record."""
    return _recorded()["small program"] / _small_program()


def _small_program() -> float:
    took = []
    for n in range(3):
        begun = time.process_time()
        f = lambda x, n=n: functools.reduce(lambda a, k: jnp.sin(a + k) @ a, range(100), x + n)
        jax.jit(f).lower(jnp.ones((4, 4)))
        took.append(time.process_time() - begun)
    return min(took)


def _record(costs: dict[str, Cost], *, is_part: bool = False) -> None:
    """Writes the record; for a part of the tests only theirs, at the speed of the record."""
    functions = collections.defaultdict(list)
    for name, cost in costs.items():
        functions[function_of(name)].append(cost.seconds)
    cases = {name: round(sum(s) / len(s), 3) for name, s in sorted(functions.items())}
    made = {"small program": round(_small_program(), 3), "cases": cases}
    if is_part:
        old = _recorded()
        scale = old["small program"] / made["small program"]
        new = {name: round(seconds * scale, 3) for name, seconds in cases.items()}
        made = {**old, "cases": dict(sorted({**old["cases"], **new}.items()))}
    RECORD.write_text(json.dumps(made, indent=0) + "\n")


# Counting


def pytest_addoption(parser):
    """Adds the options of ``make costs``."""
    parser.addoption("--record-costs", action="store_true", help="writes tests/costs.json")


_counts = collections.Counter[str]()
jax.monitoring.register_event_duration_secs_listener(
    lambda name, seconds, **more: _counts.update([name])
)
jax.monitoring.register_event_listener(lambda name, **more: _counts.update([name]))


def programs() -> int:
    """The number of programs that this process has compiled or read."""
    return _counts[_COMPILED]


def _now() -> Cost:
    return Cost(programs(), _counts[_STORED], sum(os.times()[:4]))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    """Records the cost before a test."""
    del nextitem
    item.stash[_BEFORE] = _now()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Stores the cost in the last report of a test, which pytest-xdist transfers."""
    report = yield
    if call.when == "teardown":
        report.user_properties.append(("cost", list(_now().plus(item.stash[_BEFORE], -1))))
    return report


_BEFORE = pytest.StashKey[Cost]()


def pytest_terminal_summary(terminalreporter):
    """Prints the costs of all tests, and of the most expensive files."""
    costs, files = {}, collections.defaultdict(Cost)
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", ()):
                if name == "cost" and report.when == "teardown":
                    costs[report.nodeid] = Cost(*value)
    for name, cost in costs.items():
        file = name.partition("::")[0]
        files[file] = files[file].plus(cost)
    total = functools.reduce(Cost.plus, costs.values(), Cost())
    terminalreporter.section("cost")
    show = lambda cost, file: terminalreporter.write_line(
        f"{cost.seconds:8.1f} {cost.programs:9} {cost.stored:9}  {file}"
    )
    terminalreporter.write_line("   CPU s  programs    stored")
    show(total, f"all {len(files)} files")
    most = sorted(files, key=lambda file: files[file].seconds, reverse=True)[:_MOST]
    for file in most:
        show(files[file], file)
    if terminalreporter.config.getoption("--record-costs"):
        source = terminalreporter.config.args_source
        _record(costs, is_part=source is pytest.Config.ArgsSource.ARGS)
