"""A module of Flax NNX on an explicit mesh, with ``nnx.Optimizer``.

``python examples/trainers/nnx.py FOLDER STEPS`` resumes from the checkpoint in the folder, on any
number of devices. Each update is the mean of two batches (``optzoo.accumulate``).
"""

import sys

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits

import optzoo

OPTIMIZER = optzoo.accumulate(optzoo.row_wise_adagrad(0.01), every=2)


class Model(nnx.Module):
    def __init__(self, rngs):
        divided = lambda *axes: nnx.with_partitioning(nnx.initializers.lecun_normal(), axes)
        self.hidden = nnx.Linear(64, 256, kernel_init=divided("d", None), rngs=rngs)
        self.out = nnx.Linear(256, 10, kernel_init=divided("d", None), rngs=rngs)

    def __call__(self, x):
        x = jax.nn.relu(self.hidden(x, out_sharding=P("d")))
        return self.out(x, out_sharding=P("d"))


@nnx.jit
def step(model, optimizer, x, y):
    entropy = optax.softmax_cross_entropy_with_integer_labels
    value, grads = nnx.value_and_grad(lambda model: entropy(model(x), y).mean())(model)
    optimizer.update(model, grads)
    return value


def main(folder, steps, devices=None):
    mesh = jax.make_mesh((len(devices or jax.devices()),), ("d",), devices=devices)
    with jax.set_mesh(mesh), ocp.CheckpointManager(folder) as checkpoints:
        model = Model(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)
        if (done := checkpoints.latest_step() or 0) > 0:
            like = ocp.args.StandardRestore(nnx.state((model, optimizer)))
            nnx.update((model, optimizer), checkpoints.restore(done, args=like))
        x, y = load_digits(return_X_y=True)
        for i in range(done, steps):
            batch = slice(i % 13 * 128, (i % 13 + 1) * 128)
            data = x[batch].astype(np.float32) / 16, y[batch]
            value = step(model, optimizer, *(jax.device_put(a, P("d")) for a in data))
        checkpoints.save(steps, args=ocp.args.StandardSave(nnx.state((model, optimizer))))
    return float(value)


if __name__ == "__main__":
    print("loss", main(sys.argv[1], int(sys.argv[2])))
