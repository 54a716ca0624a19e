"""Creates optimizers by name or from a config, with exactly the values of the originals."""

from __future__ import annotations

import difflib
import enum
import functools
import importlib
import inspect
import math
import numbers
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax

from .catalog import CATALOG, DISTRIBUTED, WRAPPERS, Entry, Rows
from .core.checks import check_choice
from .core.optimizer import Optimizer, about_of
from .core.paths import containing, names_with
from .first_order.sign_decay import cosine_sign_decay, linear_sign_decay, restart_sign_decay
from .schedules import (
    cosine_decay,
    cosine_decay_restarts,
    cosine_decay_with_warmup,
    exponential_decay,
    exponential_decay_with_burnin,
    inverse_time_decay,
    linear_cosine_decay,
    manual_stepping,
    natural_exp_decay,
    noam,
    piecewise_constant,
    polynomial_decay,
)

__all__ = ["create", "register"]


def create(
    name_or_config: str | enum.Enum | Mapping[str, Any], **kwargs: Any
) -> optax.GradientTransformationExtraArgs:
    r"""Creates an optimizer or wrapper by name, with exactly the values of the original.

    .. code-block:: python

        create("AdamOptimizer", learning_rate=1e-3, beta1=0.9, epsilon=1e-8)
        create({"class": "momentum", "momentum": 0.9}, learning_rate=0.1)
        create({"class": "MovingAverage", "average_decay": 0.99, "opt": {"class": "adam"}})

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.create("tf.train.MomentumOptimizer", learning_rate=0.1, momentum=0.9)
        >>> updates, state = tx.update(jnp.ones(2), tx.init(jnp.ones(2)), jnp.ones(2))
        >>> print(optzoo.slot_names(state), updates)
        ('momentum',) [-0.1 -0.1]

    Args:
        name_or_config: a name of TensorFlow, of RETURNN, of FBGEMM or of this library, in any case,
            with or without ``Optimizer`` and underscores; a member of FBGEMM's ``EmbOptimType``; or
            a dict with one of these under ``"class"`` and the arguments under their names. A config
            is data: nothing in it is imported or evaluated. A module before the name selects the
            library: ``"ADAM"`` is TensorFlow's, ``"EmbOptimType.ADAM"`` FBGEMM's
            (:func:`optzoo.interop.fbgemm.fbgemm_optimizer`), ``"nadam"`` is
            ``tf.contrib.opt.NadamOptimizer`` and ``"keras.optimizers.Nadam"`` Keras'. Names of
            Keras accept all of its arguments (``beta_1``, ``rho``, ``clipnorm``, ``weight_decay``,
            ``use_ema``, ...), and use the installed Keras 3 unless this library computes the same
            values; the result of ``keras.optimizers.serialize`` is also a config. Projects are
            modules with their own names, arguments and defaults: ``"tensor2tensor.adam"``
            (LazyAdam), ``"lingvo.Adam"``, ``"object_detection.adam_optimizer"``. A message
            ``Optimizer`` of object_detection is a config as the dict ``{"rms_prop_optimizer":
            {...}, "use_moving_average": False}``; by default there is a moving average, as in the
            original.
        **kwargs: arguments, in addition to those of a config, by the original's names (``beta1``,
            ``epsilon``, ``use_nesterov``, ``opt``, ...) or this library's (``b1``, ``eps``,
            ``nesterov``, ``inner``, ...). Arguments without an effect in JAX (``use_locking``,
            ``name``, ...) are ignored. The ``opt`` of a wrapper is a config or a transformation;
            its ``learning_rate`` is passed to the inner optimizer. ``sign_decay_fn`` may be a
            config of one of the sign decays. ``learning_rate_multiplier`` is RETURNN's constant
            factor of the rate. ``learning_rate`` may be the config of a schedule of
            ``optzoo.schedules``, ``{"class": "tf.train.polynomial_decay", "learning_rate": 0.1,
            "decay_steps": 100}``, or a message ``LearningRate`` of object_detection.

    Returns:
        The transformation. Arguments and values of schedules are rounded to float32 as in the
        original: with ``beta2=0.999`` the weight of a new squared gradient is :math:`1 -
        \mathrm{float32}(0.999) = 0.00100001287`. The functions of this library, and ``create`` for
        optimizers without an original, do not round arguments.

    Raises:
        ImportError: if a name of Keras needs Keras 3 on JAX, which is missing.
        TypeError: if there is no name, or if an argument is unknown (the message suggests similar
            names), missing or given twice.
        ValueError: if the name is unknown or belongs to another library or module (the message
            suggests alternatives), or if an argument is out of its range.
    """
    config = _as_config(name_or_config)
    if twice := config.keys() & kwargs.keys():
        raise TypeError(f"{sorted(twice)} are given both in the config and as keyword arguments")
    config |= kwargs
    if isinstance(rate := config.get("learning_rate"), Mapping):
        config["learning_rate"] = _schedule(rate)
    found = _find(config.pop("class"), config)
    multiplier = None if found.is_wrapper else config.pop("learning_rate_multiplier", None)
    arguments = _defaults(found) | _translated(found, config)
    if found.is_wrapper:
        arguments = _with_inner(found, arguments)
    if found.name == "lars" and "skip_list" in config:  # it has parts of names, not patterns
        arguments["skip"] = tuple(map(containing, arguments["skip"] or ()))
    if "exclude_from_weight_decay" in config:  # for re.search
        arguments["skip"] = names_with("exclude_from_weight_decay", arguments["skip"] or ())
    if "sign_decay" in arguments:
        arguments["sign_decay"] = _sign_decay(arguments["sign_decay"])
    if found.original is not None and found.rounds:
        arguments = {k: _as_original(found.name, k, v) for k, v in arguments.items()}
    if missing := [p for p in found.parameters if p not in arguments]:
        raise TypeError(f"{found.name} needs {', '.join(missing)}")
    if multiplier is None:
        return found.factory(**arguments)
    arguments["learning_rate"] = _times(multiplier, arguments["learning_rate"])
    return _with_override_times(multiplier, found.factory(**arguments))


