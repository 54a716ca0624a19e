"""An optimizer that breaks one promise fails the test of the contract that is about it."""

import functools
import inspect

import jax
import jax.numpy as jnp
import optax
import pytest

import optzoo
from optzoo import SparseRows, get_slot, set_slot
from optzoo.catalog import Entry
from optzoo.testing import contract, samples
from optzoo.testing.contract import eager  # noqa: F401 (a fixture)

RATE = 0.01

# What is wrong: each function is the update, or ``init``, of momentum with one fault.


def kept(inner, g, s, p, **extra_args):
    return inner.update(g, s, p, **extra_args)


def uphill(inner, g, s, p, **extra_args):
    u, new = inner.update(g, s, p, **extra_args)
    return jax.tree.map(jnp.negative, u), new


def fixed_rate(inner, g, s, p, learning_rate=None):
    return inner.update(g, s, p)


def few_arguments(inner, g, s, p):
    return inner.update(g, s, p)


def missing_as_zero(inner, g, s, p):
    is_none = lambda g: g is None
    full = jax.tree.map(lambda g, x: jnp.zeros_like(x) if g is None else g, g, p, is_leaf=is_none)
    u, new = inner.update(full, s, p)
    return jax.tree.map(lambda g, u: None if g is None else u, g, u, is_leaf=is_none), new


def one_norm(inner, g, s, p):
    norm = optax.tree.norm(g)
    return inner.update(jax.tree.map(lambda g: g / norm, g), s, p)


def one_nan_in_all_updates(inner, g, s, p):
    u, new = inner.update(g, s, p)
    nan = 0 * optax.tree.norm(g)
    return jax.tree.map(lambda a: a + nan, u), new


def short_slots(inner, g, s, p):
    u, new = inner.update(g, s, p)
    is_real = lambda a: jnp.issubdtype(a.dtype, jnp.floating)
    return u, jax.tree.map(lambda a: a.astype(jnp.bfloat16) if is_real(a) else a, new)


def twice_without_params(inner, g, s, p):
    u, new = inner.update(g, s, p)
    return (u if p is not None else jax.tree.map(lambda a: 2 * a, u)), new


def number_as_rate(inner, g, s, p):
    return inner.update(g, s, p)


def same_arrays(init, params):
    return set_slot(init(params), "momentum", params)


# The same where the table has rows.


def with_rows(change):
    """The change of a gradient, or of the values afterwards, where it is of rows."""

    @functools.wraps(change)
    def update(inner, g, s, p, **extra_args):
        if isinstance(g["table"], SparseRows):
            return change(inner, g, s, p)
        return inner.update(g, s, p, **extra_args)

    return update


@with_rows
def slot_of_a_row_stays(inner, g, s, p):
    u, new = inner.update(g, s, p)
    old, slot = get_slot(s, "momentum"), get_slot(new, "momentum")
    table = slot["table"].at[3].set(old["table"][3])
    return u, set_slot(new, "momentum", {**slot, "table": table})


@with_rows
def slot_of_another_row_decays(inner, g, s, p):
    u, new = inner.update(g, s, p)
    slot = get_slot(new, "momentum")
    return u, set_slot(new, "momentum", {**slot, "table": slot["table"].at[0].multiply(0.9)})


@with_rows
def row_stays(inner, g, s, p):
    u, new = inner.update(g, s, p)
    return {**u, "table": u["table"].to_dense().at[3].set(0)}, new


@with_rows
def another_row_moves(inner, g, s, p):
    u, new = inner.update(g, s, p)
    return {**u, "table": u["table"].to_dense().at[0].add(0.1)}, new


@with_rows
def padding_counts(inner, g, s, p):
    t = g["table"]
    return inner.update({**g, "table": SparseRows(t.indices.clip(0, 4), t.values, 5)}, s, p)


@with_rows
def last_of_equal_ids(inner, g, s, p):
    t = g["table"]
    dense = jnp.zeros((5, 2)).at[t.indices].set(t.values, mode="drop")
    return inner.update({**g, "table": SparseRows(jnp.arange(5), dense, 5)}, s, p)


@with_rows
def other_values(inner, g, s, p):
    return inner.update({**g, "table": g["table"].with_values(1.001 * g["table"].values)}, s, p)


FAULTS = {
    "test_compiles_once_and_takes_donated_buffers": [short_slots],
    "test_no_two_buffers_are_the_same": [same_arrays],
    "test_untouched_rows": [
        slot_of_a_row_stays, slot_of_another_row_decays, row_stays, another_row_moves,
    ],
    "test_rows_sum_in_any_order_and_padding_is_ignored": [padding_counts, last_of_equal_ids],
    "test_rows_equal_the_dense_gradient_where_they_touch": [other_values, last_of_equal_ids],
    "test_no_rows_are_as_good_as_padding": [padding_counts],
    "test_no_gradient_no_change": [missing_as_zero],
    "test_nan_stays_in_its_leaf": [one_norm, one_nan_in_all_updates],
    "test_cond_and_scan_accept_the_old_state": [short_slots],
    "test_goes_downhill": [uphill],
    "test_injected_hyperparameters_are_traced": [number_as_rate],
    "test_rate_can_be_overridden_for_a_step": [fixed_rate],
    "test_unknown_extra_args_are_ignored": [few_arguments],
    "test_without_params_the_same_or_an_error": [twice_without_params],
}  # fmt: skip


def run(name, change):
    """A test of the contract, with dense gradients, on momentum with a change."""

    def factory(learning_rate):
        rate = float(learning_rate) if change is number_as_rate else learning_rate
        inner = optzoo.momentum(rate, 0.9)
        if change is same_arrays:
            return inner._replace(init=functools.partial(change, inner.init))
        update = lambda g, s, p=None, **extra_args: change(inner, g, s, p, **extra_args)
        return optax.GradientTransformationExtraArgs(inner.init, update)

    entry = Entry(factory, "lazy", RATE, None)
    test = getattr(contract, name)
    given = {
        "entry": entry,
        "case": contract.Case(entry),
        "grads": samples.dense_grads(samples.params()),
    }
    test(*(given[argument] for argument in inspect.signature(test).parameters))


@pytest.mark.parametrize("name", FAULTS)
def test_a_broken_promise_is_found(name):
    run(name, kept)
    for fault in FAULTS[name]:
        with pytest.raises((AssertionError, TypeError)):
            run(name, fault)
            pytest.fail(f"{fault.__name__} was not found")
