"""Matrices divided among owners: values of one device, and as many collectives as shapes."""

import collections
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from optzoo.second_order.owners import Owners

COLLECTIVE = re.compile(
    r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)
# The mesh, the owners, and how arrays are divided.
CASES = {
    "in tiles": ({"d": 4, "m": 2}, ("d", "m"), P("d", "m")),
    "rows": ({"d": 8}, "d", P("d")),
    "columns": ({"d": 8}, "d", P(None, "d")),
    "replicated": ({"d": 8}, "d", P()),
    "in tiles, owners along rows": ({"d": 4, "m": 2}, "d", P("d", "m")),
    "in tiles, other order": ({"d": 4, "m": 2}, ("m", "d"), P("d", "m")),
    "rows by two axes": ({"d": 4, "m": 2}, ("d", "m"), P(("d", "m"))),
    "rows by one of two owners": ({"d": 4, "m": 2}, ("d", "m"), P("d")),
    "three axes": ({"a": 2, "b": 2, "c": 2}, ("a", "b", "c"), P("c", ("a", "b"))),
}


def work(x):
    """Of each matrix by itself, with all of its elements."""
    return x - x @ x.mT @ x / 8


def by_numpy(x):
    return x - x @ x.T @ x / 8


def arrays(number=11):
    """Matrices of two shapes, whose numbers no mesh divides."""
    rng = np.random.default_rng(0)
    return [rng.normal(size=(16, 8) if i % 3 else (8, 24)) for i in range(number)]


def apply(owners, work, xs):
    """Each array is a stack of one."""
    return [x[0] for x in owners.apply(work, [x[None] for x in xs])]


def mesh_of(sizes, kind):
    kinds = (getattr(AxisType, kind),) * len(sizes)
    return jax.make_mesh((*sizes.values(),), (*sizes,), axis_types=kinds)


def collectives(f, *args):
    text = jax.jit(f).lower(*args).compile().as_text()
    return collections.Counter(COLLECTIVE.findall(text))


@pytest.mark.unique
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ["Explicit", "Auto"])
def test_values_and_places(case, kind, x64):
    sizes, axes, spec = CASES[case]
    owners = Owners.of(axes, None)
    placed = NamedSharding(mesh_of(sizes, kind), spec)
    with x64(True):
        xs = jax.device_put([jnp.asarray(x) for x in arrays()], placed)
        got = jax.jit(lambda xs: apply(owners, work, xs))(xs)
    for x, y, result in zip(arrays(), xs, got, strict=True):
        np.testing.assert_allclose(result, by_numpy(x), rtol=0, atol=1e-13)
        assert result.sharding.is_equivalent_to(y.sharding, 2)


@pytest.mark.unique
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ["Explicit", "Auto"])
def test_collectives_do_not_grow_with_the_number_of_arrays(case, kind):
    """They depend on the number of shapes; and no array is sent that is not divided."""
    sizes, axes, spec = CASES[case]
    owners = Owners.of(axes, None)
    placed = NamedSharding(mesh_of(sizes, kind), spec)
    count = lambda number: collectives(
        lambda xs: apply(owners, work, xs),
        jax.device_put([jnp.asarray(x, jnp.float32) for x in arrays(number)], placed),
    )
    few, many = count(3), count(20)
    assert few == many
    expected = {
        "rows": {"all-to-all": 4},
        "columns": {"all-to-all": 4},
        "replicated": {"all-gather": 2},
    }
    assert many == expected.get(case, many)
    if not {*jax.tree.leaves(axes)} - {*jax.tree.leaves(tuple(spec))}:  # the owners divide all
        assert "all-gather" not in many or case == "in tiles, owners along rows"


