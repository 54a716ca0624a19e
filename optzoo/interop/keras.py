"""Optimizers of Keras 3 as optax transformations."""

from __future__ import annotations

import contextlib
import copy
import inspect
import numbers
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from ..core.checks import check_params
from ..core.gradients import check_gradients
from ..core.meshes import where_it_was
from ..core.numerics import upcast
from ..core.paths import leaves_with_path, path_name
from ..core.rows import SparseRows, is_sparse_or_none, map_rows, update_tree
from ..core.schedules import at_step
from ..first_order.momentum import scale_by_momentum
from ..registry import add_module, add_name
from ..rules.learning_rate import scale_by_learning_rate
from ..state.types import SlotsByName
from .keras_import import import_keras

__all__ = ["for_fit", "keras_optimizer"]


def keras_optimizer(optimizer: Any) -> optax.GradientTransformationExtraArgs:
    """Any optimizer of Keras 3 (on the JAX backend) as an optax transformation.

    Each update calls Keras' ``stateless_apply``, so clipping, weight decay, averages (``use_ema``),
    ``gradient_accumulation_steps``, schedules and ``LossScaleOptimizer`` work as in ``model.fit``.
    The update is ``new - old``, so it must be the last transformation of a chain.

    The given optimizer is copied by its ``get_config()`` and never changed. Its learning rate is
    not part of the state; it may be a number, a Keras schedule or, unlike in Keras, an optax
    schedule. ``update(..., learning_rate=x)`` overrides it for one update.

    Variables are named by the paths of the parameters, so
    ``optimizer.exclude_from_weight_decay(var_names=["bias"])``, ``exclude_layers`` of Muon and the
    patterns of ``OptimizerMap`` work. With ``use_ema`` the averages are
    ``state.slots["model_variables_moving_average"]``; Keras replaces the parameters by them at the
    end of ``fit``. The gradients must be those of the loss times
    ``state.variables["dynamic_scale"]`` with ``LossScaleOptimizer``, and times
    ``loss_scale_factor`` if it is set.

    Slots and variables have the names of the optimizer's attributes without a leading ``_``. Names
    of a wrapper's inner optimizer begin with ``inner_optimizer/``, those of ``MultiOptimizer`` with
    ``inner_optimizers/0/`` and so on.

    A row-sparse gradient becomes dense, as in Keras on JAX. A missing gradient leaves its parameter
    and slots unchanged; if all are missing, the state is unchanged. Keras computes in the dtype of
    the parameters: in 16 bits some of its optimizers give NaN (``docs/keras.md``).

    Example:
        >>> import jax, jax.numpy as jnp, optzoo
        >>> import os; os.environ["KERAS_BACKEND"] = "jax"
        >>> import keras
        >>> tx = optzoo.interop.keras.keras_optimizer(keras.optimizers.SGD(0.1))
        >>> updates, state = tx.update(jnp.array([1.0, -2.0]), tx.init(jnp.ones(2)), jnp.ones(2))
        >>> print(updates)
        [-0.1  0.2]

    Args:
        optimizer: an instance such as ``keras.optimizers.Adam(1e-3)`` that is not yet built.

    Raises:
        ImportError: if Keras 3 is missing or does not run on JAX.
        TypeError: if ``optimizer`` is not a Keras optimizer.
        ValueError: if ``optimizer`` is already built for a model, excludes variables of a model
            from the weight decay by ``var_list``, or has a setting that its ``get_config()`` does
            not return; in ``update``, if no params are given.

    References:
        `keras.io/api/optimizers <https://keras.io/api/optimizers>`_; the original is RETURNN's
        ``KerasOptimizerWrapper``, which never increments the count of iterations.
    """
    _check(optimizer)
    new = _maker(optimizer)

    def init(params):
        xs, treedef = jax.tree.flatten(params)
        names = [path_name(path) for path, _ in leaves_with_path(params)]
        built, probe = _build(new(), names, xs), _probe(new())
        # All names, for any parameters, so that optax.tree.map_params finds them.
        variables = {k: jnp.array(v.value) for k, v in (probe.variables | built.variables).items()}
        put = lambda x, v: optax.MaskedNode() if v is None else _placed_like(x, v.value)
        slots = {name: [None] * len(xs) for name in probe.slots} | built.slots
        trees = {name: treedef.unflatten(map(put, xs, vs)) for name, vs in slots.items()}
        return SlotsByName(variables, trees)

    def update(updates, state, params=None, *, learning_rate=None, **extra_args):
        del extra_args
        check_params(params)
        check_gradients(updates, params)
        if not jax.tree.leaves(updates):
            return updates, state
        return apply(map_rows(SparseRows.to_dense, updates), state, params, learning_rate)

    @jax.jit  # outside jit the optimizer would be rebuilt at each call
    def apply(updates, state, params, rate):
        gs, treedef = update_tree.flatten(updates)
        paths = leaves_with_path(updates, is_leaf=is_sparse_or_none)
        xs = treedef.flatten_up_to(params)
        built = _build(new(), [path_name(path) for path, _ in paths], xs)
        slots = {name: treedef.flatten_up_to(tree) for name, tree in state.slots.items()}
        new_xs, variables, slots = built.apply(gs, state.variables, slots, xs, rate)
        move = lambda g, new, x: None if g is None else (upcast(new) - upcast(x)).astype(g.dtype)
        slots = {name: treedef.unflatten(s) for name, s in slots.items()}
        return treedef.unflatten(map(move, gs, new_xs, xs)), SlotsByName(variables, slots)

    return optax.GradientTransformationExtraArgs(init, update)


