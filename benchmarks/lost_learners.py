"""Late and lost learners: the share of their work that is used, and the final loss.

    .venv/bin/python benchmarks/lost_learners.py [--seeds 3] [--save]

Simulated: 64 learners on one device train a perceptron on handwritten digits, each on its own
batches, with Adam, for 512 ticks. Absences are drawn once, from a fixed seed: times of work and of
absence are exponential, an absence takes 32 ticks on average, and 10 or 30 percent of the learners
are absent at any time; or one learner is absent for ten periods. An absent learner makes no step
and takes part in no exchange; when it returns, it starts from the center of the last exchange and
keeps the slots of its optimizer.

Synchronous training waits until all learners are present. DiLoCo exchanges every 16 ticks, with a
plain outer step of 0.7; the weight of a learner is its number of steps since the last exchange.
With a quorum of 48, an exchange with fewer learners is postponed to the next one.

Goodput is the share of all 64 x 512 possible steps that contribute to the common parameters. The
loss is that of the center on the validation data, the mean over the seeds; the inner rate of each
method is the best of three without failures.
"""

import argparse

import harness
import jax
import jax.numpy as jnp
import numpy as np
import optax

import optzoo
from optzoo.race.problems import digits

LEARNERS, TICKS, PERIOD, BATCH, ABSENCE, QUORUM = 64, 512, 16, 8, 32, 48
RATES = 0.003, 0.01, 0.03


def masks(away, rng):
    """Whether each learner is present, by tick: stretches of work and of absence."""
    present = np.ones((TICKS, LEARNERS), bool)
    for learner in range(LEARNERS):
        is_there, tick = rng.random() >= away, 0
        while tick < TICKS:
            mean = ABSENCE * (1 - away) / away if is_there else ABSENCE
            length = max(1, round(rng.exponential(mean)))
            present[tick : tick + length, learner] = is_there
            is_there, tick = not is_there, tick + length
    return present


def scenarios():
    """The masks by name."""
    one = np.ones((TICKS, LEARNERS), bool)
    one[10 * PERIOD : 20 * PERIOD, 0] = False
    rng = np.random.default_rng(35)
    some = {f"{int(100 * away)} % away": masks(away, rng) for away in (0.1, 0.3)}
    nobody = np.ones((TICKS, LEARNERS), bool)
    return {"nobody away": nobody, "one away for ten periods": one, **some}


def used_steps(present, quorum):
    """The steps of the learners that take part in an exchange."""
    waiting, used = np.zeros(LEARNERS), 0
    for tick in range(TICKS):
        waiting += present[tick]
        if (tick + 1) % PERIOD == 0 and present[tick].sum() >= quorum:
            used += waiting[present[tick]].sum()
            waiting[:] = 0  # the others take the center, and their steps are lost
    return used


def weights(present, quorum):
    """By tick, the steps of each learner that an exchange at this tick would use."""
    waiting, found = np.zeros(LEARNERS, np.float32), []
    for tick in range(TICKS):
        waiting = waiting + present[tick]
        found.append(waiting)
        if (tick + 1) % PERIOD == 0 and present[tick].sum() >= quorum:
            waiting = np.zeros(LEARNERS, np.float32)
    return np.array(found)


def learner(problem, make):
    """``learn(rate, seed, masks)``: the validation loss after each period."""
    train, valid = (jax.tree.map(jnp.asarray, part) for part in (problem.train, problem.valid))

    def learn(rate, seed, inputs):
        tx = make(rate)

        def step(params, state, batch, given):
            grads = jax.grad(problem.loss)(optzoo.replicas.per_replica(params), batch)
            updates, state = tx.update(grads, state, params, **given)
            return optax.apply_updates(params, updates), state

        def tick(carry, inputs):
            t, given = inputs
            key = jax.random.fold_in(jax.random.key(1000 + seed), t)
            ids = jax.random.randint(key, (LEARNERS, BATCH), 0, len(train[0]))
            batch = jax.tree.map(lambda a: a[ids], train)
            return optzoo.replicas.map_over_replicas(step)(*carry, batch, given), None

        def period(carry, inputs):
            carry, _ = jax.lax.scan(tick, carry, inputs)
            return carry, problem.loss(optzoo.eval_params(*carry), valid)

        params = problem.init(jax.random.key(seed))
        start = optzoo.replicas.replicate(params, tx.init(params), LEARNERS)
        cut = lambda a: a.reshape(-1, PERIOD, *a.shape[1:])
        return jax.lax.scan(period, start, jax.tree.map(cut, (jnp.arange(TICKS), inputs)))[1]

    return jax.jit(jax.vmap(learn, (None, 0, None)))


def main():
    """Runs all, prints and saves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    problem, seeds, table = digits(), jnp.arange(args.seeds), {}

    def best(learn, inputs):
        curves = {rate: learn(rate, seeds, inputs).mean(0) for rate in RATES}
        return min(RATES, key=lambda rate: float(curves[rate][-1])), curves

    synchronous = learner(problem, lambda rate: optzoo.sync_replicas(optzoo.adam(rate), LEARNERS))
    rate, curves = best(synchronous, {})
    for name, present in scenarios().items():
        done = int(present.all(axis=1).sum())
        first = np.mean(
            [
                problem.loss(problem.init(jax.random.key(s)), problem.valid)
                for s in range(args.seeds)
            ]
        )
        loss = curves[rate][done // PERIOD - 1] if done >= PERIOD else first
        goodput = done / TICKS
        table[f"{name}, synchronous"] = {"goodput": goodput, "loss": float(loss), "rate": rate}
    for quorum in (1, QUORUM):
        learn = learner(
            problem,
            lambda rate, quorum=quorum: optzoo.diloco(
                optzoo.adam(rate),
                optax.sgd(0.7),
                communication_period=PERIOD,
                min_arrived=quorum,
            ),
        )
        given = {
            name: {"active": p, "arrived": p, "weight": weights(p, quorum)}
            for name, p in scenarios().items()
        }
        rate, _ = best(learn, given["nobody away"])
        for name, present in scenarios().items():
            losses = np.asarray(learn(rate, seeds, given[name]))[:, -1]
            table[f"{name}, quorum {quorum}"] = {
                "goodput": float(used_steps(present, quorum) / present.size),
                "loss": float(losses.mean()),
                "losses": losses.tolist(),
                "rate": rate,
            }
    for name, row in table.items():
        print(f"{name:40} goodput {row['goodput']:.3f}  loss {row['loss']:.4f}  rate {row['rate']}")
    if args.save:
        harness.save("lost_learners", table)


if __name__ == "__main__":
    main()
