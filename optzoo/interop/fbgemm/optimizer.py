"""FBGEMM's optimizers, by their original names and arguments."""

from __future__ import annotations

import enum
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ...core.checks import check_flags, check_not_negative, check_positive, check_rate
from ...core.numerics import wide_dtype
from ...core.optimizer import recorded
from ...core.rows import SparseRows, is_rows, map_rows, rows_tree, update_tree
from ...core.warn import warn
from ...first_order.adagrad_eps import adagrad_eps
from ...first_order.counter_row_wise_adagrad import counter_row_wise_adagrad
from ...first_order.cowclip_row_wise_adagrad import cowclip_row_wise_adagrad
from ...first_order.global_decay_row_wise_adagrad import global_decay_row_wise_adagrad
from ...first_order.gradient_descent import gradient_descent
from ...first_order.partial_row_wise_adam import partial_row_wise_adam
from ...first_order.row_wise_adagrad import row_wise_adagrad
from ...first_order.row_wise_lamb import partial_row_wise_lamb, row_wise_lamb
from ...first_order.row_wise_lars import row_wise_lars
from ...first_order.row_wise_rmsprop import row_wise_rmsprop
from ...first_order.sparse_adamw import sparse_adamw
from ...registry import add_name
from ...transforms._per_leaf import on_listed
from ...wrappers.ema_in_place import ema_in_place
from ...wrappers.ensemble import ensemble
from ...wrappers.variable_clipping import variable_clipping
from .definitions import (
    COUNTER_DECAY_MODES,
    DECAY_MODES,
    RATE_MODES,
    STEP_MODES,
    definition,
    member,
)

_NEVER = 2**31 - 1  # updates
Transformation = optax.GradientTransformationExtraArgs


@recorded
def fbgemm_optimizer(
    optimizer: Any,
    *,
    learning_rate: optax.ScalarOrSchedule = 0.01,
    eps: float = 1e-8,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    weight_decay_mode: Any = "NONE",
    eta: float = 0.001,
    beta1: float = 0.9,
    beta2: float = 0.999,
    max_norm: float = 0.0,
    gradient_clipping: bool = False,
    max_gradient: float = 1.0,
    stochastic_rounding: bool | None = None,
    counter_based_regularization: Any = None,
    cowclip_regularization: Any = None,
    global_weight_decay: Any = None,
    emainplace_mode: Any = None,
    ensemble_mode: Any = None,
    extra_optimizer_config: Any = None,
    ar_alpha: float = 0.0,
    ema_beta: float = 0.99,
    min_shrinkage: float = 0.1,
) -> Transformation:
    r"""An optimizer of FBGEMM for embedding tables, by its name and arguments.

    :func:`optzoo.create` calls it: ``create("EXACT_ROWWISE_ADAGRAD", learning_rate=0.1)``.

    The parameters are tables. Slots of 16-bit tables are float32. The row-wise optimizers round a
    new row of such a table once; the others first round the update, as the original does. Only the
    learning rate is rounded to float32.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.interop.fbgemm.fbgemm_optimizer("EXACT_ROWWISE_ADAGRAD", learning_rate=0.1)
        >>> table = jnp.ones((3, 2))
        >>> print(optzoo.get_slot(tx.init(table), "accumulator").shape)
        (3,)

    Args:
        optimizer: a member of ``EmbOptimType``, or its name; or ``"rowwise_rmsprop_ar"``, for which
            FBGEMM has only an operator.
        learning_rate: a number or a schedule.
        eps: added outside the root.
        momentum: the momentum of ``LARS_SGD``.
        weight_decay: the weight decay.
        weight_decay_mode: a member of ``WeightDecayMode``, or its name.
        eta: the trust coefficient of ``LARS_SGD``.
        beta1: decay of the mean in ``ADAM``, ``LAMB`` and their row-wise variants.
        beta2: decay of the squared mean in the same optimizers.
        max_norm: the largest norm of a row after an update of row-wise Adagrad; 0 for no bound.
        gradient_clipping: whether each element of a gradient is clipped before rows that share an
            id are summed. For bags that are sums without weights, these are gradients of the sums.
        max_gradient: the bound of ``gradient_clipping``.
        stochastic_rounding: True is ignored with a warning: tables are rounded to nearest.
        counter_based_regularization: ``CounterBasedRegularizationDefinition``, or a mapping.
        cowclip_regularization: ``CowClipDefinition``, or a mapping.
        global_weight_decay: ``GlobalWeightDecayDefinition``, or a mapping.
        emainplace_mode: ``EmainplaceModeDefinition``, or a mapping.
        ensemble_mode: ``EnsembleModeDefinition``, or a mapping.
        extra_optimizer_config: ``UserEnabledConfigDefinition``, or a mapping; for ``ADAM``.
        ar_alpha: the weight decay of ``rowwise_rmsprop_ar``.
        ema_beta: the decay of its mean square.
        min_shrinkage: its smallest factor of a row.

    Raises:
        TypeError: if an argument is of another type, or a definition has an unknown field.
        ValueError: if the name is unknown, if the original refuses the optimizer or the combination
            of arguments, or if a value is out of its range.

    Warns:
        UserWarning: for each argument that has no effect, with the reason, and for arguments whose
            effect is rarely intended: a negative decay, rows that never move.

    References:
        ``SplitTableBatchedEmbeddingBagsCodegen`` of `FBGEMM <https://github.com/pytorch/FBGEMM>`_
        1.8.0. See ``docs/fbgemm.md``.
    """
    name = _name(optimizer)
    kind = _KINDS[name]
    check_rate(learning_rate)
    check_not_negative(max_norm=max_norm)
    check_flags(gradient_clipping=gradient_clipping)
    check_positive(max_gradient=max_gradient)
    given = _Given(
        _in_float32(learning_rate), eps, momentum, weight_decay, weight_decay_mode, eta, beta1,
        beta2, max_norm, counter_based_regularization, cowclip_regularization, global_weight_decay,
        emainplace_mode, ensemble_mode, extra_optimizer_config, ar_alpha, ema_beta, min_shrinkage,
    )  # fmt: skip
    _check_extra(name, extra_optimizer_config)
    _warn_about_ignored(name, kind.reads, given)
    if stochastic_rounding:
        warn("stochastic_rounding has no effect: 16-bit tables are rounded to nearest")
    bound = max_gradient if gradient_clipping else None
    return _of_tables(kind.build(given), bound, rounds_once=kind.rounds_once)


