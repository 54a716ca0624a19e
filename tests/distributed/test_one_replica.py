"""DiLoCo of a single replica: lookahead with an optimizer, and slow weights on the host."""

import pathlib
import runpy
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optzoo
from optzoo.testing import samples

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "algoperf_diloco.py"
START = {"w": np.ones((3, 2), np.float32), "scale": np.float32(2)}


class Regression:
    """A workload of AlgoPerf: a linear model, and a state that counts."""

    step_hint = 200

    def model_fn(self, params, batch, model_state, mode, rng, update_batch_norm):
        assert mode == "train" and update_batch_norm
        return batch["inputs"] @ params["w"] * params["scale"], model_state + 1

    def loss_fn(self, targets, logits, weights):
        assert weights is None
        return {"summed": jnp.sum((logits - targets) ** 2), "n_valid_examples": len(targets)}


class Replay:
    """The update of the submission in NumPy, formula by formula."""

    rate, b1, b2, epsilon, decay = 0.000955, 0.99, 0.995, 1e-8, 0.2424
    outer_rate, outer_momentum, period = 0.3006, 0.7675, 75

    def __init__(self, start, steps):
        self.fast = {name: np.array(x, np.float64) for name, x in start.items()}
        self.slow = {name: x.copy() for name, x in self.fast.items()}
        zeros = lambda: {name: np.zeros_like(x) for name, x in self.fast.items()}
        self.m, self.v, self.b = zeros(), zeros(), zeros()
        self.steps, self.count = steps, 0

    def gradients(self, x, y):
        """Of the mean over the examples of the squared error."""
        product = x @ self.fast["w"]
        error = 2 * (product * self.fast["scale"] - y) / len(y)
        return {"w": x.T @ error * self.fast["scale"], "scale": np.sum(error * product)}

    def step(self, x, y):
        gradients = self.gradients(x, y)
        rate = self.rate * (1 + np.cos(np.pi * min(self.count / self.steps, 1))) / 2
        self.count += 1
        for name, g in gradients.items():
            self.m[name] = self.b1 * self.m[name] + (1 - self.b1) * g
            self.v[name] = self.b2 * self.v[name] + (1 - self.b2) * g**2
            m = self.m[name] / (1 - self.b1**self.count)
            v = self.v[name] / (1 - self.b2**self.count)
            direction = m / (np.sqrt(v) + self.epsilon) + self.decay * self.fast[name]
            self.fast[name] = self.fast[name] - rate * direction
        if self.count % self.period == 0:
            for name, fast in self.fast.items():
                change = self.slow[name] - fast
                self.b[name] = self.outer_momentum * self.b[name] + change
                move = change + self.outer_momentum * self.b[name]
                self.slow[name] = self.slow[name] - self.outer_rate * move
                self.fast[name] = self.slow[name].copy()


def test_the_submission_to_algoperf(monkeypatch, x64):
    """Step by step, with an evaluation between two steps."""
    spec = types.SimpleNamespace(ForwardPassMode=types.SimpleNamespace(TRAIN="train"))
    module = types.ModuleType("algoperf")
    module.spec = spec
    monkeypatch.setitem(sys.modules, "algoperf", module)
    submission = runpy.run_path(str(EXAMPLE))
    assert (
        len(EXAMPLE.read_text().splitlines()) <= 60 and submission["get_batch_size"]("wmt") == 128
    )
    rng, workload, replay = np.random.default_rng(0), Regression(), Replay(START, 200)
    with x64(True):
        params = jax.tree.map(lambda a: jnp.asarray(a, np.float64), START)
        state, model_state = submission["init_optimizer_state"](workload, params), jnp.zeros(())
        for step in range(160):
            batch = {"inputs": rng.normal(size=(4, 3)), "targets": rng.normal(size=(4, 2))}
            queue = iter([batch])
            batch = submission["data_selection"](workload, queue)
            if step in (10, 90):
                ready = submission["prepare_for_eval"](
                    workload, params, None, model_state, None, None, state
                )
                state, slow, model_state = ready
                for name, want in replay.slow.items():
                    np.testing.assert_allclose(slow[name], want, rtol=1e-6, atol=1e-9)
                params = slow
            args = params, None, model_state, None, batch, None, state, [], step
            state, params, model_state = submission["update_params"](workload, *args, None)
            replay.step(batch["inputs"], batch["targets"])
            for name, want in replay.fast.items():
                np.testing.assert_allclose(params[name], want, rtol=1e-6, atol=1e-9)
    assert np.asarray(model_state) == 160


