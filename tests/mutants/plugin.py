"""A pytest plugin: lists all tests and runs the quick ones, or runs chosen tests in order.

``MUTANTS_TESTS`` is the file for the list, ``MUTANTS_CHOSEN`` the file with the chosen tests.
"""

import json
import os
import pathlib
import time

import pytest

TIME_LIMIT = "the time for this mutant is over"
_TESTS = os.environ.get("MUTANTS_TESTS")
_CHOSEN = os.environ.get("MUTANTS_CHOSEN")
_LIMIT = float(os.environ.get("MUTANTS_LIMIT", "inf"))  # seconds; then no test is begun
_IS_FIRST = os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0"  # or there are no workers
_begun = time.monotonic()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Records and removes full tests; or sorts chosen tests."""
    if _CHOSEN:
        rank = {name: i for i, name in enumerate(json.loads(pathlib.Path(_CHOSEN).read_text()))}
        items[:] = sorted((x for x in items if x.nodeid in rank), key=lambda x: rank[x.nodeid])
        return
    is_full = {item.nodeid: item.get_closest_marker("full") is not None for item in items}
    if _IS_FIRST:
        pathlib.Path(_TESTS).write_text(json.dumps(is_full))
    items[:] = [item for item in items if not is_full[item.nodeid]]


def pytest_runtest_protocol(item, nextitem):
    """Ends a run that takes too long."""
    del nextitem
    if time.monotonic() - _begun > _LIMIT:
        item.session.shouldstop = TIME_LIMIT