def for_fit(
    tx: Any,
    learning_rate: Any = None,
    *,
    loss_scale_factor: float | None = None,
    name: str | None = None,
) -> Any:
    """An optax transformation as an optimizer of Keras 3, for ``model.compile`` and ``fit``.

    Each step of ``fit`` is one ``tx.update`` with dense gradients and ``optax.apply_updates``. The
    parameters are a dict of the trainable variables by their paths, such as
    ``"sequential/dense/kernel"``, to which patterns apply. Each array of the state is a Keras
    variable, created when Keras builds the optimizer: at the first ``fit``, or by
    ``optimizer.build(model.trainable_variables)``. ``model.save_weights``, ``ModelCheckpoint`` and
    ``keras.distribution`` include these variables. ``optimizer.params`` and ``optimizer.state``
    return the current values, between epochs and in callbacks at the end of an epoch.

    Keras on JAX has dense gradients, also for embeddings: in ``fit`` an optimizer never receives
    rows, and a lazy optimizer updates all rows. To train tables by rows use :func:`optzoo.minimize`
    with ``model.stateless_call`` (``docs/keras.md``).

    With averages (:func:`optzoo.moving_average`) the model has the trained parameters after
    ``fit``; ``optimizer.assign_eval_params()`` writes the averages into the model.

    Example:
        >>> import os; os.environ["KERAS_BACKEND"] = "jax"
        >>> import keras, numpy as np, optzoo
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, name="out")])
        >>> tx = optzoo.interop.keras.for_fit({"class": "adam", "learning_rate": 0.1})
        >>> model.compile(optimizer=tx, loss="mse")
        >>> history = model.fit(np.eye(2), np.ones((2, 1)), epochs=3, verbose=0)
        >>> print(tx.iterations.value, optzoo.slot_names(tx.state), float(tx.learning_rate))
        3 ('m', 'v') 0.10000000149011612

    Args:
        tx: a transformation, or a name or config of :func:`optzoo.create`. With a config of plain
            values the model can be saved as a ``.keras`` file, and is loaded after ``import
            optzoo.interop.keras_fit``.
        learning_rate: a number or a Keras schedule, which replaces the rate of ``tx``: callbacks
            such as ``ReduceLROnPlateau`` can then read and set it. The default is the number in the
            config, or the default of its class; Keras cannot access the rate of a transformation.
        loss_scale_factor: as in all Keras optimizers. ``LossScaleOptimizer`` may also be used.
        name: the name of the optimizer.

    Raises:
        ImportError: if Keras 3 is missing or does not run on JAX.
        TypeError: if ``tx`` or ``learning_rate`` is of another type.
        ValueError: if ``fit`` cannot use ``tx``: its update needs further arguments such as
            ``value``, it is a method for replicas or :func:`optzoo.caught_up`, or nothing in it
            reads ``learning_rate``; when Keras saves a model as a ``.keras`` file, if ``tx`` is not
            a config of plain values.

    References:
        ``keras.optimizers.Optimizer`` of `Keras <https://keras.io/api/optimizers>`_.
    """
    from .keras_fit import FitOptimizer  # which needs Keras

    return FitOptimizer(tx, learning_rate, loss_scale_factor, name)


