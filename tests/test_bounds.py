"""Each number of a module that bounds something has a test at its ends; a new one is seen."""

import ast
import pathlib

import optzoo

TESTS = pathlib.Path(__file__).parent
PACKAGE = pathlib.Path(optzoo.__file__).parent

# Where each is tested: before it, at it and beyond it.
TESTED = {
    "compiled/hlo.py:NO_ESTIMATE": "compiled/test_hlo.py::test_cycles_beside_a_collective",
    "compiled/report.py:_LISTED": "compiled/test_report.py::test_ten_of_each_are_shown",
    "compiled/report.py:_SMALL": "compiled/test_report.py::test_the_smallest_table",
    "compiled/requirements.py:_SHARE": "compiled/test_report.py::test_five_percent_more",
    "core/lines.py:_LANES _WASTE": "sparse/test_lines.py::test_shapes",
    "distributed/engine/collectives.py:BUCKET_BYTES BUCKET_LEAVES": (
        "distributed/test_degenerate.py::test_buckets"
    ),
    "distributed/engine/few_bits.py:BLOCK": (
        "distributed/test_degenerate.py::test_sizes_of_what_is_sent"
    ),
    "host/arrays.py:CHUNK": "host/test_values.py::test_tables_in_chunks",
    "host/cache_map.py:AGE": "host/test_cache_map.py::test_what_was_frequent_once_leaves",
    "host/cache_map.py:_MOST": "host/test_cache_map.py::test_counts_do_not_overflow",
    "host/cache_map.py:_BLOCK": "host/test_cache_map.py::test_places_in_blocks",
    "host/exchange.py:_LEAST": "host/test_values.py::test_few_programs",
    "native/division.py:MOST_LEAVES": "native/test_bounds.py::test_numbers_of_arrays",
    "native/leaf_kernel.py:_SHORT _KEPT": "native/test_bounds.py::test_lengths_of_groups",
    "native/loops.py:_MASKED": "native/test_bounds.py::test_widths_of_loops_with_a_mask",
    "native/merging.py:AHEAD": "native/test_bounds.py::test_numbers_of_rows",
    "native/merging.py:_LINE _MOST_LINES": (
        "native/test_bounds.py::test_widths_of_rows_that_are_fetched_ahead"
    ),
    "native/merging.py:_SAMPLED": "native/test_bounds.py::test_numbers_of_ids_that_repeat",
    "native/norms.py:_FEWEST": "native/test_bounds.py::test_sizes_of_arrays_with_a_norm",
    "native/rows_kernel.py:_BLOCK _NBYTES": "native/test_bounds.py::test_numbers_of_rows",
    "native/rows_kernel.py:_CHUNKS": "native/test_bounds.py::test_numbers_of_ids_that_repeat",
    "native/scratch.py:CHUNK _PART": "native/test_bounds.py::test_numbers_of_ids_that_repeat",
    "native/scratch.py:_MOST_PARTS": "native/test_bounds.py::test_the_greatest_number_of_parts",
    "native/sum_kernel.py:_TASK": "native/test_bounds.py::test_sizes_of_arrays_with_a_norm",
    "native/leaf_kernel.py:_BLOCK _MANY": (
        "native/test_pool.py::test_results_are_the_same_bits_on_all_pools"
    ),
    "native/scratch.py:SUMMED": "native/test_pool.py::test_results_are_the_same_bits_on_all_pools",
    "native/tpu_kernel.py:_BLOCK": "native/test_tpu_kernel.py::test_numbers_of_ids",
    "train/sharded.py:SMALL": "sharded/test_messages.py::test_small_messages_are_not_measured",
    "second_order/muon.py:MOST_STEPS": "second_order/test_muon.py::test_the_most_steps",
    "second_order/shampoo/refresh.py:CHUNK": "second_order/test_refresh.py::test_in_chunks",
    "second_order/shampoo/roots.py:TOLERANCE USABLE": (
        "second_order/test_roots.py::test_a_newton_that_does_not_converge_is_found"
    ),
    "second_order/shampoo/roots.py:RESIDUAL": (
        "second_order/test_roots.py::test_an_eigh_that_lies_is_found"
    ),
    "deferred/motion.py:_BITS": (
        "deferred/test_caught_up_rules.py::test_powers_are_products_from_short_tables"
    ),
    "deferred/optimizer.py:_LEAST_ROWS": (
        "deferred/test_caught_up.py::test_deferred_tables_without_a_mask"
    ),
    "deferred/tables.py:_BLOCK": "deferred/test_caught_up.py::test_flush_in_blocks",
    "sparse/wanted.py:MIN_ROWS": (
        "jaxprs/test_gathers.py::test_small_tables_stay_dense_without_a_word"
    ),
    "state/storage/codes.py:_DROPPED _BASE _NAN _GREATEST": (
        "state/test_eight_bits.py::test_scales_around_the_ends"
    ),
    "state/storage/float8.py:_LEAST _TOP": (
        "state/test_float8.py::test_values_are_those_of_ml_dtypes"
    ),
    "state/storage/codes.py:GROUP _NARROW": "state/test_eight_bits.py::test_scales_beside_codes",
    "state/storage/codes.py:_LEAST_WIDTH": "state/test_eight_bits.py::test_the_least_width",
    "wrappers/divide_states.py:MIN_SIZE": "wrappers/test_divide_states.py::test_small_parameters",
}
# No test is at the ends of these. Most decide how fast something is, and not what it gives.
UNTESTED = {
    "interop/fbgemm/optimizer.py": "_NEVER",
    "native/tpu_kernel.py": "_MOST_BYTES",
    "native/tpu_leaf_kernel.py": "_FAST_MEMORY",
    "second_order/bases.py": "EQUAL ONE_BY_ONE",
    "second_order/shampoo/roots.py": "MAX_ITERATIONS",
    "sharded/row_sharding.py": "SPREAD",
    "deferred/series.py": "_LONGEST _MOST_FEATURES _MOST_TERMS",
}
# They bound nothing: seeds, factors of hashes, numbers of an interface, shapes of tiles.
NO_BOUNDS = {
    "core/merge.py": "_FACTOR",
    "distributed/engine/few_bits.py": "_LEVELS_OF_TWO_BITS",
    "host/folder.py": "FORMAT",
    "native/call_frame.py": "EXECUTE",
    "native/machine.py": "_SYMBOL_TABLE",
    "native/merging.py": "_HASH _MASK",
    "native/pool.py": "_WORDS",
    "native/sum_kernel.py": "_BYTES",
    "native/tpu_kernel.py": "_DEPTH",
    "native/tpu_leaf_kernel.py": "_ROWS _LANES _COLUMNS",
    "deferred/tables.py": "_SEED",
    "state/storage/at_random.py": "_SIGN",
    "state/storage/stored.py": "STREAM",
}


def is_number(node):
    match node:
        case ast.Constant(value):
            return type(value) in (int, float)
        case ast.UnaryOp(_, operand):
            return is_number(operand)
        case ast.BinOp(left, _, right):
            return is_number(left) and is_number(right)
        case ast.Call(ast.Attribute(ast.Name("np")), [argument]):
            return is_number(argument)
    return False


def numbers_of_modules():
    """The names that are given a number outside of functions, but for those of the race."""
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if name.startswith("race/"):
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and is_number(node.value):
                yield from (f"{name}:{target.id}" for target in node.targets)


def listed(keys):
    for key in keys:
        module, names = key.split(":")
        yield from (f"{module}:{name}" for name in names.split())


def test_each_number_is_listed_once():
    others = (
        f"{module}:{names}" for table in (UNTESTED, NO_BOUNDS) for module, names in table.items()
    )
    found = sorted([*listed(TESTED), *listed(others)])
    assert found == sorted(numbers_of_modules())


def test_the_tests_exist():
    for test in TESTED.values():
        path, name = test.split("::")
        assert f"\ndef {name}(" in (TESTS / path).read_text(), test
