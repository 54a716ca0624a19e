"""SOAP and Shampoo whose matrices have owners: the same values, and states for any devices."""

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optzoo
from tests.second_order.test_owners import collectives

# Three of one shape, so that on most meshes some owners have none; cut and merged; no matrices.
SHAPES = {
    "up": (16, 24), "down": (24, 16), "up2": (16, 24), "up3": (16, 24), "conv": (8, 3, 2, 8),
    "bias": (16,), "scale": (),
}  # fmt: skip
MATRICES = ("up", "down", "up2", "up3", "conv")
TILES = {
    "up": P("d", "m"), "down": P("m", "d"), "up2": P("d", "m"), "up3": P("d", "m"),
    "conv": P("d", None, None, None), "bias": P("m"), "scale": P(),
}  # fmt: skip
ROWS = {name: P(*["d", None, None, None][: len(shape)]) for name, shape in SHAPES.items()}
OPTIMIZERS = {
    "soap": lambda **more: optzoo.soap(
        lambda count: 0.125 / (1 + count), preconditioner_interval=2, merge_dims=True, **more
    ),
    "soap, KL": lambda **more: optzoo.soap(
        0.1, preconditioner_interval=2, max_matrix_size=20, kl_statistics=True, **more
    ),
    "soap, blocks": lambda **more: optzoo.soap(
        0.1, preconditioner_interval=2, block_size=8, one_sided=True, weight_decay=0.1, **more
    ),
    "blocked_shampoo": lambda **more: optzoo.blocked_shampoo(
        0.1, block_size=12, preconditioner_interval=2, start_step=1, root="newton", momentum=0.9,
        max_matrix_size=20, **more,
    ),
    "shampoo": lambda **more: optzoo.shampoo(
        0.1, preconditioner_interval=2, skip_vectors=True, **more
    ),
    "shampoo, KL": lambda **more: optzoo.blocked_shampoo(
        0.1, block_size=12, preconditioner_interval=2, start_step=0, root="pseudo_inverse",
        kl_statistics=True, **more,
    ),
    "shampoo, one side": lambda **more: optzoo.blocked_shampoo(
        0.1, preconditioner_interval=1, max_matrix_size=20, one_sided=True, **more
    ),
}  # fmt: skip


def arrays(seed):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape) for name, shape in SHAPES.items()}


def on(mesh, specs):
    """Puts a tree on a mesh; on the first device if there is none."""
    if mesh is None:
        return lambda tree: jax.tree.map(jnp.asarray, tree)
    return lambda tree: {
        k: jax.device_put(jnp.asarray(x), NamedSharding(mesh, specs[k])) for k, x in tree.items()
    }


def mesh_of(kind, shape=(4, 2), axes=("d", "m")):
    devices = jax.devices()[: int(np.prod(shape))]
    types = (getattr(AxisType, kind),) * len(axes)
    return jax.make_mesh(shape, axes, axis_types=types, devices=devices)


def steps(tx, place, params, state, times):
    """After some updates; in every other one a matrix and a vector have no gradient."""
    step = jax.jit(tx.update)
    for t in times:
        grads = place(arrays(t + 1)) | ({"up2": None, "bias": None} if t % 2 else {})
        updates, state = step(grads, state, params)
        params = {k: x if updates[k] is None else x + updates[k] for k, x in params.items()}
    assert step._cache_size() <= 2  # with and without missing gradients
    return params, state


def same_places(state, tx, params):
    """Asserts that a state lies as ``state_sharding`` says."""
    shardings = optzoo.state_sharding(tx, params)
    for x, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(shardings), strict=True):
        assert x.sharding.is_equivalent_to(sharding, x.ndim), (x.sharding, sharding)


def specs_of(tx, params):
    """For ``shard_map``."""
    return jax.tree.map(lambda s: s.spec, optzoo.state_sharding(tx, params))


