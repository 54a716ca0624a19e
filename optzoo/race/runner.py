"""Runs one optimizer on one problem: all rates and seeds in one compiled program."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ..catalog import Entry
from ..distributed.engine.launch import map_over_replicas, replicate
from ..sparse.lookup import value_and_grad
from ..train.eval_params import eval_params
from ..train.minimize import minimize
from .entrants import REPLICAS, Entrant, arguments
from .problem import Problem
from .timing import time_stretches


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a race.

    Example:
        >>> from optzoo.race import Settings
        >>> print(Settings(num_rates=3).grid(0.01))
        [0.0032 0.01   0.032 ]

    Attributes:
        rates: the learning rates to try; None for a grid around the default rate of each optimizer,
            which is extended, at most ``extensions`` times, while the best rate is at its edge.
        num_rates: the size of that grid, with steps of half a decade.
        seeds: number of runs for each rate.
        steps: number of steps; None for that of the problem.
        timed_steps: number of consecutive steps that are timed together, including refreshes.
        timed_stretches: number of such timed stretches.
    """

    rates: tuple[float, ...] | None = None
    num_rates: int = 5
    extensions: int = 2
    seeds: int = 3
    steps: int | None = None
    timed_steps: int = 40
    timed_stretches: int = 5

    def grid(self, default_rate: float, block: int = 0) -> np.ndarray:
        """The rates to try around a default rate; blocks other than 0 extend the grid."""
        if self.rates is not None:
            return np.array(self.rates)
        middle = (self.num_rates - 1) // 2
        exponents = (np.arange(self.num_rates) - middle + block * self.num_rates) / 2
        return np.array([float(f"{default_rate * 10.0**e:.2g}") for e in exponents])


class Unsuited(Exception):
    """Raised if an optimizer cannot run on a problem; the message has the reason."""


@dataclasses.dataclass(frozen=True)
class Start:
    """The inputs and functions that all optimizers share on a problem, compiled once.

    Attributes:
        problem: the problem.
        settings: the settings.
        params: the initial parameters of each seed.
        batches: indices of examples, of shape (seeds, evaluations, steps each, batch).
        train: the training data.
        judge: ``judge(params) -> (loss, track)`` on the validation data.
        metrics: ``metrics(params)`` for the parameters of all rates and seeds.
    """

    problem: Problem
    settings: Settings
    params: Any
    batches: jax.Array
    train: Any
    judge: Callable[[Any], Any]
    metrics: Callable[[Any], Any]

    @property
    def observed_steps(self) -> np.ndarray:
        """The steps at which the validation loss is computed."""
        _, evaluations, each, _ = self.batches.shape
        return np.arange(evaluations + 1) * each


