"""Canaries: what the library needs of JAX and optax beyond their stable public API is there.

If one fails on a new version of JAX, adapt the function of the same name in ``core/compat.py``, or
the place that the message names; it says what must hold, and who needs it. ``custom_jvp`` is in
``test_derivatives.py``.
"""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import pallas
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from optzoo.core import compat
from optzoo.jaxprs.equations import line_of
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


def test_traced_once():
    must = fix("traced_once", "trace a function once and keep its lines", "a code of 8 bits")
    calls = []

    @compat.traced_once
    def add_sum(x):
        calls.append(x)
        return x + x.sum()

    eqns = jax.make_jaxpr(lambda x: add_sum(add_sum(x)))(X).jaxpr.eqns
    assert [e.primitive.name for e in eqns] == 2 * ["reduce_sum", "add"], must
    assert {line_of(e).endswith("add_sum)") for e in eqns} == {True}, must
    assert len(calls) == 1, must
    np.testing.assert_array_equal(add_sum(X), X + 6, err_msg=must)
    assert calls[1] is X, must  # outside of a trace it is a function like others


def test_TracedOnce():
    must = fix("TracedOnce", "trace a function once and keep its lines", "accumulate")
    calls = []

    def twice(x):
        y = jnp.sin(x)

        def add_sum():
            calls.append(x)
            return x + y.sum()

        once = compat.TracedOnce(add_sum)
        assert once.types == jax.typeof(x), must
        return jax.lax.cond(x[0] > 0, once, once)

    cond = jax.make_jaxpr(twice)(X).jaxpr.eqns[-1]
    assert len(calls) == 1, must
    for branch in cond.params["branches"]:
        assert [e.primitive.name for e in branch.jaxpr.eqns] == ["reduce_sum", "add"], must
        assert {line_of(e).endswith("add_sum)") for e in branch.jaxpr.eqns} == {True}, must
    expected = X + jnp.sin(X).sum()
    np.testing.assert_allclose(jax.jit(twice)(X), expected, rtol=1e-6, err_msg=must)
    np.testing.assert_allclose(jax.vmap(twice)(X[None])[0], expected, rtol=1e-6, err_msg=must)
    jacobian = np.eye(4) + jnp.cos(X)[None]
    np.testing.assert_allclose(jax.jacobian(twice)(X), jacobian, rtol=1e-6, err_msg=must)


def test_make_replaceable():
    must = fix("make_replaceable", "run another function where there is one", "native code")

    def refuse(where, *, by):
        if by == 2.5:
            raise RuntimeError(f"{by} not {where}")

    on = {"cpu": lambda ctx, *, by: lambda x: (x * by + 100, -x)}
    f = lambda x, *, by: (x * by, -x)
    primitive = compat.make_replaceable("canary", f, on=on, check_plain=refuse)
    f = lambda x: primitive.bind(x, by=2.0)
    assert [e.primitive for e in jax.make_jaxpr(f)(X).jaxpr.eqns] == [primitive], must
    np.testing.assert_array_equal(jax.jit(f)(X)[0], 2 * X + 100, err_msg=must)
    np.testing.assert_array_equal(jax.vmap(f)(X[None])[0], 2 * X[None], err_msg=must)
    got = jax.grad(lambda x: jnp.sum(f(x)[0]))(X)
    np.testing.assert_array_equal(got, 2 * jnp.ones(4), err_msg=must)
    f = lambda x: primitive.bind(x, by=2.5)[0]
    with pytest.raises(RuntimeError, match=r"2.5 not on tpu"):
        jax.jit(f).trace(X).lower(lowering_platforms=("tpu",))
    with pytest.raises(RuntimeError, match=r"2.5 not under vmap"):
        jax.vmap(f)(X[None])
    with pytest.raises(RuntimeError, match=r"2.5 not in derivatives"):
        jax.grad(lambda x: jnp.sum(f(x)))(X)


def test_inline_constant():
    must = fix("inline_constant", "be an operation and no input", "SparseCore")
    f = lambda x: x + compat.inline_constant(np.arange(4.0, dtype=np.float32))
    closed = jax.make_jaxpr(f)(X)
    assert not closed.consts and len(closed.jaxpr.invars) == 1, must
    np.testing.assert_array_equal(jax.jit(f)(X), 2 * X, err_msg=must)


