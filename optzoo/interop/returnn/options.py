"""The options of RETURNN's updater, read from its config: each is supported or refused."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple, get_args

from ...registry import accepts
from .keys import hint, refuse_unknown
from .values import (
    PARAM_READERS,
    STEP_READERS,
    ParamOptions,
    StepOptions,
    flag,
    not_negative,
    number,
    whole,
)

ReturnnVersion = Literal["2017", "2022", "2026"]
RETURNN_VERSIONS = get_args(ReturnnVersion)


class Options(NamedTuple):
    """All options."""

    step: StepOptions
    default: ParamOptions
    layers: dict[str, ParamOptions]

    def of(self, name: str) -> ParamOptions:
        """The options of the parameter at a path: those of the innermost layer around it."""
        layer = _innermost(self.layers, name)
        return self.default if layer is None else self.layers[layer]

    @property
    def distinct(self) -> list[ParamOptions]:
        """The default options and those of each layer."""
        return [self.default, *self.layers.values()]

    def check_names(self, names: list[str]) -> None:
        """Raises ``ValueError`` if a layer or an extra update has no parameter."""
        for layer in self.layers:
            if not any(_is_in(name, layer) for name in names):
                raise ValueError(
                    f"layers: no parameter's path begins with '{layer}/'; there are {names}"
                )
        for name in self.step.extra_updates:
            if name not in names:
                raise ValueError(
                    f"extra_updates: no parameter has the path {name!r}; there are {names}"
                )


def read_options(config: Any, layers: Any) -> Options:
    """Reads a config; see :func:`optzoo.returnn_updater` for what it raises."""
    if not isinstance(config, Mapping):
        raise TypeError(
            f"config must be a dict, got {config!r}; of a returnn.config.Config take typed_dict"
        )
    refuse_unknown(config)
    given = {name: value for name, value in config.items() if value is not None}
    step = StepOptions(**_read(given, STEP_READERS))
    optimizer = _complete(_default_optimizer(given), {}, given)
    default = _with_tag(ParamOptions(optimizer=optimizer, **_read(given, PARAM_READERS)))
    found = _layers_of(config) if layers is None else layers
    if not isinstance(found, Mapping):
        raise TypeError(f"layers must be a dict of layers' options by their names, got {found!r}")
    of_layers = {name: _layer(name, options, default, given) for name, options in found.items()}
    _fill_from_outer(of_layers, found)
    options = Options(step, default, of_layers)
    _check_tags(options)
    return options


def _is_in(name: str, layer: str) -> bool:
    return name == layer or name.startswith(layer + "/")


def _innermost(layers: Iterable[str], name: str) -> str | None:
    return max((layer for layer in layers if _is_in(name, layer)), key=len, default=None)


def _read(given: Mapping[str, Any], readers: Mapping[str, Any]) -> dict[str, Any]:
    return {name: read(name, given[name]) for name, read in readers.items() if name in given}


# The optimizer


def _default_optimizer(given: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the default optimizer, from ``optimizer`` or from one of the old switches."""
    if "optimizer" in given:
        optimizer = given["optimizer"]
        if not isinstance(optimizer, Mapping) or "class" not in optimizer:
            raise TypeError(
                "optimizer must be a dict with the name of the class under 'class', such as "
                f"{{'class': 'adam'}}, got {optimizer!r}"
            )
        return dict(optimizer)
    momentum = number("momentum", given.get("momentum", 0))
    for name in ("adam", "nadam", "adadelta", "adagrad"):
        if flag(name, given.get(name, False)):
            if momentum:
                raise ValueError(f"{name} takes no momentum, got momentum={momentum}")
            return _old({"class": name}, given)
    rmsprop = given.get("rmsprop", False)
    if isinstance(rmsprop, float):
        return _old({"class": "rmsprop", "decay": rmsprop}, given)
    if flag("rmsprop", rmsprop):
        return _old({"class": "rmsprop"}, given)
    if momentum:
        return _old({"class": "momentum"}, given)
    return {"class": "gradientdescent"}


