"""The structures of XLA's calls of native functions, and a check that they match jaxlib.

XLA guarantees to support a version of its FFI for a year. The structures are in its header
``xla/ffi/api/c_api.h``, which jaxlib installs, and are declared here as far as they are used.
"""

import ctypes
import functools
import pathlib
import re
from typing import Any

import jaxlib

_Pointer, _Size, _Int = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int32


class Extension(ctypes.Structure):
    """``XLA_FFI_InternalExtension``, before JAX 0.12 ``XLA_FFI_Extension_Base``."""

    _fields_ = [("struct_size", _Size), ("type", _Int), ("next", _Pointer)]


class Version(ctypes.Structure):
    """``XLA_FFI_Api_Version``."""

    _fields_ = [
        ("struct_size", _Size),
        ("extension_start", _Pointer),
        ("major_version", _Int),
        ("minor_version", _Int),
    ]


class Metadata(ctypes.Structure):
    """``XLA_FFI_Metadata``."""

    _fields_ = [("struct_size", _Size), ("api_version", Version), ("traits", _Int)]


class MetadataExtension(ctypes.Structure):
    """``XLA_FFI_Metadata_Extension``, by which XLA requests the version of a function."""

    _fields_ = [("extension_base", Extension), ("metadata", _Pointer)]


class Buffer(ctypes.Structure):
    """``XLA_FFI_Buffer``: an array."""

    _fields_ = [
        ("struct_size", _Size),
        ("extension_start", _Pointer),
        ("dtype", _Int),
        ("data", _Pointer),
        ("rank", ctypes.c_int64),
        ("dims", _Pointer),
    ]


class Args(ctypes.Structure):
    """``XLA_FFI_Args``."""

    _fields_ = [
        ("struct_size", _Size),
        ("extension_start", _Pointer),
        ("size", ctypes.c_int64),
        ("types", _Pointer),
        ("args", _Pointer),
    ]


class Rets(ctypes.Structure):
    """``XLA_FFI_Rets``."""

    _fields_ = [*Args._fields_[:-1], ("rets", _Pointer)]


class CallFrame(ctypes.Structure):
    """``XLA_FFI_CallFrame``."""

    _fields_ = [
        ("struct_size", _Size),
        ("extension_start", _Pointer),
        ("api", _Pointer),
        ("ctx", _Pointer),
        ("stage", _Int),
        ("args", Args),
        ("rets", Rets),
    ]


class Api(ctypes.Structure):
    """``XLA_FFI_Api``, up to the last function that is used. Others may have other names."""

    _fields_ = [
        ("struct_size", _Size),
        ("extension_start", _Pointer),
        ("api_version", Version),
        ("internal_api", _Pointer),
        *((f"_{k}", _Pointer) for k in range(2)),
        ("XLA_FFI_Error_Destroy", _Pointer),
        *((f"_{k}", _Pointer) for k in range(2, 10)),
        ("XLA_FFI_ThreadPool_Schedule", _Pointer),
        ("XLA_FFI_ThreadPool_NumThreads", _Pointer),
    ]


class Schedule(ctypes.Structure):
    """``XLA_FFI_ThreadPool_Schedule_Args``: a task for a thread of XLA's pool."""

    _fields_ = [
        ("struct_size", _Size),
        ("extension_start", _Pointer),
        ("ctx", _Pointer),
        ("task", _Pointer),
        ("data", _Pointer),
    ]


class NumThreads(ctypes.Structure):
    """``XLA_FFI_ThreadPool_NumThreads_Args``."""

    _fields_ = [
        ("struct_size", _Size),
        ("extension_start", _Pointer),
        ("ctx", _Pointer),
        ("num_threads", _Pointer),
    ]


class Destroy(ctypes.Structure):
    """``XLA_FFI_Error_Destroy_Args``."""

    _fields_ = [("struct_size", _Size), ("extension_start", _Pointer), ("error", _Pointer)]


EXECUTE = 3  # XLA_FFI_ExecutionStage_EXECUTE
_STRUCTS = {
    r"XLA_FFI_(?:InternalExtension|Extension_Base)": Extension,
    "XLA_FFI_Api_Version": Version,
    "XLA_FFI_Metadata": Metadata,
    "XLA_FFI_Metadata_Extension": MetadataExtension,
    "XLA_FFI_Buffer": Buffer,
    "XLA_FFI_Args": Args,
    "XLA_FFI_Rets": Rets,
    "XLA_FFI_CallFrame": CallFrame,
    "XLA_FFI_Api": Api,
    "XLA_FFI_ThreadPool_Schedule_Args": Schedule,
    "XLA_FFI_ThreadPool_NumThreads_Args": NumThreads,
    "XLA_FFI_Error_Destroy_Args": Destroy,
}
_KINDS: dict[str, Any] = {
    "size_t": _Size,
    "int64_t": ctypes.c_int64,
    "int": _Int,
    "XLA_FFI_DataType": _Int,
    "XLA_FFI_ExecutionStage": _Int,
    "XLA_FFI_Extension_Type": _Int,
    "XLA_FFI_InternalExtension_Type": _Int,
    "XLA_FFI_Handler_Traits": _Int,
}


