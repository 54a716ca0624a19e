"""The options of Shampoo: named and checked in one place."""

import dataclasses
import numbers
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args

import optax
from jax import Array

from ...core.checks import (
    check,
    check_decays,
    check_flags,
    check_not_negative,
    check_positive,
    check_size,
)
from .blocks import Blocks, cut
from .roots import METHODS

Root = Literal["auto", "eigh", "newton", "two_iterations"]
Grafting = Literal["sgd", "adagrad", "rmsprop", "adam"]
GRAFTINGS = (None, *get_args(Grafting))

# The options that may be schedules.
SCHEDULED = (
    "gbar_decay",
    "gbar_weight",
    "mat_gbar_decay",
    "mat_gbar_weight",
    "svd_interval",
    "precond_update_interval",
    "alpha",
)


_FLAGS = (
    "use_iterative_root",
    "relative_epsilon",
    "merge_dims",
    "skip_vectors",
    "stagger",
    "nesterov",
)


class StepValues(NamedTuple):
    """The options that may be schedules, at one step: all but ``alpha`` in float32 at least."""

    t: Array  # the number of updates, this one included
    T: Any  # the number of the step, which follows the global step: 1, 2, ...
    gbar_decay: Array
    gbar_weight: Array
    mat_gbar_decay: Array
    mat_gbar_weight: Array
    svd_interval: Array
    precond_update_interval: Array
    alpha: Any


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class ShampooOptions:
    """The arguments of :func:`optzoo.scale_by_shampoo`; :func:`optzoo.shampoo` describes them."""

    max_matrix_size: int
    gbar_decay: optax.ScalarOrSchedule
    gbar_weight: optax.ScalarOrSchedule
    mat_gbar_decay: optax.ScalarOrSchedule
    mat_gbar_weight: optax.ScalarOrSchedule
    svd_interval: optax.ScalarOrSchedule
    precond_update_interval: optax.ScalarOrSchedule
    epsilon: float
    alpha: Any  # a plain number unless the method is "eigh", then also an array or a schedule
    use_iterative_root: bool
    root: Root | None
    relative_epsilon: bool
    block_size: int | None
    merge_dims: bool
    skip_vectors: bool
    stagger: bool
    grafting: Grafting | None
    grafting_decay: Any
    grafting_eps: float
    momentum: float | None
    nesterov: bool
    start_step: int
    axis_name: str | None

    @property
    def method(self) -> Root:
        """How roots are computed: a key of ``METHODS``."""
        return self.root or ("two_iterations" if self.use_iterative_root else "eigh")

    @property
    def needs_squares(self) -> bool:
        """Whether the grafted optimizer keeps a mean or a sum of the squared gradient."""
        return self.grafting in ("adagrad", "rmsprop", "adam")

    @property
    def allows_rows(self) -> bool:
        """Whether rows without a gradient have a step of zero and unchanged statistics."""
        return statically_equals(self.gbar_decay, 0) and statically_equals(self.mat_gbar_decay, 1)

    @property
    def scheduled(self) -> dict[str, Any]:
        """The options that may be schedules, by name."""
        return {name: getattr(self, name) for name in SCHEDULED}

    def blocks(self, shape: tuple[int, ...]) -> Blocks:
        """The blocks of a parameter of this shape."""
        return cut(
            shape,
            max_matrix_size=self.max_matrix_size,
            block_size=self.block_size,
            merge_dims=self.merge_dims,
            skip_vectors=self.skip_vectors,
        )


def make_options(
    arguments: Mapping[str, Any],
    names: Mapping[str, str] = MappingProxyType({}),
    **settings: Any,
) -> ShampooOptions:
    """The options, checked.

    Args:
        arguments: of a factory, by name. Those that are not options are ignored.
        names: the name of the factory's argument for each option that it names differently.
        settings: the options that the factory sets itself, by name.

    Raises:
        TypeError: if an argument is of the wrong kind.
        ValueError: if an argument is out of its range.
    """
    fields = [field.name for field in dataclasses.fields(ShampooOptions)]
    given = {f: arguments[names.get(f, f)] for f in fields if f not in settings}
    return _checked(ShampooOptions(**given, **settings), names)


def _checked(options: ShampooOptions, names: Mapping[str, str]) -> ShampooOptions:
    """The options with plain sizes, if they are valid; errors name the caller's arguments."""
    some = lambda *fields: {names.get(f, f): getattr(options, f) for f in fields}
    max_matrix_size = check_size(**some("max_matrix_size"))
    block_size = options.block_size
    if block_size is not None:
        block_size = check_size(1, **some("block_size"))
    decays, weights = ("gbar_decay", "mat_gbar_decay"), ("gbar_weight", "mat_gbar_weight")
    intervals = ("svd_interval", "precond_update_interval")
    check("in [0, 1]", lambda v: 0 <= v <= 1, schedule=True, **some(*decays))
    check_positive(schedule=True, **some(*weights, "alpha"))
    check("at least 1", lambda v: v >= 1, schedule=True, **some(*intervals))
    check_positive(**some("epsilon"))
    [grafting_decay] = check_decays(**some("grafting_decay"))
    check_not_negative(none=True, **some("momentum"))
    check_not_negative(**some("grafting_eps", "start_step"))
    check_flags(**some(*_FLAGS))
    if options.grafting not in GRAFTINGS:
        raise ValueError(f"grafting must be one of {GRAFTINGS}, got {options.grafting!r}")
    if options.root not in (None, *METHODS):
        raise ValueError(f"root must be None or one of {tuple(METHODS)}, got {options.root!r}")
    if options.method != "eigh" and not isinstance(options.alpha, numbers.Real):
        raise TypeError(
            f"alpha must be a plain number for root={options.method!r}, got {options.alpha!r}; "
            "optax.inject_hyperparams needs it among its static_args"
        )
    [(name, interval)] = some("svd_interval").items()
    if options.stagger and not (isinstance(interval, int) and interval > 1):
        raise ValueError(f"{name} must be an int above 1 to stagger, got {interval!r}")
    return dataclasses.replace(
        options,
        max_matrix_size=max_matrix_size,
        block_size=block_size,
        grafting_decay=grafting_decay,
    )


def statically_equals(value: Any, number: int) -> bool:
    """Whether ``value`` is a plain number, known when tracing, and equals this one."""
    return isinstance(value, numbers.Real) and value == number
