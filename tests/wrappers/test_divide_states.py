"""States divided over data-parallel devices: values, places, programs and refusals."""

import functools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optzoo

SHAPES = {"w": (64, 32), "conv": (3, 3, 8, 16), "wide": (4, 256), "odd": (33, 35), "b": (16,)}
# The last two have no dimension that eight divides, or are too small.
SHARES = {
    "w": P("data"), "conv": P(None, None, "data"), "wide": P(None, "data"), "odd": P(), "b": P(),
}  # fmt: skip
divide = functools.partial(optzoo.divide_states, axis="data", min_size=1000)


def mesh_of(kind, shape=(8,), axes=("data",)):
    devices = jax.devices()[: int(np.prod(shape))]
    types = (getattr(AxisType, kind),) * len(axes)
    return jax.make_mesh(shape, axes, axis_types=types, devices=devices)


def arrays(seed, shapes=SHAPES):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype("float32") for name, shape in shapes.items()}


def put(tree, mesh, specs=None):
    """On a mesh, whole or divided; on one device without a mesh."""
    if mesh is None:
        return jax.tree.map(jnp.asarray, tree)
    place = lambda k: NamedSharding(mesh, P() if specs is None else specs[k])
    return {k: jax.device_put(x, place(k)) for k, x in tree.items()}


def run(tx, mesh, times=range(1, 5), specs=None, carry=None, jit=jax.jit):
    """Parameters and state after some steps, in one program."""
    params = put(arrays(0), mesh, specs)
    carry = (params, tx.init(params)) if carry is None else carry

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    step = jit(step)
    for t in times:
        carry = step(*carry, put(arrays(t), mesh, specs))
    return carry


def on_device(tree):
    """The bytes of one device, and of all arrays."""
    leaves = jax.tree.leaves(tree)
    return sum(x.addressable_shards[0].data.nbytes for x in leaves), sum(x.nbytes for x in leaves)


def same_places(tree, shardings):
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(shardings), strict=True)
    assert all(x.sharding.is_equivalent_to(s, x.ndim) for x, s in pairs)


TXS = {
    "adam": lambda: optzoo.adam(0.1),
    "optax, a chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)),
    "accumulate": lambda: optzoo.accumulate(optzoo.adam(0.1), 2),
    "int8": lambda: optzoo.slots_dtype(optzoo.adam(0.1), "int8"),
    "groups": lambda: optzoo.param_groups({"w.*": optzoo.adam(0.1), ".*": optzoo.ftrl(0.1)}),
    "momentum": lambda: optzoo.momentum(0.1, 0.9),
    "moving_average": lambda: optzoo.moving_average(optzoo.rmsprop(0.1), 0.9),
    "packed": lambda: optzoo.slots_dtype(optzoo.adam(0.1), "bfloat16", packed=True),
    "random bits": lambda: optzoo.slots_dtype(optzoo.adam(0.1), "bfloat16", stochastic=True),
    "injected": lambda: optax.inject_hyperparams(optzoo.adam)(0.1),
    "adafactor": lambda: optzoo.adafactor(0.1),
    "lamb": lambda: optzoo.lamb(0.1),
    "shampoo": lambda: optzoo.blocked_shampoo(0.1, block_size=16, preconditioner_interval=2),
    "muon with owners": lambda: optzoo.param_groups(
        {"w|odd": optzoo.muon(0.1, owners="data"), ".*": optzoo.adam(0.1)}
    ),
    "decay": lambda: optzoo.decoupled_weight_decay(optzoo.adam(0.1), weight_decay_per_step=0.1),
    "stacked": lambda: optzoo.stacked(optzoo.adam(0.1)),
}


