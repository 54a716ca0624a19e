"""Optimizers that projects combine from several, available by name in ``optzoo.create`` only."""

from __future__ import annotations

import optax

from ..core.checks import check_size
from ..first_order.adam import adam, lazy_adam
from ..registry import add_name
from ..wrappers.accumulate import accumulate
from ..wrappers.weight_decay import decoupled_weight_decay
from .keras import sgd


def multistep_adam(
    learning_rate: optax.ScalarOrSchedule,
    n: int,
    b1: float = 0.85,
    b2: float = 0.997,
    eps: float = 1e-6,
) -> optax.GradientTransformationExtraArgs:
    """Adam with the mean of the gradients of ``n`` steps; a schedule counts all steps.

    References:
        ``multistep_adam`` of `tensor2tensor <https://github.com/tensorflow/tensor2tensor>`_;
        Saunders et al., `Multi-representation Ensembles and Delayed SGD Updates
        <https://arxiv.org/abs/1805.00456>`_, 2018.
    """
    n, rate = check_size(1, n=n), learning_rate
    if callable(rate):  # the rate of the last step of a cycle
        schedule = rate
        rate = lambda updates: schedule(updates * n + n - 1)
    return accumulate(adam(rate, b1, b2, eps), n, use_mean=True)


def opennmt_adam(
    learning_rate: optax.ScalarOrSchedule,
    beta_1: float = 0.9,
    beta_2: float = 0.999,
    epsilon: float = 1e-7,
    weight_decay: float | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Adam of tf.keras, with the decoupled decay of TensorFlow Addons if a decay is given.

    References:
        ``make_optimizer`` of `OpenNMT-tf <https://github.com/OpenNMT/OpenNMT-tf>`_.
    """
    return _decaying(adam(learning_rate, beta_1, beta_2, epsilon), weight_decay)


def opennmt_adamw(
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: float,
    beta_1: float = 0.9,
    beta_2: float = 0.999,
    epsilon: float = 1e-7,
) -> optax.GradientTransformationExtraArgs:
    """:func:`opennmt_adam` with a required decay, which is not multiplied by the rate.

    References:
        ``tfa.optimizers.AdamW`` of `TensorFlow Addons <https://github.com/tensorflow/addons>`_.
    """
    return opennmt_adam(learning_rate, beta_1, beta_2, epsilon, weight_decay)


def opennmt_lazy_adam(
    learning_rate: optax.ScalarOrSchedule,
    beta_1: float = 0.9,
    beta_2: float = 0.999,
    epsilon: float = 1e-7,
    weight_decay: float | None = None,
) -> optax.GradientTransformationExtraArgs:
    """:func:`opennmt_adam` that does not change rows without a gradient.

    References:
        ``tfa.optimizers.LazyAdam`` of `TensorFlow Addons <https://github.com/tensorflow/addons>`_.
    """
    return _decaying(lazy_adam(learning_rate, beta_1, beta_2, epsilon), weight_decay)


def opennmt_sgd(
    learning_rate: optax.ScalarOrSchedule,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float | None = None,
) -> optax.GradientTransformationExtraArgs:
    """SGD of tf.keras, with the decoupled decay of TensorFlow Addons if a decay is given.

    References:
        ``make_optimizer`` of `OpenNMT-tf <https://github.com/OpenNMT/OpenNMT-tf>`_.
    """
    return _decaying(sgd(learning_rate, momentum, nesterov), weight_decay)


def opennmt_sgdw(
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: float,
    momentum: float = 0.0,
    nesterov: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """:func:`opennmt_sgd` with a required decay, which is not multiplied by the rate.

    References:
        ``tfa.optimizers.SGDW`` of `TensorFlow Addons <https://github.com/tensorflow/addons>`_.
    """
    return opennmt_sgd(learning_rate, momentum, nesterov, weight_decay)


def _decaying(
    inner: optax.GradientTransformationExtraArgs, weight_decay: float | None
) -> optax.GradientTransformationExtraArgs:
    if weight_decay is None:
        return inner
    return decoupled_weight_decay(inner, weight_decay_per_step=weight_decay)


_T2T, _OPENNMT = "tensor2tensor.multistep_adam", "opennmt."
add_name(_T2T, multistep_adam, _T2T)
for _name, _factory in (
    ("Adam", opennmt_adam),
    ("AdamW", opennmt_adamw),
    ("LazyAdam", opennmt_lazy_adam),
    ("SGD", opennmt_sgd),
    ("SGDW", opennmt_sgdw),
):
    add_name(_OPENNMT + _name, _factory, _OPENNMT + _name)
