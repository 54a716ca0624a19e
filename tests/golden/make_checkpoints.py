"""Checkpoints of TensorFlow 1.15.5 and RETURNN, and how training went on from them.

    python3.7 tests/golden/make_checkpoints.py                    # theirs: saves, and goes on
    python -m tests.interop.tf1.cases ours                        # ours: saves after as many steps
    python3.7 tests/golden/make_checkpoints.py --continue ours    # restores ours, and goes on

The first and the last need what ``make_records.py`` needs. ``README.md`` describes the files.
"""

import argparse
import contextlib
import os
import tempfile
import zipfile

import make_records  # first: it says how TensorFlow is to run
import numpy as np
import tensorflow as tf
from make_records import Scope, find, make_optimizer, write
from tensorflow.contrib import opt as contrib_opt

STEPS = 5  # before the checkpoint, and after it
SHAPES = {"enc/kernel": (3, 2), "enc/bias": (2,), "w": (2,), "w1": (2, 2)}
# Of models as BERT and T5 are; the last one begins with zeros.
MODEL = {
    "bert/layer_0/kernel": (6, 4),
    "bert/layer_0/bias": (4,),
    "bert/layer_0/LayerNorm/gamma": (4,),
    "cube": (3, 4, 3),
    "head": (4, 3),
}
IN_SCOPE, PLAIN = ("enc/kernel", "enc/bias"), ("w", "w1")

RATE = {"learning_rate": 0.1}
STEP = {"$global_step": 1}
ADAM = {"$opt": "Adam", "kwargs": RATE}
MOMENTUM = {"$opt": "Momentum", "kwargs": {"learning_rate": 0.1, "momentum": 0.9}}
FALLING = {"$of_step": "0.1 / (1.0 + 0.2 * k)"}


GETTERS = {
    "ElasticAverage": contrib_opt.ElasticAverageCustomGetter,
    "AGN": contrib_opt.AGNCustomGetter,
}
# Those that need nothing but a rate.
SIMPLE = [
    *("GradientDescent", "Adagrad", "RegAdagrad", "Adam", "LazyAdam", "AdaMax", "Nadam"),
    *("RMSProp", "LARS", "AddSign", "ProximalGradientDescent", "ProximalAdagrad"),
    *("CustomGradientDescent", "NormalizedSGD", "NeuralOptimizer1", "GradVarianceScaled"),
    "CustomAdam",
]


