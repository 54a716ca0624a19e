"""``sparsecore``: which optimizers, their scalars, slots and widths, bad input."""

import importlib.metadata
import re
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optzoo
from optzoo import CATALOG, SparseRows
from optzoo.testing import samples

from ...selection import KINDS, chosen_first
from . import lowered

WIDTH = 4
ON_ROWS = [
    "adam", "adam_gs", "adam_weight_decay", "adamw", "add_sign", "grad_variance_scaled",
    "nadam", "neural_optimizer1", "power_sign",
]  # fmt: skip
NEVER = [
    "adafactor", "blocked_shampoo", "ggt", "lamb", "lars", "muon", "normalized_sgd", "shampoo",
    "soap",
]  # fmt: skip
AS_THEY_ARE = sorted(CATALOG.keys() - {*ON_ROWS, *NEVER})
# The elements of a row depend on each other.
WHOLE_ROWS = [
    "counter_row_wise_adagrad", "cowclip_row_wise_adagrad", "global_decay_row_wise_adagrad",
    "row_wise_lamb",
    "partial_row_wise_adam", "partial_row_wise_lamb", "row_wise_adagrad", "row_wise_lars",
    "row_wise_rmsprop",
]  # fmt: skip
WIDTHS = dict.fromkeys(WHOLE_ROWS, WIDTH)
CASES = {
    **{name: lambda name=name: CATALOG[name].make() for name in AS_THEY_ARE},
    **{f"on_rows({n})": lambda n=n: optzoo.on_rows(CATALOG[n].make()) for n in ON_ROWS},
    "schedule": lambda: optzoo.adagrad(optax.exponential_decay(0.1, 2, 0.5)),
    "piecewise schedule": lambda: optzoo.momentum(
        optax.piecewise_interpolate_schedule("linear", 0.1, {2: 0.5, 4: 0.1}), 0.9
    ),
    "injected": lambda: optzoo.on_rows(optax.inject_hyperparams(optax.adam)(0.1)),
    "optax.adamw": lambda: optzoo.on_rows(optax.adamw(0.1)),
    "optax.lion": lambda: optzoo.on_rows(optax.lion(0.1)),
    "weight decay": lambda: optzoo.decoupled_weight_decay(
        optzoo.lazy_adam(0.1), weight_decay_per_step=0.01
    ),
    "clipped": lambda: optzoo.on_rows(optax.chain(optax.clip(0.3), optzoo.lazy_adam(0.1))),
    "beta": lambda: optzoo.ftrl(0.1, beta=1.0, l2_regularization_strength=0.1),
}  # fmt: skip


@pytest.fixture(autouse=True)
def wheel(monkeypatch):
    lowered.pretend(monkeypatch)


def follow(spec, text, x, gradients, ids):
    """The table after the updates, by the lowered text, row by row; and all slots."""
    run = lowered.compiled(text)
    arrays = [np.array(x)] + [
        np.array(f(None, x.shape)) for f in spec.slot_variables_initializers()
    ]
    shared = spec.first_shared()
    for g, rows in zip(gradients, ids, strict=True):
        scalars = [np.full((1, x.shape[1]), s) for s in spec.get_hyperparameters(shared)]
        for i, row in zip(rows, g, strict=True):
            outs = run(row[None], *(a[i : i + 1] for a in arrays), *scalars)
            arrays = [lowered.put(a, i, out) for a, out in zip(arrays, outs, strict=True)]
        shared = spec.next_shared(shared)
    return arrays, shared


def data(width=WIDTH):
    random = np.random.default_rng(0)
    x = random.normal(size=(5, width)).astype(np.float32)
    ids = np.array([[0, 2], [2, 4], [1, 2], [0, 4], [3, 2], [0, 1]])
    return x, random.normal(size=(6, 2, width)).astype(np.float32), ids


@pytest.mark.parametrize(
    "name", chosen_first(CASES, [n for n in CASES if n not in CATALOG or n in KINDS])
)
def test_equals_the_update_of_rows(name):
    """The lowered text equals the optimizer on SparseRows, also where there is no record."""
    tx, (x, gradients, ids) = CASES[name](), data()
    spec = optzoo.interop.sparsecore.sparsecore(tx, width=WIDTHS.get(name))
    [got, *_], shared = follow(spec, lowered.lower(spec, WIDTH), x, gradients, ids)
    params, state = jnp.asarray(x), tx.init(x)
    extra = optax.with_extra_args_support(tx)
    for step, (g, rows) in enumerate(zip(gradients, ids, strict=True)):
        sparse = SparseRows(jnp.asarray(rows), jnp.asarray(g), len(x))
        params, state = samples.step(extra, sparse, params, state, global_step=step)
    np.testing.assert_allclose(got, params, rtol=2e-6, atol=2e-6)
    assert np.abs(got - x).max() > 1e-3
    assert shared.step == 6


