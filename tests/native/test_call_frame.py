"""The structures of XLA's FFI are those of the installed jaxlib."""

import pathlib

import jaxlib
import pytest

from optzoo.native.call_frame import UnknownInterfaceError, check_header, version_of_jaxlib

HEADER = pathlib.Path(jaxlib.__file__).parent / "include/xla/ffi/api/c_api.h"


def test_the_installed_header_is_known():
    assert version_of_jaxlib() == check_header(HEADER.read_text()) >= (0, 1)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("int64_t rank;", "int32_t rank;"),
        ("  void* data;\n  int64_t rank;", "  int64_t rank;\n  void* data;"),
        ("  XLA_FFI_ExecutionStage stage;\n  XLA_FFI_Args args;", "  XLA_FFI_Args args;"),
        ("ExecutionStage_EXECUTE = 3", "ExecutionStage_EXECUTE = 4"),
        ("XLA_FFI_API_MAJOR 0", "XLA_FFI_API_MAJOR 1"),
        ("int minor_version;", "int64_t minor_version;"),
        ("  XLA_FFI_Task* task;\n  void* data;", "  void* data;\n  XLA_FFI_Task* task;"),
        ("_FIELD(XLA_FFI_ThreadPool_Schedule);", "_FIELD(XLA_FFI_ThreadPool_Start);"),
        ("_FIELD(XLA_FFI_Stream_Get);", "_FIELD(XLA_FFI_Stream_Get);\n  void* one_more;"),
        ("  int64_t* num_threads;", "  int64_t num_threads;"),
        ("struct XLA_FFI_Rets {", "struct XLA_FFI_Results {"),
    ],
)
def test_another_header_is_not(old, new):
    text = HEADER.read_text()
    assert old in text
    with pytest.raises(UnknownInterfaceError):
        check_header(text.replace(old, new))