def register(
    name: str,
    factory: Callable[..., Any],
    *,
    rows: Literal["lazy", "dense", "touched", "linear"] = "dense",
    rate: float = 0.01,
    original: str | None = None,
    **about: Any,
) -> None:
    """Adds your optimizer to :data:`optzoo.CATALOG`, for :func:`optzoo.create` and the race.

    Example:
        >>> import optax, optzoo
        >>> optzoo.registry.register(
        ...     "my_sgd", lambda learning_rate: optax.sgd(learning_rate), rate=0.1
        ... )
        >>> tx = optzoo.create("MySGD", learning_rate=0.1)
        >>> print(optzoo.CATALOG.pop("my_sgd").rows)
        dense

    Args:
        name: its name; ``create`` finds it in any case, with or without ``Optimizer``.
        factory: returns the transformation; the first argument is the learning rate.
        rows: the policy for row-sparse gradients.
        rate: a learning rate that is suitable for small problems.
        original: the class whose values it computes, if any, including its rounding.
        **about: further fields of :class:`optzoo.catalog.Entry`, such as ``required``.

    Raises:
        TypeError: if the factory is not a function.
        ValueError: if the name already exists, or ``rows`` is not a known policy.
    """
    if not callable(factory):
        raise TypeError(f"factory must be a function that returns the optimizer, got {factory!r}")
    if (taken := _table().get(_key(name))) is not None:
        free = (
            f": remove it with del optzoo.CATALOG[{taken.name!r}]" if taken.name in CATALOG else ""
        )
        raise ValueError(f"name {name!r} is already used by {taken.name}{free}")
    check_choice(Rows, rows=rows)
    CATALOG[name] = Entry(factory, rows, rate, original, **about)


def add_name(
    name: str,
    factory: Callable[..., Any],
    original: str,
    *,
    others: Iterable[str] = (),
    rounds: bool = True,
) -> None:
    """Adds a name to :func:`create` only, for an optimizer without a table entry, such as Keras'.

    Args:
        name: the name.
        factory: returns the transformation.
        original: the class whose values it computes.
        others: other names.
        rounds: whether ``create`` rounds its arguments to float32.
    """
    found = _Found(name, factory, original, rounds=rounds)
    _ADDED.update({_key(known): found for known in (name, original, *others)})


def add_module(module: str, factories: Callable[[], Mapping[str, Callable[..., Any]]]) -> None:
    """Adds a module of another library to :func:`create`; its names are read when it is imported.

    An optimizer of this library with the same name is preferred unless it lacks a given argument.

    Args:
        module: the module, in the form of the keys of :func:`create`.
        factories: a function that imports the library and returns a factory for each name.
    """
    _ADDED_MODULES[module] = factories


def accepts(name: str, argument: str) -> bool:
    """Whether the optimizer or wrapper with this name has an argument with this name.

    The argument's name may be the original's or this library's. Ignored arguments (``use_locking``,
    ...) are excluded.
    """
    found = _find(name)
    return _ours(found, argument) in found.parameters


def factory_of(name: str | enum.Enum) -> Callable[..., Any]:
    """The function that :func:`create` calls for a name, with the same errors."""
    factory = _find(name).factory
    return factory.func if isinstance(factory, functools.partial) else factory