class _Given(NamedTuple):
    """The arguments of :func:`fbgemm_optimizer` that only some optimizers read, and the rate."""

    learning_rate: optax.ScalarOrSchedule
    eps: float
    momentum: float
    weight_decay: float
    weight_decay_mode: Any
    eta: float
    beta1: float
    beta2: float
    max_norm: float
    counter_based_regularization: Any
    cowclip_regularization: Any
    global_weight_decay: Any
    emainplace_mode: Any
    ensemble_mode: Any
    extra_optimizer_config: Any
    ar_alpha: float
    ema_beta: float
    min_shrinkage: float


class _Kind(NamedTuple):
    """An optimizer: its factory, and the arguments that it reads."""

    build: Callable[[_Given], Transformation]
    reads: frozenset[str]
    rounds_once: bool = True


def _row_wise_adagrad(given: _Given) -> Transformation:
    mode = _decay_mode(given)
    if mode in ("COUNTER", "COWCLIP"):
        if not _is_zero(given.max_norm):
            warn(f"max_norm={given.max_norm!r} has no effect with weight_decay_mode={mode!r}")
        return _counter(given) if mode == "COUNTER" else _cowclip(given)
    if mode == "DECOUPLE_GLOBAL":
        about = definition("global_weight_decay", given.global_weight_decay)
        tx = global_decay_row_wise_adagrad(
            given.learning_rate,
            given.eps,
            given.weight_decay,
            start_step=_start(about, "start_iter"),
            lower_bound=about["lower_bound"],
        )
    else:
        decay = given.weight_decay
        if mode == "NONE" and decay:
            warn(f"weight_decay={decay!r} has no effect with weight_decay_mode='NONE'")
            decay = 0.0
        kind = "l2_weight_decay" if mode == "L2" else "weight_decay"
        tx = row_wise_adagrad(given.learning_rate, given.eps, **{kind: decay})
    return tx if _is_zero(given.max_norm) else variable_clipping(tx, {".*": (1,)}, given.max_norm)


