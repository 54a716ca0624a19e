"""How parameters are cut into blocks, and that each block is treated as a parameter."""

import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import optzoo
from optzoo.second_order.shampoo.blocks import Cutting
from optzoo.testing.samples import step

LARGE = {"max_matrix_size": 8192, "block_size": None, "merge_dims": False, "skip_vectors": False}
often = settings(derandomize=True, deadline=None, max_examples=25, database=None)


def cut(shape, **kwargs):
    return Cutting(**LARGE | kwargs).blocks(shape)


def dims(shape, **kwargs):
    return cut(shape, **kwargs).dims


def sizes(shape, **kwargs):
    return cut(shape, **kwargs).sizes


@st.composite
def cuts(draw):
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=4)))
    return cut(
        shape,
        max_matrix_size=draw(st.integers(0, 30)),
        block_size=draw(st.none() | st.integers(1, 9)),
        merge_dims=draw(st.booleans()),
        skip_vectors=draw(st.booleans()),
    )


@often
@given(cuts())
def test_split_and_join(blocks):
    x = jnp.arange(1.0, 1 + math.prod(blocks.shape)).reshape(blocks.shape)
    split = blocks.split(x)
    assert split.shape == (blocks.number, *blocks.sizes)
    np.testing.assert_array_equal(blocks.join(split), x[None])
    two = jnp.stack([x, -x])  # one after the other
    np.testing.assert_array_equal(blocks.split(two), jnp.concatenate([split, -split]))
    np.testing.assert_array_equal(blocks.join(blocks.split(two)), two)
    # Each is a part of the array, with zeros behind its ends.
    whole = np.asarray(x).reshape(blocks.dims)
    corners = itertools.product(*map(range, blocks.parts))
    for block, corner in zip(np.asarray(split), corners, strict=True):
        ranges = [slice(i * n, (i + 1) * n) for i, n in zip(corner, blocks.sizes, strict=True)]
        part = whole[tuple(ranges)]
        np.testing.assert_array_equal(block[tuple(map(slice, part.shape))], part)
        assert np.count_nonzero(block) == part.size and (part.size or not whole.size)


@often
@given(cuts(), st.data())
def test_state_keeps_an_axis_for_blocks_only_if_there_are_some(blocks, data):
    shape = tuple(data.draw(st.lists(st.integers(1, 3), max_size=2)))
    kept = blocks.stack(*shape)
    assert kept == (shape if blocks.number == 1 else (blocks.number, *shape))


def test_as_few_parts_as_can_be():
    assert sizes((512, 513), block_size=512) == (512, 257)
    assert sizes((768, 1024, 1025), block_size=512) == (384, 512, 342)
    assert sizes((7, 1), block_size=1) == (1, 1)


def test_a_quarter_more_parts_if_they_divide():
    assert sizes((28,), block_size=5) == (4,)  # 7 parts, not 6
    assert sizes((1000,), block_size=300) == (250,)  # 4 divide it
    assert sizes((25,), block_size=7) == (5,)  # 5 parts, not 4
    assert sizes((30,), block_size=9) == (6,)  # 5 parts, not 4
    assert sizes((9,), block_size=8) == (5,)  # 3 would divide it, but that is half more than 2
    assert sizes((44,), block_size=9) == (9,)  # neither 5 nor 6 divide it


def test_no_block_beyond_a_matrix():
    """Large dimensions stay whole, with the diagonal; the others are cut."""
    blocks = cut((100, 12), max_matrix_size=16, block_size=4)
    assert blocks.parts == (1, 3) and blocks.full == (False, True)
    assert blocks.factors == [(100, False, True), (4, True, False)]
    assert sizes((12,), max_matrix_size=16, block_size=40) == (12,)


def test_merging():
    assert dims((3, 3, 64, 128), merge_dims=True, max_matrix_size=576) == (576, 128)
    assert dims((3, 3, 64, 128), merge_dims=True, block_size=575) == (9, 64, 128)
    assert dims((1, 1, 50_000, 3, 4), merge_dims=True) == (50_000, 12)
    assert dims((1, 9), merge_dims=True, max_matrix_size=4) == (9,)
    assert dims((9, 1, 1), merge_dims=True) == (9,)
    assert dims((1, 1), merge_dims=True) == dims((), merge_dims=True) == dims(()) == (1,)
    assert dims((2, 1, 3, 4)) == (2, 1, 3, 4)


def test_two_dimensions_are_left():
    """A matrix, however small, is no vector."""
    assert dims((2, 3), merge_dims=True) == (2, 3)
    assert dims((2, 3, 4), merge_dims=True) == dims((1, 2, 3, 4, 1), merge_dims=True) == (6, 4)


def test_skipped():
    factors = lambda shape, **kwargs: cut(shape, **kwargs).factors
    assert factors((5,)) == [(5, True, False)] and factors(()) == [(1, True, False)]
    assert factors((5,), skip_vectors=True) == factors((), skip_vectors=True) == []
    assert factors((5, 1), skip_vectors=True) == [(5, True, False), (1, True, False)]
    assert factors((5, 1), skip_vectors=True, merge_dims=True) == []
    assert factors((5, 2), skip_vectors=True, merge_dims=True) == [
        (5, True, False),
        (2, True, False),
    ]
    for limit in (0, 9):
        assert factors((0,), max_matrix_size=limit) == factors((3, 0), max_matrix_size=limit) == []


