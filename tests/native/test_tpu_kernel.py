"""The kernel of rows on TPUs, interpreted on the CPU, computes what XLA computes."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.pallas import tpu as pltpu

import optzoo
from optzoo import CATALOG, SparseRows
from optzoo.jaxprs.graph import read
from optzoo.native.calls import Call
from optzoo.native.groups import Unsupported
from optzoo.native.rows_groups import RowsGroup
from optzoo.native.tpu_kernel import tpu_kernel

from ..selection import KINDS, chosen_first
from .guarded import native_calls
from .test_step import LAZY, ROUNDINGS, adam, both, check_close, make, rows, table

# XLA does as well on their slots, which have one element for each row; and linear ones need no
# merging.
LEFT_TO_XLA = {name for name in LAZY if "row_wise" in name or name.startswith("partial_row")}
LEFT_TO_XLA |= {name for name in LAZY if CATALOG[name].rows == "linear"}
LEFT_TO_XLA -= {"row_wise_lamb", "row_wise_lars"}
WITH_KERNEL = sorted({*LAZY} - LEFT_TO_XLA)


MANY = (600, 6)


def many_rows(seed, ids=700):
    """Gradients of rows in several blocks."""
    rng = np.random.default_rng(seed)
    chosen = jnp.asarray(rng.integers(-1, MANY[0] + 1, ids), jnp.int32)
    return SparseRows(chosen, jnp.asarray(rng.normal(size=(ids, MANY[1])), jnp.float32), MANY[0])


@pytest.fixture
def kernels(monkeypatch):
    """The groups for which kernels are made. They take the place of native calls."""
    return interpreted(monkeypatch, True)


def interpreted(monkeypatch, how):
    made = []

    def run(self, known):
        if not isinstance(self.parts[0], RowsGroup):
            return as_before(self, known)
        args = [jnp.asarray(read(known, v)) for v in self.ins]
        results = tpu_kernel(self.parts[0], interpret=how)(*args)
        made.append(self.parts[0])
        known.update(zip(self.outs, results, strict=True))

    as_before = Call.run
    monkeypatch.setattr(Call, "run", run)
    return made


@pytest.mark.parametrize("name", chosen_first(WITH_KERNEL, [n for n in KINDS if n in WITH_KERNEL]))
def test_optimizers(kernels, name):
    expected, got = both(make(name), {"t": table()}, lambda seed: {"t": rows(seed)})
    assert kernels
    check_close(expected, got)


@pytest.mark.parametrize("name", sorted(LEFT_TO_XLA))
def test_what_is_left_to_xla(kernels, name):
    with pytest.raises(Unsupported, match=r"vectors of several elements|are not merged"):
        both(make(name), {"t": table()}, lambda seed: {"t": rows(seed)}, steps=1)
    assert not kernels


@pytest.mark.parametrize(
    ("tx", "dtype", "reason"),
    [
        (adam(dtype="bfloat16"), jnp.float32, "rows of bfloat16 cannot be copied"),
        (optzoo.lazy_adam(0.1), jnp.bfloat16, "rows of bfloat16 cannot be copied"),
        (optzoo.lazy_adam(0.1), jnp.float64, "rows of float64 cannot be copied"),
    ],
    ids=["slots", "bfloat16", "float64"],
)
def test_what_a_tpu_cannot_copy(kernels, tx, dtype, reason):
    with jax.enable_x64(dtype == jnp.float64), pytest.raises(Unsupported, match=reason):
        g = rows(0).astype(dtype)
        both(tx, {"t": table().astype(dtype)}, lambda seed: {"t": g}, steps=1)
    assert not kernels


@pytest.mark.parametrize("ids", [2, 3, 24, 128, 700])
def test_numbers_of_ids(kernels, ids):
    """From one block that is not full to six, which take the memory of each other."""
    drawn = lambda seed: many_rows(seed, ids)
    expected, got = both(optzoo.lazy_adam(0.1), table(shape=MANY), drawn)
    check_close(expected, got)
    assert kernels


@pytest.mark.unique
def test_copies_are_waited_for(monkeypatch):
    """On a simulated TPU on which rows arrive, and leave, as late as they may."""
    params = pltpu.InterpretParams(dma_execution_mode="on_wait", uninitialized_memory="nan")
    kernels = interpreted(monkeypatch, params)
    monkeypatch.setattr("optzoo.native.tpu_kernel._BLOCK", 8)
    drawn = lambda seed: rows(seed, ids=40)  # in five blocks
    expected, got = both(optzoo.lazy_adam(0.1), table(), drawn, steps=1)
    check_close(expected, got)
    assert kernels


@pytest.mark.parametrize(
    "tx",
    {
        "packed": adam(dtype="float32", packed=True),
        "packed, random": adam(dtype="bfloat16", packed=True, stochastic=True),
        "decay": optzoo.decoupled_weight_decay(
            optzoo.momentum(0.1, 0.9), weight_decay_per_step=0.1
        ),
        "proof": optzoo.on_rows(optax.adamw(0.1)),
        "clipped": optax.chain(optzoo.clip_by_global_norm(1.0), optzoo.adagrad(0.1)),
        "schedule": optzoo.adamax(optax.linear_schedule(0.3, 0.1, 2)),
    }.items(),
    ids=lambda case: case[0],
)
def test_wrappers(kernels, tx):
    name, tx = tx
    params = {"t": table(shape=(50, 8)), "u": table(1, (30, 4)), "w": table(2, (3, 5))}

    def draw(seed):
        return {
            "t": rows(seed, (50, 8), 150),
            "u": rows(seed, (30, 4), 20),
            "w": table(seed, (3, 5)),
        }

    expected, got = both(tx, params, draw, required=False)
    assert len(kernels) == 2
    # A value near the middle of two of 16 bits may be rounded to the other one.
    check_close(expected, got, 2**-7 if "random" in name else ROUNDINGS)


def test_rows_of_padding_alone(kernels):
    params = {"t": table()}
    nothing = SparseRows(jnp.array([50, -1, 1000]), jnp.ones((3, 6)), 50)
    expected, got = both(optzoo.lazy_adam(0.1), params, lambda seed: {"t": nothing})
    check_close(expected, got)
    np.testing.assert_array_equal(got[0]["t"], params["t"])
    assert kernels


class OneSlot(NamedTuple):
    m: Any


@pytest.mark.unique
def test_arrays_for_all_rows_and_by_position(kernels):
    """A rate for each column, and one for each position of an id."""
    rates = jnp.linspace(0.1, 1.0, 6)[None]

    def rule(g, x, slots, t):
        del x, t
        by_position = jnp.arange(len(g), dtype=jnp.float32)[:, None] / 100
        m = slots.m + jnp.broadcast_to(rates, g.shape) * g
        return -g * rates * (1 + m) * (1 + by_position), OneSlot(m)

    tx = optzoo.rules.leafwise(rule, slots=OneSlot(optzoo.rules.zeros))
    expected, got = both(tx, table(shape=MANY), many_rows)
    assert (1, 6) in [v.shape for v in kernels[0].streams]
    check_close(expected, got)


@pytest.mark.unique
def test_numbers_of_rows_and_columns_of_a_table(kernels):
    """They are those of the table, wherever its rows are in the list of ids."""

    def update(g, state, params=None):
        g = g.coalesce()
        number = lambda axis: jax.lax.broadcasted_iota(jnp.float32, state.shape, axis)
        new = g.gather(state) * g.gather(number(1) + number(0) / 100) + g.values
        return g.with_values(-new), g.scatter(state, new)

    tx = optax.GradientTransformation(jnp.ones_like, update)
    expected, got = both(tx, table(shape=MANY), many_rows)
    assert kernels
    check_close(expected, got)


class TwoSlots(NamedTuple):
    wide: Any
    narrow: Any


def test_the_longest_rows():
    """Of tables of different widths: two rows of all have to fit into the fast memory."""
    eighth = lambda g: g[:, : g.shape[1] // 8]

    def rule(g, x, slots, t):
        del x, t
        return -g, TwoSlots(slots.wide + g, slots.narrow + eighth(g))

    def kernel(width):
        g = SparseRows(jnp.array([1, 3]), jnp.ones((2, width)), 4)
        _, [call] = native_calls(tx, jnp.zeros((4, width)), g)
        assert {table.shape[1] for table in call.parts[0].tables} == {width, width // 8}
        return tpu_kernel(call.parts[0])

    slots = TwoSlots(optzoo.rules.zeros, lambda x: jnp.zeros_like(eighth(x)))
    tx = optzoo.rules.leafwise(rule, slots=slots)
    kernel(110_000)
    with pytest.raises(Unsupported, match="its rows are too long for the fast memory"):
        kernel(140_000)
