"""Records of the real TensorFlow 1.15.5 (``README.md``), and how we follow them."""

import inspect
import json
import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optzoo
from optzoo import CATALOG, LeafwiseState, SparseRows

FOLDER = pathlib.Path(__file__).with_name("tf1")
RECORDS = sorted(path.stem for path in FOLDER.glob("*.npz"))

_ARGUMENTS = {
    "beta1": "b1",
    "beta2": "b2",
    "epsilon": "eps",
    "use_nesterov": "nesterov",
    "sign_decay_fn": "sign_decay",
}
# What the original keeps at the precision of the variable; all else it rounds to float32.
_EXACT = {"initial_accumulator_value"}


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


def build(meta: dict[str, Any]) -> optax.GradientTransformation:
    """Our optimizer with the numbers that the original really used."""
    wanted = f"{meta['optimizer']}Optimizer"
    [entry] = [e for e in CATALOG.values() if e.original.endswith(f".{wanted}")]
    parameters = inspect.signature(entry.factory).parameters.values()
    kwargs = {p.name: p.default for p in parameters if p.default is not p.empty}
    kwargs |= {_ARGUMENTS.get(k, k): v for k, v in meta["kwargs"].items()}
    return entry.factory(**{k: _resolve(k, v) for k, v in kwargs.items()})


def _resolve(name: str, value: Any) -> Any:
    if isinstance(value, dict) and "$of_step" in value:
        return lambda k: eval(value["$of_step"], {}, {"k": jnp.asarray(k, jnp.float32)})
    if isinstance(value, dict) and "$sign_decay" in value:
        return getattr(optzoo, f"{value['$sign_decay']}_sign_decay")(**value["args"])
    if isinstance(value, float) and name not in _EXACT:
        return float(np.float32(value))
    return value


def follow(record: Record) -> dict[str, np.ndarray]:
    """Our parameters after every step and our slots at the end, named as in the record."""
    tx, start = build(record.meta), record.meta.get("global_step_start", 0)
    params = {k: jnp.asarray(v) for k, v in record.group("init").items()}
    inputs = [record.group(group) for group in ("grad", "grad_idx", "grad_val")]

    def step(carry, inputs):
        params, state, global_step = carry
        dense, ids, values = inputs
        rows = {k: SparseRows(ids[k], values[k], len(params[k])) for k in ids}
        updates, state = tx.update(dense | rows, state, params, global_step=global_step)
        params = optax.apply_updates(params, updates)
        return (params, state, global_step + 1), params

    @jax.jit
    def run(params, inputs):
        return jax.lax.scan(step, (params, tx.init(params), jnp.int32(start)), inputs)

    (_, state, _), path = run(params, inputs)
    trees: dict[str, Any] = {}
    for link in jax.tree.leaves(state, is_leaf=lambda s: isinstance(s, LeafwiseState)):
        trees |= link.slots._asdict()
    slots = {
        f"slot/{slot['checkpoint_name']}": trees[slot["slot"]][slot["var"]]
        for slot in record.meta["slots"]
        if slot["slot"] is not None  # not the originals' counters
    }
    return jax.device_get({f"param/{k}": v for k, v in path.items()} | slots)


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
