"""The steps of RETURNN's updater between the raw gradients and the new parameters."""

import inspect
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from ...core.norms import clipping_factor
from ...core.numerics import upcast
from ...core.paths import path_name
from ...core.rows import is_rows, is_sparse_or_none
from ...transforms._per_leaf import on_listed
from ...transforms.clip_by_average_norm import clipped_by_average_norm
from ...transforms.clip_by_norm import clipped_by_norm
from ...transforms.nan_inf_filter import filtered
from ...transforms.zero_if_norm_exceeds import is_within, zero_unless
from .options import Options
from .values import ParamOptions


class StepContext(NamedTuple):
    """What the steps of one update need beside gradients and parameters.

    It is not part of the state, nor an argument of ``update``: the updater makes the
    transformations below anew for each update, around optimizers that it makes once.
    """

    norms: dict[str | None, Array]  # of the raw gradients, by tag; None is that of all
    key: Any  # of the noise; None if no parameter has any
    decay: Any  # the factor of decoupled constraints


# Only for `init`, which does not depend on it.
NO_CONTEXT = StepContext(norms={}, key=None, decay=None)


# Each step takes one gradient, its name, its options, and the context. Norms of rows are those of
# the rows as they are listed: RETURNN does not merge them. What is dense afterwards is dense in
# RETURNN, too, so that a lazy optimizer sees the same.


def _noise(g: Any, name: str, o: ParamOptions, context: StepContext) -> Any:
    if not o.gradient_noise:
        return g
    g = _dense(g)
    # By the name, so that the noise of a parameter does not depend on which others there are.
    key = jax.random.fold_in(context.key, zlib.crc32(name.encode()))
    noise = jax.random.truncated_normal(key, -2, 2, jnp.shape(g), jnp.float32)
    return on_listed(lambda v: v + o.gradient_noise * noise, g)


def _clip(g: Any, name: str, o: ParamOptions, context: StepContext) -> Any:
    c = o.gradient_clip
    return on_listed(lambda v: jnp.clip(v, -c, c), g) if c else g


def _clip_norm(g: Any, name: str, o: ParamOptions, context: StepContext) -> Any:
    c = o.gradient_clip_norm
    return clipped_by_norm(g, c) if c else g


def _clip_avg_norm(g: Any, name: str, o: ParamOptions, context: StepContext) -> Any:
    c, dense = o.gradient_clip_avg_norm, _dense(g)
    return clipped_by_average_norm(dense, jnp.size(dense), c) if c else g


def _clip_global_norm(g: Any, name: str, o: ParamOptions, context: StepContext) -> Any:
    c = o.gradient_clip_global_norm
    if not c:
        return g
    norm = context.norms[o.gradient_clip_global_norm_tag]
    factor = jnp.where(jnp.isfinite(norm), clipping_factor(norm, c), jnp.nan)
    return on_listed(lambda v: v * factor.astype(v.dtype), g)


def _nan_inf_filter(g: Any, name: str, o: ParamOptions, context: StepContext) -> Any:
    return filtered(g) if o.gradient_nan_inf_filter else g


def _clip_to_zero(g: Any, name: str, o: ParamOptions, context: StepContext) -> Any:
    c = o.grad_norm_to_clip_to_zero
    return zero_unless(is_within(context.norms[o.global_norm_tag], c), _dense(g)) if c else g


STEPS: tuple[Callable[[Any, str, ParamOptions, StepContext], Any], ...] = (
    _noise,
    _clip,
    _clip_norm,
    _clip_avg_norm,
    _clip_global_norm,
    _nan_inf_filter,
    _clip_to_zero,
)


def process_gradients(
    options: Options, context: StepContext
) -> optax.GradientTransformationExtraArgs:
    """All these steps in their order."""

    def on_leaf(name, o, g):
        for step in STEPS:
            g = step(g, name, o, context)
        return g

    def update(updates, state, params=None, **extra_args):
        del params, extra_args
        return map_named(options, on_leaf, updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def needed_tags(options: Options) -> set[str | None]:
    """The tags for which a norm is needed."""
    used = options.distinct
    clip = {o.gradient_clip_global_norm_tag for o in used if o.gradient_clip_global_norm}
    return clip | {o.global_norm_tag for o in used if o.grad_norm_to_clip_to_zero}


def decay_before(
    inner: optax.GradientTransformation, options: Options, context: StepContext
) -> optax.GradientTransformationExtraArgs:
    """Decoupled constraints before the update of ``inner``, which sees the decayed parameters."""
    inner = optax.with_extra_args_support(inner)

    def update(updates, state, params=None, **extra_args):
        decays = map_named(options, lambda name, o, g, x: _decay(o, context, x), updates, params)
        decayed = jax.tree.map(_plus, params, decays)
        updates, state = inner.update(updates, state, decayed, **extra_args)
        return jax.tree.map(_plus, updates, decays, is_leaf=is_sparse_or_none), state

    return optax.GradientTransformationExtraArgs(inner.init, update)


def decay_after(
    inner: optax.GradientTransformation, options: Options, context: StepContext
) -> optax.GradientTransformationExtraArgs:
    """Decoupled constraints after the update of ``inner``."""
    inner = optax.with_extra_args_support(inner)

    def update(updates, state, params=None, **extra_args):
        updates, state = inner.update(updates, state, params, **extra_args)
        decay = lambda name, o, u, x: _plus(u, _decay(o, context, upcast(x) + u))
        return map_named(options, decay, updates, params), state

    return optax.GradientTransformationExtraArgs(inner.init, update)


def with_extra_updates(
    inner: optax.GradientTransformation, functions: Mapping[str, Callable[..., Any]]
) -> optax.GradientTransformationExtraArgs:
    """Functions of parameters after their updates that return new values."""
    inner = optax.with_extra_args_support(inner)

    def change(path, u, g, x):
        function = functions.get(path_name(path))
        if function is None or u is None:
            return u
        given = {"var": (upcast(x) + u).astype(x.dtype)}
        if "grad" in inspect.signature(function).parameters:
            given["grad"] = g
        value = jnp.asarray(function(**given))
        if value.shape != x.shape:
            raise ValueError(
                f"extra_updates: the function of '{path_name(path)}' made an array of shape "
                f"{value.shape}, but the parameter has shape {x.shape}"
            )
        return (upcast(value) - upcast(x)).astype(u.dtype)

    def update(updates, state, params=None, **extra_args):
        new, state = inner.update(updates, state, params, **extra_args)
        walk = jax.tree_util.tree_map_with_path
        return walk(change, new, updates, params, is_leaf=is_sparse_or_none), state

    return optax.GradientTransformationExtraArgs(inner.init, update)


def _decay(o: ParamOptions, context: StepContext, x: Any) -> Any:
    return -2 * o.L2 * context.decay * upcast(x) if o.L2 else None


def _plus(a: Any, change: Any) -> Any:
    """``a``, perhaps rows, with a change added in float32 at least; None is no change."""
    if a is None or change is None:
        return a
    a = a.to_dense() if is_rows(a) else jnp.asarray(a)
    return (upcast(a) + change).astype(a.dtype)


def map_named(options: Options, f: Callable[..., Any], updates: Any, *others: Any) -> Any:
    """``f(name, options, gradient, *others)`` for each parameter that has a gradient."""

    def on_leaf(path, g, *rest):
        if g is None:
            return None
        name = path_name(path)
        return f(name, options.of(name), g, *rest)

    return jax.tree_util.tree_map_with_path(on_leaf, updates, *others, is_leaf=is_sparse_or_none)


def _dense(g: Any) -> Any:
    return g.to_dense() if is_rows(g) else g
