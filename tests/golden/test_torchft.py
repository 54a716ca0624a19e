"""DiLoCo follows Streaming DiLoCo of torchft step by step; ``README.md`` describes the records."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optzoo
from optzoo.distributed.engine.launch import map_per_replica
from optzoo.testing import samples

FOLDER = pathlib.Path(__file__).with_name("torchft")
RECORDS = sorted(path.stem for path in FOLDER.glob("*.npz"))
PUBLISHED = json.loads((FOLDER / "published.json").read_text())
TOLERANCE = 1e-8
INNER = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.05, momentum=0.9),
    "adam": lambda: optax.adam(0.05),
}
OUTER = {
    "nesterov": lambda: None,  # the default
    "sgd": lambda: optax.sgd(1.0),
    "adam": lambda: optax.adam(0.1),
}


def trainer(tx):
    step = lambda params, state, grads, masks: samples.step(tx, grads, params, state, **masks)
    return jax.jit(optzoo.replicas.map_over_replicas(step))


@pytest.mark.every_value
@pytest.mark.parametrize("name", RECORDS)
def test_records(name, x64):
    arrays = dict(np.load(FOLDER / f"{name}.npz"))
    meta = json.loads(str(arrays.pop("meta")))
    with x64(True):
        tx = optzoo.diloco(
            INNER[meta["inner"]](),
            OUTER[meta["outer"]](),
            communication_period=meta["communication_period"],
            fragments=meta["fragments"],
            overlap_steps=meta["delay"],
            mixing=meta["mixing"],
        )
        start = [jnp.asarray(x) for x in arrays["start"]]
        params, state = optzoo.replicas.replicate(start, tx.init(start), meta["replicas"])
        train = trainer(tx)
        for t, gradients in enumerate(arrays["gradients"], 1):
            params, state = train(params, state, list(gradients.swapaxes(0, 1)), {})
            got = np.stack(params, axis=1), np.stack(state.replicated.center)
            for ours, key in zip(got, ("parameters", "centers"), strict=True):
                np.testing.assert_allclose(ours, arrays[key][t], rtol=0, atol=TOLERANCE)


def published(delay=0, mixing=0.0):
    """The optimizer of the histories that torchft publishes, at its start."""
    tx = optzoo.diloco(
        optzoo.gradient_descent(1.0),
        optax.sgd(2.0),
        communication_period=6,
        fragments=2,
        overlap_steps=delay,
        mixing=mixing,
    )
    start = [jnp.ones(1), jnp.ones(1)]
    return trainer(tx), *optzoo.replicas.replicate(start, tx.init(start), 2)


GRADIENT = [np.full((2, 1), 2.0, np.float32)] * 2
OPTIONS = {"updates_0": (0, 0.0), "updates_1": (0, 0.5), "updates_2": (0, 1.0), "updates_3": (1, 0)}


@pytest.mark.every_value
@pytest.mark.parametrize("name", OPTIONS)
def test_published_histories(name):
    train, params, state = published(*OPTIONS[name])
    for t in range(1, 16):
        params, state = train(params, state, GRADIENT, {})
        for rank, history in enumerate(PUBLISHED[name]):
            assert [x[rank].item() for x in params] == history["parameters"][str(t)]
            if str(t) in history["centers"]:
                center = state.replicated.center
                assert [c.item() for c in center] == history["centers"][str(t)]


def test_a_replica_fails_and_comes_back():
    """It fails at its second exchange, and takes the parameters of the other at its next one."""
    [of_first, of_second] = PUBLISHED["failure_recovery_0"]
    train, params, state = published()
    back, away = 9, {"active": np.array([True, False]), "arrived": np.array([True, False])}
    for t in range(1, 22):
        params, state = train(params, state, GRADIENT, away if 6 <= t <= back else {})
        if t == back:
            params, state = map_per_replica(lambda a: a.at[1].set(a[0]), params, state)
        histories = [(0, of_first, t)]
        if t < 3 or t >= back:  # the second one counts its steps anew
            histories.append((1, of_second, t if t < 3 else t - back + 3))
        for rank, history, at in histories:
            assert [x[rank].item() for x in params] == history["parameters"][str(at)]
            if str(at) in history["centers"]:
                center = state.replicated.center
                assert [c.item() for c in center] == history["centers"][str(at)]


def test_every_kind_is_recorded():
    metas = [json.loads(str(np.load(FOLDER / f"{name}.npz")["meta"])) for name in RECORDS]
    seen = lambda key: {meta[key] for meta in metas}
    assert seen("inner") == {*INNER} and seen("outer") == {*OUTER}
    assert len(metas) == 8 and seen("fragments") == {1, 2, 3, 4} and min(seen("delay")) == 0
