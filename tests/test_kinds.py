"""Arguments of another kind where an array is expected: as defined, or refused in words."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optzoo
from optzoo import SparseRows

from .mismatches import outcome

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
ASLEEP = optzoo.caught_up(ADAM, mask=True)


STATES = {tx: tx.init(PARAMS) for tx in (ADAM, AVERAGED, ASLEEP)}
IDS = {
    "lookup": lambda ids: optzoo.lookup(TABLE, ids),
    "value_and_grad": lambda ids: optzoo.value_and_grad(
        lambda p: jnp.sum(optzoo.lookup(p["t"], ids))
    )(PARAMS),
    "lookup_sparse": lambda ids: optzoo.lookup_sparse(TABLE, ids, np.zeros(2, int), 1),
    "lookup_sparse, segments": lambda ids: optzoo.lookup_sparse(TABLE, np.zeros(2, int), ids, 1),
    "catch_up": lambda ids: optzoo.rows.catch_up(PARAMS, STATES[ASLEEP], {"t": ids}),
    "reset_rows": lambda ids: optzoo.growing.reset_rows(PARAMS, STATES[ADAM], {"t": ids}, tx=ADAM),
}
OTHERS = {
    "eval_params": lambda x: optzoo.eval_params({"t": x}, STATES[AVERAGED]),
    "swap_averages": lambda x: optzoo.state.swap_averages({"t": x}, STATES[AVERAGED]),
    "set_slot": lambda x: optzoo.set_slot(STATES[ADAM], "m", {"t": x}),
    "state_like": lambda x: optzoo.state.state_like(x, STATES[ADAM]),
    "slots_like": lambda x: optzoo.state.slots_like(STATES[ADAM], x),
    "take_over": lambda x: optzoo.rows.take_over(ASLEEP, PARAMS, x),
    "take_over, tx": lambda x: optzoo.rows.take_over(x, PARAMS, STATES[ADAM]),
    "resize_replicas": lambda x: optzoo.replicas.resize_replicas(AVERAGED, PARAMS, x, 2),
    "resize_replicas, tx": lambda x: optzoo.replicas.resize_replicas(x, PARAMS, STATES[ADAM], 2),
    "resize_table": lambda x: optzoo.growing.resize_table(PARAMS, x, {"t": 5}, tx=ADAM),
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
        ("resize_table", "a string"),  # JAX says it
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
            with pytest.raises(ValueError, match=r"the average of parameter 't', .* is not that"):
                function({"t": x}, STATES[AVERAGED])


def test_a_state_of_other_shapes_is_not_taken_over():
    other = ADAM.init({"t": TABLE[:3]})
    with pytest.raises(ValueError, match="inner_state is not a state of the optimizer in tx"):
        optzoo.rows.take_over(ASLEEP, PARAMS, other)


@pytest.mark.parametrize("shape", [(0, 2), (4, 0), (0,)])
def test_tables_without_elements_have_no_lines(shape):
    with pytest.raises(ValueError, match="one without elements"):
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
