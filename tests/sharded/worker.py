"""One process of those that train a sharded table for some steps, and save what comes out."""

import argparse
import pathlib
import sys

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding

import optzoo
from optzoo.train import sharded as train_module

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))
from tests.sharded import test_minimize as cases


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--coordinator")
    parser.add_argument("--num-processes", type=int)
    parser.add_argument("--process-id", type=int)
    parser.add_argument("--checkpoints", type=pathlib.Path)
    args = parser.parse_args()
    jax.distributed.initialize(args.coordinator, args.num_processes, args.process_id)
    mesh = cases.mesh_of(args.num_processes)
    s = optzoo.sharded.RowSharding(cases.ROWS, mesh.size, multiple=16)
    tx = cases.LAZY["lazy_adam"]
    place = lambda x: jax.make_array_from_callback(
        x.shape, NamedSharding(mesh, s.spec), lambda index: np.asarray(x)[index]
    )
    # All processes make messages of the size that the ids of all of them need.
    train_module.SMALL = 0
    trained = []
    for factor in ("auto", 0.01):
        params, state = cases.start(tx, mesh, s)
        step = optzoo.sharded_minimize(
            cases.loss, tx, mesh, {"table": s}, capacity_factor=factor, parts=2
        )
        for batch in cases.batches("zipf", 3, mesh):
            params, state, _ = step(params, state, *map(place, batch))
        trained.append(params["table"].addressable_data(0))
    np.testing.assert_allclose(*trained, atol=2e-6)
    with ocp.StandardCheckpointer() as checkpointer:
        trained = {"params": params, "state": state}
        trained = optzoo.sharded.in_order_of_ids(trained, {"table": s}, params)
        checkpointer.save(args.checkpoints.absolute(), trained)


if __name__ == "__main__":
    main()