@pytest.mark.parametrize("axes", ["d", ("d", "m")], ids=str)
def test_inside_of_shard_map(axes, x64):
    """Each device has all arrays, computes its share, and gets the others."""
    mesh, owners = mesh_of({"d": 4, "m": 2}, "Auto"), Owners.of(axes, None)
    sizes = []

    def noted(x):
        sizes.append(len(x))
        return work(x)

    f = lambda xs: apply(owners, noted, xs)
    with x64(True):
        xs = [jnp.asarray(x) for x in arrays()]
        got = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P()))(xs)
        varying = lambda xs: f(jax.lax.pcast(xs, ("d", "m"), to="varying"))
        stacked = jax.shard_map(varying, mesh=mesh, in_specs=P(), out_specs=P(("d", "m")))
        of_all = jax.jit(stacked)(xs)
    for x, result, several in zip(arrays(), got, of_all, strict=True):
        np.testing.assert_allclose(result, by_numpy(x), rtol=0, atol=1e-13)
        np.testing.assert_array_equal(several, np.concatenate([result] * 8))
    of_class = collections.Counter(x.shape for x in arrays()).values()
    devices = 4 if axes == "d" else 8
    assert sorted(sizes) == sorted(2 * [-(-n // devices) for n in of_class])


@pytest.mark.parametrize("inside", [False, True], ids=["jit", "shard_map"])
def test_arrays_are_sent_in_another_dtype(inside):
    """Rounded before they are sent, and after the work, which is in their own dtype."""
    mesh, owners = mesh_of({"d": 8}, "Auto"), Owners.of("d", "bfloat16")
    xs = [jnp.asarray(x, jnp.float32) for x in arrays(8)]
    f = lambda xs: apply(owners, lambda x: 3 * x, xs)
    if inside:
        got = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P()))(xs)
    else:
        got = jax.jit(f)(jax.device_put(xs, NamedSharding(mesh, P("d"))))
    rounded = lambda x: x.astype(ml_dtypes.bfloat16).astype(np.float32)
    for x, result in zip(map(np.asarray, xs), got, strict=True):
        assert result.dtype == jnp.float32
        np.testing.assert_array_equal(result, rounded(3 * (x if inside else rounded(x))))


@pytest.mark.every_value
@pytest.mark.parametrize("spec", [P("d"), P(None, "d"), P(None, None, "d")], ids=str)
@pytest.mark.parametrize("kind", ["Explicit", "Auto"])
def test_stacks_of_matrices(kind, spec):
    """Such as experts: those whose types say that devices have other ones are not sent."""
    owners, placed = Owners.of("d", None), NamedSharding(mesh_of({"d": 8}, kind), spec)
    rng = np.random.default_rng(1)
    given = [rng.normal(size=(8, 16, 24)).astype(np.float32) for _ in range(3)]
    xs, f = jax.device_put(given, placed), lambda xs: owners.apply(work, xs)
    for x, result in zip(given, jax.jit(f)(xs), strict=True):
        np.testing.assert_allclose(result, list(map(by_numpy, x)), rtol=0, atol=1e-4)
        assert result.sharding.is_equivalent_to(placed, 3)
    if kind == "Explicit" or spec != P("d"):
        assert collectives(f, xs) == ({} if spec == P("d") else {"all-to-all": 2})
    uneven = [jnp.asarray(x[:3]) for x in given]  # nine matrices
    for x, result in zip(uneven, jax.jit(f)(uneven_on(uneven, placed)), strict=True):
        np.testing.assert_allclose(result, list(map(by_numpy, np.asarray(x))), rtol=0, atol=1e-4)


def uneven_on(xs, placed):
    """Divided as is possible: the devices do not divide the first axis."""
    spec = P() if placed.spec == P("d") else placed.spec
    return jax.device_put(xs, NamedSharding(placed.mesh, spec))


def test_one_at_a_time():
    """Outside of jit, and on the mesh of set_mesh."""
    mesh, owners = mesh_of({"d": 8}, "Auto"), Owners.of("d", None)
    x = np.float32(arrays(1)[0])
    on_mesh = jax.device_put(x, NamedSharding(mesh, P("d")))
    np.testing.assert_allclose(apply(owners, work, [on_mesh])[0], by_numpy(x), rtol=1e-5)
    with jax.set_mesh(mesh):
        got = jax.jit(lambda x: apply(owners, work, [x]))(x)
    np.testing.assert_allclose(got[0], by_numpy(x), rtol=1e-5)
    assert owners.apply(work, []) == []


@pytest.mark.unique
@pytest.mark.parametrize("spec", [P("d"), P(None, "d"), P("m", "d")], ids=str)
def test_sizes_that_do_not_divide_each_other(spec):
    """There XLA has no way from one division to the other, and ends the process."""
    mesh = jax.make_mesh((3, 2), ("d", "m"), (AxisType.Auto,) * 2, devices=jax.devices()[:6])
    xs = [np.arange(6.0 * 12).reshape(6, 12).astype("f") + i for i in range(4)]
    sharding = NamedSharding(mesh, spec)
    got = jax.jit(lambda xs: apply(Owners.of(("d", "m"), None), lambda x: 2 * x, xs))(
        jax.device_put(xs, sharding)
    )
    for x, result in zip(xs, got, strict=True):
        np.testing.assert_array_equal(result, 2 * x)
        assert result.sharding.is_equivalent_to(sharding, 2)


def test_mistakes():
    for wrong in (3, ("d", 3), {"d": 1}):
        with pytest.raises(TypeError, match=r"owners must be the name of a mesh axis, or a tuple"):
            Owners.of(wrong, None)
    for wrong in ((), ("d", "d")):
        with pytest.raises(ValueError, match=r"owners must be different mesh axes, at least one"):
            Owners.of(wrong, None)
    with pytest.raises(ValueError, match="exchange_dtype must be None without owners, got"):
        Owners.of(None, "bfloat16")
    with pytest.raises(TypeError, match=r"exchange_dtype must be"):
        Owners.of("d", "int8")
    assert Owners.of(None, None) is None
    with pytest.raises(ValueError, match=r"needs a mesh with these axes"):
        Owners.of("d", None).apply(work, [jnp.ones((1, 4, 4))])
    mesh = mesh_of({"d": 4, "m": 2}, "Auto")
    x = jax.device_put(jnp.ones((4, 4)), NamedSharding(mesh, P("d")))
    with pytest.raises(ValueError, match=r"mesh has no axis 'e', .* give owners= one of these"):
        Owners.of("e", None).apply(work, [x[None]])
    both = Owners.of(("d", "m"), None)
    partly = jax.shard_map(
        lambda x: both.apply(work, [x[None]]),
        mesh=mesh,
        in_specs=P(),
        out_specs=P(),
        axis_names={"d"},
    )
    with pytest.raises(
        ValueError, match=r"mixes axes of the shard_map around the update with other"
    ):
        jax.jit(partly)(x)
