"""Every optimizer against records of TensorFlow 1.15.5 and RETURNN."""

import collections
import functools

import pytest

from optzoo import CATALOG

from . import RECORDS, float32_inside, follow_all, load, short_name, worst

# The first step of this case replaces a start of 2.6 by about 1e-4. The update is added, and x +
# (new - x) has the rounding error of x: 1.7e-4 of the new value.
REPLACES_THE_START = "AdagradDA-lr0.1-dense-f32"


def tolerance(meta):
    """The precision of the original."""
    if meta["case"] == REPLACES_THE_START:
        return 1.8e-4
    if meta["dtype"] == "float32":
        # The rounding error of the record, but at least one unit in the last place of the largest
        # element, relative to a thousandth of it, the smallest scale of errors. A few originals
        # have no run in float64 to measure their rounding; for others it is about 3e-5.
        return max(3 * meta.get("rounding", 3e-5), 2.0**-24 / 1e-3)
    return 1e-5 if float32_inside(meta) else 1e-10


@functools.cache
def groups():
    """The names of the records by optimizer and dtype."""
    found = collections.defaultdict(list)
    for name in RECORDS:
        meta = load(name).meta
        found[meta["optimizer"], meta["dtype"]].append(name)
    return found


@functools.cache
def followed(optimizer, dtype):
    """What we compute for the records of a group, in one program."""
    names = groups()[optimizer, dtype]
    return dict(zip(names, follow_all([load(name) for name in names]), strict=True))


# In float64 first, where the tolerance is small.
CASES = sorted((tuple(name.rsplit("-", 1)) for name in RECORDS), key=lambda case: case[1] == "f32")


@pytest.mark.every_value
@pytest.mark.parametrize(("case", "bits"), CASES)
def test_follows_the_original(case, bits, x64):
    name = f"{case}-{bits}"
    record = load(name)
    optimizer, dtype = record.meta["optimizer"], record.meta["dtype"]
    with x64(dtype == "float64"):
        error, where = worst(followed(optimizer, dtype)[name], record)
    assert error <= tolerance(record.meta), f"{name}: off by {error:.1e} in {where}"


def test_every_optimizer_has_records():
    recorded = [load(name).meta for name in RECORDS]
    for entry in CATALOG.values():
        if entry.original is None:
            continue  # without an original
        name = short_name(entry.original)
        wanted = {"dense", "sparse", "dup"}
        if entry.original.startswith("returnn."):
            wanted -= {"dup"}  # RETURNN does not sum duplicates
        if name == "AMSGrad":
            wanted -= {"sparse"}  # the original refuses rows
        if name == "GGT":
            wanted -= {"sparse", "dup"}  # the original refuses rows
        assert wanted <= {meta["kind"] for meta in recorded if meta["optimizer"] == name}, name
