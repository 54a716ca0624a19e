"""Trains on many hosts, one replica for each device, and resumes after failures.

Start it once on every host. Where JAX knows the cluster (SLURM, GKE, ...), no address is needed:

    srun python examples/multihost.py --checkpoints /shared/run1

Elsewhere give each process the address at which process 0 listens:

    python examples/multihost.py --coordinator host0:1234 --num-processes 2 --process-id 0 ...

If one process dies or hangs, all others end with an error. Start all of them again: they resume
from the newest good checkpoint and compute the same values as without the failure. The number of
devices may change. See docs/many_hosts.md.
"""

import argparse
import json
import os
import time
import traceback
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from sklearn.datasets import load_digits

import optzoo

INNER = optzoo.momentum(0.05, 0.9)
# Functions from the number of replicas and the steps between exchanges to an optimizer.
METHODS = {
    "elastic_average": lambda n, every: optzoo.elastic_average(
        INNER, n, communication_period=every
    ),
    "agn": lambda n, every: optzoo.agn(INNER, communication_period=every),
    "model_average": lambda n, every: optzoo.model_average(INNER, interval_steps=every),
    "diloco": lambda n, every: optzoo.diloco(INNER, communication_period=every),
    "sync_replicas": lambda n, every: optzoo.sync_replicas(INNER, n),
    "drop_stale_gradient": lambda n, every: optzoo.drop_stale_gradient(INNER, staleness=n - 1),
}


def init_params():
    """A perceptron for 8 x 8 images, the same in every process."""
    rng = np.random.default_rng(0)
    layer = lambda n, m: {
        "kernel": rng.normal(0, n**-0.5, (n, m)).astype(np.float32),
        "bias": np.zeros(m, np.float32),
    }
    return {"hidden": layer(64, 32), "logits": layer(32, 10)}


def loss_of(params, images, labels):
    """Cross-entropy."""
    layer = lambda p, x: x @ p["kernel"] + p["bias"][None]
    logits = layer(params["logits"], jax.nn.relu(layer(params["hidden"], images)))
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


class Training:
    """The replicas of a mesh, one for each device; without a mesh all on one device."""

    def __init__(self, method, every, mesh=None, num_replicas=None):
        self.mesh, self.size = mesh, mesh.size if mesh else int(num_replicas)
        self.tx = tx = METHODS[method](self.size, every)
        images, labels = load_digits(return_X_y=True)
        self.data = (images / 16).astype(np.float32), labels.astype(np.int32)

        def step(params, state, images, labels):
            loss, grads = jax.value_and_grad(loss_of)(
                optzoo.replicas.per_replica(params), images, labels
            )
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, loss

        self.step = jax.jit(
            optzoo.replicas.map_over_replicas(step, mesh=mesh), donate_argnums=(0, 1)
        )

    def sharding(self, *spec):
        """The sharding of a spec on the mesh; the default device without a mesh."""
        if self.mesh is None:
            return SingleDeviceSharding(jax.devices()[0])
        return NamedSharding(self.mesh, PartitionSpec(*spec))

    def start(self):
        """Parameters and state of one replica."""
        params = init_params()
        return params, jax.jit(self.tx.init)(params)

    def init(self):
        """Parameters and state of all replicas."""
        params, state = self.start()
        return optzoo.replicas.replicate(params, state, self.size, mesh=self.mesh)

    def batch(self, step, size=16):
        """Images and labels of all replicas; each process makes those of its own devices.

        They depend only on step and replica, so that a restart repeats them.
        """

        def draw(data, index):
            rngs = [np.random.default_rng([step, i]) for i in range(self.size)[index[0]]]
            return data[np.stack([rng.integers(len(data), size=size) for rng in rngs])]

        return [
            jax.make_array_from_callback(
                (self.size, size, *data.shape[1:]),
                self.sharding("replica"),
                lambda index, data=data: draw(data, index),
            )
            for data in self.data
        ]


@jax.jit
def fingerprint(tree):
    """A number that changes if a bit changes, and that does not depend on the sharding."""

    def of(a):
        a = a.astype(jnp.uint8) if a.dtype == bool else a
        bits = jax.lax.bitcast_convert_type(a, jnp.uint8).astype(jnp.uint32)
        return jnp.sum(bits.ravel() * (2 * jnp.arange(bits.size, dtype=jnp.uint32) + 1))

    return sum((2 * i + 1) * of(a) for i, a in enumerate(jax.tree.leaves(tree)))


