"""Optax's tests run as optax runs them: less strictly than ours. A skipped one is a failure."""

import jax
import pytest

RANKS = "jax_numpy_rank_promotion"


@pytest.fixture(autouse=True)
def as_in_optax():
    """Ranks are promoted, and whatever flags a test changes are as before after it."""
    before = {name: getattr(jax.config, name) for name in ("jax_enable_x64", RANKS)}
    jax.config.update(RANKS, "allow")
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """What does not apply is to be in the table of exclusions."""
    report = yield
    if report.skipped:
        report.outcome = "failed"
        report.longrepr = f"skipped by optax: {report.longrepr}"
    return report
