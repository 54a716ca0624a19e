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

    It is :func:`optzoo.minimize` with ``mesh=`` and ``tables=``: the loss is the same function,
    which reads the tables by ``table[ids]``, :func:`optzoo.lookup` or
    :func:`optzoo.lookup_sparse`. It is called with the part of the batch of one device, and its
    mean over all devices is minimized.

    Each device asks the owners for the distinct rows that its part of the batch needs, computes
    their gradients, and sends them to the owners, which alone update rows and slots. All tables
    share these messages. They have room for as many rows as the first batch needs, or for
    ``capacity_factor`` times the average number of ids; what finds no room is sent in another
    round, so the result is exact for any ids, in bounded memory. In several rounds each row must
    be updated by itself, and untouched rows must not change: "lazy" and "linear" optimizers, and
    :func:`optzoo.on_rows`. This is proved when the step is traced. All others, such as
    :func:`optzoo.adam`, need ``capacity_factor=None``. With :func:`optzoo.caught_up` around Adam,
    whose owners catch up rows when they are read, any number of rounds is possible.

    Norms of gradients by transformations of this library, such as
    :func:`optzoo.clip_by_global_norm`, count all shards and all rounds. What uses a norm, or
    anything else, of the rows of one shard alone is refused, whatever the rounds.

    Parameters and state are donated, as in :func:`optzoo.minimize`: use only the arrays that a step
    returns. On several CPU devices, JAX 0.10.2 may end the process if an old one is read.

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
        loss_fn: ``loss_fn(params, *batch)`` returns a scalar, or ``(scalar, aux)``. A table has the
            shape ``(num_rows, *row_shape)`` there, so its padding id is ``num_rows``. It can be
            read by lookups and by gathers of whole rows, at ids that depend on no row of a table,
            and used in no other way.
        tx: any optax transformation.
        mesh: its axes that a table is not sharded over are data-parallel.
        tables: by a pattern of names (:func:`optzoo.param_groups`) its sharding.
            All other parameters are replicated, small tables by choice.
        capacity_factor: the capacity of a message: a multiple of the average number of ids for an
            owner, with a margin, as in :func:`optzoo.sharded.lookup`; None for one round for any
            ids, with messages and memory ``num_shards`` times as large. With ``"auto"`` the first
            call finds ``n``, the most distinct ids of its batch that a device requests from one
            owner. The capacity is then ``n + 2 sqrt(n)`` rows, at least that of a factor of 0.25
            and at most that of 1.0, which suffices for random ids. Messages of at most 128 rows
            use 1.0. ``compile_report``, and a step inside another program, use the capacity
            measured in a call with the same shapes, or else 1.0.
        max_norm: clips the global norm of all gradients, as :func:`optzoo.clip_by_global_norm`
            at the start of ``tx`` does. It costs the same, but around :func:`optzoo.caught_up`
            less, whose rows are then written once. In several rounds gradients are sent twice.
        transport: the dtype in which rows and gradients are sent, such as ``jnp.bfloat16``; None
            for that of the table.
        parts: into how many parts of equal size the batch of a device is divided; the mean of
            their losses is minimized. All are read before one update for all of them: the result
            is that of one part, up to rounding. The rows and gradients of one part can be sent
            while the loss of another one is computed. It pays off where ``compile_report`` shows
            that a large network waits for them.
        has_aux: whether ``loss_fn`` returns auxiliary data too.
        sparse: for the tables that are not sharded, as in :func:`optzoo.minimize`.
        min_rows: for the same, as in :func:`optzoo.minimize`.
        native: whether the optimizer runs as native loops on the CPU, as in
            :func:`optzoo.minimize`.

    Raises:
        TypeError: if an argument is of another kind than described.
        ValueError: if an argument is out of range, the mesh lacks an axis, a pattern matches no
            parameter or two match one; at trace time if a table has another number of rows than its
            sharding, if it is used in another way than described, if the optimizer uses
            a norm of one shard or needs ``capacity_factor=None``, if something in ``tx`` changes an
            update of :func:`optzoo.caught_up`, or if native code is required and XLA updates some
            arrays.
        RuntimeError: at trace time, if native code is required and cannot run.

    Returns:
        ``step(params, state, *batch, **extra_args) -> (params, state, loss)``, with ``aux`` as a
        fourth if ``has_aux``, each array of it with one more leading axis over the devices, and
        over the parts of the batch of each.
        The arrays of ``batch`` are divided along their first axis over all axes of the mesh. The
        extra args go to ``tx.update``.
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
