"""Runs of torch that continue here, by their record; ``make_torch_states.py`` describes it."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optzoo
from optzoo.interop.torch import from_torch

FILE = pathlib.Path(__file__).parents[1] / "golden" / "torch_states.npz"
ARRAYS = dict(np.load(FILE))
META = json.loads(str(ARRAYS.pop("meta")))
HALF, CASES = META["half"], META["cases"]
RATE, E, NO = 0.01, {"eps": 0.1}, {"eps": 0.0}
L2 = optax.add_decayed_weights
RMS = {"b2": 0.99, **NO}
SAME = {
    "SGD": optzoo.gradient_descent(RATE),
    "SGD, momentum": optzoo.momentum(RATE, 0.9),
    "SGD, nesterov": optax.chain(L2(0.1), optzoo.momentum(RATE, 0.9, nesterov=True)),
    "Adam": optzoo.sparse_adamw(RATE, **E),
    "Adam, no eps": optzoo.adam(RATE, **NO),
    "Adam, weight_decay": optax.chain(L2(0.2), optzoo.sparse_adamw(RATE, **E)),
    "AdamW": optzoo.sparse_adamw(RATE, **E, weight_decay=0.2),
    "AdamW, no eps": optzoo.adamw(RATE, **NO, weight_decay_per_step=0.2 * RATE),
    "SparseAdam": optzoo.lazy_adam(RATE, **E),
    "Adagrad": optzoo.adagrad_eps(RATE, **E),
    "Adagrad, lr_decay": optzoo.adagrad_eps(lambda count: RATE / (1 + 0.2 * count), **E),
    "RMSprop, no eps": optzoo.rmsprop(RATE, **RMS, momentum=None),
    "RMSprop, momentum": optzoo.rmsprop(RATE, **RMS, momentum=0.9),
    "RMSprop, centered": optzoo.rmsprop(RATE, **RMS, momentum=None, centered=True),
    "RMSprop, all": optzoo.rmsprop(RATE, **RMS, momentum=0.9, centered=True),
    "Muon": optzoo.muon(RATE, weight_decay=0.2, adjust_lr="match_rms_adamw"),
}
# What docs/from_torch.md names that is of optax.
OF_OPTAX = {
    "SGD, momentum": optax.sgd(RATE, 0.9),
    "Adam": optax.adam(RATE, **E),
    "AdamW": optax.adamw(RATE, **E, weight_decay=0.2),
    "RMSprop": optax.rmsprop(RATE, 0.99, **E, eps_in_sqrt=False),
    "RMSprop, momentum": optax.rmsprop(RATE, 0.99, **NO, eps_in_sqrt=False, momentum=0.9),
    "RMSprop, all": optax.rmsprop(RATE, 0.99, **NO, eps_in_sqrt=False, momentum=0.9, centered=True),
}
RUNS = [*SAME.items(), *OF_OPTAX.items()]
REFUSED = {
    "SGD, dampening": (optzoo.momentum(RATE, 0.9), "SGD has dampening=0.5, which"),
    "SGD, maximize": (optzoo.momentum(RATE, 0.9), "SGD has maximize=True, but .*negate the loss"),
    "Adam": (
        optzoo.adam(RATE, **E),
        "eps=0.1, .* tx before the bias correction, by torch after it: use",
    ),
    "Adam, amsgrad": (
        optzoo.amsgrad(RATE),
        "amsgrad=True, but optzoo.amsgrad has no bias correction",
    ),
    "Adam, no eps": (optzoo.adam(RATE, 0.8), r"has betas=\[0.9, 0.999\], but tx has 0.8"),
    "SparseAdam": (
        optzoo.sparse_adamw(RATE, **E),
        "eps=0.1, .* by tx after the bias correction, .*lazy_adam",
    ),
    "RMSprop": (
        optzoo.rmsprop(RATE),
        "eps=0.1, .* by optzoo.rmsprop inside the root: use optax",
    ),
    "RMSprop, momentum": (optzoo.rmsprop(RATE, momentum=None), "left over: momentum_buffer of 'ta"),
    "RMSprop, no eps": (optzoo.rmsprop(RATE), "'head/bias' has no momentum_buffer in the state"),
    "RMSprop, centered": (optzoo.rmsprop(RATE, momentum=None), "left over: grad_avg of 'head/b"),
    "RMSprop, all": (optzoo.adam(RATE), "'head/bias' has AdamSlots, which RMSprop does not have"),
    "SGD": (optzoo.momentum(RATE, 0.9), "'head/bias' has no momentum_buffer in the state of SGD"),
    "SGD, momentum": (optzoo.gradient_descent(RATE), "left over: momentum_buffer of 'head/bias'"),
    "SGD, nesterov": (
        optzoo.shampoo(RATE),
        "tx has ShampooSlots, which cannot be filled; the classes that can are Ada",
    ),
    "NAdam": (optzoo.nadam(RATE), r"param_groups\[0\] has .* the options of none of SGD, Adam or"),
    "Adagrad": (optax.adagrad(RATE), "left over: sum of 'head/bias'"),
}
KERNEL = "head/weight"  # in JAX the last axis of a kernel is that of the outputs


def state_dict(case):
    state = {}
    for key, a in ARRAYS.items():
        if key.startswith(f"{case}/state/"):
            index, field = key.removeprefix(f"{case}/state/").split("/")
            state.setdefault(int(index), {})[field] = a
    return {"state": state, "param_groups": CASES[case]["param_groups"]}


def without_names(given):
    groups = [{k: v for k, v in g.items() if k != "param_names"} for g in given["param_groups"]]
    return {**given, "param_groups": groups}


def tree(prefix, pick=lambda a: a):
    """The arrays of a record as parameters."""
    found = {}
    for key, a in ARRAYS.items():
        if key.startswith(prefix):
            layer, name = key.removeprefix(prefix).split(".")
            a = pick(a)
            a = a.swapaxes(-1, -2) if layer == "head" and name == "weight" else a
            found.setdefault(layer, {})[name] = jnp.asarray(a)
    return found


@pytest.mark.parametrize(("case", "tx"), RUNS, ids=[case for case, _ in RUNS])
def test_a_run_continues(case, tx):
    params = tree(f"{case}/half/")
    state = from_torch(state_dict(case), tx, params, transpose=KERNEL)
    gradients = tree("gradients/", lambda a: a[HALF:])
    gradients = {k: {name: gradients[k][name] for name in x} for k, x in params.items()}

    def step(carry, gradient):
        params, state = carry
        updates, state = tx.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), params

    _, path = jax.jit(lambda *x: jax.lax.scan(step, x, gradients))(params, state)
    want = tree(f"{case}/path/")
    gaps = jax.tree.map(lambda a, b: float(np.max(np.abs(a - b))), path, want)
    assert max(jax.tree.leaves(gaps)) < 1e-6
    # Without the state it would be another run.
    _, other = jax.lax.scan(step, (params, tx.init(params)), gradients)
    gaps = jax.tree.map(lambda a, b: float(np.max(np.abs(a - b))), other, want)
    assert case == "SGD" or max(jax.tree.leaves(gaps)) > 1e-4


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_equal_is_refused(case):
    tx, message = REFUSED[case]
    with pytest.raises(ValueError, match=f"(?s){message}"):
        from_torch(state_dict(case), tx, tree(f"{case}/half/"), transpose=KERNEL)


def test_all_of_the_record_is_compared():
    assert CASES.keys() == SAME.keys() | REFUSED.keys()


GIVEN = state_dict("SGD, momentum")
PARAMS, MOMENTUM = tree("SGD, momentum/half/"), SAME["SGD, momentum"]
ORDER = ["head/weight", "head/bias", "table/weight"]


def test_ways_to_name_and_to_transpose():
    want = from_torch(GIVEN, MOMENTUM, PARAMS, transpose=KERNEL)
    bare = without_names(GIVEN)
    renamed = {"kernel": PARAMS["head"]["weight"], "b": PARAMS["head"]["bias"]}
    renamed |= {"t": PARAMS["table"]["weight"]}
    by_theirs = {"kernel": "head.weight", "b": "head.bias", "t": "table.weight"}
    # As torch.distributed.checkpoint has it.
    name_of = ["head.weight", "head.bias", "table.weight"]
    by_name = {
        "state": {name_of[i]: x for i, x in bare["state"].items()},
        "param_groups": [
            {**g, "params": [name_of[i] for i in g["params"]]} for g in bare["param_groups"]
        ],
    }
    for given, names, transpose, params in [
        (bare, ORDER, KERNEL, PARAMS),
        (bare, ORDER, (KERNEL,), PARAMS),
        (bare, tuple(ORDER), {KERNEL: (1, 0)}, PARAMS),
        (GIVEN, None, lambda params: KERNEL, PARAMS),
        (GIVEN, by_theirs, "kernel", renamed),
        (bare, ["kernel", "b", "t"], "kernel", renamed),
        (by_name, None, KERNEL, PARAMS),
    ]:
        got = from_torch(given, MOMENTUM, params, names, transpose=transpose)
        got, expected = optzoo.get_slot(got, "momentum"), optzoo.get_slot(want, "momentum")
        if params is renamed:
            got = {
                "head": {"weight": got["kernel"], "bias": got["b"]},
                "table": {"weight": got["t"]},
            }
        jax.tree.map(np.testing.assert_array_equal, got, expected)
    kernel = GIVEN["state"][0]["momentum_buffer"]
    np.testing.assert_array_equal(optzoo.get_slot(want, "momentum")["head"]["weight"], kernel.T)


def test_axes_of_convolutions():
    buffer = np.arange(24.0, dtype=np.float32).reshape(4, 3, 2, 1)
    given = {"state": {0: {"momentum_buffer": buffer}}, "param_groups": [{**GROUP, "params": [0]}]}
    params = {"conv": jnp.ones((2, 1, 3, 4))}
    state = from_torch(given, MOMENTUM, params, ["conv"], transpose={"conv": (2, 3, 1, 0)})
    got = optzoo.get_slot(state, "momentum")["conv"]
    np.testing.assert_array_equal(got, buffer.transpose(2, 3, 1, 0))
    with pytest.raises(ValueError, match=r"transpose: 'conv' has shape .* is not a matrix"):
        from_torch(given, MOMENTUM, params, ["conv"], transpose="conv")
    with pytest.raises(ValueError, match="transpose: 'conv' needs an order of axes"):
        from_torch(given, MOMENTUM, params, ["conv"], transpose={"conv": (2, 3, 1, 1)})
    with pytest.raises(ValueError, match=r"'conv' must have shape \(2, 1, 3, 4\), got \(4, 3, 2"):
        from_torch(given, MOMENTUM, params, ["conv"])


GROUP = {k: v for k, v in GIVEN["param_groups"][0].items() if k != "param_names"}


class Tensor:
    """As far as a tensor of torch is read; ``numpy`` has the conditions that torch's has."""

    def __init__(self, a, dtype, *, needs_gradient=True, device="cuda"):
        self.a, self.dtype, self.needs_gradient, self.device = a, dtype, needs_gradient, device

    def detach(self):
        return Tensor(self.a, self.dtype, needs_gradient=False, device=self.device)

    def cpu(self):
        return Tensor(self.a, self.dtype, needs_gradient=self.needs_gradient, device="cpu")

    def float(self):
        where = {"needs_gradient": self.needs_gradient, "device": self.device}
        return Tensor(self.a.astype(np.float32), "torch.float32", **where)

    def numpy(self):
        if self.needs_gradient or self.device != "cpu" or self.dtype == "torch.bfloat16":
            raise TypeError("torch refuses it")
        return self.a


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensors(dtype):
    a = np.asarray(jnp.arange(3.0, dtype=dtype))
    state = {"exp_avg": Tensor(a, f"torch.{dtype}"), "exp_avg_sq": Tensor(a, f"torch.{dtype}")}
    state["step"] = Tensor(np.float32(7), "torch.float32")
    adam = {**CASES["Adam"]["param_groups"][0], "params": [0], "param_names": ["w"]}
    state = from_torch(
        {"state": {0: state}, "param_groups": [adam]}, SAME["Adam"], {"w": jnp.ones(3)}
    )
    np.testing.assert_array_equal(optzoo.get_slot(state, "v")["w"], [0, 1, 2])
    assert state[0].count == 7