def split_over_devices():
    mesh = jax.make_mesh((4,), ("r",), axis_types=(AxisType.Auto,))
    return jax.device_put(X, NamedSharding(mesh, SPLIT))


def test_number_of_partitions():
    must = fix("number_of_partitions", "tell what XLA divides", "native code")
    found = []

    def on_cpu(ctx):
        found.append((compat.number_of_partitions(ctx), compat.can_partition(ctx)))
        return lambda x: (x,)

    primitive = compat.make_replaceable("canary", lambda x: (x,), on={"cpu": on_cpu})
    f = lambda x: primitive.bind(x)[0]
    jax.jit(f).lower(X)
    jax.jit(f).lower(split_over_devices())
    mapped(lambda a, _: f(a), SPLIT).lower(X, X)
    assert [number for number, _ in found] == [1, 4, 1] and found[1][1], must


def test_partitioned_by_first():
    must = fix("partitioned_by_first", "run on the part of each device", "native code")
    shapes = []

    def f(by, x, y):
        shapes.append(x.shape)
        return x * by, x + y

    x = split_over_devices()
    partitioned = compat.partitioned_by_first(f, 1, [x.shape], [2], [2])
    got = jax.jit(partitioned)(2.0, x, x)
    assert shapes[-1] == (1,), must
    for a in got:
        assert a.sharding.is_equivalent_to(x.sharding, 1), must
        np.testing.assert_array_equal(a, 2 * X, err_msg=must)


# Programs


def test_kept_arguments():
    must = fix("kept_arguments", "leave out what a program does not read", "compile_report")
    lowered = jax.jit(lambda a, b, c: (a + c, 3 * c)).lower(X, X, X)
    assert compat.kept_arguments(lowered) == [0, 2], must


def test_result_types():
    must = fix("result_types", "compare results with arguments", "compile_report")
    lowered = jax.jit(lambda a, b: (a + 1, {"x": jnp.sum(a)})).lower(X, X)
    found = jax.tree.map(lambda x: (x.shape, x.dtype), compat.result_types(lowered))
    assert found == ((X.shape, X.dtype), {"x": ((), X.dtype)}), must


def test_has_side_effects():
    must = fix("has_side_effects", "tell a print from the number of a device", "native code")
    trace = lambda f: jax.make_jaxpr(f, axis_env=[("r", 4)])(X).jaxpr
    assert not compat.has_side_effects(trace(lambda x: x + jax.lax.axis_index("r"))), must
    assert compat.has_side_effects(trace(lambda x: jax.debug.print("{}", x))), must


def test_in_same_trace():
    must = fix("in_same_trace", "tell an array of an outer trace", "caught_up")
    found = []

    def f(x):
        inside = lambda y: found.append((compat.in_same_trace(y, 2 * y), x is y)) or y * x
        return jax.jvp(lambda y: found.append(compat.in_same_trace(x, y)) or inside(y), (x,), (x,))

    jax.jit(f).trace(X)
    assert found == [False, (True, False)], must
    assert compat.in_same_trace(X, X + 1), must


def test_is_tracing():
    must = fix("is_tracing", "know that a call is a part of another program", "minimize")
    found = []
    f = lambda x: found.append(compat.is_tracing()) or x
    f(X), jax.jit(lambda: f(X))(), jax.vmap(f)(X), jax.grad(lambda x: jnp.sum(f(x)))(X), f(X)
    assert found == [False, True, True, True, False], must


def test_in_row_major(monkeypatch):
    must = fix("in_row_major", "take the memory of a donated argument", "rows.row_major")
    monkeypatch.setattr(compat, "may_be_for_tpus", lambda: True)
    f = jax.jit(lambda x: compat.in_row_major(x + 1), donate_argnums=0)
    got = f(jnp.ones((3, 2)))
    np.testing.assert_array_equal(got, 2 * np.ones((3, 2)), err_msg=must)
    assert got.format.layout.major_to_minor == (0, 1), must


