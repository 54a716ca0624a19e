"""Records of the real TensorFlow 1.15.5 and RETURNN (``README.md``), and how they are replayed."""

import json
import lzma
import math
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optzoo
from optzoo import SparseRows, create
from optzoo.state import LeafwiseState

FOLDER = pathlib.Path(__file__).with_name("records")
RECORDS = sorted(path.stem for path in FOLDER.glob("*.xz"))


class Record(NamedTuple):
    """One recorded run of an original."""

    meta: dict[str, Any]
    arrays: dict[str, np.ndarray]

    def group(self, prefix: str) -> dict[str, np.ndarray]:
        """The arrays named ``prefix/...``, without the prefix."""
        cut = len(prefix) + 1
        return {k[cut:]: v for k, v in self.arrays.items() if k.startswith(prefix + "/")}


def load(name: str, folder: pathlib.Path = FOLDER) -> Record:
    """Reads one record."""
    header, _, data = lzma.decompress((folder / f"{name}.xz").read_bytes()).partition(b"\n")
    meta, arrays, start = json.loads(header), {}, 0
    for key, dtype, stored, shape in meta.pop("arrays"):
        array = np.frombuffer(data, stored, math.prod(shape), start)
        arrays[key] = array.reshape(shape).astype(dtype)
        start += array.nbytes
    return Record(meta, arrays)


def short_name(original: str) -> str:
    """The name of an original class as in ``meta``."""
    return original.rsplit(".", 1)[-1].removesuffix("Optimizer")


def build(meta: dict[str, Any]) -> optax.GradientTransformation:
    """Our optimizer with the values that the original used after its rounding."""
    name, kwargs = meta["optimizer"], meta["kwargs"]
    if meta["kind"] != "dense" and name == "LARS":
        # For rows it is momentum, which rounds its arguments to float32; create does not for LARS.
        kwargs = {"momentum": 0.9, **kwargs}
        kwargs = {k: float(np.float32(v)) if isinstance(v, float) else v for k, v in kwargs.items()}
    if meta["kind"] != "dense" and name == "PowerSign":
        return _power_sign_of_rows(**kwargs)
    config = _config(name, kwargs)
    if "decay_var_list" in meta:
        config["mask"] = {s["var"]: s["var"] in meta["decay_var_list"] for s in meta["slots"]}
    return create(config)


def _config(name: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The config of an original from its record."""
    kwargs = {k: _resolve(v) for k, v in kwargs.items()}
    if name not in ("extend_with_decoupled_weight_decay", "ShampooW"):
        return {"class": name, **kwargs}
    weight_decay = kwargs.pop("weight_decay")
    inner = {"class": kwargs.pop("base_optimizer", "Shampoo"), **kwargs}
    return {"class": "extend_with_decoupled_weight_decay", "opt": inner} | {
        "weight_decay": weight_decay
    }


def _power_sign_of_rows(
    learning_rate: Any = 0.1, base: float = math.e, beta: float = 0.9, sign_decay_fn: Any = None
):
    """PowerSign for rows, where the original rounds e and the logarithm of its base."""
    base = float(np.float32(math.e)) ** float(np.float32(math.log(base)))
    rate, decay = _resolve(learning_rate), _resolve(sign_decay_fn)
    rate = float(np.float32(rate)) if isinstance(rate, float) else rate
    if decay is not None:
        decay = getattr(optzoo, f"{decay.pop('class')}_sign_decay")(**decay)
    return optzoo.power_sign(rate, base, float(np.float32(beta)), decay)


def _resolve(value: Any) -> Any:
    match value:
        case {"$of_step": expression}:
            return lambda k: eval(expression, {}, {"k": jnp.asarray(k, jnp.float32)})
        case {"$fn_of_T": expression}:
            return lambda k: eval(
                expression, {}, {"T": jnp.asarray(k, jnp.float32) + 1, "where": jnp.where}
            )
        case {"$global_step": _}:
            return "count"
        case {"$opt": name, "kwargs": kwargs}:
            return _config(name, kwargs)
        case {"$sign_decay": kind, "args": args}:
            return {"class": kind, **args}
        case {"$tensor": number}:
            return jnp.asarray(number)  # the original does not round it
        case {"$var_dict": axes}:
            return axes
        case list():
            return tuple(value)
    return value


def follow(record: Record) -> dict[str, np.ndarray]:
    """Our parameters after every step and our final slots, named as in the record."""
    [values] = follow_all([record])
    return values


def follow_all(records: list[Record]) -> list[dict[str, np.ndarray]]:
    """:func:`follow` for each record; all in one program, which is compiled faster than many."""
    programs, inputs = zip(*map(_program, records), strict=True)

    @jax.jit
    def run(inputs):
        return [program(x) for program, x in zip(programs, inputs, strict=True)]

    return jax.device_get(run(inputs))


def _program(record: Record) -> tuple[Callable[[Any], dict[str, jax.Array]], Any]:
    """What :func:`follow` computes, as a function, and the argument for it."""
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
        missing = dict.fromkeys(params)
        updates, state = tx.update(missing | dense | rows, state, params, **extra)
        moved = {k: u for k, u in updates.items() if u is not None}
        params = params | optax.apply_updates({k: params[k] for k in moved}, moved)
        return (params, state, global_step + 1), params

    def run(arguments):
        params, inputs = arguments
        (_, state, _), path = jax.lax.scan(
            step, (params, tx.init(params), jnp.int32(start)), inputs
        )
        trees: dict[str, Any] = {}
        for node in jax.tree.leaves(state, is_leaf=lambda s: isinstance(s, LeafwiseState)):
            if isinstance(node, LeafwiseState):
                trees |= node.slots._asdict()
        slots = {
            f"slot/{slot['checkpoint_name']}": _slot(trees, slot["slot"], slot["var"])
            for slot in record.meta["slots"]
        }
        return {f"param/{k}": v for k, v in path.items()} | slots

    return run, (params, (gradients, extra))


def _slot(trees: dict[str, Any], name: str, var: str) -> jax.Array:
    """A slot by its name; a number after the name selects a dimension of the variable."""
    if name in trees:
        return trees[name][var]
    name, _, dimension = name.rpartition("_")
    return trees[name][var][int(dimension)]


def float32_inside(meta):
    """Whether the original computes in float32 even for float64 variables."""
    kwargs = meta["kwargs"]
    of_step = {"$of_step", "$fn_of_T"}
    return (
        any(isinstance(v, dict) and not of_step.isdisjoint(v) for v in kwargs.values())
        or "sign_decay_fn" in kwargs
        or meta["optimizer"] in ("AdamGS", "LazyAdamGS")  # powers of the betas
        or kwargs.get("num_updates") is not None  # the decay of a moving average
    )


class Miss(NamedTuple):
    """The largest difference from a record, and its position."""

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
