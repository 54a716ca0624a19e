"""DiLoCo at a fraction of the bytes of synchronous training.

Eight replicas train a perceptron on handwritten digits with Adam, on their own batches. Synchronous
training averages gradients in every step; DiLoCo averages parameters every H steps, and moves the
common parameters with the outer optimizer: the Nesterov momentum of the paper, with rate 0.7 and
decay 0.9, or gradient descent with the same rate (``plain``). Each method is at the best of a grid
of inner rates, by the mean over the seeds. The bytes are those of the collectives in the compiled
program of a step, or of a round of H steps, on eight devices.
"""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import optzoo
from optzoo.race.problems import digits

PAPER = "Douillard et al. 2023, [DiLoCo](https://arxiv.org/abs/2311.08105)"
CLAIM = "eight replicas that exchange every H steps train as well as synchronous ones"
PUBLISHED = "H = 500: 500 times less communication, perplexity as good as that of synchronous steps"

REPLICAS, BATCH = 8, 8


def methods(periods):
    """The period and the optimizer for an inner rate, by name."""
    synchronous = lambda rate: optzoo.sync_replicas(optzoo.adam(rate), REPLICAS)

    def local(period, outer=None):
        return lambda rate: optzoo.diloco(optzoo.adam(rate), outer, communication_period=period)

    paper = {f"H = {period}": (period, local(period)) for period in periods}
    plain = {f"H = {period}, plain": (period, local(period, optax.sgd(0.7))) for period in periods}
    return {"synchronous": (1, synchronous), **paper, **plain}


def a_round(loss, tx, period, mesh=None):
    """``period`` steps of all replicas, the last one with an exchange."""

    def step(params, state, batch, exchange):
        value, grads = jax.value_and_grad(loss)(optzoo.replicas.per_replica(params), batch)
        masks = {} if period == 1 else {"exchange": exchange}
        updates, state = tx.update(grads, state, params, **masks)
        return optax.apply_updates(params, updates), state, value

    return optzoo.replicas.map_over_replicas(optzoo.replicas.scan_local_steps(step), mesh=mesh)


def sent(program):
    """The bytes that come out of all collectives of a compiled program, each counted once."""
    outputs = re.findall(r"= (.*?) (?:all-reduce|all-gather)(?:-start)?\(", program.as_text())
    shapes = [shape for found in outputs for shape in re.findall(r"[fsu]32\[([\d,]*)\]", found)]
    return sum(4 * math.prod(int(n) for n in shape.split(",") if n) for shape in shapes)


def on_devices(problem, period, tx):
    """A round on eight devices, and its arguments."""
    mesh = jax.make_mesh((REPLICAS,), ("replica",))
    params = jax.eval_shape(problem.init, jax.random.key(0))
    params = jax.tree.map(lambda a: jnp.zeros(a.shape), params)
    params, state = optzoo.replicas.replicate(params, tx.init(params), REPLICAS, mesh=mesh)
    shape = (REPLICAS, period, BATCH)
    batches = jax.tree.map(lambda a: jnp.zeros(shape + a.shape[1:], a.dtype), problem.train)
    batches = jax.device_put(batches, NamedSharding(mesh, PartitionSpec("replica")))
    return jax.jit(a_round(problem.loss, tx, period, mesh)), (params, state, batches)


def bytes_of_a_step(problem, period, tx):
    """What a replica receives from collectives, for each step, on eight devices."""
    step, args = on_devices(problem, period, tx)
    return sent(step.lower(*args).compile()) / period


def curves(problem, period, make, rates, steps, seeds):
    """The validation loss after each round, for each rate: the mean over the seeds."""
    train, valid = (jax.tree.map(jnp.asarray, part) for part in (problem.train, problem.valid))
    shape = (steps // period, REPLICAS, period, BATCH)
    ids = np.random.default_rng(0).integers(len(train[0]), size=(steps, REPLICAS, BATCH))
    ids = jnp.asarray(ids.reshape(-1, period, REPLICAS, BATCH).swapaxes(1, 2).reshape(shape))

    def one(rate, seed):
        tx = make(rate)
        params = problem.init(jax.random.key(seed))
        step = a_round(problem.loss, tx, period)

        def turn(carry, ids):
            params, state, _ = step(*carry, jax.tree.map(lambda a: a[ids], train))
            return (params, state), problem.loss(optzoo.eval_params(params, state), valid)

        start = optzoo.replicas.replicate(params, tx.init(params), REPLICAS)
        return jax.lax.scan(turn, start, ids)[1]

    all_runs = jax.jit(jax.vmap(jax.vmap(one, (None, 0)), (0, None)))
    return np.asarray(all_runs(jnp.array(rates), jnp.arange(seeds))).mean(axis=1)


def run(periods=(16, 64), steps=1024, rates=(0.001, 0.003, 0.01, 0.03), seeds=2):
    """Validation loss and bytes of each method."""
    problem, result = digits(), {}
    for name, (period, make) in methods(periods).items():
        found = curves(problem, period, make, rates, steps, seeds)
        best = int(np.argmin(np.nan_to_num(found[:, -1], nan=np.inf)))
        result[name] = {
            "period": period,
            "rate": rates[best],
            "bytes of a step": bytes_of_a_step(problem, period, make(rates[best])),
            "loss": float(found[best, -1]),
            "curve": found[best].tolist(),
        }
    return {"steps": steps, "methods": result}


def holds(result, slack=1.25):
    """Whether the bytes fall by H, within 2 percent, and no loss is much higher: yes, in part, no.

    In part: with the outer optimizer of the paper some loss is, with the plain one none.
    """
    synchronous, *others = result["methods"].values()
    fewer = [synchronous["bytes of a step"] / r["bytes of a step"] / r["period"] for r in others]
    good = {n: r["loss"] < slack * synchronous["loss"] for n, r in result["methods"].items()}
    if not all(0.98 < f < 1.02 for f in fewer):
        return False
    return all(good.values()) or (
        "in part" if all(is_good for name, is_good in good.items() if "plain" in name) else False
    )


def here(result):
    """One line about the result."""
    (_, synchronous), *others = result["methods"].items()
    cells = [f"synchronous: loss {synchronous['loss']:.3f}"]
    for name, r in others:
        fraction = synchronous["bytes of a step"] / r["bytes of a step"]
        name = name.replace("plain", "outer step without momentum")
        cells.append(f"{name}: {r['loss']:.3f} with 1/{fraction:.0f} of the bytes")
    return f"{result['steps']} steps; " + "; ".join(cells)


def draw(result, figure):
    """Loss over steps, and over bytes."""
    left, right = figure.subplots(1, 2, sharey=True)
    for name, r in result["methods"].items():
        steps = r["period"] * np.arange(1, len(r["curve"]) + 1)
        shown = steps % max(16, r["period"]) == 0
        loss = np.array(r["curve"])[shown]
        left.semilogy(steps[shown], loss, label=name)
        right.loglog(steps[shown] * r["bytes of a step"] / 1e6, loss, label=name)
    left.set(xlabel="step", ylabel="validation loss")
    right.set(xlabel="MB received by each replica")
    left.legend()
