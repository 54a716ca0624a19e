"""Canaries: jaxprs look as ``optzoo/jaxprs/equations.py`` expects.

If one fails on a new version of JAX, adapt the function that the message names.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Literal

import optzoo
from optzoo.jaxprs import equations

X = jnp.arange(4.0)


def fix(name, must, needed_by):
    where = f"optzoo.jaxprs.equations.{name}"
    return f"JAX {jax.__version__}: make {where} {must}; {needed_by} needs it"


CONSTANT = jnp.array([1.0, 2.0, 3.0, 4.0])


def scoped(x):
    with jax.named_scope("outer"), jax.named_scope("inner"):
        return jnp.sin(x) + CONSTANT, 3.0


@pytest.mark.optimized
def test_evaluate():
    must = fix("evaluate", "give the outputs of a jaxpr, in its name scopes", "value_and_grad")
    closed = jax.make_jaxpr(scoped)(X)
    of_closed = lambda x: equations.evaluate(closed.jaxpr, closed.consts, [x])
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
    read = lambda v: v.val if equations.is_literal(v) else known[v]
    for eqn in jaxpr.eqns:
        outputs = equations.evaluate_equation(jaxpr, eqn, list(map(read, eqn.invars)))
        known.update(zip(eqn.outvars, outputs, strict=True))
    got = [read(v) for v in jaxpr.outvars]
    for x, want in zip(got, jax.tree.leaves(f(X)), strict=True):
        np.testing.assert_allclose(x, want, rtol=1e-6, err_msg=must)


def test_bind_equation():
    must = fix("bind_equation", "give the outputs of one equation", "native code for TPUs")
    jaxpr = jax.make_jaxpr(lambda x: (jnp.sin(x), jax.nn.relu(x - 2.0), jnp.split(x, 2)))(X).jaxpr
    known = dict(zip(jaxpr.invars, [X], strict=True))
    read = lambda v: v.val if equations.is_literal(v) else known[v]
    for eqn in jaxpr.eqns:
        values = list(map(read, eqn.invars))
        got = equations.bind_equation(eqn, values)
        want = equations.evaluate_equation(jaxpr, eqn, values)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, err_msg=must), got, want)
        known.update(zip(eqn.outvars, got, strict=True))


def test_scope_of():
    must = fix("scope_of", "give the name scopes of an equation", "value_and_grad")
    eqn = jax.make_jaxpr(scoped)(X).jaxpr.eqns[0]

    def in_scope(x):
        with equations.scope_of(eqn):
            return jnp.cos(x)

    again = jax.make_jaxpr(in_scope)(X).jaxpr.eqns[0]
    assert str(again.source_info.name_stack) == "outer/inner", must
    with equations.scope_of(jax.make_jaxpr(jnp.cos)(X).jaxpr.eqns[0]):
        pass


def names(jaxpr):
    """The primitives in a jaxpr, and in those inside."""
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        for inner, _ in equations.closed_jaxprs(eqn):
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
    assert list(equations.used_inputs(jaxpr)) == [True, True], must
    changed = equations.map_equations(jaxpr, cut)
    assert sorted(names(changed)) == sorted(names(jaxpr)), must
    assert list(equations.used_inputs(changed)) == [True, False], must


def test_used_inputs():
    must = fix("used_inputs", "tell which inputs the outputs depend on", "value_and_grad")

    def f(a, b, c, d):
        _ = jnp.sin(b)
        looped = jax.lax.fori_loop(0, 2, lambda _, s: (s[0] + c, s[1] + d), (a, d))
        return jax.jit(lambda a, b: a)(looped[0], b)

    jaxpr = jax.make_jaxpr(f)(1.0, 2.0, 3.0, 4.0).jaxpr
    assert list(equations.used_inputs(jaxpr)) == [True, False, True, False], must


def test_needed_part():
    must = fix("needed_part", "keep the inputs and drop the rest", "value_and_grad")
    jaxpr = jax.make_jaxpr(lambda a, b: (jnp.cos(b), jnp.sin(a))[1])(1.0, 2.0).jaxpr
    assert [e.primitive.name for e in jaxpr.eqns] == ["cos", "sin"]
    needed = equations.needed_part(jaxpr)
    assert [e.primitive.name for e in needed.eqns] == ["sin"] and len(needed.invars) == 2, must


def test_line_of():
    must = fix("line_of", "name the file and the function", "the errors of on_rows")
    [eqn] = jax.make_jaxpr(lambda x: jnp.negative(x))(X).jaxpr.eqns
    assert re.search(r"test_equations\.py:\d+.*test_line_of", equations.line_of(eqn)), must


def test_caller_of():
    must = fix("caller_of", "name a line outside of the library", "the reasons of dense gradients")
    [eqn] = jax.make_jaxpr(lambda x: optzoo.lookup(x, [1]))(X).jaxpr.eqns
    assert "bind_lookup" in equations.line_of(eqn), must
    assert re.search(r"test_equations\.py:\d+.*test_caller_of", equations.caller_of(eqn)), must


def test_text_of():
    must = fix("text_of", "give the same text in every process", "what the race stores")

    def text():
        f = jax.custom_jvp(lambda x: x * 2.0)  # its address is in the text
        f.defjvp(lambda primals, tangents: (f(*primals), tangents[0]))
        return equations.text_of(jax.make_jaxpr(f)(X))

    found = text()
    assert "mul" in found and "\x1b" not in found and found == text(), must


def test_closed_jaxprs():
    must = fix("closed_jaxprs", "give the jaxprs in an equation and their constants", "lookup")
    for transform in (jax.jit, jax.checkpoint):
        (eqn,) = jax.make_jaxpr(transform(lambda x: x * CONSTANT))(X).jaxpr.eqns
        ((jaxpr, consts),) = equations.closed_jaxprs(eqn)
        assert len(jaxpr.constvars) == len(consts), must
        assert len(jaxpr.invars) == len(eqn.invars), must


def test_has_shardings():
    must = fix("has_shardings", "tell whether a jit has shardings", "lookup")
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    for settings in ({}, {"in_shardings": device}, {"out_shardings": device}):
        (eqn,) = jax.make_jaxpr(jax.jit(jnp.sin, **settings))(X).jaxpr.eqns
        assert equations.has_shardings(eqn) == bool(settings), must


def test_checkpoint_like():
    must = fix("checkpoint_like", "keep the settings of a checkpoint", "lookup")
    policy = jax.checkpoint_policies.dots_saveable
    f = jax.checkpoint(jnp.sin, prevent_cse=False, policy=policy)
    (eqn,) = jax.make_jaxpr(f)(X).jaxpr.eqns
    (again,) = jax.make_jaxpr(equations.checkpoint_like(eqn, jnp.cos))(X).jaxpr.eqns
    for name in eqn.params.keys() - {"jaxpr"}:
        assert again.params[name] == eqn.params[name], must
    [(inner, _)] = equations.closed_jaxprs(again)
    assert list(names(inner)) == ["cos"], must


def test_scan_like():
    must = fix("scan_like", "keep the settings of a scan", "lookup")
    scan = lambda x: jax.lax.scan(lambda c, x: (c, x), 0.0, x, reverse=True, unroll=2)
    (eqn,) = jax.make_jaxpr(scan)(X).jaxpr.eqns
    body = lambda c, x: (c * 0.5 + x[0], c)
    again = lambda x: equations.scan_like(eqn, body, 1.0, (x, 2 * x))
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
    assert equations.scan_sizes(eqn) == (2, 2), must
