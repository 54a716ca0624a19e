"""Steps by rows add to no place twice on a GPU: a loop of compare and swap before jaxlib 0.11.1."""

import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import optzoo

ROWS, WIDTH, IDS = 100_000, 64, 512
of = lambda *shape, dtype=jnp.float32: jax.ShapeDtypeStruct(shape, dtype)
PARAMS = {"table": of(ROWS, WIDTH), "w": of(WIDTH)}
BATCH = of(IDS, dtype=jnp.int32), of(IDS)


def loss(params, ids, y):
    return jnp.mean((optzoo.lookup(params["table"], ids) @ params["w"] - y) ** 2)


def loss_of_bags(params, ids, y):
    total = optzoo.lookup_sparse(params["table"], ids, ids % 64, 64, combiner="sum")
    return jnp.mean((total @ params["w"] - y[:64]) ** 2)


def of_one(tx, loss=loss):
    state = jax.eval_shape(tx.init, PARAMS)
    step = optzoo.minimize(loss, tx)
    return optzoo.compile_report(step, PARAMS, state, *BATCH, device="h100")


def of_several(tx, num_devices=4):
    device = f"h100:{num_devices}"
    mesh = Mesh(np.array(optzoo.compiled.devices_of(device)), ("shard",))
    sharding = optzoo.sharded.RowSharding(ROWS, num_devices)

    def place(x, is_divided):
        spec = PartitionSpec("shard") if is_divided else PartitionSpec()
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    params = {"table": of(sharding.stored_rows, WIDTH), "w": of(WIDTH)}
    args = params, jax.eval_shape(tx.init, params)
    args = jax.tree.map(lambda x: place(x, x.shape[:1] == (sharding.stored_rows,)), args)
    step = optzoo.sharded_minimize(loss, tx, mesh, {"table": sharding})
    return optzoo.compile_report(step, *args, *(place(x, True) for x in BATCH), device=device)


STEPS = {
    "lazy_adam": lambda: of_one(optzoo.lazy_adam(0.1)),
    "lazy_adam, bags": lambda: of_one(optzoo.lazy_adam(0.1), loss_of_bags),
    "row_wise_adagrad": lambda: of_one(optzoo.row_wise_adagrad(0.1)),
    "gradient_descent": lambda: of_one(optzoo.gradient_descent(0.1)),
    "adam": lambda: of_one(optzoo.adam(0.1)),
    "caught_up": lambda: of_one(optzoo.caught_up(optzoo.adam(0.1))),
    "clipped": lambda: of_one(optzoo.on_rows(optzoo.row_wise_lamb(0.1))),
    "sharded lazy_adam": lambda: of_several(optzoo.lazy_adam(0.1)),
    "sharded gradient_descent": lambda: of_several(optzoo.gradient_descent(0.1)),
}


def repeated_additions(text):
    """The scatters of a program that compute with what is in their place, which may come again."""
    scatters = [line for line in text.splitlines() if re.search(r"= \(?b?f\d\S* scatter\(", line)]
    places = [line for line in scatters if "unique_indices=true" not in line]
    bodies = [re.search(r"to_apply=%?([\w.\-]+)", line)[1] for line in places]
    return [
        body for body in bodies if " add(" in text.partition(f"%{body} (")[2].partition("\n}")[0]
    ]


def test_what_is_looked_for():
    add = lambda x, ids: x.at[ids].add(1.0)
    args = of(ROWS, WIDTH), of(IDS, dtype=jnp.int32)
    assert repeated_additions(optzoo.compile_report(add, *args, device="h100").text)


@pytest.mark.parametrize("name", STEPS)
def test_no_repeated_additions(name):
    assert repeated_additions(STEPS[name]().text) == []


def test_no_compare_and_swap(tmp_path):
    """In the assembler code, which jaxlib writes up to version 0.11.0."""
    flags = {"XLA_FLAGS": f"--xla_dump_to={tmp_path}", "JAX_PLATFORMS": "cpu"}
    root = pathlib.Path(__file__).parents[2]
    run = [sys.executable, "-m", "tests.accelerators.test_repeated_ids"]
    subprocess.run(run, env=os.environ | flags, cwd=root, check=True)
    code = [path.read_text() for path in tmp_path.glob("*.ptx")]
    assert code or jax.__version_info__ > (0, 11, 0)
    assert not [text for text in code if re.search(r"atom[.\w]*\.cas", text)]


if __name__ == "__main__":
    for compile_step in STEPS.values():
        compile_step()
