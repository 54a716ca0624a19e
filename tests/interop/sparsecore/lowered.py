"""Runs a lowered optimizer on a CPU: for each row the StableHLO, not the Python function."""

import functools
import importlib.util
import json
import lzma
import pathlib
import sys
import types

import jax
import numpy as np
from jax._src import compiler
from jax._src.interpreters import mlir
from jax._src.lib import xla_client
from jax._src.lib.mlir import ir

from tests import golden

STORED = pathlib.Path(__file__).with_name("stablehlo.json.xz")
HAS_WHEEL = importlib.util.find_spec("jax_tpu_embedding") is not None


class Spec:
    """``CustomOptimizerSpec``, where jax-tpu-embedding is not installed: it only holds these."""

    def __init__(
        self, learning_rate, custom_computation_fn, slot_variable_initializers_tuple, short_name_str
    ):
        self.learning_rate = learning_rate
        self.custom_computation_fn = custom_computation_fn
        self.slot_variable_initializers_tuple = slot_variable_initializers_tuple
        self.short_name_str = short_name_str

    def slot_variables_initializers(self):
        return self.slot_variable_initializers_tuple


def pretend(monkeypatch):
    """Without the wheel, a module with ``Spec`` in its place."""
    if HAS_WHEEL:
        return
    name = "jax_tpu_embedding.sparsecore.lib.nn"
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:i]), types.ModuleType(parts[i - 1]))
    specs = types.ModuleType("embedding_spec")
    specs.CustomOptimizerSpec = Spec
    monkeypatch.setitem(sys.modules, f"{name}.embedding_spec", specs)
    monkeypatch.setattr(sys.modules[name], "embedding_spec", specs, raising=False)


def lower(spec, width):
    """As ``CustomOptimizerSpec.lower_to_stablehlo``, which the wheel of Python 3.11 lacks."""
    num_slots = len(spec.slot_variables_initializers())
    num_scalars = len(spec.get_hyperparameters({spec.short_name_str: spec.first_shared()}))
    if hasattr(spec, "lower_to_stablehlo"):
        function = spec.custom_computation_fn
        return spec.lower_to_stablehlo(function, width, num_slots, num_scalars)
    row = jax.ShapeDtypeStruct((1, width), np.float32)
    rows = [row] * (2 + num_slots + num_scalars)
    return jax.jit(spec.custom_computation_fn).lower(*rows).as_text(dialect="stablehlo")


@functools.cache
def compiled(stablehlo):
    """A module of StableHLO as a function of arrays, compiled by XLA for the CPU."""
    with mlir.make_ir_context():
        module = ir.Module.parse(stablehlo)
        device = jax.devices("cpu")[0]
        options = compiler.get_compile_options(num_replicas=1, num_partitions=1)
        devices = xla_client.DeviceList((device,))
        executable = device.client.compile_and_load(
            mlir.module_to_bytecode(module), devices, options
        )

    def run(*arrays):
        outs = executable.execute(jax.device_put(list(arrays), device))
        return [np.asarray(a) for a in outs]

    return run


def follow(record, spec, text_of):
    """Our parameters after every step and our final slots, as ``golden.follow``.

    ``text_of(width)`` gives the StableHLO for a table of this width.
    """
    got = {}
    for name, start in record.group("init").items():
        table = start.reshape(len(start), -1)
        ids, values = record.group("grad_idx")[name], record.group("grad_val")[name]
        run = compiled(text_of(table.shape[1]))
        arrays = [table] + [
            np.array(f(None, table.shape)) for f in spec.slot_variables_initializers()
        ]
        shared = spec.first_shared(record.meta.get("global_step_start", 0))
        path = []
        for step in range(record.meta["steps"]):
            scalars = [np.full((1, table.shape[1]), s) for s in spec.get_hyperparameters(shared)]
            sums = np.zeros_like(table)
            np.add.at(sums, ids[step], values[step].reshape(len(ids[step]), -1))
            for i in np.unique(ids[step]):
                outs = run(sums[i : i + 1], *(a[i : i + 1] for a in arrays), *scalars)
                arrays = [put(a, i, row) for a, row in zip(arrays, outs, strict=True)]
            shared = spec.next_shared(shared)
            path.append(arrays[0].reshape(start.shape))
        got[f"param/{name}"] = np.stack(path)
        fields = spec.slot_variables_initializers()._fields
        slots = dict(zip(fields, arrays[1:], strict=True))
        for slot in record.meta["slots"]:
            if slot["var"] == name and slot["slot"] in slots:
                got[f"slot/{slot['checkpoint_name']}"] = slots[slot["slot"]].reshape(start.shape)
    return got


def put(a, i, row):
    a = a.copy()
    a[i] = row
    return a


def error(got, record):
    """The largest difference, relative to the largest value of its array."""
    worst = lambda a, b: np.max(np.abs(a - b)) / max(np.max(np.abs(b)), 1e-30)
    return max(worst(a, record.arrays[name]) for name, a in got.items())


@functools.cache
def records():
    """The records in float32 whose gradients are rows, by name."""
    loaded = {name: golden.load(name) for name in golden.RECORDS}
    return {
        name: record
        for name, record in loaded.items()
        if record.meta["kind"] != "dense" and record.meta["dtype"] == "float32"
    }


@functools.cache
def stored():
    """What ``make_stablehlo.py`` has lowered: for each record, by the width of the table."""
    return json.loads(lzma.decompress(STORED.read_bytes()))


# Those of the records that do not update each touched row by itself, and why.
REFUSED = {
    "Adafactor": "may mix the rows",
    "Adam": "moves all rows",
    "AdamGS": "moves all rows",
    "AdamW": "moves all rows",
    "AdamWeightDecay": "moves all rows",
    "AddSign": "may use all rows",
    "GradVarianceScaled": "may use all rows",
    "LAMB": "may mix the rows",
    "LARS": "may mix the rows",
    "MovingAverage": "may use all rows",
    "Nadam": "may use all rows",
    "NeuralOptimizer1": "may use all rows",
    "NormalizedSGD": "may mix the rows",
    "PowerSign": "may use all rows",
    "Shampoo": "has rows in an axis other|may mix the rows",
    "VariableClipping": "no parameter matches",  # it names them
}
