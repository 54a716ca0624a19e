"""The random bits that round slots in updates: uniform, and no two of them alike.

They are found from the updates alone. A slot is made a float32 with ``k`` in the 16 bits that
bfloat16 drops: it is rounded up if ``k`` and the random bits overflow. Updates from the same state
have the same bits, so 16 of them, each with another ``k``, tell all bits of every element.
"""

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import optzoo
from optzoo import SparseRows
from optzoo.core.optimizer import about_of
from optzoo.core.rows import Shard
from optzoo.deferred.tables import map_tables, whole
from optzoo.state.storage.at_random import places_of_rows
from optzoo.state.types import LeafwiseState, map_nodes
from optzoo.train.sharded import update_deferred

ROWS, WIDTH = 32, 32
SHAPE, SIZE = (ROWS, WIDTH), ROWS * WIDTH
DEVICES = 4


# Statistics

ALIKE = 0.25  # a correlation that chance does not give: eight times its deviation


def standard(streams):
    """With a mean of zero and a variance of one."""
    streams = np.asarray(streams, "float64")
    streams = streams - streams.mean(-1, keepdims=True)
    return streams / streams.std(-1, keepdims=True)


def check_apart(streams):
    """No sequence is like another one, nor like itself or another one moved by some elements.

    Args:
        streams: of shape ``(many, parts, SIZE)``; the parts move together.
    """
    many, parts, size = streams.shape
    streams = standard(streams)
    flat = streams.reshape(-1, size)
    here = flat @ flat.T / size
    np.fill_diagonal(here, 0)
    assert abs(here).max() < ALIKE
    waves = np.fft.rfft(streams)
    for k in range(many):
        moved = np.fft.irfft(np.sum(waves[k].conj() * waves, 1), size) / size / parts
        moved[k, 0] = 0
        assert abs(moved).max() < ALIKE / parts**0.5, f"{k} and {np.argmax(abs(moved)) // size}"


def check_random(words, number):
    """Words of so many bits, of shape ``(many, SIZE)``: each bit of them is random."""
    bits = words[:, None] >> np.arange(number)[:, None] & 1
    assert abs(bits.mean(-1) - 0.5).max() < ALIKE / 2
    assert abs(bits.mean((0, 2)) - 0.5).max() < ALIKE / 2 / len(words) ** 0.5
    check_apart(bits)


# Bits of updates


class Slots(NamedTuple):
    a: Any
    b: Any
    c: Any
    d: Any
    e: Any


# One, and what bfloat16 drops.
RULE = optzoo.rules.leafwise(
    lambda g, x, s, t: (g, Slots(*[1 + g] * 5)), slots=Slots(*[optzoo.rules.full(1)] * 5)
)
ORDER = np.random.default_rng(0).permutation(ROWS)
PARAMS = {name: np.zeros(SHAPE, "float32") for name in ("a", "b", "rows")}


def found_bits(ups, names, number):
    """For each parameter the random bits of its slots, of shape ``(5, SIZE)``.

    Args:
        ups: ``ups(gradients)`` gives by parameter which elements of ``(5, *SHAPE)`` are rounded up.
        names: of the parameters.
        number: of the bits that are dropped.
    """
    words = {name: np.zeros((5, *SHAPE), np.int64) for name in names}
    for j, bit in itertools.product(range(5), reversed(range(number))):
        guess = {name: w[j] + (1 << bit) for name, w in words.items()}
        unit = 2.0**-23
        up = ups({name: ((2**number - w) * unit).astype("float32") for name, w in guess.items()})
        for name, w in words.items():
            w[j] = np.where(up[name][j], guess[name], w[j])
    return {name: w.reshape(5, SIZE) for name, w in words.items()}


@functools.cache
def compiled(dtype):
    tx = optzoo.slots_dtype(RULE, dtype, stochastic=True, packed=True)

    def update(gradients, count, seed):
        rows = SparseRows(ORDER, gradients["rows"][ORDER], ROWS)
        at = lambda s: s._replace(count=count)
        state = map_nodes(LeafwiseState, at, tx.init(PARAMS))
        gradients = {**gradients, "rows": rows}
        state = tx.update(gradients, state, PARAMS, rounding_seed=seed)[1]
        slots = [optzoo.get_slot(state, name) for name in Slots._fields]
        return jax.tree.map(lambda *each: jnp.stack(each) > 1, *slots)

    return jax.jit(update)


@functools.cache
def bits(dtype, number, count, seed):
    ups = lambda gradients: jax.device_get(compiled(dtype)(gradients, count, seed))
    return found_bits(ups, PARAMS, number)


@pytest.mark.parametrize(("dtype", "number"), [("bfloat16", 16), ("float16", 13)])
def test_bits_of_updates(dtype, number):
    """Of rows, elements, slots, parameters, steps and seeds."""
    runs = [(0, 0), (1, 0), (0, 1), (7, 5)] if number == 16 else [(0, 0)]
    words = [bits(dtype, number, *run)[name] for run in runs for name in PARAMS]
    check_random(np.concatenate(words), number)


# Bits of shards


MESH = Mesh(np.array(jax.devices()[:DEVICES]), ("d",))


