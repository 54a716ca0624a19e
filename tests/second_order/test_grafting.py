"""``graft``: the direction of one transformation with the length of another."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optzoo
from optzoo import SparseRows
from optzoo.second_order.shampoo.grafting import GraftState
from optzoo.testing.samples import avals, last, run, side_by_side

SHAPES = {"w": (3, 2), "v": (3,), "s": ()}


def gradients(seed=0):
    rng = np.random.default_rng(seed)
    return {k: np.asarray(rng.normal(size=s), np.float32) for k, s in SHAPES.items()}


GRADS = jax.tree.map(lambda *gs: np.stack(gs), *map(gradients, range(3)))


def by_hand(direction, length):
    """In float64, for one parameter."""
    d, length = np.float64(direction), np.float64(length)
    norm = lambda x: np.sqrt(np.sum(x**2))
    return d * norm(length) / norm(d)


def close(got, want, rtol=1e-5, atol=1e-6):
    chex.assert_trees_all_close(got, want, rtol=rtol, atol=atol)


def test_the_formula():
    direction, length = optax.scale_by_adam(), optzoo.momentum(0.1, 0.9)
    txs = {"graft": optzoo.transforms.graft(direction, length), "d": direction, "s": length}
    got, states = run(side_by_side(txs), GRADS)
    state, *parts = (last(states[name]) for name in txs)
    assert isinstance(state, GraftState) and avals(got["graft"]) == avals(got["d"])
    chex.assert_trees_all_close(state, GraftState(*parts), rtol=1e-6)
    for name in SHAPES:
        want = [by_hand(*pair) for pair in zip(got["d"][name], got["s"][name], strict=True)]
        close(got["graft"][name], np.stack(want))


def test_shampoo_with_the_length_of_the_gradient():
    txs = {
        "graft": optzoo.transforms.graft(optzoo.transforms.scale_by_shampoo(), optax.identity()),
        "sgd": optzoo.transforms.scale_by_shampoo(grafting="sgd"),
    }
    got, _ = run(side_by_side(txs), GRADS)
    close(got["graft"], got["sgd"])


def test_the_rate_and_the_sign():
    """A constant factor of the direction counts by its sign only, one of the length by its size."""
    graft, length = optzoo.transforms.graft, optax.sgd(0.1)
    txs = {
        "plain": graft(optax.scale_by_adam(), length),
        "adam": graft(optax.adam(7.0), length),
        "doubled": graft(optax.scale_by_adam(), optax.sgd(-0.2)),
    }
    got, _ = run(side_by_side(txs), GRADS)
    close(got["adam"], jax.tree.map(lambda u: -u, got["plain"]))
    close(got["doubled"], jax.tree.map(lambda u: 2 * u, got["plain"]))


@pytest.mark.parametrize("zero", ["direction", "length"])
def test_zero(zero):
    """Where either is zero, so is the update."""
    factors = {"direction": 1.0, "length": 1.0, zero: 0.0}
    tx = optzoo.transforms.graft(**{name: optax.scale(factor) for name, factor in factors.items()})
    updates, _ = run(tx, GRADS)
    for u in jax.tree.leaves(updates):
        np.testing.assert_array_equal(u, 0)


def test_a_parameter_without_elements():
    x = jnp.ones((0, 3))
    tx = optzoo.transforms.graft(optzoo.adam(), optzoo.adagrad(0.1))
    updates, _ = jax.jit(tx.update)(x, tx.init(x))
    assert avals(updates) == avals(x)


def test_no_gradient():
    """No update, slots unchanged, and the others as without it."""
    tx = optzoo.transforms.graft(optzoo.adam(), optzoo.adagrad(0.1))
    grads = gradients()
    state = tx.init(grads)
    got, after = jax.jit(tx.update)({**grads, "w": None}, state)
    want, _ = jax.jit(tx.update)(grads, state)
    assert got["w"] is None
    close([got["v"], got["s"]], [want["v"], want["s"]])
    slots = lambda state: [slot["w"] for one in state for slot in one[0].slots]
    chex.assert_trees_all_equal(slots(after), slots(state))


@pytest.mark.parametrize("missing", ["direction", "length"])
def test_no_update_where_one_has_none(missing):
    nothing = optax.stateless(lambda updates, _: dict.fromkeys(updates))
    parts = {"direction": optax.identity(), "length": optax.identity(), missing: nothing}
    tx = optzoo.transforms.graft(**parts)
    updates, _ = tx.update(gradients(), tx.init(gradients()))
    assert updates == dict.fromkeys(SHAPES)


# Rows

ROWS = SparseRows(
    jnp.array([1, 3, 1, 5, -1]),
    jnp.array([[1.0, 2], [3, 4], [5, 6], [np.nan, 8], [9, np.inf]]), 5,
)  # fmt: skip
LAZY, DENSE = optzoo.adagrad(0.1), optzoo.adam(0.1)


@functools.cache
def table():
    return jnp.cos(jnp.arange(10.0)).reshape(5, 2)


def on_table(tx, g):
    """The second update, and its state."""
    update = jax.jit(tx.update)
    return update(g, update(table(), tx.init(table()), table())[1], table())


def test_rows_of_both():
    """Rows, with the sums of rows that share an index."""
    tx = optzoo.transforms.graft(LAZY, optzoo.gradient_descent(0.3))
    got, state = on_table(tx, ROWS)
    assert isinstance(got, SparseRows)
    outside = (got.indices < 0) | (got.indices >= 5)
    assert not np.any(got.values[outside])
    d, _ = on_table(LAZY, ROWS)
    close(got.to_dense(), by_hand(d.to_dense(), [[6, 8], [3, 4]]) * 0.3)
    want, wanted = on_table(tx, ROWS.coalesce().to_dense())
    close(got.to_dense(), want)
    close(state, wanted)


@pytest.mark.parametrize(
    ("direction", "length"), [(LAZY, DENSE), (DENSE, LAZY)], ids=["direction", "length"]
)
def test_rows_of_one(direction, length):
    """The norm of rows is that of their array."""
    got, _ = on_table(optzoo.transforms.graft(direction, length), ROWS)
    (d, _), (s, _) = on_table(direction, ROWS), on_table(length, ROWS)
    assert isinstance(got, SparseRows) == isinstance(d, SparseRows) != isinstance(s, SparseRows)
    dense = lambda u: u.to_dense() if isinstance(u, SparseRows) else u
    close(dense(got), by_hand(dense(d), dense(s)))


@pytest.mark.parametrize("part", ["direction", "length"])
def test_rows_that_a_transformation_repeats(part):
    """They are summed before the norm, and those outside of the table are ignored."""
    repeat = lambda g: SparseRows(
        jnp.concatenate([g.indices, g.indices]), jnp.concatenate([g.values, g.values[::-1]]), 5
    )
    parts = {"direction": optax.identity(), "length": optax.identity()}
    tx = optzoo.transforms.graft(**parts | {part: optax.stateless(lambda g, _: repeat(g))})
    got, _ = jax.jit(tx.update)(ROWS, tx.init(table()))
    merged = ROWS.coalesce()
    dense = dict.fromkeys(parts, merged.to_dense()) | {part: repeat(merged).to_dense()}
    close(got.to_dense(), by_hand(**dense))


# Types and wrappers


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_norms_in_float32(dtype):
    """In 16 bits the squares would overflow, or their sum would be rounded."""
    x = {"w": jnp.full((64, 64), 300, dtype)}
    tx = optzoo.transforms.graft(optax.scale(0.5), optax.identity())
    updates, _ = jax.jit(tx.update)(x, tx.init(x))
    assert updates["w"].dtype == dtype
    np.testing.assert_array_equal(updates["w"], x["w"])


def test_float64(x64):
    with x64(True):
        g = np.array([3.0, 4])
        tx = optzoo.transforms.graft(optax.scale(1 / 3), optax.identity())
        updates, _ = jax.jit(tx.update)(g, tx.init(g))
        assert updates.dtype == "float64"
        np.testing.assert_allclose(updates, g, rtol=1e-15)


def test_extra_arguments_reach_both():
    seen = []

    def recorder(name):
        def update(updates, state, params=None, **extra):
            seen.append((name, params is not None, extra))
            return updates, state

        return optax.GradientTransformationExtraArgs(lambda _: (), update)

    tx, g = optzoo.transforms.graft(recorder("direction"), recorder("length")), gradients()
    tx.update(g, tx.init(g), g, value=3)
    assert seen == [("direction", True, {"value": 3}), ("length", True, {"value": 3})]


def test_the_rate_of_one_step():
    """The override reaches the length; the direction, of optax, ignores it."""
    tx, g = (
        optzoo.transforms.graft(optax.scale_by_adam(), optzoo.gradient_descent(0.1)),
        gradients(),
    )
    usual, _ = tx.update(g, tx.init(g))
    once, _ = tx.update(g, tx.init(g), learning_rate=0.3)
    close(once, jax.tree.map(lambda u: 3 * u, usual))


def test_within_and_around_wrappers():
    """Masked parameters, hyper-parameters in the state, a chain."""
    length = optax.inject_hyperparams(optzoo.gradient_descent)(0.1)
    graft, descent = optzoo.transforms.graft, optzoo.gradient_descent
    adam = graft(optzoo.adam(), descent(0.1))
    txs = {
        "chain": optax.chain(graft(optzoo.ggt(1.0, window=2), length), optax.scale(2.0)),
        "plain": graft(optzoo.ggt(window=2), descent(0.2)),
        "masked": optax.masked(adam, {"w": True, "v": False, "s": False}),
        "adam": adam,
    }
    got, _ = run(side_by_side(txs), GRADS)
    close(got["chain"], got["plain"])
    close(got["masked"]["w"], got["adam"]["w"])
    for name in ("v", "s"):
        np.testing.assert_array_equal(got["masked"][name], GRADS[name])


def test_slots_in_bfloat16():
    tx = optzoo.slots_dtype(optzoo.transforms.graft(optzoo.adam(), optzoo.adagrad(0.1)), "bfloat16")
    g = gradients()
    state = tx.init(g)
    updates, after = jax.eval_shape(tx.update, g, state)
    assert avals(after) == avals(state) and avals(updates) == avals(g)
    slots = [slot for one in state for slot in jax.tree.leaves(one[0].slots)]
    assert {a.dtype.name for a in slots} == {"bfloat16"}


def test_bad_gradients():
    tx, g = optzoo.transforms.graft(optax.identity(), optax.identity()), {"w": jnp.ones(2)}
    state = tx.init(g)
    with pytest.raises(TypeError, match="'w' has a gradient of dtype int32"):
        tx.update({"w": jnp.ones(2, int)}, state)
    with pytest.raises(ValueError, match=r"'w' has shape \(2,\), but its gradient \(3,\)"):
        tx.update({"w": jnp.ones(3)}, state, g)
