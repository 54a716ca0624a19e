"""Fixtures of the tests of sharded tables."""

import pytest

from optzoo.sharded import row_sharding


@pytest.fixture
def several_rounds(monkeypatch):
    """With a small ``capacity_factor`` a message has room for one row of each owner."""
    monkeypatch.setattr(row_sharding, "SPREAD", 0.0)
