"""The graphs of ``golden/make_checkpoints.py`` in this library.

python -m tests.interop.tf1.cases FOLDER    # trains from the start, and saves there
"""

import functools
import pathlib
import shutil
import sys
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import optax

import optzoo
from optzoo.interop.tf1.save import save_tf1_state
from optzoo.testing import samples
from tests import golden

FOLDER = golden.FOLDER.with_name("checkpoints")
THEIRS = golden.load("theirs", FOLDER)
CASES, STEPS = THEIRS.meta["cases"], THEIRS.meta["steps"]


def tree(values: dict[str, Any]) -> Any:
    """Parameters from their names in TensorFlow."""
    nested: dict[str, Any] = {}
    for name, value in values.items():
        *scopes, last = name.split("/")
        inside = nested
        for scope in scopes:
            inside = inside.setdefault(scope, {})
        inside[last] = value
    return nested


def start(case: dict[str, Any]) -> Any:
    """The parameters at the start."""
    return tree({n: jnp.asarray(THEIRS.arrays[f"init/{n}"]) for n in case["variables"]})


def make(case: dict[str, Any]) -> optax.GradientTransformationExtraArgs:
    """The optimizer of a case."""
    of = lambda name, kwargs: golden.build({"optimizer": name, "kwargs": kwargs, "kind": "dense"})
    if "each" in case:
        each = {name: of(o["$opt"], o["kwargs"]) for name, o in case["each"].items()}
        return optax.partition(each, tree({name: name for name in each}))
    if case["optimizer"] == "SyncReplicas":
        inner = of(case["kwargs"]["opt"]["$opt"], case["kwargs"]["opt"]["kwargs"])
        return optzoo.sync_replicas(inner, 1, axis_name=None)
    if case["optimizer"] in ("ElasticAverage", "AGN"):
        inner = of(case["kwargs"]["opt"]["$opt"], case["kwargs"]["opt"]["kwargs"])
        size = {"num_workers": 1} if case["optimizer"] == "ElasticAverage" else {}
        wrap = optzoo.elastic_average if size else optzoo.agn
        return wrap(inner, **size, axis_name=None, communication_period=2)
    return of(case["optimizer"], case["kwargs"])


def gradients(case: dict[str, Any], first: int) -> Any:
    """Those of some steps, stacked."""
    steps = slice(first, first + STEPS)
    found = {name: THEIRS.arrays[f"grad/{name}"][steps] for name in case["variables"]}
    if case["kind"] == "sparse":
        found["enc/kernel"] = optzoo.SparseRows(
            jnp.asarray(THEIRS.arrays["rows"][steps], jnp.int32), found["enc/kernel"][:, :2], 3
        )
    return tree(found)


@functools.cache
def _trainer(name: str) -> Any:
    """Some steps of a case, compiled."""
    tx = make(CASES[name])
    needs_step = CASES[name]["optimizer"] in ("AdamGS", "LazyAdamGS")

    def step(carry, inputs):
        (params, state), (g, k) = carry, inputs
        extra = {"global_step": k} if needs_step else {}
        params, state = samples.step(tx, g, params, state, **extra)
        return (params, state), params

    return jax.jit(lambda carry, inputs: jax.lax.scan(step, carry, inputs))


def train(name: str, first: int, params: Any, state: Any) -> tuple[Any, Any, Any]:
    """Some steps: the parameters after each, and in the end parameters and state."""
    steps = CASES[name].get("start", 0) + first + jnp.arange(STEPS)
    (params, state), path = _trainer(name)((params, state), (gradients(CASES[name], first), steps))
    return path, params, state


def train_from_start(name: str) -> tuple[Any, Any]:
    """Our parameters and state where TensorFlow saved its own."""
    case = CASES[name]
    params = start(case)
    state = make(case).init(params)
    if "start" in case:  # of the global step; GGT's own starts at 0
        state = (state[0], state[1]._replace(count=jnp.int32(case["start"])))
    return train(name, 0, params, state)[1:]


