"""The train step of a model with tables sharded by rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import optax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from ..native.step import Native
from ..sharded.row_sharding import RowSharding
from ..sparse.wanted import MIN_ROWS, Sparse
from .minimize import minimize
from .sharded import CapacityFactor


def sharded_minimize(
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    mesh: Mesh,
    tables: Mapping[str, RowSharding],
    *,
    capacity_factor: CapacityFactor = "auto",
    max_norm: float | None = None,
    transport: DTypeLike | None = None,
    parts: int = 1,
    has_aux: bool = False,
    sparse: Sparse | Mapping[str, Sparse] = "warn",
    min_rows: int = MIN_ROWS,
    native: Native = False,
) -> Callable[..., Any]:
    r"""A compiled train step for tables sharded by rows; everything else is data-parallel.

    Equivalent to :func:`optzoo.minimize` with ``mesh=`` and ``tables=``. The loss is the same as on
    one device: it reads tables by ``table[ids]``, :func:`optzoo.lookup` or
    :func:`optzoo.lookup_sparse`. It is called with one device's part of the batch, and its mean
    over all devices is minimized.

    Each device requests the distinct rows of its part of the batch from their owners, computes the
    gradients of these rows and sends them to the owners, which update rows and slots. All tables
    share these messages. The capacity of a message is the number of rows that the first batch
    needs, or ``capacity_factor`` times the average number of ids. Rows that exceed it are sent in
    another round, so the result is exact for any ids, in bounded memory. Several rounds need an
    optimizer that updates each row by itself and leaves untouched rows unchanged: "lazy" and
    "linear" optimizers, and :func:`optzoo.on_rows`. This is verified when the step is traced. Other
    optimizers, such as :func:`optzoo.adam`, need ``capacity_factor=None``, or
    :func:`optzoo.caught_up` around them, with which the owners catch up rows when they are read,
    and which supports any number of rounds.

    Gradient norms in transformations of this library, such as :func:`optzoo.clip_by_global_norm`,
    include all shards and all rounds. An optimizer that uses a norm, or any other value, of only
    one shard is refused.

    Parameters and state are donated, as in :func:`optzoo.minimize`: use only the arrays that a step
    returns. On several CPU devices, JAX 0.10.2 may end the process if a donated array is read.

    Example:
        >>> import jax, jax.numpy as jnp, numpy as np, optzoo
        >>> mesh = jax.make_mesh((1,), ("shard",))
        >>> sharding = optzoo.sharded.RowSharding(6, 1, multiple=1)
        >>> rows = lambda ids: jnp.ones((len(ids), 2))
        >>> params = {"table": optzoo.sharded.create_table(sharding, mesh, rows)}
        >>> loss = lambda p, ids: jnp.sum(optzoo.lookup(p["table"], ids) ** 2)
        >>> tx = optzoo.lazy_adam(0.1)
        >>> state = jax.jit(tx.init, out_shardings=optzoo.state_sharding(tx, params))(params)
        >>> step = optzoo.sharded_minimize(loss, tx, mesh, {"table": sharding})
        >>> params, state, value = step(params, state, jnp.array([0, 3]))
        >>> float(value)
        4.0

    Args:
        loss_fn: ``loss_fn(params, *batch)`` returns a scalar, or ``(scalar, aux)``. In it, a table
            has the shape ``(num_rows, *row_shape)``, and ``num_rows`` is the padding id. The loss
            can use a table only by lookups and gathers of whole rows, at ids that do not depend on
            rows of a table.
        tx: any optax transformation.
        mesh: the devices. Axes over which a table is not sharded are data-parallel.
        tables: a dict from patterns of names (:func:`optzoo.param_groups`) to shardings. All other
            parameters, such as small tables, are replicated.
        capacity_factor: the capacity of a message, as a multiple of the average number of ids per
            owner, with a margin, as in :func:`optzoo.sharded.lookup`. None needs one round for any
            ids, with messages and memory ``num_shards`` times as large. With ``"auto"`` the first
            call measures ``n``, the largest number of distinct ids of its batch that a device
            requests from one owner. The capacity is then ``n + 2 sqrt(n)`` rows, limited to the
            range of the factors 0.25 to 1.0; 1.0 suffices for random ids. Messages of at most 128
            rows use 1.0. ``compile_report``, and a step inside another program, use the capacity
            that a call with the same shapes measured, otherwise 1.0.
        max_norm: clips the global norm of all gradients, like :func:`optzoo.clip_by_global_norm` at
            the start of ``tx``, at the same cost, or less with :func:`optzoo.caught_up`, whose rows
            are then written once. In several rounds gradients are sent twice.
        transport: the dtype in which rows and gradients are sent, such as ``jnp.bfloat16``; None
            for that of the table.
        parts: the number of equal parts into which the batch of a device is divided; the mean of
            their losses is minimized. The rows of all parts are read before the single update, so
            the result equals that of one part, up to rounding. Rows and gradients of one part can
            be sent while the loss of another part is computed. Use it if ``compile_report`` shows
            that a large network waits for messages.
        has_aux: whether ``loss_fn`` also returns auxiliary data.
        sparse: for tables that are not sharded, as in :func:`optzoo.minimize`.
        min_rows: for tables that are not sharded, as in :func:`optzoo.minimize`.
        native: whether the optimizer runs as native code on the CPU, as in :func:`optzoo.minimize`.

    Raises:
        TypeError: if an argument has a wrong type.
        ValueError: if an argument is out of range, the mesh lacks an axis, a pattern matches no
            parameter, or two patterns match the same one; at trace time, if the number of rows of a
            table differs from its sharding, if the loss uses a table in an unsupported way, if the
            optimizer uses a norm of one shard or needs ``capacity_factor=None``, if a
            transformation in ``tx`` changes the updates of :func:`optzoo.caught_up`, or if native
            code is required and XLA would update some arrays.
        RuntimeError: at trace time, if native code is required and cannot run.

    Returns:
        ``step(params, state, *batch, **extra_args) -> (params, state, loss)``, followed by ``aux``
        if ``has_aux``, whose arrays have an additional leading axis over the devices and the parts
        of the batch of each. The arrays of ``batch`` are divided along their first axis over all
        axes of the mesh. The extra args are passed to ``tx.update``.
    """
    return minimize(
        loss_fn,
        tx,
        has_aux,
        mesh=mesh,
        tables=tables,
        capacity_factor=capacity_factor,
        max_norm=max_norm,
        transport=transport,
        parts=parts,
        sparse=sparse,
        min_rows=min_rows,
        native=native,
    )
