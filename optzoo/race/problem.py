"""What a race is run on."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jax import Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """A model, its data and how to judge it.

    Attributes:
        name: a short name, used in tables and file names.
        init: ``init(key) -> params``; each seed starts from its own parameters.
        loss: ``loss(params, batch) -> scalar``, what is minimized. ``batch`` has the structure of
            ``train``. Tables read by :func:`optzoo.lookup` get row-sparse gradients.
        train: a tree of arrays whose leading axis counts the examples.
        valid: the same, held out; it decides the best rate.
        metrics: by name, ``metric(params, valid) -> scalar``, reported at the end of each run.
        l1: strength of an L1 penalty on all parameters. Optimizers with an
            ``l1_regularization_strength`` take it as their own and see the loss without it; the
            others get it as part of the loss. Validation losses include it for all.
        batch_size: examples drawn, with replacement, for each step.
        steps: steps of a run.
        evaluations: how often during a run the validation loss is taken, evenly spaced; steps left
            over by the division are not run.
        target: the validation loss whose first reaching is reported; None for none.
        track: ``track(params) -> array``, recorded at each evaluation of the best run.
        compare_dense: also time a step with dense gradients of the looked-up tables.
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
    steps: int = 300
    evaluations: int = 30
    target: float | None = None
    track: Callable[[Any], Array] | None = None
    compare_dense: bool = False
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