@pytest.mark.parametrize(
    ("compiler", "backend", "want"),
    [(None, "cpu", False), (None, "gpu", False), (None, "tpu", True), ("libtpu", "cpu", True)],
)
def test_where_programs_may_be_for_tpus(compiler, backend, want, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", {"libtpu": compiler}.get)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    assert compat.may_be_for_tpus() is want
    made = jax.make_jaxpr(lambda x: compat.in_row_major(x))(jnp.ones((3, 2))).eqns  # not cached
    assert bool(made) is (want and compat.DEMANDS_LAYOUTS)


def test_eigh_by_jacobi():
    must = fix("eigh_by_jacobi", "be an operation of XLA for TPUs", "the second order")
    f = jax.jit(functools.partial(compat.eigh_by_jacobi, symmetrize_input=False))
    text = f.trace(jnp.eye(300)).lower(lowering_platforms=("tpu",)).as_text()
    assert "@Eigh" in text and "@Qdwh" not in text, must


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


def test_vary():
    must = fix("vary", "change the type along the missing axes alone", "the replicas")
    found = []

    def f(a, b):
        found.append((compat.vary(a, {"r"}) is a, compat.varying(compat.vary(b, {"r"}))))
        return a

    mapped(f, SPLIT)(X, X)
    assert found[-1] == (True, {"r"}), must


def test_shape_varying():
    must = fix("shape_varying", "be the type of a result that varies", "native code for TPUs")
    found = []

    def kernel(a, out):
        out[...] = a[...]

    def f(a, b):
        shape = compat.shape_varying(a.shape, a.dtype, {"r"})
        found.append(compat.varying(pallas.pallas_call(kernel, out_shape=shape)(a)))
        return a

    jax.eval_shape(mapped(f, SPLIT), X, X)
    assert found == [{"r"}], must


def test_gather_invarying():
    must = fix("gather_invarying", "join arrays, typed as the same everywhere", "the replicas")
    found = []

    def f(a, b):
        whole = compat.gather_invarying({"a": a}, "r")["a"]
        found.append(compat.varying(whole))
        return whole, compat.gather_invarying(a[None], "r", 1)

    got, beside = mapped(f, WHOLE)(X, X)  # refused if the type says that it varies
    assert found[-1] == frozenset(), must
    np.testing.assert_array_equal(got, X, err_msg=must)
    np.testing.assert_array_equal(beside, X[None], err_msg=must)


def test_group_shardings():
    """Groups of equal types do not become one, and derivatives and vmap pass by."""
    must = fix("group_shardings", "divide its results as arguments", "states on automatic axes")
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=2 * (AxisType.Auto,))
    put = lambda spec: jax.device_put(np.ones((4, 4), "f"), NamedSharding(mesh, spec))
    x, y = put(PartitionSpec(None, "b")), put(PartitionSpec("a"))
    mixed = put(PartitionSpec("a", "b"))
    f = lambda a: compat.group_shardings(mixed @ mixed + a, a)
    new = jax.jit(lambda *arrays: [f(a) for a in arrays])(x, y)
    assert [a.sharding for a in new] == [x.sharding, y.sharding], must
    loop = jax.jit(lambda a: jax.lax.scan(lambda a, _: (f(a), None), a, length=2)[0])
    assert loop(x).sharding == x.sharding, must
    np.testing.assert_array_equal(jax.jit(jax.grad(lambda a: f(a).sum()))(x), 1, err_msg=must)
    stacked = jnp.stack([x, y])
    np.testing.assert_array_equal(jax.vmap(f)(stacked), 5, err_msg=must)
    eqns = jax.make_jaxpr(lambda a: compat.group_shardings(a, a))(x).jaxpr.eqns
    assert [str(e.primitive) for e in eqns] == ["optzoo_placed_as"], must


# Optax


def test_no_params_msg():
    must = fix("NO_PARAMS_MSG", "optax's message for missing params", "every optimizer")
    tx = optax.add_decayed_weights(0.1)
    with pytest.raises(ValueError) as caught:
        tx.update(X, tx.init(X), None)
    assert str(caught.value) == compat.NO_PARAMS_MSG, must
