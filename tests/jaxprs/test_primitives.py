"""The table of primitives against the installed version of JAX."""

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Primitive, primitives
from jax.sharding import AxisType, PartitionSpec

from optzoo.core import compat
from optzoo.jaxprs.graph import Graph
from optzoo.jaxprs.primitives import CALLS, KINDS, Kind, function_of

X = jnp.arange(4.0)
SPLIT, WHOLE = PartitionSpec("r"), PartitionSpec()  # of the mesh axis of `mapped`


def fix(names, needed_by):
    return (
        f"JAX {jax.__version__} has primitives that optzoo/jaxprs/primitives.py does not know: "
        f"give {names} the kind that fits what they do; {needed_by} needs it"
    )


def operations_of(f, *args, **options):
    closed = jax.make_jaxpr(f, **options)(*args)
    return [op for op, *_ in Graph.of(closed.jaxpr, closed.consts).walk({*CALLS, Kind.MAP})]


def mapped(f, out_specs):
    mesh = jax.make_mesh((4,), ("r",), axis_types=(AxisType.Auto,))
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=(SPLIT, WHOLE), out_specs=out_specs))


def test_all_primitives_of_this_jax_are_known():
    names = {p.name for p in vars(primitives).values() if isinstance(p, Primitive)}
    assert len(names) > 100
    assert names <= KINDS.keys(), fix(sorted(names - KINDS.keys()), "every proof")


@jax.custom_vjp
def with_own_gradient(x):
    return jnp.sin(x)


with_own_gradient.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * x,))


WITH_BODIES = {
    "jit": jax.jit(jnp.sin),
    "checkpoint": jax.checkpoint(jnp.sin),
    "cond": lambda x: jax.lax.cond(x[0] > 0, jnp.sin, jnp.cos, x),
    "while": lambda x: jax.lax.fori_loop(0, x[0].astype(int), lambda _, a: jnp.sin(a), x),
    "scan": lambda x: jax.lax.scan(lambda c, _: (jnp.sin(c), None), x, length=3)[0],
    "custom_jvp": jax.nn.relu,
    "custom_vjp": with_own_gradient,
}


@pytest.mark.parametrize("f", WITH_BODIES.values(), ids=list(WITH_BODIES))
def test_calls(f):
    found = operations_of(f, X)
    assert {"sin", "max"} & {op.name for op in found}
    with_bodies = {op.name for op in found if op.bodies}
    assert with_bodies
    assert {KINDS[name] for name in with_bodies} <= CALLS, fix(with_bodies, "on_rows")


COLLECTIVES = {
    "psum": lambda x: jax.lax.psum(x, "r"),
    "pmean": lambda x: jax.lax.pmean(x, "r"),
    "pmax": lambda x: jax.lax.pmax(x, "r"),
    "pmin": lambda x: jax.lax.pmin(x, "r"),
    "ppermute": lambda x: jax.lax.ppermute(x, "r", [(0, 1)]),
    "all_gather": lambda x: jax.lax.all_gather(x, "r"),
    "all_to_all": lambda x: jax.lax.all_to_all(x, "r", 0, 0),
    "psum_scatter": lambda x: jax.lax.psum_scatter(x, "r"),
}


@pytest.mark.parametrize("f", COLLECTIVES.values(), ids=list(COLLECTIVES))
def test_collectives(f):
    """On an axis without devices, as ``describe`` traces them."""
    found = operations_of(f, X, axis_env=[("r", 4)])
    assert Kind.COLLECTIVE in {op.kind for op in found}, fix(found[-1].name, "describe")


@pytest.mark.parametrize(
    "f",
    [COLLECTIVES["psum"], lambda x: compat.gather_invarying(x, "r")],
    ids=["psum", "gather_invarying"],
)
def test_collectives_of_shard_map(f):
    found = operations_of(mapped(lambda a, _: f(a), WHOLE), X, X)
    assert Kind.COLLECTIVE in {op.kind for op in found}, fix(found[-1].name, "describe")


with_jvp, with_vjp = jax.custom_jvp(jnp.sin), jax.custom_vjp(jnp.sin)


with_jvp.defjvp(lambda x, t: (jnp.sin(*x), *t))


with_vjp.defvjp(lambda x: (jnp.sin(x), None), lambda _, g: (g,))


FUNCTIONS = {
    "jax.jit": jax.jit(jnp.sin),
    "jax.checkpoint": jax.checkpoint(jnp.sin),
    "jax.lax.scan": lambda x: jax.lax.scan(lambda c, _: (c, None), x, length=3),
    "jax.lax.while_loop": lambda x: jax.lax.while_loop(jnp.any, jnp.sin, x),
    "jax.lax.cond": lambda x: jax.lax.cond(x[0] > 0, jnp.sin, jnp.cos, x),
    "jax.lax.convert_element_type": lambda x: x.astype("float16"),
    "jax.lax.stop_gradient": jax.lax.stop_gradient,
    "jax.custom_jvp": with_jvp,
    "jax.custom_vjp": with_vjp,
    "jax.shard_map": lambda x: mapped(lambda a, b: a, PartitionSpec("r")).__wrapped__(x, x),
    "sin": jnp.sin,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_of(name):
    eqn = jax.make_jaxpr(FUNCTIONS[name])(X).jaxpr.eqns[-1]
    assert function_of(eqn.primitive.name) == name
