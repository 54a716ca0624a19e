"""For pytest: notes the seconds of each test, or runs chosen tests in the order given.

``MUTANTS_SECONDS`` names the file for the seconds, ``MUTANTS_CHOSEN`` one with the chosen tests.
"""

import json
import os
import pathlib
import time

import pytest

TIME_LIMIT = "the time for this mutant is over"
_SECONDS = os.environ.get("MUTANTS_SECONDS")
_CHOSEN = os.environ.get("MUTANTS_CHOSEN")
_LIMIT = float(os.environ.get("MUTANTS_LIMIT", "inf"))  # seconds; then no test is begun
_seconds: dict[str, float] = {}
_begun = time.monotonic()


def pytest_runtest_logreport(report):
    """Setup, call and teardown together."""
    _seconds[report.nodeid] = _seconds.get(report.nodeid, 0.0) + report.duration


def pytest_sessionfinish(session):
    """Workers of pytest-xdist report to the main process, which writes."""
    if _SECONDS and not hasattr(session.config, "workerinput"):
        pathlib.Path(_SECONDS).write_text(json.dumps(_seconds))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Sorts; the tests of a file that are together stay together."""
    if _CHOSEN:
        rank = {name: i for i, name in enumerate(json.loads(pathlib.Path(_CHOSEN).read_text()))}
        items[:] = sorted((x for x in items if x.nodeid in rank), key=lambda x: rank[x.nodeid])


def pytest_runtest_protocol(item, nextitem):
    """Ends a run that takes too long."""
    del nextitem
    if time.monotonic() - _begun > _LIMIT:
        item.session.shouldstop = TIME_LIMIT
