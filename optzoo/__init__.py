"""Every optimizer of TensorFlow 1 and of RETURNN, as optax gradient transformations.

An argument of a wrong type is a ``TypeError``, one out of its range a ``ValueError``; both name it.
"""

__version__ = "0.1.0"

from .catalog import CATALOG, DISTRIBUTED, WRAPPERS
from .catalog import Entry as Entry
from .catalog import Method as Method
from .catalog import Wrapper as Wrapper
from .cite import cite
from .compiled.devices import devices_of as devices_of
from .compiled.report import CompileReport as CompileReport
from .compiled.report import compile_report as compile_report
from .core.lines import Lines, from_lines, to_lines
from .core.rows import SparseRows, coalesce, densify, on_values
from .describe import Description as Description
from .describe import describe
from .distributed.agn import agn
from .distributed.diloco import diloco
from .distributed.drop_stale import drop_stale_gradient
from .distributed.elastic_average import elastic_average
from .distributed.engine.collectives import broadcast, per_replica
from .distributed.engine.launch import (
    map_over_replicas,
    replica_specs,
    replicate,
    resize_replicas,
    scan_local_steps,
)
from .distributed.model_average import model_average
from .distributed.sync_replicas import sync_replicas
from .first_order.adadelta import adadelta, scale_by_adadelta
from .first_order.adagrad import adagrad, scale_by_adagrad
from .first_order.adagrad_eps import adagrad_eps, scale_by_adagrad_eps
from .first_order.adam import adam, lazy_adam, scale_by_adam, scale_by_lazy_adam
from .first_order.adam_gs import adam_gs, lazy_adam_gs, scale_by_adam_gs, scale_by_lazy_adam_gs
from .first_order.adamax import adamax, scale_by_adamax
from .first_order.adamw import adamw
from .first_order.add_sign import add_sign, scale_by_add_sign
from .first_order.amsgrad import amsgrad, scale_by_amsgrad
from .first_order.counter_row_wise_adagrad import counter_row_wise_adagrad
from .first_order.cowclip_row_wise_adagrad import cowclip_row_wise_adagrad
from .first_order.custom_adam import custom_adam
from .first_order.global_decay_row_wise_adagrad import global_decay_row_wise_adagrad
from .first_order.grad_variance_scaled import grad_variance_scaled, scale_by_grad_variance
from .first_order.gradient_descent import gradient_descent
from .first_order.lamb import (
    lamb,
    partial_row_wise_lamb,
    scale_by_lamb,
    scale_by_partial_row_wise_lamb,
)
from .first_order.lars import lars, scale_by_lars_trust_ratio
from .first_order.lazy_adamw import lazy_adamw, scale_by_lazy_adamw
from .first_order.momentum import momentum, scale_by_momentum
from .first_order.momentumw import momentumw
from .first_order.nadam import nadam, scale_by_nadam
from .first_order.neural_optimizer1 import neural_optimizer1, scale_by_neural_optimizer1
from .first_order.normalized_sgd import normalized_sgd, scale_by_own_norm
from .first_order.partial_row_wise_adam import partial_row_wise_adam, scale_by_partial_row_wise_adam
from .first_order.power_sign import power_sign, scale_by_power_sign
from .first_order.reg_adagrad import reg_adagrad, scale_by_reg_adagrad
from .first_order.rmsprop import rmsprop
from .first_order.row_wise_adagrad import row_wise_adagrad, scale_by_row_wise_adagrad
from .first_order.row_wise_lars import row_wise_lars
from .first_order.row_wise_rmsprop import row_wise_rmsprop
from .first_order.sign_decay import cosine_sign_decay, linear_sign_decay, restart_sign_decay
from .interop.fbgemm.optimizer import fbgemm_optimizer
from .interop.fbgemm.state import fbgemm_state_dict, load_fbgemm_state, save_fbgemm_state
from .interop.keras import keras_optimizer
from .interop.returnn.learning_rate import LearningRateControl as LearningRateControl
from .interop.returnn.updater import returnn_updater
from .interop.sparsecore.api import sparsecore
from .interop.tf1.load import load_tf1_state
from .interop.tf1.save import save_tf1_state
from .interop.tf1.save import tf1_variables as tf1_variables
from .native.step import native_step as native_step
from .proximal.adagrad_da import adagrad_da
from .proximal.ftrl import ftrl
from .proximal.ftrl_from import InitialValueWarning, ftrl_from
from .proximal.proximal_adagrad import proximal_adagrad
from .proximal.proximal_gradient_descent import proximal_gradient_descent
from .registry import create, register
from .rules.leafwise import full as full
from .rules.leafwise import leafwise
from .rules.leafwise import zeros as zeros
from .rules.learning_rate import scale_by_learning_rate
from .rules.policies import RowsPolicy, Rule
from .rules.policies import dense as dense
from .rules.policies import lazy as lazy
from .rules.policies import linear as linear
from .rules.policies import touched as touched
from .rules.treewise import treewise
from .second_order.ggt import ggt, scale_by_ggt
from .second_order.shampoo.api import blocked_shampoo, scale_by_shampoo, shampoo
from .second_order.shampoo.grafting import graft
from .second_order.soap import scale_by_soap, soap
from .sharded.bags import lookup_sparse
from .sharded.create_table import create_table, uniform_rows
from .sharded.lookup import sharded_lookup
from .sharded.minimize import sharded_minimize
from .sharded.order_of_ids import from_order_of_ids, in_order_of_ids
from .sharded.row_sharding import RowSharding
from .sparse.caught_up import caught_up, take_over
from .sparse.lookup import DenseGradientWarning, lookup, value_and_grad
from .sparse.minimize import minimize
from .sparse.on_rows import on_rows
from .sparse.row_major import row_major
from .state.averages import eval_params, swap
from .state.sharding import state_sharding
from .state.sleeping.tables import catch_up, flush
from .state.slots import get_slot, set_slot, slot_names
from .state.types import LeafwiseState, LocalSGDState, ReplicaState, SharedParamsState, Slot
from .transforms.arithmetic import add, global_norm, psum
from .transforms.check_numerics import check_numerics
from .transforms.clip_by_average_norm import clip_by_average_norm
from .transforms.clip_by_global_norm import clip_by_global_norm
from .transforms.clip_by_norm import clip_by_norm
from .transforms.nan_inf_filter import gradient_nan_inf_filter
from .transforms.scale import scale, scale_by_schedule
from .transforms.summaries import gradient_summaries, read_summaries
from .transforms.zero_if_norm_exceeds import zero_if_norm_exceeds
from .wrappers.accumulate import accumulate
from .wrappers.ema_in_place import ema_in_place
from .wrappers.ensemble import ensemble
from .wrappers.groups import groups
from .wrappers.moving_average import moving_average
from .wrappers.multitask import multitask
from .wrappers.slots_dtype import slots_dtype
from .wrappers.stacked import stacked
from .wrappers.variable_clipping import variable_clipping
from .wrappers.weight_decay import decoupled_weight_decay

