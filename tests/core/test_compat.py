"""Canaries: what the library needs of JAX and optax beyond their stable public API is there.

If one fails on a new version of JAX, adapt the function of the same name in ``core/compat.py``, or
the place that the message names; it says what must hold, and who needs it.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec

from optzoo.core import compat
from optzoo.jaxprs.graph import Graph
from optzoo.jaxprs.primitives import Kind

X = jnp.arange(4.0)
SPLIT, WHOLE = PartitionSpec("r"), PartitionSpec()  # of the mesh axis of `mapped`


def fix(name, must, needed_by):
    return f"JAX {jax.__version__}: make optzoo.core.compat.{name} {must}; {needed_by} needs it"


def test_make_primitive():
    must = fix("make_primitive", "behave as its function and stay in jaxprs", "lookup")
    primitive = compat.make_primitive(
        "scaled",
        lambda x, n, *, by: x * n * by,
        lambda t, x, n, *, by: t * n * by,
        lambda args, axes, *, by: (jnp.moveaxis(args[0], axes[0], 0) * args[1] * by, 0),
    )
    f = lambda x: primitive.bind(x, 3, by=2.0)
    assert [e.primitive for e in jax.make_jaxpr(f)(X).jaxpr.eqns] == [primitive], must
    np.testing.assert_array_equal(f(X), 6 * X, err_msg=must)
    np.testing.assert_array_equal(jax.jit(f)(X), 6 * X, err_msg=must)
    np.testing.assert_array_equal(jax.vmap(f, 1, 1)(X[None]), 6 * X[None], err_msg=must)
    np.testing.assert_array_equal(jax.grad(lambda x: f(x).sum())(X), 6 * jnp.ones(4), err_msg=must)
    weak = jax.make_jaxpr(f)(1.5)
    assert weak.out_avals[0].weak_type, must


# Types of arrays that refuse arithmetic


def test_opaque_dtype():
    must = fix("opaque_dtype", "keep the bits and refuse arithmetic with the tag", "SparseRows")
    dtype = compat.opaque_dtype("optzoo_canary", 1, "a canary")
    words = jnp.arange(4, dtype=jnp.uint32)[:, None]
    wrap = functools.partial(jax.random.wrap_key_data, impl=dtype)
    there_and_back = lambda a: jax.random.key_data(jnp.roll(wrap(a), 1))
    np.testing.assert_array_equal(jax.jit(there_and_back)(words), jnp.roll(words, 1, 0), must)
    twice = jax.vmap(there_and_back)(jnp.stack([words, words]))
    np.testing.assert_array_equal(twice[1], jnp.roll(words, 1, 0), must)
    for f in jnp.negative, lambda a: a + a, lambda a: 0.5 * a, jnp.sum:
        with pytest.raises((TypeError, ValueError)) as caught:
            f(wrap(words))
        assert "a canary" in str(caught.value), must
    with pytest.raises(TypeError) as caught:
        jax.random.split(wrap(words)[0])
    assert "a canary" in str(caught.value), must


# Types of arrays inside shard_map


def mapped(f, out_specs):
    mesh = jax.make_mesh((4,), ("r",), axis_types=(AxisType.Auto,))
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=(SPLIT, WHOLE), out_specs=out_specs))


def test_varying():
    must = fix("varying", "give the mesh axes along which an array may differ", "the replicas")
    found = []

    def f(a, b):
        found.append((compat.varying(a), compat.varying(b), compat.varying(a + b[0])))
        return a

    mapped(f, SPLIT)(X, X)
    assert found[-1] == ({"r"}, set(), {"r"}), must
    assert compat.varying(X) == frozenset(), must
    graph = Graph.of(jax.make_jaxpr(mapped(lambda a, b: a + b[0], PartitionSpec("r")))(X, X).jaxpr)
    while graph.operations[0].kind is not Kind.MAP:
        graph = graph.operations[0].bodies[0].graph
    inputs = graph.operations[0].bodies[0].graph.inputs
    assert sorted(map(len, map(compat.varying, inputs))) == [0, 1], must


def test_cast_varying():
    must = fix("cast_varying", "change the type and not the values", "the replicas")
    found = []

    def f(a, b):
        cast = compat.cast_varying(b, ("r",))
        found.append(compat.varying(cast))
        return cast

    got = mapped(f, SPLIT)(X, X)
    assert found[-1] == {"r"}, must
    np.testing.assert_array_equal(got, jnp.tile(X, 4), err_msg=must)


def test_gather_invarying():
    must = fix("gather_invarying", "join arrays, typed as the same everywhere", "the replicas")
    found = []

    def f(a, b):
        whole = compat.gather_invarying({"a": a}, "r")["a"]
        found.append(compat.varying(whole))
        return whole

    got = mapped(f, WHOLE)(X, X)  # refused if the type says that it varies
    assert found[-1] == frozenset(), must
    np.testing.assert_array_equal(got, X, err_msg=must)


# Optax


def test_no_params_msg():
    must = fix("NO_PARAMS_MSG", "optax's message for missing params", "every optimizer")
    tx = optax.add_decayed_weights(0.1)
    with pytest.raises(ValueError) as caught:
        tx.update(X, tx.init(X), None)
    assert str(caught.value) == compat.NO_PARAMS_MSG, must
