"""On explicit and on mixed axes, with ``jax.set_mesh`` and without it: as on automatic axes."""

import contextlib
import functools
import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec, reshard

import optzoo
from optzoo import SparseRows
from optzoo.testing import samples

from .selection import chosen_first

P = PartitionSpec
SPECS = [P(), P("a"), P(None, "b"), P("a", "b"), P(("a", "b"))]
RNG = np.random.default_rng(0)
PARAMS = {
    "table": RNG.normal(size=(16, 8)).astype("float32"),
    "kernel": RNG.normal(size=(4, 4, 8)).astype("float32"),
    "bias": RNG.normal(size=8).astype("float32"),
}
ROWS = SparseRows(np.array([1, 3, 1, 16]), RNG.normal(size=(4, 8)).astype("float32"), 16)


def make_mesh(*kinds, sizes=(2, 2), names=("a", "b")):
    kinds = [AxisType[kind] for kind in kinds] or 2 * [AxisType.Explicit]
    return jax.make_mesh(sizes, names, axis_types=tuple(kinds[: len(sizes)]))


def put(mesh, x, spec):
    # As JAX gives it for results: jit compiles again for another spec of the same meaning.
    entries = (*spec, *(None,) * np.ndim(x))[: np.ndim(x)]
    if AxisType.Explicit not in mesh.axis_types:
        while entries and entries[-1] is None:
            entries = entries[:-1]
    spec = P(*entries)
    return jax.device_put(x, NamedSharding(mesh, spec))


def inside(mesh, is_set):
    return jax.set_mesh(mesh) if is_set else contextlib.nullcontext()


def trained(tx, params, grads, steps=3):
    """Parameters and state after some steps, whose types and places never change."""
    step = jax.jit(samples.step_of(tx), donate_argnums=(0, 1))
    params = jax.tree.map(jnp.copy, params)
    state = tx.init(params)
    about = lambda tree: jax.tree.map(lambda x: (jax.typeof(x), x.sharding), tree)
    before = about((params, state))
    for _ in range(steps):
        params, state = step(params, state, grads)
        assert about((params, state)) == before
    assert step._cache_size() == 1
    return params, state


int8 = functools.partial(optzoo.slots_dtype, dtype="int8")
WRAPPERS = {
    "moving_average": lambda tx: optzoo.moving_average(tx, 0.9),
    "accumulate": lambda tx: optzoo.accumulate(tx, 2),
    "int8": int8,
    "int8 at random": functools.partial(int8, stochastic=True),
    "packed": lambda tx: optzoo.slots_dtype(tx, "bfloat16", packed=True),
    "packed at random": lambda tx: optzoo.slots_dtype(tx, "bfloat16", packed=True, stochastic=True),
    "variable_clipping": lambda tx: optzoo.variable_clipping(tx, {"table": (1,)}, 0.8),
    "cautious": lambda tx: optzoo.cautious_weight_decay(tx, weight_decay_per_step=0.1),
    "ema_nesterov": lambda tx: optzoo.ema_nesterov(tx, 0.5),
    "hyperball": lambda tx: optzoo.hyperball(tx, 0.1, {"table": (0, 1)}),
    "ema_in_place": lambda tx: optzoo.interop.fbgemm.ema_in_place(tx, 3),
    "ensemble": lambda tx: optzoo.interop.fbgemm.ensemble(tx, 2, 3),
    "multitask": optzoo.multitask,
    "skip_spikes": lambda tx: optzoo.skip_spikes(tx, on="norm"),
    "agn": lambda tx: optzoo.agn(tx, axis_name=None, communication_period=2),
    "diloco": lambda tx: optzoo.diloco(tx, axis_name=None, communication_period=2),
    "elastic_average": lambda tx: optzoo.elastic_average(
        tx, 1, axis_name=None, communication_period=2
    ),
    "sync_replicas": lambda tx: optzoo.sync_replicas(tx, 1, axis_name=None),
    "caught_up": lambda tx: optzoo.caught_up(optzoo.adam(0.1)),
    "stacked": optzoo.stacked,
    "decoupled": lambda tx: optzoo.decoupled_weight_decay(tx, weight_decay_per_step=0.1),
    "on_rows": optzoo.on_rows,
    "clip": lambda tx: optax.chain(optzoo.clip_by_global_norm(1.0), tx),
}


# Of a parameter that is divided along a narrow last axis they are whole.
NARROW = pytest.mark.filterwarnings("ignore:8-bit slots of")


