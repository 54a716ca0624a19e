"""The graphs and estimators of ``golden/make_estimators.py`` in this library.

python -m tests.interop.tf1.estimators FOLDER    # trains as long as they did, and saves there
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
from optzoo.interop.tf1.load import load_tf1_state
from optzoo.interop.tf1.save import save_tf1_state
from optzoo.testing import samples
from tests import golden

FOLDER = golden.FOLDER.with_name("estimators")
THEIRS = golden.load("theirs", FOLDER)
GRAPHS, ESTIMATORS = THEIRS.meta["graphs"], THEIRS.meta["estimators"]
STEPS = THEIRS.meta["steps"]


def path_of(name: str, folder: pathlib.Path) -> pathlib.Path:
    """What TensorFlow's saver called the checkpoint of a case."""
    is_many = name in GRAPHS and GRAPHS[name]["sharded"] and GRAPHS[name]["format"] == 1
    return folder / (f"{name}-?????-of-00002" if is_many else name)


def of(name: str, kind: str) -> dict[str, Any]:
    """The recorded arrays of a kind of a case."""
    return golden.Record({}, THEIRS.arrays).group(f"{name}/{kind}")


def start(name: str) -> dict[str, Any]:
    """The parameters at the start; of an estimator, zeros of their shapes."""
    if name in GRAPHS:
        return {
            n: jnp.asarray(x) for n, x in golden.Record({}, THEIRS.arrays).group("init").items()
        }
    return {n: jnp.zeros(x.shape[1:]) for n, x in of(name, "path").items()}


def make(name: str) -> optax.GradientTransformationExtraArgs:
    """The optimizer of a case."""
    build = lambda o: golden.build({"optimizer": o["$opt"], "kwargs": o["kwargs"], "kind": "dense"})
    if name in GRAPHS:
        each = {scope: (build(o), names) for scope, o, names in GRAPHS[name]["each"]}
    else:
        optimizers, names = ESTIMATORS[name][2], start(name)
        each = {p: (build(o), [n for n in names if n.startswith(p)]) for p, o in optimizers.items()}
    if len(each) == 1:
        return next(iter(each.values()))[0]
    labels = {name: part for part, (_, names) in each.items() for name in names}
    return optax.partition({part: tx for part, (tx, _) in each.items()}, labels)


def gradients(name: str, first: int) -> dict[str, Any]:
    """Those of some steps, stacked."""
    of_graphs = golden.Record({}, THEIRS.arrays).group("grad")
    found = of_graphs if name in GRAPHS else of(name, "grad")
    return stack(name, {n: g[first : first + STEPS] for n, g in found.items()})


def stack(name: str, found: dict[str, Any]) -> dict[str, Any]:
    """The gradients of some steps: those of embeddings as rows."""
    found = {n: jnp.asarray(g) for n, g in found.items()}
    for n, ids in of(name, "rows").items():
        ids, rows = jnp.asarray(ids, jnp.int32), found[n].shape[1]
        found[n] = optzoo.SparseRows(jnp.tile(ids, (STEPS, 1)), found[n][:, ids], rows)
    return found


@functools.cache
def _trainer(optimizer: str) -> Any:
    """Some steps of the case that is the first with this optimizer, compiled."""
    tx = make(optimizer)

    def step(carry, inputs):
        (params, state), (g, k) = carry, inputs
        extra = {"global_step": k} if optimizer == "AdamGS" else {}
        params, state = samples.step(tx, g, params, state, **extra)
        return (params, state), params

    return jax.jit(lambda carry, inputs: jax.lax.scan(step, carry, inputs))


def train(name: str, first: int, params: Any, state: Any, g: Any = None) -> tuple[Any, Any, Any]:
    """Some steps: the parameters after each, and in the end parameters and state."""
    optimizer = name
    if name in GRAPHS:
        each = GRAPHS[name]["each"]
        without_scope = lambda each: (
            [[o, names] for _, o, names in each] if len(each) == 1 else each
        )
        optimizer = next(
            n for n, c in GRAPHS.items() if without_scope(c["each"]) == without_scope(each)
        )
    g = gradients(name, first) if g is None else g
    (params, state), path = _trainer(optimizer)((params, state), (g, first + jnp.arange(STEPS)))
    return path, params, state


def load(name: str, folder: pathlib.Path) -> tuple[Any, Any]:
    """The parameters and the state in TensorFlow's checkpoint of a case."""
    empty = jax.tree.map(jnp.zeros_like, start(name))
    return load_tf1_state(make(name), empty, path_of(name, folder))


def trained(name: str, folder: pathlib.Path) -> tuple[Any, Any]:
    """What we save: of a graph after as many steps as TensorFlow; of an estimator after more."""
    if name in GRAPHS:
        params = start(name)
        return train(name, 0, params, make(name).init(params))[1:]
    return train(name, 0, *load(name, folder))[1:]


def save_all(folder: pathlib.Path, theirs: pathlib.Path) -> None:
    """Trains every case here, and saves it for TensorFlow."""
    for name in (*GRAPHS, *ESTIMATORS):
        save_tf1_state(folder / name, *trained(name, theirs), like=path_of(name, theirs))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        shutil.unpack_archive(FOLDER / "checkpoints.zip", scratch)
        pathlib.Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
        save_all(pathlib.Path(sys.argv[1]), pathlib.Path(scratch))
