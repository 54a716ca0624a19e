"""RETURNN's updater: one transformation from a config."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from ...core.checks import check_choice, check_params, check_positive
from ...core.gradients import check_gradients
from ...core.norms import global_norm
from ...core.numerics import common_cycle, next_count, safe_divide, upcast
from ...core.paths import check_mask, hides_leaves, leaves_with_path, map_with_path, path_name
from ...core.rows import coalesce, is_rows, is_sparse_or_none, rows_tree
from ...core.short import short_repr
from ...distributed.engine.collectives import AxisName, Replicas, divide_gradients
from ...transforms.check_numerics import raise_if_bad
from ...transforms.summaries import gradient_summaries
from ...wrappers.accumulate import accumulate
from .backends import BLACKLIST, DECAY_CHECK, Backend
from .options import Options, read_options
from .steps import (
    NO_CONTEXT,
    StepContext,
    map_named,
    plus,
    process_gradients,
    with_decay,
    with_extra_updates,
)
from .values import ParamOptions, StepOptions

ReturnnVersion = Literal["2017", "2022", "2026"]


class UpdaterState(NamedTuple):
    """The state of :func:`returnn_updater`."""

    count: Array  # of the steps
    shared: dict[str, Array]  # noise_key and grad_norm, where an option needs them
    inner: Any  # of the optimizers

    __repr__ = short_repr


def returnn_updater(
    config: Mapping[str, Any],
    *,
    layers: Mapping[str, Any] | None = None,
    returnn_version: ReturnnVersion = "2026",
    axis_name: AxisName = None,
    decay_mask: Any = None,
) -> optax.GradientTransformationExtraArgs:
    r"""The complete updater of a RETURNN config, as in the backend that the config names.

    .. code-block:: python

        tx = returnn_updater(
            {"optimizer": {"class": "adam"}, "learning_rate": 1e-3, "gradient_clip_global_norm": 5},
            layers={"encoder": {"L2": 1e-4}, "output": {"updater_opts": {"gradient_clip": 0.1}}},
        )

    ``backend`` in the config selects its meaning, as in RETURNN: ``"tensorflow"``,
    ``"tensorflow-net-dict"``, ``"torch"`` or ``"jax"``; TensorFlow if it is not set. With
    TensorFlow, one step performs the following operations in order, if their options are set:

    1. The gradient of the constraints (``L2``: :math:`2 \lambda x`) is added, unless
       ``decouple_constraints``; then ``use_horovod`` sums over the replicas. These are the *raw*
       gradients, from which all norms over several parameters are computed.
    2. ``maximize_grad_norm``.
    3. ``accum_grad_multiple_step``: sums gradients; the operations below run in the last micro-step
       of a cycle only.
    4. ``debug_grad_summaries``, ``gradient_noise``, ``gradient_clip``, ``gradient_clip_norm``,
       ``gradient_clip_avg_norm``, ``gradient_clip_global_norm``, ``gradient_nan_inf_filter``,
       ``grad_norm_to_clip_to_zero``.
    5. Decoupled constraints, the optimizers, ``extra_updates``.
    6. ``debug_add_check_numerics_ops``.

    With torch and JAX the optimizers are those of torch and of optax, and norms are those of the
    sums, after noise and preceding clips. Their update is multiplied by the rate :math:`\eta`:
    AdamW with the decay :math:`\lambda` and Adam's update :math:`u_t` is :math:`x \leftarrow x -
    \eta (u_t + \lambda x)`, and momentum :math:`v \leftarrow \mu v + g`, :math:`x \leftarrow x -
    \eta v`. A decay in the optimizer's dict applies to the parameters selected by ``decay_mask``;
    AdamW's default decay applies to all.

    The gradients given to ``update`` are those of the loss without constraints. The update is the
    difference of new and old parameters, so the updater must be the last of a chain. Row-sparse
    gradients stay row-sparse unless the layer has a coupled ``L2``, or an option makes them dense,
    as in RETURNN.

    ``update(..., learning_rate=x)`` overrides the rate of the config, as ``LearningRateControl``
    does for each epoch; ``dynamic_learning_rate`` and the factors still apply. ``update(...,
    global_step=n)`` replaces the count of steps. ``maximize_grad_norm`` needs ``update(...,
    grad_fn=f)``, where ``f(params)`` is the gradient of the loss.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.interop.returnn.returnn_updater(
        ...     {"optimizer": {"class": "adam"}, "learning_rate": 0.1}
        ... )
        >>> params = {"layer": {"W": jnp.ones(2)}}
        >>> gradients = {"layer": {"W": jnp.array([3.0, -4.0])}}
        >>> updates, state = tx.update(gradients, tx.init(params), params)
        >>> print(updates["layer"]["W"])
        [-0.1  0.1]

    Args:
        config: RETURNN's config. Keys that do not concern the updater are ignored;
            ``docs/returnn.md`` lists the options.
        layers: the options of layers by name: ``L2`` and ``updater_opts``. The parameters of a
            layer are those whose paths begin with its name and ``/``; of nested layers the
            innermost is used. The default is to read them from ``config["network"]``.
        returnn_version: the version that defines ``decouple_constraints``. ``"2026"`` (RETURNN
            since November 2022): :math:`x \leftarrow x - 2 \lambda x` before each update.
            ``"2022"`` (March to November 2022): :math:`x \leftarrow x - k\, 2 \lambda x` before it,
            where :math:`k` is ``decouple_constraints_factor`` times the rate divided by the
            config's ``learning_rate``. ``"2017"`` (December 2017 to March 2022): the same after the
            update. The old versions decay in every micro-step.
        axis_name: the axis of the replicas for ``use_horovod``.
        decay_mask: with torch and JAX, the parameters to which a ``weight_decay`` in the
            optimizer's dict applies, as a mask (:func:`optzoo.param_groups`). The default is all
            parameters whose names do not end with ``bias``. Exclude the parameters of modules
            without a decay, since the updater has no access to modules: those of the config's
            ``weight_decay_modules_blacklist``, by default ``torch.nn.LayerNorm`` and
            ``torch.nn.Embedding`` with torch, and none with JAX.

    Raises:
        TypeError: if a value has a wrong type, or the optimizer has no such argument.
        ValueError: if options are not supported, ignored by the backend or out of range, if a key
            resembles an option, or if ``decay_mask`` is missing and the dict of the optimizer names
            modules or a function that selects decays; in ``init``, if a layer has no parameter; in
            ``update``, if a gradient for an optax optimizer is None.

    References:
        ``returnn.tf.updater``, ``returnn.torch.updater`` and ``returnn.jax.updater``.

    Differences from the original:
        An optimizer used with two numbers of micro-steps counts steps separately; in the original
        both advance the same powers of Adam. ``gradient_nan_inf_filter`` sets an infinity in rows
        to zero, not to 1e30. A parameter without a gradient does not decay. With version 2026
        parameters decay in the last micro-step only; the original has a race condition. Summaries
        are of the sum of a cycle, and ``extra_updates`` follow an update; in the original both
        occur in every micro-step. Optimizers that read a global step receive it; the original's
        ``AdamGS`` always reads the first. Torch's ``amsgrad``, ``dampening``, ``lr_decay`` and
        ``maximize``, and classes other than SGD, Adam, AdamW, Adamax, Adagrad, Adadelta and
        RMSprop, are not supported.
    """
    options = read_options(config, layers)
    _check_decay_mask(config.get("optimizer"), options.backend, decay_mask)
    return make_updater(options, returnn_version, axis_name, decay_mask)


def make_updater(
    options: Options,
    returnn_version: ReturnnVersion = "2026",
    axis_name: AxisName = None,
    decay_mask: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """The updater of parsed options."""
    decoupled = _decoupled(options.step, returnn_version)
    if options.step.use_horovod and axis_name is None:
        raise ValueError("use_horovod needs the argument axis_name, the axis of the replicas")
    replicas = Replicas(axis_name if options.step.use_horovod else None)
    updater = _Updater(options, decoupled, replicas, decay_mask)
    return optax.GradientTransformationExtraArgs(updater.init, updater.update)


def _check_decay_mask(optimizer: Any, backend: Backend, decay_mask: Any) -> None:
    """Raises ``ValueError`` if ``decay_mask`` is missing, or given for another backend."""
    check_mask(decay_mask=decay_mask)
    if not backend.optimizers:
        if decay_mask is not None:
            raise ValueError(
                "decay_mask needs the torch or JAX backend; with TensorFlow, give a mask in the "
                "optimizer's dict"
            )
        return
    optimizer = optimizer or {}
    found = [key for key in (BLACKLIST, DECAY_CHECK) if optimizer.get(key)]
    if found and decay_mask is None and optimizer.get("weight_decay"):
        raise ValueError(
            f"optimizer: {' and '.join(found)} need the modules of the model, which are not "
            "available: pass the parameters that decay as decay_mask"
        )


def _decoupled(options: StepOptions, version: str) -> str | None:
    """The version of the decoupled constraints; None for coupled constraints."""
    check_choice(ReturnnVersion, returnn_version=version)
    if not options.decouple_constraints:
        return None
    if version in ("2017", "2022"):
        check_positive(learning_rate=options.learning_rate)
    if version == "2017" and options.extra_updates:
        raise ValueError(
            "extra_updates with returnn_version='2017' is not supported, because that version "
            "decays after the update: use another returnn_version"
        )
    return version


class _Updater:
    """The functions ``init`` and ``update`` of :func:`returnn_updater`.

    It builds the optimizers once, one for each of the ``kinds``: configs of optimizers with their
    numbers of micro-steps. ``decoupled`` is the version of the decoupled constraints.
    """

    def __init__(
        self, options: Options, decoupled: str | None, replicas: Replicas, decay_mask: Any
    ):
        self.options, self.decoupled, self.replicas = options, decoupled, replicas
        kinds = [_kind(o) for o in options.distinct]
        self.kinds = [kind for i, kind in enumerate(kinds) if kind not in kinds[:i]]
        dynamic, periods = options.step.dynamic_learning_rate, [every for _, every in self.kinds]
        if isinstance(dynamic, Mapping):
            periods.append(dynamic["interval"])
        self.cycle = common_cycle(*filter(None, periods))
        rate = options.step.learning_rate
        create = options.backend.create
        self.optimizers = [create(config, rate, decay_mask) for config, _ in self.kinds]

    def init(self, params: Any) -> UpdaterState:
        names = [path_name(path) for path, _ in leaves_with_path(params)]
        # optax.masked passes only some parameters, possibly without those of a layer.
        if names and not hides_leaves(params):
            self.options.check_names(names)
        shared = {}
        if self.options.has("gradient_noise"):
            shared["noise_key"] = jax.random.PRNGKey(self.options.step.random_seed)
        if self.options.step.log_grad_norm or self.options.has("debug_grad_summaries"):
            shared["grad_norm"] = jnp.zeros([], jnp.float32)
        inner = self.with_steps(NO_CONTEXT).init(params)
        return UpdaterState(jnp.zeros([], jnp.int32), shared, inner)

    def update(
        self,
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        learning_rate: Any = None,
        grad_fn: Callable[[Any], Any] | None = None,
        global_step: Any = None,
        **extra_args: Any,
    ) -> tuple[Any, UpdaterState]:
        check_params(params)
        check_gradients(updates, params)
        options = self.options
        step = state.count if global_step is None else global_step
        if options.step.debug_add_check_numerics_ops:
            raise_if_bad(updates, "gradient", step)
        rate = _rate_at(step, options.step, learning_rate, self.replicas)
        raw = self.raw_gradients(updates, params)
        context, shared = self.context(raw, state.shared, step, rate)
        if options.has("maximize_grad_norm"):
            raw = self.norm_maximized(raw, params, grad_fn)

        extra_args |= {"learning_rate": rate, "global_step": step}
        new, inner = self.with_steps(context).update(raw, state.inner, params, **extra_args)
        if options.step.debug_add_check_numerics_ops:
            raise_if_bad(new, "update", step)
        count = next_count(state.count, self.cycle)
        return new, UpdaterState(count, shared, inner)

    def raw_gradients(self, updates: Any, params: Any) -> Any:
        """The gradients of the loss with constraints, summed over the replicas."""
        self.replicas.check_per_replica(updates)
        if self.decoupled is None:
            constrained = lambda name, o, g, x: plus(g, 2 * o.L2 * upcast(x)) if o.L2 else g
            updates = map_named(self.options, constrained, updates, params)
        if not self.options.step.use_horovod:
            return updates
        sums, _ = self.replicas.sum_gradients(updates, True)
        number = self.replicas.size if self.options.step.horovod_avg_grad else 1
        return divide_gradients(sums, jnp.asarray(number), updates)

    def norm_maximized(self, raw: Any, params: Any, grad_fn: Callable[[Any], Any] | None) -> Any:
        """The raw gradients g minus f times the gradient of their norm: g - f H g / |g|."""
        if grad_fn is None:
            raise ValueError(
                "maximize_grad_norm needs the gradient as a function: pass update(..., grad_fn=f), "
                "where f(params) is the gradient of the loss"
            )
        if any(map(is_rows, rows_tree.leaves(raw))):
            raise TypeError(
                "maximize_grad_norm does not support row-sparse gradients: all gradients must be "
                "dense"
            )
        norm = self.norm(raw, None)
        unit = lambda x, g: (
            jnp.zeros_like(x) if g is None else safe_divide(upcast(g), norm).astype(x.dtype)
        )
        units = jax.tree.map(unit, params, raw)
        _, change = jax.jvp(lambda p: self.raw_gradients(grad_fn(p), p), (params,), (units,))
        less = lambda name, o, g, c: (g - o.maximize_grad_norm * c).astype(jnp.result_type(g))
        return map_named(self.options, less, raw, change)

    def context(
        self, raw: Any, shared: dict[str, Array], step: Any, rate: Array
    ) -> tuple[StepContext, dict[str, Array]]:
        """The context of the steps of this update, and the new arrays of the state."""
        norms = None if self.options.backend.norms_of_sums else self.norms(raw)
        if "grad_norm" in shared:
            shared = {**shared, "grad_norm": self.norm(raw, None).astype(jnp.float32)}
        key = jax.random.fold_in(shared["noise_key"], step) if "noise_key" in shared else None
        decay = 1
        if self.decoupled in ("2017", "2022"):
            step_options = self.options.step
            decay = step_options.decouple_constraints_factor * rate / step_options.learning_rate
        return StepContext(norms, key, decay), shared

    def norms(self, gradients: Any) -> dict[str | None, Array]:
        """The norms by tag that the steps need."""
        return {tag: self.norm(gradients, tag) for tag in self.options.needed_tags}

    def norm(self, raw: Any, tag: str | None) -> Array:
        """The norm of all gradients with a tag, or of all gradients for None."""
        leaves = leaves_with_path(raw, is_leaf=is_sparse_or_none)
        has_tag = lambda path: tag is None or tag in self.options.of(path_name(path)).tags
        return global_norm(g for path, g in leaves if has_tag(path))

    def with_steps(self, context: StepContext) -> optax.GradientTransformationExtraArgs:
        """All optimizers for one update, with the steps before and after them."""
        if self.options.backend.norms_of_sums:  # of all parameters, so all share the micro-steps
            every = self.options.default.accum_grad_multiple_step
            tx = self.group(self.by_kind(self.optimizers), every, context)
        else:
            pairs = zip(self.optimizers, self.kinds, strict=True)
            tx = self.by_kind([self.group(tx, every, context) for tx, (_, every) in pairs])
        if self.decoupled in ("2017", "2022"):
            tx = with_decay(tx, self.options, context, after=self.decoupled == "2017")
        return tx

    def by_kind(
        self, txs: Sequence[optax.GradientTransformationExtraArgs]
    ) -> optax.GradientTransformationExtraArgs:
        """The transformation of its kind for each parameter."""
        if len(txs) == 1:
            return txs[0]
        label = lambda o: f"group{self.kinds.index(_kind(o))}"
        groups: dict[Any, Any] = {f"group{i}": tx for i, tx in enumerate(txs)}
        return optax.partition(groups, lambda tree: self.of_each(label, tree))

    def group(
        self, tx: optax.GradientTransformationExtraArgs, every: int, context: StepContext
    ) -> optax.GradientTransformationExtraArgs:
        """Optimizers with all steps that follow the sum of the micro-steps."""
        options = self.options
        if options.step.deterministic_train:
            tx = optax.chain(coalesce(deterministic=True), tx)
        if self.decoupled == "2026":
            tx = with_decay(tx, options, context, after=False)
        if options.step.extra_updates:
            tx = with_extra_updates(tx, options.step.extra_updates)
        steps = [process_gradients(options, context, self.norms), tx]
        if options.has("debug_grad_summaries"):
            wanted = lambda tree: self.of_each(lambda o: o.debug_grad_summaries, tree)
            steps.insert(0, optax.masked(gradient_summaries(), wanted))
        tx = optax.chain(*steps)
        return accumulate(tx, every) if every else tx

    def of_each(self, f: Callable[[ParamOptions], Any], tree: Any) -> Any:
        """``f`` applied to the options of each parameter of a tree."""
        of_path = lambda path, _: f(self.options.of(path_name(path)))
        return map_with_path(of_path, tree, is_leaf=is_sparse_or_none)


def _kind(o: ParamOptions) -> tuple[Any, int]:
    """The key of parameters that share an optimizer."""
    return o.optimizer, o.accum_grad_multiple_step


def _rate_at(step: Any, options: StepOptions, override: Any, replicas: Replicas) -> Array:
    """The learning rate of a step, in float32 as in RETURNN."""
    rate = jnp.asarray(options.learning_rate if override is None else override, jnp.float32)
    dynamic = options.dynamic_learning_rate
    if isinstance(dynamic, Mapping):
        power = jnp.asarray(step % dynamic["interval"], jnp.float32)
        rate = rate * jnp.float32(dynamic["decay"]) ** power
    elif dynamic is not None:
        rate = jnp.asarray(dynamic(global_train_step=step, learning_rate=rate), jnp.float32)
    return rate * replicas.size if options.horovod_scale_lr else rate
