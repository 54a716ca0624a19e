"""A stand-in for AlgoPerf's criteo1tb: its interface, model and shapes, on random data.

AlgoPerf itself needs its data set and its own installation. ``Workload`` has what a submission
calls, and the model reads its table by the same operation, ``embedding_table[idx_lookup]``. The
module also has the names of ``algoperf.spec`` that the submission uses.
"""

import enum
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

NUMBERS = 13
# About how many values the 26 features of Criteo's data set have.
VALUES = [40_000_000] * 5 + [25_000_000, 3_000_000, 600_000, 400_000, 40_000, 26_000, 20_000]
VALUES += [17_000, 13_000, 12_000, 7_000, 7_000, 2_000, 1_500, 1_000, 150, 100, 60, 36, 14, 4]


class ForwardPassMode(enum.Enum):
    """What a model is run for."""

    TRAIN = 0
    EVAL = 1


class Dlrm(nn.Module):
    """Layers on the numbers, one table for all features, products of all pairs, layers on these."""

    num_rows: int
    width: int
    bottom: tuple[int, ...]
    top: tuple[int, ...]

    @nn.compact
    def __call__(self, inputs, train, dropout_rate=0.0):
        """The logits, of shape ``(batch, 1)``."""
        numbers, ids = jnp.split(inputs, [NUMBERS], 1)
        x = numbers
        for size in self.bottom:
            x = nn.relu(nn.Dense(size)(x))
        initial = nn.initializers.uniform(1 / self.num_rows**0.5)
        embedding_table = self.param("embedding_table", initial, (self.num_rows, self.width))
        idx_lookup = jnp.reshape(ids.astype(jnp.int32), -1) % self.num_rows
        rows = embedding_table[idx_lookup].reshape(len(inputs), -1, self.width)
        features = jnp.concatenate([x[:, None], rows], 1)
        products = jnp.einsum("nid,njd->nij", features, features)
        first, second = np.triu_indices(features.shape[1])
        x = jnp.concatenate([x, products[:, first, second]], 1)
        for size in self.top[:-1]:
            x = nn.relu(nn.Dense(size)(x))
        x = nn.Dropout(dropout_rate, deterministic=not train)(x)
        return nn.Dense(self.top[-1])(x)


def on_devices(*axes):
    """A sharding over all devices."""
    return NamedSharding(Mesh(jax.devices(), ("batch",)), PartitionSpec(*axes))


class RandomData:
    """The batches of a workload."""

    def input_queue(self, seed, batch_size):
        """Random batches, each device with its part; small values are frequent, as by Zipf's law.

        As in AlgoPerf the ids are floats, in one array with the numbers.
        """
        rng, place = np.random.default_rng(seed), on_devices("batch")
        values, of_feature = np.array(VALUES), np.arange(len(VALUES)) * 104_729
        weights = rng.normal(size=NUMBERS)
        while True:
            numbers = rng.exponential(size=(batch_size, NUMBERS))
            ids = values[None] ** rng.uniform(size=(batch_size, len(VALUES)))
            ids = (ids.astype(np.int64) * 2_654_435_761 + of_feature[None]) % 2**24
            targets = rng.uniform(size=batch_size) < 1 / (1 + np.exp(-numbers @ weights))
            inputs = np.concatenate([numbers, ids], 1)
            batch = {"inputs": inputs, "targets": targets[:, None]}
            yield jax.device_put({k: x.astype(np.float32) for k, x in batch.items()}, place)


class Workload(RandomData):
    """The workload: a table of ``num_rows`` rows, AlgoPerf's 4,194,304 or fewer."""

    step_hint = 10_666
    loss_type = None
    model_params_types = None
    metrics_logger = None

    def __init__(self, num_rows, width=128, bottom=(512, 256, 128), top=(1024, 1024, 512, 256, 1)):
        self.model = Dlrm(num_rows, width, bottom, top)

    def init_model_fn(self, rng):
        """Parameters, the same on all devices; the model has no other state."""
        init = functools.partial(self.model.init, train=False)
        inputs = jnp.ones((2, NUMBERS + len(VALUES)))
        return jax.jit(init, out_shardings=on_devices())(rng, inputs)["params"], None

    def model_fn(self, params, batch, model_state, mode, rng, update_batch_norm, dropout_rate=0.0):
        """The logits."""
        del model_state, update_batch_norm
        train = mode == ForwardPassMode.TRAIN
        rngs = {"dropout": rng} if train else None
        apply = functools.partial(self.model.apply, {"params": params}, rngs=rngs)
        return apply(batch["inputs"], train=train, dropout_rate=dropout_rate), None

    def loss_fn(self, label_batch, logits_batch, mask_batch=None, label_smoothing=0.0):
        """The cross-entropies, and their sum."""
        del label_smoothing
        y, logits = label_batch.reshape(-1), logits_batch.reshape(-1)
        losses = jax.nn.softplus(logits) - y * logits
        weights = jnp.ones_like(losses) if mask_batch is None else mask_batch.reshape(-1)
        losses = losses * weights
        return {
            "summed": losses.sum(),
            "n_valid_examples": weights.sum(),
            "per_example": losses,
        }


def algoperfs(num_rows):
    """AlgoPerf's own workload, where it is installed, on the same random data."""
    from algoperf.workloads.criteo1tb.criteo1tb_jax import workload

    class OnRandomData(RandomData, workload.Criteo1TbDlrmSmallWorkload):
        vocab_size = num_rows

    return OnRandomData()
