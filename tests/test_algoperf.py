"""The AlgoPerf submission in examples/, through AlgoPerf's interface, at a tiny size."""

import inspect
import multiprocessing
import pathlib
import re

import jax
import numpy as np
import optax
import pytest

import optzoo

FOLDER = pathlib.Path(__file__).parents[1] / "examples" / "algoperf_criteo1tb"
TABLE = "embedding_table"
ROWS, BATCH, STEPS = 4096, 16, 3
# The arguments that AlgoPerf's runner gives, by name or in this order.
INTERFACE = {
    "init_optimizer_state": "workload model_params model_state hyperparameters rng",
    "update_params": "workload current_param_container current_params_types model_state "
    "hyperparameters batch loss_type optimizer_state eval_results global_step rng train_state",
    "prepare_for_eval": "workload current_param_container current_params_types model_state "
    "hyperparameters loss_type optimizer_state eval_results global_step rng",
    "get_batch_size": "workload_name",
    "data_selection": "workload input_queue optimizer_state current_param_container model_state "
    "hyperparameters global_step rng",
}


@pytest.fixture
def run(monkeypatch):
    """The script, as when it is run; it promotes ranks, as everywhere but in our tests."""
    monkeypatch.syspath_prepend(FOLDER)
    import run

    with jax.numpy_rank_promotion("allow"):
        yield run


def tiny(run, num_rows=ROWS):
    """The workload, small."""
    return run.Workload(num_rows, width=8, bottom=(16, 8), top=(16, 1))


def trained(run, init, hyperparameters=None, steps=STEPS):
    """The training after some steps."""
    training = run.Training(init, tiny(run), BATCH, hyperparameters or run.HYPERPARAMETERS)
    for _ in range(steps):
        training.update(training.select())
    return training


def sgd(run, **options):
    """The start of the submission with plain gradient descent."""

    def init(workload, params, model_state, hyperparameters, rng):
        tx = optzoo.gradient_descent(0.1)
        return run.submission.start(workload, params, hyperparameters, tx, **options)

    return init


def test_interface(run):
    for name, arguments in INTERFACE.items():
        assert " ".join(inspect.signature(getattr(run.submission, name)).parameters) == arguments
    assert run.submission.get_batch_size("criteo1tb") % 8 == 0
    with pytest.raises(ValueError, match="is for criteo1tb, got 'wmt'"):
        run.submission.get_batch_size("wmt")


def test_rows_train_as_dense_gradients(run):
    """Where no row moves without a gradient: on all devices, with the same parameters on each."""
    rows = trained(run, sgd(run, sparse={TABLE: "require"}))
    workload, mode = rows.workload, run.submission.spec.ForwardPassMode.TRAIN
    start, _ = workload.init_model_fn(rows.rng)

    @jax.jit
    def step(params, batch):
        def loss(params):
            logits, _ = workload.model_fn(params, batch, None, mode, rows.rng, True)
            return workload.loss_fn(batch["targets"], logits)["per_example"].mean()

        return jax.tree.map(lambda x, g: x - 0.1 * g, params, jax.grad(loss)(params))

    params, queue = start, workload.input_queue(0, BATCH)
    for _ in range(STEPS):
        params = step(params, next(queue))
    for x, y, first in zip(*map(jax.tree.leaves, (rows.params, params, start)), strict=True):
        assert len(x.devices()) == jax.device_count() and x.sharding.is_fully_replicated
        assert np.max(np.abs(x - first)) > 1e-4
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7)


def test_submission(run):
    """It is AdamW, but rows that no batch has read keep their values and moments."""
    at_once = run.HYPERPARAMETERS._replace(warmup_factor=0)
    rows, dense = (trained(run, run.INIT[name], at_once, steps=1) for name in ("rows", "dense"))
    for x, y in zip(*map(jax.tree.leaves, (rows.params, dense.params)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5)  # the decay of a row is less
    m, mu = optzoo.get_slot(rows.state[0], "m"), optax.tree.get(dense.state[0], "mu")
    np.testing.assert_allclose(m[TABLE], mu[TABLE], rtol=1e-4, atol=1e-9)
    ids = [np.asarray(next(rows.workload.input_queue(0, BATCH))["inputs"])[:, 13:]]
    for _ in range(STEPS - 1):
        batch = rows.select()
        ids.append(np.asarray(batch["inputs"])[:, 13:])
        rows.update(batch)
        dense.update(dense.select())
    is_read = np.isin(np.arange(ROWS), np.concatenate(ids).astype(int) % ROWS)
    assert 100 < is_read.sum() < ROWS / 2
    start = rows.workload.init_model_fn(rows.rng)[0][TABLE]
    moved = np.abs(rows.params[TABLE] - start)
    assert not moved[~is_read].any() and moved[is_read].any(1).all()
    assert np.abs(dense.params[TABLE] - start).any(1).all()
    assert not optzoo.get_slot(rows.state[0], "m")[TABLE][~is_read].any()
    queue, tree = iter([{"inputs": 1}]), rows.params
    assert run.submission.data_selection(None, queue, *[None] * 6) == {"inputs": 1}
    assert run.submission.prepare_for_eval(None, tree, *[None] * 8)[1] is tree


def test_no_array_of_the_size_of_the_table_is_sent(run):
    """Between devices go ids, rows, and the gradients of the layers, each once."""
    workload = tiny(run, 2**15)
    for name, is_sent in (("rows", False), ("dense", True)):
        training = run.Training(run.INIT[name], workload, BATCH)
        state, step = training.state
        lowered = step.lower(training.params, state, training.select(), None, training.rng)
        text = lowered.compile().as_text()
        sent = re.findall(r"= (.*?) (?:all-reduce|all-gather)(?:-start)?\(", text)
        assert sent
        assert any("[32768,8]" in shapes for shapes in sent) == is_sent, (name, sent)
        assert "pred[]" not in sent  # the condition of a loop that merges rows of all devices


def test_clipping_counts_repeated_rows(run):
    clipped = run.collections.namedtuple("Clipped", "grad_clip")(1e-3)
    moved = []
    for options in ({"sparse": {TABLE: "require"}}, {"sparse": "allow"}):
        training = run.Training(sgd(run, **options), tiny(run), BATCH, clipped)
        before = jax.tree.map(np.asarray, training.params)
        training.update(training.select())
        moved.append(optax.tree.norm(optax.tree.sub(training.params, before)))
    np.testing.assert_allclose(moved, 1e-4, rtol=1e-3)


def test_what_is_measured(run):
    """One step in a process, here in this one; and what is printed."""
    here, there = multiprocessing.Pipe()
    here.send(True)
    here.send(False)
    run.contender(there, "rows", run.Workload, ROWS, BATCH)
    found, seconds, peak = (here.recv() for _ in range(3))
    assert ROWS / 50 < found["distinct"] <= BATCH * 26 and found["temporaries"] > 0
    assert seconds > 0 and peak > found["temporaries"]
    found = {
        "dense": {"distinct": 7, "seconds": [4.0, 2.0, 6.0], "temporaries": 2**31, "peak": 2**32},
        "rows": {"distinct": 7, "seconds": [1.0, 3.0, 1.0], "temporaries": 2**30, "peak": 2**30},
    }
    numbers = [line.split()[2:] for line in run.report(found, 1024)]
    assert numbers == [
        ["dense", "2.000", "4.000", "2.000", "4.000"],
        ["rows", "1.000", "1.000", "1.000", "1.000"],
        ["ratio", "0.500", "0.250", "0.500", "0.250"],
    ]
