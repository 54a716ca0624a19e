"""The distributed optimizers follow clusters of TensorFlow 1.15.5, event by event."""

import pytest

from tests.distributed import replay

# Both compute tens of steps in float32; the roundings differ.
TOLERANCE = 2e-6

CASES = replay.load()
WAYS = [(name, together) for name, case in CASES.items() for together in replay.ways(case)]


@pytest.mark.every_value
@pytest.mark.parametrize(("name", "together"), WAYS)
def test_follows_the_cluster(name, together):
    for array, (ours, theirs) in replay.follow(CASES[name], together).items():
        error = replay.error(ours, theirs)
        assert error <= TOLERANCE, f"off by {error:.1e} in {array}"


@pytest.mark.parametrize("name", [name for name in CASES if "round_robin" in name])
def test_the_counts_of_simultaneous_exchanges_are_those_of_successive_ones(name):
    arrays = replay.follow(CASES[name], together=True, order="simultaneous")
    for array in ("global_step", "local_step"):
        assert replay.error(*arrays[array]) == 0


def test_every_history_applies():
    assert all(map(replay.applies, CASES.values()))


def test_every_wrapper_has_records_with_every_inner_optimizer():
    metas = [case.meta for case in CASES.values()]
    recorded = {(meta["optimizer"], meta["kwargs"]["opt"]["$opt"]) for meta in metas}
    wrappers = ("AGN", "DropStaleGradient", "ElasticAverage", "ModelAverage", "SyncReplicas")
    inners = ("GradientDescent", "Momentum", "Adam")
    assert recorded == {(wrapper, inner) for wrapper in wrappers for inner in inners}
