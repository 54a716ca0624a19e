"""The exchange of a round runs beside its local steps: read from the schedules of the compilers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec

import optzoo

from .facts.cases import mesh_of, of, placed

WIDTH, STEPS, OVERLAP = 512, 6, 4
NBYTES = 4 * WIDTH * WIDTH
# Compilers for TPUs run a sum of all devices beside other operations only if they are asked to.
ASYNCHRONOUS = {
    "xla_enable_async_all_reduce": True,
    "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": "true",
}


def overlaps(device, overlap_steps, options=None):
    """The exchanges of a round with so many steps between."""
    report = round_of(device, overlap_steps, options)
    assert ("overlapped collectives:" in str(report)) == bool(report.overlaps)
    return [overlap for overlap in report.overlaps if overlap.nbytes >= NBYTES]


def round_of(device, overlap_steps, options=None, **arguments):
    """The report of a round."""
    mesh, by_replica = mesh_of(device, replica=4), PartitionSpec("replica")
    tx = optzoo.diloco(
        optzoo.momentum(0.1, 0.9),
        communication_period=STEPS,
        overlap_steps=overlap_steps,
        **arguments,
    )

    def step(params, state, x, exchange):
        of_one = lambda w: jnp.mean(jnp.tanh(x @ w) ** 2)
        value, grads = jax.value_and_grad(of_one)(optzoo.replicas.per_replica(params))
        updates, state = tx.update(grads, state, params, exchange=exchange)
        return optax.apply_updates(params, updates), state, value

    a_round = optzoo.replicas.scan_local_steps(step, overlap_steps=overlap_steps)
    w = of(WIDTH, WIDTH)
    start = lambda w: optzoo.replicas.replicate(w, tx.init(w), 4)
    args = jax.eval_shape(start, w)
    specs = optzoo.replicas.replica_specs(*args, PartitionSpec(), by_replica)
    args = *placed(args, mesh, specs), placed(of(4, STEPS, 32, WIDTH), mesh, by_replica)
    mapped = optzoo.replicas.map_over_replicas(a_round, mesh=mesh)
    jitted = jax.jit(mapped, donate_argnums=(0, 1), compiler_options=options)
    return optzoo.compile_report(jitted, *args, device=device)


@pytest.mark.parametrize(("device", "options"), [("v5e:2x2", ASYNCHRONOUS), ("h100:4", None)])
def test_an_exchange_runs_beside_the_steps_of_the_overlap(device, options):
    [found] = overlaps(device, OVERLAP, options)
    assert found.kind == "all-reduce" and found.nbytes == NBYTES
    assert found.turns == OVERLAP - 1  # and the last step, which is outside of the loop
    after = found.between[max(i for i, name in enumerate(found.between) if "while" in name) :]
    assert any("dot_general" in name for name in after)


@pytest.mark.parametrize(("device", "options"), [("v5e:2x2", ASYNCHRONOUS), ("h100:4", None)])
def test_without_an_overlap_no_step_runs_beside_the_exchange(device, options):
    found = overlaps(device, 0, options)
    assert all(overlap.turns == 0 for overlap in found)


def test_without_the_option_a_tpu_waits():
    assert overlaps("v5e:2x2", OVERLAP) == []


def lookups(device, width=128, rows=16_384, ids=4096):
    """A step, written by hand, with a sharded table and a network that needs its rows."""
    devices = optzoo.compiled.devices_of(device)
    mesh, n = Mesh(np.array(devices), ("shard",)), len(devices)
    sharding, by_rows = optzoo.sharded.RowSharding(rows, n), PartitionSpec("shard")

    def step(table, w, ids):
        def loss(table, w):
            read = optzoo.sharded.lookup(table, ids, sharding, capacity_factor=1.0)
            return jax.lax.pmean(jnp.mean((read @ w) ** 2), "shard")

        table_gradient, of_w = jax.grad(loss, (0, 1))(table, w)
        return table - table_gradient, w - of_w

    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(by_rows, PartitionSpec(), by_rows),
        out_specs=(by_rows, PartitionSpec()),
    )
    args = of(sharding.stored_rows, width), of(width, 512), of(n * ids, dtype=jnp.int32)
    return mapped, placed(args, mesh, (by_rows, PartitionSpec(), by_rows))


@pytest.mark.parametrize(
    ("device", "has_option"),
    [
        ("v5e:4x4", True),
        ("v5e:4x8", False),
        ("v6e:4x8", True),
        ("tpu7x:2x2x2", True),
        ("h100:8", False),
    ],
)
def test_the_option_for_all_to_alls(device, has_option):
    """The compiler for v5e refuses it for more than 16 chips."""
    step, args = lookups(device)
    wanted = {"xla_tpu_enable_async_all_to_all": "true"} if has_option else {}
    assert optzoo.rows.compiler_options(step, *args) == wanted


@pytest.mark.parametrize("device", ["v5e:2x2", "v6e:4x4", "h100:4"])
def test_rows_are_exchanged_beside_other_operations(device):
    """With the option on TPUs, and without any on GPUs."""
    step, args = lookups(device)
    options = optzoo.rows.compiler_options(step, *args) or None
    report = optzoo.compile_report(jax.jit(step, compiler_options=options), *args, device=device)
    [*found] = [o for o in report.overlaps if o.kind == "all-to-all" and o.nbytes > 1_000_000]
    assert found and all(o.cycles is None if "h100" in device else o.cycles > 0 for o in found)
    if options:
        report = optzoo.compile_report(jax.jit(step), *args, device=device)
        assert not [o for o in report.overlaps if o.kind == "all-to-all"]
        of_rows = [b for b in report.blocking if b.kind == "all-to-all" and b.nbytes > 1_000_000]
        assert len(of_rows) == 2
