"""Records what RETURNN's updater does with each of its options into ``returnn.npz``.

It runs with the RETURNN it finds, which is of one of three eras (they differ in what
``decouple_constraints`` means), and replaces the records of that era; those of the others stay:

    python3.7 -m pip install tensorflow==1.15.5 'protobuf<3.21' 'numpy<1.19' dm-tree
    python3.7 -m pip install returnn==1.20210901.233229    # 2017, and all that eras share
    python3.7 tests/golden/make_returnn_records.py [--out FILE]
    python3.7 -m pip install returnn==1.20220406.171758    # 2022
    python3.7 tests/golden/make_returnn_records.py [--out FILE]
    python3.11 -m pip install tensorflow==2.21 returnn==1.20261022 dm-tree    # 2026
    python3.11 tests/golden/make_returnn_records.py [--out FILE]

The updater gets a loss that is linear in the variables, so that their gradients are what is fed.
Two runs give the same numbers, but for the last bits of ``maximize_grad_norm``. ``README.md``
describes the format.
"""

import argparse
import contextlib
import io
import json
import os
import pathlib

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

tf1 = tf.compat.v1
tf1.disable_v2_behavior()
tf1.logging.set_verbosity(tf1.logging.FATAL)

import returnn
from returnn.config import Config
from returnn.tf.updater import Updater
from returnn.util.basic import CollectionReadCheckCovered

STEPS = 12
DENSE = {
    "first/bias": (3,),
    "first/kernel": (3, 2),
    "last/scalar": (),
    "last/conv": (2, 1, 2),
    "rest/vector": (2,),
}
ROWS = {"embed/table": (6, 2), "embed/list": (5,)}
MIXED = [*ROWS, "first/bias", "first/kernel"]
SCALES = {"first/bias": 0.3, "first/kernel": 3.0, "last/conv": 0.02, "embed/list": 0.1}
LISTED = 4


# -------------------------------------------------------------------------------- the cases
ADAM = {"class": "adam", "epsilon": 1e-8}
MOMENTUM = {"class": "momentum", "momentum": 0.9}


