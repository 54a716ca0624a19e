"""What ``compile_report`` says of programs for TPUs and GPUs that are not there."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import optzoo

ROWS, WIDTH, IDS = 1_000_000, 128, 4096
TABLE = 4 * ROWS * WIDTH  # bytes
ONE = ["v5e:2x2", "v6e:2x2", "h100"]
of = lambda *shape, dtype=jnp.float32: jax.ShapeDtypeStruct(shape, dtype)


def loss(params, ids, y):
    return jnp.mean((optzoo.lookup(params["table"], ids) @ params["w"] - y) ** 2)


def report_of(tx, device):
    params = {"table": of(ROWS, WIDTH), "w": of(WIDTH)}
    batch = of(IDS, dtype=jnp.int32), of(IDS)
    state = jax.eval_shape(tx.init, params)
    return optzoo.compile_report(optzoo.minimize(loss, tx), params, state, *batch, device=device)


@pytest.mark.parametrize("device", ONE)
def test_rows_of_128_in_place(device):
    found = report_of(optzoo.lazy_adam(1e-3), device)
    assert found.large == () and found.not_reused == {} and found.at_least == TABLE
    assert found.temporaries < 0.02 * found.arguments
    assert 3 * TABLE < found.reused < found.arguments < 3.01 * TABLE
    has_estimates = device != "h100"
    assert (found.estimated_bytes is not None) == has_estimates
    # Whether there are cycles for a v6e depends on the version of libtpu.
    if device != "v6e:2x2":
        assert (found.estimated_cycles is not None) == has_estimates
    assert f"compiled for {device}, one device" in str(found)


@pytest.mark.parametrize("device", ONE)
def test_a_dense_gradient(device):
    found = report_of(optzoo.adam(1e-3), device)
    assert found.temporaries >= TABLE
    assert any("to_dense" in line for op in found.large for line in op.lines)
    assert any(__file__ in line for op in found.large for line in op.lines)


@pytest.mark.parametrize("device", ONE)
def test_another_layout_and_a_donation_that_is_lost(device):
    def step(params, ids):
        return {"t": params["t"].astype(jnp.bfloat16)}, params["t"][ids].sum()

    jitted = jax.jit(step, donate_argnums=0)
    args = {"t": of(ROWS, 64)}, of(8, dtype=jnp.int32)
    found = optzoo.compile_report(jitted, *args, device=device, at_least=1000 * 64 * 4)
    assert found.not_reused == {"params['t']": 4 * ROWS * 64}
    assert found.large and "params['t']" in str(found)


def test_arguments_with_a_layout():
    """By rows, as results can be asked to be: nothing is copied. XLA's own choice is by columns."""
    device = "v5e:2x2"
    by_rows = Format(Layout((0, 1)), SingleDeviceSharding(optzoo.compiled.devices_of(device)[0]))
    table = jax.ShapeDtypeStruct((ROWS, 64), jnp.float32, sharding=by_rows)
    add = lambda table, ids: table.at[ids].add(1.0)
    kept = jax.jit(add, donate_argnums=0, out_shardings=by_rows)
    found = optzoo.compile_report(kept, table, of(8, dtype=jnp.int32), device=device)
    assert found.large == () and found.not_reused == {}
    assert found.arguments == pytest.approx(2 * 4 * ROWS * 64, rel=0.01)  # lanes of 128
    lost = jax.jit(add, donate_argnums=0)
    found = optzoo.compile_report(lost, table, of(8, dtype=jnp.int32), device=device)
    assert found.large != () and list(found.not_reused) == ["table"]


@functools.cache
def report_of_sharded(device, **options):
    """Of a step whose table has ``ROWS`` rows on each of four devices, and of its sharding."""
    mesh = Mesh(np.array(optzoo.compiled.devices_of(device)), ("shard",))
    sharding = optzoo.sharded.RowSharding(4 * ROWS, 4)
    tx = optzoo.lazy_adam(1e-3)
    step = optzoo.sharded_minimize(loss, tx, mesh, {"table": sharding}, **options)
    rows, all_of = PartitionSpec("shard"), PartitionSpec()
    place = lambda x, spec: jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=NamedSharding(mesh, spec)
    )
    by_rows = lambda x: place(x, rows if x.shape[:1] == (sharding.stored_rows,) else all_of)
    params = {"table": of(sharding.stored_rows, WIDTH), "w": of(WIDTH)}
    args = jax.tree.map(by_rows, (params, jax.eval_shape(tx.init, params)))
    batch = place(of(4 * IDS, dtype=jnp.int32), rows), place(of(4 * IDS), rows)
    return optzoo.compile_report(step, *args, *batch, device=device), sharding


@pytest.mark.parametrize("device", ["v5e:2x2", "h100:4"])
def test_sharded_tables(device):
    found, sharding = report_of_sharded(device)
    assert found.num_devices == 4 and found.large == () and found.not_reused == {}
    assert found.temporaries < 0.02 * found.arguments
    assert found.arguments == pytest.approx(3 * 4 * sharding.rows_per_shard * WIDTH, rel=0.01)
    sent = {(c.kind, c.in_loop): c for c in found.collectives}
    assert sent["all-to-all", True].number == 4
    # Ids and rows there, rows and ids back.
    assert 2 * IDS * WIDTH * 4 <= sent["all-to-all", True].nbytes < 3 * IDS * WIDTH * 4


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_transport_in_16_bits_converts_what_is_sent(dtype):
    """Not the whole shard, which is a temporary of 256 MB (XLA's choice for bfloat16 on TPUs)."""
    found, _ = report_of_sharded("v5e:2x2", transport=dtype)
    assert found.large == () and found.temporaries < 0.02 * found.arguments
    plain, _ = report_of_sharded("v5e:2x2")
    assert found.estimated_bytes < plain.estimated_bytes
    # In the first round, and in the loop of further rounds.
    sent = [c for c in found.collectives if c.kind == "all-to-all"]
    assert [c.in_loop for c in sent] == [False, True]
    assert all(IDS * WIDTH * 4 <= c.nbytes < 1.5 * IDS * WIDTH * 4 for c in sent)


def test_what_does_not_fit():
    tx, params = optax.adam(1e-3), {"table": of(40 * ROWS, 128)}
    state = jax.eval_shape(tx.init, params)
    update = jax.jit(lambda g, s, x: tx.update(g, s, x), donate_argnums=(1, 2))
    words = r"of 'v5e:2x2': the largest .* args\[0\]\['table'\] 20\.5 GB"
    with pytest.raises(MemoryError, match=words):
        optzoo.compile_report(update, params, state, params, device="v5e:2x2")


def test_slices_that_do_not_exist():
    with pytest.raises(ValueError, match="device='v5e:7x1' is not supported by its compiler"):
        optzoo.compiled.devices_of("v5e:7x1")


@pytest.mark.parametrize(
    "tx",
    [
        optzoo.row_wise_adagrad(0.1),
        optzoo.row_wise_rmsprop(0.1),
        optzoo.slots_dtype(optzoo.lazy_adam(0.1), "bfloat16", stochastic=True, packed=True),
    ],
    ids=["row_wise_adagrad", "row_wise_rmsprop", "packed"],
)
def test_no_lookup_is_repeated_after_the_update(tx):
    """XLA for GPUs would copy the table twice."""
    found = report_of(tx, "h100")
    assert found.large == () and found.temporaries < 14e6