def cases():
    """By name, one dict for each graph."""
    table = {}

    def add(name, optimizer, kwargs, **more):
        usual = {"kind": "dense", "variables": IN_SCOPE}
        table[name] = dict(usual, optimizer=optimizer, kwargs=kwargs, **more)

    for name in SIMPLE:
        add(name, name, RATE)
    add("AdamFalling", "Adam", {"learning_rate": FALLING})
    add("AdamScoped", "Adam", RATE, scope="optimize")
    add("AdamRows", "Adam", RATE, kind="sparse")
    add("LazyAdamRows", "LazyAdam", RATE, kind="sparse")
    add("Adadelta", "Adadelta", {"learning_rate": 1.0})
    add("Momentum", "Momentum", dict(RATE, momentum=0.9))
    add("MomentumRows", "Momentum", dict(RATE, momentum=0.9), kind="sparse")
    add("AdagradDA", "AdagradDA", dict(RATE, global_step=STEP, l1_regularization_strength=0.01))
    add("AdamGS", "AdamGS", dict(RATE, global_step=STEP))
    add("LazyAdamGS", "LazyAdamGS", dict(RATE, global_step=STEP))
    add("AdamW", "AdamW", dict(RATE, weight_decay=0.01))
    add("MomentumW", "MomentumW", dict(RATE, weight_decay=0.01, momentum=0.9))
    decay = {"$sign_decay": "linear", "args": {"decay_steps": 20}}
    add("PowerSign", "PowerSign", dict(RATE, sign_decay_fn=decay))
    add("RMSPropCentered", "RMSProp", dict(RATE, centered=True, momentum=0.9, epsilon=0.01))
    l1l2 = {"l1_regularization_strength": 0.1, "l2_regularization_strength": 0.1}
    add("Ftrl", "Ftrl", dict(RATE, **l1l2))
    add("AMSGrad", "AMSGrad", dict(RATE, decay=True, epsilon=1e-3))

    shampoo = dict(RATE, global_step=STEP, epsilon=0.1)
    add("Shampoo", "Shampoo", shampoo)
    add("ShampooRoots", "Shampoo", dict(shampoo, svd_interval=3, gbar_decay=0.5))
    add("ShampooMixed", "Shampoo", dict(shampoo, svd_interval=2, max_matrix_size=2))
    add("ShampooW", "ShampooW", dict(shampoo, weight_decay=0.01))
    ggt = dict(RATE, window=4, svd_eps=0.01)
    add("GGT", "GGT", ggt, variables=PLAIN, resource=True)
    add(
        "GGTFalling",
        "GGT",
        dict(ggt, learning_rate=FALLING),
        variables=PLAIN,
        resource=True,
        start=7,
    )

    names = {"exclude_from_weight_decay": ["LayerNorm", "layer_norm", "bias"]}
    decay = dict(RATE, weight_decay_rate=0.1, **names)
    add("AdamWeightDecay", "AdamWeightDecay", decay, variables=tuple(MODEL))
    add("AdamWeightDecayRows", "AdamWeightDecay", decay, kind="sparse")
    add("LAMB", "LAMB", decay, variables=tuple(MODEL))
    add("Adafactor", "Adafactor", {}, variables=tuple(MODEL))
    momentum = dict(RATE, beta1=0.9)
    add("AdafactorMomentum", "Adafactor", momentum, variables=tuple(MODEL))
    mesh = {"min_dim_size_to_factor": 3}
    add("AdafactorMesh", "Adafactor", mesh, variables=tuple(MODEL))
    add("AdafactorMeshMomentum", "Adafactor", dict(mesh, **momentum), variables=tuple(MODEL))

    add("MovingAverage", "MovingAverage", {"opt": ADAM, "average_decay": 0.9})
    counted = {"opt": MOMENTUM, "average_decay": 0.9, "num_updates": STEP}
    add("MovingAverageCounted", "MovingAverage", counted, resource=True)
    swapped = {"opt": ADAM, "average_decay": 0.9}
    add("MovingAverageSwapped", "MovingAverage", swapped, swapped=True)
    axes = {"$var_dict": {"enc/kernel": [0]}}
    clip = {"opt": ADAM, "vars_to_clip_dims": axes, "max_norm": 0.8}
    add("VariableClipping", "VariableClipping", clip)
    add("Multitask", "MultitaskOptimizerWrapper", {"opt": ADAM})
    # Each with its own optimizer, in one graph.
    both = {"enc/kernel": ADAM, "enc/bias": MOMENTUM}
    add("Both", None, {}, each=both)
    another = {"$opt": "Adam", "kwargs": {"learning_rate": 0.01, "beta1": 0.5}}
    add("TwoAdams", None, {}, each=dict(both, **{"enc/bias": another}))
    sync = {"opt": ADAM, "replicas_to_aggregate": 1, "total_num_replicas": 1}
    add("SyncReplicas", "SyncReplicas", sync)
    # Of these a checkpoint has the center only: workers begin there again.
    alone = {"opt": ADAM, "num_worker": 1, "communication_period": 2}
    add("ElasticAverage", "ElasticAverage", dict(alone, rho=0.0), restart=True)
    add("AGN", "AGN", alone, restart=True)
    return table


def make_data():
    """Start and gradients of all variables; the same for all cases."""
    rng = np.random.RandomState(1)
    data = draw(rng, SHAPES)
    data["rows"] = np.array([rng.permutation(3)[:2] for _ in range(2 * STEPS)])
    data.update(draw(np.random.RandomState(2), MODEL))
    data["init/head"] *= 0
    return data


def draw(rng, shapes):
    """Start and gradients of some variables."""
    data = {}
    for name, shape in sorted(shapes.items()):
        data["init/" + name] = rng.standard_normal(shape).astype(np.float32)
        scale = 10.0 ** rng.uniform(-1, 0, size=shape)
        gradients = scale * rng.standard_normal((2 * STEPS, *shape))
        data["grad/" + name] = gradients.astype(np.float32)
    return data


