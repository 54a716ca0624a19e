"""The arrays that functions have captured, wherever they hold them."""

import dataclasses
import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

import optzoo
from optzoo.core.captured import captured
from optzoo.core.optimizer import about_of

ONE, TWO = jnp.float32(1), jnp.float32(2)


class Pair(NamedTuple):
    first: object
    second: object


@dataclasses.dataclass(frozen=True)
class Options:
    rate: object
    name: str = "a"

    def scaled(self, x):
        return self.rate * x


def in_a_variable(rate):
    return lambda x: rate * x


def in_a_function_in_a_variable(rate):
    inner = in_a_variable(rate)

    def outer(x):
        return inner(x)

    return outer


def in_defaults(rate):
    return lambda x, rate=rate: rate * x


def in_keyword_defaults(rate):
    def f(x, *, rate=rate):
        return rate * x

    return f


def in_a_partial(rate):
    return functools.partial(lambda rate, x, more: rate * x * more, rate, more=1)


def in_a_method(rate):
    return Options(rate).scaled


def in_a_dataclass_in_a_tuple(rate):
    pair = Pair([Options(rate)], {"a": 3})
    return lambda x: pair.first[0].rate * x


def in_a_dict(rate):
    options = {"rate": rate}
    return lambda x: options["rate"] * x


def test_they_are_found_and_replaced():
    for make in (
        in_a_variable, in_a_function_in_a_variable, in_defaults, in_keyword_defaults,
        in_a_partial, in_a_method, in_a_dataclass_in_a_tuple, in_a_dict,
    ):  # fmt: skip
        f = make(TWO)
        arrays, with_others = captured(f)
        assert [id(x) for x in arrays] == [id(TWO)], make
        assert with_others([5.0])(3) == 15 and f(3) == 6, make


def test_two_arrays_in_several_places():
    a, b = in_a_variable(ONE), in_a_variable(TWO)
    third = Pair(ONE, 3)
    f = lambda x: (a(x), b(x), third.first * x)
    arrays, with_others = captured(f)
    assert [float(x) for x in arrays] == [1, 2]
    assert with_others([5.0, 7.0])(1) == (5, 7, 5)


def test_what_is_known_of_an_optimizer_stays():
    tx = optzoo.lazy_adam(ONE, TWO / 4)
    arrays, with_others = captured(lambda: tx)
    new = with_others([{1.0: 3.0, 0.5: 0.25}[float(x)] for x in arrays])()
    assert type(new) is type(tx) and about_of(new) == about_of(tx) and about_of(new).row_wise
    x = jnp.array([1.0, -2.0])
    want = optzoo.lazy_adam(3.0, 0.25)
    got, want = (tx.update(x, tx.init(x), x)[0] for tx in (new, want))
    np.testing.assert_array_equal(got, want)


def test_what_holds_none_stays():
    """Functions, also such that call themselves, NumPy's arrays, and a variable without a value."""
    table = np.ones(2)

    def power(x, n):
        return 1 if n == 0 else x * power(x, n - 1) * table[0] * helper(1)

    helper = in_a_variable(1)
    arrays, with_others = captured(power)
    assert arrays == [] and with_others([]) is power

    def early():
        return captured(lambda: late)

    arrays, with_others = early()
    assert arrays == []
    late = 3
    assert with_others([])() == late
