"""What is done to replicas between two exchanges leaves the history what it is without it."""

import functools

import flax.serialization
import jax
import pytest

import optzoo

from ..growing.cases import same
from . import cases

AT = 5  # of the exchanges after 3 and 6 ticks; one that overlaps has begun after 4
METHODS = [*cases.METHODS, "diloco, int8"]


@functools.cache
def make(method, number=cases.REPLICAS):
    if method == "diloco, int8":
        return optzoo.diloco(
            cases.lazy_adam(), communication_period=3, exchange_dtype="int8", error_feedback=True
        )
    return cases.make(method, cases.lazy_adam(), number)


@functools.cache
def train_of(method):
    tx = make(method)
    return cases.over("vmap", cases.train_step(tx), tx)


def goes_on(method, now, ticks):
    for batch in list(zip(*cases.batches(), strict=True))[ticks]:
        *now, _ = train_of(method)(*now, *batch)
    return tuple(now)


@functools.cache
def until_the_middle(method):
    return goes_on(method, cases.start(make(method)), slice(AT))


@functools.cache
def until_the_end(method):
    return goes_on(method, until_the_middle(method), slice(AT, None))


@pytest.mark.parametrize("method", METHODS)
def test_saved_and_restored(method):
    now = until_the_middle(method)
    like = jax.eval_shape(lambda: cases.start(make(method)))
    restored = flax.serialization.from_bytes(like, flax.serialization.to_bytes(now))
    same(restored, now)
    same(goes_on(method, restored, slice(AT, None)), until_the_end(method))


@pytest.mark.parametrize("method", METHODS)
def test_with_replicas_that_come_and_go(method):
    now = until_the_middle(method)
    for number in (6, cases.REPLICAS):
        now = optzoo.replicas.resize_replicas(make(method, number), *now, number)
    same(now, until_the_middle(method))
