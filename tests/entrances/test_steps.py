"""Options of train steps, gradients and the native step."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType

import optzoo
from optzoo import SparseRows

from .effects import SGD, Table, outcome

TABLE = Table()
effect = TABLE.effect


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


def by_sharded_minimize(loss, tx, ids=4, minimize=optzoo.sharded_minimize, **options):
    """The table is replicated, beside another one that is sharded."""
    mesh = jax.make_mesh((2,), ("shard",), axis_types=(AxisType.Auto,))
    sharding = optzoo.sharded.RowSharding(50, 2)
    rows = lambda ids: jnp.full((len(ids), 3), 1 + 2**-9)  # no number of bfloat16
    params = {
        "table": jnp.ones((40, 2)),
        "sharded": optzoo.sharded.create_table(sharding, mesh, rows),
    }
    of_both = lambda p, ids: _plus(loss(p, ids), jnp.sum(optzoo.lookup(p["sharded"], ids)))
    step = minimize(of_both, tx, mesh=mesh, tables={"sharded": sharding}, **options)
    return step(params, tx.init(params), jnp.arange(ids))


def _plus(result, more):
    return (result[0] + more, *result[1:]) if isinstance(result, tuple) else result + more


MINIMIZERS = {
    "minimize": by_minimize,
    "nnx_minimize": by_nnx_minimize,
    "sharded_minimize": by_sharded_minimize,
}


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


for minimize in (optzoo.sharded_minimize, optzoo.minimize):
    name, on_mesh = minimize.__name__, functools.partial(by_sharded_minimize, minimize=minimize)

    @effect(name, "capacity_factor", {0.01: "ValueError", "auto": None, None: None})
    def _(capacity_factor, on_mesh=on_mesh):
        """Rows that move without a gradient need one round."""
        train = functools.partial(on_mesh, looked_up, optzoo.adam(0.1), ids=40)
        return outcome(lambda: train(capacity_factor=capacity_factor))

    @effect(name, "parts", {1: [2], 2: [1]})
    def _(parts, on_mesh=on_mesh):
        """How many of four ids the loss sees at once, on two devices."""
        found = []
        on_mesh(lambda p, ids: found.append(len(ids)) or looked_up(p, ids), SGD, parts=parts)
        return sorted(set(found))

    @effect(name, "max_norm", {None: 8**0.5 / 2, 0.5: 0.5 * (8 / 20) ** 0.5})
    def _(max_norm, on_mesh=on_mesh):
        """How far the table moves: its part of a norm of 4 ids in tables of 2 and of 3 columns."""
        params, *_ = on_mesh(looked_up, SGD, max_norm=max_norm)
        return pytest.approx(float(jnp.linalg.norm(params["table"] - 1)), rel=1e-5)

    @effect(name, "transport", {None: 6 * (1 + 2**-9), "bfloat16": 6.0})
    def _(transport, on_mesh=on_mesh):
        loss = lambda p, ids: 0.0
        return float(on_mesh(loss, SGD, transport=transport)[2])


@effect("minimize", "mesh", {None: [4], 2: [2]})
def _(devices):
    """How many of four ids the loss sees."""
    kinds = {"axis_types": (AxisType.Auto,)}
    mesh = None if devices is None else jax.make_mesh((devices,), ("data",), **kinds)
    found = []
    by_minimize(lambda p, ids: found.append(len(ids)) or looked_up(p, ids), SGD, mesh=mesh)
    return found[:1]


@effect("minimize", "tables", {None: (40,), 2: (20,)})
def _(shards):
    """How many rows of a table of 40 a device has after a step."""
    mesh = jax.make_mesh((2,), ("shard",), axis_types=(AxisType.Auto,))
    sharding = optzoo.sharded.RowSharding(40, 2, multiple=1)
    tables = None if shards is None else {"table": sharding}
    params, *_ = by_minimize(looked_up, SGD, mesh=mesh, tables=tables)
    return params["table"].addressable_shards[0].data.shape[:1]


ROWS = jnp.arange(80.0).reshape(40, 2)


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
    return outcome(lambda: gradient({"table": ROWS}, jnp.arange(3)))


@effect("value_and_grad", "min_rows", {40: "SparseRows", 41: "ArrayImpl"})
def _(min_rows):
    gradient = optzoo.value_and_grad(gathered, min_rows=min_rows)
    return type(gradient({"table": ROWS}, jnp.arange(3))[1]["table"]).__name__


@effect("value_and_grad", "allow_int", {False: "TypeError", True: None})
def _(allow_int):
    gradient = optzoo.value_and_grad(lambda p: p["x"] * 2.0, allow_int=allow_int)
    return outcome(lambda: gradient({"x": 1.0, "i": jnp.arange(3)}))


@effect("native_step", "required", {False: None, True: "ValueError"})
def _(required):
    tx = optax.chain(optax.scale_by_adam(), optax.stateless(lambda u, p: u @ (u.T @ u)))
    step = optzoo.native_step(tx, required=required)
    return outcome(lambda: jax.make_jaxpr(step)(ROWS, tx.init(ROWS), ROWS))


@effect("native_step", "in_place", {"all": True, "slots": False})
def _(in_place):
    """Whether the native code writes the parameters where they are."""
    tx = optzoo.gradient_descent(0.1)
    step = optzoo.native_step(tx, in_place=in_place)
    text = jax.jit(step, donate_argnums=(0, 1)).lower(ROWS, tx.init(ROWS), ROWS).as_text()
    return "output_operand_alias" in text


test_an_option_has_its_effect = TABLE.test(all_quick=True)


def test_every_entrance_hands_on_its_options():
    """A wrong value is refused where it is used, so the error says that it arrives there."""
    wrong = {
        "has_aux": ("no", "has_aux must be"),
        "sparse": ("no", "sparse must be"),
        "min_rows": (0, "min_rows must be at least 1"),
        "native": ("no", "native must be"),
    }
    for train, (name, (value, message)) in itertools.product(MINIMIZERS.values(), wrong.items()):
        with pytest.raises((TypeError, ValueError), match=message):
            train(looked_up, SGD, **{name: value})
