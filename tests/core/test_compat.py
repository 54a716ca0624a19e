"""Canaries: what the library needs of JAX beyond its stable public API is there and behaves.

If one fails on a new version of JAX, adapt the function of the same name in ``core/compat.py``; the
message says what it must do, and who needs it.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from optzoo.core import compat

X = jnp.arange(4.0)


def fix(name, must, needed_by):
    return f"JAX {jax.__version__}: make optzoo.core.compat.{name} {must}; {needed_by} needs it"


def test_trace_state():
    must = fix("trace_state", "equal within one trace and different in another", "lookup")
    outside, inside = compat.trace_state(), []
    assert outside == compat.trace_state(), must

    def record(x):
        inside.append((compat.trace_state(), compat.trace_state()))
        return x

    jax.jit(record)(X)
    jax.vmap(record)(X)
    jax.lax.scan(lambda c, x: (c, record(x)), 0, X)
    assert len(inside) >= 3
    for first, second in inside:
        assert first == second != outside, must
    states = [first for first, _ in inside]
    assert all(a != b for i, a in enumerate(states) for b in states[:i]), must


def test_is_batched():
    must = fix("is_batched", "true of what a vmap gives to its function", "lookup")
    found = []

    def record(x):
        found.append(compat.is_batched(x))
        return x

    jax.vmap(record)(X)
    jax.jit(record)(X)
    jax.vmap(jax.jit(record))(X)
    jax.grad(lambda x: record(x).sum())(X)
    assert [*found, compat.is_batched(X), compat.is_batched(3)] == [True] + 5 * [False], must


def test_used_inputs():
    must = fix("used_inputs", "tell which inputs the outputs depend on", "value_and_grad")

    def f(a, b, c, d):
        _ = jnp.sin(b)
        looped = jax.lax.fori_loop(0, 2, lambda _, s: (s[0] + c, s[1] + d), (a, d))
        return jax.jit(lambda a, b: a)(looped[0], b)

    jaxpr = jax.make_jaxpr(f)(1.0, 2.0, 3.0, 4.0).jaxpr
    assert list(compat.used_inputs(jaxpr)) == [True, False, True, False], must


@pytest.mark.parametrize(
    "f",
    [
        jax.jit(jnp.sin),
        jax.checkpoint(jnp.sin),
        lambda x: jax.lax.cond(x[0] > 0, jnp.sin, jnp.cos, x),
        lambda x: jax.lax.fori_loop(0, x[0].astype(int), lambda _, a: jnp.sin(a), x),
        lambda x: jax.lax.scan(lambda c, _: (jnp.sin(c), None), x, length=3)[0],
        jax.nn.relu,
    ],
    ids=["jit", "checkpoint", "cond", "while", "scan", "custom_jvp"],
)
def test_inner_jaxprs(f):
    must = fix("inner_jaxprs", "find the jaxprs in every equation", "on_rows and describe")

    def names(jaxpr):
        for eqn in jaxpr.eqns:
            yield eqn.primitive.name
            for inner in compat.inner_jaxprs(eqn):
                yield from names(inner)

    assert {"sin", "max"} & set(names(jax.make_jaxpr(f)(X).jaxpr)), must


# Types of arrays inside shard_map


def mapped(f, out_specs):
    mesh = jax.make_mesh((4,), ("r",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("r")
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=(spec, None), out_specs=out_specs))


def test_varying():
    must = fix("varying", "give the mesh axes along which an array may differ", "the replicas")
    found = []

    def f(a, b):
        found.append((compat.varying(a), compat.varying(b), compat.varying(a + b[0])))
        return a

    mapped(f, PartitionSpec("r"))(X, X)
    assert found[-1] == ({"r"}, set(), {"r"}), must
    assert compat.varying(X) == frozenset(), must


def test_cast_varying():
    must = fix("cast_varying", "change the type and not the values", "the replicas")
    found = []

    def f(a, b):
        cast = compat.cast_varying(b, ("r",))
        found.append(compat.varying(cast))
        return cast

    got = mapped(f, PartitionSpec("r"))(X, X)
    assert found[-1] == {"r"}, must
    np.testing.assert_array_equal(got, jnp.tile(X, 4), err_msg=must)


def test_gather_invarying():
    must = fix("gather_invarying", "join arrays, typed as the same everywhere", "the replicas")
    found = []

    def f(a, b):
        whole = compat.gather_invarying({"a": a}, "r")["a"]
        found.append(compat.varying(whole))
        return whole

    got = mapped(f, PartitionSpec())(X, X)  # refused if the type says that it varies
    assert found[-1] == frozenset(), must
    np.testing.assert_array_equal(got, X, err_msg=must)