# What TensorFlow calls the slots, where it is not the name of the case's optimizer.
NAMES = {
    "AddSign": "AddSignOptimizer",
    "AdamGS": "Adam",
    "CustomAdam": "CustomAdamOptimizer",
    "GradVarianceScaled": "GradVarianceScaledOptimizer",
    "LARS": "LARSOptimizer",
    "LazyAdam": "Adam",
    "LazyAdamGS": "Adam",
    "Nadam": "Adam",
    "PowerSign": "PowerSignOptimizer",
}
# Their slots have the names of the fields, w_slot_v; so they have for AdamWeightDecay and LAMB.
BY_FIELD = ("AdafactorMesh", "AdafactorMeshMomentum")
# These need a checkpoint of the graph: only that has the prefix of the powers, or the roots.
NEED_LIKE = ("VariableClipping", "ShampooRoots", "ShampooMixed")


def load_arguments(name: str, case: dict[str, Any]) -> dict[str, Any]:
    """The arguments with which a case's checkpoint is loaded."""
    if name == "AMSGrad":
        # Its variables have no names: the count, then three for each parameter of var_list.
        slots = [f"0/slots/{s}/{n}" for n in case["variables"] for s in ("m", "v", "v_hat")]
        names = {slot: f"Variable_{i + 1}" for i, slot in enumerate(slots)}
        return {"variables": {"0/count": "Variable", **names}}
    return {"swapped": True} if case.get("swapped") else {}


def save_arguments(name: str, case: dict[str, Any], theirs: pathlib.Path) -> dict[str, Any]:
    """The arguments with which a checkpoint for a case's graph is saved."""
    if name in NEED_LIKE:
        return load_arguments(name, case) | {"like": theirs / name}
    if "each" in case:
        # In the order in which the graph has them, not in that of the labels.
        powers = {
            f"inner_states/{p}/inner_state/0/shared/{power}": power + ("_1" if i else "")
            for i, p in enumerate(case["variables"])
            for power in ("beta1_power", "beta2_power")
        }
        return {
            "optimizer_name": {p: o["$opt"] for p, o in case["each"].items()},
            "variables": powers if name == "TwoAdams" else None,
        }
    if name in BY_FIELD:
        return {}
    used = case["kwargs"]["opt"]["$opt"] if "opt" in case["kwargs"] else case["optimizer"]
    return load_arguments(name, case) | {
        "optimizer_name": NAMES.get(used, used),
        "scope": case.get("scope"),
    }


def save_all(folder: pathlib.Path, theirs: pathlib.Path) -> None:
    """Trains every case here from the start, and saves it for TensorFlow."""
    for name, case in CASES.items():
        params, state = train_from_start(name)
        save_tf1_state(folder / name, params, state, **save_arguments(name, case, theirs))


def table() -> str:
    """What checkpoints have beside parameters and the global step, as the page shows it."""
    lines = ["| optimizer | beside a matrix `w` |", "|---|---|"]
    for ours, entry in optzoo.CATALOG.items():
        if entry.original is not None:
            name = golden.short_name(entry.original)
            variables = _beside_a_matrix({"RMSProp": "RMSPropCentered"}.get(name, name))
            lines.append(f"| `{ours}` | {', '.join(variables) or 'nothing'} |")
    return "\n".join(lines) + "\n"


def _beside_a_matrix(name: str) -> list[str]:
    saved = golden.Record({}, THEIRS.arrays).group(f"{name}/end")
    matrix, *others = CASES[name]["variables"]
    hidden = {"global_step", matrix, *others}
    of_others = tuple(f"{other}/" for other in others)
    names = [n for n in saved if n not in hidden and not n.startswith(of_others)]
    names = sorted(names)[:4]  # of AMSGrad's without a name the rest are of the other parameters
    return [f"`{n.replace(f'{matrix}/', 'w/')}`" for n in names]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        shutil.unpack_archive(FOLDER / "checkpoints.zip", scratch)
        pathlib.Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
        save_all(pathlib.Path(sys.argv[1]), pathlib.Path(scratch))
