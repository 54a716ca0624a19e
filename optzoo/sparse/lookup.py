"""Embedding lookups whose gradient is row-sparse.

Inside :func:`value_and_grad` every leaf of the differentiated arguments is a tracer of its own.
:func:`lookup` recognizes such a leaf by its identity, reads the rows from an undifferentiated
copy, and adds a *tap*, an array of zeros. The gradient of the tap is the gradient of the rows, so
no dense gradient is ever made. A first, abstract trace finds the lookups; its jaxpr tells which
of the tables are used in any other way too, and which looked-up arrays are casts of a leaf. These
are recognized in later traces by their order.
"""

import contextvars
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.custom_batching import custom_vmap
from jax.dtypes import canonicalize_dtype

from ..core.compat import is_batched, trace_state, used_inputs, varying
from ..core.paths import path_name
from ..core.rows import SparseRows
from .dense_uses import SCOPE, find_casts, why_dense, without_stop_gradient

Sparse = Literal["warn", "require", "allow"]


class DenseGradientWarning(UserWarning):
    """The gradient of a looked-up table is dense, for the reason given."""


def lookup(table: Any, ids: Any) -> Array:
    """``table[ids]`` for integer ids of any shape, with a row-sparse gradient.

    Inside a loss differentiated by :func:`optzoo.value_and_grad`, the gradient of a table that is
    only read by lookups becomes :class:`optzoo.SparseRows`. Everywhere else, and for tables that
    are also used in another way (tied weights), it is the usual dense gradient. ``table`` may be a
    cast of such a table, ``params["table"].astype(...)``: then the rows are cast instead.

    The id ``len(table)`` is padding: it reads zeros and has no gradient. Any other id outside
    ``[0, len(table))`` is an error if the ids are concrete; if they are traced, it reads NaN, so
    that it cannot go unnoticed. Negative ids do not count from the end, and ids are not clipped.

    Works under ``jax.vmap``. In the body of a loop, a ``jit``, a ``checkpoint`` or a
    ``shard_map`` *inside* the loss, the gradient is dense: do the lookup before the loop.
    :func:`optzoo.value_and_grad` warns of it.

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
    if hasattr(table, "look_up"):  # a sharded table in the loss of sharded_minimize
        return table.look_up(ids)
    table = _array_of(table)
    if isinstance(ids, list | tuple):
        known = not any(isinstance(i, jax.core.Tracer) for i in jax.tree.leaves(ids))
        ids = np.asarray(ids) if known else jnp.asarray(ids)
    if jnp.ndim(table) == 0:
        raise ValueError("table must have at least one dimension, got a scalar")
    if not jnp.issubdtype(jnp.result_type(ids), jnp.integer):
        raise TypeError(f"ids must be integers, got dtype {jnp.result_type(ids)}")
    if not isinstance(ids, jax.core.Tracer):
        _check_range(ids, len(table))
    tape = _TAPE.get()
    # Ids that are arguments of the loss exist outside of the body of a loop in which they are used.
    # What a conversion makes of them there does not.
    is_input = tape is not None and id(ids) in tape.inputs
    if not is_input:
        ids = jnp.asarray(ids)
    leaf = None if tape is None else tape.leaf_of(table)
    if tape is None or leaf is None:
        return _read_densely(table, ids)
    # Whether the ids are concrete must not matter: the abstract trace and the run have to find
    # the same lookups.
    if is_input or trace_state() == tape.trace_state:
        return tape.read(leaf, ids).astype(table.dtype)
    if is_batched(ids):
        return _lookup_under_vmap(table)(ids)
    # In the body of a loop or the like the ids cannot be recorded.
    return _read_densely(table, ids)


class _Lookup(NamedTuple):
    leaf: int  # the position of the table among the leaves
    ids: Array
    shape: tuple[int, ...]  # of the rows


class _Found(NamedTuple):
    """What a trace of a loss finds."""

    log: list[_Lookup]
    others: list[Array]  # the tables of lookups outside of bodies that are not leaves
    casts: dict[int, int]  # by the position of a table among `others` the leaf that it is a cast of

    def places(self) -> tuple[Any, ...]:
        """What must be the same in every trace."""
        others = [(jnp.shape(table), jnp.result_type(table)) for table in self.others]
        return [(entry.leaf, entry.shape) for entry in self.log], others, self.casts


class _Tape:
    """Records the lookups of one run of a loss.

    Args:
        leaves: by the identity of each differentiated leaf its position.
        copies: the undifferentiated leaves.
        inputs: the identities of all arrays among the arguments: as ids they can be recorded from
            any body in which the loss uses them.
        casts: as in :class:`_Found`.
        taps: what to add to the rows of each lookup in turn; None to find their shapes.
    """

    def __init__(
        self,
        leaves: dict[int, int],
        copies: Sequence[Array],
        inputs: set[int],
        casts: dict[int, int],
        taps: Sequence[Array] | None,
    ):
        self.leaves, self.copies, self.inputs, self.taps = leaves, copies, inputs, taps
        self.found = _Found([], [], casts)
        self.trace_state = trace_state()

    def leaf_of(self, table: Array) -> int | None:
        """The leaf that a table is, or is a cast of."""
        if id(table) in self.leaves or trace_state() != self.trace_state:
            return self.leaves.get(id(table))
        others = self.found.others
        if not any(other is table for other in others):
            others.append(table)
        number = next(k for k, other in enumerate(others) if other is table)
        return self.found.casts.get(number)

    def read(self, leaf: int, ids: Array) -> Array:
        copy, log = self.copies[leaf], self.found.log
        rows = _read(copy, ids)
        if axes := varying(rows) - varying(copy):
            raise ValueError(
                f"the ids differ along the mesh axes {sorted(axes)} but the table does not: its "
                "gradient would be a sum over replicas, which rows cannot express. Make the table "
                "varying with jax.lax.pcast(table, axes, to='varying') and aggregate its rows, "
                "or use shard_map(..., check_vma=False)"
            )
        log.append(_Lookup(leaf, ids, rows.shape))
        if self.taps is None:
            return rows
        if len(log) > len(self.taps) or self.taps[len(log) - 1].shape != rows.shape:
            raise ValueError(_DIFFERENT)
        return rows + self.taps[len(log) - 1]


_DIFFERENT = (
    "loss_fn must do the same lookups whenever it is called, since value_and_grad traces it more "
    "than once. In a second trace it looked up other tables or other numbers of rows: make it "
    "independent of what changes between calls, such as a counter, a cache or random numbers of "
    "Python"
)
_TAPE = contextvars.ContextVar[_Tape | None]("tape", default=None)


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
    gets what ``jax.value_and_grad`` would give. The loss is traced twice, or three times if it
    looks up a cast of a table. Use it under ``jit``: otherwise JAX allocates a dense gradient of
    zeros and discards it.

    A table that is looked up and used in any other way too (tied weights), or looked up where
    :func:`optzoo.lookup` cannot record it, gets its correct dense gradient, which costs time and
    memory in proportion to the table, and a :class:`DenseGradientWarning` with the reason. A use
    of ``jax.lax.stop_gradient(table)`` does not count, nor does one by the auxiliary data.

    Args:
        loss_fn: returns a scalar, or ``(scalar, aux)``.
        argnums: which positional arguments to differentiate.
        has_aux: whether ``loss_fn`` returns auxiliary data too.
        sparse: where the gradient of a looked-up table is dense, ``"warn"`` gives a
            :class:`DenseGradientWarning` in every trace, ``"require"`` raises, and ``"allow"``
            does neither.

    Returns:
        A function of the arguments of ``loss_fn`` giving ``(value, gradients)`` or
        ``((value, aux), gradients)``.

    Raises:
        TypeError: at trace time, where ``jax.value_and_grad`` would raise it.
        ValueError: if ``sparse`` is none of the three; at trace time if two traces of the loss do
            different lookups, or if ``sparse="require"`` and a gradient is dense.
    """
    if sparse not in get_args(Sparse):
        raise ValueError(f"sparse must be one of {list(get_args(Sparse))}, got {sparse!r}")
    which = (argnums,) if isinstance(argnums, int) else tuple(argnums)

    def wrapped(*args, **kwargs):
        chosen = tuple(args[i] for i in which)
        flat, treedef = jax.tree.flatten(chosen)

        def call(leaves):
            full_args = list(args)
            for i, arg in zip(which, treedef.unflatten(leaves), strict=True):
                full_args[i] = arg
            out = loss_fn(*full_args, **kwargs)
            return out if has_aux else (out, None)

        inputs = {id(x) for x in jax.tree.leaves((args, kwargs)) if hasattr(x, "dtype")}
        loss = _Loss(call, flat, inputs)
        found, jaxpr = loss.find()
        is_tied = used_inputs(jaxpr)
        if sparse != "allow":
            recorded = {entry.leaf for entry in found.log}
            for i in (i for i, tied in enumerate(is_tied) if tied):
                if reason := why_dense(jaxpr, jaxpr.invars[i], i in recorded):
                    _report(_name(chosen, which, i), reason, sparse)
        value, aux, of_leaves, of_tables = loss.differentiate(found)
        for i, rows in of_tables.items():
            # Rows added to the gradient of the other uses: the correct dense gradient.
            of_leaves[i] = of_leaves[i] + rows if is_tied[i] else rows
        grads = treedef.unflatten(of_leaves)
        return (value, aux) if has_aux else value, grads[0] if isinstance(argnums, int) else grads

    return wrapped


