"""The compiled programs of our updates, compared with optax's."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optzoo
from optzoo import CATALOG, SparseRows
from optzoo.first_order.adam import AdamSlots
from optzoo.rules import leafwise, zeros
from optzoo.testing.samples import step_of

from ..selection import KINDS, chosen_first

pytestmark = pytest.mark.optimized


def like_optax_adam(learning_rate, b1=0.9, b2=0.999, eps=1e-8):
    """The exact arithmetic of ``optax.adam`` as a rule."""

    def rule(g, x, s, t):
        m = (1 - b1) * g + b1 * s.m
        v = (1 - b2) * g**2 + b2 * s.v
        m_hat, v_hat = m / (1 - b1**t).astype(m.dtype), v / (1 - b2**t).astype(v.dtype)
        return -learning_rate * (m_hat / (jnp.sqrt(v_hat) + eps)), AdamSlots(m, v)

    return leafwise(rule, slots=AdamSlots(zeros, zeros))


def compiled_step(tx, num_leaves):
    params = [jnp.ones((8, 128)) for _ in range(num_leaves)]
    lowered = jax.jit(step_of(tx), donate_argnums=(0, 1)).lower(params, tx.init(params), params)
    return lowered.compile()


def cost(tx, num_leaves):
    """Fusions in the entry computation, floating-point operations and bytes moved."""
    compiled = compiled_step(tx, num_leaves)
    [entry] = re.findall(r"^ENTRY .*?^}", compiled.as_text(), re.DOTALL | re.MULTILINE)
    analysis = compiled.cost_analysis()
    return entry.count(" fusion("), analysis["flops"], analysis["bytes accessed"]


@pytest.mark.parametrize("num_leaves", [1, 10, 200])
def test_leafwise_costs_nothing(num_leaves):
    ours, theirs = (cost(tx, num_leaves) for tx in (like_optax_adam(0.1), optax.adam(0.1)))
    assert ours[0] == theirs[0]
    assert ours[1] <= theirs[1] and ours[2] <= theirs[2]


@pytest.mark.parametrize("num_leaves", [1, 10, 200])
def test_adam_costs_what_optax_adam_costs(num_leaves):
    """Except for the two running powers, for any number of leaves."""
    schedule = optax.linear_schedule(0.1, 0.0, 100)
    ours, theirs = (cost(tx, num_leaves) for tx in (optzoo.adam(schedule), optax.adam(schedule)))
    assert ours[0] <= theirs[0] + 2
    assert ours[1] <= theirs[1] and ours[2] <= theirs[2] + 64


IN_PLACE = [name for name, entry in CATALOG.items() if entry.rows in ("lazy", "linear")]


@pytest.mark.parametrize("name", chosen_first(IN_PLACE, [n for n in KINDS if n in IN_PLACE]))
def test_touched_rows_are_updated_in_place(name):
    tx, table = CATALOG[name].make(), jnp.ones((100_000, 16))
    state = tx.init(table)
    rows = SparseRows(np.arange(64) % 50, jnp.ones((64, 16)), len(table))
    step = functools.partial(step_of(tx), global_step=0)
    train = jax.jit(step, donate_argnums=(0, 1)).lower(table, state, rows).compile()
    memory = train.memory_analysis()
    assert memory.temp_size_in_bytes < 0.05 * table.nbytes
    where = lambda *trees: [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(trees)]
    before = where(table, state)
    for _ in range(2):
        table, state = train(table, state, rows)
        assert where(table, state) == before


# They need the norm of their direction, which is as large as the parameter, to scale it.
OF_THEIR_OWN_NORM = ("adafactor", "lamb", "row_wise_lamb", "partial_row_wise_lamb")
FIRST_ORDER = [name for name, entry in CATALOG.items() if entry.family != "second_order"]


@pytest.mark.skipif(jax.__version_info__ < (0, 10), reason="older XLA kept the operands of a sum")
@pytest.mark.parametrize("name", FIRST_ORDER)
def test_a_dense_step_copies_nothing(name):
    """Slots are updated in place, and there is no temporary array of the parameter's size."""
    tx, x = CATALOG[name].make(), jnp.ones((100, 1000))
    step = functools.partial(step_of(tx), global_step=0)
    train = jax.jit(step, donate_argnums=(0, 1)).lower(x, tx.init(x), x).compile()
    arrays = 1 if name in OF_THEIR_OWN_NORM else 0
    few = 0.02 if name == "adafactor" else 0.01  # which has means of 100 rows and 1000 columns
    assert train.memory_analysis().temp_size_in_bytes < (arrays + few) * x.nbytes
