"""Makes an optimizer of optax, or any other, lazy on row-sparse gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from ..core.paths import is_sparse_or_none
from ..core.rows import is_rows
from .rowwise_check import RowsOfState, rows_of_state


def on_rows(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Makes any row-wise optimizer lazy: it sees, and pays for, only the touched rows.

    Repeated indices are summed. The touched rows of the parameters and of the state are gathered,
    updated by ``inner`` as if they were the whole table, and the rows of the state scattered
    back. The rows that no index names stand still, with all their state. Other gradients are
    left to ``inner``, and the state is that of ``inner``, so checkpoints move both ways.

    *Row-wise* means that what becomes of a row depends on no other row, nor on how many there
    are. Element-wise optimizers such as ``optax.adamw`` and ``optax.lion`` are row-wise, and so is
    a norm within each row. A norm over the table (LAMB, clipping), factored statistics (Adafactor)
    and noise are not. This is read off the operations of the update when it is traced, with no
    cost at run time; without ``jit``, once for each set of shapes. Wrappers that keep a gradient
    for a later step (``optax.MultiSteps``, ``apply_every``, ``lookahead``, ``contrib.sam``) are
    refused by name; one of your own must not do it.

    Example:
        >>> import jax.numpy as jnp, optax, optzoo
        >>> params = jnp.ones((5, 2))
        >>> tx = optzoo.on_rows(optax.adamw(0.1))
        >>> rows = optzoo.SparseRows(jnp.array([3, 3]), jnp.ones((2, 2)), num_rows=5)
        >>> updates, state = tx.update(rows, tx.init(params), params)
        >>> jnp.flatnonzero(optax.apply_updates(params, updates)[:, 0] < 1).tolist()
        [3]

    Args:
        inner: any optax transformation.

    Raises:
        ValueError: at trace time, if a SparseRows gradient is given and ``inner`` is not row-wise,
            or if the gradient has another number of rows than its parameter or state. An error
            of ``inner`` itself passes, with a note.
    """
    inner = optax.with_extra_args_support(inner)
    # A memory, not a state: the same shapes would give the same again.
    known = dict[Any, RowsOfState]()

    def update(updates, state, params=None, **extra_args):
        gs, treedef = jax.tree.flatten(updates, is_leaf=is_sparse_or_none)
        # A table without rows has none to gather, not even for padding.
        gs = [g.to_dense() if is_rows(g) and g.num_rows == 0 else g for g in gs]
        updates = treedef.unflatten(gs)
        if not any(map(is_rows, gs)):
            return inner.update(updates, state, params, **extra_args)
        shapes = _shapes((updates, params)), *sorted(extra_args)
        if shapes not in known:
            known[shapes] = rows_of_state(inner, updates, state, params, extra_args)
        state_def, owners = known[shapes]

        gs = [g.coalesce() if is_rows(g) else g for g in gs]
        slots = state_def.flatten_up_to(state)
        of_slots = [None if place is None else gs[place] for place in owners]
        values = treedef.unflatten([g.values if is_rows(g) else g for g in gs])
        few = state_def.unflatten(map(_gather, of_slots, slots))
        xs = params
        if params is not None:
            xs = treedef.unflatten(map(_gather, gs, treedef.flatten_up_to(params)))
        us, new = inner.update(values, few, xs, **extra_args)
        us = map(_at_places, gs, treedef.flatten_up_to(us))
        slots = map(_scatter, of_slots, slots, state_def.flatten_up_to(new))
        return treedef.unflatten(us), state_def.unflatten(slots)

    return optax.GradientTransformationExtraArgs(inner.init, update)


def _shapes(tree: Any) -> Any:
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, *((jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)


# Of a leaf ``g`` that is SparseRows; the leaves of ordinary gradients pass.


def _gather(g: Any, x: Any) -> Any:
    if not is_rows(g):
        return x
    if jnp.shape(x)[:1] != (g.num_rows,):
        raise ValueError(f"a gradient of {g.num_rows} rows does not fit an array of {jnp.shape(x)}")
    return g.gather(x)


def _scatter(g: Any, x: Any, rows: Any) -> Any:
    return g.scatter(x, rows) if is_rows(g) else rows


def _at_places(g: Any, update: Any) -> Any:
    return g.with_values(update).drop_padding() if is_rows(g) else update
