"""TensorFlow's serial histories through our transformations, one tick after the other.

In TensorFlow one worker moves at a time. A tick of ours moves those replicas that are active, so
a history can be followed in two ways:

* one event, one tick: a single replica is active;
* ``together``: as many successive events as the library orders in the same way are one tick
  (:func:`ticks`), in lockstep where all replicas are active.

An update of SyncReplicas comes with the gradient that completes it, and the original's with the
chief's event that follows; both are compared after that. What does not apply:

* histories in which the chief is so late that more than ``replicas_to_aggregate`` gradients are in
  (:func:`applies`): the original takes them all, and we never do;
* the steps that SyncReplicas hands to its workers, and who waits for them: we have no token queue.
  Which step a worker had is from the record, as an argument of ``update``;
* rounds of ModelAverage one event at a time: the original's workers wait for one another.
"""

import json
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optzoo
from optzoo.state import LeafwiseState
from optzoo.state.types import SharedParamsState, nodes_of
from optzoo.testing import samples
from tests import golden

FILE = golden.FOLDER.with_name("distributed.npz")
PUSH = BEGIN = 0  # the first of two kinds of events

# What a record holds beside what became of it all.
GIVEN = {"grad", "events", "queue_size", "recorded_step"}


class Case(NamedTuple):
    """One history of TensorFlow's workers."""

    meta: dict[str, Any]
    arrays: dict[str, np.ndarray]


class Step(NamedTuple):
    """A gradient on its way into the optimizer, and the row of the record that is after it."""

    worker: int
    gradient: np.ndarray
    row: int
    local_step: int = 0
    global_step: int = 0


def load(path: Any = FILE) -> dict[str, Case]:
    """All histories of a file."""
    cases: dict[str, dict[str, np.ndarray]] = {}
    with np.load(path) as file:
        for key in file.files:
            case, name = key.split("/")
            cases.setdefault(case, {})[name] = file[key]
    return {k: Case(json.loads(str(v.pop("meta"))), v) for k, v in cases.items()}


def applies(case: Case) -> bool:
    """Whether the chief was never late."""
    if case.meta["optimizer"] != "SyncReplicas":
        return True
    aggregate = case.meta["kwargs"]["replicas_to_aggregate"]
    return bool(case.arrays["num_accumulated"].max() <= aggregate)


def steps(case: Case) -> list[Step]:
    """The gradients in the order in which they came."""
    (meta, arrays), result = case, []
    events, gradients = arrays["events"], arrays["grad"]
    match meta["optimizer"]:
        case "ModelAverage":
            for round, gs in enumerate(gradients):
                result += [Step(w, g, round + 1) for w, g in enumerate(gs)]
        case "SyncReplicas":
            is_full = arrays["num_accumulated"][:, 0] == _aggregate(meta)
            for i, (what, w) in enumerate(events):
                row = i + 1 + is_full[i + 1]
                # What completes the update is left out if the update is not in the record.
                if what == PUSH and row <= len(events):
                    read_at, now = arrays["local_step"][i, w], arrays["global_step"][i]
                    result.append(Step(w, gradients[i], row, read_at, now))
        case "DropStaleGradient":
            held = {}
            for i, (what, w) in enumerate(events):
                if what == BEGIN:
                    held[w] = gradients[i]
                else:
                    read_at = arrays["recorded_step"][i, w]
                    result.append(Step(w, held[w], i + 1, local_step=read_at))
        case _:
            result = [Step(w, gradients[i], i + 1) for i, w in enumerate(events)]
    return result


def ways(case: Case) -> tuple[bool, ...]:
    """Whether to follow it ``together``: those who average models always are."""
    return (True,) if case.meta["optimizer"] == "ModelAverage" else (False, True)


def ticks(case: Case, together: bool) -> list[list[Step]]:
    """The steps that make up each tick.

    Replicas move in the order of ranks, so ascending workers can be one tick. SyncReplicas knows
    an order of its own, ``priority``: there it is different workers, until an update; and after
    it those whose gradients it made stale, the backup workers.
    """

    def joins(tick, step):
        if case.meta["optimizer"] != "SyncReplicas":
            return step.worker > tick[-1].worker
        now = tick[0].global_step
        is_backup = step.global_step == now + 1 and step.local_step <= now
        return step.worker not in [other.worker for other in tick] and (
            step.global_step == now or is_backup
        )

    result: list[list[Step]] = []
    for step in steps(case):
        if together and result and joins(result[-1], step):
            result[-1].append(step)
        else:
            result.append([step])
    return result


def build(meta: dict[str, Any], order: str) -> optax.GradientTransformation:
    """Our optimizer with the numbers that the original really used."""
    kwargs = dict(meta["kwargs"])
    opt = kwargs.pop("opt")
    inner = golden.build({"optimizer": opt["$opt"], "kwargs": opt["kwargs"], "kind": "dense"})
    match meta["optimizer"]:
        case "ElasticAverage":
            return optzoo.elastic_average(inner, kwargs.pop("num_worker"), order=order, **kwargs)
        case "AGN":
            period = kwargs["communication_period"]
            return optzoo.agn(inner, communication_period=period, order=order)
        case "ModelAverage":
            return optzoo.model_average(inner, interval_steps=kwargs["interval_steps"])
        case "SyncReplicas":
            if average := kwargs.pop("variable_averages", None):
                decay = float(np.float32(average["$ema_of_step"]))
                inner = optzoo.moving_average(inner, decay, "count")
            return optzoo.sync_replicas(inner, **kwargs)
        case "DropStaleGradient":
            return optzoo.drop_stale_gradient(inner, **kwargs)
    raise ValueError(meta["optimizer"])


