"""For pytest: notes what each test costs, or runs chosen tests in the order given.

``MUTANTS_TESTS`` names the file for the former, ``MUTANTS_CHOSEN`` one with the chosen tests.
"""

import collections
import json
import os
import pathlib
import time

import pytest

from .. import costs

TIME_LIMIT = "the time for this mutant is over"
_TESTS = os.environ.get("MUTANTS_TESTS")
_CHOSEN = os.environ.get("MUTANTS_CHOSEN")
_LIMIT = float(os.environ.get("MUTANTS_LIMIT", "inf"))  # seconds; then no test is begun
_LONGEST = 30.0  # seconds of a test; longer ones are not for mutants
_tests = collections.defaultdict[str, dict](
    lambda: {"seconds": 0.0, "full": False, "failed": False}
)
_begun = time.monotonic()


def pytest_runtest_logreport(report):
    """Seconds of all phases, whether only ``make test-full`` runs the test, whether it fails."""
    noted = _tests[report.nodeid]
    noted["seconds"] += report.duration
    noted["full"] = "full" in report.keywords
    noted["failed"] |= report.failed


def pytest_sessionfinish(session):
    """Workers of pytest-xdist report to the main process, which writes."""
    if _TESTS and not hasattr(session.config, "workerinput"):
        pathlib.Path(_TESTS).write_text(json.dumps(_tests))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Sorts; the tests of a file that are together stay together."""
    if _CHOSEN:
        rank = {name: i for i, name in enumerate(json.loads(pathlib.Path(_CHOSEN).read_text()))}
        items[:] = sorted((x for x in items if x.nodeid in rank), key=lambda x: rank[x.nodeid])
    else:
        items[:] = [x for x in items if costs.expected(x.nodeid) <= _LONGEST]


def pytest_runtest_protocol(item, nextitem):
    """Ends a run that takes too long."""
    del nextitem
    if time.monotonic() - _begun > _LIMIT:
        item.session.shouldstop = TIME_LIMIT
