"""Reads the options of RETURNN's updater from its config, with an error for unsupported options."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from .backends import Backend, backend_of
from .keys import hint, refuse_unknown
from .values import (
    PARAM_READERS,
    STEP_READERS,
    ParamOptions,
    Readers,
    StepOptions,
    mapping,
    not_negative,
)


class Options(NamedTuple):
    """All options."""

    backend: Backend
    step: StepOptions
    default: ParamOptions
    layers: dict[str, ParamOptions]

    def of(self, name: str) -> ParamOptions:
        """The options of the parameter at a path: those of its innermost layer."""
        layer = _innermost(self.layers, name)
        return self.default if layer is None else self.layers[layer]

    @property
    def distinct(self) -> list[ParamOptions]:
        """The default options, and those of each layer."""
        return [self.default, *self.layers.values()]

    @property
    def needed_tags(self) -> set[str | None]:
        """The tags for which a norm is needed; None for the norm of all gradients."""
        used = self.distinct
        clip = {o.gradient_clip_global_norm_tag for o in used if o.gradient_clip_global_norm}
        return clip | {o.global_norm_tag for o in used if o.grad_norm_to_clip_to_zero}

    def has(self, option: str) -> bool:
        """Whether a parameter has this option."""
        return any(getattr(o, option) for o in self.distinct)

    def check_names(self, names: list[str]) -> None:
        """Raises ``ValueError`` if a layer or an extra update matches no parameter."""
        for layer in self.layers:
            if not any(_is_in(name, layer) for name in names):
                raise ValueError(
                    f"layers: no parameter's path begins with '{layer}/'; the parameters are "
                    f"{names}"
                )
        if unknown := sorted(self.step.extra_updates.keys() - set(names)):
            raise ValueError(
                f"extra_updates: no parameter has the path {unknown[0]!r}; the parameters are "
                f"{names}"
            )


def read_options(config: Any, layers: Any, backend: str = "tensorflow") -> Options:
    """Reads a config; raises the errors of :func:`optzoo.interop.returnn.returnn_updater`.

    Args:
        config: the config.
        layers: the options of layers; None for those of the config's network.
        backend: the default backend.
    """
    if not isinstance(config, Mapping):
        raise TypeError(
            f"config must be a dict, got {config!r}; for a returnn.config.Config, give its "
            "typed_dict"
        )
    semantics = backend_of(config, backend)
    refuse_unknown(config, semantics.name, semantics.ignored(config))
    given = semantics.prepare({name: x for name, x in config.items() if x is not None})
    step = StepOptions(**_read(given, STEP_READERS))
    optimizer = semantics.complete(given["optimizer"], {}, given)
    default = ParamOptions(optimizer=optimizer, **_read(given, PARAM_READERS))
    tag = default.gradient_clip_global_norm_tag or default.global_norm_tag
    default = dataclasses.replace(default, gradient_clip_global_norm_tag=tag)
    if layers is None:
        layers = _layers_of(config) if semantics.reads_network else {}
    found = mapping("layers", layers)
    read = lambda name: _layer(name, found[name], default, given, semantics)
    of_layers = {name: read(name) for name in found}
    _fill_from_outer(of_layers, found)
    options = Options(semantics, step, default, of_layers)
    known = {tag for one in of_layers.values() for tag in one.tags}
    if unknown := sorted(map(repr, options.needed_tags - {None, *known})):
        raise ValueError(
            "global_norm_tag or gradient_clip_global_norm_tag: no layer has the tag "
            f"{unknown[0]}; the tags are {sorted(known)}"
        )
    return options


def _is_in(name: str, layer: str) -> bool:
    return name == layer or name.startswith(layer + "/")


def _innermost(layers: Iterable[str], name: str) -> str | None:
    return max((layer for layer in layers if _is_in(name, layer)), key=len, default=None)


def _read(given: Mapping[str, Any], readers: Readers, where: str = "") -> dict[str, Any]:
    is_given = lambda name: given.get(name) is not None
    return {name: readers[name](where + name, given[name]) for name in filter(is_given, readers)}


# Layers


def _layer(
    name: str, options: Any, default: ParamOptions, given: Mapping[str, Any], backend: Backend
) -> ParamOptions:
    """The options of one layer, completed with the default options."""
    if not isinstance(options, Mapping) or options.keys() - {"L2", "updater_opts"}:
        raise ValueError(f"layers: {name!r} may have L2 and updater_opts, got {options!r}")
    where = f"layer {name!r}: "
    own = mapping(f"{where}updater_opts", options.get("updater_opts") or {})
    if unread := own.keys() - {*PARAM_READERS, "optimizer"}:
        hints = [hint(key, [*PARAM_READERS, "optimizer"]) for key in sorted(unread)]
        raise ValueError(f"{where}updater_opts has unknown options: {'; '.join(hints)}")
    values = _read(own, PARAM_READERS, where)
    if own.get("optimizer") is not None:
        optimizer = mapping(f"{where}optimizer", own["optimizer"])
        values["optimizer"] = backend.complete(optimizer, default.optimizer, given)
    every = values.get("accum_grad_multiple_step", default.accum_grad_multiple_step)
    if backend.norms_of_sums and every != default.accum_grad_multiple_step:
        raise ValueError(
            f"{where}accum_grad_multiple_step must be {default.accum_grad_multiple_step}, as in "
            f"the config, with the {backend.name} backend, got {every}"
        )
    if "global_norm_tag" in values and "gradient_clip_global_norm_tag" not in values:
        # The default one falls back on the layer's own tag, unless the config names one.
        named = given.get("gradient_clip_global_norm_tag")
        values["gradient_clip_global_norm_tag"] = named or values["global_norm_tag"]
    if options.get("L2"):
        values["L2"] = not_negative("L2", options["L2"])
    return dataclasses.replace(default, **values)


def _fill_from_outer(layers: dict[str, ParamOptions], found: Mapping[str, Any]) -> None:
    """Completes the options of a nested layer with those of its outer layer."""
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
            "the network of this config is not a dict whose layers can be read: pass layers, a "
            "dict of the options (L2, updater_opts) of layers, or layers={}"
        )
    return dict(_layers_in(network))


# Classes of layers without parameters, unless they normalize.
_WITHOUT_PARAMETERS = ("combine", "copy", "dropout")


def _layers_in(
    network: Mapping[str, Any], prefix: str = "", trained: bool = True
) -> Iterator[tuple[str, Any]]:
    for name, layer in network.items():
        if name.startswith("#") or not isinstance(layer, Mapping):
            continue
        for key in ("darc1", "spatial_smoothing"):
            if layer.get(key):
                raise ValueError(
                    f"layer {prefix + name!r}: {key} depends on the output of the layer: add it "
                    "to the loss and remove it from the config"
                )
        is_trained = trained and bool(layer.get("trainable", True))
        options = {key: layer[key] for key in ("L2", "updater_opts") if layer.get(key)}
        if options and is_trained and _has_parameters(layer):
            yield prefix + name, options
        for inside in ("subnetwork", "unit"):
            if isinstance(layer.get(inside), Mapping):
                yield from _layers_in(layer[inside], f"{prefix}{name}/", is_trained)


def _has_parameters(layer: Mapping[str, Any]) -> bool:
    """Whether a layer may have parameters of its own; otherwise its options have no effect."""
    if isinstance(layer.get("reuse_params"), str):  # all parameters are those of another layer
        return False
    return layer.get("class") not in _WITHOUT_PARAMETERS or bool(layer.get("batch_norm"))
