"""Records what the optimizers of TensorFlow 1.15.5 and of RETURNN do into ``records/*.xz``.

And what those of ``published.py`` do there, which are in neither.

    python3.7 -m pip install tensorflow==1.15.5 'protobuf<3.21' 'numpy<1.19'
    python3.7 -m pip install returnn==1.20210901.233229 dm-tree  # for the cases of RETURNN
    python3.7 tests/golden/make_records.py [--only PREFIX] [--out DIR]

Deterministic: two runs give identical files. ``README.md`` describes the format.
"""

import argparse
import collections
import contextlib
import functools
import json
import lzma
import math
import os
import sys
import types
import unittest.mock
import zlib

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import published
import tensorflow as tf
from tensorflow.contrib import opt as contrib_opt
from tensorflow.contrib.opt.python.training import matrix_functions, shampoo, sign_decay
from tensorflow.contrib.opt.python.training import weight_decay_optimizers

tf.compat.v1.logging.set_verbosity(tf.compat.v1.logging.ERROR)

STEPS = 32
DENSE = {"s": (), "v": (5,), "w": (4, 3), "t": (2, 3, 2)}
SPARSE = {"e": (6, 4), "b": (5,)}
# For the originals that refuse scalars.
NO_SCALAR = {"v": (3,), "w": (3, 2), "t": (2, 3, 2)}

SIGN_DECAYS = {
    "linear": sign_decay.get_linear_decay_fn,
    "cosine": sign_decay.get_cosine_decay_fn,
    "restart": sign_decay.get_restart_decay_fn,
}

FLOAT32_ONLY = ("AMSGrad", "CustomAdam")  # the originals do not run in float64
PATCHED = ("Shampoo", "ShampooW")  # these do with a patch


# ------------------------------------------------------------------------------- the cases
EVERY, DISTINCT, BOTH = "dense sparse dup", "dense sparse", "f32 f64"
STEP = {"$global_step": 1}
FALLING = {"$of_step": "0.1 / (1.0 + 0.2 * k)"}
OTHER_ADAM = {"learning_rate": 0.1, "beta1": 0.5, "beta2": 0.9, "epsilon": 1e-3}


def cases():
    """One dict for each record: what to run on which kind of gradients, in which dtype."""
    table = []

    def add(optimizer, tag, kwargs, kinds="dense dup", dtypes="f64", start=0, **more):
        for kind in kinds.split():
            for dtype in dtypes.split():
                case = {
                    "case": "-".join((optimizer, tag, kind, dtype)),
                    "optimizer": optimizer,
                    "kwargs": kwargs,
                    "kind": kind,
                    "dtype": {"f32": "float32", "f64": "float64"}[dtype],
                    "global_step_start": start,
                }
                table.append(dict(case, **more))

    sections = (first_order, adams, signs, proximal, second_order, decoupled, wrappers, returnn)
    sections += (of_projects,)
    for section in sections:
        section(add)
    return table


def first_order(add):
    add("GradientDescent", "lr0.1", {"learning_rate": 0.1}, EVERY, BOTH)
    add("GradientDescent", "falling", {"learning_rate": FALLING}, "dense", BOTH)

    add("Momentum", "m0.9", {"learning_rate": 0.1, "momentum": 0.9}, EVERY, BOTH)
    nesterov = {"learning_rate": 0.1, "momentum": 0.9, "use_nesterov": True}
    add("Momentum", "nesterov", nesterov, dtypes=BOTH)
    add("Momentum", "falling", {"learning_rate": FALLING, "momentum": 0.9}, "dense", BOTH)

    add("Adagrad", "lr0.1", {"learning_rate": 0.1}, EVERY, BOTH)
    start_at_one = {"learning_rate": 1.0, "initial_accumulator_value": 1.0}
    add("Adagrad", "acc1", start_at_one, dtypes=BOTH)
    tiny = {"learning_rate": 0.01, "initial_accumulator_value": 1e-6}
    add("Adagrad", "acc1e-6", tiny, "dense")
    add("RegAdagrad", "lr0.1", {"learning_rate": 0.1}, EVERY, BOTH)
    avoid = [0, 1, 2, 9, 10, 20, 31]
    add("RegAdagrad", "avoid", start_at_one, avoid_updating_slots_steps=avoid)

    add("Adadelta", "default", {}, EVERY, BOTH)
    add("Adadelta", "lr1", {"learning_rate": 1.0, "rho": 0.9, "epsilon": 1e-4})

    add("RMSProp", "lr0.01", {"learning_rate": 0.01}, EVERY, BOTH)
    lively = {"learning_rate": 0.01, "decay": 0.5, "momentum": 0.9, "epsilon": 1e-3}
    add("RMSProp", "momentum", lively, dtypes=BOTH)
    add("RMSProp", "falling", {"learning_rate": FALLING, "momentum": 0.9}, "dense", "f32")
    centered = {"learning_rate": 0.01, "centered": True, "epsilon": 1e-2}
    add("RMSProp", "centered", centered, EVERY)
    lively = {"learning_rate": 0.05, "decay": 0.8, "momentum": 0.5, "epsilon": 0.1}
    add("RMSProp", "centered-momentum", dict(lively, centered=True))

    add("LARS", "lr1", {"learning_rate": 1.0}, EVERY, BOTH)
    strong = {"learning_rate": 0.1, "eeta": 0.1, "weight_decay": 0.1}
    nesterov = dict(strong, momentum=0.8, epsilon=1e-3, use_nesterov=True)
    add("LARS", "nesterov", nesterov)
    add("LARS", "skip", dict(strong, skip_list=["v", "t"]), "dense")
    add("LARS", "zero-start", strong, "dense", BOTH, zero_start=["w"])


