"""Tasks of native calls on several threads: the same bits, whoever does them and when."""

import ctypes
import gc
import threading

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optzoo
from optzoo.native import engine
from optzoo.native.call_frame import call_as_xla

from .guarded import Guarded, check_close, compiled, native_calls
from .pools import Pool

pytestmark = pytest.mark.skipif(engine.problem() is not None, reason=str(engine.problem()))

NUM_ROWS = 3000
HOWS = [("threads", 2), ("threads", 5), ("inline", 3), ("late", 4), ("refused", 4), ("none", 4)]


def ids_of(kind, many):
    rng = np.random.default_rng(0)
    ids = rng.integers(-5, NUM_ROWS + 5, many)
    if kind == "skewed":  # one id in half of the places
        ids = np.where(rng.random(many) < 0.5, 7, ids)
    elif kind == "in turn":  # all are different in a chunk
        ids = np.arange(many) % NUM_ROWS
    elif kind == "one":
        ids = np.full(many, 7)
    return jnp.asarray(ids, jnp.int32)


def rows_case(tx, kind, many, width=64):
    """The native call of a step on rows, its arguments and its results by XLA."""
    rng = np.random.default_rng(1)
    table = jnp.asarray(rng.normal(size=(NUM_ROWS, width)), jnp.float32)
    values = jnp.asarray(rng.normal(size=(many, width)), jnp.float32)
    grads = optzoo.SparseRows(ids_of(kind, many), values, NUM_ROWS)
    return case_of(tx, table, grads)


def leaves_case(tx, sizes, which=-1):
    rng = np.random.default_rng(2)
    draw = lambda: {f"p{n}": jnp.asarray(rng.normal(size=n), jnp.float32) for n in sizes}
    return case_of(tx, draw(), draw(), which)


def case_of(tx, params, grads, which=-1):
    tx = optax.with_extra_args_support(tx)
    probe, calls = native_calls(tx, params, grads)
    args, expected = probe(params, tx.init(params), grads)[which]
    call = calls[which]
    return call, [np.asarray(x) for x in args], expected


CLIPPED = optax.chain(optzoo.clip_by_global_norm(1.0), optzoo.lazy_adam(0.1))
MOMENTUM = optzoo.momentum(0.1, 0.9)  # whose update does not magnify the rounding of a sum
CASES = {
    "few ids": lambda: rows_case(optzoo.lazy_adam(0.1), "random", 3000),
    "many ids": lambda: rows_case(MOMENTUM, "in turn", 20_000, width=32),
    "skewed": lambda: rows_case(MOMENTUM, "skewed", 20_000, width=32),
    "one id": lambda: rows_case(MOMENTUM, "one", 20_000, width=32),
    "added": lambda: rows_case(optzoo.gradient_descent(0.1), "skewed", 17_000),
    "merged outside": lambda: rows_case(CLIPPED, "random", 3000),
    "norms": lambda: rows_case(optzoo.row_wise_lars(0.1), "skewed", 20_000),
    "sums": lambda: leaves_case(CLIPPED, [16, 4095, 65_537, 200_000], which=0),
    "leaves": lambda: leaves_case(optzoo.adam(0.1), [0, 1, 65_536, 65_537, 200_000]),
}


def results_of(case, pool=None):
    """The results of a call, on arrays that nothing may touch after it."""
    call, args, _ = case
    place, avals = compiled(call)
    arrays = [Guarded(x.shape, x.dtype, at_end=True) for x in (*args, *avals)]
    ins, outs = arrays[: len(args)], arrays[len(args) :]
    for x, y in zip(ins, args, strict=True):
        x.array[...] = y
    fields = {} if pool is None else pool.fields()
    call_as_xla(place, [x.array for x in ins], [x.array for x in outs], **fields)
    found = [x.array.copy() for x in outs[: len(call.outs)]]
    for x in arrays:
        x.check_surroundings()
        x.protect(0, x.length, 0)
    if pool is not None:
        pool.finish()
        assert pool.errors == 0  # each was destroyed
    return found


@pytest.fixture(scope="module")
def cases():
    return {name: make() for name, make in CASES.items()}


@pytest.mark.parametrize("name", CASES)
def test_results_are_the_same_bits_on_all_pools(cases, name):
    case = cases[name]
    alone = results_of(case)
    for a, b in zip(case[2], alone, strict=True):
        check_close(a, b, 2e-5)
    for how, size in HOWS:
        pool = Pool(how, size)
        for a, b in zip(alone, results_of(case, pool), strict=True):
            np.testing.assert_array_equal(a, b, err_msg=f"{how}, {size} threads")
        assert (pool.given > 0) == (how not in ("refused", "none")), how


def test_few_rows_and_small_arrays_ask_no_thread():
    small = [
        rows_case(optzoo.lazy_adam(0.1), "random", 200),
        leaves_case(optzoo.adam(0.1), range(1, 17)),
    ]
    for case in small:
        results_of(case, pool := Pool("threads", 4))
        assert pool.given == 0


def test_calls_at_the_same_time_share_a_pool_that_does_nothing(cases):
    pool, found = Pool("late", 8), {}
    run = lambda name: found.update({name: results_of(cases[name], pool)})
    pool.finish, finish = lambda: None, pool.finish
    threads = [threading.Thread(target=run, args=(name,)) for name in ("skewed", "leaves")]
    for each in (*(t.start for t in threads), *(t.join for t in threads), finish):
        each()
    for name, got in found.items():
        for a, b in zip(results_of(cases[name]), got, strict=True):
            np.testing.assert_array_equal(a, b)
    assert len(found) == 2


class _Used(ctypes.Structure):
    """``struct mallinfo2`` of the C library."""

    _fields_ = [(f"word{k}", ctypes.c_size_t) for k in range(10)]


@pytest.mark.parametrize("how", ["inline", "late", "refused"])
def test_what_threads_share_is_freed(cases, how):
    call, args, _ = cases["leaves"]
    place, avals = compiled(call)
    outs = [np.empty(x.shape, x.dtype) for x in avals]
    used = ctypes.CDLL(None).mallinfo2
    used.restype = _Used

    pool = Pool(how, 3)

    def memory(calls):
        for _ in range(calls):
            call_as_xla(place, args, outs, **pool.fields())
            pool.finish()
        gc.collect()
        return used().word7  # bytes in use

    memory(5)
    before = memory(1)
    assert memory(500) - before < 500 * 32  # of each call 48 bytes would be left


def test_chunks_are_merged_first_where_many_ids_are_equal(cases):
    """So an id in half of the places is the work of several threads."""
    for name, expected in {"many ids": 0, "skewed": 1, "one id": 1}.items():
        call, args, _ = cases[name]
        place, avals = compiled(call)
        outs = [np.empty(x.shape, x.dtype) for x in avals]
        call_as_xla(place, args, outs)
        counts = outs[len(call.outs)]
        assert counts[-1, 0] == expected, name
        left = counts[:-3, -1].sum()  # positions after the chunks are merged
        assert (left < 0.6 * 20_000) == bool(expected), (name, left)