@pytest.mark.unique
@pytest.mark.parametrize("name", ["soap", "blocked_shampoo"])
@pytest.mark.parametrize("kind", ["Explicit", "Auto"])
def test_equals_one_device(name, kind, x64):
    check_that_it_equals_one_device(name, kind, x64)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS.keys() - {"soap", "blocked_shampoo"}))
@pytest.mark.parametrize("kind", ["Explicit", "Auto"])
def test_others_equal_one_device(name, kind, x64):
    check_that_it_equals_one_device(name, kind, x64)


def check_that_it_equals_one_device(name, kind, x64):
    """However the parameters are divided; each device has its share of the state."""
    owners = "d" if name == "soap" else ("d", "m")
    alone, divided = OPTIMIZERS[name](), OPTIMIZERS[name](owners=owners)
    place = on(mesh_of(kind), TILES)
    with x64(True):
        params = on(None, None)(arrays(0))
        want, of_one = steps(alone, on(None, None), params, alone.init(params), range(5))
        params = place(arrays(0))
        state = divided.init(params)
        same_places(state, divided, params)
        got, state = steps(divided, place, params, state, range(5))
        same_places(state, divided, params)
    chex.assert_trees_all_close(got, want, rtol=0, atol=1e-12)
    for slot in optzoo.slot_names(of_one):
        old, new = (optzoo.get_slot(s, slot) for s in (of_one, state))
        chex.assert_trees_all_close(new, old, rtol=0, atol=1e-10)
    of_matrices = jax.tree.leaves(state[0].matrices.slots)
    assert {x.addressable_shards[0].data.shape[0] for x in of_matrices} == {1}


@pytest.mark.parametrize("name", ["soap", "blocked_shampoo"])
def test_on_other_numbers_of_devices(name, x64):
    """One run, with a restore on another mesh after every two steps."""
    make = OPTIMIZERS[name]
    meshes = [None, mesh_of("Auto", (8,), "d"), mesh_of("Explicit", (2,), "d"), None,
              mesh_of("Auto", (1,), "d"), mesh_of("Explicit", (8,), "d")]  # fmt: skip
    with x64(True):
        place = on(None, None)
        params, state = place(arrays(0)), make().init(place(arrays(0)))
        want = steps(make(), place, params, state, range(12))
        params = arrays(0)
        for i, mesh in enumerate(meshes):
            tx, place = make(owners=None if mesh is None else "d"), on(mesh, ROWS)
            params = place(jax.tree.map(np.asarray, params))
            like = jax.eval_shape(tx.init, params)
            state = optzoo.state.slots_like(jax.tree.map(np.asarray, state), like)
            chex.assert_trees_all_equal_shapes_and_dtypes(state, like)
            state = jax.device_put(state, optzoo.state_sharding(tx, params))
            params, state = steps(tx, place, params, state, range(2 * i, 2 * i + 2))
        state = optzoo.state.slots_like(state, want[1])
    chex.assert_trees_all_close((params, state), want, rtol=0, atol=1e-10)


def test_a_checkpoint_of_another_number_of_devices():
    """``state_like`` of what it holds: nested dicts."""
    tx = OPTIMIZERS["soap"](owners="d")
    many, few = (mesh_of("Auto", (n,), "d") for n in (8, 2))
    params = on(many, ROWS)(arrays(0))
    _, state = steps(tx, on(many, ROWS), params, tx.init(params), range(2))
    to_dicts = lambda x: (
        {k: to_dicts(v) for k, v in x._asdict().items()}
        if hasattr(x, "_fields")
        else {k: to_dicts(v) for k, v in x.items()}
        if isinstance(x, dict)
        else [*map(to_dicts, x)]
        if isinstance(x, tuple)
        else np.asarray(x)
    )
    like = jax.eval_shape(tx.init, on(few, ROWS)(arrays(0)))
    restored = optzoo.state.state_like(to_dicts(state), like)
    chex.assert_trees_all_equal_shapes_and_dtypes(restored, like)
    for slot in optzoo.slot_names(state):
        there, here = (optzoo.get_slot(s, slot) for s in (state, restored))
        chex.assert_trees_all_equal(jax.device_get(here), jax.device_get(there))