def adams(add):
    for name in ("Adam", "LazyAdam", "AdaMax"):
        add(name, "default", {}, EVERY, BOTH)
        add(name, "other", OTHER_ADAM, dtypes=BOTH)
        add(name, "falling", {"learning_rate": FALLING}, "dense", "f32")
    big_eps = {"learning_rate": 0.05, "beta1": 0.9, "beta2": 0.99, "epsilon": 0.1}
    add("Adam", "eps0.1", big_eps, "dense")

    add("Nadam", "default", {}, EVERY, BOTH)
    add("Nadam", "other", OTHER_ADAM)

    for name, kind in (("AdamGS", "dense"), ("LazyAdamGS", "dup")):
        add(name, "default", {"global_step": STEP}, EVERY, BOTH)
        add(name, "start100", {"global_step": STEP}, kind, BOTH, start=100)
        add(name, "other", dict(OTHER_ADAM, global_step=STEP), "dup")


def signs(add):
    decays = (
        ("linear", "linear", {"decay_steps": 20}, 0),
        ("cosine", "cosine", {"decay_steps": 20}, 0),
        ("cosine-zero", "cosine", {"decay_steps": 24, "num_periods": 1.5, "zero_after": 1.0}, 0),
        ("restart", "restart", {"decay_steps": 20, "num_periods": 2}, 0),
        ("restart-zero", "restart", {"decay_steps": 24, "num_periods": 3, "zero_after": 2}, 3),
    )
    other = {"beta": 0.5, "learning_rate": 0.02}
    for name, other, decays in (
        ("AddSign", dict(other, alpha=0.5), decays),
        ("PowerSign", dict(other, base=2.0), decays[::2]),
    ):
        add(name, "default", {}, EVERY, BOTH)
        add(name, "other", other, dtypes=BOTH)
        for tag, kind, args, start in decays:
            kwargs = {"learning_rate": 0.05, "sign_decay_fn": {"$sign_decay": kind, "args": args}}
            add(name, tag, kwargs, "dense", start=start)


def ftrl(learning_rate=0.1, power=-0.5, start=0.1, l1=0.0, l2=0.0, shrinkage=0.0):
    return {
        "learning_rate": learning_rate,
        "learning_rate_power": power,
        "initial_accumulator_value": start,
        "l1_regularization_strength": l1,
        "l2_regularization_strength": l2,
        "l2_shrinkage_regularization_strength": shrinkage,
    }


def proximal(add):
    add("Ftrl", "lr0.1", {"learning_rate": 0.1}, EVERY, BOTH)
    add("Ftrl", "l1l2", ftrl(l1=0.5, l2=0.1), EVERY, BOTH)
    add("Ftrl", "shrinkage", ftrl(l1=0.2, l2=0.05, shrinkage=0.3), EVERY)
    add("Ftrl", "power-0.3", ftrl(0.5, power=-0.3, start=1.0, l1=0.05))
    add("Ftrl", "power0", ftrl(0.05, power=0.0, l2=0.1))
    add("Ftrl", "power-0.7", ftrl(0.2, power=-0.7, shrinkage=0.1))
    add("Ftrl", "acc0", ftrl(0.2, start=0.0, l1=0.01), "dense")

    def regularized(l1, l2, **kwargs):
        strengths = {"l1_regularization_strength": l1, "l2_regularization_strength": l2}
        return dict(kwargs, **strengths)

    plain = {"learning_rate": 0.1, "global_step": STEP}
    add("AdagradDA", "lr0.1", plain, EVERY, BOTH)
    add("AdagradDA", "l1l2", regularized(0.02, 0.1, **plain), dtypes=BOTH)
    late = dict(plain, initial_gradient_squared_accumulator_value=1.0)
    add("AdagradDA", "start100", regularized(0.001, 0.01, **late), start=100)

    # In float64 these two take no Python numbers.
    number = lambda x: {"$tensor": x}
    plain = regularized(number(0.0), number(0.0), learning_rate=number(0.1))
    l1l2 = regularized(number(0.05), number(0.2), learning_rate=number(0.1))
    for name in ("ProximalGradientDescent", "ProximalAdagrad"):
        add(name, "lr0.1", plain, EVERY, BOTH)
        add(name, "l1l2", l1l2, dtypes=BOTH)