def names() -> dict[str, list[str]]:
    """All names of this library in :func:`create`, with the other names of each."""
    known: dict[str, list[str]] = {}
    for key, found in sorted(_table().items()):
        name = found.project or found.name
        is_other = key not in (_key(name), _key(found.original or ""))
        known.setdefault(name, []).extend([key] if is_other else [])
    return known


def listing(pattern: str = "") -> str:
    """A listing of all optimizers and wrappers: arguments, defaults, other names.

    Args:
        pattern: lists only those with this string in one of their names, in any case.

    Raises:
        ValueError: if no name contains the string.
    """
    lines = []
    for name, others in names().items():
        found = _find(name)
        if any(_key(pattern) in _key(n) for n in [name, found.original or "", *others]):
            call = f"{name}({', '.join(map(_as_written, found.parameters.values()))})"
            lines += textwrap.wrap(call, 100, subsequent_indent=" " * 8)
            lines.append("    " + ", ".join([found.original or "optzoo", *others]))
    if not lines:
        near = _nearest(_last(_key(pattern)), map(_last, _table()))
        near = near or "; leave it out to list all names"
        raise ValueError(f"no name contains {pattern!r}{near}")
    return "\n".join(lines)


class _Found(NamedTuple):
    """The optimizer or wrapper of a name."""

    name: str
    factory: Callable[..., optax.GradientTransformationExtraArgs]
    original: str | None
    is_wrapper: bool = False
    rounds: bool = True  # whether its arguments are rounded as the original does
    arguments: Mapping[str, str] = MappingProxyType({})  # this library's, by a project's names
    project: str = ""  # its name in a project, if the name is from a project

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """The parameters with a name."""
        found = inspect.signature(self.factory).parameters
        return {k: p for k, p in found.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}

    @property
    def takes_others(self) -> bool:
        """Whether arguments may have any name, by ``**kwargs``."""
        parameters = inspect.signature(self.factory).parameters.values()
        return any(p.kind is p.VAR_KEYWORD for p in parameters)


class _Alias(NamedTuple):
    """The meaning of another name."""

    name: str  # in the tables
    defaults: Mapping[str, Any] = MappingProxyType({})  # where they differ, by our names
    arguments: Mapping[str, str] = MappingProxyType({})  # our names by theirs, where they differ


_OF_T2T = {"b1": 0.85, "b2": 0.997, "eps": 1e-6}  # its basic_params1
_OF_MESH = {"min_dim_size_to_factor": 128}
_OF_PROTO = {"momentum_optimizer_value": "momentum"}
# Names that are not in the tables: of RETURNN's registry, and of projects that give names of their
# own, or other defaults, to classes of TensorFlow. Those of OpenNMT-tf 1 are those of the classes.
_ALSO = {
    "CustomGradientDescent": _Alias("gradient_descent"),
    "keras.optimizers.Ftrl": _Alias("ftrl", {"learning_rate": 0.001}),
    "lingvo.AdaDelta": _Alias("adadelta", {"b2": 0.95, "eps": 1e-8}, {"decay": "b2"}),
    "lingvo.Adagrad": _Alias("adagrad", {"initial_accumulator_value": 1.0}),
    "lingvo.Adam": _Alias("adam", {"eps": 1e-6}),
    "lingvo.Momentum": _Alias("momentum", {"momentum": 0.9}, {"alpha": "momentum"}),
    "lingvo.RMSProp": _Alias("rmsprop", {"b2": 0.9, "momentum": 0.9, "eps": 1.0}),
    "lingvo.SGD": _Alias("gradient_descent"),
    "mesh_tensorflow.Adafactor": _Alias("adafactor", _OF_MESH),
    "mesh_tensorflow.AdamWeightDecayOptimizer": _Alias("adam_weight_decay"),
    "object_detection.adam_optimizer": _Alias("adam"),
    "object_detection.momentum_optimizer": _Alias("momentum", {"momentum": 0.9}, _OF_PROTO),
    "object_detection.rms_prop_optimizer": _Alias(
        "rmsprop", {"b2": 0.9, "momentum": 0.9, "eps": 1.0}, _OF_PROTO
    ),
    "t5.Adafactor": _Alias("adafactor", _OF_MESH),
    "tensor2tensor.adagrad": _Alias("adagrad"),
    "tensor2tensor.adam": _Alias("lazy_adam", _OF_T2T),
    "tensor2tensor.adam_w": _Alias("adamw", _OF_T2T | {"weight_decay_per_step": 1e-6}),
    "tensor2tensor.ftrl": _Alias("ftrl"),
    "tensor2tensor.momentum": _Alias("momentum", {"momentum": 0.9}),
    "tensor2tensor.rms_prop": _Alias("rmsprop"),
    "tensor2tensor.sgd": _Alias("gradient_descent"),
    "tensor2tensor.true_adam": _Alias("adam", _OF_T2T),
}
# The modules that add names, imported when one is looked up; and these names.
_ADD_NAMES = "interop.fbgemm.optimizer", "interop.keras", "interop.projects"
_ADDED: dict[str, _Found] = {}
_ADDED_MODULES: dict[str, Callable[[], Mapping[str, Callable[..., Any]]]] = {}


