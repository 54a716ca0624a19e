"""Every test runs strictly (ranks are not promoted, warnings are errors) on eight devices."""

import contextlib
import gc
import os
import pathlib
import sys

import jax
import pytest

from optzoo import CATALOG
from optzoo.testing import samples

from .costs import (  # noqa: F401 (hooks)
    pytest_runtest_makereport,
    pytest_runtest_protocol,
    pytest_terminal_summary,
)
from .selection import mark_costly

os.environ["KERAS_BACKEND"] = "jax"  # read when keras is imported
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")

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

# The conformance tests that do not apply.
EXCEPT = {
    # A norm of all parameters flattened into one is another norm.
    "tests/test_contract.py::test_flatten[lars]",
    "tests/test_contract.py::test_flatten[normalized_sgd]",
    # Flattened, every element is a row.
    "tests/test_contract.py::test_flatten[counter_row_wise_adagrad]",
    "tests/test_contract.py::test_flatten[cowclip_row_wise_adagrad]",
    "tests/test_contract.py::test_flatten[global_decay_row_wise_adagrad]",
    "tests/test_contract.py::test_flatten[lamb]",
    "tests/test_contract.py::test_flatten[partial_row_wise_adam]",
    "tests/test_contract.py::test_flatten[partial_row_wise_lamb]",
    "tests/test_contract.py::test_flatten[row_wise_adagrad]",
    "tests/test_contract.py::test_flatten[row_wise_lars]",
    "tests/test_contract.py::test_flatten[row_wise_rmsprop]",
    # The rule of LARS for rows is another: momentum.
    "tests/test_contract.py::test_rows_equal_the_dense_gradient_where_they_touch[lars]",
    "tests/test_contract.py::test_rows_of_other_ranks[lars]",
    # A tensor flattened into a vector has one large matrix in the place of one for each dimension.
    "tests/test_contract.py::test_flatten[shampoo]",
    # And with SOAP a vector takes Adam's steps.
    "tests/test_contract.py::test_flatten[soap]",
    # These look into slots that have the shape of the parameter; of its dimensions there are
    # tuples of matrices. tests/second_order/test_shampoo.py has the same for them.
    "tests/test_contract.py::test_no_gradient_no_change[blocked_shampoo]",
    "tests/test_contract.py::test_no_gradient_no_change[shampoo]",
    "tests/test_contract.py::test_no_gradient_no_change[soap]",
    "tests/test_contract.py::test_rows_equal_the_dense_gradient_where_they_touch[blocked_shampoo]",
    "tests/test_contract.py::test_rows_equal_the_dense_gradient_where_they_touch[shampoo]",
    "tests/test_contract.py::test_rows_equal_the_dense_gradient_where_they_touch[soap]",
    "tests/test_contract.py::test_untouched_rows[blocked_shampoo]",
    "tests/test_contract.py::test_untouched_rows[shampoo]",
    "tests/test_contract.py::test_untouched_rows[soap]",
    # GGT sees all parameters as one vector, on purpose: what is done to a part of them is another
    # problem, and NaN is everywhere. Its window has one more axis.
    "tests/test_contract.py::test_composes_with_optax[ggt-partition]",
    "tests/test_contract.py::test_composes_with_optax_on_rows[ggt]",
    "tests/test_contract.py::test_masked_leaves_pass[ggt]",
    "tests/test_contract.py::test_nan_stays_in_its_leaf[ggt-dense]",
    "tests/test_contract.py::test_nan_stays_in_its_leaf[ggt-rows]",
    "tests/test_contract.py::test_no_gradient_no_change[ggt]",
    "tests/test_contract.py::test_untouched_rows[ggt]",
    # tests/second_order/test_ggt.py has one for the window and the Gram matrix.
    "tests/test_sharding.py::test_sharded[ggt-dense]",
    "tests/test_sharding.py::test_sharded[ggt-rows]",
    # Counters stay in float32: in 16 bits they would end at 256.
    "tests/wrappers/test_slots_dtype.py::test_slots_keep_their_dtype[counter_row_wise_adagrad-float32-bfloat16]",
    "tests/wrappers/test_slots_dtype.py::test_slots_keep_their_dtype[cowclip_row_wise_adagrad-float32-bfloat16]",
    "tests/wrappers/test_slots_dtype.py::test_slots_keep_their_dtype[global_decay_row_wise_adagrad-float32-bfloat16]",
    "tests/wrappers/test_slots_dtype.py::test_slots_keep_their_dtype[row_wise_rmsprop-float32-bfloat16]",
    # Statistics stay in float32, as tests/second_order/test_shampoo.py says.
    "tests/wrappers/test_slots_dtype.py::test_slots_keep_their_dtype[blocked_shampoo-float32-bfloat16]",
    "tests/wrappers/test_slots_dtype.py::test_slots_keep_their_dtype[shampoo-float32-bfloat16]",
    "tests/wrappers/test_slots_dtype.py::test_slots_keep_their_dtype[soap-float32-bfloat16]",
}


def pytest_configure(config):
    """A program that cannot be read, or written, is compiled: no error, but no gain either."""
    message = "Error (reading|writing) persistent compilation cache"
    config.addinivalue_line("filterwarnings", f"default:{message}")


def pytest_sessionstart(session):
    """Removes the programs that were read longest ago, down to the limit."""
    if hasattr(session.config, "workerinput"):
        return  # a worker of pytest-xdist
    files = [(path, path.stat()) for path in PROGRAMS.glob("*-cache")]
    left = LIMIT
    for path, stat in sorted(files, key=lambda file: file[1].st_atime, reverse=True):
        left -= stat.st_size
        if left < 0:
            path.unlink(missing_ok=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Takes out what does not apply, rather than to skip it at run time; marks long tests."""
    mark_costly(items)
    out = [item for item in items if item.nodeid in EXCEPT]
    items[:] = [item for item in items if item.nodeid not in EXCEPT]
    config.hook.pytest_deselected(items=out)


@pytest.fixture(params=sorted(CATALOG))
def entry(request):
    """Each optimizer of the catalogue in turn, with a step count where it needs one."""
    entry = CATALOG[request.param]
    return entry._replace(factory=samples.factory(entry))


@pytest.fixture(autouse=True, scope="module")
def few_programs():
    """Forgets compiled programs when there are many.

    Each has its own parts of memory. Linux allows a process 65,530; beyond that it crashes.
    """
    yield
    maps = pathlib.Path("/proc/self/maps")
    if not maps.exists() or maps.read_bytes().count(b"\n") > 15_000:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(autouse=True)
def optimizations(request):
    """Compiles quickly, with fewer optimizations, but for tests with the mark ``optimized``."""
    quickly = request.node.get_closest_marker("optimized") is None
    jax.config.update("jax_disable_most_optimizations", quickly)


@pytest.fixture
def x64():
    """A context in which float64 is, or is not, available."""

    @contextlib.contextmanager
    def context(enabled):
        before = jax.config.jax_enable_x64
        jax.config.update("jax_enable_x64", enabled)
        try:
            yield
        finally:
            jax.config.update("jax_enable_x64", before)

    return context
