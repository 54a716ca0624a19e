"""Checkpoints of TensorFlow 1.15.5 with variables in parts, and how training went on from them.

    python3.7 tests/golden/make_estimators.py                      # theirs: saves, and goes on
    python -m tests.interop.tf1.estimators ours                    # ours: saves after as many steps
    python3.7 tests/golden/make_estimators.py --continue ours      # restores ours, and goes on

The first and the last need what ``make_records.py`` needs, without RETURNN. ``README.md`` describes
the files.
"""

import argparse
import contextlib
import itertools
import os
import shutil
import tempfile
import zipfile

import make_records  # first: it says how TensorFlow is to run
import numpy as np
import tensorflow as tf
from make_records import Scope, find, write

STEPS = 3  # before the checkpoint, and after it
RATE = {"learning_rate": 0.1}
# Of graphs: what is in parts, what has a partitioner of one part, what has none.
SHAPES = {"e/t": (12, 2), "e/kernel": (2, 2), "bias": (2,)}
PARTS, ONE_PART = "e/t", "e/kernel"
FTRL = {"$opt": "Ftrl", "kwargs": dict(RATE, l1_regularization_strength=0.01)}
ADAGRAD = {"$opt": "Adagrad", "kwargs": RATE}
ADAM = {"$opt": "Adam", "kwargs": RATE}
STEP = {"$global_step": 1}

# As long as some letters of e/t/part_0, as all of them, and longer.
SCOPES = ["", "d", "dnn", "a/bcd", "linear", "seventh", "eight_er", "eleven/ten", "a_long_name"]
SCOPES += ["twelve_words", "a_longer/model_name"]
OPTIMIZERS = {
    "Adadelta": {"learning_rate": 1.0},
    "Momentum": dict(RATE, momentum=0.9),
    "AdagradDA": dict(RATE, global_step=STEP, l1_regularization_strength=0.01),
    "AdamGS": dict(RATE, global_step=STEP),
    "AdamW": dict(RATE, weight_decay=0.01),
    "MomentumW": dict(RATE, weight_decay=0.01, momentum=0.9),
    "RMSPropCentered": dict(RATE, centered=True, momentum=0.9, epsilon=0.01),
    "Ftrl": FTRL["kwargs"],
    "PowerSign": dict(RATE, sign_decay_fn={"$sign_decay": "linear", "args": {"decay_steps": 20}}),
    "MovingAverage": {"opt": ADAM, "average_decay": 0.9},
}
for simple in ("GradientDescent", "Adagrad", "RegAdagrad", "LazyAdam", "AdaMax", "Nadam"):
    OPTIMIZERS[simple] = RATE
for simple in ("RMSProp", "AddSign", "ProximalGradientDescent", "ProximalAdagrad"):
    OPTIMIZERS[simple] = RATE


def graphs():
    """Graphs by name: the optimizer of all variables, or one for each of some variables."""
    table = {}

    def add(name, optimizer="Adam", kwargs=None, parts=2, scope="dnn", **more):
        each = [[scope, {"$opt": optimizer, "kwargs": kwargs or RATE}, sorted(SHAPES)]]
        table[name] = dict({"parts": parts, "format": 2, "sharded": False, "each": each}, **more)

    for scope in SCOPES:
        for parts in (1, 2, 11):
            add(f"Scope{len(scope)}-{parts}", scope=scope, parts=parts)
    for name, kwargs in OPTIMIZERS.items():
        add(name, name.replace("Centered", ""), kwargs)
    for format in (1, 2):
        for parts in (1, 2):
            add(f"V{format}-{parts}-sharded", parts=parts, format=format, sharded=True)
    add("V1-1", parts=1, format=1)
    add("V1-2", format=1)
    add("Resource", resource=True)
    wide_and_deep = [["linear", FTRL, ["e/t"]], ["dnn", ADAGRAD, ["e/kernel", "bias"]]]
    add("Two", each=wide_and_deep)
    same_length = [["wide", ADAGRAD, ["e/t"]], ["deep", ADAGRAD, ["bias", "e/kernel"]]]
    add("TwoAlike", each=same_length)
    return table