def second_order(add):
    shampoos(add)
    ggts(add)


def shampoos(add):
    one, two = {"w": (3, 2)}, {"v": (3,), "w": (3, 2)}
    table, tables = {"e": (5, 2)}, {"e": (5, 2), "b": (4,)}
    ridge = {"epsilon": 1e-2}

    def shampoo(tag, kinds, dtypes, shapes, kwargs, start=0, optimizer="Shampoo", **more):
        kwargs = dict({"global_step": STEP, "learning_rate": 0.1}, **kwargs)
        # What rounding costs grows with the ratio of the squared gradients to epsilon.
        more = dict(more, shapes=shapes, grad_scale=math.sqrt(kwargs.get("epsilon", 1e-4)))
        add(optimizer, tag, kwargs, kinds, dtypes, start, **more)

    def dense(tag, dtypes="f64", shapes=one, start=0, **kwargs):
        shampoo(tag, "dense", dtypes, shapes, kwargs, start)

    def rows(tag, dtypes="f64", shapes=table, **kwargs):
        shampoo(tag, "dup", dtypes, shapes, kwargs)

    plain = {"global_step": STEP}
    add("Shampoo", "default", plain, "dense", BOTH, shapes=NO_SCALAR, grad_scale=0.01)
    dense("lr0.1", BOTH, two)
    dense("momentum", BOTH, two, gbar_decay=0.9, gbar_weight=0.1)
    dense("ema", BOTH, two, mat_gbar_decay=0.9, mat_gbar_weight=0.1, **ridge)
    dense("forget", mat_gbar_decay=0.0, **ridge)
    dense("alpha1", alpha=1.0, **ridge)
    dense("eps0.1", epsilon=0.1)

    # Some dimensions too large for a matrix; then all. A zero gradient first: 0 ** -a is not inf.
    zeros = {"zero_steps": {"v": [0, 1, 8], "w": [0, 2, 9]}}
    shampoo("mixed", "dense", BOTH, NO_SCALAR, {"max_matrix_size": 2}, **zeros)
    shampoo("diagonal", "dense", BOTH, two, {"max_matrix_size": 1}, **zeros)
    dense("diagonal-forget", max_matrix_size=1, mat_gbar_decay=0.0)
    means = {"gbar_decay": 0.9, "gbar_weight": 0.1, "mat_gbar_decay": 0.95, "mat_gbar_weight": 0.05}
    means = dict(means, max_matrix_size=2, svd_interval=2, **ridge)
    dense("mixed-means", shapes={"t": (2, 3, 2)}, **means)

    dense("svd4", BOTH, two, svd_interval=4, **ridge)
    dense("precond5", BOTH, two, precond_update_interval=5, **ridge)
    dense("precond5-forget", precond_update_interval=5, mat_gbar_decay=0.0, **ridge)
    intervals = {"svd_interval": 3, "precond_update_interval": 2, "epsilon": 1e-2}
    dense("svd3-precond2", BOTH, **intervals)
    dense("start100", start=100, **intervals)

    # With a matrix + epsilon of small norm, the square root stops after its first iteration.
    iterative = {"use_iterative_root": True, "epsilon": 0.25}
    dense("iterative", BOTH, two, **iterative)
    dense("iterative-small", use_iterative_root=True, precond_update_interval=5)
    # It wants rank / (2 * alpha) to be whole.
    root = dict(iterative, alpha=1.0, svd_interval=3)
    dense("iterative-svd3", gbar_decay=0.9, gbar_weight=0.1, **root)

    of = lambda expression: {"$fn_of_T": expression}
    matrix_means = {"mat_gbar_decay": of("(T - 1.0) / T"), "mat_gbar_weight": of("1.0 / T")}
    means = {"gbar_decay": of("T / (T + 1.0)"), "gbar_weight": of("1.0 / (T + 1.0)")}
    rates = {"learning_rate": of("0.2 / (1.0 + 0.1 * T)"), "alpha": of("0.5 - 0.1 / T")}
    schedules = dict(dict(matrix_means, **means), **dict(rates, **ridge))
    dense("schedules", "f32", two, max_matrix_size=2, **schedules)
    dense("schedules", "f64", NO_SCALAR, max_matrix_size=2, **schedules)
    dense("schedules-start100", start=100, **schedules)
    seldom = {"precond_update_interval": of("where(T < 10.0, 1.0, 4.0)"), "epsilon": 1e-2}
    dense("precond-schedule", BOTH, **seldom)
    dense("precond-schedule-svd2", svd_interval=2, **dict(seldom, **matrix_means))

    dense("ranks", shapes={"q": (2, 3, 1, 2), "p": (2, 1, 2, 2, 2)}, **ridge)
    ones = {"a": (1,), "b": (1, 1), "c": (3, 1)}
    dense("ones", shapes=ones)
    dense("ones-iterative", shapes=ones, **iterative)

    # They stay rows if they are too many for a matrix and gbar_decay is the number 0.
    rows("densified", BOTH, tables)
    zeros = {"zero_steps": {"e": [0, 1, 9], "b": [0, 3]}}
    shampoo("rows", "sparse", "f64", tables, {"max_matrix_size": 2}, **zeros)
    shampoo("rows", "dup", BOTH, tables, {"max_matrix_size": 2}, **zeros)
    rows("rows-mixed", shapes={"u": (4, 2, 3)}, max_matrix_size=2)
    weights = {"max_matrix_size": 2, "gbar_weight": 0.5, "mat_gbar_weight": 0.2}
    rows("rows-intervals", **dict(intervals, **weights))
    rows("rows-diagonal", max_matrix_size=1)
    rows("rows-iterative", max_matrix_size=2, **iterative)
    rows("rows-momentum", max_matrix_size=2, gbar_decay=0.9)
    rows("rows-schedules", max_matrix_size=2, **schedules)

    # Its mat_gbar_decay and mat_gbar_weight are not what they are called.
    decay = {"weight_decay": 0.01}
    shampoo("wd0.01", "dense", BOTH, two, decay, optimizer="ShampooW")
    few = dict(decay, max_matrix_size=2)
    shampoo("rows", "dup", "f64", table, few, optimizer="ShampooW")


