"""Kernels become machine code that calls no library, on every processor that is admitted.

A symbol that the process lacks would end it, without an error that could be caught.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import optzoo
from optzoo.native import engine, machine
from optzoo.native.call_frame import call_as_xla, version_of_jaxlib
from optzoo.native.elementwise import is_elementwise
from optzoo.native.groups import LeafGroup, read_program
from optzoo.native.leaf_kernel import leaf_kernel

from .guarded import native_calls, text_of

pytestmark = pytest.mark.skipif(engine.problem() is not None, reason=str(engine.problem()))

MACHINES = {
    "here": machine._this_machine,
    "aarch64": lambda: machine.Machine("aarch64-unknown-linux-gnu", "generic", ""),
    "neoverse": lambda: machine.Machine("aarch64-unknown-linux-gnu", "neoverse-v1", ""),
    # The oldest that has all that `machine.has_half` asks for, and one with AVX-512.
    "ivybridge": lambda: machine.Machine("x86_64-unknown-linux-gnu", "ivybridge", ""),
    "skylake": lambda: machine.Machine("x86_64-unknown-linux-gnu", "skylake-avx512", ""),
}
EVERYWHERE = {
    "memcpy",
    "memset",
    "memmove",
    "malloc",
    "free",
    "sched_yield",
}  # of the C library, which every process has


def calls_of(assembly):
    """The functions that code calls, and does not define."""
    called = r"^\s*(?:callq?|jmp|bl|b)\s+([A-Za-z_]\w*)"
    taken = r"(?:movabsq?\s+\$|:abs_g3:|@)([A-Za-z_]\w*)"  # addresses, in the large model
    names = {*re.findall(called, assembly, re.M), *re.findall(taken, assembly)}
    defined = {*re.findall(r"^([A-Za-z_]\w*):", assembly, re.M)}
    words = {"function", "object", "progbits", "nobits", "unwind", "GOTPCREL", "PLT"}
    return names - defined - words


def check(name, text):
    made = MACHINES[name]()
    module = made.optimize(text)
    unknown = calls_of(made.machine.emit_assembly(module)) - EVERYWHERE
    assert not unknown, unknown
    assert made.machine.emit_object(module)[:4] == b"\x7fELF"


@pytest.fixture(scope="module")
def kernels():
    """Rows and arrays, in several dtypes."""
    table = jnp.ones((5, 3))
    rows = optzoo.SparseRows(jnp.array([1, 3, 1], jnp.int32), jnp.ones((3, 3)), 5)
    wide, wide_rows = jnp.ones((5, 64)), optzoo.SparseRows(rows.indices, jnp.ones((3, 64)), 5)
    adam, words = optzoo.lazy_adam(0.1), {"packed": True, "stochastic": True}
    cases = [
        (adam, table, rows),
        (optax.chain(optzoo.clip_by_global_norm(1.0), adam), table, rows),
        (optzoo.row_wise_adagrad(0.1), table, rows),
        (optzoo.slots_dtype(adam, "bfloat16", **words), table, rows),
        (optzoo.slots_dtype(adam, "float16", stochastic=True), table, rows),
        (optzoo.slots_dtype(adam, "int8"), wide, wide_rows),
        (optzoo.slots_dtype(optzoo.adam(0.1), "int8"), wide, wide),
        (optzoo.adam(0.1), table, table),
        (optzoo.slots_dtype(optzoo.adam(0.1), "float16"), table, table),
        (optzoo.adam(0.1), table.astype("bfloat16"), table.astype("bfloat16")),
    ]
    return [text_of(call) for case in cases for call in native_calls(*case)[1]]


@pytest.mark.parametrize("name", MACHINES)
def test_kernels_call_no_library(name, kernels):
    assert len(kernels) >= 8
    for text in kernels:
        check(name, text)


def test_the_check_finds_calls():
    text = """
      declare float @llvm.exp.f32(float)
      define float @f(float %x) {
        %y = call float @llvm.exp.f32(float %x)
        %z = fadd float %y, 1.0
        ret float %z
      }"""
    for name in MACHINES:
        with pytest.raises(AssertionError, match="expf"):
            check(name, text)


@pytest.mark.parametrize("width", [5, 9, 13])
@pytest.mark.parametrize("name", ["here", "skylake"])
def test_no_vector_stores_one_narrow_element(name, width):
    """LLVM 22 makes a store of 4 bytes of it, which goes beyond the row."""
    rows = optzoo.SparseRows(jnp.zeros(9, jnp.int32), jnp.ones((9, width)), 4)
    table, narrow = jnp.ones((4, width)), functools.partial(optzoo.slots_dtype, dtype="bfloat16")
    for tx, g in ((optzoo.lazy_adam(0.1), rows), (optzoo.row_wise_lamb(0.1), rows.to_dense())):
        [call] = native_calls(narrow(tx), table, g)[1]
        text = str(MACHINES[name]().optimize(text_of(call)))
        masks = re.findall(r"masked\.store\.v\d+i16\S*\(.*x i1> <(.*?)>", text)
        assert all(mask.count("true") > 1 for mask in masks)


INF, NAN = float("inf"), float("nan")
FLOATS = ["float16", "bfloat16", "float32", "float64"]
INTEGERS = ["int8", "uint8", "int32", "uint32", "int64", "uint64", "uint16"]
OPERATIONS = {
    "exponential": lambda x, y: lax.exp(x),
    "logarithm": lambda x, y: lax.log(lax.abs(x)),
    "real power": lambda x, y: lax.pow(x, y),
    "floor": lambda x, y: lax.floor(x),
    "add": lambda x, y: x + y,
    "clamp": lambda x, y: lax.clamp(-lax.abs(y), x, lax.abs(y)),
    "compare": lambda x, y: jnp.where(x < y, x, y),
    "divide": lambda x, y: lax.div(x, y),
    "largest": lambda x, y: lax.max(x, y),
    "power": lambda x, y: lax.integer_pow(x, -3),
    "root": lambda x, y: lax.sqrt(x) + lax.rsqrt(lax.abs(y)),
    "sign": lambda x, y: jnp.where(lax.is_finite(x), lax.sign(y), -x),
    "smallest": lambda x, y: lax.min(x, y),
}

OF_INTEGERS = {
    "bits": lambda x, y: (x & y) | ~x ^ y,
    "compare": lambda x, y: jnp.where(x < y, x, y) + x * y,
    "largest and smallest": lambda x, y: lax.max(x, y) - lax.min(x, y) * 3,
    "remainder": lambda x, y: lax.rem(x, jnp.asarray(7, x.dtype)),
    "shift": lambda x, y: lax.shift_right_arithmetic(x, jnp.asarray(3, x.dtype)),
}


def leaf_of(f, dtype, size=8):
    """What is known to the native engine of the results of ``f`` of two arrays."""
    aval = jax.ShapeDtypeStruct((size,), dtype)
    program = read_program(jax.make_jaxpr(f)(aval, aval).jaxpr)
    known = [op for op in program.operations if is_elementwise(op)]
    made = {v for op in known for v in op.outs} | {*program.inputs}
    outs = [v for v in program.results if v in made]
    assert all(v in made or v.literal is not None for op in known for v in op.ins)
    return LeafGroup(program.inputs, outs, known, {}, [], program.inputs)


def kernel_of(f, dtype):
    return leaf_kernel("kernel", leaf_of(f, dtype), version_of_jaxlib())


@pytest.mark.parametrize("name", MACHINES)
def test_operations_call_no_library(name, x64):
    others = lambda dtype: [d for d in (*FLOATS, *INTEGERS, "bool") if d != dtype]
    conversions = lambda d: lambda x, y: [lax.convert_element_type(x, other) for other in others(d)]
    computed = lambda x, y: [f(x, y) for f in OPERATIONS.values()]
    with x64(True):
        for dtype in (*FLOATS, *INTEGERS, "bool"):
            check(name, kernel_of(conversions(dtype), dtype))
        for dtype in FLOATS:
            check(name, kernel_of(computed, dtype))
        computed = lambda x, y: [f(x, y) for f in OF_INTEGERS.values()]
        check(name, kernel_of(computed, "int64"))


SPECIAL = {
    # With two that are halfway between two numbers of bfloat16.
    "float": [
        0.0,
        -0.0,
        1.0,
        -1.0,
        2.5,
        3.5,
        1 + 2**-8,
        1 + 3 * 2**-8,
        -1e-3,
        1e-6,
        300.0,
        65504.0,
        INF,
        -INF,
        NAN,
    ],
    "int": [0, 1, 2, 3, 255, 256, 1000, 2**15, 2**15 + 1, -1, -300],
    "uint": [0, 1, 2, 3, 255, 256, 1000, 2**15, 2**15 + 1, -1, -300],  # the last ones are large
    "bool": [False, True],
}


def values(dtype):
    """All pairs of special values of a dtype."""
    kind = dtype.rstrip("0123456789").removeprefix("b") if dtype != "bool" else dtype
    some = np.array(SPECIAL[kind], jnp.dtype(dtype) if dtype in FLOATS else None).astype(dtype)
    if dtype == "float32":
        some[-1:].view("uint32")[:] = 0x7FFFFFFF  # NaN; rounded as a number it would be -0
    return np.repeat(some, len(some)), np.tile(some, len(some))


def computed(f, x, y):
    """The results of the native engine, called as XLA calls it."""
    leaf = leaf_of(f, str(x.dtype), len(x))
    if not leaf.outs:
        return []
    place = machine.address(lambda name: leaf_kernel(name, leaf, version_of_jaxlib()))[1]
    results = [np.zeros(len(x), v.dtype) for v in leaf.outs]
    call_as_xla(place, [x, y], results)
    return results


@pytest.mark.parametrize("dtype", FLOATS)
def test_operations_compute_what_xla_does(dtype, x64):
    """Of special values as well, and rounded to 16 bits once."""
    with x64(True):
        x, y = values(dtype)
        tiny = float(jnp.finfo(dtype).smallest_subnormal)
        close = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 3e-7, "float64": 1e-15}[dtype]
        for name, f in OPERATIONS.items():
            if name == "real power" and dtype == "float64":  # left to XLA
                continue
            [got] = computed(lambda x, y, f=f: [f(x, y)], x, y)
            want = np.asarray(f(jnp.asarray(x), jnp.asarray(y)))
            got, want = got.astype("float64"), want.astype("float64")
            np.testing.assert_allclose(got, want, close, tiny, err_msg=name)
            exact = name in ("clamp", "compare", "largest", "sign", "smallest")
            assert not exact or (np.signbit(got) == np.signbit(want))[~np.isnan(want)].all(), name


@pytest.mark.unique
@pytest.mark.parametrize("dtype", INTEGERS)
def test_operations_on_integers_compute_what_xla_does(dtype, x64):
    with x64(True):
        x, y = values(dtype)
        for name, f in OF_INTEGERS.items():
            [got] = computed(lambda x, y, f=f: [f(x, y)], x, y)
            np.testing.assert_array_equal(got, f(jnp.asarray(x), jnp.asarray(y)), err_msg=name)


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, "bool"])
def test_conversions_are_those_of_xla(dtype, x64):
    with x64(True):
        x, y = values(dtype)
        for other in (*FLOATS, *INTEGERS, "bool"):
            if other == dtype:
                continue
            some = x
            if dtype in FLOATS and other in INTEGERS:  # of others C++ does not say what they are
                with np.errstate(invalid="ignore"):  # NaN
                    some = np.where((x >= 0) & (x < 1e3), x, 0).astype(x.dtype)
            convert = lambda x, y, other=other: [lax.convert_element_type(x, other)]
            for got in computed(convert, some, y):  # none, if the engine leaves it to XLA
                want = np.asarray(lax.convert_element_type(jnp.asarray(some), other))
                got, want = (a.astype("float64") for a in (got, want))
                np.testing.assert_array_equal(got, want, err_msg=other)


@pytest.mark.parametrize("name", ["exponential", "logarithm", "real power"])
def test_powers_in_float32_are_close(name):
    rng = np.random.default_rng(0)
    x = {
        "exponential": rng.uniform(-87, 88, 3000),
        "logarithm": np.exp(rng.uniform(-80, 80, 3000)),
        "real power": np.exp(rng.uniform(-15, 15, 3000)),
    }[name].astype(np.float32)
    y = rng.uniform(-4, 4, 3000).astype(np.float32)
    [got] = computed(lambda x, y: [OPERATIONS[name](x, y)], x, y)
    exact = {"exponential": np.exp, "logarithm": np.log, "real power": np.power}[name]
    want = exact(*(a.astype(np.float64) for a in (x, y)[: 1 + (name == "real power")]))
    unit = np.spacing(abs(want).astype(np.float32))
    assert (abs(got - want) / unit).max() < (0.9 if name == "exponential" else 0.501)


@pytest.mark.parametrize("name", ["exponential", "logarithm"])
def test_powers_in_float64_are_close(name, x64):
    rng = np.random.default_rng(0)
    with x64(True):
        x = rng.uniform(-740, 709, 3000)
        x = np.exp(x) if name == "logarithm" else x
        x[:1000] = 1 + 1e-3 * rng.normal(size=1000)
        [got] = computed(lambda x, y: [OPERATIONS[name](x, y)], x, x)
        want = {"exponential": np.exp, "logarithm": np.log}[name](x)
        assert (abs(got - want) / np.spacing(abs(want))).max() < 1.6  # each is off by less than one
