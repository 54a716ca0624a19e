"""All tests run strictly (no rank promotion, warnings are errors) on eight devices."""

import contextlib
import gc
import os
import pathlib
import sys
import threading

import jax
import pytest

from optzoo import CATALOG
from optzoo.testing import samples

from . import costs
from .costs import (  # noqa: F401 (hooks)
    pytest_addoption,
    pytest_runtest_makereport,
    pytest_runtest_protocol,
    pytest_terminal_summary,
)
from .progress import Progress
from .selection import KINDS, select

os.environ["KERAS_BACKEND"] = "jax"  # read when keras is imported
# The threads of XLA. By default as many as devices: a step with collectives may then wait forever
# for one that is taken by an operation outside of ``jit``.
os.environ.setdefault("NPROC", "16")
if jax.__version_info__[:2] == (0, 10):  # its other code generator compiles three times faster
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_use_fusion_emitters=false"
    )
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_traceback_filtering", "off")  # it takes a third of the time of an error

# Compiled programs are kept in the environment, for all workers and runs. The variables of JAX
# take precedence; processes that tests start inherit them.
PROGRAMS = pathlib.Path(sys.prefix, "jax_programs")
LIMIT = 2**29  # bytes; a run of all tests leaves about a fifth
for name, value in {
    "jax_compilation_cache_dir": str(PROGRAMS),
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}.items():
    chosen = os.environ.setdefault(name.upper(), str(value))
    jax.config.update(name, type(value)(chosen))


@pytest.hookimpl(trylast=True)  # after there is a reporter
def pytest_configure(config):
    """Shows the progress. A cached program that cannot be read or written is compiled."""
    if not hasattr(config, "workerinput") and config.pluginmanager.has_plugin("terminalreporter"):
        config.pluginmanager.register(Progress(config))
    message = "Error (reading|writing) persistent compilation cache"
    config.addinivalue_line("filterwarnings", f"default:{message}")


def pytest_sessionstart(session):
    """Removes the least recently read programs, down to the limit."""
    if hasattr(session.config, "workerinput"):
        return  # a worker of pytest-xdist
    files = []
    for path in PROGRAMS.glob("*-cache"):
        with contextlib.suppress(FileNotFoundError):  # another run has removed it
            files.append((path, path.stat()))
    left = LIMIT
    for path, stat in sorted(files, key=lambda file: file[1].st_atime, reverse=True):
        left -= stat.st_size
        if left < 0:
            path.unlink(missing_ok=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Removes tests that do not apply, rather than skipping them; marks slow tests."""
    config.hook.pytest_deselected(items=select(items))


def pytest_collection_finish(session):
    """Freezes existing objects, so that garbage collection is faster and less frequent."""
    gc.freeze()
    gc.set_threshold(50_000)


@pytest.fixture(params=[*KINDS, *sorted(CATALOG.keys() - {*KINDS})], scope="module")
def entry(request):
    """Each optimizer of the catalogue, with a step count where it needs one."""
    entry = CATALOG[request.param]
    return entry._replace(factory=samples.factory(entry))


def _reused(make_context, times=50):
    """Makes an MLIR context, which takes 3 ms, for several programs, as JAX does from 0.12.

    Not in threads of XLA, in which it partitions a program while it compiles.
    """
    kept = []

    def context():
        if threading.current_thread() is not threading.main_thread():
            return make_context()
        if not kept:
            kept.extend([make_context()] * times)
        return kept.pop()

    return context


@pytest.fixture(autouse=True)
def few_programs(request):
    """Clears compiled programs when there are many, checked after a number of new ones.

    Each has 3 to 20 memory mappings. Linux allows 65,530 per process, which crashes beyond. Lowered
    programs are cleared after each test: JAX before 0.12 keeps their MLIR contexts, which slow down
    later programs (tenfold after thousands).
    """
    yield
    for cache in LOWERED:
        cache.cache_clear()
    stash, compiled = request.config.stash, costs.programs()
    if compiled - stash.get(LOOKED, 0) < 200:
        return
    stash[LOOKED] = compiled
    maps = pathlib.Path("/proc/self/maps")
    if not maps.exists() or maps.read_bytes().count(b"\n") > 40_000:
        jax.clear_caches()
        gc.collect()


LOOKED = pytest.StashKey[int]()
LOWERED = []
if jax.__version_info__ < (0, 12):
    from jax._src import pjit
    from jax._src.interpreters import mlir, pxla

    LOWERED = [pxla._cached_lowering_to_hlo, pjit._pjit_lower]
    mlir.make_ir_context = _reused(mlir.make_ir_context)


@pytest.fixture(autouse=True)
def optimizations(request):
    """Compiles with fewer optimizations, except in tests with the mark ``optimized``.

    Operations also do not store the stack frames of pytest.
    """
    quickly = request.node.get_closest_marker("optimized") is None
    jax.config.update("jax_disable_most_optimizations", quickly)
    jax.config.update("jax_traceback_in_locations_limit", 1 if quickly else FRAMES)


FRAMES = jax.config.jax_traceback_in_locations_limit


@pytest.fixture
def x64():
    """A context manager in which float64 is, or is not, available."""

    @contextlib.contextmanager
    def context(enabled):
        before = jax.config.jax_enable_x64
        jax.config.update("jax_enable_x64", enabled)
        try:
            yield
        finally:
            jax.config.update("jax_enable_x64", before)

    return context