def _old(optimizer: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    if whole("behavior_version", given.get("behavior_version", 0)) >= 2:
        raise ValueError(
            f"behavior_version 2 and later need optimizer={optimizer!r} instead of the switch"
        )
    return optimizer


def _complete(
    optimizer: dict[str, Any], default: Mapping[str, Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Adds what RETURNN adds: the default's class, ``optimizer_epsilon`` and ``momentum``."""
    optimizer = {"class": default.get("class"), **optimizer}
    if "learning_rate" in optimizer:
        raise ValueError(
            "optimizer: learning_rate is an option of the config, not of the optimizer's dict; "
            "that may have a learning_rate_multiplier"
        )
    multiplier = optimizer.get("learning_rate_multiplier")
    if multiplier is not None:
        optimizer["learning_rate_multiplier"] = number("learning_rate_multiplier", multiplier)
    added = {
        "epsilon": not_negative("optimizer_epsilon", given.get("optimizer_epsilon", 1e-16)),
        "momentum": number("momentum", given.get("momentum", 0)),
    }
    added = {k: v for k, v in added.items() if k == "epsilon" or v}
    ours = {"epsilon": "eps"}
    for name, value in added.items():
        if not {name, ours.get(name)} & optimizer.keys() and accepts(optimizer["class"], name):
            optimizer[name] = value
    return optimizer


# Layers


def _layer(name: str, options: Any, default: ParamOptions, given: Mapping[str, Any]):
    """The options of one layer over the default ones."""
    if not isinstance(options, Mapping) or options.keys() - {"L2", "updater_opts"}:
        raise ValueError(f"layers: {name!r} may have L2 and updater_opts, got {options!r}")
    where = f"layer {name!r}: "
    own = options.get("updater_opts") or {}
    if not isinstance(own, Mapping):
        raise TypeError(f"{where}updater_opts must be a dict, got {own!r}")
    own = dict(own)
    values: dict[str, Any] = {}
    optimizer = own.pop("optimizer", None)
    if optimizer is not None:
        if not isinstance(optimizer, Mapping):
            raise TypeError(f"{where}optimizer must be a dict, got {optimizer!r}")
        values["optimizer"] = _complete(dict(optimizer), default.optimizer, given)
    if unread := own.keys() - PARAM_READERS.keys():
        hints = [hint(key, [*PARAM_READERS, "optimizer"]) for key in sorted(unread)]
        raise ValueError(f"{where}updater_opts has unknown options: {'; '.join(hints)}")
    own = {key: value for key, value in own.items() if value is not None}
    values |= {key: PARAM_READERS[key](f"{where}{key}", value) for key, value in own.items()}
    if "global_norm_tag" in own and "gradient_clip_global_norm_tag" not in own:
        # The default one falls back on the layer's own tag, unless the config names one.
        named = given.get("gradient_clip_global_norm_tag")
        values["gradient_clip_global_norm_tag"] = named or own["global_norm_tag"]
    if options.get("L2"):
        values["L2"] = not_negative("L2", options["L2"])
    return dataclasses.replace(default, **values)


def _with_tag(options: ParamOptions) -> ParamOptions:
    tag = options.gradient_clip_global_norm_tag or options.global_norm_tag
    return dataclasses.replace(options, gradient_clip_global_norm_tag=tag)


def _fill_from_outer(layers: dict[str, ParamOptions], found: Mapping[str, Any]) -> None:
    """A layer inside of another inherits what it does not set itself."""
    for name in sorted(layers):  # a layer comes before those inside of it
        outer = _innermost([other for other in layers if other != name], name)
        if outer is None:
            continue
        if not found[name].get("updater_opts"):
            layers[name] = dataclasses.replace(layers[outer], L2=layers[name].L2)
        if not found[name].get("L2"):
            layers[name] = dataclasses.replace(layers[name], L2=layers[outer].L2)


def _layers_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the layers of ``config["network"]``."""
    network = config.get("network", {})
    if callable(config.get("get_network")) or not isinstance(network, Mapping):
        raise ValueError(
            "the network of this config is not a dict whose layers can be read: pass layers=, a "
            "dict of the options (L2, updater_opts) of the layers that have some, or layers={}"
        )
    found: dict[str, Any] = {}
    _collect(network, "", found)
    return found


def _collect(network: Mapping[str, Any], prefix: str, found: dict[str, Any]) -> None:
    for name, layer in network.items():
        if name.startswith("#") or not isinstance(layer, Mapping):
            continue
        for key in ("darc1", "spatial_smoothing"):
            if layer.get(key):
                raise ValueError(
                    f"layer {prefix + name!r}: {key} depends on the output of the layer: add it "
                    "to the loss and remove it from the config"
                )
        options = {key: layer[key] for key in ("L2", "updater_opts") if layer.get(key)}
        if options:
            found[prefix + name] = options
        for inside in ("subnetwork", "unit"):
            if isinstance(layer.get(inside), Mapping):
                _collect(layer[inside], f"{prefix}{name}/", found)


def _check_tags(options: Options) -> None:
    known = {tag for one in options.layers.values() for tag in one.tags}
    for one in options.distinct:
        used = {
            "gradient_clip_global_norm_tag": one.gradient_clip_global_norm,
            "global_norm_tag": one.grad_norm_to_clip_to_zero,
        }
        for name, is_used in used.items():
            tag = getattr(one, name)
            if is_used and tag is not None and tag not in known:
                raise ValueError(
                    f"{name}: no layer has {tag!r} among its tags; there are {sorted(known)}"
                )