def test_steps_and_the_count():
    tx = optzoo.momentum(lambda count: 1.0 * count, 0.0)
    given = {**GIVEN, "state": {i: {"momentum_buffer": np.zeros_like(x["momentum_buffer"])}
                                for i, x in GIVEN["state"].items()}}  # fmt: skip
    for count, rate in {None: 0.0, 7: 7.0}.items():
        state = from_torch(given, tx, PARAMS, transpose=KERNEL, count=count)
        updates, _ = tx.update(PARAMS, state, PARAMS)
        np.testing.assert_allclose(updates["head"]["bias"], -rate * PARAMS["head"]["bias"])
    adam, params = state_dict("Adam"), tree("Adam/half/")
    with pytest.raises(ValueError, match=r"numbers of updates differ: \[5, 6\]"):
        from_torch(adam, SAME["Adam"], params, transpose=KERNEL, count=6)
    adam["state"][1]["step"] = np.float32(4)
    with pytest.raises(ValueError, match=r"numbers of updates differ: \[4, 5\]"):
        from_torch(adam, SAME["Adam"], params, transpose=KERNEL)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (ORDER[:2], "names must be 3 different names of parameters"),
        ([*ORDER[:2], ORDER[1]], "names must be 3 different names"),
        ([*ORDER[:2], "other"], "names must be 3 different names .*'other'"),
        (None, "names: state_dict has no param_names"),
        ({}, "names: state_dict has no param_names"),
    ],
)
def test_names_that_do_not_fit_are_refused(names, message):
    with pytest.raises(ValueError, match=message):
        from_torch(without_names(GIVEN), MOMENTUM, PARAMS, names, transpose=KERNEL)


