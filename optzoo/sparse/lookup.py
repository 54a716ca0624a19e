"""Embedding lookups whose gradient is row-sparse.

``value_and_grad`` traces the loss once. In its jaxpr it finds the lookups of the differentiated
arguments, and the gathers of rows that count as such (``wanted.py``), and evaluates it with a
*tap*, an array of zeros, added to the rows of each, which are read from an undifferentiated copy
(``jaxprs/taps.py``). The gradient of the tap is the gradient of the rows, so no dense gradient is
ever made. The same jaxpr tells which of the tables are used in any other way too
(``jaxprs/dense_uses.py``).
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
    only read by lookups becomes :class:`optzoo.SparseRows`. Everywhere else, and for tables that
    are also used in another way (tied weights), it is the usual dense gradient. ``table`` may be a
    cast of such a table, ``params["table"].astype(...)``: then the rows are cast instead.

    The gradient of a large table is row-sparse there with ``table[ids]``, too. A lookup differs
    from it in three ways: the table may have any size, there is an id for padding, and wrong ids
    do not pass for others.

    The id ``len(table)`` is padding: it reads zeros and has no gradient. Where ids are padded with
    -1, replace it: ``ids = jnp.where(ids < 0, len(table), ids)``. Any other id outside
    ``[0, len(table))`` is an error if the ids are concrete; if they are traced, it reads NaN, so
    that it cannot go unnoticed. Negative ids do not count from the end, and ids are not clipped.

    Works under ``jax.vmap``, and inside the loss also in the body of a ``jit``, a ``checkpoint``, a
    ``scan``, a ``cond`` or an inner ``grad``. The gradient is dense where a ``while_loop``, a
    ``shard_map``, a ``jit`` with shardings, or a function of ``custom_jvp`` or ``custom_vjp`` takes
    the table itself, and where a ``vmap`` or a ``scan`` takes a slice of it in each step:
    do the lookup before. :func:`optzoo.value_and_grad` warns of it.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> loss = lambda table: jnp.sum(optzoo.lookup(table, jnp.array([0, 2])) ** 2)
        >>> value, gradient = optzoo.value_and_grad(loss)(jnp.ones((3, 2)))
        >>> print(gradient.indices, gradient.values.tolist())
        [0 2] [[2.0, 2.0], [2.0, 2.0]]

    Args:
        table: an array of shape ``(num_rows, *row_shape)``; or a variable that holds one, such as
            an ``nnx.Param`` or a linen variable: of an object that is not an array, ``table[...]``
            is read, or ``table.value`` if it has no ``[...]``.
        ids: integers of any shape: an array, a number or a (nested) list.
        out_sharding: a ``PartitionSpec``, or a ``NamedSharding``, of the rows on a mesh with
            explicit axes. By default rows are divided as their ids, and along their own axes as
            those of the table, where these are other axes of the mesh.

    Returns:
        The rows, of shape ``ids.shape + row_shape``.

    Raises:
        TypeError: if the ids are not integers; if the table neither is nor holds an array, or is
            reduced along an axis of a mesh.
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

    A table gets :class:`optzoo.SparseRows` (one row for each id that is read, repeats included) if
    ``loss_fn`` reads it by :func:`optzoo.lookup` alone; or, if it has at least ``min_rows`` rows,
    by lookups and by gathers of whole rows: ``table[ids]``, ``jnp.take(table, ids, axis=0)``,
    ``table.at[ids].get()``, ``jax.lax.dynamic_index_in_dim``, and what makes the same operations,
    such as the ``Embed`` of Flax. They have the values and the gradient that JAX gives them, also
    for ids out of range. Everything else gets what ``jax.value_and_grad`` would give. ``loss_fn``
    is called once. Use it under ``jit``: otherwise JAX allocates a dense gradient of zeros and
    discards it.

    If such a table is used in any other way too (tied weights), or read where :func:`optzoo.lookup`
    names it, it gets its correct dense gradient, which costs time and memory in proportion to the
    table, and a :class:`DenseGradientWarning` with the reason and the line. A use of
    ``jax.lax.stop_gradient(table)`` does not count, nor does one by the auxiliary data.

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
        has_aux: whether ``loss_fn`` returns auxiliary data too.
        sparse: where the gradient of such a table is dense, ``"warn"`` gives a
            :class:`DenseGradientWarning` in every trace, ``"require"`` raises, and ``"allow"``
            does neither. Or a dict of these by patterns of names (:func:`optzoo.param_groups`),
            with ``"warn"`` for all others; of several arguments, the name begins with the position
            in ``argnums``. A parameter that a pattern requires is a table of any size, and its
            gradient must be rows, whatever reads it.
        min_rows: the number of rows from which gathers count. Smaller tables, such as those of
            positions, and biases that are read by index keep dense gradients.
        allow_int: whether integers and booleans may be among what is differentiated. As in JAX
            their gradients have the dtype ``float0``; optimizers want None instead.

    Returns:
        A function of the arguments of ``loss_fn`` giving ``(value, gradients)`` or
        ``((value, aux), gradients)``.

    Raises:
        TypeError: if a pattern is no string, ``min_rows`` no int, or ``allow_int`` no bool; at
            trace time, where ``jax.value_and_grad`` would raise it, or if ``loss_fn`` does not
            return what ``has_aux`` says.
        ValueError: if ``sparse`` is none of these, or ``min_rows`` is not positive; at trace time
            if an argument to differentiate is not given by position, if a pattern matches no
            parameter or two match one, or if a gradient is dense that ``sparse`` requires as rows.
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
    """The loss and the auxiliary data, None without, of what a loss function has returned."""
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
    """Raises ``TypeError`` unless ``x`` has a gradient: it is real or complex."""
    dtype = jnp.result_type(x)
    if not jnp.issubdtype(dtype, jnp.inexact):
        raise TypeError(
            f"{name} has dtype {dtype}, which has no gradient: differentiate with respect to the "
            "parameters alone. Of a module of Flax NNX these are the second part of "
            "nnx.split(model, nnx.Param, ...); optzoo.nnx_minimize takes the module"
        )


def check_no_module(*args: Any) -> None:
    """Raises ``TypeError`` for a module of Flax NNX that holds more than parameters.

    What the loss changes in it, such as the count of a random key, would be lost.
    """
    nnx = sys.modules.get("flax.nnx")  # who has a module has imported it
    for module in args:
        if nnx is None or not isinstance(module, nnx.Module):
            continue
        is_variable = lambda x: isinstance(x, nnx.Variable)
        for path, x in leaves_with_path(module, is_leaf=is_variable):
            if not isinstance(x, nnx.Param):
                raise TypeError(
                    f"'{path_name(path)}' of the {type(module).__name__} is no nnx.Param: use "
                    "optzoo.nnx_minimize(loss_fn), or differentiate with respect to the second "
                    "part of nnx.split(model, nnx.Param, ...)"
                )


def _name(path: Any, which: Sequence[int]) -> str:
    """The path of a leaf in its argument; of several arguments, or of a bare one, which it is."""
    inner, argument = path_name(path[1:]), f"argument {which[path[0].idx]}"
    if not inner:
        return argument
    return f"'{inner}'" if len(which) == 1 else f"'{inner}' of {argument}"


def table_of(table: Any) -> Any:
    """The array itself, or the one that a variable of Flax or of another library holds.

    Raises:
        TypeError: if it neither is nor holds an array.
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
    """Raises ``IndexError`` if ids, as they are given, are known and out of range."""
    if any(isinstance(i, jax.core.Tracer) for i in jax.tree.leaves(ids)):
        return
    ids = np.asarray(jax.device_get(ids))
    bad = (ids < 0) | (ids > num_rows)
    if bad.any():
        first = ids[bad].flat[0]
        fix = f": jnp.where(ids < 0, {num_rows}, ids) makes it padding" if first < 0 else ""
        raise IndexError(
            f"ids must lie in [0, {num_rows}) or be {num_rows} for padding, got {first}{fix}"
        )