@pytest.mark.parametrize("name", TXS)
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_values_are_those_of_the_inner_one(name, kind):
    mesh, inner = mesh_of(kind), TXS[name]()
    tx = divide(inner)
    params, state = run(tx, mesh)
    want, of_inner = run(inner, None if "owners" not in name else mesh)
    for got, wanted in zip(jax.tree.leaves(params), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-6)
        assert got.sharding.is_fully_replicated
    chex.assert_trees_all_equal_shapes_and_dtypes(state, of_inner)
    shardings = optzoo.state_sharding(tx, params)
    same_places(state, shardings)
    same_places(tx.init(params), shardings)
    with jax.set_mesh(mesh):  # nothing in it depends on the parameters
        same_places(jax.jit(tx.init)(params), shardings)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_where_slots_are(kind):
    mesh = mesh_of(kind)
    params = put(arrays(0), mesh)
    tx = divide(optzoo.adam(0.1))
    state = tx.init(params)
    for name, m in optzoo.get_slot(state, "m").items():
        wanted = NamedSharding(mesh, SHARES[name])
        assert m.sharding.is_equivalent_to(wanted, m.ndim), name
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params
    )
    same_places(state, optzoo.state_sharding(tx, abstract))


def test_each_device_has_its_share():
    mesh = mesh_of("Auto")
    shapes = {"w": (256, 128), "u": (128, 512), "b": (64,)}
    params = put(arrays(0, shapes), mesh)
    here, whole = on_device(divide(optzoo.adam(0.1)).init(params))
    assert here <= 1.05 * whole / 8


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_what_is_divided_already(kind):
    """By the same axis it stays; by another one the slots are divided by both."""
    mesh = mesh_of(kind, (4, 2), ("data", "model"))
    specs = {
        "w": P("model"), "conv": P(None, None, None, "data"), "wide": P("data"),
        "odd": P(), "b": P("model"),
    }  # fmt: skip
    tx = divide(optzoo.adam(0.1), specs=specs if kind == "Auto" else None)
    params, state = run(tx, mesh, specs=specs)
    want, _ = run(optzoo.adam(0.1), None)
    chex.assert_trees_all_close(jax.device_get(params), jax.device_get(want), rtol=1e-5, atol=1e-6)
    same_places(params, {k: NamedSharding(mesh, specs[k]) for k in sorted(params)})
    slots = optzoo.get_slot(state, "v")
    wanted = specs | {"w": P("model", "data")}
    same_places(slots, {k: NamedSharding(mesh, wanted[k]) for k in sorted(slots)})


def test_small_parameters():
    """By default those with fewer than 2**14 elements."""
    params = put({"a": np.ones((128, 128)), "b": np.ones((128, 127))}, mesh_of("Auto"))
    m = optzoo.get_slot(optzoo.divide_states(optzoo.adam(0.1), "data").init(params), "m")
    assert m["a"].sharding.spec == P("data") and m["b"].is_fully_replicated


