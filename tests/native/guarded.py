"""Native calls on memory whose neighbours may not be touched; a script for ``test_safety.py``.

Each array begins right after, or ends right before, a page that can be neither read nor written.
A kernel that goes beyond an array ends the process. So cases run in a process of their own.
"""

import ctypes
import functools
import mmap
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optzoo
from optzoo.core.marked_rows import gather_rows
from optzoo.jaxprs.equations import bind_equation
from optzoo.native import calls, machine
from optzoo.native.call_frame import call_as_xla
from optzoo.native.cpu_kernels import KERNELS
from optzoo.native.norms import SumGroup
from optzoo.native.rows_groups import RowsGroup
from optzoo.testing.samples import with_global_step

PAGE = mmap.PAGESIZE
NONE, READ = 0, 1  # PROT_NONE, PROT_READ
FILL = 0xA5  # what is around an array, and what a result holds before the call


class Guarded:
    """An array between two pages that are forbidden."""

    def __init__(self, shape, dtype, *, at_end):
        size = int(np.prod(shape, dtype=int)) * np.dtype(dtype).itemsize
        self.length = -(-size // PAGE) * PAGE
        self.memory = mmap.mmap(-1, self.length + 2 * PAGE)
        self.bytes = np.frombuffer(self.memory, np.uint8)
        self.bytes[:] = FILL
        self.start = PAGE + (self.length - size if at_end else 0)
        self.end = self.start + size
        self.array = self.bytes[self.start : self.end].view(dtype).reshape(shape)
        self.protect(0, PAGE, NONE)
        self.protect(PAGE + self.length, PAGE, NONE)

    def protect(self, start, length, how):
        address = ctypes.c_void_p(self.bytes.ctypes.data + start)
        if length and ctypes.CDLL(None).mprotect(address, ctypes.c_size_t(length), how):
            raise OSError("mprotect")

    def freeze(self):
        """Writing to it ends the process, too."""
        self.protect(PAGE, self.length, READ)

    def check_surroundings(self):
        around = [self.bytes[PAGE : self.start], self.bytes[self.end : PAGE + self.length]]
        assert all((part == FILL).all() for part in around), "bytes beside an array were written"


def native_calls(tx, params, grads):
    """A function of parameters, state and gradients; the native calls of the step of ``tx``.

    The function gives for each call its arguments and the results of its reference.
    """
    tx = optax.with_extra_args_support(tx)
    leaves, treedef = jax.tree.flatten((params, tx.init(params), grads))
    step = optzoo.native_step(tx)
    closed = jax.make_jaxpr(lambda *leaves: step(*treedef.unflatten(leaves)))(*leaves)
    found = [e.params["call"] for e in closed.jaxpr.eqns if e.primitive is calls._native_p]

    def probe(*leaves):
        known = dict(zip((*closed.jaxpr.constvars, *closed.jaxpr.invars), leaves, strict=True))
        seen = []
        for eqn in closed.jaxpr.eqns:
            ins = [v.val if hasattr(v, "val") else known[v] for v in eqn.invars]
            if eqn.primitive is calls._native_p:
                outs = eqn.params["call"].reference(*ins)
                seen.append((ins, outs))
            else:
                outs = bind_equation(eqn, ins)
            known.update(zip(eqn.outvars, outs, strict=True))
        return seen

    probe = jax.jit(probe)
    return lambda *trees: probe(*closed.consts, *jax.tree.leaves(trees)), found


def kernel_of(call):
    return next(kernel for kernel in KERNELS if kernel.match(call.parts[0]))


def text_of(call, name="kernel"):
    """The kernel of a call in LLVM's language."""
    return kernel_of(call).text(call, name)


@functools.cache
def compiled(call):
    """The address of a kernel, and the types of its results with those that serve as scratch."""
    jaxpr = jax.make_jaxpr(kernel_of(call).lower(call))(*[v.aval for v in call.ins]).jaxpr
    [eqn] = [e for e in jaxpr.eqns if e.primitive.name == "ffi_call"]
    place = machine.address(lambda name: text_of(call, name))[1]
    return place, [v.aval for v in eqn.outvars]


def call_guarded(call, args, *, at_end, in_place):
    """The results of a native call without XLA, on guarded memory."""
    place, results = compiled(call)
    ins, outs = [], {}
    for i, x in enumerate(map(np.asarray, args)):
        ins.append(Guarded(x.shape, x.dtype, at_end=at_end))
        ins[-1].array[...] = x
        if in_place and i in call.aliases:
            outs[call.aliases[i]] = ins[-1]
        else:
            ins[-1].freeze()
    for o, aval in enumerate(results):
        if o not in outs:
            outs[o] = Guarded(aval.shape, aval.dtype, at_end=at_end)
    outs = [outs[o] for o in range(len(outs))]
    call_as_xla(place, [x.array for x in ins], [x.array for x in outs])
    for x in (*ins, *outs):
        x.check_surroundings()
    return [x.array for x in outs[: len(call.outs)]]


def check_close(expected, got, limit):
    """Equal up to ``limit`` of the array's scale; words that hold two slots, most of them."""
    assert (expected.shape, expected.dtype) == (got.shape, got.dtype)
    if not jnp.issubdtype(expected.dtype, jnp.inexact):
        # Two slots of 16 bits in a word: one rounded to its neighbour is another integer.
        differ = np.mean(np.asarray(expected) != got) if got.size else 0.0
        assert differ < 0.5, f"{differ} of the integers differ"
        return
    a, b = (np.asarray(x, np.float64) for x in (expected, got))
    scale = np.sqrt(np.mean(a**2)) if a.size else 0.0
    np.testing.assert_allclose(b, a, rtol=limit, atol=limit * scale)


# Cases

NUM_ROWS, MANY = 5, 40  # more than the kernel fetches ahead
LOW, HIGH = -(2**31), 2**31 - 1


def ids_of(num_rows, many):
    """Ids that repeat, are out of range on both sides, are all the same, are all out of range."""
    wrong = [-1, num_rows, LOW, HIGH, num_rows + 1, -num_rows]
    random = np.random.default_rng(many).integers(0, num_rows, many)
    mixed = np.where(np.arange(many) % 3 == 1, np.resize(wrong, many), random)
    last = np.full(many, num_rows - 1)
    return [np.asarray(x, np.int32) for x in (mixed, random, last, np.resize(wrong, many))]


def run_rows(tx, row, *, many=MANY, num_rows=NUM_ROWS, dtype="float32", limit=2e-6):
    """A step on rows of these shapes, for ids of all kinds."""
    rng = np.random.default_rng(0)
    table = jnp.asarray(rng.normal(size=(num_rows, *row)), dtype)
    values = jnp.asarray(rng.normal(size=(many, *row)), dtype)
    grads = lambda ids: optzoo.SparseRows(jnp.asarray(ids), values, num_rows)
    cases = ids_of(num_rows, many)
    probe, found = native_calls(tx, table, grads(cases[0]))
    state = optax.with_extra_args_support(tx).init(table)
    assert [type(call.parts[0]) for call in found].count(RowsGroup) == 1, found
    for ids in cases:
        check_all(found, probe(table, state, grads(ids)), limit)


def run_leaves(tx, sizes=(0, 1, 7, 1000), dtype="float32", limit=2e-6):
    """A step on several arrays of different sizes."""
    rng = np.random.default_rng(0)
    draw = lambda: {f"p{k}": jnp.asarray(rng.normal(size=n), dtype) for k, n in enumerate(sizes)}
    params, grads = draw(), draw()
    probe, found = native_calls(tx, params, grads)
    state = optax.with_extra_args_support(tx).init(params)
    assert sum(len(call.parts) for call in found) == len(sizes), found
    assert max(len(call.parts) for call in found) > 1, found
    check_all(found, probe(params, state, grads), limit)


def check_all(found, seen, limit):
    for call, (args, expected) in zip(found, seen, strict=True):
        for at_end in (True, False):
            for in_place in (True, False):
                got = call_guarded(call, args, at_end=at_end, in_place=in_place)
                for a, b in zip(expected, got, strict=True):
                    check_close(a, b, limit)


def adam(dtype=None, **kwargs):
    tx = optzoo.lazy_adam(0.1)
    return tx if dtype is None else optzoo.slots_dtype(tx, dtype, **kwargs)


def clipped():
    """The rows are merged before, by XLA."""
    return optax.chain(optzoo.clip_by_global_norm(1.0), adam())


def reader(many, *, writes=False):
    """Its state has rows of the parameters, times the entry of a list that each names.

    With ``writes`` it changes the numbers of these entries, and rows out of range are zeros.
    """

    def init(table):
        numbers = jnp.asarray([0, 3, LOW, HIGH, -1], jnp.int32)[: len(table)]
        return numbers, jnp.arange(1.0, 5.0), jnp.zeros((many, *table.shape[1:]))

    def update(g, state, table=None):
        numbers, entries, _ = state
        g = g.coalesce() if writes else g
        place = g.gather(jnp.arange(len(table), dtype=jnp.float32))
        of_rows = gather_rows(entries, g.gather(numbers)) + place
        rows = g.gather(table) * of_rows.reshape(-1, *[1] * (table.ndim - 1))
        if writes:
            rows = g.with_values(rows).drop_padding().values
            numbers = g.scatter(numbers, g.gather(numbers) - 1)
        return jnp.zeros_like(table), (numbers, entries, rows)

    return optax.GradientTransformation(init, update)


def run_sums(tx, sizes=(16, 17, 4095, 4097, 9000), dtype="float32", limit=2e-6):
    """A step after norms of arrays of different sizes."""
    rng = np.random.default_rng(0)
    draw = lambda: {f"p{n}": jnp.asarray(rng.normal(size=n), dtype) for n in sizes}
    params, grads = draw(), draw()
    probe, found = native_calls(tx, params, grads)
    state = optax.with_extra_args_support(tx).init(params)
    assert sum(len(c.parts) for c in found if isinstance(c.parts[0], SumGroup)) >= len(sizes)
    check_all(found, probe(params, state, grads), limit)


def in_float64(run, *args, **kwargs):
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    try:
        run(*args, dtype="float64", limit=1e-14, **kwargs)
    finally:
        jax.config.update("jax_enable_x64", before)


ROW_SHAPES = [(), (1,), (3,), (64,), (2, 3)]
# A value near the middle between two of 16 bits may be rounded to the other one.
BF16, F16, CODES = 2**-7, 2**-9, 2e-6
CASES = {
    **{f"rows {s}": (run_rows, adam(), s) for s in ROW_SHAPES},
    **{f"merged outside {s}": (run_rows, clipped(), s) for s in [(), (3,), (2, 3)]},
    "no ids": (lambda: run_rows(adam(), (3,), many=0),),
    "no ids, merged outside": (lambda: run_rows(clipped(), (3,), many=0),),
    "one id": (lambda: run_rows(adam(), (3,), many=1),),
    "one id, merged outside": (lambda: run_rows(clipped(), (3,), many=1),),
    "one row": (lambda: run_rows(adam(), (3,), num_rows=1),),
    "one row, one id": (lambda: run_rows(adam(), (), num_rows=1, many=1),),
    "many rows": (lambda: run_rows(adam(), (2,), num_rows=3000, many=1500),),
    "wide rows": (lambda: run_rows(adam(), (1000,), many=20),),
    "read": (run_rows, reader(MANY), (3,)),
    "read and written": (run_rows, reader(MANY, writes=True), (3,)),
    "one row, read": (lambda: run_rows(reader(MANY), (2, 3), num_rows=1),),
    "added": (run_rows, optzoo.gradient_descent(0.1), (3,)),
    "norms": (run_rows, optzoo.row_wise_adagrad(0.1), (3,)),
    "norms (2, 3)": (run_rows, optzoo.row_wise_adagrad(0.1), (2, 3)),
    "bfloat16": (lambda: run_rows(adam("bfloat16"), (3,), limit=BF16),),
    "bfloat16, nine elements": (lambda: run_rows(adam("bfloat16"), (9,), limit=BF16),),
    "float16": (lambda: run_rows(adam("float16"), (5,), limit=F16),),
    "packed": (run_rows, adam("float32", packed=True), (3,)),
    "words": (
        lambda: run_rows(adam("bfloat16", packed=True, stochastic=True), (3,), limit=BF16),
    ),
    "random": (lambda: run_rows(adam("float16", stochastic=True), (2, 3), limit=F16),),
    "8 bits": (lambda: run_rows(adam("int8"), (64,), limit=CODES),),
    "8 bits, wide": (lambda: run_rows(adam("int8"), (160,), limit=CODES),),
    "8 bits, filled up": (lambda: run_rows(adam("int8"), (40,), limit=CODES),),
    "8 bits, one group": (lambda: run_rows(adam("int8"), (9,), limit=CODES),),
    "leaves in 8 bits": (
        lambda: run_leaves(
            optzoo.slots_dtype(optzoo.adam(0.1), "int8"), [(1, 160), (5, 192), (2, 3, 96)]
        ),
    ),
    "leaves with rows": (run_leaves, optzoo.row_wise_lamb(0.1), [(5, 3), (2, 3), (1, 3)]),
    "long rows": (run_leaves, optzoo.partial_row_wise_lamb(0.1), [(1, 5000), (3, 5000)]),
    "all in bfloat16": (lambda: run_rows(adam(), (3,), dtype="bfloat16", limit=BF16),),
    "all in float16": (lambda: run_rows(adam(), (3,), dtype="float16", limit=F16),),
    "float64": (in_float64, run_rows, adam(), (3,)),
    "leaves": (run_leaves, optzoo.adam(0.1)),
    "sums": (run_sums, optax.lamb(0.1)),
    "sums in float64": (in_float64, run_sums, optax.lamb(0.1)),
    "leaves of ftrl": (run_leaves, optzoo.ftrl(0.1)),
    "leaves in bfloat16": (lambda: run_leaves(optzoo.adam(0.1), dtype="bfloat16", limit=BF16),),
    "leaves in float16": (lambda: run_leaves(optzoo.adam(0.1), dtype="float16", limit=F16),),
    "leaves in float64": (in_float64, run_leaves, optzoo.adam(0.1)),
}  # fmt: skip
# Those that differ little from others; in `make test-full` only.
MORE = {"rows (1,)", "rows (64,)", "merged outside ()", "merged outside (2, 3)", "wide rows"}
MORE |= {"one id, merged outside", "no ids, merged outside", "norms (2, 3)", "all in float16"}
MORE |= {"leaves of ftrl", "leaves in float16", "leaves in float64", "sums in float64"}
QUICK = CASES.keys() - MORE


def overrun(*, at_end):
    """A leaf kernel is told that an array has one element more, or that it begins one before."""
    ones = lambda n: jnp.ones(n, jnp.float32)
    tx = with_global_step(optzoo.gradient_descent)(0.1)
    _, [call] = native_calls(tx, ones(7), ones(7))
    place = machine.address(lambda name: text_of(call, name))[1]
    arrays = []
    for v in call.ins:
        x = Guarded(v.shape, v.dtype, at_end=at_end)
        x.array[...] = 1
        arrays.append(x)
    longer = lambda x: np.ctypeslib.as_array(
        (ctypes.c_float * 8).from_address(x.array.ctypes.data - (0 if at_end else 4))
    )
    args = [longer(x) if x.array.ndim else x.array for x in arrays]
    call_as_xla(place, args, [args[next(iter(call.aliases))]])


def main(names):
    failed = 0
    for name in names:
        print(f"case: {name}", flush=True)
        if name in ("after", "before"):
            overrun(at_end=name == "after")
            continue
        run, *args = CASES[name]
        try:
            run(*args)
        except Exception as error:  # the other cases run as well
            failed += 1
            print(f"failed: {name}: {type(error).__name__}: {error}", flush=True)
    print(f"end: {failed} failed", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1:])))