def ggts(add):
    def ggt(tag, dtypes="f64", shapes={"v": (3,), "w": (3, 2)}, start=0, scale=0.1, **kwargs):
        # Nothing orders its reads and writes of variables that are not resource variables.
        more = {"shapes": shapes, "grad_scale": scale, "variables": "resource"}
        add("GGT", tag, kwargs, "dense", dtypes, start, **more)

    # What rounding costs grows with the ratio of the squared gradients to svd_eps.
    ggt("default", BOTH, NO_SCALAR, scale=0.01)
    other = {"learning_rate": 0.01, "beta1": 0.5, "svd_eps": 1e-4, "sigma_eps": 1e-3}
    ggt("window4", BOTH, window=4, **other)
    ggt("window1", window=1, **other)
    ggt("window40", shapes={"w": (3, 2)}, window=40, **other)
    ggt("falling", "f32", svd_eps=1e-2, learning_rate=FALLING)
    ggt("start100", svd_eps=1e-2, learning_rate=FALLING, start=100)
    # Never above eps; then now and then.
    ggt("notail", BOTH, window=5, eps=10.0, sigma_eps=0.1, learning_rate=0.01)
    ggt("sometail", window=3, eps=0.02, svd_eps=1e-4, beta1=0.5, learning_rate=0.01)
    ggt("big", shapes={"v": (5,), "w": (5, 4)}, window=6, svd_eps=1e-3)


def decoupled(add):
    add("AdamW", "wd0.01", {"weight_decay": 0.01}, EVERY, BOTH)
    add("AdamW", "other", dict(OTHER_ADAM, weight_decay=0.1))
    some = {"weight_decay": 0.1, "learning_rate": 0.01}
    add("AdamW", "some", some, "dense", decay_var_list=["w", "s"])
    add("AdamW", "some", some, "dup", decay_var_list=["b"])

    momentum = {"weight_decay": 0.01, "learning_rate": 0.1, "momentum": 0.9}
    add("MomentumW", "wd0.01", momentum, EVERY, BOTH)
    add("MomentumW", "nesterov", dict(momentum, use_nesterov=True))
    add("MomentumW", "some", momentum, "dense", decay_var_list=["v"])

    for base, kwargs, dtypes in (
        ("AdaMax", {"weight_decay": 0.05, "learning_rate": 0.01}, BOTH),
        ("Adagrad", {"weight_decay": 0.02, "learning_rate": 0.1}, "f64"),
        ("RMSProp", {"weight_decay": 0.02, "learning_rate": 0.01, "momentum": 0.5}, "f64"),
        ("Ftrl", dict(ftrl(l1=0.2, l2=0.1), weight_decay=0.02), "f64"),
    ):
        kwargs = dict(kwargs, base_optimizer=base)
        add("extend_with_decoupled_weight_decay", base, kwargs, dtypes=dtypes)