@NARROW
@pytest.mark.parametrize("is_set", [True, False])
@pytest.mark.parametrize("kind", ["dense", "rows"])
@pytest.mark.parametrize("spec", SPECS[::-1], ids=str)
@pytest.mark.parametrize("name", WRAPPERS)
def test_wrappers(name, spec, kind, is_set):
    tx = WRAPPERS[name](optzoo.adam(0.1))
    grads = jax.tree.map(np.cos, PARAMS) | ({"table": ROWS} if kind == "rows" else {})
    want, _ = trained(tx, jax.tree.map(jnp.asarray, PARAMS), grads)
    mesh = make_mesh()
    place = lambda x: put(mesh, x, spec)
    with inside(mesh, is_set):
        on_mesh = {k: g if isinstance(g, SparseRows) else place(g) for k, g in grads.items()}
        got, _ = trained(tx, jax.tree.map(place, PARAMS), on_mesh)
    chex.assert_trees_all_close(jax.device_get(got), jax.device_get(want), rtol=1e-5, atol=1e-6)


ALL = {name: WRAPPERS[name](optzoo.adam(0.1)) for name in WRAPPERS}
ALL |= {name: samples.make(entry) for name, entry in optzoo.CATALOG.items()}
ALL["soap in blocks"] = optzoo.soap(0.1, block_size=4)


@NARROW
@pytest.mark.parametrize("kind", ["Explicit", "Auto"])
@pytest.mark.parametrize("spec", [P("a"), P("a", "b"), P(None, "b")], ids=str)
@pytest.mark.parametrize("name", ALL)
def test_a_new_state_is_divided_as_state_sharding_says(name, spec, kind):
    mesh = make_mesh(kind, kind)
    params = {"table": np.ones((4096, 8), "float32"), "kernel": np.ones((8, 4), "float32")}
    params |= {"square": np.ones((4, 4), "float32"), "cube": np.ones((4, 4, 4), "float32")}
    params = jax.tree.map(lambda x: put(mesh, x, spec), params)
    state, want = ALL[name].init(params), optzoo.state_sharding(ALL[name], params)
    chex.assert_trees_all_equal_structs(state, want)
    for (path, a), place in zip(
        jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(want), strict=True
    ):
        assert a.sharding.is_equivalent_to(place, a.ndim), jax.tree_util.keystr(path)
        if kind == "Explicit":  # or the second step would be compiled again
            assert a.sharding.spec == place.spec, jax.tree_util.keystr(path)


@NARROW
@pytest.mark.parametrize("kind", ["dense", "rows"])
@pytest.mark.parametrize("name", ALL)
def test_one_column_on_each_device(name, kind):
    """No half of a row, and no group of elements, has a part on each device."""
    mesh = make_mesh(sizes=(8,), names=("a",))
    tx, shapes = ALL[name], {"table": (16, 8), "kernel": (3, 8), "cube": (2, 3, 8), "bias": (8,)}
    place = lambda shape: NamedSharding(mesh, P(*(len(shape) - 1) * [None], "a"))
    of = lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=place(shape))
    params = {k: of(shape) for k, shape in shapes.items()}
    ids = jax.ShapeDtypeStruct((5,), jnp.int32, sharding=NamedSharding(mesh, P(None)))
    rows = {"table": SparseRows(ids, of((5, 8)), 16)} if kind == "rows" else {}
    with jax.set_mesh(mesh):
        after, _ = jax.eval_shape(
            lambda params, grads: samples.step(tx, grads, params), params, params | rows
        )
    types = lambda tree: [(x.shape, x.sharding.spec) for x in jax.tree.leaves(tree)]
    assert types(after) == types(params)


@pytest.mark.parametrize("spec", [P("a"), P("a", "b"), P(None, "b")], ids=str)
@pytest.mark.parametrize("name", ["adam", "lazy_adam", "moving_average", "accumulate"])
def test_rows_outside_of_jit(name, spec):
    """Without a mesh that is set only arrays say on which devices a result is."""
    tx, mesh = ALL[name], make_mesh()
    want, _ = samples.step(tx, {"table": ROWS}, {"table": PARAMS["table"]})
    got, _ = samples.step(tx, {"table": ROWS}, {"table": put(mesh, PARAMS["table"], spec)})
    assert got["table"].sharding.spec == P(*(*spec, None)[:2])
    np.testing.assert_allclose(got["table"], want["table"], rtol=1e-5)


def in_spec(tree, spec):
    return jax.jit(lambda tree: jax.tree.map(lambda x: reshard(x, spec), tree))(tree)