def cases():
    """By name: the config, the layers' options, and how the run goes."""
    table = {}

    def add(name, config=None, first=None, last=None, era="2017", embed=None, **more):
        layers = {"first": first, "last": last, "embed": embed}
        layers = {layer: options for layer, options in layers.items() if options}
        case = dict(config=config or {}, layers=layers, era=era, variables=list(DENSE))
        table[name] = dict(case, **more)

    def opts(**options):
        return {"updater_opts": options}

    filters = {"gradient_nan_inf_filter": True}
    add("nothing")
    add("clip", {"gradient_clip": 0.5})
    add("clip_norm", {"gradient_clip_norm": 1.0})
    add("clip_avg_norm", {"gradient_clip_avg_norm": 0.2})
    add("clip_global_norm", {"gradient_clip_global_norm": 1.0, "optimizer": ADAM})
    add(
        "clips",
        dict(
            filters,
            gradient_clip=2.0,
            gradient_clip_norm="3",
            gradient_clip_avg_norm=0.5,
            gradient_clip_global_norm=4.0,
        ),
    )
    add(
        "clip_global_norm_tags",
        {"gradient_clip_global_norm": 1.0},
        opts(tags=["a"], gradient_clip_global_norm=0.5, gradient_clip_global_norm_tag="a"),
        opts(tags=["b", "c"], global_norm_tag="b"),
    )
    add("clip_to_zero", {"grad_norm_to_clip_to_zero": 6.0, "optimizer": ADAM}, bad=True)
    add(
        "clip_to_zero_tags",
        {"grad_norm_to_clip_to_zero": 3.0, "global_norm_tag": "a"},
        opts(tags=["a"]),
        opts(tags=["b"], global_norm_tag="b"),
    )
    add("nan_inf_filter", dict(filters, optimizer=ADAM), bad=True)
    add("nan_inf_filter_clip", dict(filters, gradient_clip=0.5), bad=True)
    add("nan_inf_filter_clip_global_norm", dict(filters, gradient_clip_global_norm=1.0), bad=True)
    add("noise_zero", {"gradient_noise": 0.0})
    add("accum3", {"accum_grad_multiple_step": 3})
    add("accum3_adam", {"accum_grad_multiple_step": 3, "optimizer": ADAM})
    add("accum3_clip_global_norm", {"accum_grad_multiple_step": 3, "gradient_clip_global_norm": 2})
    add("accum1", {"accum_grad_multiple_step": 1, "optimizer": MOMENTUM})
    add("maximize_grad_norm", {"maximize_grad_norm": 0.3}, {"L2": 0.01}, quadratic=True)
    add(
        "without_effect",
        {
            "optimizer": ADAM,
            "optimizer_use_locking": True,
            "deterministic_train": True,
            "debug_grad_summaries": True,
            "debug_add_check_numerics_ops": True,
            "debug_save_updater_vars": True,
        },
    )
    # Optimizers.
    add("epsilon", {"optimizer": {"class": "Adam"}})
    add("optimizer_epsilon", {"optimizer": {"class": "AdamOptimizer"}, "optimizer_epsilon": 1e-3})
    add("multiplier", {"optimizer": dict(MOMENTUM, learning_rate_multiplier=0.5)})
    add("momentum", {"optimizer": {"class": "momentum", "use_nesterov": True}, "momentum": 0.8})
    for name in (
        "adadelta adagrad adamax addsign ftrl lars lazyadam nadam powersign proximaladagrad rmsprop "
        "customadam normalizedsgd neuraloptimizer1 gradvariancescaled"
    ).split():
        add("class_" + name, {"optimizer": {"class": name}})
    add(
        "layers_optimizers",
        {"optimizer": MOMENTUM},
        opts(optimizer=ADAM, accum_grad_multiple_step=2),
        opts(optimizer={"class": "Adagrad", "learning_rate_multiplier": 3}, gradient_clip=0.1),
    )
    add(
        "layers_default_class",
        {"optimizer": dict(ADAM, beta1=0.5)},
        opts(optimizer={"learning_rate_multiplier": 2.0, "epsilon": 1e-4}),
    )
    for name in ("adam", "nadam", "adadelta", "adagrad", "rmsprop"):
        add("old_" + name, {name: True, "optimizer_epsilon": 1e-6})
    add("old_rmsprop_decay", {"rmsprop": 0.8, "momentum": 0.5, "optimizer_epsilon": 1e-10})
    add("old_momentum", {"momentum": 0.9})
    # Rates.
    add("rates", rates=[0.1 / (1 + 0.3 * k) for k in range(STEPS)])
    add("dynamic", {"dynamic_learning_rate": {"interval": 5, "decay": 0.8}, "optimizer": ADAM})
    add("dynamic_function", {"dynamic_learning_rate": {"$inverse_root": 1}})
    add("extra_updates", {"extra_updates": {"first/kernel": {"$clip": 0.5}}, "optimizer": ADAM})
    add("extra_updates_grad", {"extra_updates": {"last/conv": {"$grad": 0.5}}})
    # Constraints.
    add("l2", {}, {"L2": 0.05}, {"L2": 0.1})
    add("l2_clip", {"optimizer": ADAM, "gradient_clip_global_norm": 1.0}, {"L2": 0.05})
    decoupled = {"decouple_constraints": True}
    for era in ("2017", "2022", "2026"):
        add("decoupled_" + era, decoupled, {"L2": 0.1}, {"L2": 0.2}, era, initial_rate=0.5)
        adam = dict(decoupled, optimizer=ADAM, decouple_constraints_factor=1.0)
        add("decoupled_adam_" + era, adam, {"L2": 0.05}, None, era)
        # In 2026 RETURNN reads the step in a race with its increment, so there is nothing to follow.
        if era != "2026":
            accum = dict(adam, accum_grad_multiple_step=2)
            add("decoupled_accum2_" + era, accum, {"L2": 0.05}, None, era)
    # Rows.
    rows = {"variables": list(ROWS)}
    mixed = {"variables": MIXED}
    add("rows", **rows)
    add("rows_adam", {"optimizer": ADAM}, **rows)
    add("rows_clip", {"gradient_clip": 0.5, "gradient_clip_norm": 1.0}, **rows)
    add("rows_clip_avg_norm", {"gradient_clip_avg_norm": 0.1, "optimizer": MOMENTUM}, **rows)
    add("rows_clip_global_norm", {"gradient_clip_global_norm": 1.0}, **mixed)
    add("rows_accum2", {"accum_grad_multiple_step": 2, "optimizer": MOMENTUM}, **mixed)
    add("rows_accum1", {"accum_grad_multiple_step": 1, "optimizer": MOMENTUM}, **mixed)
    add("rows_clip_to_zero", {"grad_norm_to_clip_to_zero": 8.0, "optimizer": MOMENTUM}, **mixed)
    add("rows_nan_filter", filters, bad=True, **rows)
    add("rows_l2", {}, embed={"L2": 0.05}, **rows)
    return table


