"""Every optimizer against what TensorFlow 1.15.5 really does."""

import pytest

from optzoo import CATALOG

from . import RECORDS, follow, load, worst


def tolerance(meta):
    """As exact as the original is."""
    if meta["dtype"] == "float32":
        # The record's own rounding; at the least one unit in the last place of the largest
        # element, as seen at a thousandth of it, which is the smallest scale errors refer to.
        return max(3 * meta["rounding"], 2.0**-24 / 1e-3)
    if any(isinstance(value, dict) for value in meta["kwargs"].values()):
        return 1e-5  # schedules and sign decays are float32 in the original, whatever the dtype
    return 1e-10


@pytest.mark.parametrize("name", RECORDS)
def test_follows_tensorflow(name, x64):
    record = load(name)
    with x64(record.meta["dtype"] == "float64"):
        error, where = worst(follow(record), record)
    assert error <= tolerance(record.meta), f"{name}: off by {error:.1e} in {where}"


def test_every_optimizer_has_records():
    kinds = {(load(name).meta["optimizer"], load(name).meta["kind"]) for name in RECORDS}
    for entry in CATALOG.values():
        original = entry.original.rsplit(".", 1)[1].removesuffix("Optimizer")
        assert {(original, "dense"), (original, "sparse"), (original, "dup")} <= kinds, original
