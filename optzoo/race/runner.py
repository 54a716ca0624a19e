"""Runs one optimizer on one problem: all rates and seeds in one compiled program."""

import dataclasses
import inspect
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ..catalog import CATALOG, Entry
from ..core.lookup import value_and_grad
from ..core.minimize import minimize
from .problem import Problem


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a race is run.

    Attributes:
        rates: the learning rates to try; None for a grid around each optimizer's usual rate,
            which is extended, at most ``extensions`` times, while the best rate is at its edge.
        num_rates: the size of that grid, half a decade apart.
        seeds: how many runs for each rate.
        steps: overrides the steps of every problem.
        timed_steps: how many single steps are timed.
    """

    rates: tuple[float, ...] | None = None
    num_rates: int = 7
    extensions: int = 2
    seeds: int = 3
    steps: int | None = None
    timed_steps: int = 30

    def grid(self, usual: float, block: int = 0) -> np.ndarray:
        """The rates to try for an optimizer with this usual rate; blocks continue the grid."""
        if self.rates is not None:
            return np.array(self.rates)
        middle = (self.num_rates - 1) // 2
        exponents = (np.arange(self.num_rates) - middle + block * self.num_rates) / 2
        return np.array([float(f"{usual * 10.0**e:.2g}") for e in exponents])


class Unsuited(Exception):
    """The optimizer cannot take the problem; says why."""


def run_one(problem: Problem, name: str, settings: Settings) -> dict[str, Any]:
    """Trains with every rate and seed, picks the best rate, and describes its runs.

    Args:
        problem: what to train.
        name: an optimizer of the catalogue.
        settings: rates, seeds, steps.

    Returns:
        A dict ready for JSON; ``diverged`` is true if no rate gave a finite loss.

    Raises:
        Unsuited: if the optimizer cannot be traced on this problem.
    """
    entry = CATALOG[name]
    steps = settings.steps or problem.steps
    chunk = max(1, steps // problem.evaluations)
    steps -= steps % chunk
    kwargs = _l1_arguments(problem, entry, steps)
    loss = problem.loss if kwargs else lambda p, batch: _objective(problem, p, batch)
    seeds = jnp.arange(settings.seeds)

    def run(rate, seed):
        start_key, data_key = jax.random.split(jax.random.key(seed))
        params, tx = problem.init(start_key), entry.make(rate, **kwargs)
        examples = len(jax.tree.leaves(problem.train)[0])

        def step(carry, key):
            params, state = carry
            batch = jax.random.randint(key, (problem.batch_size,), 0, examples)
            _, grads = value_and_grad(loss)(params, jax.tree.map(lambda a: a[batch], train))
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        def observe(params):
            seen = problem.track(params) if problem.track else None
            return _objective(problem, params, valid), seen

        def stretch(carry, keys):
            carry, _ = jax.lax.scan(step, carry, keys)
            return carry, observe(carry[0])

        train, valid = jax.tree.map(jnp.asarray, (problem.train, problem.valid))
        keys = jax.random.split(data_key, (steps // chunk, chunk))
        (end, _), after = jax.lax.scan(stretch, (params, tx.init(params)), keys)
        join = lambda first, rest: jnp.concatenate([first[None], rest])
        curve, track = jax.tree.map(join, observe(params), after)
        metrics = {k: f(end, valid) * 1.0 for k, f in problem.metrics.items()}
        return {"curve": curve, "track": track, "metrics": metrics}

    program = jax.jit(jax.vmap(jax.vmap(run, (None, 0)), (0, None)))
    try:
        compiled = program.lower(jnp.array(settings.grid(entry.rate)), seeds).compile()
    except (TypeError, ValueError, NotImplementedError) as error:
        raise Unsuited(str(error).splitlines()[0]) from error
    rates, runs = _search(entry.rate, settings, lambda rates: compiled(jnp.array(rates), seeds))
    result = _describe(runs, rates, problem, np.arange(steps // chunk + 1) * chunk)
    best = entry.make(result["rate"], **kwargs)
    params = jax.eval_shape(problem.init, jax.random.key(0))
    result |= {
        "problem": problem.name,
        "optimizer": name,
        "rows": entry.rows,
        "state bytes per parameter": _bytes(jax.eval_shape(best.init, params)) / _count(params),
        "seconds per step": _time_step(problem, loss, best, settings, rows=True),
    }
    if problem.compare_dense:
        dense = _time_step(problem, loss, best, settings, rows=False)
        result["seconds per dense step"] = dense
    return result


def _search(usual: float, settings: Settings, run: Any) -> tuple[np.ndarray, Any]:
    """Runs the grid, and goes on beyond the edge at which the best rate lies."""
    blocks: dict[int, Any] = {}

    def joined():
        ordered = [blocks[i] for i in sorted(blocks)]
        return jax.tree.map(lambda *parts: np.concatenate(parts), *ordered)

    block: int | None = 0
    while block is not None:
        rates = settings.grid(usual, block)
        blocks[block] = rates, jax.device_get(run(rates))
        rates, runs = joined()
        best, block = int(np.argmin(_final_losses(runs).mean(axis=1))), None
        if settings.rates is None and len(blocks) <= settings.extensions:
            if best == 0:
                block = min(blocks) - 1
            elif best == len(rates) - 1:
                block = max(blocks) + 1
    return joined()


def _final_losses(runs: Any) -> np.ndarray:
    """Of each rate and seed; infinite where the run diverged."""
    final = runs["curve"][..., -1].astype(np.float64)
    return np.where(np.isfinite(final), final, np.inf)


def _objective(problem: Problem, params: Any, batch: Any):
    penalty = sum(jnp.sum(jnp.abs(leaf)) for leaf in jax.tree.leaves(params)) if problem.l1 else 0
    return problem.loss(params, batch) + problem.l1 * penalty


def _l1_arguments(problem: Problem, entry: Entry, steps: int) -> dict[str, float]:
    name = "l1_regularization_strength"
    if not problem.l1 or name not in inspect.signature(entry.factory).parameters:
        return {}
    return {name: problem.l1 * (steps if entry.l1_of_the_sum else 1)}


def _describe(runs: Any, rates: np.ndarray, problem: Problem, at: np.ndarray) -> dict[str, Any]:
    curves = runs["curve"].astype(np.float64)  # (rates, seeds, evaluations)
    final = _final_losses(runs)
    of_rate = final.mean(axis=1)
    best = int(np.argmin(of_rate))
    mine = curves[best]
    reached = np.full(len(mine), np.nan)
    if problem.target is not None:
        hit = mine <= problem.target
        reached = np.where(hit.any(axis=1), at[hit.argmax(axis=1)], np.nan)
    return {
        "rate": float(rates[best]),
        "diverged": not np.isfinite(of_rate[best]),
        "loss": _spread(mine[:, -1]),
        "metrics": {k: _spread(v[best].astype(np.float64)) for k, v in runs["metrics"].items()},
        "steps to target": _spread(reached) if np.isfinite(reached).all() else None,
        "rates": [
            {"rate": float(rate), "loss": _number(loss), "diverged": bool(np.isinf(each).any())}
            for rate, loss, each in zip(rates, of_rate, final, strict=True)
        ],
        "curve": {
            "steps": at.tolist(),
            "mean": [_number(v) for v in mine.mean(axis=0)],
            "low": [_number(v) for v in mine.min(axis=0)],
            "high": [_number(v) for v in mine.max(axis=0)],
        },
        "track": None if runs["track"] is None else _numbers(runs["track"][best, 0]),
    }


def _spread(values: np.ndarray) -> dict[str, float | None]:
    return {"mean": _number(values.mean()), "std": _number(values.std())}


def _number(value: Any) -> float | None:
    """JSON has no infinity."""
    return float(value) if np.isfinite(value) else None


def _numbers(values: np.ndarray) -> list[Any]:
    return [[_number(v) for v in row] for row in values.reshape(len(values), -1)]


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _count(tree: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def _time_step(problem: Problem, loss: Any, tx: Any, settings: Settings, *, rows: bool) -> float:
    """Median seconds of a donated, compiled train step of one run."""
    params = problem.init(jax.random.key(0))
    state = tx.init(params)
    train = jax.tree.map(lambda a: jnp.asarray(a[: problem.batch_size]), problem.train)
    # Without minimize's value_and_grad, lookups are ordinary and their gradients dense.
    step = minimize(loss, tx) if rows else _dense_step(loss, tx)
    seconds = []
    for _ in range(settings.timed_steps + 1):
        begin = time.perf_counter()
        params, state, _ = jax.block_until_ready(step(params, state, train))
        seconds.append(time.perf_counter() - begin)
    return float(np.median(seconds[1:]))  # the first one compiles


def _dense_step(loss: Any, tx: Any) -> Any:
    def step(params, state, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return jax.jit(step, donate_argnums=(0, 1))