def test_over_two_axes():
    mesh = mesh_of("Auto", (4, 2), ("data", "fsdp"))
    tx = optzoo.divide_states(optzoo.adam(0.1), ("data", "fsdp"), min_size=1000)
    params, state = run(tx, mesh)
    assert optzoo.get_slot(state, "m")["w"].sharding.spec == P(("data", "fsdp"))
    want, _ = run(optzoo.adam(0.1), None)
    chex.assert_trees_all_close(jax.device_get(params), jax.device_get(want), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_without_jit(kind):
    tx, mesh = divide(optzoo.momentum(0.1, 0.9)), mesh_of(kind)
    params, state = run(tx, mesh, jit=lambda f: f)
    want, _ = run(optzoo.momentum(0.1, 0.9), None)
    chex.assert_trees_all_close(jax.device_get(params), jax.device_get(want), rtol=1e-5, atol=1e-6)
    same_places(
        (params, state),
        (jax.tree.map(lambda x: x.sharding, put(params, mesh)), optzoo.state_sharding(tx, params)),
    )


def test_a_run_goes_on_elsewhere():
    """On eight devices, on four, and without the wrapper: by the arrays of the state alone."""
    inner = optzoo.adam(0.1)
    tx = divide(inner)
    want, _ = run(inner, None, range(1, 7))
    carry = run(tx, mesh_of("Auto"), range(1, 3))
    four = mesh_of("Auto", (4,))
    saved = jax.device_get(carry)
    params = put(saved[0], four)
    state = jax.device_put(saved[1], optzoo.state_sharding(tx, params))
    carry = run(tx, four, range(3, 5), carry=(params, state))
    assert optzoo.get_slot(carry[1], "m")["w"].sharding.num_devices == 4
    saved = jax.device_get(carry)
    got, _ = run(inner, None, range(5, 7), carry=jax.tree.map(jnp.asarray, saved))
    chex.assert_trees_all_close(got, want, rtol=1e-6, atol=1e-7)


def test_a_state_that_was_whole_is_divided_by_a_step():
    mesh, inner = mesh_of("Auto"), optzoo.adam(0.1)
    params = put(arrays(0), mesh)
    tx, state = divide(inner), inner.init(params)
    _, state = run(tx, mesh, [1], carry=(params, state))
    same_places(state, optzoo.state_sharding(tx, params))


def test_what_the_inner_one_sees():
    """Gradients and parameters as the slots are divided."""
    seen = {}

    def update(updates, state, params=None):
        seen.update(gradients=updates, params=params)
        return updates, state

    inner = optax.GradientTransformation(lambda _: optax.EmptyState(), update)
    params = put(arrays(0), mesh_of("Explicit"))
    divide(inner).update(params, optax.EmptyState(), params)
    for tree in seen.values():
        same_places(tree, {k: NamedSharding(mesh_of("Explicit"), SHARES[k]) for k in sorted(tree)})
    assert seen.keys() == {"gradients", "params"}


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_described(kind):
    params = put({"w": np.ones((128, 64), "float32")}, mesh_of(kind))
    found = optzoo.describe(divide(optzoo.momentum(0.1, 0.9)), params)
    assert found.state - 4 == 128 * 64 * 4  # a count of four bytes
    assert found.state_on_device - 4 == 16 * 64 * 4
    assert ", 4,100 on one device" in str(found)
    plain = optzoo.describe(optzoo.momentum(0.1, 0.9), params)
    assert plain.state_on_device is None and "on one device" not in str(plain)


def test_only_some_parameters():
    params = put(arrays(0), mesh_of("Auto"))
    state = divide(optzoo.adam(0.1), mask="w.*").init(params)
    found = {k for k, x in optzoo.get_slot(state, "m").items() if not x.is_fully_replicated}
    assert found == {"w", "wide"}


@pytest.mark.parametrize("has_params", [True, False])
def test_missing_gradients_and_parameters(has_params):
    mesh, tx = mesh_of("Explicit"), divide(optzoo.adam(0.1))
    params, grads = put(arrays(0), mesh), put(arrays(1), mesh) | {"w": None}
    state = tx.init(params)
    given = params if has_params else None
    if not has_params:
        grads = put(arrays(1), mesh)
    updates, _ = jax.jit(tx.update)(grads, state, given)
    assert (updates["w"] is None) == has_params
    assert updates["conv"].sharding.is_fully_replicated


# Programs


def shapes_of_a_step(kind):
    """On eight devices: the mesh, the optimizer, parameters, state and batch."""
    devices = np.array(optzoo.compiled.devices_of("cpu")[:8])
    mesh = jax.sharding.Mesh(devices, ("data",), axis_types=(getattr(AxisType, kind),))
    of = lambda *spec: NamedSharding(mesh, P(*spec))
    params = {k: jax.ShapeDtypeStruct((128, 256), jnp.float32, sharding=of()) for k in "ab"}
    batch = jax.ShapeDtypeStruct((64, 128), jnp.float32, sharding=of("data"))
    tx = optzoo.divide_states(optzoo.adam(0.1), "data")
    state = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        jax.eval_shape(tx.init, params),
        optzoo.state_sharding(tx, params),
    )
    return mesh, tx, params, state, batch


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_a_program_keeps_its_shares(kind):
    """Each array is reused and comes back as it was; updates are gathered, and nothing else is."""
    mesh, tx, params, state, batch = shapes_of_a_step(kind)
    loss = lambda params, x: jnp.mean((x @ params["a"] * (x @ params["b"])) ** 2)
    step = optzoo.minimize(loss, tx)
    report = optzoo.compile_report(step, params, state, batch, device="cpu")
    size = 2 * 128 * 256 * 4
    report.require(
        donated=True,
        same_shardings=True,
        divided={1: 8},
        collectives={"all-gather": size, "all-reduce": size + 64},
    )
    plain = jax.eval_shape(optzoo.adam(0.1).init, params)
    whole = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P())), plain
    )
    report = optzoo.compile_report(
        optzoo.minimize(loss, optzoo.adam(0.1)), params, whole, batch, device="cpu"
    )
    with pytest.raises(AssertionError, match="divided: a device has"):
        report.require(divided={1: 8})


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_an_accumulated_step_has_one_reduction(kind):
    """Where each device sums the gradients of its micro-batches."""
    mesh, tx, params, state, batch = shapes_of_a_step(kind)

    def loss(params, x):
        of_part = lambda x: jnp.mean((x @ params["a"] * (x @ params["b"])) ** 2)
        return jnp.mean(jax.lax.map(of_part, x.reshape(4, -1, 128)))

    step = optzoo.minimize(loss, tx, mesh=mesh)
    report = optzoo.compile_report(step, params, state, batch, device="cpu")
    size = 2 * 128 * 256 * 4
    report.require(donated=True, same_shardings=True, divided={1: 8})
    assert not any(found.in_loop for found in report.collectives)
    report.require(collectives={"all-gather": size, "reduce-scatter": size // 8, "all-reduce": 64})


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize(
    ("shape", "axis"),
    [((8,), "x"), ((4, 2), ("x", "y")), ((4, 2), ("y", "x")), ((4, 2), "x"), ((2, 4), "y")],
)
def test_a_mesh_with_a_norm_and_auxiliary_data(kind, shape, axis):
    """Where one or two axes divide the state, and the batch is divided over all devices."""
    axes = ("x", "y")[: len(shape)]
    mesh, start = mesh_of(kind, shape, axes), arrays(0, {"w": (64, 32), "odd": (7,)})
    x = 10 * np.random.default_rng(0).normal(size=(16, 64)).astype("float32")

    def loss(params, x):
        return jnp.mean((x @ params["w"]) ** 2) + jnp.sum(params["odd"] ** 2), jnp.max(x)

    params = put(start, mesh)
    tx = optzoo.divide_states(optzoo.momentum(0.1, 0.9), axis, min_size=1000)
    step = optzoo.minimize(loss, tx, True, mesh=mesh, max_norm=0.5)
    placed = jax.device_put(x, NamedSharding(mesh, P(axes)))
    params, state, value, aux = step(params, tx.init(params), placed)
    grads = jax.grad(lambda params: loss(params, x)[0])(start)
    grads, _ = optax.clip_by_global_norm(0.5).update(grads, ())
    want = jax.tree.map(lambda w, g: w - 0.1 * g, start, grads)
    chex.assert_trees_all_close(jax.device_get(params), want, rtol=1e-5, atol=1e-7)
    found = jax.device_get(optzoo.get_slot(state, "momentum"))
    chex.assert_trees_all_close(found, grads, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(value, loss(start, x)[0], rtol=1e-5)
    np.testing.assert_array_equal(aux, x.reshape(8, -1).max(1))
    same_places(params, jax.tree.map(lambda _: NamedSharding(mesh, P()), params))


def test_means_of_gradients_in_16_bits_are_rounded_once():
    """Of six devices; the sum, 261, is no number of bfloat16."""
    mesh = mesh_of("Auto", (6,))
    params = put({"w": jnp.ones((66, 32), jnp.bfloat16)}, mesh)
    tx = divide(optzoo.gradient_descent(1.0))
    step = optzoo.minimize(lambda params, x: jnp.sum(params["w"] * x.mean()), tx, mesh=mesh)
    x = jnp.array([256, 1, 1, 1, 1, 1], jnp.bfloat16)
    x = jax.device_put(x, NamedSharding(mesh, P("data")))
    found = step(params, tx.init(params), x)[0]["w"]
    np.testing.assert_array_equal(found.astype("float32"), 1 - 261 / 6)


# Models


@pytest.mark.unique
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_around_a_clip_an_average_and_skipped_spikes(kind):
    """In a train step whose eighth batch is a spike; the state came from optax.

    The gradients are those of one program, or each device computes those of its part.
    """
    loss = lambda params, x: jnp.mean(jnp.tanh(x @ params["w"] + params["b"][None]) ** 2)
    start = arrays(0, {"w": (64, 128), "b": (128,)})
    batches = [10.0 * (t == 7) + arrays(t, {"x": (16, 64)})["x"] / 4 for t in range(10)]
    adamw = optzoo.sparse_adamw(0.01)
    clipped = optax.chain(optzoo.clip_by_global_norm(1.0), adamw)
    inner = optzoo.skip_spikes(optzoo.moving_average(clipped, 0.9), window=8, min_values=3)
    old = optax.adamw(0.01)
    finals = []
    mesh = mesh_of(kind)
    cases = [(None, inner, {}), (mesh, divide(inner), {}), (mesh, divide(inner), {"mesh": mesh})]
    for mesh, tx, options in cases:
        params = put(start, mesh)
        _, state = old.update(
            put(arrays(1, {"w": (64, 128), "b": (128,)}), mesh), old.init(params), params
        )
        state = optzoo.interop.optax.from_optax(state, tx, params)
        step = optzoo.minimize(loss, tx, **options)
        for x in batches:
            x = (
                jnp.asarray(x)
                if mesh is None
                else jax.device_put(x, NamedSharding(mesh, P("data")))
            )
            params, state, _ = step(params, state, x)
        finals.append((params, optzoo.eval_params(params, state), state.num_skipped))
        if mesh is not None:
            m = optzoo.get_slot(state, "m")["w"]
            assert m.sharding.is_equivalent_to(NamedSharding(mesh, P("data")), 2)
            assert params["w"].is_fully_replicated
    assert finals[0][2] == 1
    for found in finals[1:]:
        found, want = map(jax.device_get, (found, finals[0]))
        chex.assert_trees_all_close(found, want, rtol=1e-5, atol=1e-6)


def test_a_flax_model():
    mesh, model = mesh_of("Auto"), nn.Dense(64)
    x = jax.device_put(np.ones((16, 32), "float32"), NamedSharding(mesh, P("data")))
    params = model.init(jax.random.key(0), x)
    finals = []
    for tx in (optax.adam(0.1), divide(optax.adam(0.1))):
        placed = jax.device_put(params, NamedSharding(mesh, P()))
        state = TrainState.create(apply_fn=model.apply, params=placed, tx=tx)

        @jax.jit
        def step(state):
            loss = lambda params: jnp.mean(jnp.sin(state.apply_fn(params, x)) ** 2)
            return state.apply_gradients(grads=jax.grad(loss)(state.params))

        finals.append(step(step(state)))
    chex.assert_trees_all_close(finals[1].params, finals[0].params, rtol=1e-5, atol=1e-6)
    assert finals[1].opt_state[0].mu["params"]["kernel"].sharding.spec == P("data")


def test_an_nnx_model():
    mesh = mesh_of("Auto")
    model = nnx.Linear(32, 64, rngs=nnx.Rngs(0))
    nnx.update(model, jax.device_put(nnx.state(model), NamedSharding(mesh, P())))
    optimizer = nnx.Optimizer(model, divide(optzoo.adam(0.1)), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        grads = nnx.grad(lambda model: jnp.mean(model(jnp.ones((4, 32))) ** 2))(model)
        optimizer.update(model, grads)

    before = np.asarray(model.kernel[...])
    for _ in range(2):
        step(model, optimizer)
    found = [x for x in jax.tree.leaves(nnx.state(optimizer)) if jnp.shape(x) == (32, 64)]
    assert len(found) == 2 and all(x.sharding.spec == P("data") for x in found)
    assert np.all(before != model.kernel[...])
    assert model.kernel[...].sharding.is_fully_replicated


@pytest.mark.unique
def test_rows_of_a_table_beside_it():
    mesh = mesh_of("Auto")
    tx = optzoo.param_groups({"table": optzoo.lazy_adam(0.1), "w": optzoo.adam(0.1)})
    params = {"table": np.ones((64, 32), "float32"), "w": np.ones((32, 64), "float32")}
    loss = lambda params, ids: jnp.mean(jnp.tanh(optzoo.lookup(params["table"], ids) @ params["w"]))
    ids = np.array([1, 3, 3, 5, 1, 7, 60, 2])
    finals, only_w = [], functools.partial(divide, mask="w")
    for wrap, options in ((lambda tx: tx, {}), (only_w, {}), (only_w, {"mesh": mesh})):
        placed = put(params, mesh)
        step = optzoo.minimize(loss, wrap(tx), **options)
        finals.append(step(placed, wrap(tx).init(placed), ids)[0])
    for found in finals[1:]:
        chex.assert_trees_all_close(found, finals[0], rtol=1e-6)
    placed = put(params, mesh)
    with pytest.raises(ValueError, match=r"'table' has a row-sparse gradient.*mask="):
        optzoo.minimize(loss, divide(tx))(placed, divide(tx).init(placed), ids)


# Arguments


def test_bad_arguments():
    adam = optzoo.adam(0.1)
    for axis in (3, (), ("data", 1)):
        with pytest.raises(TypeError, match="axis must be the name of a mesh axis"):
            optzoo.divide_states(adam, axis)
    with pytest.raises(TypeError, match="inner"):
        optzoo.divide_states(3, "data")
    with pytest.raises(ValueError, match="min_size must be at least 0, got -1"):
        optzoo.divide_states(adam, "data", min_size=-1)
    with pytest.raises(TypeError, match="mask"):
        optzoo.divide_states(adam, "data", mask=3)
    with pytest.raises(ValueError, match="needs a mesh with these axes"):
        divide(adam).init({"w": jnp.ones((8, 8))})
    params = put(arrays(0), mesh_of("Auto"))
    with pytest.raises(ValueError, match=r"mesh has no axis 'replica'.*axis="):
        optzoo.divide_states(adam, "replica").init(params)
    tx, grads = divide(optax.sgd(0.1)), {**params, "b": jnp.ones(1)}
    with pytest.raises(ValueError, match=r"'b' has shape \(16,\), but its gradient \(1,\)"):
        tx.update(grads, tx.init(params), params)


@pytest.mark.parametrize(
    "around",
    [
        lambda tx: optzoo.accumulate(tx, 2),
        lambda tx: optzoo.moving_average(tx, 0.9),
        lambda tx: optzoo.param_groups({".*": tx}),
        lambda tx: optzoo.slots_dtype(tx, "bfloat16"),
        lambda tx: divide(tx),
    ],
)
def test_it_is_the_outermost(around):
    with pytest.raises(ValueError, match="divide_states, which must be the outermost"):
        around(divide(optzoo.adam(0.1)))


def test_divided_parameters_that_an_update_cannot_see():
    params = put({"w": np.ones((64, 32), "float32")}, mesh_of("Auto"), {"w": P("data")})
    tx = divide(optzoo.adam(0.1))
    for call in (tx.init, functools.partial(optzoo.state_sharding, tx)):
        with pytest.raises(ValueError, match=r"parameter 'w' is divided as .*give specs="):
            call(params)


def test_sharded_tables_need_an_update_inside():
    mesh, tx = mesh_of("Auto"), divide(optzoo.adam(0.1))
    tables = {"w": optzoo.sharded.RowSharding(64, 8, axis_name="data", multiple=1)}
    loss = lambda params, ids: jnp.mean(optzoo.lookup(params["w"], ids))
    params = put(arrays(0), mesh)
    with pytest.raises(ValueError, match=r"optzoo\.divide_states divides the update outside"):
        step = optzoo.minimize(loss, tx, mesh=mesh, tables=tables)
        step(params, tx.init(params), jnp.arange(8))


def test_axes_of_two_kinds():
    types = (AxisType.Auto, AxisType.Explicit)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=types)
    with pytest.raises(ValueError, match="automatic, but other axes of the mesh are explicit"):
        divide(optzoo.adam(0.1)).init(put(arrays(0), mesh))
