"""The updater for RETURNN's JAX engine, with the optimizers of optax and optzoo."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optax
from jax import Array

from ...core.checks import check_positive
from .backends import BLACKLIST, DECAY_CHECK
from .options import read_options
from .updater import make_updater
from .values import PARAM_READERS, schedule


class OptzooUpdater:
    """An updater for RETURNN's JAX backend, with more options and all optimizers of optzoo.

    In a config, before the training starts::

        import returnn.jax.engine
        from optzoo.interop.returnn import OptzooUpdater

        returnn.jax.engine.Updater = OptzooUpdater

    The engine makes it from the config and calls it; ``docs/returnn.md`` has a complete config. A
    config of RETURNN's own updater gives the same values: ``adam``, ``adamw`` and ``sgd`` are
    optax's, and a decay that is set applies to all parameters except biases and those of
    ``weight_decay_modules_blacklist``. Other classes are those of :func:`optzoo.create`, and other
    options those of :func:`optzoo.interop.returnn.returnn_updater`; ``updater_layers`` in the
    config corresponds to its argument ``layers``, with names of parameters joined by ``/``. The log
    names the optimizer, and options that RETURNN's own updater does not have. ``backend`` selects
    the meaning of the config, also for other backends.

    The engine computes the learning rate (``learning_rate_control``, ``dynamic_learning_rate``) and
    passes it to each step. Optimizers of optzoo receive it as an argument, not as a factor of the
    update, as FTRL and the proximal optimizers need.

    Example:
        >>> import jax.numpy as jnp
        >>> from returnn.config import Config
        >>> from optzoo.interop.returnn import OptzooUpdater
        >>> config = Config({"optimizer": {"class": "sgd"}, "learning_rate": 0.1})
        >>> updater = OptzooUpdater(config=config, param_names=["bias"])
        JAX updater: optax.sgd({})
        >>> params = [jnp.ones(2)]
        >>> params, state = updater.step(
        ...     params=params, grads=params, opt_state=updater.init(params), learning_rate=0.1
        ... )
        >>> print(params[0])
        [0.9 0.9]

    Args:
        config: RETURNN's ``Config``.
        model: RETURNN's model, whose modules determine which parameters have no decay. Without it a
            decay applies to all parameters, as in RETURNN.
        param_names: the names of the parameters passed to ``init`` and ``step``, in order.

    Raises:
        TypeError: if an option has a wrong type, or the optimizer has no such argument.
        ValueError: if options are out of range or not supported, or if a key resembles an option.

    References:
        ``returnn.jax.updater.Updater``.
    """

    def __init__(self, *, config: Any, model: Any = None, param_names: Sequence[str] = ()):
        from returnn.log import log

        # Options of the command line are strings, unless the file has them, too.
        options = {name: config.value(name, None) for name in config.dict} | config.typed_dict
        added = _added(options)
        self.learning_rate_function = _schedule(options.pop("dynamic_learning_rate", None))
        self.log_grad_norm_p = _norm_order(options.pop("log_grad_norm", None))
        layers = options.pop("updater_layers", {})
        self.names = [name.replace(".", "/") for name in param_names]
        read = read_options(options, layers, "jax")
        decays = _decays(options.get("optimizer") or {}, model, param_names)
        self._optimizer = make_updater(read, decay_mask=dict(zip(self.names, decays, strict=True)))
        running = [o.optimizer for o in read.distinct]
        running = [o for i, o in enumerate(running) if o not in running[:i]]
        for optimizer in running:
            print(f"JAX updater: {read.backend.written(optimizer)}", file=log.v3)
        classes = dict.fromkeys(o["class"] for o in running)
        added = [f"the class {c}" for c in classes if c not in read.backend.optimizers] + added
        if added:
            print(f"JAX updater: not in RETURNN's own: {', '.join(added)}", file=log.v3)

    def get_effective_learning_rate(
        self,
        *,
        learning_rate: float,
        global_train_step: int,
        epoch: int,
        epoch_continuous: float | None = None,
    ) -> float:
        """The rate of a step, from that of its epoch; the engine calls it on the host."""
        if self.learning_rate_function is None:
            return learning_rate
        rate = self.learning_rate_function(
            learning_rate=learning_rate,
            global_train_step=global_train_step,
            epoch=epoch,
            epoch_continuous=epoch_continuous,
        )
        return float(rate)

    def init(self, params: Sequence[Array]) -> Any:
        """The state, for parameters in the order of their names."""
        return self._optimizer.init(self._named(params))

    def step(
        self,
        *,
        params: Sequence[Array],
        grads: Sequence[Array],
        opt_state: Any,
        learning_rate: Any,
    ) -> tuple[list[Array], Any]:
        """The new parameters and state; the engine compiles this with the rest of a step."""
        named = self._named(params)
        updates, opt_state = self._optimizer.update(
            self._named(grads), opt_state, named, learning_rate=learning_rate
        )
        new: Any = optax.apply_updates(named, updates)
        return [new[name] for name in self.names], opt_state

    def _named(self, arrays: Sequence[Array]) -> dict[str, Array]:
        return dict(zip(self.names, arrays, strict=True))


# Of all options, those that RETURNN's own updater has.
_OWN = {"optimizer", "accum_grad_multiple_step", "gradient_clip_global_norm"}
_ADDED = ("decouple_constraints", "debug_add_check_numerics_ops", "updater_layers")


def _added(options: Mapping[str, Any]) -> list[str]:
    """The options of a config that RETURNN's own updater does not have."""
    names = [name for name in (*PARAM_READERS, *_ADDED) if name not in _OWN and options.get(name)]
    dynamic = "dynamic_learning_rate"
    return names + [f"{dynamic} as a dict"] * isinstance(options.get(dynamic), Mapping)