def _table() -> dict[str, _Found]:
    """The optimizer of each key (see _key): names of this library and of the originals."""
    for module in _ADD_NAMES:
        importlib.import_module(f"{__package__}.{module}")
    table = {}
    for entries, is_wrapper in ((CATALOG, False), (WRAPPERS, True), (DISTRIBUTED, True)):
        for name, entry in entries.items():
            found = _Found(name, entry.factory, entry.original, is_wrapper)
            table[_key(name)] = found
            for known in (entry.original, _last(entry.original)) if entry.original else ():
                table.setdefault(_key(known), found)
    for other, alias in _ALSO.items():
        found = table[_key(alias.name)]
        if "." in other:
            factory = functools.partial(found.factory, **alias.defaults)
            found = found._replace(factory=factory, arguments=alias.arguments, project=other)
        table[_key(other)] = found
    return table | _ADDED


# Modules as written in keys, in the order of replacement: empty where a name means what
# it means without a module.
_MODULES = (
    (r"^tensorflow\b", "tf"),
    (r"^tf\.compat\.v1\b", "tf"),
    (r"^tf\.python\.training\b.*", "tf.train"),
    (r"^tf\.contrib\.opt\b.*", "tf.contrib.opt"),
    (r"^tf\.optimizers\b", "keras.optimizers"),
    (r"^(tf\.)?keras\b.*\blegacy$", "keraslegacy"),
    (r"^(tf\.)?keras\b.*", "keras"),
    (r"^(.*\.)?emboptimtype$", "emboptimtype"),
    (
        r"^(bert|lingvo|meshtensorflow|nvidia|objectdetection|opennmt|t5|tensor2tensor)\b.*",
        r"\1",
    ),
    (r"^(optzoo\b.*|returnn\.tf\.updater|tfupdater)$", ""),
)


@functools.cache
def _key(name: str) -> str:
    """A name as a key of the tables: ``adam``, or ``tf.train.adam`` with a module."""
    module, _, last = name.rpartition(".")
    module = module.lower().replace("_", "")
    for pattern, ours in _MODULES:
        module = re.sub(pattern, ours, module)
    key = last.lower().replace("_", "").removesuffix("optimizer")
    if module == "keraslegacy" and key in _AS_IN_OLD_KERAS:
        module = "keras"
    return f"{module}.{key}" if module else key


def _last(name: str) -> str:
    """A name without its module."""
    return name.rpartition(".")[2]


def _find(name: Any, given: Mapping[str, Any] = MappingProxyType({})) -> _Found:
    """The optimizer of a name; of several, one that has these arguments, if any."""
    if isinstance(name, enum.Enum):
        name = str(enum.Enum.__str__(name))  # EmbOptimType.ADAM
    if not isinstance(name, str):
        raise TypeError(f"the name of an optimizer must be a string, got {name!r}")
    found = _table().get(_key(name))
    if found is None or not all(_takes(found, *argument) for argument in given.items()):
        found = _of_module(name) or found
    if found is not None:
        return found
    if _key(name) == "basecustom":
        raise ValueError(
            "BaseCustom is RETURNN's base class for user-defined optimizers: use "
            "optzoo.rules.leafwise"
        )
    raise ValueError(f"no optimizer is called {name!r}{_instead(name)}")


def _of_module(name: str) -> _Found | None:
    """The optimizer of a name with the module of another library."""
    module, _, last = _key(name).rpartition(".")
    if module not in _ADDED_MODULES:
        return None
    for known, factory in _ADDED_MODULES[module]().items():
        if _last(_key(known)) == last:
            return _Found(known, factory, None, rounds=False)
    return None


def _takes(found: _Found, argument: str, value: Any) -> bool:
    """Whether an optimizer has or ignores an argument."""
    if argument == "learning_rate" and isinstance(value, Mapping):  # a schedule of Keras
        return False
    ignored = _MEANINGLESS | _MEANINGLESS_OF.get(found.name, set()) | {"learning_rate_multiplier"}
    return argument in ignored or _ours(found, argument) in found.parameters


