"""Arguments of another kind where an array is expected: as defined, or refused in words."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import optzoo
from optzoo import SparseRows
from optzoo.core.rows import Shard

from .mismatches import outcome


class Described:
    """A leaf with a shape and a dtype that is no array, as ``ParameterSpec`` of AXLearn."""

    shape, dtype = (4, 2), jnp.float32


TABLE = np.arange(8, dtype=np.float32).reshape(4, 2)
KINDS = {
    "a scalar": 1.5,
    "None": None,
    "a key": jax.random.key(0),
    "keys": jax.random.split(jax.random.key(0), 4),
    "a string": "x",
    "a tuple": ((TABLE,), np.ones(2)),
    "no rows": TABLE[:0],
    "no columns": TABLE[:, :0],
    "complex numbers": TABLE.astype("complex64"),
    "rows": SparseRows(np.array([1]), TABLE[:1], 4),
    "a shape": jax.ShapeDtypeStruct((4, 2), jnp.float32),
}
PARAMS = {"t": TABLE}
ADAM = optzoo.adam(0.1)
AVERAGED = optzoo.moving_average(ADAM)
DEFERRED = optzoo.caught_up(ADAM, mask=True)


STATES = {tx: tx.init(PARAMS) for tx in (ADAM, AVERAGED, DEFERRED)}
IDS = {
    "lookup": lambda ids: optzoo.lookup(TABLE, ids),
    "value_and_grad": lambda ids: optzoo.value_and_grad(
        lambda p: jnp.sum(optzoo.lookup(p["t"], ids))
    )(PARAMS),
    "lookup_sparse": lambda ids: optzoo.lookup_sparse(TABLE, ids, np.zeros(2, int), 1),
    "lookup_sparse, segments": lambda ids: optzoo.lookup_sparse(TABLE, np.zeros(2, int), ids, 1),
    "catch_up": lambda ids: optzoo.rows.catch_up(PARAMS, STATES[DEFERRED], {"t": ids}),
    "reset_rows": lambda ids: optzoo.growing.reset_rows(PARAMS, STATES[ADAM], {"t": ids}, tx=ADAM),
}
OTHERS = {
    "eval_params": lambda x: optzoo.eval_params({"t": x}, STATES[AVERAGED]),
    "swap_averages": lambda x: optzoo.state.swap_averages({"t": x}, STATES[AVERAGED]),
    "set_slot": lambda x: optzoo.set_slot(STATES[ADAM], "m", {"t": x}),
    "state_like": lambda x: optzoo.state.state_like(x, STATES[ADAM]),
    "slots_like": lambda x: optzoo.state.slots_like(STATES[ADAM], x),
    "take_over": lambda x: optzoo.rows.take_over(DEFERRED, PARAMS, x),
    "take_over, tx": lambda x: optzoo.rows.take_over(x, PARAMS, STATES[ADAM]),
    "resize_replicas": lambda x: optzoo.replicas.resize_replicas(AVERAGED, PARAMS, x, 2),
    "resize_replicas, tx": lambda x: optzoo.replicas.resize_replicas(x, PARAMS, STATES[ADAM], 2),
    "resize_table": lambda x: optzoo.growing.resize_table(PARAMS, x, {"t": 5}, tx=ADAM),
    "native_step": lambda x: optzoo.native_step(ADAM)(PARAMS, x, PARAMS),
    "minimize": lambda x: optzoo.minimize(lambda p: jnp.sum(p["t"]), ADAM)(PARAMS, x),
    "catch_up, params": lambda x: optzoo.rows.catch_up({"t": x}, STATES[DEFERRED]),
    "rows.add": lambda x: optzoo.rows.add(PARAMS, x),
    "uniform_rows": lambda x: optzoo.sharded.uniform_rows(x, 2) and None,
    "uniform_rows, width": lambda x: optzoo.sharded.uniform_rows(jax.random.key(0), x),
    "piecewise_constant": lambda x: optzoo.schedules.piecewise_constant(x, [1.0, 2.0]),
    "weights": lambda x: optzoo.lookup_sparse(TABLE, np.zeros((1, 3), int), weights=x),
}


# Of abstract parameters the dtypes are known, which is all that the averages need.
CASES = [
    (name, kind)
    for name in [*IDS, *OTHERS]
    for kind in KINDS
    if (name, kind)
    not in [
        ("eval_params", "a shape"),
        ("swap_averages", "a shape"),
        # JAX says what it is.
        *((name, "a string") for name in ("native_step", "minimize")),
        ("catch_up, params", "no columns"),
        # It is what is expected.
        ("uniform_rows", "a key"),
        ("weights", "None"),
    ]
]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_what_is_none_is_refused(name, kind):
    got, error = outcome(lambda: {**IDS, **OTHERS}[name](KINDS[kind]))
    assert got == "ours", repr(error)


def test_averages_are_of_the_parameters():
    """Not of some with more elements, or of integers, which would round them."""
    for x in (np.ones((5, 2), np.float32), np.ones((4, 2), int)):
        for function in (optzoo.eval_params, optzoo.state.swap_averages):
            with pytest.raises(
                ValueError, match=r"the average of parameter 't', .* does not match params"
            ):
                function({"t": x}, STATES[AVERAGED])


def test_a_state_of_other_shapes_is_not_taken_over():
    other = ADAM.init({"t": TABLE[:3]})
    with pytest.raises(ValueError, match="inner_state is not a state of the optimizer in tx"):
        optzoo.rows.take_over(DEFERRED, PARAMS, other)


@pytest.mark.parametrize("shape", [(0, 2), (4, 0), (0,)])
def test_tables_without_elements_have_no_lines(shape):
    with pytest.raises(ValueError, match="has no elements, and so no lines"):
        optzoo.rows.to_lines(jnp.ones(shape))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_slot_that_is_set_stays_finite(dtype):
    tx = optzoo.slots_dtype(optzoo.adagrad(0.1), dtype)
    state = optzoo.set_slot(tx.init(PARAMS), "accumulator", {"t": np.full_like(TABLE, 3.4e38)})
    got = optzoo.get_slot(state, "accumulator")["t"]
    assert got.dtype == dtype and np.all(np.asarray(got) == jnp.finfo(dtype).max)


def test_rows_are_no_slots():
    saved = {"0": STATES[ADAM][0]._asdict()}
    rows = KINDS["rows"]
    saved["0"]["slots"] = {"m": {"t": rows}, "v": PARAMS}
    with pytest.raises(ValueError, match="saved has no array at '0/slots/m/t'"):
        optzoo.state.state_like(saved, STATES[ADAM])


LOSS = lambda p, ids: jnp.sum(optzoo.lookup(p["t"], ids) ** 2)
BAG = np.array([[1, 2]])
ROWS = KINDS["rows"]


def native_step(tx=ADAM, state=None, grads=PARAMS):
    state = tx.init(PARAMS) if state is None else state
    return optzoo.native_step(tx)(PARAMS, state, grads)


def minimize(state):
    return optzoo.minimize(LOSS, optzoo.adam(0.1))(jax.tree.map(jnp.asarray, PARAMS), state, [0])


def pooled(table=TABLE, ids=BAG, weights=None):
    return optzoo.lookup_sparse(table, ids, weights=weights)


def test_bool_weights():
    np.testing.assert_array_equal(pooled(weights=np.array([[True, False]])), TABLE[1:2])


def resized(init, dtype="float32"):
    x = {"t": TABLE.astype(dtype)}
    return optzoo.growing.resize_table(x, ADAM.init(x), {"t": 5}, tx=ADAM, init=init)[0]["t"]


def resized_state(slot):
    first, *others = STATES[ADAM]
    state = first._replace(slots=first.slots._replace(m={"t": slot})), *others
    return optzoo.growing.resize_table(PARAMS, state, {"t": 5}, tx=ADAM)


def made(**changed):
    mesh = jax.make_mesh((1,), ("shard",))
    sharding = optzoo.sharded.RowSharding(4, 1, multiple=1)
    given = {"sharding": sharding, "mesh": mesh, "rows_of": lambda ids: jnp.ones((len(ids), 2))}
    return optzoo.sharded.create_table(**{**given, **changed})


def uniform(**changed):
    return optzoo.sharded.uniform_rows(**{"key": KINDS["a key"], "width": 2, **changed})


OF_ROWS = {"indices": np.array([1]), "values": TABLE[:1], "num_rows": 4}


# Calls that are refused, and what the errors say.
STATE = r"expected \(LeafwiseState with AdamSlots\(m, v\), EmptyState\), got "
STATES_OF_STEPS = {"an array": np.ones(3), "a number": 3, "a dict": {"m": 1}}


def with_narrow_slot(state):
    """The first array with the shape of the table has one column."""
    leaves, treedef = jax.tree.flatten(state)
    first = next(i for i, a in enumerate(leaves) if jnp.shape(a) == jnp.shape(TABLE))
    leaves[first] = leaves[first][:, :1]
    return treedef.unflatten(leaves)


REFUSED = {
    **{f"minimize, {k}": (lambda s=s: minimize(s), STATE) for k, s in STATES_OF_STEPS.items()},
    **{
        f"native_step, {k}": (lambda s=s: native_step(optzoo.adam(0.1), s), STATE)
        for k, s in STATES_OF_STEPS.items()
    },
    "no gradients": (
        lambda: optzoo.native_step(ADAM)(PARAMS, STATES[ADAM], None),
        "gradient of None, but is",
    ),
    "gradients, no dict": (lambda: native_step(grads={}), "structure of the parameters"),
    "a string as gradient": (lambda: native_step(grads={"t": "x"}), "'t' .* not an array, got 'x'"),
    "bags of a scalar": (lambda: pooled(1.0), "table must be an array"),
    "bags of an array without axes": (lambda: pooled(np.ones(())), "at least one dimension"),
    "bags of None": (lambda: pooled(None), "table must be an array or a tree"),
    "bags of two tables": (lambda: pooled({"a": TABLE, "b": TABLE}), "ids must be a tree like"),
    "weights of one table": (
        lambda: pooled({"a": TABLE, "b": TABLE}, {"a": BAG, "b": BAG}, {"a": np.ones((1, 2))}),
        "weights must be a tree like",
    ),
    "weights, a string": (lambda: pooled(weights="x"), "weights must be real numbers.* a str"),
    "weights, None in a list": (lambda: pooled(weights=[[1.0, None]]), "weights must be real"),
    "complex weights": (lambda: pooled(weights=np.ones((1, 2), complex)), "got dtype complex"),
    "weights of another shape": (lambda: pooled(weights=np.ones((2, 1))), r"of the ids, \(1, 2\)"),
    **{
        f"rows, {name} of {value!r}": (
            lambda name=name, value=value: SparseRows(**{**OF_ROWS, name: value}),
            f"SparseRows.{name} must be",
        )
        for name, values in {
            "indices": (None, "x", 1.0, [0.5], np.ones(1)),
            "values": (None, "x", 1.0, [[1.0]]),
            "num_rows": (None, 1.0, "x", -1, True),
        }.items()
        for value in values
    },
    "add, None": (lambda: optzoo.rows.add(ROWS, None), "other must have the structure of tree"),
    "add, a string": (lambda: optzoo.rows.add(ROWS, "x"), "must have numbers, got 'x'"),
    "add, strings": (lambda: optzoo.rows.add("x", "x"), "must have numbers, got 'x'"),
    "add, keys": (lambda: optzoo.rows.add(KINDS["a key"], KINDS["a key"]), "random keys"),
    "add, names": (lambda: optzoo.rows.add({"a": ROWS}, {"b": ROWS}), "the structure of tree"),
    "add, another shape": (lambda: optzoo.rows.add(TABLE, TABLE[:1]), "shapes of tree"),
    "init, a description": (lambda: ADAM.init({"a": Described()}), "'a' must have numbers"),
    "norm, a string": (lambda: optzoo.rows.global_norm({"a": "x"}), "'a' must have numbers"),
    "norm, a shape": (
        lambda: optzoo.rows.global_norm(KINDS["a shape"]),
        "has no values, got .* jax.eval_shape",
    ),
    "init, complex": (lambda: resized(lambda ids: np.ones((1, 2), complex)), "real numbers"),
    "init, keys": (
        lambda: resized(lambda ids: jax.random.split(KINDS["a key"], (1, 2))),
        "real numbers",
    ),
    **{
        f"catch_up, {k}": (lambda x=x: optzoo.rows.catch_up(x, STATES[DEFERRED]), message)
        for k, (x, message) in {
            "an array": (TABLE, "parameter '', .* got a dict"),
            "other names": ({"u": TABLE}, "a tree of another structure"),
            "None": (None, "a tree of another structure"),
            "more": ({"t": TABLE, "u": TABLE}, "a tree of another structure"),
            "fewer rows": ({"t": TABLE[:3]}, "parameter 't', .* got 4 rows"),
            "fewer columns": ({"t": TABLE[:, :1]}, r"'t', .* got a slot of shape \(4, 2\)"),
            "a string": ({"t": "x"}, "params must be a tree of arrays, got 'x' at 't'"),
        }.items()
    },
    "lookup_sparse, a mean of integers": (
        lambda: pooled(TABLE.astype(int)),
        "'sum' for a table of int32",
    ),
    "lookup_sparse, a part of integers": (
        lambda: optzoo.lookup_sparse(TABLE.astype(int), BAG, weights=BAG / 2, combiner="sum"),
        "weights must be integers for a table of int32, got float32",
    ),
    "catch_up, one slot of fewer columns": (
        lambda: optzoo.rows.catch_up({"t": TABLE}, with_narrow_slot(STATES[DEFERRED])),
        r"'t', .* got a slot of shape \(4, 1\)",
    ),
    "catch_up, a string as state": (
        lambda: optzoo.rows.catch_up(PARAMS, "x"),
        "no rows are deferred",
    ),
    **{
        f"create_table, {name} of {value!r}": (
            lambda name=name, value=value: made(**{name: value}),
            f"{name} must be",
        )
        for name in ("sharding", "mesh", "rows_of")
        for value in (None, "x", jax.sharding.PartitionSpec("shard"))
    },
    "rows_of, no rows": (lambda: made(rows_of=lambda ids: 1.0), "an array of 4 rows .* got ()"),
    "rows_of, one row": (lambda: made(rows_of=lambda ids: TABLE[:1]), "an array of 4 rows"),
    "rows_of, None": (lambda: made(rows_of=lambda ids: None), "an array of 4 rows .* got None"),
    **{
        f"uniform_rows, {name} of {value}": (
            lambda name=name, value=value: uniform(**{name: value}),
            f"{name} must be",
        )
        for name, values in {
            "key": (None, 0, "x", np.ones(3), np.ones((2, 2), np.uint32), KINDS["keys"]),
            "width": (None, 1.5, -1, True),
            "scale": (None, "x", -1, np.nan, np.inf, 3e38, np.ones(2)),
            "dtype": ("x", int, complex),
        }.items()
        for value in values
    },
    "uniform_rows, float16": (lambda: uniform(scale=4e4, dtype="float16"), "scale must be"),
    "lines, a string": (lambda: optzoo.rows.to_lines("x"), "array of numbers, got 'x'"),
    "lines, keys": (lambda: optzoo.rows.to_lines(KINDS["keys"]), "array of numbers, got"),
    "lines, a shape": (
        lambda: optzoo.rows.to_lines(KINDS["a shape"]),
        r"use jax.eval_shape\(optzoo.rows.to_lines, table\)",
    ),
    "resize, None in the state": (lambda: resized_state(None), "at '0/slots/m/t', got nothing"),
    "resize, a string": (lambda: resized_state("x"), "state .* got 'x' at '0/slots/m/t'"),
    "resize, None": (
        lambda: optzoo.growing.resize_table({"t": None}, STATES[ADAM], {"t": 5}, tx=ADAM),
        "'t' is None and has no rows",
    ),
    **{
        f"{name}, {value!r}": (lambda f=f, value=value: f(value, [1.0]), "must be a list")
        for name, f in {
            "piecewise_constant": optzoo.schedules.piecewise_constant,
            "values": lambda x, y: optzoo.schedules.piecewise_constant([1], x),
            "manual_stepping": optzoo.schedules.manual_stepping,
        }.items()
        for value in (0.5, None, "x", np.array(1))
    },
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case):
    call, message = REFUSED[case]
    with pytest.raises((TypeError, ValueError), match=message):
        call()


def test_a_native_step_without_a_gradient():
    params, _ = native_step(grads={"t": None})
    np.testing.assert_array_equal(params["t"], TABLE)


@pytest.mark.parametrize("table", [optzoo.rows.to_lines(TABLE), nnx.Param(jnp.asarray(TABLE))])
def test_bags_of_what_holds_a_table(table):
    np.testing.assert_array_equal(pooled(table), [[3, 4]])


def test_the_norm_of_complex_numbers():
    np.testing.assert_allclose(optzoo.rows.global_norm([np.array([3 + 4j])]), 5, rtol=1e-6)


@pytest.mark.parametrize("sign", [1, -1])
def test_new_rows_stay_finite(sign):
    huge = sign * jnp.full((1, 2), 1e6)
    want = sign * np.finfo(np.float16).max
    for rows in (huge, huge.astype(int)):
        got = resized(lambda ids, rows=rows: rows, "float16")[4]
        np.testing.assert_array_equal(got, [want, want])
    assert np.isinf(resized(lambda ids: huge * np.inf, "float16")[4]).all()


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_a_saved_state_of_other_bits(dtype):
    wide = lambda a: a.astype(dtype) if jnp.issubdtype(a.dtype, jnp.floating) else a
    saved = jax.tree.map(lambda a: wide(np.asarray(a)), STATES[ADAM])
    assert optzoo.state.state_like(saved, STATES[ADAM])[0].slots.m["t"].dtype == dtype


OTHER_NUMBERS = {"count": (complex, float, bool), "slots": (complex, int, bool)}


@pytest.mark.parametrize(("part", "dtype"), [(p, d) for p, ds in OTHER_NUMBERS.items() for d in ds])
def test_a_saved_state_of_other_numbers(part, dtype):
    """Without an error its updates would be complex, or slots that integers round."""
    first, *others = jax.tree.map(np.asarray, STATES[ADAM])
    changed = jax.tree.map(lambda a: a.astype(dtype), getattr(first, part))
    with pytest.raises(ValueError, match=rf"saved has .* at '0/{part}.*', but the state has"):
        optzoo.state.state_like((first._replace(**{part: changed}), *others), STATES[ADAM])


def test_rows_in_a_pickle():
    """Nothing that is known of them is lost."""
    rows = SparseRows(
        np.array([1]), TABLE[:1], 4, shard=Shard(("d",), 8, True), squares=np.ones(())
    )
    rows = optzoo.rows.Lines(rows, (4, 2)).value
    got = pickle.loads(pickle.dumps(rows))
    assert jax.tree.structure(got) == jax.tree.structure(rows)
    assert (got.shard, got.lines, got.coalesced) == (rows.shard, True, False)
    for a, b in zip(jax.tree.leaves(got.values), jax.tree.leaves(rows.values), strict=True):
        np.testing.assert_array_equal(a, b)
