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
from jax.extend.core import Literal
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


CONSTANT = jnp.array([1.0, 2.0, 3.0, 4.0])


def scoped(x):
    with jax.named_scope("outer"), jax.named_scope("inner"):
        return jnp.sin(x) + CONSTANT, 3.0


@pytest.mark.optimized
def test_evaluate():
    must = fix("evaluate", "give the outputs of a jaxpr, in its name scopes", "value_and_grad")
    closed = jax.make_jaxpr(scoped)(X)
    of_closed = lambda x: compat.evaluate(closed.jaxpr, closed.consts, [x])
    np.testing.assert_allclose(of_closed(X)[0], jnp.sin(X) + CONSTANT, err_msg=must)
    assert "outer/inner" in jax.jit(of_closed).lower(X).compile().as_text(), must
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        of_closed(X * jnp.inf)


def test_evaluate_equation():
    must = fix("evaluate_equation", "give the outputs of one equation", "value_and_grad")
    looped = lambda x: jax.lax.scan(lambda c, x: (c + x * x, (c, 2.0)), 0.5, x)
    f = lambda x: (looped(x), jax.nn.relu(x - 2.0), x * x)
    jaxpr = jax.make_jaxpr(f)(X).jaxpr
    known = dict(zip(jaxpr.invars, [X], strict=True))
    read = lambda v: v.val if compat.is_literal(v) else known[v]
    for eqn in jaxpr.eqns:
        outputs = compat.evaluate_equation(jaxpr, eqn, list(map(read, eqn.invars)))
        known.update(zip(eqn.outvars, outputs, strict=True))
    got = [read(v) for v in jaxpr.outvars]
    for x, want in zip(got, jax.tree.leaves(f(X)), strict=True):
        np.testing.assert_allclose(x, want, rtol=1e-6, err_msg=must)


def test_scope_of():
    must = fix("scope_of", "give the name scopes of an equation", "value_and_grad")
    eqn = jax.make_jaxpr(scoped)(X).jaxpr.eqns[0]

    def in_scope(x):
        with compat.scope_of(eqn):
            return jnp.cos(x)

    again = jax.make_jaxpr(in_scope)(X).jaxpr.eqns[0]
    assert str(again.source_info.name_stack) == "outer/inner", must
    with compat.scope_of(jax.make_jaxpr(jnp.cos)(X).jaxpr.eqns[0]):
        pass


def names(jaxpr):
    """The primitives in a jaxpr, and in those inside."""
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        for inner in compat.inner_jaxprs(eqn):
            yield from names(inner)


def test_map_equations():
    must = fix("map_equations", "change equations, in bodies too", "value_and_grad")

    def f(x, y):
        y = jax.jit(jax.checkpoint(lambda y: jax.lax.stop_gradient(y) + CONSTANT))(y)
        return jax.lax.cond(
            x[0] > 0, lambda x, y: x + jax.lax.stop_gradient(y), lambda x, y: x, x, y
        )

    def cut(eqn):
        if eqn.primitive.name != "stop_gradient":
            return eqn
        return eqn.replace(invars=[Literal(0, v.aval) for v in eqn.invars])

    jaxpr = jax.make_jaxpr(f)(X, X).jaxpr
    assert list(compat.used_inputs(jaxpr)) == [True, True], must
    changed = compat.map_equations(jaxpr, cut)
    assert sorted(names(changed)) == sorted(names(jaxpr)), must
    assert list(compat.used_inputs(changed)) == [True, False], must


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


def test_closed_jaxprs():
    must = fix("closed_jaxprs", "give the jaxprs in an equation and their constants", "lookup")
    for transform in (jax.jit, jax.checkpoint):
        (eqn,) = jax.make_jaxpr(transform(lambda x: x * CONSTANT))(X).jaxpr.eqns
        ((jaxpr, consts),) = compat.closed_jaxprs(eqn)
        assert len(jaxpr.constvars) == len(consts), must
        assert len(jaxpr.invars) == len(eqn.invars), must


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
    must = fix("function_of", "name the function that makes an equation", "lookup")
    eqn = jax.make_jaxpr(FUNCTIONS[name])(X).jaxpr.eqns[-1]
    assert compat.function_of(eqn) == name, must


def test_has_shardings():
    must = fix("has_shardings", "tell whether a jit has shardings", "lookup")
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    for settings in ({}, {"in_shardings": device}, {"out_shardings": device}):
        (eqn,) = jax.make_jaxpr(jax.jit(jnp.sin, **settings))(X).jaxpr.eqns
        assert compat.has_shardings(eqn) == bool(settings), must


