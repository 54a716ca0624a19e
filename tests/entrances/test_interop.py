"""Options of what works with other libraries."""

import tempfile
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from returnn.config import Config

import optzoo
from optzoo.interop import fbgemm
from optzoo.interop.keras import for_fit
from optzoo.interop.optax import from_optax
from optzoo.interop.returnn import OptzooUpdater, returnn_updater
from optzoo.interop.sparsecore import sparsecore
from optzoo.interop.torch import from_torch

from ..interop.sparsecore import lowered
from .effects import SGD, Table, outcome

with warnings.catch_warnings():  # of what Keras imports
    warnings.simplefilter("ignore")
    import keras

TABLE = Table()
effect = TABLE.effect


@pytest.fixture(autouse=True)
def wheel(monkeypatch):
    lowered.pretend(monkeypatch)


# FBGEMM

ROW_WISE = optzoo.row_wise_adagrad(0.1)
ITEMS = {"items": jnp.ones((3, 2))}


def by_save(*arguments, **options):
    with tempfile.TemporaryDirectory() as folder:
        fbgemm.save_fbgemm_state(f"{folder}/state.npz", *arguments, **options)
        return dict(np.load(f"{folder}/state.npz"))


WRITERS = {"fbgemm_state_dict": fbgemm.fbgemm_state_dict, "save_fbgemm_state": by_save}
for name, write in WRITERS.items():

    @effect(f"interop.fbgemm.{name}", "tables", {None: {"items"}, "t_0": {"t_0"}})
    def _(tables, write=write):
        given = {"tables": tables and {"items": tables}}
        saved = write(ITEMS, ROW_WISE.init(ITEMS), **given)
        return {key.partition("/")[0] for key in saved if "/" in key}


@effect("interop.fbgemm.load_fbgemm_state", "tables", {None: 4.0, "t_0": 5.0})
def _(tables):
    name = tables or "items"
    saved = {f"{name}/momentum1": np.full(3, 5.0 if tables else 4.0), "iter": np.array([1])}
    given = {"tables": tables and {"items": tables}}
    _, state = fbgemm.load_fbgemm_state(ROW_WISE, ITEMS, saved, **given)
    return float(optzoo.get_slot(state, "accumulator")["items"][0])


# Keras


@effect("interop.keras.for_fit", "learning_rate", {None: 0.25, 0.5: 0.5})
def _(learning_rate):
    """What callbacks see: that of the config, or this."""
    optimizer = for_fit({"class": "adam", "learning_rate": 0.25}, learning_rate)
    return float(optimizer.learning_rate)


@effect("interop.keras.for_fit", "loss_scale_factor", {None: 1.0, 4.0: 0.25})
def _(loss_scale_factor):
    """How far a weight moves by a gradient of 1 of the scaled loss."""
    with jax.numpy_rank_promotion("allow"):
        variable = keras.Variable(np.zeros(1, np.float32), name="w")
        optimizer = for_fit(SGD, loss_scale_factor=loss_scale_factor)
        optimizer.apply([keras.ops.ones(1)], [variable])
        return -float(variable.value[0])


@effect("interop.keras.for_fit", "name", {"one": "one", "other": "other"})
def _(name):
    return for_fit("adam", name=name).name


# optax and torch

COUNTED = optzoo.momentum(lambda count: 1.0 * count, 0.0)  # moves by the number of updates


def first_step(state, params):
    updates, _ = COUNTED.update(params, state, params)
    return -float(updates["items"][0, 0])


@effect("interop.optax.from_optax", "count", {None: 0.0, 3: 3.0})
def _(count):
    state = optax.sgd(0.1, 0.9).init(ITEMS)
    return first_step(from_optax(state, COUNTED, ITEMS, count=count), ITEMS)


def of_torch(buffer=None, params=ITEMS, **options):
    group = {"lr": 0.1, "momentum": 0.9, "dampening": 0, "nesterov": False, "params": [0]}
    group["param_names"] = ["items"]
    buffer = np.zeros((3, 2), np.float32) if buffer is None else buffer
    given = {"state": {0: {"momentum_buffer": buffer}}, "param_groups": [group]}
    return from_torch(given, COUNTED, params, **options)


@effect("interop.torch.from_torch", "count", {None: 0.0, 3: 3.0})
def _(count):
    return first_step(of_torch(count=count), ITEMS)


@effect("interop.torch.from_torch", "names", {None: "ValueError", "other": None})
def _(names):
    """Torch's name is ``items``."""
    given = names and [names]
    return outcome(lambda: of_torch(params={"other": ITEMS["items"]}, names=given))


@effect("interop.torch.from_torch", "transpose", {None: 1.0, "items": 2.0})
def _(transpose):
    buffer = np.arange(4.0, dtype=np.float32).reshape(2, 2)
    state = of_torch(buffer, {"items": jnp.ones((2, 2))}, transpose=transpose)
    return float(optzoo.get_slot(state, "momentum")["items"][0, 1])


# RETURNN

WEIGHTS = {"layer": {"W": jnp.ones(1)}}


def moved(config=(), params=WEIGHTS, gradient=0.0, steps=1, **options):
    """How far each weight moves by the gradient in some steps of the rate 0.5."""
    config = {"optimizer": {"class": "sgd"}, "learning_rate": 0.5, **dict(config)}
    tx = returnn_updater(config, **options)
    grads = jax.tree.map(lambda x: jnp.full_like(x, gradient), params)

    @jax.jit
    def run(x):
        state = tx.init(x)
        for _ in range(steps):
            updates, state = tx.update(grads, state, x)
            x = optax.apply_updates(x, updates)
        return x

    return [round(float(x[0]) - 1, 6) for x in jax.tree.leaves(run(params))]


