"""The experiments of examples/papers: small versions here, the stored ones with ``full``."""

import pathlib
import runpy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optzoo.race import published

SCRIPT = runpy.run_path(
    str(pathlib.Path(__file__).parents[1] / "benchmarks" / "papers.py"), run_name="benchmark"
)
PAPERS = SCRIPT["modules"]()


@pytest.fixture(autouse=True)
def as_users_do():
    """The examples promote ranks, as everywhere but in our tests."""
    with jax.numpy_rank_promotion("allow"):
        yield


def test_deepobs():
    result = PAPERS["deepobs"].run(["momentum"])
    assert PAPERS["deepobs"].holds(result)
    assert result["optimizers"]["momentum"]["runs"] == 5
    [first, *_] = [run for run in published.published_runs() if run.optimizer == "momentum"]
    np.testing.assert_allclose(result["optimizers"]["momentum"]["curve"], first.test, rtol=1e-6)


def test_amsgrad():
    amsgrad = PAPERS["amsgrad"]
    theorem = amsgrad.run(("theorem",), steps=3000, points=10)
    assert amsgrad.holds(theorem)
    online = amsgrad.run(("online",), steps=20_000, points=10)["examples"]["online"]
    assert online["adam"]["end"][0] > 0.9 and online["amsgrad"]["end"][1] < -0.5
    assert online["amsgrad"]["regret"] < online["adam"]["regret"]


def test_easgd():
    """The bound is exact with three replicas; beyond it, and there alone, training is unstable."""
    easgd = PAPERS["easgd"]
    result = easgd.run(replicas=(1, 3), points=16)
    assert easgd.holds(result)
    for found in result["same"].values():
        assert found["stable beyond the bound"] == 0
        assert found["unstable, eta below 2"] > 20
    assert all(r["unstable, eta below 2"] == 0 for r in result["after"].values())


def test_a_round_of_easgd():
    """The map is that of the paper, replica after replica."""
    eta, alpha, state = 0.3, 0.4, np.array([1.0, -2.0, 3.0, 0.5])
    step = PAPERS["easgd"].a_round(eta, alpha, 3, "same")
    got = np.asarray(step(jnp.asarray(state, jnp.float32)))
    for i in range(3):
        x, center = state[i], state[-1]
        state[i] = x - eta * x - alpha * (x - center)
        state[-1] = center + alpha * (x - center)
    np.testing.assert_allclose(got, state, rtol=1e-6)


def test_ftrl():
    ftrl = PAPERS["ftrl"]
    sizes = {"steps": 200, "size": 2**12, "tests": 4000}
    result = ftrl.run(rates=(0.3, 0.3), l1s=(1, 10), **sizes)
    assert ftrl.holds(result)
    methods = result["methods"]
    assert methods["subgradient"]["nonzero"][-1] == methods["subgradient"]["nonzero"][0]
    assert methods["FTRL"]["nonzero"][-1] < methods["FTRL"]["nonzero"][0] / 4
    for r in methods.values():
        assert r["auc"][0] > 0.9  # the stream can be learned


def test_auc():
    auc = PAPERS["ftrl"].stream.auc
    labels = np.array([0, 1, 0, 1, 1], np.float32)
    scores = np.array([0.1, 0.1, 0.3, 0.4, 0.2])
    pairs = [(p, n) for p in scores[labels == 1] for n in scores[labels == 0]]
    assert auc(scores, labels) == pytest.approx(
        np.mean([(p > n) + 0.5 * (p == n) for p, n in pairs])
    )


def test_adagrad():
    """A lower loss on text, and smaller errors of the weights of rare features."""
    adagrad = PAPERS["adagrad"]
    losses = adagrad.text((0.03, 0.3, 3.0), steps=200, size=2**12, tests=4000)
    least = {name: min(of_rates) for name, of_rates in losses.items()}
    assert least.pop("Adagrad") < min(least.values())
    probability, rates = adagrad.known_weights()[0], (0.01, 0.3)
    rare = {}
    for name, errors in adagrad.errors(rates, 200).items():
        best = np.argmin(np.square(errors) @ probability)
        rare[name] = np.sqrt(np.mean(np.square(errors[best][probability < 0.01])))
    assert rare.pop("Adagrad") < 0.9 * min(rare.values())


