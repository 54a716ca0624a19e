"""Around each number at which native code goes on in another way, results are the same."""

from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optzoo
from optzoo.native import (
    division,
    leaf_kernel,
    loops,
    merging,
    norms,
    rows_kernel,
    scratch,
    sum_kernel,
)


class Counted(NamedTuple):
    times: Annotated[Any, "signed"]


def counted():
    """Plain descent that counts, for each element, how often it was updated."""
    rule = lambda g, x, s, t: (-g, Counted(s.times + 1))
    return optzoo.rules.leafwise(rule, slots=Counted(jnp.zeros_like), rows=optzoo.rules.lazy)


def native(tx):
    return jax.jit(optzoo.native_step(tx, required=True), donate_argnums=(0, 1))


def around(*numbers):
    """Beyond each number, at it and before it; `make test` runs the first ones."""
    return list(dict.fromkeys(n + d for d in (1, 0, -1) for n in numbers))


def check_rows(ids, num_rows, width, dtype=np.float32, tx=None):
    """Whole numbers, of which sums are exact in any order."""
    rng = np.random.default_rng(0)
    values = rng.integers(-2, 3, (len(ids), width))
    want = np.zeros((num_rows, width))
    np.add.at(want, ids, -values)
    tx, params = tx or counted(), jnp.zeros((num_rows, width), dtype)
    rows = optzoo.SparseRows(jnp.asarray(ids, jnp.int32), jnp.asarray(values, dtype), num_rows)
    params, state = native(tx)(params, tx.init(params), rows)
    np.testing.assert_array_equal(np.asarray(params, np.float64), want)
    times = np.zeros((num_rows, width))
    times[np.unique(ids)] = 1
    [counts] = jax.tree.leaves(optax.tree.get(state, "slots"))
    np.testing.assert_array_equal(np.asarray(counts, np.float64), times)


WIDTH = 4
# Rows of which the written bytes, of a table and its slot, are worth a thread.
WORTH = rows_kernel._NBYTES // (2 * 4 * WIDTH)
DISTINCT = around(rows_kernel._BLOCK, WORTH, merging.AHEAD)
CHUNKS = [scratch.CHUNK * n for n in (1, merging._SAMPLED, rows_kernel._CHUNKS)]
REPEATED = around(scratch._PART, 2 * scratch._PART, *CHUNKS)


@pytest.mark.parametrize("number", DISTINCT)
def test_numbers_of_rows(number):
    """Each of another id, and merged before, as the norm of a clip needs them."""
    ids = np.random.default_rng(number).permutation(number + 3)[:number]
    check_rows(ids, number + 3, WIDTH, tx=optax.chain(optzoo.clip_by_global_norm(1e30), counted()))


@pytest.mark.parametrize("number", REPEATED)
def test_numbers_of_ids_that_repeat(number):
    ids = np.random.default_rng(number).zipf(1.3, number) % (number // 2)
    check_rows(ids, number // 2, WIDTH)


@pytest.mark.full
@pytest.mark.parametrize("number", around(scratch._PART * scratch._MOST_PARTS))
def test_the_greatest_number_of_parts(number):
    check_rows(np.random.default_rng(0).integers(0, 5000, number), 5000, 1)


LINES = around(merging._LINE // 4, merging._LINE * merging._MOST_LINES // 4)


@pytest.mark.parametrize("width", LINES)
def test_widths_of_rows_that_are_fetched_ahead(width):
    check_rows(np.arange(2 * merging.AHEAD) % 25, 30, width)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("width", [*range(1, loops._MASKED, 4), *around(loops._MASKED)])
def test_widths_of_loops_with_a_mask(width, dtype):
    check_rows(np.array([3, 0, 3, 1]), 5, width, dtype)


def check_arrays(tx, params):
    """The step of XLA, on arrays of small whole numbers."""
    rng = np.random.default_rng(1)
    grads = jax.tree.map(lambda x: jnp.asarray(rng.integers(-2, 3, x.shape), x.dtype), params)
    state = tx.init(params)

    @jax.jit
    def by_xla(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    want = jax.device_get(by_xla(params, state, grads))
    got = native(tx)(params, state, grads)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("number", around(division.MOST_LEAVES, 2 * division.MOST_LEAVES))
def test_numbers_of_arrays(number):
    check_arrays(optzoo.momentum(0.1, 0.9), [jnp.full(k + 1, float(k)) for k in range(number)])


@pytest.mark.parametrize("length", around(leaf_kernel._SHORT, leaf_kernel._KEPT))
def test_lengths_of_groups(length):
    check_arrays(optzoo.row_wise_adagrad(0.1), jnp.ones((3, length)))


BLOCKS = sum_kernel._TASK * scratch.SUMMED
SIZES = around(norms._FEWEST, scratch.SUMMED, BLOCKS)


@pytest.mark.parametrize("size", SIZES)
def test_sizes_of_arrays_with_a_norm(size):
    """The norm of many ones, exact in float32."""
    tx = optax.chain(optzoo.clip_by_global_norm(1.0), optzoo.gradient_descent(1.0))
    params = jnp.zeros(size)
    params, _ = native(tx)(params, tx.init(params), jnp.ones(size))
    np.testing.assert_allclose(params, np.full(size, -1 / np.sqrt(size)), rtol=3e-7)