class _Loss(NamedTuple):
    """A loss as a function of the leaves of its differentiated arguments."""

    call: Callable[[Sequence[Array]], tuple[Any, Any]]  # returns the value and auxiliary data
    flat: Sequence[Array]  # the leaves
    inputs: set[int]  # as in _Tape

    def run(self, leaves, casts, taps=None) -> tuple[Any, Any, _Found]:
        """The value, the auxiliary data and what was found; the arguments are as in `_Tape`."""
        by_id = {id(x): i for i, x in enumerate(leaves)}
        tape = _Tape(by_id, self.flat, self.inputs, casts, taps)
        token = _TAPE.set(tape)
        try:
            value, aux = self.call(leaves)
        finally:
            _TAPE.reset(token)
        return value, aux, tape.found

    def find(self) -> tuple[_Found, Any]:
        """The lookups of the loss, and its jaxpr, in which a lookup does not read the table."""
        found, jaxpr, casts = self._find({})
        if casts:
            found, jaxpr, again = self._find(casts)
            if again != casts:
                raise ValueError(_DIFFERENT)
        return found, jaxpr

    def _find(self, casts: dict[int, int]) -> tuple[_Found, Any, dict[int, int]]:
        """As :meth:`find` with the casts that are known, and the casts that are found."""
        found = _Found([], [], {})

        def value_of(leaves):
            nonlocal found
            value, _, found = self.run(leaves, casts)
            return found.others, value

        # A lookup reads the copy, so the value depends on what is used in any other way.
        jaxpr = jax.make_jaxpr(value_of)(self.flat).jaxpr
        number = len(found.others)
        casts = find_casts(jaxpr, jaxpr.outvars[:number])
        jaxpr = jaxpr.replace(outvars=jaxpr.outvars[number:])
        return found, without_stop_gradient(jaxpr), casts

    def differentiate(self, found: _Found) -> tuple[Any, Any, list[Any], dict[int, SparseRows]]:
        """The value, the auxiliary data, the gradients but for lookups, and those of lookups."""

        def tapped(leaves, taps):
            value, aux, again = self.run(leaves, found.casts, taps)
            if again.places() != found.places():
                raise ValueError(_DIFFERENT)
            return value, (aux, [entry.ids for entry in again.log])

        log = found.log
        # zeros_like keeps the type inside shard_map: along which axes the table varies.
        taps = [jnp.zeros_like(self.flat[entry.leaf], shape=entry.shape) for entry in log]
        gradients_of = jax.value_and_grad(tapped, argnums=(0, 1), has_aux=True)
        (value, (aux, ids)), (of_leaves, of_taps) = gradients_of(self.flat, taps)
        of_tables = {}
        for i in dict.fromkeys(entry.leaf for entry in log):
            x, mine = self.flat[i], [k for k, entry in enumerate(log) if entry.leaf == i]
            of_tables[i] = SparseRows(
                jnp.concatenate([ids[k].reshape(-1) for k in mine]),
                jnp.concatenate([of_taps[k].reshape(-1, *x.shape[1:]) for k in mine]),
                x.shape[0],
            )
        return value, aux, of_leaves, of_tables


