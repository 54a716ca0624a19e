"""The meaning of a config in each of RETURNN's backends: the table ``BACKENDS``.

RETURNN's TensorFlow updater has its own optimizers and TensorFlow's. Its updaters for torch and JAX
have those of torch and optax, whose updates, including all decays, are multiplied by the rate.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import optax

from ...core.checks import check_choice
from ...core.norms import times
from ...core.paths import leaves_with_path, map_with_path, path_name, resolve_mask
from ...core.rows import densify, is_sparse_or_none
from ...first_order.adadelta import adadelta
from ...first_order.adagrad_eps import adagrad_eps
from ...registry import accepts, create
from .keys import hint
from .torch_adams import scale_by_torch_nadam, scale_by_torch_radam
from .values import flag, not_negative, number, whole

# Keys of the default optimizer's dict that select the parameters that decay, besides biases.
BLACKLIST, DECAY_CHECK = "weight_decay_modules_blacklist", "weight_decay_custom_include_check"


class Backend(NamedTuple):
    """The specific behaviour of the updater of one RETURNN backend."""

    name: str
    # The options with the dict of the default optimizer; a dict with what RETURNN adds to it.
    prepare: Callable[[Mapping[str, Any]], dict[str, Any]]
    complete: Callable[[dict[str, Any], Mapping[str, Any], Mapping[str, Any]], dict[str, Any]]
    # The optimizers of rate 1 by their classes; all others are of `create`.
    optimizers: Mapping[str, Callable[..., optax.GradientTransformation]] = {}
    # Whether norms are those of the sum of the micro-steps, after noise and the clips before; else
    # they are those of the raw gradients of the present micro-step.
    norms_of_sums: bool = True
    reads_network: bool = False  # whether layers and their options are in the config
    norm_epsilon: float = 0.0  # what is added to the norm to clip by

    def ignored(self, config: Mapping[str, Any]) -> Mapping[str, str] | None:
        """TensorFlow options that it ignores, with the alternatives; None for TensorFlow."""
        if not self.optimizers:
            return None
        optimizer = config.get("optimizer")
        name = optimizer.get("class") if isinstance(optimizer, Mapping) else None
        is_own = not isinstance(name, str) or name.lower() in self.optimizers
        return _IGNORED if is_own else _IGNORED_BY_ALL

    def create(self, config: Mapping[str, Any], rate: Any, decay_mask: Any) -> Any:
        """The optimizer of a completed dict; ``decay_mask`` as in ``returnn_updater``."""
        options = dict(config)
        make = self.optimizers.get(options.pop("class"))
        if make is None:
            return create(config, learning_rate=rate)
        if options.get("weight_decay"):  # RETURNN masks only a decay that is set
            mask = _all_but_biases if decay_mask is None else decay_mask
            options["mask"] = lambda tree: resolve_mask(mask, tree, "decay_mask")
        return _times_rate(make(1.0, **options), rate)

    def written(self, config: Mapping[str, Any]) -> str:
        """The completed dict as a string, for the log."""
        if config["class"] not in self.optimizers:
            return f"optzoo.create({config})"
        options = {key: value for key, value in config.items() if key != "class"}
        library = {"JAX": "optax"}.get(self.name, self.name)
        return f"{library}.{config['class']}({options})"


def backend_of(config: Mapping[str, Any], default: str) -> Backend:
    """The backend that a config names, read as RETURNN does; ``default`` if there is none.

    Raises:
        ValueError: if RETURNN has no backend of this name.
    """
    if name := config.get("backend"):
        check_choice(_NAMES, backend=name)
        return BACKENDS[_NAMES[name]]
    return BACKENDS["tensorflow" if config.get("use_tensorflow") else default]


def _times_rate(
    tx: optax.GradientTransformation, rate: Any
) -> optax.GradientTransformationExtraArgs:
    """The updates of an optimizer with rate 1, times a rate, or the rate passed to ``update``."""
    tx = optax.chain(densify(), tx)

    def update(updates, state, params=None, *, learning_rate=None, **extra_args):
        leaves = leaves_with_path(updates, is_leaf=is_sparse_or_none)
        if missing := [path_name(path) for path, g in leaves if g is None]:
            raise ValueError(
                f"{missing} have no gradients, which optax optimizers need: wrap the updater in "
                "optax.masked to exclude these parameters"
            )
        updates, state = tx.update(updates, state, params)
        factor = rate if learning_rate is None else learning_rate
        return jax.tree.map(lambda u: times(factor, u), updates), state

    return optax.GradientTransformationExtraArgs(tx.init, update)


def _all_but_biases(tree: Any) -> Any:
    """True for each parameter whose name does not end with ``bias``."""
    decays = lambda path, _: not path_name(path).endswith("bias")
    return map_with_path(decays, tree, is_leaf=is_sparse_or_none)


def _named(given: Mapping[str, Any]) -> dict[str, Any] | None:
    """The value of ``optimizer``; None if it is not set."""
    optimizer = given.get("optimizer")
    if optimizer is None or isinstance(optimizer, Mapping):
        return None if optimizer is None else dict(optimizer)
    raise TypeError(_needs_class(optimizer))


def _needs_class(optimizer: Any) -> str:
    return (
        "optimizer must be a dict with the name of the class under 'class', such as "
        f"{{'class': 'adam'}}, got {optimizer!r}"
    )


def _refuse_rate(optimizer: Mapping[str, Any], instead: str = "") -> None:
    if found := {"learning_rate", "lr"} & optimizer.keys():
        raise ValueError(
            f"optimizer: {found.pop()} must not be in the optimizer's dict: set learning_rate in "
            f"the config{instead}"
        )


# TensorFlow


def _tensorflow(given: Mapping[str, Any]) -> dict[str, Any]:
    """``optimizer`` as set, or as defined by one of the old switches."""
    return {**given, "optimizer": _tensorflow_default(given)}


def _tensorflow_default(given: Mapping[str, Any]) -> dict[str, Any]:
    if (optimizer := _named(given)) is not None:
        if "class" not in optimizer:
            raise TypeError(_needs_class(optimizer))
        return optimizer
    momentum = number("momentum", given.get("momentum", 0))
    switches = ("adam", "nadam", "adadelta", "adagrad")
    switch = next((name for name in switches if flag(name, given.get(name, False))), None)
    if switch and momentum:
        raise ValueError(f"{switch} has no momentum, got momentum={momentum}: remove it")
    rmsprop = given.get("rmsprop", False)
    if switch:
        old = {"class": switch}
    elif isinstance(rmsprop, float):
        old = {"class": "rmsprop", "decay": rmsprop}
    elif flag("rmsprop", rmsprop):
        old = {"class": "rmsprop"}
    elif momentum:
        old = {"class": "momentum"}
    else:
        return {"class": "gradientdescent"}
    if whole("behavior_version", given.get("behavior_version", 0)) >= 2:
        raise ValueError(
            f"behavior_version 2 and later does not support the switch: use optimizer={old!r}"
        )
    return old


def _tensorflow_complete(
    optimizer: dict[str, Any], default: Mapping[str, Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Adds the default's class, ``optimizer_epsilon`` and ``momentum``."""
    optimizer = {"class": default.get("class"), **optimizer}
    _refuse_rate(optimizer, "; the dict may have a learning_rate_multiplier")
    multiplier = optimizer.get("learning_rate_multiplier")
    if multiplier is not None:
        optimizer["learning_rate_multiplier"] = number("learning_rate_multiplier", multiplier)
    epsilon = not_negative("optimizer_epsilon", given.get("optimizer_epsilon", 1e-16))
    momentum = number("momentum", given.get("momentum", 0))
    if not {"epsilon", "eps"} & optimizer.keys() and accepts(optimizer["class"], "epsilon"):
        optimizer["epsilon"] = epsilon
    if momentum and "momentum" not in optimizer and accepts(optimizer["class"], "momentum"):
        optimizer["momentum"] = momentum
    return optimizer


