"""Matrices with owners: a Flax model divided over all devices (FSDP), by SOAP or Muon.

``python examples/trainers/owners.py FOLDER STEPS [soap | muon]`` resumes from the checkpoint in the
folder, on any number of devices: the state is saved in the form that it has without owners. At the
end it prints what the compiled step keeps on a device and sends.
"""

import sys

import jax
import optax
import orbax.checkpoint as ocp
from flax import linen as nn
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits

import optzoo


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(64, name="in")(x)
        for i in range(8):
            x = x + nn.Dense(64, name=f"layer_{i}")(nn.relu(x))
        return nn.Dense(10, name="out")(x)


def optimizer(name, owners):
    """For the kernels of the layers between; AdamW for the others."""
    if name == "soap":
        tx = optzoo.soap(3e-3, preconditioner_interval=2, owners=owners)
    else:
        tx = optzoo.muon(0.02, owners=owners)
    return optzoo.param_groups({"params/layer_.*/kernel": tx, ".*": optax.adamw(3e-3)})


def loss(params, x, y):
    logits = Model().apply(params, x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def main(folder, steps, devices=None, name="soap"):
    sizes, kinds = (len(devices or jax.devices()),), (AxisType.Auto,)
    mesh = jax.make_mesh(sizes, ("d",), axis_types=kinds, devices=devices)
    x, y = load_digits(return_X_y=True)
    x = x.astype("float32") / 16
    with jax.set_mesh(mesh):
        init = lambda: Model().init(jax.random.key(0), x[:1])
        even = lambda a: NamedSharding(mesh, P("d") if a.shape[0] % mesh.size == 0 else P())
        params = jax.jit(init, out_shardings=jax.tree.map(even, jax.eval_shape(init)))()
        tx, saved = optimizer(name, "d"), optimizer(name, None)
        state, without = tx.init(params), jax.eval_shape(saved.init, params)
        step, done = optzoo.minimize(loss, tx), 0
        with ocp.CheckpointManager(folder) as checkpoints:
            if (done := checkpoints.latest_step() or 0) > 0:
                places = optzoo.state_sharding(saved, params)
                place = lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s)
                like = (params, jax.tree.map(place, without, places))
                params, old = checkpoints.restore(done, args=ocp.args.StandardRestore(like))
                state = optzoo.state.slots_like(old, state)
                state = jax.device_put(state, optzoo.state_sharding(tx, params))
            for i in range(done, steps):
                batch = slice(i % 13 * 128, (i % 13 + 1) * 128)
                data = jax.device_put((x[batch], y[batch]), NamedSharding(mesh, P("d")))
                params, state, _ = step(params, state, *data)
            whole = optzoo.state.slots_like(state, without)
            checkpoints.save(steps, args=ocp.args.StandardSave((params, whole)))
        if devices is None:
            print(optzoo.compile_report(step, params, state, *data, device="cpu"))
        return float(loss(params, *data))


if __name__ == "__main__":
    print("loss", main(sys.argv[1], int(sys.argv[2]), name=[*sys.argv[3:], "soap"][0]))
