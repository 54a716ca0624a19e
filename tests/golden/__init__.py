"""Records of the real TensorFlow 1.15.5 and RETURNN (``README.md``), and how we follow them."""

import inspect
import json
import math
import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optzoo
from optzoo import CATALOG, LeafwiseState, SparseRows

FOLDER = pathlib.Path(__file__).with_name("records")
RECORDS = sorted(path.stem for path in FOLDER.glob("*.npz"))

_ARGUMENTS = {
    "beta1": "b1",
    "beta2": "b2",
    "epsilon": "eps",
    "use_nesterov": "nesterov",
    "sign_decay_fn": "sign_decay",
    "skip_list": "skip",
}
# What the originals keep at the precision of the variable; all else they round to float32.
_EXACT = {
    "initial_accumulator_value",
    "initial_gradient_squared_accumulator_value",
    "weight_decay",
    "decrease_factor",
}
_ALL_EXACT = {("LARS", "dense"), ("AMSGrad", "dense")}
_ALL_EXACT |= {("Shampoo", kind) for kind in ("dense", "sparse", "dup")}


class Record(NamedTuple):
    """One trajectory of an original."""

    meta: dict[str, Any]
    arrays: dict[str, np.ndarray]

    def group(self, prefix: str) -> dict[str, np.ndarray]:
        """The arrays named ``prefix/...``, without the prefix."""
        cut = len(prefix) + 1
        return {k[cut:]: v for k, v in self.arrays.items() if k.startswith(prefix + "/")}


def load(name: str, folder: pathlib.Path = FOLDER) -> Record:
    """Reads one record."""
    with np.load(folder / f"{name}.npz") as file:
        arrays = {k: file[k] for k in file.files}
    return Record(json.loads(str(arrays.pop("meta"))), arrays)


def short_name(original: str) -> str:
    """The name of an original class as ``meta`` has it."""
    return original.rsplit(".", 1)[-1].removesuffix("Optimizer")


def build(meta: dict[str, Any]) -> optax.GradientTransformation:
    """Our optimizer with the numbers that the original really used."""
    return _build(meta["optimizer"], meta["kwargs"], meta)


def _build(name: str, kwargs: dict[str, Any], meta: dict[str, Any]):
    if "opt" in kwargs:
        inner = _build(kwargs["opt"]["$opt"], kwargs["opt"]["kwargs"], meta)
    match name:
        case "MovingAverage":
            # It rounds one minus the decay, too.
            decay = 1 - float(1 - np.float32(kwargs.get("average_decay", 0.9999)))
            n = kwargs.get("num_updates")
            return optzoo.moving_average(inner, decay, "count" if isinstance(n, dict) else n)
        case "MultitaskOptimizerWrapper":
            return optzoo.multitask(inner)
        case "VariableClipping":
            axes = kwargs["vars_to_clip_dims"]["$var_dict"].items()
            return optzoo.variable_clipping(
                inner, {name: tuple(dims) for name, dims in axes}, kwargs["max_norm"]
            )
        case "extend_with_decoupled_weight_decay" | "ShampooW":
            kwargs = dict(kwargs)
            weight_decay = kwargs.pop("weight_decay")
            inner = _build(kwargs.pop("base_optimizer", "Shampoo"), kwargs, meta)
            return optzoo.decoupled_weight_decay(inner, weight_decay)
        case _:
            return _from_catalog(name, kwargs, meta)


def _from_catalog(name: str, kwargs: dict[str, Any], meta: dict[str, Any]):
    wanted = "GradientDescent" if name == "CustomGradientDescent" else name
    originals = [(e.original, e.factory) for e in CATALOG.values() if e.original]
    [factory] = [factory for original, factory in originals if short_name(original) == wanted]
    parameters = inspect.signature(factory).parameters.values()
    ours = {p.name: p.default for p in parameters if p.default is not p.empty}
    given = {k: v for k, v in kwargs.items() if k != "global_step"}
    ours |= {k if k in ours else _ARGUMENTS.get(k, k): v for k, v in given.items()}
    exact = set(ours) if (name, meta["kind"]) in _ALL_EXACT else _EXACT
    ours = {k: _resolve(v, exact=k in exact) for k, v in ours.items()}
    if "base" in ours:
        # PowerSign rounds the logarithm of its base, and for rows e as well.
        e = math.e if meta["kind"] == "dense" else float(np.float32(math.e))
        ours["base"] = e ** float(np.float32(math.log(kwargs.get("base", math.e))))
    if "decay_var_list" in meta:
        ours["mask"] = {s["var"]: s["var"] in meta["decay_var_list"] for s in meta["slots"]}
    return factory(**ours)


