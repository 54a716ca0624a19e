"""A plain loop: parameters, slots and batches divided over all devices (FSDP).

``python examples/trainers/fsdp.py FOLDER STEPS`` resumes from the checkpoint in the folder, on any
number of devices. The slots are in 8 bits, and the loss is that of the moving averages.
"""

import sys

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits

import optzoo

OPTIMIZER = optzoo.moving_average(optzoo.slots_dtype(optzoo.adam(0.01), "int8"), average_decay=0.9)


def init():
    keys = jax.random.split(jax.random.key(0))
    return {"hidden": jax.random.normal(keys[0], (64, 256)) / 8, "out": jnp.zeros((256, 10))}


def loss(params, x, y):
    logits = jax.nn.relu(x @ params["hidden"]) @ params["out"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def main(folder, steps, devices=None):
    mesh = jax.make_mesh((len(devices or jax.devices()),), ("d",), devices=devices)
    rows = NamedSharding(mesh, P("d"))  # of each parameter and of a batch
    with jax.set_mesh(mesh):
        params = jax.jit(init, out_shardings=rows)()
        step = optzoo.minimize(loss, OPTIMIZER)
        done, state = 0, OPTIMIZER.init(params)
        with ocp.CheckpointManager(folder) as checkpoints:
            if (done := checkpoints.latest_step() or 0) > 0:
                like = ocp.args.StandardRestore((params, state))
                params, state = checkpoints.restore(done, args=like)
            x, y = load_digits(return_X_y=True)
            for i in range(done, steps):
                batch = slice(i % 13 * 128, (i % 13 + 1) * 128)
                data = jax.device_put((x[batch].astype("float32") / 16, y[batch]), rows)
                params, state, _ = step(params, state, *data)
            checkpoints.save(steps, args=ocp.args.StandardSave((params, state)))
        return float(loss(optzoo.eval_params(params, state), *data))


if __name__ == "__main__":
    print("loss", main(sys.argv[1], int(sys.argv[2])))