@pytest.mark.parametrize("name", ALL)
def test_parts_of_a_sum_are_refused(name):
    """Gradients that are unreduced, which parameters that are reduced get."""
    tx = ALL[name]
    with jax.set_mesh(make_mesh()):
        params = {"table": jnp.ones((16, 8))}
        reduced = in_spec(params, P(reduced={"a"}))
        loss = lambda p, x: jnp.sum((x @ p["table"]) ** 2)
        grads = jax.jit(jax.grad(loss))(reduced, reshard(jnp.ones((4, 16)), P("a")))
        state = tx.init(params)
        step = jax.jit(samples.step_of(tx))
        with pytest.raises(TypeError, match=r"'table' .*is unreduced along mesh axes \['a'\]"):
            step(params, state, grads)
        step(params, state, in_spec(grads, P()))
        with pytest.raises(TypeError, match=r"'table' is reduced along mesh axes \['a'\]"):
            tx.init(reduced)
        with pytest.raises(TypeError, match=r"'table' is reduced along mesh axes \['a'\]"):
            step(reduced, state, params)


@pytest.mark.parametrize(
    "tx",
    [
        optzoo.clip_by_global_norm(1.0),
        optzoo.transforms.clip_by_norm(1.0),
        optzoo.transforms.clip_by_average_norm(1.0),
        optzoo.transforms.zero_if_norm_exceeds(1.0),
    ],
)
def test_no_norm_of_parts_of_a_sum(tx):
    with jax.set_mesh(make_mesh()):
        grads = in_spec({"w": jnp.ones(4)}, P(reduced={"a"}))
        with pytest.raises(TypeError, match=r"'w' is reduced along mesh axes \['a'\]"):
            tx.update(grads, tx.init(None))


@pytest.mark.parametrize("devices", [1, 2])
def test_results_on_few_devices(devices):
    """Counts are where the parameters are. On one device results are not placed.

    That would keep parameters in memory which the update does not need.
    """
    mesh = jax.make_mesh((devices,), ("d",), axis_types=(AxisType.Auto,),
                         devices=jax.devices()[:devices])  # fmt: skip
    x, tx = jax.device_put(jnp.ones((4, 2)), NamedSharding(mesh, P("d"))), optzoo.adam(0.1)
    state = tx.init(x)
    assert {len(a.sharding.device_set) for a in jax.tree.leaves(state)} == {devices}
    program = jax.make_jaxpr(tx.update)(x, state, x)
    assert ("optzoo_placed_as" in str(program)) == (devices > 1)


def test_parameters_that_the_loss_reduces():
    """Their gradients are summed once, by JAX; a table is looked up as it is."""
    params = {"table": PARAMS["table"], "kernel": RNG.normal(size=(8, 3)).astype("float32")}
    ids, y = np.arange(8) % 5, RNG.normal(size=(8, 3)).astype("float32")
    tx = optzoo.lazy_adam(0.1)

    def train(reduced, params, ids, y):
        def loss(p, ids, y):
            kernel = reshard(p["kernel"], reduced) if reduced else p["kernel"]
            return jnp.mean((optzoo.lookup(p["table"], ids) @ kernel - y) ** 2)

        step = jax.jit(optzoo.minimize(loss, tx, sparse={"table": "require"}))
        params, _, value = step(params, tx.init(params), ids, y)
        return params, value

    want = train(None, params, ids, y)
    mesh = make_mesh()
    place = functools.partial(put, mesh)
    with jax.set_mesh(mesh):
        on_mesh = jax.tree.map(lambda x: place(x, P()), params)
        got = train(P(reduced={"a"}), on_mesh, place(ids, P("a")), place(y, P("a")))
        with pytest.raises(TypeError, match=r"'table' is reduced along mesh axes \['a'\]"):
            optzoo.lookup(in_spec(on_mesh["table"], P(reduced={"a"})), ids)
    chex.assert_trees_all_close(jax.device_get(got), jax.device_get(want), rtol=1e-5)


@pytest.mark.parametrize("kind", ["Explicit", "Auto"])
@pytest.mark.parametrize("of_slots", [P("a"), P(), P("a", "b"), P(None, "b")], ids=str)
def test_rows_that_rest_in_a_table_that_is_divided(kind, of_slots):
    """By hand, without sharded_minimize; also if the state does not lie where its table does."""
    tx, mesh = optzoo.caught_up(optzoo.adam(0.1)), make_mesh(kind, kind)
    loss = lambda p, ids: jnp.mean(optzoo.lookup(p["table"], ids) ** 2)
    table = RNG.normal(size=(4096, 4)).astype("float32")

    def train(params, state):
        step = optzoo.minimize(loss, tx, sparse="require")
        for k in range(3):
            params, state, _ = step(params, state, np.arange(8) + k)
        params, state = optzoo.rows.catch_up(params, state)
        return params, optzoo.get_slot(state, "m")

    params = {"table": jnp.asarray(table)}
    want = train(params, tx.init(params))
    params = {"table": put(mesh, table, P("a"))}
    place = lambda a: put(mesh, a, of_slots) if a.shape[:1] == (4096,) else a
    got = train(params, jax.tree.map(place, tx.init(params)))
    chex.assert_trees_all_close(jax.device_get(got), jax.device_get(want), rtol=1e-5)


