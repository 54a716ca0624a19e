"""RETURNN's updater: one transformation from a config."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from ...core.checks import check_params, check_positive
from ...core.gradients import check_gradients
from ...core.numerics import safe_divide, upcast
from ...core.paths import is_masked, path_name
from ...core.rows import coalesce, is_rows, is_sparse_or_none
from ...distributed.engine.collectives import AxisName, Replicas, divide_gradients
from ...registry import create
from ...transforms._per_leaf import global_norm
from ...transforms.check_numerics import raise_if_bad
from ...transforms.summaries import gradient_summaries
from ...wrappers.accumulate import accumulate
from .options import RETURNN_VERSIONS, Options, ParamOptions, StepOptions, read_options
from .steps import (
    StepContext,
    decay_first,
    decay_last,
    map_named,
    needed_tags,
    processed,
    with_extra_updates,
)


class UpdaterState(NamedTuple):
    """How many steps were made, what no parameter owns, and what the optimizers keep."""

    count: Array
    shared: dict[str, Array]  # noise_key and grad_norm, where they are wanted
    inner: Any


def returnn_updater(
    config: Mapping[str, Any],
    *,
    layers: Mapping[str, Any] | None = None,
    returnn_version: str = "2026",
    axis_name: AxisName = None,
) -> optax.GradientTransformationExtraArgs:
    r"""The whole updater of a RETURNN config, as in ``returnn.tf.updater.Updater``.

    .. code-block:: python

        tx = returnn_updater(
            {"optimizer": {"class": "adam"}, "learning_rate": 1e-3, "gradient_clip_global_norm": 5},
            layers={"encoder": {"L2": 1e-4}, "output": {"updater_opts": {"gradient_clip": 0.1}}},
        )

    One step does in this order, where an option asks for it:

    1. The gradient of the constraints (``L2``: :math:`2 \lambda x`) is added, unless
       ``decouple_constraints``; then ``use_horovod`` sums over the replicas. These are the *raw*
       gradients: all norms over several parameters are of them.
    2. ``maximize_grad_norm``.
    3. ``accum_grad_multiple_step``: sums; what follows runs on the last micro-step of a cycle only.
    4. ``debug_grad_summaries``, ``gradient_noise``, ``gradient_clip``, ``gradient_clip_norm``,
       ``gradient_clip_avg_norm``, ``gradient_clip_global_norm``, ``gradient_nan_inf_filter``,
       ``grad_norm_to_clip_to_zero``.
    5. Decoupled constraints, the optimizers, ``extra_updates``.
    6. ``debug_add_check_numerics_ops``.

    The gradients given to ``update`` are those of the loss without constraints. The update is new
    minus old parameters, so nothing may come behind it in a chain. Row-sparse gradients stay rows
    unless the layer has a coupled ``L2``, or an option is dense in RETURNN as well.

    ``update(..., learning_rate=x)`` overrides the rate of the config, as ``LearningRateControl``
    does for each epoch; ``dynamic_learning_rate`` and the factors still apply. ``update(...,
    global_step=n)`` replaces the count of steps. ``maximize_grad_norm`` needs ``update(...,
    grad_fn=f)``, where ``f(params)`` is the gradient of the loss.

    Args:
        config: RETURNN's config. What has nothing to do with the updater is ignored;
            ``docs/returnn.md`` lists the options.
        layers: the options of layers by their names: ``L2`` and ``updater_opts``. The parameters
            of a layer are those whose paths begin with its name and ``/``; of layers inside of
            each other the innermost counts. By default those of ``config["network"]``.
        returnn_version: what ``decouple_constraints`` means. ``"2026"`` (RETURNN since November
            2022): :math:`x \leftarrow x - 2 \lambda x` before each update. ``"2022"`` (March to
            November 2022): :math:`x \leftarrow x - k\, 2 \lambda x` before it, where :math:`k` is
            ``decouple_constraints_factor`` times the rate by the config's ``learning_rate``.
            ``"2017"`` (December 2017 to March 2022): the same after it. The old versions decay in
            every micro-step.
        axis_name: the axis of the replicas for ``use_horovod``.

    Raises:
        TypeError: if a value has a wrong type.
        ValueError: if an option is unknown, not supported or out of its range; at ``init``, if a
            layer has no parameter.

    References:
        ``returnn.tf.updater``.

    Differences from the original:
        An optimizer that two numbers of micro-steps share has a step count for each; there each of
        them advances Adam's powers. ``gradient_nan_inf_filter`` makes an infinity in rows zero,
        there it is 1e30. A parameter without a gradient does not decay. With the version of 2026
        parameters decay on the last micro-step only; there a race decides. Summaries are of the
        sum of a cycle, and ``extra_updates`` follow an update; there both are in every micro-step.
        An optimizer that reads a global step is given one; there ``AdamGS`` stands at its first.
    """
    if returnn_version not in RETURNN_VERSIONS:
        raise ValueError(
            f"returnn_version must be one of {', '.join(RETURNN_VERSIONS)}, got {returnn_version!r}"
        )
    options = read_options(config, layers)
    step_options = options.step
    if step_options.use_horovod and axis_name is None:
        raise ValueError("use_horovod needs axis_name=, the axis of the replicas")
    decoupled = returnn_version if step_options.decouple_constraints else None
    if decoupled in ("2017", "2022"):
        check_positive(learning_rate=step_options.learning_rate)
    if decoupled == "2017" and step_options.extra_updates:
        raise ValueError(
            "extra_updates come after the decay in RETURNN, but returnn_version="
            "'2017' decays after the "
            "update: take another returnn_version"
        )
    replicas = Replicas(axis_name if step_options.use_horovod else None)
    inner = _optimizers(options, decays=decoupled == "2026")
    if decoupled == "2022":
        inner = decay_first(inner, options)
    elif decoupled == "2017":
        inner = decay_last(inner, options)

    def raw_gradients(updates, params):
        """Those of the whole loss, of all replicas."""
        replicas.check_per_replica(updates)
        if decoupled is None:
            updates = map_named(options, _plus_constraint, updates, params)
        if not step_options.use_horovod:
            return updates
        sums, _ = replicas.sum_gradients(updates, True)
        number = replicas.size if step_options.horovod_avg_grad else 1
        return divide_gradients(sums, jnp.asarray(number), updates)

    def init(params):
        leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_masked)
        # A part of the parameters, as optax.masked shows them, may be without some layer.
        if leaves and not any(is_masked(x) for _, x in leaves):
            options.check_names([path_name(path) for path, _ in leaves])
        shared = {}
        if any(o.gradient_noise for o in options.distinct):
            shared["noise_key"] = jax.random.PRNGKey(step_options.random_seed)
        if _keeps_norm(options):
            shared["grad_norm"] = jnp.zeros([], jnp.float32)
        return UpdaterState(jnp.zeros([], jnp.int32), shared, inner.init(params))

    def update(
        updates,
        state,
        params=None,
        *,
        learning_rate=None,
        grad_fn=None,
        global_step=None,
        **extra_args,
    ):
        check_params(params)
        check_gradients(updates, params)
        step = state.count if global_step is None else global_step
        if step_options.debug_add_check_numerics_ops:
            raise_if_bad(updates, "gradient", step)
        rate = _rate_at(step, step_options, learning_rate, replicas)
        raw = raw_gradients(updates, params)
        norms = {tag: _norm(options, raw, tag) for tag in needed_tags(options)}
        shared = dict(state.shared)
        if "grad_norm" in shared:
            shared["grad_norm"] = _norm(options, raw, None).astype(jnp.float32)
        key = jax.random.fold_in(shared["noise_key"], step) if "noise_key" in shared else None
        decay = 1
        if decoupled in ("2017", "2022"):
            decay = step_options.decouple_constraints_factor * rate / step_options.learning_rate
        if any(o.maximize_grad_norm for o in options.distinct):
            raw = _norm_maximized(options, raw, params, grad_fn, raw_gradients)

        extra_args |= {
            "learning_rate": rate,
            "global_step": step,
            "now": StepContext(norms, key, decay),
        }
        new, inner_state = inner.update(raw, state.inner, params, **extra_args)
        if step_options.debug_add_check_numerics_ops:
            raise_if_bad(new, "update", step)
        count = jnp.asarray(optax.safe_increment(state.count))
        return new, UpdaterState(count, shared, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _optimizers(options: Options, *, decays: bool) -> optax.GradientTransformationExtraArgs:
    """All optimizers, each with the steps before it: one for each number of micro-steps."""
    kinds: list[tuple[Any, int]] = []
    for o in options.distinct:
        if _kind(o) not in kinds:
            kinds.append(_kind(o))
    made = [_group(options, *kind, decays) for kind in kinds]
    if len(made) == 1:
        return made[0]

    def labels(tree):
        label = lambda path, _: f"group{kinds.index(_kind(options.of(path_name(path))))}"
        return jax.tree_util.tree_map_with_path(label, tree, is_leaf=is_sparse_or_none)

    return optax.partition({f"group{i}": tx for i, tx in enumerate(made)}, labels)


def _kind(o: ParamOptions) -> tuple[Any, int]:
    return o.optimizer, o.accum_grad_multiple_step


def _group(
    options: Options, optimizer: dict[str, Any], every: int, decays: bool
) -> optax.GradientTransformationExtraArgs:
    """What one optimizer does, from the sum of the micro-steps on."""
    last = create(optimizer, learning_rate=options.step.learning_rate)
    if options.step.deterministic_train:
        last = optax.chain(coalesce(deterministic=True), last)
    if decays:
        last = decay_first(last, options)
    if options.step.extra_updates:
        last = with_extra_updates(last, options.step.extra_updates)
    links = [processed(options), last]
    if any(o.debug_grad_summaries for o in options.distinct):
        links.insert(0, optax.masked(gradient_summaries(), lambda tree: _summarized(options, tree)))
    tx = optax.chain(*links)
    return accumulate(tx, every) if every else tx


def _summarized(options: Options, tree: Any) -> Any:
    wanted = lambda path, _: options.of(path_name(path)).debug_grad_summaries
    return jax.tree_util.tree_map_with_path(wanted, tree, is_leaf=is_sparse_or_none)


def _plus_constraint(name: str, o: ParamOptions, g: Any, x: Any) -> Any:
    """A gradient with that of L2, which is that of all rows."""
    if not o.L2:
        return g
    g = g.to_dense() if is_rows(g) else jnp.asarray(g)
    return (upcast(g) + 2 * o.L2 * upcast(x)).astype(g.dtype)


def _keeps_norm(options: Options) -> bool:
    return options.step.log_grad_norm or any(o.debug_grad_summaries for o in options.distinct)


def _norm(options: Options, raw: Any, tag: str | None) -> Array:
    """The norm of the raw gradients with a tag, or of all."""
    leaves = jax.tree_util.tree_leaves_with_path(raw, is_leaf=is_sparse_or_none)
    has_tag = lambda path: tag is None or tag in options.of(path_name(path)).tags
    return global_norm(g for path, g in leaves if has_tag(path))


def _norm_maximized(
    options: Options,
    raw: Any,
    params: Any,
    grad_fn: Callable[[Any], Any] | None,
    raw_gradients: Callable[[Any, Any], Any],
) -> Any:
    """The raw gradients g with that of minus their norm: -f H g / |g|."""
    if grad_fn is None:
        raise ValueError(
            "maximize_grad_norm needs the gradient as a function: pass update(..., grad_fn=f), "
            "where f(params) is the gradient of the loss"
        )
    if any(map(is_rows, jax.tree.leaves(raw, is_leaf=is_rows))):
        raise TypeError("maximize_grad_norm takes no rows: it needs dense gradients everywhere")
    norm = _norm(options, raw, None)
    unit = lambda x, g: (
        jnp.zeros_like(x) if g is None else safe_divide(upcast(g), norm).astype(x.dtype)
    )
    units = jax.tree.map(unit, params, raw)
    _, change = jax.jvp(lambda p: raw_gradients(grad_fn(p), p), (params,), (units,))
    less = lambda name, o, g, c: (g - o.maximize_grad_norm * c).astype(jnp.result_type(g))
    return map_named(options, less, raw, change)


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