@pytest.mark.parametrize("name", [*ON_ROWS, *NEVER])
def test_refuses_what_moves_other_rows(name):
    with pytest.raises(
        ValueError,
        match=r"optzoo\.interop\.sparsecore\.sparsecore cannot run this optimizer row by row",
    ):
        optzoo.interop.sparsecore.sparsecore(CATALOG[name].make())


@pytest.mark.parametrize("name", NEVER)
def test_on_rows_does_not_help_these(name):
    with pytest.raises(ValueError, match=r"may mix|in an axis other than 0"):
        optzoo.interop.sparsecore.sparsecore(optzoo.on_rows(CATALOG[name].make()))


@pytest.mark.parametrize("name", CASES)
def test_only_elementwise_operations(name):
    """And no argument is dropped; scalars are arguments, and need no operation of their own."""
    if name in WIDTHS:
        return
    spec = optzoo.interop.sparsecore.sparsecore(CASES[name]())
    text = lowered.lower(spec, 8)
    found = set(re.findall(r"stablehlo\.(\w+)", text))
    assert not found & {"gather", "scatter", "slice", "dynamic_slice", "reduce", "pad", "iota"}
    arguments = re.findall(r"%arg\d+: tensor<1x8xf32>", text.split("@main")[1].split("{\n")[0])
    num_scalars = len(spec.get_hyperparameters(spec.first_shared()))
    assert len(arguments) == 2 + len(spec.slot_variables_initializers()) + num_scalars


# XLA makes functions of many rows of programs of these; not of slices, iota, dot, pad, reshape.
FOR_MANY_ROWS = {
    "abs", "add", "and", "bitcast_convert", "broadcast_in_dim", "compare", "constant", "convert",
    "divide", "exponential", "maximum", "minimum", "multiply", "negate", "or", "power", "reduce",
    "select", "sign", "sqrt", "subtract",
}  # fmt: skip


@pytest.mark.parametrize("name", [*AS_THEY_ARE, *(f"on_rows({name})" for name in ON_ROWS)])
def test_the_function_of_a_row_can_become_one_of_many_rows(name):
    """It has no slice, also where the table is padded; ``tests/accelerators`` compiles some."""
    for width in (8, 6) if name in WIDTHS else (None,):
        spec = optzoo.interop.sparsecore.sparsecore(CASES[name](), width=width)
        text = lowered.lower(spec, 8)
        assert set(re.findall(r"stablehlo\.([a-z_]+)", text)) <= FOR_MANY_ROWS
        shapes = set(re.findall(r"tensor<([\dx]*)[a-z]+\d+>", text))
        assert shapes <= {"1x8x", "8x", "1x", ""}  # a mask is of shape (8,), a sum (1,)
        reduced = re.findall(r"dimensions = (\[.*?\]) : \(tensor<(.*?)>", text)
        assert set(reduced) <= {("[1]", "1x8xf32")}


@pytest.mark.parametrize("name", ["lazy_adam", "ftrl", "schedule", "row_wise_adagrad"])
def test_all_is_float32(name, x64):
    """Also where float64 is available."""
    with x64(True):
        spec = optzoo.interop.sparsecore.sparsecore(CASES[name](), width=WIDTHS.get(name))
        text = lowered.lower(spec, 8)
        scalars = spec.get_hyperparameters(spec.first_shared())
    results = text.split("-> (")[1].split("{\n")[0]
    assert results.count("tensor<1x8xf32>") == 1 + len(spec.slot_variables_initializers())
    assert all(a.dtype == jnp.float32 and a.shape == () for a in scalars)


# What is kept for all rows together


def test_a_schedule_is_a_scalar():
    spec = optzoo.interop.sparsecore.sparsecore(
        optzoo.gradient_descent(optax.exponential_decay(0.5, 1, 0.5))
    )
    shared, rates = spec.first_shared(), []
    for _ in range(3):
        [rate] = spec.get_hyperparameters(shared)
        rates.append(float(rate))
        shared = jax.jit(spec.next_shared)(shared)
    np.testing.assert_allclose(np.abs(rates), [0.5, 0.25, 0.125])


