"""Records trajectories of TensorFlow 1.15.5's own optimizers into ``tf1/*.npz``.

    python3.7 -m pip install tensorflow==1.15.5 'protobuf<3.21'
    python3.7 tests/golden/make_tf1.py [--only PREFIX] [--out DIR]

Deterministic: two runs give identical files. ``README.md`` describes the format.
"""

import argparse
import json
import math
import os
import zlib

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import tensorflow as tf
from tensorflow.contrib import opt as contrib_opt
from tensorflow.contrib.opt.python.training import sign_decay

tf.compat.v1.logging.set_verbosity(tf.compat.v1.logging.ERROR)

STEPS = 32
DENSE = {"s": (), "v": (5,), "w": (4, 3), "t": (2, 3, 2)}
SPARSE = {"e": (6, 4), "b": (5,)}

SIGN_DECAYS = {
    "linear": sign_decay.get_linear_decay_fn,
    "cosine": sign_decay.get_cosine_decay_fn,
    "restart": sign_decay.get_restart_decay_fn,
}


# ------------------------------------------------------------------------------- the cases
def cases():
    """One dict for each record: what to run on which kind of gradients, in which dtype."""
    table = []

    def add(optimizer, tag, kwargs, kinds="dense dup", dtypes="f64", start=0):
        for kind in kinds.split():
            for dtype in dtypes.split():
                table.append(
                    {
                        "case": "-".join((optimizer, tag, kind, dtype)),
                        "optimizer": optimizer,
                        "kwargs": kwargs,
                        "kind": kind,
                        "dtype": {"f32": "float32", "f64": "float64"}[dtype],
                        "global_step_start": start,
                    }
                )

    every, both = "dense sparse dup", "f32 f64"
    falling = {"$of_step": "0.1 / (1.0 + 0.2 * k)"}

    add("GradientDescent", "lr0.1", {"learning_rate": 0.1}, every, both)
    add("GradientDescent", "falling", {"learning_rate": falling}, "dense", both)

    add("Momentum", "m0.9", {"learning_rate": 0.1, "momentum": 0.9}, every, both)
    nesterov = {"learning_rate": 0.1, "momentum": 0.9, "use_nesterov": True}
    add("Momentum", "nesterov", nesterov, dtypes=both)
    add("Momentum", "falling", {"learning_rate": falling, "momentum": 0.9}, "dense", both)

    add("Adagrad", "lr0.1", {"learning_rate": 0.1}, every, both)
    start_at_one = {"learning_rate": 1.0, "initial_accumulator_value": 1.0}
    add("Adagrad", "acc1", start_at_one, dtypes=both)
    tiny = {"learning_rate": 0.01, "initial_accumulator_value": 1e-6}
    add("Adagrad", "acc1e-6", tiny, "dense")

    other = {"learning_rate": 0.1, "beta1": 0.5, "beta2": 0.9, "epsilon": 1e-3}
    for name in ("Adam", "LazyAdam", "AdaMax"):
        add(name, "default", {}, every, both)
        add(name, "other", other, dtypes=both)
        add(name, "falling", {"learning_rate": falling}, "dense", "f32")
    big_eps = {"learning_rate": 0.05, "beta1": 0.9, "beta2": 0.99, "epsilon": 0.1}
    add("Adam", "eps0.1", big_eps, "dense")

    add("RMSProp", "lr0.01", {"learning_rate": 0.01}, every, both)
    lively = {"learning_rate": 0.01, "decay": 0.5, "momentum": 0.9, "epsilon": 1e-3}
    add("RMSProp", "momentum", lively, dtypes=both)
    add("RMSProp", "falling", {"learning_rate": falling, "momentum": 0.9}, "dense", "f32")
    centered = {"learning_rate": 0.01, "centered": True, "epsilon": 1e-2}
    add("RMSProp", "centered", centered, every)
    centered_lively = {
        "learning_rate": 0.05,
        "centered": True,
        "momentum": 0.5,
        "decay": 0.8,
        "epsilon": 0.1,
    }
    add("RMSProp", "centered-momentum", centered_lively)

    add("AddSign", "default", {}, every, both)
    other = {"alpha": 0.5, "beta": 0.5, "learning_rate": 0.02}
    add("AddSign", "other", other, dtypes=both)
    for tag, kind, args, start in (
        ("linear", "linear", {"decay_steps": 20}, 0),
        ("cosine", "cosine", {"decay_steps": 20}, 0),
        ("cosine-zero", "cosine", {"decay_steps": 24, "num_periods": 1.5, "zero_after": 1.0}, 0),
        ("restart", "restart", {"decay_steps": 20, "num_periods": 2}, 0),
        ("restart-zero", "restart", {"decay_steps": 24, "num_periods": 3, "zero_after": 2}, 3),
    ):
        kwargs = {"learning_rate": 0.05, "sign_decay_fn": {"$sign_decay": kind, "args": args}}
        add("AddSign", tag, kwargs, "dense", start=start)

    def ftrl(learning_rate=0.1, power=-0.5, start=0.1, l1=0.0, l2=0.0, shrinkage=0.0):
        return {
            "learning_rate": learning_rate,
            "learning_rate_power": power,
            "initial_accumulator_value": start,
            "l1_regularization_strength": l1,
            "l2_regularization_strength": l2,
            "l2_shrinkage_regularization_strength": shrinkage,
        }

    add("Ftrl", "lr0.1", {"learning_rate": 0.1}, every, both)
    add("Ftrl", "l1l2", ftrl(l1=0.5, l2=0.1), every, both)
    add("Ftrl", "shrinkage", ftrl(l1=0.2, l2=0.05, shrinkage=0.3), every)
    add("Ftrl", "power-0.3", ftrl(0.5, power=-0.3, start=1.0, l1=0.05))
    add("Ftrl", "power0", ftrl(0.05, power=0.0, l2=0.1))
    add("Ftrl", "power-0.7", ftrl(0.2, power=-0.7, shrinkage=0.1))
    add("Ftrl", "acc0", ftrl(0.2, start=0.0, l1=0.01), "dense")
    return table