@NARROW
@pytest.mark.parametrize("kind", ["dense", "rows"])
@pytest.mark.parametrize("of_params", [P("a", "b"), P(), P("b")], ids=str)
@pytest.mark.parametrize("name", WRAPPERS)
def test_places_on_automatic_axes(name, of_params, kind):
    """On these no type says where an array is, and XLA might choose the place of the gradient."""
    tx, mesh = WRAPPERS[name](optzoo.adam(0.1)), make_mesh("Auto", "Auto")
    grads = jax.tree.map(np.cos, PARAMS) | ({"table": ROWS} if kind == "rows" else {})
    want, _ = trained(tx, jax.tree.map(jnp.asarray, PARAMS), grads)
    place = lambda tree, spec: jax.tree.map(lambda x: put(mesh, x, spec), tree)
    rows = ROWS.with_values(put(mesh, ROWS.values, P(None, "b")))
    on_mesh = {k: rows if g is ROWS else place(g, P("a", "b")) for k, g in grads.items()}
    got, _ = trained(tx, place(PARAMS, of_params), on_mesh)
    chex.assert_trees_all_close(jax.device_get(got), jax.device_get(want), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("of_params", [P("a"), P()], ids=str)
@pytest.mark.parametrize("name", ["int8 at random", "packed at random"])
def test_rows_at_random(name, of_params, kind):
    """Updates of five rows, which are not divided as their table."""
    tx, mesh = WRAPPERS[name](optzoo.lazy_adam(0.1)), make_mesh(kind, kind)
    table, values = {"table": PARAMS["table"]}, RNG.normal(size=(5, 8)).astype("float32")
    grads = {"table": SparseRows(np.array([1, 3, 1, 16, 2]), values, 16)}
    want, _ = trained(tx, jax.tree.map(jnp.asarray, table), grads)
    got, _ = trained(tx, {"table": put(mesh, PARAMS["table"], of_params)}, grads)
    chex.assert_trees_all_close(jax.device_get(got), jax.device_get(want), rtol=1e-5)


@pytest.mark.parametrize("spec", [P("a"), P("a", "b")], ids=str)
def test_parameters_in_bfloat16_with_their_lower_bits(spec):
    tx, mesh = optzoo.master_weights(optzoo.adam(0.1)), make_mesh()
    half = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), PARAMS)
    grads = jax.tree.map(jnp.cos, half)
    want = trained(tx, half, grads)
    place = functools.partial(jax.tree.map, lambda x: put(mesh, x, spec))
    got = trained(tx, place(half), place(grads))
    wide = [optzoo.wide_params(*found) for found in (got, want)]
    chex.assert_trees_all_close(*jax.device_get(wide), rtol=1e-5)


SECOND_ORDER = {
    "soap": optzoo.soap(0.1, one_sided=True),
    "soap in blocks": optzoo.soap(0.1, one_sided=True, block_size=4),
    "soap, KL": optzoo.soap(0.1, one_sided=True, kl_statistics=True),
    "shampoo in blocks": optzoo.shampoo(0.1, block_size=4),
    "shampoo, KL": optzoo.shampoo(0.1, root="pseudo_inverse", eps=1e-3, kl_statistics=True),
    "shampoo, one side": optzoo.shampoo(0.1, one_sided=True),
    "ggt": optzoo.ggt(0.1, window=3, svd_eps=1e-2),
}


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("spec", SPECS[::-1], ids=str)
@pytest.mark.parametrize("name", SECOND_ORDER)
def test_second_order(name, spec, kind):
    """Types and places are those of the parameters, whatever is multiplied inside."""
    mesh, grads = make_mesh(kind, kind), jax.tree.map(np.cos, PARAMS)
    want, _ = trained(SECOND_ORDER[name], jax.tree.map(jnp.asarray, PARAMS), grads)
    place = functools.partial(jax.tree.map, lambda x: put(mesh, x, spec))
    got, _ = trained(SECOND_ORDER[name], place(PARAMS), place(grads))
    chex.assert_trees_all_close(jax.device_get(got), jax.device_get(want), rtol=1e-3, atol=1e-5)


