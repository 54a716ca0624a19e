"""What a run of the tests costs: the programs that XLA compiles, and seconds of CPU, by file.

The number of programs does not depend on how busy the machine is.
"""

import collections
import time
from typing import NamedTuple

import jax
import pytest

_COMPILED = "/jax/core/compile/backend_compile_duration"  # with those that are stored
_STORED = "/jax/compilation_cache/cache_hits"
_MOST = 10  # files that are listed


class Cost(NamedTuple):
    """Of a test, of a file, or of all."""

    programs: int = 0
    stored: int = 0  # of these, those that were read from the compilation cache
    seconds: float = 0.0  # of CPU, without the processes that a test starts

    def plus(self, other: "Cost", sign: int = 1) -> "Cost":
        """The sum, or the difference."""
        return Cost(*(a + sign * b for a, b in zip(self, other, strict=True)))


_counts = collections.Counter[str]()
jax.monitoring.register_event_duration_secs_listener(
    lambda name, seconds, **more: _counts.update([name])
)
jax.monitoring.register_event_listener(lambda name, **more: _counts.update([name]))


def _now() -> Cost:
    return Cost(_counts[_COMPILED], _counts[_STORED], time.process_time())


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    """Notes the cost before a test."""
    del nextitem
    item.stash[_BEFORE] = _now()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """The last report of a test has its cost, which pytest-xdist hands on."""
    report = yield
    if call.when == "teardown":
        report.user_properties.append(("cost", list(_now().plus(item.stash[_BEFORE], -1))))
    return report


_BEFORE = pytest.StashKey[Cost]()


def pytest_terminal_summary(terminalreporter):
    """The costs of all tests, and of the most expensive files."""
    files = collections.defaultdict(Cost)
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", ()):
                if name == "cost" and report.when == "teardown":
                    file = report.nodeid.partition("::")[0]
                    files[file] = files[file].plus(Cost(*value))
    total = Cost()
    for cost in files.values():
        total = total.plus(cost)
    terminalreporter.section("cost")
    show = lambda cost, file: terminalreporter.write_line(
        f"{cost.seconds:8.1f} {cost.programs:9} {cost.stored:9}  {file}"
    )
    terminalreporter.write_line("   CPU s  programs    stored")
    show(total, f"all {len(files)} files")
    most = sorted(files, key=lambda file: files[file].seconds, reverse=True)[:_MOST]
    for file in most:
        show(files[file], file)