def wrappers(add):
    sgd = {"$opt": "GradientDescent", "kwargs": {"learning_rate": 0.1}}
    momentum = {"$opt": "Momentum", "kwargs": {"learning_rate": 0.05, "momentum": 0.9}}
    adam = {"$opt": "Adam", "kwargs": {"learning_rate": 0.05}}

    def clip(tag, opt, max_norm, axes, kind, dtypes="f64"):
        kwargs = {"opt": opt, "max_norm": max_norm, "vars_to_clip_dims": {"$var_dict": axes}}
        add("VariableClipping", tag, kwargs, kind, dtypes)

    clip("each", sgd, 0.8, {"s": [], "v": [0], "w": [1], "t": [0, 1]}, "dense", BOTH)
    clip("momentum", momentum, 1.5, {"v": [], "w": [0, 1]}, "dense")
    clip("rows", sgd, 1.2, {"e": [1], "b": []}, "sparse", BOTH)
    clip("columns", sgd, 1.5, {"e": [0], "b": [0]}, "sparse")
    clip("whole", momentum, 3.0, {"e": [0, 1]}, "sparse")
    clip("adam", adam, 1.0, {"e": [1]}, "sparse", BOTH)

    def average(tag, opt, decay, num_updates=None, kinds="dense dup", **more):
        kwargs = {"opt": opt, "average_decay": decay, "num_updates": num_updates}
        add("MovingAverage", tag, kwargs, kinds, **more)

    add("MovingAverage", "default", {"opt": momentum}, dtypes=BOTH)
    average("adam", adam, 0.9)
    average("seven", momentum, 0.99, 7, "dense")
    # The step after the update, for sure only on resource variables.
    average("counted", momentum, 0.7, STEP, dtypes=BOTH, variables="resource")
    average("start100", adam, 0.95, STEP, "dense", start=100, variables="resource")

    zeros = {"s": [0, 1, 2, 5], "v": [3, 4, 12], "w": [0, 6], "t": [2, 3, 30]}
    zero_rows = {"e": [0, 5, 6, 20], "b": [1, 2, 30]}
    for tag, opt in (("momentum", momentum), ("adam", adam)):
        add("MultitaskOptimizerWrapper", tag, {"opt": opt}, "dense", BOTH, zero_steps=zeros)
        add("MultitaskOptimizerWrapper", tag, {"opt": opt}, "dup", zero_steps=zero_rows)


def returnn(add):
    """No repeated rows: RETURNN does not sum them, we do."""
    rate = {"learning_rate": 0.1}
    add("CustomGradientDescent", "lr0.1", rate, DISTINCT, BOTH)
    add("NormalizedSGD", "lr0.1", rate, DISTINCT, BOTH)
    add("NeuralOptimizer1", "lr0.1", rate, DISTINCT, BOTH)
    add("NeuralOptimizer1", "other", dict(rate, beta1=0.5, decrease_factor=-0.3), DISTINCT)
    add("GradVarianceScaled", "lr0.1", rate, DISTINCT, BOTH)
    add("GradVarianceScaled", "other", OTHER_ADAM, DISTINCT)
    add("CustomAdam", "lr0.001", {"learning_rate": 0.001}, DISTINCT, "f32")
    add("CustomAdam", "other", OTHER_ADAM, DISTINCT, "f32")
    # Without epsilon a gradient that starts at exactly zero gives 0 / 0.
    add("AMSGrad", "default", {}, "dense", "f32", zeros_from=1)
    add("AMSGrad", "decay", dict(rate, decay=True, epsilon=1e-6), "dense", "f32")
    add("AMSGrad", "other", OTHER_ADAM, "dense", "f32")