def test_two_unlike_stacks_for_other_devices_and_in_16_bits():
    shapes = {"a": (3, 4), "b": (3, 4), "c": (5, 2), "bias": (3,)}
    soap = optzoo.soap(0.1, owners="d")

    def like(tx, devices):
        whole = NamedSharding(mesh_of("Auto", (devices,), "d"), P())
        params = {k: jax.device_put(np.zeros(shape), whole) for k, shape in shapes.items()}
        return jax.eval_shape(tx.init, params)

    count = lambda a: np.arange(a.size, dtype=a.dtype).reshape(a.shape)
    state = jax.tree.map(count, like(soap, 8))  # all numbers are below 256
    few, half = like(soap, 2), like(optzoo.slots_dtype(soap, "bfloat16"), 8)

    @jax.jit
    def read(state):
        others = optzoo.state.state_like(state, few), optzoo.state.slots_like(state, half)
        chex.assert_trees_all_equal_shapes_and_dtypes(others, (few, half))
        slots = lambda s: {k: optzoo.get_slot(s, k) for k in optzoo.slot_names(state)}
        return [jax.tree.map(jnp.float32, slots(s)) for s in (state, *others)]

    want, *found = read(state)
    for got in found:
        chex.assert_trees_all_equal(got, want)


@pytest.mark.parametrize("check_vma", [True, False])
def test_replicas_inside_of_shard_map(check_vma, x64):
    """Each has its part of the state, and needs the gradients of its own matrices alone."""
    make, mesh = OPTIMIZERS["blocked_shampoo"], mesh_of("Auto", (4,), "d")
    tx, whole = make(owners="d"), NamedSharding(mesh, P())
    with x64(True):
        place = on(None, None)
        alone, params = make(), place(arrays(0))
        everywhere = jax.device_put(params, whole)
        old, state, specs = alone.init(params), tx.init(everywhere), specs_of(tx, everywhere)
        update = jax.jit(
            jax.shard_map(
                tx.update, mesh=mesh, in_specs=(P(), specs), out_specs=(P(), specs),
                check_vma=check_vma,
            )
        )  # fmt: skip
        for t in range(4):
            grads = place(arrays(t + 1))
            want, old = alone.update(grads, old)
            got, state = update(grads, state)
            chex.assert_trees_all_close(got, want, rtol=0, atol=1e-12)
        init = jax.shard_map(tx.init, mesh=mesh, in_specs=P(), out_specs=specs)
        chex.assert_trees_all_equal_structs(jax.eval_shape(init, params), state)


def test_gradients_of_the_owner_alone():
    """Inside of ``shard_map`` those of other devices are not read."""
    mesh = mesh_of("Auto", (4,), "d")
    tx = optzoo.soap(0.1, preconditioner_interval=1, owners="d")
    names = ["a", "b", "c", "d"]  # the i-th belongs to the i-th device
    params = dict.fromkeys(names, jnp.eye(8))
    grads = {
        k: jnp.asarray(np.random.default_rng(i).normal(size=(8, 8))) for i, k in enumerate(names)
    }
    state = tx.init(jax.device_put(params, NamedSharding(mesh, P())))
    specs = jax.tree.map(
        lambda s: s.spec,
        optzoo.state_sharding(tx, jax.device_put(params, NamedSharding(mesh, P()))),
    )

    def update(grads, state, lie):
        mine = jax.lax.axis_index("d")
        others = lambda i, g: jnp.where((mine == i) | ~lie, g, jnp.nan)
        return tx.update({k: others(i, g) for i, (k, g) in enumerate(grads.items())}, state)

    run = jax.shard_map(
        update, mesh=mesh, in_specs=(P(), specs, P()), out_specs=(P(), specs), check_vma=False
    )
    results = []
    for lie in (False, True):
        now = state
        for _ in range(2):
            updates, now = jax.jit(run)(grads, now, jnp.asarray(lie))
        results.append(updates)
    chex.assert_trees_all_equal(*results)
    assert all(np.isfinite(u).all() and u.any() for u in results[0].values())


