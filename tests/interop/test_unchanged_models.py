"""Models of other libraries, unchanged: their tables have row-sparse gradients in a train step.

For Haiku, Equinox and AlgoPerf, which are not installed, stand forms of the same operations.
"""

import functools
import warnings

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import optzoo

with warnings.catch_warnings():  # of what Keras imports
    warnings.simplefilter("ignore")
    import keras

ROWS, WIDTH = 12, 4
IDS = jnp.array([[1, 5, 1], [3, 11, 5]])
SEEN = np.isin(np.arange(ROWS), IDS)


def init():
    table = jnp.sin(jnp.arange(float(ROWS * WIDTH))).reshape(ROWS, WIDTH)
    return {"table": table, "kernel": jnp.linspace(-1.0, 1.0, WIDTH)[:, None]}


def of_linen(dtype=None, **settings):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, ids):
            rows = nn.Embed(ROWS, WIDTH, dtype=dtype, **settings)(ids)
            return nn.Dense(1, use_bias=False, dtype=dtype)(rows)

    params = {"params": {"Embed_0": {"embedding": init()["table"]}}}
    params["params"]["Dense_0"] = {"kernel": init()["kernel"]}
    return params, Model().apply


def of_linen_scan():
    """A recurrent model, in whose every step the table is read."""

    class Cell(nn.Module):
        @nn.compact
        def __call__(self, state, ids):
            state = nn.tanh(state + nn.Embed(ROWS, WIDTH)(ids))
            return state, nn.Dense(1, use_bias=False)(state)

    broadcast = {"variable_broadcast": "params", "split_rngs": {"params": False}}
    model = nn.scan(Cell, **broadcast, in_axes=1, out_axes=1)()
    params, _ = of_linen()
    apply = lambda params, ids: model.apply(params, jnp.zeros((2, WIDTH)), ids)[1]
    return params, apply


def of_nnx(dtype=None):
    rngs = nnx.Rngs(0)
    embed = nnx.Embed(ROWS, WIDTH, dtype=dtype, rngs=rngs)
    out = nnx.Linear(WIDTH, 1, use_bias=False, dtype=dtype, rngs=rngs)
    embed.embedding[...], out.kernel[...] = init()["table"], init()["kernel"]
    graphdef, params = nnx.split(nnx.Sequential(embed, nnx.remat(out)), nnx.Param)
    return params, lambda params, ids: nnx.merge(graphdef, params)(ids)


def of_keras(dtype="float32"):
    embed = keras.layers.Embedding(ROWS, WIDTH, dtype=dtype)
    model = keras.Sequential([embed, keras.layers.Dense(1, use_bias=False, dtype=dtype)])
    model.build(IDS.shape)
    rest = [v.value for v in model.non_trainable_variables]
    params = [init()["table"], init()["kernel"]]
    return params, lambda params, ids: model.stateless_call(params, rest, ids)[0]


def by_hand(read):
    return init(), lambda params, ids: read(params["table"], ids) @ params["kernel"]


def of_criteo(table, ids):
    """The embeddings of the model of AlgoPerf's workload criteo1tb."""
    lookup = jnp.reshape(ids + 7 * ROWS, [-1]) % ROWS
    return jnp.reshape(table[lookup], [*ids.shape, WIDTH])


MODELS = {
    "linen": of_linen,
    "linen, bfloat16": functools.partial(of_linen, jnp.bfloat16),
    "linen, scan": of_linen_scan,
    "nnx": of_nnx,
    "nnx, bfloat16": functools.partial(of_nnx, jnp.bfloat16),
    "keras": of_keras,
    "keras, bfloat16": functools.partial(of_keras, "mixed_bfloat16"),
    "haiku": lambda: by_hand(lambda table, ids: jnp.asarray(table)[(ids,)]),
    "equinox": lambda: by_hand(lambda table, ids: jax.vmap(jax.vmap(lambda i: table[i]))(ids)),
    "algoperf": lambda: by_hand(of_criteo),
}


