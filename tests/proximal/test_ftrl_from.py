"""FTRL by the arguments of four libraries, against records of each (``make_ftrl_records.py``)."""

import json
import pathlib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optzoo
from optzoo.testing.samples import step

FOLDER = pathlib.Path(__file__).with_name("ftrl_records")
RECORDS = {path.stem: dict(np.load(path)) for path in sorted(FOLDER.glob("*.npz"))}
METAS = {dialect: json.loads(str(record["meta"])) for dialect, record in RECORDS.items()}
CASES = [(dialect, case) for dialect, meta in METAS.items() for case in meta["cases"]]
IDS = [f"{dialect}-{case.replace(' ', '_')}" for dialect, case in CASES]
DIALECTS = ["tf1", "keras", "sparsecore", "dynamicemb"]


def make(dialect, **arguments):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optzoo.InitialValueWarning)
        return optzoo.ftrl_from(dialect, **{"learning_rate": 0.1, **arguments})


def follow(tx, start, gradients, dtype="float32"):
    """All parameters, and the slots at the end."""
    start, gradients = jnp.asarray(start, dtype), jnp.asarray(gradients, dtype)

    def one(carry, g):
        x, state = carry
        updates, state = tx.update(g, state, x)
        return (x + updates, state), x + updates

    (_, state), path = jax.lax.scan(one, (start, tx.init(start)), gradients)
    return path, state.slots


def error(got, want):
    """The largest difference, relative to the largest value; where theirs is NaN, ours is 0."""
    known = np.isfinite(want)
    assert not np.any(got[~known])
    return np.max(np.abs(got - want)[known]) / np.max(np.abs(want)[known])


@pytest.mark.every_value
@pytest.mark.parametrize(("dialect", "case"), CASES, ids=IDS)
@pytest.mark.filterwarnings("ignore::optzoo.InitialValueWarning")
def test_follows_the_library(dialect, case):
    record, settings = RECORDS[dialect], METAS[dialect]["cases"][case]
    rate = METAS[dialect]["learning_rate"]
    gradients = record.get(f"{case}/grad", record["grad"])
    path, slots = follow(make(dialect, learning_rate=rate, **settings), record["init"], gradients)
    assert error(path, record[f"{case}/param"]) < 1e-6
    assert error(slots.accum, record[f"{case}/accum"]) < 1e-6
    factor = rate if settings.get("multiply_linear_by_learning_rate") else 1
    assert error(factor * slots.linear, record[f"{case}/linear"]) < 1e-6


def test_all_dialects_are_recorded():
    assert sorted(RECORDS) == sorted(DIALECTS)
    assert set(METAS["keras"]["cases"]["all"]) >= {"beta", "l2_regularization_strength"}


def test_who_gives_nan_without_a_gradient():
    """With n_0 = 0, as ``docs/ftrl.md`` says."""
    no_gradient = [(dialect, case) for dialect, case in CASES if "no gradient" in case]
    found = {f"{d} {c}" for d, c in no_gradient if np.isnan(RECORDS[d][f"{c}/param"]).any()}
    assert found == {"tf1 no gradient sparse", "keras no gradient", "sparsecore no gradient"}


def test_strengths_of_l2():
    """What the page says: DynamicEmb's is twice as strong as the others' of half the value."""
    x, g = jnp.ones(3), jnp.array([1.0, 0.5, 0.1])
    ours, _ = step(optzoo.ftrl(0.1, l2_regularization_strength=0.2), g, x)
    theirs = {"l2_reg": 0.4, "initial_accumulator_value": 0.1}
    for tx in (
        make("tf1", l2_regularization_strength=0.2),
        make("keras", l2_regularization_strength=0.2),
        make("sparsecore", l2_regularization_strength=0.2),
        make("dynamicemb", **theirs),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optzoo.InitialValueWarning)
            np.testing.assert_array_equal(step(tx, g, x)[0], ours)


def test_keras_by_name():
    """``create`` by Keras' name knows ``beta``, too."""
    g, x = jnp.array([1.0, 0.5, 0.0]), jnp.array([0.5, -1.0, 2.0])
    settings = {"learning_rate": 0.5, "beta": 0.25, "l2_regularization_strength": 0.125}
    got, _ = step(optzoo.create("keras.optimizers.Ftrl", **settings), g, x)
    want, _ = step(optzoo.ftrl(0.5, beta=0.25, l2_regularization_strength=0.125), g, x)
    np.testing.assert_array_equal(got, want)
    without, _ = step(optzoo.ftrl(0.5, l2_regularization_strength=0.125), g, x)
    assert jnp.max(jnp.abs(got - without)) > 0.01


# beta


def test_beta_bounds_the_first_rate():
    """From zero with n_0 = 0 the first step is - rate * g / (beta + |g|)."""
    g = jnp.array([1e-3, -0.5, 20.0])
    tx = optzoo.ftrl(0.1, initial_accumulator_value=0.0, beta=2.0)
    np.testing.assert_allclose(step(tx, g, jnp.zeros(3))[0], -0.1 * g / (2 + jnp.abs(g)), rtol=1e-6)


