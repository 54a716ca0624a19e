"""Transformations for chains: clipping, checks, summaries, and optimizers without a rate."""

from ..first_order.adadelta import scale_by_adadelta as scale_by_adadelta
from ..first_order.adagrad import scale_by_adagrad as scale_by_adagrad
from ..first_order.adagrad_eps import scale_by_adagrad_eps as scale_by_adagrad_eps
from ..first_order.adam import scale_by_adam as scale_by_adam
from ..first_order.adam import scale_by_lazy_adam as scale_by_lazy_adam
from ..first_order.adam_gs import scale_by_adam_gs as scale_by_adam_gs
from ..first_order.adam_gs import scale_by_lazy_adam_gs as scale_by_lazy_adam_gs
from ..first_order.adam_weight_decay import scale_by_adam_weight_decay as scale_by_adam_weight_decay
from ..first_order.adamax import scale_by_adamax as scale_by_adamax
from ..first_order.add_sign import scale_by_add_sign as scale_by_add_sign
from ..first_order.amsgrad import scale_by_amsgrad as scale_by_amsgrad
from ..first_order.grad_variance_scaled import scale_by_grad_variance as scale_by_grad_variance
from ..first_order.lamb import scale_by_lamb as scale_by_lamb
from ..first_order.lars import scale_by_lars_trust_ratio as scale_by_lars_trust_ratio
from ..first_order.momentum import scale_by_momentum as scale_by_momentum
from ..first_order.nadam import scale_by_nadam as scale_by_nadam
from ..first_order.neural_optimizer1 import scale_by_neural_optimizer1 as scale_by_neural_optimizer1
from ..first_order.normalized_sgd import scale_by_own_norm as scale_by_own_norm
from ..first_order.partial_row_wise_adam import (
    scale_by_partial_row_wise_adam as scale_by_partial_row_wise_adam,
)
from ..first_order.power_sign import scale_by_power_sign as scale_by_power_sign
from ..first_order.reg_adagrad import scale_by_reg_adagrad as scale_by_reg_adagrad
from ..first_order.row_wise_adagrad import scale_by_row_wise_adagrad as scale_by_row_wise_adagrad
from ..first_order.row_wise_lamb import (
    scale_by_partial_row_wise_lamb as scale_by_partial_row_wise_lamb,
)
from ..first_order.row_wise_lamb import scale_by_row_wise_lamb as scale_by_row_wise_lamb
from ..first_order.sparse_adamw import scale_by_sparse_adamw as scale_by_sparse_adamw
from ..rules.learning_rate import scale_by_learning_rate as scale_by_learning_rate
from ..second_order.ggt import scale_by_ggt as scale_by_ggt
from ..second_order.muon import scale_by_muon as scale_by_muon
from ..second_order.shampoo.api import scale_by_shampoo as scale_by_shampoo
from ..second_order.shampoo.grafting import graft as graft
from ..second_order.soap import scale_by_soap as scale_by_soap
from .check_numerics import check_numerics as check_numerics
from .clip_by_average_norm import clip_by_average_norm as clip_by_average_norm
from .clip_by_norm import clip_by_norm as clip_by_norm
from .nan_inf_filter import gradient_nan_inf_filter as gradient_nan_inf_filter
from .scale import scale as scale
from .scale import scale_by_schedule as scale_by_schedule
from .summaries import gradient_summaries as gradient_summaries
from .summaries import read_summaries as read_summaries
from .zero_if_norm_exceeds import zero_if_norm_exceeds as zero_if_norm_exceeds