def _name(chosen: tuple[Any, ...], which: Sequence[int], leaf: int) -> str:
    """The path of a leaf in its argument; of several arguments, or of a bare one, which it is."""
    path, _ = jax.tree_util.tree_leaves_with_path(chosen)[leaf]
    inner, argument = path_name(path[1:]), f"argument {which[path[0].idx]}"
    if not inner:
        return argument
    return f"'{inner}'" if len(which) == 1 else f"'{inner}' of {argument}"


def _report(name: str, reason: str, sparse: Sparse) -> None:
    text = f"the gradient of {name} is dense, although this table is looked up: {reason}"
    if sparse == "require":
        raise ValueError(f"{text}. With sparse='allow' dense gradients are permitted")
    text = f"{text}. sparse='allow' silences this warning, sparse='require' makes it an error"
    warnings.warn(text, DenseGradientWarning, stacklevel=3)


def _read_densely(table: Array, ids: Array) -> Array:
    with jax.named_scope(SCOPE):
        return _read(table, ids)


def _read(table: Array, ids: Array) -> Array:
    num_rows = table.shape[0]
    ids = ids.astype(canonicalize_dtype(jnp.promote_types(ids.dtype, jnp.int32)))
    rows = jnp.take(table, jnp.where(ids < 0, num_rows + 1, ids), axis=0, mode="fill")
    is_padding = (ids == num_rows).reshape(ids.shape + (1,) * (table.ndim - 1))
    return jnp.where(is_padding, 0, rows)


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


def _lookup_under_vmap(table: Array) -> Callable[[Array], Array]:
    """Looks up the ids of all members of a vmap at once, outside of it."""
    read = custom_vmap(lambda ids: _read_densely(table, ids))

    @read.def_vmap
    def _(axis_size, in_batched, ids):
        del axis_size
        return lookup(table, ids), in_batched[0]

    return read
