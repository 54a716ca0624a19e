"""The sharding of states follows that of the parameters, for every optimizer."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import optzoo
from optzoo.core.paths import path_name
from optzoo.state.sharding import state_sharding

P = PartitionSpec


@pytest.fixture
def mesh():
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("rows", "columns"))


@pytest.fixture
def params(mesh):
    """A table sharded along both axes, a kernel along its columns, a replicated vector."""
    specs = {"table": P("rows", "columns"), "layer": {"kernel": P(None, "columns"), "bias": P()}}
    arrays = {
        "table": jnp.ones((16, 4)),
        "layer": {"kernel": jnp.ones((3, 2)), "bias": jnp.ones(2)},
    }
    return jax.tree.map(lambda a, s: jax.device_put(a, NamedSharding(mesh, s)), arrays, specs)


def specs(shardings):
    """Partition specs by the last part of the paths."""
    leaves = jax.tree_util.tree_leaves_with_path(shardings)
    return {path_name(path): sharding.spec for path, sharding in leaves}


KERNELS = {"table": True, "layer": {"kernel": True, "bias": False}}
TXS = {
    "adagrad_da": optzoo.adagrad_da(0.1),
    "blocked_shampoo": optzoo.blocked_shampoo(0.1),
    "chain": optax.chain(optzoo.clip_by_global_norm(1.0), optzoo.lazy_adam(0.1)),
    "decay": optzoo.decoupled_weight_decay(optzoo.adam(0.1), weight_decay_per_step=0.1),
    "skip_spikes": optzoo.skip_spikes(optzoo.lazy_adam(0.1), on="norm"),
    "ema_nesterov": optzoo.ema_nesterov(optzoo.lazy_adam(0.1), 0.5, mask="kernel"),
    "elastic_average": optzoo.elastic_average(optzoo.momentum(0.1, 0.9), 1, axis_name=None),
    "ggt": optzoo.ggt(0.1, window=5),
    "inject": optax.inject_hyperparams(optzoo.rmsprop)(0.1),
    "lazy_adam": optzoo.lazy_adam(0.1),
    "masked": optax.masked(optzoo.adam(0.1), KERNELS),
    "moving_average": optzoo.moving_average(optzoo.ftrl(0.1), 0.9),
    "multi_steps": optax.MultiSteps(optzoo.momentum(0.1, 0.9), 2).gradient_transformation(),
    "optax": optax.adamw(0.1),
    "partition": optax.partition(
        {True: optzoo.adam(0.1), False: optzoo.momentum(0.1, 0.9)}, KERNELS
    ),
    "prefix": optax.masked(optzoo.adam(0.1), {"table": True, "layer": False}),
    "shampoo": optzoo.shampoo(0.1),
    "sync_replicas": optzoo.sync_replicas(optzoo.adagrad(0.1), 1, axis_name=None),
}


@pytest.mark.parametrize("name", TXS)
def test_init_puts_the_state_where_it_says(name, params):
    tx = TXS[name]
    placed = state_sharding(tx, params)
    abstract = jax.eval_shape(lambda: jax.tree.map(jnp.zeros_like, params))
    with_shardings = jax.tree.map(
        lambda a, x: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=x.sharding), abstract, params
    )
    assert state_sharding(tx, with_shardings) == placed
    state = jax.jit(tx.init, out_shardings=placed)(params)
    assert jax.tree.map(lambda a: a.sharding, state) == placed
    assert jax.tree.structure(state) == jax.tree.structure(jax.eval_shape(tx.init, params))
    of_params = {path_name(p): x for p, x in jax.tree_util.tree_leaves_with_path(params)}
    slots = jax.tree_util.tree_leaves_with_path(state)
    for (path, a), sharding in zip(slots, jax.tree.leaves(placed), strict=True):
        for name, x in of_params.items():
            if path_name(path).endswith(name) and a.shape == x.shape:
                assert sharding == x.sharding
    assert any(s.spec == P("rows", "columns") for s in jax.tree.leaves(placed))


def test_every_optimizer(entry, params):
    """Also checks that no array is split into parts of different size."""
    placed = state_sharding(entry.make(), params)
    state = jax.eval_shape(entry.make().init, params)
    jax.tree.map(lambda a, sharding: sharding.shard_shape(a.shape), state, placed)
    assert jax.tree.structure(state) == jax.tree.structure(placed)


def test_which_is_where(params):
    found = specs(state_sharding(optzoo.lazy_adam(0.1), params))
    assert found["0/slots/m/table"] == found["0/slots/v/table"] == P("rows", "columns")
    assert found["0/slots/m/layer/kernel"] == P(None, "columns")
    assert found["0/slots/m/layer/bias"] == found["0/count"] == P()

    found = specs(state_sharding(optzoo.ggt(0.1, window=5), params))
    windows = [spec for name, spec in found.items() if name.endswith("table") and len(spec) == 3]
    assert windows == [P(None, "rows", "columns")]

    found = specs(state_sharding(TXS["sync_replicas"], params))
    per_row = [spec for name, spec in found.items() if name.endswith("target_update/table")]
    assert per_row == [P("rows")]

    found = specs(state_sharding(optzoo.shampoo(0.1), params))
    parts = [spec for name, spec in found.items() if "table/" in name]
    assert parts and set(parts) == {P()}


def test_a_square_parameter_of_shampoo(mesh):
    """Its matrices have the shape of the parameter, but must be replicated."""
    params = {"w": jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, P("rows")))}
    found = specs(state_sharding(optzoo.shampoo(0.1), params))
    assert {spec for name, spec in found.items() if "/w/" in name} == {P()}


@pytest.mark.parametrize("shape", [(8, 8), (8, 4)])
@pytest.mark.parametrize("columns", [True, False])
def test_axes_of_slots_that_shapes_do_not_tell(shape, columns, mesh):
    """What an optimizer keeps for the columns of a square matrix is not divided as rows."""
    of = {
        "rows": lambda x: jnp.zeros(x.shape[0]),
        "columns": lambda x: jnp.zeros(x.shape[1]),
        "of columns": lambda x: jnp.zeros((x.shape[1], x.shape[1])),
        "window": lambda x: jnp.zeros((8, *x.shape)),
        "turned": lambda x: jnp.zeros((*x.shape[::-1], 3)),
        "a number": lambda x: jnp.zeros(()),
    }
    init = lambda params: {k: jax.tree.map(f, params) for k, f in of.items()}
    tx = optax.GradientTransformation(init, lambda g, s, p=None: (g, s))
    spec = P("rows", "columns" if columns else None)
    params = {"w": jax.device_put(jnp.ones(shape), NamedSharding(mesh, spec))}
    found = specs(state_sharding(tx, params))
    rows, *_ = spec
    last = "columns" if columns else None
    assert {name.partition("/")[0]: tuple(s) for name, s in found.items()} == {
        "rows": (rows,),
        "columns": (last,),
        "of columns": (rows, last) if shape == (8, 8) else (),  # the shape of the parameter
        "window": (None, rows, last),
        "turned": (last, rows, None),
        "a number": (),
    }


def test_memory_kinds_and_partial_specs(mesh):
    kind = next(iter(jax.devices()[0].addressable_memories())).kind
    sharding = NamedSharding(mesh, P("rows"), memory_kind=kind)
    params = jax.ShapeDtypeStruct((8, 3), jnp.float32, sharding=sharding)
    found = state_sharding(optzoo.ggt(0.1, window=2), params)
    assert NamedSharding(mesh, P(None, "rows", None), memory_kind=kind) in jax.tree.leaves(found)


def test_one_device():
    x = {"w": jnp.ones(3)}
    found = jax.tree.leaves(state_sharding(optzoo.ggt(0.1, window=2), x))
    assert set(found) == {SingleDeviceSharding(jax.devices()[0])}


def test_nothing_is_computed(mesh):
    huge = jax.ShapeDtypeStruct(
        (1 << 40, 1 << 20), jnp.float32, sharding=NamedSharding(mesh, P("rows"))
    )
    assert state_sharding(optzoo.adam(0.1), huge)[0].slots.m.spec == P("rows")


def test_refuses(params):
    tx = optzoo.adam(0.1)
    with pytest.raises(TypeError, match=r"'layer/bias' has no sharding: give .* not ndarray"):
        state_sharding(tx, {**params, "layer": {"bias": np.ones(2)}})
    with pytest.raises(TypeError, match="'w' has no sharding"):
        state_sharding(tx, {"w": jax.ShapeDtypeStruct((2,), jnp.float32)})
    with pytest.raises(ValueError, match="'layer/bias' and 'table' are on different devices"):
        state_sharding(tx, {**params, "layer": {"bias": jnp.ones(2)}})
    with pytest.raises(ValueError, match="params must contain an array"):
        state_sharding(tx, {})
    with pytest.raises(ValueError) as info:
        state_sharding(optax.flatten(tx), params)
    assert "as in optax.flatten" in info.value.__notes__[0]


def test_codes_and_corrections(mesh):
    """Where optax asks for a state without parameters, nothing is missed."""
    sharding = NamedSharding(mesh, P("rows"))
    of = lambda dtype: {"w": jax.ShapeDtypeStruct((16, 8), dtype, sharding=sharding)}
    weights = state_sharding(optzoo.master_weights(optzoo.momentum(0.1, 0.9)), of(jnp.bfloat16))
    assert weights.corrections["w"] == sharding
    # GGT has one slot that may be in 8 bits, and one that may not.
    state_sharding(optzoo.slots_dtype(optzoo.ggt(0.1), "int8"), of(jnp.float32))


# For each parameter its shape, the axis that two devices divide, and whether each of them has whole
# groups of 32 elements in 8 bits, with their scales.
IN_8_BITS = {
    "rows": ((8, 40), 0, True),
    "wide rows": ((4, 160), 0, True),
    "inner": ((2, 4, 40), 1, True),
    "groups": ((4, 192), 1, True),
    "parts of groups": ((4, 160), 1, False),
    "beside scales": ((4, 40), 1, False),  # 44 columns with them, which two devices could divide
    "beside whole groups": ((4, 64), 1, False),
    "short": ((2, 2, 40), 2, False),
}


@pytest.mark.optimized
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_slots_in_8_bits(kind):
    """A new state and one after steps is where it is said to be, and has the bits of one device."""
    tx, types = optzoo.slots_dtype(optzoo.adam(0.1), "int8"), (getattr(AxisType, kind),)
    mesh = jax.make_mesh((2,), ("d",), axis_types=types, devices=jax.devices()[:2])
    place = {
        k: NamedSharding(mesh, P(*axis * [None], "d")) for k, (_, axis, _) in IN_8_BITS.items()
    }
    draw = np.random.default_rng(0).normal
    alone = {k: np.float32(draw(size=shape)) for k, (shape, *_) in IN_8_BITS.items()}
    divided = jax.device_put(alone, place)
    undivided = [k for k, (*_, is_divided) in IN_8_BITS.items() if not is_divided]
    with pytest.warns(UserWarning, match="are not divided along") as said:
        places = optzoo.state_sharding(tx, divided)
    assert [k for k in IN_8_BITS if f"'{k}'" in str(said[0].message)] == undivided
    with pytest.warns(UserWarning, match="are not divided along") as said:
        state = tx.init(divided)
    shapes = {str(IN_8_BITS[k][0]) for k in undivided}
    assert all(shape in str(said[0].message) for shape in shapes)
    assert str(said[0].message).count("parameters of shape") == len(shapes)

    step = jax.jit(lambda grads, state: tx.update(grads, state, grads))
    want = tx.init(alone)
    for _ in range(3):
        for a, there in zip(*map(jax.tree.leaves, (state, places)), strict=True):
            assert a.sharding.is_equivalent_to(there, a.ndim)
        (updates, state), (expected, want) = step(divided, state), step(alone, want)
    for k, (*_, is_divided) in IN_8_BITS.items():
        slots = [slots[k] for slots in state[0].slots]
        parts = [a.addressable_shards[0].data.nbytes / a.nbytes for a in jax.tree.leaves(slots)]
        if is_divided:
            assert set(parts) == {0.5}
            chex.assert_trees_all_equal(
                (updates[k], slots), (expected[k], [slots[k] for slots in want[0].slots])
            )
        # XLA's programs for parts of groups round products and sums in another order.
        np.testing.assert_allclose(updates[k], expected[k], rtol=1e-6)
