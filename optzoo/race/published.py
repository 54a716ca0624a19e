"""The problem ``quadratic_deep`` of DeepOBS, and published runs of TensorFlow 1.

Source and licence of the data: ``data/README.md``.
"""

import functools
import inspect
import json
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ..catalog import CATALOG
from .problem import Problem

EPOCHS, BATCH, SIZE = 100, 128, 100
EXAMPLES = 1000 // BATCH * BATCH  # of an epoch; the rest is dropped
_DATA = pathlib.Path(__file__).with_name("data")


class Run(NamedTuple):
    """A published run."""

    optimizer: str  # its name in the catalogue
    arguments: dict[str, float]  # of the optimizer
    seed: int  # of the graph
    shuffle: str  # the order of its examples: op seed/graph seed
    hessian: int  # the index of the problem among those that its process built
    epochs: tuple[int, int]  # the first and the last one of the losses
    train: np.ndarray  # loss on the training data at the end of each epoch
    test: np.ndarray

    @property
    def losses(self) -> np.ndarray:
        """Both losses, of shape (epochs, 2)."""
        return np.stack([self.train, self.test], axis=1)


@functools.cache
def published_runs() -> tuple[Run, ...]:
    """All published runs."""
    rows = json.loads((_DATA / "quadratic_deep.json").read_text())
    as_arrays = lambda run: run._replace(train=np.array(run.train), test=np.array(run.test))
    return tuple(as_arrays(Run(**row)) for row in rows)


def quadratic_deep() -> Problem:
    """A noisy quadratic function with the eigenvalues of a deep network, from DeepOBS."""
    hessian = _hessian(0)
    train, test = _data()
    orders = [order for key, order in _orders().items() if key.startswith("2/")]

    def batches(seed: int, steps: int) -> np.ndarray:
        if seed >= len(orders):
            raise ValueError(
                "quadratic_deep has stored orders of examples: seeds must be at most "
                f"{len(orders)}, got {seed + 1}"
            )
        epoch = orders[seed][:EXAMPLES].reshape(-1, BATCH)
        return epoch[np.arange(steps) % len(epoch)]

    return Problem(
        name="quadratic_deep",
        init=lambda key: jnp.ones(SIZE),
        loss=lambda params, batch: _loss(params, batch, hessian),
        train=train,
        valid=test[:EXAMPLES],
        batch_size=BATCH,
        steps=EXAMPLES // BATCH * EPOCHS,
        evaluations=EPOCHS,
        batches=batches,
        published=compare,
        target=90.0,
        about="the noisy quadratic function of DeepOBS, 100 dimensions with 10 large eigenvalues, "
        "its order of examples, 100 epochs, test loss",
    )


def replay(runs: Sequence[Run]) -> np.ndarray:
    """Repeats published runs of one optimizer with the optimizer of this library.

    Args:
        runs: runs with the same optimizer and the same arguments.

    Returns:
        Train and test loss before the first and after each epoch, of shape (runs, 101, 2).
    """
    # TensorFlow rounds a hyper-parameter to float32 before it computes 1 - b2.
    arguments = {name: float(np.float32(value)) for name, value in runs[0].arguments.items()}
    tx = CATALOG[runs[0].optimizer].make(**arguments)
    data, test = _data()
    orders = [_orders()[run.shuffle][:EXAMPLES] for run in runs]

    def one(hessian, train):
        def judge(params):
            flat = train.reshape(-1, SIZE), jnp.asarray(test[:EXAMPLES])
            return jnp.stack([_loss(params, part, hessian) for part in flat])

        def step(carry, batch):
            params, state = carry
            grads = jax.grad(_loss)(params, batch, hessian)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        def epoch(carry, _):
            carry, _ = jax.lax.scan(step, carry, train)
            return carry, judge(carry[0])

        params = jnp.ones(SIZE)
        _, losses = jax.lax.scan(epoch, (params, tx.init(params)), length=EPOCHS)
        return jnp.concatenate([judge(params)[None], losses])

    hessians = np.stack([_hessian(run.hessian) for run in runs])
    examples = data[np.stack(orders)].reshape(len(runs), -1, BATCH, SIZE)
    return np.asarray(jax.jit(jax.vmap(one))(hessians, examples))


def compare(optimizer: str) -> dict[str, Any] | None:
    """The mean test loss of the published runs of an optimizer, and of their replay.

    Returns:
        None if no run of it is published, otherwise a dict that can be written as JSON:
        ``settings`` (the arguments that differ from the catalogue), ``runs`` (their number),
        ``published`` and ``here`` (mean test losses after the last epoch) and ``difference`` (the
        largest relative difference of train and test losses over all published epochs).
    """
    runs = [run for run in published_runs() if run.optimizer == optimizer]
    if not runs:
        return None
    entry, ours = CATALOG[optimizer], replay(runs)
    usual = {k: v.default for k, v in inspect.signature(entry.factory).parameters.items()}
    usual |= {**entry.required, "learning_rate": None}
    unusual = {k: v for k, v in sorted(runs[0].arguments.items()) if v != usual[k]}
    return {
        "settings": ", ".join(f"{name}={value:.3g}" for name, value in unusual.items()),
        "runs": len(runs),
        "published": float(np.mean([run.test[-1] for run in runs])),
        "here": float(ours[:, -1, 1].mean()),
        "difference": max(difference(run, losses) for run, losses in zip(runs, ours, strict=True)),
    }


def difference(run: Run, losses: np.ndarray) -> float:
    """The largest relative difference between a replay and a published run."""
    first, last = run.epochs
    return float(np.max(np.abs(losses[first : last + 1] / run.losses - 1)))


def _loss(params: Any, batch: Any, hessian: Any) -> Any:
    distance = params[None] - batch
    return jnp.mean(0.5 * jnp.sum((distance @ hessian) * distance, axis=1))


@functools.cache
def _data() -> tuple[np.ndarray, np.ndarray]:
    """The training data and the test data."""
    draw = lambda seed: np.random.RandomState(seed).normal(0, 0.6, (1000, SIZE))
    return draw(42).astype(np.float32), draw(43).astype(np.float32)


@functools.cache
def _orders() -> dict[str, np.ndarray]:
    with np.load(_DATA / "quadratic_deep.npz") as stored:
        return {key: stored[key].astype(np.int32) for key in stored}


@functools.cache
def _hessian(number: int) -> np.ndarray:
    """The Hessian of problem ``number``; all problems draw from one generator, in order."""
    rng = np.random.RandomState(42)
    draw = lambda: ([*rng.uniform(0, 1, 90), *rng.uniform(30, 60, 10)], _rotation(rng))
    eigenvalues, rotation = [draw() for _ in range(number + 1)][number]
    return (rotation.T @ np.diag(eigenvalues) @ rotation).astype(np.float32)


def _rotation(rng: np.random.RandomState) -> np.ndarray:
    """A random rotation: a rotation of the plane, then a reflection for each further dimension.

    Diaconis and Shahshahani, The subgroup algorithm for generating uniform random variables, 1987.
    """
    angle = 2 * np.pi * rng.uniform()
    rotation = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
    for size in range(3, SIZE + 1):
        direction = rng.normal(size=size)
        mirror = np.eye(size)[0] - direction / np.linalg.norm(direction)
        mirror /= np.linalg.norm(mirror)
        rotation = np.pad(rotation, ((1, 0), (1, 0)))
        rotation[0, 0] = 1
        rotation -= 2 * np.outer(mirror, mirror @ rotation)
    return -rotation