def estimators():
    """Estimators by name: the class, how many parts tables have, and the optimizers."""
    rms = {"$opt": "RMSProp", "kwargs": dict(RATE, momentum=0.9)}
    momentum = {"$opt": "Momentum", "kwargs": dict(RATE, momentum=0.9)}
    return {
        "DNNClassifier": ["DNNClassifier", 1, {"dnn": ADAGRAD}],
        "DNNClassifierParts": ["DNNClassifier", 2, {"dnn": ADAM}],
        "DNNRegressor": ["DNNRegressor", 3, {"dnn": momentum}],
        "LinearClassifier": ["LinearClassifier", 1, {"linear": FTRL}],
        "LinearClassifierParts": ["LinearClassifier", 2, {"linear": rms}],
        "LinearRegressor": ["LinearRegressor", 3, {"linear": FTRL}],
        "Combined": ["DNNLinearCombinedClassifier", 1, {"dnn": ADAGRAD, "linear": FTRL}],
        "CombinedParts": ["DNNLinearCombinedClassifier", 2, {"dnn": ADAM, "linear": FTRL}],
        "CombinedRegressor": ["DNNLinearCombinedRegressor", 3, {"dnn": rms, "linear": ADAGRAD}],
    }


def make_data():
    """Start and gradients of the variables of all graphs."""
    rng = np.random.RandomState(3)
    data = {}
    for name, shape in sorted(SHAPES.items()):
        data["init/" + name] = rng.standard_normal(shape).astype(np.float32)
        gradients = 0.5 * rng.standard_normal((2 * STEPS, *shape))
        data["grad/" + name] = gradients.astype(np.float32)
    return data


class Graph:
    """A graph with its session."""

    def __init__(self, case, data):
        self.stack = contextlib.ExitStack()
        self.stack.enter_context(tf.Graph().as_default())
        if case["sharded"]:  # a file for each device
            self.stack.enter_context(tf.device(alternating()))
        tf.get_variable_scope().set_use_resource(case.get("resource", False))
        step = tf.train.get_or_create_global_step()
        self.variables, parts_of, self.feeds = {}, {}, {}
        for name, shape in SHAPES.items():
            number = {PARTS: case["parts"], ONE_PART: 1}.get(name)
            partitioner = number and tf.fixed_size_partitioner(number)
            with tf.variable_scope("", partitioner=partitioner):
                start = tf.constant_initializer(data["init/" + name])
                if number and number > 1:
                    start = sliced(data["init/" + name])
                variable = tf.get_variable(name, shape, initializer=start)
            parts_of[name] = list(variable) if number else [variable]
            self.variables[name] = tf.convert_to_tensor(variable)
        updates = []
        for i, (scope, optimizer, names) in enumerate(case["each"]):
            pairs = []
            for name in names:
                first = 0
                for part in parts_of[name]:
                    gradient = tf.placeholder(tf.float32, part.shape)
                    rows = part.shape.as_list()[0]
                    self.feeds[gradient] = data["grad/" + name][:, first : first + rows]
                    first += rows
                    pairs.append((gradient, part))
            arguments = Scope(step, self.variables, None)
            with tf.variable_scope(scope) if scope else contextlib.nullcontext():
                counted = None if i else step
                updates.append(
                    make_records.resolve(optimizer, arguments).apply_gradients(pairs, counted)
                )
        self.train = tf.group(*updates)
        self.saver = tf.train.Saver(sharded=case["sharded"], write_version=case["format"])
        config = tf.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=1)
        config.graph_options.rewrite_options.disable_meta_optimizer = True
        config.device_count["CPU"] = 2
        self.session = self.stack.enter_context(tf.Session(config=config))
        self.session.run(tf.global_variables_initializer())

    def go(self, first):
        """Some steps; gives the parameters after each."""
        path = []
        for k in range(first, first + STEPS):
            self.session.run(self.train, {p: values[k] for p, values in self.feeds.items()})
            path.append(self.session.run(self.variables))
        return {"path/" + name: np.array([values[name] for values in path]) for name in SHAPES}

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return self.stack.__exit__(*error)


