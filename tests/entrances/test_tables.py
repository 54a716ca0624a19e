"""Options of tables in shards and in lines, of those that grow, and of their rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType

import optzoo
from optzoo import SparseRows
from optzoo.core.rows import Shard

from .effects import Table, outcome

TABLE = Table()
effect = TABLE.effect


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
    return has_scatter_add(jax.make_jaxpr(lambda g: tx.update(g, tx.init(g))[0].values)(rows))


@effect("sharded.RowSharding", "partition", {"mod": [0, 20, 1], "div": [0, 1, 2]})
def _(partition):
    """Where the first three of 40 rows are stored in two shards."""
    return shards(partition=partition, multiple=1)[0].places_of(np.arange(3)).tolist()


@effect("sharded.RowSharding", "axis_name", {"shard": ("shard",), ("a", "b"): (("a", "b"),)})
def _(axis_name):
    return tuple(shards(axis_name=axis_name)[0].spec)


@effect("sharded.RowSharding", "multiple", {1: 40, 64: 64})
def _(multiple):
    return shards(multiple=multiple)[0].stored_rows


@effect("sharded.RowSharding.capacity", "repeated", {False: 20, True: 1000})
def _(repeated):
    """How many of 1,000 ids one of two owners of 20 rows may be asked for."""
    return shards(multiple=1)[0].capacity(1000, None, repeated=repeated)


@effect("growing.Vocabulary", "admit_after", {1: [1, 2], 2: [0, 0]})
def _(admit_after):
    return optzoo.growing.Vocabulary(4, admit_after=admit_after).observe(["a", "b"]).rows.tolist()


@effect("growing.Vocabulary", "evict_after", {None: [], 1: ["a"]})
def _(evict_after):
    """The ids that lose the only row, where two follow each other."""
    vocabulary = optzoo.growing.Vocabulary(2, evict_after=evict_after)
    vocabulary.observe(["a"])
    return vocabulary.observe(["b"]).evicted


def rows_of(ids=(1, 1), **options):
    return SparseRows(jnp.array(ids), jnp.ones((len(ids), 2)), 4, **options)


@effect("SparseRows", "coalesced", {False: 1, True: 2})
def _(coalesced):
    """The rows of two with the same id that are left after a merge; a hint that is not true."""
    return int(jnp.sum(rows_of(coalesced=coalesced).coalesce().indices < 4))


@effect("SparseRows", "shard", {None: 8, (("shard",), 40, False): 80})
def _(shard):
    """The elements of the whole table."""
    return rows_of(shard=shard and Shard(*shard)).size


@effect("SparseRows", "squares", {None: 0.5, 16.0: 0.25})
def _(squares):
    """The elements, of 1, after the norm was clipped to 1: four are there, or 16 in all."""
    squares = None if squares is None else jnp.float32(squares)
    shard, values = Shard((), 8, False), jnp.ones((1, 4))
    rows = SparseRows(jnp.array([1]), values, 4, coalesced=True, shard=shard, squares=squares)
    return float(optzoo.clip_by_global_norm(1.0).update(rows, optax.EmptyState())[0].values[0, 0])


@effect("SparseRows", "lines", {False: "ValueError", True: (125, 128)})
def _(lines):
    """What the sum is with an array in the shape of the lines of 1000 rows of 16."""
    rows = SparseRows(jnp.array([9]), jnp.ones((1, 16)), 1000, lines=lines)
    try:
        return (jnp.zeros((125, 128)) + rows).shape
    except ValueError as error:
        return type(error).__name__


@effect("SparseRows.with_rows", "coalesced", {False: 2, True: 3})
def _(coalesced):
    """How many rows are left of those that share an index."""
    ids = jnp.array([1, 1, 2])
    rows = rows_of().with_rows(ids, jnp.ones((3, 2)), coalesced=coalesced)
    return int(jnp.sum(rows.coalesce().indices < 4))


@effect("SparseRows.to_dense", "like", {False: (128, 2), True: (2, 128)})
def _(like):
    """The shape of the array, also of a table in lines."""
    rows = SparseRows(jnp.array([1]), jnp.ones((1, 2)), 128, lines=True)
    lines = optzoo.rows.to_lines(jnp.ones((128, 2))).value
    return (rows.to_dense(lines) if like else rows.to_dense()).shape


@effect("SparseRows.coalesce", "deterministic", {False: True, True: False})
def _(deterministic):
    """Whether rows are summed by a scatter, in any order."""
    coalesce = lambda g: g.coalesce(deterministic=deterministic).values
    return has_scatter_add(jax.make_jaxpr(coalesce)(rows_of()))


def has_scatter_add(jaxpr):
    return any(name in str(jaxpr) for name in ("scatter-add", "scatter_add"))


test_an_option_has_its_effect = TABLE.test()
