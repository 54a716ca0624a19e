"""FBGEMM's names and arguments: what they become here, what is refused, and warnings."""

import dataclasses
import enum
import types
import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optzoo
from optzoo import SparseRows, create
from optzoo.testing.samples import step

X = {"t": jnp.linspace(-1.0, 1, 20).reshape(5, 4)}


def trained(tx, x=X, steps=4):
    """The table and the state after some steps with a few rows."""
    x, state = {"t": jnp.array(x["t"])}, tx.init(x)
    for k in range(steps):
        ids, values = jnp.array([0, 2, 0, k % 4]), jnp.cos(jnp.arange(16.0) + k).reshape(4, 4)
        x, state = step(tx, {"t": SparseRows(ids, values, 5)}, x, state)
    return x, state


# Copies of FBGEMM's enums and classes.
EmbOptimType = enum.Enum(
    "EmbOptimType",
    {"ADAM": "adam", "EXACT_ROWWISE_ADAGRAD": "exact_row_wise_adagrad", "MADGRAD": "madgrad"},
)
WeightDecayMode = enum.IntEnum("WeightDecayMode", {"L2": 1, "DECOUPLE": 2, "COUNTER": 3})
CounterMode = enum.IntEnum("CounterWeightDecayMode", {"NONE": 0, "L2": 1, "ADAGRADW": 3})
RateMode = enum.IntEnum("LearningRateMode", {"EQUAL": -1, "TAIL_ID_LR_INCREASE": 0})


@dataclasses.dataclass(frozen=True)
class TailIdThreshold:
    val: float = 0
    is_ratio: bool = False


@dataclasses.dataclass(frozen=True)
class Definition:
    counter_weight_decay_mode: CounterMode = CounterMode.NONE
    counter_halflife: int = -1
    adjustment_iter: int = -1
    learning_rate_mode: RateMode = RateMode.EQUAL
    tail_id_threshold: TailIdThreshold = dataclasses.field(default_factory=TailIdThreshold)


