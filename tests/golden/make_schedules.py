"""Records of TensorFlow's schedules of the learning rate, for ``tests/test_schedules.py``.

    python3.7 -m pip install tensorflow==1.15.5 'protobuf<3.21'
    python3.7 tests/golden/make_schedules.py

``schedules.npz`` has the steps, an int32 array, and for each case the rates at them, in float32, as
the graph computes them from a global step. ``meta`` is JSON: for each case the name of the schedule
and its arguments, and the version. The functions of object_detection and OpenNMT-tf are written
here anew, in TensorFlow, from their definitions.
"""

import json
import pathlib

import numpy as np
import tensorflow as tf

STEPS = sorted({*range(0, 64), 99, 100, 101, 149, 150, 199, 200, 201, 299, 300, 301, 1000, 123457})
CASES = {
    "exponential": ("exponential_decay", dict(learning_rate=0.1, decay_steps=7, decay_rate=0.9)),
    "exponential stairs": (
        "exponential_decay",
        dict(learning_rate=0.1, decay_steps=10, decay_rate=0.96, staircase=True),
    ),
    "exponential stairs 41": (  # at step 41 the quotient is below 1
        "exponential_decay",
        dict(learning_rate=0.1, decay_steps=41, decay_rate=0.5, staircase=True),
    ),
    "natural": ("natural_exp_decay", dict(learning_rate=0.3, decay_steps=20, decay_rate=0.5)),
    "natural stairs": (
        "natural_exp_decay",
        dict(learning_rate=0.3, decay_steps=5, decay_rate=0.2, staircase=True),
    ),
    "inverse": ("inverse_time_decay", dict(learning_rate=0.1, decay_steps=3, decay_rate=0.5)),
    "inverse stairs": (
        "inverse_time_decay",
        dict(learning_rate=0.1, decay_steps=7, decay_rate=0.5, staircase=True),
    ),
    "polynomial": ("polynomial_decay", dict(learning_rate=0.1, decay_steps=100)),
    "polynomial power": (
        "polynomial_decay",
        dict(learning_rate=0.1, decay_steps=50, end_learning_rate=0.01, power=2.0),
    ),
    "polynomial cycles": ("polynomial_decay", dict(learning_rate=0.1, decay_steps=10, cycle=True)),
    "polynomial cycles, root": (
        "polynomial_decay",
        dict(learning_rate=0.1, decay_steps=7, end_learning_rate=0.0, power=0.5, cycle=True),
    ),
    "piecewise": (
        "piecewise_constant",
        dict(boundaries=[10, 30, 100], values=[0.1, 0.05, 0.3, 0.001]),
    ),
    "piecewise one": ("piecewise_constant", dict(boundaries=[0], values=[0.5, 0.1])),
    "cosine": ("cosine_decay", dict(learning_rate=0.1, decay_steps=50)),
    "cosine alpha": ("cosine_decay", dict(learning_rate=0.1, decay_steps=60, alpha=0.05)),
    "restarts": ("cosine_decay_restarts", dict(learning_rate=0.1, first_decay_steps=9)),
    "restarts equal": (
        "cosine_decay_restarts",
        dict(learning_rate=0.1, first_decay_steps=8, t_mul=1.0, m_mul=0.9, alpha=0.1),
    ),
    "linear cosine": ("linear_cosine_decay", dict(learning_rate=0.1, decay_steps=50)),
    "linear cosine periods": (
        "linear_cosine_decay",
        dict(learning_rate=0.1, decay_steps=60, num_periods=2.5, alpha=0.1, beta=0.01),
    ),
    "noam": ("noam", dict(learning_rate=2.0, model_dim=512, warmup_steps=40)),
    "manual": ("manual_stepping", dict(boundaries=[10, 30, 100], rates=[0.1, 0.05, 0.01, 0.001])),
    "manual warmup": (
        "manual_stepping",
        dict(boundaries=[10, 30], rates=[0.01, 0.1, 0.02], warmup=True),
    ),
    "burnin": (
        "exponential_decay_with_burnin",
        dict(
            learning_rate=0.1,
            decay_steps=10,
            decay_rate=0.9,
            burnin_learning_rate=0.003,
            burnin_steps=20,
            min_learning_rate=0.02,
        ),
    ),
    "burnin smooth": (
        "exponential_decay_with_burnin",
        dict(learning_rate=0.1, decay_steps=9, decay_rate=0.9, burnin_steps=5, staircase=False),
    ),
    "warmup": (
        "cosine_decay_with_warmup",
        dict(learning_rate=0.1, total_steps=200, warmup_learning_rate=0.01, warmup_steps=30),
    ),
    "warmup hold": (
        "cosine_decay_with_warmup",
        dict(learning_rate=0.1, total_steps=150, warmup_steps=10, hold_base_rate_steps=20),
    ),
    "no warmup": ("cosine_decay_with_warmup", dict(learning_rate=0.1, total_steps=100)),
}