def of_projects(add):
    """Published beside TensorFlow, and written anew (``published.py``)."""
    decay = {"learning_rate": 0.01, "weight_decay_rate": 0.1}
    for name in ("AdamWeightDecay", "LAMB"):
        add(name, "lr0.01", {"learning_rate": 0.01}, EVERY, BOTH)
        some = dict(decay, exclude_from_weight_decay=["^w", "layer_norm", "b|v$"])
        add(name, "some", some, dtypes=BOTH)
        other = dict(some, beta_1=0.5, beta_2=0.9, epsilon=1e-3)
        add(name, "falling", dict(other, learning_rate=FALLING), "dense", "f32")
    add("LAMB", "zero-start", decay, "dense", BOTH, zero_start=["w"])

    add("Adafactor", "default", {}, EVERY, BOTH)
    momentum = {"learning_rate": 0.05, "beta1": 0.9}
    add("Adafactor", "momentum", momentum, dtypes=BOTH)
    plain = {"multiply_by_parameter_scale": False, "clipping_threshold": None, "epsilon1": 1e-6}
    add("Adafactor", "plain", plain, "dense", BOTH)
    decays = {"decay_rate": 0.9, "learning_rate": FALLING, "factored": False, "epsilon2": 0.5}
    add("Adafactor", "decays", decays, "dense", "f32")
    add("Adafactor", "zero-start", {}, "dense", "f32", zero_start=["w", "v"], start=100)
    shapes = {"v": (5,), "w": (4, 3), "t": (2, 3, 3), "c": (3, 3, 3), "q": (3, 2, 1, 4)}
    mesh = dict(momentum, min_dim_size_to_factor=3)
    add("Adafactor", "mesh", mesh, "dense", BOTH, shapes=shapes)


# ------------------------------------------------------------------------------ the numbers
def make_data(case):
    """Start and gradients of every variable, at random but the same in every run."""
    rng = np.random.RandomState(zlib.crc32(case["case"].encode()) & 0x7FFFFFFF)
    data = {}
    usual = DENSE if case["kind"] == "dense" else SPARSE
    for name, shape in case.get("shapes", usual).items():
        data["init/" + name] = rng.standard_normal(shape)
        scale = case.get("grad_scale", 1.0) * 10.0 ** rng.uniform(-2, 1, size=shape)
        if case["kind"] == "dense":
            zeros_from = case.get("zeros_from", 0)
            data["grad/" + name] = dense_gradients(rng, shape, scale, zeros_from)
        else:
            rows = sparse_gradients(rng, shape, scale, repeats=case["kind"] == "dup")
            data["grad_idx/" + name], data["grad_val/" + name] = rows
    for name in case.get("zero_start", ()):
        data["init/" + name] = np.zeros_like(data["init/" + name])
    for name, steps in case.get("zero_steps", {}).items():
        data[("grad/" if case["kind"] == "dense" else "grad_val/") + name][steps] = 0.0
    # Floats through float32, so that the float64 twin of a float32 record sees the same data.
    floats = {k: np.asarray(v, np.float32) for k, v in data.items() if "idx" not in k}
    return {**data, **{k: v.astype(case["dtype"]) for k, v in floats.items()}}


def dense_gradients(rng, shape, scale, zeros_from):
    """Mixed scales and a drifting mean; some elements, and now and then all, exactly zero."""
    base = rng.standard_normal(shape)
    steps = []
    for k in range(STEPS):
        g = scale * (base * math.cos(0.25 * k) + 0.6 * rng.standard_normal(shape))
        g = np.where((rng.uniform(size=shape) < 0.06) & (k >= zeros_from), 0.0, g)
        steps.append(np.zeros(shape) if k % 11 == 7 else g)
    return np.array(steps)


def sparse_gradients(rng, shape, scale, repeats):
    """Some rows a step, with a repeated index if wanted; the last row is never touched."""
    indices, values = [], []
    for _ in range(STEPS):
        if repeats:
            i = rng.randint(0, shape[0] - 1, size=5)
            i[-1] = i[0]
        else:
            i = rng.permutation(shape[0] - 1)[:3]
        indices.append(i)
        values.append(scale[i] * rng.standard_normal((len(i),) + tuple(shape[1:])))
    return np.array(indices, np.int64), np.array(values)


# ------------------------------------------------------------------------------ the running
# What the arguments of an optimizer may refer to.
Scope = collections.namedtuple("Scope", "global_step variables constant")


def resolve(value, scope):
    """JSON's stand-ins for what JSON cannot hold."""
    if not isinstance(value, dict):
        return value
    if "$global_step" in value:
        return scope.global_step
    if "$of_step" in value:
        return eval(value["$of_step"], {}, {"k": tf.cast(scope.global_step, tf.float32)})
    if "$fn_of_T" in value:
        return functools.partial(schedule_of_shampoo, value["$fn_of_T"])
    if "$sign_decay" in value:
        return SIGN_DECAYS[value["$sign_decay"]](**value["args"])
    if "$tensor" in value:
        return scope.constant(value["$tensor"])
    if "$var_dict" in value:
        return {scope.variables[name]: axes for name, axes in value["$var_dict"].items()}
    return make_optimizer(value["$opt"], value["kwargs"], scope)


def schedule_of_shampoo(expression, t):
    """A schedule of Shampoo's at its step ``t``, in float32 even if the patch is on."""
    names = {"T": tf.cast(t, tf.float32), "where": tf.where}
    return tf.cast(eval(expression, {}, names), t.dtype)


