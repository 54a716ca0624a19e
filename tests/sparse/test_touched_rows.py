"""Which rows an optimizer moves, for lookups in every pair of branches, loops and calls.

A touched row moves by its momentum whatever its gradient, so a row that is touched by mistake is
seen. All cases are in one loss: each has a block of rows of one of two tables.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import optzoo
from optzoo import lookup

BLOCK = 6  # rows of a case
PADDING = -1  # in the ids of a step


class Container(NamedTuple):
    """A branch, a loop or a call around ``f(table, ids, bits)``.

    The lowest bits decide what runs; ``f`` gets the others.
    """

    run: Callable[..., Any]  # (f, table, ids, bits): the sum of what f gives
    # (ids, bits): of each call of f the ids and bits, and whether it is differentiated
    calls: Callable[..., Any]


def halves(ids):
    return ids.reshape(2, -1)


def through(ids, bits):
    return [(ids, bits, True)]


def twice(ids, bits):
    return [(half, bits ^ k, True) for k, half in enumerate(halves(ids))]


def cond(f, table, ids, bits):
    args = table, ids, bits >> 1
    return lax.cond(bits & 1 == 1, f, lambda table, ids, bits: 0.0, *args)


def calls_of_cond(ids, bits):
    return [(ids, bits >> 1, True)] if bits & 1 else []


def switch(f, table, ids, bits):
    rest = bits >> 2
    branches = [
        lambda: 0.0,
        lambda: f(table, ids[::-1], rest),
        lambda: f(table, ids[:2], rest) + f(table, ids[2:], rest),
    ]
    return lax.switch(bits & 3, branches)  # 3 is the last branch, too


def calls_of_switch(ids, bits):
    parts = [[], [ids[::-1]], [ids[:2], ids[2:]]][min(bits & 3, 2)]
    return [(part, bits >> 2, True) for part in parts]


def scan(f, table, ids, bits):
    step = lambda total, x: (total + f(table, x[0], bits ^ x[1]), None)
    return lax.scan(step, 0.0, (halves(ids), jnp.arange(2)))[0]


def fori_loop(f, table, ids, bits):
    """The table is in the carry."""
    of = lambda k: lax.dynamic_index_in_dim(halves(ids), k, keepdims=False)
    step = lambda k, carry: (carry[0], carry[1] + f(carry[0], of(k), bits ^ k))
    return lax.fori_loop(0, 2, step, (table, 0.0))[1]


def map_(f, table, ids, bits):
    return jnp.sum(lax.map(lambda x: f(table, x[0], bits ^ x[1]), (halves(ids), jnp.arange(2))))


def vmap(f, table, ids, bits):
    return jnp.sum(jax.vmap(lambda half: f(table, half, bits))(halves(ids)))


def while_loop(f, table, ids, bits):
    """It has no gradient, and touches nothing; it is a part of the value."""
    still = lax.stop_gradient(table)
    once = lambda c: (c[0] - 1, c[1] + f(still, following(ids), bits))
    return f(table, ids, bits) + lax.while_loop(lambda c: c[0] > 0, once, (2, 0.0))[1]


def calls_of_while(ids, bits):
    return [(ids, bits, True), *2 * [(following(ids), bits, False)]]


def call(transform, f, table, ids, bits):
    """The table is not among the arguments."""
    return transform(lambda ids, bits: f(table, ids, bits))(ids, bits)


def following(ids):
    return (ids + 1) % BLOCK


CONTAINERS = {
    "cond": Container(cond, calls_of_cond),
    "switch": Container(switch, calls_of_switch),
    "scan": Container(scan, twice),
    "fori_loop": Container(fori_loop, twice),
    "map": Container(map_, twice),
    "vmap": Container(vmap, lambda ids, bits: [(half, bits, True) for half in halves(ids)]),
    "while_loop": Container(while_loop, calls_of_while),
    "jit": Container(functools.partial(call, jax.jit), through),
    "checkpoint": Container(functools.partial(call, jax.checkpoint), through),
}
CASES = [(outer, inner) for outer in CONTAINERS for inner in CONTAINERS]
NUM_ROWS = BLOCK * -(-len(CASES) // 2)
SHAPES = [(NUM_ROWS, 2), (NUM_ROWS,)]  # the cases take turns


def value_of(n, table, ids, bits):
    """Of the n-th case."""

    def leaf(table, ids, bits):
        ids = jnp.where(ids == PADDING, NUM_ROWS, ids + n // 2 * BLOCK)
        rows = lookup(table, ids)
        return 0.5 * jnp.sum(rows**2 * expand(1.0 + np.arange(len(ids), dtype="float32"), rows))

    outer, inner = (CONTAINERS[name].run for name in CASES[n])
    return outer(functools.partial(inner, leaf), table, ids, bits)


def loss_of(some):
    def loss(tables, ids, bits):
        values = [value_of(n, tables[n % 2], ids, bits) for n in some]
        return sum(values), jnp.stack(values)

    return loss


def expected(some, tables, ids, bits):
    """By NumPy: the values of some cases, the gradients, and which rows are touched."""
    values = []
    gradients = [np.zeros_like(x) for x in tables]
    touched = [np.zeros(NUM_ROWS, bool) for _ in tables]
    for n in some:
        x, g, seen = (arrays[n % 2] for arrays in (tables, gradients, touched))
        outer, inner = (CONTAINERS[name].calls for name in CASES[n])
        values.append(0.0)
        for part, rest, is_outside in outer(ids, bits):
            for each, _, is_inside in inner(part, rest):
                real = each != PADDING
                places, weights = each[real] + n // 2 * BLOCK, 1.0 + np.flatnonzero(real)
                rows = x[places] * expand(weights, x)
                values[-1] += 0.5 * np.sum(rows * x[places])
                if is_outside and is_inside:
                    np.add.at(g, places, rows)
                    seen[places] = True
    return values, gradients, touched


def expand(mask, x):
    return mask.reshape(-1, *(1,) * (x.ndim - 1))


def steps():
    """All bits that decide, each with ids of its own; at times padding, or row 0 alone."""
    rng = np.random.default_rng(0)
    ids = rng.integers(1, BLOCK, (16, 4))
    ids[rng.random(ids.shape) < 0.1] = PADDING
    ids[rng.random(ids.shape) < 0.1] = 0
    ids[::5] = ids[::5, :1]
    return [(each.astype("int32"), np.int32(bits)) for bits, each in enumerate(ids)]


def arrays(seed):
    rng = np.random.default_rng(seed)
    return [(1 + rng.random(shape)).astype("float32") for shape in SHAPES]


def train(tx, state, some):
    """After each step the tables before and after it, the state, the values and its batch."""
    step = optzoo.minimize(loss_of(some), tx, has_aux=True, sparse="require")
    tables = [jnp.array(x) for x in arrays(0)]
    for batch in steps():
        before = jax.device_get(tables)
        tables, state, _, values = step(tables, state, *batch)
        yield before, jax.device_get(tables), state, values, batch


def test_lazy():
    rate, decay = 1e-3, 0.9
    some, sums, counts = range(len(CASES)), arrays(1), []
    count = optax.stateless(lambda gs, _: counts.extend(len(g.ids) for g in gs) or gs)
    tx = optax.chain(count, optzoo.momentum(rate, decay))
    state = optzoo.set_slot(tx.init(arrays(0)), "momentum", [jnp.array(a) for a in sums])
    for before, after, _, values, batch in train(tx, state, some):
        wanted, gradients, touched = expected(some, before, *batch)
        np.testing.assert_allclose(values, wanted, rtol=1e-5)
        for k, (x, new) in enumerate(zip(before, after, strict=True)):
            moved = (x != new).reshape(NUM_ROWS, -1).any(1)
            np.testing.assert_array_equal(moved, touched[k], err_msg=f"{batch}")
            mask = expand(touched[k], x)
            sums[k] = np.where(mask, decay * sums[k] + gradients[k], sums[k])
            np.testing.assert_allclose(new, np.where(mask, x - rate * sums[k], x), rtol=1e-5)
    # The program has a row for each id: four of each case, and of each of two branches.
    rows = [4 * 2 ** names.count("switch") for names in CASES]
    assert counts == [sum(rows[::2]), sum(rows[1::2])]


def test_deferred():
    """The rows are read before the loss, and those that no id names are deferred.

    Each container is in two cases; a ``while_loop`` in none, since its table would be caught up.
    """
    rate, names = 1e-2, [name for name in CONTAINERS if name != "while_loop"]
    some = [CASES.index(pair) for pair in zip(names, names[1:] + names[:1], strict=True)]
    tx, tables = optzoo.caught_up(optzoo.adam(rate), mask=True), arrays(0)
    m, v = ([np.zeros(shape) for shape in SHAPES] for _ in "mv")
    run = train(tx, tx.init(tables), some)
    for t, (_, after, state, values, batch) in enumerate(run, 1):
        wanted, gradients, touched = expected(some, tables, *batch)
        np.testing.assert_allclose(values, wanted, rtol=1e-5)
        for k, g in enumerate(gradients):
            np.testing.assert_array_equal(state.last[k] == t, touched[k], err_msg=f"{batch}")
            m[k], v[k] = 0.9 * m[k] + 0.1 * g, 0.999 * v[k] + 0.001 * g**2
            size = rate * np.sqrt(1 - 0.999**t) / (1 - 0.9**t)
            tables[k] = tables[k] - size * m[k] / (np.sqrt(v[k]) + 1e-8)
            here = touched[k]
            np.testing.assert_allclose(after[k][here], tables[k][here], rtol=1e-5)