def test_counts_are_exact():
    """A count beyond what float32 holds, for what is computed from it is computed in int32."""
    rate = lambda step: jnp.where(step % 2 == 0, 1.0, 2.0)
    spec = optzoo.interop.sparsecore.sparsecore(optzoo.gradient_descent(rate))
    at = lambda n: abs(float(spec.get_hyperparameters(spec.first_shared(n))[0]))
    assert [at(2**24), at(2**24 + 1)] == [1.0, 2.0]


def test_powers_are_running_products():
    """As in the state of the optimizer, not powers of the step."""
    tx = optzoo.lazy_adam(0.1)
    spec = optzoo.interop.sparsecore.sparsecore(tx)
    shared = spec.first_shared()
    state, x = tx.init(jnp.ones((2, 3))), jnp.ones((2, 3))
    for _ in range(20):
        _, state = tx.update(x, state, x)
        shared = spec.next_shared(shared)
    others = [a for a in jax.tree.leaves(state) if a.ndim == 0]
    np.testing.assert_array_equal(jnp.stack(shared.arrays), jnp.stack(others))


def test_an_injected_rate_can_be_changed():
    spec = optzoo.interop.sparsecore.sparsecore(
        optzoo.on_rows(optax.inject_hyperparams(optax.sgd)(0.1))
    )
    x, gradients, _ = data()
    text = lowered.lower(spec, WIDTH)
    shared = spec.first_shared()
    other = shared._replace(arrays=tuple(10 * a for a in shared.arrays))
    moved = [
        lowered.compiled(text)(
            gradients[0, :1], x[:1], *(np.full((1, WIDTH), s) for s in spec.get_hyperparameters(s_))
        )[0]
        - x[:1]
        for s_ in (shared, other)
    ]
    np.testing.assert_allclose(moved[1], 10 * moved[0], rtol=1e-5)


def test_without_scalars_there_is_one_that_is_not_used():
    spec = optzoo.interop.sparsecore.sparsecore(optzoo.adagrad(0.1))
    assert spec.get_hyperparameters() == spec.get_hyperparameters(7) == (0,)


def test_several_specs_in_one_step():
    specs = [
        optzoo.interop.sparsecore.sparsecore(
            optzoo.gradient_descent(optax.exponential_decay(rate, 1, 0.5)), name=name
        )
        for rate, name in ((0.25, "a"), (0.5, "b"))
    ]
    step = {spec.short_name_str: spec.first_shared() for spec in specs}
    one, two = (spec.get_hyperparameters(step) for spec in specs)
    assert [2 * a for a in one] == list(two) == [-0.5]


# Slots


def test_slots_have_names_and_initial_values():
    spec = optzoo.interop.sparsecore.sparsecore(optzoo.ftrl(0.1, initial_accumulator_value=0.25))
    slots = spec.slot_variables_initializers()
    assert slots._fields == ("accum", "linear")
    values = [f(jax.random.key(0), (6, 8)) for f in slots]
    assert [float(v.max()) for v in values] == [0.25, 0.0]
    assert all(v.shape == (6, 8) and v.dtype == jnp.float32 for v in values)
    two = optzoo.interop.sparsecore.sparsecore(
        optax.chain(optzoo.transforms.scale_by_momentum(0.9), optzoo.momentum(0.1, 0.9))
    )
    assert len(set(two.slot_variables_initializers()._fields)) == 2


def test_a_slot_of_a_padded_table_begins_as_the_slot_and_zeros():
    tx = optzoo.ftrl(0.1, initial_accumulator_value=0.25)
    spec = optzoo.interop.sparsecore.sparsecore(tx, width=6)
    accum, _ = (f(jax.random.key(0), (2, 8)) for f in spec.slot_variables_initializers())
    np.testing.assert_array_equal(accum, [[0.25] * 6 + [0] * 2] * 2)


@pytest.mark.unique
def test_numbers_of_a_step_are_float32():
    tx = CASES["global_decay_row_wise_adagrad"]()
    spec = optzoo.interop.sparsecore.sparsecore(tx, width=6)
    numbers = spec.get_hyperparameters(spec.first_shared())
    assert numbers and all(jnp.asarray(a).dtype == jnp.float32 for a in numbers)


def test_a_slot_with_the_name_of_a_keyword():
    """A named tuple cannot have it."""
    init = lambda p: {k: jax.tree.map(jnp.zeros_like, p) for k in ("lambda", "m")}
    tx = optzoo.on_rows(optax.GradientTransformation(init, lambda g, state, p=None: (g, state)))
    slots = optzoo.interop.sparsecore.sparsecore(tx).slot_variables_initializers()
    assert slots._fields == ("_0", "m")


