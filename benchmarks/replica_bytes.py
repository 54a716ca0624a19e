"""Bytes that the methods for replicas send and store, from programs for 16 TPUs.

    .venv-accelerators/bin/python benchmarks/replica_bytes.py [--device v5e:4x4] [--save]

No TPUs are needed. The parameters are 12 matrices of 2048 x 4096, 100.7 million elements; each
replica is one device, with Adam inside. The step with the exchange is compiled. Sent bytes are for
ring algorithms: a sum over n devices is sent 2 (n - 1) / n times, the arrays of an all-gather or
all-to-all (n - 1) / n times. Kept bytes are those of a replica without its parameters and the slots
of Adam.
"""

import argparse
import math

import harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import optzoo

PERIOD, MATRICES, SHAPE = 64, 12, (2048, 4096)
RINGS = {"all-reduce": 2, "all-gather": 1, "all-to-all": 1, "reduce-scatter": 1}


def methods(replicas):
    """The optimizer, the exchanges of a period, and the steps of a period, by name."""
    adam = optzoo.adam(1e-3)
    diloco = lambda **options: optzoo.diloco(adam, communication_period=PERIOD, **options)
    few = lambda name: diloco(exchange_dtype=name, error_feedback=True)
    return {
        "sync_replicas": (optzoo.sync_replicas(adam, replicas), 1, 1),
        "drop_stale_gradient": (optzoo.drop_stale_gradient(adam, 4), 1, 1),
        "elastic_average": (
            optzoo.elastic_average(adam, replicas, communication_period=PERIOD),
            1,
            PERIOD,
        ),
        "agn": (optzoo.agn(adam, communication_period=PERIOD), 1, PERIOD),
        "model_average": (optzoo.model_average(adam, interval_steps=PERIOD), 1, PERIOD),
        "diloco": (diloco(), 1, PERIOD),
        "diloco, 4 fragments": (diloco(fragments=4), 4, PERIOD),
        "diloco, 4 fragments, overlap": (diloco(fragments=4, overlap_steps=8), 4, PERIOD),
        **{f"diloco, {name}, feedback": (few(name), 1, PERIOD) for name in ("bfloat16", "int8")},
        **{f"diloco, {name}, feedback": (few(name), 1, PERIOD) for name in ("int4", "int2")},
    }


def compiled(tx, mesh, exchanges):
    """The report of a step with an exchange: of the first fragment, if there are several."""
    when = {"exchange": True, "fragment": 0} if exchanges > 1 else {"exchange": True}
    params = [jax.ShapeDtypeStruct(SHAPE, jnp.float32)] * MATRICES
    start = lambda params: optzoo.replicas.replicate(params, tx.init(params), mesh.size)
    carry = jax.eval_shape(start, params)
    specs = optzoo.replicas.replica_specs(*carry, PartitionSpec(), PartitionSpec("replica"))
    is_shared = isinstance(specs[0], PartitionSpec) and specs[0] == PartitionSpec()

    def step(params, state, target):
        grads = jax.tree.map(lambda x: x - target, optzoo.replicas.per_replica(params))
        updates, state = tx.update(grads, state, params, **({} if is_shared else when))
        return optax.apply_updates(params, updates), state

    def place(spec, tree):
        at = NamedSharding(mesh, spec)
        shape = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=at)
        return jax.tree.map(shape, tree)

    carry = jax.tree.map(place, specs, carry, is_leaf=lambda s: isinstance(s, PartitionSpec))
    target = place(PartitionSpec("replica"), jax.ShapeDtypeStruct((mesh.size,), jnp.float32))
    jitted = jax.jit(optzoo.replicas.map_over_replicas(step, mesh=mesh), donate_argnums=(0, 1))
    return jitted, (*carry, target)


def kept(tx):
    """Bytes of one replica without the parameters and the slots of Adam."""
    params = [jax.ShapeDtypeStruct(SHAPE, jnp.float32)] * MATRICES
    size = lambda tree: sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(tree))
    states = [jax.eval_shape(tx.init, params) for tx in (tx, optzoo.adam(1e-3))]
    return size(states[0]) - size(states[1])


def main():
    """Compiles all, prints and saves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="v5e:4x4")
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    devices = optzoo.compiled.devices_of(args.device)
    mesh, table = Mesh(np.array(devices), ("replica",)), {}
    for name, (tx, exchanges, period) in methods(len(devices)).items():
        jitted, arguments = compiled(tx, mesh, exchanges)
        report = optzoo.compile_report(jitted, *arguments, device=args.device)
        ring = (len(devices) - 1) / len(devices)
        at_once = sum(RINGS[c.kind] * c.nbytes * ring for c in report.collectives)
        table[name] = {
            "MB at once": at_once / 1e6,
            "MB per step": at_once * exchanges / period / 1e6,
            "MB kept": kept(tx) / 1e6,
            "temporaries MB": report.temporaries / 1e6,
            "collectives": {c.kind: [c.number, c.nbytes] for c in report.collectives},
        }
        row = table[name]
        cells = [f"{row[key]:,.1f}" for key in ("MB at once", "MB per step", "MB kept")]
        print(f"| {name} | {' | '.join(cells)} | {row['temporaries MB']:,.0f} |", flush=True)
    if args.save:
        harness.save("replica_bytes", {"device": args.device, "period": PERIOD, "methods": table})


if __name__ == "__main__":
    main()
