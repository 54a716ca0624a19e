"""The exchange of a round runs beside its local steps: read from the schedules of the compilers."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec

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
    assert ("beside other operations:" in str(report)) == bool(report.overlaps)
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