# ------------------------------------------------------------------------------ the numbers
def make_data(case):
    """Start and gradients of every variable, at random but the same in every run."""
    rng = np.random.RandomState(zlib.crc32(case["case"].encode()) & 0x7FFFFFFF)
    data = {}
    for name, shape in (DENSE if case["kind"] == "dense" else SPARSE).items():
        data["init/" + name] = rng.standard_normal(shape)
        scale = 10.0 ** rng.uniform(-2, 1, size=shape)
        if case["kind"] == "dense":
            data["grad/" + name] = dense_gradients(rng, shape, scale)
        else:
            rows = sparse_gradients(rng, shape, scale, repeats=case["kind"] == "dup")
            data["grad_idx/" + name], data["grad_val/" + name] = rows
    # Floats through float32, so that the float64 twin of a float32 record sees the same data.
    floats = {k: np.asarray(v, np.float32) for k, v in data.items() if "idx" not in k}
    return {**data, **{k: v.astype(case["dtype"]) for k, v in floats.items()}}


def dense_gradients(rng, shape, scale):
    """Mixed scales and a drifting mean; some elements, and now and then all, exactly zero."""
    base = rng.standard_normal(shape)
    steps = []
    for k in range(STEPS):
        g = scale * (base * math.cos(0.25 * k) + 0.6 * rng.standard_normal(shape))
        g = np.where(rng.uniform(size=shape) < 0.06, 0.0, g)
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
def resolve(value, global_step):
    """JSON's stand-ins for what JSON cannot hold."""
    if isinstance(value, dict) and "$of_step" in value:
        return eval(value["$of_step"], {}, {"k": tf.cast(global_step, tf.float32)})
    if isinstance(value, dict) and "$sign_decay" in value:
        return SIGN_DECAYS[value["$sign_decay"]](**value["args"])
    return value


