"""GGT against its formula in NumPy, and what it costs."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from optzoo import SparseRows
from optzoo.second_order.ggt import (
    _divided_differences,
    _of_eigenvalues,
    ggt,
    scale_by_ggt,
)
from optzoo.testing.samples import avals, last, run, side_by_side, step, step_of

# In float32 the tail magnifies rounding as the root of svd_eps says.
MILD = {"window": 4, "svd_eps": 1e-2}


def params():
    return {"a": jnp.ones((3, 4)), "b": jnp.ones(5), "c": jnp.ones(())}


def gradients(k, like):
    """Of step ``k``: numbers without a pattern between -1 and 1, times a scale that varies."""

    def one(i, x):
        i = np.arange(x.size).reshape(x.shape) + 100 * i
        return ((1 + k % 3) * np.sin(1e3 * np.sin(i + 7.3 * k + 1))).astype(x.dtype)

    leaves, treedef = jax.tree.flatten(like)
    return treedef.unflatten([one(i, x) for i, x in enumerate(leaves)])


def several(number, like):
    """The first gradients, stacked."""
    return jax.tree.map(lambda *g: np.stack(g), *(gradients(k, like) for k in range(number)))


def flat(tree):
    """A vector for each step, of what is stacked over the steps."""
    leaves = [np.reshape(leaf, (len(leaf), -1)) for leaf in jax.tree.leaves(tree)]
    return np.concatenate(leaves, axis=1)


def original(gs, b1=0.9, window=10, eps=1e-4, svd_eps=1e-6, sigma_eps=1e-2):
    """The directions as the original computes them."""
    m, rows, ds = 0, np.zeros((window, len(gs[0]))), []
    for t, g in enumerate(gs, 1):
        m = b1 * m + (1 - b1) * g
        rows[(t - 1) % window] = m
        big = rows.T / np.sqrt(min(t, window))
        u, sigma, _ = np.linalg.svd(big.T @ big + svd_eps * np.eye(window))
        c, least = u.T @ (big.T @ m), np.sqrt(sigma.min())
        d = big @ (u @ (c / (np.sqrt(sigma) + sigma_eps) ** 3))
        ds.append(d + (m - big @ (u @ (c / sigma))) / least if least > eps else d)
    return ds


@pytest.mark.parametrize(
    "settings",
    [
        {"window": 5},
        {"window": 4, "b1": 0.5, "svd_eps": 1e-4, "sigma_eps": 1e-3},
        {"window": 4, "eps": 0.3},  # sometimes above, sometimes below the least singular value
        {"window": 1, "eps": 10.0, "sigma_eps": 0.0},
    ],
    ids=lambda s: ",".join(map(str, s.values())),
)
def test_formula(x64, settings):
    with x64(True):
        gs = several(15, params())
        us, _ = run(scale_by_ggt(**settings), gs)
        want = original(flat(gs), **settings)
        np.testing.assert_allclose(flat(us), want, rtol=1e-9, atol=1e-9)


def test_formula_in_float32():
    gs = several(15, params())
    us, _ = run(scale_by_ggt(window=5), gs)
    for got, want in zip(flat(us), original(flat(gs), window=5), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-3 * np.abs(want).max())


def test_gram_matrix_is_that_of_the_windows():
    """Also where a parameter had no gradient, or rows."""
    tx, gs = scale_by_ggt(window=4), [gradients(k, params()) for k in range(11)]
    update = jax.jit(tx.update)
    gs[5] |= {"a": None, "c": None}
    gs[6] |= {"a": SparseRows(jnp.array([2, 0, 2]), jnp.ones((3, 4)), 3)}
    gs[10] |= {"b": None}
    state = tx.init(params())
    for g in gs:
        u, new = update(g, state)
        for name in g:
            assert (u[name] is None) == (g[name] is None)
            if g[name] is None:
                chex.assert_trees_all_equal(
                    *(
                        jax.tree.map(
                            lambda slot, name=name: slot[name],
                            tuple(s.slots),
                            is_leaf=lambda t: isinstance(t, dict),
                        )
                        for s in (new, state)
                    )
                )
        state = new
        rows = [w.reshape(4, -1) for w in jax.tree.leaves(state.slots.grad_buffer)]
        want = sum(np.asarray(r, float) @ np.asarray(r, float).T for r in rows)
        np.testing.assert_allclose(state.shared["gram"], want, rtol=1e-5, atol=1e-6)


def test_only_the_concatenation_matters():
    """Neither the order of parameters nor how a vector is cut."""
    tx, gs = scale_by_ggt(**MILD), several(9, jnp.ones(12))
    want, _ = run(tx, gs)
    cut = lambda v: {"z": v[:, :4].reshape(-1, 2, 2), "a": v[:, 4:11], "m": v[:, 11]}
    got, _ = run(tx, cut(gs))
    chex.assert_trees_all_close(got, cut(want), rtol=1e-4, atol=1e-5)


def test_rows_are_dense_gradients():
    rows = SparseRows(jnp.array([2, 0, 2]), jnp.arange(12.0).reshape(3, 4), 3)
    tx, x, dense = ggt(**MILD), params(), gradients(0, params())
    train = jax.jit(lambda g: step(tx, g, x))
    chex.assert_trees_all_equal(train(dense | {"a": rows}), train(dense | {"a": rows.to_dense()}))


# Numbers

LARGE = [("float16", 6e4), ("float32", 1e15)]


@pytest.mark.parametrize(("dtype", "size"), [("float16", 6e4), ("float32", 1e15)])
def test_the_first_step_is_a_unit_vector_however_large_the_gradient(dtype, size):
    g = jnp.asarray(size * np.cos(np.arange(7)), dtype)
    u, _ = jax.jit(scale_by_ggt().update)(g, scale_by_ggt().init(g))
    g = np.float64(g)
    np.testing.assert_allclose(u, g / np.linalg.norm(g), rtol=1e-2)


@pytest.mark.parametrize("settings", [{}, {"eps": 0.0, "sigma_eps": 0.0, "svd_eps": 1e-30}])
def test_zero_gradients_give_zero_updates(settings):
    gs = jax.tree.map(lambda a: np.zeros((2, *a.shape), a.dtype), params())
    us, states = run(ggt(**settings), gs)
    chex.assert_trees_all_equal(us, gs)
    chex.assert_tree_all_finite(states)


def test_dtypes_mix_and_sizes_are_any():
    x = {
        "half": jnp.ones((2, 3), "float16"),
        "brain": jnp.ones(4, "bfloat16"),
        "single": jnp.ones(()),
        "none": jnp.ones((0, 3)),
    }
    tx, state = scale_by_ggt(**MILD), scale_by_ggt(**MILD).init(x)
    assert {a.dtype for a in jax.tree.leaves(state.slots)} == {jnp.dtype("float32")}
    # A state from a checkpoint may have other dtypes.
    like = lambda slot: {name: slot[name].astype(a.dtype) for name, a in x.items()}
    state = state._replace(slots=type(state.slots)._make(map(like, state.slots)))
    update = jax.jit(tx.update)
    for k in range(6):
        g = gradients(k, x)
        u, new = update(g | {"brain": g["brain"].astype("float32")}, state)
        assert avals(new) == avals(state)
        assert u["half"].dtype == "float16" and u["brain"].dtype == "float32"
        chex.assert_tree_all_finite(u)
        state = new
    gs = several(6, jax.tree.map(lambda x: x.astype("float32"), x))
    want = original(flat(gs), **MILD)[-1]
    got = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(u)])
    np.testing.assert_allclose(got, want, atol=0.05 * np.abs(want).max())


def test_strict_promotion_with_float64(x64):
    tx = ggt(0.1, window=4)
    with x64(True), jax.numpy_dtype_promotion("strict"):
        x = [jnp.ones(2, "float64"), jnp.ones((2, 3), "bfloat16")]
        state = jax.eval_shape(tx.init, x)
        updates, after = jax.eval_shape(tx.update, x, state, x)
        assert avals(after) == avals(state)
        assert avals(updates) == avals(x)


def test_window_of_16_bits():
    """Half the bytes; a direction within one part in a hundred; and the tail magnifies nothing."""
    x = {"a": jnp.ones((30, 40)), "b": jnp.ones(300)}
    txs = {"half": scale_by_ggt(window_dtype="bfloat16"), "full": scale_by_ggt()}
    updates, states = run(side_by_side(txs), several(12, x))
    state, wide = (last(states[name]) for name in txs)
    for half, full in zip(*(s.slots.grad_buffer.values() for s in (state, wide)), strict=True):
        assert half.dtype == "bfloat16" and 2 * half.nbytes == full.nbytes
    assert state.slots.moment1["a"].dtype == "float32"
    for got, exact in zip(flat(updates["half"]), flat(updates["full"]), strict=True):
        assert np.linalg.norm(got - exact) / np.linalg.norm(exact) < 0.01


# Cost


def compiled(tx, x, donate=(0, 1)):
    return jax.jit(step_of(tx), donate_argnums=donate).lower(x, tx.init(x), x).compile()


@pytest.mark.optimized
def test_window_lies_in_place_and_is_read_twice():
    """One row of the Gram matrix, and one sum of rows: four operations for each element."""
    x, tx = {"a": jnp.ones((100, 100)), "b": jnp.ones((50, 10, 20))}, ggt(window=20)
    train, size = compiled(tx, x), 20_000
    assert train.memory_analysis().temp_size_in_bytes < 0.1 * 4 * 20 * size
    assert train.cost_analysis()["flops"] < 4.5 * 20 * size  # the whole matrix: 40 * 20 * size
    where = lambda tree: [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree)]
    state = tx.init(x)
    before = where((x, state[0].slots))
    for _ in range(3):
        x, state = train(x, state, jax.tree.map(jnp.cos, x))
        assert where((x, state[0].slots)) == before


@pytest.mark.optimized
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_sharded(axis_type):
    mesh = jax.make_mesh((4, 2), ("d", "e"), axis_types=(axis_type,) * 2)
    specs = {"a": PartitionSpec("d", "e"), "b": PartitionSpec(None, "e"), "c": PartitionSpec()}
    x = {"a": jnp.ones((8, 4)), "b": jnp.ones((3, 2)), "c": jnp.ones(())}
    gs = [gradients(k, x) for k in range(3)]
    put = lambda tree: jax.tree.map(
        lambda a, s: jax.device_put(a, NamedSharding(mesh, s)), tree, specs
    )
    tx, x_there = ggt(**MILD), put(x)
    state, state_there = tx.init(x), tx.init(x_there)
    windows = state_there[0].slots.grad_buffer
    for name in ("a", "b"):
        assert windows[name].sharding.spec == PartitionSpec(None, *specs[name])
    text = compiled(tx, x_there, donate=()).as_text()
    found = set(re.findall(r"all-\w+|collective-\w+|reduce-scatter", text))
    assert found == {"all-reduce"}
    update = jax.jit(tx.update)
    for g in gs:
        want, state = update(g, state)
        got, state_there = update(put(g), state_there)
        chex.assert_trees_all_close(got, want, rtol=1e-5, atol=1e-7)
    assert state_there[0].slots.grad_buffer["a"].sharding.spec == windows["a"].sharding.spec


@pytest.mark.parametrize("check_vma", [True, False])
def test_shards_of_parameters_over_an_axis(check_vma):
    mesh, split = Mesh(np.array(jax.devices()), ("shard",)), PartitionSpec("shard")
    x = {"a": jnp.ones((8, 3)), "b": jnp.ones(16)}
    gs = several(3, x)

    def updates(gs, x, **kwargs):
        tx = ggt(**MILD, **kwargs)
        state, us = tx.init(x), []
        for k in range(3):
            u, state = tx.update(jax.tree.map(lambda g, k=k: g[k], gs), state)
            us.append(u)
        return us

    apart = jax.shard_map(
        lambda gs, x: updates(gs, x, axis_name="shard"),
        mesh=mesh,
        in_specs=(PartitionSpec(None, "shard"), split),
        out_specs=split,
        check_vma=check_vma,
    )
    want = jax.jit(updates)(gs, x)
    chex.assert_trees_all_close(jax.jit(apart)(gs, x), want, rtol=1e-6, atol=1e-8)


# Arguments


@pytest.mark.parametrize(
    ("bad", "error", "match"),
    [
        ({"window": 0}, ValueError, "window must be at least 1, got 0"),
        ({"window": 2.5}, TypeError, r"window must be an int, got 2\.5$"),
        ({"b1": 1.0}, ValueError, r"b1 must be in \[0, 1\), got 1.0"),
        ({"eps": -1e-4}, ValueError, "eps must be zero or positive, got -0.0001"),
        ({"sigma_eps": -1.0}, ValueError, "sigma_eps must be zero or positive, got -1.0"),
        ({"svd_eps": 0.0}, ValueError, "svd_eps must be positive, got 0.0"),
        ({"window_dtype": "int8"}, TypeError, "window_dtype must be a floating-point dtype"),
        ({"learning_rate": "fast"}, TypeError, "learning_rate must be a number or a schedule"),
    ],
    ids=lambda a: next(iter(a)) if isinstance(a, dict) else "",
)
def test_bad_arguments(bad, error, match):
    with pytest.raises(error, match=match):
        ggt(**bad)


def test_numbers_can_be_injected_but_the_window():
    with pytest.raises(TypeError, match="static_args"):
        jax.jit(optax.inject_hyperparams(ggt)(0.1).init)(params())
    tx = optax.inject_hyperparams(ggt, static_args=("window",))(0.1, **MILD)
    g = gradients(0, params())
    got, want = (step(t, g, params())[0] for t in (tx, ggt(0.1, **MILD)))
    chex.assert_trees_all_close(got, want, rtol=1e-5)


# Derivatives


def after(steps, size, scale, rate, epsilons):
    """A smooth function of the parameters after some steps, by gradients that depend on them."""
    svd_eps, sigma_eps = epsilons
    tx = ggt(rate, window=5, svd_eps=svd_eps, sigma_eps=sigma_eps)
    x, i = jnp.ones(size), jnp.arange(size)

    def body(carry, k):
        x, state = carry
        g = (1 + scale * jnp.cos(i + k)) * jnp.sin(3.0 * i * (k + 1)) + x / 10
        u, state = tx.update(g, state, x)
        return (x + u, state), None

    (x, _), _ = jax.lax.scan(body, (x, tx.init(x)), jnp.arange(steps))
    return jnp.sum(jnp.sin(x * (1 + i)))


@pytest.mark.parametrize("eps", [1e-4, 0.5])
def test_divided_differences(x64, eps):
    """With the last term of the formula, and without it where the least eigenvalue is below eps."""
    with x64(True):
        epsilons, values = (eps, 1e-2, 1e-2), jnp.array([0.0, 0.3, 0.3, 2.0])
        f = lambda v: _of_eigenvalues(v, values[0], epsilons)
        found = _divided_differences(values, epsilons)
        slopes = jax.vmap(jax.grad(lambda v: f(v[None])[0]))(values)
        v, w = values[:, None], values[None]
        quotients = (f(values)[:, None] - f(values)[None]) / jnp.where(v == w, 1, v - w)
        want = jnp.where(v == w, slopes[:, None], quotients)
        is_zero = jnp.isnan(want)  # the root of 0 has no slope
        assert is_zero.sum() == 1
        np.testing.assert_allclose(found[~is_zero], want[~is_zero], rtol=1e-12)


@pytest.mark.parametrize(("steps", "size"), [(1, 8), (2, 3), (5, 3), (8, 8)])
def test_derivatives_are_difference_quotients(x64, steps, size):
    """With an empty window, a full one, and one of moments that depend on one another."""
    f = lambda v: after(steps, size, v[0], v[1], (v[2], v[3]))
    at = np.array([0.3, 0.1, 1e-4, 1e-2])
    with x64(True):
        all_at_once = jax.jit(lambda v: (f(v), jax.grad(f)(v), jax.jacfwd(f)(v)))
        _, got, forward = all_at_once(at)
        call = lambda v: all_at_once(v)[0]
        want = [(call(at + h) - call(at - h)) / (2 * h.sum()) for h in np.diag(1e-5 * at)]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(forward, got, rtol=1e-9)
    with x64(False):
        single = jax.jit(jax.grad(f))(at.astype("float32"))
    np.testing.assert_allclose(single, got, rtol=0.05, atol=1e-3)


def test_a_second_derivative_is_refused():
    f = lambda scale: after(2, 3, scale, 0.1, (1e-4, 1e-2))
    with pytest.raises(NotImplementedError, match="first derivatives only"):
        jax.eval_shape(jax.hessian(f), 0.3)