F32 = float(np.float32(0.1))
DECAY = {"learning_rate": 0.1, "weight_decay": 0.2}
CLASS_OF_COUNTER = "counter_based_regularization"
# FBGEMM's name and arguments, and the same by our plain names.
SAME = {
    "sgd": (("EXACT_SGD", {"learning_rate": 0.1}), lambda: optzoo.gradient_descent(F32)),
    "adagrad": (("EXACT_ADAGRAD", {"eps": 0.1}), lambda: optzoo.adagrad_eps(np.float32(0.01), 0.1)),
    "row-wise": (
        ("EXACT_ROWWISE_ADAGRAD", {"learning_rate": 0.1}),
        lambda: optzoo.row_wise_adagrad(F32),
    ),
    "l2": (
        ("EXACT_ROWWISE_ADAGRAD", {**DECAY, "weight_decay_mode": "L2"}),
        lambda: optzoo.row_wise_adagrad(F32, l2_weight_decay=0.2),
    ),
    "decouple": (
        (EmbOptimType.EXACT_ROWWISE_ADAGRAD, {**DECAY, "weight_decay_mode": WeightDecayMode(2)}),
        lambda: optzoo.row_wise_adagrad(F32, weight_decay=0.2),
    ),
    "counter": (
        (
            "exact_row_wise_adagrad",
            {
                **DECAY,
                "weight_decay_mode": WeightDecayMode.COUNTER,
                CLASS_OF_COUNTER: Definition(CounterMode.L2, 3, 1),
            },
        ),
        lambda: optzoo.interop.fbgemm.counter_row_wise_adagrad(
            F32, weight_decay=0.2, weight_decay_mode="l2", half_life=3, start_step=1
        ),
    ),
    "tail": (
        (
            "EmbOptimType.EXACT_ROWWISE_ADAGRAD",
            {
                **DECAY,
                "weight_decay_mode": "WeightDecayMode.COUNTER",
                CLASS_OF_COUNTER: {
                    "counter_weight_decay_mode": "adagradw",
                    "learning_rate_mode": RateMode.TAIL_ID_LR_INCREASE,
                    "tail_id_threshold": TailIdThreshold(0.5, True),
                    "max_counter_update_freq": 2,
                },
            },
        ),
        lambda: optzoo.interop.fbgemm.counter_row_wise_adagrad(
            F32,
            weight_decay=0.2,
            weight_decay_mode="adagradw",
            learning_rate_mode="tail_increase",
            tail_threshold=0.5,
            is_ratio=True,
            max_counter_every=2,
        ),
    ),
    "cowclip": (
        (
            "EXACT_ROWWISE_ADAGRAD",
            {
                **DECAY,
                "weight_decay_mode": "COWCLIP",
                "cowclip_regularization": types.SimpleNamespace(lower_bound=0.1),
            },
        ),
        lambda: optzoo.interop.fbgemm.cowclip_row_wise_adagrad(
            F32, weight_decay=0.2, weight_norm_coefficient=0, lower_bound=0.1
        ),
    ),
    "ema": (
        ("EMAINPLACE_ROWWISE_ADAGRAD", {"emainplace_mode": {"step_ema": 2.0}}),
        lambda: optzoo.interop.fbgemm.ema_in_place(optzoo.row_wise_adagrad(np.float32(0.01)), 2),
    ),
    "rmsprop": (
        ("rowwise_rmsprop_ar", {"learning_rate": 0.1, "ar_alpha": 0.5}),
        lambda: optzoo.row_wise_rmsprop(F32, weight_decay=0.5),
    ),
    "adam": (
        (EmbOptimType.ADAM, {"learning_rate": 0.1, "weight_decay": 0.2}),
        lambda: optzoo.sparse_adamw(F32, weight_decay=0.2),
    ),
    "partial adam": (
        ("EmbOptimType.PARTIAL_ROWWISE_ADAM", {**DECAY, "beta1": 0.8}),
        lambda: optzoo.partial_row_wise_adam(F32, 0.8, weight_decay=0.2),
    ),
    "lamb": (
        ("EmbOptimType.LAMB", {**DECAY, "beta2": 0.9}),
        lambda: optzoo.row_wise_lamb(F32, b2=0.9, weight_decay=0.2),
    ),
    "partial lamb": (
        ("EmbOptimType.PARTIAL_ROWWISE_LAMB", {**DECAY, "eps": 0.1}),
        lambda: optzoo.partial_row_wise_lamb(F32, eps=0.1, weight_decay=0.2),
    ),
    "lars": (
        ("LARS_SGD", {**DECAY, "momentum": 0.8, "eta": 0.1}),
        lambda: optzoo.row_wise_lars(F32, 0.8, 0.2, 0.1),
    ),
    "adam by its value": (
        ("EmbOptimType.adam", {"learning_rate": 0.1}),
        lambda: optzoo.sparse_adamw(F32),
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_names_of_both(name):
    (theirs, arguments), ours = SAME[name]
    chex.assert_trees_all_equal(trained(create(theirs, **arguments)), trained(ours()))
    config = {"class": theirs, **arguments}
    chex.assert_trees_all_equal(trained(create(config)), trained(ours()))
    chex.assert_trees_all_equal(
        trained(optzoo.interop.fbgemm.fbgemm_optimizer(theirs, **arguments)), trained(ours())
    )


def test_adam_without_its_enum_is_that_of_tensorflow():
    (a, _), (b, _) = trained(create("ADAM", epsilon=0.1)), trained(optzoo.adam(eps=0.1))
    np.testing.assert_allclose(a["t"], b["t"], rtol=1e-6)


def test_the_rate_is_rounded_and_may_be_a_schedule():
    falling = lambda k: 0.1 / (1 + k)
    arguments = {"weight_decay": 0.2, "weight_decay_mode": "DECOUPLE"}
    tx = create("EXACT_ROWWISE_ADAGRAD", learning_rate=falling, **arguments)
    want = optzoo.row_wise_adagrad(lambda k: jnp.float32(falling(k)), weight_decay=0.2)
    chex.assert_trees_all_equal(trained(tx), trained(want))


REFUSED = {
    "unknown": (("EXACT_ROWWISE_ADAGRAD", {"epsilom": 1}), TypeError, "no argument 'epsilom'"),
    "of lookups": (("EXACT_SGD", {"pooling_mode": 1}), TypeError, "no argument 'pooling_mode'"),
    "madgrad": ((EmbOptimType.MADGRAD, {}), ValueError, "FBGEMM does not implement it"),
    "deprecated": (("EmbOptimType.SGD", {}), ValueError, "deprecated in FBGEMM: use EXACT_SGD"),
    "none": (("EmbOptimType.NONE", {}), ValueError, "optax.set_to_zero"),
    "mode": (
        ("EXACT_ROWWISE_ADAGRAD", {"weight_decay_mode": "L3"}),
        ValueError,
        "weight_decay_mode must be one of NONE, L2, DECOUPLE",
    ),
    "number": (
        ("EXACT_ROWWISE_ADAGRAD", {"weight_decay_mode": 2}),
        TypeError,
        "weight_decay_mode must be the name of a mode",
    ),
    "no definition": (
        ("EXACT_ROWWISE_ADAGRAD", {"weight_decay_mode": "COUNTER"}),
        ValueError,
        "weight_decay_mode='COUNTER' needs counter_based_regularization, and vice versa",
    ),
    "no mode": (
        ("EXACT_ROWWISE_ADAGRAD", {"cowclip_regularization": {}}),
        ValueError,
        "weight_decay_mode='COWCLIP' needs cowclip_regularization, and vice versa",
    ),
    "field": (
        (
            "EXACT_ROWWISE_ADAGRAD",
            {"weight_decay_mode": "COUNTER", CLASS_OF_COUNTER: {"counter_half_life": 3}},
        ),
        TypeError,
        "no field 'counter_half_life'; did you mean 'counter_halflife'",
    ),
    "no mapping": (
        ("EXACT_ROWWISE_ADAGRAD", {"weight_decay_mode": "COUNTER", CLASS_OF_COUNTER: 3}),
        TypeError,
        "counter_based_regularization must be a mapping",
    ),
    "counter in ema": (
        (
            "EMAINPLACE_ROWWISE_ADAGRAD",
            {"weight_decay_mode": "DECOUPLE_GLOBAL", "global_weight_decay": {}},
        ),
        ValueError,
        "needs the optimizer EXACT_ROWWISE_ADAGRAD",
    ),
    "writeback": (
        ("EXACT_SGD", {"extra_optimizer_config": {"use_writeback_bwd_prehook": True}}),
        ValueError,
        "use_writeback_bwd_prehook changes lookups",
    ),
    "half a step": (
        ("EMAINPLACE_ROWWISE_ADAGRAD", {"emainplace_mode": {"step_ema": 1.5}}),
        TypeError,
        "step_ema must be a whole number",
    ),
    "range": (("EXACT_ADAGRAD", {"eps": -1.0}), ValueError, "eps must be zero or positive"),
    "norm": (("EXACT_SGD", {"max_norm": -1.0}), ValueError, "max_norm must be zero or positive"),
    "flag": (("EXACT_SGD", {"gradient_clipping": 2}), TypeError, "gradient_clipping must be True"),
    "rate": (("EXACT_SGD", {"learning_rate": "a"}), TypeError, "learning_rate must be"),
    "bound": (("EXACT_SGD", {"max_gradient": 0.0}), ValueError, "max_gradient must be positive"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    (optimizer, arguments), error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        create(optimizer, **arguments)


def test_an_unknown_optimizer():
    for bad in ("EXACT_FTRL", 3):
        with pytest.raises(ValueError, match="optimizer must be one of EXACT_SGD"):
            optzoo.interop.fbgemm.fbgemm_optimizer(bad)


COUNTED = {"weight_decay_mode": "COUNTER", CLASS_OF_COUNTER: {}}
WARNED = {
    "decay of sgd": (("EXACT_SGD", {"weight_decay": 0.1}), "EXACT_SGD ignores weight_decay=0.1"),
    "mode of adagrad": (
        ("EXACT_ADAGRAD", {"weight_decay_mode": "L2"}),
        "EXACT_ADAGRAD ignores weight_decay_mode='L2'",
    ),
    "betas": (("EXACT_ROWWISE_ADAGRAD", {"beta1": 0.5}), "ignores beta1=0.5"),
    "decay without mode": (
        ("EXACT_ROWWISE_ADAGRAD", {"weight_decay": 0.1}),
        "weight_decay=0.1 has no effect with weight_decay_mode='NONE'",
    ),
    "max_norm of counters": (
        ("EXACT_ROWWISE_ADAGRAD", {**COUNTED, "max_norm": 1.0}),
        "max_norm=1.0 has no effect with weight_decay_mode='COUNTER'",
    ),
    "rounding": (
        ("EXACT_SGD", {"stochastic_rounding": True}),
        "16-bit tables are rounded to nearest",
    ),
    "growing rows": (
        (
            "EXACT_ROWWISE_ADAGRAD",
            {**COUNTED, CLASS_OF_COUNTER: {"counter_weight_decay_mode": "L2"}},
        ),
        "half_life=-1 makes .* negative: rows grow, as in FBGEMM",
    ),
    "grad_sum_decay": (
        ("EXACT_ROWWISE_ADAGRAD", {**COUNTED, CLASS_OF_COUNTER: {"grad_sum_decay": "CTR_DECAY"}}),
        "grad_sum_decay has no effect",
    ),
    "cowclip": (
        ("EXACT_ROWWISE_ADAGRAD", {"weight_decay_mode": "COWCLIP", "cowclip_regularization": {}}),
        "clips all gradients to zero",
    ),
    "cowclip and adagradw": (
        (
            "EXACT_ROWWISE_ADAGRAD",
            {
                "weight_decay_mode": "COWCLIP",
                "cowclip_regularization": {
                    "counter_weight_decay_mode": "ADAGRADW",
                    "lower_bound": 1.0,
                },
            },
        ),
        "COWCLIP with ADAGRADW has no decay",
    ),
}


@pytest.mark.parametrize("name", WARNED)
def test_warnings(name):
    (optimizer, arguments), message = WARNED[name]
    with pytest.warns(UserWarning, match=message) as caught:
        create(optimizer, **arguments)
    assert len(caught) == 1


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_decay_without_a_mode_does_nothing():
    tx = create("EXACT_ROWWISE_ADAGRAD", **DECAY)
    chex.assert_trees_all_equal(trained(tx), trained(optzoo.row_wise_adagrad(F32)))


def test_defaults_warn_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in ("EXACT_SGD", "EXACT_ADAGRAD", "EXACT_ROWWISE_ADAGRAD", "EmbOptimType.LAMB"):
            create(name, stochastic_rounding=False, weight_decay_mode="NONE", beta1=0.9)


def test_gradients_are_clipped_before_rows_are_summed():
    tx = create("EXACT_SGD", learning_rate=1.0, gradient_clipping=True, max_gradient=0.5)
    rows = SparseRows(jnp.array([1, 1, 2]), jnp.array([[2.0], [2.0], [-0.25]]), 3)
    x, _ = step(tx, rows, jnp.zeros((3, 1)))
    np.testing.assert_array_equal(x, [[0], [-1], [0.25]])
    x, _ = step(tx, jnp.array([[2.0], [0.1], [-3]]), jnp.zeros((3, 1)))
    np.testing.assert_allclose(x, [[-0.5], [-0.1], [0.5]])


def test_max_norm_holds_for_touched_rows():
    tx = create("EXACT_ROWWISE_ADAGRAD", learning_rate=0.1, max_norm=0.5)
    x, _ = trained(tx)
    norms = np.linalg.norm(x["t"], axis=1)
    assert (norms[:4] < 0.5 + 1e-6).all() and norms[4] == np.linalg.norm(X["t"][4]) > 0.5


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_tables_of_16_bits_have_wide_slots(dtype):
    half = {"t": X["t"].astype(dtype)}
    for name in ("EXACT_ADAGRAD", "EXACT_ROWWISE_ADAGRAD", "EmbOptimType.LAMB"):
        tx = create(name, learning_rate=0.1)
        abstract = jax.eval_shape(lambda: half)
        assert jax.tree.map(lambda a: a.dtype, tx.init(abstract)) == jax.tree.map(
            lambda a: a.dtype, tx.init(half)
        )
        x, state = trained(tx, half)
        assert x["t"].dtype == dtype
        floats = {a.dtype for a in jax.tree.leaves(state) if a.ndim}
        assert floats == {jnp.dtype("float32")}


def test_a_row_of_16_bits_is_rounded_once():
    """By row-wise optimizers: the sum of row and update alone. Others round the update, too."""
    x = jnp.array([[1.0, 0.5]], jnp.float16)
    g = jnp.array([[1.0, 0.4995]], jnp.float32)
    rows = SparseRows(jnp.array([0]), g, 1)
    tx = create("EXACT_ROWWISE_ADAGRAD", learning_rate=1.0)
    exact, _ = step(tx, rows, x.astype(jnp.float32))
    once, _ = step(tx, rows, x)
    np.testing.assert_array_equal(once, exact.astype(jnp.float16))
    twice, _ = step(create("EXACT_SGD", learning_rate=1.0), rows, x)
    np.testing.assert_array_equal(twice, x - g.astype(jnp.float16))


def test_gradients_that_are_missing_or_of_no_table():
    tx = create("EXACT_ROWWISE_ADAGRAD", gradient_clipping=True)
    updates, _ = tx.update({"t": None}, tx.init(X), X)
    assert updates == {"t": None}
    sgd = create("EXACT_SGD", learning_rate=1.0)
    rows = SparseRows(jnp.array([1, 1]), jnp.ones((2, 4)), 5)
    updates, _ = sgd.update({"t": rows}, sgd.init(X))
    np.testing.assert_array_equal(optax.apply_updates(X, updates)["t"][1], X["t"][1] - 2)