def test_two_optimizers_of_a_parameter_are_refused():
    with pytest.raises(ValueError, match="tx has several MomentumSlots for 'head/bias'"):
        from_torch(GIVEN, optax.chain(MOMENTUM, MOMENTUM), PARAMS, transpose=KERNEL)


def test_shapes_are_enough():
    shapes = jax.eval_shape(lambda: PARAMS)
    got, want = (from_torch(GIVEN, MOMENTUM, p, transpose=KERNEL) for p in (shapes, PARAMS))
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_what_is_missing_or_of_another_kind_is_refused():
    with pytest.raises(TypeError, match=r"state_dict must be the result of optimizer.state_dict"):
        from_torch({"state": {}}, MOMENTUM, PARAMS)
    with pytest.raises(TypeError, match="names must be a sequence of names, a dict or None"):
        from_torch(GIVEN, MOMENTUM, PARAMS, "head/weight")
    with pytest.raises(ValueError, match="'more' is in no group of torch"):
        from_torch(GIVEN, MOMENTUM, {**PARAMS, "more": jnp.ones(2)}, transpose=KERNEL)
    frozen = {**GIVEN, "state": {i: GIVEN["state"][i] for i in (0, 1)}}
    with pytest.raises(ValueError, match="'table/weight' has no momentum_buffer in the state"):
        from_torch(frozen, MOMENTUM, PARAMS, transpose=KERNEL)
    complex_ = {**GIVEN, "state": {**GIVEN["state"], 1: {"momentum_buffer": np.ones(3, complex)}}}
    with pytest.raises(ValueError, match="'head/bias' must have a real dtype such as float32"):
        from_torch(complex_, MOMENTUM, PARAMS, transpose=KERNEL)
