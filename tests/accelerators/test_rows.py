"""What a step on rows costs does not depend on how many rows there are."""

import jax
import jax.numpy as jnp
import optax
import pytest

import optzoo
from optzoo.core.compat import DEMANDS_LAYOUTS
from tests.accelerators.facts.cases import in_formats, loss, of, parameters, rows, sharded

V5E = "v5e:2x2"
NEEDS_DEMANDS = pytest.mark.skipif(not DEMANDS_LAYOUTS, reason="row_major needs JAX 0.11.1")


@pytest.mark.parametrize("width", [16, 100])
@pytest.mark.parametrize("name", ["lazy_adam", "gradient_descent", "row_wise_adagrad"])
def test_three_times_as_many_rows_take_the_same_cycles(name, width):
    tx = optzoo.CATALOG[name].make()

    def cycles(size, in_lines):
        step, args = rows(tx, width, V5E, in_lines=in_lines, size=size)
        return optzoo.compile_report(step, *args, device=V5E).estimated_cycles

    for in_lines in (False, True) if DEMANDS_LAYOUTS else (True,):
        assert cycles(3_000_000, in_lines) <= 1.1 * cycles(1_000_000, in_lines)


@NEEDS_DEMANDS
def test_a_step_by_hand():
    """It does the same if ``row_major`` is around it, and copies tables if not."""
    tx, params = optzoo.lazy_adam(1e-3), parameters(64)

    def step(params, state, ids, y):
        value, grads = optzoo.value_and_grad(loss)(params, ids, y)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    args = params, jax.eval_shape(tx.init, params), of(4096, dtype=jnp.int32), of(4096)
    by_rows = jax.jit(optzoo.rows.row_major(step), donate_argnums=(0, 1))
    _, in_rows = in_formats(by_rows, args, V5E)
    found = optzoo.compile_report(by_rows, *in_rows, device=V5E)
    assert found.large == () and found.not_reused == {}
    assert found.temporaries < 8e6 and found.estimated_bytes < 300e6
    plain = optzoo.compile_report(jax.jit(step, donate_argnums=(0, 1)), *args, device=V5E)
    assert len(plain.large) == 6


LARGE = 2_000_896  # a multiple of 128; XLA by itself stores such tables by columns in a branch


@NEEDS_DEMANDS
def test_large_tables_in_branches_and_loops():
    """They stay row-major there, too."""
    steps = [
        rows(optzoo.skip_spikes(optzoo.lazy_adam(1e-3)), 16, V5E, size=LARGE),
        sharded(optzoo.lazy_adam(1e-3), 64, V5E, size=LARGE),
    ]
    for step, args in steps:
        found = optzoo.compile_report(step, *args, device=V5E)
        assert found.large == () and found.not_reused == {} and found.temporaries < 8e6


@NEEDS_DEMANDS
def test_options_for_a_step_by_hand():
    f = lambda x, ids: x + optzoo.SparseRows(ids, jnp.ones((len(ids), 64)), len(x))
    step = optzoo.rows.row_major(lambda x, ids: jax.lax.cond(ids[0] > 0, f, lambda x, _: x, x, ids))
    of_table = lambda size: in_formats(step, (of(size, 64), of(4096, dtype=jnp.int32)), V5E)[1]
    options = lambda size: optzoo.rows.compiler_options(step, *of_table(size))
    assert list(options(LARGE).values()) == [1] and list(options(2 * LARGE).values()) == [1]
    assert list(options(3 * LARGE).values()) == [2] and options(LARGE // 2) == {}
    for given, copies in [(options(LARGE), 0), (None, 2)]:
        jitted = jax.jit(step, donate_argnums=0, compiler_options=given)
        found = optzoo.compile_report(jitted, *of_table(LARGE), device=V5E)
        assert len(found.large) == copies


def test_elements_of_64_bits():
    """They are two arrays on a TPU; their steps compile, and copy tables."""
    with jax.enable_x64(True):
        tx, params = optzoo.lazy_adam(1e-3), {"table": of(1000, 16, dtype=jnp.float64)}
        loss = lambda params, ids: jnp.sum(optzoo.lookup(params["table"], ids) ** 2)
        args = params, jax.eval_shape(tx.init, params), of(8, dtype=jnp.int32)
        found = optzoo.compile_report(optzoo.minimize(loss, tx), *args, device=V5E)
    assert found.arguments > 3 * 8 * 1000 * 16


def test_casts_of_rows_in_a_loop():
    """XLA would convert the whole table to bfloat16, once before the loop."""
    params = parameters(128)

    def loss(params, ids):
        def turn(total, i):
            rows = optzoo.lookup(params["table"], i).astype(jnp.bfloat16)
            return total + jnp.sum(rows.astype(jnp.float32) ** 2), None

        return jax.lax.scan(turn, 0.0, ids)[0]

    tx = optzoo.lazy_adam(1e-3)
    args = params, jax.eval_shape(tx.init, params), of(4, 1024, dtype=jnp.int32)
    found = optzoo.compile_report(optzoo.minimize(loss, tx), *args, device=V5E)
    assert found.large == () and found.temporaries < 8e6
