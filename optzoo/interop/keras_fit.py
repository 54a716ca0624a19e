"""Optax transformations as optimizers of Keras 3, for ``model.compile`` and ``fit``."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import inspect
import json
import numbers
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ..core.checks import check_transformation
from ..core.numerics import from_words, words_of
from ..core.optimizer import Optimizer, about_of
from ..jaxprs.reads import UnusedKeyword, check_all_read
from ..registry import create, factory_of
from ..state.inner import fitting
from ..state.sharding import state_sharding
from ..state.types import ReplicaState, nodes_of
from ..train.eval_params import eval_params
from .keras_import import import_keras

keras = import_keras()
_Base: Any = keras.optimizers.Optimizer

# The alternatives to arguments of Keras' optimizers.
_INSTEAD = {
    "clipnorm": "put optzoo.transforms.clip_by_norm before it in an optax.chain",
    "clipvalue": "put optax.clip before it in an optax.chain",
    "global_clipnorm": "put optax.clip_by_global_norm before it in an optax.chain",
    "weight_decay": "use optzoo.extend_with_decoupled_weight_decay",
    "use_ema": "use optzoo.moving_average",
    "ema_momentum": "use optzoo.moving_average",
    "ema_overwrite_frequency": "use optzoo.moving_average",
    "gradient_accumulation_steps": "use optzoo.accumulate",
}
# The sample with which a transformation is checked before the model's variables are known.
_SAMPLE = {"kernel": jax.ShapeDtypeStruct((2, 3), jnp.float32)}


class _Refused(ValueError):
    """Raised for a transformation that ``fit`` cannot use with any model."""


@dataclasses.dataclass(frozen=True)
class _Program:
    """A transformation, and the config from which it was made.

    It is not a named tuple, as Keras would rebuild attributes that are named tuples.
    """

    tx: Optimizer
    config: Any  # None if it is given as a transformation

    @classmethod
    def of(cls, given: Any, rate: Any) -> tuple[_Program, Any]:
        """The program, and the rate for Keras: the given rate, or that of the config."""
        if not isinstance(given, str | Mapping):
            check_transformation(tx=given)
            return cls(fitting(given), None), rate
        config: dict[str, Any] = {"class": given} if isinstance(given, str) else dict(given)
        if rate is not None:
            config["learning_rate"] = rate if isinstance(rate, float) else float(rate(0))
        tx = fitting(create(config))
        if rate is None and "learning_rate" in tx.about.reads:
            number = config.get("learning_rate", _default_rate(config))
            rate = float(number) if isinstance(number, numbers.Real) else None
        return cls(tx, given), rate

    def check(self, params: Any, has_rate: bool) -> bool:
        """Whether an update needs a global step; raises an error if ``fit`` cannot use it.

        The update is traced, without any computation.
        """

        def update(params, state, given, rate):
            call = functools.partial(self.tx.update, params, state, params, **given)
            check_all_read(self.tx, call, rate)
            return call(**rate)

        number = jax.ShapeDtypeStruct((), jnp.float32)
        rate = {"learning_rate": number} if has_rate else {}
        step = {"global_step": jax.ShapeDtypeStruct((), jnp.int32)}
        try:
            state = jax.eval_shape(self.tx.init, params)
            if nodes_of(ReplicaState, state):
                raise _Refused(
                    "tx is a method for replicas, but fit has one model: give its inner "
                    "optimizer, or use optzoo.replicas in a custom training loop"
                )
            try:
                jax.eval_shape(update, params, state, {}, rate)
            except Exception:
                with contextlib.suppress(Exception):
                    jax.eval_shape(update, params, state, step, rate)
                    return True
                raise
        except Exception as error:
            if reason := self._reason(error):
                raise _Refused(reason) from error
            raise
        return False

    @staticmethod
    def _reason(error: Exception) -> str | None:
        """The reason why ``fit`` can never use a transformation that raises this error, or None."""
        text = str(error)
        if missing := re.findall(r"required keyword-only arguments?: (.*)", text):
            return (
                f"the update of tx needs {missing[0]}, which fit does not pass: use "
                "optzoo.minimize or a custom training loop"
            )
        if isinstance(error, UnusedKeyword) and error.name == "learning_rate":
            return (
                "learning_rate is given, but nothing in tx reads it: leave it out, or put "
                "optzoo.transforms.scale_by_learning_rate last in an optax.chain"
            )
        if isinstance(error, NameError) and "axis name" in text:
            return (
                f"tx averages over replicas ({text}), but fit has one model: give its inner "
                "optimizer"
            )
        return None


@keras.saving.register_keras_serializable("optzoo")
class FitOptimizer(_Base):
    """The optimizer that :func:`optzoo.interop.keras.for_fit` returns.

    The parameters of the transformation are the trainable variables, by path and in their order.
    Each array of its state is a variable of this optimizer.
    """

    def __init__(
        self,
        optimizer: Any,
        learning_rate: Any = None,
        loss_scale_factor: float | None = None,
        name: str | None = None,
        **kwargs: Any,
    ):
        for argument, value in kwargs.items():
            fix = _INSTEAD.get(
                argument, "its arguments are learning_rate, loss_scale_factor and name"
            )
            raise TypeError(f"for_fit has no argument {argument!r}, got {value!r}: {fix}")
        program, rate = _Program.of(optimizer, _checked_rate(learning_rate))
        super().__init__(_NoRate() if rate is None else rate, name=name)
        self.loss_scale_factor = loss_scale_factor
        self._program = program
        if about_of(program.tx).deferred is not None:
            raise ValueError(
                "tx is optzoo.caught_up, which defers rows until a loss looks them up, but the "
                "gradients of fit are dense: give its inner transformation"
            )
        try:
            program.check(_SAMPLE, self._has_rate())
        except _Refused:
            raise
        except Exception:  # such as that patterns match no name of the sample
            return

    def build(self, variables: Sequence[Any]) -> None:
        """Creates the state, as Keras does before the first step."""
        if self.built:
            return
        super().build(variables)
        # Keras itself writes variables in float8.
        written = self._overwrite_variable_with_gradient
        self._names = [v.path for v in variables if not written(v)]
        if twice := [name for name, n in collections.Counter(self._names).items() if n > 1]:
            raise ValueError(
                f"two variables of the model have the path {twice[0]!r}: give their layers "
                "different names"
            )
        with jax.numpy_rank_promotion("allow"):
            self._needs_step = self._program.check(self.params, self._has_rate())
            init = jax.jit(self._program.tx.init, out_shardings=self._shardings())
            state = init(self.params)
        paths, self._treedef = jax.tree_util.tree_flatten_with_path(state)
        self._keys = [from_words(leaf) for _, leaf in paths]
        ranks = _Ranks({name: i for i, name in enumerate(self._names)})
        order = sorted(range(len(paths)), key=[ranks.of(path) for path, _ in paths].__getitem__)
        made = {i: self._add(*paths[i]) for i in order}
        self._of_state = [made[i] for i in range(len(paths))]

    @property
    def params(self) -> dict[str, Any]:
        """The current values of the trainable variables, by path."""
        by_path = {v.path: v.value for v in self._trainable_variables}
        return {name: by_path[name] for name in self._names}

    @property
    def state(self) -> Any:
        """The current state of the transformation."""
        pairs = zip(self._of_state, self._keys, strict=True)
        return self._treedef.unflatten(wrap(v.value) for v, wrap in pairs)

    def assign_eval_params(self) -> None:
        """Writes the parameters for evaluation into the model: averages, if the state has them.

        They are those of :func:`optzoo.eval_params`. Further training would start from them.
        """
        self._assign_params(eval_params(self.params, self.state))

    @property
    def learning_rate(self) -> Any:
        """The learning rate of the next step; raises ``AttributeError`` if none was given."""
        return self._get_current_learning_rate()

    @learning_rate.setter
    def learning_rate(self, learning_rate: Any) -> None:
        if not self._has_rate():
            self._learning_rate()  # raises
        _Base.learning_rate.fset(self, _checked_rate(learning_rate))

    def get_config(self) -> dict[str, Any]:
        """The config, if the optimizer was made from one; raises ``ValueError`` otherwise."""
        try:
            if self._program.config is None:
                raise TypeError("which was made from a transformation")
            config = json.loads(json.dumps(self._program.config))
        except TypeError as error:
            raise ValueError(
                f"this optimizer has no config that can be saved, {error}: give for_fit a config "
                "of optzoo.create with plain values, or save with model.save_weights"
            ) from error
        return {
            "optimizer": config,
            "learning_rate": super().get_config()["learning_rate"] if self._has_rate() else None,
            "loss_scale_factor": self.loss_scale_factor,
            "name": self.name,
        }

    def _backend_apply_gradients(self, grads: Sequence[Any], trainable_variables: Any) -> None:
        """Keras' hook that updates the variables that have gradients."""
        given = {v.path: g for v, g in zip(trainable_variables, grads, strict=True)}
        params, tx = self.params, self._program.tx
        gradients = {name: given.get(name) for name in params}
        extra = {}
        if self._has_rate():
            extra["learning_rate"] = keras.ops.convert_to_tensor(self.learning_rate)
        if self._needs_step:
            extra["global_step"] = self._iterations.value
        with jax.numpy_rank_promotion("allow"):
            result: Any = tx.update(gradients, self.state, params, **extra)
            updates, state = result
            moved = {name: u for name, u in updates.items() if u is not None}
            new: Any = optax.apply_updates({name: params[name] for name in moved}, moved)
        self._assign_params(new)
        for v, leaf in zip(self._of_state, jax.tree.leaves(state), strict=True):
            v.assign(words_of(leaf))

    def _has_rate(self) -> bool:
        return not isinstance(self._learning_rate, _NoRate)

    def _assign_params(self, params: Mapping[str, Any]) -> None:
        for v in self._trainable_variables:
            if v.path in params:
                v.assign(params[v.path])

    def _add(self, path: Any, leaf: Any) -> Any:
        """A variable of the state, with a copy of its initial value, because Keras donates it."""
        value = words_of(leaf)
        name = jax.tree_util.keystr(path, simple=True, separator="_") or "state"
        return self.add_variable(
            value.shape,
            initializer=lambda shape, dtype: jnp.array(value, dtype),
            dtype=jnp.dtype(value.dtype).name,
            layout=value.sharding if keras.distribution.distribution() is not None else None,
            name=name.replace("/", "_"),
        )

    def _shardings(self) -> Any:
        """The shardings of the state, from those of the variables, if the model is distributed."""
        if keras.distribution.distribution() is None:
            return None
        return state_sharding(self._program.tx, self.params)


