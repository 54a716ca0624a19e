"""Tasks for the threads of XLA's own pool, in LLVM IR.

The calling thread participates, and can run all tasks itself, so it never waits for busy threads of
the pool, and calls of several devices share the pool.
"""

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

from llvmlite import ir

from .call_frame import Api, CallFrame, Destroy, NumThreads, Schedule
from .handler import Frame
from .loops import POINTER, ZERO, loop, memory, repeat, variable
from .operations import I8, I32, I64, smaller

# What threads share, in words of 64 bits: the next task, how many are done, how many threads will
# still look at this memory, the number of tasks, and the frame of the call.
_NEXT, _DONE, _OWNERS, _MANY, _FRAME = range(5)
_WORDS = 5


def in_parallel(
    frame: Frame, name: str, many: Any, is_worth: Any, write: Callable[[Frame, Any], None]
) -> None:
    """Runs ``many`` tasks, in any order, on any threads; returns when all are finished.

    Args:
        frame: the frame of the call.
        name: the name of the functions in the module.
        many: the number of tasks.
        is_worth: whether to use other threads.
        write: writes a task, given the frame of the call and the index of the task.
    """
    b = frame.b
    work, task = _functions(frame.b.module, name, write)
    alone = memory(b, 8 * _WORDS)
    place = variable(b, POINTER)
    b.store(alone, place)
    helpers = variable(b, I64)
    b.store(ZERO, helpers)
    with b.if_then(b.and_(is_worth, b.icmp_signed(">", many, I64(1)))):
        others = b.sub(smaller(b, _threads(frame), many), I64(1))
        with b.if_then(b.icmp_signed(">", others, ZERO)):
            common = b.call(_from_c(b.module, "malloc", POINTER, [I64]), [I64(8 * _WORDS)])
            with b.if_then(b.icmp_unsigned("!=", common, POINTER(None))):
                b.store(common, place)
                b.store(others, helpers)
    shared, others = b.load(place, typ=POINTER), b.load(helpers, typ=I64)
    for word, value in ((_NEXT, ZERO), (_DONE, ZERO), (_OWNERS, b.add(others, I64(1)))):
        b.store(value, _word(b, shared, word))
    b.store(many, _word(b, shared, _MANY))
    b.store(frame.pointer, _word(b, shared, _FRAME))
    with loop(b, others):
        fields = {Schedule.task: task, Schedule.data: shared}
        refused = _ask(frame, Api.XLA_FFI_ThreadPool_Schedule, Schedule, fields)
        with b.if_then(refused):
            _count(b, shared, _OWNERS, -1)
    b.call(work, [shared])
    pause = _from_c(b.module, "sched_yield", I32, [])
    done = lambda _: b.icmp_signed(
        "==", b.load_atomic(_word(b, shared, _DONE), "acquire", 8, typ=I64), many
    )
    repeat(b, ZERO, done, lambda i: (b.call(pause, []), i)[1])
    with b.if_then(b.icmp_unsigned("!=", shared, alone)):
        _release(b, shared)


def _functions(
    module: ir.Module, name: str, write: Callable[[Frame, Any], None]
) -> tuple[ir.Function, ir.Function]:
    """The function that runs tasks until none is left, and its variant for a thread of the pool."""
    kind = ir.FunctionType(ir.VoidType(), [POINTER])
    work, task = (ir.Function(module, kind, f"{name}_{part}") for part in ("work", "task"))
    for function in (work, task):
        function.linkage = "internal"
    b = ir.IRBuilder(work.append_basic_block("entry"))
    (shared,) = work.args
    many = b.load(_word(b, shared, _MANY), typ=I64)
    inner = Frame(b, b.load(_word(b, shared, _FRAME), typ=POINTER))

    def do(i):
        write(inner, i)
        _count(b, shared, _DONE, 1)
        return _count(b, shared, _NEXT, 1)

    repeat(b, _count(b, shared, _NEXT, 1), lambda i: b.icmp_signed(">=", i, many), do)
    b.ret_void()
    b = ir.IRBuilder(task.append_basic_block("entry"))
    b.call(work, task.args)
    _release(b, task.args[0])
    b.ret_void()
    return work, task


def _threads(frame: Frame) -> Any:
    """The number of threads of the pool; 1 without a pool."""
    b, found = frame.b, memory(frame.b, 8)
    b.store(I64(1), found)
    api = frame.field(POINTER, frame.pointer, CallFrame.api)
    with b.if_then(b.icmp_unsigned("!=", api, POINTER(None))):
        fields = {NumThreads.num_threads: found}
        with b.if_then(_ask(frame, Api.XLA_FFI_ThreadPool_NumThreads, NumThreads, fields)):
            b.store(I64(1), found)
    return b.load(found, typ=I64)


def _ask(frame: Frame, function: Any, kind: type, fields: Mapping[Any, Any]) -> Any:
    """Calls a function of XLA with a structure; returns whether it failed."""
    b, of_xla = frame.b, ir.FunctionType(POINTER, [POINTER]).as_pointer()
    api = frame.field(POINTER, frame.pointer, CallFrame.api)
    ctx = frame.field(POINTER, frame.pointer, CallFrame.ctx)

    def call(function, kind, fields):
        args = memory(b, ctypes.sizeof(kind))
        fixed = {kind.struct_size: I64(ctypes.sizeof(kind)), kind.extension_start: POINTER(None)}
        for field, value in {**fixed, **fields}.items():
            b.store(value, b.gep(args, [I64(field.offset)], source_etype=I8))
        return b.call(frame.field(of_xla, api, function), [args])

    error = call(function, kind, {kind.ctx: ctx, **fields})
    failed = b.icmp_unsigned("!=", error, POINTER(None))
    with b.if_then(failed, likely=False):
        call(Api.XLA_FFI_Error_Destroy, Destroy, {Destroy.error: error})
    return failed


def _release(b: ir.IRBuilder, shared: Any) -> None:
    last = b.icmp_signed("==", _count(b, shared, _OWNERS, -1), I64(1))
    with b.if_then(last):
        b.call(_from_c(b.module, "free", ir.VoidType(), [POINTER]), [shared])


def _word(b: ir.IRBuilder, shared: Any, word: int) -> Any:
    return b.gep(shared, [I64(word)], source_etype=I64)


def _count(b: ir.IRBuilder, shared: Any, word: int, by: int) -> Any:
    """Atomically adds to a word; returns its previous value."""
    return b.atomic_rmw("add", _word(b, shared, word), I64(by), "acq_rel")


def _from_c(module: ir.Module, name: str, result: Any, args: list[Any]) -> ir.Function:
    """A function of the C library."""
    found = module.globals.get(name)
    return found or ir.Function(module, ir.FunctionType(result, args), name)
