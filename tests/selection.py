"""What ``make test`` runs of tests that go over large tables; ``make test-full`` runs all cases."""

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
        "blocked_shampoo",
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

# Of the tests on every optimizer, those that compile most: `make test` runs them on KINDS.
COSTLY = frozenset(
    {
        "tests/test_contract.py::test_composes_with_optax",
        "tests/test_contract.py::test_composes_with_optax_on_rows",
        "tests/test_contract.py::test_extreme_gradients_give_finite_updates",
        "tests/test_contract.py::test_rows_of_other_ranks",
        "tests/test_contract.py::test_vmap",
        "tests/test_sharding.py::test_sharded",
    }
)


def quick(cases: Iterable[str], chosen: Collection[str]) -> list:
    """The cases as parameters of a test; those that are not chosen are marked ``full``."""
    cases = list(cases)
    if unknown := {*chosen} - {*cases}:
        raise ValueError(f"chosen cases that do not exist: {sorted(unknown)}")
    return [c if c in chosen else pytest.param(c, marks=pytest.mark.full) for c in cases]


def mark_costly(items: Iterable[pytest.Item]) -> None:
    """Marks the tests in ``COSTLY`` as ``full`` on optimizers that are not in ``KINDS``."""
    for item in items:
        if item.nodeid.partition("[")[0] in COSTLY and item.callspec.params["entry"] not in KINDS:
            item.add_marker(pytest.mark.full)