def _counter(given: _Given) -> Transformation:
    about = definition("counter_based_regularization", given.counter_based_regularization)
    tail = definition("tail_id_threshold", about["tail_id_threshold"])
    if _mode(about, "grad_sum_decay", ("NO_DECAY", "CTR_DECAY")) != "NO_DECAY":
        warn("grad_sum_decay has no effect: FBGEMM does not read it")
    every = _whole(about, "max_counter_update_freq")
    return counter_row_wise_adagrad(
        given.learning_rate,
        given.eps,
        given.weight_decay,
        COUNTER_DECAY_MODES[_mode(about, "counter_weight_decay_mode", COUNTER_DECAY_MODES)],
        half_life=about["counter_halflife"],
        start_step=_start(about, "adjustment_iter"),
        adjustment_ub=about["adjustment_ub"],
        learning_rate_mode=RATE_MODES[_mode(about, "learning_rate_mode", RATE_MODES)],
        tail_threshold=tail["val"],
        is_ratio=tail["is_ratio"],
        max_counter_every=every if every > 0 else _NEVER,
    )


def _cowclip(given: _Given) -> Transformation:
    about = definition("cowclip_regularization", given.cowclip_regularization)
    decay = _mode(about, "counter_weight_decay_mode", COUNTER_DECAY_MODES)
    if decay == "ADAGRADW":
        warn("COWCLIP with ADAGRADW has no decay, as in FBGEMM: use L2 or DECOUPLE")
        decay = "NONE"
    if _is_zero(about["weight_norm_coefficient"]) and _is_zero(about["lower_bound"]):
        warn(
            "COWCLIP with weight_norm_coefficient=0 and lower_bound=0, FBGEMM's defaults, clips "
            "all gradients to zero: rows move by their decay only"
        )
    return cowclip_row_wise_adagrad(
        given.learning_rate,
        given.eps,
        given.weight_decay,
        COUNTER_DECAY_MODES[decay],
        half_life=about["counter_halflife"],
        weight_norm_coefficient=about["weight_norm_coefficient"],
        lower_bound=about["lower_bound"],
    )


def _averaged(given: _Given) -> Transformation:
    """Row-wise Adagrad inside an average, for which FBGEMM has only the simple modes."""
    if (mode := _decay_mode(given)) not in ("NONE", "L2", "DECOUPLE"):
        raise ValueError(f"weight_decay_mode={mode!r} needs the optimizer EXACT_ROWWISE_ADAGRAD")
    return _row_wise_adagrad(given)


def _ema_in_place(given: _Given) -> Transformation:
    about = definition("emainplace_mode", given.emainplace_mode)
    return ema_in_place(
        _averaged(given),
        every=_whole(about, "step_ema"),
        start_step=_start(about, "step_start"),
        coefficient=about["step_ema_coef"],
    )


def _ensemble(given: _Given) -> Transformation:
    about = definition("ensemble_mode", given.ensemble_mode)
    return ensemble(
        _averaged(given),
        every=_whole(about, "step_ema"),
        swap_every=_whole(about, "step_swap"),
        start_step=_start(about, "step_start"),
        coefficient=about["step_ema_coef"],
        reset=_mode(about, "step_mode", STEP_MODES) == "NONE",
    )


def _rmsprop(given: _Given) -> Transformation:
    decay = given.ar_alpha
    rate, shrinkage = given.learning_rate, given.min_shrinkage
    return row_wise_rmsprop(rate, given.ema_beta, given.eps, decay, shrinkage)


def _adam(given: _Given) -> Transformation:
    about = definition("extra_optimizer_config", given.extra_optimizer_config)
    correction, decay = about["use_rowwise_bias_correction"], given.weight_decay
    return sparse_adamw(*_adam_arguments(given), decay, row_wise_bias_correction=correction)


def _adam_arguments(given: _Given) -> tuple[Any, float, float, float]:
    return given.learning_rate, given.beta1, given.beta2, given.eps


