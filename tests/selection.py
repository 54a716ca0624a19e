"""Selects the tests of `make test`: as many cases of each test function as fit a time limit.

A test that does not apply to an optimizer is deselected, never skipped.
"""

import collections
from collections.abc import Collection, Iterable, Iterator

import pytest

from . import costs

# Seconds of CPU that the cases of one test function may take together. One case is run in any case,
# unless it alone takes longer than the second number. What exceeds the limits has the mark.
LIMITS = {
    "full": (0.1, 0.3),  # not in `make test`
    "nightly": (0.3, 0.5),  # nor in what CI runs each time on the newest Python
}

# One optimizer for each way to compute an update: with and without slots, rows lazy, dense or with
# slots that decay, by global step, proximal, by norms, by rows, by counters, of second order, and
# with factored slots.
KINDS = (
    "adam",
    "lazy_adam",
    "momentum",
    "row_wise_adagrad",
    "ftrl",
    "gradient_descent",
    "add_sign",
    "counter_row_wise_adagrad",
    "shampoo",
    "lars",
    "adagrad",
    "adagrad_da",
    "rmsprop",
    "ggt",
    "soap",
    "adafactor",
)


# The tests that do not apply to an optimizer, and why; with the id of a case, to this case.
NORM = "flattened parameters have other norms"
BY_ROWS = {"test_flatten": "flattened, every element is a row"}
IN_32_BITS = "test_slots_keep_their_dtype[float32-bfloat16]"
COUNTERS = {IN_32_BITS: "counters stay in float32: in 16 bits they would end at 256"}
FACTORS = "slots of a matrix are two vectors; tests/first_order/test_adafactor.py has the same"
MATRICES = "slots are tuples of matrices; tests/second_order/test_shampoo.py has the same for them"
OF_MATRICES = {
    "test_no_gradient_no_change": MATRICES,
    "test_rows_equal_the_dense_gradient_where_they_touch": MATRICES,
    "test_untouched_rows": MATRICES,
    IN_32_BITS: "statistics stay in float32, as tests/second_order/test_shampoo.py says",
}
ONE_VECTOR = "all parameters are one vector, on purpose: of a part of them it is another problem"
WINDOW = "the window has one more axis; tests/second_order/test_ggt.py has one for it"
MOMENTUM = "its rule for rows is that of momentum"
EXEMPT: dict[str, dict[str, str]] = {
    "adafactor": {
        "test_flatten": NORM,
        "test_no_gradient_no_change": FACTORS,
        "test_rows_equal_the_dense_gradient_where_they_touch": FACTORS,
        "test_untouched_rows": FACTORS,
        IN_32_BITS: "means over rows and columns stay in float32, as factors of a matrix",
    },
    "blocked_shampoo": OF_MATRICES,
    "counter_row_wise_adagrad": BY_ROWS | COUNTERS,
    "cowclip_row_wise_adagrad": BY_ROWS | COUNTERS,
    "ggt": {
        "test_composes_with_optax[partition]": ONE_VECTOR,
        "test_composes_with_optax_on_rows": ONE_VECTOR,
        "test_masked_leaves_pass": ONE_VECTOR,
        "test_nan_stays_in_its_leaf": ONE_VECTOR,
        "test_no_gradient_no_change": WINDOW,
        "test_sharded": WINDOW,
        "test_untouched_rows": WINDOW,
    },
    "global_decay_row_wise_adagrad": BY_ROWS | COUNTERS,
    "row_wise_lamb": BY_ROWS,
    "lamb": {"test_flatten": NORM},
    "lars": {
        "test_flatten": NORM,
        "test_rows_equal_the_dense_gradient_where_they_touch": MOMENTUM,
        "test_rows_of_other_ranks": MOMENTUM,
    },
    "muon": {"test_flatten": "one vector in the place of matrices"},
    "normalized_sgd": {"test_flatten": NORM},
    "partial_row_wise_adam": BY_ROWS,
    "partial_row_wise_lamb": BY_ROWS,
    "row_wise_adagrad": BY_ROWS,
    "row_wise_lars": BY_ROWS,
    "row_wise_rmsprop": BY_ROWS | COUNTERS,
    "shampoo": OF_MATRICES
    | {"test_flatten": "one large matrix in the place of one for each dimension"},
    "soap": OF_MATRICES
    | {
        "test_flatten": "a vector takes Adam's steps",
        "test_meshes": "vectors of equal eigenvalues, which test_soap.py does not have",
        "test_updates_in_16_bits": "its first matrices lack full rank: float64 finds other bases",
    },
}


def chosen_first(cases: Iterable[str], chosen: Collection[str]) -> list[str]:
    """Puts cases first, since `make test` runs the first cases of a test."""
    cases = list(cases)
    if unknown := {*chosen} - {*cases}:
        raise ValueError(f"chosen cases that do not exist: {sorted(unknown)}")
    return sorted(cases, key=lambda case: case not in chosen)


def select(items: list[pytest.Item]) -> list[pytest.Item]:
    """Removes, and returns, tests that do not apply; marks slow ones as ``LIMITS`` says."""
    out = [item for item in items if _does_not_apply(item)]
    items[:] = [item for item in items if item not in out]
    functions = collections.defaultdict(list)
    for item in items:
        functions[costs.function_of(item.nodeid)].append(item)
        if item.get_closest_marker("full"):  # by hand
            item.add_marker("nightly")
    for cases in functions.values():
        for mark, limits in LIMITS.items():
            for item in _slow(cases, *limits):
                item.add_marker(mark)
    return out


def _slow(cases: list[pytest.Item], together: float, alone: float) -> Iterator[pytest.Item]:
    """The cases of a test function that exceed the limits.

    The first cases do not, up to a total time. Cases with a new value of a parameter precede the
    others; with the mark ``every_value`` all of them are within the limits. With the mark
    ``unique`` one case is, for any time.
    """
    cost, spent = costs.expected(cases[0].nodeid), 0.0
    marked = lambda name: cases[0].get_closest_marker(name) is not None
    for item, is_new in _in_turn(cases):
        is_first = spent == 0.0 and (cost <= alone or marked("unique"))
        if is_first or spent + cost <= together or (is_new and marked("every_value")):
            spent += cost
        else:
            yield item


def _in_turn(cases: list[pytest.Item]) -> Iterator[tuple[pytest.Item, bool]]:
    """Cases with new values of parameters, then the others; and whether each has a new value."""
    seen, others = set(), []
    for item in cases:
        values = _values(item)
        if values <= seen:
            others.append(item)
        else:
            seen |= values
            yield item, True
    for item in others:
        yield item, False


def _values(item: pytest.Item) -> set[tuple[str, object]]:
    """The values of the parameters of a case; for objects, such as a list, their identity."""
    case = getattr(item, "callspec", None)
    if case is None:
        return {("case", item.nodeid)}
    plain = lambda value: isinstance(value, str | int | float | bool | None)
    return {(k, v if plain(v) else f"#{id(v)}") for k, v in case.params.items()}


def _does_not_apply(item: pytest.Item) -> bool:
    """Whether EXEMPT lists the test for its optimizer."""
    case = getattr(item, "callspec", None)
    optimizer = case and case.params.get("entry")
    if not isinstance(optimizer, str):
        return False
    test, of_case = item.originalname, case.id.removeprefix(f"{optimizer}-")
    return bool({test, f"{test}[{of_case}]"} & EXEMPT.get(optimizer, {}).keys())
