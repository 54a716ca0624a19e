"""Exchanges in few bits: what the devices send, and that it runs beside local steps."""

import functools

import pytest

from .test_overlap import NBYTES, OVERLAP, round_of

# Bits of an element; of integers a scale of 32 bits for 512 elements is sent, too.
BITS = {"bfloat16": 16, "int8": 8 + 1 / 16, "int4": 4 + 1 / 16, "int2": 2 + 1 / 16}
report = functools.cache(lambda few: round_of("v5e:2x2", OVERLAP, exchange_dtype=few))


@pytest.mark.parametrize("few", BITS)
def test_bytes_on_the_wire(few):
    """The codes of all parts, and the codes of their sums; of numbers only the replicas' count."""
    found = {c.kind: (c.number, c.nbytes) for c in report(few).collectives}
    size = NBYTES * BITS[few] / 32
    assert found.pop("all-reduce") == (1, 4)
    assert found == {"all-to-all": (1, size), "all-gather": (1, size)}


@pytest.mark.parametrize("few", ["bfloat16", "int2"])
def test_the_sums_travel_beside_local_steps(few):
    """Without an option of the compiler, which a sum of all devices needs."""
    [overlap] = report(few).overlaps
    assert (overlap.kind, overlap.turns) == ("all-gather", OVERLAP - 1)


@pytest.mark.parametrize("few", BITS)
def test_codes_take_little_memory(few):
    assert report(few).temporaries < 4 * NBYTES
