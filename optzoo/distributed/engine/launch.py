"""Maps the code of one replica over all replicas."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.custom_batching import custom_vmap
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ...core.checks import check_size, check_transformation
from ...core.compat import varying
from ...core.integers import check_integers
from ...core.meshes import (
    automatically,
    check_axes,
    devices_along,
    explicit_axes,
    mesh_of,
    place_of,
    shard_map,
    spec_of,
)
from ...core.paths import leaves_with_path, path_name
from ...state.averages import averages_of
from ...state.fit import StateError
from ...state.types import LocalSGDState, ReplicaState, SharedParamsState
from .collectives import AxisName


def map_over_replicas(
    step: Callable[..., Any],
    *,
    axis_name: AxisName = "replica",
    mesh: Mesh | None = None,
    check_vma: bool = True,
) -> Callable[..., Any]:
    """Maps the train step of one replica over all replicas.

    Example:
        >>> import jax, jax.numpy as jnp, optax, optzoo
        >>> def step(params, state, gradient):
        ...     return params - jax.lax.pmean(gradient, "replica"), state
        >>> params, state = optzoo.replicas.replicate(
        ...     jnp.zeros(1), optax.sgd(0.1).init(jnp.zeros(1)), 2
        ... )
        >>> params, state = optzoo.replicas.map_over_replicas(step)(
        ...     params, state, jnp.array([[1.0], [3.0]])
        ... )
        >>> print(params)
        [[-2.]
         [-2.]]

    Args:
        step: ``step(params, state, *batch) -> (params, state, *out)`` of one replica; it may use
            collectives over ``axis_name``, as the distributed wrappers do.
        axis_name: the axis, or axes of the mesh, of the replicas.
        mesh: a mesh with one device for each replica, for ``jax.shard_map``; None for all
            replicas on one device, by ``jax.vmap`` (or on many devices, if the arrays are sharded
            over them and the result is compiled).
        check_vma: as for ``jax.shard_map``.

    Returns:
        A function like ``step``, for parameters and state made by
        :func:`optzoo.replicas.replicate`, and for batches and results with a first axis over the
        replicas. It is not compiled: wrap it in ``jax.jit``, with ``donate_argnums=(0, 1)``.

    Raises:
        ValueError: if the mesh has no such axis; when called, if the number of replicas is not the
            number of devices of the mesh, or if arrays that all replicas share are known to differ
            between them, as with ``optax.apply_if_finite`` around a method for replicas.
    """
    if mesh is not None:
        check_axes(mesh, axis_name, _AXIS)

    def of_one(params, state, batch):
        params, state, *out = step(params, state, *batch)
        return params, state, out

    def vmapped(params, state, *batch):
        check_integers(batch)
        axes = *replica_specs(params, state, None, 0), 0
        mapped = jax.vmap(of_one, in_axes=axes, out_axes=axes, axis_name=axis_name)
        try:
            # On explicit axes vmap takes no batch that is divided in another way than the replicas.
            params, state, out = automatically(mapped, _specs_of_vmapped)(params, state, batch)
        except ValueError as error:
            _refuse_differing(_batched(of_one, axis_name, params, state, batch), error)
            raise
        return params, state, *out

    def sharded(params, state, *batch):
        check_integers(batch)
        spec = PartitionSpec(axis_name)
        specs = *replica_specs(params, state, PartitionSpec(), spec), spec

        def of_block(params, state, batch):
            params, state = map_per_replica(_only_replica, params, state)
            params, state, out = of_one(params, state, jax.tree.map(_only_replica, batch))
            axes = {*jax.tree.leaves(axis_name)}
            differ = [name for name, a in _shared(params, state) if axes & varying(a)]
            _refuse_differing(differ)
            params, state = map_per_replica(lambda a: a[None], params, state)
            return params, state, jax.tree.map(lambda a: jnp.asarray(a)[None], out)

        mapped = shard_map(of_block, mesh, specs, specs, check_vma=check_vma)
        try:
            params, state, out = mapped(params, state, batch)
        except TypeError as error:  # of a conditional: its branches differ along other axes
            _refuse_differing(_batched(of_one, axis_name, params, state, batch), error)
            raise
        return params, state, *out

    return functools.wraps(step)(vmapped if mesh is None else sharded)


def _specs_of_vmapped(results: Any, params: Any, state: Any, batch: Any) -> Any:
    """Specs of parameters and state as before, and of other arrays along the replicas."""
    del batch
    like = jax.tree.leaves([node.per_replica for node in _nodes(state)])
    first = PartitionSpec(*spec_of(like[0])[:1]) if like else PartitionSpec()
    specs = (jax.tree.map(spec_of, tree) for tree in (params, state))
    return *specs, jax.tree.map(lambda _: first, results[2])


def _shared(params: Any, state: Any) -> list[tuple[str, Any]]:
    """The names and arrays of parameters and state that all replicas share."""
    marks = replica_specs(params, state, True, False)
    each = lambda is_shared, tree: jax.tree.map(lambda a: a if is_shared else None, tree)
    named = {"params": params, "state": state}
    shared = jax.tree.map(each, dict(zip(named, marks, strict=True)), named)
    return [(path_name(path), a) for path, a in leaves_with_path(shared)]


def _batched(of_one, axis_name, params, state, batch) -> list[str]:
    """The names of arrays that all replicas share, and that differ between them in ``vmap``."""
    found = list[str]()

    def watch(name, a):
        same = custom_vmap(lambda a: a)

        @same.def_vmap  # called for an array that differs
        def note(size, is_batched, a):
            found.append(name)
            return a, *is_batched

        same(a)

    def watched(*args):
        params, state, _ = of_one(*args)
        for name, a in _shared(params, state):
            watch(name, a)

    with contextlib.suppress(Exception):  # those of the step itself are raised again by the caller
        axes = *replica_specs(params, state, None, 0), 0
        mapped = jax.vmap(watched, in_axes=axes, axis_name=axis_name)
        # Without the types of a mesh.
        of = lambda a: jax.ShapeDtypeStruct(jnp.shape(a), jnp.result_type(a))
        jax.eval_shape(mapped, *jax.tree.map(of, (params, state, batch)))
    return found


def _refuse_differing(names: list[str], cause: Exception | None = None) -> None:
    """Raises ``ValueError`` if arrays that all replicas share differ between them."""
    if names:
        first = ", ".join(map(repr, names[:3]))
        raise ValueError(
            f"arrays that all replicas share differ between them: {first}. "
            "What depends on the gradients or the loss of one replica, such as "
            "optax.apply_if_finite, belongs inside of the method for replicas; give it arguments "
            "that are equal on all, by jax.lax.pmean"
        ) from cause


def scan_local_steps(step: Callable[..., Any], *, overlap_steps: int = 0) -> Callable[..., Any]:
    """Scans a round of local steps with one exchange at its end.

    A step with a conditional exchange makes row-sparse updates dense, and XLA cannot fuse
    operations across the condition. A round has no condition, so its local steps cost as much as
    those of the inner optimizer. The step is compiled twice: as a local step, and as the last one.

    With ``overlap_steps`` the exchange starts that many steps before the end of the round, and the
    steps until then do not depend on its result: communication can overlap with them.

    Example:
        >>> import jax.numpy as jnp, optax, optzoo
        >>> tx = optzoo.model_average(optzoo.gradient_descent(0.1))
        >>> def step(params, state, gradient, *, exchange):
        ...     updates, state = tx.update(gradient, state, params, exchange=exchange)
        ...     return optax.apply_updates(params, updates), state
        >>> params, state = optzoo.replicas.replicate(jnp.zeros(1), tx.init(jnp.zeros(1)), 2)
        >>> round_of_3 = optzoo.replicas.map_over_replicas(optzoo.replicas.scan_local_steps(step))
        >>> gradients = jnp.array([1.0, 3.0])[:, None, None] * jnp.ones((2, 3, 1))
        >>> params, state = round_of_3(params, state, gradients)
        >>> print(params.ravel())
        [-0.6 -0.6]

    Args:
        step: ``step(params, state, *batch, exchange) -> (params, state, *out)`` for one replica,
            which passes ``exchange`` (a Python bool, or ``"start"`` or ``"finish"``) to ``update``.
        overlap_steps: as for :func:`optzoo.diloco`; below the number of steps of a round.

    Raises:
        ValueError: when called, if a round has too few steps for ``overlap_steps``.

    Returns:
        A function ``round(params, state, *batches) -> (params, state, *outs)`` for one replica,
        where batches and outs have a first axis over the steps of the round.
    """
    overlap_steps = check_size(overlap_steps=overlap_steps)

    def body(carry, batch, exchange=False):
        params, state, *out = step(*carry, *batch, exchange=exchange)
        return (params, state), out

    def until(exchange, carry, batches):
        """Local steps, the last one with this exchange."""
        local, last = (jax.tree.map(lambda a, at=at: a[at], batches) for at in (slice(-1), -1))
        carry, outs = lax.scan(body, carry, local)
        carry, out = body(carry, last, exchange=exchange)
        join = lambda a, b: jnp.concatenate([a, jnp.asarray(b)[None]])
        return carry, jax.tree.map(join, outs, out)

    @functools.wraps(step)
    def round(params, state, *batches):
        if overlap_steps == 0:
            carry, outs = until(True, (params, state), batches)
            return *carry, *outs
        steps = len(jax.tree.leaves(batches)[0])
        if overlap_steps >= steps:
            raise ValueError(
                f"overlap_steps must be below the number of steps of a round, {steps}, got "
                f"{overlap_steps}"
            )
        parts = slice(-overlap_steps), slice(-overlap_steps, None)
        before, during = (jax.tree.map(lambda a, at=at: a[at], batches) for at in parts)
        carry, outs = until("start", (params, state), before)
        carry, more = until("finish", carry, during)
        return *carry, *jax.tree.map(lambda a, b: jnp.concatenate([a, b]), outs, more)

    return round


def replicate(
    params: Any,
    state: Any,
    num_replicas: int,
    *,
    mesh: Mesh | None = None,
    axis_name: AxisName = "replica",
) -> tuple[Any, Any]:
    """Replicates parameters and state for all replicas.

    Arrays that differ between replicas receive a first axis over the replicas.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.model_average(optzoo.adam(0.1))
        >>> params = jnp.zeros(1)
        >>> params, state = optzoo.replicas.replicate(params, tx.init(params), 4)
        >>> print(params.shape)
        (4, 1)

    Args:
        params: the parameters.
        state: ``tx.init(params)``.
        num_replicas: the number of replicas.
        mesh: the mesh on which to place them; None for the devices of the arrays.
        axis_name: the axis, or axes, of the mesh.

    Raises:
        ValueError: if the mesh has no such axis, or its size does not divide ``num_replicas``.
    """
    _check_replicas(num_replicas, mesh, axis_name)

    def all_of(params, state):
        spread = lambda a: jnp.broadcast_to(a, (num_replicas, *jnp.shape(a)))
        return map_per_replica(spread, params, state)

    if mesh is None:
        return jax.jit(all_of)(params, state)
    return _placed(all_of, params, state, mesh, axis_name, None)


def resize_replicas(
    tx: optax.GradientTransformation,
    params: Any,
    state: Any,
    num_replicas: int,
    *,
    mesh: Mesh | None = None,
    axis_name: AxisName = "replica",
) -> tuple[Any, Any]:
    """Changes the number of replicas of parameters and state, to resume from a checkpoint.

    The first replicas keep their parameters and their state. A new replica ``i`` starts from the
    center, with the slots and counts of the inner optimizer of replica ``i % old number``.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.model_average(optzoo.adam(0.1))
        >>> params, state = optzoo.replicas.replicate(jnp.zeros(1), tx.init(jnp.zeros(1)), 2)
        >>> params, state = optzoo.replicas.resize_replicas(tx, params, state, 3)
        >>> print(params.shape)
        (3, 1)

    Args:
        tx: the optimizer for the new number of replicas.
        params: the parameters of all replicas, as made by :func:`optzoo.replicas.replicate`.
        state: the state of all replicas.
        num_replicas: the new number of replicas.
        mesh: the mesh on which to place them, which may have other devices than before; each
            device then first receives all old replicas, unless their number is a multiple of the
            devices. None for the devices of the arrays. With several processes, all must call this
            function, with arrays on devices of all processes.
        axis_name: the axis, or axes, of the mesh.

    Raises:
        TypeError: if ``tx`` is not a transformation.
        StateError: if the state was not made for replicas.
        ValueError: if the mesh has no such axis, or its size does not divide ``num_replicas``.
    """
    check_transformation(tx=tx)
    if not _nodes(state):
        raise StateError(
            "state has no replicas: give a state made by optzoo.replicas.replicate, after any "
            "number of updates"
        )
    _check_replicas(num_replicas, mesh, axis_name)
    before = len(jax.tree.leaves([node.per_replica for node in _nodes(state)])[0])
    resize = functools.partial(_resize, tx, before, num_replicas)
    if mesh is None:
        return jax.jit(automatically(resize, _specs_of_resized))(params, state)
    return _placed(resize, params, state, mesh, axis_name, before)


_AXIS = "axis_name=, the axis of the replicas"


def _check_replicas(num_replicas: int, mesh: Mesh | None, axis_name: AxisName) -> None:
    check_size(1, num_replicas=num_replicas)
    size = 1 if mesh is None else check_axes(mesh, axis_name, _AXIS)
    if num_replicas % size:
        raise ValueError(
            f"num_replicas must be a multiple of the {size} devices along {axis_name!r}, got "
            f"{num_replicas}"
        )


def _specs_of_resized(results: Any, params: Any, state: Any) -> Any:
    """Specs as before; arrays are divided along the replicas if there is a multiple of devices."""

    def of(is_per_replica, new, old):
        if not is_per_replica:
            return spec_of(old)
        along, *others = spec_of(old)
        divides = len(new) % devices_along(mesh_of(old), along) == 0
        return PartitionSpec(along if divides else None, *others)

    marks = replica_specs(params, state, False, True)
    each = lambda mark, new, old: jax.tree.map(functools.partial(of, mark), new, old)
    return jax.tree.map(each, marks, results, (params, state))


def _resize(tx, before, num_replicas, params, state):
    params_are_per_replica, _ = replica_specs(params, state, False, True)
    center = averages_of(params, state)
    if params_are_per_replica:  # a parameter without a center starts as on the first replica
        center = jax.tree.map(lambda c, x: c if c.shape != x.shape else x[0], center, params)
    take = lambda a: a[jnp.arange(num_replicas) % before]
    is_new = jnp.arange(num_replicas) >= before
    renew = lambda a, first: jnp.where(is_new.reshape(-1, *(1,) * jnp.ndim(first)), first, a)
    params, state = map_per_replica(take, params, state)
    if params_are_per_replica:
        params = jax.tree.map(renew, params, center)

    def start(node, fresh):
        """New replicas receive the inner state and the local step of an old one."""
        if not _is_replicas(node):
            return node
        old = node.per_replica
        if isinstance(node, LocalSGDState):
            method = jax.tree.map(renew, old.method, fresh.per_replica.method)
            return node._replace(per_replica=old._replace(method=method))
        new = jax.tree.map(renew, old, fresh.per_replica)
        return node._replace(per_replica=new._replace(local_step=old.local_step))

    return params, jax.tree.map(start, state, tx.init(center), is_leaf=_is_replicas)


def replica_specs(params: Any, state: Any, replicated: Any, per_replica: Any) -> tuple[Any, Any]:
    """Marks the arrays of parameters and state as replicated or as per replica.

    With ``replicated=None, per_replica=0`` these are ``in_axes`` and ``out_axes`` of ``jax.vmap``
    and ``jax.pmap``, with ``PartitionSpec()`` and ``PartitionSpec("replica")`` the specs of
    ``jax.shard_map``. The parameters are replicated if their optimizer shares them between the
    replicas (:func:`optzoo.sync_replicas` and :func:`optzoo.drop_stale_gradient`); with other
    optimizers each replica has its own.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.model_average(optzoo.adam(0.1))
        >>> params = jnp.zeros(1)
        >>> specs = optzoo.replicas.replica_specs(
        ...     params, tx.init(params), replicated=None, per_replica=0
        ... )
        >>> print(specs[0])  # each replica has its own parameters
        0

    Args:
        params: the parameters.
        state: the state of an optimizer that may contain distributed wrappers anywhere.
        replicated: the mark for arrays that all replicas share.
        per_replica: the mark for arrays that differ between replicas.

    Returns:
        A mark for the parameters, and a tree of marks that is a prefix of the state.
    """
    del params
    mark = lambda node: type(node)(replicated, per_replica) if _is_replicas(node) else per_replica
    shares_params = any(isinstance(node, SharedParamsState) for node in _nodes(state))
    of_state = jax.tree.map(mark, state, is_leaf=_is_replicas)
    return replicated if shares_params else per_replica, of_state


def map_per_replica(f: Callable[[Array], Any], params: Any, state: Any) -> tuple[Any, Any]:
    """``f`` applied to every array that differs between replicas."""
    marks = replica_specs(params, state, False, True)
    change = lambda is_per_replica, tree: jax.tree.map(f, tree) if is_per_replica else tree
    return jax.tree.map(change, marks, (params, state))


def _placed(f, params, state, mesh, axis_name, before):
    """``f(params, state)`` for all replicas, on the devices of the mesh.

    ``before`` is the number of replicas in the arrays; None if they have no axis over replicas.
    """
    at = functools.partial(NamedSharding, mesh)
    whole, parts = at(PartitionSpec()), at(PartitionSpec(axis_name))
    specs = replica_specs(params, state, whole, parts)
    divides = before is not None and before % devices_along(mesh, axis_name) == 0
    start = replica_specs(params, state, whole, parts if divides else whole)
    move = lambda sharding, part: jax.tree.map(lambda x: _moved(x, sharding), part)
    params, state = jax.tree.map(move, start, (params, state))
    of = lambda sharding, part: jax.tree.map(lambda _: sharding.spec, part)
    f = automatically(f, lambda results, *_: jax.tree.map(of, specs, results))
    return jax.jit(f, out_shardings=specs)(params, state)


def _moved(x: Any, sharding: NamedSharding) -> Any:
    """An array on the devices of a sharding, in the types of its mesh."""
    place = place_of(x)
    if place is None or not x.committed or getattr(place, "mesh", None) == sharding.mesh:
        return x
    is_typed = explicit_axes(mesh_of(x)) or explicit_axes(sharding.mesh)
    if place.device_set == sharding.device_set and not is_typed:
        return x  # jit divides it anew
    return jax.device_put(x, sharding)


def _is_replicas(node: Any) -> bool:
    return isinstance(node, ReplicaState)


def _nodes(state: Any) -> list[ReplicaState]:
    return [node for node in jax.tree.leaves(state, is_leaf=_is_replicas) if _is_replicas(node)]


def _only_replica(block: Array) -> Array:
    if len(block) != 1:
        raise ValueError(
            f"each device must have one replica, got {len(block)}: give map_over_replicas a mesh "
            "with one device for each replica, or mesh=None"
        )
    return block[0]
