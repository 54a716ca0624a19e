"""Kernels become machine code that calls no library, on every processor that is admitted.

A symbol that the process lacks would end it, without an error that could be caught.
"""

import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

import optzoo
from optzoo.native import engine, machine
from optzoo.native.call_frame import version_of_jaxlib
from optzoo.native.calls import leaf_kernel
from optzoo.native.groups import Leaf
from optzoo.native.operations import is_elementwise
from optzoo.native.program import read_program

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
EVERYWHERE = {"memcpy", "memset", "memmove"}  # of the C library, which every process has


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
    adam, words = optzoo.lazy_adam(0.1), {"packed": True, "stochastic": True}
    cases = [
        (adam, table, rows),
        (optax.chain(optzoo.clip_by_global_norm(1.0), adam), table, rows),
        (optzoo.row_wise_adagrad(0.1), table, rows),
        (optzoo.slots_dtype(adam, "bfloat16", **words), table, rows),
        (optzoo.slots_dtype(adam, "float16", stochastic=True), table, rows),
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


FLOATS = ["float16", "bfloat16", "float32", "float64"]
INTEGERS = ["int32", "uint32", "int64", "uint64", "uint16"]
OPERATIONS = {
    "add": lambda x, y: x + y,
    "compare": lambda x, y: jnp.where(x < y, x, y),
    "divide": lambda x, y: lax.div(x, y),
    "extremes": lambda x, y: lax.max(x, lax.min(y, x)),
    "power": lambda x, y: lax.integer_pow(x, -3),
    "root": lambda x, y: lax.sqrt(x) + lax.rsqrt(lax.abs(y)),
    "sign": lambda x, y: jnp.where(lax.is_finite(x), lax.sign(y), -x),
}


def kernel_of(f, dtype):
    """The kernel of what is known to the native engine of the results of ``f`` of two arrays."""
    aval = jax.ShapeDtypeStruct((8,), dtype)
    program = read_program(jax.make_jaxpr(f)(aval, aval).jaxpr)
    known = [op for op in program.operations if is_elementwise(op)]
    made = {v for op in known for v in op.outs} | {*program.inputs}
    outs = [v for v in program.results if v in made]
    assert all(v in made or v.literal is not None for op in known for v in op.ins)
    leaf = Leaf(program.inputs, outs, known, {}, [], program.inputs)
    return leaf_kernel("kernel", leaf, version_of_jaxlib())


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
