"""Runs optax's tests with the settings of optax, less strict than ours. A skip is a failure."""

import jax
import pytest

RANKS = "jax_numpy_rank_promotion"


@pytest.fixture(autouse=True)
def as_in_optax():
    """Allows rank promotion, and restores the flags that a test changes."""
    before = {name: getattr(jax.config, name) for name in ("jax_enable_x64", RANKS)}
    jax.config.update(RANKS, "allow")
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Tests that do not apply must be in the table of exclusions."""
    report = yield
    if report.skipped:
        report.outcome = "failed"
        report.longrepr = f"skipped by optax: {report.longrepr}"
    return report
