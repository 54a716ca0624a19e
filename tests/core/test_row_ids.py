"""The ids of rows pass through all of JAX, and no arithmetic changes them."""

import copy
import dataclasses
import pickle

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import optzoo
from optzoo import SparseRows
from optzoo.core.rows import zeros_like_update
from optzoo.testing import samples

IDS = [1, 3, -2, 1, 9, 5]
ROWS = SparseRows(jnp.array(IDS), jnp.arange(12.0).reshape(6, 2), 5)
HINT = r"optzoo\.rows\.densify\(\).*optzoo\.rows\.on_values"


def stack(g):
    return jax.tree.map(lambda a: jnp.stack([a, a]), g)


def over_devices(f, out_specs):
    mesh = Mesh(np.array(jax.devices()[:1]), "r")
    return jax.jit(
        jax.shard_map(
            f, mesh=mesh, in_specs=PartitionSpec("r"), out_specs=out_specs, check_vma=False
        )
    )


# Arithmetic

ARITHMETIC = {
    "negative": jnp.negative,
    "add": lambda a: a + a,
    "subtract": lambda a: a - a,
    "scale": lambda a: -1 * a,
    "scale by a float": lambda a: 0.5 * a,
    "sign": jnp.sign,
    "absolute": jnp.abs,
    "clip": lambda a: jnp.clip(a, -1, 1),
    "maximum": lambda a: jnp.maximum(a, 0),
    "square": jnp.square,
    "sum": jnp.sum,
    "cast": lambda a: jax.lax.convert_element_type(a, jnp.float32),
    "sort": jnp.sort,
    "choose zero": lambda a: jnp.where(a == a, a, 0),
}


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("f", ARITHMETIC.values(), ids=list(ARITHMETIC))
def test_arithmetic_is_refused_with_the_hint(f, jit):
    with pytest.raises((TypeError, ValueError), match=HINT):
        jit(lambda g: jax.tree.map(f, g))(ROWS)


METHODS = {
    "real": lambda a: a.real,
    "imag": lambda a: a.imag,
    "conj": lambda a: a.conj(),
    "sum": lambda a: a.sum(),
    "mean": lambda a: a.mean(),
    "max": lambda a: a.max(),
    "astype": lambda a: a.astype(jnp.float32),
    "clip": lambda a: a.clip(0),
    "item": lambda a: a[0].item(),
    "asarray": np.asarray,
    "NumPy": lambda a: np.ones(6) + np.add(a, 1),
    "msgpack": lambda a: flax.serialization.msgpack_serialize({"a": a}),
    "int": lambda a: [int(i) for i in np.array(a)],
}


@pytest.mark.parametrize("f", METHODS.values(), ids=list(METHODS))
def test_methods_are_refused(f):
    """Outside of jit by JAX's own errors, of which not all name the dtype with the hint."""
    with pytest.raises((TypeError, NotImplementedError, AttributeError)):
        f(ROWS.ids)


def test_no_class_of_another_library_is_changed():
    classes = [jax.Array, jax.core.Tracer, *jax.Array.__subclasses__(), np.ndarray]
    classes += [optax.GradientTransformation, optax.GradientTransformationExtraArgs]
    for cls in classes:
        for name, attribute in vars(cls).items():
            f = attribute.fget if isinstance(attribute, property) else attribute
            module = str(getattr(f, "__module__", ""))
            assert not module.startswith("optzoo"), f"{cls}.{name}"


@pytest.mark.parametrize("sum_", [jax.lax.psum, jax.lax.pmean, jax.lax.pmax])
@pytest.mark.parametrize("over", ["vmap", "shard_map"])
def test_sums_over_replicas_are_refused(sum_, over):
    of_rows = lambda g: jax.tree.map(lambda a: sum_(a, "r"), g)
    with pytest.raises((TypeError, ValueError), match=HINT):
        if over == "vmap":
            jax.vmap(of_rows, axis_name="r")(stack(ROWS))
        else:
            over_devices(of_rows, PartitionSpec())(ROWS)


@pytest.mark.parametrize(
    "tx",
    [optax.scale(-1), optax.scale_by_schedule(lambda _: -1), optax.scale_by_sign(), optax.clip(1)],
    ids=["scale", "scale_by_schedule", "sign", "clip"],
)
def test_optax_bends_no_ids(tx):
    """With integers of the ids' dtype, which no check of dtypes would notice."""
    grads = {"table": SparseRows(jnp.array(IDS), jnp.ones((6, 2), int), 5)}
    with pytest.raises(TypeError, match=HINT):
        tx.update(grads, tx.init(grads))