STORAGES = {
    "bfloat16": ("bfloat16", {}),
    "int8": ("int8", {}),
    "packed": ("bfloat16", {"packed": True}),
    "side by side": ("float32", {"packed": True}),
}


@pytest.mark.parametrize("storage", STORAGES)
def test_storages(storage):
    """As without owners, by the formula that has no bases which a sum in another order turns."""
    dtype, more = STORAGES[storage]
    make = lambda **owners: optzoo.slots_dtype(
        OPTIMIZERS["blocked_shampoo"](**owners), dtype, **more
    )
    place = on(mesh_of("Auto", (8,), "d"), ROWS)
    in_32 = lambda seed: {k: x.astype(np.float32) for k, x in arrays(seed).items()}
    results = []
    for tx in (make(), make(owners="d")):
        params = place(in_32(0))
        state, step = tx.init(params), jax.jit(tx.update)
        for t in range(4):
            updates, state = step(place(in_32(t + 1)), state, params)
            params = optax.apply_updates(params, updates)
        results.append((params, state))
    (want, old), (got, new) = results
    same_places(new, tx, params)
    # The same numbers, but for those that a sum in another order rounds the other way.
    atol = 4 * 0.1 * 2**-6 if dtype == "bfloat16" else 1e-5
    chex.assert_trees_all_close(got, want, rtol=0, atol=atol)
    kinds = lambda state: {a.dtype for a in jax.tree.leaves(state)}
    assert kinds(new) == kinds(old)
    plain = OPTIMIZERS["blocked_shampoo"](owners="d")
    wide = optzoo.state.slots_like(new, jax.eval_shape(plain.init, params))
    back = optzoo.state.slots_like(wide, jax.eval_shape(tx.init, params))
    for slot in optzoo.slot_names(new):  # not what is in the place of no matrix
        chex.assert_trees_all_equal(
            *(jax.device_get(optzoo.get_slot(s, slot)) for s in (back, new))
        )


@pytest.mark.unique
def test_random_rounding_differs_between_owners():
    tx = optzoo.slots_dtype(
        optzoo.shampoo(0.1, gbar_decay=0.9, owners="d"), "bfloat16", stochastic=True
    )
    mesh = mesh_of("Auto", (8,), "d")
    whole = NamedSharding(mesh, P())
    params = jax.device_put({k: jnp.zeros((8, 8)) for k in "abcdefgh"}, whole)
    grads = jax.device_put({k: jnp.full((8, 8), 1 + 2**-9) for k in params}, whole)
    with jax.numpy_dtype_promotion("strict"):
        _, state = jax.jit(tx.update)(grads, tx.init(params), params)
    kept = {np.asarray(x).tobytes() for x in optzoo.get_slot(state, "gbar").values()}
    assert len(kept) == 8