def make_optimizer(name, kwargs, scope):
    """The optimizer of TensorFlow, of ``published.py`` or else of RETURNN."""
    cls = find(name)
    kwargs = {k: resolve(v, scope) for k, v in kwargs.items()}
    if name == "extend_with_decoupled_weight_decay":
        cls = cls(find(kwargs.pop("base_optimizer")))
    if name == "AMSGrad":
        kwargs["var_list"] = list(scope.variables.values())
    return cls(**kwargs)


def find(name):
    """A class by its name, which may lack ``Optimizer``."""
    for module in (tf.train, contrib_opt, weight_decay_optimizers, published, None):
        if module is None:
            from returnn.tf import updater as module
        for full_name in (name + "Optimizer", name):
            if hasattr(module, full_name):
                return getattr(module, full_name)
    raise KeyError(name)


def find_slots(optimizer, variables):
    """(slot, variable, where it is kept) for all slots of an optimizer."""
    if type(optimizer).__name__ == "AMSGradOptimizer":
        trees = {slot: getattr(optimizer, slot) for slot in ("m", "v", "v_hat")}
        return [(s, n, tree[v]) for s, tree in trees.items() for n, v in variables.items()]
    if type(optimizer).__name__ == "MovingAverageOptimizer":
        averages = [("average", n, optimizer._ema.average(v)) for n, v in variables.items()]
        averages = [(s, n, kept) for s, n, kept in averages if kept is not None]
        return find_slots(optimizer._optimizer, variables) + averages
    if type(optimizer).__name__ == "GGTOptimizer":
        wholes = {"moment1": optimizer._get_moment1(), "grad_buffer": optimizer._get_grad_buffer()}
        start = {n: optimizer.index_dict[v.name] for n, v in variables.items()}
        return [
            (s, n, part(whole, start[n], v.shape, n + "/" + s))
            for s, whole in wholes.items()
            for n, v in variables.items()
        ]
    if hasattr(optimizer, "kept"):
        return [(s, n, kept) for (s, n), kept in optimizer.kept.items()]
    names = optimizer.get_slot_names()
    slots = [(s, n, optimizer.get_slot(v, s)) for s in names for n, v in variables.items()]
    # Shampoo's are as many as a variable has dimensions.
    return [(s, n, kept) for s, n, kept in slots if kept is not None]


def part(whole, start, shape, name):
    """What belongs to one variable, where all of them lie in a row along the last axis."""
    piece = whole[..., start : start + shape.num_elements()]
    return tf.reshape(piece, whole.shape[:-1].concatenate(shape), name=name)


@contextlib.contextmanager
def shampoo_in_float64():
    """Its cast of the step, its identities and its zeros are float64 where they were float32."""
    with contextlib.ExitStack() as stack:
        for user, used, changes in (
            (shampoo, "dtypes", {"float32": tf.float64}),
            (shampoo, "linalg_ops", {"eye": functools.partial(tf.eye, dtype=tf.float64)}),
            (shampoo, "array_ops", {"zeros": functools.partial(tf.zeros, dtype=tf.float64)}),
            (matrix_functions, "linalg_ops", {"eye": functools.partial(tf.eye, dtype=tf.float64)}),
        ):
            changed = types.SimpleNamespace(**dict(vars(getattr(user, used)), **changes))
            stack.enter_context(unittest.mock.patch.object(user, used, changed))
        yield


