"""Embedding lookups whose gradient is row-sparse.

:func:`value_and_grad` traces the loss once. In its jaxpr it finds the lookups of the differentiated
arguments, and evaluates it with a *tap*, an array of zeros, added to the rows of each lookup, which
are read from an undifferentiated copy (``taps.py``). The gradient of the tap is the gradient of the
rows, so no dense gradient is ever made. The same jaxpr tells which of the tables are used in any
other way too (``dense_uses.py``).
"""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..core.compat import evaluate, needed_part, used_inputs
from ..core.lines import is_lines
from ..core.paths import path_name
from ..core.rows import SparseRows
from . import taps as taps_of
from .dense_uses import why_dense, without_stop_gradient
from .primitive import bind_lookup

Sparse = Literal["warn", "require", "allow"]


class DenseGradientWarning(UserWarning):
    """The gradient of a looked-up table is dense, for the reason given.

    Example:
        >>> import warnings
        >>> import jax.numpy as jnp, optzoo
        >>> tied = lambda table: jnp.sum(optzoo.lookup(table, jnp.array([0])) @ table.T)
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     value, gradient = optzoo.value_and_grad(tied)(jnp.ones((3, 2)))
        >>> print(caught[0].category.__name__, gradient.shape)
        DenseGradientWarning (3, 2)
    """


def lookup(table: Any, ids: Any) -> Array:
    """``table[ids]`` for integer ids of any shape, with a row-sparse gradient.

    Inside a loss differentiated by :func:`optzoo.value_and_grad`, the gradient of a table that is
    only read by lookups becomes :class:`optzoo.SparseRows`. Everywhere else, and for tables that
    are also used in another way (tied weights), it is the usual dense gradient. ``table`` may be a
    cast of such a table, ``params["table"].astype(...)``: then the rows are cast instead.

    The id ``len(table)`` is padding: it reads zeros and has no gradient. Any other id outside
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

    Returns:
        The rows, of shape ``ids.shape + row_shape``.

    Raises:
        TypeError: if the ids are not integers, or the table neither is nor holds an array.
        ValueError: if the table is a scalar; or, inside a ``shard_map`` that checks replication,
            if a replicated table is looked up at ids that differ between replicas.
        IndexError: if a concrete id is out of range.
    """
    in_lines = table.shape if is_lines(table) else None
    table = table.value if is_lines(table) else _array_of(table)
    if isinstance(ids, list | tuple):
        known = not any(isinstance(i, jax.core.Tracer) for i in jax.tree.leaves(ids))
        ids = np.asarray(ids) if known else jnp.asarray(ids)
    if jnp.ndim(table) == 0:
        raise ValueError("table must have at least one dimension, got a scalar")
    if not jnp.issubdtype(jnp.result_type(ids), jnp.integer):
        raise TypeError(f"ids must be integers, got dtype {jnp.result_type(ids)}")
    if not isinstance(ids, jax.core.Tracer):
        _check_range(ids, (in_lines or table.shape)[0])
    return bind_lookup(table, jnp.asarray(ids), in_lines=in_lines)


