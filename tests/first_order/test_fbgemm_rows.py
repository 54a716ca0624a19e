"""Optimizers that FBGEMM runs on GPUs only, against its formulas in NumPy, row by row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optzoo
from optzoo import SparseRows, create
from optzoo.testing.samples import step

LR, B1, B2, EPS, WD = 0.1, 0.8, 0.95, 1e-3, 0.2
STEPS, SHAPE = 7, (6, 4)


def norm(a):
    return np.sqrt(np.sum(a * a))


def direction(s, g, x, t, of_squares):
    """Of Adam; the bias of both means is corrected."""
    s["m"] = B1 * s["m"] + (1 - B1) * g
    s["v"] = B2 * s["v"] + (1 - B2) * of_squares(g * g)
    return s["m"] / (1 - B1**t) / (np.sqrt(s["v"] / (1 - B2**t)) + EPS) + WD * x


def adam(s, g, x, t):
    return x - LR * direction(s, g, x, t, lambda a: a)


def adam_by_row(s, g, x, t):
    s["n"] = s.get("n", 0) + 1
    return x - LR * direction(s, g, x, s["n"], lambda a: a)


def partial_adam(s, g, x, t):
    return x - LR * direction(s, g, x, t, np.mean)


def lamb(s, g, x, t):
    r = direction(s, g, x, t, lambda a: a)
    return x - LR * norm(x) / norm(r) * r


def partial_lamb(s, g, x, t):
    r = direction(s, g, x, t, np.mean)
    return x - LR * norm(x) / norm(r) * r


def lars(s, g, x, t):
    a = 10 * LR * 0.3 * norm(x) / (norm(g) + WD * norm(x))
    s["m"] = 0.7 * s["m"] + a * (g + WD * x)
    return x - s["m"]


def row_wise_adagrad(s, g, x, t, decay=0.0, max_norm=None):
    s["v"] = s["v"] + np.mean(g * g)
    x = (1 - LR * decay) * x - LR / (np.sqrt(s["v"]) + EPS) * g
    return x if max_norm is None or norm(x) <= max_norm else x * max_norm / norm(x)


def with_max_norm(s, g, x, t):
    return row_wise_adagrad(s, g, x, t, WD, max_norm=0.8)


def global_decay(s, g, x, t, start=3, least=0.965):
    if t >= start:
        skipped = max(t - s.get("prev", 0) - 1, 0)
        x = x * (max(least, (1 - LR * WD) ** skipped) if s.get("prev") else 1)
        s["prev"] = t
    return row_wise_adagrad(s, g, x, t, WD)


def counter_sgd(s, g, x, t):
    """Of rows that came more than floor(2.5 N) times; N is 1 before the counters are read."""
    s["n"] = s.get("n", 0) + 1
    s["v"] = s["v"] + np.mean(g * g)
    root = np.sqrt(0.7 * s["n"] if s["n"] > 2 else s["v"])
    return x - LR / (root + EPS) * g


ADAM = {"beta1": B1, "beta2": B2, "eps": EPS, "weight_decay": WD}
PLAIN = {"b1": B1, "b2": B2, "eps": EPS, "weight_decay": WD}
DECOUPLE = {"eps": EPS, "weight_decay": WD, "weight_decay_mode": "DECOUPLE"}
# FBGEMM's name and arguments; ours; the formula.
CASES = {
    "adam": ("EmbOptimType.ADAM", ADAM, lambda: optzoo.sparse_adamw(LR, **PLAIN), adam),
    "adam by row": (
        "EmbOptimType.ADAM",
        {**ADAM, "extra_optimizer_config": {"use_rowwise_bias_correction": True}},
        lambda: optzoo.sparse_adamw(LR, **PLAIN, row_wise_bias_correction=True),
        adam_by_row,
    ),
    "partial adam": (
        "EmbOptimType.PARTIAL_ROWWISE_ADAM",
        ADAM,
        lambda: optzoo.partial_row_wise_adam(LR, **PLAIN),
        partial_adam,
    ),
    "lamb": ("EmbOptimType.LAMB", ADAM, lambda: optzoo.row_wise_lamb(LR, **PLAIN), lamb),
    "partial lamb": (
        "EmbOptimType.PARTIAL_ROWWISE_LAMB",
        ADAM,
        lambda: optzoo.partial_row_wise_lamb(LR, **PLAIN),
        partial_lamb,
    ),
    "lars": (
        "LARS_SGD",
        {"learning_rate": 10 * LR, "momentum": 0.7, "weight_decay": WD, "eta": 0.3},
        lambda: optzoo.row_wise_lars(10 * LR, 0.7, WD, 0.3),
        lars,
    ),
    "max_norm": (
        "EXACT_ROWWISE_ADAGRAD",
        {**DECOUPLE, "max_norm": 0.8},
        lambda: optzoo.variable_clipping(
            optzoo.row_wise_adagrad(LR, EPS, WD), {".*": (1,)}, max_norm=0.8
        ),
        with_max_norm,
    ),
    "global decay": (
        "EXACT_ROWWISE_ADAGRAD",
        {
            **DECOUPLE,
            "weight_decay_mode": "DECOUPLE_GLOBAL",
            "global_weight_decay": {"start_iter": 3, "lower_bound": 0.965},
        },
        lambda: optzoo.interop.fbgemm.global_decay_row_wise_adagrad(LR, EPS, WD, 3, 0.965),
        global_decay,
    ),
    "counter sgd": (
        "EXACT_ROWWISE_ADAGRAD",
        {
            "eps": EPS,
            "weight_decay_mode": "COUNTER",
            "counter_based_regularization": {
                "learning_rate_mode": "COUNTER_SGD",
                "adjustment_ub": 0.7,
                "tail_id_threshold": {"val": 2.5, "is_ratio": True},
            },
        },
        lambda: optzoo.interop.fbgemm.counter_row_wise_adagrad(
            LR,
            EPS,
            adjustment_ub=0.7,
            learning_rate_mode="counter_sgd",
            tail_threshold=2.5,
            is_ratio=True,
        ),
        counter_sgd,
    ),
}


def gradients(seed=0):
    """Ids and rows of each step; some repeat, and rows have no gradient for different times."""
    rng = np.random.default_rng(seed)
    return [(rng.integers(0, 5, 3), rng.normal(size=(3, SHAPE[1]))) for _ in range(STEPS)]


def expected(rule):
    x = np.random.default_rng(1).normal(size=SHAPE)
    slots = [{"m": 0.0, "v": 0.0} for _ in x]
    path = []
    for t, (ids, values) in enumerate(gradients(), start=1):
        for row in set(ids.tolist()):
            x[row] = rule(slots[row], values[ids == row].sum(axis=0), x[row], t)
        path.append(x.copy())
    return path


@pytest.mark.parametrize("ours", [False, True], ids=["theirs", "ours"])
@pytest.mark.parametrize("name", CASES)
def test_is_the_formula(name, ours, x64):
    theirs, arguments, make, rule = CASES[name]
    with x64(True):
        rate = {"learning_rate": lambda k: jnp.float64(LR)}  # which is not rounded
        tx = make() if ours else create(theirs, **{**rate, **arguments})
        x = {"t": jnp.asarray(np.random.default_rng(1).normal(size=SHAPE))}
        state, error = tx.init(x), 1e-12
        if not ours:  # the rate is one of float32
            error = 1e-6
        for (ids, values), want in zip(gradients(), expected(rule), strict=True):
            rows = {"t": SparseRows(jnp.asarray(ids), jnp.asarray(values), SHAPE[0])}
            x, state = step(tx, rows, x, state)
            np.testing.assert_allclose(x["t"], want, rtol=error, atol=error)


def ensembled(reset):
    """The formula of the ensemble, on all rows."""
    x, e = np.random.default_rng(1).normal(size=SHAPE), np.zeros(SHAPE)
    slots = [{"v": 0.0} for _ in x]
    for t, (ids, values) in enumerate(gradients(), start=1):
        if t % 2 == 0:
            kept = 0.0 if t <= 2 else 0.7
            e = kept * e + (1 - kept) * x
        if t % 3 == 0:
            x = e.copy()
        if t % 2 == 0 and reset:
            e = np.zeros(SHAPE)
        for row in set(ids.tolist()):
            x[row] = row_wise_adagrad(slots[row], values[ids == row].sum(axis=0), x[row], t)
        yield x.copy(), e.copy()


@pytest.mark.parametrize("mode", ["USE_ITER", "NONE"])  # the second forgets at each average
def test_ensemble_is_the_formula(mode, x64):
    definition = {"step_ema": 2, "step_swap": 3, "step_start": 2, "step_ema_coef": 0.7}
    with x64(True):
        tx = create(
            "ENSEMBLE_ROWWISE_ADAGRAD",
            learning_rate=LR,
            eps=EPS,
            ensemble_mode={**definition, "step_mode": mode},
        )
        x = {"t": jnp.asarray(np.random.default_rng(1).normal(size=SHAPE))}
        state = tx.init(x)
        for (ids, values), (want, average) in zip(
            gradients(), ensembled(mode == "NONE"), strict=True
        ):
            rows = {"t": SparseRows(jnp.asarray(ids), jnp.asarray(values), SHAPE[0])}
            x, state = step(tx, rows, x, state)
            np.testing.assert_allclose(x["t"], want, rtol=1e-6, atol=1e-7)
            np.testing.assert_allclose(state.average["t"], average, rtol=1e-6, atol=1e-7)


def test_dense_gradients_are_those_of_rows():
    """An array is a gradient of all rows; the halves of a row are averaged in place, too."""
    x = {"t": jnp.asarray(np.random.default_rng(1).normal(size=SHAPE), jnp.float32)}
    dense = {"t": jnp.asarray(np.random.default_rng(2).normal(size=SHAPE), jnp.float32)}
    rows = {"t": SparseRows(jnp.arange(SHAPE[0]), dense["t"], SHAPE[0])}
    for tx in (
        optzoo.interop.fbgemm.ema_in_place(optzoo.row_wise_adagrad(0.1), every=1),
        optzoo.interop.fbgemm.ensemble(optzoo.row_wise_adagrad(0.1), 1, 1),
        optzoo.interop.fbgemm.counter_row_wise_adagrad(
            0.1, weight_decay=0.1, weight_decay_mode="adagradw"
        ),
    ):
        a, b = step(tx, dense, x)[0], step(tx, rows, x)[0]
        np.testing.assert_allclose(a["t"], b["t"], rtol=1e-6)


def test_halves_of_an_odd_row_are_refused():
    tx, x = (
        optzoo.interop.fbgemm.ema_in_place(optzoo.row_wise_adagrad(0.1)),
        {"t": jnp.ones((2, 3))},
    )
    with pytest.raises(ValueError, match=r"parameter 't' has rows of 3 elements.*groups"):
        tx.update(x, tx.init(x), x)


def test_zero_rows_of_lamb_and_lars_are_not_nan():
    x, g = jnp.zeros((2, 4)), jnp.array([[1.0] * 4, [0] * 4])
    for tx in (
        optzoo.row_wise_lamb(0.1),
        optzoo.partial_row_wise_lamb(0.1),
        optzoo.row_wise_lars(0.1),
    ):
        np.testing.assert_array_equal(step(tx, g, x)[0], x)


def test_the_largest_counter_of_all_tables_is_found_anew():
    """As on FBGEMM's GPU: periodically, from the counters of all tables; on its CPU it is 1."""
    tx = optzoo.interop.fbgemm.counter_row_wise_adagrad(
        0.1, learning_rate_mode="tail_increase", max_counter_every=3
    )
    x = {"a": np.ones((3, 2), np.float32), "b": np.ones((4, 1), np.float32)}

    def rows(ids):
        columns = zip(x.items(), ids, strict=True)
        return {
            k: SparseRows(jnp.array(i), jnp.ones((len(i), a.shape[1])), len(a))
            for (k, a), i in columns
        }

    @jax.jit
    def run(state):
        one = lambda state, _: 2 * (tx.update(rows([[3], [1, 1, 2]]), state, x)[1],)  # 3 is padding
        state, states = jax.lax.scan(one, state, length=7)
        return states.max_counter, tx.update(rows([[0], [1]]), state, x, max_counter=100.0)[1]

    found, given = run(tx.init(x))
    assert found.tolist() == [1, 1, 3, 3, 3, 6, 6]
    assert given.max_counter == 6  # for one update
