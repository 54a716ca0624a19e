"""Whether native code can run on this machine."""

import functools
import importlib.util
import platform
import sys

import jax
import numpy as np

from ..core.extras import how_to_install
from ..core.warn import warn

_PLATFORMS = {("linux", "x86_64"), ("linux", "aarch64")}


@functools.cache
def problem() -> str | None:
    """The reason why native code cannot run; None if it can.

    Compares the structures of XLA's FFI with the header of jaxlib, and compiles and calls a small
    function, once per process.
    """
    here = sys.platform, platform.machine()
    if here not in _PLATFORMS:
        return f"native code does not support {here[0]} {here[1]}"
    if importlib.util.find_spec("llvmlite") is None:
        return f"llvmlite is missing: {how_to_install('native')}"
    try:
        test_itself()
    except Exception as error:  # whatever is wrong: XLA can do the same
        return f"native code does not work on this machine: {type(error).__name__}: {error}"
    return None


def has_half() -> bool:
    """Whether native code for the processor of this machine can convert float16."""
    if problem() is not None:
        return True  # there is none
    from . import machine

    return machine.has_half()


@functools.cache
def warn_once(reason: str) -> None:
    """Warns that XLA replaces native code."""
    warn(f"{reason}. XLA computes the same", RuntimeWarning)


def test_itself() -> None:
    """Raises an error unless a small native function, called like XLA would, is correct."""
    from . import machine
    from .call_frame import call_as_xla, metadata_of, version_of_jaxlib
    from .groups import LeafGroup, read_program
    from .leaf_kernel import leaf_kernel

    aval = lambda *shape: jax.ShapeDtypeStruct(shape, np.float32)
    program = read_program(
        jax.make_jaxpr(lambda s, x, g: x - s * g)(aval(), aval(3), aval(3)).jaxpr
    )
    s, x, g = program.inputs
    leaf = LeafGroup([s, x, g], program.results, program.operations, {1: 0}, [s], [x, g])
    version = version_of_jaxlib()
    place = machine.address(lambda name: leaf_kernel(name, leaf, version))[1]
    if (found := metadata_of(place)) != version:
        raise RuntimeError(f"a native function returned version {found} instead of {version}")
    numbers = [np.array(a, np.float32) for a in (2.0, [1.0, 2.0, 3.0], [0.5, 0.25, -1.0])]
    result = numbers[1]  # in place
    call_as_xla(place, numbers, [result])
    if result.tolist() != [0.0, 1.5, 5.0]:
        raise RuntimeError(f"a native function returned {result} instead of [0, 1.5, 5]")
