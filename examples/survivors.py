"""EXPERIMENTAL: when a process dies, the others continue without it.

    python examples/survivors.py --coordinator host0:1234 --num-processes 3 --process-id 0

One device for each process. It uses ``jax.experimental.multihost_utils.live_devices`` of JAX 0.10
or newer, which JAX calls unstable. A process that died or hung cannot rejoin, and if process 0
dies, all end. The supported way is multihost.py: all processes end and restart from a checkpoint.
"""

import argparse
import contextlib
import os
import traceback

import jax
import numpy as np
from jax.experimental.multihost_utils import ProcessFailureError, live_devices
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from multihost import METHODS, Training, checksum

import optzoo

FAILURES = 5  # in succession, after which it gives up


def mine(tree):
    """This process's part of all arrays, in host memory."""
    return jax.tree.map(lambda a: np.asarray(a.addressable_data(0)), tree)


def joined(mesh, params, state):
    """Global arrays from the parts of the processes of the mesh."""

    def join(spec, part):
        shape = (mesh.size, *part.shape[1:]) if spec else part.shape
        here = [jax.device_put(part, device) for device in mesh.local_devices]
        return jax.make_array_from_single_device_arrays(shape, NamedSharding(mesh, spec), here)

    specs = optzoo.replicas.replica_specs(params, state, PartitionSpec(), PartitionSpec("replica"))
    join_all = lambda spec, tree: jax.tree.map(lambda part: join(spec, part), tree)
    return jax.tree.map(join_all, specs, (params, state))


def main():
    """Trains in rounds, which all survivors either finish or repeat."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--coordinator")
    add("--num-processes", type=int)
    add("--process-id", type=int)
    add("--heartbeat", type=int, default=100, help="seconds after which a silent process is dead")
    add("--method", choices=METHODS, default="diloco")
    add("--steps", type=int, default=1000)
    add(
        "--period", type=int, default=10, help="steps from one exchange to the next, and of a round"
    )
    args = parser.parse_args()

    jax.config.update("jax_enable_recoverability", True)  # else one dead process ends all
    # Without it, processes may deadlock that wait for one which noticed the dead process earlier.
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_collective_timeout_seconds={args.heartbeat}"
    )
    jax.distributed.initialize(
        args.coordinator,
        args.num_processes,
        args.process_id,
        heartbeat_timeout_seconds=args.heartbeat,
    )
    one = Training(args.method, args.period, num_replicas=1)
    params, state = one.start()
    kept = mine(optzoo.replicas.replicate(params, state, 1))
    step, mesh, failures = 0, None, 0
    while step < args.steps:
        try:
            # All survivors leave this block without an error, or all with one.
            with live_devices(jax.devices()) as devices:
                if mesh is None:
                    mesh = Mesh(np.array(devices), ("replica",), axis_types=(AxisType.Auto,))
                    training = Training(args.method, args.period, mesh)
                    carry = joined(mesh, *kept)
                for at in range(step, step + args.period):
                    *carry, loss = training.step(*carry, *training.batch(at))
                after = (
                    mine(carry),
                    f"loss {np.mean(mine(loss)):.6f} checksum {checksum(*carry):08x}",
                )
        except Exception as error:
            failures, mesh = failures + 1, None
            print(f"step {step}: {type(error).__name__}, the round is repeated", flush=True)
            if failures == FAILURES:
                raise
            continue
        failures, step, kept = 0, step + args.period, after[0]
        print(f"step {step} of {mesh.size} replicas, {after[1]}", flush=True)
    while jax.process_index() == 0 and len(devices) > 1:  # others cannot exit after process 0
        with contextlib.suppress(ProcessFailureError), live_devices(jax.devices()) as devices:
            pass


if __name__ == "__main__":
    try:
        main()
    except Exception:
        traceback.print_exc()
        os._exit(1)
