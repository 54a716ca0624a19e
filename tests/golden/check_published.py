"""Compares ``published.py`` with the classes of BERT, tensor2tensor and Mesh TensorFlow.

    python3.7 -m pip install --no-deps bert-tensorflow==1.0.4 tensor2tensor==1.15.7
    python3.7 -m pip install --no-deps mesh-tensorflow==0.1.19 gin-config==0.5.0 future
    python3.7 tests/golden/check_published.py

Beside that it needs what ``make_records.py`` needs. It prints, for each float32 case of that, the
largest difference of a parameter or slot, relative to the array's largest element. There is no
package with NVIDIA's LAMB.
"""

import importlib.util
import os
import sys
import types

import make_records  # first: it says how TensorFlow is to run
import numpy as np
import tensorflow as tf


def module_of(package, *path):
    """One module of a package, without what the package itself imports."""
    [folder] = importlib.util.find_spec(package).submodule_search_locations
    spec = importlib.util.spec_from_file_location(path[-1], os.path.join(folder, *path) + ".py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def adafactor_of_tensor2tensor():
    """Without the modules for bfloat16, which import most of tensor2tensor."""
    found = importlib.util.find_spec("tensor2tensor").submodule_search_locations
    like = lambda x, y: tf.cast(x, y.dtype.base_dtype)
    stubs = {
        "layers.common_layers": {"cast_like": like},
        "utils.quantization": {"noise_from_step_num": lambda: None},
    }
    for name, content in stubs.items():
        parent, _, last = name.partition(".")
        stub = types.ModuleType(name)
        vars(stub).update(content)
        package = types.ModuleType("tensor2tensor." + parent)
        package.__path__ = [os.path.join(found[0], parent)]
        setattr(package, last, stub)
        sys.modules["tensor2tensor." + name] = stub
        sys.modules["tensor2tensor." + parent] = package
    return module_of("tensor2tensor", "utils", "adafactor").AdafactorOptimizer


class Counted:
    """BERT increments the global step by hand."""

    def __init__(self, inner):
        self.inner, self.kept = inner, {}

    def apply_gradients(self, pairs, global_step):
        """One step, and the slots by the names of their variables."""
        pairs = list(pairs)
        update = self.inner.apply_gradients(pairs)
        variables = {v.op.name: v for v in tf.global_variables()}
        for slot in ("adam_m", "adam_v"):
            for _, x in pairs:
                self.kept[slot, x.op.name] = variables[x.op.name + "/" + slot]
        with tf.control_dependencies([update]):
            return global_step.assign_add(1)


def of_class(case, data, make):
    """What an original computes for a case."""
    find, make_records.find = make_records.find, lambda name: make
    try:
        arrays, _ = make_records.run(case, data, case["dtype"])
    finally:
        make_records.find = find
    return arrays


def of_mesh_tensorflow(case, data):
    """The parameters and slots after the last step."""
    import mesh_tensorflow as mtf
    from mesh_tensorflow import optimize

    with tf.Graph().as_default(), tf.device("/cpu:0"):
        step = tf.train.get_or_create_global_step()
        graph = mtf.Graph()
        mesh, gradients, feeds = mtf.Mesh(graph, "mesh"), {}, {}
        for name in (key[5:] for key in data if key.startswith("init/")):
            start = data["init/" + name]
            sizes = enumerate(start.shape)
            shape = mtf.Shape([mtf.Dimension("%s_%d" % (name, i), n) for i, n in sizes])
            mtf.get_variable(mesh, name, shape, initializer=tf.constant_initializer(start))
            feed = tf.placeholder(tf.float32, start.shape)
            feeds[feed] = data["grad/" + name]
            gradients[name] = mtf.import_tf_tensor(mesh, feed, shape)
        optimizer = optimize.AdafactorOptimizer(**case["kwargs"])
        variables = graph.trainable_variables
        updates = optimizer.apply_grads([gradients[v.name] for v in variables], variables)
        where = mtf.placement_mesh_impl.PlacementMeshImpl([], [], ["cpu:0"])
        lowered = mtf.Lowering(graph, {mesh: where})
        with tf.control_dependencies([lowered.lowered_operation(op) for op in updates]):
            train = tf.group(step.assign_add(1))
        begin, end = lowered.copy_masters_to_slices(), lowered.copy_slices_to_masters()
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(begin)
            for k in range(make_records.STEPS):
                session.run(train, {feed: values[k] for feed, values in feeds.items()})
            session.run(end)
            saved = {v.op.name: v for v in tf.global_variables()}
            return session.run({n: v for n, v in saved.items() if n.split("/")[0] == n})


def main():
    """Runs all cases."""
    bert = module_of("bert", "optimization").AdamWeightDecayOptimizer
    counted = lambda **kwargs: Counted(bert(**kwargs))
    t2t = adafactor_of_tensor2tensor()
    for case in make_records.cases():
        if case["dtype"] != "float32" or case["optimizer"] not in ("AdamWeightDecay", "Adafactor"):
            continue
        data = make_records.make_data(case)
        ours, _ = make_records.run(case, data, "float32")
        if "min_dim_size_to_factor" in case["kwargs"]:
            theirs = of_mesh_tensorflow(case, data)
            del theirs["global_step"]
            last = {k.split("/")[1]: v[-1] for k, v in ours.items() if k.startswith("param/")}
            slots = {k.split("/")[1]: v for k, v in ours.items() if k.startswith("slot/")}
            ours = dict(last, **slots)
        else:
            theirs = of_class(case, data, counted if case["optimizer"] != "Adafactor" else t2t)
        shapes = lambda arrays: {name: np.shape(a) for name, a in arrays.items()}
        assert shapes(ours) == shapes(theirs), case["case"]
        errors = [np.abs(ours[k] - theirs[k]).max() / np.abs(theirs[k]).max() for k in ours]
        print("%-40s %.1e" % (case["case"], max(errors)))


if __name__ == "__main__":
    main()