def run(case, data, dtype):
    """Trains with TensorFlow; gives the parameters of every step, and the slots' description."""
    arrays = {}
    with tf.Graph().as_default(), tf.device("/cpu:0"):
        start = np.int64(case["global_step_start"])
        global_step = tf.get_variable("global_step", initializer=start, trainable=False)
        variables, pairs, feeds = {}, [], {}
        for key, value in data.items():
            if not key.startswith("init/"):
                continue
            name = key.split("/")[1]
            variables[name] = tf.get_variable(name, initializer=value.astype(dtype))
            if case["kind"] == "dense":
                gradient = tf.placeholder(dtype, value.shape)
                feeds[gradient] = data["grad/" + name].astype(dtype)
            else:
                ids = tf.placeholder(tf.int64, [None])
                rows = tf.placeholder(dtype, (None,) + value.shape[1:])
                gradient = tf.IndexedSlices(rows, ids, tf.constant(value.shape, tf.int64))
                feeds[ids] = data["grad_idx/" + name]
                feeds[rows] = data["grad_val/" + name].astype(dtype)
            pairs.append((gradient, variables[name]))
        kwargs = {k: resolve(v, global_step) for k, v in case["kwargs"].items()}
        class_name = case["optimizer"] + "Optimizer"
        optimizer = (getattr(tf.train, class_name, None) or getattr(contrib_opt, class_name))(
            **kwargs
        )
        train = optimizer.apply_gradients(pairs, global_step=global_step)
        slots = [
            {"slot": slot, "var": name, "checkpoint_name": optimizer.get_slot(v, slot).op.name}
            for slot in optimizer.get_slot_names()
            for name, v in variables.items()
        ]
        slot_variables = {
            s["checkpoint_name"]: optimizer.get_slot(variables[s["var"]], s["slot"]) for s in slots
        }
        # One thread and no graph rewriting: the numbers are those of the graph as written.
        config = tf.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=1)
        config.graph_options.rewrite_options.disable_meta_optimizer = True
        with tf.Session(config=config) as session:
            session.run(tf.global_variables_initializer())
            path = []
            for k in range(STEPS):
                session.run(train, {p: values[k] for p, values in feeds.items()})
                path.append(session.run(variables))
            for name in variables:
                arrays["param/" + name] = np.array([p[name] for p in path])
            for name, value in session.run(slot_variables).items():
                arrays["slot/" + name] = value
    return arrays, slots


def relative_error(got, want):
    """Against the value, or a thousandth of the array's largest where that is more."""
    scale = np.maximum(np.abs(want), 1e-3 * np.max(np.abs(want), initial=0.0))
    return float(np.max(np.abs(got - want) / np.maximum(scale, 1e-30), initial=0.0))


def record(case, folder):
    """Writes one file."""
    data = make_data(case)
    arrays, slots = run(case, data, case["dtype"])
    meta = dict(case, slots=slots, steps=STEPS, tf_version=tf.__version__)
    if case["dtype"] == "float32":
        exact, _ = run(case, data, "float64")
        meta["rounding"] = max(relative_error(arrays[k], exact[k]) for k in exact)
    everything = dict(data, **arrays)
    everything["meta"] = np.array(json.dumps(meta, sort_keys=True))
    np.savez_compressed(os.path.join(folder, case["case"] + ".npz"), **everything)


def main():
    """Runs all cases."""
    here = os.path.dirname(os.path.abspath(__file__))
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="a prefix of the cases to record")
    parser.add_argument("--out", default=os.path.join(here, "tf1"))
    args = parser.parse_args()
    os.makedirs(args.out, exist_ok=True)
    chosen = [case for case in cases() if case["case"].startswith(args.only)]
    for case in chosen:
        record(case, args.out)
    print("%d records in %s" % (len(chosen), args.out))


if __name__ == "__main__":
    main()