class _Ranks:
    """The order of the arrays of a state, with parameters in the order of the model.

    Files store the arrays by number. JAX sorts by name, but the names that Keras generates for
    layers, such as ``dense_9`` and ``dense_10``, differ between processes.

    Args:
        positions: the positions of the parameters, by name.
    """

    def __init__(self, positions: Mapping[Any, int]):
        self.positions, self.seen = positions, dict[Any, int]()

    def of(self, path: Sequence[Any]) -> list[int]:
        """The sort key of a path; paths must be passed in the order of JAX."""
        return [self._of_step(path[:i], step) for i, step in enumerate(path)]

    def _of_step(self, before: Any, step: Any) -> int:
        rank = self.seen.setdefault((*before, step), len(self.seen))
        return self.positions.get(getattr(step, "key", None), rank)


class _NoRate:
    """A placeholder for the rate of a transformation that has its own rate."""

    def __call__(self) -> Any:
        raise AttributeError(
            "the learning rate is inside the transformation: to read and set it, use "
            "for_fit(..., learning_rate=0.001)"
        )


def _checked_rate(rate: Any) -> Any:
    """A learning rate for Keras: a float, a Keras schedule or None."""
    if rate is None or isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
        return rate
    if callable(rate) or isinstance(rate, str | Mapping):
        raise TypeError(
            f"learning_rate must be a number or a Keras schedule, got {rate!r}: give an optax "
            "schedule to the transformation instead"
        )
    return float(rate)


def _default_rate(config: Mapping[str, Any]) -> Any:
    """The default learning rate of the original class that the config names, or None."""
    if "class" not in config:
        return None
    parameter = inspect.signature(factory_of(config["class"])).parameters.get("learning_rate")
    return None if parameter is None else parameter.default