def _resolve(value: Any, exact: bool) -> Any:
    match value:
        case {"$of_step": expression}:
            return lambda k: eval(expression, {}, {"k": jnp.asarray(k, jnp.float32)})
        case {"$fn_of_T": expression}:
            return lambda k: eval(
                expression, {}, {"T": jnp.asarray(k, jnp.float32) + 1, "where": jnp.where}
            )
        case {"$sign_decay": kind, "args": args}:
            return getattr(optzoo, f"{kind}_sign_decay")(**args)
        case {"$tensor": number}:
            return number
        case list():
            return tuple(value)
        case float() if not exact:
            return float(np.float32(value))
    return value


def follow(record: Record) -> dict[str, np.ndarray]:
    """Our parameters after every step and our slots at the end, named as in the record."""
    tx, start = build(record.meta), record.meta.get("global_step_start", 0)
    params = {k: jnp.asarray(v) for k, v in record.group("init").items()}
    gradients = [record.group(group) for group in ("grad", "grad_idx", "grad_val")]
    extra = {}
    if "avoid_updating_slots_steps" in record.meta:
        steps = np.arange(record.meta["steps"])
        extra["update_slots"] = ~np.isin(steps, record.meta["avoid_updating_slots_steps"])

    def step(carry, inputs):
        params, state, global_step = carry
        (dense, ids, values), extra = inputs
        rows = {k: SparseRows(ids[k], values[k], len(params[k])) for k in ids}
        extra["global_step"] = global_step
        updates, state = tx.update(dense | rows, state, params, **extra)
        params = optax.apply_updates(params, updates)
        return (params, state, global_step + 1), params

    @jax.jit
    def run(params, inputs):
        return jax.lax.scan(step, (params, tx.init(params), jnp.int32(start)), inputs)

    (_, state, _), path = run(params, (gradients, extra))
    trees: dict[str, Any] = {}
    for link in jax.tree.leaves(state, is_leaf=lambda s: isinstance(s, LeafwiseState)):
        if isinstance(link, LeafwiseState):
            trees |= link.slots._asdict()
    slots = {
        f"slot/{slot['checkpoint_name']}": _slot(trees, slot["slot"], slot["var"])
        for slot in record.meta["slots"]
    }
    return jax.device_get({f"param/{k}": v for k, v in path.items()} | slots)


def _slot(trees: dict[str, Any], name: str, var: str) -> jax.Array:
    """A slot by its name; of a dimension of the variable, if a number follows the name."""
    if name in trees:
        return trees[name][var]
    name, _, dimension = name.rpartition("_")
    return trees[name][var][int(dimension)]


class Miss(NamedTuple):
    """Where and by how much we differ most from a record."""

    error: float
    where: str


def worst(got: dict[str, np.ndarray], record: Record) -> Miss:
    """The largest relative error of all arrays, parameters at their step."""
    misses = [Miss(0.0, "nowhere")]
    for name, ours in got.items():
        want = record.arrays[name]
        assert ours.shape == want.shape and ours.dtype == want.dtype, name
        scale = np.maximum(np.abs(want), 1e-3 * np.max(np.abs(want), initial=0.0))
        error = np.abs(ours - want) / np.maximum(scale, 1e-30)
        error = np.where(np.isfinite(ours), error, np.inf)
        if error.size:
            place = np.unravel_index(np.argmax(error), error.shape)
            step = f" at step {place[0]}" if name.startswith("param/") else ""
            misses.append(Miss(float(error[place]), f"{name}{step}"))
    return max(misses)