# The optimizers of Keras 3 with the formulas of tf.keras before TensorFlow 2.11.
_AS_IN_OLD_KERAS = {"adadelta", "adagrad", "adam", "adamax", "ftrl", "sgd"}
# Libraries whose optimizers are not found by name, and what to do instead.
_OTHER_LIBRARIES = {
    "keraslegacy": "supported are the legacy Adadelta, Adagrad, Adam, Adamax, Ftrl and SGD; {} of "
    "Keras 3 has another formula",
    "keras": "give keras.optimizers.{}(...) to optzoo.interop.keras.keras_optimizer",
    "opennmt": "the supported optimizers of OpenNMT-tf are Adam, AdamW, LazyAdam, SGD and SGDW",
    "optax": "call the function of optax; optzoo accepts optax transformations",
    "torch": "docs/from_torch.md lists the equivalents of torch optimizers",
}
# Wrappers that cannot be described by a config.
_CALLED = {
    "caughtup": "caught_up",
    "dividestates": "divide_states",
    "onrows": "on_rows",
    "paramgroups": "param_groups",
}
# Optimizers that neither optzoo nor optax has by this name.
_ELSEWHERE = {
    "rectifiedadam": "use optax.radam",
    "sparseadam": "use optzoo.lazy_adam, which is torch's SparseAdam",
    "yellowfin": "tensor2tensor.utils.yellowfin needs TensorFlow 1",
}


def _instead(name: str) -> str:
    """The alternatives to an unknown name, as the end of a message."""
    module, _, key = _key(name).rpartition(".")
    if (advice := _OTHER_LIBRARIES.get(module.partition(".")[0])) is not None:
        return f": {advice.format(_last(name))}"
    if key in _CALLED:
        return f": call optzoo.{_CALLED[key]} with the optimizers that create returns"
    if key in _ELSEWHERE:
        return f"; {_ELSEWHERE[key]}"
    table = _table()
    same = {f.project or f.original or f.name for known, f in table.items() if _last(known) == key}
    if places := [*sorted(same), *_of_optax(key)]:
        return f"; available are {', '.join(places)}"
    return _nearest(key, [_last(k) for k in table if k.rpartition(".")[0] == module])


def _of_optax(key: str) -> list[str]:
    """The optax optimizers with a key, by their names in optax."""
    return [
        f"{module.__name__}.{name}"
        for module in (optax, optax.contrib)
        for name in dir(module)
        if _key(name) == key
        and callable(made := getattr(module, name))
        and "learning_rate" in inspect.signature(made).parameters
    ]


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(dict.fromkeys(known)), n=3, cutoff=0.5)
    return f"; the nearest are {', '.join(close)}" if close else ""


def _as_config(name_or_config: Any) -> dict[str, Any]:
    if isinstance(name_or_config, str | enum.Enum):
        return {"class": name_or_config}
    if isinstance(name_or_config, Mapping) and (found := _PROTOS & name_or_config.keys()):
        return _from_proto(found, dict(name_or_config))
    if isinstance(name_or_config, Mapping) and "class_name" in name_or_config:
        return _from_keras(name_or_config)
    if not isinstance(name_or_config, Mapping) or "class" not in name_or_config:
        raise TypeError(
            "name_or_config must be the name of an optimizer or a dict with its name under "
            f"'class', got {name_or_config!r}"
        )
    return dict(name_or_config)


# Keys other than arguments in configs of older versions of Keras, with their required values.
_OF_OLD_KERAS = {"decay": 0.0, "is_legacy_optimizer": None, "jit_compile": None}


