"""Shampoo: closed forms, extensions of the original, rows, types and programs."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import optzoo
from optzoo import SparseRows
from optzoo.testing.samples import avals, last, run, side_by_side, step, step_of

MATRIX = {"w": (3, 2)}
ALL_RANKS = {"w": (3, 2), "v": (3,), "s": ()}


def gradients(steps, shapes=MATRIX):
    """Stacked over the steps."""
    rng = np.random.default_rng(0)
    return {k: rng.normal(size=(steps, *s)).astype("float32") for k, s in shapes.items()}


def close(got, want, rtol=1e-5, atol=1e-6):
    chex.assert_trees_all_close(got, want, rtol=rtol, atol=atol)


def norms(x):
    """For each step."""
    return np.sqrt(np.sum(np.square(x), axis=tuple(range(1, x.ndim))))


def unit(x):
    return x / np.maximum(norms(x), 1e-30).reshape(-1, *(1,) * (x.ndim - 1))


# Closed forms


def test_diagonal_gradients():
    """Each element of a diagonal has its own sums, and each of two dimensions half the power."""
    g = np.array([[1.0, -2, 0], [3, 0.5, 0], [-1, 4, 0]], "float32")
    grads = {"m": np.stack([np.diag(row) for row in g]), "s": g[:, 0]}
    options = {
        "gbar_decay": 0.5, "gbar_weight": 2.0, "mat_gbar_decay": 0.9, "mat_gbar_weight": 3.0,
        "eps": 0.1, "alpha": 0.7,
    }  # fmt: skip
    got, _ = run(optzoo.shampoo(lambda k: 1.0 / (1 + k), **options), grads)
    b, sums = 0.0, 0.0
    for t, row in enumerate(g.astype("float64"), 1):
        b, sums = 0.5 * b + 2 * row, 0.9 * sums + 3 * row**2
        want = -b * (sums / 3 + 0.1) ** -0.7 / t
        np.testing.assert_allclose(got["m"][t - 1], np.diag(want), rtol=1e-5, atol=1e-6)
        scalar = -b[0] * (sums[0] + 0.1) ** -0.7 / t
        np.testing.assert_allclose(got["s"][t - 1], scalar, rtol=1e-5)


def test_one_vector():
    """Of rank one: only its length changes."""
    g = {"v": np.array([[1.0, 2, -2]], "float32")}
    got, _ = run(optzoo.shampoo(1.0, eps=1.0), g)
    close(got["v"], -g["v"] * (9 / 3 + 1) ** -0.5)


def test_without_matrices():
    """A vector has AdaGrad; of a matrix each element has the sums of its row and its column."""
    grads = gradients(3, ALL_RANKS)
    grads["w"][:, 1], grads["v"][:, 2] = 0, 0
    txs = {"tx": optzoo.shampoo(1.0, 0), "adagrad": optzoo.adagrad(1.0, 1e-30)}
    got, _ = run(side_by_side(txs), grads)
    close(got["tx"]["v"], got["adagrad"]["v"])
    close(got["tx"]["s"], got["adagrad"]["s"])
    squares = np.cumsum(np.float64(grads["w"]) ** 2, axis=0)
    of_rows, of_columns = np.mean(squares, axis=2) * 2 / 3, np.mean(squares, axis=1) * 3 / 2
    of_rows[:, 1] = 1
    want = -grads["w"] / (of_rows[:, :, None] * of_columns[:, None]) ** 0.25
    close(got["tx"]["w"], want)
    assert not np.any(got["tx"]["w"][:, 1]) and not np.any(got["tx"]["v"][:, 2])


def test_a_diagonal_of_zero_takes_no_step():
    """Not even of gradients that are remembered: it has no epsilon."""
    g = {"v": np.array([[1, 2], [0, 2]], "float32")}
    got, _ = run(optzoo.shampoo(1.0, 0, gbar_decay=0.5, mat_gbar_decay=0.0), g)
    close(got["v"], -np.array([[1, 1], [0, 1.5]], "float32"))


def test_the_recipe_is_shampoo_with_other_settings():
    shapes = {"w": (3, 3, 2), "v": (3,), "large": (9, 2)}
    grads = gradients(4, shapes)
    ours = {"momentum": 0.8, "nesterov": True, "weight_decay": 0.1, "mask": ("w", "v")}
    recipe = optzoo.blocked_shampoo(
        0.3, 0.8, 0.7, 1e-4, block_size=6, max_matrix_size=8, preconditioner_interval=2,
        statistics_interval=2, grafting_b2=0.9, grafting_eps=1e-3, start_step=1, **ours,
    )  # fmt: skip
    plain = optzoo.shampoo(
        0.3, 8, gbar_decay=0.8, gbar_weight=1 - 0.8, mat_gbar_decay=0.7, mat_gbar_weight=1 - 0.7,
        preconditioner_interval=2, statistics_interval=2, eps=1e-4, relative_eps=True,
        block_size=6, merge_dims=True, skip_vectors=True, grafting="adam", grafting_b2=0.9,
        grafting_eps=1e-3, start_step=1, **ours,
    )  # fmt: skip
    updates, states = run(side_by_side({"recipe": recipe, "plain": plain}), grads)
    close(updates["recipe"], updates["plain"])
    close(states["recipe"], states["plain"])
    slots = last(states["recipe"])[0].slots
    assert [a.shape for a in slots.H["w"]] == [(3, 3), (6, 6)] and slots.H["v"] == ()
    assert [a.shape for a in slots.Gbar["large"]] == [(9,), (2, 2)]


def test_the_recipe_has_steps_of_adam_for_vectors():
    """In each element, not only their length; and until its start for everything."""
    grads = gradients(3, ALL_RANKS)
    txs = {"recipe": optzoo.blocked_shampoo(1.0, start_step=2), "adam": optax.adam(1.0)}
    got, _ = run(side_by_side(txs), grads)
    for leaf, steps in (("v", 3), ("s", 3), ("w", 2)):
        close(got["recipe"][leaf][:steps], got["adam"][leaf][:steps])


def test_the_size_of_all_gradients_does_not_matter_to_the_recipe():
    recipe = optzoo.blocked_shampoo(1.0, preconditioner_interval=1, start_step=0, block_size=3)
    txs = {"one": recipe, "thousand": optax.chain(optax.scale(1000.0), recipe)}
    got, _ = run(side_by_side(txs), gradients(3, {"w": (5, 4)}))
    close(got["one"], got["thousand"], rtol=1e-3, atol=1e-3)


# One side, and statistics that minimize a divergence


def test_one_side_has_the_smallest_matrix_alone():
    """And the whole power; a parameter without a matrix takes the simple step."""
    shapes = {"w": (3, 5), "kernel": (2, 6, 3), "large": (9, 8), "half": (9, 2)}
    grads = gradients(3, shapes)
    tx = optzoo.shampoo(1.0, 6, one_sided=True, eps=0.1, grafting="adagrad", grafting_eps=0.0)
    got, states = run(side_by_side({"tx": tx, "adagrad": optzoo.adagrad(1.0, 1e-30)}), grads)
    slots = last(states["tx"])[0].slots
    shapes_of = lambda tree: {k: [np.shape(a) for a in arrays] for k, arrays in tree.items()}
    sides = {
        "w": [(3, 3), (0,)],
        "kernel": [(2, 2), (0,), (0,)],
        "large": [],
        "half": [(0,), (2, 2)],
    }
    assert shapes_of(slots.H) == shapes_of(slots.Gbar) == sides
    close(got["tx"]["large"], got["adagrad"]["large"])
    total = 0.0
    for t, g in enumerate(np.float64(grads["kernel"])):
        total = total + np.einsum("iab,jab->ij", g, g)
        w, v = np.linalg.eigh(total / 2 + 0.1 * np.eye(2))
        want = unit(-np.einsum("ij,jab->iab", (v * w**-0.5) @ v.T, g)[None])[0]
        np.testing.assert_allclose(unit(got["tx"]["kernel"])[t], want, rtol=1e-4, atol=1e-5)


def test_kl_statistics_beside_a_diagonal():
    """A diagonal has those of the gradient times the matrix, and the matrix the plain ones."""
    grads = gradients(3, {"w": (7, 2)})
    tx = optzoo.shampoo(1.0, 4, kl_statistics=True, eps=0.1, grafting="sgd")
    got, states = run(tx, grads)
    d, m, h = 0.0, 0.0, np.eye(2)
    for t, g in enumerate(np.float64(grads["w"])):
        d, m = d + np.sum((g @ h) ** 2, axis=1) / 7, m + g.T @ g
        w, v = np.linalg.eigh(m + 0.1 * np.eye(2))
        h = (v * w**-0.25) @ v.T
        want = d[:, None] ** -0.25 * g @ h
        np.testing.assert_allclose(unit(got["w"])[t], unit(-want[None])[0], rtol=1e-4, atol=1e-5)
    close(last(states)[0].slots.Gbar["w"][0], np.float32(d))


def test_a_pseudo_inverse_leaves_other_directions_alone():
    """Rows and columns that no gradient has do not move, whatever the momentum adds to them."""
    grads = gradients(3, {"w": (4, 5)})
    grads["w"][:, 2] = grads["w"][:, :, 3] = 0
    tx = optzoo.shampoo(1.0, root="pseudo_inverse", eps=1e-6, relative_eps=True)
    got, states = run(tx, grads)
    assert np.all(np.isfinite(got["w"]))
    roots = last(states)[0].slots.H["w"]
    for h, i in zip(roots, (2, 3), strict=True):
        np.testing.assert_allclose(h[i], 0, atol=1e-6)
        np.testing.assert_allclose(h[:, i], 0, atol=1e-6)


# Grafting


def by_adam(g, decay):
    """Of a constant beta1 of 0.8, and beta2."""
    m = v = 0.0
    for t, g_t in enumerate(np.float64(g), 1):
        m, v = 0.8 * m + 0.2 * g_t, decay * v + (1 - decay) * g_t**2
        yield m / (1 - 0.8**t) / (np.sqrt(v / (1 - decay**t)) + 1e-8)


SIMPLE = {
    "sgd": optax.identity(),
    "adagrad": optax.chain(optzoo.adagrad(1.0, 1e-30), optax.scale(-1.0)),
    "rmsprop": optax.scale_by_rms(0.999, 1e-8, eps_in_sqrt=False),
}
OPTIONS = {"eps": 0.01}


@functools.cache
def grafted():
    grads = gradients(4)
    txs = {k: optzoo.transforms.scale_by_shampoo(grafting=k, **OPTIONS) for k in SIMPLE}
    txs["none"] = optzoo.transforms.scale_by_shampoo(**OPTIONS)
    txs["mean"] = optzoo.transforms.scale_by_shampoo(grafting="adagrad", gbar_decay=0.5, **OPTIONS)
    txs["start"] = optzoo.transforms.scale_by_shampoo(grafting="rmsprop", start_step=2, **OPTIONS)
    txs["start alone"] = optzoo.transforms.scale_by_shampoo(
        start_step=2, gbar_weight=2.0, **OPTIONS
    )
    txs["momentum"] = optzoo.transforms.scale_by_shampoo(momentum=0.9, **OPTIONS)
    txs["nesterov"] = optzoo.transforms.scale_by_shampoo(momentum=0.9, nesterov=True, **OPTIONS)
    txs |= {f"plain {k}": tx for k, tx in SIMPLE.items()}
    return grads, run(side_by_side(txs), grads)[0]


@pytest.mark.parametrize("name", SIMPLE)
def test_grafting(name):
    _, got = grafted()
    close(norms(got[name]["w"]), norms(got[f"plain {name}"]["w"]))
    close(unit(got[name]["w"]), unit(got["none"]["w"]))


def test_grafting_of_adagrad_on_a_sum():
    """Its squares are those of the gradients themselves."""
    grads, got = grafted()
    b, sums = 0.0, 0.0
    for g, p in zip(grads["w"], got["mean"]["w"], strict=True):
        b, sums = 0.5 * b + g, sums + g**2
        np.testing.assert_allclose(np.linalg.norm(p), np.linalg.norm(b / sums**0.5), rtol=1e-5)


@pytest.mark.parametrize("decay", [0.0, 0.9])
def test_grafting_of_adam(decay):
    """On the mean of the gradients, without the bias of either."""
    grads, options = gradients(4), {"gbar_decay": 0.8, "gbar_weight": 1 - 0.8, "alpha": 0.3}
    txs = {
        "adam": optzoo.transforms.scale_by_shampoo(grafting="adam", grafting_b2=decay, **options),
        "none": optzoo.transforms.scale_by_shampoo(**options),
    }
    got, _ = run(side_by_side(txs), grads)
    close(norms(got["adam"]["w"]), norms(np.stack(list(by_adam(grads["w"], decay)))))
    close(unit(got["adam"]["w"]), unit(got["none"]["w"]))


def test_grafting_of_adam_on_a_plain_sum():
    """Whose decay is one: its mean is the sum over the number of steps."""
    grads = {"w": np.full((3, 2, 2), 3.0, "float32")}
    options = {"max_matrix_size": 0, "gbar_decay": 1.0, "gbar_weight": 2.0, "grafting": "adam"}
    got, _ = run(optzoo.transforms.scale_by_shampoo(**options), grads)
    close(norms(got["w"]), np.full(3, 2.0))  # a one for each element


def test_start_step():
    grads, got = grafted()
    first = lambda name: jax.tree.map(lambda u: u[:2], got[name])
    rest = lambda name: jax.tree.map(lambda u: u[2:], got[name])
    close(first("start"), first("plain rmsprop"))
    close(rest("start"), rest("rmsprop"))
    close(first("start alone"), jax.tree.map(lambda g: 2 * g[:2], grads))
    close(rest("start alone"), jax.tree.map(lambda u: 2 * u, rest("none")))
    assert not np.allclose(got["rmsprop"]["w"][1], got["plain rmsprop"]["w"][1])


def test_momentum():
    """A sum of the steps, to which Nesterov adds the next one."""
    _, got = grafted()
    sums = 0.0
    for t, p in enumerate(got["none"]["w"]):
        sums = 0.9 * sums + p
        close(got["momentum"]["w"][t], sums)
        close(got["nesterov"]["w"][t], p + 0.9 * sums)


def test_weight_decay():
    """Of what the mask lets through, beside the whole step, times the rate."""
    grads = gradients(2, ALL_RANKS)
    options = {"max_matrix_size": 0, "momentum": 0.9, "start_step": 1}
    txs = {
        "none": optzoo.shampoo(0.5, **options),
        "all": optzoo.shampoo(0.5, weight_decay=0.1, **options),
        "paths": optzoo.shampoo(0.5, weight_decay=0.1, mask=("w",), **options),
        "tree": optzoo.shampoo(
            0.5, weight_decay=0.1, mask={"w": False, "v": True, "s": False}, **options
        ),
    }
    got, _ = run(side_by_side(txs), grads)
    decays = {"all": (1, 1, 1), "paths": (1, 0, 0), "tree": (0, 1, 0)}  # parameters are one
    for name, decayed in decays.items():
        for leaf, decay in zip("wvs", decayed, strict=True):
            close(got[name][leaf], got["none"][leaf] - 0.5 * 0.1 * decay)
    with pytest.raises(ValueError, match="requires the current value of parameters"):
        update = lambda g: txs["all"].update(g, txs["all"].init(g))
        jax.eval_shape(update, {"w": grads["w"][0]})


def test_zero_gradients_give_zero_steps():
    """Also with a mean that is zero, and after the others."""
    grads = gradients(3, {"w": (2, 2), "v": (2,)})
    for g in grads.values():
        g[0] = g[2] = 0
    txs = {
        kind: optzoo.transforms.scale_by_shampoo(0, grafting=kind, grafting_eps=0.0)
        for kind in ("sgd", "adagrad", "rmsprop", "adam")
    }
    txs["matrices"] = optzoo.transforms.scale_by_shampoo()
    txs["recipe"] = optzoo.blocked_shampoo(
        b1=0.0, preconditioner_interval=1, start_step=0, block_size=2
    )
    got, _ = run(side_by_side(txs), grads)
    for updates in got.values():
        for u in updates.values():
            np.testing.assert_array_equal(u[[0, 2]], 0)
            assert np.all(u[1] != 0)


# Shapes


def test_merged_and_skipped_dimensions():
    """A kernel is a matrix, and a vector takes the simple step."""
    grads = gradients(2, {"kernel": (2, 1, 2, 3), "v": (3,), "s": ()})
    options = {"grafting": "adagrad", "grafting_eps": 0.0, "max_matrix_size": 4}
    tx = optzoo.shampoo(1.0, merge_dims=True, skip_vectors=True, **options)
    got, states = run(side_by_side({"tx": tx, "adagrad": optzoo.adagrad(1.0, 1e-30)}), grads)
    matrix = {"kernel": grads["kernel"].reshape(2, 4, 3)}
    want, _ = run(optzoo.shampoo(1.0, **options), matrix)
    close(got["tx"]["kernel"].reshape(2, 4, 3), want["kernel"])
    for leaf in "vs":
        close(got["tx"][leaf], got["adagrad"][leaf])
        assert states["tx"][0].slots.Gbar[leaf] == states["tx"][0].slots.H[leaf] == ()


@pytest.mark.parametrize("limit", [0, 9])
def test_leaves_without_elements(limit):
    x = {"none": jnp.ones((0, 3)), "empty": jnp.ones((0,)), "w": jnp.ones((2, 2))}
    tx = optzoo.shampoo(1.0, limit, grafting="sgd")
    updates, state = jax.jit(tx.update)(x, tx.init(x), x)
    assert avals(updates) == avals(x) and avals(state) == avals(tx.init(x))
    close(updates["w"], -x["w"])


def test_no_gradient_no_change():
    """Of its leaf; the others move as without it."""
    grads = gradients(2, {"a": (2, 2), "b": (2, 2)})
    tx = optzoo.transforms.scale_by_shampoo(momentum=0.9, gbar_decay=0.5, grafting="adam")
    update = jax.jit(tx.update)
    first, second = (jax.tree.map(lambda g, i=i: jnp.asarray(g[i]), grads) for i in (0, 1))
    _, state = update(first, tx.init(first))
    updates, after = update({**second, "b": None}, state)
    assert updates["b"] is None
    slots = lambda state, name: [tree[name] for tree in state.slots]
    chex.assert_trees_all_equal(slots(after, "b"), slots(state, "b"))
    without = lambda tree: {k: x for k, x in tree.items() if k != "b"}
    fewer = state._replace(slots=type(state.slots)(*map(without, state.slots)))
    want, wanted = update(without(second), fewer)
    close(without(updates), want)
    close(slots(after, "a"), slots(wanted, "a"))
    assert after.count == 2
    for old, new in zip(*(jax.tree.leaves(slots(s, "a")) for s in (state, after)), strict=True):
        assert np.any(old != new)
    nothing, still = update(dict.fromkeys(grads), state)
    assert nothing == dict.fromkeys(grads)
    chex.assert_trees_all_equal(still.slots, state.slots)


# Rows


ROWS = SparseRows(
    jnp.array([1, 3, 1, 5, -1]),
    jnp.array([[1.0, 2], [3, 4], [5, 6], [np.nan, 8], [9, np.inf]]), 5,
)  # fmt: skip


def table(**options):
    """A table, the optimizer, and its state after a dense step."""
    tx, x = optzoo.transforms.scale_by_shampoo(**options), jnp.cos(jnp.arange(10.0)).reshape(5, 2)
    update = jax.jit(tx.update)
    return update, x, update(x, tx.init(x))[1]


DENSE = {
    "a matrix of rows": {},
    "gbar decays": {"max_matrix_size": 0, "gbar_decay": 0.5},
    "statistics decay": {"max_matrix_size": 0, "mat_gbar_decay": 0.5},
    "no one knows": {"max_matrix_size": 0, "gbar_decay": lambda k: 0.0},
}


@pytest.mark.parametrize("options", DENSE.values(), ids=list(DENSE))
def test_rows_become_dense(options):
    update, x, state = table(grafting="adam", momentum=0.9, **options)
    got = update(ROWS, state, x)
    close(got, update(ROWS.coalesce().to_dense(), state, x), rtol=1e-6)
    rest = np.array([0, 2, 4])
    assert np.all(got[1].slots.momentum[rest] != state.slots.momentum[rest])


def test_rows_of_a_merged_dimension_become_dense():
    tx = optzoo.transforms.scale_by_shampoo(max_matrix_size=4, merge_dims=True)
    rows = SparseRows(jnp.array([0, 0]), jnp.ones((2, 6)), 1)
    updates, _ = jax.jit(tx.update)(rows, tx.init(jnp.ones((1, 6))))
    np.testing.assert_array_equal(updates, np.ones((1, 6)))


@pytest.mark.parametrize(("block_size", "grafting"), [(None, "adam"), (1, None)])
def test_rows_alone(block_size, grafting):
    """If the rows have only a diagonal, other rows are unchanged. It is not divided by its size."""
    options = {"grafting": grafting, "block_size": block_size}
    update, x, state = table(max_matrix_size=4, momentum=0.9, eps=1.0, **options)
    updates, after = update(ROWS, state, x)
    touched, rest = np.array([1, 3]), np.array([0, 2, 4])
    # Duplicates sum, padding does not matter, and nothing else moves.
    assert isinstance(updates, SparseRows)
    assert not np.any(updates.values[(updates.indices < 0) | (updates.indices >= 5)])
    dense = updates.to_dense()
    assert np.all(dense[touched] != 0) and not np.any(dense[rest])
    by_rows = lambda s: [s.Gbar[0].T, *jax.tree.leaves((s.graft, s.momentum))]
    for old, new in zip(by_rows(state.slots), by_rows(after.slots), strict=True):
        np.testing.assert_array_equal(new[rest], old[rest])
        assert np.all(new[touched] != old[touched])
    chex.assert_trees_all_equal(after.slots.gbar, state.slots.gbar)
    # By hand.
    g, old = np.array([[6.0, 8], [3, 4]]), jax.tree.map(np.float64, state.slots)
    if block_size:  # each column is a block
        diagonal = old.Gbar[0].T[touched] + g**2
        root = np.diag((old.Gbar[1][:, 0, 0] + np.sum(g**2, axis=0) + 1) ** -0.25)
    else:
        diagonal = (old.Gbar[0][touched] + np.sum(g**2, axis=1))[:, None]
        values, v = np.linalg.eigh((old.Gbar[1] + g.T @ g) / 2 + np.eye(2))
        root = v * values**-0.25 @ v.T
    p = diagonal**-0.25 * g @ root
    if grafting:
        second = 0.999 * old.graft[touched] + 0.001 * g**2
        d = g / (np.sqrt(second / (1 - 0.999**2)) + 1e-8)
        p *= np.linalg.norm(d) / np.linalg.norm(p)
    np.testing.assert_allclose(dense[touched], 0.9 * old.momentum[touched] + p, rtol=1e-5)


@pytest.mark.optimized
@pytest.mark.parametrize("block_size", [None, 4])
def test_rows_do_not_cost_what_the_table_costs(block_size):
    tx = optzoo.shampoo(
        0.1, max_matrix_size=100, block_size=block_size, grafting="adam", momentum=0.9
    )

    x = jnp.ones((50_000, 8))
    state, rows = tx.init(x), SparseRows(jnp.arange(16) % 11, jnp.ones((16, 8)), len(x))
    train = jax.jit(step_of(tx), donate_argnums=(0, 1)).lower(x, state, rows).compile()
    assert train.memory_analysis().temp_size_in_bytes < 0.05 * x.nbytes
    where = lambda *trees: [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(trees)]
    before = where(x, state)
    x, state = train(x, state, rows)
    assert where(x, state) == before
    assert np.all(x[:11] != 1) and np.all(x[11:] == 1)


# Types


def dtypes(tree):
    return {a.dtype.name for a in jax.tree.leaves(tree)}


ALL_SLOTS = {"gbar_decay": 0.9, "grafting": "adam", "momentum": 0.9, "block_size": 2}


def test_half_precision_parameters_have_statistics_in_single():
    tx = optzoo.transforms.scale_by_shampoo(**ALL_SLOTS)
    x = {"w": jnp.ones((3, 2), jnp.bfloat16), "v": jnp.ones(3, jnp.bfloat16)}
    assert dtypes(tx.init(x).slots) == {"float32"}
    state = optzoo.slots_dtype(tx, "bfloat16").init(x)
    updates, after = jax.jit(tx.update)(x, state)
    assert avals(after) == avals(state) and dtypes(updates) == {"bfloat16"}
    kinds = {name: dtypes(slot) for name, slot in after.slots._asdict().items()}
    assert kinds.pop("Gbar") == {"float32"}
    assert all(kind == {"bfloat16"} for kind in kinds.values())
    # In single precision as in the same numbers of single precision: only what is kept is rounded.
    wide = jax.tree.map(lambda a: a.astype("float32"), x)
    want, wanted = jax.jit(tx.update)(wide, tx.init(wide))
    close(after.slots.Gbar, wanted.slots.Gbar)
    close(jax.tree.map(lambda a: a.astype("float32"), updates), want, rtol=1e-2)


@pytest.mark.parametrize(
    ("of_params", "of_slots"), [("float32", "bfloat16"), ("bfloat16", "float32")]
)
def test_slots_in_another_dtype_but_for_the_statistics(of_params, of_slots):
    """A root needs those in single precision."""
    tx = optzoo.slots_dtype(optzoo.shampoo(**ALL_SLOTS), of_slots)
    x = {"w": jnp.ones((3, 2), of_params), "v": jnp.ones(3, of_params)}
    state = tx.init(x)
    for grads in (x, {**x, "w": SparseRows(jnp.array([1]), x["w"][:1], 3)}):
        updates, after = jax.eval_shape(tx.update, grads, state, x)
        assert avals(after) == avals(state) and dtypes(updates) == {of_params}
    kinds = {name: dtypes(slot) for name, slot in state[0].slots._asdict().items()}
    assert kinds.pop("Gbar") == {"float32"}
    assert all(kind == {of_slots} for kind in kinds.values())


def test_float64(x64):
    with x64(True):
        g = {"w": np.diag([1.0, 2])[None], "s": np.array([3.0])}
        got, states = run(optzoo.shampoo(1.0, eps=0.1), g)
        assert dtypes((got, states[0].slots)) == {"float64"}
        want = [1.0, 2] / np.sqrt(np.array([1.0, 4]) / 2 + 0.1)
        np.testing.assert_allclose(got["w"][0], -np.diag(want), rtol=1e-13)
        np.testing.assert_allclose(got["s"][0], -3 / np.sqrt(9.1), rtol=1e-13)


# Programs


def test_vmap_over_problems():
    tx, grads = (
        optzoo.blocked_shampoo(0.1, preconditioner_interval=2, start_step=0, block_size=2),
        gradients(2, {"w": (3, 2)}),
    )
    several = lambda x, g: functools.reduce(
        lambda xs, _: step(tx, g, *xs), range(2), (x, tx.init(x))
    )
    x = {"w": np.stack([np.ones((3, 2)), np.zeros((3, 2))]).astype("float32")}
    got = jax.jit(jax.vmap(several))(x, grads)
    one = jax.jit(several)
    for i in range(2):
        mine = lambda tree, i=i: jax.tree.map(lambda a: a[i], tree)
        close(mine(got), one(mine(x), mine(grads)), rtol=1e-5)


@pytest.mark.parametrize("stagger", [False, True])
def test_a_step_without_refresh_is_in_place(stagger):
    """And one with it: no array of the state moves."""
    tx = optzoo.blocked_shampoo(
        block_size=8, preconditioner_interval=3, stagger=stagger, statistics_interval=2
    )
    x = {"w": jnp.ones((16, 16)), "b": jnp.ones(16)}
    grads, state = jax.tree.map(jnp.copy, x), tx.init(x)
    train = jax.jit(step_of(tx), donate_argnums=(0, 1))
    where = lambda *trees: [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(trees)]
    before = where(x, state)
    for _ in range(3):
        x, state = train(x, state, grads)
        assert where(x, state) == before
    assert np.any(np.asarray(state[0].slots.H["w"][1]) != np.eye(8))


def test_sharded_parameters():
    """What has the shape of the parameter stays where it is; the matrices are where XLA likes.

    There are as many blocks as devices: JAX 0.9 cannot return 4 blocks that XLA puts on 8 devices.
    """
    mesh = Mesh(np.array(jax.devices()), ("d",))
    options = {"block_size": 4, "preconditioner_interval": 1, "start_step": 0, "momentum": 0.9}
    tx = optzoo.blocked_shampoo(eps=0.01, **options)
    x = jnp.cos(jnp.arange(128.0)).reshape(32, 4)
    sharded = jax.device_put(x, NamedSharding(mesh, PartitionSpec("d")))
    train = jax.jit(lambda x, state: step(tx, x, x, state))
    moved, state = train(sharded, tx.init(sharded))
    like_x = [slot for slot in (moved, *jax.tree.leaves(state)) if slot.shape == x.shape]
    assert [a.sharding.spec for a in like_x] == 4 * [PartitionSpec("d")]
    close((moved, state), train(x, tx.init(x)), rtol=1e-4, atol=1e-5)


# Arguments


@pytest.mark.parametrize(
    ("bad", "error", "says"),
    [
        ({"max_matrix_size": -1}, ValueError, "max_matrix_size must be at least 0"),
        ({"max_matrix_size": 2.5}, TypeError, "max_matrix_size must be an int"),
        ({"block_size": 0}, ValueError, "block_size must be at least 1"),
        ({"block_size": 1.5}, TypeError, "block_size must be an int"),
        ({"root": "cholesky"}, ValueError, "root must be None or one of .*newton.*cholesky"),
        ({"grafting": "lion"}, ValueError, "grafting must be one of .*adam.*lion"),
        ({"alpha": lambda k: 0.5, "root": "newton"}, TypeError, "alpha must be a plain number"),
        (
            {"alpha": lambda k: 0.5, "use_iterative_root": True},
            TypeError,
            "alpha must be a plain number for root='two_iterations'",
        ),
        (
            {"stagger": True},
            ValueError,
            "preconditioner_interval must be an int above 1 with stagger=True",
        ),
        (
            {"stagger": True, "preconditioner_interval": lambda k: 2},
            ValueError,
            "preconditioner_interval must be an int above 1 with stagger=True",
        ),
        ({"weight_decay": 0.1, "mask": 1}, TypeError, "mask must be a pattern of names"),
    ],
)
def test_bad_arguments(bad, error, says):
    """Ranges of numbers are tested with the catalogue."""
    with pytest.raises(error, match=f"^{says}"):
        optzoo.shampoo(**bad)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"b1": 1.0}, r"b1 must be in \[0, 1\)"),
        ({"eps": 0.0}, "eps must be positive"),
        ({"preconditioner_interval": 0}, "preconditioner_interval must be at least 1"),
        ({"statistics_interval": 0.5}, "statistics_interval must be at least 1"),
        (
            {"stagger": True, "preconditioner_interval": 1},
            "preconditioner_interval must be an int above 1 with stagger=True",
        ),
    ],
)
def test_errors_of_the_recipe_have_its_names(bad, says):
    with pytest.raises(ValueError, match=f"^{says}"):
        optzoo.blocked_shampoo(**bad)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"root": "newton", "alpha": 0.3}, r"multiple of 1 for root='newton', got 0\.3: .*rank 2"),
        ({"root": "auto", "alpha": 3}, "multiple of 1 for root='auto', got 3: .*rank 2"),
        (
            {"use_iterative_root": True, "alpha": 2.0},
            r"multiple of 2 for root='two_iterations', got 2\.0: rank / alpha is 1\.0 .*rank 2",
        ),
    ],
)
def test_orders_of_roots_that_are_no_integers_name_the_rank(options, says):
    tx, x = optzoo.shampoo(**options), jnp.ones((2, 2))
    with pytest.raises(ValueError, match=f"alpha must make rank / alpha a {says}"):
        tx.update(x, tx.init(x))


def test_an_order_that_is_an_integer_but_for_rounding():
    tx, x = (
        optzoo.transforms.scale_by_shampoo(root="newton", alpha=3 / 59),
        jnp.full((1, 1, 1), 8.0),
    )
    assert 3 / (3 / 59) < 59
    updates, _ = jax.jit(tx.update)(x, tx.init(x))
    np.testing.assert_allclose(updates, 8 * 64 ** (-3 / 59), rtol=1e-5)


@pytest.mark.parametrize("name", ["shampoo", "blocked_shampoo"])
def test_structural_arguments_cannot_be_injected(name):
    factory, static = getattr(optzoo, name), optzoo.CATALOG[name].static
    x = jnp.ones((2, 2))
    for i in range(len(static)):
        some = static[:i] + static[i + 1 :]
        with pytest.raises(
            TypeError, match=f"{static[i]} must be (an int|a plain number).* static_args"
        ):
            jax.eval_shape(optax.inject_hyperparams(factory, some)(0.1).init, x)
    tx = optax.inject_hyperparams(factory, static)(0.1)
    state = jax.eval_shape(tx.init, x)
    numbers = (
        {"eps", "preconditioner_interval", "start_step"} if name == "shampoo" else {"b1", "eps"}
    )
    assert numbers <= state.hyperparams.keys()


def test_injected_numbers_are_those():
    """All but the structural ones, into optimizers that then keep every sum."""
    options = {
        "gbar_decay": 0.0,
        "mat_gbar_decay": 1.0,
        "preconditioner_interval": 2,
        "start_step": 1,
        "alpha": 0.4,
    }
    options |= {"grafting": "adam", "momentum": 0.9, "statistics_interval": 2}
    factory = optax.inject_hyperparams(optzoo.shampoo, ("max_matrix_size",))
    txs = {"injected": factory(0.1, **options), "plain": optzoo.shampoo(0.1, **options)}
    got, _ = run(side_by_side(txs), gradients(4, {"w": (2, 2)}))
    close(got["injected"], got["plain"])
