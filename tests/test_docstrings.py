"""Every public name has an example in its docstring, and every example runs.

The direction of an optimizer has none, but the name of the optimizer, which has one.
"""

import doctest
import importlib.util
import inspect
import re

import jax
import numpy as np
import pytest

from optzoo import catalog
from tests.public import NAMES, home

DIRECTION = re.compile(r"The direction of :func:`(optzoo\.\w+)`.*")
# Data and types of other modules have no docstring of their own.
THINGS = {name: thing for name, thing in NAMES.items() if home(thing)}
if importlib.util.find_spec("jax_tpu_embedding") is None:  # there are wheels for Linux alone
    del THINGS["optzoo.interop.sparsecore.sparsecore"]
OF_OPTIMIZERS = {
    name: found[1]
    for name, thing in THINGS.items()
    if (found := DIRECTION.fullmatch(inspect.getdoc(thing) or ""))
}


def examples(thing):
    """The example of a docstring, to be run in an empty namespace."""
    doc = inspect.getdoc(thing) or ""
    return doctest.DocTestParser().get_doctest(doc, {}, thing.__name__, None, 0)


def test_directions_are_those_of_optimizers():
    assert {*OF_OPTIMIZERS.values()} <= THINGS.keys() - OF_OPTIMIZERS.keys()
    assert all(name.startswith("optzoo.transforms.scale_by_") for name in OF_OPTIMIZERS)


@pytest.mark.parametrize("name", [name for name in THINGS if name not in OF_OPTIMIZERS])
def test_example_runs(name):
    found = examples(THINGS[name])
    assert "Example:" in inspect.getdoc(THINGS[name])
    assert any(example.want for example in found.examples), f"{name} has no example with a result"
    known = dict(catalog.CATALOG)
    try:
        with (
            jax.numpy_rank_promotion("allow"),  # as everywhere but in our tests
            np.printoptions(precision=4, suppress=True),
        ):
            report: list[str] = []
            results = doctest.DocTestRunner(verbose=False).run(found, out=report.append)
    finally:
        catalog.CATALOG.clear()
        catalog.CATALOG.update(known)
    assert results.failed == 0, "".join(report)


def test_few_names_have_no_docstring():
    without = {name for name, thing in NAMES.items() if not home(thing)}
    tables = {
        "optzoo.CATALOG",
        "optzoo.catalog.DISTRIBUTED",
        "optzoo.catalog.WRAPPERS",
        "optzoo.race.PROBLEMS",
    }
    kinds = {f"optzoo.rules.{kind}" for kind in ("Exact", "NotNegative", "Signed", "Sum")}
    assert without == {*tables, *kinds, "optzoo.replicas.ReplicaState", "optzoo.state.Slot"}
