"""One process of those that train with every method for some steps, and save what comes out."""

import argparse
import pathlib
import sys

import jax
import orbax.checkpoint as ocp
from jax.sharding import AxisType

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples"))
import multihost


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--coordinator")
    parser.add_argument("--num-processes", type=int)
    parser.add_argument("--process-id", type=int)
    parser.add_argument("--checkpoints", type=pathlib.Path)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--period", type=int)
    args = parser.parse_args()
    jax.distributed.initialize(args.coordinator, args.num_processes, args.process_id)
    mesh = jax.make_mesh((jax.device_count(),), ("replica",), axis_types=(AxisType.Auto,))
    found = {}
    for method in multihost.METHODS:
        training = multihost.Training(method, args.period, mesh)
        params, state = training.init()
        for step in range(args.steps):
            params, state, _ = training.step(params, state, *training.batch(step))
        found[method] = {"params": params, "state": state}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(args.checkpoints.absolute(), found)


if __name__ == "__main__":
    main()
