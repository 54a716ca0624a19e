"""Builds the arrays of a plan: of parameters and state, or of a checkpoint."""

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...core.meshes import where_it_was
from ...core.paths import map_with_path, path_name
from ...deferred.state import CaughtUpState
from ...deferred.tables import all_current
from ...state.storage.stored import pack_state_like, unpack_state
from ...state.tf1_names import tf1_names
from ...state.types import AccumulateState, LeafwiseState, map_nodes
from .names import GLOBAL_STEP
from .plan import Plan, Source
from .steps import Steps


def build_state(
    plan: Plan,
    steps: Steps,
    given: Mapping[str, np.ndarray],
    params: Any,
    init: Callable[[Any], Any],
) -> tuple[Any, Any]:
    """The parameters and the state with the arrays of a checkpoint.

    Arrays that the checkpoint lacks are those of ``params``, or of ``init`` of the loaded
    parameters, from which averages and centers start.
    """
    of = lambda sources: {s.path: given[s.variable] for s in sources if s.variable in given}
    new_params = _fill(params, of(plan.parameters))
    start = init(new_params)
    values = {**of(plan.arrays), **steps.values}
    for vector in plan.vectors:
        if vector.variable in given:
            values |= _split(vector, given[vector.variable])
    state = map_nodes(LeafwiseState, _with_computed, _fill(unpack_state(start), values))
    state = jax.tree.map(_like, pack_state_like(start, state), start)
    state = map_nodes(AccumulateState, _all_came, state)
    return new_params, map_nodes(CaughtUpState, all_current, state)


def _all_came(state: AccumulateState) -> AccumulateState:
    """Marks all gradients as received, since the originals apply the sums of all variables."""
    came = jax.tree.map(jnp.ones_like, state.came)
    return state._replace(came=came, inner=map_nodes(AccumulateState, _all_came, state.inner))


def build_variables(
    plan: Plan,
    step: int,
    like: Mapping[str, np.ndarray],
    params: Mapping[str, Any],
    state: Mapping[str, Any],
) -> dict[str, np.ndarray]:
    """The variables of a checkpoint, in the dtypes of those in ``like``."""
    saved = dict(like)

    def put(variable, value, dtype):
        dtype = like[variable].dtype if variable in like else dtype
        saved[variable] = np.asarray(value).astype(dtype)

    for arrays, sources in ((params, plan.parameters), (state, plan.arrays)):
        for source in sources:
            put(source.variable, arrays[source.path], source.saved_dtype)
    for vector in plan.vectors:
        put(vector.variable, _concatenate(vector, state), vector.saved_dtype)
    if plan.counts:
        put(GLOBAL_STEP, step, np.int64)
    return saved


def _fill(tree: Any, values: Mapping[str, Any]) -> Any:
    """The tree with some arrays replaced, by path."""
    put = lambda path, old: _like(values.get(path_name(path), old), old)
    return map_with_path(put, tree)


def _like(new: Any, old: Any) -> Any:
    """An array with the dtype and sharding of the old one."""
    if new is old:
        return old
    return where_it_was(jnp.asarray(new, jnp.result_type(old)), old)


def _with_computed(state: LeafwiseState) -> LeafwiseState:
    """Adds optimizer-wide arrays that TensorFlow does not have, computed from slots."""
    shared = dict(state.shared)
    for name, compute in tf1_names(state.slots).not_in_tf1.items():
        if compute is not None and jax.tree.leaves(state.slots):
            shared[name] = _like(compute(state.slots), shared[name])
    return state._replace(shared=shared)


def _split(vector: Source, value: np.ndarray) -> dict[str, np.ndarray]:
    """The arrays of the parameters, by path."""
    rows = math.prod(vector.shape[:-1])
    size = lambda part: math.prod(part.shape) // rows
    ends = list(itertools.accumulate(map(size, vector.parts)))
    cuts = np.split(value, ends, axis=-1)[:-1]
    pairs = zip(vector.parts, cuts, strict=True)
    return {part.path: cut.reshape(part.shape) for part, cut in pairs}


def _concatenate(vector: Source, state: Mapping[str, Any]) -> np.ndarray:
    rows = [np.asarray(state[p.path]).reshape(*vector.shape[:-1], -1) for p in vector.parts]
    return np.concatenate(rows, axis=-1) if rows else np.zeros(vector.shape)