def test_each_fragment_has_its_own_outer_step():
    """Two of other sizes, exchanged in turn: plain local steps, momentum outside."""
    g = {"a": np.arange(1.0, 4, dtype=np.float32), "b": np.array([[4.0], [5.0]], np.float32)}
    tx = optzoo.diloco(
        optzoo.gradient_descent(0.1),
        optax.sgd(0.5, momentum=0.5),
        axis_name=None,
        communication_period=2,
        fragments=2,
    )

    @jax.jit
    def run(x):
        step = lambda carry, _: (samples.step(tx, g, *carry), None)
        return jax.lax.scan(step, (x, tx.init(x)), length=4)[0][0]

    x = run(jax.tree.map(np.ones_like, g))
    # After steps 1 and 3 a is 1 - 0.05 g and 1 - 0.175 g; b is 1 - 0.1 g and 1 - 0.25 g one later.
    np.testing.assert_allclose(x["a"], 1 - 0.275 * g["a"], rtol=1e-6)
    np.testing.assert_allclose(x["b"], 1 - 0.25 * g["b"], rtol=1e-6)


def alone(period=3, **options):
    return optzoo.diloco(
        optzoo.momentum(0.1, 0.9), axis_name=None, communication_period=period, **options
    )


def run(tx, ticks=7):
    step = jax.jit(lambda x, state: samples.step(tx, jax.tree.map(jnp.cos, x), x, state))
    params = jax.tree.map(jnp.asarray, START)
    state = tx.init(params)
    for _ in range(ticks):
        params, state = step(params, state)
    return params, state


def on_host():
    """Where the host's memory is: before JAX 0.10.2 arrays of CPUs stay where they are."""
    kind = jax.device_put(jnp.ones(2), jax.memory.Space.Host).sharding.memory_kind
    assert kind == ("pinned_host" if jax.__version_info__ >= (0, 10, 2) else "device")
    return kind


def kinds(tree):
    return {a.sharding.memory_kind for a in jax.tree.leaves(tree) if a.ndim}


@pytest.mark.parametrize("options", [{}, {"overlap_steps": 1}, {"skip_nonfinite": True}], ids=str)
def test_slow_weights_on_the_host(options):
    want, plain = run(alone(**options))
    params, state = run(alone(**options, placement="pinned_host"))
    assert kinds(state.replicated) == {on_host()} and kinds(plain) == {"device"}
    assert kinds((params, state.per_replica, optzoo.eval_params(params, state))) == {"device"}
    for ours, theirs in zip(*map(jax.tree.leaves, ((params, state), (want, plain))), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("placement", ["pinned_host", None])
def test_the_program_for_a_tpu_has_slow_weights_on_the_host(placement):
    tx = alone(placement=placement)
    step = jax.jit(lambda g, s, x: tx.update(g, s, x)[1])
    traced = step.trace(START, tx.init(START), START)
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert ("pinned_host" in text) == (placement is not None)


def test_of_several_replicas_on_the_host():
    tx = optzoo.diloco(optzoo.momentum(0.1, 0.9), communication_period=2, placement="pinned_host")

    def step(params, state, to):
        return samples.step(tx, jax.tree.map(lambda x: x - to, params), params, state)

    params, state = optzoo.replicas.replicate(START, tx.init(START), 2)
    train = jax.jit(optzoo.replicas.map_over_replicas(step))
    for _ in range(2):
        params, state = train(params, state, np.arange(2, dtype=np.float32))
    assert kinds(state.replicated) == {on_host()}
    np.testing.assert_allclose(params["w"][0], optzoo.eval_params(params, state)["w"])


def test_a_placement_that_moves_nothing(monkeypatch):
    class Alone:
        platform = "abacus"
        kind = "unpinned_host"
        addressable_memories = lambda self: [self]
        default_memory = lambda self: self

    monkeypatch.setattr(jax, "local_devices", lambda: [Alone()])
    words = "placement='pinned_host' would move nothing: devices of 'abacus' have"
    with pytest.raises(ValueError, match=words):
        alone(placement="pinned_host").init(START)
    with pytest.raises(ValueError, match="placement must be one of pinned_host, None, got 'disk'"):
        alone(placement="disk")
