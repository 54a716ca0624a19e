"""What the compiled programs send, and when."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import optzoo
from optzoo.distributed.engine.collectives import Replicas
from optzoo.testing import samples

from ..selection import chosen_first
from . import cases

pytestmark = pytest.mark.optimized

PERIODIC = [m for m in cases.METHODS if not m.startswith(("sync", "drop", "diloco, streaming"))]
QUICK = ["elastic_average", "agn, round robin", "model_average, of slots", "diloco"]
COLLECTIVE = (
    r"= .*? (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)
# A loop over one number, and not one for each replica: that would be a select.
TURN_OR_NONE = re.compile(r"= \(pred\[\], .* while\(")


@functools.cache
def program(method, **static):
    """The optimized HLO of a train step, on as many devices as there are replicas."""
    tx = cases.METHODS[method](optzoo.adam(0.1), cases.REPLICAS)
    step = cases.train_step(tx, **static)
    batch = jax.tree.map(lambda a: a[0], cases.batches())
    lowered = cases.over("shard_map", step, tx).lower(*cases.start(tx, "shard_map"), *batch)
    return lowered.as_text(), lowered.compile().as_text()


def computations(hlo, conditional):
    """The computations of a program that run always, or only in a branch or in a loop."""
    texts, entry = {}, None
    for block in re.split(r"\n(?=(?:ENTRY )?%?[\w.-]+ \()", hlo):
        if head := re.match(r"(ENTRY )?%?([\w.-]+) \(", block):
            texts[head[2]] = block
            entry = head[2] if head[1] else entry
    assert entry is not None

    def reached(name, seen):
        if name in seen or name not in texts:
            return seen
        seen.add(name)
        for line in texts[name].splitlines():
            if " conditional(" not in line and " while(" not in line:
                for called in re.findall(r"(?:calls|to_apply)=%?([\w.-]+)", line):
                    reached(called, seen)
        return seen

    always = reached(entry, set())
    return [text for name, text in texts.items() if (name not in always) == conditional]


def collectives(hlo, conditional):
    """The collectives that run always, or only in a branch or in a loop."""
    return re.findall(COLLECTIVE, "\n".join(computations(hlo, conditional)))


@pytest.mark.parametrize("method", chosen_first(PERIODIC, QUICK))
def test_a_quiet_step_sends_nothing(method):
    """All that is sent is in a loop that has one turn, or none on a quiet step."""
    _, hlo = program(method)
    assert collectives(hlo, conditional=False) == []
    assert "all-reduce" in collectives(hlo, conditional=True)
    assert TURN_OR_NONE.search(hlo)


ALONE = {
    "elastic_average": lambda inner: optzoo.elastic_average(inner, 1, axis_name=None),
    "agn": lambda inner: optzoo.agn(inner, axis_name=None),
    "model_average": lambda inner: optzoo.model_average(inner, axis_name=None),
    "diloco": lambda inner: optzoo.diloco(inner, axis_name=None),
}


@pytest.mark.parametrize("method", ALONE)
def test_a_quiet_step_copies_no_parameters(method):
    """What the loop carries stays in its place."""
    tx, x = ALONE[method](optzoo.adam(0.1)), jnp.ones((64, 128))
    step = jax.jit(samples.step_of(tx), donate_argnums=(0, 1))
    hlo = step.lower(x, tx.init(x), x).compile().as_text()
    # Newer XLA calls the loop of a CPU as a function, which it compiles into one kernel.
    always = "\n".join(computations(hlo, conditional=False))
    assert TURN_OR_NONE.search(always) and not re.search(r"f32\[64,128\]\S* copy\(", always)


@pytest.mark.parametrize("method", chosen_first(PERIODIC, QUICK))
def test_a_local_step_has_no_collective(method):
    _, hlo = program(method, exchange=False)
    assert collectives(hlo, False) == collectives(hlo, True) == []
    assert " conditional(" not in hlo


SUMMED = [m for m in PERIODIC if "robin" not in m]


@pytest.mark.parametrize(
    "method", chosen_first(SUMMED, ["agn", *(m for m in QUICK if m in SUMMED)])
)
def test_an_exchange_is_one_sum_for_each_dtype(method):
    stable, hlo = program(method, exchange=True)
    sent = re.findall(r"stablehlo\.all_reduce.*?-> tensor<[^>]*?(f32|i32)>", stable, flags=re.S)
    assert sorted(sent) == ["f32", "i32"]
    assert set(collectives(hlo, False)) == {"all-reduce"} and len(collectives(hlo, False)) <= 2


def test_synchronous_training_is_one_sum_for_each_dtype_and_no_condition():
    stable, hlo = program("sync_replicas")
    sent = re.findall(r"stablehlo\.all_reduce.*?-> tensor<[^>]*?(f32|i32)>", stable, flags=re.S)
    # The rows of the table are gathered as rows.
    assert sorted(sent) == ["f32", "i32"] and stable.count("stablehlo.all_gather") == 2
    assert " conditional(" not in hlo


def test_the_loop_has_one_turn_for_all_where_all_replicas_are_on_one_device():
    tx = cases.METHODS["elastic_average"](optzoo.adam(0.1), cases.REPLICAS)
    batch = jax.tree.map(lambda a: a[0], cases.batches())
    train = cases.over("vmap", cases.train_step(tx), tx)
    assert TURN_OR_NONE.search(train.lower(*cases.start(tx), *batch).compile().as_text())


def test_a_round_sends_once():
    tx = cases.METHODS["elastic_average"](optzoo.adam(0.1), cases.REPLICAS)

    def step(params, state, ids, target, exchange):
        _, grads = optzoo.value_and_grad(cases.loss_fn)(params, ids, target)
        return samples.step(tx, grads, params, state, exchange=exchange)

    step = optzoo.replicas.map_over_replicas(
        optzoo.replicas.scan_local_steps(step), mesh=cases.mesh()
    )
    ids, target, _ = jax.tree.map(lambda a: a.swapaxes(0, 1), cases.batches(3))
    lowered = jax.jit(step).lower(*cases.start(tx, "shard_map"), ids, target)
    assert lowered.as_text().count("stablehlo.all_reduce") == 2  # floats, and a count
    assert " conditional(" not in lowered.compile().as_text()


@pytest.mark.parametrize(("bucket_bytes", "messages"), [(1 << 20, 1), (16, 2), (None, 3), (0, 3)])
def test_small_arrays_travel_together(bucket_bytes, messages):
    """Of 40, 12 and 4 bytes."""
    tree = {**cases.params(), "scalar": np.float32(1)}
    replicas = Replicas("replica", bucket_bytes)
    summed = jax.shard_map(
        lambda tree: replicas.sum(jax.tree.map(lambda a: a * replicas.index, tree)),
        mesh=cases.mesh(),
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(),
    )
    assert jax.jit(summed).lower(tree).as_text().count("stablehlo.all_reduce") == messages
    for got, one in zip(*map(jax.tree.leaves, (jax.jit(summed)(tree), tree)), strict=True):
        np.testing.assert_allclose(got, 6 * one)
