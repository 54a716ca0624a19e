"""A model of Keras 3 on JAX, trained by ``fit``, with the batches divided over all devices.

``python examples/trainers/keras_fit.py FOLDER STEPS`` resumes from the weights in the folder, on
any number of devices.
"""

import os
import pathlib
import sys

os.environ["KERAS_BACKEND"] = "jax"

import jax
import keras
from sklearn.datasets import load_digits

import optzoo

OPTIMIZER = optzoo.moving_average(optzoo.nadam(0.01), average_decay=0.9)


def build():
    layers = keras.layers.Dense(256, "relu"), keras.layers.Dense(10)
    model = keras.Sequential([keras.Input((64,)), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optzoo.interop.keras.for_fit(OPTIMIZER), loss=loss)
    model.optimizer.build(model.trainable_variables)  # so that the weights have its state
    return model


def main(folder, steps, devices=None):
    names = [f"{device.platform}:{device.id}" for device in devices or jax.devices()]
    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=names))
    keras.utils.set_random_seed(0)
    model, path = build(), pathlib.Path(folder) / "run.weights.h5"
    path.parent.mkdir(exist_ok=True)
    if path.exists():
        model.load_weights(path)
    x, y = load_digits(return_X_y=True)
    first, last = int(model.optimizer.iterations.value) * 128, steps * 128
    model.fit(x[first:last] / 16, y[first:last], 128, shuffle=False, verbose=0)
    model.save_weights(path)
    value = model.evaluate(x[:1792] / 16, y[:1792], 128, verbose=0)
    keras.distribution.set_distribution(None)
    return value


if __name__ == "__main__":
    print("loss", main(sys.argv[1], int(sys.argv[2])))
