"""The options of Shampoo, in groups with their checks."""

import dataclasses
import numbers
from typing import Any, Literal, get_args

from jax import Array

from ...core.checks import check, check_decays, check_flags, check_not_negative, check_positive
from ...core.numerics import is_number
from ..owners import Owners
from .blocks import Cutting
from .roots import BY_EIGENVALUES, METHODS

Root = Literal["auto", "eigh", "pseudo_inverse", "newton", "two_iterations"]
Grafting = Literal["sgd", "adagrad", "rmsprop", "adam"]


@dataclasses.dataclass(frozen=True, eq=False)
class Scheduled:
    """The options that may be schedules."""

    gbar_decay: Any
    gbar_weight: Any
    mat_gbar_decay: Any
    mat_gbar_weight: Any
    preconditioner_interval: Any
    statistics_interval: Any
    alpha: Any  # a plain number unless the method is by eigenvalues, then also a schedule


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class StepValues(Scheduled):
    """The options that may be schedules, at one step; all but ``alpha`` in at least float32."""

    t: Array  # the number of updates, this one included
    T: Any  # the number of the step, which follows the global step: 1, 2, ...


@dataclasses.dataclass(eq=False)
class RootOptions:
    """How roots are computed."""

    root: Root | None
    use_iterative_root: bool
    eps: float
    relative_eps: bool
    kl_statistics: bool
    stagger: bool
    axis_name: str | None

    def __post_init__(self) -> None:
        check_positive(eps=self.eps)
        check_flags(
            use_iterative_root=self.use_iterative_root,
            relative_eps=self.relative_eps,
            kl_statistics=self.kl_statistics,
            stagger=self.stagger,
        )
        if self.root not in (None, *METHODS):
            raise ValueError(f"root must be None or one of {tuple(METHODS)}, got {self.root!r}")

    @property
    def method(self) -> Root:
        """A key of ``METHODS``."""
        return self.root or ("two_iterations" if self.use_iterative_root else "eigh")


@dataclasses.dataclass(eq=False)
class UpdateOptions:
    """The options that are applied to a preconditioned gradient."""

    grafting: Grafting | None
    grafting_b2: Any
    grafting_eps: float
    start_step: int
    momentum: float | None
    nesterov: bool

    def __post_init__(self) -> None:
        [self.grafting_b2] = check_decays(grafting_b2=self.grafting_b2)
        check_not_negative(grafting_eps=self.grafting_eps, start_step=self.start_step)
        check_not_negative(none=True, momentum=self.momentum)
        check_flags(nesterov=self.nesterov)
        if self.grafting not in (known := (None, *get_args(Grafting))):
            raise ValueError(f"grafting must be one of {known}, got {self.grafting!r}")

    @property
    def needs_squares(self) -> bool:
        """Whether the grafted optimizer keeps a mean or a sum of the squared gradient."""
        return self.grafting in ("adagrad", "rmsprop", "adam")


@dataclasses.dataclass(frozen=True, eq=False)
class ShampooOptions:
    """The arguments of ``scale_by_shampoo``; :func:`optzoo.shampoo` describes them."""

    cutting: Cutting
    scheduled: Scheduled
    roots: RootOptions
    update: UpdateOptions
    owners: Owners | None = None

    def __post_init__(self) -> None:
        given = self.scheduled
        decays = {"gbar_decay": given.gbar_decay, "mat_gbar_decay": given.mat_gbar_decay}
        weights = {"gbar_weight": given.gbar_weight, "mat_gbar_weight": given.mat_gbar_weight}
        check("in [0, 1]", lambda v: 0 <= v <= 1, schedule=True, **decays)
        check_positive(schedule=True, **weights, alpha=given.alpha)
        check_interval(
            preconditioner_interval=given.preconditioner_interval, stagger=self.roots.stagger
        )
        check_interval(statistics_interval=given.statistics_interval)
        if self.roots.method not in BY_EIGENVALUES and not isinstance(given.alpha, numbers.Real):
            raise TypeError(
                f"alpha must be a plain number for root={self.roots.method!r}, got "
                f"{given.alpha!r}; optax.inject_hyperparams needs it among its static_args"
            )

    @property
    def allows_rows(self) -> bool:
        """Whether rows without a gradient have a step of zero and unchanged statistics."""
        given = self.scheduled
        return is_number(given.gbar_decay, 0) and is_number(given.mat_gbar_decay, 1)


def check_interval(*, stagger: bool = False, **argument: Any) -> None:
    """Checks a number of steps, given by name; a schedule unless roots are staggered.

    Raises:
        TypeError: if it is not a number.
        ValueError: if it is below 1 or, with ``stagger``, not an int above 1.
    """
    check("at least 1", lambda v: v >= 1, schedule=True, **argument)
    [(name, interval)] = argument.items()
    if stagger and not (isinstance(interval, int) and interval > 1):
        raise ValueError(f"{name} must be an int above 1 with stagger=True, got {interval!r}")