# --------------------------------------------------------------------------------- the data
def data():
    """Variables at the start, gradients, and coefficients of a quadratic loss."""
    random = np.random.RandomState(7)
    arrays = {}
    for name, shape in dict(DENSE, **ROWS).items():
        draw = lambda *shape: np.asarray(random.standard_normal(shape), np.float32)
        scale = np.float32(SCALES.get(name, 1.0))
        arrays["init/" + name] = draw(*shape)
        if name in ROWS:
            ids = random.randint(0, shape[0] - 1, size=(STEPS, LISTED))
            ids[3] = ids[3, 0]  # one row again and again
            arrays["grad_idx/" + name] = ids.astype(np.int32)
            arrays["grad_val/" + name] = scale * draw(STEPS, LISTED, *shape[1:])
            continue
        grad = scale * draw(STEPS, *shape)
        grad[random.uniform(size=grad.shape) < 0.1] = 0
        grad[7] *= 30
        arrays["grad/" + name] = grad
        arrays["quadratic/" + name] = np.asarray(0.5 + random.uniform(size=shape), np.float32)
    return arrays


def spoilt(arrays):
    """The same gradients with some that are not finite."""
    arrays = {name: array.copy() for name, array in arrays.items()}
    for name in ROWS:
        arrays["grad_val/" + name].reshape(STEPS, -1)[2, 0] = np.nan
    arrays["grad/first/bias"][2, 0] = np.nan
    arrays["grad/first/kernel"][4, 1, 1] = np.inf
    arrays["grad/last/conv"][4, 0, 0, 0] = np.nan
    arrays["grad/last/scalar"][6] = -np.inf
    return arrays


# ---------------------------------------------------------------------------------- the run
class Network:
    """What the updater asks a network."""

    used_data_keys = ()

    def __init__(self, loss, constraints, decoupled):
        self.loss, self.constraints, self.decoupled = loss, constraints, decoupled
        self.global_train_step_var = tf1.get_variable(
            "global_step", (), tf.int64, tf1.zeros_initializer(), trainable=False
        )
        self.global_train_step = self.global_train_step_var
        self.extra_vars_to_save = []

    def reset_saver(self):
        pass

    def get_total_loss(self):
        return self.loss

    def get_total_constraints(self):
        return self.constraints

    def get_objective(self):
        # The old eras ask for the parts; the new one has its layers leave out what is decoupled.
        return self.loss if self.decoupled else self.loss + self.constraints


def in_tensorflow(value):
    """What stands for a function in the records' JSON becomes one."""
    if isinstance(value, dict):
        if "$inverse_root" in value:
            return lambda learning_rate, global_train_step, **_: (
                learning_rate / tf.sqrt(tf.cast(global_train_step, tf.float32) + 1.0)
            )
        if "$clip" in value:
            return lambda var: tf1.assign(
                var, tf.clip_by_value(var, -value["$clip"], value["$clip"])
            )
        if "$grad" in value:
            return lambda var, grad: tf1.assign_add(var, value["$grad"] * grad)
        return {name: in_tensorflow(inner) for name, inner in value.items()}
    return value


