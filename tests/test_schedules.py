"""Schedules against the graph of TensorFlow 1.15.5, and as configs."""

import functools
import inspect
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optzoo import create, schedules

RECORDS = np.load(pathlib.Path(__file__).parent / "golden" / "schedules.npz")
CASES, STEPS = json.loads(str(RECORDS["meta"]))["cases"], RECORDS["steps"]


def test_each_schedule_has_a_record():
    assert {name for name, _ in CASES.values()} == set(schedules.__all__)


def schedule_of(case):
    name, arguments = CASES[case]
    return getattr(schedules, name)(**arguments)


@functools.cache
def compiled():
    """The values of all schedules, by one program."""
    of_all = lambda steps: {case: jax.vmap(schedule_of(case))(steps) for case in CASES}
    return jax.device_get(jax.jit(of_all)(STEPS))


@pytest.mark.every_value
@pytest.mark.parametrize("case", CASES)
def test_values_are_those_of_tensorflow(case):
    schedule, want = schedule_of(case), RECORDS[case]
    for got in (np.array([schedule(int(k)) for k in STEPS]), compiled()[case]):
        assert got.dtype == np.float32
        # A cosine near -1 is as exact as its angle: relative to the greatest rate.
        np.testing.assert_allclose(got, want, rtol=5e-7, atol=3e-7 * max(want))
    at = schedule(jnp.int32(3))
    assert at.dtype == jnp.float32 and at.shape == ()


@pytest.mark.parametrize("enabled", [True, False])
def test_strict_promotion(enabled, x64):
    with x64(enabled), jax.numpy_dtype_promotion("strict"):
        step = jax.ShapeDtypeStruct((), "int32")
        assert {jax.eval_shape(schedule_of(case), step).dtype.name for case in CASES} == {"float32"}


# As configs

X = {"w": jnp.array([1.0, -2.0])}


def rates_of(config, steps=12, **kwargs):
    """The rates that gradient descent has in its first steps."""
    tx = create(config, **kwargs)
    state, rates = tx.init(X), []
    for _ in range(steps):
        updates, state = tx.update(X, state, X)
        rates.append(-updates["w"][0])
    return np.array(rates)


def of(schedule, steps=12):
    return np.array([schedule(k) for k in range(steps)])


POLYNOMIAL = {"learning_rate": 0.1, "decay_steps": 5, "cycle": True}


@pytest.mark.parametrize(
    "name",
    ["tf.train.polynomial_decay", "polynomial_decay", "tf.compat.v1.train.polynomial_decay"],
)
def test_a_config_has_a_schedule(name):
    want = of(schedules.polynomial_decay(**POLYNOMIAL))
    rate = {"class": name, **POLYNOMIAL, "name": "x"}
    plain = {"class": "GradientDescent", "learning_rate": rate}
    np.testing.assert_array_equal(rates_of(plain), want)
    np.testing.assert_array_equal(rates_of("GradientDescent", learning_rate=rate), want)
    averaged = {"class": "MovingAverage", "average_decay": 0.5, "opt": plain}
    np.testing.assert_array_equal(rates_of(averaged), want)


@pytest.mark.parametrize("name", ["noam", "opennmt.schedules.NoamDecay", "NoamDecay"])
def test_noam_has_the_names_of_opennmt(name):
    want = of(schedules.noam(2.0, 16, 4))
    rate = {"class": name, "scale": 2.0, "model_dim": 16, "warmup_steps": 4}
    np.testing.assert_array_equal(rates_of("GradientDescent", learning_rate=rate), want)


S = schedules
MESSAGES = [
    (
        {"exponential_decay_learning_rate": {"decay_steps": 4, "burnin_steps": 3}},
        lambda: S.exponential_decay_with_burnin(0.002, 4, 0.95, 0.0, 3),
    ),
    (
        {
            "exponential_decay_learning_rate": {
                **{"initial_learning_rate": 0.1, "decay_steps": 3, "decay_factor": 0.5},
                **{"staircase": False, "burnin_learning_rate": 0.01, "burnin_steps": 4},
                "min_learning_rate": 0.02,
            }
        },
        lambda: S.exponential_decay_with_burnin(0.1, 3, 0.5, 0.01, 4, 0.02, False),
    ),
    (
        {
            "manual_step_learning_rate": {
                "initial_learning_rate": 0.01,
                "schedule": [{"step": 3, "learning_rate": 0.1}, {"step": 6}],
                "warmup": True,
            }
        },
        lambda: S.manual_stepping([3, 6], [0.01, 0.1, 0.002], True),
    ),
    (
        {"cosine_decay_learning_rate": {"total_steps": 10, "warmup_steps": 3}},
        lambda: S.cosine_decay_with_warmup(0.002, 10, 0.0002, 3, 0),
    ),
    (
        {"cosine_decay_learning_rate": {}},
        lambda: S.cosine_decay_with_warmup(0.002, 4_000_000, 0.0002, 10_000),
    ),
]


