"""FTRL with the arguments of other libraries, where the same names have other meanings."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ..core.checks import check_choice, check_not_negative
from ..core.initial_values import InitialValueWarning
from ..core.optimizer import Optimizer, about_of, recorded
from ..core.warn import warn
from .ftrl import ftrl

Dialect = Literal["tf1", "keras", "sparsecore", "dynamicemb"]


@recorded
def ftrl_from(dialect: Dialect, **arguments: Any) -> optax.GradientTransformationExtraArgs:
    r""":func:`optzoo.ftrl` with the arguments of another library: its names and defaults.

    .. code-block:: python

        ftrl_from("dynamicemb", learning_rate=0.1, ftrl_beta=1.0, l2_reg=0.2)
        # the same as
        ftrl(0.1, initial_accumulator_value=0.0, beta=1.0, l2_regularization_strength=0.1)

    In :func:`optzoo.ftrl` and in the first three libraries the denominator contains the L2 strength
    times two, in DynamicEmb and in the paper times one. Keras' documentation has the paper's
    formula, but its code has the factor of two.

    ============== ============================================================================
    ``dialect``    arguments, with their defaults
    ============== ============================================================================
    ``tf1``        of ``tf.train.FtrlOptimizer``: those of :func:`optzoo.ftrl` without ``beta``
    ``keras``      of ``keras.optimizers.Ftrl``: those of :func:`optzoo.ftrl`, with
                   ``learning_rate=0.001``. :func:`optzoo.interop.keras.keras_optimizer` also takes
                   arguments that all Keras optimizers have, such as ``clipnorm``
    ``sparsecore`` of ``FTRLOptimizerSpec`` in jax-tpu-embedding: ``learning_rate=0.01``,
                   ``learning_rate_power=-0.5``, ``l1_regularization_strength=0.0``,
                   ``l2_regularization_strength=0.0``, ``beta=0.0``,
                   ``initial_accumulator_value=0.1``, ``initial_linear_value=0.0``,
                   ``multiply_linear_by_learning_rate=False``
    ``dynamicemb`` of NVIDIA's DynamicEmb: ``learning_rate=0.01``, ``learning_rate_power=-0.5``,
                   ``initial_accumulator_value=0.0``, ``ftrl_beta=0.0``, ``l1_reg=0.0``,
                   ``l2_reg=0.0``
    ============== ============================================================================

    Every ``learning_rate`` may be a schedule. With ``multiply_linear_by_learning_rate``,
    SparseCore's slot ``linear`` is that of this library times the rate, which must be constant.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.ftrl_from("keras", learning_rate=0.1)
        >>> params = jnp.zeros(2)
        >>> updates, state = tx.update(jnp.array([0.5, -4.0]), tx.init(params), params)
        >>> print(updates)
        [-0.0845  0.0997]

    Warns:
        InitialValueWarning: in ``init``, if the parameters are concrete and not all zero, and if
            the first update replaces most of their values because of the accumulator or ``beta``.
            There is no warning for ``tf1``, whose default does this, nor in :func:`optzoo.ftrl`.

    Args:
        dialect: ``"tf1"``, ``"keras"``, ``"sparsecore"`` or ``"dynamicemb"``.
        **arguments: the arguments of that library.

    Raises:
        TypeError: if the library has no such argument, or if an argument is missing or of a wrong
            type.
        ValueError: if there is no such dialect, if ``initial_linear_value`` is not 0, or if the
            rate is a schedule with ``multiply_linear_by_learning_rate``.

    References:
        :func:`optzoo.ftrl`; ``docs/ftrl.md`` shows measured differences from the four libraries.
    """
    check_choice(Dialect, dialect=dialect)
    library = _LIBRARIES[dialect]
    known = inspect.signature(library).parameters
    if unknown := sorted(arguments.keys() - known.keys()):
        raise TypeError(
            f"FTRL of {dialect} has no argument {unknown[0]!r}; its arguments are {_list(known)}"
        )
    if missing := [k for k, p in known.items() if p.default is p.empty and k not in arguments]:
        raise TypeError(f"FTRL of {dialect} needs {_list(missing)}")
    ours = library(**arguments).ours()
    tx = ftrl(**ours)
    return tx if dialect == "tf1" else _warning_of_replaced_values(tx, ours)


@dataclasses.dataclass
class _TF1:
    learning_rate: Any
    learning_rate_power: Any = -0.5
    initial_accumulator_value: Any = 0.1
    l1_regularization_strength: Any = 0.0
    l2_regularization_strength: Any = 0.0
    l2_shrinkage_regularization_strength: Any = 0.0

    def ours(self) -> dict[str, Any]:
        """The arguments of :func:`optzoo.ftrl`."""
        return dict(vars(self))


@dataclasses.dataclass
class _Keras(_TF1):
    learning_rate: Any = 0.001
    beta: Any = 0.0


@dataclasses.dataclass
class _SparseCore:
    learning_rate: Any = 0.01
    learning_rate_power: Any = -0.5
    l1_regularization_strength: Any = 0.0
    l2_regularization_strength: Any = 0.0
    beta: Any = 0.0
    initial_accumulator_value: Any = 0.1
    initial_linear_value: Any = 0.0
    multiply_linear_by_learning_rate: bool = False

    def __post_init__(self) -> None:
        if self.initial_linear_value != 0:
            raise ValueError(
                f"initial_linear_value must be 0, got {self.initial_linear_value!r}: set the slot "
                "'linear' of the state with optzoo.set_slot"
            )
        if self.multiply_linear_by_learning_rate and callable(self.learning_rate):
            raise ValueError(
                "learning_rate must be a number with multiply_linear_by_learning_rate=True, got "
                f"{self.learning_rate!r}: the values equal those of optzoo.ftrl only with a "
                "constant rate"
            )

    def ours(self) -> dict[str, Any]:
        theirs = "initial_linear_value", "multiply_linear_by_learning_rate"
        return {name: value for name, value in vars(self).items() if name not in theirs}


@dataclasses.dataclass
class _DynamicEmb:
    learning_rate: Any = 0.01
    learning_rate_power: Any = -0.5
    initial_accumulator_value: Any = 0.0
    ftrl_beta: Any = 0.0
    l1_reg: Any = 0.0
    l2_reg: Any = 0.0

    def __post_init__(self) -> None:
        check_not_negative(ftrl_beta=self.ftrl_beta, l1_reg=self.l1_reg, l2_reg=self.l2_reg)

    def ours(self) -> dict[str, Any]:
        return {
            "learning_rate": self.learning_rate,
            "learning_rate_power": self.learning_rate_power,
            "initial_accumulator_value": self.initial_accumulator_value,
            "l1_regularization_strength": self.l1_reg,
            "l2_regularization_strength": self.l2_reg / 2,
            "beta": self.ftrl_beta,
        }


_LIBRARIES = dict(zip(get_args(Dialect), (_TF1, _Keras, _SparseCore, _DynamicEmb), strict=True))


def _list(names: Any) -> str:
    return ", ".join(names)


def _warning_of_replaced_values(
    tx: optax.GradientTransformationExtraArgs, arguments: Mapping[str, Any]
) -> optax.GradientTransformationExtraArgs:
    """``tx`` with an ``init`` that warns if the first update replaces most of the parameters."""
    n, beta = arguments["initial_accumulator_value"], arguments["beta"]
    power = arguments["learning_rate_power"]
    if any(isinstance(value, jax.core.Tracer) for value in (n, beta, power)):
        return tx  # inside of jit, where there is no value to warn of
    kept = _kept(n, beta, power, gradient=0.01)
    if kept > 0.99:
        return tx

    def init(params):
        if any(map(_is_known_not_zero, jax.tree.leaves(params))):
            warn(
                "FTRL computes the parameters from its slots alone. With "
                f"initial_accumulator_value={n} and beta={beta} an element whose first gradient "
                f"is 0.01 keeps {kept:.2g} of its initial value. Start from zeros, or set both to "
                "0 to keep initial values; warnings.simplefilter('ignore', "
                "optzoo.InitialValueWarning) silences this",
                InitialValueWarning,
            )
        return tx.init(params)

    return Optimizer(init, tx.update, about_of(tx))


def _kept(n: float, beta: float, power: float, gradient: float) -> float:
    """The fraction of an initial value that the first update keeps, without penalties."""
    after = (n + gradient**2) ** -power
    return (after - n**-power) / (after + beta)


def _is_known_not_zero(x: Any) -> bool:
    """Whether an array is known not to be all zero; False if it is traced or not addressable."""
    if isinstance(x, jax.core.Tracer) or not isinstance(x, jax.Array | np.ndarray):
        return False
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return False
    return jnp.issubdtype(x.dtype, jnp.floating) and bool(jnp.any(x != 0))