class UnknownInterfaceError(RuntimeError):
    """The FFI of the installed jaxlib has an unknown version."""


@functools.cache
def version_of_jaxlib() -> tuple[int, int]:
    """The version of the FFI of the installed jaxlib, after a check of all structures.

    Raises:
        UnknownInterfaceError: if its header is missing or has other structures.
    """
    folder = jaxlib.__file__ and pathlib.Path(jaxlib.__file__).parent
    try:
        text = pathlib.Path(folder, "include/xla/ffi/api/c_api.h").read_text()
    except OSError as error:
        raise UnknownInterfaceError(f"jaxlib has no header of its FFI: {error}") from error
    return check_header(text)


def check_header(text: str) -> tuple[int, int]:
    """The version in a header; raises an error unless it has the structures above."""
    text = re.sub(r"//[^\n]*", "", text)
    text = re.sub(r"_XLA_FFI_API_STRUCT_FIELD\((\w+)\)", r"void* \1", text)
    for name, struct in _STRUCTS.items():
        expected = [(field[0], field[1]) for field in struct._fields_]
        found = _fields(name, text)
        is_any = lambda name: name.startswith("_")
        known = [
            (mine if is_any(mine) else name, kind)
            for (mine, _), (name, kind) in zip(expected, found, strict=False)
        ]
        if known != expected:
            raise UnknownInterfaceError(f"{name} of jaxlib is {found}, expected {expected}")
    if not re.search(rf"XLA_FFI_ExecutionStage_EXECUTE = {EXECUTE}\b", text):
        raise UnknownInterfaceError("the execution stage of jaxlib's FFI has another value")
    numbers = [re.search(rf"XLA_FFI_API_{part} (\d+)", text) for part in ("MAJOR", "MINOR")]
    major, minor = (int(number[1]) if number else -1 for number in numbers)
    if major != 0:
        raise UnknownInterfaceError(f"version {major}.{minor} of jaxlib's FFI, expected 0.x")
    return major, minor


def _fields(name: str, text: str) -> list[tuple[str, Any]]:
    """The fields of a structure of the header, each with its kind."""
    found = re.search(rf"struct {name}\s*{{(.*?)}}", text, re.DOTALL)
    fields = []
    for line in found[1].split(";") if found else ():
        if match := re.fullmatch(r"(.*?)(\**)\s*(\w+)", line.strip(), re.DOTALL):
            c_type, stars, field = match.groups()
            c_type = c_type.replace("struct ", "").replace("const ", "").strip()
            fields.append((field, _Pointer if stars else _kind(c_type)))
    return fields


def _kind(c_type: str) -> Any:
    for name, struct in _STRUCTS.items():
        if re.fullmatch(name, c_type):
            return struct
    return _KINDS.get(c_type, c_type)


# Calls without XLA


def call_as_xla(place: int, args: list[Any], rets: list[Any], **fields: Any) -> None:
    """Calls the function at an address with NumPy arrays, as XLA would.

    There are no other threads, unless ``fields`` of the call frame set a pool.
    """
    kept: list[Any] = []

    def pointers(arrays):
        buffers = []
        for a in arrays:
            dims = (ctypes.c_int64 * a.ndim)(*a.shape)
            at = ctypes.cast(dims, _Pointer)
            buffers.append(Buffer(ctypes.sizeof(Buffer), None, 0, a.ctypes.data, a.ndim, at))
            kept.append(dims)
        table = (_Pointer * len(buffers))(*map(ctypes.addressof, buffers))
        kept.extend([*buffers, table])
        return ctypes.cast(table, _Pointer)

    of = lambda kind, arrays: kind(ctypes.sizeof(kind), None, len(arrays), None, pointers(arrays))
    _call(place, args=of(Args, args), rets=of(Rets, rets), **fields)


def metadata_of(place: int) -> tuple[int, int]:
    """The FFI version that the function at an address returns to XLA."""
    metadata = Metadata(ctypes.sizeof(Metadata))
    size = ctypes.sizeof(MetadataExtension)
    base = Extension(ctypes.sizeof(Extension), 1, None)
    extension = MetadataExtension(base, ctypes.addressof(metadata))
    extension.extension_base.struct_size = size
    _call(place, extension_start=ctypes.addressof(extension))
    return metadata.api_version.major_version, metadata.api_version.minor_version


def _call(place: int, **fields: Any) -> None:
    frame = CallFrame(ctypes.sizeof(CallFrame), stage=EXECUTE, **fields)
    function = ctypes.CFUNCTYPE(_Pointer, _Pointer)(place)
    if error := function(ctypes.addressof(frame)):
        raise RuntimeError(f"a native function returned the error {error:#x}")