# JAX and torch


def _completed(
    name: str, optimizers: Mapping[str, Callable[..., Any]], optimizer: dict[str, Any]
) -> dict[str, Any]:
    """A dict of the arguments of one of the optimizers, by its own names."""
    _refuse_rate(optimizer)
    if "epsilon" in optimizer:
        optimizer["eps"] = optimizer.pop("epsilon")
    parameters = inspect.signature(optimizers[optimizer["class"]]).parameters
    known = ["class", *parameters.keys() - {"learning_rate", "mask"}]
    if unknown := [key for key in optimizer if key not in known]:
        raise TypeError(
            f"optimizer: {optimizer['class']} of RETURNN's {name} backend has no argument "
            f"{'; '.join(hint(key, known) for key in unknown)}"
        )
    return optimizer


def _jax(given: Mapping[str, Any]) -> dict[str, Any]:
    """Reads ``gradient_clip_global_norm`` from the dict of the optimizer, if it is there."""
    optimizer = _named(given) or {}
    optimizer.pop(BLACKLIST, None)
    clip = optimizer.pop("gradient_clip_global_norm", None)
    clip = {"gradient_clip_global_norm": clip} if clip else {}
    return {**given, **clip, "optimizer": optimizer}


def _jax_complete(
    optimizer: dict[str, Any], default: Mapping[str, Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of optax, by its names; other classes as with TensorFlow."""
    optimizer = {"class": default.get("class", "adamw"), **optimizer}
    name = optimizer["class"]
    if not isinstance(name, str) or name.lower() not in _OPTAX:
        return _tensorflow_complete(optimizer, default, given)
    optimizer["class"] = name.lower()
    if "betas" in optimizer:
        optimizer["b1"], optimizer["b2"] = optimizer.pop("betas")
    return _completed("JAX", _OPTAX, optimizer)


_OPTAX = {"adam": optax.adam, "adamw": optax.adamw, "sgd": optax.sgd}


def _torch(given: Mapping[str, Any]) -> dict[str, Any]:
    """``optimizer`` is required."""
    optimizer = _named(given)
    if optimizer is None:
        raise ValueError("optimizer must be set with the torch backend, as RETURNN requires")
    if "class" not in optimizer:
        raise TypeError(_needs_class(optimizer))
    for key in (BLACKLIST, DECAY_CHECK):
        optimizer.pop(key, None)
    return {**given, "optimizer": optimizer}


def _torch_complete(
    optimizer: dict[str, Any], default: Mapping[str, Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of torch that have an effect, by its names."""
    optimizer = {"class": default.get("class"), **optimizer}
    if "param_groups_custom" in optimizer:
        raise ValueError(
            "optimizer: param_groups_custom is not supported, because it is a function of torch "
            "modules; pass the groups by the argument layers"
        )
    name = str(optimizer["class"]).lower().removeprefix("torch.optim.")
    if name not in _TORCH:
        raise ValueError(
            f"optimizer: the class {optimizer['class']!r} is not supported for the torch backend; "
            f"supported are {', '.join(_TORCH)}"
        )
    optimizer["class"] = name
    for key in _TORCH_SPEED:
        optimizer.pop(key, None)
    for key in _TORCH_REFUSED:
        if optimizer.pop(key, None):
            raise ValueError(f"optimizer: {key} of torch's {name} is not supported")
    return _completed("torch", _TORCH, optimizer)


# They do not change values.
_TORCH_SPEED = ("foreach", "fused", "capturable", "differentiable")
_TORCH_REFUSED = ("amsgrad", "dampening", "lr_decay", "maximize")


def _with_l2(weight_decay: float, mask: Any, tx: Any) -> optax.GradientTransformation:
    """Torch's ``weight_decay``, which is added to the gradient except in AdamW."""
    return optax.chain(optax.add_decayed_weights(weight_decay, mask), tx) if weight_decay else tx


def _torch_sgd(learning_rate, momentum=0.0, weight_decay=0.0, nesterov=False, mask=None):
    # Without momentum there is no velocity to store.
    sgd = optax.sgd(learning_rate, momentum or None, nesterov)
    return _with_l2(weight_decay, mask, sgd)


def _torch_adam(
    learning_rate,
    betas=(0.9, 0.999),
    eps=1e-8,
    weight_decay=0.0,
    decoupled_weight_decay=False,
    mask=None,
):
    if decoupled_weight_decay:
        return _torch_adamw(learning_rate, betas, eps, weight_decay, mask)
    b1, b2 = betas
    return _with_l2(weight_decay, mask, optax.adam(learning_rate, b1, b2, eps))


def _torch_adamw(learning_rate, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, mask=None):
    b1, b2 = betas
    return optax.adamw(learning_rate, b1, b2, eps, weight_decay=weight_decay, mask=mask)


def _torch_adamax(learning_rate, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, mask=None):
    b1, b2 = betas
    return _with_l2(weight_decay, mask, optax.adamax(learning_rate, b1, b2, eps))


def _torch_nadam(
    learning_rate,
    betas=(0.9, 0.999),
    eps=1e-8,
    weight_decay=0.0,
    momentum_decay=4e-3,
    decoupled_weight_decay=False,
    mask=None,
):
    b1, b2 = betas
    nadam = scale_by_torch_nadam(b1, b2, eps, momentum_decay)
    return _decayed(nadam, learning_rate, weight_decay, decoupled_weight_decay, mask)


def _torch_radam(
    learning_rate,
    betas=(0.9, 0.999),
    eps=1e-8,
    weight_decay=0.0,
    decoupled_weight_decay=False,
    mask=None,
):
    b1, b2 = betas
    radam = scale_by_torch_radam(b1, b2, eps)
    return _decayed(radam, learning_rate, weight_decay, decoupled_weight_decay, mask)


def _decayed(direction: Any, rate: Any, weight_decay: float, decoupled: bool, mask: Any) -> Any:
    """A direction times a rate, with a weight decay of torch."""
    if not decoupled:
        return _with_l2(weight_decay, mask, optax.chain(direction, optax.scale(-rate)))
    decay = optax.add_decayed_weights(weight_decay, mask)
    return optax.chain(direction, decay, optax.scale(-rate))


def _torch_adagrad(
    learning_rate, weight_decay=0.0, initial_accumulator_value=0.0, eps=1e-10, mask=None
):
    return _with_l2(weight_decay, mask, adagrad_eps(learning_rate, eps, initial_accumulator_value))


def _torch_adadelta(learning_rate, rho=0.9, eps=1e-6, weight_decay=0.0, mask=None):
    return _with_l2(weight_decay, mask, adadelta(learning_rate, rho, eps))


def _torch_rmsprop(
    learning_rate,
    alpha=0.99,
    eps=1e-8,
    weight_decay=0.0,
    momentum=0.0,
    centered=False,
    mask=None,
):
    rmsprop = optax.rmsprop(
        learning_rate,
        alpha,
        eps=eps,
        eps_in_sqrt=False,
        momentum=momentum or None,
        centered=centered,
    )
    return _with_l2(weight_decay, mask, rmsprop)


_TORCH = {
    "adadelta": _torch_adadelta,
    "adagrad": _torch_adagrad,
    "adam": _torch_adam,
    "adamax": _torch_adamax,
    "adamw": _torch_adamw,
    "nadam": _torch_nadam,
    "radam": _torch_radam,
    "rmsprop": _torch_rmsprop,
    "sgd": _torch_sgd,
}

_IGNORED_BY_ALL = {
    "extra_updates": "apply the functions to the parameters after the step",
    "use_horovod": "average the gradients over the replicas before the update",
}
_IGNORED = {
    "optimizer_epsilon": "write epsilon into the dict of the optimizer",
    **_IGNORED_BY_ALL,
}
BACKENDS = {
    "tensorflow": Backend(
        "TensorFlow", _tensorflow, _tensorflow_complete, norms_of_sums=False, reads_network=True
    ),
    "jax": Backend("JAX", _jax, _jax_complete, _OPTAX),
    "torch": Backend(
        "torch",
        _torch,
        _torch_complete,
        _TORCH,
        norm_epsilon=1e-6,
    ),
}
# RETURNN's names of them.
_NAMES = {
    "tensorflow-net-dict": "tensorflow",
    "tensorflow": "tensorflow",
    "torch": "torch",
    "jax": "jax",
}
