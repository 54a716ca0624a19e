"""Canaries: what the library needs of JAX and optax beyond their stable public API is there.

If one fails on a new version of JAX, adapt the function of the same name in ``core/compat.py``, or
the place that the message names; it says what must hold, and who needs it.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec

from optzoo.core import compat

X = jnp.arange(4.0)
SPLIT, WHOLE = PartitionSpec("r"), PartitionSpec()  # of the mesh axis of `mapped`


def fix(name, must, needed_by):
    return f"JAX {jax.__version__}: make optzoo.core.compat.{name} {must}; {needed_by} needs it"


def equations(jaxpr):
    """The equations of a jaxpr and of those inside it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in compat.inner_jaxprs(eqn):
            yield from equations(inner)


def equations_of(f, *args, **options):
    return list(equations(jax.make_jaxpr(f, **options)(*args).jaxpr))


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
def test_inner_jaxprs(f):
    must = fix("inner_jaxprs", "find the jaxprs in every equation", "on_rows and describe")
    assert {"sin", "max"} & {eqn.primitive.name for eqn in equations_of(f, X)}, must


def test_literals():
    must = fix("literals", "give the constants of an equation", "on_rows and stacked")
    [add, scale] = equations_of(lambda x, y: (x + y) * 2.0, X, X)
    assert not compat.literals(add), must
    [two] = compat.literals(scale)
    assert "2." in two, must


def test_line_of():
    must = fix("line_of", "name the file and the function", "the errors of on_rows")
    [eqn] = equations_of(lambda x: jnp.negative(x), X)
    assert re.search(r"test_compat\.py:\d+.*test_line_of", compat.line_of(eqn)), must


def test_text_of():
    must = fix("text_of", "give the same text in every process", "what the race stores")

    def text():
        f = jax.custom_jvp(lambda x: x * 2.0)  # its address is in the text
        f.defjvp(lambda primals, tangents: (f(*primals), tangents[0]))
        return compat.text_of(jax.make_jaxpr(f)(X))

    found = text()
    assert "mul" in found and "\x1b" not in found and found == text(), must


def test_turns():
    must = fix("turns", "give the number of turns of a scan and None else", "describe, on_rows")
    found = {name: compat.turns(equations_of(f, X)[0]) for name, f in WITH_BODIES.items()}
    assert {name: number for name, number in found.items() if number is not None} == {"scan": 3}, (
        must
    )


@pytest.mark.parametrize(
    ("f", "name", "params"),
    [
        (
            lambda: jax.lax.broadcasted_iota(int, (3, 4), 1),
            "iota",
            {"shape": (3, 4), "dimension": 1},
        ),
        (lambda: jnp.reshape(jnp.broadcast_to(X, (2, 4)), 8), "reshape", {"dimensions": None}),
    ],
    ids=["iota", "reshape"],
)
def test_parameters_of_primitives(f, name, params):
    [found] = [eqn.params for eqn in equations_of(f) if eqn.primitive.name == name]
    assert {key: found[key] for key in params} == params, (
        f"JAX {jax.__version__}: adapt _is_row_wise in optzoo/sparse/rowwise_check.py, which reads "
        f"{list(params)} of `{name}`: now {found}"
    )


# Names of primitives


@pytest.mark.parametrize("f", WITH_BODIES.values(), ids=list(WITH_BODIES))
def test_calls(f):
    found = {
        eqn.primitive.name for eqn in equations_of(f, X) if next(compat.inner_jaxprs(eqn), None)
    }
    must = fix("CALLS", f"contain {found}", "on_rows")
    assert found and found <= compat.CALLS, must


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
    found = {eqn.primitive.name for eqn in equations_of(f, X, axis_env=[("r", 4)])}
    must = fix("COLLECTIVES", f"contain one of {found}", "describe")
    assert found & compat.COLLECTIVES, must


@pytest.mark.parametrize(
    "f",
    [COLLECTIVES["psum"], lambda x: compat.gather_invarying(x, "r")],
    ids=["psum", "gather_invarying"],
)
def test_collectives_of_shard_map(f):
    found = {eqn.primitive.name for eqn in equations_of(mapped(lambda a, _: f(a), WHOLE), X, X)}
    must = fix("COLLECTIVES", f"contain one of {found}", "describe")
    assert found & compat.COLLECTIVES, must


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