@pytest.mark.parametrize("is_64", [False, True])
def test_places_of_rows_of_long_tables(is_64, x64):
    """They wrap at 32 bits, also where integers have 64."""
    ids = np.array([0, 3, 40_000_000, 2**31 - 2], np.int32)
    want = (7 + ids.astype(np.uint64) * 6 * 64) % 2**32
    with x64(is_64):
        found = places_of_rows(jnp.uint32(7), jnp.asarray(ids), (2**31 - 1, 6, 64))
    assert found.dtype == np.uint32
    np.testing.assert_array_equal(found, want.astype(np.uint32))


def spec_of(x):
    return PartitionSpec("d") if x.ndim and len(x) == ROWS else PartitionSpec()


def rows_of_shard(values):
    shard = Shard(("d",), DEVICES * len(values), False)
    return SparseRows(jnp.arange(len(values)), values, len(values), shard=shard)


def test_bits_of_shards():
    """A table in shards has the bits that it has in one piece."""
    tx = optzoo.slots_dtype(RULE, "bfloat16", stochastic=True, packed=True)

    def update(values):
        x = {"rows": values}
        state = tx.update({"rows": rows_of_shard(values)}, tx.init(x), x)[1]
        slots = [optzoo.get_slot(state, name)["rows"] for name in Slots._fields]
        return jnp.stack(slots) > 1

    specs = {"in_specs": PartitionSpec("d"), "out_specs": PartitionSpec(None, "d")}
    run = jax.jit(jax.shard_map(update, mesh=MESH, **specs))
    ups = lambda gradients: {"rows": np.asarray(run(gradients["rows"]))}
    np.testing.assert_array_equal(
        found_bits(ups, ["rows"], 16)["rows"], bits("bfloat16", 16, 0, 0)["rows"]
    )


# Bits of rows that are caught up

KEPT, DEFERRED = 0.9, 3  # of a slot in a step, and the steps that a row is deferred
DEFERRABLE = optzoo.slots_dtype(
    optzoo.rmsprop(0.1, KEPT, momentum=KEPT, centered=True), "bfloat16", stochastic=True
)
TX = optzoo.caught_up(DEFERRABLE, mask=True, dense=True)
TABLES = {name: np.ones(SHAPE, "float32") for name in ("a", "b")}
NONE = {name: SparseRows(np.full(1, ROWS), np.zeros((1, WIDTH), "float32"), ROWS) for name in "ab"}
# Of the numbers that bfloat16 has, one that becomes the middle of two others.
START = min(1.5 + np.arange(64) / 128, key=lambda x: abs(KEPT**DEFERRED * x * 128 % 1 - 0.5))


@jax.jit
def deferred(count):
    """Tables and a state after rows with equal slots were deferred."""
    inner = DEFERRABLE.init(TABLES)
    fill = lambda s: s._replace(
        count=count, slots=jax.tree.map(lambda a: jnp.full_like(a, START), s.slots)
    )
    state = optzoo.rows.take_over(TX, TABLES, map_nodes(LeafwiseState, fill, inner))
    for _ in range(DEFERRED):
        state = TX.update(NONE, state, TABLES)[1]
    return TABLES, state


def slots_of(state):
    """The slots of both tables, of shape ``(6, SIZE)``."""
    slots = [optzoo.get_slot(state.inner, name) for name in ("rms", "mg", "momentum")]
    return np.stack([np.float32(slot[k]).reshape(SIZE) for slot in slots for k in TABLES])


@functools.cache
def current(count):
    """The slots after all rows have been caught up."""
    return slots_of(optzoo.rows.catch_up(*deferred(count))[1])


def test_bits_of_rows_that_are_caught_up():
    """Of rows, elements, slots, tables and steps."""
    slots = [current(count) for count in (0, 5)]
    assert len(np.unique(slots)) == 2
    check_random((np.concatenate(slots) > START * KEPT**DEFERRED).astype(int), 1)


def test_bits_of_shards_that_are_caught_up():
    """As in one piece. Rounded as they are caught up, and again by an update, no two are alike."""
    params, state = deferred(0)
    place = lambda x: jax.device_put(x, NamedSharding(MESH, spec_of(x)))
    flushed = optzoo.rows.catch_up(*jax.tree.map(place, (params, state)))[1]
    sharding = optzoo.sharded.RowSharding(ROWS, DEVICES, "div", "d", multiple=1)

    def on_device(params, state):
        zeros = {name: rows_of_shard(jnp.zeros_like(x)) for name, x in params.items()}
        gs = jax.tree.structure(params).flatten_up_to(zeros)
        updated = update_deferred(about_of(TX).deferred, params, state, gs, {})[1]
        current = lambda _, table: whole(table.divided(sharding.axes))
        return updated, map_tables(params, state, current)[1]

    specs = jax.tree.map(spec_of, (params, state))
    out_specs = (specs[1], specs[1])
    mapped = jax.shard_map(on_device, mesh=MESH, in_specs=specs, out_specs=out_specs)
    updated, caught_up = jax.jit(mapped)(params, state)
    for got in (flushed, caught_up):
        np.testing.assert_array_equal(slots_of(got), current(0))
    check_apart(slots_of(updated)[:, None])
