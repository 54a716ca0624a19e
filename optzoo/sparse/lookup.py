"""Embedding lookups whose gradient is row-sparse.

``value_and_grad`` traces the loss once. In the jaxpr it finds the lookups of the differentiated
arguments, and the gathers of rows that are treated as lookups (``wanted.py``). It evaluates the
jaxpr with a *tap*, an array of zeros, added to the rows of each lookup, which reads an
undifferentiated copy of the table (``jaxprs/taps.py``). The gradient of the tap is the gradient of
the rows, so no dense gradient is computed. The same jaxpr shows which tables are also used in other
ways (``jaxprs/dense_uses.py``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from ..core.checks import check_flags
from ..core.gradients import check_arrays
from ..core.lines import is_lines
from ..core.paths import leaves_with_path, path_name
from ..core.row_ids import integer_ids
from ..jaxprs.lookup import bind_lookup
from ..jaxprs.loss import trace_loss
from .wanted import MIN_ROWS, RowsSetting, Sparse


def lookup(table: Any, ids: Any, *, out_sharding: Any = None) -> Array:
    """``table[ids]`` for integer ids of any shape, with a row-sparse gradient.

    Inside a loss differentiated by :func:`optzoo.value_and_grad`, the gradient of a table that is
    read by lookups only is a :class:`optzoo.SparseRows`. Otherwise, as for tied weights, it is the
    usual dense gradient. ``table`` may be a cast of a parameter, ``params["table"].astype(...)``:
    only the rows are cast.

    ``table[ids]`` of a large table has a row-sparse gradient, too. A lookup differs from it in
    three ways: it works for tables of any size, it has a padding id, and invalid ids do not read
    other rows.

    The id ``len(table)`` is padding: it reads zeros and has no gradient. If your ids are padded
    with -1, replace it: ``ids = jnp.where(ids < 0, len(table), ids)``. Any other id outside
    ``[0, len(table))`` raises an error if the ids are concrete, and reads NaN if they are traced.
    Negative ids do not index from the end, and ids are not clipped.

    Works under ``jax.vmap``, and inside the loss also in the body of a ``jit``, a ``checkpoint``, a
    ``scan``, a ``cond`` or an inner ``grad``. The gradient is dense if the table itself is an
    argument of a ``while_loop``, a ``shard_map``, a ``jit`` with shardings, or a function with
    ``custom_jvp`` or ``custom_vjp``, or if a ``vmap`` or a ``scan`` maps over it: call ``lookup``
    outside of them. :func:`optzoo.value_and_grad` warns in these cases.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> loss = lambda table: jnp.sum(optzoo.lookup(table, jnp.array([0, 2])) ** 2)
        >>> value, gradient = optzoo.value_and_grad(loss)(jnp.ones((3, 2)))
        >>> print(gradient.indices, gradient.values.tolist())
        [0 2] [[2.0, 2.0], [2.0, 2.0]]

    Args:
        table: an array of shape ``(num_rows, *row_shape)``, or a variable that holds one, such as
            an ``nnx.Param`` or a linen variable, whose array is ``table[...]``, or ``table.value``
            if it does not support ``[...]``.
        ids: integers of any shape: an array, a number or a (nested) list.
        out_sharding: a ``PartitionSpec``, or a ``NamedSharding``, of the rows on a mesh with
            explicit axes. By default rows are divided like their ids, and along their own axes like
            the table, if these are other axes of the mesh.

    Returns:
        The rows, of shape ``ids.shape + row_shape``.

    Raises:
        TypeError: if the ids are not integers; if the table is not an array or a variable that
            holds one, or is reduced along an axis of a mesh.
        ValueError: if the table is a scalar; or, inside a ``shard_map`` that checks replication,
            if a replicated table is looked up at ids that differ between replicas.
        IndexError: if a concrete id is out of range.
    """
    in_lines = table.shape if is_lines(table) else None
    table = table.value if is_lines(table) else table_of(table)
    check_arrays({"table": table})
    array = integer_ids(ids)
    check_range(ids, (in_lines or table.shape)[0])
    return bind_lookup(table, array, in_lines=in_lines, spec=_spec(out_sharding))


def _spec(out_sharding: Any) -> PartitionSpec | None:
    spec = out_sharding.spec if isinstance(out_sharding, NamedSharding) else out_sharding
    if spec is not None and not isinstance(spec, PartitionSpec):
        raise TypeError(
            f"out_sharding must be a PartitionSpec or a NamedSharding, got {out_sharding!r}"
        )
    return spec


def value_and_grad(
    loss_fn: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    sparse: Sparse | Mapping[str, Sparse] = "warn",
    min_rows: int = MIN_ROWS,
    allow_int: bool = False,
) -> Callable[..., Any]:
    """``jax.value_and_grad`` whose gradients of looked-up tables are SparseRows.

    The gradient of a table is a :class:`optzoo.SparseRows` (one row for each id, repeats included)
    if ``loss_fn`` reads it by :func:`optzoo.lookup` only; or, if it has at least ``min_rows`` rows,
    by lookups and by gathers of whole rows: ``table[ids]``, ``jnp.take(table, ids, axis=0)``,
    ``table.at[ids].get()``, ``jax.lax.dynamic_index_in_dim``, and functions with the same
    operations, such as ``Embed`` of Flax. Gathers keep the values and gradients of JAX, also for
    ids out of range. All other gradients are those of ``jax.value_and_grad``. ``loss_fn`` is called
    once. Call the result under ``jit``: otherwise JAX allocates a dense gradient of zeros and
    discards it.

    If such a table is also used in another way (tied weights), or read in one of the ways that
    :func:`optzoo.lookup` lists, its gradient is dense, at a cost proportional to the table, and a
    :class:`DenseGradientWarning` names the reason and the line. Uses of
    ``jax.lax.stop_gradient(table)``, and uses by the auxiliary data only, keep the gradient
    row-sparse.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> loss = lambda p: jnp.sum(optzoo.lookup(p["table"], jnp.array([2])) * p["w"])
        >>> params = {"table": jnp.ones((3, 2)), "w": jnp.ones(2)}
        >>> value, gradients = optzoo.value_and_grad(loss)(params)
        >>> print(gradients["table"].indices, gradients["w"])
        [2] [1. 1.]

    Args:
        loss_fn: returns a scalar, or ``(scalar, aux)``.
        argnums: which positional arguments to differentiate.
        has_aux: whether ``loss_fn`` also returns auxiliary data.
        sparse: if the gradient of such a table is dense, ``"warn"`` gives a
            :class:`DenseGradientWarning` in every trace, ``"require"`` raises an error, and
            ``"allow"`` does neither. Or a dict from patterns of names (:func:`optzoo.param_groups`)
            to these, with ``"warn"`` for all others; with several arguments, a name begins with the
            position in ``argnums``. A pattern with ``"require"`` applies to tables of any size,
            whose gradients must be row-sparse.
        min_rows: the minimum number of rows of a table for which gathers have row-sparse gradients.
            Smaller tables, such as position embeddings, and biases that are read by index keep
            dense gradients.
        allow_int: whether differentiated arguments may contain integers and booleans. As in JAX,
            their gradients have the dtype ``float0``; optimizers need None instead.

    Returns:
        A function of the arguments of ``loss_fn`` that returns ``(value, gradients)`` or
        ``((value, aux), gradients)``.

    Raises:
        TypeError: if a pattern is not a string, ``min_rows`` not an int, or ``allow_int`` not a
            bool; at trace time, if ``jax.value_and_grad`` would raise it, or if the result of
            ``loss_fn`` does not match ``has_aux``.
        ValueError: if ``sparse`` has another value, or ``min_rows`` is not positive; at trace time,
            if a differentiated argument is not given by position, if a pattern matches no
            parameter, if two patterns match the same one, or if a gradient is dense although
            ``sparse`` requires rows.
    """
    setting = RowsSetting.of(sparse, min_rows)
    check_flags(allow_int=allow_int)
    which = (argnums,) if isinstance(argnums, int) else tuple(argnums)

    def wrapped(*args, **kwargs):
        for i in which:
            if not -len(args) <= i < len(args):
                raise ValueError(
                    f"argnums={argnums!r} differentiates positional argument {i}, but loss_fn got "
                    f"{len(args)} positional arguments and the keywords {sorted(kwargs)}: pass "
                    "what to differentiate by position"
                )
        chosen = tuple(args[i] for i in which)
        check_no_module(*chosen)
        flat, treedef = jax.tree.flatten(chosen)

        def call(leaves):
            full_args = list(args)
            for i, arg in zip(which, treedef.unflatten(leaves), strict=True):
                full_args[i] = arg
            return value_and_aux(loss_fn(*full_args, **kwargs), has_aux)

        names = [_name(path, which) for path, _ in leaves_with_path(chosen)]
        for x, name in zip(flat, names, strict=True):
            if not allow_int:
                check_differentiable(x, name)
        traced = trace_loss(call, flat)
        wanted = setting.of_tree(chosen[0] if len(which) == 1 else chosen, names)
        loss = traced.with_taps(gathers=wanted.gathers(traced))
        wanted.report(loss)
        value, aux, grads, _ = loss.differentiate(flat)
        grads = treedef.unflatten(grads)
        return (value, aux) if has_aux else value, grads[0] if isinstance(argnums, int) else grads

    return wrapped


def value_and_aux(out: Any, has_aux: bool) -> tuple[Any, Any]:
    """The loss and the auxiliary data (None without) in the result of a loss function."""
    is_pair = isinstance(out, tuple | list) and len(out) == 2
    if has_aux and not is_pair:
        found = "the loss alone" if hasattr(out, "shape") else type(out).__name__
        raise TypeError(f"has_aux=True: loss_fn must return a pair (loss, aux), got {found}")
    if not has_aux and isinstance(out, tuple | list | Mapping):
        raise TypeError(
            f"loss_fn must return a scalar, got {type(out).__name__} of {len(out)}: if it returns "
            "(loss, aux), give has_aux=True"
        )
    return (out[0], out[1]) if has_aux else (out, None)


def check_differentiable(x: Any, name: str) -> None:
    """Raises ``TypeError`` unless ``x`` is real or complex, and so has a gradient."""
    dtype = jnp.result_type(x)
    if not jnp.issubdtype(dtype, jnp.inexact):
        raise TypeError(
            f"{name} has dtype {dtype}, which has no gradient: differentiate with respect to the "
            "parameters only. In Flax NNX these are the second part of nnx.split(model, "
            "nnx.Param, ...); optzoo.nnx_minimize accepts the module"
        )


def check_no_module(*args: Any) -> None:
    """Raises ``TypeError`` for a module of Flax NNX that holds more than parameters.

    Changes that the loss makes to it, such as the count of a random key, would be lost.
    """
    nnx = sys.modules.get("flax.nnx")  # who has a module has imported it
    for module in args:
        if nnx is None or not isinstance(module, nnx.Module):
            continue
        is_variable = lambda x: isinstance(x, nnx.Variable)
        for path, x in leaves_with_path(module, is_leaf=is_variable):
            if not isinstance(x, nnx.Param):
                raise TypeError(
                    f"'{path_name(path)}' of the {type(module).__name__} is not an nnx.Param: use "
                    "optzoo.nnx_minimize(loss_fn), or differentiate with respect to the second "
                    "part of nnx.split(model, nnx.Param, ...)"
                )


def _name(path: Any, which: Sequence[int]) -> str:
    """The path of a leaf in its argument, and the argument unless there is only one with paths."""
    inner, argument = path_name(path[1:]), f"argument {which[path[0].idx]}"
    if not inner:
        return argument
    return f"'{inner}'" if len(which) == 1 else f"'{inner}' of {argument}"


def table_of(table: Any) -> Any:
    """The array, also that of a variable of Flax or of another library.

    Raises:
        TypeError: if it is not an array or a variable that holds one.
        ValueError: if it is a scalar.
    """
    held = table
    if not isinstance(table, jax.Array | np.ndarray | list | tuple | str | Mapping):
        held = table[...] if hasattr(table, "__getitem__") else getattr(table, "value", None)
    if not isinstance(held, jax.Array | np.ndarray):
        raise TypeError(f"table must be an array or a variable that holds one, got {type(table)}")
    if held.ndim == 0:
        raise ValueError("table must have at least one dimension, got a scalar")
    return held


def check_range(ids: Any, num_rows: int) -> None:
    """Raises ``IndexError`` if ids are concrete and out of range."""
    if any(isinstance(i, jax.core.Tracer) for i in jax.tree.leaves(ids)):
        return
    ids = np.asarray(jax.device_get(ids))
    bad = (ids < 0) | (ids > num_rows)
    if bad.any():
        first = ids[bad].flat[0]
        fix = f": jnp.where(ids < 0, {num_rows}, ids) makes it padding" if first < 0 else ""
        raise IndexError(
            f"ids must be in [0, {num_rows}), or {num_rows} for padding, got {first}{fix}"
        )