def alternating():
    """A function of devices that puts variables on two of them."""
    numbers = itertools.cycle((0, 1))
    return lambda op: f"/cpu:{next(numbers)}" if op.type == "VariableV2" else op.device


def sliced(value):
    """An initializer of parts."""

    def initialize(shape, dtype=None, partition_info=None):
        return tf.constant(value[index(partition_info.var_offset, shape)], dtype)

    return initialize


def index(offset, shape):
    """Where a part is in the whole."""
    return tuple(slice(begin, begin + shape[i]) for i, begin in enumerate(offset))


def all_of(session):
    """The values of all variables as a checkpoint has them, with their slices."""
    found = {}
    for variable in tf.global_variables():
        value = session.run(variable)
        info = variable._get_save_slice_info()
        if info is None:
            found[variable.op.name] = value
        else:
            found[info.full_name + " " + info.spec] = value
    return found


def record_graph(case, data, prefix, ours=None):
    """Trains, saves and goes on; or restores ours and goes on."""
    arrays = {}
    with Graph(case, data) as graph:
        if ours is None:
            graph.go(0)
            save = {"write_meta_graph": False, "write_state": False}
            graph.saver.save(graph.session, prefix, **save)
        else:
            graph.saver.restore(graph.session, ours)
            arrays.update(named("restored", all_of(graph.session)))
        arrays.update(graph.go(STEPS))
        if ours is None:
            arrays.update(named("end", all_of(graph.session)))
    return arrays


class Recorder(tf.train.SessionRunHook):
    """Records gradients and parameters of each step of an estimator."""

    def __init__(self):
        self.gradients, self.path = [], []

    def after_create_session(self, session, coord):
        self.restored = all_of(session)

    def end(self, session):
        self.at_end = all_of(session)

    def before_run(self, run_context):
        pairs = tf.get_collection("pairs")
        return tf.train.SessionRunArgs([gradient for gradient, _ in pairs])

    def after_run(self, run_context, run_values):
        variables = [variable for _, variable in tf.get_collection("pairs")]
        values = run_context.session.run(variables)
        self.gradients.append(whole(variables, run_values.results))
        self.path.append(whole(variables, values))
        self.rows = {v._get_save_slice_info().full_name for v in tf.get_collection("rows")}


def whole(variables, values):
    """The parts of each variable together."""
    found = {}
    for i, variable in enumerate(variables):
        info = variable._get_save_slice_info()
        array = found.setdefault(info.full_name, np.zeros(info.full_shape, np.float32))
        array[index(info.var_offset, info.var_shape)] = values[i]
    return found


def recording(optimizer):
    """An optimizer whose gradients a ``Recorder`` finds."""
    base = find(optimizer["$opt"])

    class Recording(base):
        def apply_gradients(self, grads_and_vars, *args, **kwargs):
            pairs = list(grads_and_vars)
            for gradient, variable in pairs:
                tf.add_to_collection("pairs", (tf.convert_to_tensor(gradient), variable))
                if isinstance(gradient, tf.IndexedSlices):
                    tf.add_to_collection("rows", variable)
            return base.apply_gradients(self, pairs, *args, **kwargs)

    return Recording(**optimizer["kwargs"])


def make_estimator(kind, parts, optimizers, folder):
    """An estimator with a numeric column and a categorical one, or its embedding."""
    age = tf.feature_column.numeric_column("age")
    word = tf.feature_column.categorical_column_with_identity("word", 6)
    # Estimators make a new optimizer for each graph if they are given a function.
    make = {part: lambda o=o: recording(o) for part, o in optimizers.items()}
    deep = [age, tf.feature_column.embedding_column(word, 2)]
    config = tf.estimator.RunConfig(folder, tf_random_seed=4, save_summary_steps=10**6)
    partitioner = tf.fixed_size_partitioner(parts) if parts > 1 else None
    arguments = {"config": config}
    if "Combined" in kind:
        arguments.update(dnn_feature_columns=deep, linear_feature_columns=[age, word])
        arguments.update(dnn_hidden_units=[3], input_layer_partitioner=partitioner)
        arguments.update(dnn_optimizer=make["dnn"], linear_optimizer=make["linear"])
    elif kind.startswith("DNN"):
        arguments.update(feature_columns=deep, hidden_units=[3], optimizer=make["dnn"])
        arguments.update(input_layer_partitioner=partitioner)
    else:
        arguments.update(feature_columns=[age, word], optimizer=make["linear"])
        arguments.update(partitioner=partitioner)
    return getattr(tf.estimator, kind)(**arguments)