def run(case, arrays):
    """The variables after each step, in a row."""
    if case.get("bad"):
        arrays = spoilt(arrays)
    with tf.Graph().as_default(), tf1.Session() as session:
        variables, feeds, losses, constraints = {}, {}, [], [tf.constant(0.0)]
        for name in case["variables"]:
            layer = name.split("/")[0]
            options = case["layers"].get(layer, {})
            start = arrays["init/" + name]
            var = variables[name] = tf1.get_variable(name, initializer=start)
            if "updater_opts" in options:
                var.RETURNN_updater_opts = CollectionReadCheckCovered(dict(options["updater_opts"]))
            if "L2" in options:
                var.RETURNN_constraint_L2 = options["L2"]
                constraints.append(options["L2"] * tf.reduce_sum(var**2))
            if name in ROWS:
                values = tf1.placeholder(tf.float32, (LISTED,) + start.shape[1:])
                ids = tf1.placeholder(tf.int32, (LISTED,))
                feeds["grad_val/" + name], feeds["grad_idx/" + name] = values, ids
                losses.append(tf.reduce_sum(tf.gather(var, ids) * values))
                continue
            grad = feeds["grad/" + name] = tf1.placeholder(tf.float32, start.shape)
            losses.append(tf.reduce_sum(var * grad))
            if case.get("quadratic"):
                losses.append(tf.reduce_sum(0.5 * arrays["quadratic/" + name] * var**2))
        config = Config({name: in_tensorflow(value) for name, value in case["config"].items()})
        decoupled = config.bool("decouple_constraints", False)
        network = Network(tf.add_n(losses), tf.add_n(constraints), decoupled)
        updater = Updater(config, network, initial_learning_rate=case.get("initial_rate", 1.0))
        updater.set_trainable_vars(list(variables.values()))
        with contextlib.redirect_stdout(io.StringIO()):
            step = updater.get_optim_op()
        session.run(tf1.global_variables_initializer())
        updater.init_optimizer_vars(session)
        path = []
        for k in range(STEPS):
            updater.set_learning_rate(case.get("rates", [0.1] * STEPS)[k], session)
            session.run(step, {feed: arrays[name][k] for name, feed in feeds.items()})
            now = session.run(list(variables.values()))
            path.append(np.concatenate([np.ravel(array) for array in now]))
    return np.stack(path)


def era_of(version):
    """What decoupled constraints mean in this RETURNN."""
    day = int(version.split(".")[1][:8])
    return "2017" if day < 20220322 else "2022" if day < 20221101 else "2026"


def main():
    """Makes the records of one era."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default=str(pathlib.Path(__file__).with_name("returnn.npz")))
    out = parser.parse_args().out
    version = returnn.__long_version__.split("+")[0]
    era = era_of(version)
    arrays, meta, records = data(), {}, {}
    if os.path.exists(out):
        with np.load(out) as file:
            meta = json.loads(str(file["meta"]))["cases"]
            records = {name: file[name] for name in file.files if name.startswith("param/")}
    meta = {name: case for name, case in meta.items() if case["era"] != era}
    for name, case in cases().items():
        if case["era"] == era:
            tf1.reset_default_graph()
            records["param/" + name] = run(case, arrays)
            meta[name] = dict(case, returnn=version, tensorflow=tf.__version__)
            print(name, flush=True)
    about = json.dumps({"steps": STEPS, "cases": meta}, sort_keys=True)
    records = {name: records[name] for name in sorted(records) if name[6:] in meta}
    np.savez_compressed(out, meta=np.asarray(about), **dict(arrays, **records))
    print(len(meta), "cases", os.path.getsize(out), "bytes")


if __name__ == "__main__":
    main()
