"""The counts of docs/reliability.md agree with what the tests read."""

import functools

from . import counts, golden
from .accelerators.facts import record
from .interop.sparsecore import lowered


@functools.cache
def numbers():
    return {what: count() for what, count, _ in counts.COUNTS}


def number(start):
    [found] = [n for what, n in numbers().items() if what.startswith(start)]
    return found


def test_nothing_is_counted_as_none():
    assert len(numbers()) == len(counts.COUNTS)
    assert all(found not in (0, "more than 0") for found in numbers().values()), numbers()


def test_counts_are_those_of_the_readers():
    assert number("runs of the optimizers of TensorFlow") == len(golden.RECORDS)
    assert number("programs for TPU") == len(record.read(record.FACTS).keys() - {"versions"})
    assert number("of the runs above") == len(lowered.stored().keys() - {"versions"})


def test_numbers_are_rounded_down():
    assert [counts._hundreds(n) for n in (1700, 1799)] == ["more than 1,700"] * 2