class _Built:
    """A Keras optimizer built for some parameters, and its variables by name.

    Attributes:
        variables: the variables of the whole optimizer.
        slots: for each name a list like the parameters, with None for those without this slot.
    """

    def __init__(self, optimizer: Any, refs: list[Any]):
        self.optimizer = optimizer
        self.variables, self.rates, self.slots = dict[str, Any](), list[Any](), dict[str, Any]()
        variable = import_keras().Variable
        position = {id(ref): i for i, ref in enumerate(refs)}
        for prefix, part in _walk(optimizer):
            own = part._trainable_variables
            for attribute, value in vars(part).items():
                name = prefix + attribute.lstrip("_")
                if attribute == "_learning_rate":
                    self.rates += [value] if isinstance(value, variable) else []
                elif isinstance(value, variable):
                    self.variables[name] = value
                elif _are_slots(attribute, value, own, variable):
                    self.slots[name] = [None] * len(refs)
                    for ref, v in zip(own, value, strict=True):
                        self.slots[name][position[id(ref)]] = v
        known = {id(v) for vs in (self.variables.values(), self.rates) for v in vs}
        known |= {id(v) for vs in self.slots.values() for v in vs}
        others = [v for v in optimizer.variables if id(v) not in known]
        self.variables |= {f"variables/{i}": v for i, v in enumerate(others)}

    def apply(self, gs, variables, slots, xs, rate):
        """The new parameters, variables and slots, by the names of this class."""
        values = {id(v): v.value if rate is None else rate for v in self.rates}
        values |= {id(v): variables[name] for name, v in self.variables.items()}
        for name, vs in self.slots.items():
            values |= {id(v): s for v, s in zip(vs, slots[name], strict=True) if v is not None}
        if rate is not None:
            for _, part in _walk(self.optimizer):
                if callable(part._learning_rate):
                    part._learning_rate = lambda: rate
        keras_variables = self.optimizer.variables
        with _keras_context():
            xs, new = self.optimizer.stateless_apply(
                [values[id(v)] for v in keras_variables], gs, xs
            )
        new = {id(v): a for v, a in zip(keras_variables, new, strict=True)}
        variables = variables | {name: new[id(v)] for name, v in self.variables.items()}
        put = lambda vs, old: [o if v is None else new[id(v)] for v, o in zip(vs, old, strict=True)]
        return xs, variables, slots | {n: put(vs, slots[n]) for n, vs in self.slots.items()}


def _maker(optimizer: Any) -> Callable[[], Any]:
    """A function that returns new optimizers with the current settings of this one."""
    rate = getattr(optimizer, "_learning_rate", None)
    twin = object.__new__(type(optimizer))
    vars(twin).update(vars(optimizer))
    if callable(rate):  # passed on as it is: a config cannot hold a function
        vars(twin)["_learning_rate"] = None
    with _keras_context():
        config = twin.get_config()
    given = {"learning_rate": _schedule(rate)} if callable(rate) else {}
    pattern = "_exclude_from_weight_decay_pattern"  # not in the config
    patterns = [getattr(part, pattern, None) for _, part in _walk(optimizer)]

    def new():
        with _keras_context():
            made = type(optimizer).from_config({**copy.deepcopy(config), **given})
        for (_, part), excluded in zip(_walk(made), patterns, strict=True):
            if excluded is not None:
                setattr(part, pattern, excluded)
        return made

    _check_same_settings(optimizer, new())  # errors now rather than in the first update
    return new