def injected(factory, *static, **options):
    """With all hyper-parameters in the state, but for those that decide about shapes."""
    static = {*static, *inspect.signature(factory).parameters} & {
        "window", "max_matrix_size", "block_size", "alpha", "owners", "exchange_dtype", "ns_steps",
        "ns_coefficients",
    }  # fmt: skip
    make = optax.inject_hyperparams(factory, static_args=tuple(static))
    return make(optax.linear_schedule(0.1, 0.02, 3), **options)


INJECTED = {
    "ggt": functools.partial(injected, optzoo.ggt, window=3, svd_eps=1e-2),
    "soap": functools.partial(injected, optzoo.soap, one_sided=True),
    "shampoo": functools.partial(injected, optzoo.shampoo, eps=1e-2, root="eigh"),
    "muon": functools.partial(injected, optzoo.muon, axes=("o", "io", "bio")),
    "adam, int8": lambda: optzoo.slots_dtype(injected(optzoo.adam), "int8"),
    "lamb, packed": lambda: optzoo.slots_dtype(injected(optzoo.lamb), "bfloat16", packed=True),
}


@pytest.mark.unique
@NARROW
@pytest.mark.parametrize("is_set", [True, False])
@pytest.mark.parametrize(
    ("name", "owners"),
    [*((name, None) for name in INJECTED), ("soap", ("a", "b")), ("shampoo", "b"), ("muon", "a")],
)
def test_hyper_parameters_in_the_state(name, owners, is_set):
    """A rule captures them, and after the first step their types have the mesh."""
    mesh, grads = make_mesh(), jax.tree.map(np.cos, PARAMS)

    def train(tx, place):
        step, params = jax.jit(samples.step_of(tx)), place(PARAMS)
        state = tx.init(params)
        for _ in range(3):
            params, state = step(params, state, place(grads))
        return jax.device_get(params)

    want = train(INJECTED[name](), functools.partial(jax.tree.map, jnp.asarray))
    tx = INJECTED[name](**{} if owners is None else {"owners": owners})
    with inside(mesh, is_set):
        place = lambda tree: {k: put(mesh, x, P(*"ba"[: x.ndim])) for k, x in tree.items()}
        got = train(tx, place)
    chex.assert_trees_all_close(got, want, rtol=1e-3, atol=1e-5)


# Inside of a shard_map that checks types

INSIDE = SECOND_ORDER | {
    name: WRAPPERS[name](optzoo.adam(0.1))
    for name in ("accumulate", "agn", "sync_replicas", "diloco", "caught_up", "moving_average")
}
INSIDE |= {name: samples.make(entry) for name, entry in optzoo.CATALOG.items()}


@pytest.mark.parametrize("name", INSIDE)
def test_a_state_is_made_and_trained_inside_of_shard_map(name):
    """Each device has a part of two parameters and all of another; a scan takes the state."""
    tx, mesh, specs = INSIDE[name], make_mesh(), {"part": P("a"), "other": P("a"), "all": P()}
    shapes = {"part": (8, 4), "other": (8, 2), "all": (4, 4)}
    if "ggt" in name:  # whose update of one parameter depends on all others
        del specs["all"]
    params = {k: RNG.normal(size=shapes[k]).astype("float32") for k in specs}

    def train(params):
        def step(carry, _):
            params, state = carry
            return samples.step(tx, jax.tree.map(jnp.cos, params), params, state), None

        return jax.lax.scan(step, (params, tx.init(params)), length=3)[0][0]

    here = jax.jit(jax.shard_map(train, mesh=mesh, in_specs=(specs,), out_specs=specs))
    got = jax.device_get(here({k: put(mesh, x, specs[k]) for k, x in params.items()}))
    alone = jax.jit(train)
    for i in range(2):
        part = lambda tree, i=i: {
            k: x if k == "all" else np.split(x, 2)[i] for k, x in tree.items()
        }
        chex.assert_trees_all_close(
            part(got), jax.device_get(alone(part(params))), rtol=1e-4, atol=1e-6
        )


# Lookups


def by_rows_of_reshard(mesh):
    return lambda table, ids: reshard(table, NamedSharding(mesh, P()))[ids]


def at_get(mesh):
    place = NamedSharding(mesh, P("a"))
    return lambda table, ids: table.at[ids].get(out_sharding=place)


