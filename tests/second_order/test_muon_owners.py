"""Muon whose matrices have owners: the same values and states, on every kind of mesh."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optzoo
from tests.second_order.test_owners import collectives

# Layers of two shapes, a convolution, layers of a scan, and what is no matrix.
SHAPES = {
    "up": (16, 32), "down": (32, 16), "up2": (16, 32), "conv": (3, 1, 8, 16), "scan": (16, 16, 3),
    "bias": (16,), "scale": (),
}  # fmt: skip
AXES = ("", "o", "io", "iob", "iiio")
SPECS = {
    "rows": {"up": P("d"), "down": P("d"), "up2": P("d"), "conv": P(None, None, "d"),
             "scan": P("d"), "bias": P("d"), "scale": P()},
    "tiles": {"up": P("d", "m"), "down": P("m", "d"), "up2": P("d", "m"),
              "conv": P(None, None, None, "d"), "scan": P("d", "m"), "bias": P("m"),
              "scale": P()},
    "replicated": dict.fromkeys(SHAPES, P()),
}  # fmt: skip


def arrays(seed):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape) for name, shape in SHAPES.items()}


def make(owners=None, **arguments):
    """In float64, with every part that could be in another order around it."""
    arguments = {"axes": AXES, "iteration_dtype": None, **arguments}
    return optax.chain(
        optzoo.clip_by_global_norm(3.0), optzoo.muon(0.1, owners=owners, **arguments)
    )


def run(tx, params, place):
    """Parameters and the state after three updates; one gradient is missing in the second."""
    params = place(params)
    step = jax.jit(tx.update)
    state = jax.jit(tx.init, out_shardings=optzoo.state_sharding(tx, params))(params)
    for t in range(3):
        grads = {**place(arrays(t + 1)), **({"up2": None} if t == 1 else {})}
        updates, state = step(grads, state, params)
        params = {k: x if updates[k] is None else x + updates[k] for k, x in params.items()}
    return params, state


@pytest.mark.unique
@pytest.mark.parametrize("places", SPECS)
@pytest.mark.parametrize("owners", ["d", ("d", "m")], ids=str)
@pytest.mark.parametrize("kind", ["Explicit", "Auto"])
def test_equals_one_device(places, owners, kind, x64):
    mesh = jax.make_mesh((4, 2), ("d", "m"), axis_types=(getattr(AxisType, kind),) * 2)
    put = lambda x: {k: jax.device_put(x[k], NamedSharding(mesh, SPECS[places][k])) for k in x}
    with x64(True):
        want = run(make(), arrays(0), lambda x: jax.tree.map(jnp.asarray, x))
        got = run(make(owners), arrays(0), put)
    chex.assert_trees_all_equal_structs(got, want)
    chex.assert_trees_all_close(got, want, rtol=0, atol=1e-12)
    for name, x in got[0].items():
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, SPECS[places][name]), x.ndim)


WRAPPERS = {
    "accumulate": lambda tx: optzoo.accumulate(tx, 2),
    "moving_average": lambda tx: optzoo.moving_average(tx, 0.9),
    "param_groups": lambda tx: optzoo.param_groups({"up|down": tx, ".*": optzoo.adam(0.1)}),
    "slots_dtype": lambda tx: optzoo.slots_dtype(tx, "bfloat16"),
    "slots_dtype, 8 bits": lambda tx: optzoo.slots_dtype(tx, "int8"),
    "master_weights": lambda tx: optzoo.master_weights(tx),
    "masked": lambda tx: optax.masked(tx, {k: k != "conv" for k in SHAPES}),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("kind", ["Explicit", "Auto"])
def test_in_wrappers(wrapper, kind):
    """As without owners, on the same mesh."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(getattr(AxisType, kind),))
    # Not by tiles, whose 8-bit codes are on each device.
    dtype = "bfloat16" if wrapper == "master_weights" else "float32"
    put = lambda x: {
        k: jax.device_put(x[k].astype(dtype), NamedSharding(mesh, SPECS["rows"][k])) for k in x
    }
    wrap = lambda owners: WRAPPERS[wrapper](optzoo.muon(0.1, axes=AXES, owners=owners))
    results = []
    for owners in (None, "d"):
        tx, params = wrap(owners), put(arrays(0))
        step, state = jax.jit(tx.update), tx.init(params)
        for t in range(4):
            updates, state = step(put(arrays(t + 1)), state, params)
            params = optax.apply_updates(params, updates)
        results.append((params, state))
    (want, old), (got, new) = results
    chex.assert_trees_all_equal_structs(old, new)
    # The iteration is in bfloat16: a sum in another order may round to another number.
    chex.assert_trees_all_close(got, want, rtol=0, atol=4 * 0.1 * 2**-6)


