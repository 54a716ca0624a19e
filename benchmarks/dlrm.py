"""A step of DLRM-v2 as in MLPerf, compiled for TPU slices, which are not needed.

    JAX_PLATFORMS=cpu .venv/bin/python benchmarks/dlrm.py [v5e:4x4 v6e:4x4 ...] [--dense | --native]

26 tables of width 128 with a total of 28.1 million rows, 214 ids per example, Adagrad, 4,096
examples per chip. The sizes of the tables are those of MLPerf with 4,783,082 rows in place of 40
million, so that they sum to 28.1 million: the sizes used by others are not published. The tables
are concatenated in one array, sharded by rows.

Nothing is run. Bytes read and written are estimates of the compiler, which include the body of a
loop once. ``--dense``: the same with dense gradients of the sharded table, by XLA only.
``--native``: with a kernel that updates the rows.
"""

import argparse
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import optzoo

CAP, WIDTH, DENSE = 4_783_082, 128, 13
SIZES = [40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956]
SIZES += [405_282, 10, 2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152]
SIZES += [12_973, 108, 36]
SIZES = np.minimum(SIZES, CAP)
HOT = [3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1]
ROWS = int(SIZES.sum())
FIRST = np.repeat(np.cumsum(SIZES) - SIZES, HOT).astype("int32")  # of the table of each id
FEATURE = np.repeat(np.arange(len(HOT)), HOT).astype("int32")
BOTTOM, TOP = [DENSE, 512, 256, WIDTH], [WIDTH * (1 + len(HOT)), 1024, 1024, 512, 256, 1]
CROSS, RANK = 3, 512


def layers(sizes):
    """The shapes of a perceptron."""
    return [{"w": pair, "b": pair[1:]} for pair in itertools.pairwise(sizes)]


def shapes(stored_rows):
    """The shapes of all parameters."""
    d = TOP[0]
    cross = [{"v": (d, RANK), "w": (RANK, d), "b": (d,)} for _ in range(CROSS)]
    tree = {"bottom": layers(BOTTOM), "cross": cross, "top": layers(TOP)}
    tree["table"] = (stored_rows, WIDTH)
    is_shape = lambda x: isinstance(x, tuple)
    of = lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    return jax.tree.map(of, tree, is_leaf=is_shape)


def perceptron(x, parts):
    """A perceptron; the last layer has an activation, too."""
    for part in parts:
        x = jax.nn.relu(x @ part["w"] + part["b"])
    return x


def loss_of(pooled, params, dense, labels):
    """The loss for sums of bags of shape (examples, features, width)."""
    first = perceptron(dense, params["bottom"])
    x = x0 = jnp.concatenate([first[:, None], pooled], 1).reshape(len(first), -1)
    for part in params["cross"]:
        x = x0 * (x @ part["v"] @ part["w"] + part["b"]) + x
    last = params["top"][-1]
    logits = (perceptron(x, params["top"][:-1]) @ last["w"] + last["b"])[:, 0]
    return jnp.mean(optax.sigmoid_binary_cross_entropy(logits, labels))


def bags(ids):
    """The rows of all ids, and the bag of each."""
    examples, features = len(ids), len(HOT)
    segments = jnp.arange(examples, dtype=jnp.int32)[:, None] * features + FEATURE
    return (ids + FIRST).reshape(-1), segments.reshape(-1), examples * features


def sparse_loss(params, ids, dense, labels):
    """The loss with row-sparse gradients of the table."""
    total = optzoo.lookup_sparse(params["table"], *bags(ids), combiner="sum")
    return loss_of(total.reshape(len(ids), len(HOT), WIDTH), params, dense, labels)


def dense_loss(params, ids, dense, labels):
    """The loss with a dense gradient of the table."""
    rows, segments, number = bags(ids)
    total = jax.ops.segment_sum(params["table"][rows], segments, number)
    return loss_of(total.reshape(len(ids), len(HOT), WIDTH), params, dense, labels)


def dense_step(tx):
    """A step by optax, for the comparison."""

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, *batch):
        value, grads = jax.value_and_grad(dense_loss)(params, *batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def report(device, is_dense, is_native, examples):
    """Prints the report of the step for a slice."""
    devices = optzoo.compiled.devices_of(device)
    mesh = Mesh(np.array(devices), ("shard",))
    sharding = optzoo.sharded.RowSharding(ROWS, len(devices))
    by_rows, everywhere = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (["shard"], []))
    put = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
    place = lambda x: put(x, by_rows if x.shape[:1] == (sharding.stored_rows,) else everywhere)
    tx = optax.adagrad(0.01) if is_dense else optzoo.adagrad(0.01)
    params = shapes(sharding.stored_rows)
    params, state = jax.tree.map(place, (params, jax.eval_shape(tx.init, params)))
    n = examples * len(devices)
    kinds = [((n, sum(HOT)), jnp.int32), ((n, DENSE), jnp.float32), ((n,), jnp.float32)]
    batch = [put(jax.ShapeDtypeStruct(*kind), by_rows) for kind in kinds]
    step = (
        dense_step(tx)
        if is_dense
        else optzoo.sharded_minimize(sparse_loss, tx, mesh, {"table": sharding}, native=is_native)
    )
    shard = 4 * WIDTH * sharding.rows_per_shard
    return optzoo.compile_report(step, params, state, *batch, device=device, at_least=shard)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("devices", nargs="*", default=["v5e:4x4"])
    parser.add_argument("--dense", action="store_true", help="with dense gradients")
    parser.add_argument("--native", action="store_true", help="rows are updated by a kernel")
    parser.add_argument("--examples", type=int, default=4096, help="on each chip")
    args = parser.parse_args()
    print(f"{ROWS:,} rows in {len(SIZES)} tables, {sum(HOT)} ids in an example")
    for device in args.devices:
        print(report(device, args.dense, args.native, args.examples), flush=True)
