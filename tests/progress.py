"""Says first how long the tests will take on this machine, then how far they are.

The first estimate is the recorded CPU time of the tests (``costs.py``), by the speed of this
machine, and by the share of it that the last run needed: programs may be stored.
"""

import json
import pathlib
import sys
import time

import pytest

from . import costs

_LAST = pathlib.Path(sys.prefix, "tests_last_run.json")
_EVERY, _SHORT = 20.0, 0.5  # seconds between two lines in a file, and on a terminal
_LEAST = 60.0  # recorded seconds of CPU of a run from which the time of the next one is estimated


class Progress:
    """A plugin of the process that reports, not of the workers of pytest-xdist."""

    def __init__(self, config: pytest.Config):
        self._reporter = config.pluginmanager.get_plugin("terminalreporter")
        self._workers = 1
        self._left: dict[str, float] = {}  # by the name of a test, of those that are not over
        self._total, self._factor = 0.0, 1.0
        self._number, self._begun, self._shown = 0, 0.0, 0.0

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node, ids):
        """Each worker has collected all tests."""
        self._workers = node.config.getoption("numprocesses") or 1
        self._begin(ids)

    def pytest_collection_finish(self, session):
        """The same without pytest-xdist, where the main process collects nothing."""
        if session.items and not session.config.getoption("collectonly"):
            self._begin([item.nodeid for item in session.items])

    def _begin(self, names):
        if self._left:
            return
        self._left = {name: costs.expected(name) for name in names}
        self._total, self._number = sum(self._left.values()), len(self._left)
        share = json.loads(_LAST.read_text()) if _LAST.exists() else 1.0
        self._factor = share / costs.speed() / self._workers
        self._begun = self._shown = time.monotonic()
        on = "one worker" if self._workers == 1 else f"{self._workers} workers"
        self._line(f"{self._number:,} tests on {on}, about {_minutes(self._factor * self._total)}")

    @pytest.hookimpl(wrapper=True)
    def pytest_report_teststatus(self, report, config):
        """No letters: what passes is counted, and what fails has a line of its own."""
        del report
        category, letter, word = yield
        return (category, letter, word) if config.get_verbosity() > 0 else (category, "", "")

    def pytest_runtest_logreport(self, report):
        """Counts a test when it is over."""
        if report.failed:
            self._line(f"FAILED {report.nodeid}")
        if report.when == "teardown" and self._left.pop(report.nodeid, None) is not None:
            wait = _SHORT if self._reporter.isatty else _EVERY
            if time.monotonic() - self._shown > wait:
                self._show()

    def _show(self):
        self._shown = time.monotonic()
        left = sum(self._left.values())
        done = self._total - left
        # The first tests say little about the others: a quarter of all counts as estimated before.
        took, quarter = self._shown - self._begun, self._total / 4
        rate = (took + self._factor * quarter) / (done + quarter)
        self._line(
            f"{self._number - len(self._left):,} of {self._number:,} tests, "
            f"{_minutes(took)}; about {_minutes(rate * left)} left",
            is_progress=True,
        )

    def pytest_sessionfinish(self):
        """Remembers how long it took."""
        if self._total >= _LEAST and not self._left:
            took = (time.monotonic() - self._begun) * costs.speed() * self._workers / self._total
            _LAST.write_text(json.dumps(round(took, 3)))

    def _line(self, text, *, is_progress=False):
        """On a terminal a line about the progress replaces the one before."""
        if self._reporter.isatty:
            self._reporter.rewrite(text, erase=True)
            if not is_progress:
                self._reporter.write_line("")
        else:
            self._reporter.write_line(text)
            self._reporter.flush()


def _minutes(seconds):
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"