def value_and_grad(
    loss_fn: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    sparse: Sparse = "warn",
) -> Callable[..., Any]:
    """``jax.value_and_grad`` whose gradients of looked-up tables are SparseRows.

    A table that ``loss_fn`` reads by :func:`optzoo.lookup` alone gets
    :class:`optzoo.SparseRows` (one row for each id looked up, repeats included); everything else
    gets what ``jax.value_and_grad`` would give. ``loss_fn`` is called once. Use it under ``jit``:
    otherwise JAX allocates a dense gradient of zeros and discards it.

    A table that is looked up and used in any other way too (tied weights), looked up where
    :func:`optzoo.lookup` names it, or of which rows are read by ``table[ids]`` or ``jnp.take``
    alone, fewer than it has, gets its correct dense gradient, which costs time and memory in
    proportion to the table, and a :class:`DenseGradientWarning` with the reason. A use
    of ``jax.lax.stop_gradient(table)`` does not count, nor does one by the auxiliary data.

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
            does neither.

    Returns:
        A function of the arguments of ``loss_fn`` giving ``(value, gradients)`` or
        ``((value, aux), gradients)``.

    Raises:
        TypeError: at trace time, where ``jax.value_and_grad`` would raise it, or if ``loss_fn``
            does not return what ``has_aux`` says.
        ValueError: if ``sparse`` is none of the three; at trace time if an argument to
            differentiate is not given by position, or if ``sparse="require"`` and a gradient is
            dense.
    """
    if sparse not in get_args(Sparse):
        raise ValueError(f"sparse must be one of {list(get_args(Sparse))}, got {sparse!r}")
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
        flat, treedef = jax.tree.flatten(chosen)

        def call(leaves):
            full_args = list(args)
            for i, arg in zip(which, treedef.unflatten(leaves), strict=True):
                full_args[i] = arg
            return value_and_aux(loss_fn(*full_args, **kwargs), has_aux)

        for i, x in enumerate(flat):
            check_differentiable(x, lambda i=i: _name(chosen, which, i))
        loss = trace_loss(call, flat)
        if sparse != "allow":
            for i, reason in loss.dense_tables():
                report_dense(_name(chosen, which, i), reason, sparse)
        value, aux, grads, _ = loss.differentiate(flat)
        grads = treedef.unflatten(grads)
        return (value, aux) if has_aux else value, grads[0] if isinstance(argnums, int) else grads

    return wrapped