@pytest.mark.parametrize("width", [6, 1])
def test_a_padded_table(width):
    """Rows of 6 numbers in a table of 8: their mean does not see the padding."""
    tx = optzoo.row_wise_adagrad(0.1)
    spec = optzoo.interop.sparsecore.sparsecore(tx, width=width)
    x, gradients, ids = data(width)
    pad = lambda a: np.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, 8 - width)])
    (got, slot), _ = follow(spec, lowered.lower(spec, 8), pad(x), pad(gradients), ids)
    params, state = jnp.asarray(x), tx.init(x)
    for g, rows in zip(gradients, ids, strict=True):
        updates, state = tx.update(SparseRows(jnp.asarray(rows), jnp.asarray(g), 5), state, params)
        params = params + updates
    np.testing.assert_allclose(got[:, :width], params, rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(got[:, width:], 0)
    np.testing.assert_allclose(slot[:, 0], optzoo.get_slot(state, "accumulator"), rtol=1e-6)


@pytest.mark.parametrize(
    "name", ["global_decay_row_wise_adagrad", "row_wise_lamb", "partial_row_wise_lamb"]
)
def test_other_padded_tables(name):
    """With scalars and numbers for each row, and slots of the width of the table."""
    tx = CASES[name]()
    spec, (x, gradients, ids) = optzoo.interop.sparsecore.sparsecore(tx, width=6), data(6)
    pad = lambda a: np.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, 2)])
    [got, *_], _ = follow(spec, lowered.lower(spec, 8), pad(x), pad(gradients), ids)
    params, state = jnp.asarray(x), tx.init(x)
    for g, rows in zip(gradients, ids, strict=True):
        updates, state = tx.update(SparseRows(jnp.asarray(rows), jnp.asarray(g), 5), state, params)
        params = params + updates
    np.testing.assert_allclose(got[:, :6], params, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(got[:, 6:], 0)


EDGES = np.array([np.nan, np.inf, -np.inf, -2.5, -0.0, 0.0, 1e-40, 3e38], np.float32)


def test_numbers_are_kept_bit_by_bit():
    """One number a row, whatever it is; and scalars of the step."""
    keep = optax.GradientTransformation(
        lambda x: jnp.zeros(len(x)),
        lambda g, s, x=None: (jnp.where(s[:, None] == -2.5, g, -g), s),
    )
    spec = optzoo.interop.sparsecore.sparsecore(optzoo.on_rows(keep), width=3)
    run = lowered.compiled(lowered.lower(spec, 8))
    g, x, unused = np.full((1, 8), 0.5), np.zeros((1, 8)), np.zeros((1, 8))
    for value in EDGES:
        new, slot = run(*(np.float32(a) for a in (g, x, np.full((1, 8), value), unused)))
        np.testing.assert_array_equal(slot.view(np.int32), value.view(np.int32))
        np.testing.assert_array_equal(new[0, :3], 0.5 if value == -2.5 else -0.5)


def test_padding_is_not_seen_whatever_is_there():
    """Each reduction has its own padding; the values of a row are not changed by one bit."""
    operations = jnp.sum, jnp.max, jnp.min, jnp.prod
    sums = lambda g: sum(f(g, 1, keepdims=True) for f in operations)
    mix = lambda g, s, x=None: (g * jnp.array([[1.0, 2, 3]]) + sums(g), s + g)
    tx = optax.GradientTransformation(jnp.zeros_like, mix)
    spec = optzoo.interop.sparsecore.sparsecore(optzoo.on_rows(tx), width=3)
    run = lowered.compiled(lowered.lower(spec, 8))
    zeros = np.zeros((1, 8), np.float32)
    for row in (*EDGES[None].repeat(2, 0), [2, 3, 4], [-2, -3, -4]):
        for padding in (0.0, np.nan, np.inf, -7.0):
            g = np.full((1, 8), padding, np.float32)
            g[0, :3] = row[:3]
            new, slot, *_ = run(g, zeros, zeros, zeros)
            wanted = mix(jnp.asarray(g[:, :3]), zeros[:, :3])[0]
            np.testing.assert_allclose(new[:, :3], wanted, rtol=1e-6)
            np.testing.assert_array_equal(slot[:, :3], g[:, :3])
            np.testing.assert_array_equal((new[:, 3:], slot[:, 3:]), 0)


# Bad input


def test_refuses_slots():
    with pytest.raises(ValueError, match=r"slot '.*accumulator' is bfloat16"):
        optzoo.interop.sparsecore.sparsecore(optzoo.slots_dtype(optzoo.adagrad(0.1), "bfloat16"))
    remember = optax.GradientTransformation(lambda x: x, lambda g, s, x=None: (g, s))
    with pytest.raises(ValueError, match="is initialized from the parameters"):
        optzoo.interop.sparsecore.sparsecore(optzoo.on_rows(remember))
    wide = optax.GradientTransformation(
        lambda x: jnp.zeros((len(x), 2)), lambda g, s, x=None: (g, s + 1)
    )
    with pytest.raises(ValueError, match=r"has \(2,\) elements for each row"):
        optzoo.interop.sparsecore.sparsecore(optzoo.on_rows(wide))


def test_refuses_another_rule_for_rows():
    def halved(rule):
        return optzoo.rules.policies.lazy(lambda g, *args, **kwargs: rule(g / 2, *args, **kwargs))

    tx = optzoo.rules.leafwise(lambda g, x, s, t: (-g, s), rows=halved)
    with pytest.raises(ValueError, match="its rules for SparseRows and for arrays differ"):
        optzoo.interop.sparsecore.sparsecore(tx)


def test_refuses_what_cannot_be_done_for_many_rows():
    product = lambda g, s, x=None: (g * jnp.einsum("ij,ij->i", g, g)[:, None], s)
    tx = optax.GradientTransformation(lambda x: (), product)
    with pytest.raises(ValueError, match=r"`dot_general` \(.*\) cannot be batched over rows"):
        optzoo.interop.sparsecore.sparsecore(optzoo.on_rows(tx), width=8)


def test_refuses_arguments():
    with pytest.raises(TypeError, match="tx must be an optax transformation"):
        optzoo.interop.sparsecore.sparsecore(0.1)
    with pytest.raises(TypeError, match="width must be an int"):
        optzoo.interop.sparsecore.sparsecore(optzoo.adagrad(0.1), width=2.5)
    with pytest.raises(ValueError, match="name must be a valid name of a variable, got 'a b'"):
        optzoo.interop.sparsecore.sparsecore(optzoo.adagrad(0.1), name="a b")
    with pytest.raises(ValueError, match=r"the elements of a row depend on each other.*width="):
        optzoo.interop.sparsecore.sparsecore(optzoo.row_wise_adagrad(0.1))
    spec = optzoo.interop.sparsecore.sparsecore(optzoo.row_wise_adagrad(0.1), width=9)
    with pytest.raises(ValueError, match="width must be at most 8, that of the table, got 9"):
        lowered.lower(spec, 8)
    adam = optzoo.interop.sparsecore.sparsecore(optzoo.lazy_adam(0.1))
    for step in (None, 3, {}, {"other": adam.first_shared()}):
        with pytest.raises(TypeError, match="step must be the result of first_shared"):
            adam.get_hyperparameters(step)
    with pytest.raises(ValueError, match="step must be zero or positive, got -1"):
        adam.first_shared(-1)


def test_hints_at_on_rows():
    with pytest.raises(
        ValueError, match=r"moves all rows of table 'table'\. Use optzoo\.on_rows\("
    ):
        optzoo.interop.sparsecore.sparsecore(optzoo.adam(0.1))


def test_without_the_wheel(monkeypatch):
    from optzoo.interop.sparsecore import api

    api._spec_class.cache_clear()
    monkeypatch.setitem(sys.modules, api._MODULE, None)
    with pytest.raises(ImportError, match=r"pip install 'optzoo\[sparsecore\]'"):
        optzoo.interop.sparsecore.sparsecore(optzoo.adagrad(0.1))
    api._spec_class.cache_clear()


def test_a_wheel_without_custom_optimizers(monkeypatch):
    from optzoo.interop.sparsecore import api

    api._spec_class.cache_clear()
    monkeypatch.setitem(sys.modules, api._MODULE, types.ModuleType("embedding_spec"))
    monkeypatch.setattr(importlib.metadata, "version", {"jax-tpu-embedding": "0.0.9"}.get)
    with pytest.raises(ImportError, match=r"jax-tpu-embedding 0\.1\.0 or later, got 0\.0\.9,"):
        optzoo.interop.sparsecore.sparsecore(optzoo.adagrad(0.1))
    api._spec_class.cache_clear()
