"""Inner transformations of wrappers, with clear errors for arguments that do not match."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ..core.checks import check_transformation, check_update_arguments
from ..core.gradients import (
    GradientShapeError,
    GradientTypeError,
    check_arrays,
    check_gradients,
)
from ..core.meshes import beside
from ..core.optimizer import Optimizer, about_of
from ..core.paths import leaves_with_path, path_name
from ..core.rows import as_arrays, fits, is_sparse_or_none, update_tree
from ..jaxprs.equations import used_inputs
from ..jaxprs.reads import UnusedKeyword, note_reads, unread
from .fit import SWAPPED, KnownStates, StateError, change
from .types import (
    AccumulateState,
    MasterWeightsState,
    ReplicaState,
    SharedParamsState,
    nodes_of,
)

# What JAX and Python raise where trees or shapes do not fit. All others are left alone.
_OF_A_MISFIT = (TypeError, ValueError, LookupError, AttributeError, AssertionError)


def fitting(
    tx: optax.GradientTransformation, *, moves: str = "", in_cycles: bool = False
) -> Optimizer:
    """The same transformation, with clear errors if its arguments do not match.

    If the update fails, or returns a state of other shapes, the state is compared with that of
    ``init``, and gradients with parameters.

    Args:
        tx: the transformation.
        moves: the name of a wrapper that moves or averages parameters itself.
        in_cycles: whether the wrapper counts steps rather than updates, so that it may be around
            ``accumulate``.

    Raises:
        StateError: in ``update``, if the state does not match the transformation and the
            parameters.
        TypeError: if a call fails and a parameter or gradient has a dtype that no optimizer of this
            library supports.
        ValueError: in ``init``, if the wrapper ``moves`` is around a transformation that hides the
            parameters; in ``update``, if a gradient does not have the shape of its parameter.
    """
    about, tx = about_of(tx), optax.with_extra_args_support(tx)
    known = KnownStates(tx.init)

    def init(params):
        try:
            state = tx.init(params)
        except Exception:
            check_arrays(params)
            check_gradients(params, params, allow_complex=True)
            raise
        if moves:
            _check_order(moves, in_cycles, state)
        state = beside(params, state)
        known.add(params, state)
        return state

    def update(updates, state, params=None, **extra_args):
        updates, state, params = map(as_arrays, (updates, state, params))
        note_reads(extra_args, about.reads)
        try:
            new_updates, new = tx.update(updates, state, params, **extra_args)
        except _OF_A_MISFIT as error:
            found = known.mistake(updates, state, params)
            # What a transformation inside has found says more.
            is_clear = isinstance(error, StateError | GradientTypeError | GradientShapeError)
            if found is None or (is_clear and str(found) != SWAPPED):
                raise
            raise found from error
        if (changed := change(state, new)) is not None:
            raise known.mistake(updates, state, params) or changed
        _check_shapes(updates, new_updates)
        return new_updates, new

    return Optimizer(init, update, about)


def _check_order(wrapper: str, in_cycles: bool, state: Any) -> None:
    """Raises ``ValueError`` if a wrapper that moves parameters is around one that hides them."""
    if nodes_of(MasterWeightsState, state):
        raise ValueError(
            f"{wrapper} is around optzoo.master_weights, so it would get and move only rounded "
            f"parameters: write master_weights({wrapper}(tx, ...))"
        )
    if not in_cycles and any(jax.tree.leaves(x.sums) for x in nodes_of(AccumulateState, state)):
        raise ValueError(
            f"{wrapper} is around optzoo.accumulate, so it would act in each step of a cycle, not "
            f"in each update: write accumulate({wrapper}(tx, ...), every)"
        )
    if not in_cycles and nodes_of(SharedParamsState, state):
        raise ValueError(
            f"{wrapper} is around a method whose replicas share parameters, so it would act in "
            "each step of a replica, not in each update: put it inside, as in "
            f"sync_replicas({wrapper}(tx, ...), ...)"
        )


def check_not_around_replicas(wrapper: str, why: str, state: Any) -> None:
    """Raises ``ValueError`` if a wrapper is around a method for replicas."""
    if nodes_of(ReplicaState, state):
        raise ValueError(
            f"{wrapper} is around a method for replicas, {why}: put it inside, such as "
            f"sync_replicas({wrapper}(tx, ...), ...)"
        )


def _check_shapes(updates: Any, new: Any) -> None:
    """Raises ``ValueError`` if an update was broadcast to another shape than its gradient."""
    gs, us = (update_tree.leaves(tree) for tree in (updates, new))
    if len(gs) != len(us):
        return
    for i, (g, u) in enumerate(zip(gs, us, strict=True)):
        if g is not None and u is not None and not fits(g, u):
            path, _ = leaves_with_path(updates, is_leaf=is_sparse_or_none)[i]
            raise ValueError(
                f"parameter '{path_name(path)}' has a gradient of shape {jnp.shape(g)}, but its "
                f"update has shape {jnp.shape(u)}: the gradient must have the shape of the "
                "parameter"
            )


def inner_transformation(**arguments: Any) -> Optimizer:
    """The inner transformation of a wrapper, with checks of its arguments.

    Raises:
        TypeError: if it is not a transformation; in ``update``, as in
            :func:`optzoo.core.checks.check_update_arguments`, or if it changes parameters without
            using the given ``learning_rate``.
        StateError: in ``update``, as in :func:`fitting`.
    """
    check_transformation(**arguments)
    [(name, tx)] = arguments.items()
    if about_of(tx).divide is not None:
        raise ValueError(
            f"{name} is optzoo.divide_states, which must be the outermost transformation, to "
            "divide the whole state: put it around this one"
        )
    tx = fitting(tx)
    proved = set[Any]()  # so that each structure is traced once more, not each update

    def update(updates, state, params=None, **extra_args):
        check_update_arguments(extra_args)
        rate = None if "learning_rate" in tx.about.reads else extra_args.get("learning_rate")
        if rate is not None and (key := jax.tree.structure((updates, params))) not in proved:
            call = lambda gs, **given: tx.update(gs, state, params, **{**extra_args, **given})
            _check_rate_is_read(name, call, updates, rate)
            proved.add(key)
        return tx.update(updates, state, params, **extra_args)

    return Optimizer(tx.init, update, tx.about._replace(deferred=None))


def _check_rate_is_read(name: str, update: Any, updates: Any, rate: Any) -> None:
    """Raises ``UnusedKeyword`` if the updates of the parameters do not depend on the rate."""
    names, _ = unread(functools.partial(update, updates), {"learning_rate": rate})
    if not names:
        return
    jaxpr = jax.make_jaxpr(lambda gs: update(gs, learning_rate=rate)[0])(updates)
    if any(used_inputs(jaxpr.jaxpr)):  # otherwise the parameters are frozen
        raise UnusedKeyword(
            "learning_rate",
            f"update got a learning_rate, but {name} does not use it: give an optimizer of "
            "optzoo, or optax.chain(optax.scale_by_adam(), "
            "optzoo.transforms.scale_by_learning_rate(rate))",
        )