# How rows are read, whether ids may be divided, and how the rows are divided then.
READS = {
    "lookup": (lambda mesh: optzoo.lookup, True),
    "out_sharding": (lambda mesh: functools.partial(optzoo.lookup, out_sharding=P("a")), True),
    "at.get": (at_get, True),
    "reshard": (by_rows_of_reshard, False),
}


@pytest.mark.parametrize("is_set", [True, False])
@pytest.mark.parametrize("of_ids", [P("a"), P()], ids=str)
@pytest.mark.parametrize("of_table", SPECS[:4], ids=str)
@pytest.mark.parametrize("name", chosen_first(READS, {"at.get"}))
def test_lookups(name, of_table, of_ids, is_set):
    make_read, takes_divided = READS[name]
    if of_ids != P() and not takes_divided:
        of_ids = P()  # JAX refuses the gather
    table, ids = RNG.normal(size=(40, 8)).astype("float32"), np.arange(16) % 5
    tx = optzoo.lazy_adam(0.1)

    def run(read, table, ids):
        loss = lambda p, ids: jnp.mean(read(p["table"], ids) ** 2)
        step, params = optzoo.minimize(loss, tx, sparse="require", min_rows=8), {"table": table}
        state = tx.init(params)
        for _ in range(2):
            params, state, _ = step(params, state, ids)
        return params["table"]

    want = run(optzoo.lookup, jnp.asarray(table), jnp.asarray(ids))
    mesh = make_mesh()
    with inside(mesh, is_set):
        got = run(make_read(mesh), put(mesh, table, of_table), put(mesh, ids, of_ids))
        assert jax.typeof(got) == jax.typeof(put(mesh, table, of_table))
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_rows_are_divided_as_their_ids():
    mesh = make_mesh()
    table = put(mesh, np.ones((40, 8), "float32"), P("a", "b"))
    ids = put(mesh, np.arange(4), P("a"))
    spec = lambda ids, **kwargs: (
        jax.typeof(jax.jit(functools.partial(optzoo.lookup, **kwargs))(table, ids)).sharding.spec
    )
    assert spec(ids) == P("a", "b")
    assert spec(put(mesh, np.arange(4), P("b"))) == P("b", None)
    assert spec(put(mesh, np.ones((2, 4), int), P(None, "a"))) == P(None, "a", "b")
    assert spec(ids, out_sharding=P()) == P(None, None)
    assert spec(ids, out_sharding=NamedSharding(mesh, P(None, "b"))) == P(None, "b")
    with pytest.raises(TypeError, match="out_sharding must be a PartitionSpec"):
        optzoo.lookup(table, ids, out_sharding="a")


LINES = ["moving_average", "accumulate", "int8", "packed", "packed at random"]


@pytest.mark.unique
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("spec", [P("a"), P(), P(("a", "b"))], ids=str)
@pytest.mark.parametrize("name", LINES)
def test_tables_in_lines(name, spec, dtype):
    """Lines are divided as the rows, and a step by lookups has the values of one device."""
    tx, ids = WRAPPERS[name](optzoo.lazy_adam(0.1)), np.array([0, 3, 63, 3, 8, 64, 40, 1])
    loss = lambda p, ids: jnp.mean(optzoo.lookup(p["table"], ids).astype("float32") ** 2)

    def train(table, ids):
        params = {"table": optzoo.rows.to_lines(table)}
        state, step = tx.init(params), optzoo.minimize(loss, tx, sparse="require")
        types = list(map(jax.typeof, jax.tree.leaves((params, state))))
        for _ in range(3):
            params, state, value = step(params, state, ids)
            assert list(map(jax.typeof, jax.tree.leaves((params, state)))) == types
        return optzoo.rows.from_lines(params)["table"], optzoo.rows.from_lines(state), value

    table = jnp.asarray(RNG.normal(size=(64, 32)), dtype)
    want, mesh = train(table, jnp.asarray(ids)), make_mesh()
    got = train(put(mesh, table, spec), put(mesh, ids, P("a")))
    rtol = 1e-5 if dtype == "float32" else 1e-2
    chex.assert_trees_all_close(jax.device_get(got), jax.device_get(want), rtol=rtol, atol=1e-6)
    assert jax.typeof(got[0]) == jax.typeof(put(mesh, table, spec))


# Tables and replicas


MESHES = {
    "Explicit": (("Explicit",), (4,), ("shard",)),
    "two axes": (("Explicit", "Explicit"), (2, 2), ("shard", "data")),
    "mixed": (("Explicit", "Auto"), (2, 2), ("shard", "data")),
    "mixed the other way": (("Explicit", "Auto"), (2, 2), ("data", "shard")),
}


