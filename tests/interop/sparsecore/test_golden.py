"""What is lowered, run row by row on the CPU, against records of TensorFlow 1 and RETURNN."""

import pytest

import optzoo
from tests import golden
from tests.golden.test_golden import tolerance

from . import lowered

ROW_WISE = [n for n, r in lowered.records().items() if r.meta["optimizer"] not in lowered.REFUSED]
OTHERS = sorted(lowered.records().keys() - set(ROW_WISE))


@pytest.fixture(autouse=True)
def wheel(monkeypatch):
    lowered.pretend(monkeypatch)


def test_most_optimizers_with_sparse_records_are_row_wise():
    assert len(ROW_WISE) == 43
    assert len({lowered.records()[name].meta["optimizer"] for name in ROW_WISE}) == 17


@pytest.mark.parametrize("name", ROW_WISE)
def test_the_stored_stablehlo_follows_the_original(name):
    """That which the public wheel lowered: ``make_stablehlo.py``."""
    record = lowered.records()[name]
    spec = optzoo.interop.sparsecore.sparsecore(golden.build(record.meta))
    got = lowered.follow(record, spec, lambda width: lowered.stored()[name][str(width)])
    assert len(got) == 2 * (1 + len(spec.slot_variables_initializers()))
    assert lowered.error(got, record) < 1e-6
    assert golden.worst(got, record).error < tolerance(record.meta)


@pytest.mark.parametrize("name", [name for name in ROW_WISE if "-sparse-" in name])
def test_what_is_lowered_now_follows_the_original(name):
    """By the wheel where it is installed, otherwise as the wheel does it."""
    record = lowered.records()[name]
    spec = optzoo.interop.sparsecore.sparsecore(golden.build(record.meta))
    got = lowered.follow(record, spec, lambda width: lowered.lower(spec, width))
    assert lowered.error(got, record) < 1e-6


@pytest.mark.parametrize("name", OTHERS)
def test_others_are_refused(name):
    meta = lowered.records()[name].meta
    with pytest.raises(ValueError, match=lowered.REFUSED[meta["optimizer"]]):
        optzoo.interop.sparsecore.sparsecore(golden.build(meta))
