"""Which tests run on which optimizer: by ``make test``, by ``make test-full`` alone, or never."""

from collections.abc import Collection, Iterable

import pytest

# One optimizer for each way to compute an update: with and without slots, rows lazy, dense or with
# slots that decay, by global step, proximal, by norms, by rows, by counters, and of second order.
KINDS = frozenset(
    {
        "adagrad",
        "adagrad_da",
        "adam",
        "add_sign",
        "counter_row_wise_adagrad",
        "ftrl",
        "ggt",
        "gradient_descent",
        "lars",
        "lazy_adam",
        "momentum",
        "rmsprop",
        "row_wise_adagrad",
        "shampoo",
        "soap",
    }
)

# Of the tests on every optimizer, those that cost most: `make test` runs them on KINDS.
COSTLY = frozenset(
    {
        "test_composes_with_optax",
        "test_composes_with_optax_on_rows",
        "test_extreme_gradients_give_finite_updates",
        "test_hyperparameters_injected_into_16_bits",
        "test_orbax_round_trip",
        "test_rows_of_other_ranks",
        "test_sharded",
        "test_vmap",
    }
)

# The tests that do not apply to an optimizer, and why; with the id of a case, to this case.
NORM = "a norm of all parameters flattened into one is another norm"
BY_ROWS = {"test_flatten": "flattened, every element is a row"}
IN_32_BITS = "test_slots_keep_their_dtype[float32-bfloat16]"
COUNTERS = {IN_32_BITS: "counters stay in float32: in 16 bits they would end at 256"}
MATRICES = "slots are tuples of matrices; tests/second_order/test_shampoo.py has the same for them"
OF_MATRICES = {
    "test_no_gradient_no_change": MATRICES,
    "test_rows_equal_the_dense_gradient_where_they_touch": MATRICES,
    "test_untouched_rows": MATRICES,
    IN_32_BITS: "statistics stay in float32, as tests/second_order/test_shampoo.py says",
}
ONE_VECTOR = "all parameters are one vector, on purpose: of a part of them it is another problem"
WINDOW = "the window has one more axis; tests/second_order/test_ggt.py has one for it"
MOMENTUM = "its rule for rows is another: momentum"
EXEMPT: dict[str, dict[str, str]] = {
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
    "lars": {
        "test_flatten": NORM,
        "test_rows_equal_the_dense_gradient_where_they_touch": MOMENTUM,
        "test_rows_of_other_ranks": MOMENTUM,
    },
    "normalized_sgd": {"test_flatten": NORM},
    "partial_row_wise_adam": BY_ROWS,
    "partial_row_wise_lamb": BY_ROWS,
    "row_wise_adagrad": BY_ROWS,
    "row_wise_lars": BY_ROWS,
    "row_wise_rmsprop": BY_ROWS | COUNTERS,
    "shampoo": OF_MATRICES
    | {"test_flatten": "one large matrix in the place of one for each dimension"},
    "soap": OF_MATRICES | {"test_flatten": "a vector takes Adam's steps"},
}


def quick(cases: Iterable[str], chosen: Collection[str]) -> list:
    """The cases as parameters of a test; those that are not chosen are marked ``full``."""
    cases = list(cases)
    if unknown := {*chosen} - {*cases}:
        raise ValueError(f"chosen cases that do not exist: {sorted(unknown)}")
    return [c if c in chosen else pytest.param(c, marks=pytest.mark.full) for c in cases]


def select(items: list[pytest.Item]) -> list[pytest.Item]:
    """Takes out, and returns, what does not apply; marks costly tests as ``full``."""
    out = []
    for item in items:
        case = getattr(item, "callspec", None)
        optimizer = case and case.params.get("entry")
        if not isinstance(optimizer, str):
            continue
        test, of_case = item.originalname, case.id.removeprefix(f"{optimizer}-")
        if {test, f"{test}[{of_case}]"} & EXEMPT.get(optimizer, {}).keys():
            out.append(item)
        elif test in COSTLY and optimizer not in KINDS:
            item.add_marker(pytest.mark.full)
    items[:] = [item for item in items if item not in out]
    return out
