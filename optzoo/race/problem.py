"""The definition of a race problem."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jax import Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """A model, its data and its evaluation.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from optzoo.race import Problem
        >>> x = jnp.linspace(-1.0, 1.0, 32)
        >>> data = {"x": x, "y": 3 * x}
        >>> problem = Problem(
        ...     name="line",
        ...     init=lambda key: {"w": jax.random.normal(key, ())},
        ...     loss=lambda params, batch: jnp.mean((params["w"] * batch["x"] - batch["y"]) ** 2),
        ...     train=data,
        ...     valid=data,
        ... )
        >>> print(problem.loss({"w": 3.0}, data))
        0.0

    Attributes:
        name: a short name, used in tables and file names.
        init: ``init(key) -> params``; each seed has other initial parameters.
        loss: ``loss(params, batch) -> scalar``, the function to minimize. ``batch`` has the
            structure of ``train``. Tables read by :func:`optzoo.lookup` have row-sparse gradients.
        train: a tree of arrays whose leading axis is the examples.
        valid: the same for the held-out data, which select the best rate.
        metrics: by name, ``metric(params, valid) -> scalar``, reported at the end of each run.
        l1: strength of an L1 penalty on all parameters. Optimizers with the argument
            ``l1_regularization_strength`` receive it there, with a loss without the penalty; for
            others it is part of the loss. The validation loss always includes it.
        batch_size: number of examples for each step.
        batches: ``batches(seed, steps) -> indices`` of the examples of each step, of shape
            (steps, batch_size); None to draw them with replacement.
        steps: number of steps of a run.
        evaluations: the number of evenly spaced evaluations of the validation loss during a run; if
            ``steps`` is not a multiple of it, the remaining steps are not run.
        target: a validation loss; the number of steps to reach it is reported. None for no target.
        track: ``track(params) -> array``, recorded at each evaluation of the best run.
        published: ``published(optimizer) -> facts`` about published runs, for a column of the
            report, as returned by :func:`optzoo.race.published.compare`, or None.
        embeddings: whether the model consists of embedding tables, read by :func:`optzoo.lookup`.
            Such models have separate recommendations, and a step with dense gradients is also
            timed.
        about: one sentence for the report.
    """

    name: str
    init: Callable[[Array], Any]
    loss: Callable[[Any, Any], Array]
    train: Any
    valid: Any
    metrics: Mapping[str, Callable[[Any, Any], Array]] = dataclasses.field(default_factory=dict)
    l1: float = 0.0
    batch_size: int = 64
    batches: Callable[[int, int], Any] | None = None
    steps: int = 300
    evaluations: int = 30
    target: float | None = None
    track: Callable[[Any], Array] | None = None
    published: Callable[[str], Mapping[str, Any] | None] | None = None
    embeddings: bool = False
    about: str = ""

    def __post_init__(self):
        for field in ("batch_size", "steps", "evaluations"):
            value = getattr(self, field)
            if not (isinstance(value, int) and value > 0):
                raise ValueError(
                    f"{field} of problem {self.name!r} must be positive, got {value!r}"
                )
        if self.l1 < 0:
            raise ValueError(f"l1 of problem {self.name!r} must be zero or positive, got {self.l1}")