@pytest.mark.parametrize("name", MODELS)
def test_equal_to_a_dense_run(name):
    """With the same ids in each step, lazy Adam is Adam, and the other rows never move."""
    params, apply = MODELS[name]()
    y = jnp.linspace(0.0, 1.0, IDS.size).reshape(*IDS.shape, 1)
    loss = lambda p, ids: jnp.mean((apply(p, ids).astype("float32") - y) ** 2)
    settings = {"min_rows": ROWS, "sparse": "require"}
    grads = jax.eval_shape(optzoo.value_and_grad(loss, **settings), params, IDS)[1]
    leaves = jax.tree.leaves(grads, is_leaf=lambda g: isinstance(g, optzoo.SparseRows))
    [rows] = [g for g in leaves if isinstance(g, optzoo.SparseRows)]
    assert rows.values.shape == (IDS.size, WIDTH) and rows.dtype == jnp.float32

    ends = []
    for tx, given in ((optzoo.lazy_adam(0.1), settings), (optzoo.adam(0.1), {})):
        step, p = optzoo.minimize(loss, tx, **given), jax.tree.map(jnp.copy, params)
        state = tx.init(p)
        for _ in range(3):
            p, state, value = step(p, state, IDS)
        ends.append((p, value))
    # JAX sums the gradients of repeated rows in bfloat16; here they are summed in float32.
    tolerance = 2e-2 if "bfloat16" in name else 1e-5
    chex.assert_trees_all_close(*ends, rtol=tolerance, atol=tolerance)
    [table] = [x for x in jax.tree.leaves(ends[0][0]) if x.shape == (ROWS, WIDTH)]
    np.testing.assert_array_equal((table != init()["table"]).all(axis=1), SEEN)


def test_tied_weights_of_flax_are_dense_with_the_reason():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, ids):
            embed = nn.Embed(ROWS, WIDTH)
            return embed.attend(embed(ids))

    params = {"params": {"Embed_0": {"embedding": init()["table"]}}}
    loss = lambda p: jnp.mean(Model().apply(p, IDS) ** 2)
    ours = optzoo.value_and_grad(loss, min_rows=ROWS)
    reason = r"Embed_0/embedding' is dense.*also used by transpose \(\S*linear\.py:"
    with pytest.warns(optzoo.DenseGradientWarning, match=reason):
        got = jax.jit(ours)(params)
    chex.assert_trees_all_close(got, jax.jit(jax.value_and_grad(loss))(params), rtol=1e-5)


class Tied(keras.layers.Layer):
    """A table whose rows are read, and which is the last matrix."""

    def build(self, shape):
        self.table = self.add_weight(shape=(ROWS, WIDTH))

    def compute_output_shape(self, shape):
        return (*shape, ROWS)

    def call(self, ids):
        rows = keras.ops.take(self.table, keras.ops.cast(ids, "int32"), axis=0)
        return keras.ops.matmul(rows, keras.ops.transpose(self.table))


HERE = r"\(\S*test_unchanged_models\.py:\d+\S*"


def test_tied_weights_of_keras_name_the_line_of_the_layer():
    model = keras.Sequential([Tied()])
    model.build(IDS.shape)
    loss = lambda p: jnp.mean(model.stateless_call(p, [], IDS)[0] ** 2)
    reason = rf"'0' is dense.*: it is also used by transpose {HERE} \(\S*call\)"
    with pytest.warns(optzoo.DenseGradientWarning, match=reason):
        jax.eval_shape(optzoo.value_and_grad(loss, min_rows=ROWS), [init()["table"]])


def test_a_layer_of_keras_itself_is_named_by_what_calls_it():
    layer = keras.layers.Dense(WIDTH, use_bias=False)
    layer.build((2, ROWS))

    def loss(p):
        return jnp.sum(p[0][IDS]) + jnp.sum(layer.stateless_call(p, [], jnp.ones((2, ROWS)))[0])

    reason = rf"'0' is dense.*: it is also used by dot_general {HERE} \(\S*loss\)"
    with pytest.warns(optzoo.DenseGradientWarning, match=reason):
        jax.eval_shape(optzoo.value_and_grad(loss, min_rows=ROWS), [init()["table"]])
