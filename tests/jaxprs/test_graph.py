"""Programs as graphs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optzoo.jaxprs.graph import Graph, inlined, needed, read
from optzoo.jaxprs.primitives import PLAIN_CALLS, WITH_DERIVATIVES, Kind

CONSTANT = np.arange(3.0)


def graph_of(f, *args):
    closed = jax.make_jaxpr(f)(*args)
    return Graph.of(closed.jaxpr, closed.consts)


def run(graph, *args):
    """The results, operation by operation."""
    known = dict(zip(graph.inputs, args, strict=True))
    for op in graph.operations:
        outs = op.evaluate([read(known, v) for v in op.ins])
        known.update(zip(op.outs, outs, strict=True))
    return [read(known, v) for v in graph.results]


def looped(a, b):
    """A loop of three turns, one whose number of turns is not known, and a branch."""
    turn = lambda x, _: (jnp.sin(x) + b, x)
    a, xs = jax.lax.scan(turn, a, length=3)
    b = jax.lax.while_loop(lambda b: b < a, lambda b: 2 * b, b)
    return jax.lax.cond(a > b, jnp.cos, jnp.tanh, a), xs, b


def test_a_graph_computes_what_its_program_computes():
    got, want = run(graph_of(looped, 0.5, 0.25), 0.5, 0.25), looped(0.5, 0.25)
    for each, expected in zip(got, want, strict=True):
        np.testing.assert_allclose(each, expected, rtol=1e-6)


def test_constants_are_literals_or_the_first_inputs():
    closed = jax.make_jaxpr(lambda x: x * CONSTANT)(CONSTANT)
    [x] = Graph.of(closed.jaxpr, closed.consts).inputs
    number = len(closed.jaxpr.constvars)
    assert len(Graph.of(closed.jaxpr).inputs) == number + 1
    np.testing.assert_array_equal(
        run(Graph.of(closed.jaxpr, closed.consts), CONSTANT)[0], CONSTANT**2
    )
    assert x.shape == (3,) and x.dtype == str(np.asarray(CONSTANT, jnp.result_type(0.0)).dtype)


def test_a_walk_goes_through_calls_and_counts_turns():
    steps = {s.operation.name: s for s in graph_of(jax.jit(looped), 0.5, 0.25).walk()}
    assert {name: steps[name].times for name in ("sin", "cos", "mul")} == {
        "sin": 3,
        "cos": 1,
        "mul": 1,
    }
    assert {name for name, step in steps.items() if step.sometimes} >= {"cos", "tanh", "mul"}
    assert not steps["sin"].sometimes and steps["sin"].outermost.name == "jit"
    outside = {op.name for op, *_ in graph_of(looped, 0.5, 0.25).walk(into=())}
    assert "scan" in outside and "sin" not in outside
    never = lambda x: jax.lax.scan(lambda x, _: (jnp.sin(x), None), x, length=0)[0]
    assert {s.times for s in graph_of(never, 0.5).walk() if s.operation.name == "sin"} <= {0}


def marked(f, which, number=3):
    """Which results depend on marked arguments; the calls that these decide are noted."""
    decided = []

    def of(op, given, top):
        if op.bodies:
            decided.extend([op.name] * any(given))
            return given
        return [any(given)] * len(op.outs)

    graph = graph_of(f, *map(float, range(number)))
    found = graph.spread([k in which for k in range(len(graph.inputs))], of)
    return found, set(decided)


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
    assert marked(scan, {2}) == ([True] * 4, set())
    assert marked(scan, {1}) == ([True, True, False, True], set())
    assert marked(scan, set()) == ([False] * 4, set())
    assert marked(loop, {2})[1] == {"while"}  # its number of turns depends on it
    assert marked(by_last, {0}) == ([True, True, False], set())
    assert marked(by_last, {2})[1] == {"while"}
    assert marked(either, {2}) == ([True, False], set())
    assert marked(either, {1}) == ([True, True], set())
    assert marked(either, {0})[1] == {"cond"}
    plain = lambda a, b, c: jax.jit(lambda a, b, c: (a + b, c))(a, b, c)
    assert marked(plain, {1}) == ([True, False], set())


def test_what_depends_and_what_is_needed():
    graph = graph_of(lambda a, b: (jnp.sin(a) * b, jnp.cos(b)), 0.5, 0.25)
    a, _ = graph.inputs
    assert [v in graph.depending([a]) for v in graph.results] == [True, False]
    assert [op.name for op in needed(graph.operations, graph.results[1:])] == ["cos"]
    sine = next(op.outs[0] for op in graph.operations if op.name == "sin")
    given = needed(graph.operations, graph.results[:1], lambda v: v is sine)
    assert [op.name for op in given] == ["mul"]


def test_calls_in_line():
    @jax.custom_jvp
    def f(x):
        return jnp.sin(x) * 2.0

    f.defjvp(lambda primals, tangents: (f(*primals), *tangents))
    program = lambda x, y: (jax.jit(lambda x: f(x) + 1.0)(x), (y + 1) * (y + 1))
    x, y = jnp.ones(3), 1.5
    closed = jax.make_jaxpr(program)(x, y)
    names = lambda calls, whole=(): [
        op.name for op in inlined(closed.jaxpr, closed.consts, calls, whole).operations
    ]
    derived = next(n for n in names(()) if n == "custom_jvp_call" or n in PLAIN_CALLS)
    assert derived in PLAIN_CALLS  # the jit is one operation
    kept = inlined(closed.jaxpr, closed.consts, PLAIN_CALLS, WITH_DERIVATIVES)
    assert [op.name for op in kept.operations] == ["custom_jvp_call", "add", "add", "mul"]
    whole = kept.operations[0]
    assert [op.name for op in whole.inside] == ["sin", "mul"]
    assert whole.outs[0].meaning is whole.inside[-1].outs[0]
    assert whole.inside[0].ins[0] is kept.inputs[0]
    assert "custom_jvp_call" not in names({*PLAIN_CALLS, *WITH_DERIVATIVES})
    np.testing.assert_allclose(run(kept, x, y)[0], 2 * np.sin(1) + 1, rtol=1e-6)


def test_a_jit_with_shardings_is_not_in_line():
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    f = jax.jit(jnp.sin, in_shardings=device)
    closed = jax.make_jaxpr(f)(1.0)
    assert [op.kind for op in inlined(closed.jaxpr, None, PLAIN_CALLS).operations] == [Kind.CALL]


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_equal_scalars_have_equal_keys(value):
    graph = graph_of(lambda x: (x + value) * (x - value), jnp.ones(3))
    literals = [v for op in graph.operations for v in op.ins if v.literal is not None]
    assert len({v.key for v in literals}) == 1 or not literals
    assert len({v.key for v in graph.inputs}) == 1