@pytest.mark.unique
def test_in_a_train_step(x64):
    """With ``minimize`` on automatic axes; saved and continued without owners, and with."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    put = lambda tree: jax.device_put(tree, NamedSharding(mesh, P("d")))
    params = lambda: put({k: arrays(0)[k] for k in ("up", "down", "up2")})
    x, y = arrays(1)["up"].T, arrays(2)["up"].T

    def loss(p, x, y):
        return jnp.mean((jnp.tanh(x @ p["up"] @ p["down"]) @ p["up2"] @ p["down"] - y) ** 2)

    def steps(tx, params, state, number):
        step = optzoo.minimize(loss, tx)
        for _ in range(number):
            params, state, value = step(params, state, x, y)
        return params, state, value

    with_owners, alone = (
        optzoo.muon(0.02, iteration_dtype=None, owners=owners) for owners in ("d", None)
    )
    with x64(True):
        want = steps(alone, params(), alone.init(params()), 6)
        there = steps(with_owners, *steps(alone, params(), alone.init(params()), 3)[:2], 3)
        back = steps(alone, *steps(with_owners, params(), with_owners.init(params()), 3)[:2], 3)
    chex.assert_trees_all_close(there, want, rtol=1e-10)
    chex.assert_trees_all_close(back, want, rtol=1e-10)


@pytest.mark.parametrize("exchange_dtype", [None, "bfloat16"])
def test_replicas_inside_of_shard_map(exchange_dtype, x64):
    """Each computes a share of the matrices; updates are those of all."""
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    given = {"axes": AXES, "iteration_dtype": None, "weight_decay": 0.0}
    alone = optzoo.muon(0.1, **given)
    shared = optzoo.muon(0.1, **given, owners="d", exchange_dtype=exchange_dtype)
    with x64(True):
        params, grads = (jax.tree.map(jnp.asarray, arrays(seed)) for seed in (0, 1))
        state = alone.init(params)
        want, _ = alone.update(grads, state, params)
        update = jax.shard_map(shared.update, mesh=mesh, in_specs=P(), out_specs=P())
        got, _ = jax.jit(update)(grads, state, params)
    chex.assert_trees_all_close(got, want, rtol=2**-8 if exchange_dtype else 1e-12)
    matrices = [k for k in want if k not in ("bias", "scale")]
    rounded = [k for k in want if not np.allclose(got[k], want[k], rtol=1e-6, atol=0)]
    assert rounded == (matrices if exchange_dtype else [])


@pytest.mark.unique
def test_collectives_of_many_layers():
    """Two all-to-alls for each shape, however many layers there are; without owners many more."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    place = NamedSharding(mesh, P("d"))
    shapes = {"up": (16, 32), "down": (32, 16)}

    def count(layers, owners):
        tree = {f"{k}{i}": np.ones(s, "f") for i in range(layers) for k, s in shapes.items()}
        params = jax.device_put(tree, place)
        tx = optzoo.muon(0.1, owners=owners)
        state = jax.device_put(tx.init(params), jax.tree.map(lambda a: a.sharding, tx.init(params)))
        return collectives(tx.update, params, state, params)

    assert count(2, "d") == count(9, "d") == {"all-to-all": 4}
    assert sum(count(2, None).values()) > 4


def test_mistakes():
    with pytest.raises(TypeError, match="owners must be the name of a mesh axis"):
        optzoo.muon(owners=2)
    with pytest.raises(ValueError, match="exchange_dtype must be None without owners"):
        optzoo.muon(exchange_dtype="bfloat16")
    params = {"w": jnp.ones((4, 4))}
    tx = optzoo.muon(owners="d")
    with pytest.raises(ValueError, match=r"owners=\('d',\) needs a mesh with these axes"):
        tx.update(params, tx.init(params), params)
