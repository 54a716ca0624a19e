"""The train step for a training loop."""

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

    Tables that the loss reads by :func:`optzoo.lookup`, and large tables that it reads by gathers
    of whole rows such as ``table[ids]``, get SparseRows as gradients, as in
    :func:`optzoo.value_and_grad`. If ``tx`` raises an error for SparseRows when it is traced, the
    gradients of gathers are dense. Parameters and state are donated: the step updates them in
    place, so do not use the arrays passed in again.

    With ``mesh=`` training is data-parallel: the batch is divided over the devices, and the mean of
    their losses is minimized. Tables named by ``tables=`` are sharded by rows, as in
    :func:`optzoo.sharded_minimize`. Put parameters and state on the mesh before the first step,
    such as by ``jax.device_put(params, NamedSharding(mesh, PartitionSpec()))``: otherwise the step
    is compiled twice.

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
        tx: any optax transformation. Put :func:`optzoo.rows.densify` before a transformation that
            does not support SparseRows.
        has_aux: whether ``loss_fn`` also returns auxiliary data.
        mesh: the devices that share a step; None for a step without ``shard_map``.
        tables: with a mesh, a dict from patterns of names (:func:`optzoo.param_groups`) to the
            shardings of tables. All other parameters are replicated.
        capacity_factor: with a mesh, as in :func:`optzoo.sharded_minimize`.
        max_norm: with a mesh, as in :func:`optzoo.sharded_minimize`.
        transport: with a mesh, as in :func:`optzoo.sharded_minimize`.
        parts: with a mesh, as in :func:`optzoo.sharded_minimize`.
        sparse: what to do if rows of a table are read but its gradient is dense: ``"warn"``,
            ``"require"`` (an error) or ``"allow"``; or a dict from patterns to these, as in
            :func:`optzoo.value_and_grad`.
        min_rows: as in :func:`optzoo.value_and_grad`.
        native: whether the optimizer runs as native code on the CPU, as in
            :func:`optzoo.native_step`. ``"require"`` raises an error if XLA has to update any
            array.

    Raises:
        TypeError: if ``tx`` is not a transformation; at trace time, if ``tx`` does not use one of
            the extra args.
        ValueError: as in :func:`optzoo.value_and_grad`, and with a mesh as in
            :func:`optzoo.sharded_minimize`; if an argument for a mesh is given without ``mesh``, or
            ``native`` is out of range; at trace time, if ``state`` is not a state of ``tx`` for
            these parameters, if a transformation in ``tx`` changes the updates of
            :func:`optzoo.caught_up`, or if native code is required and XLA would update some
            arrays.
        RuntimeError: at trace time, if native code is required and cannot run.

    Returns:
        ``step(params, state, *batch, **extra_args) -> (params, state, loss)``, followed by ``aux``
        if ``has_aux``. The extra args, trees of arrays, are passed to ``tx.update``, which must use
        them. With a mesh, the arrays of ``batch`` are divided along their first axis over all axes
        of the mesh, and each array of ``aux`` has an additional leading axis over the devices.
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
