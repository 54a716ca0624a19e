"""Faults that are put into a step are found in the facts of its program."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest

import optzoo
from optzoo.native import tpu_kernel
from optzoo.native.groups import Unsupported

from .facts import cases, promises, record

ROWS, QUIET, SHARDED = "rows/lazy_adam/128", "replicas/agn, quiet", "sharded/lazy_adam/128"


def changed(key, change):
    """The case with another step, of the same arguments."""

    def make(device):
        step, args = cases.CASES[key].make(device)
        return change(step), args

    return cases.CASES[key]._replace(make=make)


def compiled(key, change=None):
    case = cases.CASES[key] if change is None else changed(key, change)
    return record.facts_of(record.report_of(case.lowered(), case.device))


as_it_is = functools.cache(compiled)


def afterwards(f):
    """The step, and then a function of its results and the parameters before."""

    def change(step):
        then = lambda params, *rest: f(step(params, *rest), params)
        return jax.jit(then, donate_argnums=(0, 1))

    return change


def in_table(f):
    """The step, and then a function of its new table."""
    new = lambda out: ({**out[0], "table": f(out[0]["table"])}, *out[1:])
    return afterwards(lambda out, _: new(out))


def with_copy(step):
    """Keeps the parameters of before, as a wrapper may."""
    return jax.jit(lambda params, *rest: (*step(params, *rest), params), donate_argnums=(0, 1))


SELECT = in_table(lambda x: jnp.where(jnp.any(x > 9, axis=1, keepdims=True), 0.0, x))
ROUNDED = in_table(lambda x: jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7))
CALLBACK = afterwards(lambda out, _: (jax.debug.callback(lambda x: None, out[2]), out)[1])
NOT_DONATED = lambda step: jax.jit(lambda *args: step(*args))
DONATED_IN_VAIN = afterwards(lambda out, _: (jax.tree.map(lambda x: x[:-1], out[0]), *out[1:]))
MEANS = afterwards(lambda out, _: (out[0] - jnp.mean(out[0], axis=0), *out[1:]))
WHOLE = in_table(lambda x: x - jnp.mean(jnp.sort(x, axis=0)[:2]))

FAULTS = {
    "a select as large as a table": (ROWS, SELECT, "large"),
    "a table that is rounded": (ROWS, ROUNDED, "large"),
    "no donation": (ROWS, NOT_DONATED, "reused"),
    "donation in vain": (ROWS, DONATED_IN_VAIN, "not_reused"),
    "a copy is kept": (ROWS, with_copy, "results"),
    "a mean of replicas in a quiet step": (QUIET, MEANS, "sent"),
    "an operation on the whole sharded table": (SHARDED, WHOLE, "sent"),
}


@pytest.mark.parametrize("device", ["v5e:2x2", "h100"])
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault, device):
    name, change, where = FAULTS[fault]
    key = f"{name}/{device}" if name == ROWS else f"{name}/{device.replace('h100', 'h100:4')}"
    now = compiled(key, change)
    found = record.differences(as_it_is(key), now)
    assert where in {line.split(":")[0] for line in found}
    if where in ("not_reused", "sent", "large"):
        assert promises.broken(key, now)


def test_a_call_of_the_host_is_found():
    """For a GPU that is not there JAX refuses it."""
    key = f"{ROWS}/v5e:2x2"
    now = compiled(key, CALLBACK)
    assert any(line.startswith("calls: ") for line in record.differences(as_it_is(key), now))
    assert any("to the host" in line for line in promises.broken(key, now))


def test_a_change_of_all_rows_in_place_is_found():
    """It makes no array, and so it is no large operation."""
    key = f"{ROWS}/v5e:2x2"
    scaled = lambda params, *rest: (jax.tree.map(lambda x: 0.9 * x, params), *rest[:1])
    now = compiled(key, lambda _: jax.jit(scaled, donate_argnums=(0, 1)))
    assert "large" not in now and "all rows" in " ".join(promises.broken(key, now))


def test_a_dense_gradient_is_found():
    """A gather that is no lookup."""

    def dense(params, ids, y):
        return jnp.mean((params["table"][ids] @ params["w"] - y) ** 2)

    key = f"{ROWS}/h100"
    step = optzoo.minimize(dense, optzoo.lazy_adam(1e-3), min_rows=10_000_000)
    now = compiled(key, lambda _: step)
    assert "large" in now and promises.broken(key, now)


def test_the_same_step_is_no_fault():
    key = f"{ROWS}/h100"
    again = compiled(key, lambda step: jax.jit(lambda *args: step(*args), donate_argnums=(0, 1)))
    assert record.differences(as_it_is(key), again) == promises.broken(key, again) == []


def test_numbers_that_are_near_agree():
    facts = {"temporaries": 10_000_000, "cycles": 1000, "sent": {"all-reduce": [2, 1_000_000]}}
    near = {"temporaries": 10_090_000, "cycles": 1040, "sent": {"all-reduce": [2, 1_050_000]}}
    assert record.differences(facts, near) == []
    far = {"temporaries": 10_300_000, "cycles": 1100, "sent": {"all-reduce": [1, 1_000_000]}}
    assert record.differences(facts, {**far, "large": 1}) == [
        "temporaries: recorded 10,000,000, now 10,300,000",
        "cycles: recorded 1,000, now 1,100",
        "sent: recorded {'all-reduce': [2, 1000000]}, now {'all-reduce': [1, 1000000]}",
        "large: recorded none, now 1",
    ]


def test_what_is_donated_is_a_part_of_a_program():
    """Also of an argument that the program does not read."""
    x = jax.ShapeDtypeStruct((3,), jnp.float32)
    lowered = lambda step: record.fingerprint(step.lower(x, x))
    first = lambda x, unused: x + 1
    assert lowered(jax.jit(first)) == lowered(jax.jit(first))
    assert lowered(jax.jit(first)) != lowered(jax.jit(first, donate_argnums=1))
    assert lowered(jax.jit(optax.apply_updates)) != lowered(jax.jit(first))


def test_a_lost_kernel_is_found(monkeypatch):
    def refuse(rows):
        raise Unsupported("none")

    monkeypatch.setattr(tpu_kernel, "_check", refuse)
    key = "native/lazy_adam/64/v5e:2x2"
    now = compiled(key)
    assert "bytes" in {
        line.split(":")[0] for line in record.differences(record.read(record.FACTS)[key], now)
    }
    assert promises.broken(key, now) == ["its rows are left to XLA"]


def test_arrays_in_8_bits_have_a_kernel():
    """With it a step moves fewer bytes than one in float32, and needs no temporaries."""
    shape = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)

    def facts(tx, step):
        args = shape, jax.eval_shape(tx.init, shape), shape
        step = jax.jit(step(tx), donate_argnums=(0, 1))
        return record.facts_of(optzoo.compile_report(step, *args, device="v5e:2x2"))

    def plain(tx):
        def step(params, state, grads):
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        return step

    in_8_bits = optzoo.slots_dtype(optzoo.adam(1e-3), "int8")
    wide, coded = facts(optzoo.adam(1e-3), plain), facts(in_8_bits, plain)
    native = facts(in_8_bits, optzoo.native_step)
    assert promises.KERNEL in native["calls"] and promises.KERNEL not in coded.get("calls", ())
    assert native["bytes"] < 0.65 * wide["bytes"] < coded["bytes"]
    assert native["temporaries"] < 10_000
