"""A module of Equinox whose parameters are haliax' named arrays, as in Levanter.

``python examples/trainers/haliax_equinox.py FOLDER STEPS`` resumes from the checkpoint in the
folder, on any number of devices: the names of the axes say how arrays and slots are divided.
"""

import sys

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import optax
import orbax.checkpoint as ocp
from jax.sharding import AxisType
from sklearn.datasets import load_digits

import optzoo

Batch, Pixel, Hidden, Digit = hax.make_axes(batch=128, pixel=64, hidden=256, digit=10)
OPTIMIZER = optzoo.moving_average(optzoo.row_wise_adagrad(0.01), average_decay=0.9)
COMPUTED, STORED = {"batch": "d"}, {"hidden": "d"}  # which axes the mesh divides


class Model(eqx.Module):
    hidden: hnn.Linear
    out: hnn.Linear

    @staticmethod
    def init(key):
        keys = jax.random.split(key)
        return Model(
            hnn.Linear.init(Pixel, Hidden, key=keys[0]), hnn.Linear.init(Hidden, Digit, key=keys[1])
        )

    def __call__(self, x):
        return self.out(hnn.relu(self.hidden(x)))


def loss(model, x, y):
    logits = model(hax.named(x, (Batch, Pixel))).rearrange((Batch, Digit))
    return optax.softmax_cross_entropy_with_integer_labels(logits.array, y).mean()


@eqx.filter_jit
def step(model, state, x, y):
    value, grads = eqx.filter_value_and_grad(loss)(model, x, y)
    updates, state = OPTIMIZER.update(grads, state, eqx.filter(model, eqx.is_array))
    return hax.shard((eqx.apply_updates(model, updates), state), STORED), value


def main(folder, steps, devices=None):
    number = len(devices or jax.devices())
    mesh = jax.make_mesh((number,), ("d",), axis_types=(AxisType.Auto,), devices=devices)
    with (
        jax.set_mesh(mesh),
        hax.axis_mapping(COMPUTED),
        ocp.CheckpointManager(folder) as checkpoints,
    ):
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