WRAPPERS = {
    "accumulate": lambda tx: optzoo.accumulate(tx, 2),
    "moving_average": lambda tx: optzoo.moving_average(tx, 0.9),
    "param_groups": lambda tx: optzoo.param_groups({"up|down": tx, ".*": optzoo.adam(0.1)}),
    "clip": lambda tx: optax.chain(optzoo.clip_by_global_norm(1.0), tx),
    "masked": lambda tx: optax.masked(tx, {k: k != "conv" for k in SHAPES}),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("kind", ["Explicit", "Auto"])
def test_in_wrappers(wrapper, kind, x64):
    results, place = [], on(mesh_of(kind, (8,), "d"), ROWS)
    with x64(True):
        for owners in (None, "d"):
            tx = WRAPPERS[wrapper](OPTIMIZERS["shampoo"](owners=owners))
            params = place(arrays(0))
            step, state = jax.jit(tx.update), tx.init(params)
            for t in range(4):
                updates, state = step(place(arrays(t + 1)), state, params)
                params = optax.apply_updates(params, updates)
            results.append(params)
        same_places(state, tx, params)
    chex.assert_trees_all_close(*results, rtol=0, atol=1e-11)


@pytest.mark.unique
def test_messages_do_not_grow_with_layers():
    """One all-to-all there and one back for each shape; and little else."""
    place = lambda n: {
        f"{k}{i}": jax.device_put(
            jnp.zeros(shape), NamedSharding(mesh_of("Auto", (8,), "d"), P("d"))
        )
        for i in range(n)
        for k, shape in {"up": (16, 32), "down": (32, 16)}.items()
    }
    tx = optzoo.blocked_shampoo(0.1, owners="d", preconditioner_interval=1, root="newton")
    sent = []
    for n in (1, 4):
        params = place(n)
        sent.append(collectives(tx.update, params, tx.init(params), params))
    assert sent[0] == sent[1]
    assert sent[0]["all-to-all"] == 4 and "all-gather" not in sent[0]


@pytest.mark.unique
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_staggered_refreshes_are_those_of_each_owner(kind, x64):
    """With one matrix on a device these are as without owners and other matrices."""
    params = {f"w{i}": jnp.asarray(x) for i, x in enumerate(np.ones((8, 8, 8)))}
    rng, make = (
        np.random.default_rng(0),
        lambda **more: optzoo.soap(0.1, preconditioner_interval=2, stagger=True, **more),
    )
    grads = [{k: rng.normal(size=(8, 8)) for k in params} for _ in range(6)]
    with x64(True):
        mesh = mesh_of(kind)
        put = lambda tree: on(mesh, dict.fromkeys(tree, P("d")))(tree)
        tx, alone = make(owners=("d", "m")), make()
        update, one = jax.jit(tx.update), jax.jit(alone.update)
        state = tx.init(put(params))
        states = {k: alone.init({k: x}) for k, x in params.items()}
        for g in grads:
            updates, state = update(put(g), state)
            for k in params:
                want, states[k] = one({k: g[k]}, states[k])
                np.testing.assert_allclose(updates[k], want[k], rtol=1e-10, atol=1e-12)


def test_exchanged_in_16_bits():
    """Gradients and updates are rounded once each, and nothing else is."""
    place = on(mesh_of("Auto", (8,), "d"), ROWS)
    in_16 = lambda tree: jax.tree.map(lambda x: x.astype(ml_dtypes.bfloat16), tree)
    in_32 = lambda tree: place(jax.tree.map(lambda x: x.astype(np.float32), tree))
    make = lambda **more: optzoo.transforms.scale_by_shampoo(skip_vectors=True, owners="d", **more)
    states, updates = [], []
    for tx, grads in (
        (make(), in_32(in_16(arrays(1)))),
        (make(exchange_dtype="bfloat16"), in_32(arrays(1))),
    ):
        update, state = jax.jit(tx.update)(grads, tx.init(grads))
        states.append(state.matrices)
        updates.append({k: np.asarray(update[k]) for k in MATRICES})
    chex.assert_trees_all_equal(*states)
    chex.assert_trees_all_equal(jax.tree.map(np.float32, in_16(updates[0])), updates[1])


def test_missing_gradients_of_all():
    tx = OPTIMIZERS["soap"](owners="d")
    params = on(mesh_of("Auto", (8,), "d"), ROWS)(arrays(0))
    state = tx.init(params)
    updates, new = jax.jit(tx.update)(dict.fromkeys(SHAPES), state, params)
    assert updates == dict.fromkeys(SHAPES)
    chex.assert_trees_all_equal(new[0].matrices.slots, state[0].matrices.slots)
    assert int(new[0].matrices.count) == 1


def test_a_parameter_with_the_name_of_a_stack():
    """It has no owners: ``state_sharding`` reads the axes in the keys of stacks alone."""
    whole = NamedSharding(mesh_of("Auto", (8,), "d"), P())
    params = {"0_1__d": jax.device_put(jnp.ones((8, 8)), whole)}
    placed = optzoo.state_sharding(optzoo.adam(0.1), params)
    assert {x.spec for x in jax.tree.leaves(placed)} == {P()}


def test_without_matrices():
    tx = OPTIMIZERS["soap"](owners="d")
    params = {"bias": jnp.ones(3)}
    state = tx.init(params)
    updates, _ = tx.update(params, state, params)
    want, _ = (plain := OPTIMIZERS["soap"]()).update(params, plain.init(params), params)
    chex.assert_trees_all_equal(updates, want)


def test_what_does_not_fit():
    place = on(mesh_of("Auto", (8,), "d"), ROWS)
    tx, params = OPTIMIZERS["soap"](owners="d"), place(arrays(0))
    few = on(mesh_of("Auto", (2,), "d"), ROWS)(arrays(0))
    with pytest.raises(
        ValueError,
        match=r"8 places for 1 matrices, but 2 owners need 2: convert a state of another",
    ):
        jax.eval_shape(tx.update, few, jax.tree.map(np.asarray, tx.init(params)), few)
    other = OPTIMIZERS["soap"](owners="m")
    grid = on(mesh_of("Auto"), ROWS)(arrays(0))
    with pytest.raises(ValueError, match=r"expected matrices with owners=\('d',\).*\('m',\)"):
        jax.eval_shape(tx.update, grid, other.init(grid), grid)
    with pytest.raises(ValueError, match=r"expected OwnersState\(matrices, others\), got Leafwise"):
        jax.eval_shape(tx.update, params, OPTIMIZERS["soap"]().init(params), params)
    with pytest.raises(ValueError, match="needs a mesh with these axes"):
        tx.init(arrays(0))
    with pytest.raises(
        ValueError, match=r"multitask is around optzoo.stacked or an optimizer with owners"
    ):
        optzoo.multitask(tx).init(params)
    with pytest.raises(ValueError, match="stacked is around an optimizer with owners, which"):
        optzoo.stacked(tx).init(params)


@st.composite
def cases(draw):
    """Parameters on a mesh, how they are divided, and who owns them."""
    sizes = draw(st.sampled_from([(8,), (4, 2), (2, 4), (2, 2, 2), (3, 2)]))
    axes = ("d", "m", "k")[: len(sizes)]
    owners = draw(st.permutations(axes))[: draw(st.integers(1, len(axes)))]
    shapes = draw(
        st.lists(st.sampled_from([(24, 48), (48, 24), (24, 24), (24,)]), min_size=1, max_size=9)
    )
    specs = [P(*draw(st.permutations([*axes[:2], None, None]))[: len(shape)]) for shape in shapes]
    return sizes, axes, tuple(owners), dict(enumerate(shapes)), dict(enumerate(specs))


@settings(max_examples=8, deadline=None)
@given(cases(), st.sampled_from(["Auto", "Explicit"]), st.sampled_from([*OPTIMIZERS]))
def test_any_mesh(case, kind, name):
    sizes, axes, owners, shapes, specs = case
    rng = np.random.default_rng(0)
    trees = [{f"x{k}": rng.normal(size=shape) for k, shape in shapes.items()} for _ in range(4)]
    specs = {f"x{k}": spec for k, spec in specs.items()}
    results = []
    with jax.enable_x64(True):
        for mesh in (None, mesh_of(kind, sizes, axes)):
            place = on(mesh, specs)
            tx = OPTIMIZERS[name](owners=None if mesh is None else owners)
            params = place(trees[0])
            step, state = jax.jit(tx.update), tx.init(params)
            for grads in map(place, trees[1:]):
                updates, state = step(grads, state, params)
                params = optax.apply_updates(params, updates)
            results.append(params)
    chex.assert_trees_all_close(*map(jax.device_get, results), rtol=0, atol=1e-11)
