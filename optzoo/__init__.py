"""Every optimizer of TensorFlow 1 and of RETURNN, as optax gradient transformations.

An argument of a wrong type is a ``TypeError``, one out of its range a ``ValueError``; both name it.
"""

__version__ = "0.1.0"

import importlib
import types
import typing

from .catalog import CATALOG as CATALOG
from .catalog import DISTRIBUTED as DISTRIBUTED
from .catalog import WRAPPERS as WRAPPERS
from .catalog import Entry as Entry
from .catalog import Method as Method
from .catalog import Wrapper as Wrapper
from .cite import cite as cite
from .core.lines import Lines as Lines
from .core.lines import from_lines as from_lines
from .core.lines import to_lines as to_lines
from .core.rows import SparseRows as SparseRows
from .core.rows import coalesce as coalesce
from .core.rows import densify as densify
from .core.rows import on_values as on_values
from .describe import Description as Description
from .describe import describe as describe
from .distributed.agn import agn as agn
from .distributed.diloco import diloco as diloco
from .distributed.drop_stale import drop_stale_gradient as drop_stale_gradient
from .distributed.elastic_average import elastic_average as elastic_average
from .distributed.engine.collectives import broadcast as broadcast
from .distributed.engine.collectives import per_replica as per_replica
from .distributed.engine.launch import map_over_replicas as map_over_replicas
from .distributed.engine.launch import replica_specs as replica_specs
from .distributed.engine.launch import replicate as replicate
from .distributed.engine.launch import resize_replicas as resize_replicas
from .distributed.engine.launch import scan_local_steps as scan_local_steps
from .distributed.model_average import model_average as model_average
from .distributed.sync_replicas import sync_replicas as sync_replicas
from .first_order.adadelta import adadelta as adadelta
from .first_order.adadelta import scale_by_adadelta as scale_by_adadelta
from .first_order.adagrad import adagrad as adagrad
from .first_order.adagrad import scale_by_adagrad as scale_by_adagrad
from .first_order.adagrad_eps import adagrad_eps as adagrad_eps
from .first_order.adagrad_eps import scale_by_adagrad_eps as scale_by_adagrad_eps
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
from .first_order.counter_row_wise_adagrad import (
    counter_row_wise_adagrad as counter_row_wise_adagrad,
)
from .first_order.cowclip_row_wise_adagrad import (
    cowclip_row_wise_adagrad as cowclip_row_wise_adagrad,
)
from .first_order.custom_adam import custom_adam as custom_adam
from .first_order.global_decay_row_wise_adagrad import (
    global_decay_row_wise_adagrad as global_decay_row_wise_adagrad,
)
from .first_order.grad_variance_scaled import grad_variance_scaled as grad_variance_scaled
from .first_order.grad_variance_scaled import scale_by_grad_variance as scale_by_grad_variance
from .first_order.gradient_descent import gradient_descent as gradient_descent
from .first_order.lamb import lamb as lamb
from .first_order.lamb import partial_row_wise_lamb as partial_row_wise_lamb
from .first_order.lamb import scale_by_lamb as scale_by_lamb
from .first_order.lamb import scale_by_partial_row_wise_lamb as scale_by_partial_row_wise_lamb
from .first_order.lars import lars as lars
from .first_order.lars import scale_by_lars_trust_ratio as scale_by_lars_trust_ratio
from .first_order.lazy_adamw import lazy_adamw as lazy_adamw
from .first_order.lazy_adamw import scale_by_lazy_adamw as scale_by_lazy_adamw
from .first_order.momentum import momentum as momentum
from .first_order.momentum import scale_by_momentum as scale_by_momentum
from .first_order.momentumw import momentumw as momentumw
from .first_order.nadam import nadam as nadam
from .first_order.nadam import scale_by_nadam as scale_by_nadam
from .first_order.neural_optimizer1 import neural_optimizer1 as neural_optimizer1
from .first_order.neural_optimizer1 import scale_by_neural_optimizer1 as scale_by_neural_optimizer1
from .first_order.normalized_sgd import normalized_sgd as normalized_sgd
from .first_order.normalized_sgd import scale_by_own_norm as scale_by_own_norm
from .first_order.partial_row_wise_adam import partial_row_wise_adam as partial_row_wise_adam
from .first_order.partial_row_wise_adam import (
    scale_by_partial_row_wise_adam as scale_by_partial_row_wise_adam,
)
from .first_order.power_sign import power_sign as power_sign
from .first_order.power_sign import scale_by_power_sign as scale_by_power_sign
from .first_order.reg_adagrad import reg_adagrad as reg_adagrad
from .first_order.reg_adagrad import scale_by_reg_adagrad as scale_by_reg_adagrad
from .first_order.rmsprop import rmsprop as rmsprop
from .first_order.row_wise_adagrad import row_wise_adagrad as row_wise_adagrad
from .first_order.row_wise_adagrad import scale_by_row_wise_adagrad as scale_by_row_wise_adagrad
from .first_order.row_wise_lars import row_wise_lars as row_wise_lars
from .first_order.row_wise_rmsprop import row_wise_rmsprop as row_wise_rmsprop
from .first_order.sign_decay import cosine_sign_decay as cosine_sign_decay
from .first_order.sign_decay import linear_sign_decay as linear_sign_decay
from .first_order.sign_decay import restart_sign_decay as restart_sign_decay
from .growing.reset_rows import reset_rows as reset_rows
from .growing.resize_table import resize_table as resize_table
from .growing.vocabulary import Vocabulary as Vocabulary
from .proximal.adagrad_da import adagrad_da as adagrad_da
from .proximal.ftrl import ftrl as ftrl
from .proximal.ftrl_from import InitialValueWarning as InitialValueWarning
from .proximal.ftrl_from import ftrl_from as ftrl_from
from .proximal.proximal_adagrad import proximal_adagrad as proximal_adagrad
from .proximal.proximal_gradient_descent import (
    proximal_gradient_descent as proximal_gradient_descent,
)
from .registry import create as create
from .registry import register as register
from .rules.leafwise import full as full
from .rules.leafwise import leafwise as leafwise
from .rules.leafwise import zeros as zeros
from .rules.learning_rate import scale_by_learning_rate as scale_by_learning_rate
from .rules.policies import RowsPolicy as RowsPolicy
from .rules.policies import Rule as Rule
from .rules.policies import dense as dense
from .rules.policies import lazy as lazy
from .rules.policies import linear as linear
from .rules.policies import touched as touched
from .rules.treewise import treewise as treewise
from .second_order.ggt import ggt as ggt
from .second_order.ggt import scale_by_ggt as scale_by_ggt
from .second_order.shampoo.api import blocked_shampoo as blocked_shampoo
from .second_order.shampoo.api import scale_by_shampoo as scale_by_shampoo
from .second_order.shampoo.api import shampoo as shampoo
from .second_order.shampoo.grafting import graft as graft
from .second_order.soap import scale_by_soap as scale_by_soap
from .second_order.soap import soap as soap
from .sharded.bags import lookup_sparse as lookup_sparse
from .sharded.create_table import create_table as create_table
from .sharded.create_table import uniform_rows as uniform_rows
from .sharded.lookup import sharded_lookup as sharded_lookup
from .sharded.order_of_ids import from_order_of_ids as from_order_of_ids
from .sharded.order_of_ids import in_order_of_ids as in_order_of_ids
from .sharded.row_sharding import RowSharding as RowSharding
from .sleeping.catch_up import catch_up as catch_up
from .sleeping.catch_up import flush as flush
from .sleeping.caught_up import caught_up as caught_up
from .sleeping.caught_up import take_over as take_over
from .sparse.lookup import lookup as lookup
from .sparse.lookup import value_and_grad as value_and_grad
from .sparse.on_rows import on_rows as on_rows
from .sparse.row_major import row_major as row_major
from .sparse.wanted import DenseGradientWarning as DenseGradientWarning
from .state.averages import swap as swap
from .state.sharding import state_sharding as state_sharding
from .state.slots import get_slot as get_slot
from .state.slots import set_slot as set_slot
from .state.slots import slot_names as slot_names
from .state.storage import slots_like as slots_like
from .state.types import LeafwiseState as LeafwiseState
from .state.types import LocalSGDState as LocalSGDState
from .state.types import ReplicaState as ReplicaState
from .state.types import SharedParamsState as SharedParamsState
from .state.types import Slot as Slot
from .train.eval_params import eval_params as eval_params
from .train.minimize import minimize as minimize
from .train.sharded_minimize import sharded_minimize as sharded_minimize
from .transforms.arithmetic import add as add
from .transforms.arithmetic import global_norm as global_norm
from .transforms.arithmetic import psum as psum
from .transforms.check_numerics import check_numerics as check_numerics
from .transforms.clip_by_average_norm import clip_by_average_norm as clip_by_average_norm
from .transforms.clip_by_global_norm import clip_by_global_norm as clip_by_global_norm
from .transforms.clip_by_norm import clip_by_norm as clip_by_norm
from .transforms.nan_inf_filter import gradient_nan_inf_filter as gradient_nan_inf_filter
from .transforms.scale import scale as scale
from .transforms.scale import scale_by_schedule as scale_by_schedule
from .transforms.summaries import gradient_summaries as gradient_summaries
from .transforms.summaries import read_summaries as read_summaries
from .transforms.zero_if_norm_exceeds import zero_if_norm_exceeds as zero_if_norm_exceeds
from .wrappers.accumulate import accumulate as accumulate
from .wrappers.ema_in_place import ema_in_place as ema_in_place
from .wrappers.ensemble import ensemble as ensemble
from .wrappers.groups import groups as groups
from .wrappers.master_weights import MasterWeightsState as MasterWeightsState
from .wrappers.master_weights import master_weights as master_weights
from .wrappers.master_weights import split_params as split_params
from .wrappers.master_weights import wide_params as wide_params
from .wrappers.moving_average import moving_average as moving_average
from .wrappers.multitask import multitask as multitask
from .wrappers.slots_dtype import slots_dtype as slots_dtype
from .wrappers.stacked import stacked as stacked
from .wrappers.variable_clipping import variable_clipping as variable_clipping
from .wrappers.weight_decay import decoupled_weight_decay as decoupled_weight_decay

