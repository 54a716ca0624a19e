"""A wide and deep model with tables sharded by rows, on the source code that Python comes with.

Is the next token of a program a name? The features are the last eight tokens and crosses of them,
hashed to the rows of two tables: the wide part has a weight for each row and learns by FTRL, whose
L1 term keeps most of them zero; the deep part has an embedding for each row and learns by lazy
Adam. The data are the modules of Python's standard library.

    python examples/wide_and_deep.py                       # on one device

With several processes, give each the address at which process 0 listens:

    python examples/wide_and_deep.py --coordinator host0:1234 --num-processes 4 --process-id 0 ...

All runs compute the same values, but for rounding. If a process dies, the others end with an error.
Start again, with any number of processes: the run resumes from its newest checkpoint.
"""

import argparse
import functools
import itertools
import os
import pathlib
import re
import sysconfig
import time
import traceback
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec

import optzoo

ROWS, WIDTH, BATCH = 1 << 20, 8, 4096
TOKENS = re.compile(r"[A-Za-z_]\w*|\d[\w.]*|\n[ \t]*|[^\s\w]+")
# Positions before the token to predict. The last two are bags: which tokens are there, not where.
PLACES = [
    *([i] for i in range(1, 9)),
    *([i, i + 1] for i in range(1, 8)),
    *([i, i + 1, i + 2] for i in range(1, 5)),
    *([1, 2, 3, 4], [1, 2, 3, 4, 5]),
    *([1, 3], [1, 4], [2, 4]),
]
BAGS = [range(1, 9), range(9, 33)]
HISTORY = 32

TX = optzoo.param_groups(
    {
        "wide": optzoo.ftrl(0.1, l1_regularization_strength=1e-4),
        "deep": optzoo.lazy_adam(0.002),
        "layers/.*": optzoo.adam(0.002),
    }
)


def read_tokens():
    """The tokens of all modules as hashes, whether each is a name, and which are for the test."""
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    files = sorted(p for p in root.rglob("*.py") if "site-packages" not in p.parts)
    known, hashes, is_test = {}, [], []
    for path in files:
        tokens = TOKENS.findall(path.read_text(errors="replace"))
        hashes += [known.setdefault(token, (zlib.crc32(token.encode()), token)) for token in tokens]
        # Whole files, so that the test has programs that were never seen.
        is_test += [zlib.crc32(str(path.relative_to(root)).encode()) % 10 == 0] * len(tokens)
    is_name = {h: re.match(r"[A-Za-z_]", token) is not None for h, token in set(known.values())}
    hashes = np.array([h for h, _ in hashes], np.uint64)
    return hashes, np.array([is_name[h] for h in hashes.tolist()]), np.array(is_test)


def features(hashes, at):
    """The rows of each example: one for each cross, and those of each bag."""
    back = lambda i: hashes[at - i]
    rows = []
    for number, places in enumerate(PLACES):
        mixed = np.full(len(at), number + 1, np.uint64)
        for i in places:
            mixed = (mixed ^ back(i)) * np.uint64(0x9E3779B97F4A7C15)
            mixed ^= mixed >> np.uint64(29)
        rows.append(mixed % np.uint64(ROWS))
    bags = [
        np.stack(
            [(back(i) * np.uint64(0x9E3779B1) + np.uint64(k)) % np.uint64(ROWS) for i in bag], 1
        )
        for k, bag in enumerate(BAGS)
    ]
    return [x.astype(np.int32) for x in (np.stack(rows, 1), *bags)]


def logits_of(layers, wide, deep, bags):
    """Both parts of the model, from the rows of one batch."""
    x = jnp.concatenate([deep.reshape(len(deep), -1), *bags], 1)
    for layer in layers[:-1]:
        x = jax.nn.relu(x @ layer["kernel"] + layer["bias"][None])
    deep = x @ layers[-1]["kernel"] + layers[-1]["bias"][None]
    return jnp.sum(wide, (1, 2)) + deep[:, 0]


def loss_of(params, crosses, *rest):
    """The cross-entropy; it is the same function for tables on one device and on many."""
    *bags, labels = rest
    read = functools.partial(optzoo.lookup_sparse, params["deep"])
    logits = logits_of(
        params["layers"],
        optzoo.lookup(params["wide"], crosses),
        optzoo.lookup(params["deep"], crosses),
        [read(bag) for bag in bags],
    )
    return jnp.mean(optax.sigmoid_binary_cross_entropy(logits, labels))


