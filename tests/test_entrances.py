"""Each option of a public function that is no factory has its effect, through each entrance.

``EFFECTS`` has a row for each function and option: what is observed with some values of it. An
option without a row fails, and so does one whose values are all observed to do the same. Options of
factories are in ``test_options.py``.
"""

import functools
import inspect
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

import optzoo
from optzoo import SparseRows

from .public import NAMES
from .test_options import NAMES as FACTORIES

EFFECTS = {}
SGD = optzoo.gradient_descent(1.0)


def effect(function, option, expected):
    """Decorates what observes an option: called with each value, it gives what is expected."""

    def add(observe):
        assert (function, option) not in EFFECTS
        EFFECTS[function, option] = observe, expected
        return observe

    return add


# Train steps


def kind_of_gradient(found):
    """Notes what gradient the table has."""

    def update(updates, state, params=None):
        found.append("rows" if isinstance(updates["table"], SparseRows) else "dense")
        return updates, state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


class Model(nnx.Module):
    def __init__(self):
        self.table = nnx.Param(jnp.ones((40, 2)))


def by_minimize(loss, tx, **options):
    """A step of each entrance on a table of 40 rows: what it returns."""
    params = {"table": jnp.ones((40, 2))}
    return optzoo.minimize(loss, tx, **options)(params, tx.init(params), jnp.arange(4))


def by_nnx_minimize(loss, tx, **options):
    model = Model()
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    of_model = lambda model, ids: loss({"table": model.table}, ids)
    return optzoo.nnx_minimize(of_model, **options)(model, optimizer, jnp.arange(4))


def by_sharded_minimize(loss, tx, ids=4, **options):
    """The table is replicated, beside another one that is sharded."""
    mesh = jax.make_mesh((2,), ("shard",), axis_types=(AxisType.Auto,))
    sharding = optzoo.sharded.RowSharding(50, 2)
    rows = lambda ids: jnp.full((len(ids), 3), 1 + 2**-9)  # no number of bfloat16
    params = {
        "table": jnp.ones((40, 2)),
        "sharded": optzoo.sharded.create_table(sharding, mesh, rows),
    }
    of_both = lambda p, ids: _plus(loss(p, ids), jnp.sum(optzoo.lookup(p["sharded"], ids)))
    step = optzoo.sharded_minimize(of_both, tx, mesh, {"sharded": sharding}, **options)
    return step(params, tx.init(params), jnp.arange(ids))


def _plus(result, more):
    return (result[0] + more, *result[1:]) if isinstance(result, tuple) else result + more


MINIMIZERS = {
    "minimize": by_minimize,
    "nnx_minimize": by_nnx_minimize,
    "sharded_minimize": by_sharded_minimize,
}


