"""States divided inside of ``shard_map``, where each device has its own share of each slot."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import optzoo
from optzoo.testing import samples

from .test_divide_states import TXS, arrays, divide, mesh_of, on_device, put, run, same_places

# Each element is computed from those in its place, and from norms and counts.
DIVISIBLE = [
    "adam", "optax, a chain", "accumulate", "groups", "momentum", "moving_average", "packed",
    "injected", "lamb", "decay", "stacked",
]  # fmt: skip


def specs_of(tx, params):
    return jax.tree.map(lambda s: s.spec, optzoo.state_sharding(tx, params))


def mapped_step(tx, mesh, params, check_vma=True, **options):
    """A step of a user, who maps it over the devices; the gradients are the same on all of them."""
    specs = specs_of(tx, params)
    places = {"in_specs": (P(), specs, P()), "out_specs": (P(), specs)} | options
    return jax.jit(jax.shard_map(samples.step_of(tx), mesh=mesh, check_vma=check_vma, **places))


def mapped_run(tx, mesh, times=range(1, 5), check_vma=True):
    params = put(arrays(0), mesh)
    state = tx.init(params)
    step = mapped_step(tx, mesh, params, check_vma)
    for t in times:
        params, state = step(params, state, put(arrays(t), mesh))
    return params, state


@pytest.mark.parametrize("name", DIVISIBLE)
@pytest.mark.parametrize(
    ("kind", "check_vma"), [("Auto", True), ("Explicit", True), ("Auto", False)]
)
def test_values_are_those_of_the_inner_one(name, kind, check_vma):
    inner, mesh = TXS[name](), mesh_of(kind)
    tx = divide(inner)
    params, state = mapped_run(tx, mesh, check_vma=check_vma)
    want, of_inner = run(inner, None)
    for got, wanted in zip(jax.tree.leaves(params), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-6)
        assert got.sharding.is_fully_replicated
    chex.assert_trees_all_equal_shapes_and_dtypes(state, of_inner)
    same_places(state, optzoo.state_sharding(tx, params))


def test_each_device_has_its_share():
    mesh = mesh_of("Auto")
    params = put(arrays(0, {"w": (256, 128), "u": (128, 512), "b": (64,)}), mesh)
    tx = divide(optzoo.adam(0.1))
    specs = specs_of(tx, params)
    init = jax.jit(jax.shard_map(tx.init, mesh=mesh, in_specs=P(), out_specs=specs))
    state = init(params)
    here, whole = on_device(state)
    assert here <= 1.05 * whole / 8
    chex.assert_trees_all_equal(jax.device_get(state), jax.device_get(tx.init(params)))
    same_places(state, optzoo.state_sharding(tx, params))


def test_over_two_axes():
    """Shares are in the order of the axes of a sharding, the first of which is the slowest."""
    mesh = mesh_of("Auto", (4, 2), ("x", "y"))
    for axis in (("x", "y"), ("y", "x"), "y"):
        tx = optzoo.divide_states(optzoo.adam(0.1), axis, min_size=1000)
        params, state = mapped_run(tx, mesh)
        want, of_inner = run(optzoo.adam(0.1), None)
        chex.assert_trees_all_close(jax.device_get(params), want, rtol=1e-5, atol=1e-6)
        chex.assert_trees_all_close(jax.device_get(state), of_inner, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_other_axes_are_not_mapped(kind):
    """A parameter is divided over the model axis by XLA, and its slots over both."""
    mesh = mesh_of(kind, (4, 2), ("data", "model"))
    specs = {"w": P("model"), "wide": P(None, "model")}
    start = {k: x for k, x in arrays(0).items() if k in specs}
    grads = {k: x for k, x in arrays(1).items() if k in specs}
    tx = divide(optzoo.adam(0.1), specs=specs if kind == "Auto" else None)
    params = put(start, mesh, specs)
    state = tx.init(params)
    own = jax.tree.map(
        lambda spec: P(*(name if name == "data" else None for name in spec)), specs_of(tx, params)
    )
    step = mapped_step(
        tx, mesh, params, in_specs=(P(), own, P()), out_specs=(P(), own), axis_names={"data"}
    )
    with jax.set_mesh(mesh):
        params, state = step(params, state, put(grads, mesh, specs))
    want, _ = optzoo.adam(0.1).update(grads, optzoo.adam(0.1).init(start), start)
    want = optax.apply_updates(start, want)
    chex.assert_trees_all_close(jax.device_get(params), jax.device_get(want), rtol=1e-5, atol=1e-6)
    here, whole = on_device(optzoo.get_slot(state, "m"))
    assert here == whole // 8


def _by_extremes():
    """Gradients divided by maxima, minima and counts."""

    def update(updates, state, params=None):
        del params

        def scaled(g):
            extremes = jnp.max(g) - jnp.min(g) + jnp.any(g > 2)
            return g / (extremes + jnp.sum(g > 0) + jnp.all(g < 2))

        return jax.tree.map(scaled, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


SUMS = {
    "all finite": lambda: optax.apply_if_finite(optax.sgd(0.1), 3),
    "extremes": lambda: optax.chain(_by_extremes(), optax.sgd(0.1)),
}


@pytest.mark.parametrize("name", SUMS)
def test_what_goes_over_all_parts(name):
    mesh, inner = mesh_of("Auto"), SUMS[name]()
    tx = divide(inner)
    params = put(arrays(0), mesh)
    grads = arrays(1)
    infinite = dict(grads, w=np.where(np.arange(64)[:, None] == 63, np.inf, grads["w"]))
    step = mapped_step(tx, mesh, params)
    want, of_inner = arrays(0), inner.init(arrays(0))
    state = tx.init(params)
    for gs in (infinite, grads) if name == "all finite" else (grads,):
        params, state = step(params, state, put(gs, mesh))
        updates, of_inner = inner.update(gs, of_inner, want)
        want = optax.apply_updates(want, updates)
    chex.assert_trees_all_close(jax.device_get(params), jax.device_get(want), rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_close(jax.device_get(state), jax.device_get(of_inner), rtol=1e-6)


# Refused


REFUSED = {
    "a mean": (lambda: optax.chain(optax.clip_by_block_rms(0.1), optax.sgd(0.1)), "the size of a"),
    "factors": (lambda: optzoo.adafactor(0.1), "the size of a parameter"),
    "random bits": (TXS["random bits"], "`iota` may mix the parts of parameter"),
    "a product of matrices": (TXS["muon with owners"], "`dot_general` may mix the parts of"),
    "blocks": (TXS["shampoo"], "`reshape` may mix the parts of parameter 'conv'"),
    "groups of 256": (TXS["int8"], "`concatenate` may mix the parts of parameter 'wide'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_shares_are_refused(name):
    make, message = REFUSED[name]
    mesh, tx = mesh_of("Auto"), divide(make())
    params = put(arrays(0), mesh)
    state = tx.init(params)
    with pytest.raises(ValueError, match=f"inner cannot be divided.*{message}"):
        mapped_step(tx, mesh, params)(params, state, put(arrays(1), mesh))


def test_an_init_that_depends_on_other_shares():
    inner = optax.GradientTransformation(
        lambda params: jax.tree.map(lambda x: jnp.cumsum(x, 0), params),
        lambda gs, state, params=None: (gs, state),
    )
    mesh, params = mesh_of("Auto"), put(arrays(0), mesh_of("Auto"))
    init = jax.shard_map(divide(inner).init, mesh=mesh, in_specs=P(), out_specs=P("data"))
    with pytest.raises(ValueError, match=r"inner cannot be divided.*`cumsum` may mix the parts"):
        init(params)


def test_gradients_that_differ():
    mesh, tx = mesh_of("Auto"), divide(optzoo.adam(0.1))
    params = put(arrays(0), mesh)
    specs = specs_of(tx, params)

    def step(params, state, grads):
        grads = jax.tree.map(lambda g: g * jax.lax.axis_index("data"), grads)
        return tx.update(grads, state, params)

    step = jax.shard_map(step, mesh=mesh, in_specs=(P(), specs, P()), out_specs=(P(), specs))
    with pytest.raises(ValueError, match=r"'conv' or its gradient varies over \['data'\]: give"):
        step(params, tx.init(params), put(arrays(1), mesh))


def test_a_whole_state():
    mesh, tx = mesh_of("Auto"), divide(optzoo.adam(0.1))
    params = put(arrays(0), mesh)
    step = mapped_step(tx, mesh, params, in_specs=P(), out_specs=P())
    with pytest.raises(ValueError, match=r"conv' of shape \(3, 3, 8, 16\) inside.*\(3, 3, 1, 16\)"):
        step(params, tx.init(params), put(arrays(1), mesh))


def test_axes_of_which_one_is_mapped():
    mesh = mesh_of("Auto", (4, 2), ("x", "y"))
    tx = optzoo.divide_states(optzoo.adam(0.1), ("x", "y"), min_size=1000)
    params = put(arrays(0), mesh)
    init = jax.shard_map(tx.init, mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"x"})
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="map over all of them, or over none"):
        jax.jit(init)(params)


def with_rows(tx):
    """A step with two unlike tables, of which one has rows for a gradient."""

    def step(params, state, ids, values, grads):
        grads = grads | {"w": optzoo.SparseRows(ids, values, 64)}
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


@pytest.mark.parametrize("check_vma", [True, False])
def test_rows_of_a_table_beside_it(check_vma):
    mesh = mesh_of("Auto")
    inner = optzoo.param_groups({"w": optzoo.lazy_adam(0.1), ".*": optzoo.adam(0.1)})
    params = {k: arrays(0)[k] for k in ("w", "wide", "b")}
    grads = {k: arrays(1)[k] for k in ("wide", "b")}
    rows = np.array([3, 60, 3, 64]), np.float32(arrays(2)["w"][:4])
    want, of_inner = with_rows(inner)(params, inner.init(params), *rows, grads)

    def run(tx):
        placed = put(params, mesh)
        specs = specs_of(tx, placed)
        step = jax.shard_map(
            with_rows(tx),
            mesh=mesh,
            in_specs=(P(), specs, P(), P(), P()),
            out_specs=(P(), specs),
            check_vma=check_vma,
        )
        return jax.jit(step)(placed, tx.init(placed), *rows, grads)

    got, state = run(divide(inner, mask="wide"))
    chex.assert_trees_all_close(jax.device_get(got), jax.device_get(want), rtol=1e-6, atol=1e-6)
    chex.assert_trees_all_close(jax.device_get(state), jax.device_get(of_inner), rtol=1e-6)
    with pytest.raises(ValueError, match=r"'w' has a row-sparse gradient.*mask="):
        run(divide(inner))
