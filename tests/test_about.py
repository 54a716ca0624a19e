"""What transformations say of themselves, against what their updates do."""

import itertools

import jax
import jax.numpy as jnp
import optax
import pytest

import optzoo
from optzoo import CATALOG, SparseRows
from optzoo.core.optimizer import UNKNOWN, Notes, Optimizer, about_of, known
from optzoo.jaxprs.equations import used_inputs
from optzoo.jaxprs.prove_shards import NotAlone, prove_alone

from .wrappers.test_contract import WRAPPERS as AROUND

# Their rules for rows are no policies: they are momentum, and a norm of all rows together.
NO_POLICY = {"lars", "normalized_sgd", "grad_variance_scaled"}
WRAPPERS = {
    **{
        name: lambda inner, wrap=wrap: wrap(inner, dims={".*": ()}) for name, wrap in AROUND.items()
    },
    "accumulate": lambda inner: optzoo.accumulate(inner, 2),
    "caught_up": lambda inner: optzoo.caught_up(inner, mask=True, dense=True),
    "graft": lambda inner: optzoo.transforms.graft(inner, inner),
    "groups": lambda inner: optzoo.param_groups({".*": inner}),
    "master_weights": optzoo.master_weights,
    "on_rows": optzoo.on_rows,
    "on_values": optzoo.rows.on_values,
    "slots_dtype": lambda inner: optzoo.slots_dtype(inner, "bfloat16", packed=True),
    # Random bits by the places of rows, which the proof does not follow.
    "slots_dtype at random": lambda inner: optzoo.slots_dtype(inner, "bfloat16", stochastic=True),
    "slots_dtype in 8 bits": lambda inner: optzoo.slots_dtype(inner, "int8"),
    "stacked": optzoo.stacked,
}
# What is said of rows beyond the keywords, where the wrapper keeps it; with its own decay rule.
STORED = {"slots_dtype", "slots_dtype at random"}
KEEPS_ROWS = {
    "cautious_weight_decay",
    "decoupled_weight_decay",
    "groups",
    "master_weights",
    "multitask",
    "on_rows",
    "skip_spikes",
    "stacked",
}
KEEPS_ROWS |= {"slots_dtype in 8 bits", *STORED}
KEEPS_DEFERRAL = {"decoupled_weight_decay", "moving_average", *STORED}
PARAMS = {"table": jnp.ones((7, 8))}


def is_alone(tx, params=PARAMS, **extra_args):
    """Whether it is proved that an optimizer updates each touched row by itself."""
    try:
        prove_alone(tx, params, {0: "table"}, extra_args)
    except NotAlone:
        return False
    return True


def read_by(tx, names):
    """The keywords on which a result of an update depends, of dense gradients or of rows."""
    rows = {"table": SparseRows(jnp.array([2]), jnp.ones((1, 8)), 7)}
    state, found = jax.eval_shape(tx.init, PARAMS), set()
    others = {name: jnp.zeros([]) for name in sorted({*names} - {"global_step"})}
    step = {"global_step": jnp.zeros([], jnp.int32)}  # read by schedules, where no value is given
    for grads, given in itertools.product((PARAMS, rows), (step, step | others)):
        update = lambda given, state, grads=grads: tx.update(grads, state, PARAMS, **given)
        used = used_inputs(jax.make_jaxpr(update)(given, state).jaxpr)
        found |= {name for name, is_used in zip(sorted(given), used, strict=False) if is_used}
    return found


KEYWORDS = set().union(*(entry.make().about.reads for entry in CATALOG.values()))
KEYWORDS -= {"alpha"}  # of Shampoo: a static argument


@pytest.mark.parametrize("name", CATALOG)
def test_what_an_optimizer_says_is_what_it_does(name):
    entry = CATALOG[name]
    tx = entry.make(lambda step: 0.1 / (1 + step))
    about = tx.about
    by_rule = name in NO_POLICY or entry.family == "second_order"
    assert (about.rows and about.rows.__name__) == (None if by_rule else entry.rows)
    needed = {"global_step": 0} if entry.needs_global_step else {}
    assert about.row_wise == is_alone(tx, **needed) or (by_rule and not about.row_wise)
    assert UNKNOWN not in about.reads
    assert read_by(tx, KEYWORDS) <= about.reads


def test_the_keywords_that_are_read_are_found():
    assert read_by(optzoo.lazy_adam(), KEYWORDS) == {"learning_rate"}
    falling = optzoo.add_sign(lambda step: 0.1 / (1 + step))
    assert read_by(falling, KEYWORDS) == {"global_step", "learning_rate", "sign_decay"}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapper_hands_on_what_is_known(wrapper):
    inner = optzoo.momentum(0.1, 0.9)
    about = about_of(WRAPPERS[wrapper](inner))
    assert UNKNOWN not in about.reads and inner.about.reads <= about.reads
    assert (about.rows is optzoo.rules.lazy) == (wrapper in KEEPS_ROWS)
    assert about.row_wise == (
        wrapper in KEEPS_ROWS - {"multitask", "skip_spikes", "slots_dtype at random"}
    )
    dtype = "bfloat16" if wrapper == "master_weights" else "float32"
    params = {"table": PARAMS["table"].astype(dtype)}
    assert not about.row_wise or is_alone(WRAPPERS[wrapper](inner), params)
    assert (about.deferral is not None) == (wrapper in KEEPS_DEFERRAL)
    assert (about.deferred is not None) == (wrapper == "caught_up")


@pytest.mark.parametrize("others_first", [False, True])
def test_groups_say_what_is_true_of_all_of_them(others_first):
    pair = optzoo.lazy_adam(0.1), optzoo.accumulate(optzoo.adam(0.1), 2)
    about = optzoo.param_groups(dict(zip("ab", pair[:: 1 - 2 * others_first], strict=True))).about
    assert about.rows is None and not about.row_wise
    assert about.reads == pair[0].about.reads | pair[1].about.reads


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapper_of_another_library_s_transformation_knows_that_it_does_not_know(wrapper):
    inner = known(optax.sgd(0.1), deferral=optzoo.momentum(0.1, 0.9).about.deferral)
    about = about_of(WRAPPERS[wrapper](inner))
    assert UNKNOWN in about.reads
    assert not about.row_wise or wrapper == "on_rows"  # which proves it by itself


def test_all_wrappers_are_here():
    assert {*optzoo.catalog.WRAPPERS, *optzoo.catalog.DISTRIBUTED} <= WRAPPERS.keys()


def test_an_optimizer_is_a_transformation_of_optax():
    tx = optzoo.lazy_adam(0.1)
    init, update = tx
    assert (init, update) == (tx.init, tx.update) and isinstance(tx, Optimizer)
    assert optax.with_extra_args_support(tx) is tx
    for unknown in (optax.chain(tx, optax.identity()), tx._replace(init=init), optax.sgd(0.1)):
        assert about_of(unknown).reads == {UNKNOWN} and about_of(unknown).rows is None


def test_notes_pass_transformations_of_jax():
    """They are no arrays: a program that is traced for other notes is another one."""
    tx = optax.chain(optax.clip(1.0), optzoo.transforms.scale_by_learning_rate(0.1))
    state, notes = tx.init(PARAMS), [Notes(), Notes()]
    for each in notes:
        jax.jit(tx.update)(PARAMS, state, PARAMS, optzoo_reads=each)
    assert [each.of for each in notes] == [[frozenset({"global_step", "learning_rate"})]] * 2
