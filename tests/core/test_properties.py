"""Row-sparse gradients of any kind, by each policy, against the dense rule and NumPy."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import optzoo
from optzoo import CATALOG, SparseRows
from optzoo.rules import leafwise
from optzoo.testing import samples


class Slots(NamedTuple):
    mean: Any
    calls: Any


def rule(g, x, s, t):
    mean, calls = 0.5 * s.mean + g, s.calls + 1
    return -mean * (1 + x**2) / calls, Slots(mean, calls)


def own(policy):
    return leafwise(rule, slots=Slots(optzoo.rules.zeros, optzoo.rules.full(2)), rows=policy)


OPTIMIZERS = {
    "own lazy": ("lazy", own(optzoo.rules.lazy)),
    "own dense": ("dense", own(optzoo.rules.dense)),
    "own touched": ("touched", own(optzoo.rules.touched)),
    "own linear": ("linear", leafwise(lambda g, x, s, t: (-t * g, s), rows=optzoo.rules.linear)),
} | {
    name: (CATALOG[name].rows, samples.make(CATALOG[name]))
    for name in ("ftrl", "rmsprop", "adam", "nadam", "power_sign", "gradient_descent")
}
of_each = pytest.mark.parametrize("name", OPTIMIZERS)
often = settings(derandomize=True, deadline=None, max_examples=30, database=None)


@functools.cache
def update(name):
    return jax.jit(OPTIMIZERS[name][1].update)


def train(name, grads, x, state):
    """The parameters and the state after an update, in which there is nothing at padding."""
    updates, state = update(name)(grads, state, x)
    if not isinstance(updates, SparseRows):
        return np.asarray(x + updates), state
    padding = (updates.indices < 0) | (updates.indices >= len(x))
    if OPTIMIZERS[name][0] != "linear":  # which leaves the rows as they come
        assert not np.any(np.asarray(updates.values)[np.asarray(padding)])
    x = np.array(x)
    np.add.at(x, np.asarray(updates.indices)[~padding], np.asarray(updates.values)[~padding])
    return x, state


# Few shapes, for each has to be compiled: how many rows are listed, and how many there are.
SHAPES = st.sampled_from([(0, 5), (7, 1), (7, 5)])


class Case(NamedTuple):
    """Quarters, whose sums are exact."""

    x: Any
    first: Any  # the gradient of a dense step before
    indices: Any  # some repeated, some padding, some out of range
    values: Any


@st.composite
def cases(draw, shapes=SHAPES):
    n, num_rows = draw(shapes)
    integers = lambda low, high, size: draw(
        st.lists(st.integers(low, high), min_size=size, max_size=size)
    )
    quarters = lambda rows: np.array(integers(-8, 8, 2 * rows), "float32").reshape(rows, 2) / 4
    indices = np.array(integers(-2, num_rows + 2, n), "int32")
    values = quarters(n)
    # What stands at padding does not matter.
    values[(indices < 0) | (indices >= num_rows)] = draw(st.sampled_from([0, 1, np.nan, np.inf]))
    return Case(quarters(num_rows), quarters(num_rows), indices, values)


def real(case):
    return [(i, v) for i, v in zip(case.indices, case.values, strict=True) if 0 <= i < len(case.x)]


def rows(case):
    return SparseRows(case.indices, case.values, len(case.x))


def dense(case):
    total = np.zeros_like(case.x)
    for i, v in real(case):
        total[i] += v
    return total


def before(name, case):
    """The parameters and the state after a dense step."""
    tx = OPTIMIZERS[name][1]
    return train(name, case.first, case.x, tx.init(case.x))


def close(got, want):
    for ours, theirs in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


# The policies


@of_each
@often
@given(case=cases())
def test_policy(name, case):
    policy, _ = OPTIMIZERS[name]
    start, old = before(name, case)
    moved, new = train(name, rows(case), start, old)
    want, wanted = train(name, dense(case), start, old)
    touched = np.isin(np.arange(len(case.x)), [i for i, _ in real(case)])
    close(moved[touched], want[touched])
    rest = moved[~touched], want[~touched], start[~touched]
    slots = [
        (np.asarray(ours), np.asarray(theirs), np.asarray(olds))
        for ours, theirs, olds in zip(*map(samples.slots, (new, wanted, old)), strict=True)
    ]
    close([ours[touched] for ours, _, _ in slots], [theirs[touched] for _, theirs, _ in slots])
    if policy in ("lazy", "touched", "linear"):
        np.testing.assert_array_equal(rest[0], rest[2])
    else:
        close(rest[0], rest[1])
    for ours, theirs, olds in slots:
        if policy == "lazy":
            np.testing.assert_array_equal(ours[~touched], olds[~touched])
        else:
            close(ours[~touched], theirs[~touched])


@of_each
@often
@given(case=cases(), data=st.data())
def test_order_does_not_matter(name, case, data):
    order = np.array(data.draw(st.permutations(range(len(case.indices)))), int)
    start = before(name, case)
    shuffled = case._replace(indices=case.indices[order], values=case.values[order])
    close(train(name, rows(shuffled), *start), train(name, rows(case), *start))


@of_each
@often
@given(whole=cases(st.sampled_from([(7, 1), (7, 5)])))
def test_a_row_may_come_in_parts(name, whole):
    """Of the first four rows three give a part of their values to the indices of the others."""
    num_rows = len(whole.x)
    indices, values = whole.indices.copy(), np.nan_to_num(whole.values, posinf=1.0)
    parts = values[4:].copy()
    indices[4:] = num_rows
    merged = whole._replace(indices=indices, values=values)
    indices, values = indices.copy(), values.copy()
    indices[4:] = indices[:3]
    values[:3] -= parts
    split = whole._replace(indices=indices, values=values)
    start = before(name, whole)
    close(train(name, rows(split), *start), train(name, rows(merged), *start))


# Transformations before an optimizer


def after(tx, g):
    return tx.update(g, tx.init(None), None)[0]


@jax.jit
def prepared(g, other, array):
    add = lambda a, b: (a + b).to_dense()
    return {
        "dense": g.to_dense(),
        "other": other.to_dense(),
        "coalesced": g.coalesce().to_dense(),
        "in a fixed order": after(optzoo.rows.coalesce(deterministic=True), g).to_dense(),
        "densified": after(optzoo.rows.densify(), g),
        "clipped": after(optzoo.rows.on_values(optax.clip(0.5)), g).to_dense(),
        "norm": after(optzoo.clip_by_global_norm(1.0), {"x": array, "g": g}),
        "sum": add(g, other),
        "sum of coalesced": add(g.coalesce(), other.coalesce()),
        "sum at equal indices": add(g, g.with_values(2 * g.values)),
        "left": g + array,
        "right": array + g,
    }


@often
@given(case=cases(), scale=st.sampled_from([-1.0, 2.0]))
def test_preparations_agree_with_dense(case, scale):
    """And so do sums of rows with rows and with arrays."""
    other = case._replace(indices=case.indices[::-1].copy(), values=scale * case.values[::-1])
    got = prepared(rows(case), rows(other), case.x)
    want, others = dense(case), dense(other)
    for name in ("dense", "coalesced", "in a fixed order", "densified"):
        np.testing.assert_array_equal(got[name], want, err_msg=name)
    np.testing.assert_array_equal(got["clipped"], np.clip(want, -0.5, 0.5))
    for name in ("sum", "sum of coalesced"):
        np.testing.assert_array_equal(got[name], want + others, err_msg=name)
    np.testing.assert_array_equal(got["sum at equal indices"], 3 * want)
    for name in ("left", "right"):
        np.testing.assert_array_equal(got[name], case.x + want, err_msg=name)
    clipped, _ = optax.clip_by_global_norm(1.0).update({"x": case.x, "g": want}, optax.EmptyState())
    norm = got["norm"]
    close({"x": norm["x"], "g": norm["g"].to_dense()}, clipped)


def test_rows_of_tables_of_different_lengths_do_not_add():
    """Padding of the shorter one is a row of the longer one."""
    short, long = (SparseRows(jnp.array([5]), jnp.array([7.0]), n) for n in (5, 7))
    for pair in ((short, long), (long, short)):
        with pytest.raises(ValueError, match=r"\(5,\).*\(7,\)|\(7,\).*\(5,\)"):
            sum(pair[1:], pair[0])
