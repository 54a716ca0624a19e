"""Click prediction with an embedding table in files, of which the device has a cache.

Each example has 26 categories, as those of Criteo: ids by Zipf's law, each category in a part of
the table. Whether it was clicked follows a score of its ids, which the model has to learn.

    python examples/host_table.py --folder /tmp/clicks --steps 300

Stop it at any moment, by Ctrl-C or ``kill -9``, or in the middle by ``--stop-at 150``, and start it
again: it goes on at its last flush, and ends with the same numbers. The disk of the folder needs
room for the table and two slots.
"""

import argparse
import hashlib
import itertools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optzoo

FEATURES, BATCH, WIDTH = 26, 256, 16
TX = optzoo.param_groups({"table": optzoo.lazy_adam(0.01), "net/.*": optzoo.adam(0.003)})


def batches(rows, first):
    """Ids and clicks of each step, which depend on its number alone, from the first one on."""
    part = rows // FEATURES
    total = np.cumsum(np.arange(1, part + 1) ** -1.1)
    for step in itertools.count(first):
        rng = np.random.default_rng([0, step])
        ranks = np.searchsorted(total, rng.random((BATCH, FEATURES)) * total[-1])
        ids = (np.arange(FEATURES) * part + ranks * 2654435761 % part).astype(np.int32)
        score = np.sin(ids * 0.37).sum(1) / 2
        clicked = rng.random(BATCH) < 1 / (1 + np.exp(-score))
        yield ids, clicked.astype(np.float32)


def loss(params, ids, clicked):
    """The cross-entropy of a net over the rows of an example."""
    x = params["table"][ids].reshape(len(ids), -1)
    for layer in params["net"][:-1]:
        x = jax.nn.relu(x @ layer["kernel"] + layer["bias"][None])
    last = params["net"][-1]
    logits = (x @ last["kernel"] + last["bias"][None])[:, 0]
    return jnp.mean(optax.sigmoid_binary_cross_entropy(logits, clicked))


def net():
    """The first weights of the layers."""
    sizes = [FEATURES * WIDTH, 64, 1]
    keys = jax.random.split(jax.random.key(1), 2)
    return {
        "net": [
            {"kernel": jax.random.normal(key, (a, b)) / a**0.5, "bias": jnp.zeros(b)}
            for key, (a, b) in zip(keys, itertools.pairwise(sizes), strict=True)
        ]
    }


def progress(step, value, now, before):
    """One line: the loss, and what the store has done since the last one."""
    of = {name: getattr(now, name) - getattr(before, name) for name in now._fields}
    return (
        f"step {step:5}: loss {value:.4f}, {of['hits'] / max(1, of['distinct']):.0%} hits, "
        f"{of['rows_in'] / of['steps']:,.0f} rows in and {of['rows_out'] / of['steps']:,.0f} out, "
        f"waited {1e3 * of['seconds_waited'] / of['steps']:.1f} ms"
    )


def main():
    """Trains to a number of steps, from where the folder is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=pathlib.Path, required=True)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--cache-rows", type=int, default=100_000)
    parser.add_argument("--flush-every", type=int, default=100)
    parser.add_argument("--stop-at", type=int, help="a step after which it ends without a flush")
    args = parser.parse_args()

    store = optzoo.host.HostTable(
        jax.ShapeDtypeStruct((args.rows, WIDTH), jnp.float32),
        TX,
        args.cache_rows,
        init=optzoo.sharded.uniform_rows(jax.random.key(0), WIDTH),
        folder=args.folder,
    )
    params, state = store.init(net())
    print(f"{store}: begins at step {store.step}", flush=True)
    step, before = store.minimize(loss), store.stats()
    data = itertools.islice(batches(args.rows, store.step), args.steps - store.step)
    for places, (_, clicked) in store.ahead(data, ids=lambda batch: batch[0]):
        params, state, value = step(*store.swap(params, state), places, clicked)
        if store.step % 50 == 0:
            print(progress(store.step, value, store.stats(), before), flush=True)
            before = store.stats()
        if store.step == args.stop_at:
            raise SystemExit(f"stopped at step {store.step}, without a flush")
        if store.step % args.flush_every == 0:
            store.flush(params, state)
    params, state = store.flush(params, state)
    digest = hashlib.sha256(params["table"].tobytes()).hexdigest()[:16]
    print(f"ends at step {store.step}; the table has the checksum {digest}")


if __name__ == "__main__":
    main()