def test_sums_of_trees_are_refused():
    with pytest.raises(TypeError, match=HINT):
        optax.tree.add(ROWS, ROWS)


@pytest.mark.parametrize("like", [jnp.zeros_like, jnp.ones_like, lambda a: jnp.full_like(a, 3)])
def test_what_is_made_like_ids_is_padding(like):
    for made in (jax.tree.map(like, ROWS), jax.jit(lambda g: jax.tree.map(like, g))(ROWS)):
        assert np.all(made.indices < 0)
        assert not np.any(made.to_dense())
        x = jnp.ones((5, 2))
        tx = optzoo.lazy_adam()
        _, state = tx.update(made, tx.init(x), x)
        assert not any(np.any(slot) for slot in jax.tree.leaves(samples.slots(state)))


def test_other_arrays_in_the_place_of_ids_are_refused_where_they_are_used():
    for dtype in (jnp.float32, jnp.int32, bool):
        other = jax.tree.map(lambda a, dtype=dtype: jnp.zeros(a.shape, dtype), ROWS)
        with pytest.raises(TypeError, match=HINT):
            other.to_dense()
        assert "SparseRows" in repr(other)
    same = jax.tree.map(lambda a, b: bool(jnp.all(a == b)), ROWS, ROWS)
    assert jax.tree.all(same)


# Transformations of JAX

PASSES = {
    "jit": jax.jit(lambda g: g),
    "donated": lambda g: jax.jit(lambda g: g, donate_argnums=0)(jax.tree.map(jnp.copy, g)),
    "scan": lambda g: jax.lax.scan(lambda g, _: (g, None), g, length=2)[0],
    "scan over": lambda g: jax.tree.map(
        lambda a: a[1], jax.lax.scan(lambda _, g: (None, g), None, stack(g))[1]
    ),
    "while": lambda g: jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1]), (0, g))[
        1
    ],
    "cond": lambda g: jax.jit(lambda p, g: jax.lax.cond(p, lambda: g, lambda: g))(True, g),
    "vmap": lambda g: jax.tree.map(lambda a: a[0], jax.vmap(lambda g: g)(stack(g))),
    "shard_map": lambda g: over_devices(lambda g: g, PartitionSpec("r"))(g),
    "gathered": lambda g: over_devices(
        lambda g: jax.lax.all_gather(g, "r", tiled=True), PartitionSpec()
    )(g),
    "placed": lambda g: jax.device_put(
        g, NamedSharding(Mesh(np.array(jax.devices()[:1]), "r"), PartitionSpec("r"))
    ),
    "stop_gradient": jax.lax.stop_gradient,
    "checkpoint": jax.checkpoint(lambda g: g),
    "pickle": lambda g: pickle.loads(pickle.dumps(g)),
    "deepcopy": copy.deepcopy,
    "replace": lambda g: dataclasses.replace(g, values=g.values),
    "constructor": lambda g: SparseRows(g.ids, g.values, g.num_rows),
    "where": lambda g: jax.tree.map(lambda a: jnp.where(True, a, jnp.zeros_like(a)), g),
}


@pytest.mark.parametrize("through", PASSES.values(), ids=list(PASSES))
def test_ids_pass(through):
    got = through(ROWS)
    assert got.indices.dtype == jnp.int32 and got.ids.dtype == ROWS.ids.dtype
    np.testing.assert_array_equal(got.indices, IDS)
    np.testing.assert_array_equal(got.values, ROWS.values)
    np.testing.assert_array_equal((got + got).to_dense(), 2 * ROWS.to_dense())


def test_derivatives():
    value = lambda v: jnp.sum(ROWS.with_values(v).coalesce().to_dense() ** 3)
    got = jax.grad(value)(ROWS.values)
    np.testing.assert_allclose(got[3], 3 * ROWS.to_dense()[1] ** 2)
    np.testing.assert_array_equal(got[jnp.array([2, 4, 5])], jnp.zeros((3, 2)))
    given, tangents = jax.jvp(ROWS.with_values, (ROWS.values,), (ROWS.values,))
    np.testing.assert_array_equal(given.indices, IDS)
    np.testing.assert_array_equal(tangents.values, ROWS.values)


