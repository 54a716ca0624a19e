"""A module of Flax Linen in a ``TrainState``; its parameters know their axes (``nn.Partitioned``).

``python examples/trainers/linen.py FOLDER STEPS`` resumes from the checkpoint in the folder, on any
number of devices. Kernels have one optimizer and biases another; slots are in boxes like kernels.
"""

import sys

import flax.linen as nn
import jax
import optax
import orbax.checkpoint as ocp
from flax.training.train_state import TrainState
from jax.sharding import AxisType
from sklearn.datasets import load_digits

import optzoo

OPTIMIZER = optzoo.param_groups(
    {"kernel": optzoo.partial_row_wise_adam(0.01), "bias": optzoo.momentum(0.1, 0.9)}
)


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        divided = lambda *axes: nn.with_partitioning(nn.initializers.lecun_normal(), axes)
        x = nn.relu(nn.Dense(256, kernel_init=divided(None, "d"))(x))
        return nn.Dense(10, kernel_init=divided("d", None))(x)


@jax.jit
def step(train, x, y):
    entropy = optax.softmax_cross_entropy_with_integer_labels
    loss = lambda params: entropy(train.apply_fn(params, x), y).mean()
    value, grads = jax.value_and_grad(loss)(train.params)
    return train.apply_gradients(grads=grads), value


def main(folder, steps, devices=None):
    number = len(devices or jax.devices())
    mesh = jax.make_mesh((number,), ("d",), axis_types=(AxisType.Auto,), devices=devices)
    x, y = load_digits(return_X_y=True)
    create = lambda key: TrainState.create(
        apply_fn=Model().apply, params=Model().init(key, x[:1]), tx=OPTIMIZER
    )
    shapes = jax.eval_shape(create, jax.random.key(0))
    places = nn.get_sharding(shapes, mesh)
    train = jax.jit(create, out_shardings=places)(jax.random.key(0))
    with ocp.CheckpointManager(folder) as checkpoints:
        if (done := checkpoints.latest_step() or 0) > 0:
            train = checkpoints.restore(done, args=ocp.args.StandardRestore(train))
        for i in range(done, steps):
            batch = slice(i % 13 * 128, (i % 13 + 1) * 128)
            train, value = step(train, x[batch].astype("float32") / 16, y[batch])
        checkpoints.save(steps, args=ocp.args.StandardSave(train))
    return float(value)


if __name__ == "__main__":
    print("loss", main(sys.argv[1], int(sys.argv[2])))