def train_tables(mesh, tx, divided):
    """Losses, and parameters and state in the order of the ids, which are there and back again."""
    rows = optzoo.sharded.RowSharding(100, mesh.shape["shard"], multiple=4)
    make = optzoo.sharded.uniform_rows(jax.random.key(0), 8)
    params = {
        "table": optzoo.sharded.create_table(rows, mesh, make),
        "small": put(mesh, PARAMS["table"], P()),
        "kernel": put(mesh, np.ones((8, 4), "float32"), P()),
    }
    tx = optax.chain(optzoo.clip_by_global_norm(1.0), tx)
    state = jax.jit(tx.init, out_shardings=optzoo.state_sharding(tx, params))(params)

    def loss(p, ids, of_small):
        out = p["table"][ids] @ p["kernel"] - np.arange(4, dtype="float32")[None]
        return jnp.mean(out**2) + jnp.mean(optzoo.lookup(p["small"], of_small) ** 2)

    tables, losses = {"table": rows}, []
    options = {"min_rows": 8, "capacity_factor": None}
    step = optzoo.sharded_minimize(loss, tx, mesh, tables, **options)
    rng = np.random.default_rng(1)
    for _ in range(3):
        batch = put(mesh, rng.integers(0, 100, 32), divided), rng.integers(0, 16, 32)
        params, state, value = step(params, state, *batch)
        losses.append(float(value))
    trained = {"params": params, "state": state}
    ordered = optzoo.sharded.in_order_of_ids(trained, tables, params)
    back = optzoo.sharded.from_order_of_ids(ordered, tables, params)
    chex.assert_trees_all_equal(jax.device_get(back), jax.device_get(trained))
    assert jax.tree.map(jax.typeof, back) == jax.tree.map(jax.typeof, trained)
    return losses, jax.device_get(ordered["params"]["table"])[:100]


OPTIMIZERS = {
    "lazy_adam": lambda: optzoo.lazy_adam(0.1),
    "row_wise_adagrad": lambda: optzoo.row_wise_adagrad(0.1),
    "caught_up": lambda: optzoo.caught_up(optzoo.adam(0.1)),
}


@functools.cache
def on_automatic_axes(name):
    mesh = make_mesh("Auto", sizes=(4,), names=("shard",))
    return jax.device_get(train_tables(mesh, OPTIMIZERS[name](), P()))