class Run:
    """A graph with its session."""

    def __init__(self, case, data):
        self.stack = contextlib.ExitStack()
        self.stack.enter_context(tf.Graph().as_default())
        self.stack.enter_context(tf.device("/cpu:0"))
        tf.get_variable_scope().set_use_resource(case.get("resource", False))
        start = np.int64(case.get("start", 0))
        step = tf.train.get_or_create_global_step()
        of_workers = GETTERS.get(case["optimizer"])
        getter = of_workers and of_workers("/cpu:0")
        # AGN's parameters have to be resource variables, its step must not be one.
        resource = case.get("resource", False) or case["optimizer"] == "AGN"
        with tf.variable_scope("", custom_getter=getter, use_resource=resource):
            self.variables = {
                name: tf.get_variable(name, initializer=data["init/" + name])
                for name in case["variables"]
            }
        self.feeds, pairs = {}, []
        for name, variable in self.variables.items():
            gradients = data["grad/" + name]
            if case["kind"] == "sparse" and name.endswith("kernel"):
                ids, values = tf.placeholder(tf.int64, [2]), tf.placeholder(tf.float32, [2, 2])
                self.feeds.update({ids: data["rows"], values: gradients[:, :2]})
                gradient = tf.IndexedSlices(values, ids, tf.constant([3, 2], tf.int64))
            else:
                gradient = tf.placeholder(tf.float32, variable.shape)
                self.feeds[gradient] = gradients
            pairs.append((gradient, variable))
        scope = Scope(step, self.variables, None)
        saver, hooks, self.begin = None, [], tf.no_op()
        with tf.variable_scope(case["scope"]) if "scope" in case else contextlib.nullcontext():
            if "each" in case:
                made = {n: make_records.resolve(o, scope) for n, o in case["each"].items()}
                updates = [made[v.op.name].apply_gradients([(g, v)]) for g, v in pairs]
                with tf.control_dependencies(updates):
                    self.train = tf.assign_add(step, 1)
            elif getter is not None:
                kwargs = {k: make_records.resolve(v, scope) for k, v in case["kwargs"].items()}
                inner, number = kwargs.pop("opt"), kwargs.pop("num_worker")
                optimizer = find(case["optimizer"])(inner, number, getter, **kwargs)
                self.train = optimizer.apply_gradients(pairs, step)
                self.begin = optimizer.get_init_op(0)
            else:
                optimizer = make_optimizer(case["optimizer"], case["kwargs"], scope)
                counted = {} if case["optimizer"] == "AMSGrad" else {"global_step": step}
                self.train = optimizer.apply_gradients(pairs, **counted)
                if not counted:  # RETURNN counts by itself, too
                    with tf.control_dependencies([self.train]):
                        self.train = tf.assign_add(step, 1)
                if case["optimizer"] == "SyncReplicas":
                    hooks = [optimizer.make_session_run_hook(is_chief=True, num_tokens=0)]
                if case.get("swapped"):
                    saver = optimizer.swapping_saver()
        self.saver = saver or tf.train.Saver()
        self.saved = {v.op.name: v for v in tf.global_variables()}
        config = tf.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=1)
        config.graph_options.rewrite_options.disable_meta_optimizer = True
        if hooks:
            config.inter_op_parallelism_threads = 4  # for the thread of its queue
            session = tf.train.SingularMonitoredSession(
                hooks, config=config, stop_grace_period_secs=1
            )
        else:
            session = tf.Session(config=config)
        session = self.stack.enter_context(session)
        self.session = session.raw_session() if hooks else session
        if not hooks:
            self.session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
            self.session.run(self.begin)
            self.session.run(step.assign(start) if start else tf.no_op())

    def go(self, first):
        """Some steps; gives the parameters after each."""
        path = []
        for k in range(first, first + STEPS):
            self.session.run(self.train, {p: values[k] for p, values in self.feeds.items()})
            path.append(self.session.run(self.variables))
        return {name: np.array([values[name] for values in path]) for name in self.variables}

    def restore(self, prefix):
        """Goes back to a checkpoint."""
        self.saver.restore(self.session, prefix)
        self.session.run(self.begin)

    def all(self):
        """All variables."""
        return self.session.run(self.saved)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return self.stack.__exit__(*error)


def named(prefix, arrays):
    """The arrays by names that begin so."""
    return {prefix + "/" + name: np.asarray(value) for name, value in arrays.items()}


def save_theirs(folder):
    """Theirs: trains, saves and goes on."""
    data, arrays = make_data(), {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, case in cases().items():
            with Run(case, data) as run:
                run.go(0)
                prefix = os.path.join(scratch, name)
                save = {"write_meta_graph": False, "write_state": False}
                run.saver.save(run.session, prefix, **save)
                if case.get("restart"):
                    run.session.run(tf.local_variables_initializer())
                    run.restore(prefix)
                arrays.update(named(name + "/path", run.go(STEPS)))
                arrays.update(named(name + "/end", run.all()))
        with zipfile.ZipFile(os.path.join(folder, "checkpoints.zip"), "w") as archive:
            for file in sorted(os.listdir(scratch)):
                with open(os.path.join(scratch, file), "rb") as stream:
                    member = zipfile.ZipInfo(file)  # of no date
                    member.compress_type = zipfile.ZIP_DEFLATED
                    archive.writestr(member, stream.read())
    meta = {"cases": cases(), "steps": STEPS, "tf_version": tf.__version__}
    write(os.path.join(folder, "theirs.xz"), meta, dict(data, **arrays))


def continue_ours(ours, folder):
    """Restores what this library wrote, and goes on."""
    data, arrays = make_data(), {}
    for name, case in cases().items():
        with Run(case, data) as run:
            run.restore(os.path.join(ours, name))
            arrays.update(named(name + "/restored", run.all()))
            arrays.update(named(name + "/path", run.go(STEPS)))
    write(os.path.join(folder, "ours.xz"), {"tf_version": tf.__version__}, arrays)


def main():
    """Runs all cases."""
    here = os.path.dirname(os.path.abspath(__file__))
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--continue", dest="ours", help="the folder with our checkpoints")
    parser.add_argument("--out", default=os.path.join(here, "checkpoints"))
    args = parser.parse_args()
    os.makedirs(args.out, exist_ok=True)
    if args.ours:
        continue_ours(args.ours, args.out)
    else:
        save_theirs(args.out)


if __name__ == "__main__":
    main()
