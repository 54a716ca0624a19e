"""Tables of what the options of public functions, classes and commands do.

A table has a row for each function and option: what is observed with some values of it. A row fails
if one of them is not as expected, and it needs two values that are observed to differ.
"""

import warnings

import pytest

import optzoo

SGD = optzoo.gradient_descent(1.0)


class Table(dict):
    """By function and option, a function that observes it and what is expected by value."""

    def effect(self, function, option, expected):
        """Decorates what observes an option: called with each value, it gives what is expected."""

        def add(observe):
            assert (function, option) not in self
            assert len(set(map(str, expected.values()))) > 1
            self[function, option] = observe, expected
            return observe

        return add

    def test(self, *, all_quick=False):
        """The test of all rows; ``make test`` runs them all where they cost little together."""

        @pytest.mark.parametrize("row", self, ids="-".join)
        def test_an_option_has_its_effect(row):
            observe, expected = self[row]
            assert {value: observe(value) for value in expected} == expected

        test = test_an_option_has_its_effect
        return pytest.mark.every_value(test) if all_quick else test


def outcome(call):
    """The name of the warning or the error of a call, or None."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            call()
        except Exception as error:
            return type(error).__name__
    return None
