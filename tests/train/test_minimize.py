"""The whole train step against the loop it stands for."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optzoo
from optzoo.testing.samples import params, step
from tests import costs

IDS = jnp.array([1, 3, 1])


def loss(p, ids):
    layer = jax.tree.leaves(p["layer"])
    return jnp.sum(optzoo.lookup(p["table"], ids) ** 2) + sum(jnp.sum(x**3) for x in layer)


@pytest.mark.parametrize("optimizer", ["lazy_adam", "adam", "gradient_descent"])
def test_equals_the_loop_by_hand(optimizer):
    tx = optzoo.CATALOG[optimizer].make()
    by_hand, x = params(), params()
    old = state = tx.init(x)
    train = optzoo.minimize(loss, tx)
    for _ in range(3):
        grads = jax.grad(lambda p: loss(p, IDS))(by_hand)
        if optimizer == "lazy_adam":
            grads["table"] = optzoo.SparseRows(IDS[:2], grads["table"][IDS[:2]], 5)
        want = loss(by_hand, IDS)
        by_hand, old = step(tx, grads, by_hand, old)
        x, state, value = train(x, state if state is not old else tx.init(x), IDS)
        np.testing.assert_allclose(value, want, rtol=1e-6)
    chex.assert_trees_all_close((x, state), (by_hand, old), rtol=1e-5)
    assert train._cache_size() == 1


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("optimizer", ["lazy_adam", "caught_up", "shampoo"])
def test_a_mesh_divides_the_batch(optimizer, kind):
    """The mean of the losses of four devices: as one device does with the sum of them all."""
    make = optzoo.CATALOG[optimizer].make if optimizer != "caught_up" else caught_up_adam
    kinds = (getattr(AxisType, kind),) * 2
    mesh = jax.make_mesh((2, 2), ("data", "more"), axis_types=kinds, devices=jax.devices()[:4])
    batches = jnp.array([[1, 3, 1], [0, 0, 2], [1, 2, 3], [4, 4, 4]])
    mean = lambda p, ids: sum(loss(p, of) for of in ids) / 4
    clipped = lambda: optax.chain(optzoo.clip_by_global_norm(2.0), make())
    tx, theirs = make() if optimizer == "caught_up" else clipped(), params()
    old = tx.init(theirs)
    ours, state = jax.device_put((params(), tx.init(theirs)), NamedSharding(mesh, P()))
    settings = {"sparse": "allow", "has_aux": True}
    of_part = lambda p, ids: (loss(p, ids), ids[0])
    on_mesh = optzoo.minimize(of_part, tx, mesh=mesh, **settings)
    alone = optzoo.minimize(lambda p, ids: (mean(p, ids), ids), tx, **settings)
    compiled = []
    for _ in range(3):
        ours, state, value, firsts = on_mesh(ours, state, batches.ravel())
        theirs, old, want, _ = alone(theirs, old, batches)
        np.testing.assert_allclose(value, want, rtol=1e-6)
        np.testing.assert_array_equal(firsts, batches[:, 0])  # one of each device
        compiled.append(costs.programs())
    if optimizer == "caught_up":
        ours, state = optzoo.rows.catch_up(ours, state)
        theirs, old = optzoo.rows.catch_up(theirs, old)
    chex.assert_trees_all_close((ours, state), (theirs, old), rtol=1e-5, atol=1e-6)
    assert len(set(compiled)) == 1


def caught_up_adam():
    return optzoo.caught_up(optzoo.adam(0.1))


def test_arguments_of_a_mesh_need_one():
    wrong = {"tables": {"table": None}, "capacity_factor": None, "max_norm": 1.0, "transport": "f2"}
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=f"{name}={value!r} needs a mesh: give mesh="):
            optzoo.minimize(loss, optzoo.lazy_adam(), **{name: value})
    with pytest.raises(
        TypeError, match=r"mesh must be a jax.sharding.Mesh, such as of jax.make_mesh, got 4"
    ):
        optzoo.minimize(loss, optzoo.lazy_adam(), mesh=4)
    with pytest.raises(TypeError, match=r"tables must be a dict from .* got \('table',\)"):
        mesh = jax.make_mesh((1,), ("shard",), devices=jax.devices()[:1])
        optzoo.minimize(loss, optzoo.lazy_adam(), mesh=mesh, tables=("table",))
    for name, value in {"max_norm": 0.0, "capacity_factor": -1.0}.items():
        with pytest.raises(ValueError, match=f"{name} must be positive, got {value}"):
            optzoo.minimize(loss, optzoo.lazy_adam(), mesh=mesh, **{name: value})
    with pytest.raises(ValueError, match="parts must be at least 1, got 0"):
        optzoo.minimize(loss, optzoo.lazy_adam(), mesh=mesh, parts=0)


def test_arrays_of_another_device():
    tx, mesh = optzoo.momentum(0.1, 0.9), jax.make_mesh((8,), ("x",))
    params = jax.device_put({"w": jnp.ones(4)}, jax.devices()[1])
    step = optzoo.minimize(lambda p, x: jnp.mean(x @ p["w"]), tx, mesh=mesh)
    with pytest.raises(ValueError, match="incompatible devices") as found:
        step(params, tx.init(params), jnp.ones((8, 4)))
    assert "optzoo.state_sharding(tx, params)" in found.value.__notes__[0]
    params = jax.device_put(params, optzoo.sharded.params_sharding(params, mesh, {}))
    state = jax.device_put(tx.init(params), optzoo.state_sharding(tx, params))
    step(params, state, jnp.ones((8, 4)))


def test_donates():
    tx, old = optzoo.lazy_adam(), params()
    state = tx.init(old)
    optzoo.minimize(loss, tx)(old, state, IDS)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((old, state)))


def test_large_tables_and_slots_stay_where_they_are():
    x = {"table": jnp.ones((50_000, 16)), "layer": jnp.ones(3)}
    tx = optax.chain(optzoo.clip_by_global_norm(1.0), optzoo.lazy_adam())
    state = tx.init(x)
    train = optzoo.minimize(loss, tx)
    where = lambda *trees: [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(trees)]
    large = lambda *trees: [t for t in jax.tree.leaves(trees) if t.size >= 50_000]
    before = where(large(x, state))
    for _ in range(2):
        x, state, _ = train(x, state, IDS)
    assert len(before) == 3 and where(large(x, state)) == before


def test_aux_and_extra_args():
    with_aux = lambda p, ids: (loss(p, ids), {"ids": ids + 1})
    train = optzoo.minimize(with_aux, optzoo.gradient_descent(1.0), has_aux=True)
    x = params()
    state = optzoo.gradient_descent(1.0).init(x)
    x, state, value, aux = train(x, state, IDS, learning_rate=0.0)
    chex.assert_trees_all_equal(x, params())
    np.testing.assert_allclose(value, loss(params(), IDS), rtol=1e-6)
    np.testing.assert_array_equal(aux["ids"], IDS + 1)


def test_optimizer_that_takes_no_extra_args():
    tx = optax.chain(optzoo.rows.densify(), optax.sgd(1.0))
    x = params()
    want = jax.tree.map(lambda x, g: x - g, x, jax.grad(lambda p: loss(p, IDS))(x))
    x, *_ = optzoo.minimize(loss, tx)(x, tx.init(x), IDS)
    chex.assert_trees_all_close(x, want, rtol=1e-6)


def test_arguments_that_nothing_reads():
    by_value = optax.chain(optzoo.lazy_adam(), optzoo.rows.on_values(by_argument("value")))
    of_optzoo = optzoo.slots_dtype(optzoo.lazy_adam(), "bfloat16")
    of_optax = optax.chain(optzoo.rows.densify(), optax.adam(1.0))
    cases = [
        (
            of_optzoo,
            {"foo": 1.0},
            "use 'foo'. .*: global_step, learning_rate, rounding_seed",
        ),
        (of_optzoo, {"value": 1.0}, "does not use 'value'"),
        (of_optzoo, {"learning_rates": 1.0}, "did you mean 'learning_rate'"),
        (of_optzoo, {"rounding_sed": 1}, "did you mean 'rounding_seed'"),
        (of_optax, {"learning_rate": 1.0}, "does not use 'learning_rate'"),
        (of_optax, {"global_step": 1}, "does not use 'global_step'"),
        (of_optax, {"lr": 1.0}, "does not use 'lr'; did you mean 'learning_rate'"),
        (by_value, {"value": 1.0, "rate": {"a": 1.0}}, "does not use 'rate'"),
        (optzoo.on_rows(optax.adam(1.0)), {"learning_rate": 1.0}, "inner does not use it"),
    ]
    for tx, given, message in cases:
        with pytest.raises(TypeError, match=message):
            trace(tx, params(), **given)
    # They are read, although no result may depend on them.
    trace(of_optzoo, params(), global_step=1, learning_rate=0.1, rounding_seed=3)
    trace(by_value, params(), global_step=1, learning_rate=0.1, value=2.0, foo=None)


def test_states_that_do_not_fit():
    tx, x = optzoo.lazy_adam(), params()
    step = jax.eval_shape
    run = lambda x, state: step(optzoo.minimize(loss, tx), x, state, IDS)
    run(x, tx.init(x))
    with pytest.raises(ValueError, match=r"are swapped: .*step\(params, state, \.\.\.\)"):
        run(tx.init(x), x)
    with pytest.raises(ValueError, match=r"expected .*AdamSlots\(m, v\), got .*ScaleByAdamState"):
        run(x, optax.adam(1.0).init(x))
    with pytest.raises(ValueError, match=r"'m' of parameter 'table'.* \(5, 2\), got .*\(6, 2\)"):
        run(x, tx.init({**x, "table": jnp.ones((6, 2))}))
    with pytest.raises(TypeError, match="tx must be an optax transformation"):
        optzoo.minimize(loss, optzoo.adam)


def by_argument(name):
    """Scales by an argument of the update."""

    def update(updates, state, params=None, **extra_args):
        return jax.tree.map(lambda g: g * extra_args[name], updates), state

    return optax.GradientTransformationExtraArgs(lambda x: optax.EmptyState(), update)


def trace(tx, x, **extra_args):
    jax.eval_shape(optzoo.minimize(loss, tx), x, tx.init(x), IDS, **extra_args)


def test_a_dense_gradient_of_a_table():
    tied = lambda p, ids: loss(p, ids) + jnp.sum(p["table"])
    tx = optzoo.gradient_descent(0.1)
    start = lambda: (params(), tx.init(params()))
    with pytest.warns(optzoo.DenseGradientWarning, match="'table' is dense"):
        optzoo.minimize(tied, tx)(*start(), IDS)
    with pytest.raises(ValueError, match=r"'table' is dense, although .* also used by reduce_sum"):
        optzoo.minimize(tied, tx, sparse="require")(*start(), IDS)
    x, *_ = optzoo.minimize(tied, tx, sparse="allow")(*start(), IDS)
    want = jax.tree.map(lambda x, g: x - 0.1 * g, params(), jax.grad(tied)(params(), IDS))
    chex.assert_trees_all_close(x, want, rtol=1e-6)
