"""The function that XLA calls, in LLVM IR: it reads a call frame."""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from ..jaxprs.graph import Value
from .call_frame import EXECUTE, Args, Buffer, CallFrame, Metadata, MetadataExtension, Rets, Version
from .loops import POINTER, SCALAR, ZERO, complete_hints, loop, variable, word_at
from .operations import BOOL, I8, I32, I64, bytes_of, load


class Frame:
    """The arguments that XLA passes."""

    def __init__(self, b: ir.IRBuilder, pointer: Any):
        self.b, self.pointer = b, pointer

    def field(self, t: Any, pointer: Any, *fields: Any) -> Any:
        """A field of a structure; ``fields`` is a path of descriptors of structures."""
        offset = sum(field.offset for field in fields)
        return self.b.load(self.b.gep(pointer, [I64(offset)], source_etype=I8), typ=t)

    def argument(self, i: Any) -> Any:
        """The buffer of an argument."""
        table = self.field(POINTER, self.pointer, CallFrame.args, Args.args)
        return word_at(self.b, POINTER, table, i)

    def result(self, i: Any) -> Any:
        """The buffer of a result."""
        table = self.field(POINTER, self.pointer, CallFrame.rets, Rets.rets)
        return word_at(self.b, POINTER, table, i)

    def data(self, buffer: Any) -> Any:
        """The memory of a buffer."""
        return self.field(POINTER, buffer, Buffer.data)

    def size(self, buffer: Any) -> Any:
        """The number of elements of a buffer."""
        dims = self.field(POINTER, buffer, Buffer.dims)
        total = variable(self.b, I64)
        self.b.store(I64(1), total)
        with loop(self.b, self.field(I64, buffer, Buffer.rank), **SCALAR) as i:
            self.b.store(
                self.b.mul(self.b.load(total, typ=I64), word_at(self.b, I64, dims, i)), total
            )
        return self.b.load(total, typ=I64)

    def length(self, buffer: Any, axis: int = 0) -> Any:
        """A dimension of a buffer."""
        return word_at(self.b, I64, self.field(POINTER, buffer, Buffer.dims), I64(axis))

    def scalars(self, start: int, values: Sequence[Value]) -> list[Any]:
        """Scalars, the arguments from ``start``."""
        data = lambda i: self.data(self.argument(I64(i)))
        return [load(self.b, v.dtype, data(start + k), ZERO) for k, v in enumerate(values)]

    def keep(self, dtype: str, argument: Any, result: Any) -> None:
        """Copies arguments to results that should share their memory, unless they do."""
        source, target = self.data(argument), self.data(result)
        with self.b.if_then(self.b.icmp_unsigned("!=", source, target), likely=False):
            size = self.b.mul(self.size(result), I64(bytes_of(dtype)))
            copy = self.b.module.declare_intrinsic("llvm.memcpy", [POINTER, POINTER, I64])
            self.b.call(copy, [target, source, size, BOOL(0)])


class Members:
    """The arguments and results of a call for several groups, which share its first arguments.

    Args:
        shared: the number of arguments that all share.
        ins: the number of further arguments of each.
        outs: the number of results of each.
    """

    def __init__(self, shared: int, ins: int, outs: int):
        self.shared, self.ins, self.outs = shared, ins, outs

    def argument(self, frame: Frame, k: Any, i: int) -> Any:
        """The buffer of one of the further arguments of a group."""
        b = frame.b
        return frame.argument(b.add(b.mul(k, I64(self.ins)), I64(self.shared + i)))

    def result(self, frame: Frame, k: Any, i: int) -> Any:
        """The buffer of one of the results of a group."""
        return frame.result(frame.b.add(frame.b.mul(k, I64(self.outs)), I64(i)))


def module_of(
    name: str, version: tuple[int, int], execute: Callable[[ir.Module, Frame], None]
) -> str:
    """The text of a module with one function that XLA can call."""
    module = ir.Module(name)
    function = ir.Function(module, ir.FunctionType(POINTER, [POINTER]), name)
    b = ir.IRBuilder(function.append_basic_block("entry"))
    frame = Frame(b, function.args[0])
    extension = frame.field(POINTER, frame.pointer, CallFrame.extension_start)
    null = POINTER(None)
    with b.if_then(b.icmp_unsigned("!=", extension, null), likely=False):
        # XLA asks for the version and the traits before it calls the function.
        metadata = frame.field(POINTER, extension, MetadataExtension.metadata)
        api, (major, minor) = Metadata.api_version.offset, version
        for offset, value in (
            (api + Version.major_version.offset, major),
            (api + Version.minor_version.offset, minor),
            (Metadata.traits.offset, 0),
        ):
            b.store(I32(value), b.gep(metadata, [I64(offset)], source_etype=I8))
        b.ret(null)
    stage = frame.field(I32, frame.pointer, CallFrame.stage)
    with b.if_then(b.icmp_signed("==", stage, I32(EXECUTE))):
        execute(module, frame)
    b.ret(null)
    return complete_hints(str(module))


def inner_function(module: ir.Module, name: str, types: Sequence[Any]) -> tuple[Any, Any]:
    """An inner function of the module whose pointers do not alias."""
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), types), name)
    function.linkage = "internal"
    for argument in function.args:
        if argument.type == POINTER:
            argument.add_attribute("noalias")
    return function, ir.IRBuilder(function.append_basic_block("entry"))
