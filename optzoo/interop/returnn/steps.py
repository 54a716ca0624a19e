"""The steps of RETURNN's updater between the raw gradients and the new parameters."""

import functools
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
from ...core.paths import map_with_path, path_name
from ...core.rows import SparseRows, is_sparse_or_none, map_rows, update_tree
from ...transforms._per_leaf import on_listed
from ...transforms.clip_by_average_norm import clipped_by_average_norm
from ...transforms.clip_by_norm import clipped_by_norm
from ...transforms.nan_inf_filter import filtered
from ...transforms.zero_if_norm_exceeds import is_within, zero_unless
from .options import Options
from .values import ParamOptions


class StepContext(NamedTuple):
    """Inputs of the steps of one update, in addition to gradients and parameters.

    They are neither part of the state nor arguments of ``update``: the updater rebuilds the
    transformations below for each update, around optimizers that it builds once.
    """

    # Of the raw gradients, by tag; that of None is of all. None: of what is to be clipped by them.
    norms: dict[str | None, Array] | None
    key: Any  # of the noise; None if no parameter has any
    decay: Any  # the factor of decoupled constraints


# Only for `init`, which does not depend on it.
NO_CONTEXT = StepContext(norms={}, key=None, decay=None)

dense = functools.partial(map_rows, SparseRows.to_dense)


def process_gradients(
    options: Options, context: StepContext, norms_of: Callable[[Any], dict[str | None, Array]]
) -> optax.GradientTransformation:
    """Noise, clipping and filters, in RETURNN's order."""
    clip_each = functools.partial(_noisy_and_clipped, context.key)
    clip_all = functools.partial(_clipped_by_norms, options.backend.norm_epsilon)

    def process(updates, params):
        if context.norms is None:  # its gradients are dense: repeated rows are summed
            updates = map_rows(SparseRows.coalesce, updates)
        updates = map_named(options, clip_each, updates)
        norms = norms_of(updates) if context.norms is None else context.norms
        return map_named(options, functools.partial(clip_all, norms), updates)

    return optax.stateless(process)


def _noisy_and_clipped(key: Any, name: str, o: ParamOptions, g: Any) -> Any:
    """One gradient after the steps that do not depend on other gradients.

    Norms are those of unmerged rows, as in RETURNN. A gradient becomes dense where it does so in
    RETURNN, so that a lazy optimizer updates the same rows.
    """
    if o.gradient_noise:
        g = dense(g)
        # By the name, so that the noise of a parameter does not depend on other parameters.
        key = jax.random.fold_in(key, zlib.crc32(name.encode()))
        noise = jax.random.truncated_normal(key, -2, 2, jnp.shape(g), jnp.float32)
        g = on_listed(lambda v: v + o.gradient_noise * noise, g)
    if o.gradient_clip:
        g = on_listed(lambda v: jnp.clip(v, -o.gradient_clip, o.gradient_clip), g)
    if o.gradient_clip_norm:
        g = clipped_by_norm(g, o.gradient_clip_norm)
    if o.gradient_clip_avg_norm:
        g = dense(g)
        g = clipped_by_average_norm(g, jnp.size(g), o.gradient_clip_avg_norm)
    return g


def _clipped_by_norms(
    epsilon: float, norms: dict[str | None, Array], name: str, o: ParamOptions, g: Any
) -> Any:
    """One gradient after the subsequent steps."""
    if o.gradient_clip_global_norm:
        norm = norms[o.gradient_clip_global_norm_tag]
        factor = clipping_factor(norm + epsilon, o.gradient_clip_global_norm)
        factor = jnp.where(jnp.isfinite(norm), factor, jnp.nan)
        g = on_listed(lambda v: v * factor.astype(v.dtype), g)
    if o.gradient_nan_inf_filter:
        g = filtered(g)
    if o.grad_norm_to_clip_to_zero:
        keep = is_within(norms[o.global_norm_tag], o.grad_norm_to_clip_to_zero)
        g = zero_unless(keep, dense(g))
    return g


def with_decay(
    inner: optax.GradientTransformation, options: Options, context: StepContext, *, after: bool
) -> optax.GradientTransformationExtraArgs:
    """Decoupled constraints after the update of ``inner``, or before it, on its parameters."""
    inner = optax.with_extra_args_support(inner)
    decay = lambda x, o: -2 * o.L2 * context.decay * upcast(x) if o.L2 else None

    def update(updates, state, params=None, **extra_args):
        if after:
            updates, state = inner.update(updates, state, params, **extra_args)
            decay_new = lambda name, o, u, x: decay(upcast(x) + u, o)
            decays = map_named(options, decay_new, updates, params)
        else:
            decays = map_named(options, lambda name, o, g, x: decay(x, o), updates, params)
            decayed = jax.tree.map(plus, params, decays)
            updates, state = inner.update(updates, state, decayed, **extra_args)
        return update_tree.map(plus, updates, decays), state

    return optax.GradientTransformationExtraArgs(inner.init, update)


def with_extra_updates(
    inner: optax.GradientTransformation, functions: Mapping[str, Callable[..., Any]]
) -> optax.GradientTransformationExtraArgs:
    """Applies functions that return new values of parameters after their updates."""
    inner = optax.with_extra_args_support(inner)

    def change(path, u, g, x):
        function = functions.get(path_name(path))
        if function is None or u is None:
            return u
        given = {"var": (upcast(x) + upcast(u)).astype(x.dtype)}
        if "grad" in inspect.signature(function).parameters:
            given["grad"] = g
        value = jnp.asarray(function(**given))
        if value.shape != x.shape:
            raise ValueError(
                f"extra_updates: the function of '{path_name(path)}' returned an array of shape "
                f"{value.shape}, but the parameter has shape {x.shape}"
            )
        return (upcast(value) - upcast(x)).astype(u.dtype)

    def update(updates, state, params=None, **extra_args):
        new, state = inner.update(updates, state, params, **extra_args)
        walk = map_with_path
        return walk(change, new, updates, params, is_leaf=is_sparse_or_none), state

    return optax.GradientTransformationExtraArgs(inner.init, update)


def map_named(options: Options, f: Callable[..., Any], updates: Any, *others: Any) -> Any:
    """Applies ``f(name, options, gradient, *others)`` to each parameter that has a gradient."""

    def on_leaf(path, g, *rest):
        name = path_name(path)
        return None if g is None else f(name, options.of(name), g, *rest)

    return map_with_path(on_leaf, updates, *others, is_leaf=is_sparse_or_none)


def plus(a: Any, change: Any) -> Any:
    """``a``, an array or rows, plus a change, added in at least float32; None for no change."""
    if a is None or change is None:
        return a
    a = jnp.asarray(dense(a))
    return (upcast(a) + change).astype(a.dtype)