def run(case, data, dtype):
    """Trains with the original; gives the parameters of every step, and the slots' description."""
    arrays, steps = {}, case.get("steps", STEPS)
    numpy_dtype = tf.as_dtype(dtype).as_numpy_dtype  # NumPy itself has no bfloat16
    patch = contextlib.ExitStack()
    if dtype == "float64" and case["optimizer"] in PATCHED:
        patch.enter_context(shampoo_in_float64())
    with patch, tf.Graph().as_default(), tf.device("/cpu:0"):
        resource = case.get("variables") == "resource"
        # The optimizer's own variables, too.
        tf.get_variable_scope().set_use_resource(resource)
        start = np.int64(case["global_step_start"])
        global_step = tf.get_variable(
            "global_step", initializer=start, trainable=False, use_resource=resource
        )
        variables, pairs, feeds = {}, [], {}
        for key, value in data.items():
            if not key.startswith("init/"):
                continue
            name = key.split("/")[1]
            variables[name] = tf.get_variable(
                name, initializer=value.astype(numpy_dtype), use_resource=resource
            )
            gradient = None
            if "grad/" + name in data:
                gradient = tf.placeholder(dtype, value.shape)
                feeds[gradient] = data["grad/" + name].astype(numpy_dtype)
            elif "grad_idx/" + name in data:
                ids = tf.placeholder(tf.int64, [None])
                rows = tf.placeholder(dtype, (None,) + value.shape[1:])
                gradient = tf.IndexedSlices(rows, ids, tf.constant(value.shape, tf.int64))
                feeds[ids] = data["grad_idx/" + name]
                feeds[rows] = data["grad_val/" + name].astype(numpy_dtype)
            pairs.append((gradient, variables[name]))

        # The float64 twin of a float32 record has the same constants, too.
        of_case = tf.as_dtype(case["dtype"]).as_numpy_dtype
        constant = lambda x: tf.constant(of_case(x), dtype)
        scope = Scope(global_step, variables, constant)
        optimizer = make_optimizer(case["optimizer"], case["kwargs"], scope)
        options = {"global_step": global_step}
        if case["optimizer"] == "AMSGrad":
            options = {}
        if "decay_var_list" in case:
            options["decay_var_list"] = [variables[name] for name in case["decay_var_list"]]
        train = [optimizer.apply_gradients(pairs, **options)] * steps
        if "avoid_updating_slots_steps" in case:
            with optimizer.avoid_updating_slots():
                avoiding = optimizer.apply_gradients(pairs, **options)
            for k in case["avoid_updating_slots_steps"]:
                train[k] = avoiding
        slots = find_slots(optimizer, variables)

        # One thread and no graph rewriting: the numbers are those of the graph as written.
        config = tf.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=1)
        config.graph_options.rewrite_options.disable_meta_optimizer = True
        with tf.Session(config=config) as session:
            session.run(tf.global_variables_initializer())
            path = []
            for k in range(steps):
                session.run(train[k], {p: values[k] for p, values in feeds.items()})
                path.append(session.run(variables))
            for name in variables:
                arrays["param/" + name] = np.array([p[name] for p in path])
            for name, value in session.run({s.op.name: s for _, _, s in slots}).items():
                arrays["slot/" + name] = value
    described = [{"slot": s, "var": n, "checkpoint_name": v.op.name} for s, n, v in slots]
    return arrays, described


def relative_error(got, want):
    """Against the value, or a thousandth of the array's largest where that is more."""
    scale = np.maximum(np.abs(want), 1e-3 * np.max(np.abs(want), initial=0.0))
    return float(np.max(np.abs(got - want) / np.maximum(scale, 1e-30), initial=0.0))


def record(case, folder):
    """Writes one file."""
    data = make_data(case)
    arrays, slots = run(case, data, case["dtype"])
    meta = dict(case, slots=slots, steps=STEPS, tf_version=tf.__version__)
    if find(case["optimizer"]).__module__.startswith("returnn."):
        meta["returnn_version"] = sys.modules["returnn"].__version__
    if case["dtype"] == "float64" and case["optimizer"] in PATCHED:
        meta["patched"] = True
    if case["dtype"] == "float32" and case["optimizer"] not in FLOAT32_ONLY:
        exact, _ = run(case, data, "float64")
        meta["rounding"] = max(relative_error(arrays[k], exact[k]) for k in exact)
    write(os.path.join(folder, case["case"] + ".xz"), meta, dict(data, **arrays))


def write(path, meta, arrays):
    """A line of JSON and the bytes of all arrays, compressed together."""
    packed = {k: pack(v) for k, v in arrays.items()}
    described = [(k, v.dtype.str, packed[k].dtype.str, v.shape) for k, v in arrays.items()]
    header = json.dumps(dict(meta, arrays=described), sort_keys=True).encode()
    header += b" " * (-(len(header) + 1) % 8) + b"\n"  # the data begin at a multiple of 8 bytes
    # Numbers have nothing in common but their bytes at the same place.
    numbers = {"id": lzma.FILTER_LZMA2, "preset": 9, "lc": 0, "lp": 3, "pb": 3}
    with lzma.open(path, "wb", check=lzma.CHECK_CRC32, filters=[numbers]) as file:
        file.write(header + b"".join(v.tobytes() for v in packed.values()))


def pack(array):
    """The array in a smaller dtype, if that loses nothing."""
    small = array.astype(np.int8 if array.dtype.kind == "i" else np.float32)
    return small if small.astype(array.dtype).tobytes() == array.tobytes() else array


def main():
    """Runs all cases."""
    here = os.path.dirname(os.path.abspath(__file__))
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="a prefix of the cases to record")
    parser.add_argument("--out", default=os.path.join(here, "records"))
    args = parser.parse_args()
    os.makedirs(args.out, exist_ok=True)
    chosen = [case for case in cases() if case["case"].startswith(args.only)]
    for case in chosen:
        record(case, args.out)
    print("%d records in %s" % (len(chosen), args.out))


if __name__ == "__main__":
    main()
