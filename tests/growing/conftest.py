"""What the tests of growing tables share."""

import jax
import pytest


@pytest.fixture
def eager():
    """Nothing is compiled: there are many optimizers, and each makes several programs."""
    with jax.disable_jit():
        yield