@pytest.mark.parametrize(("rate", "schedule"), MESSAGES)
def test_messages_of_object_detection(rate, schedule):
    message = {"learning_rate": rate, "momentum_optimizer_value": 0.0}
    got = rates_of({"momentum_optimizer": message, "use_moving_average": False})
    np.testing.assert_array_equal(got, of(schedule()))


@pytest.mark.parametrize(
    ("rate", "error", "message"),
    [
        (
            {"class": "tf.train.noisy_linear_cosine_decay", "learning_rate": 0.1},
            ValueError,
            "noisy_linear_cosine_decay draws random numbers of TensorFlow",
        ),
        ({"class": "polynomial"}, ValueError, "no schedule is called 'polynomial'; the nearest"),
        ({"class": "optax.cosine_decay"}, ValueError, "no schedule is called 'optax.cosine_decay'"),
        ({"class": "cosine_decay"}, TypeError, "cosine_decay needs learning_rate, decay_steps"),
        (
            {"class": "cosine_decay", "learning_rate": 1.0, "decay_steps": 2, "alpa": 1},
            TypeError,
            "cosine_decay has no argument 'alpa'; the nearest are alpha",
        ),
        ({"learning_rate": 0.1}, TypeError, "learning_rate must be a number, a schedule or a dict"),
        (
            {"manual_step_learning_rate": {}},
            ValueError,
            "manual_step_learning_rate has no schedule",
        ),
        (
            {"manual_step_learning_rate": {"schedule": [{"step": 0, "learning_rate": 0.1}]}},
            ValueError,
            r"step of a part of schedule must be at least 1, got \{'step': 0,",
        ),
        (
            {"cosine_decay_learning_rate": {"steps": 3}},
            TypeError,
            "cosine_decay_learning_rate has no field 'steps'",
        ),
    ],
)
def test_configs_that_are_refused(rate, error, message):
    with pytest.raises(error, match=message):
        create("adam", learning_rate=rate)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: S.piecewise_constant([1.5], [1, 2]), TypeError, "boundaries must be an int"),
        (lambda: S.piecewise_constant([3, 3], [1, 2, 3]), ValueError, "boundaries must increase"),
        (
            lambda: S.piecewise_constant([3], [1]),
            ValueError,
            "values must have one more element than bound",
        ),
        (
            lambda: S.manual_stepping([0], [1, 2]),
            ValueError,
            "boundaries must be at least 1, got 0",
        ),
        (lambda: S.manual_stepping([1], ["a", 2]), TypeError, "rates must be a number"),
        (lambda: S.polynomial_decay(0.1, 0), ValueError, "decay_steps must be positive"),
        (lambda: S.polynomial_decay(0.1, 1, cycle=2), TypeError, "cycle must be True or False"),
        (
            lambda: S.cosine_decay_with_warmup(0.1, 5, 0.0, 5),
            ValueError,
            "total_steps must be more than warmup_steps",
        ),
        (
            lambda: S.cosine_decay_with_warmup(0.1, 9, 0.2, 5),
            ValueError,
            "warmup_learning_rate must be at most learning_rate=0.1, got 0.2",
        ),
        (lambda: S.noam(1.0, 0, 4), ValueError, "model_dim must be positive"),
    ],
)
def test_refuses(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_message_with_one_part():
    """Parsers of messages give a single part without a list."""
    rate = lambda schedule: {
        "manual_step_learning_rate": {"initial_learning_rate": 0.1, "schedule": schedule}
    }
    part = {"step": 5, "learning_rate": 0.01}
    for schedule in (part, [part]):
        tx = create({"class": "gradient_descent", "learning_rate": rate(schedule)})
        steps = [-float(tx.update(jnp.ones(()), tx.init(jnp.ones(())))[0])]
        state = tx.init(jnp.ones(()))
        for _ in range(6):
            u, state = tx.update(jnp.ones(()), state)
            steps.append(-float(u))
        np.testing.assert_allclose(steps, [0.1] * 6 + [0.01], rtol=1e-6)


@pytest.mark.every_value
@pytest.mark.parametrize("name", schedules.__all__)
def test_wrong_values_of_each_argument(name):
    make, [arguments, *_] = getattr(schedules, name), [a for n, a in CASES.values() if n == name]
    single = [p for p in inspect.signature(make).parameters.values() if "Seq" not in p.annotation]
    for argument in single:
        for value in ("True", float("nan")):
            with pytest.raises((TypeError, ValueError), match=f"^{argument.name} must be"):
                make(**arguments | {argument.name: value})
