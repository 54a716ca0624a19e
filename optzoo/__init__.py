"""Optimizers for JAX as optax transformations: all of TensorFlow 1 and RETURNN, and many more.

A wrong type of an argument raises ``TypeError``, a value out of range ``ValueError``; both name the
argument.
"""

__version__ = "0.1.0"

import importlib
import types
import typing

from . import catalog as catalog
from . import growing as growing
from . import registry as registry
from . import replicas as replicas
from . import rows as rows
from . import rules as rules
from . import schedules as schedules
from . import sharded as sharded
from . import state as state
from . import transforms as transforms
from .catalog import CATALOG as CATALOG
from .cite import cite as cite
from .core.initial_values import InitialValueWarning as InitialValueWarning
from .core.rows import SparseRows as SparseRows
from .deferred.caught_up import caught_up as caught_up
from .describe import Description as Description
from .describe import describe as describe
from .distributed.agn import agn as agn
from .distributed.diloco import diloco as diloco
from .distributed.drop_stale import drop_stale_gradient as drop_stale_gradient
from .distributed.elastic_average import elastic_average as elastic_average
from .distributed.model_average import model_average as model_average
from .distributed.sync_replicas import sync_replicas as sync_replicas
from .first_order.adadelta import adadelta as adadelta
from .first_order.adafactor import adafactor as adafactor
from .first_order.adagrad import adagrad as adagrad
from .first_order.adagrad_eps import adagrad_eps as adagrad_eps
from .first_order.adam import adam as adam
from .first_order.adam import lazy_adam as lazy_adam
from .first_order.adam_gs import adam_gs as adam_gs
from .first_order.adam_gs import lazy_adam_gs as lazy_adam_gs
from .first_order.adam_weight_decay import adam_weight_decay as adam_weight_decay
from .first_order.adamax import adamax as adamax
from .first_order.adamw import adamw as adamw
from .first_order.add_sign import add_sign as add_sign
from .first_order.amsgrad import amsgrad as amsgrad
from .first_order.custom_adam import custom_adam as custom_adam
from .first_order.grad_variance_scaled import grad_variance_scaled as grad_variance_scaled
from .first_order.gradient_descent import gradient_descent as gradient_descent
from .first_order.lamb import lamb as lamb
from .first_order.lars import lars as lars
from .first_order.momentum import momentum as momentum
from .first_order.momentumw import momentumw as momentumw
from .first_order.nadam import nadam as nadam
from .first_order.neural_optimizer1 import neural_optimizer1 as neural_optimizer1
from .first_order.normalized_sgd import normalized_sgd as normalized_sgd
from .first_order.partial_row_wise_adam import partial_row_wise_adam as partial_row_wise_adam
from .first_order.power_sign import power_sign as power_sign
from .first_order.reg_adagrad import reg_adagrad as reg_adagrad
from .first_order.rmsprop import rmsprop as rmsprop
from .first_order.row_wise_adagrad import row_wise_adagrad as row_wise_adagrad
from .first_order.row_wise_lamb import partial_row_wise_lamb as partial_row_wise_lamb
from .first_order.row_wise_lamb import row_wise_lamb as row_wise_lamb
from .first_order.row_wise_lars import row_wise_lars as row_wise_lars
from .first_order.row_wise_rmsprop import row_wise_rmsprop as row_wise_rmsprop
from .first_order.sign_decay import cosine_sign_decay as cosine_sign_decay
from .first_order.sign_decay import linear_sign_decay as linear_sign_decay
from .first_order.sign_decay import restart_sign_decay as restart_sign_decay
from .first_order.sparse_adamw import sparse_adamw as sparse_adamw
from .proximal.adagrad_da import adagrad_da as adagrad_da
from .proximal.ftrl import ftrl as ftrl
from .proximal.ftrl_from import ftrl_from as ftrl_from
from .proximal.proximal_adagrad import proximal_adagrad as proximal_adagrad
from .proximal.proximal_gradient_descent import (
    proximal_gradient_descent as proximal_gradient_descent,
)
from .registry import create as create
from .second_order.ggt import ggt as ggt
from .second_order.muon import muon as muon
from .second_order.shampoo.api import blocked_shampoo as blocked_shampoo
from .second_order.shampoo.api import shampoo as shampoo
from .second_order.soap import soap as soap
from .sharded.bags import lookup_sparse as lookup_sparse
from .sparse.lookup import lookup as lookup
from .sparse.lookup import value_and_grad as value_and_grad
from .sparse.on_rows import on_rows as on_rows
from .sparse.wanted import DenseGradientWarning as DenseGradientWarning
from .state.sharding import state_sharding as state_sharding
from .state.slots import get_slot as get_slot
from .state.slots import set_slot as set_slot
from .state.slots import slot_names as slot_names
from .train.eval_params import eval_params as eval_params
from .train.minimize import minimize as minimize
from .train.sharded_minimize import sharded_minimize as sharded_minimize
from .transforms.clip_by_global_norm import clip_by_global_norm as clip_by_global_norm
from .wrappers.accumulate import accumulate as accumulate
from .wrappers.cautious_weight_decay import cautious_weight_decay as cautious_weight_decay
from .wrappers.divide_states import divide_states as divide_states
from .wrappers.ema_nesterov import ema_nesterov as ema_nesterov
from .wrappers.hyperball import hyperball as hyperball
from .wrappers.master_weights import master_weights as master_weights
from .wrappers.master_weights import split_params as split_params
from .wrappers.master_weights import wide_params as wide_params
from .wrappers.moving_average import moving_average as moving_average
from .wrappers.multitask import multitask as multitask
from .wrappers.param_groups import param_groups as param_groups
from .wrappers.skip_spikes import skip_spikes as skip_spikes
from .wrappers.slots_dtype import slots_dtype as slots_dtype
from .wrappers.stacked import stacked as stacked
from .wrappers.variable_clipping import variable_clipping as variable_clipping
from .wrappers.weight_decay import decoupled_weight_decay as decoupled_weight_decay

if typing.TYPE_CHECKING:
    from . import compiled as compiled
    from . import host as host
    from . import interop as interop
    from .compiled.report import compile_report as compile_report
    from .interop.nnx import nnx_minimize as nnx_minimize
    from .interop.nnx import nnx_split as nnx_split
    from .interop.nnx import nnx_update as nnx_update
    from .interop.tf1.load import load_tf1_state as load_tf1_state
    from .interop.tf1.save import save_tf1_state as save_tf1_state
    from .native.step import native_step as native_step

# What belongs to other libraries and compilers is imported at its first use.
_LATER = {
    "compile_report": "compiled.report",
    "nnx_minimize": "interop.nnx",
    "nnx_split": "interop.nnx",
    "nnx_update": "interop.nnx",
    "load_tf1_state": "interop.tf1.load",
    "native_step": "native.step",
    "save_tf1_state": "interop.tf1.save",
}
if not typing.TYPE_CHECKING:  # type checkers read the imports above
    _NAMES = {name for name, thing in vars().items() if not isinstance(thing, types.ModuleType)}
    __all__ = sorted(name for name in {*_NAMES, *_LATER} if name[0] != "_")

    def __getattr__(name):
        if name in ("compiled", "host", "interop"):
            return importlib.import_module(f"{__name__}.{name}")
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        thing = getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
        return globals().setdefault(name, thing)

    def __dir__():
        return sorted({*globals(), *_LATER})