class Loss(NamedTuple):
    """A loss as a jaxpr, whose inputs are the leaves, their copies and the taps."""

    jaxpr: Any  # its outputs are the value, the arrays of the auxiliary data, and the ids
    consts: Sequence[Any]
    of_value: Any  # the jaxpr that gives the value alone, without what a stop_gradient hides
    uses: list[bool]  # for each leaf whether the value depends on it in another way than by taps
    lookups: list[taps_of.Lookup]
    elsewhere: frozenset[int]  # the leaves whose rows are the taps
    rebuild: Callable[[Sequence[Any]], tuple[Any, Any]]  # of arrays the value and auxiliary data

    def dense_tables(self) -> list[tuple[int, str]]:
        """The leaves of which rows are read and whose gradient is dense, with the reasons."""
        has_taps = {found.leaf for found in self.lookups}
        variables = zip(self.of_value.invars, self.uses, strict=False)
        used = [(i, v) for i, (v, is_used) in enumerate(variables) if is_used]
        reasons = {i: why_dense(self.of_value, v, i in has_taps) for i, v in used}
        tables = [taps_of.Table(i) for i in range(len(self.uses))]
        jaxpr = needed_part(self.of_value)
        more: list[Any] = [None] * (len(jaxpr.invars) - len(tables))
        reads = taps_of.make_plan(jaxpr, [*tables, *more]).reads
        for i, line in reads.rows.items():
            if i not in reads.others and reasons.get(i) is None:
                reasons[i] = (
                    f"they are read by indexing ({line}); read them by optzoo.lookup(table, ids)"
                )
        return [(i, reason) for i, reason in sorted(reasons.items()) if reason]

    def reads(self) -> list[bool]:
        """For each leaf whether anything reads it in another way than by taps."""
        return used_inputs(self.jaxpr)[: len(self.uses)]

    def ids(self, flat: Sequence[Array]) -> list[Array]:
        """The ids of each lookup of a leaf whose rows are elsewhere."""
        return self._ids(flat, _zeros(flat, self.lookups))

    def ids_depend_on_rows(self, flat: Sequence[Array]) -> bool:
        """Whether the ids of a lookup of a leaf whose rows are elsewhere depend on any rows."""
        jaxpr = jax.make_jaxpr(lambda taps: self._ids(flat, taps))(_zeros(flat, self.lookups))
        return any(used_inputs(jaxpr.jaxpr))

    def _ids(self, flat: Sequence[Array], taps: Sequence[Array]) -> list[Array]:
        outputs = self._outputs(flat, flat, taps)
        ids = outputs[len(outputs) - len(taps) :]
        return [
            x for x, found in zip(ids, self.lookups, strict=True) if found.leaf in self.elsewhere
        ]

    def differentiate(
        self, flat: Sequence[Array], rows: Sequence[Array] = ()
    ) -> tuple[Any, Any, list[Any], list[Array]]:
        """The value, the auxiliary data, the gradients, and those of rows that are elsewhere.

        Args:
            flat: the leaves.
            rows: of each lookup of a leaf whose rows are elsewhere.
        """
        mine = [k for k, found in enumerate(self.lookups) if found.leaf in self.elsewhere]
        given = dict(zip(mine, rows, strict=True))

        def tapped(leaves, taps):
            # What the value does not depend on is not differentiated, nor are the copies.
            leaves = [
                x if is_used else copy
                for x, copy, is_used in zip(leaves, flat, self.uses, strict=True)
            ]
            outputs = self._outputs(leaves, flat, taps)
            first = len(outputs) - len(taps)
            value, aux = self.rebuild(outputs[:first])
            return value, (aux, outputs[first:])

        gradients_of = jax.value_and_grad(tapped, argnums=(0, 1), has_aux=True)
        taps = [given.get(k, zeros) for k, zeros in enumerate(_zeros(flat, self.lookups))]
        (value, (aux, ids)), (of_leaves, of_taps) = gradients_of(flat, taps)
        for i in self._copies(flat):
            looked_up = [k for k, f in enumerate(self.lookups) if f.leaf == i]
            num_rows, *row_shape = self.lookups[looked_up[0]].table
            rows_of_leaf = SparseRows(
                jnp.concatenate([ids[k].reshape(-1) for k in looked_up]),
                jnp.concatenate([of_taps[k].reshape(-1, *row_shape) for k in looked_up]),
                num_rows,
                shard=next((self.lookups[k].shard for k in looked_up), None),
            )
            # Rows added to the gradient of the other uses: the correct dense gradient.
            of_leaves[i] = of_leaves[i] + rows_of_leaf if self.uses[i] else rows_of_leaf
        return value, aux, of_leaves, [of_taps[k] for k in mine]

    def _copies(self, flat: Sequence[Array]) -> dict[int, Array]:
        return _copies(flat, self.lookups, self.elsewhere)

    def _outputs(self, leaves: Sequence[Array], flat: Sequence[Array], taps: Sequence[Array]):
        copies = self._copies(flat).values()
        return evaluate(self.jaxpr, self.consts, [*leaves, *copies, *taps])


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


def check_differentiable(x: Any, name: Callable[[], str]) -> None:
    """Raises ``TypeError`` unless ``x`` has a gradient: it is real or complex."""
    dtype = jnp.result_type(x)
    if not jnp.issubdtype(dtype, jnp.inexact):
        raise TypeError(
            f"{name()} has dtype {dtype}, which has no gradient: differentiate with respect to the "
            "parameters alone. Of a module of Flax NNX these are the second part of "
            "nnx.split(model, nnx.Param, ...)"
        )