def _decays(optimizer: Any, model: Any, names: Sequence[str]) -> list[bool]:
    """Whether each parameter has the decay that is set."""
    if DECAY_CHECK in optimizer:
        raise ValueError(
            f"optimizer: {DECAY_CHECK} is not supported, because it is a function of torch modules"
        )
    if model is None:
        return [True] * len(names)
    import returnn.frontend as rf

    types = tuple(_module_type(rf, value) for value in optimizer.get(BLACKLIST) or ())
    without = {
        f"{prefix}.{key}" if prefix else key
        for prefix, module in model.named_modules()
        if isinstance(module, types)
        for key, value in vars(module).items()
        if isinstance(value, rf.Parameter)
    }
    return [not name.endswith("bias") and name not in without for name in names]


def _module_type(rf: Any, value: Any) -> type:
    """The module type of an entry of the list: a type, or its name such as ``"rf.LayerNorm"``."""
    found = value
    if isinstance(value, str):
        scope, *parts = value.split(".")
        inside = lambda part, name: getattr(part, name, None)
        found = functools.reduce(inside, parts, rf if scope == "rf" else None)
    if not isinstance(found, type) or not issubclass(found, rf.Module):
        raise ValueError(
            f"optimizer: {BLACKLIST} must have modules of returnn.frontend, such as "
            f"'rf.LayerNorm', got {value!r}"
        )
    return found


def _schedule(value: Any) -> Callable[..., Any] | None:
    """``dynamic_learning_rate`` as a function of the arguments that the engine passes."""
    if value is None:
        return None
    read = schedule("dynamic_learning_rate", value, {"network"}, "which need TensorFlow")
    if callable(read):
        return read
    power = lambda step: read["decay"] ** (step % read["interval"])
    return lambda learning_rate, global_train_step, **_: learning_rate * power(global_train_step)


def _norm_order(value: Any) -> float | None:
    """The order of the global gradient norm that the engine logs; None for no norm."""
    if isinstance(value, str):  # of the command line
        value = {"true": True, "false": False, "none": None}.get(value.lower(), value)
    if value is None or isinstance(value, bool):
        return 2.0 if value else None
    check_positive(fix="it is True or the order of the norm", log_grad_norm=value)
    return float(value)
