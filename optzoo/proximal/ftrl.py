"""FTRL-Proximal: follow the regularized leader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax
from jax import Array

from ..core.checks import check, check_not_negative, check_rate
from ..core.marks import marked
from ..core.numerics import power, safe_divide, sqrt
from ..core.optimizer import recorded
from ..rules.leafwise import full, leafwise, zeros
from ..rules.learning_rate import row_wise
from ..state.types import Sum
from .shrink import soft_threshold


class FtrlSlots(NamedTuple):
    """The slots of FTRL."""

    accum: Sum  # sum of the squared gradients
    linear: Sum  # coefficients of the linear term


@recorded
def ftrl(
    learning_rate: optax.ScalarOrSchedule,
    learning_rate_power: float = -0.5,
    initial_accumulator_value: float = 0.1,
    l1_regularization_strength: float = 0.0,
    l2_regularization_strength: float = 0.0,
    l2_shrinkage_regularization_strength: float = 0.0,
    beta: float = 0.0,
) -> optax.GradientTransformationExtraArgs:
    r"""FTRL-Proximal, as in ``tf.train.FtrlOptimizer``.

    .. math::
        n_t &= n_{t-1} + g_t^2 \\
        z_t &= z_{t-1} + g_t + 2 S x_{t-1} - \frac{n_t^{-p} - n_{t-1}^{-p}}{\eta_t}\, x_{t-1} \\
        x_t &= \frac{\mathrm{clip}(z_t, -\lambda_1, \lambda_1) - z_t}
                    {(\beta + n_t^{-p}) / \eta_t + 2 \lambda_2}

    Many parameters become exactly zero for :math:`\lambda_1 > 0`. Without penalties the first
    update keeps the fraction :math:`(n_1^{-p} - n_0^{-p}) / (\beta + n_1^{-p})` of the initial
    value :math:`x_0`: it is small if :math:`n_0` or :math:`\beta` is large relative to the
    gradient, and 0 if the gradient is zero. Rows without a gradient keep their parameters and slots
    (:func:`optzoo.rules.lazy`). :func:`optzoo.ftrl_from` accepts the arguments of other libraries,
    where the same names have other meanings.

    An update with a rate of exactly zero changes neither parameters nor slots, and its gradient is
    lost: as :math:`\eta_t` goes to 0, :math:`z_t` has no limit. The parameters depend on the rate
    of the current update: a falling rate shrinks them, and a tiny rate in a single update makes
    them very large in the next one (``docs/ftrl.md``).

    The transformation computes new parameters from the old ones: it applies the learning rate
    itself and must be the last of a chain.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.ftrl(0.1, l1_regularization_strength=1.0)
        >>> params = jnp.zeros(2)
        >>> updates, state = tx.update(jnp.array([0.5, -4.0]), tx.init(params), params)
        >>> print((params + updates))  # a gradient below the L1 strength: exactly zero
        [0.     0.0748]

    Args:
        learning_rate: :math:`\eta`, a positive number, or a schedule, which may be zero.
        learning_rate_power: :math:`p`, at most 0; with 0 the learning rate is constant.
        initial_accumulator_value: :math:`n_0`, at least 0.
        l1_regularization_strength: :math:`\lambda_1`, at least 0.
        l2_regularization_strength: :math:`\lambda_2`, at least 0, a penalty on the solution.
        l2_shrinkage_regularization_strength: :math:`S`, at least 0, a penalty added to the
            gradient: it shrinks the parameters and does not enter :math:`n_t`.
        beta: :math:`\beta`, at least 0: it bounds the rate of the first updates by :math:`\eta /
            \beta`. TensorFlow 1 has no such argument.

    Raises:
        ValueError: if no params are given to ``update``.

    References:
        McMahan et al., `Ad Click Prediction: a View from the Trenches
        <https://research.google/pubs/ad-click-prediction-a-view-from-the-trenches/>`_, 2013.

    Differences from the original:
        An update with a rate of zero changes nothing; in the original it is an error.

        Where the denominator is zero (a zero gradient with ``initial_accumulator_value=0``), the
        parameter becomes zero. The original gives NaN for row-sparse gradients, and infinity where
        shrinkage makes the numerator nonzero.
    """
    # An array is the rate of one step, injected by optax from a schedule, and may be zero.
    check_rate(learning_rate, positive=not isinstance(learning_rate, Array))
    check("zero or negative", lambda v: v <= 0, learning_rate_power=learning_rate_power)
    check_not_negative(
        initial_accumulator_value=initial_accumulator_value,
        l1_regularization_strength=l1_regularization_strength,
        l2_regularization_strength=l2_regularization_strength,
        l2_shrinkage_regularization_strength=l2_shrinkage_regularization_strength,
        beta=beta,
    )
    l1, l2 = l1_regularization_strength, l2_regularization_strength
    shrinkage = l2_shrinkage_regularization_strength

    # Values of optax.inject_hyperparams are traced and cannot be compared.
    is_square_root = isinstance(learning_rate_power, float) and learning_rate_power == -0.5
    has_beta = not (isinstance(beta, float | int) and beta == 0)

    def to_rate(n):
        return sqrt(n) if is_square_root else power(n, -learning_rate_power)

    def rule(g, x, s, t, learning_rate):
        learning_rate, unless_zero = _with_zero(learning_rate)
        # Without a gradient and shrinkage the slots are unchanged.
        g, strength = unless_zero(g), unless_zero(shrinkage)
        sigma = (to_rate(s.accum + g**2) - to_rate(s.accum)) / learning_rate
        linear = s.linear + g + 2 * strength * x - sigma * x
        accum = _after(s.accum, linear) + g**2

        def update(s):
            inverse_rate = to_rate(s.accum) + beta if has_beta else to_rate(s.accum)
            quadratic = inverse_rate / learning_rate + 2 * l2
            return unless_zero(safe_divide(-soft_threshold(s.linear, l1), quadratic) - x)

        return update, FtrlSlots(accum, linear)

    tx = leafwise(
        rule,
        slots=FtrlSlots(accum=full(initial_accumulator_value), linear=zeros),
        scheduled={"learning_rate": learning_rate},
        needs_params=True,
    )
    return row_wise(tx)


def _with_zero(learning_rate: Array) -> tuple[Array, Callable[[Any], Any]]:
    """A nonzero rate to divide by, and a function that zeroes values if the given rate is zero."""
    is_zero = learning_rate == 0
    return jnp.where(is_zero, 1, learning_rate), lambda a: jnp.where(is_zero, 0, a)


@marked("after")  # of a native loop it is `a`: it costs a square root
def _after(a: Array, other: Array) -> Array:
    """``a``, which is not negative, computed after ``other``.

    The accumulator is updated in place, so all reads of its old value (by the linear term) must
    come first. Unless the data flow enforces this order, XLA copies the accumulator;
    ``jax.lax.optimization_barrier`` does not prevent the copy. Therefore ``a`` depends on ``other``
    by a selection between two equal values, whose equality XLA cannot derive.

    Without this function, ``test_a_dense_step_copies_nothing[ftrl]`` in
    ``tests/rules/test_compiled.py`` fails.
    """
    return jnp.where(jnp.isnan(other), jnp.abs(a), a)