class Model:
    """The tables of a mesh, and the programs that use them."""

    def __init__(self, mesh):
        self.mesh = mesh
        self.sharding = s = optzoo.sharded.RowSharding(ROWS, mesh.size)
        self.tables = {"wide|deep": s}
        self.step = optzoo.sharded_minimize(loss_of, TX, mesh, self.tables)

        @jax.jit
        @functools.partial(
            jax.shard_map, mesh=mesh, in_specs=(self.specs(), *[s.spec] * 3), out_specs=s.spec
        )
        def predict(params, crosses, *bags):
            tables = [params["wide"], params["deep"]]
            wide, deep = optzoo.sharded.lookup(tables, [crosses] * 2, s)
            bags = [optzoo.lookup_sparse(params["deep"], bag, sharding=s) for bag in bags]
            return logits_of(params["layers"], wide, deep, bags)

        self.predict = predict

    def specs(self):
        """The partition specs of the parameters."""
        return {"wide": self.sharding.spec, "deep": self.sharding.spec, "layers": PartitionSpec()}

    def start(self):
        """Parameters and state, made shard by shard."""
        key = jax.random.key(0)
        whole = NamedSharding(self.mesh, PartitionSpec())
        sizes = [(len(PLACES) + len(BAGS)) * WIDTH, 64, 32, 1]
        rng = np.random.default_rng(0)
        layers = [
            {"kernel": rng.normal(0, (2 / n) ** 0.5, (n, m)), "bias": np.zeros(m)}
            for n, m in itertools.pairwise(sizes)
        ]
        place = lambda x: jax.make_array_from_callback(
            x.shape, whole, lambda index: x[index].astype(np.float32)
        )
        params = {
            "wide": optzoo.sharded.create_table(
                self.sharding, self.mesh, lambda ids: jnp.zeros((len(ids), 1))
            ),
            "deep": optzoo.sharded.create_table(
                self.sharding, self.mesh, optzoo.sharded.uniform_rows(key, WIDTH)
            ),
            "layers": jax.tree.map(place, layers),
        }
        placed = optzoo.state_sharding(TX, params)
        return {"params": params, "state": jax.jit(TX.init, out_shardings=placed)(params)}

    def place(self, *arrays):
        """A batch of all devices, of which each process places the part of its own."""
        sharding = NamedSharding(self.mesh, self.sharding.spec)
        return [
            jax.make_array_from_callback(x.shape, sharding, lambda index, x=x: x[index])
            for x in arrays
        ]


def area_under_curve(scores, labels):
    """The probability that a positive example has a higher score than a negative one."""
    _, ranks, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[ranks]
    positive = labels.sum()
    return (ranks[labels].sum() - positive * (positive + 1) / 2) / (
        positive * (len(labels) - positive)
    )


def baseline(hashes, is_name, train, test):
    """The loss and the AUC of the frequencies after each token."""
    _, before = np.unique(hashes[np.concatenate([train, test]) - 1], return_inverse=True)
    of_train, of_test = before[: len(train)], before[len(train) :]
    size, names = before.max() + 1, is_name[train].astype(float)
    total, rate = np.bincount(of_train, minlength=size), names.mean()
    p = (np.bincount(of_train, names, size) + rate) / (total + 1)
    p, y = p[of_test], is_name[test]
    return -np.mean(np.where(y, np.log(p), np.log1p(-p))), area_under_curve(p, y)


def evaluate(model, params, hashes, is_name, test):
    """The loss and the AUC on the test."""
    logits = []
    for i in range(0, len(test), BATCH):
        part = np.resize(test[i : i + BATCH], BATCH)
        out = model.predict(params, *model.place(*features(hashes, part)))
        logits.append(
            np.asarray(jax.experimental.multihost_utils.process_allgather(out, tiled=True))
        )
    logits = np.concatenate(logits)[: len(test)]
    y = is_name[test]
    return np.mean(np.logaddexp(0, np.where(y, -logits, logits))), area_under_curve(logits, y)