class Checkpoints:
    """Checkpoints that all processes save and refuse together, so all resume at one step."""

    def __init__(self, directory, training):
        self.training = training
        self.manager = ocp.CheckpointManager(
            epath.Path(directory).absolute(),
            # All processes use the list of checkpoints that process 0 finds.
            options=ocp.CheckpointManagerOptions(
                max_to_keep=3, single_host_load_and_broadcast=True
            ),
        )

    def save(self, step, params, state):
        """Saves in the background: replicated arrays once, those of a replica by its process."""
        train = {"params": params, "state": state}
        about = {"replicas": self.training.size, "fingerprint": int(fingerprint(train))}
        items = {"train": ocp.args.StandardSave(train), "about": ocp.args.JsonSave(about)}
        self.manager.save(step, args=ocp.args.Composite(**items), force=True)

    def restore(self):
        """Step, parameters and state of the newest good checkpoint, or the initial ones."""
        refused = []
        for step in sorted(self.manager.all_steps(), reverse=True):
            path, error = self.manager.directory / str(step), None
            try:
                train, about = self.load(path)
            except Exception as e:  # damaged files raise errors of many types
                error = f"{type(e).__name__}: {str(e)[:300]}"
            if np.any(multihost_utils.process_allgather(np.array(error is not None))):
                error = error or "another process cannot read it"
            elif int(fingerprint(train)) != about["fingerprint"]:
                error = "the fingerprint differs from that of the saved arrays"
            else:
                self._set_aside(refused)
                return step, *self._resized(**train)
            print(f"refused checkpoint {path}: {error}", flush=True)
            refused.append(path)
        if refused:
            raise SystemExit(f"no good checkpoint in {self.manager.directory}; nothing was changed")
        return 0, *self.training.init()

    def load(self, path):
        """The arrays of a checkpoint and its metadata, for any number of devices."""
        # Without Orbax's barriers: if one process raised an error, the others would deadlock.
        training = self.training
        about = json.loads((path / "about" / "metadata").read_text())
        one = jax.eval_shape(training.start)
        copies = lambda p, s: optzoo.replicas.replicate(p, s, about["replicas"])
        params, state = jax.eval_shape(copies, *one)
        axis = () if about["replicas"] % training.size else ("replica",)
        places = training.sharding(), training.sharding(*axis)
        marks = optzoo.replicas.replica_specs(params, state, *places)
        place = lambda mark, tree: jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=mark), tree
        )
        params, state = jax.tree.map(place, marks, (params, state))
        wanted = ocp.args.StandardRestore({"params": params, "state": state})
        return ocp.StandardCheckpointHandler().restore(path / "train", args=wanted), about

    def _resized(self, params, state):
        training = self.training
        return optzoo.replicas.resize_replicas(
            training.tx, params, state, training.size, mesh=training.mesh
        )

    def _set_aside(self, paths):
        for path in paths if jax.process_index() == 0 else ():
            path.rename(path.parent / f"refused_{path.name}_{time.time_ns()}")
        multihost_utils.sync_global_devices("set aside")
        self.manager.reload()


def checksum(params, state):
    """The checksum of the parameters to evaluate."""
    leaves = jax.tree.leaves(optzoo.eval_params(params, state))
    return zlib.crc32(b"".join(np.asarray(a).tobytes() for a in leaves))


def main():
    """Trains, starting from the newest checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--coordinator", help="host:port of process 0; None to ask the cluster")
    add("--num-processes", type=int)
    add("--process-id", type=int)
    add("--heartbeat", type=int, default=100, help="seconds after which a silent process is dead")
    add("--method", choices=METHODS, default="elastic_average")
    add("--steps", type=int, default=1000)
    add("--period", type=int, default=10, help="steps from one exchange to the next")
    add("--checkpoints", default="checkpoints", help="a directory shared by all processes")
    add("--save-every", type=int, default=100)
    args = parser.parse_args()

    jax.distributed.initialize(
        args.coordinator,
        args.num_processes,
        args.process_id,
        heartbeat_timeout_seconds=args.heartbeat,
    )
    mesh = jax.make_mesh((jax.device_count(),), ("replica",))
    say = print if jax.process_index() == 0 else lambda *_, **__: None
    training = Training(args.method, args.period, mesh)
    checkpoints = Checkpoints(args.checkpoints, training)
    step, params, state = checkpoints.restore()
    say(f"{training.size} replicas begin at step {step}", flush=True)
    stop = False
    while step < args.steps and not stop:
        params, state, loss = training.step(params, state, *training.batch(step))
        step += 1
        # After SIGTERM to any process all agree on a step at which to save and stop.
        stop = checkpoints.manager.reached_preemption(step)
        if stop or step % args.save_every == 0 or step == args.steps:
            values = f"loss {jnp.mean(loss):.6f} checksum {checksum(params, state):08x}"
            say(f"step {step} {values}", flush=True)
            checkpoints.save(step, params, state)
    checkpoints.manager.close()
    say("stopped early, saved" if stop else "done", flush=True)


if __name__ == "__main__":
    try:
        main()
    except Exception:
        # An ordinary exit would wait for the other processes, and one of them may be dead.
        traceback.print_exc()
        os._exit(1)