def test_checkpoint_like():
    must = fix("checkpoint_like", "keep the settings of a checkpoint", "lookup")
    policy = jax.checkpoint_policies.dots_saveable
    f = jax.checkpoint(jnp.sin, prevent_cse=False, policy=policy)
    (eqn,) = jax.make_jaxpr(f)(X).jaxpr.eqns
    (again,) = jax.make_jaxpr(compat.checkpoint_like(eqn, jnp.cos))(X).jaxpr.eqns
    for name in eqn.params.keys() - {"jaxpr"}:
        assert again.params[name] == eqn.params[name], must
    assert list(names(next(compat.inner_jaxprs(again)))) == ["cos"], must


def test_scan_like():
    must = fix("scan_like", "keep the settings of a scan", "lookup")
    scan = lambda x: jax.lax.scan(lambda c, x: (c, x), 0.0, x, reverse=True, unroll=2)
    (eqn,) = jax.make_jaxpr(scan)(X).jaxpr.eqns
    body = lambda c, x: (c * 0.5 + x[0], c)
    again = lambda x: compat.scan_like(eqn, body, 1.0, (x, 2 * x))
    for name in ("reverse", "unroll", "length"):
        assert jax.make_jaxpr(again)(X).jaxpr.eqns[-1].params[name] == eqn.params[name], must
    want = jax.lax.scan(body, 1.0, (X, 2 * X), reverse=True)
    for got, expected in zip(jax.tree.leaves(again(X)), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(got, expected, err_msg=must)


def test_scan_sizes():
    must = fix("scan_sizes", "count constants and carry", "lookup")

    def f(x, y, z):
        body = lambda c, x: ((c[0] * jnp.sum(y), c[1] + z), (x[0] * c[0], x[1]))
        return jax.lax.scan(body, (x[0], z), (x, jnp.ones((4, 2))))

    (eqn,) = [e for e in jax.make_jaxpr(f)(X, X, X).jaxpr.eqns if e.primitive.name == "scan"]
    assert compat.scan_sizes(eqn) == (2, 2), must


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
    jaxpr = jax.make_jaxpr(mapped(lambda a, b: a + b[0], PartitionSpec("r")))(X, X).jaxpr
    while compat.function_of(jaxpr.eqns[0]) != "jax.shard_map":
        jaxpr = next(compat.inner_jaxprs(jaxpr.eqns[0]))
    body = next(compat.inner_jaxprs(jaxpr.eqns[0]))
    assert sorted(map(len, map(compat.varying, body.invars))) == [0, 1], must


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


def of_results(f, marked, number=3):
    """Which results of the last equation of ``f`` depend on its marked arguments."""

    def walk(body, inputs):
        known = {v for v, mark in zip(body.invars, inputs, strict=True) if mark}
        has = lambda v: not compat.is_literal(v) and v in known
        for eqn in body.eqns:
            if any(map(has, eqn.invars)):
                known.update(eqn.outvars)
        return [has(v) for v in body.outvars]

    jaxpr = jax.make_jaxpr(f)(*map(float, range(number))).jaxpr
    eqn = jaxpr.eqns[-1]
    arguments = [not compat.is_literal(v) and v in jaxpr.invars for v in eqn.invars]
    inputs = [
        m and jaxpr.invars.index(v) in marked for v, m in zip(eqn.invars, arguments, strict=True)
    ]
    return compat.through_call(eqn, inputs, walk)


def test_what_spreads_through_calls():
    """In a loop from one value that is carried to the next, in each turn by one place."""
    shift = lambda c: (c[1], c[2], 2 * c[2])
    scan = lambda a, b, c: jax.lax.scan(lambda x, _: (shift(x), x[0] + 1), (a, b, c), length=4)
    loop = lambda a, b, c: jax.lax.while_loop(lambda x: x[0] < 9, shift, (a, b, c))
    by_last = lambda a, b, c: jax.lax.while_loop(
        lambda x: x[2] < 9, lambda x: (x[1], x[0], x[2] + 1), (a, b, c)
    )
    either = lambda a, b, c: jax.lax.cond(
        a > 0, lambda b, c: (b + 1, 2 * b), lambda b, c: (c + 1, 3 * b), b, c
    )
    assert of_results(scan, {2}) == [True] * 4
    assert of_results(scan, {1}) == [True, True, False, True]
    assert of_results(scan, set()) == [False] * 4
    assert of_results(loop, {2}) is None  # its number of turns depends on it
    assert of_results(by_last, {0}) == [True, True, False]
    assert of_results(by_last, {2}) is None
    assert of_results(either, {2}) == [True, False]
    assert of_results(either, {1}) == [True, True]
    assert of_results(lambda a, b, c: jax.jit(lambda a, b, c: (a + b, c))(a, b, c), {1}) == [
        True,
        False,
    ]