def test_shapes_stand_for_rows():
    shapes = jax.eval_shape(lambda: ROWS)
    assert shapes.indices == jax.ShapeDtypeStruct((6,), jnp.int32)
    made = SparseRows(jax.ShapeDtypeStruct((6,), jnp.int32), shapes.values, 5)
    assert made.ids == shapes.ids and jax.eval_shape(lambda g: g, made).ids == shapes.ids
    assert jax.jit(lambda g: g.to_dense()).lower(made).compile()(ROWS).shape == (5, 2)
    assert np.all(zeros_like_update(shapes).indices == -1)
    here = jax.sharding.SingleDeviceSharding(jax.devices()[1])
    placed = SparseRows(jax.ShapeDtypeStruct((6,), jnp.int32, sharding=here), shapes.values, 5)
    assert placed.indices.sharding == here
    specs = SparseRows(PartitionSpec("r"), PartitionSpec(), 5)
    assert specs.indices == PartitionSpec("r")
    assert jax.tree.structure(specs) == jax.tree.structure(ROWS)


@pytest.mark.optimized
def test_protection_costs_nothing():
    """The compiled program is that of plain ids."""
    table = jnp.ones((1000, 8))
    plain = lambda x, ids, v: x.at[ids].add(v, mode="drop", wrap_negative_indices=False)
    ours = lambda x, ids, v: x + SparseRows(ids, v, 1000)
    through = lambda x, g: x + g
    values = jnp.ones((6, 8))
    costs = []
    for f, args in (
        (plain, (table, jnp.array(IDS), values)),
        (ours, (table, jnp.array(IDS), values)),
        (through, (table, SparseRows(jnp.array(IDS), values, 1000))),
    ):
        compiled = jax.jit(f, donate_argnums=0).lower(*args).compile()
        costs.append(compiled.memory_analysis().temp_size_in_bytes)
    assert max(costs) <= costs[0] + 64  # bytes


# Widths


@pytest.mark.parametrize("array", [list, tuple, np.array, jnp.array])
def test_ids_of_any_container(array):
    np.testing.assert_array_equal(SparseRows(array(IDS), ROWS.values, 5).indices, IDS)


@pytest.mark.parametrize("bad", [np.array([True, False]), jnp.zeros(2), [0.5, 1.0]])
def test_what_is_no_integer_is_refused(bad):
    with pytest.raises(TypeError, match=r"must be integers.*" + HINT):
        SparseRows(bad, jnp.ones(2), 5)


def test_wide_ids_without_x64_are_padding():
    """NumPy's integers have 64 bits; cut to 32, an id could name another row."""
    wide = np.array([2**32 + 3, 2**31, -(2**33), 2**31 - 1, 3])
    got = SparseRows(wide, jnp.ones(5), 5)
    np.testing.assert_array_equal(got.indices, [-1, -1, -1, 2**31 - 1, 3])
    np.testing.assert_array_equal(got.to_dense(), [0, 0, 0, 1, 0])
    np.testing.assert_array_equal(
        SparseRows(np.array([2**32 - 3, 3], "uint32"), jnp.ones(2), 5).to_dense(), [0, 0, 0, 1, 0]
    )


def test_wide_ids_with_x64(x64):
    with x64(True):
        num_rows = 2**33
        wide = SparseRows(np.array([2**32 + 3, -2, 7, 2**32 + 3]), jnp.ones(4), num_rows)
        assert wide.indices.dtype == jnp.int64
        np.testing.assert_array_equal(jax.jit(lambda g: g)(wide).indices, wide.indices)
        merged = jax.jit(lambda g: g.coalesce())(wide)
        ids, values = np.asarray(merged.indices), np.asarray(merged.values)
        got = dict(zip(ids, values, strict=True))
        assert got == {2**32 + 3: 2, 7: 1, num_rows: 0}
        narrow = SparseRows(jnp.array([5], jnp.int32), jnp.ones(1), num_rows)
        assert narrow.indices.dtype == jnp.int32
        assert (narrow + wide).indices.dtype == jnp.int64
        np.testing.assert_array_equal((narrow + wide).indices, [5, *wide.indices])
        assert np.all(jax.tree.map(jnp.zeros_like, wide).indices == -1)
