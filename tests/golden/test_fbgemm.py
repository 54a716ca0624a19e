"""FBGEMM's optimizers, by its names and arguments, against records of it."""

import json

import numpy as np
import pytest

from ..selection import chosen_first
from .fbgemm.follow import FOLDER, RECORDS, arguments, by_name, follow, load, worst
from .fbgemm.verify_fbgemm import replay

# The errors of the formulas in float64: the rounding errors of the records.
ROUNDING = json.loads((FOLDER / "replay_errors.json").read_text())
HALF = [name for name in RECORDS if "fp16" in name]
SINGLE = [name for name in RECORDS if name not in HALF]
# Their gradients come another way; the formula is that of another record.
OTHER_INPUTS = ("clip", "mean", "nobag", "shared", "weighted", "d8")
FORMULAS = [name for name in SINGLE if not name.endswith(OTHER_INPUTS)]


def test_all_records_are_there():
    assert len(RECORDS) == 87 and {*RECORDS} == {*ROUNDING}
    assert len(HALF) == 7


@pytest.mark.every_value
@pytest.mark.parametrize("name", SINGLE)
def test_float32(name):
    """The error of the formulas in float32 is below 3e-5 in all records."""
    arrays, meta = load(name)
    found = follow(by_name(meta, arrays), meta, arrays)
    assert worst(found, arrays) <= ROUNDING[name] + 3e-5


@pytest.mark.parametrize("name", chosen_first(SINGLE, FORMULAS))
def test_float64_is_the_formula(name, x64):
    """So errors are those of the formulas, case by case."""
    arrays, meta = load(name)
    with x64(True):
        found = follow(by_name(meta, arrays), meta, arrays, "float64")
    steps = list(replay(arrays, meta, np.float64))
    want = {f"param/{n}": np.stack([x[n] for x, _ in steps]) for n in meta["var_names"]}
    want |= {f"slot/{s}": np.stack([kept[s] for _, kept in steps]) for s in steps[0][1]}
    assert found.keys() == want.keys()
    assert worst(found, want) < 1e-12
    assert worst(found, arrays) < 1.0001 * ROUNDING[name] + 1e-12


@pytest.mark.every_value
@pytest.mark.parametrize("name", HALF)
def test_tables_of_float16(name):
    """Each row is rounded where the original rounds it: tables are equal, and slots are float32."""
    arrays, meta = load(name)
    found = follow(by_name(meta, arrays), meta, arrays)
    for key in found:
        if key.startswith("param/"):
            assert found[key].dtype == np.float16
            np.testing.assert_array_equal(found[key], arrays[key])
        else:
            assert found[key].dtype == np.float32
    assert worst(found, arrays) < 1e-6


def test_arguments_that_the_cpu_ignores_are_known():
    """Its path for tables with one feature drops the decay, and max_norm is for GPUs."""
    dropped = [name for name in RECORDS if arguments(load(name)[1]) != load(name)[1]["kwargs"]]
    assert dropped == [
        "rowwise-decouple-global-plain",
        "rowwise-decouple-plain",
        "rowwise-l2-plain",
        "rowwise-maxnorm-plain",
        "rowwise-maxnorm-shared",
    ]
