"""Which arrays are rearranged for a checkpoint: the tables and their slots, and nothing else."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import optzoo
from optzoo.testing import samples

from .cases import mesh_of

# Both tables have 8 stored rows on 2 shards, and so have two kernels.
TABLES = {
    "/?emb": optzoo.sharded.RowSharding(8, 2, multiple=1),
    "users/.*": optzoo.sharded.RowSharding(7, 2, multiple=1),
}
ALONE = optzoo.sharded.RowSharding(8, 2, multiple=1)
IDS = np.array([0, 2, 4, 6, 1, 3, 5, 7])  # of the stored rows
IS_TABLE = {"emb": True, "users": {"emb": True}, "mlp": {"emb": False, "bias": False}}


def values(seed):
    """Parameters or gradients in the order of the ids: two tables and two kernels of 8 rows."""
    rng = np.random.default_rng(seed)
    shapes = {"emb": (8, 3), "users": {"emb": (8, 2)}, "mlp": {"emb": (8, 3), "bias": (8,)}}
    draw = lambda shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    return jax.tree.map(draw, shapes, is_leaf=lambda shape: isinstance(shape, tuple))


def stored(tree):
    """Parameters or gradients with the rows of the tables where the shards have them."""
    return jax.tree.map(lambda is_table, x: x[IDS] if is_table else x, IS_TABLE, tree)


def same(got, want, rtol=0.0):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol)


LAZY, ADAM = optzoo.lazy_adam(0.1), optax.adam(0.1)
LABELS = {"emb": "rows", "users": "rows", "mlp": "rest"}
STATES = {
    "chain": lambda: optax.chain(optax.clip(1.0), ADAM, optax.ema(0.5)),
    "groups": lambda: optzoo.param_groups(
        {"(users/)?emb": LAZY, "mlp/.*": optzoo.momentum(0.1, 0.9)}
    ),
    "groups-with-the-names-of-parameters": lambda: optzoo.param_groups(
        {"emb": LAZY, "bias": optzoo.momentum(0.1, 0.9)}
    ),
    "multi_transform": lambda: optax.multi_transform({"rows": LAZY, "rest": ADAM}, LABELS),
    "masked": lambda: optax.chain(
        optax.masked(ADAM, {"emb": True, "users": False, "mlp": True}), LAZY
    ),
    "moving_average": lambda: optzoo.moving_average(LAZY, 0.9),
    "packed": lambda: optzoo.slots_dtype(LAZY, "bfloat16", packed=True),
    "row-wise": lambda: optzoo.row_wise_adagrad(0.1),
    "factored": lambda: optax.adafactor(0.1, min_dim_size_to_factor=2),
    "MultiSteps": lambda: optax.MultiSteps(optax.inject_hyperparams(optax.adam)(0.1), 3),
    "accumulate": lambda: optzoo.accumulate(LAZY, 3),
}


@functools.cache
def trained(name):
    """Parameters and state, trained in the order of the ids and in that of the shards."""
    tx = STATES[name]()
    tx = tx.gradient_transformation() if isinstance(tx, optax.MultiSteps) else tx
    found = []
    for place in (lambda tree: tree, stored):
        params = place(values(0))
        state = tx.init(params)
        for seed in (1, 2):
            params, state = samples.step(tx, place(values(seed)), params, state)
        found.append({"params": params, "state": state})
    return found


@pytest.mark.parametrize("name", STATES)
def test_states(name):
    """Rows are trained independently, so both orders give the same rows."""
    wanted, found = trained(name)
    rtol = 1e-6 if name == "factored" else 0.0  # it has sums over rows
    params = found["params"]
    same(optzoo.sharded.in_order_of_ids(found, TABLES, params), wanted, rtol)
    same(optzoo.sharded.in_order_of_ids(found["state"], TABLES, params), wanted["state"], rtol)
    same(optzoo.sharded.in_order_of_ids(params, TABLES), wanted["params"], rtol)
    same(optzoo.sharded.from_order_of_ids(wanted, TABLES, wanted["params"]), found, rtol)


def test_deferred_rows():
    """The steps of the rows move with them; the clock has steps, as many as the table has rows."""
    tx = optzoo.caught_up(optzoo.adam(0.1), mask="users/.*")
    params, ids = values(0), jnp.array([1, 6])
    both = []
    for place, rows in ((lambda tree: tree, ids), (stored, jnp.argsort(IDS)[ids])):
        grads = {**values(1), "users": {"emb": optzoo.SparseRows(rows, jnp.ones((2, 2)), 8)}}
        grads["emb"] = place(values(1))["emb"]
        _, state = tx.update(grads, tx.init(place(params)), place(params))
        [(rule, clock)] = state.clock.items()
        both.append(state._replace(clock={rule: clock._replace(ring=jnp.arange(8.0))}))
    wanted, found = both
    assert wanted.last["users"]["emb"].tolist() == [0, 1, 0, 0, 0, 0, 1, 0]
    same(optzoo.sharded.in_order_of_ids(found, TABLES, params), wanted)


def test_arrays_of_any_kind():
    """Of NumPy they stay on the host; shapes stay as they are; names count, not types."""
    wanted, found = trained("moving_average")
    on_host = jax.tree.map(np.asarray, found)
    shapes = jax.eval_shape(lambda tree: tree, found)
    got = optzoo.sharded.in_order_of_ids(on_host, TABLES, shapes["params"])
    assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(got))
    same(got, wanted)
    assert optzoo.sharded.in_order_of_ids(shapes, TABLES, shapes["params"]) == shapes
    # As Orbax restores a state whose types it is not told.
    [adam, *_], average = found["state"][0], found["state"][1]
    loose = {"0": {"slots": adam.slots._asdict()}, "1": {"average": average.slots.average}}
    got = optzoo.sharded.in_order_of_ids(loose, TABLES, found["params"])
    same(got["0"]["slots"]["m"], wanted["state"][0][0].slots.m)
    same(got["1"]["average"], wanted["state"][1].slots.average)


def test_a_scalar_of_a_table_of_numbers():
    """It has no rows, as the table of one axis has no columns."""
    x, scale = np.arange(8.0), np.float32(3)
    tree = {"slot": {"t": x[IDS]}, "scale": {"t": scale}}
    got = optzoo.sharded.in_order_of_ids(tree, {"t": ALONE}, {"t": x[IDS]})
    np.testing.assert_array_equal(got["slot"]["t"], x)
    assert got["scale"]["t"] == scale


def test_nnx():
    """Variables in the parameters, in the state or in both."""

    class Model(nnx.Module):
        def __init__(self):
            self.emb, self.mlp = nnx.Param(jnp.arange(8.0)), nnx.Param(jnp.arange(8.0))

    model = Model()
    optimizer = nnx.Optimizer(model, optzoo.moving_average(LAZY, 0.9), wrt=nnx.Param)
    params, tables = nnx.state(model, nnx.Param), {"emb": ALONE}
    plain = {name: params[name][...] for name in ("emb", "mlp")}
    tree = nnx.state((model, optimizer))
    got = optzoo.sharded.from_order_of_ids({"params": plain}, tables, params)["params"]
    same(got, {"emb": IDS, "mlp": np.arange(8)})
    for like in (params, plain):
        got = optzoo.sharded.from_order_of_ids(tree, tables, like)
        assert jax.tree.structure(got) == jax.tree.structure(tree)
        names = jax.tree_util.tree_leaves_with_path(got)
        rows = {jax.tree_util.keystr(path): x for path, x in names if x.shape and x.any()}
        assert len(rows) == 4  # the parameters and their averages
        for name, x in rows.items():
            np.testing.assert_array_equal(x, IDS if "emb" in name else np.arange(8))


def test_on_a_mesh():
    mesh = mesh_of(2)
    place = lambda spec: lambda x: jax.device_put(x, NamedSharding(mesh, spec))
    specs = jax.tree.map(lambda t: PartitionSpec("shard") if t else PartitionSpec(), IS_TABLE)
    params = jax.tree.map(lambda spec, x: place(spec)(x), specs, values(0))
    tree = {"params": params, "step": jnp.array(3), "dealt": place(PartitionSpec())(jnp.arange(8))}
    got = optzoo.sharded.from_order_of_ids(tree, TABLES, params)
    same(got, {**tree, "params": stored(values(0))})
    jax.tree.map(lambda a, b: a.sharding == b.sharding or pytest.fail(str(a)), got, tree)
    assert got["params"]["mlp"]["emb"] is params["mlp"]["emb"]
    for wrong in ({"emb|mlp/bias": ALONE}, {"emb": optzoo.sharded.RowSharding(8, 1, multiple=1)}):
        with pytest.raises(
            ValueError, match=r"has [48] rows on each device, but its sharding in tables has [48]"
        ):
            optzoo.sharded.in_order_of_ids(params, wrong)


def test_nothing_moves_where_the_order_is_that_of_the_ids():
    params = values(0)
    for one in (
        optzoo.sharded.RowSharding(8, 1, multiple=1),
        optzoo.sharded.RowSharding(8, 2, "div", multiple=1),
    ):
        assert optzoo.sharded.in_order_of_ids(params, {"emb": one}) is params
        with pytest.raises(ValueError, match=r"no parameter matches \['embed'\]"):
            optzoo.sharded.in_order_of_ids(params, {"embed": one})


TUPLE = jnp.arange(8.0), jnp.arange(8.0)  # a table and a kernel


@pytest.mark.parametrize(
    ("words", "tree", "tables", "params"),
    [
        (
            r"no parameter matches \['em'\]; the parameters are \['emb', 'mlp/",
            values(0),
            {"em": ALONE},
            None,
        ),
        ("all match parameter 'emb'", values(0), {"emb": ALONE, ".*b": ALONE}, None),
        (
            "'mlp/emb' must have the 64 stored rows",
            values(0),
            {"mlp/emb": optzoo.sharded.RowSharding(64, 2, multiple=1)},
            None,
        ),
        (
            "contains an optimizer state: give the parameters",
            (values(0), LAZY.init(values(0))),
            {".*emb": ALONE},
            None,
        ),
        ("params is one array without a name", LAZY.init(jnp.ones(8)), {"": ALONE}, jnp.ones(8)),
        # Of other parameters, or of some of them.
        (
            r"'0/slots/m/emb', of shape \(8, 3\), has as many rows as a stored table",
            LAZY.init({"emb": values(0)["emb"]}),
            TABLES,
            values(0),
        ),
        ("'other', of shape", {"params": values(0), "other": np.arange(8)}, TABLES, values(0)),
        (
            "'emb/seen' may belong to several parameters, or to none",
            {"emb": {"m": {"emb": np.ones(8)}, "seen": np.arange(8)}},
            {"emb": ALONE},
            {"emb": np.ones(8)},
        ),
        # A tuple of parameters is like that of parameters and state.
        ("'0/1' may belong to several parameters", (TUPLE, LAZY.init(TUPLE)), {"0": ALONE}, TUPLE),
        (
            "in an axis other than the first",
            {"emb": jnp.ones((2, 8, 3))},
            {"emb": ALONE},
            {"emb": jnp.ones((8, 3))},
        ),
        (
            "in an axis other than the first",
            {"emb": jnp.ones(8)},
            {"emb": ALONE},
            {"emb": jnp.ones((8, 8))},
        ),
        (
            "has 12 rows, but its table has 8 stored rows",
            {"emb": jnp.ones((12, 3))},
            {"emb": ALONE},
            {"emb": jnp.ones((8, 3))},
        ),
        (
            "row indices",
            optzoo.accumulate(LAZY, 2, max_rows={"emb": 4}).init(values(0)),
            TABLES,
            values(0),
        ),
    ],
    ids=[
        "typo",
        "twice",
        "rows",
        "state",
        "bare",
        "some",
        "other",
        "chance",
        "tuple",
        "axis",
        "square",
        "stored",
        "numbers",
    ],
)
def test_what_is_refused(words, tree, tables, params):
    for call in (optzoo.sharded.in_order_of_ids, optzoo.sharded.from_order_of_ids):
        with pytest.raises(ValueError, match=words):
            call(tree, tables, params)


def test_one_sharding_is_for_one_array():
    with pytest.raises(TypeError, match=r"tables must be a dict .* such as \{'\.\*/embedding'"):
        optzoo.sharded.in_order_of_ids(values(0), ALONE)
    assert optzoo.sharded.from_order_of_ids(np.arange(8), ALONE).tolist() == IDS.tolist()
