"""Every optimizer of TensorFlow 1 and of RETURNN, as optax gradient transformations."""

__version__ = "0.1.0"

from .catalog import CATALOG as CATALOG
from .catalog import Entry as Entry
from .core.leafwise import LeafwiseState as LeafwiseState
from .core.leafwise import dense as dense
from .core.leafwise import full as full
from .core.leafwise import lazy as lazy
from .core.leafwise import leafwise as leafwise
from .core.leafwise import linear as linear
from .core.leafwise import touched as touched
from .core.leafwise import zeros as zeros
from .core.learning_rate import scale_by_learning_rate as scale_by_learning_rate
from .core.lookup import lookup as lookup
from .core.lookup import value_and_grad as value_and_grad
from .core.minimize import minimize as minimize
from .core.rows import SparseRows as SparseRows
from .core.rows import clip_by_global_norm as clip_by_global_norm
from .core.rows import coalesce as coalesce
from .core.rows import densify as densify
from .core.rows import on_values as on_values
from .core.slots_dtype import slots_dtype as slots_dtype
from .first_order.adadelta import adadelta as adadelta
from .first_order.adadelta import scale_by_adadelta as scale_by_adadelta
from .first_order.adagrad import adagrad as adagrad
from .first_order.adagrad import scale_by_adagrad as scale_by_adagrad
from .first_order.adam import adam as adam
from .first_order.adam import lazy_adam as lazy_adam
from .first_order.adam import scale_by_adam as scale_by_adam
from .first_order.adam import scale_by_lazy_adam as scale_by_lazy_adam
from .first_order.adam_gs import adam_gs as adam_gs
from .first_order.adam_gs import lazy_adam_gs as lazy_adam_gs
from .first_order.adam_gs import scale_by_adam_gs as scale_by_adam_gs
from .first_order.adam_gs import scale_by_lazy_adam_gs as scale_by_lazy_adam_gs
from .first_order.adamax import adamax as adamax
from .first_order.adamax import scale_by_adamax as scale_by_adamax
from .first_order.adamw import adamw as adamw
from .first_order.add_sign import add_sign as add_sign
from .first_order.add_sign import scale_by_add_sign as scale_by_add_sign
from .first_order.amsgrad import amsgrad as amsgrad
from .first_order.amsgrad import scale_by_amsgrad as scale_by_amsgrad
from .first_order.custom_adam import custom_adam as custom_adam
from .first_order.grad_variance_scaled import grad_variance_scaled as grad_variance_scaled
from .first_order.grad_variance_scaled import scale_by_grad_variance as scale_by_grad_variance
from .first_order.gradient_descent import gradient_descent as gradient_descent
from .first_order.momentum import momentum as momentum
from .first_order.momentum import scale_by_momentum as scale_by_momentum
from .first_order.momentumw import momentumw as momentumw
from .first_order.nadam import nadam as nadam
from .first_order.nadam import scale_by_nadam as scale_by_nadam
from .first_order.neural_optimizer1 import neural_optimizer1 as neural_optimizer1
from .first_order.neural_optimizer1 import scale_by_neural_optimizer1 as scale_by_neural_optimizer1
from .first_order.normalized_sgd import normalized_sgd as normalized_sgd
from .first_order.normalized_sgd import scale_by_own_norm as scale_by_own_norm
from .first_order.power_sign import power_sign as power_sign
from .first_order.power_sign import scale_by_power_sign as scale_by_power_sign
from .first_order.reg_adagrad import reg_adagrad as reg_adagrad
from .first_order.reg_adagrad import scale_by_reg_adagrad as scale_by_reg_adagrad
from .first_order.rmsprop import rmsprop as rmsprop
from .first_order.sign_decay import cosine_sign_decay as cosine_sign_decay
from .first_order.sign_decay import linear_sign_decay as linear_sign_decay
from .first_order.sign_decay import restart_sign_decay as restart_sign_decay
from .layerwise.lars import lars as lars
from .layerwise.lars import scale_by_trust_ratio as scale_by_trust_ratio
from .proximal.adagrad_da import adagrad_da as adagrad_da
from .proximal.ftrl import ftrl as ftrl
from .proximal.proximal_adagrad import proximal_adagrad as proximal_adagrad
from .proximal.proximal_gradient_descent import (
    proximal_gradient_descent as proximal_gradient_descent,
)
from .wrappers.moving_average import eval_params as eval_params
from .wrappers.moving_average import moving_average as moving_average
from .wrappers.moving_average import swap as swap
from .wrappers.multitask import multitask as multitask
from .wrappers.variable_clipping import variable_clipping as variable_clipping
from .wrappers.weight_decay import decoupled_weight_decay as decoupled_weight_decay