def test_one_side():
    """The smallest of the dimensions that may have a matrix, the first of equal ones."""
    cutting = Cutting(16, 4, False, False, one_sided=True)
    blocks = cutting.blocks((100, 12, 12))
    assert blocks.factors == [(100, False, False), (4, True, False), (12, False, False)]
    assert blocks.rank == 1 and blocks.parts == (1, 3, 1)
    assert cutting.blocks((100, 99)).factors == []
    assert Cutting(16, None, False, False, diagonals=False).blocks((100, 99)).factors == []


# Blocks of an optimizer


def by_hand(g, size, divisors, epsilon=0.1):
    """Blocks of at most ``size`` after two gradients ``g``, each by NumPy in float64."""
    out = np.zeros(g.shape)
    for ranges in itertools.product(*(range(0, n, size) for n in g.shape)):
        part = tuple(slice(i, i + size) for i in ranges)
        p = np.asarray(g[part], "float64")
        for axis, divisor in enumerate(divisors):
            m = np.moveaxis(np.asarray(g[part], "float64"), axis, 0).reshape(p.shape[axis], -1)
            w, v = np.linalg.eigh(2 * m @ m.T / divisor + epsilon * np.eye(len(m)))
            root = (v * w ** (-0.5 / g.ndim)) @ v.T
            p = np.moveaxis(np.tensordot(root, p, (1, axis)), 0, axis)
        out[part] = p
    return out


@pytest.mark.parametrize("shape", [(3, 5), (5,), (3, 2, 3)])
def test_padding_changes_nothing(shape):
    """The rows of zeros of a padded block have no part in it, whatever their root.

    Statistics of all blocks are divided by the size of a whole one. So every block of a parameter
    has the same scale, also one of fewer rows.
    """
    g = np.cos(np.arange(math.prod(shape)) ** 2.0).astype("float32").reshape(shape)
    tx = optzoo.shampoo(1.0, block_size=2, eps=0.1)
    update = jax.jit(tx.update)
    _, state = update(g, tx.init(g))
    updates, _ = update(g, state)
    np.testing.assert_allclose(updates, -by_hand(g, 2, len(shape) * [2]), rtol=1e-5, atol=1e-6)


def test_blocks_are_parameters_of_their_own():
    """What each part gets if it is a parameter; with grafting the length is that of the whole."""
    options = {"eps": 1e-3, "relative_eps": True, "gbar_decay": 0.5}
    x = np.cos(np.arange(24.0)).astype("float32").reshape(6, 4)
    parts = lambda x: [x[i : i + 3, j : j + 2] for i in (0, 3) for j in (0, 2)]
    whole = lambda parts: jnp.block([parts[:2], parts[2:]])
    blocked, grafted = (
        optzoo.shampoo(1.0, **options, block_size=3, grafting=kind) for kind in (None, "sgd")
    )
    plain = optzoo.shampoo(1.0, **options)

    @jax.jit
    def two_steps():
        states = blocked.init(x), grafted.init(x), plain.init(parts(x))
        for i in range(2):
            g = jnp.sin(x + i)
            ours, ours_grafted, wanted = (
                tx.update(g, state)
                for tx, g, state in zip(
                    (blocked, grafted, plain), (g, g, parts(g)), states, strict=True
                )
            )
            states = ours[1], ours_grafted[1], wanted[1]
        return ours, ours_grafted[0], wanted

    (updates, state), of_grafting, (wanted, states) = two_steps()
    np.testing.assert_allclose(updates, whole(wanted), rtol=1e-4, atol=1e-5)
    unit = lambda x: x / jnp.linalg.norm(x)
    np.testing.assert_allclose(unit(of_grafting), unit(updates), rtol=1e-4, atol=1e-5)
    gbar, gbars = state[0].slots.Gbar, states[0].slots.Gbar
    assert [a.shape for a in gbar] == [(4, 3, 3), (4, 2, 2)]
    for dimension in (0, 1):
        one_by_one = np.stack([gbars[part][dimension] for part in range(4)])
        np.testing.assert_allclose(gbar[dimension], one_by_one, rtol=1e-5, atol=1e-6)


def test_a_diagonal_dimension_in_blocks_of_the_other():
    """Of a dimension too large for a matrix each block has the diagonal."""
    x = np.cos(np.arange(24.0)).astype("float32").reshape(6, 4)
    blocked, plain = (
        optzoo.shampoo(1.0, max_matrix_size=4, eps=1e-3, block_size=size) for size in (2, None)
    )
    moved, state = jax.jit(lambda x: step(blocked, x, x))(x)
    halves = [x[:, :2], x[:, 2:]]
    wanted, _ = jax.jit(lambda xs: step(plain, xs, xs))(halves)
    np.testing.assert_allclose(moved, np.concatenate(wanted, axis=1), rtol=1e-5)
    assert [a.shape for a in state[0].slots.Gbar] == [(2, 6), (2, 2, 2)]


def calls(x, **options):
    tx = optzoo.shampoo(**options)
    compiled = jax.jit(tx.update).lower(x, tx.init(x)).compile()
    return len(re.findall(r'custom_call_target="lapack_ssyevd', compiled.as_text()))


@pytest.mark.optimized
def test_one_root_in_the_program_for_each_size_and_rank():
    """However many parameters and blocks there are."""
    x = {"a": jnp.ones((2, 3)), "b": jnp.ones((4, 3)), "c": [jnp.ones((3, 2))] * 2}
    assert calls(x, block_size=3) == 2  # 3 and 2
    assert calls(x, block_size=2, preconditioner_interval=3, stagger=True) == 1
    # A root of another order is another place.
    assert calls({**x, "d": jnp.ones(3)}, block_size=2) == 2
