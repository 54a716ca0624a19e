"""Makes any row-wise optimizer, such as one of optax, lazy for row-sparse gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from ..core.gradients import check_gradients
from ..core.optimizer import About, Optimizer, recorded
from ..core.rows import is_rows, update_tree
from ..jaxprs.prove_rows import RowsOfState, rows_of_state
from ..rules.policies import lazy
from ..state.inner import fitting, inner_transformation
from ..state.stacks import is_stack


@recorded
def on_rows(
    inner: optax.GradientTransformation, *, check: bool = True
) -> optax.GradientTransformationExtraArgs:
    """Makes any row-wise optimizer lazy: it updates only the touched rows.

    Rows with repeated indices are summed. The touched rows of the parameters and the state are
    gathered and updated by ``inner`` as if they were the whole table, and the rows of the state are
    scattered back. Untouched rows and their state are unchanged. Dense gradients are passed to
    ``inner``. The state is that of ``inner``, so checkpoints are interchangeable.

    *Row-wise* means that the new value and state of a row depend on no other row, nor on the number
    of rows. Element-wise optimizers such as ``optax.adamw`` and ``optax.lion`` are row-wise, and so
    are norms within each row. Norms over the table (LAMB, clipping), factored statistics
    (Adafactor) and noise are not. This is verified from the operations of the update when it is
    traced, at no cost at run time; without ``jit``, once for each set of shapes. Wrappers that keep
    a gradient for a later step (``optax.MultiSteps``, ``apply_every``, ``lookahead``,
    ``contrib.sam``) are recognized by their states and refused.

    ``check=False`` skips the verification; only ``inner.init`` is traced, to find the arrays of the
    state that have rows. ``inner`` must then be row-wise, keep no gradient for a later step, and
    keep the shapes of updates and state; otherwise results are wrong without an error. A wrapper of
    your own that keeps gradients is not detected in either case.

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
        check: whether to verify that ``inner`` is row-wise. A new version of JAX may have
            primitives that the verification does not support; the error then names ``check=False``.

    Raises:
        TypeError: if ``inner`` is not a transformation; at trace time, if a gradient or its
            parameter has an integer or 8-bit dtype.
        ValueError: at trace time, if a SparseRows gradient is given and ``inner`` is not row-wise,
            if the shapes of a gradient and its parameter differ, if the state is that of another
            table, or if ``inner`` keeps the slots of the table in a stack. Errors of ``inner`` are
            raised with a note.
    """
    traced, inner = inner, inner_transformation(inner=inner)
    traced = optax.with_extra_args_support(traced)
    known = dict[Any, RowsOfState]()  # a cache: it depends on the shapes alone

    def update(updates, state, params=None, **extra_args):
        check_gradients(updates, params, allow_complex=True)
        gs, treedef = update_tree.flatten(updates)
        # A table without rows has none to gather, not even for padding.
        gs = [g.to_dense() if is_rows(g) and g.num_rows == 0 else g for g in gs]
        updates = treedef.unflatten(gs)
        if not any(map(is_rows, gs)):
            return inner.update(updates, state, params, **extra_args)
        key = _shapes((updates, params)), *sorted(extra_args)
        if key not in known:
            known[key] = rows_of_state(traced, updates, state, params, extra_args, check=check)
        return _update_rows(inner, known[key], (gs, treedef), state, params, extra_args)

    about = About(lazy, row_wise=check, reads=inner.about.reads)
    return fitting(Optimizer(inner.init, update, about))


def _update_rows(
    inner: optax.GradientTransformationExtraArgs,
    rows_of_state: RowsOfState,
    gradients: tuple[list[Any], Any],
    state: Any,
    params: Any,
    extra_args: dict[str, Any],
) -> tuple[Any, Any]:
    """An update of the touched rows, and of all parameters with dense gradients."""
    gs, treedef = gradients
    gs = [g.coalesce() if is_rows(g) else g for g in gs]
    state_def, owners = rows_of_state
    slots = state_def.flatten_up_to(state)
    gs_of_slots = [None if owner is None else gs[owner] for owner in owners]

    values = treedef.unflatten([g.values if is_rows(g) else g for g in gs])
    few = state_def.unflatten(map(_gather, gs_of_slots, slots))
    if params is not None:
        params = treedef.unflatten(map(_gather, gs, treedef.flatten_up_to(params)))
    new_values, new_few = inner.update(values, few, params, **extra_args)

    new_gs = map(_as_rows, gs, treedef.flatten_up_to(new_values))
    new_slots = map(_scatter, gs_of_slots, slots, state_def.flatten_up_to(new_few))
    return treedef.unflatten(new_gs), state_def.unflatten(new_slots)


def _shapes(tree: Any) -> Any:
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, *((jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)


# For a gradient ``g`` that is SparseRows; for others the array is returned as it is.


def _gather(g: Any, x: Any) -> Any:
    if not is_rows(g):
        return x
    if is_stack(x):
        raise ValueError(
            "optzoo.on_rows is around optzoo.stacked, which has put a table with a row-sparse "
            "gradient into a stack: keep tables out of the stacks by its mask or max_size"
        )
    if jnp.shape(x)[:1] != (g.num_rows,) and not g.in_lines(x):
        raise ValueError(
            f"a gradient of {g.num_rows} rows does not match an array of shape {jnp.shape(x)}"
        )
    return g.gather(x)


def _scatter(g: Any, x: Any, rows: Any) -> Any:
    return g.scatter(x, rows) if is_rows(g) else rows


def _as_rows(g: Any, update: Any) -> Any:
    return g.with_values(update).drop_padding() if is_rows(g) else update