def inputs(case: Case, schedule: list[list[Step]]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Gradients and arguments of ``update``, by tick and replica.

    What the library must not look at is NaN.
    """
    name, size = case.meta["optimizer"], (len(schedule), case.meta["workers"])
    gradients = np.full((*size, case.arrays["center"].shape[-1]), np.nan, np.float32)
    active, local_step, priority = np.zeros(size, bool), np.zeros(size, int), np.zeros(size, int)
    for t, tick in enumerate(schedule):
        for place, step in enumerate(tick):
            at = t, step.worker
            gradients[at], active[at] = step.gradient, True
            local_step[at], priority[at] = step.local_step, place
    extra = {}
    if name == "SyncReplicas":
        extra = {"arrived": active, "local_step": local_step, "priority": priority}
        fresh = all(step.local_step >= step.global_step for tick in schedule for step in tick)
        if active.all() and fresh and case.meta["workers"] == _aggregate(case.meta):
            extra = {}  # as one trains who has no stragglers
    elif name == "DropStaleGradient":
        extra = {"active": active, "local_step": local_step}
    elif not active.all():
        extra = {"active": active}
    return gradients, extra


def follow(
    case: Case, together: bool, order: str | None = None
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Everything that the record holds: what we have at the end of each tick, and what it has.

    The original's order is that of ranks; a single one that moves does it in either.
    """
    meta, arrays = case
    schedule = ticks(case, together)
    tx = build(meta, order or ("round_robin" if together else "simultaneous"))
    gradients, extra = inputs(case, schedule)

    def step(params, state, g, extra):
        params, state = samples.step(tx, _unflat(g), params, state, **extra)
        return params, state, params

    map_over_replicas = optzoo.replicas.map_over_replicas(step)

    @jax.jit
    def run(start, inputs):
        def tick(carry, inputs):
            params, state, own_params = map_over_replicas(*carry, *inputs)
            return (params, state), _watch(meta, params, state, own_params)

        params = _unflat(start)
        carry = optzoo.replicas.replicate(params, tx.init(params), meta["workers"])
        (_, state), path = jax.lax.scan(tick, carry, inputs)
        return path, _slots(state)

    path, slots = jax.device_get(run(arrays["center"][0], (gradients, extra)))
    rows = [tick[-1].row for tick in schedule]
    at_the_end = {k: a for k, a in arrays.items() if k.startswith(("slot.", "power."))}
    theirs = {k: arrays[k][rows] for k in arrays.keys() - at_the_end.keys() - GIVEN}
    if meta["optimizer"] == "SyncReplicas":
        del theirs["local_step"]  # from the token queue
        theirs["num_accumulated"] = theirs["num_accumulated"][:, 0]  # of the first variable
        pushed = np.cumsum([len(tick) for tick in schedule])
        taken = _aggregate(meta) * theirs["global_step"] + theirs["num_accumulated"]
        theirs["dropped"] = pushed - taken
    ours, theirs = path | slots, theirs | at_the_end
    return {name: (ours[name], theirs[name]) for name in sorted(theirs)}


def error(ours: np.ndarray, theirs: np.ndarray) -> float:
    """The largest, relative to ``max(1, |theirs|)``; integers must be the same."""
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    if np.issubdtype(ours.dtype, np.integer):
        return 0.0 if np.array_equal(ours, theirs) else np.inf
    errors = np.abs(ours - theirs) / np.maximum(1, np.abs(theirs))
    return float(np.max(np.where(np.isfinite(ours), errors, np.inf), initial=0.0))


def _aggregate(meta):
    return meta["kwargs"]["replicas_to_aggregate"]


def _unflat(a):
    return {"w": a[..., :3], "b": a[..., 3:].reshape(*a.shape[:-1], 1, 2)}


def _flat(tree, batch=0):
    leaves = [tree[name] for name in ("w", "b")]
    return jnp.concatenate([a.reshape(*a.shape[:batch], -1) for a in leaves], axis=-1)


def _watch(meta, params, state, own_params):
    """What the records call it: what we have."""
    replicated, per_replica = state
    name = meta["optimizer"]
    counts = ("global_step", "stale_counter", "dropped")
    seen = {k: getattr(replicated, k) for k in counts if hasattr(replicated, k)}
    if name == "SyncReplicas":
        averages = optzoo.eval_params(params, state)
        return seen | {
            "center": _flat(params),
            "average": _flat(averages),
            "num_accumulated": replicated.count,
        }
    if name == "DropStaleGradient":
        return seen | {"center": _flat(params)}
    seen |= {"center": _flat(optzoo.eval_params(params, state)), "local": _flat(own_params, 1)}
    kept, trees = per_replica.method, ("local_center", "accumulated")
    seen |= {k: _flat(getattr(kept, k), 1) for k in trees if hasattr(kept, k)}
    return seen | {"local_step": per_replica.local_step}


def _slots(state):
    """The slots and powers of the inner optimizers."""
    replicated, per_replica = state
    if isinstance(state, SharedParamsState):
        center, local = replicated.inner, ()
    else:
        center, local = getattr(replicated.method, "center_inner", ()), per_replica.inner
    kept = {}
    # Powers belong to the workers, if these have some.
    for side, batch, tree in (("center", 0, center), ("local", 1, local)):
        for node in nodes_of(LeafwiseState, tree):
            slots = node.slots._asdict()
            kept |= {f"slot.{side}.{k}": _flat(v, batch) for k, v in slots.items()}
            kept |= {f"power.{k.removesuffix('_power')}": v for k, v in node.shared.items()}
    return kept