def batches():
    """The same examples in each step; no example has the last word."""
    inputs = {"age": np.float32([[0.5], [-1.0], [2.0], [0.0]]), "word": np.array([0, 3, 4, 1])}
    return tf.data.Dataset.from_tensors((inputs, np.array([[0], [1], [1], [0]]))).repeat()


def record_estimator(case, prefix, ours=None):
    """Trains, saves and goes on; or restores ours and goes on."""
    with tempfile.TemporaryDirectory() as folder:
        if ours is None:
            estimator = make_estimator(*case, folder)
            estimator.train(batches, steps=STEPS)
            copy(estimator.latest_checkpoint(), prefix)
        else:
            prefix = os.path.join(folder, f"model.ckpt-{2 * STEPS}")
            copy(ours, prefix)
            tf.train.update_checkpoint_state(folder, prefix)
            estimator = make_estimator(*case, folder)
        recorder = Recorder()
        estimator.train(batches, hooks=[recorder], steps=STEPS)
        arrays = {}
        for name in recorder.path[0]:
            arrays["grad/" + name] = np.array([of[name] for of in recorder.gradients])
            arrays["path/" + name] = np.array([of[name] for of in recorder.path])
            if name in recorder.rows:
                touched = [of[name].any(axis=1) for of in recorder.gradients]
                arrays["rows/" + name] = np.flatnonzero(np.any(touched, axis=0))
        if ours is None:
            arrays.update(named("end", recorder.at_end))
        else:
            arrays.update(named("restored", recorder.restored))
    return arrays


def copy(old, new):
    """The files of a checkpoint by another name."""
    folder, file = os.path.split(old)
    for name in os.listdir(folder):
        if name.startswith(file + ".") and not name.endswith(".meta"):
            shutil.copyfile(os.path.join(folder, name), new + name[len(file) :])


def named(prefix, arrays):
    """The arrays by names that begin so."""
    return {prefix + "/" + name: np.asarray(value) for name, value in arrays.items()}


def main():
    """Runs all cases."""
    here = os.path.dirname(os.path.abspath(__file__))
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--continue", dest="ours", help="the folder with our checkpoints")
    parser.add_argument("--out", default=os.path.join(here, "estimators"))
    args = parser.parse_args()
    os.makedirs(args.out, exist_ok=True)
    data, arrays = make_data(), {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, case in graphs().items():
            ours = args.ours and os.path.join(args.ours, name)
            recorded = record_graph(case, data, os.path.join(scratch, name), ours)
            arrays.update(named(name, recorded))
        for name, case in estimators().items():
            ours = args.ours and os.path.join(args.ours, name)
            recorded = record_estimator(case, os.path.join(scratch, name), ours)
            arrays.update(named(name, recorded))
        if args.ours:
            write(os.path.join(args.out, "ours.xz"), {"tf_version": tf.__version__}, arrays)
            return
        with zipfile.ZipFile(os.path.join(args.out, "checkpoints.zip"), "w") as archive:
            for file in sorted(os.listdir(scratch)):
                with open(os.path.join(scratch, file), "rb") as stream:
                    member = zipfile.ZipInfo(file)  # of no date
                    member.compress_type = zipfile.ZIP_DEFLATED
                    archive.writestr(member, stream.read())
    meta = {"graphs": graphs(), "estimators": estimators(), "steps": STEPS}
    meta["tf_version"] = tf.__version__
    write(os.path.join(args.out, "theirs.xz"), meta, dict(data, **arrays))


if __name__ == "__main__":
    main()