def trace_loss(
    call: Callable[[Sequence[Array]], tuple[Any, Any]],
    flat: Sequence[Array],
    elsewhere: Iterable[int] = (),
) -> Loss:
    """Traces a loss.

    Args:
        call: gives the value and the auxiliary data for the leaves.
        flat: the leaves.
        elsewhere: the positions of leaves that are not read: their rows are given later.
    """
    structure: list[Any] = []

    def arrays_of(leaves):
        value, aux = call(leaves)
        values, of_value = jax.tree.flatten(value)
        parts, of_aux = jax.tree.flatten(aux)
        # What is no tracer, such as a string, is the same in every evaluation.
        traced = [k for k, x in enumerate(parts) if isinstance(x, jax.core.Tracer)]
        fixed = {k: x for k, x in enumerate(parts) if k not in traced}

        def rebuild(arrays):
            known = fixed | dict(zip(traced, arrays[len(values) :], strict=True))
            aux = of_aux.unflatten([known[k] for k in range(len(parts))])
            return of_value.unflatten(arrays[: len(values)]), aux

        structure[:] = len(values), rebuild
        return [*values, *(parts[k] for k in traced)]

    closed = jax.make_jaxpr(arrays_of)(flat)
    num_values, rebuild = structure
    plan = taps_of.make_plan(closed.jaxpr, [taps_of.Table(i) for i in range(len(flat))])
    lookups, elsewhere = plan.lookups, frozenset(elsewhere)
    if lookups:
        tapped = lambda *args: taps_of.evaluate(plan, closed.consts, *args)
        copies = _copies(flat, lookups, elsewhere)
        closed = jax.make_jaxpr(tapped)(flat, copies, _zeros(flat, lookups))
    of_value = closed.jaxpr.replace(outvars=closed.jaxpr.outvars[:num_values])
    of_value = without_stop_gradient(of_value)
    uses = used_inputs(of_value)[: len(flat)]
    return Loss(closed.jaxpr, closed.consts, of_value, uses, lookups, elsewhere, rebuild)


def _copies(
    flat: Sequence[Array], lookups: Sequence[taps_of.Lookup], elsewhere: frozenset[int]
) -> dict[int, Array]:
    """By their positions the leaves that are looked up, and read."""
    return {i: flat[i] for i in sorted({found.leaf for found in lookups} - elsewhere)}


def _zeros(flat: Sequence[Array], lookups: Sequence[taps_of.Lookup]) -> list[Array]:
    """The taps."""
    # zeros_like keeps the type inside shard_map: along which axes the table varies.
    return [jnp.zeros_like(flat[found.leaf], shape=found.rows) for found in lookups]


def _name(chosen: tuple[Any, ...], which: Sequence[int], leaf: int) -> str:
    """The path of a leaf in its argument; of several arguments, or of a bare one, which it is."""
    path, _ = jax.tree_util.tree_leaves_with_path(chosen)[leaf]
    inner, argument = path_name(path[1:]), f"argument {which[path[0].idx]}"
    if not inner:
        return argument
    return f"'{inner}'" if len(which) == 1 else f"'{inner}' of {argument}"


def report_dense(name: str, reason: str, sparse: Sparse) -> None:
    """Warns of the dense gradient of a table of which rows are read, or raises ``ValueError``."""
    text = f"the gradient of {name} is dense, although rows of it are read: {reason}"
    if sparse == "require":
        raise ValueError(f"{text}. With sparse='allow' dense gradients are permitted")
    text = f"{text}. sparse='allow' silences this warning, sparse='require' makes it an error"
    warnings.warn(text, DenseGradientWarning, stacklevel=3)


def _array_of(table: Any) -> Any:
    """The array itself, or the one that a variable of Flax or of another library holds."""
    if isinstance(table, jax.Array | np.ndarray):
        return table
    if not isinstance(table, list | tuple | str | Mapping):
        held = table[...] if hasattr(table, "__getitem__") else getattr(table, "value", None)
        if isinstance(held, jax.Array | np.ndarray):
            return held
    raise TypeError(f"table must be an array or a variable that holds one, got {type(table)}")


def _check_range(ids: Any, num_rows: int) -> None:
    ids = np.asarray(jax.device_get(ids))
    bad = (ids < 0) | (ids > num_rows)
    if bad.any():
        raise IndexError(
            f"ids must lie in [0, {num_rows}) or be {num_rows} for padding, got {ids[bad].flat[0]}"
        )
