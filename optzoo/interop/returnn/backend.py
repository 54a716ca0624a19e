"""The updater of RETURNN's JAX backend, on the optimizers of optzoo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import optax
from jax import Array

from ...core.checks import check_positive
from .options import read_options
from .updater import returnn_updater
from .values import schedule


class OptzooUpdater:
    """The updater for RETURNN's JAX backend: all of RETURNN's options, every optimizer of optzoo.

    In a config, before the training starts::

        import returnn.jax.engine
        from optzoo.interop.returnn import OptzooUpdater

        returnn.jax.engine.Updater = OptzooUpdater

    The engine makes it from the config and calls it; ``docs/returnn.md`` has a complete config. The
    options are those of :func:`optzoo.interop.returnn.returnn_updater`; ``updater_layers`` in the
    config is its ``layers=``, by the names of parameters with ``/`` between their parts. The engine
    keeps the learning rate (``learning_rate_control``, ``dynamic_learning_rate``) and gives it to
    each step. It is an argument of the optimizer and not a factor of the update, so that FTRL and
    the proximal optimizers get the right one. The log names the optimizer that runs.

    Example:
        >>> import jax.numpy as jnp
        >>> from returnn.config import Config
        >>> from optzoo.interop.returnn import OptzooUpdater
        >>> config = Config({"optimizer": {"class": "GradientDescent"}, "learning_rate": 0.1})
        >>> updater = OptzooUpdater(config=config, param_names=["bias"])
        JAX updater: optzoo.create({'class': 'GradientDescent'})
        >>> params = [jnp.ones(2)]
        >>> params, state = updater.step(
        ...     params=params, grads=params, opt_state=updater.init(params), learning_rate=0.1
        ... )
        >>> print(params[0])
        [0.9 0.9]

    Args:
        config: RETURNN's ``Config``.
        model: not used; RETURNN's own updater looks for modules without weight decay in it.
        param_names: the names of the parameters that ``init`` and ``step`` get, in their order.

    Raises:
        TypeError: if an option has a wrong type.
        ValueError: if an option is out of its range, unknown or not supported.
    """

    def __init__(self, *, config: Any, model: Any = None, param_names: Sequence[str] = ()):
        from returnn.log import log

        options = dict(config.typed_dict)
        self.learning_rate_function = _schedule(options.pop("dynamic_learning_rate", None))
        self.log_grad_norm_p = _norm_order(options.pop("log_grad_norm", None))
        layers = options.pop("updater_layers", {})
        self.names = [name.replace(".", "/") for name in param_names]
        self._optimizer = returnn_updater(options, layers=layers)
        running = [o.optimizer for o in read_options(options, layers).distinct]
        for i, optimizer in enumerate(running):
            if optimizer not in running[:i]:
                print(f"JAX updater: optzoo.create({optimizer})", file=log.v3)

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
        """The new parameters and the new state; the engine compiles it with the rest of a step."""
        named = self._named(params)
        updates, opt_state = self._optimizer.update(
            self._named(grads), opt_state, named, learning_rate=learning_rate
        )
        new: Any = optax.apply_updates(named, updates)
        return [new[name] for name in self.names], opt_state

    def _named(self, arrays: Sequence[Array]) -> dict[str, Array]:
        return dict(zip(self.names, arrays, strict=True))


def _schedule(value: Any) -> Callable[..., Any] | None:
    """``dynamic_learning_rate`` as a function of what the engine knows."""
    if value is None:
        return None
    read = schedule("dynamic_learning_rate", value, {"network"}, "which only TensorFlow has")
    if callable(read):
        return read
    power = lambda step: read["decay"] ** (step % read["interval"])
    return lambda learning_rate, global_train_step, **_: learning_rate * power(global_train_step)


def _norm_order(value: Any) -> float | None:
    """The order of the norm of all gradients that the engine logs; None for no norm."""
    if value is None or isinstance(value, bool):
        return 2.0 if value else None
    check_positive(fix="it is True or the order of the norm", log_grad_norm=value)
    return float(value)
