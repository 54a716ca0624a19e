"""skip_spikes follows OLMo-core's class step by step; ``make_skip_spikes.py`` has the records."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optzoo

RECORDS = np.load(pathlib.Path(__file__).with_name("skip_spikes.npz"))
CASES = sorted({name.split("/")[0] for name in RECORDS})


def of_case(case):
    names = "losses", "norms", "skipped", "skipped_all", "arguments"
    return (RECORDS[f"{case}/{name}"] for name in names)


def followed(case):
    """Which steps are skipped, and which must be."""
    losses, norms, skipped, _, (window, deviations) = of_case(case)
    on = ("loss", "norm") if len(norms) else "loss"
    tx = optzoo.skip_spikes(optax.sgd(1.0), window=int(window), deviations=float(deviations), on=on)
    norms = norms if len(norms) else np.ones_like(losses)

    def step(state, now):
        loss, norm = now
        before = state.num_skipped
        update, state = tx.update(norm[None], state, value=loss)
        return state, (state.num_skipped - before, update[0])

    state, (got, updates) = jax.lax.scan(step, tx.init(jnp.zeros(1)), (losses, norms))
    finite = np.isfinite(losses) & np.isfinite(norms)
    want = np.where(finite, skipped, True)
    np.testing.assert_array_equal(updates, np.where(want, 0, -norms))
    assert state.num_skipped == want.sum() and state.count == finite.sum()
    return np.asarray(got, bool), want


@pytest.mark.parametrize("case", CASES)
def test_the_same_steps_are_skipped(case):
    got, want = followed(case)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("case", CASES)
def test_the_original_skips_all_steps_while_a_value_that_is_not_finite_is_in_its_window(case):
    """What the docstring says of it; minus infinity is not above the mean, so it is kept."""
    losses, norms, some, every, (window, _) = of_case(case)
    finite = np.isfinite(losses) & (np.isfinite(norms) if len(norms) else True)
    window, least = int(window), max(2, int(window) // 2) - 1
    for t in range(len(losses)):
        before = finite[max(0, t - window) : t]
        if t < least:
            assert not every[t]
        elif not before.all() or (not finite[t] and losses[t] != -np.inf):
            assert every[t]
    first = np.argmin(finite)
    np.testing.assert_array_equal(every[:first], some[:first])
