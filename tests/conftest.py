"""Every test runs strictly (ranks are not promoted, warnings are errors) on eight devices."""

import contextlib

import jax
import pytest

from optzoo import CATALOG

from . import helpers

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(params=sorted(CATALOG))
def entry(request):
    """Each optimizer of the catalogue in turn, with a step count where it needs one."""
    entry = CATALOG[request.param]
    return entry._replace(factory=helpers.factory(entry))


@pytest.fixture
def x64():
    """A context in which float64 is, or is not, available."""

    @contextlib.contextmanager
    def context(enabled):
        before = jax.config.jax_enable_x64
        jax.config.update("jax_enable_x64", enabled)
        try:
            yield
        finally:
            jax.config.update("jax_enable_x64", before)

    return context