def plot(path, steps, losses, first):
    """The losses of the steps, and their mean over the last 20."""
    import matplotlib.pyplot as plt

    smooth = np.convolve(losses, np.ones(20) / 20, "valid")
    fig, ax = plt.subplots(figsize=(7, 4))
    ax.plot(steps, losses, color="0.8", label="loss of a batch")
    ax.plot(steps[19:], smooth, label="mean of 20")
    ax.axhline(first, ls=":", color="k", label="frequencies after the last token")
    ax.set(xlabel="step", ylabel="cross-entropy", title="Is the next token a name?")
    ax.legend()
    fig.savefig(path, dpi=120)


def main():
    """Trains, starting from the newest checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--coordinator", help="host:port of process 0; not needed for one process")
    add("--num-processes", type=int, default=1)
    add("--process-id", type=int, default=0)
    add("--heartbeat", type=int, default=100, help="seconds after which a silent process is dead")
    add("--steps", type=int, default=500)
    add("--checkpoints", default="wide_and_deep", help="a directory shared by all processes")
    add("--save-every", type=int, default=100)
    add("--test", type=int, default=20 * BATCH, help="examples to evaluate")
    args = parser.parse_args()
    if args.num_processes > 1:
        jax.distributed.initialize(
            args.coordinator,
            args.num_processes,
            args.process_id,
            heartbeat_timeout_seconds=args.heartbeat,
        )
    mesh = jax.make_mesh((jax.device_count(),), ("shard",))
    say = print if jax.process_index() == 0 else lambda *_, **__: None

    hashes, is_name, is_test = read_tokens()
    at = np.arange(HISTORY, len(hashes))
    train, test = at[~is_test[at]], at[is_test[at]]
    test = np.random.default_rng(0).choice(test, min(args.test, len(test)), replace=False)
    first, first_auc = baseline(hashes, is_name, train, test)
    say(
        f"{len(train):,} tokens to learn from, {len(PLACES) + len(BAGS)} features, "
        f"2 tables of {ROWS:,} rows on {mesh.size} devices"
    )
    say(f"frequencies after the last token: loss {first:.4f}, AUC {first_auc:.4f}", flush=True)

    model, directory = Model(mesh), epath.Path(args.checkpoints).absolute()
    trained, step, losses = model.start(), 0, []
    with ocp.CheckpointManager(
        directory, options=ocp.CheckpointManagerOptions(max_to_keep=2)
    ) as saved:
        if saved.latest_step() is not None:
            step = saved.latest_step()
            like = jax.tree.map(ocp.utils.to_shape_dtype_struct, trained)
            restored = saved.restore(step, args=ocp.args.StandardRestore(like))
            trained = optzoo.sharded.from_order_of_ids(restored, model.tables, restored["params"])
            say(f"resumes at step {step}", flush=True)
        start, begin = time.perf_counter(), step
        params, state = trained["params"], trained["state"]
        while step < args.steps:
            # The same examples for any number of processes, and after a restart.
            examples = np.random.default_rng([1, step]).choice(train, BATCH)
            batch = *features(hashes, examples), is_name[examples].astype(np.float32)
            params, state, loss = model.step(params, state, *model.place(*batch))
            losses.append(float(loss))
            step += 1
            if step % 20 == 0:
                speed = BATCH * (step - begin) / (time.perf_counter() - start)
                say(f"step {step} loss {losses[-1]:.6f}, {speed:,.0f} examples/s", flush=True)
            if step % args.save_every == 0 or step == args.steps:
                trained = {"params": params, "state": state}
                trained = optzoo.sharded.in_order_of_ids(trained, model.tables, params)
                saved.save(step, args=ocp.args.StandardSave(trained))
        saved.wait_until_finished()
    loss, auc = evaluate(model, params, hashes, is_name, test)
    is_zero = float(jax.jit(lambda wide: jnp.mean(wide == 0))(params["wide"]))
    say(f"wide and deep: loss {loss:.4f}, AUC {auc:.4f}; {is_zero:.1%} of the wide weights are 0")
    if jax.process_index() == 0 and losses:
        steps = np.arange(begin + 1, step + 1)
        plot(directory / "loss.png", steps, np.array(losses), first)


if __name__ == "__main__":
    try:
        main()
    except Exception:
        # An ordinary exit would wait for the other processes, and one of them may be dead.
        traceback.print_exc()
        os._exit(1)
