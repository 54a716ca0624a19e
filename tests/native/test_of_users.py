"""Optimizers of users: native code is right or leaves them to XLA, and it writes no argument."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import optzoo
from optzoo import SparseRows
from optzoo.native import engine, groups

from . import of_users
from .test_safety import run_module

pytestmark = pytest.mark.skipif(engine.problem() is not None, reason=str(engine.problem()))
ROWS, WIDTH = 4, 3
TABLE = np.arange(10.0, 22, dtype="float32").reshape(ROWS, WIDTH)
BACKWARDS = SparseRows(jnp.array([3, 2, 1, 0]), jnp.ones((ROWS, WIDTH)), ROWS)


class Slots(NamedTuple):
    """One slot, so that the rule has a state."""

    m: object


def of_parents():
    """Each row moves to another row of its table, whose number is in the state."""

    def update(g, parent, x):
        g = g.coalesce()
        other = g.with_rows(g.gather(parent), g.values).gather(x)
        return g.with_values(-0.5 * (g.gather(x) - other)).drop_padding(), parent

    want = TABLE - 0.5 * (TABLE - TABLE[[0, 0, 1, 2]])
    return optax.GradientTransformation(lambda x: jnp.array([0, 0, 1, 2]), update), want


def of_whole_tables():
    """As many ids as rows: a table is read as a whole by the place of an id."""
    rule = lambda g, x, s, t: (-g - 0.5 * x, s)
    tx = optzoo.rules.leafwise(rule, slots=Slots(optzoo.rules.zeros), rows=optzoo.rules.linear,
                               needs_params=True)  # fmt: skip
    return tx, TABLE - 1 - 0.5 * TABLE[::-1]


def of_two_tables():
    """The rows of one table read the whole other one."""

    def update(g, s, x):
        g = g.coalesce()
        moved = g.with_values(-g.gather(x) * s).drop_padding()
        return moved, g.scatter(s, g.gather(s) + 1)

    return optax.GradientTransformation(lambda x: jnp.ones_like(x), update), 0 * TABLE


OF_TABLES = {"parents": of_parents, "whole": of_whole_tables, "two": of_two_tables}


@pytest.mark.parametrize("name", OF_TABLES)
def test_an_array_that_is_read_in_two_ways(name):
    tx, want = OF_TABLES[name]()
    x = jnp.asarray(TABLE)
    state = tx.init(x)
    before = jax.device_get((x, state))
    got, _ = jax.jit(optzoo.native_step(tx))(x, state, BACKWARDS)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, (x, state), before)  # nothing was donated
    with pytest.raises(ValueError, match="both by the rows of its ids and in another way"):
        jax.jit(optzoo.native_step(tx, required=True))(x, state, BACKWARDS)


def first_column(x):
    return jnp.broadcast_to(x[:, 0][None, :], x.shape)


def all_of_them(x):
    return jnp.sum(x.reshape(1, -1), 1, keepdims=True) + 0 * x


MIXING = {
    "a column as a row": (3, first_column, lambda x: np.broadcast_to(x[:, 0], x.shape)),
    "a sum of all rows": (1, all_of_them, lambda x: np.full_like(x, x.sum())),
}


@pytest.mark.parametrize("name", MIXING)
def test_as_many_ids_as_columns(name):
    """An axis of that size is not always that of the rows."""
    width, f, of_numpy = MIXING[name]
    rule = lambda g, x, s, t: (-f(x), s)
    tx = optzoo.rules.leafwise(rule, slots=Slots(optzoo.rules.zeros), needs_params=True)
    x = np.arange(1.0, 1 + 3 * width, dtype="float32").reshape(3, width)
    g = SparseRows(jnp.arange(3), jnp.ones((3, width)), 3)
    got, _ = jax.jit(optzoo.native_step(tx))(jnp.asarray(x), tx.init(x), g)
    np.testing.assert_allclose(got, x - of_numpy(x))
    with pytest.raises(ValueError, match=r"reads other rows|not over an available row"):
        jax.jit(optzoo.native_step(tx, required=True))(jnp.asarray(x), tx.init(x), g)


THERE_AND_BACK = {
    "int32, float32": ("int32", "float32", 2**24 + 1, 2**24),
    "int32, bfloat16": ("int32", "bfloat16", 257, 256),
    "int32, float16": ("int32", "float16", 4097, 4096),
    "int16, float32": ("int16", "float32", 2**15 - 1, 2**15 - 1),
    "int8, bfloat16": ("int8", "bfloat16", 127, 127),
}


@pytest.mark.parametrize("name", THERE_AND_BACK)
def test_integers_that_become_floats_and_integers_again(name):
    dtype, middle, number, want = THERE_AND_BACK[name]
    update = lambda g, s, x: (-g, s.astype(middle).astype(dtype))
    tx = optax.GradientTransformation(lambda x: jnp.full(x.shape, number, dtype), update)
    x = jnp.ones(4)
    _, got = jax.jit(optzoo.native_step(tx))(x, tx.init(x), x)
    np.testing.assert_array_equal(got, np.full(4, want, dtype))


FLAGS = {
    "two": lambda g, x, dtype: (g > 0).astype(dtype) + (x > 0).astype(dtype),
    "minus": lambda g, x, dtype: -(g > 0).astype(dtype),
    "wider": lambda g, x, dtype: ((g > 0).astype(dtype).astype("int32") * 100).astype(dtype),
}


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32"])
@pytest.mark.parametrize("name", FLAGS)
def test_flags_as_integers(name, dtype):
    update = lambda g, s, x: (-g, FLAGS[name](g, x, dtype).astype("int32"))
    tx = optax.GradientTransformation(lambda x: jnp.zeros(x.shape, "int32"), update)
    x = jnp.ones(4)
    _, got = jax.jit(optzoo.native_step(tx))(x, tx.init(x), x)
    one = np.ones(4, dtype)
    want = {"two": one + one, "minus": -one, "wider": 100 * one}[name]
    np.testing.assert_array_equal(got, want.astype("int32"))


@pytest.mark.parametrize("of", [jnp.max, jnp.min])
def test_extremes_of_integers_at_their_ends(of):
    """Of numbers at the end where a search begins."""
    kept, dtype = np.iinfo("int32"), "int32"
    number = kept.min + 1 if of is jnp.max else kept.max - 1
    update = lambda g, s, x: (-g, s - of(s, axis=1, keepdims=True))
    tx = optax.GradientTransformation(lambda x: jnp.full(x.shape, number, dtype), update)
    x = jnp.ones((4, 3))
    _, got = jax.jit(optzoo.native_step(tx))(x, tx.init(x), x)
    np.testing.assert_array_equal(got, np.zeros((4, 3), dtype))


def elsewhere(where, step, *args):
    """A step where XLA does all of it."""
    if where == "under vmap":
        return jax.vmap(step)(*jax.tree.map(lambda a: jnp.stack([a, a]), args))
    if where == "in derivatives":
        return jax.grad(lambda x: jnp.sum(step(x, *args[1:])[0]))(args[0])
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    put = lambda a: jax.device_put(a, NamedSharding(mesh, PartitionSpec(*["d"][: a.ndim - 1])))
    return jax.jit(step)(*jax.tree.map(put, args))


@pytest.mark.unique
@pytest.mark.parametrize(
    "where", ["under vmap", "in derivatives", "of arrays that it divides over devices"]
)
def test_what_is_required_is_never_left_to_xla(where):
    tx, x = optzoo.lazy_adam(0.1), jnp.asarray(TABLE)
    args = x, tx.init(x), BACKWARDS
    elsewhere(where, optzoo.native_step(tx), *args)
    with pytest.raises(RuntimeError, match=f"native code is required, .* the update {where}"):
        elsewhere(where, optzoo.native_step(tx, required=True), *args)


@jax.custom_jvp
def doubled_sums(a):
    """A function with an operation that native code has, and one that it lacks."""
    return 2 * jnp.cumsum(a, axis=-1)


doubled_sums.defjvp(lambda primals, tangents: (doubled_sums(*primals), doubled_sums(*tangents)))


def test_a_function_of_which_native_code_has_a_part():
    """XLA computes it, and native code the rows around it."""
    rule = lambda g, x, s, t: (-0.5 * doubled_sums(g) - 0.25 * x, Slots(s.m + doubled_sums(g)))
    tx = optzoo.rules.leafwise(rule, slots=Slots(optzoo.rules.zeros), needs_params=True)
    x, g = jnp.asarray(TABLE), SparseRows(jnp.array([1, 3]), jnp.ones((2, WIDTH)), ROWS)
    new, state = jax.jit(optzoo.native_step(tx, required=True))(x, tx.init(x), g)
    sums, touched = np.array([2.0, 4.0, 6.0]), [[0], [1], [0], [1]]
    np.testing.assert_array_equal(new, TABLE - touched * (0.5 * sums + 0.25 * TABLE))
    np.testing.assert_array_equal(optzoo.get_slot(state, "m"), touched * sums)


@pytest.mark.parametrize("seed", range(4))
def test_random_optimizers(seed):
    of_users.run(of_users.Program(seed))


@pytest.mark.full
@pytest.mark.parametrize("threads", [1, 2, 4])
def test_many_random_optimizers(threads):
    """In a process of its own: native code that writes elsewhere ends it."""
    done = run_module("of_users", str(1000 * threads), "60", NPROC=str(threads))
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
    assert "60 programs, 0 differ" in done.stdout


def test_what_is_required_of_an_array_names_the_operation_and_its_line():
    update = lambda g, s, x: (g - jnp.sort(x), s)
    tx = optax.GradientTransformation(lambda x: (), update)
    x = jnp.ones(4)
    with pytest.raises(ValueError, match=r"elementwise: `sort` \(\S+test_of_users.py:\d+"):
        jax.jit(optzoo.native_step(tx, required=True))(x, (), x)


def test_reasons_are_written_where_they_are_read(monkeypatch):
    """To find the lines of operations takes as long as to trace a step, which reads no reason."""

    def find(eqn):
        raise AssertionError("a line is looked up")

    monkeypatch.setattr(groups, "caller_of", find)
    update = lambda g, s, x: (g - jnp.sort(x), s)
    tx = optax.GradientTransformation(lambda x: (), update)
    jax.jit(optzoo.native_step(tx)).trace(jnp.ones(4), (), jnp.ones(4))
    with pytest.raises(AssertionError, match="a line is looked up"):
        jax.jit(optzoo.native_step(tx, required=True)).trace(jnp.ones(4), (), jnp.ones(4))
