"""The directions of torch's RAdam and NAdam, which optax does not have in this form."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from ...core.checks import check_decays, check_not_negative
from ...core.short import short_repr


def scale_by_torch_radam(b1: float, b2: float, eps: float) -> optax.GradientTransformation:
    r"""The direction of ``torch.optim.RAdam``.

    .. math::
        u_t = \hat m_t\, r_t\, \frac{\sqrt{1 - \beta_2^t}}{\sqrt{v_t} + \epsilon}
        \quad \text{if } \rho_t > 5, \text{ else } \hat m_t

    with the means of Adam, :math:`\rho_t` of :func:`length_of_mean`, :math:`\rho` its limit, and

    .. math::
        r_t = \sqrt{\frac{(\rho_t - 4)(\rho_t - 2)\, \rho}{(\rho - 4)(\rho - 2)\, \rho_t}}

    In ``optax.radam`` :math:`\epsilon` is added after the bias correction.

    References:
        Liu et al., `On the Variance of the Adaptive Learning Rate and Beyond
        <https://arxiv.org/abs/1908.03265>`_, 2020.
    """
    b1, b2 = check_decays(beta1=b1, beta2=b2)
    check_not_negative(eps=eps)
    limit = 2 / (1 - b2) - 1

    def init(params):
        mu, nu = optax.tree.zeros_like(params), optax.tree.zeros_like(params)
        return optax.ScaleByAdamState(jnp.zeros((), jnp.int32), mu, nu)

    def update(updates, state, params=None):
        del params
        mu, nu, count = _next(updates, state, b1, b2)
        direction = optax.tree.bias_correction(mu, b1, count)
        if limit > 5:  # else no length is above 5
            length = length_of_mean(b2, count)
            is_long = length > 5
            rest = jnp.where(is_long, length, 6.0)  # no root of a negative number
            factor = jnp.sqrt(
                (rest - 4) * (rest - 2) * limit / ((limit - 4) * (limit - 2) * rest)
            ) * jnp.sqrt(-jnp.expm1(count * math.log(b2)))
            adapt = lambda m, v: jnp.where(is_long, m * (factor / (jnp.sqrt(v) + eps)), m)
            direction = jax.tree.map(lambda m, v: adapt(m, v).astype(m.dtype), direction, nu)
        return direction, optax.ScaleByAdamState(count, mu, nu)

    return optax.GradientTransformation(init, update)


class TorchNAdamState(NamedTuple):
    """The state of :func:`scale_by_torch_nadam`."""

    count: jax.typing.ArrayLike
    mu_product: jax.Array  # of the coefficients of all steps
    mu: optax.Updates
    nu: optax.Updates

    __repr__ = short_repr


def scale_by_torch_nadam(
    b1: float, b2: float, eps: float, momentum_decay: float
) -> optax.GradientTransformation:
    r"""The direction of ``torch.optim.NAdam``.

    .. math::
        \mu_t &= \beta_1 (1 - \tfrac12\, 0.96^{t \psi}) \\
        u_t &= \Bigl(\frac{\mu_{t+1}\, m_t}{1 - \prod_{i \le t+1} \mu_i}
               + \frac{(1 - \mu_t)\, g_t}{1 - \prod_{i \le t} \mu_i}\Bigr)
               \Big/ \Bigl(\sqrt{\hat v_t} + \epsilon\Bigr)

    with the means of Adam, and ``momentum_decay`` :math:`\psi`.

    References:
        Dozat, `Incorporating Nesterov Momentum into Adam
        <https://openreview.net/forum?id=OM0jvwB8jIp57ZJjtNEZ>`_, 2016.
    """
    b1, b2 = check_decays(beta1=b1, beta2=b2)
    check_not_negative(eps=eps, momentum_decay=momentum_decay)
    coefficient = lambda t: b1 * (1 - 0.5 * jnp.exp(t * (momentum_decay * math.log(0.96))))

    def init(params):
        mu, nu = optax.tree.zeros_like(params), optax.tree.zeros_like(params)
        return TorchNAdamState(jnp.zeros((), jnp.int32), jnp.ones(()), mu, nu)

    def update(updates, state, params=None):
        del params
        mu, nu, count = _next(updates, state, b1, b2)
        now, ahead = coefficient(count), coefficient(count + 1)
        product = (state.mu_product * now).astype(state.mu_product.dtype)
        of_gradient = (1 - now) / (1 - product)
        of_mean = ahead / (1 - product * ahead)

        def direction(g, m, v):
            return ((of_gradient * g + of_mean * m) / (jnp.sqrt(v) + eps)).astype(m.dtype)

        corrected = optax.tree.bias_correction(nu, b2, count)
        direction = jax.tree.map(direction, updates, mu, corrected)
        return direction, TorchNAdamState(count, product, mu, nu)

    return optax.GradientTransformation(init, update)


def _next(updates, state, b1, b2):
    """The means after a gradient, and the number of steps so far."""
    mu = optax.tree.update_moment(updates, state.mu, b1, 1)
    nu = optax.tree.update_moment_per_elem_norm(updates, state.nu, b2, 2)
    return mu, nu, optax.safe_increment(state.count)


def length_of_mean(b2, t):
    r"""RAdam's length of the mean of squares after :math:`t` steps.

    .. math:: \rho_t = \frac{2}{1 - \beta_2} - 1 - \frac{2 t \beta_2^t}{1 - \beta_2^t}

    In the first steps these terms are large and almost equal: in float32 their difference, which is
    compared with 5, would have an error of 0.02. With :math:`x = -\log \beta_2` and :math:`L(z) =
    \coth z - 1/z` it equals :math:`t + L(x/2) - t L(tx/2)`, which has small terms.
    """
    x = -math.log(b2)
    early = t + _langevin(x / 2) - t * _langevin(jnp.minimum(t * (x / 2), 1.0))
    late = 2 / (1 - b2) - 1 - 2 * t / jnp.expm1(t * x)
    return jnp.where(t * x < 2, early, late)


def _langevin(z):
    """coth(z) - 1/z for z from 0 to 1, by its continued fraction."""
    rest = 0.0
    for odd in (13, 11, 9, 7, 5, 3):
        rest = z * z / (odd + rest)
    return rest / z
