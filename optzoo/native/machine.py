"""Compiles kernels for the processor of this machine, and registers them with XLA."""

import ctypes
import functools
import hashlib
import struct
import threading
from collections.abc import Callable
from typing import Any

import jax
import llvmlite.binding as llvm

_lock = threading.Lock()
_compiled: dict[str, Any] = {}  # by name; for as long as the process, since XLA has the addresses


class Machine:
    """A target of LLVM."""

    def __init__(self, triple: str | None = None, cpu: str = "", features: str = ""):
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()
        target = llvm.Target.from_triple(triple or llvm.get_process_triple())
        self.machine = target.create_target_machine(cpu=cpu, features=features, opt=3, jit=True)

    def optimize(self, text: str) -> Any:
        """The module of a text, optimized."""
        module = llvm.parse_assembly(text)
        module.triple = self.machine.triple
        module.data_layout = str(self.machine.target_data)
        module.verify()
        options = llvm.create_pipeline_tuning_options(speed_level=3)
        builder = llvm.create_pass_builder(self.machine, options)
        builder.getModulePassManager().run(module, builder)
        return module

    def compile(self, text: str) -> Any:
        """The engine with the machine code of a text.

        Raises:
            RuntimeError: if it calls a library, since a missing symbol would end the process.
        """
        code = self.machine.emit_object(self.optimize(text))
        if missing := undefined_symbols(code) - _EVERYWHERE:
            raise RuntimeError(f"the machine code calls {sorted(missing)}")
        engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), self.machine)
        engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        engine.finalize_object()
        return engine


_EVERYWHERE = {"memcpy", "memmove", "memset", "malloc", "free", "sched_yield"}  # of the C library
_SYMBOL_TABLE = 2  # SHT_SYMTAB of ELF


def undefined_symbols(code: bytes) -> set[str]:
    """The names that an object file in 64-bit ELF format imports."""
    (sections,) = struct.unpack_from("<Q", code, 40)
    size, many = struct.unpack_from("<HH", code, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", code, sections + k * size) for k in range(many)]
    found = set()
    for _, kind, _, _, start, length, names, _, _, step in headers:
        for at in range(start, start + length, step) if kind == _SYMBOL_TABLE else ():
            name, _, _, section = struct.unpack_from("<IBBH", code, at)
            if name and not section:
                place = headers[names][4] + name
                found.add(code[place : code.index(b"\0", place)].decode())
    return found


@functools.cache
def has_half() -> bool:
    """Whether the processor has instructions to convert float16."""
    features = llvm.get_host_cpu_features()
    return "x86_64" not in llvm.get_process_triple() or features.get("f16c", False)


@functools.cache
def _this_machine() -> Machine:
    names = llvm.get_host_cpu_features().flatten()
    return Machine(cpu=llvm.get_host_cpu_name(), features=names)


_PLACE = "optzoo_native"  # the name of the function in the text before it has its own


def address(write: Callable[[str], str]) -> tuple[str, int]:
    """The name and the address of a kernel.

    Args:
        write: returns its text, given its name.
    """
    text = write(_PLACE)
    name = f"{_PLACE}_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    with _lock:
        if name not in _compiled:
            _compiled[name] = _this_machine().compile(text)
        return name, _compiled[name].get_function_address(_PLACE)


_registered: set[str] = set()


def register(write: Callable[[str], str]) -> str:
    """Compiles a new kernel and registers it with XLA; returns its name."""
    name, place = address(write)
    with _lock:
        if name not in _registered:
            handler = ctypes.CFUNCTYPE(ctypes.c_void_p)(place)
            jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(handler), platform="cpu")
            _registered.add(name)
    return name
