"""The table of all optimizers, one entry each; it is the only list of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeVar

import optax

from .distributed.agn import agn
from .distributed.diloco import diloco
from .distributed.drop_stale import drop_stale_gradient
from .distributed.elastic_average import elastic_average
from .distributed.model_average import model_average
from .distributed.sync_replicas import sync_replicas
from .first_order.adadelta import adadelta
from .first_order.adafactor import adafactor
from .first_order.adagrad import adagrad
from .first_order.adagrad_eps import adagrad_eps
from .first_order.adam import adam, lazy_adam
from .first_order.adam_gs import adam_gs, lazy_adam_gs
from .first_order.adam_weight_decay import adam_weight_decay
from .first_order.adamax import adamax
from .first_order.adamw import adamw
from .first_order.add_sign import add_sign
from .first_order.amsgrad import amsgrad
from .first_order.counter_row_wise_adagrad import counter_row_wise_adagrad
from .first_order.cowclip_row_wise_adagrad import cowclip_row_wise_adagrad
from .first_order.custom_adam import custom_adam
from .first_order.global_decay_row_wise_adagrad import global_decay_row_wise_adagrad
from .first_order.grad_variance_scaled import grad_variance_scaled
from .first_order.gradient_descent import gradient_descent
from .first_order.lamb import lamb
from .first_order.lars import lars
from .first_order.momentum import momentum
from .first_order.momentumw import momentumw
from .first_order.nadam import nadam
from .first_order.neural_optimizer1 import neural_optimizer1
from .first_order.normalized_sgd import normalized_sgd
from .first_order.partial_row_wise_adam import partial_row_wise_adam
from .first_order.power_sign import power_sign
from .first_order.reg_adagrad import reg_adagrad
from .first_order.rmsprop import rmsprop
from .first_order.row_wise_adagrad import row_wise_adagrad
from .first_order.row_wise_lamb import partial_row_wise_lamb, row_wise_lamb
from .first_order.row_wise_lars import row_wise_lars
from .first_order.row_wise_rmsprop import row_wise_rmsprop
from .first_order.sparse_adamw import sparse_adamw
from .proximal.adagrad_da import adagrad_da
from .proximal.ftrl import ftrl
from .proximal.proximal_adagrad import proximal_adagrad
from .proximal.proximal_gradient_descent import proximal_gradient_descent
from .second_order.ggt import ggt
from .second_order.muon import muon
from .second_order.shampoo.api import blocked_shampoo, shampoo
from .second_order.soap import soap
from .wrappers.accumulate import accumulate
from .wrappers.cautious_weight_decay import cautious_weight_decay
from .wrappers.ema_in_place import ema_in_place
from .wrappers.ema_nesterov import ema_nesterov
from .wrappers.ensemble import ensemble
from .wrappers.hyperball import hyperball
from .wrappers.master_weights import master_weights
from .wrappers.moving_average import moving_average
from .wrappers.multitask import multitask
from .wrappers.skip_spikes import skip_spikes
from .wrappers.slots_dtype import slots_dtype
from .wrappers.stacked import stacked
from .wrappers.variable_clipping import variable_clipping
from .wrappers.weight_decay import decoupled_weight_decay

__all__ = ["CATALOG", "DISTRIBUTED", "WRAPPERS", "Entry", "Method", "Wrapper"]

_T = TypeVar("_T", "Entry", "Wrapper", "Method")
Rows = Literal["lazy", "dense", "touched", "linear"]


class Entry(NamedTuple):
    """The properties of an optimizer that the rest of the library needs.

    Example:
        >>> import optzoo
        >>> entry = optzoo.CATALOG["adam"]
        >>> print(entry.original, entry.rows, entry.family)
        tf.train.AdamOptimizer dense first_order
        >>> tx = entry.make(0.1, b1=0.5)
    """

    factory: Callable[..., optax.GradientTransformationExtraArgs]
    rows: Rows  # the policy for row-sparse gradients
    rate: float  # a learning rate for small problems; the middle of the race's grid
    original: str | None  # the equivalent class in TF1 or RETURNN; None if there is none
    l1_of_the_sum: bool = False  # its L1 strength is relative to the sum of all gradients
    # Values for arguments without default, or with a default that is suitable for few models.
    required: Mapping[str, Any] = MappingProxyType({})
    needs_global_step: bool = False  # update(..., global_step=) must be given
    static: tuple[str, ...] = ()  # static_args of optax.inject_hyperparams: not to be injected

    def make(self, learning_rate: optax.ScalarOrSchedule | None = None, **kwargs: Any):
        """The optimizer at its default settings, or with the given arguments."""
        rate = self.rate if learning_rate is None else learning_rate
        return self.factory(rate, **{**self.required, **kwargs})

    @property
    def family(self) -> str:
        """The folder of its module."""
        return self.factory.__module__.split(".")[1]


def _by_name(*entries: _T) -> dict[str, _T]:
    """A table of entries by the names of their factories."""
    return {entry.factory.__name__: entry for entry in entries}


_TRAIN, _CONTRIB, _RETURNN = "tf.train", "tf.contrib.opt", "returnn.tf.updater"
_MOMENTUM, _DECAY = {"momentum": 0.9}, {"weight_decay_per_step": 1e-4}
_ANY_AXES = {"axes": ("", "o", "io", "iio", "iiio")}  # vectors and convolutions, too

CATALOG: dict[str, Entry] = _by_name(
    Entry(adadelta, "lazy", 30.0, f"{_TRAIN}.AdadeltaOptimizer"),
    Entry(
        adafactor,
        "dense",
        0.05,
        "tensor2tensor.utils.adafactor.AdafactorOptimizer",
        static=("b1", "min_dim_size_to_factor"),
    ),
    Entry(adagrad, "lazy", 0.1, f"{_TRAIN}.AdagradOptimizer"),
    Entry(adagrad_da, "lazy", 0.1, f"{_TRAIN}.AdagradDAOptimizer"),
    Entry(adagrad_eps, "lazy", 0.1, None),
    Entry(adam, "dense", 0.01, f"{_TRAIN}.AdamOptimizer"),
    Entry(adam_gs, "dense", 0.01, f"{_CONTRIB}.AdamGSOptimizer", needs_global_step=True),
    Entry(adam_weight_decay, "dense", 0.01, "bert.optimization.AdamWeightDecayOptimizer"),
    Entry(adamax, "lazy", 0.01, f"{_CONTRIB}.AdaMaxOptimizer"),
    Entry(adamw, "dense", 0.01, f"{_CONTRIB}.AdamWOptimizer", required=_DECAY),
    Entry(add_sign, "touched", 0.1, f"{_CONTRIB}.AddSignOptimizer"),
    Entry(amsgrad, "lazy", 0.01, f"{_RETURNN}.AMSGradOptimizer"),
    Entry(blocked_shampoo, "dense", 0.01, None, static=("alpha", "block_size", "max_matrix_size")),
    Entry(
        counter_row_wise_adagrad,
        "lazy",
        0.1,
        None,
        static=("half_life", "start_step", "max_counter_every"),
    ),
    Entry(cowclip_row_wise_adagrad, "lazy", 0.1, None, static=("half_life",)),
    Entry(custom_adam, "lazy", 0.01, f"{_RETURNN}.CustomAdamOptimizer"),
    Entry(ftrl, "lazy", 0.1, f"{_TRAIN}.FtrlOptimizer", l1_of_the_sum=True),
    Entry(ggt, "dense", 0.01, f"{_CONTRIB}.GGTOptimizer", static=("window",)),
    Entry(global_decay_row_wise_adagrad, "lazy", 0.1, None, static=("start_step",)),
    Entry(grad_variance_scaled, "touched", 1.0, f"{_RETURNN}.GradVarianceScaledOptimizer"),
    Entry(gradient_descent, "linear", 0.1, f"{_TRAIN}.GradientDescentOptimizer"),
    Entry(lamb, "dense", 0.02, "nvidia.LAMBOptimizer"),
    Entry(lars, "lazy", 1.0, f"{_CONTRIB}.LARSOptimizer"),
    Entry(lazy_adam, "lazy", 0.01, f"{_CONTRIB}.LazyAdamOptimizer"),
    Entry(lazy_adam_gs, "lazy", 0.01, f"{_CONTRIB}.LazyAdamGSOptimizer", needs_global_step=True),
    Entry(momentum, "lazy", 0.03, f"{_TRAIN}.MomentumOptimizer", required=_MOMENTUM),
    Entry(momentumw, "lazy", 0.03, f"{_CONTRIB}.MomentumWOptimizer", required=_MOMENTUM | _DECAY),
    Entry(muon, "dense", 0.02, None, required=_ANY_AXES, static=("ns_steps",)),
    Entry(nadam, "touched", 0.01, f"{_CONTRIB}.NadamOptimizer"),
    Entry(neural_optimizer1, "touched", 0.1, f"{_RETURNN}.NeuralOptimizer1"),
    Entry(normalized_sgd, "lazy", 0.03, f"{_RETURNN}.NormalizedSGD"),
    Entry(partial_row_wise_adam, "lazy", 0.01, None),
    Entry(partial_row_wise_lamb, "lazy", 0.02, None),
    Entry(power_sign, "touched", 0.03, f"{_CONTRIB}.PowerSignOptimizer"),
    Entry(proximal_adagrad, "lazy", 0.1, f"{_TRAIN}.ProximalAdagradOptimizer"),
    Entry(proximal_gradient_descent, "lazy", 0.1, f"{_TRAIN}.ProximalGradientDescentOptimizer"),
    Entry(reg_adagrad, "lazy", 0.1, f"{_CONTRIB}.RegAdagradOptimizer"),
    Entry(rmsprop, "lazy", 0.01, f"{_TRAIN}.RMSPropOptimizer"),
    Entry(row_wise_adagrad, "lazy", 0.1, None),
    Entry(row_wise_lamb, "lazy", 0.02, None),
    Entry(row_wise_lars, "lazy", 10.0, None),
    Entry(row_wise_rmsprop, "lazy", 0.01, None),
    Entry(shampoo, "dense", 0.1, f"{_CONTRIB}.ShampooOptimizer", static=("max_matrix_size",)),
    Entry(soap, "dense", 0.01, None, static=("block_size", "max_matrix_size")),
    Entry(sparse_adamw, "lazy", 0.01, None),
)


class Wrapper(NamedTuple):
    """The properties of a wrapper that the rest of the library needs.

    Example:
        >>> import optzoo
        >>> print(optzoo.catalog.WRAPPERS["moving_average"].original)
        tf.contrib.opt.MovingAverageOptimizer
    """

    factory: Callable[..., optax.GradientTransformationExtraArgs]
    original: str | None  # the equivalent class or function in TF1; None if there is none


WRAPPERS: dict[str, Wrapper] = _by_name(
    Wrapper(accumulate, None),
    Wrapper(cautious_weight_decay, None),
    Wrapper(decoupled_weight_decay, f"{_CONTRIB}.extend_with_decoupled_weight_decay"),
    Wrapper(ema_in_place, None),
    Wrapper(ema_nesterov, None),
    Wrapper(ensemble, None),
    Wrapper(hyperball, None),
    Wrapper(master_weights, None),
    Wrapper(moving_average, f"{_CONTRIB}.MovingAverageOptimizer"),
    Wrapper(multitask, f"{_CONTRIB}.MultitaskOptimizerWrapper"),
    Wrapper(skip_spikes, None),
    Wrapper(slots_dtype, None),
    Wrapper(stacked, None),
    Wrapper(variable_clipping, f"{_CONTRIB}.VariableClippingOptimizer"),
)


class Method(NamedTuple):
    """The properties of a distributed method that the rest of the library needs.

    Example:
        >>> import optzoo
        >>> method = optzoo.catalog.DISTRIBUTED["elastic_average"]
        >>> print(method.original)
        tf.contrib.opt.ElasticAverageOptimizer
        >>> tx = method.make(optzoo.adam(0.1), 4)
    """

    factory: Callable[..., optax.GradientTransformationExtraArgs]
    original: str | None  # the equivalent class in TF1 or RETURNN; None if there is none
    sized: Mapping[str, Callable[[int], int]] = MappingProxyType({})  # values by num_replicas

    def make(self, inner: optax.GradientTransformation, num_replicas: int, **kwargs: Any):
        """The method around an optimizer, at its default settings for ``num_replicas``."""
        usual = {name: value(num_replicas) for name, value in self.sized.items()}
        return self.factory(inner, **{**usual, **kwargs})


DISTRIBUTED: dict[str, Method] = _by_name(
    Method(agn, f"{_CONTRIB}.AGNOptimizer"),
    Method(diloco, None),
    # If all gradients start at the same parameters, the last one applied is this stale.
    Method(
        drop_stale_gradient,
        f"{_CONTRIB}.DropStaleGradientOptimizer",
        {"staleness": lambda num_replicas: num_replicas - 1},
    ),
    Method(elastic_average, f"{_CONTRIB}.ElasticAverageOptimizer"),
    Method(model_average, f"{_CONTRIB}.ModelAverageOptimizer"),
    Method(sync_replicas, f"{_TRAIN}.SyncReplicasOptimizer"),
)


def optimizers_table() -> str:
    """The table of all optimizers."""
    lines = ["| optimizer | what it is | original | rows |", "|---|---|---|---|"]
    lines += [f"{_about(name, entry)} {entry.rows} |" for name, entry in CATALOG.items()]
    return "\n".join(lines) + "\n"


def distributed_table() -> str:
    """The table of distributed methods."""
    lines = ["| wrapper | what it is | original |", "|---|---|---|"]
    lines += [_about(name, method) for name, method in DISTRIBUTED.items()]
    return "\n".join(lines) + "\n"


def _about(name: str, entry: Entry | Method) -> str:
    first_line = (entry.factory.__doc__ or "").splitlines()[0]
    summary = first_line.split(", as in")[0].removesuffix(".")
    original = "optzoo" if entry.original is None else f"`{entry.original}`"
    return f"| `{name}` | {summary} | {original} |"
