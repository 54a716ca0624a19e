"""Checks that saved states can be restored by other versions of Python, JAX, Flax and Orbax.

``states.py save FOLDER`` saves states of some optimizers with the installed versions;
``states.py restore FOLDER...`` restores those of others and compares each array bit for bit. The
exit status is 1 if one differs.
"""

import argparse
import functools
import json
import platform
import shutil
import sys
from pathlib import Path

import flax
import flax.serialization
import jax
import numpy as np
import optax
import orbax.checkpoint as ocp

import optzoo
from optzoo.testing.samples import dense_grads, params, row_grads, step

REPLICAS = 2


def _half(inner):
    return optzoo.slots_dtype(inner, "bfloat16", stochastic=True, packed=True)


# Each with the kind of gradients that it gets.
CASES = {
    "accumulate": (lambda: optzoo.accumulate(optzoo.adam(0.1), 3), dense_grads),
    "accumulate_rows": (
        lambda: optzoo.accumulate(optzoo.lazy_adam(0.1), 3, max_rows={"table": 4, "one_row": 2}),
        row_grads,
    ),
    "adam": (lambda: optzoo.adam(0.1), dense_grads),
    "caught_up": (lambda: optzoo.caught_up(optzoo.adam(0.1), mask="table"), row_grads),
    "chain": (
        lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1), optax.ema(0.5)),
        dense_grads,
    ),
    "elastic_average": (lambda: optzoo.elastic_average(optzoo.adam(0.1), REPLICAS), dense_grads),
    "groups": (
        lambda: optzoo.param_groups(
            {
                "layer/.*": optzoo.momentum(0.1, 0.9),
                "one_row": optzoo.lazy_adam(0.1),
                "table": optzoo.ftrl(0.1),
            }
        ),
        row_grads,
    ),
    "lazy_adam": (lambda: optzoo.lazy_adam(0.1), row_grads),
    "moving_average": (lambda: optzoo.moving_average(optzoo.lazy_adam(0.1), 0.9), row_grads),
    "packed": (
        lambda: optzoo.slots_dtype(optzoo.lazy_adam(0.1), "float32", packed=True),
        row_grads,
    ),
    "packed_half": (lambda: _half(optzoo.lazy_adam(0.1)), row_grads),
    "shampoo": (lambda: optzoo.shampoo(0.1), dense_grads),
    "stacked": (lambda: optzoo.stacked(optzoo.adam(0.1)), dense_grads),
}


@functools.cache
def start(name):
    """A compiled training step, and parameters and state before the first one."""
    factory, grads = CASES[name]
    tx, x = factory(), params()
    state = tx.init(x)
    train = lambda x, state: step(tx, grads(x), x, state)
    if name == "elastic_average":
        x, state = optzoo.replicas.replicate(x, state, REPLICAS)
        train = optzoo.replicas.map_over_replicas(train)
    return jax.jit(train), x, state


def save(name, folder):
    """Saves a state after two steps, with Orbax, with Flax, and as plain bytes."""
    train, x, state = start(name)
    for _ in range(2):
        x, state = train(x, state)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "orbax", state)
        checkpointer.wait_until_finished()
    (folder / "flax").write_bytes(flax.serialization.to_bytes(state))
    (folder / "plain").write_text(json.dumps(plain(state)))


def restore(name, folder):
    """A description of differences between restored and saved arrays."""
    train, x, empty = start(name)
    wanted = json.loads((folder / "plain").read_text())
    with ocp.StandardCheckpointer() as checkpointer:
        from_orbax = checkpointer.restore(folder / "orbax", jax.eval_shape(lambda: empty))
    from_flax = flax.serialization.from_bytes(empty, (folder / "flax").read_bytes())
    for reader, state in {"orbax": from_orbax, "flax": from_flax}.items():
        got = plain(state)
        if len(got) != len(wanted):
            yield f"{reader}: {len(got)} arrays, saved were {len(wanted)}"
        for i, (before, after) in enumerate(zip(wanted, got, strict=False)):
            if before != after:
                yield f"{reader}: array {i} of {before[:2]} is {after[:2]} or differs in its bits"
        advanced, _ = train(x, state)  # training resumes
        if not all(np.isfinite(a).all() for a in jax.tree.leaves(advanced)):
            yield f"{reader}: the next step is not finite"


def plain(state):
    """Dtype, shape and bytes of each array."""
    arrays = map(np.asarray, jax.tree.leaves(state))
    return [[a.dtype.name, list(a.shape), a.tobytes().hex()] for a in arrays]


def main():
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("verb", choices=["save", "restore"])
    parser.add_argument("folders", nargs="+", type=lambda text: Path(text).absolute())
    arguments = parser.parse_args()
    wrong = 0
    for folder in arguments.folders:
        if arguments.verb == "save":
            shutil.rmtree(folder, ignore_errors=True)
        for name in CASES:
            (folder / name).mkdir(parents=True, exist_ok=True)
            try:
                if arguments.verb == "save":
                    save(name, folder / name)
                    found = []
                else:
                    found = list(restore(name, folder / name))
            except Exception as error:
                found = [f"{type(error).__name__}: {error}"]
            wrong += len(found)
            print(*[f"{folder.name}: {name}: {line}\n" for line in found], sep="", end="")
    about = f"Python {platform.python_version()}, JAX {jax.__version__}, Flax {flax.__version__}"
    print(f"{arguments.verb}: {wrong} errors ({about}, Orbax {ocp.__version__})")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
