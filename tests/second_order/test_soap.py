"""SOAP: blocks, options, rows, types, derivatives and programs; tests/golden has the original's."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec

import optzoo
from optzoo import SparseRows
from optzoo.testing.samples import avals, last, run, side_by_side, step_of

SHAPES = {"w": (4, 4), "v": (3,), "s": ()}


def gradients(steps, shapes=SHAPES):
    """Stacked over the steps."""
    rng = np.random.default_rng(0)
    return {k: rng.normal(size=(steps, *s)).astype("float32") for k, s in shapes.items()}


def close(got, want, rtol=1e-5, atol=1e-6):
    chex.assert_trees_all_close(got, want, rtol=rtol, atol=atol)


# What a step is


def test_the_first_gradient_makes_the_basis_only():
    grads = gradients(2)
    tx = optzoo.transforms.scale_by_soap()
    updates, states = run(tx, jax.tree.map(lambda g: g[:1], grads))
    state = last(states)
    assert not np.any(updates["w"]) and np.all(updates["v"]) and np.all(updates["s"])
    assert not np.any(state.slots.m["w"]) and not np.any(state.slots.v["w"])
    g = grads["w"][0]
    for i, matrix in enumerate((g @ g.T, g.T @ g)):
        q = state.slots.basis["w"][i]
        close(state.slots.statistics["w"][i], 0.05 * matrix)
        close(q.T @ q, np.eye(4), atol=1e-5)
        turned = q.T @ matrix @ q
        close(turned, np.diag(np.diag(turned)), atol=1e-4)
    # In the basis of one gradient that gradient is diagonal: a step of Adam on its singular values.
    again = {name: np.stack([a[0], a[0]]) for name, a in grads.items()}
    updates, _ = run(optzoo.transforms.scale_by_soap(eps=0.1), again)
    u, s, v = np.linalg.svd(g)
    one = lambda s: s / (s + 0.1 / np.sqrt(0.05))
    close(updates["w"][1], u * one(s) @ v, rtol=1e-4, atol=1e-4)


def test_what_has_no_basis_takes_steps_of_adam():
    grads = gradients(5, {"v": (3,), "s": (), "large": (3, 4), "none": (0, 3)})
    betas = {"b1": 0.9, "b2": 0.99, "eps": 1e-3}
    txs = {
        "soap": optzoo.transforms.scale_by_soap(max_matrix_size=2, **betas),
        "adam": optzoo.transforms.scale_by_adam(**betas),
    }
    updates, states = run(side_by_side(txs), grads)
    close(updates["soap"], updates["adam"])
    close(states["soap"].slots.m, states["adam"].slots.m)
    assert jax.tree.leaves(states["soap"].slots.basis) == []


def test_refreshes_find_the_eigenvectors():
    """Of statistics that do not change."""
    g = np.diag([4.0, 3, 2, 1]).astype("float32") @ np.linalg.qr(gradients(1)["w"][0])[0]
    noise = np.linalg.qr(gradients(2)["w"][1])[0]
    tx = optzoo.transforms.scale_by_soap(preconditioner_interval=1)
    take = jax.jit(tx.update)
    _, state = take(g, tx.init(g))
    slots = state.slots._replace(basis=(noise, noise))
    state = state._replace(slots=slots)
    for _ in range(60):
        _, state = take(g, state)
    for q, a in zip(state.slots.basis, state.slots.statistics, strict=True):
        turned = q.T @ a @ q
        close(turned, np.diag(np.diag(turned)), atol=1e-3)


def test_times_of_refreshes():
    grads = {"w": gradients(12)["w"]}
    intervals = {"number": 3, "schedule": lambda k: 3.0}
    txs = {
        name: optzoo.transforms.scale_by_soap(preconditioner_interval=interval)
        for name, interval in intervals.items()
    }
    updates, states = run(side_by_side(txs), grads)
    close(updates["schedule"], updates["number"])
    start = txs["number"].init({"w": grads["w"][0]}).slots.basis["w"][0]
    bases = [start, *states["number"].slots.basis["w"][0]]
    new = [not np.array_equal(*pair) for pair in itertools.pairwise(bases)]
    assert [t for t, is_new in enumerate(new, 1) if is_new] == [1, 4, 7, 10]


def test_blocks_are_separate():
    grads = {"w": gradients(9, {"w": (4, 6)})["w"]}
    options = {"preconditioner_interval": 2}
    got, states = run(optzoo.transforms.scale_by_soap(block_size=2, **options), grads)
    slots = last(states).slots
    parts = {f"{i}{j}": grads["w"][:, i : i + 2, j : j + 2] for i in (0, 2) for j in (0, 2, 4)}
    want, apart = run(optzoo.transforms.scale_by_soap(**options), parts)
    close({k: got["w"][:, int(k[0]) :, int(k[1]) :][:, :2, :2] for k in parts}, want, atol=1e-5)
    assert slots.m["w"].shape == slots.v["w"].shape == (6, 2, 2)
    close(slots.v["w"], np.stack([last(apart).slots.v[k] for k in parts]), rtol=1e-4)


def test_blocks_that_do_not_divide():
    grads = gradients(9, {"w": (5, 7), "t": (3, 2, 5)})
    updates, states = run(
        optzoo.transforms.scale_by_soap(block_size=3, preconditioner_interval=2), grads
    )
    state = last(states)
    chex.assert_tree_all_finite((updates, states))
    assert state.shared["num_failed_bases"] == 0
    for q in jax.tree.leaves(state.slots.basis):
        close(q @ q.mT, np.broadcast_to(np.eye(q.shape[-1]), q.shape), atol=1e-5)


def test_merged_dimensions():
    grads = gradients(5, {"w": (2, 2, 4)})
    got, states = run(optzoo.transforms.scale_by_soap(merge_dims=True, block_size=4), grads)
    want, _ = run(optzoo.transforms.scale_by_soap(), {"w": grads["w"].reshape(5, 4, 4)})
    close(got["w"].reshape(5, 4, 4), want["w"])
    assert last(states).slots.m["w"].shape == (2, 2, 4)


def test_one_side():
    """That of the smallest dimension, the first of those of one size; it is not cut elsewhere."""
    grads = gradients(6, {"wide": (3, 5), "tall": (5, 3), "cube": (4, 3, 5), "square": (2, 2)})
    got, states = run(
        optzoo.transforms.scale_by_soap(one_sided=True, preconditioner_interval=2), grads
    )
    full = jax.tree.map(np.shape, last(states).slots.basis)
    assert full == {
        "wide": ((3, 3), ()), "tall": ((), (3, 3)), "cube": ((), (3, 3), ()), "square": ((2, 2), ())
    }  # fmt: skip
    square = {k: g for k, g in grads.items() if k != "square"}
    want, _ = run(
        optzoo.transforms.scale_by_soap(max_matrix_size=3, preconditioner_interval=2), square
    )
    close({k: got[k] for k in square}, want)
    _, states = run(
        optzoo.transforms.scale_by_soap(one_sided=True, block_size=2), {"w": grads["wide"]}
    )
    basis = last(states).slots.basis["w"]
    assert basis[0].shape == (2, 2, 2) and basis[1] == ()


def test_weight_decay():
    x, mask = jax.tree.map(lambda g: jnp.ones(g.shape[1:]), gradients(1)), ("w",)
    tx, plain = optzoo.soap(0.1, weight_decay=0.5, mask=mask), optzoo.soap(0.1)
    updates, without = (
        jax.jit(lambda x, t=t: t.update(x, t.init(x), x)[0])(x) for t in (tx, plain)
    )
    close(updates["w"] - without["w"], -0.05 * x["w"])
    close((updates["v"], updates["s"]), (without["v"], without["s"]))
    with pytest.raises(ValueError, match="params"):
        tx.update(x, tx.init(x))


# Gradients of other kinds


def test_rows_become_dense():
    rows = SparseRows(jnp.array([1, 3, 1, 5]), jnp.arange(8.0).reshape(4, 2), 5)
    tx, x = optzoo.transforms.scale_by_soap(preconditioner_interval=1), jnp.ones((5, 2))
    state, take = tx.init(x), jax.jit(tx.update)
    for _ in range(3):
        update, new = take(rows, state)
        chex.assert_trees_all_equal((update, new), take(rows.to_dense(), state))
        state = new


def test_no_gradient_no_change():
    """Of its leaf; the others move as without it."""
    grads = gradients(3, {"a": (2, 2), "b": (2, 2)})
    update = jax.jit(optzoo.transforms.scale_by_soap(preconditioner_interval=1).update)
    first, second, third = (jax.tree.map(lambda g, i=i: jnp.asarray(g[i]), grads) for i in range(3))
    tx = optzoo.transforms.scale_by_soap(preconditioner_interval=1)
    state = update(second, update(first, tx.init(first))[1])[1]
    updates, after = update({**third, "b": None}, state)
    assert updates["b"] is None
    slots = lambda state, name: [tree[name] for tree in state.slots]
    chex.assert_trees_all_equal(slots(after, "b"), slots(state, "b"))
    want, wanted = update(third, state)
    close((updates["a"], slots(after, "a")), (want["a"], slots(wanted, "a")))


def test_a_basis_that_is_not_finite_is_not_used():
    grads = gradients(5, {"a": (3, 3), "b": (3, 3)})
    tx = optzoo.transforms.scale_by_soap(preconditioner_interval=2)
    want, _ = run(tx, grads)
    spoilt = {**grads, "b": grads["b"].copy()}
    spoilt["b"][1, 0, 0] = np.nan
    got, states = run(tx, spoilt)
    state = last(states)
    assert state.shared["num_failed_bases"] == 4  # two dimensions, at steps 3 and 5
    close(got["a"], want["a"])
    chex.assert_tree_all_finite(state.slots.basis)
    zeros = {"a": np.zeros((5, 3, 3), "float32")}
    tx = optzoo.transforms.scale_by_soap(preconditioner_interval=2, eps=0.0)
    updates, states = run(tx, zeros)
    assert not np.any(updates["a"]) and not np.any(states.shared["num_failed_bases"])


@pytest.mark.parametrize("of_params", ["bfloat16", "float16"])
def test_half_precision_parameters_have_bases_in_single(of_params):
    x = {"w": jnp.ones((4, 3), of_params), "v": jnp.ones(3, of_params)}
    tx = optzoo.slots_dtype(optzoo.soap(0.1, preconditioner_interval=1), "bfloat16")
    state = tx.init(x)
    dtypes = lambda tree: {str(a.dtype) for a in jax.tree.leaves(tree)}
    assert dtypes(state[0].slots.m) == dtypes(state[0].slots.v) == {"bfloat16"}
    assert dtypes((state[0].slots.statistics, state[0].slots.basis)) == {"float32"}
    updates, after = jax.jit(tx.update)(x, state, x)
    assert avals(updates) == avals(x) and avals(after) == avals(state)


# Derivatives


def after(g, steps=4):
    """A smooth function of the gradients of all steps."""
    tx = optzoo.transforms.scale_by_soap(preconditioner_interval=2, eps=1e-3)
    _, updates = jax.lax.scan(lambda s, g: tx.update(g, s)[::-1], tx.init(g[0]), g)
    return jnp.sum(jnp.sin(jnp.cumsum(updates) / 10))


@pytest.mark.unique
def test_kl_statistics_by_their_formula(x64):
    """Of each step from the state before it; the eigenvalues of the second array are the least."""
    rng = np.random.default_rng(0)
    grads = [
        {"cube": rng.normal(size=(2, 3, 4)), "small": 1e-9 * rng.normal(size=(3, 2))}
        for _ in range(24)
    ]
    tx = optzoo.transforms.scale_by_soap(
        shampoo_b2=0.5, preconditioner_interval=2, kl_statistics=True
    )
    with x64(True):
        state, update = tx.init(jax.tree.map(jnp.asarray, grads[0])), jax.jit(tx.update)
        states = [state]
        for g in grads:
            states.append(update(g, states[-1])[1])
    states = jax.device_get(states)
    for t, (g, before, after) in enumerate(zip(grads, states, states[1:], strict=False)):
        for name, x in g.items():
            old, new = (type(s.slots)(*(slot[name] for slot in s.slots)) for s in (before, after))
            turned = x
            for i, q in enumerate(old.basis):
                turned = np.moveaxis(np.tensordot(turned, q, (i, 0)), -1, i)
            for i, d in enumerate(x.shape):
                scaled = turned
                for j, values in enumerate(old.eigenvalues):
                    if j != i:
                        scaled = np.moveaxis(np.moveaxis(scaled, j, -1) / np.sqrt(values), -1, j)
                flat = lambda a, i=i, d=d: np.moveaxis(a, i, 0).reshape(d, -1)
                gram, values = flat(x) @ flat(x).T / (x.size / d), old.eigenvalues[i]
                if t:
                    whitened = old.basis[i] @ flat(scaled)
                    gram = old.statistics[i] / 2 + whitened @ whitened.T / (x.size / d) / 2
                    values = values / 2 + np.mean(flat(scaled) ** 2, axis=1) / 2
                    values = np.maximum(values, 1 / 4000**2)
                np.testing.assert_allclose(new.statistics[i], gram, rtol=1e-12, atol=1e-12)
                np.testing.assert_allclose(new.eigenvalues[i], values, rtol=1e-12)
    assert np.all(states[-1].slots.eigenvalues["small"][0] == 1 / 4000**2)


def test_a_staggered_refresh_by_its_formula(x64):
    """Each step from the state before it, given which bases are new; and which these are."""
    rng, interval, shapes = np.random.default_rng(0), 3, {"a": (4, 3), "b": (3, 3), "c": (3,)}
    grads = [{k: rng.normal(size=shape) for k, shape in shapes.items()} for _ in range(11)]
    tx = optzoo.transforms.scale_by_soap(preconditioner_interval=interval, stagger=True)
    with x64(True):
        state, update = tx.init(jax.tree.map(jnp.asarray, grads[0])), jax.jit(tx.update)
        found = [(None, state)]
        for g in grads:
            found.append(update(g, found[-1][1]))
    found, times = jax.device_get(found), {}
    turn = lambda x, bases: np.einsum("ij,ik,jl->kl", x, *bases)
    back = lambda x, bases: turn(x, [q.T for q in bases])
    for t, g in enumerate(grads, 1):
        (_, old), (updates, new) = found[t - 1 : t + 1]
        for name in ("a", "b"):
            x = g[name]
            m, v, statistics, basis = (slot[name] for slot in old.slots)
            h = turn(x, basis) if t > 1 else 0 * x
            m, v = 0.95 * m + 0.05 * h, 0.95 * v + 0.05 * h**2
            k = max(t - 1, 1)
            d = (1 - 0.95**k) ** 0.5 / (1 - 0.95**k) * m / (np.sqrt(v) + 1e-8)
            close(updates[name], back(d, basis), rtol=1e-10, atol=1e-12)
            close(new.slots.v[name], v, rtol=1e-10, atol=1e-12)
            plain = back(m, basis)
            close(new.slots.m[name], turn(plain, new.slots.basis[name]), rtol=1e-9, atol=1e-12)
            for i, (q, before) in enumerate(zip(new.slots.basis[name], basis, strict=True)):
                a = 0.95 * statistics[i] + 0.05 * (x @ x.T if i == 0 else x.T @ x)
                close(new.slots.statistics[name][i], a, rtol=1e-10, atol=1e-12)
                if np.array_equal(q, before):
                    continue
                times.setdefault((name, i), []).append(t)
                if t == 1:
                    close(q.T @ a @ q, np.diag(np.diag(q.T @ a @ q)), atol=1e-12)
                else:
                    order = np.argsort(-np.sum(before * (a @ before), axis=0))
                    by_qr = np.linalg.qr((a @ before)[:, order])[0]
                    close(np.abs(by_qr.T @ q[:, order]), np.eye(len(q)), atol=1e-8)
    # All first; then each third step, and of the three of one size one in each step.
    assert times == {
        ("a", 0): [1, 4, 7, 10],
        ("a", 1): [1, 2, 5, 8, 11],
        ("b", 0): [1, 3, 6, 9],
        ("b", 1): [1, 4, 7, 10],
    }


def test_derivatives_are_difference_quotients(x64):
    with x64(True):
        rng = np.random.default_rng(3)
        g, towards = (rng.normal(size=(4, 3, 3)) for _ in range(2))
        f = jax.jit(lambda g: (*jax.jvp(after, (g,), (towards,)), jax.grad(after)(g)))
        want = (f(g + 1e-6 * towards)[0] - f(g - 1e-6 * towards)[0]) / 2e-6
        _, forward, gradient = f(g)
        reverse = np.vdot(gradient, towards)
        np.testing.assert_allclose([forward, reverse], [want, want], rtol=1e-5)


@pytest.mark.parametrize("shape", [(4, 2), (2, 5), (1, 3)])
def test_equal_eigenvalues_have_finite_derivatives(shape):
    g, gradient = gradients(4, {"w": shape})["w"], jax.jit(jax.grad(after))
    g[:, 0] = 0
    for some in (g, np.zeros_like(g)):
        chex.assert_tree_all_finite(gradient(some))


def test_second_derivatives_are_refused():
    g = jnp.asarray(gradients(2)["w"])
    with pytest.raises(NotImplementedError, match="soap has first derivatives only"):
        jax.eval_shape(jax.hessian(after), g)


# Programs


@pytest.mark.parametrize("stagger", [False, True])
def test_a_step_is_in_place(stagger):
    """With and without a refresh: no array of the state moves."""
    tx = optzoo.soap(block_size=8, preconditioner_interval=2, stagger=stagger)
    x = {"w": jnp.ones((16, 16)), "u": jnp.ones((8, 8)), "b": jnp.ones(16)}
    grads, state = jax.tree.map(jnp.cos, x), tx.init(x)
    train = jax.jit(step_of(tx), donate_argnums=(0, 1))
    where = lambda *trees: [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(trees)]
    before = where(x, state)
    for _ in range(5):
        x, state = train(x, state, grads)
        assert where(x, state) == before


@pytest.mark.optimized
def test_nothing_of_the_size_of_a_matrix_is_copied_without_need():
    """Of the state only ``m``; the rest of the temporaries are gradient and step in the basis."""
    tx, x = optzoo.soap(), jnp.ones((64, 64))
    program = jax.jit(step_of(tx), donate_argnums=(0, 1)).lower(x, tx.init(x), x).compile()
    [entry] = [part for part in program.as_text().split("\n\n") if part.startswith("ENTRY")]
    assert entry.count(" copy(") <= 1 and entry.count(" conditional(") == 1


def several(grads, **more):
    tx = optzoo.transforms.scale_by_soap(block_size=2, preconditioner_interval=2, **more)
    state = tx.init(jax.tree.map(lambda g: g[0], grads))
    return jax.lax.scan(lambda s, g: tx.update(g, s)[::-1], state, grads)


OF_REPLICAS = gradients(5, {"a": (4, 2), "b": (3,), "c": (2, 2)})


@functools.cache
def alone(stagger):
    return jax.jit(functools.partial(several, stagger=stagger))(OF_REPLICAS)


@pytest.mark.parametrize(
    ("check", "stagger"), [(None, False), (False, False), (True, False), (None, True), (True, True)]
)
def test_replicas_share_the_work(check, stagger):
    """Of which three do not divide any batch; by vmap, and by shard_map with and without check."""
    shared = functools.partial(several, axis_name="r", stagger=stagger)
    if check is None:
        got = jax.jit(jax.vmap(shared, axis_name="r", axis_size=3, in_axes=None))(OF_REPLICAS)
        got = jax.tree.map(lambda a: a[2], got)
    else:
        mesh, spec = Mesh(np.array(jax.devices()[:3]), ("r",)), PartitionSpec()
        mapped = jax.shard_map(shared, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check)
        got = jax.jit(mapped)(OF_REPLICAS)
    close(got, alone(stagger))


# Arguments


@pytest.mark.parametrize("interval", [1, 2.0, lambda k: 2])
def test_staggered_refreshes_need_an_int(interval):
    with pytest.raises(
        ValueError, match="preconditioner_interval must be an int above 1 with stagger=True"
    ):
        optzoo.soap(preconditioner_interval=interval, stagger=True)


@pytest.mark.parametrize("i", range(2))
def test_structural_arguments_cannot_be_injected(i):
    static = optzoo.CATALOG["soap"].static
    given = {"block_size": 2, "max_matrix_size": 3}
    left = tuple(name for name in static if name != static[i])
    with pytest.raises(TypeError, match=f"{static[i]} must be an int.* static_args"):
        jax.eval_shape(optax.inject_hyperparams(optzoo.soap, left)(0.1, **given).init, jnp.ones(2))


def test_injected_numbers_are_those():
    options = {"b1": 0.8, "b2": 0.9, "shampoo_b2": 0.7, "eps": 1e-3, "preconditioner_interval": 2}
    factory = optax.inject_hyperparams(optzoo.soap, optzoo.CATALOG["soap"].static)
    txs = {"injected": factory(0.1, **options), "plain": optzoo.soap(0.1, **options)}
    updates, _ = run(side_by_side(txs), gradients(5))
    close(updates["injected"], updates["plain"])
