"""Gradient accumulation: dtypes of the sums, steps of a schedule, NaN between updates."""

import jax.numpy as jnp
import optax

import optzoo

ASKED = ["google-deepmind/optax/issues/1567", "AI-Hypercomputer/maxtext/pull/3428"]
ASKED += ["AI-Hypercomputer/maxtext/pull/3452"]
ANSWERED = "partly: schedules count updates in both, which you have to know"
EVERY = 4


def found(wrap):
    """The dtype of sums, the step of a schedule at the second update, an update by NaN."""
    x = jnp.zeros(2, jnp.bfloat16)
    tx = wrap(optax.sgd(lambda count: count + 1.0))
    state = start = tx.init(x)
    for _ in range(2 * EVERY):
        update, state = tx.update(x + 1, state, x)
    sums = getattr(state, "acc_grads", None)
    sums = getattr(state, "sums", None) if sums is None else sums
    within, _ = tx.update(x + jnp.nan, start, x)
    return (
        f"sums in {sums.dtype}; a schedule is at step {-int(update[0]) - 1} in micro-step "
        f"{2 * EVERY}; the update of a micro-step by NaN is {float(abs(within[0]))}"
    )


def with_optax():
    """Zero times NaN is NaN."""
    return f"`MultiSteps`: {found(lambda tx: optax.MultiSteps(tx, EVERY))}"


def with_optzoo():
    """Also with `rows=`, for row-sparse gradients."""
    return f"`accumulate`: {found(lambda tx: optzoo.accumulate(tx, EVERY, use_mean=True))}"


if __name__ == "__main__":
    print("optax: ", with_optax(), "\noptzoo:", with_optzoo())
