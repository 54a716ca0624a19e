"""Backup workers under stragglers.

40 workers compute gradients of a perceptron on handwritten digits. The time of a gradient is 1
second and an exponential delay with mean 0.1, and in one of 20 cases ten times that. An update uses
the first R gradients that are fresh; a worker that is late finds its gradient dropped, and begins
again with the newest parameters. With R = 40 every update waits for the slowest.

The simulation keeps a clock for each worker, and tells ``sync_replicas`` which gradients arrived,
in which order, and how old they are; the optimizer decides which to use.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optzoo
from optzoo.race.problems import digits

PAPER = "Chen et al. 2016, [backup workers](https://arxiv.org/abs/1604.00981)"
CLAIM = "a few backup workers shorten the time of an update, and so the time to a loss"
PUBLISHED = "100 workers: fastest with the first 96 gradients; the last few take most of the time"

WORKERS, BATCH = 40, 4


def simulate(aggregate, updates, workers=WORKERS, seed=0):
    """The time of each update, and what arrived for it: arrays with a first axis over updates."""
    random = np.random.default_rng(seed)
    seconds = lambda: (1 + 0.1 * random.exponential()) * (10 if random.random() < 0.05 else 1)
    done = np.array([seconds() for _ in range(workers)])  # when each has its next gradient
    read_at, times, masks = np.zeros(workers, np.int32), [], []
    for update in range(updates):
        arrived, fresh = np.zeros(workers, bool), np.zeros(workers, bool)
        arrival, age = np.zeros(workers), np.zeros(workers, np.int32)
        while fresh.sum() < aggregate:
            i = np.where(fresh, np.inf, done).argmin()  # the next to arrive
            now = done[i]
            arrived[i], arrival[i], age[i] = True, now, read_at[i]
            if read_at[i] == update:
                fresh[i] = True
            else:  # too late: begins again
                read_at[i], done[i] = update, now + seconds()
        for i in np.flatnonzero(fresh):
            read_at[i], done[i] = update + 1, now + seconds()
        times.append(now)
        priority = (arrival - now).astype(np.float32)
        masks.append({"arrived": arrived, "priority": priority, "local_step": age})
    return np.array(times), jax.tree.map(lambda *rows: np.stack(rows), *masks)


def losses(problem, aggregate, masks, rate, every):
    """The validation loss after every so many updates; updates made, and gradients dropped."""
    tx = optzoo.sync_replicas(optzoo.momentum(rate, 0.9), aggregate, WORKERS, hold=False)
    train, valid = (jax.tree.map(jnp.asarray, part) for part in (problem.train, problem.valid))
    updates = len(masks["arrived"])
    ids = np.random.default_rng(1).integers(len(train[0]), size=(updates, WORKERS, BATCH))
    by_stretch = lambda a: jnp.asarray(a).reshape(-1, every, *a.shape[1:])
    turns = jax.tree.map(by_stretch, {"ids": ids, "masks": masks})

    def step(params, state, ids, masks):
        batch = jax.tree.map(lambda a: a[ids], train)
        value, grads = jax.value_and_grad(problem.loss)(optzoo.replicas.per_replica(params), batch)
        updates, state = tx.update(grads, state, params, **masks)
        return optax.apply_updates(params, updates), state, value

    def update(carry, turn):
        return optzoo.replicas.map_over_replicas(step)(*carry, turn["ids"], turn["masks"])[:2], None

    def stretch(carry, turn):
        carry, _ = jax.lax.scan(update, carry, turn)
        return carry, problem.loss(optzoo.eval_params(*carry), valid)

    params = problem.init(jax.random.key(0))
    start = optzoo.replicas.replicate(params, tx.init(params), WORKERS)
    (_, state), found = jax.jit(lambda start, turns: jax.lax.scan(stretch, start, turns))(
        start, turns
    )
    return found, int(state.replicated.global_step), int(state.replicated.dropped)


def run(aggregates=(40, 38, 36, 34, 30, 20), updates=400, rate=0.1, every=10, target=0.15):
    """The time of an update and the loss, by the number of gradients of an update."""
    problem, result = digits(), {}
    for aggregate in aggregates:
        times, masks = simulate(aggregate, updates)
        found, made, dropped = losses(problem, aggregate, masks, rate, every)
        found, at = np.asarray(found), times[every - 1 :: every]
        reached = at[found <= target]
        result[str(aggregate)] = {
            "updates made": made,
            "gradients dropped": dropped,
            "seconds of an update": float(times[-1] / updates),
            "loss": float(found[-1]),
            "seconds to target": float(reached[0]) if len(reached) else None,
            "times": at.tolist(),
            "losses": found.tolist(),
        }
    return {"workers": WORKERS, "updates": updates, "target": target, "aggregate": result}


def holds(result):
    """Whether some backup workers reach the target sooner than none."""
    alone, *others = (r["seconds to target"] for r in result["aggregate"].values())
    return min(seconds for seconds in others if seconds) < alone


def here(result):
    """One line about the result."""
    cells = [
        f"first {aggregate}: {r['seconds of an update']:.2f} s, loss {r['loss']:.3f}, "
        + (
            f"{r['seconds to target']:.0f} s to {result['target']}"
            if r["seconds to target"]
            else "-"
        )
        for aggregate, r in result["aggregate"].items()
    ]
    return f"{result['workers']} workers, {result['updates']} updates; " + "; ".join(cells)


def draw(result, figure):
    """Loss over updates, and over time."""
    left, right = figure.subplots(1, 2, sharey=True)
    for aggregate, r in result["aggregate"].items():
        steps = np.linspace(0, result["updates"], len(r["losses"]) + 1)[1:]
        left.semilogy(steps, r["losses"], label=f"first {aggregate} of {result['workers']}")
        right.loglog(r["times"], r["losses"])
    left.set(xlabel="update", ylabel="validation loss")
    right.set(xlabel="simulated seconds")
    left.legend(fontsize=8)
