"""Options of checkpoints of TensorFlow 1."""

import functools
import tempfile

import jax
import jax.numpy as jnp
import numpy as np

import optzoo

from .effects import SGD, Table, outcome

TABLE = Table()
effect = TABLE.effect

MOMENTUM = optzoo.momentum(0.1, 0.9)
PARAMS = {"w": jnp.ones(2)}
[SLOT] = [
    jax.tree_util.keystr(path, simple=True, separator="/")
    for path, x in jax.tree_util.tree_leaves_with_path(MOMENTUM.init(PARAMS))
    if x.shape
]


def by_save(*arguments, **options):
    with tempfile.TemporaryDirectory() as folder:
        optzoo.save_tf1_state(f"{folder}/model.npz", *arguments, **options)
        return dict(np.load(f"{folder}/model.npz"))


def named(write, **options):
    """The names of the variables of a momentum."""
    options = {"optimizer_name": "Momentum", **options}
    return sorted(write(PARAMS, MOMENTUM.init(PARAMS), **options))


AVERAGED = optzoo.moving_average(SGD, average_decay=0.5)


@functools.cache
def averaged():
    """A parameter of 2 and its average of 3, of the values 4 and 2."""
    params = {"w": jnp.full(1, 4.0)}
    step = jax.jit(lambda p, s: AVERAGED.update({"w": jnp.full(1, 2.0)}, s, p))
    updates, state = step(params, AVERAGED.init(params))
    return {"w": params["w"] + updates["w"]}, state


USUAL = ["global_step", "w", "w/Momentum"]
WRITERS = {"interop.tf1.tf1_variables": optzoo.interop.tf1.tf1_variables, "save_tf1_state": by_save}
for name, write in WRITERS.items():

    @effect(name, "names", {None: USUAL, "v": ["global_step", "v", "v/Momentum"]})
    def _(names, write=write):
        return named(write, names=names and {"w": names})

    @effect(name, "optimizer_name", {"Momentum": USUAL, "M": ["global_step", "w", "w/M"]})
    def _(optimizer_name, write=write):
        return named(write, optimizer_name=optimizer_name)

    @effect(name, "scope", {None: USUAL, "optimize": ["global_step", "optimize/w/Momentum", "w"]})
    def _(scope, write=write):
        return named(write, scope=scope)

    @effect(name, "variables", {None: USUAL, "other": ["global_step", "other", "w"]})
    def _(variables, write=write):
        return named(write, variables=variables and {SLOT: variables})

    @effect(name, "global_step", {None: 0, 5: 5})
    def _(global_step, write=write):
        state = MOMENTUM.init(PARAMS)
        saved = write(PARAMS, state, optimizer_name="Momentum", global_step=global_step)
        return int(saved["global_step"])

    @effect(name, "swapped", {False: 2.0, True: 3.0})
    def _(swapped, write=write):
        saved = write(*averaged(), optimizer_name="Any", swapped=swapped)
        return float(saved["w"][0])

    @effect(name, "like", {False: USUAL, True: ["global_step", "other", "w", "w/Momentum"]})
    def _(like, write=write):
        """What only the checkpoint has is copied."""
        other = dict.fromkeys(["w", "w/Momentum"], np.zeros(2, np.float32))
        other |= {"other": np.zeros(3, np.float32), "global_step": np.array(1)}
        return named(write, like=other if like else None)


def loaded(values, tx=MOMENTUM, params=None, **options):
    """The parameters and the state from variables of the given values."""
    params = params or {"w": jnp.zeros(2)}
    checkpoint = {name: np.full(2, value, np.float32) for name, value in values.items()}
    checkpoint |= {"global_step": np.array(7), "step": np.array(8)}
    options = {"ignore": ["step"], **options}
    return optzoo.load_tf1_state(tx, params, checkpoint, **options)


def slot(checkpoint, **options):
    """The slot of the parameter ``w``."""
    state = loaded({"w": 1, **checkpoint}, **options)[1]
    return float(optzoo.get_slot(state, "momentum")["w"][0])


@effect("load_tf1_state", "names", {None: 1.0, "v": 2.0})
def _(names):
    """The parameter: other variables may be left over."""
    variables = {"w": 1, "w/Momentum": 3, "v": 2, "v/Momentum": 4}
    ignore = ["step", "w", "w/*"] if names else ["step", "v", "v/*"]
    params, _ = loaded(variables, names=names and {"w": names}, ignore=ignore)
    return float(params["w"][0])


@effect("load_tf1_state", "optimizer_name", {"A": 3.0, "B": 4.0})
def _(optimizer_name):
    return slot({"w/A": 3, "w/B": 4}, optimizer_name=optimizer_name, ignore=["step", "w/?"])


@effect("load_tf1_state", "scope", {"": 3.0, "optimize": 4.0})
def _(scope):
    variables = {"w/Momentum": 3, "optimize/w/Momentum": 4}
    return slot(variables, optimizer_name="Momentum", scope=scope, ignore=["step", "*/Momentum"])


@effect("load_tf1_state", "variables", {None: 3.0, "other": 4.0})
def _(variables):
    given = variables and {SLOT: variables}
    ignore = ["step", "w/Momentum" if variables else "other"]
    return slot({"w/Momentum": 3, "other": 4}, variables=given, ignore=ignore)


@effect("load_tf1_state", "global_step", {None: 7, 9: 9, "step": 8})
def _(global_step):
    """What is saved again; the name is that of a variable."""
    ignore = ["global_step"] if global_step == "step" else ["step"]
    state = loaded({"w": 1, "w/Momentum": 3}, global_step=global_step, ignore=ignore)
    saved = optzoo.interop.tf1.tf1_variables(*state, optimizer_name="Momentum")
    return int(saved["global_step"])


@effect("load_tf1_state", "swapped", {False: [1.0, 5.0], True: [5.0, 1.0]})
def _(swapped):
    """The parameter and its average, from a variable of 1 and its average of 5."""
    variables = {"w": 1, "w/ExponentialMovingAverage": 5}
    params, state = loaded(variables, tx=AVERAGED, swapped=swapped)
    return [float(p["w"][0]) for p in (params, optzoo.eval_params(params, state))]


@effect("load_tf1_state", "ignore", {(): "ValueError", ("step", "oth*"): None})
def _(ignore):
    return outcome(lambda: loaded({"w": 1, "w/Momentum": 3, "other": 4}, ignore=ignore))


@effect("load_tf1_state", "partial", {False: "ValueError", True: "UserWarning"})
def _(partial):
    return outcome(lambda: loaded({"w": 1}, partial=partial))


test_an_option_has_its_effect = TABLE.test(all_quick=True)