def test_ill_conditioned():
    module = PAPERS["ill_conditioned"]
    methods = ("gradient descent", "Adam", "GGT", "Shampoo")
    result = module.run(methods, steps=200, rates=(0.3, 1.0, 3.0, 30.0))["methods"]
    assert result["Shampoo"]["loss"] < 1e-2 * result["Adam"]["loss"]
    assert result["GGT"]["loss"] < result["Adam"]["loss"] < result["gradient descent"]["loss"]


def test_diloco():
    """Exactly 1/H of the bytes, and it trains."""
    diloco = PAPERS["diloco"]
    problem, methods = diloco.digits(), diloco.methods((8,))
    size = sum(a.size for a in jax.tree.leaves(problem.init(jax.random.key(0))))
    for name in ("synchronous", "H = 8"):
        period, make = methods[name]
        sent = diloco.bytes_of_a_step(problem, period, make(0.01))
        assert sent * period == pytest.approx(4 * size, abs=16)
    period, make = methods["H = 8, plain"]
    [losses] = diloco.curves(problem, period, make, (0.01,), steps=128, seeds=1)
    assert len(losses) == 128 / 8 and losses[-1] < 0.4 < 2 < losses[0]


def test_muloco():
    """Two bits with feedback and Muon inside: less than an eighth of the bytes, and it trains."""
    muloco = PAPERS["muloco"]
    ways = ("float32", "2 bits, feedback")
    result = muloco.run(("Muon",), ways, steps=128, rates=(0.03,), seeds=1)["methods"]
    whole, few = (result[f"Muon, {way}"] for way in ways)
    assert few["bytes of a step"] < whole["bytes of a step"] / 8
    assert len(few["curve"]) == 8 and few["loss"] < 0.5 < few["curve"][0]


def test_backup_workers():
    workers = PAPERS["backup_workers"]
    times, masks = workers.simulate(workers.WORKERS, 200)
    # All fresh: the time of an update is the largest of 40 independent delays.
    random = np.random.default_rng(1)
    delays = (1 + 0.1 * random.exponential(size=(20_000, 40))) * np.where(
        random.random((20_000, 40)) < 0.05, 10, 1
    )
    assert times[-1] / 200 == pytest.approx(delays.max(axis=1).mean(), rel=0.05)
    assert masks["arrived"].all()
    result = workers.run(aggregates=(40, 36), updates=60, every=10, target=0.4)
    assert workers.holds(result)
    alone, backup = result["aggregate"].values()
    assert alone["updates made"] == backup["updates made"] == 60
    assert alone["gradients dropped"] == 0 < backup["gradients dropped"]
    assert backup["seconds of an update"] < 0.6 * alone["seconds of an update"]


def test_flashoptim():
    """Codes with companding train as float32 does, linear ones do not; and are less exact."""
    flashoptim = PAPERS["flashoptim"]
    result = flashoptim.run(seeds=2, width=32, layers=1, steps=120)
    losses = result["losses"]
    np.testing.assert_allclose(losses["8 bits"], losses["32 bits"], rtol=0.01)
    assert max(losses["32 bits"]) < 3.3 < 10 < min(x or np.inf for x in losses["8 bits, linear"])
    assert flashoptim.holds(result)
    lost, linear = (result["errors"][name] for name in ("8 bits", "8 bits, linear"))
    assert lost["m"] < 0.7 * linear["m"] and lost["v"] < 0.1 * linear["v"]
    worse = {**losses, "8 bits": [x + 1 for x in losses["32 bits"]]}
    assert flashoptim.holds({**result, "losses": worse}) == "in part"


@pytest.mark.full
@pytest.mark.parametrize("name", PAPERS)
def test_as_stored(name):
    """A new run of the whole experiment has the outcome of the stored one."""
    stored = SCRIPT["stored"]()[name]
    result = SCRIPT["short"](PAPERS[name].run())
    assert PAPERS[name].holds(result) == PAPERS[name].holds(stored)
    assert jax.tree.structure(result) == jax.tree.structure(stored)