def test_without_beta_the_program_is_the_same():
    """An argument of 0 adds no operation; another value adds one addition."""
    x = jnp.ones(3)

    def operations(tx):
        state = tx.init(x)
        text = jax.jit(tx.update).lower(x, state, x).as_text()
        return text.count("stablehlo.")

    plain = operations(optzoo.ftrl(0.1))
    assert operations(optzoo.ftrl(0.1, beta=0)) == plain
    assert operations(optzoo.ftrl(0.1, beta=1.0)) > plain


# Initial values


@pytest.mark.parametrize("g", [1.0, 0.01, 1e-4])
@pytest.mark.parametrize("start", [{}, {"beta": 1.0}, {"initial_accumulator_value": 0.0}], ids=str)
def test_the_kept_share(start, g):
    """That of the docstring, measured as a difference of two runs."""
    tx = optzoo.ftrl(0.1, **start)
    one, two = (step(tx, jnp.full(1, g), jnp.full(1, x))[0] for x in (1.0, 2.0))
    n, beta = start.get("initial_accumulator_value", 0.1), start.get("beta", 0.0)
    after = np.sqrt(n + g**2)
    np.testing.assert_allclose(two - one, (after - np.sqrt(n)) / (after + beta), atol=1e-5)


REPLACING = {
    "keras": make("keras"),
    "sparsecore": make("sparsecore"),
    "dynamicemb, accumulator": make("dynamicemb", initial_accumulator_value=0.1),
    "dynamicemb, beta": make("dynamicemb", ftrl_beta=1.0),
    "keras, beta": make("keras", initial_accumulator_value=0.0, beta=1.0),
    "keras, power 0": make("keras", initial_accumulator_value=0.0, learning_rate_power=0.0),
}


@pytest.mark.parametrize("tx", REPLACING.values(), ids=REPLACING)
def test_warns(tx):
    with pytest.warns(optzoo.InitialValueWarning, match="keeps .* of its initial value") as seen:
        tx.init({"a": jnp.zeros(2), "b": np.ones(3, np.float32)})
    assert len(seen) == 1 and seen[0].filename == __file__


def test_is_quiet():
    """Without values that could be lost, where none is known, and for TensorFlow 1."""
    x = {"table": jnp.ones((2, 2))}
    for tx in REPLACING.values():
        tx.init(jax.tree.map(jnp.zeros_like, x))
        jax.eval_shape(tx.init, x)
        jax.jit(tx.init)(x)
        optzoo.describe(tx, x)
    for tx in (
        make("tf1"),
        make("dynamicemb"),
        make("keras", initial_accumulator_value=0.0),
        optzoo.ftrl(0.1, beta=1.0),
        optzoo.create("Ftrl", learning_rate=0.1),
    ):
        tx.init(x)


def test_is_quiet_inside_of_jit():
    x = jnp.ones(2)
    jax.jit(lambda beta: optzoo.ftrl_from("keras", beta=beta).init(jnp.ones(2)).slots)(x[0])


def test_can_be_silenced():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optzoo.InitialValueWarning)
        state = REPLACING["keras"].init(jnp.ones(2))
    assert state.slots.accum[0] == np.float32(0.1)


# Bad input


def test_refuses():
    with pytest.raises(ValueError, match=r"dialect must be one of tf1, .*, got 'torch'"):
        optzoo.ftrl_from("torch")
    with pytest.raises(TypeError, match="FTRL of tf1 has no argument 'beta'"):
        make("tf1", beta=1.0)
    with pytest.raises(TypeError, match="FTRL of keras has no argument 'clipnorm'"):
        make("keras", clipnorm=1.0)
    with pytest.raises(TypeError, match="FTRL of tf1 needs learning_rate"):
        optzoo.ftrl_from("tf1")
    with pytest.raises(ValueError, match="l2_reg must be zero or positive, got -1"):
        make("dynamicemb", l2_reg=-1)
    with pytest.raises(TypeError, match="ftrl_beta must be a number"):
        make("dynamicemb", ftrl_beta="large")
    with pytest.raises(ValueError, match=r"initial_linear_value must be 0, got 0\.5"):
        make("sparsecore", initial_linear_value=0.5)
    with pytest.raises(ValueError, match="learning_rate must be a number with multiply_linear"):
        make("sparsecore", learning_rate=lambda t: 0.1, multiply_linear_by_learning_rate=True)


def test_a_schedule():
    tx = make("dynamicemb", learning_rate=lambda step: 0.1 / (1 + step))
    path, _ = follow(tx, jnp.zeros(2), jnp.ones((3, 2)))
    want = optzoo.ftrl(lambda step: 0.1 / (1 + step), initial_accumulator_value=0.0)
    np.testing.assert_array_equal(path, follow(want, jnp.zeros(2), jnp.ones((3, 2)))[0])


@pytest.mark.parametrize(
    ("dialect", "rate"), [("keras", 0.001), ("sparsecore", 0.01), ("dynamicemb", 0.01)]
)
def test_rates_where_none_is_given(dialect, rate):
    """TensorFlow 1 has none."""
    x, g = jnp.zeros(2), jnp.array([0.5, -2.0])
    first = lambda tx: tx.update(g, tx.init(x), x)[0]
    given = first(optzoo.ftrl_from(dialect, learning_rate=rate))
    np.testing.assert_array_equal(first(optzoo.ftrl_from(dialect)), given)
