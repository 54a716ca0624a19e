"""The submission to AlgoPerf with SOAP: its functions, on all devices, equal to one device."""

import importlib.util
import pathlib
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import optzoo

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "algoperf_soap.py"
LAYERS, WIDTH, STEPS = 9, 8, 5
RNG = np.random.default_rng(0)
START = {
    "embedding": RNG.normal(size=(9000, WIDTH)) / 4,
    "layers": {
        f"layer_{i}": {"kernel": RNG.normal(size=(WIDTH, WIDTH)) / 2, "bias": np.zeros(WIDTH)}
        for i in range(LAYERS)
    },
}


class Layers:
    """A workload of AlgoPerf: an embedding and some layers, and a state that counts."""

    step_hint = 20

    def model_fn(self, params, batch, model_state, mode, rng, update_batch_norm):
        assert mode == "train" and update_batch_norm
        x = params["embedding"][batch["inputs"]]
        for layer in params["layers"].values():
            x = jnp.tanh(x @ layer["kernel"] + layer["bias"][None])
        return x, model_state + 1

    def loss_fn(self, targets, logits, weights):
        assert weights is None
        return {"summed": jnp.sum((logits - targets) ** 2), "n_valid_examples": len(targets)}


@pytest.fixture
def submission(monkeypatch):
    """The example, with what it uses of AlgoPerf."""
    whole = NamedSharding(Mesh(jax.devices(), ("batch",)), PartitionSpec())
    module = types.ModuleType("algoperf")
    module.spec = types.SimpleNamespace(ForwardPassMode=types.SimpleNamespace(TRAIN="train"))
    module.jax_sharding_utils = types.SimpleNamespace(
        replicate=lambda tree: jax.tree.map(lambda x: jax.device_put(x, whole), tree)
    )
    monkeypatch.setitem(sys.modules, "algoperf", module)
    of_file = importlib.util.spec_from_file_location("algoperf_soap", EXAMPLE)
    example = importlib.util.module_from_spec(of_file)
    of_file.loader.exec_module(example)
    return example


def batches():
    rng = np.random.default_rng(1)
    for _ in range(STEPS):
        yield {"inputs": rng.integers(0, 9000, 16), "targets": rng.normal(size=(16, WIDTH))}


def on_one_device(tx):
    """The parameters after the same steps, of an optimizer whose matrices have no owners."""
    workload, params = Layers(), jax.tree.map(jnp.asarray, START)

    def loss(params, batch):
        logits, _ = workload.model_fn(params, batch, 0, "train", None, True)
        found = workload.loss_fn(batch["targets"], logits, None)
        return found["summed"] / found["n_valid_examples"]

    @jax.jit
    def step(params, state, batch):
        updates, state = tx.update(jax.grad(loss)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for batch in batches():
        params, state = step(params, state, batch)
    return params


def test_it_trains_as_on_one_device(submission, x64, monkeypatch):
    """In float64; and each device has the state of its own matrices alone."""
    with x64(True):
        workload, params = Layers(), jax.tree.map(jnp.asarray, START)
        state = submission.init_optimizer_state(workload, params, None, None, None)
        model_state, queue = jnp.zeros(()), batches()
        for step in range(STEPS):
            batch = submission.data_selection(workload, queue, state, params, None, None, step, 0)
            given = params, None, model_state, None, batch, None, state, [], step, None
            state, params, model_state = submission.update_params(workload, *given)
        ready = submission.prepare_for_eval(
            workload, params, None, model_state, None, None, state, [], STEPS, None
        )
        assert ready == (state, params, model_state) and int(model_state) == STEPS
        basis = optzoo.get_slot(state[0], "basis")["layers"]["layer_0"]["kernel"]
        assert [q.shape for q in basis] == [(WIDTH, WIDTH), (WIDTH, WIDTH)]
        stacks = jax.tree.leaves(state[0].inner_states[True].inner_state[0].matrices.slots)
        assert len(stacks) == 6 and {len(x) for x in stacks} == {16}  # 9 layers, and padding
        assert {len(x.addressable_shards[0].data) for x in stacks} == {16 // jax.device_count()}
        with monkeypatch.context() as patch:
            soap = optzoo.soap
            patch.setattr(optzoo, "soap", lambda *args, owners, **more: soap(*args, **more))
            want = on_one_device(submission.optimizer(workload.step_hint))
    for x, y in zip(jax.tree.leaves(params), jax.tree.leaves(want), strict=True):
        assert x.sharding.is_fully_replicated and len(x.devices()) == jax.device_count()
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-9)


def test_batch_sizes(submission):
    assert submission.get_batch_size("wmt") == 128