if typing.TYPE_CHECKING:
    from .compiled.devices import devices_of as devices_of
    from .compiled.report import CompileReport as CompileReport
    from .compiled.report import compile_report as compile_report
    from .interop.fbgemm.optimizer import fbgemm_optimizer as fbgemm_optimizer
    from .interop.fbgemm.state import fbgemm_state_dict as fbgemm_state_dict
    from .interop.fbgemm.state import load_fbgemm_state as load_fbgemm_state
    from .interop.fbgemm.state import save_fbgemm_state as save_fbgemm_state
    from .interop.keras import keras_optimizer as keras_optimizer
    from .interop.nnx import nnx_minimize as nnx_minimize
    from .interop.returnn.learning_rate import LearningRateControl as LearningRateControl
    from .interop.returnn.updater import returnn_updater as returnn_updater
    from .interop.sparsecore.api import sparsecore as sparsecore
    from .interop.tf1.load import load_tf1_state as load_tf1_state
    from .interop.tf1.save import save_tf1_state as save_tf1_state
    from .interop.tf1.save import tf1_variables as tf1_variables
    from .native.step import native_step as native_step

# What belongs to other libraries and compilers is imported at its first use.
_LATER = {
    "CompileReport": "compiled.report",
    "LearningRateControl": "interop.returnn.learning_rate",
    "compile_report": "compiled.report",
    "devices_of": "compiled.devices",
    "fbgemm_optimizer": "interop.fbgemm.optimizer",
    "fbgemm_state_dict": "interop.fbgemm.state",
    "keras_optimizer": "interop.keras",
    "nnx_minimize": "interop.nnx",
    "load_fbgemm_state": "interop.fbgemm.state",
    "load_tf1_state": "interop.tf1.load",
    "native_step": "native.step",
    "returnn_updater": "interop.returnn.updater",
    "save_fbgemm_state": "interop.fbgemm.state",
    "save_tf1_state": "interop.tf1.save",
    "sparsecore": "interop.sparsecore.api",
    "tf1_variables": "interop.tf1.save",
}
# These are public in other modules, too, such as optzoo.rules; ``import *`` does not bring them.
_ALIASES = {
    "CompileReport", "Description", "Entry", "LearningRateControl", "Method", "Wrapper", "dense",
    "full", "lazy", "linear", "touched", "tf1_variables", "zeros",
}  # fmt: skip

if not typing.TYPE_CHECKING:  # type checkers read the imports above
    _NAMES = {name for name, thing in vars().items() if not isinstance(thing, types.ModuleType)}
    __all__ = sorted(name for name in {*_NAMES, *_LATER} - _ALIASES if name[0] != "_")

    def __getattr__(name):
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        thing = getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
        return globals().setdefault(name, thing)

    def __dir__():
        return sorted({*globals(), *_LATER})