def _check_same_settings(optimizer: Any, made: Any) -> None:
    """Raises ``ValueError`` if a copy differs in a setting that the config does not contain."""
    plain = (bool, int, float, complex, str, tuple, type(None))
    for (_, ours), (_, other) in zip(_walk(optimizer), _walk(made), strict=True):
        for name, value in vars(ours).items():
            copied = getattr(other, name, None)
            if name != "_learning_rate" and isinstance(value, plain) and value != copied:
                kind = type(ours).__name__
                raise ValueError(
                    f"optimizer: {kind}.get_config() does not return {name.lstrip('_')!r}, so that "
                    f"a copy has {copied!r} instead of {value!r}: override get_config in {kind}"
                )


def _schedule(rate: Callable[..., Any]) -> Any:
    """An optax schedule as a Keras schedule; a function without arguments is unchanged."""
    kind = import_keras().optimizers.schedules.LearningRateSchedule
    if isinstance(rate, kind) or not inspect.signature(rate).parameters:
        return rate
    call = lambda _, step: at_step("learning_rate", step.value, rate)
    return type("Schedule", (kind,), {"__call__": call})()


def _build(optimizer: Any, names: list[str], xs: list[Any]) -> _Built:
    """The optimizer, built for parameters with these names."""
    with _keras_context():
        refs = list(map(_variable, names, xs))
        optimizer.build(refs)
    return _Built(optimizer, refs)


def _probe(optimizer: Any) -> _Built:
    """The optimizer and its inner ones, built for parameters of several ranks to find all names."""
    with _keras_context():
        refs = [_variable(f"rank{ndim}", jnp.zeros((1,) * ndim)) for ndim in range(3)]
        for _, part in _walk(optimizer):
            if not part.built:
                part.build(refs)
    return _Built(optimizer, refs)


