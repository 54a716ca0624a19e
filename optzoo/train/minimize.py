"""The whole train step of a plain loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import optax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from ..deferred.catch_up import check_no_guard
from ..native.step import Native
from ..sharded.row_sharding import RowSharding
from ..sparse.wanted import MIN_ROWS, Sparse
from .deferred import tables_for
from .jitted import Jitted
from .on_mesh import OnMesh
from .sharded import CapacityFactor
from .step import Model, train_step


def minimize(
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    has_aux: bool = False,
    *,
    mesh: Mesh | None = None,
    tables: Mapping[str, RowSharding] | None = None,
    capacity_factor: CapacityFactor = "auto",
    max_norm: float | None = None,
    transport: DTypeLike | None = None,
    parts: int = 1,
    sparse: Sparse | Mapping[str, Sparse] = "warn",
    min_rows: int = MIN_ROWS,
    native: Native = False,
) -> Callable[..., Any]:
    """A compiled train step: the counterpart of TensorFlow's ``Optimizer.minimize``.

    Gradients of tables read by :func:`optzoo.lookup`, and of large tables read by gathers of whole
    rows such as ``table[ids]``, are SparseRows, as in :func:`optzoo.value_and_grad`. If an update
    by ``tx`` with such rows raises an error when it is traced, gathers keep dense gradients.
    Parameters and state are donated: the step updates them in place, and the arrays passed in must
    not be used again.

    With ``mesh=`` the batch is divided over its devices, and the mean of their losses is minimized:
    data-parallel training. Tables that ``tables=`` names are sharded by rows: all that is said of
    :func:`optzoo.sharded_minimize` holds. Put parameters and state on the mesh before, such as by
    ``jax.device_put(params, NamedSharding(mesh, PartitionSpec()))``: otherwise the second step,
    whose arguments are there, is compiled again.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> params = {"table": jnp.ones((6, 2))}
        >>> loss = lambda p, ids: jnp.sum(optzoo.lookup(p["table"], ids) ** 2)
        >>> tx = optzoo.lazy_adam(0.1)
        >>> step, state = optzoo.minimize(loss, tx), tx.init(params)
        >>> params, state, value = step(params, state, jnp.array([0, 3]))
        >>> float(value)
        4.0

    Args:
        loss_fn: ``loss_fn(params, *batch)`` returns a scalar, or ``(scalar, aux)``.
        tx: any optax transformation; put :func:`optzoo.rows.densify` before one that does not
            support SparseRows.
        has_aux: whether ``loss_fn`` returns auxiliary data too.
        mesh: of the devices that share a step; None for a step without ``shard_map``.
        tables: with a mesh, by a pattern of names (:func:`optzoo.param_groups`) the sharding of a
            table. All other parameters are replicated.
        capacity_factor: with a mesh, as in :func:`optzoo.sharded_minimize`.
        max_norm: with a mesh, as in :func:`optzoo.sharded_minimize`.
        transport: with a mesh, as in :func:`optzoo.sharded_minimize`.
        parts: with a mesh, as in :func:`optzoo.sharded_minimize`.
        sparse: what to do where rows of a table are read and its gradient is dense: ``"warn"``,
            ``"require"`` (an error) or ``"allow"``; or a dict of these by patterns, as in
            :func:`optzoo.value_and_grad`.
        min_rows: as in :func:`optzoo.value_and_grad`.
        native: whether the optimizer runs as native loops on the CPU, as in
            :func:`optzoo.native_step`; with ``"require"`` it is an error if not all of it does.

    Raises:
        TypeError: if ``tx`` is no transformation; at trace time, if nothing in ``tx`` reads one
            of the extra args.
        ValueError: as :func:`optzoo.value_and_grad`, and with a mesh as
            :func:`optzoo.sharded_minimize`; if an argument for a mesh comes without it, or if
            ``native`` is none of these; at trace time,
            if ``state`` is not one of ``tx`` for these parameters, if something in ``tx`` changes
            an update of :func:`optzoo.caught_up`, or if native code is required and XLA updates
            some arrays.
        RuntimeError: at trace time, if native code is required and cannot run.

    Returns:
        ``step(params, state, *batch, **extra_args) -> (params, state, loss)``, with ``aux`` as a
        fourth if ``has_aux``. The extra args, trees of arrays, go to ``tx.update``,
        which must read them. With a mesh the arrays of ``batch`` are divided along their first axis
        over all axes of the mesh, and each array of ``aux`` has one more leading axis over the
        devices.
    """
    model = Model.of(loss_fn, tx, has_aux, sparse, min_rows, native)
    on_mesh = OnMesh.of(
        mesh,
        tables=tables,
        capacity_factor=capacity_factor,
        max_norm=max_norm,
        transport=transport,
        parts=parts,
    )

    def step_by(most):
        def step(params, state, *batch, **extra_args):
            model.check(params)
            check_no_guard(state)
            if on_mesh is None:
                tables = tables_for(model, params, state)
                params, state, value, [aux] = train_step(tables, [batch], extra_args)
            else:
                after = on_mesh.step(model, most, params, state, batch, extra_args)
                params, state, value, aux = after
            return (params, state, value, aux) if has_aux else (params, state, value)

        return step

    if on_mesh is None or not on_mesh.depends_on_batch(model):
        return Jitted(step_by)

    def most(params, state, *batch, **_):
        model.check(params)
        return on_mesh.most(model, params, state, batch)

    return Jitted(step_by, most)
