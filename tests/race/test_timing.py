"""The times of steps: warm, with their range, and again where a figure is far off."""

import jax.numpy as jnp
import pytest

from optzoo import race
from optzoo.race import session, timing

from .test_race import line


@pytest.fixture
def clock(monkeypatch):
    """Each step takes as long as the list says, by its number; 1 s after its end."""
    durations, now = {}, [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def step(params, state, examples, global_step):
        now[0] += durations.get(global_step, 1.0)
        return params + 1, state, 0.0

    return step, durations


def stretches(step, **more):
    return timing.time_stretches(
        step, jnp.zeros(()), (), (), **({"steps": 2, "stretches": 3} | more)
    )


def test_the_first_steps_do_not_count(clock):
    step, durations = clock
    durations |= {0: 1000.0, 1: 50.0, 2: 50.0}
    assert stretches(step) == [1.0, 1.0, 1.0]


def test_periodic_work_counts(clock):
    step, durations = clock
    durations |= {i: 5.0 for i in range(3, 100, 2)}
    assert stretches(step) == [3.0, 3.0, 3.0]


def test_a_disturbed_stretch_is_timed_again(clock):
    step, durations = clock
    durations[3] = 100.0
    assert stretches(step) == [1.0, 1.0, 1.0]
    # One that is only slow counts.
    durations.clear()
    durations[3] = 9.0
    assert sorted(stretches(step)) == [1.0, 1.0, 5.0]


def test_what_is_always_uneven_ends(clock):
    step, durations = clock
    durations |= {i: 100.0**i for i in range(40)}
    assert len(stretches(step)) == 3


def run(problem, seconds):
    return {"problem": problem, "seconds per step": seconds}


def test_times_far_from_those_of_the_others_are_doubtful():
    seconds = {"a": 1.0, "b": 1.5, "slow": 10.1, "fast": 0.09, "fine": 2.0}
    runs = {("p", name, ""): run("p", s) for name, s in seconds.items()}
    runs |= {("q", "slow", ""): run("q", 10.1), ("p", "no", ""): {"skipped": "reason"}}
    found = session._doubtful_times(runs)
    assert found == [("p", "fast", "")]
    runs["p", "slow", ""]["seconds per step"] = 15.1
    assert session._doubtful_times(runs) == [("p", "slow", ""), ("p", "fast", "")]


def test_a_doubtful_time_is_measured_again(monkeypatch):
    doubted = []

    def doubtful(runs):
        doubted.extend(runs)
        return list(runs)

    asked = []

    def times(start, entrant, rate):
        asked.append(rate)
        return {"seconds per step": 0.0 if len(asked) == 1 else 1e9}

    monkeypatch.setattr(session, "_doubtful_times", doubtful)
    monkeypatch.setattr(session, "times", times)
    settings = race.Settings(rates=(0.1,), seeds=1, timed_steps=1, timed_stretches=1)
    results = race.run([line()], ["adam", "momentum"], settings=settings)["results"]
    assert len(doubted) == len(asked) == 2
    first, second = (r["seconds per step"] for r in results)
    assert first == 0 and 0 < second < 1e9  # the lower one is kept