# The arguments that each optimizer, or `fbgemm_optimizer` itself, reads.
_OF_ALL = frozenset(
    {
        *("optimizer", "learning_rate", "gradient_clipping", "max_gradient"),
        *("stochastic_rounding", "extra_optimizer_config"),
    }
)
_ROW_WISE = frozenset({"eps", "weight_decay", "weight_decay_mode", "max_norm"})
_ADAM = frozenset({"eps", "beta1", "beta2", "weight_decay"})
_KINDS = {
    "EXACT_SGD": _Kind(
        lambda given: gradient_descent(given.learning_rate), frozenset(), rounds_once=False
    ),
    "EXACT_ADAGRAD": _Kind(
        lambda given: adagrad_eps(given.learning_rate, given.eps),
        frozenset({"eps"}),
        rounds_once=False,
    ),
    "EXACT_ROWWISE_ADAGRAD": _Kind(
        _row_wise_adagrad,
        _ROW_WISE
        | {"counter_based_regularization", "cowclip_regularization", "global_weight_decay"},
    ),
    "EMAINPLACE_ROWWISE_ADAGRAD": _Kind(_ema_in_place, _ROW_WISE | {"emainplace_mode"}),
    "ENSEMBLE_ROWWISE_ADAGRAD": _Kind(_ensemble, _ROW_WISE | {"ensemble_mode"}),
    "ADAM": _Kind(_adam, _ADAM),
    "PARTIAL_ROWWISE_ADAM": _Kind(
        lambda given: partial_row_wise_adam(*_adam_arguments(given), given.weight_decay),
        _ADAM,
    ),
    "LAMB": _Kind(lambda given: row_wise_lamb(*_adam_arguments(given), given.weight_decay), _ADAM),
    "PARTIAL_ROWWISE_LAMB": _Kind(
        lambda given: partial_row_wise_lamb(*_adam_arguments(given), given.weight_decay), _ADAM
    ),
    "LARS_SGD": _Kind(
        lambda given: row_wise_lars(
            given.learning_rate, given.momentum, given.weight_decay, given.eta
        ),
        frozenset({"momentum", "weight_decay", "eta"}),
    ),
    "ROWWISE_RMSPROP_AR": _Kind(
        _rmsprop, frozenset({"eps", "ar_alpha", "ema_beta", "min_shrinkage"})
    ),
}
# Members of EmbOptimType that FBGEMM refuses for tables, or that make no update.
_REFUSED = {
    "SGD": "it is deprecated in FBGEMM: use EXACT_SGD",
    "ROWWISE_ADAGRAD": "it is deprecated in FBGEMM: use EXACT_ROWWISE_ADAGRAD",
    "EXACT_ROWWISE_WEIGHTED_ADAGRAD": "it is deprecated in FBGEMM: use EXACT_ROWWISE_ADAGRAD",
    "MADGRAD": "FBGEMM does not implement it for tables",
    "SHAMPOO": "FBGEMM does not implement it for tables: use optzoo.blocked_shampoo",
    "SHAMPOO_V2": "FBGEMM does not implement it for tables: use optzoo.blocked_shampoo",
    "NONE": "it makes no update: use optax.set_to_zero",
}
# Names that are unique, and valid in `create` without `EmbOptimType`.
_UNAMBIGUOUS = (
    "EXACT_SGD", "EXACT_ADAGRAD", "EXACT_ROWWISE_ADAGRAD", "EMAINPLACE_ROWWISE_ADAGRAD",
    "ENSEMBLE_ROWWISE_ADAGRAD", "LARS_SGD", "ROWWISE_RMSPROP_AR",
)  # fmt: skip


def _name(optimizer: Any) -> str:
    """The name of an optimizer; raises ``ValueError`` with the reason for unsupported ones.

    The values of the members, such as ``exact_row_wise_adagrad``, are also names.
    """
    plain = lambda name: name.rpartition(".")[2].replace("_", "").upper()
    known = {plain(name): name for name in (*_KINDS, *_REFUSED)}
    given = optimizer.name if isinstance(optimizer, enum.Enum) else optimizer
    name = known.get(plain(given)) if isinstance(given, str) else None
    if name is None:
        raise ValueError(f"optimizer must be one of {', '.join(_KINDS)}, got {optimizer!r}")
    if name in _REFUSED:
        raise ValueError(f"optimizer={name!r}: {_REFUSED[name]}")
    return name


def _decay_mode(given: _Given) -> str:
    """The mode of the decay; raises ``ValueError`` unless exactly its definition is given."""
    mode = member("weight_decay_mode", given.weight_decay_mode, DECAY_MODES)
    definitions = {
        "COUNTER": "counter_based_regularization",
        "COWCLIP": "cowclip_regularization",
        "DECOUPLE_GLOBAL": "global_weight_decay",
    }
    for name, argument in definitions.items():
        if (mode == name) != (getattr(given, argument) is not None):
            raise ValueError(
                f"weight_decay_mode={name!r} needs {argument}, and vice versa: give both or neither"
            )
    return mode


