"""How the records of FBGEMM (``README.md``) are followed by our optimizers."""

import json
import pathlib
import warnings

import jax
import jax.numpy as jnp
import numpy as np

from optzoo import SparseRows, create, get_slot, set_slot
from optzoo.testing import samples

from .verify_fbgemm import decay_mode

FOLDER = pathlib.Path(__file__).parent
RECORDS = sorted(path.stem for path in FOLDER.glob("*-*.npz"))
NAMES = {"sum": "accumulator"}  # FBGEMM's names of slots and ours


def load(name):
    """The arrays of a record and its ``meta``."""
    with np.load(FOLDER / f"{name}.npz") as z:
        arrays = dict(z)
    return arrays, json.loads(str(arrays.pop("meta")))


def arguments(meta):
    """The arguments that FBGEMM's CPU did not ignore."""
    kwargs = {k: v for k, v in meta["kwargs"].items() if k != "max_norm"}
    if meta["optimizer"] == "EXACT_ROWWISE_ADAGRAD" and decay_mode(meta) == "NONE":
        kwargs.pop("weight_decay", None)
        if kwargs.get("weight_decay_mode") != "DECOUPLE_GLOBAL":  # it has its slot nevertheless
            kwargs.pop("weight_decay_mode", None)
    return kwargs


def by_name(meta, arrays):
    """The optimizer by FBGEMM's names and arguments."""
    kwargs = arguments(meta)
    if meta["schedule"]:
        rates = jnp.asarray(arrays["hyper/learning_rate"])
        kwargs["learning_rate"] = lambda count: rates[count]
    with warnings.catch_warnings():  # tests/interop/fbgemm has tests of them
        warnings.filterwarnings("ignore", category=UserWarning)
        return create(meta["optimizer"].removeprefix("op:"), **kwargs)


def slot_of(meta, slot):
    """Our name of a slot."""
    if meta["optimizer"] == "op:rowwise_rmsprop_ar" and slot == "sum":
        return "rms"
    return NAMES.get(slot, slot)


def start(tx, meta, arrays, dtype):
    """Parameters and state before the first step."""
    params = {name: jnp.asarray(arrays[f"init/{name}"], dtype) for name in meta["var_names"]}
    state = tx.init(params)
    for slot in {s["slot"] for s in meta["slots"]}:
        values = {name: jnp.asarray(arrays[f"slot_init/{name}/{slot}"]) for name in params}
        state = set_slot(state, slot_of(meta, slot), values)
    return params, state


def gradients(meta, arrays):
    """The row-sparse gradients of all steps."""
    rows = dict(zip(meta["var_names"], (shape[0] for shape in meta["shapes"]), strict=True))
    return {
        n: (jnp.asarray(arrays[f"grad_idx/{n}"]), jnp.asarray(arrays[f"grad_val/{n}"]), rows[n])
        for n in meta["var_names"]
    }


def follow(tx, meta, arrays, dtype=None):
    """Parameters and slots after each step, by the names of the record."""
    return run(tx, meta, arrays, start(tx, meta, arrays, dtype or meta["dtype"]), slice(None))[0]


def run(tx, meta, arrays, begin, steps):
    """Parameters and slots after some steps, by the names of the record; and both at the end."""
    all_rows = gradients(meta, arrays)
    extra = {}
    if "hyper/max_counter" in arrays:
        extra["max_counter"] = jnp.asarray(arrays["hyper/max_counter"])
    slots = sorted({s["slot"] for s in meta["slots"]})
    wide = jnp.promote_types(jnp.float32, jax.tree.leaves(begin[0])[0].dtype)

    def step(carry, inputs):
        params, state = carry
        rows, extra = inputs
        grads = {n: SparseRows(i, v.astype(wide), all_rows[n][2]) for n, (i, v) in rows.items()}
        params, state = samples.step(tx, grads, params, state, **extra)
        kept = {slot: get_slot(state, slot_of(meta, slot)) for slot in slots}
        return (params, state), (params, kept)

    rows = {n: (i, v) for n, (i, v, _) in all_rows.items()}
    inputs = jax.tree.map(lambda a: a[steps], (rows, extra))
    compiled = jax.jit(lambda carry, inputs: jax.lax.scan(step, carry, inputs))
    end, (path, kept) = jax.device_get(compiled(begin, inputs))
    found = {f"param/{n}": v for n, v in path.items()}
    return found | {f"slot/{n}/{slot}": kept[slot][n] for slot in slots for n in kept[slot]}, end


def error(a, b, least):
    """The largest error relative to elements, or to a part of the largest element."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.max(np.abs(a - b) / np.maximum(np.abs(b), least * np.abs(b).max() + 1e-30)))


def worst(found, arrays, least=1e-3):
    """The largest error of all steps, each relative to the array at its step."""
    pairs = [(a, b) for name in found for a, b in zip(found[name], arrays[name], strict=True)]
    return max(error(a, b, least) for a, b in pairs)