def _from_keras(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config from the result of ``keras.optimizers.serialize``."""
    name, module = config["class_name"], config.get("module") or "keras.optimizers"
    if _key(f"{module}.{name}").rpartition(".")[0] != "keras":
        raise ValueError(
            f"name_or_config names {module}.{name}, which is not in Keras: give "
            "keras.optimizers.deserialize(config) to optzoo.interop.keras.keras_optimizer"
        )
    given = dict(config.get("config", {}))
    for argument, must in _OF_OLD_KERAS.items():
        if given.pop(argument, must) != must and must is not None:
            raise ValueError(
                f"name_or_config has {argument!r} of an old version of Keras, got "
                f"{config['config']}: give the schedule "
                "keras.optimizers.schedules.InverseTimeDecay(rate, 1, decay) instead"
            )
    plain = {k: v for k, v in given.items() if v is not None}
    if not plain.get("use_ema", True):  # then the others of averages have no meaning
        plain = {k: v for k, v in plain.items() if k not in ("use_ema", "ema_momentum")}
    return {"class": f"keras.optimizers.{name}", **plain}


# The optimizers of object_detection's optimizer.proto.
_PROTOS = {_last(name) for name in _ALSO if name.startswith("object_detection.")}


def _from_proto(found: set[str], message: dict[str, Any]) -> dict[str, Any]:
    """The config from a message ``Optimizer`` of object_detection, given as a dict."""
    name, *others = sorted(found)
    config = {"class": f"object_detection.{name}", **message.pop(name)}
    is_averaged = message.pop("use_moving_average", True)
    decay = message.pop("moving_average_decay", 0.9999)
    if others or message:
        raise TypeError(
            f"name_or_config has {name!r} and also {[*others, *(message.keys() - others)]}: it "
            "must have one optimizer, and may have use_moving_average and moving_average_decay"
        )
    return (
        {"class": "moving_average", "average_decay": decay, "opt": config}
        if is_averaged
        else config
    )


# The originals' names of arguments and this library's, where they differ.
_ARGUMENTS = {
    "beta1": "b1",
    "beta2": "b2",
    "epsilon": "eps",
    "use_nesterov": "nesterov",
    "sign_decay_fn": "sign_decay",
    "opt": "inner",
    "optimizer": "inner",
    "base_optimizer": "inner",
    "num_worker": "num_workers",
    "weight_decay": "weight_decay_per_step",  # where it is not multiplied by the rate
}
_OF_BERT = {
    "beta_1": "b1",
    "beta_2": "b2",
    "exclude_from_weight_decay": "skip",
    "weight_decay_rate": "weight_decay",
}
_ARGUMENTS_OF = {
    "adadelta": {"rho": "b2"},
    "adagrad_da": {"initial_gradient_squared_accumulator_value": "initial_accumulator_value"},
    "add_sign": {"beta": "b1"},
    "amsgrad": {"decay": "decay_learning_rate"},
    "ggt": {"epsilon": "epsilon"},  # it has three epsilons, and none of this name
    "adafactor": {"epsilon1": "eps", "epsilon2": "min_parameter_scale"},
    "adam_weight_decay": _OF_BERT,
    "lamb": _OF_BERT,
    "lars": {"eeta": "trust_coefficient", "skip_list": "skip", "weight_decay": "l2_weight_decay"},
    "muon": {"adjust_lr_fn": "adjust_lr"},
    "power_sign": {"beta": "b1"},
    "rmsprop": {"decay": "b2"},
    "shampoo": {
        "precond_update_interval": "statistics_interval",
        "svd_interval": "preconditioner_interval",
    },
    "soap": {"precondition_frequency": "preconditioner_interval"},
    "variable_clipping": {"vars_to_clip_dims": "dims"},
}
# Arguments without an effect in JAX: of all optimizers, and of some.
_MEANINGLESS = {"name", "use_locking"}
_MEANINGLESS_OF = {
    "adagrad_da": {"global_step"},  # it counts steps itself, or takes update(..., global_step=)
    "adam_gs": {"global_step"},
    "agn": {"custom_getter"},
    "amsgrad": {"var_list"},
    "elastic_average": {"ea_custom_getter", "synchronous"},
    "ftrl": {"accum_name", "linear_name"},
    "lazy_adam_gs": {"global_step"},
    "model_average": {"is_chief", "ma_custom_getter"},
    "moving_average": {"sequential_update"},
    "shampoo": {"global_step"},
    "variable_clipping": {"colocate_clip_ops_with_vars"},
}
# SyncReplicas averages with these; here the inner optimizer is wrapped in moving_average.
_MEANINGLESS_IF_NONE = {
    "adafactor": {
        "exclude_from_parameter_scale",
        "parameter_encoding",
        "simulated_quantize_bits",
        "stacked_dim_names",
    },
    "sync_replicas": {"variable_averages", "variables_to_average"},
}


def _ours(found: _Found, argument: str) -> str:
    """This library's name of an argument."""
    if argument in found.parameters:
        return argument
    return _names_of(found).get(argument, argument)


def _names_of(found: _Found) -> dict[str, str]:
    """This library's names, by the original's names of arguments."""
    return {**_ARGUMENTS, **_ARGUMENTS_OF.get(found.name, {}), **found.arguments}


def _translated(found: _Found, given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by this library's names; raises an error for unknown arguments."""
    ours: dict[str, Any] = {}
    known = {*found.parameters, *(["learning_rate"] if found.is_wrapper else [])}
    for argument, value in given.items():
        name = _ours(found, argument)
        if name in ours:
            raise TypeError(f"{found.name}: {name} is given twice, also as {argument}")
        if name in known:
            ours[name] = value
        elif found.takes_others:
            ours[argument] = value
        elif value is None and argument in _MEANINGLESS_IF_NONE.get(found.name, set()):
            continue
        elif argument not in _MEANINGLESS | _MEANINGLESS_OF.get(found.name, set()):
            ours_of = _names_of(found)
            theirs = [k for k, v in ours_of.items() if v in known and k not in known]
            raise TypeError(
                f"{found.name} has no argument "
                f"{argument!r}{_nearest(argument, [*known, *theirs])}; its arguments are "
                f"{', '.join(sorted(known))}"
            )
    return ours


def _with_inner(found: _Found, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a wrapper, with the inner optimizer created from its config."""
    is_of_inner = "learning_rate" not in found.parameters
    rate = {k: arguments[k] for k in arguments if k == "learning_rate" and is_of_inner}
    inner = arguments.get("inner")
    if inner is None:
        raise TypeError(f"{found.name} needs 'opt': the config of the inner optimizer")
    if isinstance(inner, str | Mapping):
        inner = create(inner, **rate)
    elif rate:
        raise TypeError(
            f"{found.name}: learning_rate belongs to the inner optimizer, which was given as a "
            "transformation: leave it out"
        )
    return {**{k: v for k, v in arguments.items() if k not in rate}, "inner": inner}


def _defaults(found: _Found) -> dict[str, Any]:
    parameters = found.parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}


# Values that the originals keep in double precision, or in that of the variable.
_EXACT = {
    "initial_accumulator_value",
    "weight_decay_per_step",
    "decrease_factor",
}
_ALL_EXACT = {
    "adafactor",
    "adam_weight_decay",
    "amsgrad",
    "elastic_average",
    "lamb",
    "lars",
    "shampoo",
    "variable_clipping",
}


def _as_original(name: str, argument: str, value: Any) -> Any:
    """A hyper-parameter, rounded as in the original."""
    if argument == "learning_rate" and callable(value):
        return lambda step: jnp.asarray(value(step), jnp.float32)
    if not isinstance(value, float) or argument in _EXACT or name in _ALL_EXACT:
        return value
    match argument:
        case "base":  # PowerSign takes the logarithm in double precision
            return math.e ** float(np.float32(math.log(value)))
        case "average_decay":  # MovingAverage computes with one minus it
            return 1 - float(1 - np.float32(value))
    return float(np.float32(value))


_SIGN_DECAYS = {
    "linear": linear_sign_decay,
    "cosine": cosine_sign_decay,
    "restart": restart_sign_decay,
}


def _sign_decay(value: Any) -> Any:
    """A sign decay from its config: ``{"class": "linear", "decay_steps": 1000}``."""
    if not isinstance(value, str | Mapping):
        return value
    config = _as_config(value)
    name = config.pop("class").lower().removeprefix("get_")
    name = name.removesuffix("_fn").removesuffix("_decay").removesuffix("_sign")
    check_choice(_SIGN_DECAYS, sign_decay=name)
    return _SIGN_DECAYS[name](**config)


_OF_TF1 = {
    "tf.train.cosine_decay": cosine_decay,
    "tf.train.cosine_decay_restarts": cosine_decay_restarts,
    "tf.train.exponential_decay": exponential_decay,
    "tf.train.inverse_time_decay": inverse_time_decay,
    "tf.train.linear_cosine_decay": linear_cosine_decay,
    "tf.train.natural_exp_decay": natural_exp_decay,
    "tf.train.piecewise_constant": piecewise_constant,
    "tf.train.piecewise_constant_decay": piecewise_constant,
    "tf.train.polynomial_decay": polynomial_decay,
}
_OF_PROJECTS = {
    "object_detection.cosine_decay_with_warmup": cosine_decay_with_warmup,
    "object_detection.exponential_decay_with_burnin": exponential_decay_with_burnin,
    "object_detection.manual_stepping": manual_stepping,
    "opennmt.noam": noam,
    "opennmt.NoamDecay": noam,
}


def _schedules() -> dict[str, Callable[..., optax.Schedule]]:
    """The schedules by the keys of their names, with and without module."""
    known = {_key(name): f for name, f in (_OF_TF1 | _OF_PROJECTS).items()}
    return {_last(key): f for key, f in known.items()} | known


def _schedule(config: Mapping[str, Any]) -> Any:
    """A schedule from its config, or the rate from a message of object_detection."""
    if "class_name" in config:  # of Keras, which reads it
        return config
    if config.keys() <= _MESSAGES.keys() and len(config) == 1:
        [(name, fields)] = config.items()
        return _from_rate(name, dict(fields))
    if "class" not in config:
        raise TypeError(
            "learning_rate must be a number, a schedule or a dict with the name of a schedule "
            f"under 'class', got {dict(config)!r}"
        )
    given = dict(config)
    name = given.pop("class")
    if _last(_key(str(name))) == "noisylinearcosinedecay":
        raise ValueError(
            f"{name} draws random numbers of TensorFlow, which are not available: use "
            "linear_cosine_decay, the same schedule without noise"
        )
    if (schedule := _schedules().get(_key(str(name)))) is None:
        near = _nearest(_last(_key(str(name))), [f.__name__ for f in _schedules().values()])
        raise ValueError(f"no schedule is called {name!r}{near}")
    given.pop("name", None)
    if schedule is noam and "scale" in given:
        given["learning_rate"] = given.pop("scale")
    parameters = inspect.signature(schedule).parameters
    for argument in given.keys() - parameters.keys():
        near = _nearest(argument, parameters)
        raise TypeError(f"{schedule.__name__} has no argument {argument!r}{near}")
    required = [k for k, p in parameters.items() if p.default is p.empty and k not in given]
    if required:
        raise TypeError(f"{schedule.__name__} needs {', '.join(required)}")
    return schedule(**given)


# The messages LearningRate of object_detection's optimizer.proto, with the defaults of their fields
# by our names of arguments; the names of fields that differ are below.
_MESSAGES: dict[str, dict[str, Any]] = {
    "constant_learning_rate": {"learning_rate": 0.002},
    "cosine_decay_learning_rate": {
        **{"learning_rate": 0.002, "total_steps": 4_000_000, "warmup_learning_rate": 0.0002},
        **{"warmup_steps": 10_000, "hold_base_rate_steps": 0},
    },
    "exponential_decay_learning_rate": {
        **{"learning_rate": 0.002, "decay_steps": 4_000_000, "decay_rate": 0.95},
        **{"staircase": True, "burnin_learning_rate": 0.0, "burnin_steps": 0},
        "min_learning_rate": 0.0,
    },
    "manual_step_learning_rate": {"learning_rate": 0.002, "schedule": (), "warmup": False},
}
_FIELDS = {
    "decay_factor": "decay_rate",
    "initial_learning_rate": "learning_rate",
    "learning_rate_base": "learning_rate",
}


def _from_rate(name: str, fields: dict[str, Any]) -> Any:
    """A learning rate from a message of object_detection."""
    given: dict[str, Any] = _MESSAGES[name] | {
        _FIELDS.get(field, field): v for field, v in fields.items()
    }
    for field in given.keys() - _MESSAGES[name].keys():
        raise TypeError(
            f"{name} has no field {field!r}; its fields are {', '.join(_MESSAGES[name])}"
        )
    match name:
        case "constant_learning_rate":
            return given["learning_rate"]
        case "cosine_decay_learning_rate":
            return cosine_decay_with_warmup(**given)
        case "exponential_decay_learning_rate":
            return exponential_decay_with_burnin(**given)
    if not (parts := given["schedule"]):
        raise ValueError(
            f"{name} has no schedule: give a list of dicts with step and learning_rate"
        )
    parts = [parts] if isinstance(parts, Mapping) else parts
    if wrong := [part for part in parts if part["step"] < 1]:
        raise ValueError(
            f"{name}: the step of a part of schedule must be at least 1, got {wrong[0]}"
        )
    rates = [given["learning_rate"], *(part.get("learning_rate", 0.002) for part in parts)]
    return manual_stepping([part["step"] for part in parts], rates, given["warmup"])


def _times(multiplier: float, rate: Any) -> Any:
    """A learning rate times a constant, both in float32, as in RETURNN."""
    factor = np.float32(multiplier)
    if callable(rate):
        return lambda step: factor * jnp.asarray(rate(step), jnp.float32)
    return float(factor * np.float32(rate)) if isinstance(rate, numbers.Real) else factor * rate


def _with_override_times(
    multiplier: float, tx: optax.GradientTransformationExtraArgs
) -> optax.GradientTransformationExtraArgs:
    """Also multiplies the rate of ``update(..., learning_rate=)``."""

    def update(updates, state, params=None, **extra_args):
        if extra_args.get("learning_rate") is not None:
            extra_args["learning_rate"] = _times(multiplier, extra_args["learning_rate"])
        return tx.update(updates, state, params, **extra_args)

    return Optimizer(tx.init, update, about_of(tx)._replace(deferral=None))


def _as_written(parameter: inspect.Parameter) -> str:
    if parameter.default is parameter.empty:
        return parameter.name
    return f"{parameter.name}={parameter.default!r}"
