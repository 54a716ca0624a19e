"""What the tests of wrappers share."""

import jax
import pytest


@pytest.fixture
def eager():
    """Nothing is compiled: without jit a condition or a loop would be, at each call."""
    with jax.disable_jit():
        yield