def _check_extra(name: str, config: Any) -> None:
    """Raises ``ValueError`` for fields of another optimizer, or not of an optimizer."""
    about = definition("extra_optimizer_config", config)
    for field, value in about.items():
        if value and field != "use_rowwise_bias_correction":
            raise ValueError(f"extra_optimizer_config: {field} changes lookups, not the optimizer")
    if about["use_rowwise_bias_correction"] and name != "ADAM":
        raise ValueError(
            "extra_optimizer_config: use_rowwise_bias_correction needs the optimizer ADAM, "
            f"got {name}"
        )


def _warn_about_ignored(name: str, reads: frozenset[str], given: _Given) -> None:
    """Warns of arguments that are not defaults and that an optimizer does not read."""
    for argument, parameter in inspect.signature(fbgemm_optimizer).parameters.items():
        if argument in reads | _OF_ALL:
            continue
        value, default = getattr(given, argument), parameter.default
        if argument == "weight_decay_mode":
            value = member(argument, value, DECAY_MODES)
        if not (value is default or (np.ndim(value) == 0 and value == default)):
            warn(f"{name} ignores {argument}={value!r}, as in FBGEMM")


def _is_zero(value: Any) -> bool:
    """Whether a number is known to be zero; it may be traced."""
    return not isinstance(value, jax.core.Tracer) and value == 0


def _mode(about: Mapping[str, Any], field: str, known: Iterable[str]) -> str:
    """A field of a definition that is an enum's member."""
    return member(field, about[field], known)


def _whole(about: Mapping[str, Any], field: str) -> int:
    """A field that is a number of updates, for which FBGEMM's classes may have a float."""
    value = about[field]
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
        raise TypeError(f"{field} must be a whole number, got {value!r}")
    return int(value)


def _start(about: Mapping[str, Any], field: str) -> int:
    """A field that is the number of a first update; -1 for the first update of the run."""
    return max(0, _whole(about, field))


def _in_float32(rate: Any) -> Any:
    """The rate, rounded to float32 as in FBGEMM."""
    if callable(rate):
        return lambda step: jnp.asarray(rate(step), jnp.float32)
    return float(np.float32(rate)) if isinstance(rate, float) else rate


def _of_tables(tx: Transformation, bound: Any, rounds_once: bool) -> Transformation:
    """The optimizer with clipped gradients and FBGEMM's rounding of rows."""
    clip = lambda g: on_listed(lambda values: jnp.clip(values, -bound, bound), g)

    def update(updates, state, params=None, **extra_args):
        if bound is not None:
            updates = rows_tree.map(clip, updates)
        if not rounds_once:  # each row is rounded once for all of its gradients
            updates = _merged(updates, params)
        updates, state = tx.update(updates, state, params, **extra_args)
        if not rounds_once and params is not None:
            # FBGEMM rounds rows before it adds them.
            updates = _on_16_bits(lambda u, x: u.astype(x.dtype), updates, params)
        return updates, state

    return optax.GradientTransformationExtraArgs(tx.init, update)


def _merged(updates: Any, params: Any) -> Any:
    """The gradients with merged rows of 16-bit tables, or of all if no parameters are given."""
    if params is None:
        return map_rows(SparseRows.coalesce, updates)
    return _on_16_bits(lambda g, x: g.coalesce(), updates, params)


def _on_16_bits(f: Callable[[SparseRows, Any], SparseRows], updates: Any, params: Any) -> Any:
    """``f`` applied to the rows of each 16-bit table and the table."""
    of_each = lambda u, x: f(u, x) if is_rows(u) and wide_dtype(x) != x.dtype else u
    return update_tree.map(of_each, updates, params)


for _known in (*_KINDS, *_REFUSED):
    add_name(
        f"EmbOptimType.{_known}",
        functools.partial(fbgemm_optimizer, _known),
        f"fbgemm_gpu.EmbOptimType.{_known}",
        others=[_known] if _known in _UNAMBIGUOUS else [],
        rounds=False,
    )