def noam(step, learning_rate, model_dim, warmup_steps):
    t = tf.cast(step + 1, tf.float32)
    return learning_rate * model_dim**-0.5 * tf.minimum(t**-0.5, t * warmup_steps**-1.5)


def manual_stepping(step, boundaries, rates, warmup=False):
    if warmup:
        first = boundaries[0]
        slope = (rates[1] - rates[0]) / first
        rates = [rates[0] + slope * i for i in range(first)] + rates[1:]
        boundaries = list(range(1, first)) + boundaries
    passed = tf.reduce_sum(tf.cast(step >= tf.constant(boundaries), tf.int32))
    return tf.gather(tf.constant(rates), passed)


def exponential_decay_with_burnin(
    step,
    learning_rate,
    decay_steps,
    decay_rate,
    burnin_learning_rate=0.0,
    burnin_steps=0,
    min_learning_rate=0.0,
    staircase=True,
):
    later = tf.train.exponential_decay(
        learning_rate, step - burnin_steps, decay_steps, decay_rate, staircase
    )
    rate = tf.cond(
        step < burnin_steps, lambda: burnin_learning_rate or learning_rate, lambda: later
    )
    return tf.maximum(rate, min_learning_rate)


def cosine_decay_with_warmup(
    step,
    learning_rate,
    total_steps,
    warmup_learning_rate=0.0,
    warmup_steps=0,
    hold_base_rate_steps=0,
):
    before = warmup_steps + hold_base_rate_steps
    f = (tf.cast(step, tf.float32) - before) / (total_steps - before)
    rate = tf.where(step > total_steps, 0.0, 0.5 * learning_rate * (1 + tf.cos(np.pi * f)))
    if hold_base_rate_steps:
        rate = tf.where(step > before, rate, learning_rate)
    if warmup_steps:
        rise = (learning_rate - warmup_learning_rate) / warmup_steps
        rise = rise * tf.cast(step, tf.float32) + warmup_learning_rate
        rate = tf.where(step < warmup_steps, rise, rate)
    return rate


OTHERS = {f.__name__: f for f in (noam, manual_stepping, exponential_decay_with_burnin)}
OTHERS["cosine_decay_with_warmup"] = cosine_decay_with_warmup


def rates(name, arguments):
    """The rates at all steps, from one graph with a global step."""
    with tf.Graph().as_default(), tf.Session() as session:
        step = tf.placeholder(tf.int32, ())
        if name in OTHERS:
            rate = OTHERS[name](step, **arguments)
        elif name == "piecewise_constant":
            rate = tf.train.piecewise_constant(step, **arguments)
        else:
            rate = getattr(tf.train, name)(global_step=step, **arguments)
        return np.array([session.run(rate, {step: k}) for k in STEPS], np.float32)


if __name__ == "__main__":
    arrays = {name: rates(*case) for name, case in CASES.items()}
    meta = json.dumps({"cases": CASES, "tensorflow": tf.__version__})
    path = pathlib.Path(__file__).with_name("schedules.npz")
    np.savez_compressed(path, steps=np.array(STEPS, np.int32), meta=np.array(meta), **arrays)