def prepare(problem: Problem, settings: Settings) -> Start:
    """Prepares a problem once for all optimizers."""
    steps = settings.steps or problem.steps
    each = max(1, steps // problem.evaluations)
    train, valid = jax.tree.map(jnp.asarray, (problem.train, problem.valid))
    shape = (settings.seeds, steps // each, each, problem.batch_size)
    if problem.batches is None:
        # NumPy's random generator: that of JAX would double the compilation time of every program.
        batches = np.random.default_rng(0).integers(len(jax.tree.leaves(train)[0]), size=shape)
    else:
        of_seed = [problem.batches(seed, shape[1] * each) for seed in range(settings.seeds)]
        batches = np.reshape(of_seed, shape)
    keys = jax.random.split(jax.random.key(0), settings.seeds)

    def judge(params):
        return _objective(problem, params, valid), problem.track and problem.track(params)

    def metrics(params):
        return {k: f(params, valid) * 1.0 for k, f in problem.metrics.items()}

    return Start(
        problem,
        settings,
        params=jax.jit(jax.vmap(problem.init))(keys),
        batches=jnp.asarray(batches, jnp.int32),
        train=train,
        judge=judge,
        metrics=jax.jit(jax.vmap(jax.vmap(metrics))),
    )


def traced(start: Start, entrant: Entrant) -> Callable[[], Any]:
    """The program of :func:`run_one`, to be compiled by a call, in any thread.

    Raises:
        Unsuited: if the optimizer cannot be traced on this problem.
    """
    program = jax.jit(jax.vmap(jax.vmap(_run(start, entrant), (None, 0, 0)), (0, None, None)))
    rates = jnp.array(start.settings.grid(entrant.entry.rate))
    try:
        return program.lower(rates, start.params, start.batches).compile
    except (TypeError, ValueError, NotImplementedError) as error:
        raise Unsuited(str(error).splitlines()[0]) from error


def run_one(start: Start, name: str, entrant: Entrant, program: Any) -> dict[str, Any]:
    """Trains with every rate and seed, selects the best rate and describes its runs.

    Args:
        start: the result of :func:`prepare`.
        name: the name in the result.
        entrant: the optimizer.
        program: the compiled program of :func:`traced`.

    Returns:
        A dict that can be written as JSON; ``diverged`` is true if no rate gave a finite loss.
    """
    problem, settings, entry = start.problem, start.settings, entrant.entry
    _, kwargs = _loss_and_arguments(start, entrant)

    def run_rates(rates):
        params, curve, track = program(jnp.array(rates), start.params, start.batches)
        return jax.device_get({"curve": curve, "track": track, "metrics": start.metrics(params)})

    rates, runs = _search(entry.rate, settings, run_rates)
    result = _describe(runs, rates, problem, start.observed_steps)
    params = jax.tree.map(lambda a: a[0], start.params)
    state = jax.eval_shape(entry.make(result["rate"], **kwargs).init, params)
    result |= {
        "problem": problem.name,
        "optimizer": name,
        "family": entrant.family,
        "rows": entry.rows,
        "arguments": arguments(entrant, kwargs),
        "state bytes per parameter": _bytes(state) / _count(params),
    }
    if problem.published and (facts := problem.published(name)):
        result["published"] = facts
    return result | times(start, entrant, result["rate"])


def times(start: Start, entrant: Entrant, rate: float) -> dict[str, Any]:
    """The duration of a step of one run: the minimum over several stretches, and the range."""
    problem = start.problem
    loss, kwargs = _loss_and_arguments(start, entrant)
    tx = entrant.entry.make(rate, **kwargs)
    if entrant.is_replicated:
        steps = {"seconds per step": _compiled(_replicated_step(loss, tx))}
    elif entrant.is_foreign:
        steps = {"seconds per step": _compiled(_plain_step(loss, tx, _gradients(entrant)))}
    else:
        steps = {"seconds per step": minimize(loss, tx)}
        if problem.embeddings:
            dense = _plain_step(loss, tx, jax.value_and_grad)  # gradients of lookups are dense
            steps["seconds per dense step"] = _compiled(dense)
    examples = jax.tree.map(lambda a: a[start.batches[0, 0, 0]], start.train)
    settings, result = start.settings, dict[str, Any]()
    for key, step in steps.items():
        begin = _begin(tx, jax.tree.map(lambda a: a[0], start.params), entrant.is_replicated)
        seconds = time_stretches(
            step, *begin, examples, steps=settings.timed_steps, stretches=settings.timed_stretches
        )
        result[key] = min(seconds)  # the one that was disturbed least
        if key == "seconds per step":
            result["seconds per step from"], result["seconds per step to"] = (
                min(seconds),
                max(seconds),
            )
    return result


def _loss_and_arguments(start: Start, entrant: Entrant) -> tuple[Any, dict[str, float]]:
    """The training loss, and the L1 argument that replaces the penalty in it, if supported."""
    problem = start.problem
    kwargs = _l1_arguments(problem, entrant.entry, int(start.observed_steps[-1]))
    return problem.loss if kwargs else lambda p, batch: _objective(problem, p, batch), kwargs


def _run(start: Start, entrant: Entrant) -> Callable[..., Any]:
    """``run(rate, params, batches)``: trains, and returns final parameters, losses, trajectory."""
    loss, kwargs = _loss_and_arguments(start, entrant)
    is_replicated = entrant.is_replicated

    def run(rate, params, batches):
        tx = entrant.entry.make(rate, **kwargs)
        if is_replicated:
            train = _replicated_step(loss, tx)
        else:
            train = _plain_step(loss, tx, _gradients(entrant))

        def step(carry, batch):
            params, state, count = carry
            examples = jax.tree.map(lambda a: a[batch], start.train)
            params, state, _ = train(params, state, examples, count)
            return (params, state, count + 1), None

        def stretch(carry, batches):
            carry, _ = jax.lax.scan(step, carry, batches)
            return carry, start.judge(judged(*carry))

        judged = lambda params, state, _: eval_params(params, state) if is_replicated else params
        begin = start.judge(params)
        carry = (*_begin(tx, params, is_replicated), jnp.int32(0))
        carry, seen = jax.lax.scan(stretch, carry, batches)
        params = judged(*carry)
        curve, track = jax.tree.map(
            lambda first, rest: jnp.concatenate([first[None], rest]), begin, seen
        )
        return params, curve, track

    return run


def _search(default_rate: float, settings: Settings, run: Any) -> tuple[np.ndarray, Any]:
    """Runs the grid, and extends it while the best rate is at its edge."""
    blocks: dict[int, Any] = {}

    def joined():
        ordered = [blocks[i] for i in sorted(blocks)]
        return jax.tree.map(lambda *parts: np.concatenate(parts), *ordered)

    block: int | None = 0
    while block is not None:
        rates = settings.grid(default_rate, block)
        blocks[block] = rates, run(rates)
        rates, runs = joined()
        best, block = int(np.argmin(_final_losses(runs).mean(axis=1))), None
        if settings.rates is None and len(blocks) <= settings.extensions:
            if best == 0:
                block = min(blocks) - 1
            elif best == len(rates) - 1:
                block = max(blocks) + 1
    return joined()


def _final_losses(runs: Any) -> np.ndarray:
    """The final losses by rate and seed; infinite if the run diverged."""
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
        "steps to target by seed": [_for_json(v) for v in reached],
        "rates": [
            {
                "rate": float(rate),
                "loss": _for_json(loss),
                "losses": [_for_json(v) for v in each],
                "diverged": bool(np.isinf(each).any()),
            }
            for rate, loss, each in zip(rates, of_rate, final, strict=True)
        ],
        "curve": {
            "steps": at.tolist(),
            "mean": [_for_json(v) for v in mine.mean(axis=0)],
            "low": [_for_json(v) for v in mine.min(axis=0)],
            "high": [_for_json(v) for v in mine.max(axis=0)],
        },
        "track": None if runs["track"] is None else _rows_for_json(runs["track"][best, 0]),
    }


def _spread(values: np.ndarray) -> dict[str, float | None]:
    return {"mean": _for_json(values.mean()), "std": _for_json(values.std())}


def _for_json(value: Any) -> float | None:
    """The value, or None if it is not finite: JSON has no infinity."""
    return float(value) if np.isfinite(value) else None


def _rows_for_json(values: np.ndarray) -> list[Any]:
    return [[_for_json(v) for v in row] for row in values.reshape(len(values), -1)]


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _count(tree: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def _begin(tx: Any, params: Any, is_replicated: bool) -> tuple[Any, Any]:
    state = tx.init(params)
    return replicate(params, state, REPLICAS) if is_replicated else (params, state)


def _gradients(entrant: Entrant) -> Any:
    """The gradient function: row-sparse for tables with optimizers of this library."""
    return jax.value_and_grad if entrant.is_foreign else value_and_grad


def _plain_step(loss: Any, tx: Any, value_and_grad: Any = value_and_grad) -> Any:
    def step(params, state, batch, global_step):
        value, grads = value_and_grad(loss)(params, batch)
        updates, state = tx.update(grads, state, params, global_step=global_step)
        return optax.apply_updates(params, updates), state, value

    return step


def _replicated_step(loss: Any, tx: Any) -> Any:
    """A step of all replicas, each on its part of the batch, or on the whole if not divisible."""

    def share(a):
        if a.shape[0] % REPLICAS:
            return jnp.broadcast_to(a, (REPLICAS, *a.shape))
        return a.reshape(REPLICAS, -1, *a.shape[1:])

    def step(params, state, batch, global_step):
        steps = jnp.broadcast_to(global_step, REPLICAS)
        return map_over_replicas(_plain_step(loss, tx))(
            params, state, jax.tree.map(share, batch), steps
        )

    return step


def _compiled(step: Any) -> Any:
    return jax.jit(step, donate_argnums=(0, 1))
