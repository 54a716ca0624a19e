"""A module of Equinox whose parameters are haliax' named arrays, as in Levanter.

``python examples/trainers/haliax_equinox.py FOLDER STEPS`` resumes from the checkpoint in the
folder, on any number of devices: the names of the axes say how arrays and slots are divided.
"""

import sys

import equinox as eqx
import haliax as hax
import jax
import optax
import orbax.checkpoint as ocp
from jax.sharding import AxisType
from sklearn.datasets import load_digits

import optzoo

Pixel, Hidden, Digit = hax.make_axes(pixel=64, hidden=256, digit=10)
OPTIMIZER = optzoo.moving_average(optzoo.row_wise_adagrad(0.01), average_decay=0.9)
STORED = {"hidden": "d"}  # the axes that the mesh divides


class Model(eqx.Module):
    hidden: hax.NamedArray
    out: hax.NamedArray

    @staticmethod
    def init(key):
        keys = jax.random.split(key)
        normal = lambda key, *axes: jax.random.normal(key, [axis.size for axis in axes]) / 8
        arrays = normal(keys[0], Pixel, Hidden), normal(keys[1], Hidden, Digit)
        return Model(hax.named(arrays[0], (Pixel, Hidden)), hax.named(arrays[1], (Hidden, Digit)))

    def __call__(self, x):
        return jax.nn.relu(x @ self.hidden.array) @ self.out.array


def loss(model, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()


@eqx.filter_jit
def step(model, state, x, y):
    value, grads = eqx.filter_value_and_grad(loss)(model, x, y)
    updates, state = OPTIMIZER.update(grads, state, eqx.filter(model, eqx.is_array))
    return hax.shard((eqx.apply_updates(model, updates), state), STORED), value


def main(folder, steps, devices=None):
    number = len(devices or jax.devices())
    mesh = jax.make_mesh((number,), ("d",), axis_types=(AxisType.Auto,), devices=devices)
    with jax.set_mesh(mesh), ocp.CheckpointManager(folder) as checkpoints:
        model = hax.shard(Model.init(jax.random.key(0)), STORED)
        params, static = eqx.partition(model, eqx.is_array)
        train = params, hax.shard(OPTIMIZER.init(params), STORED)
        if (done := checkpoints.latest_step() or 0) > 0:
            train = checkpoints.restore(done, args=ocp.args.StandardRestore(train))
        model, state = eqx.combine(train[0], static), train[1]
        x, y = load_digits(return_X_y=True)
        for i in range(done, steps):
            batch = slice(i % 13 * 128, (i % 13 + 1) * 128)
            (model, state), value = step(model, state, x[batch].astype("float32") / 16, y[batch])
        params = eqx.filter(model, eqx.is_array)
        checkpoints.save(steps, args=ocp.args.StandardSave((params, state)))
    return float(value)


if __name__ == "__main__":
    print("loss", main(sys.argv[1], int(sys.argv[2])))