@pytest.mark.unique
@pytest.mark.parametrize("is_set", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("kind", MESHES)
def test_tables(kind, name, is_set):
    kinds, sizes, names = MESHES[kind]
    mesh = make_mesh(*kinds, sizes=sizes, names=names)
    with inside(mesh, is_set):
        got = train_tables(mesh, OPTIMIZERS[name](), P(names[0]))
    chex.assert_trees_all_close(jax.device_get(got), on_automatic_axes(name), rtol=1e-5)


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_shard_map_over_some_axes(check_vma):
    """Each device along one axis has its own rows, which XLA divides along the other axis.

    XLA ends the process if it is to divide arrays alike that vary along the first one.
    """
    mesh, tx = make_mesh("Auto", "Auto"), optzoo.adam(0.1)
    params = {k: put(mesh, PARAMS[k], P("a", "b")) for k in ("table", "kernel")}
    grads = jax.tree.map(jnp.sin, params)
    state = tx.init(params)
    of_rows = jax.tree.map(lambda x: P("a") if x.ndim else P(), (params, state))
    mapped = jax.shard_map(
        samples.step_of(tx),
        mesh=mesh,
        in_specs=(*of_rows, P("a")),
        out_specs=of_rows,
        axis_names={"a"},
        check_vma=check_vma,
    )
    got, _ = jax.jit(mapped)(params, state, grads)
    want, _ = samples.step(tx, *jax.device_get((grads, params)))
    chex.assert_trees_all_close(jax.device_get(got), jax.device_get(want), rtol=1e-5)


@pytest.mark.parametrize("is_set", [False, True])
@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("dtype", ["int8", pytest.param("float8_e4m3fn", marks=pytest.mark.full)])
def test_slots_in_8_bits_are_read_and_written(dtype, spec, is_set):
    """Outside of an update; its groups and scales have other axes than the table."""
    width = 512 if len(spec) > 1 else 8  # whole groups on each device, or scales beside the codes
    mesh, wide = make_mesh(), np.linspace(-1, 1, 16 * width, dtype=np.float32).reshape(16, width)
    params = {"table": put(mesh, wide, spec)}
    tx = optzoo.slots_dtype(optzoo.lazy_adam(0.1), dtype)
    with inside(mesh, is_set):
        state = tx.init(params)
        written = optzoo.set_slot(state, "m", params)
        read = jax.jit(lambda state: optzoo.get_slot(state, "m"))(written)
        again = optzoo.get_slot(written, "m")
    types = lambda tree: jax.tree.map(jax.typeof, tree)
    assert types(written) == types(state) and types(again) == types(params) == types(read)
    alone = optzoo.set_slot(tx.init({"table": wide}), "m", {"table": wide})
    chex.assert_trees_all_equal(jax.device_get(written), jax.device_get(alone))
    np.testing.assert_array_equal(again["table"], optzoo.get_slot(alone, "m")["table"])


def test_an_array_from_outside_on_explicit_axes_is_refused():
    mesh = make_mesh("Explicit", sizes=(4,), names=("shard",))
    rows = optzoo.sharded.RowSharding(8, 4, multiple=1)
    with jax.set_mesh(mesh):
        table = optzoo.sharded.create_table(rows, mesh, lambda ids: jnp.ones((len(ids), 2)))
        weight, tx = jnp.ones(2), optzoo.lazy_adam(0.1)
        loss = lambda p, ids: jnp.sum(p["table"][ids] @ weight)
        step = optzoo.sharded_minimize(loss, tx, mesh, {"table": rows}, min_rows=2)
        params = {"table": table}
        with pytest.raises(ValueError, match=r"captures an array f32\[2\].*numpy"):
            step(params, tx.init(params), np.arange(8))


@pytest.mark.parametrize("is_set", [True, False])
@pytest.mark.parametrize("kind", ["Explicit", "Auto"])
def test_replicas(kind, is_set):
    """On one device, and on a mesh."""
    tx = optzoo.diloco(optzoo.adam(0.1), communication_period=2)
    params, targets = {"w": jnp.zeros(3)}, RNG.normal(size=(4, 4, 3)).astype("float32")

    def step(params, state, target):
        grads = {"w": params["w"] - target}
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def train(mesh):
        carry = optzoo.replicas.replicate(params, tx.init(params), 4, mesh=mesh)
        many = jax.jit(optzoo.replicas.map_over_replicas(step, mesh=mesh))
        for target in targets:
            carry = many(*carry, target)
        return carry[0]["w"]

    want, mesh = train(None), make_mesh(kind, sizes=(4,), names=("replica",))
    with inside(mesh, is_set):
        np.testing.assert_allclose(train(mesh), want, rtol=1e-5)


BAGS = RNG.integers(0, 17, (8, 4))  # of which some are padding
WEIGHTS = RNG.random((8, 4)).astype("float32")


@pytest.mark.unique
@pytest.mark.parametrize("kind", ["Explicit", "Auto"])
@pytest.mark.parametrize("combiner", ["mean", "sqrtn"])
@pytest.mark.parametrize("is_ragged", [False, True])
@pytest.mark.parametrize("of_ids", [P("a"), P(), P(None, "b"), P(("a", "b"))], ids=str)
@pytest.mark.parametrize("of_table", [P("a"), P(), P(None, "b")], ids=str)
def test_bags(of_table, of_ids, is_ragged, combiner, kind):
    """Bags are divided like their ids; it is not known to which device ragged ones belong."""
    table, ids, weights, tx = PARAMS["table"], BAGS, WEIGHTS, optzoo.lazy_adam(0.1)
    ids, weights = (ids[:, 0], weights[:, 0]) if is_ragged else (ids, weights)

    def read(table, ids, weights, segments):
        ragged = (segments, 5) if is_ragged else ()
        return optzoo.lookup_sparse(table, ids, *ragged, weights=weights, combiner=combiner)

    def train(table, *batch):
        loss = lambda p, *batch: jnp.sum(read(p["table"], *batch) ** 2)
        params = {"table": table}
        params, _, value = optzoo.minimize(loss, tx)(params, tx.init(params), *batch)
        return params["table"], value

    batch = ids, weights, np.arange(8) % 6
    want = read(table, *batch), *train(jnp.asarray(table), *batch)
    mesh = make_mesh(kind, kind)
    on_mesh = [put(mesh, x, of_ids) for x in batch]
    pooled = jax.jit(read)(put(mesh, table, of_table), *on_mesh)
    if kind == "Explicit":
        assert pooled.sharding.spec[0] == (None if is_ragged else (*of_ids, None)[0])
    got = pooled, *train(put(mesh, table, of_table), *on_mesh)
    chex.assert_trees_all_close(jax.device_get(got), jax.device_get(want), rtol=1e-5, atol=1e-6)