__all__ = [
    "CATALOG",
    "DISTRIBUTED",
    "WRAPPERS",
    "DenseGradientWarning",
    "InitialValueWarning",
    "LeafwiseState",
    "Lines",
    "LocalSGDState",
    "ReplicaState",
    "RowSharding",
    "RowsPolicy",
    "Rule",
    "SharedParamsState",
    "Slot",
    "SparseRows",
    "accumulate",
    "adadelta",
    "adagrad",
    "adagrad_da",
    "adagrad_eps",
    "adam",
    "adam_gs",
    "adamax",
    "adamw",
    "add",
    "add_sign",
    "agn",
    "amsgrad",
    "blocked_shampoo",
    "broadcast",
    "catch_up",
    "caught_up",
    "check_numerics",
    "cite",
    "clip_by_average_norm",
    "clip_by_global_norm",
    "clip_by_norm",
    "coalesce",
    "compile_report",
    "cosine_sign_decay",
    "counter_row_wise_adagrad",
    "cowclip_row_wise_adagrad",
    "create",
    "create_table",
    "custom_adam",
    "decoupled_weight_decay",
    "densify",
    "describe",
    "devices_of",
    "diloco",
    "drop_stale_gradient",
    "elastic_average",
    "ema_in_place",
    "ensemble",
    "eval_params",
    "fbgemm_optimizer",
    "fbgemm_state_dict",
    "flush",
    "from_lines",
    "from_order_of_ids",
    "ftrl",
    "ftrl_from",
    "get_slot",
    "ggt",
    "global_decay_row_wise_adagrad",
    "global_norm",
    "grad_variance_scaled",
    "gradient_descent",
    "gradient_nan_inf_filter",
    "gradient_summaries",
    "graft",
    "groups",
    "in_order_of_ids",
    "keras_optimizer",
    "lamb",
    "lars",
    "lazy_adam",
    "lazy_adam_gs",
    "lazy_adamw",
    "leafwise",
    "linear_sign_decay",
    "load_fbgemm_state",
    "load_tf1_state",
    "lookup",
    "lookup_sparse",
    "map_over_replicas",
    "minimize",
    "model_average",
    "momentum",
    "momentumw",
    "moving_average",
    "multitask",
    "nadam",
    "native_step",
    "neural_optimizer1",
    "normalized_sgd",
    "on_rows",
    "on_values",
    "partial_row_wise_adam",
    "partial_row_wise_lamb",
    "per_replica",
    "power_sign",
    "proximal_adagrad",
    "proximal_gradient_descent",
    "psum",
    "read_summaries",
    "reg_adagrad",
    "register",
    "replica_specs",
    "replicate",
    "resize_replicas",
    "restart_sign_decay",
    "returnn_updater",
    "rmsprop",
    "row_major",
    "row_wise_adagrad",
    "row_wise_lars",
    "row_wise_rmsprop",
    "save_fbgemm_state",
    "save_tf1_state",
    "scale",
    "scale_by_adadelta",
    "scale_by_adagrad",
    "scale_by_adagrad_eps",
    "scale_by_adam",
    "scale_by_adam_gs",
    "scale_by_adamax",
    "scale_by_add_sign",
    "scale_by_amsgrad",
    "scale_by_ggt",
    "scale_by_grad_variance",
    "scale_by_lamb",
    "scale_by_lars_trust_ratio",
    "scale_by_lazy_adam",
    "scale_by_lazy_adam_gs",
    "scale_by_lazy_adamw",
    "scale_by_learning_rate",
    "scale_by_momentum",
    "scale_by_nadam",
    "scale_by_neural_optimizer1",
    "scale_by_own_norm",
    "scale_by_partial_row_wise_adam",
    "scale_by_partial_row_wise_lamb",
    "scale_by_power_sign",
    "scale_by_reg_adagrad",
    "scale_by_row_wise_adagrad",
    "scale_by_schedule",
    "scale_by_shampoo",
    "scale_by_soap",
    "scan_local_steps",
    "set_slot",
    "shampoo",
    "sharded_lookup",
    "sharded_minimize",
    "slot_names",
    "slots_dtype",
    "soap",
    "sparsecore",
    "stacked",
    "state_sharding",
    "swap",
    "sync_replicas",
    "take_over",
    "to_lines",
    "treewise",
    "uniform_rows",
    "value_and_grad",
    "variable_clipping",
    "zero_if_norm_exceeds",
]