@effect("interop.returnn.returnn_updater", "layers", {None: [0.0], 0.25: [-0.25]})
def _(layers):
    """By the gradient ``2 * 0.25`` of the constraint, times the rate."""
    return moved(layers=None if layers is None else {"layer": {"L2": layers}})


@effect("interop.returnn.returnn_updater", "returnn_version", {"2026": [-0.5], "2022": [-0.25]})
def _(returnn_version):
    """By ``2 * 0.25``, or that times the factor."""
    config = {"decouple_constraints": True, "decouple_constraints_factor": 0.5}
    layers = {"layer": {"L2": 0.25}}
    return moved(config, layers=layers, returnn_version=returnn_version)


@effect("interop.returnn.returnn_updater", "axis_name", {None: "ValueError", "replica": None})
def _(axis_name):
    return outcome(
        lambda: returnn_updater(
            {"optimizer": {"class": "sgd"}, "learning_rate": 0.5, "use_horovod": True},
            axis_name=axis_name,
        )
    )


@effect("interop.returnn.returnn_updater", "decay_mask", {None: [0.0, -0.125], "b": [-0.125, 0.0]})
def _(decay_mask):
    """The decay of 0.25 times the rate; by default biases have none."""
    config = {"backend": "torch", "optimizer": {"class": "sgd", "weight_decay": 0.25}}
    params = {"a_bias": jnp.ones(1), "b": jnp.ones(1)}
    return moved(config, params, decay_mask=decay_mask and "a_bias")


def of_engine(model=None, names=("w",), **config):
    """The updater of RETURNN's engine."""
    config = {"optimizer": {"class": "sgd"}, "learning_rate": 0.5, **config}
    return OptzooUpdater(config=Config(config), model=model, param_names=names)


def stepped(updater, state=None, params=(1.0,), grads=(1.0,), learning_rate=0.5):
    """The parameters after one step, and the state."""
    params, grads = ([jnp.full(1, a) for a in arrays] for arrays in (params, grads))
    state = updater.init(params) if state is None else state
    new, state = jax.jit(
        lambda x, g, s, rate: updater.step(params=x, grads=g, opt_state=s, learning_rate=rate)
    )(params, grads, state, learning_rate)
    return [round(float(x[0]), 6) for x in new], state


UPDATER = "interop.returnn.OptzooUpdater"
DECAYS = {"class": "adamw", "weight_decay": 0.25}


class Model:
    """One of RETURNN without modules that a decay spares."""

    @staticmethod
    def named_modules():
        return []


@effect(UPDATER, "config", {1.0: [0.5], 2.0: [0.0]})
def _(gradient_clip):
    """A step by a gradient of 2."""
    return stepped(of_engine(gradient_clip=gradient_clip), grads=(2.0,))[0]


@effect(UPDATER, "model", {None: [0.875, 0.875], Model: [0.875, 1.0]})
def _(model):
    """The decay of 0.25 times the rate; with a model biases have none."""
    updater = of_engine(model, ("w", "bias"), optimizer=DECAYS)
    return stepped(updater, params=(1.0, 1.0), grads=(0.0, 0.0))[0]


@effect(UPDATER, "param_names", {("w",): [0.875], ("bias",): [1.0]})
def _(names):
    return stepped(of_engine(Model, names, optimizer=DECAYS), grads=(0.0,))[0]


for option in ("learning_rate", "global_train_step", "epoch", "epoch_continuous"):

    @effect(f"{UPDATER}.get_effective_learning_rate", option, {2: 2.0, 3: 3.0})
    def _(value, option=option):
        """A schedule that returns this one."""
        updater = of_engine(dynamic_learning_rate=lambda **given: given[option])
        known = {"learning_rate": 0.5, "global_train_step": 0, "epoch": 1, "epoch_continuous": 1.0}
        return updater.get_effective_learning_rate(**{**known, option: value})


@effect(f"{UPDATER}.step", "params", {1.0: [0.5], 2.0: [1.5]})
def _(params):
    return stepped(of_engine(), params=(params,))[0]


@effect(f"{UPDATER}.step", "grads", {1.0: [0.5], 2.0: [0.0]})
def _(grads):
    return stepped(of_engine(), grads=(grads,))[0]


@effect(f"{UPDATER}.step", "opt_state", {"new": [0.5], "after one": [0.25]})
def _(opt_state):
    """The momentum of 0.5 adds half of the gradient before."""
    updater = of_engine(optimizer={"class": "sgd", "momentum": 0.5})
    state = None if opt_state == "new" else stepped(updater)[1]
    return stepped(updater, state)[0]


@effect(f"{UPDATER}.step", "learning_rate", {0.5: [0.5], 0.25: [0.75]})
def _(learning_rate):
    return stepped(of_engine(), learning_rate=learning_rate)[0]


# SparseCore


@effect("interop.sparsecore.sparsecore", "width", {None: "Refused", 4: None})
def _(width):
    """The elements of a row depend on each other."""
    return outcome(lambda: sparsecore(ROW_WISE, width=width))


@effect("interop.sparsecore.sparsecore", "name", {"one": "one", "other": "other"})
def _(name):
    return sparsecore(SGD, name=name).short_name_str


test_an_option_has_its_effect = TABLE.test()