def _variable(name: str, x: Any) -> Any:
    keras = import_keras()
    *scopes, last = [part for part in name.split("/") if part] or ["params"]
    with contextlib.ExitStack() as stack:
        for scope in scopes:
            stack.enter_context(keras.name_scope(scope))
        value = jnp.zeros(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x
        return keras.Variable(value, dtype=jnp.result_type(x).name, name=last)


def _walk(optimizer: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """An optimizer and its inner optimizers, each with the prefix of its names."""
    yield prefix, optimizer
    is_optimizer = lambda value: isinstance(value, import_keras().optimizers.Optimizer)
    for attribute, value in vars(optimizer).items():
        name = prefix + attribute.lstrip("_")
        if is_optimizer(value):
            yield from _walk(value, f"{name}/")
        elif isinstance(value, list) and all(map(is_optimizer, value)):
            for i, part in enumerate(value):
                yield from _walk(part, f"{name}/{i}/")


def _are_slots(attribute: str, value: Any, refs: list[Any], variable: type) -> bool:
    """Whether an attribute of a Keras optimizer is a list of a variable or None per parameter."""
    if attribute in ("_variables", "_trainable_variables") or not isinstance(value, list):
        return False
    kinds = {isinstance(v, variable) for v in value if v is not None}
    return len(value) == len(refs) and kinds == {True}


def _placed_like(x: Any, value: Array) -> Array:
    """A slot with the sharding of its parameter."""
    return where_it_was(value, x) if jnp.shape(x) == value.shape else value


@contextlib.contextmanager
def _keras_context() -> Iterator[None]:
    """Allows rank promotion, which Keras uses, and suppresses irrelevant warnings of Keras."""
    with jax.numpy_rank_promotion("allow"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Gradients do not exist for variables")
        warnings.filterwarnings("ignore", "__array__ implementation doesn't accept a copy")
        yield


def _check(optimizer: Any) -> None:
    if not isinstance(optimizer, import_keras().optimizers.Optimizer):
        raise TypeError(
            f"optimizer must be an instance such as keras.optimizers.Adam(1e-3), got {optimizer!r}"
        )
    for _, part in _walk(optimizer):
        if part.built:
            raise ValueError(
                f"optimizer {part.name!r} is already built for a model; pass a new one, "
                "type(optimizer).from_config(optimizer.get_config())"
            )
        if getattr(part, "_exclude_from_weight_decay", None):
            raise ValueError(
                f"optimizer {part.name!r} excludes variables of a model from the weight decay, "
                "but the parameters are not Keras variables: call "
                "exclude_from_weight_decay(var_names=[...]) with parts of names instead of "
                "var_list"
            )


def sgd(
    learning_rate: optax.ScalarOrSchedule = 0.01, momentum: float = 0.0, nesterov: bool = False
) -> optax.GradientTransformationExtraArgs:
    """Keras' SGD: the momentum contains the rate, unlike in ``tf.train.MomentumOptimizer``.

    References:
        ``keras.optimizers.SGD`` of `Keras <https://keras.io/api/optimizers/sgd>`_.
    """
    if momentum == 0:
        return scale_by_learning_rate(learning_rate)
    return optax.chain(scale_by_learning_rate(learning_rate), scale_by_momentum(momentum, nesterov))


def nadam_keras(
    learning_rate: optax.ScalarOrSchedule = 1e-3,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-7,
) -> optax.GradientTransformationExtraArgs:
    """Keras' Nadam, with its momentum schedule; needs ``keras``.

    References:
        ``keras.optimizers.Nadam`` of `Keras <https://keras.io/api/optimizers/Nadam>`_; Dozat,
        `Incorporating Nesterov Momentum into Adam
        <https://openreview.net/forum?id=OM0jvwB8jIp57ZJjtNEZ>`_, 2016.
    """
    nadam = import_keras().optimizers.Nadam
    return keras_optimizer(nadam(learning_rate=learning_rate, beta_1=b1, beta_2=b2, epsilon=eps))


add_name("sgd", sgd, "keras.optimizers.SGD")
add_name("nadam_keras", nadam_keras, "keras.optimizers.Nadam")


def _factories() -> dict[str, Callable[..., optax.GradientTransformationExtraArgs]]:
    """A factory for each optimizer of the installed Keras that has only plain arguments."""
    optimizers = import_keras().optimizers
    return {
        f"keras.optimizers.{name}": _factory(kind)
        for name, kind in vars(optimizers).items()
        if _is_kind(kind, optimizers.Optimizer) and name != "MultiOptimizer"
    }


def _factory(kind: type) -> Callable[..., optax.GradientTransformationExtraArgs]:
    def make(**arguments):
        if isinstance(rate := arguments.get("learning_rate"), numbers.Real):
            arguments["learning_rate"] = float(rate)
        elif isinstance(rate, Mapping):
            arguments["learning_rate"] = _schedule_of_config(rate)
        if isinstance(inner := arguments.get("inner_optimizer"), Mapping):
            arguments["inner_optimizer"] = _inner_of_config(inner)
        with _keras_context():
            optimizer = kind(**arguments)
        return keras_optimizer(optimizer)

    parameters = inspect.signature(kind).parameters.values()
    named = [p for p in parameters if p.kind is not p.VAR_KEYWORD]
    setattr(make, "__signature__", inspect.Signature(named))  # noqa: B010 (it is no attribute yet)
    return make


def _is_kind(kind: Any, base: type) -> bool:
    return isinstance(kind, type) and issubclass(kind, base) and kind is not base


def _schedule_of_config(config: Mapping[str, Any]) -> Any:
    """A Keras schedule from its config, without importing from paths in the config."""
    schedules, name = import_keras().optimizers.schedules, config["class_name"]
    kind: Any = getattr(schedules, name, None)
    if not _is_kind(kind, schedules.LearningRateSchedule):
        raise ValueError(f"learning_rate: Keras has no schedule {name!r}; give the schedule object")
    return kind.from_config(dict(config["config"]))


def _inner_of_config(config: Mapping[str, Any]) -> Any:
    """A Keras optimizer from its config, without importing from paths in the config."""
    optimizers, name = import_keras().optimizers, config["class_name"]
    kind: Any = getattr(optimizers, name, None)
    if not _is_kind(kind, optimizers.Optimizer):
        raise ValueError(
            f"inner_optimizer: Keras has no optimizer {name!r}; give the optimizer object"
        )
    given = dict(config["config"])
    if isinstance(given.get("learning_rate"), Mapping):
        given["learning_rate"] = _schedule_of_config(given["learning_rate"])
    with _keras_context():
        return kind(**given)


add_module("keras", _factories)