def outcome(call):
    """The name of the warning or the error of a call, or None."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            call()
        except Exception as error:
            return type(error).__name__
    return None


def gathered(p, ids):
    return jnp.sum(p["table"][...][ids])


def looked_up(p, ids):
    return jnp.sum(optzoo.lookup(p["table"], ids))


def dense_too(p, ids):
    return looked_up(p, ids) + jnp.sum(p["table"][...] ** 2)


for name, train in MINIMIZERS.items():

    @effect(name, "has_aux", {True: [7], False: None})
    def _(has_aux, train=train):
        loss = lambda p, ids: (looked_up(p, ids), 7) if has_aux else looked_up(p, ids)
        result = train(loss, SGD, has_aux=has_aux)
        *_, aux = result if isinstance(result, tuple) else (result,)
        return sorted(set(np.ravel(aux).tolist())) if has_aux else None

    @effect(
        name, "sparse", {"warn": "DenseGradientWarning", "require": "ValueError", "allow": None}
    )
    def _(sparse, train=train):
        return outcome(lambda: train(dense_too, SGD, sparse=sparse))

    @effect(name, "min_rows", {40: "rows", 41: "dense"})
    def _(min_rows, train=train):
        found = []
        tx = optax.chain(kind_of_gradient(found), optzoo.lazy_adam(0.1))
        train(gathered, tx, min_rows=min_rows)
        return found[-1]

    @effect(name, "native", {False: None, "require": "ValueError"})
    def _(native, train=train):
        product = lambda u, p: jax.tree.map(lambda a: a @ (a.T @ a), u)
        by_xla = optax.chain(optzoo.rows.densify(), optax.scale_by_adam(), optax.stateless(product))
        tx = optzoo.param_groups({"table": by_xla, ".*": SGD})
        return outcome(lambda: train(looked_up, tx, native=native))


@effect("sharded_minimize", "capacity_factor", {0.01: "ValueError", None: None})
def _(capacity_factor):
    """Rows that move without a gradient need one round."""
    train = functools.partial(by_sharded_minimize, looked_up, optzoo.adam(0.1), ids=40)
    return outcome(lambda: train(capacity_factor=capacity_factor))


@effect("sharded_minimize", "max_norm", {None: 8**0.5 / 2, 0.5: 0.5 * (8 / 20) ** 0.5})
def _(max_norm):
    """How far the table moves: its part of a norm of 4 ids in tables of 2 and of 3 columns."""
    params, *_ = by_sharded_minimize(looked_up, SGD, max_norm=max_norm)
    return pytest.approx(float(jnp.linalg.norm(params["table"] - 1)), rel=1e-5)


@effect("sharded_minimize", "transport", {None: 6 * (1 + 2**-9), "bfloat16": 6.0})
def _(transport):
    loss = lambda p, ids: 0.0
    return float(by_sharded_minimize(loss, SGD, transport=transport)[2])


# Gradients, lookups and the native step

TABLE = jnp.arange(80.0).reshape(40, 2)


@effect("value_and_grad", "argnums", {0: [4.0], 1: [6.0], (1, 0): [6.0, 4.0]})
def _(argnums):
    gradient = optzoo.value_and_grad(lambda a, b: a**2 + b**3 / 2, argnums)(2.0, 2.0)[1]
    return list(map(float, jax.tree.leaves(gradient)))


@effect("value_and_grad", "has_aux", {False: 2.0, True: (2.0, "aux")})
def _(has_aux):
    loss = lambda a: (a, "aux") if has_aux else a
    return optzoo.value_and_grad(loss, has_aux=has_aux)(2.0)[0]


@effect(
    "value_and_grad",
    "sparse",
    {"warn": "DenseGradientWarning", "require": "ValueError", "allow": None},
)
def _(sparse):
    gradient = optzoo.value_and_grad(dense_too, sparse=sparse)
    return outcome(lambda: gradient({"table": TABLE}, jnp.arange(3)))


@effect("value_and_grad", "min_rows", {40: "SparseRows", 41: "ArrayImpl"})
def _(min_rows):
    gradient = optzoo.value_and_grad(gathered, min_rows=min_rows)
    return type(gradient({"table": TABLE}, jnp.arange(3))[1]["table"]).__name__


@effect("value_and_grad", "allow_int", {False: "TypeError", True: None})
def _(allow_int):
    gradient = optzoo.value_and_grad(lambda p: p["x"] * 2.0, allow_int=allow_int)
    return outcome(lambda: gradient({"x": 1.0, "i": jnp.arange(3)}))


@effect("native_step", "required", {False: None, True: "ValueError"})
def _(required):
    tx = optax.chain(optax.scale_by_adam(), optax.stateless(lambda u, p: u @ (u.T @ u)))
    step = optzoo.native_step(tx, required=required)
    return outcome(lambda: jax.make_jaxpr(step)(TABLE, tx.init(TABLE), TABLE))


@effect("native_step", "in_place", {"all": True, "slots": False})
def _(in_place):
    """Whether the native code writes the parameters where they are."""
    tx = optzoo.gradient_descent(0.1)
    step = optzoo.native_step(tx, in_place=in_place)
    text = jax.jit(step, donate_argnums=(0, 1)).lower(TABLE, tx.init(TABLE), TABLE).as_text()
    return "output_operand_alias" in text


@effect("lookup", "out_sharding", {PartitionSpec(None, "shard"): (4, 1), PartitionSpec(): (4, 2)})
def _(out_sharding):
    """The part of the rows that a device has."""
    mesh = jax.make_mesh((2,), ("shard",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        rows = jax.jit(lambda t: optzoo.lookup(t, jnp.arange(4), out_sharding=out_sharding))(TABLE)
    return rows.addressable_shards[0].data.shape


def bags(**options):
    """The first column of bags of the ids 1 and 2, and 3 and 4."""
    given = {"ids": jnp.array([[1, 2], [3, 4]]), **options}
    pooled = jax.jit(functools.partial(optzoo.lookup_sparse, **given))(TABLE)
    return [round(x, 4) for x in pooled[:, 0].tolist()]


@effect(
    "lookup_sparse", "combiner", {"mean": [3.0, 7.0], "sum": [6.0, 14.0], "sqrtn": [4.2426, 9.8995]}
)
def _(combiner):
    return bags(combiner=combiner)


@effect("lookup_sparse", "weights", {None: [3.0, 7.0], ((1, 0), (0, 3)): [2.0, 8.0]})
def _(weights):
    return bags(weights=None if weights is None else jnp.array(weights, jnp.float32))


@effect("lookup_sparse", "segment_ids", {(0, 0, 1, 1): [3.0, 7.0], (1, 1, 1, 0): [8.0, 4.0]})
def _(segment_ids):
    return bags(ids=jnp.arange(1, 5), segment_ids=jnp.array(segment_ids), num_segments=2)


@effect("lookup_sparse", "num_segments", {2: 2, 3: 3})
def _(num_segments):
    ids = jnp.arange(1, 5)
    return len(bags(ids=ids, segment_ids=ids // 3, num_segments=num_segments))


def in_shards(read, rows=TABLE, **options):
    """What the devices of a table of two shards read together."""
    mesh = jax.make_mesh((2,), ("shard",), axis_types=(AxisType.Auto,))
    sharding = optzoo.sharded.RowSharding(40, 2)
    table = optzoo.sharded.create_table(sharding, mesh, lambda ids: rows[ids % 40])
    spec = PartitionSpec("shard")
    read = functools.partial(read, sharding=sharding, **options)
    mapped = jax.shard_map(read, mesh=mesh, in_specs=(spec, spec), out_specs=spec)
    return jax.jit(mapped), table


# Ids of two devices, all of one owner.
OF_ONE_OWNER = jnp.zeros(64, jnp.int32).at[32:].set(2).at[:32].add(2 * jnp.arange(32) % 40)


@effect("sharded.lookup", "capacity_factor", {None: False, 0.01: True})
def _(capacity_factor):
    """Whether ids had no room."""
    mapped, table = in_shards(optzoo.sharded.lookup, capacity_factor=capacity_factor)
    return bool(jnp.isnan(mapped(table, OF_ONE_OWNER)).any())


@effect("sharded.lookup", "transport", {None: 1 + 2**-9, "bfloat16": 1.0})
def _(transport):
    rows = jnp.full((40, 2), 1 + 2**-9)
    mapped, table = in_shards(optzoo.sharded.lookup, rows, transport=transport)
    return float(mapped(table, jnp.arange(4))[0, 0])


@effect("lookup_sparse", "capacity_factor", {None: False, 0.01: True})
def _(capacity_factor):
    read = lambda table, ids, **options: optzoo.lookup_sparse(table, ids[:, None], **options)
    mapped, table = in_shards(read, capacity_factor=capacity_factor, pool="here")
    return bool(jnp.isnan(mapped(table, OF_ONE_OWNER)).any())


@effect("lookup_sparse", "transport", {None: 1 + 2**-9, "bfloat16": 1.0})
def _(transport):
    read = lambda table, ids, **options: optzoo.lookup_sparse(table, ids[:, None], **options)
    mapped, table = in_shards(read, jnp.full((40, 2), 1 + 2**-9), transport=transport, pool="here")
    return float(mapped(table, jnp.arange(4))[0, 0])


@effect("lookup_sparse", "sharding", {True: [1.0, 3.0], False: [2.0, 7.0]})
def _(sharding):
    """Row 1 by its id, and row 1 of the first shard, which has the even ids; row 3 as well."""
    mapped, table = in_shards(
        lambda table, ids, **given: optzoo.lookup_sparse(
            table, ids[:, None], **(given if sharding else {})
        ),
        jnp.repeat(jnp.arange(40.0), 2).reshape(40, 2),
    )
    return mapped(table, jnp.array([1, 3]))[:, 0].tolist()


@effect("lookup_sparse", "pool", {"here": 2, "owner": 3})
def _(pool):
    """How many messages there are: ids and rows, or ids, their bags and sums."""
    mapped, table = in_shards(optzoo.lookup_sparse, pool=pool)
    text = str(jax.make_jaxpr(mapped)(table, jnp.zeros((4, 3), jnp.int32)))
    return text.count("all_to_all")


# Tables in shards and in lines, tables that grow


def shards(num_rows=40, **options):
    """A sharding over two devices, and its mesh."""
    mesh = jax.make_mesh((2,), ("shard",), axis_types=(AxisType.Auto,))
    return optzoo.sharded.RowSharding(num_rows, 2, **options), mesh


@effect("sharded.create_table", "lines", {False: "Array", True: "Lines"})
def _(lines):
    sharding, mesh = shards(256, multiple=64)
    rows = lambda ids: jnp.ones((len(ids), 2))
    table = optzoo.sharded.create_table(sharding, mesh, rows, lines=lines)
    return "Lines" if isinstance(table, optzoo.rows.Lines) else "Array"


@effect("sharded.create_table", "chunk", {16384: {20}, 10: {10}})
def _(chunk):
    """How many rows are made at once."""
    found = set()

    def rows(ids):
        found.add(len(ids))
        return jnp.ones((len(ids), 2))

    optzoo.sharded.create_table(*shards(multiple=1), rows, chunk=chunk)
    return found


@effect("sharded.uniform_rows", "scale", {0.05: True, 0.5: False})
def _(scale):
    rows = optzoo.sharded.uniform_rows(jax.random.key(0), 8, scale)(jnp.arange(9))
    return bool((abs(rows) <= 0.05).all())


@effect("sharded.uniform_rows", "dtype", {"float32": "float32", "bfloat16": "bfloat16"})
def _(dtype):
    return optzoo.sharded.uniform_rows(jax.random.key(0), 8, dtype=dtype)(jnp.arange(9)).dtype.name


for name, moved in {"in_order_of_ids": [0, 20, 1], "from_order_of_ids": [0, 2, 4]}.items():

    @effect(f"sharded.{name}", "params", {None: "ValueError", "given": moved})
    def _(params, name=name):
        """A slot moves with its table; in a tree of its own it is not known whose it is."""
        sharding, _ = shards(multiple=1)
        table = {"table": np.arange(40.0)}
        state = optax.trace(0.9).init(table)._replace(trace=table)
        given = {} if params is None else {"params": table}
        move = functools.partial(getattr(optzoo.sharded, name), state, {"table": sharding}, **given)
        return move().trace["table"][:3].tolist() if given else outcome(move)


def grown(function, tables, **options):
    """The last row of a table of two rows and that of its slot, after one became another."""
    tx = optzoo.adagrad(0.1)
    params = {"table": jnp.ones((2, 3))}
    state = optzoo.set_slot(tx.init(params), "accumulator", {"table": jnp.full((2, 3), 7.0)})
    options = {"tx": tx, **options}
    params, state = getattr(optzoo.growing, function)(params, state, tables, **options)
    slot = optzoo.get_slot(state, "accumulator")["table"]
    return [round(float(a[-1, 0]), 2) for a in (params["table"], slot)]


FOURS = lambda ids: jnp.full((len(ids), 3), 4.0)
OTHER_START = optzoo.adagrad(0.1, initial_accumulator_value=0.5)
for name, tables in {"resize_table": {"table": 3}, "reset_rows": {"table": [1]}}.items():

    @effect(f"growing.{name}", "init", {None: [0.0, 0.1], FOURS: [4.0, 0.1]})
    def _(init, name=name, tables=tables):
        return grown(name, tables, init=init)

    @effect(f"growing.{name}", "tx", {optzoo.adagrad(0.1): [0.0, 0.1], OTHER_START: [0.0, 0.5]})
    def _(tx, name=name, tables=tables):
        return grown(name, tables, tx=tx)


@effect("growing.reset_rows", "shardings", {False: 2, True: 1})
def _(shardings):
    """The stored row of the id 2 of a table in two shards: the second, or the third."""
    sharding, mesh = shards(multiple=1)
    table = optzoo.sharded.create_table(sharding, mesh, lambda ids: jnp.ones((len(ids), 2)))
    params = {"table": table if shardings else jnp.ones((40, 2))}
    tx = optzoo.gradient_descent(0.1)
    given = {"shardings": {"table": sharding}} if shardings else {}
    reset = functools.partial(optzoo.growing.reset_rows, tx=tx, **given)
    params, _ = reset(params, tx.init(params), {"table": [2]})
    return int(jnp.argmin(params["table"][:, 0]))


@effect("growing.resize_table", "shardings", {False: 60, True: 64})
def _(shardings):
    """The rows that are stored: with those that fill up the shards."""
    old, mesh = shards(multiple=16)
    new = optzoo.sharded.RowSharding(60, 2, multiple=16)
    table = optzoo.sharded.create_table(old, mesh, lambda ids: jnp.ones((len(ids), 2)))
    params = {"table": table if shardings else jnp.ones((40, 2))}
    tx = optzoo.gradient_descent(0.1)
    given = {"shardings": {"table": (old, new)}} if shardings else {}
    resize = functools.partial(optzoo.growing.resize_table, tx=tx, **given)
    return len(resize(params, tx.init(params), {"table": 60})[0]["table"])


@effect("rows.to_lines", "like", {False: "TypeError", True: {"Array", "Lines"}})
def _(like):
    """Of a state in which the slots of one of two tables of a shape are in lines."""
    tx, plain = optzoo.momentum(0.1, 0.9), {name: jnp.ones((128, 2)) for name in "ab"}
    params = {"a": optzoo.rows.to_lines(plain["a"]), "b": plain["b"]}
    state = tx.init(plain)
    if not like:
        return outcome(lambda: optzoo.rows.to_lines(state))
    leaves = jax.tree.leaves(
        optzoo.rows.to_lines(state, like=tx.init(params)),
        is_leaf=lambda x: isinstance(x, optzoo.rows.Lines),
    )
    return {"Lines" if isinstance(a, optzoo.rows.Lines) else "Array" for a in leaves}


@effect("rows.catch_up", "ids", {None: [2, 2, 2], (1,): [0, 2, 0]})
def _(ids):
    """The steps that the rows are as of."""
    tx, table = optzoo.caught_up(optzoo.adam(0.1), mask=True), jnp.ones((3, 2))
    state = tx.init(table)
    none = SparseRows(jnp.zeros(0, jnp.int32), jnp.zeros((0, 2)), 3)
    for _ in range(2):
        _, state = jax.jit(tx.update)(none, state, table)
    given = {} if ids is None else {"ids": jnp.array(ids)}
    return optzoo.rows.catch_up(table, state, **given)[1].last.tolist()


@effect("rows.coalesce", "deterministic", {False: True, True: False})
def _(deterministic):
    """Whether rows are summed by a scatter, in any order."""
    rows = SparseRows(jnp.array([1, 0, 1]), jnp.ones((3, 2)), 4)
    tx = optzoo.rows.coalesce(deterministic=deterministic)
    text = str(jax.make_jaxpr(lambda g: tx.update(g, tx.init(g))[0].values)(rows))
    return "scatter-add" in text or "scatter_add" in text


# Replicas

ALONG = {"psum": optzoo.rows.psum, "broadcast": optzoo.replicas.broadcast}
ALONG["per_replica"] = optzoo.replicas.per_replica
for name, collective in ALONG.items():
    home = "rows" if name == "psum" else "replicas"

    @effect(f"{home}.{name}", "axis_name", {"replica": None, "another": "NameError"})
    def _(axis_name, collective=collective):
        f = functools.partial(collective, axis_name=axis_name)
        return outcome(lambda: jax.vmap(f, axis_name="replica")(jnp.ones(3)))


def averaged(axis_name="replica", along="replica", **options):
    """The sum over the replicas of a parameter, taken in the step of each."""
    step = lambda p, s: (jax.lax.psum(p, along), s)
    mapped = optzoo.replicas.map_over_replicas(step, axis_name=axis_name, **options)
    return jax.jit(mapped)(jnp.ones((2, 1)), jnp.zeros((2, 1)))[0]


@effect("replicas.map_over_replicas", "axis_name", {"replica": None, "another": "NameError"})
def _(axis_name):
    return outcome(lambda: averaged(axis_name))


def two_devices(name="replica"):
    return jax.make_mesh((2,), (name,), axis_types=(AxisType.Auto,))


@effect("replicas.map_over_replicas", "mesh", {None: 1, "replica": 2})
def _(mesh):
    """On how many devices the step runs."""
    sums = averaged(mesh=mesh and two_devices(mesh))
    return len(sums.sharding.device_set)


@effect("replicas.map_over_replicas", "check_vma", {True: True, False: False})
def _(check_vma):
    """Whether JAX checks which values differ between the devices."""
    mapped = optzoo.replicas.map_over_replicas(
        lambda p, s: (p, s), mesh=two_devices(), check_vma=check_vma
    )
    return "check_vma=True" in str(jax.make_jaxpr(mapped)(jnp.ones((2, 1)), jnp.zeros((2, 1))))


MODEL = optzoo.model_average(optzoo.gradient_descent(0.1), axis_name="replica")
for name in ("replicate", "resize_replicas"):

    def placed(name, **options):
        """The devices of the parameters of two replicas."""
        params = jnp.ones(3)
        of_one = params, MODEL.init(params)
        if name == "replicate":
            params, _ = optzoo.replicas.replicate(*of_one, 2, **options)
        else:
            of_three = optzoo.replicas.replicate(*of_one, 3)
            params, _ = optzoo.replicas.resize_replicas(MODEL, *of_three, 2, **options)
        return params.sharding

    @effect(f"replicas.{name}", "mesh", {None: 1, "replica": 2})
    def _(mesh, name=name):
        return len(placed(name, mesh=mesh and two_devices(mesh)).device_set)

    @effect(f"replicas.{name}", "axis_name", {"replica": "ValueError", "other": None})
    def _(axis_name, name=name):
        """Of a mesh with the axis ``other``."""
        return outcome(lambda: placed(name, mesh=two_devices("other"), axis_name=axis_name))


@effect(
    "replicas.scan_local_steps",
    "overlap_steps",
    {0: {False, True}, 1: {False, "start", "finish"}},
)
def _(overlap_steps):
    """What the steps of a round of three are told about the exchange."""
    found = set()

    def step(params, state, x, exchange):
        found.add(exchange)
        return params, state, x

    steps = optzoo.replicas.scan_local_steps(step, overlap_steps=overlap_steps)
    steps(jnp.ones(2), (), jnp.ones(3))
    return found


# Reports


@effect("describe", "axis_name", {"replica": None, "other": "NameError"})
def _(axis_name):
    return outcome(lambda: optzoo.describe(MODEL, {"w": jnp.ones(3)}, axis_name=axis_name))


def bytes_sent(tx, params, **options):
    """What a step sends: the numbers in the last line of a description."""
    last = str(optzoo.describe(tx, params, **options)).splitlines()[-1]
    return max(int(n.replace(",", "")) for n in re.findall(r"[\d,]*\d", last))


@effect("describe", "num_replicas", {2: True, 8: False})
def _(num_replicas):
    """Whether 4,000 numbers of 8 bits, sent twice, are more than 5,000 bytes of a device."""
    tx = optzoo.diloco(SGD, exchange_dtype="int8")
    return bytes_sent(tx, {"w": jnp.ones(4000)}, num_replicas=num_replicas) > 5000


def described(ids=512, **options):
    """The bytes that a device sends for a table on eight devices."""
    sharding = optzoo.sharded.RowSharding(4096, 8, multiple=1)
    params = {"table": jax.ShapeDtypeStruct((4096, 4), jnp.float32)}
    given = {"tables": {"table": sharding}, "ids": {"table": ids}, **options}
    return bytes_sent(optzoo.lazy_adam(0.1), params, **given)


@effect("describe", "tables", {True: None, False: "ValueError"})
def _(tables):
    """Ids are of tables that are sharded."""
    return outcome(lambda: described(**({} if tables else {"tables": None})))


@effect("describe", "ids", {256: "fewer", 512: "as many", 1024: "more"})
def _(ids):
    return compared(described(ids))


@effect("describe", "capacity_factor", {1.0: "as many", None: "more"})
def _(capacity_factor):
    return compared(described(capacity_factor=capacity_factor))


def compared(sent):
    usual = described()
    return "as many" if sent == usual else "more" if sent > usual else "fewer"


@effect("compile_report", "device", {"cpu": "cpu", "h100": "ImportError"})
def _(device):
    """Without a compiler for the others."""
    try:
        return optzoo.compile_report(jnp.sin, jnp.ones(4), device=device).device
    except Exception as error:
        return type(error).__name__


@effect("compile_report", "at_least", {16: 1, 17: 0})
def _(at_least):
    """How many new arrays are large: a result of four numbers."""
    return len(optzoo.compile_report(jnp.sin, jnp.ones(4), device="cpu", at_least=at_least).large)


@pytest.mark.parametrize(("function", "option"), EFFECTS)
def test_an_option_has_its_effect(function, option):
    observe, expected = EFFECTS[function, option]
    assert {value: observe(value) for value in expected} == expected
    assert len(set(map(str, expected.values()))) > 1


def test_every_option_has_a_row():
    found = {
        (name, option)
        for name, f in ((name.removeprefix("optzoo."), f) for name, f in NAMES.items())
        if inspect.isfunction(f) and name.rpartition(".")[2] not in FACTORIES
        for option, p in inspect.signature(f).parameters.items()
        if p.default is not p.empty or p.kind is p.KEYWORD_ONLY
    }
    assert found == EFFECTS.keys()
