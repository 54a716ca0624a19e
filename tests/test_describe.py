"""What describe finds for optimizers whose sizes can be counted by hand."""

import jax
import jax.numpy as jnp
import optax
import pytest

import optzoo
from optzoo import CATALOG, describe
from optzoo.testing import samples

PARAMS = {"a": jnp.ones((20, 3)), "b": {"c": jnp.ones(4)}}
N = 64  # elements in them


def test_adam():
    found = describe(optzoo.adam(), PARAMS)
    assert found.slots == (
        ("m", "a", (20, 3), "float32", 240),
        ("m", "b/c", (4,), "float32", 16),
        ("v", "a", (20, 3), "float32", 240),
        ("v", "b/c", (4,), "float32", 16),
    )
    assert found.elements == N and found.parameters == 4 * N
    scalars = 1 + 2  # the count and two powers
    assert found.state == 2 * 4 * N + 4 * scalars
    assert found.moved == 3 * 4 * N + 2 * found.state
    assert found.state_per_parameter == found.state / N
    assert (found.sent, found.sent_at_times) == (0, 0)


def test_what_is_no_transformation():
    with pytest.raises(TypeError, match=r"^tx must be an optax transformation such as .*'adam'"):
        describe("adam", PARAMS)


def test_no_parameters():
    """Of which the counters alone are state: there is no element to divide it by."""
    found = describe(optzoo.adam(), {})
    assert (found.elements, found.state, found.state_per_parameter) == (0, 12, 0)


def test_other_dtypes_and_shapes():
    abstract = jax.eval_shape(lambda: PARAMS)
    half = describe(optzoo.slots_dtype(optzoo.momentum(0.1, 0.9), "bfloat16"), abstract)
    assert {s.dtype for s in half.slots} == {"bfloat16"}
    assert sum(s.nbytes for s in half.slots) == 2 * N
    shampoo = describe(optzoo.shampoo(), PARAMS)
    assert ("Gbar", "a/0", (20, 20), "float32", 1600) in shampoo.slots


@pytest.mark.parametrize(
    ("tx", "sent", "at_times"),
    [
        (optzoo.elastic_average(optzoo.adam(), 8), 0, 4 * N),
        (optzoo.model_average(optzoo.adam()), 0, 4 * N),
        (optzoo.sync_replicas(optzoo.adam(), 8), 4 * N, 0),
    ],
)
def test_what_is_sent(tx, sent, at_times):
    found = describe(tx, PARAMS)
    few = 32  # bytes of the engine itself: how many replicas there are, which are due
    assert sent <= found.sent <= sent + few and at_times <= found.sent_at_times <= at_times + few


def test_two_slots_of_one_name_have_their_paths():
    found = describe(optzoo.agn(optzoo.adam()), PARAMS)
    assert {"per_replica/inner/0/m", "replicated/method/center_inner/0/m"} <= {
        s.slot for s in found.slots
    }


def test_foreign_optimizers_and_groups():
    tx = optax.partition(
        {"x": optax.adam(1e-3), "y": optzoo.ftrl(0.1)}, {"a": "x", "b": {"c": "y"}}
    )
    found = describe(tx, PARAMS)
    assert [(s.slot, s.parameter) for s in found.slots] == [
        ("mu", "a"), ("nu", "a"), ("accum", "b/c"), ("linear", "b/c")
    ]  # fmt: skip


@pytest.mark.parametrize("name", CATALOG)
def test_every_optimizer_has_a_table(name):
    params = samples.params()
    found = describe(CATALOG[name].make(), params)
    table = str(found).splitlines()
    assert table[0].split() == ["slot", "parameter", "shape", "dtype", "bytes"]
    assert len(table) == 1 + len(found.slots) + 4
    assert f"state: {found.state:,} bytes" in table[-3]


def test_an_argument_of_update_that_is_missing():
    needs = optax.GradientTransformationExtraArgs(
        lambda p: optax.EmptyState(), lambda g, s, p=None, *, value, **_: (g, s)
    )
    with pytest.raises(TypeError, match="value"):
        describe(needs, PARAMS)
    assert describe(needs, PARAMS, value=1.0).state == 0


def test_another_number_of_replicas():
    tx = optzoo.elastic_average(optzoo.adam(), 4)
    with pytest.raises(ValueError, match="num_workers must be the size of the axis") as caught:
        describe(tx, PARAMS)
    assert "num_replicas=8 and axis_name='replica'" in "".join(caught.value.__notes__)
    assert describe(tx, PARAMS, num_replicas=4).sent_at_times > 0


def test_tables_sharded_by_rows():
    s = optzoo.sharded.RowSharding(1000, 4, multiple=16)
    params = {"table": jnp.zeros((s.stored_rows, 8)), "w": jnp.zeros(3)}
    about = describe(
        optzoo.adagrad(0.1), params, tables={"table": s}, ids={"table": 100}, capacity_factor=None
    )
    [table] = about.tables
    rows = s.rows_per_shard
    assert table == ("table", s, rows * 8 * 4 * 2, 100, 3 * 100 * 2 * (8 * 4 + 4), 100 * 5 * 32)
    assert "table  4 (mod)" in str(about)
    half = describe(optzoo.row_wise_adagrad(0.1), params, tables={"table": s}, ids={"table": 100})
    assert half.tables[0].kept == rows * (8 * 4 + 4)
    assert half.tables[0].capacity == s.capacity(100, 1.0) < 100
    with pytest.raises(ValueError, match="ids must have the patterns of tables"):
        describe(optzoo.adagrad(0.1), params, tables={"table": s})
