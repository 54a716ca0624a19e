"""The fuzzer: its cases, its comparison, and the stored cases."""

import numpy as np
import pytest

from . import FOLDER, Record, fuzz
from .make_fuzz import SETTINGS, case_of

FILE = FOLDER.with_name("fuzz_records") / "0-00000.xz"
STORED = [record for record in fuzz.records(FILE) if "refused" not in record.meta]


def test_a_case_is_a_function_of_seed_and_index():
    for index in range(20):
        (case, data), (again, same) = case_of(3, index), case_of(3, index)
        assert case == again
        assert data.keys() == same.keys()
        for name in data:
            np.testing.assert_array_equal(data[name], same[name])


def test_stored_cases_are_those_of_the_generator():
    """Otherwise a report of a case would name another case."""
    for record in STORED:
        seed, index = map(int, record.meta["case"].split(":"))
        case, data = case_of(seed, index)
        assert record.meta == {**case, "slots": record.meta["slots"]}
        for name, array in data.items():
            np.testing.assert_array_equal(record.arrays[name], array)


def test_the_cases_cover_all_optimizers_and_kinds():
    cases = [case_of(0, index)[0] for index in range(600)]
    assert {case["optimizer"] for case in cases} == SETTINGS.keys()
    assert {case["kind"] for case in cases} == {"dense", "sparse", "dup", "mixed"}
    assert {case["dtype"] for case in cases} == fuzz.EPS.keys()


def test_stored_cases_agree():
    for record, got in zip(STORED, fuzz.replay(STORED), strict=True):
        verdict = fuzz.judge(record, got)
        assert verdict.known, f"{verdict.group}\n{verdict.first}"


def record_of(theirs, exact=None, dtype="float32", gradients=None, **kwargs):
    """A run of Adam on one parameter with two elements, and what the original made of it."""
    theirs = np.asarray(theirs, dtype)
    gradients = np.ones_like(theirs) if gradients is None else np.asarray(gradients, dtype)
    meta = {"case": "0:0", "optimizer": "Adam", "kwargs": kwargs, "kind": "dense"}
    meta |= {"dtype": dtype, "steps": len(theirs), "slots": []}
    arrays = {"init/v": np.ones(2, dtype), "grad/v": gradients, "param/v": theirs}
    arrays["exact/param/v"] = np.asarray(theirs if exact is None else exact, np.float64)
    return Record(meta, arrays)


def test_finds_a_planted_difference():
    record = record_of([[1.0, 2.0], [1.5, 3.0], [2.0, 4.0]])
    ours = record.arrays["param/v"].copy()
    assert fuzz.judge(record, {"param/v": ours}).group == "agree"
    ours[1:, 1] *= 1 + 1e-5
    verdict = fuzz.judge(record, {"param/v": ours})
    assert not verdict.known
    assert verdict.group == "Adam float32 dense param number->number"
    assert (verdict.first.array, verdict.first.step, verdict.first.place) == ("param/v", 1, (1,))
    assert "0:0" in str(verdict.first)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, 0.0])
def test_finds_what_is_no_number(wrong):
    record = record_of([[1.0, 2.0], [1.5, 3.0]])
    ours = record.arrays["param/v"].copy()
    ours[1, 0] = wrong
    assert not fuzz.judge(record, {"param/v": ours}).known


def test_errors_are_relative_to_the_rounding_of_the_original():
    theirs = np.array([[1.0, 2.0], [1.5, 3.0]])
    ours = {"param/v": (theirs * (1 + 2e-5)).astype(np.float32)}
    assert fuzz.judge(record_of(theirs), ours).group != "agree"
    assert fuzz.judge(record_of(theirs, exact=theirs * (1 - 1e-5)), ours).group == "agree"
    # Nearer to the exact values than the original is.
    assert fuzz.judge(record_of(theirs, exact=theirs * (1 + 4e-5)), ours).group == "agree"


def test_a_documented_difference_is_counted_apart():
    theirs, gradients = [[np.nan, 0.9], [np.nan, 0.8]], [[0.0, 1.0], [0.0, 1.0]]
    ours = {"param/v": np.array([[1.0, 0.9], [1.0, 0.8]], np.float32)}
    verdict = fuzz.judge(record_of(theirs, gradients=gradients, epsilon=0.0), ours)
    assert verdict.known and verdict.group == "documented: zero divided by zero is zero"
    # With an epsilon NaN would be a surprise.
    assert not fuzz.judge(record_of(theirs, gradients=gradients, epsilon=0.1), ours).known
