"""Any optimizer made lazy, against its own dense run on a table of the touched rows."""

import dataclasses
import functools
import inspect
import re
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import Primitive
from optax import contrib

import optzoo
from optzoo import SparseRows, on_rows
from optzoo.testing.samples import (
    avals,
    dense_grads,
    params,
    row_grads,
    step,
    step_of,
    to_dense,
)

TOUCHED, REST = np.array([1, 3]), np.array([0, 2, 4])
HINT = r"[Pp]ut optzoo\.rows\.densify\(\) before"

merge = jax.jit(SparseRows.coalesce)


def table(indices, values, num_rows=5):
    return {"table": SparseRows(jnp.array(indices, jnp.int32), jnp.array(values), num_rows)}


def compare(inner, xs=None, jit=False, check=True):
    """Four steps beside the dense run of the touched rows; the rest must not move.

    All rows of ``one_row`` are touched.
    """
    lazy, xs = on_rows(inner, check=check), params() if xs is None else xs
    few = {**xs, "table": jnp.asarray(np.asarray(xs["table"])[TOUCHED])}
    start = ours = xs, lazy.init(xs)
    theirs = few, inner.init(few)
    compiled = jax.jit if jit else lambda f: f
    lazy_step, dense_step = (compiled(step_of(tx)) for tx in (lazy, inner))
    for k in (1.0, 2.0, 3.0, 4.0):
        values = np.cos(k * np.arange(8)).reshape(4, 2).astype(xs["table"].dtype)
        others = {"layer": (np.sin(k + np.arange(3)), k)}
        others = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), others)
        of_one = np.cos(k * np.arange(9.0)).reshape(3, 3).astype("float32")
        rows = {
            "table": SparseRows(jnp.array([1, 3, 1, 5]), jnp.asarray(values), 5),
            "one_row": SparseRows(jnp.array([0, 1, 0]), jnp.asarray(of_one), 1),
        }
        if not jit:  # spares compiling the merge for every optimizer
            rows = {k: dataclasses.replace(merge(g), coalesced=True) for k, g in rows.items()}
        dense = to_dense(rows)
        ours = lazy_step(*ours, rows | others)
        theirs = dense_step(*theirs, {**dense, "table": dense["table"][TOUCHED], **others})
    for trees in zip(*map(jax.tree.leaves, (start, ours, theirs)), strict=True):
        before, got, want = map(np.asarray, trees)
        if got.shape != want.shape:
            np.testing.assert_array_equal(got[REST], before[REST])
            got = got[TOUCHED]
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-7)
    types = lambda tree: [(leaf.dtype, leaf.weak_type) for leaf in jax.tree.leaves(tree)]
    assert types(ours) == types(theirs)
    for name, at in (("table", TOUCHED), ("one_row", [0])):
        after, before = (np.asarray(x[name])[at] for x in (ours[0], xs))
        assert not np.array_equal(after, before), name


# All of optax


def factories():
    """Every public factory of optax with a learning rate, and every ``scale_by_*``."""
    for module in (optax, contrib):
        for name, f in vars(module).items():
            if isinstance(f, types.FunctionType | functools.partial):
                with_rate = "learning_rate" in inspect.signature(f).parameters
                if not name.startswith("_") and (with_rate or name.startswith("scale_by_")):
                    yield name, f


FACTORIES = dict(factories())

WORKS = set(
    """
    acprop adabelief adadelta adagrad adam adamax adamaxw adamw adan ademamix adopt amsgrad cocob
    lion madgrad nadam nadamw optimistic_adam optimistic_adam_v2 optimistic_gradient_descent radam
    rmsprop rprop schedule_free schedule_free_adamw schedule_free_sgd sgd sign_sgd signum
    simplified_ademamix yogi
    scale_by_acprop scale_by_adadelta scale_by_adam scale_by_adamax scale_by_adan
    scale_by_ademamix scale_by_adopt scale_by_amsgrad scale_by_belief scale_by_cocob
    scale_by_factored_rms scale_by_learning_rate scale_by_lion scale_by_madgrad
    scale_by_optimistic_gradient scale_by_radam scale_by_rms scale_by_rprop scale_by_rss
    scale_by_schedule scale_by_sign scale_by_simplified_ademamix scale_by_stddev scale_by_yogi
    """.split()  # noqa: SIM905
)

REFUSED = {
    "norms of the table": """
        adafactor dowg dog fromage lamb lars muon novograd scale_by_distance_over_gradients
        scale_by_muon scale_by_novograd scale_by_param_block_norm scale_by_param_block_rms
        scale_by_polyak scale_by_trust_ratio
    """,
    "products over all parameters": "dadapt_adamw momo momo_adam prodigy",
    "statistics of the columns": "galore scale_by_galore scale_by_sm3 sm3",
    "a history along another axis before the rows": "lbfgs scale_by_lbfgs",
    "noise that depends on the position of a row": "noisy_sgd sophia",
    "gradients of single examples": "dpsgd",
    "a search along a line": "scale_by_backtracking_linesearch scale_by_zoom_linesearch",
}
REFUSED = {name: reason for reason, names in REFUSED.items() for name in names.split()}

ARGUMENTS = {
    "base_optimizer": optax.sgd(0.1),
    "l2_norm_clip": 1.0,
    "learning_rate": 0.1,
    "max_backtracking_steps": 3,
    "max_linesearch_steps": 3,
    "noise_multiplier": 0.1,
    "seed": 0,
    "step_size_fn": lambda count: 0.1 / (1 + count),
}
SPECIAL = {
    "scale_by_learning_rate": {"learning_rate": 0.1},
    "scale_by_muon": {
        "weight_dimension_numbers": functools.partial(
            jax.tree.map, lambda _: contrib.MuonDimensionNumbers()
        )
    },
}


def made(name):
    factory = FACTORIES[name]
    parameters = inspect.signature(factory).parameters
    required = {k: ARGUMENTS[k] for k, p in parameters.items() if p.default is p.empty}
    special = {k: v for k, v in SPECIAL.get(name, {}).items() if k in parameters}
    return factory(**required, **special)


def test_every_optimizer_of_optax_is_known():
    assert FACTORIES.keys() - WORKS - REFUSED.keys() == set()
    assert WORKS & REFUSED.keys() == set()


@pytest.mark.filterwarnings("ignore")  # optax deprecates arguments
@pytest.mark.parametrize("name", sorted(WORKS & FACTORIES.keys()))
def test_works(name):
    compare(made(name))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(REFUSED.keys() & FACTORIES.keys()))
def test_refused(name):
    tx, xs = on_rows(made(name)), {"table": jnp.ones((5, 2))}
    loss = lambda p: jnp.sum(p["table"] ** 2)
    wants = {
        "scale_by_polyak": {"value": jnp.ones(())},
        "momo": {"value": jnp.ones(())},
        "momo_adam": {"value": jnp.ones(())},
        "sophia": {"obj_fn": loss},
        "scale_by_backtracking_linesearch": {"value": jnp.ones(()), "grad": xs, "value_fn": loss},
        "scale_by_zoom_linesearch": {"value": jnp.ones(()), "grad": xs, "value_fn": loss},
    }
    # Under JAX 0.9 it is optax that compares shapes, with an assertion.
    with pytest.raises((ValueError, TypeError, AssertionError), match=HINT):
        jax.eval_shape(lambda: step(tx, table([1, 3], jnp.ones((2, 2))), xs, **wants.get(name, {})))


@pytest.mark.filterwarnings("ignore")
def test_the_check_knows_the_primitives_of_this_jax():
    """A canary: a new version of JAX or optax may bring primitives that the check does not know."""
    unknown = {}
    for name in sorted(WORKS & FACTORIES.keys()):
        tx, xs = on_rows(made(name)), {"table": jnp.ones((5, 2))}
        try:
            jax.eval_shape(lambda tx=tx, xs=xs: step(tx, table([1, 3], jnp.ones((2, 2))), xs))
        except ValueError as error:
            if "not supported by its check" not in str(error):
                raise
            unknown[name] = str(error)
    assert not unknown, (
        f"JAX {jax.__version__} with optax {optax.__version__} has primitives that the check of "
        "on_rows does not know. Give each the kind in optzoo/jaxprs/primitives.py that fits what "
        f"it does: {unknown}"
    )


# Without the check


@pytest.mark.parametrize("name", ["adamw", "lion", "scale_by_factored_rms"])
def test_without_the_check_the_rows_of_the_state_are_found(name):
    compare(made(name), check=False)


def test_without_the_check_nothing_is_proved():
    """What the check cannot know to be row-wise runs; the update is traced once, not thrice."""
    calls = []

    def sorts(g, x):
        calls.append(g.shape)
        return jnp.sort(g, axis=1) + jnp.sort(x, axis=1)

    inner, xs, rows = leaf_by_leaf(sorts), {"table": jnp.ones((5, 2))}, table([1], [[2.0, 1]])
    with pytest.raises(ValueError, match=r"`sort` may mix .* use optzoo\.on_rows\(.*check=False"):
        step(on_rows(inner), rows, xs)
    calls.clear()
    after, _ = step(on_rows(inner, check=False), rows, xs)
    np.testing.assert_array_equal(after["table"][1], [3, 4])
    assert calls == [(1, 2)]


def test_without_the_check_rows_elsewhere_than_in_front_are_refused():
    inner = optax.GradientTransformation(
        lambda x: jax.tree.map(jnp.transpose, x), lambda g, s, x=None: (g, s)
    )
    for check in (True, False):
        with pytest.raises(ValueError, match="has rows in an axis other than 0") as caught:
            step(on_rows(inner, check=check), table([1], [[1.0, 2]]), {"table": jnp.ones((5, 2))})
        assert caught.match(HINT)


def test_a_primitive_that_the_check_does_not_know():
    new = Primitive("brand_new")
    new.def_impl(jnp.sin)
    new.def_abstract_eval(lambda a: a)
    inner = leaf_by_leaf(lambda g, x: new.bind(g) + x)
    with pytest.raises(ValueError) as caught:
        step(on_rows(inner), table([1], [[1.0, 2]]), {"table": jnp.ones((5, 2))})
    assert re.fullmatch(
        r"optzoo\.on_rows cannot run this optimizer row by row: `brand_new` "
        r"\(.*test_on_rows\.py:\d+.*\) is not supported by its check, and may mix "
        r"the rows of parameter 'table'\. If the optimizer treats each row independently, use "
        r"optzoo\.on_rows\(\.\.\., check=False\); otherwise put optzoo\.rows\.densify\(\) before "
        r"it\.",
        str(caught.value),
    )
    compare(inner, check=False)


# What is row-wise

ROWWISE = {
    "row norm": lambda g, x: g / jnp.sqrt(jnp.sum(x**2, axis=1, keepdims=True)),
    "softmax": lambda g, x: jax.nn.softmax(x, axis=1) * g,
    "largest column": lambda g, x: g * jnp.argmax(x, axis=1, keepdims=True),
    "column numbers": lambda g, x: g * jnp.arange(1.0, 1 + g.shape[1])[None],
    "swapped columns": lambda g, x: jnp.concatenate([g[:, 1:], x[:, :1]], axis=1),
    "matrix": lambda g, x: (
        g @ jnp.array([[1.0, 2, 5], [3, 4, 6], [7, 8, 9]])[: g.shape[1], : g.shape[1]]
    ),
    "inner products": lambda g, x: jnp.einsum("ni,ni->n", g, x)[:, None] * g,
    "transposed": lambda g, x: (g.T * x.T).T,
    "reshaped": lambda g, x: g.reshape(1, -1, 1, g.shape[1]).sum(axis=(0, 2)),
    "jit": lambda g, x: jax.jit(lambda a: jnp.where(a > 0, a, 0.1 * x))(g),
    "cond": lambda g, x: jax.lax.cond(x.ndim + jnp.zeros(()) > 1, jnp.sin, jnp.cos, g),
    "loop": lambda g, x: jax.lax.fori_loop(0, 3, lambda _, a: a * 0.5 + x, g),
    "while": lambda g, x: jax.lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, -c[1]), (0, g)
    )[1],
    "custom_jvp": lambda g, x: jax.nn.relu(g),
    "checkpoint": lambda g, x: jax.checkpoint(jnp.sin)(g),
    "zeros": lambda g, x: g + jnp.zeros_like(x) + jnp.full(x.shape, 2.0),
}

MIXING = {
    "mean": (lambda g, x: g - jnp.mean(g, axis=0, keepdims=True), "`reduce_sum` may mix"),
    "reversed": (lambda g, x: g[::-1], "`rev` may mix"),
    "rolled": (lambda g, x: jnp.roll(g, 1, axis=0), "may mix"),
    "sums": (lambda g, x: jnp.cumsum(g, axis=0), "`cumsum` may mix"),
    "sorted": (lambda g, x: jnp.sort(g, axis=0), "`sort` may mix"),
    "one row": (lambda g, x: g - g[:1], "may mix"),
    "shuffled": (lambda g, x: g.reshape(2, -1).T, "`reshape` may mix"),
    "Gram": (lambda g, x: (g @ x.T) @ g, "`dot_general` may mix"),
    "row numbers": (lambda g, x: g * jnp.arange(len(g))[:, None], "`iota` may mix"),
    "noise": (lambda g, x: g + jax.random.normal(jax.random.key(0), g.shape), "may mix"),
    "scan over rows": (lambda g, x: jax.lax.scan(lambda c, r: (c + r, c), x[0], g)[1], "may mix"),
    "branch": (lambda g, x: jax.lax.cond(g.sum() > 0, lambda: g, lambda: x), "may mix"),
    "numpy": (lambda g, x: g * np.arange(len(g), dtype="f")[:, None], "a constant with the rows"),
    "rate by size": (lambda g, x: g / len(g), "depends on the number of rows"),
    "size first": (lambda g, x: jnp.float32(len(g)) - g, "depends on the number of rows"),
    "choice by size": (lambda g, x: g if len(g) > 100 else -g, "depends on the number of rows"),
    "other shape": (lambda g, x: g[:, :1], r"of shape \(\d+, 1\) for one of shape \(\d+, 2\)"),
    "shape of old": (lambda g, x: g + jnp.ones((500, 2)), r"got .*\d+"),
}


def leaf_by_leaf(f):
    return optax.stateless_with_tree_map(lambda g, x: f(g, x) if g.ndim == 2 else g)


@pytest.mark.parametrize("name", ROWWISE)
def test_rowwise(name):
    compare(leaf_by_leaf(ROWWISE[name]))


@pytest.mark.parametrize("name", MIXING)
def test_mixing(name):
    f, reason = MIXING[name]
    xs = {"table": jnp.ones((500, 2))}
    with pytest.raises((ValueError, TypeError), match=reason) as caught:
        step(on_rows(leaf_by_leaf(f)), table([1], [[1.0, 2]], 500), xs)
    assert caught.match(HINT)


def test_message():
    xs = {"encoder": {"table": jnp.ones((5, 2))}}
    tx = on_rows(optax.lamb(0.1))
    with pytest.raises(ValueError) as caught:
        step(tx, {"encoder": table([1], [[1.0, 2]])}, xs)
    assert re.fullmatch(
        r"optzoo\.on_rows cannot run this optimizer row by row: `reduce_sum` may mix the rows of "
        r"parameter 'encoder/table' \(.*optax.*\.py:\d+.*\)\. Put optzoo\.rows\.densify\(\) "
        "before an "
        r"optimizer that does not treat each row independently\.",
        str(caught.value),
    )


@pytest.mark.parametrize(
    ("inner", "reason"),
    [
        (
            optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
            "MultiStepsState applies a gradient",
        ),
        (optax.chain(optax.apply_every(2), optax.sgd(0.1)), "ApplyEvery applies a gradient"),
        (contrib.sam(optax.sgd(0.1), optax.sgd(0.1)), "SAMState applies a gradient"),
        (optax.apply_if_finite(optax.sgd(0.1), 2), "`reduce_and` may mix"),
        (optax.flatten(optax.sgd(0.1)), "may mix"),
        (optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)), "`reduce_sum` may mix"),
        (optax.masked(optax.lamb(0.1), {"table": True}), "`reduce_sum` may mix"),
        (contrib.mechanize(optax.sgd(0.1)), "may mix"),
    ],
    ids=[
        "MultiSteps",
        "apply_every",
        "sam",
        "apply_if_finite",
        "flatten",
        "clip",
        "masked",
        "mechanize",
    ],
)
def test_refused_wrappers(inner, reason):
    xs = {"table": jnp.ones((5, 2))}
    with pytest.raises(ValueError, match=reason) as caught:
        step(on_rows(inner), table([1], [[1.0, 2]]), xs)
    assert caught.match(HINT)


def test_lookahead_is_refused():
    tx = on_rows(optax.lookahead(optax.sgd(0.1), 2, 0.5))
    xs = optax.LookaheadParams.init_synced({"table": jnp.ones((5, 2))})
    with pytest.raises(ValueError, match="LookaheadState applies a gradient"):
        tx.update(table([1], [[1.0, 2]]), tx.init(xs), xs)


def test_what_is_refused_works_on_dense_gradients():
    """And exactly as without ``on_rows``."""
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.scale(-0.1))
    got, want = (step(tx, dense_grads(params()), params()) for tx in (on_rows(inner), inner))
    chex.assert_trees_all_equal(got, want)


# Compositions

by_name = {"table": "few", "layer": "all", "one_row": "few"}
COMPOSITIONS = {
    "chain": optax.chain(optax.clip(0.5), optax.trace(0.9), optax.scale(-0.1)),
    "named_chain": optax.named_chain(("adam", optax.scale_by_adam()), ("rate", optax.scale(-0.1))),
    "masked": optax.masked(optax.adamw(0.1), {"table": True, "layer": False, "one_row": True}),
    "masked by rank": optax.adamw(0.1, mask=lambda x: jax.tree.map(lambda a: a.ndim > 1, x)),
    "partition": optax.partition({"few": optax.lion(0.1), "all": optax.lamb(0.1)}, by_name),
    "inject_hyperparams": optax.inject_hyperparams(optax.adamw)(
        optax.linear_schedule(0.1, 0.0, 10), weight_decay=0.1
    ),
    "schedule": optax.adamw(optax.cosine_decay_schedule(0.1, 10)),
    "row-wise chain": optax.chain(optax.centralize(), optax.sgd(0.1, 0.9)),
    "ours": optzoo.adam(0.1),
    "twice": on_rows(optax.adam(0.1)),
}


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_compositions(name):
    compare(COMPOSITIONS[name])


OUTSIDE = {
    "chain": lambda f: optax.chain(optzoo.clip_by_global_norm(9.0), f(0.1)),
    "masked": lambda f: optax.masked(f(0.1), {"table": True, "layer": False, "one_row": True}),
    "partition": lambda f: optax.partition({"few": f(0.1), "all": optax.lamb(0.1)}, by_name),
    "inject_hyperparams": lambda f: optax.inject_hyperparams(f)(0.1),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_inside_of_other_transformations(name):
    tx, dense_tx = (
        OUTSIDE[name](f)
        for f in (lambda rate: on_rows(optax.adamw(rate)), lambda rate: optax.adamw(rate))
    )
    grads, xs = row_grads(params()), params()
    dense = to_dense(grads)
    got, want = jax.jit(lambda: (step(tx, grads, xs)[0], step(dense_tx, dense, xs)[0]))()
    want["table"] = xs["table"].at[TOUCHED].set(want["table"][TOUCHED])
    chex.assert_trees_all_close(got, want, rtol=1e-6)
    np.testing.assert_array_equal(got["table"][REST], xs["table"][REST])


def test_under_jit_with_repeated_indices():
    compare(optax.adamw(0.1), jit=True)


def test_our_dense_adam_becomes_our_lazy_adam():
    grads, xs = row_grads(params()), params()
    got, want = (step(tx, grads, xs) for tx in (on_rows(optzoo.adam(0.1)), optzoo.lazy_adam(0.1)))
    chex.assert_trees_all_equal(got, want)


@pytest.mark.parametrize("rows", [4, 6])
def test_a_state_of_a_table_of_another_length_is_refused(rows):
    tx = optzoo.on_rows(optax.adam(0.1))
    g = optzoo.SparseRows(jnp.array([1]), jnp.ones((1, 2)), 5)
    with pytest.raises(ValueError, match=r"shape \(5, 2\), got an array .* shape"):
        tx.update(g, tx.init(jnp.ones((rows, 2))), jnp.ones((5, 2)))


def test_state_is_that_of_the_inner_optimizer():
    inner, tx, xs = optax.adamw(0.1), on_rows(optax.adamw(0.1)), params()
    _, state = step(tx, row_grads(xs), xs)
    chex.assert_trees_all_equal_structs(state, inner.init(xs))
    step(tx, row_grads(xs), xs, step(inner, dense_grads(xs), xs)[1])
    step(inner, dense_grads(xs), xs, state)


def test_extra_args_pass():
    def update(updates, state, params=None, *, factor, **extra_args):
        del params, extra_args
        return jax.tree.map(lambda g: g * factor, updates), state

    inner = optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)
    updates, _ = on_rows(inner).update(table([1], [[1.0, 2]]), optax.EmptyState(), factor=3.0)
    np.testing.assert_array_equal(updates["table"].values, [[3.0, 6]])
    plain = on_rows(optax.sgd(0.1))  # takes none
    plain.update(table([1], [[1.0, 2]]), plain.init({"table": jnp.ones((5, 2))}), factor=3.0)


def test_vmap_and_scan():
    tx, xs = on_rows(optax.adam(0.1)), {"table": jnp.ones((5, 2))}
    lanes = [table([1, 3, 1], jnp.full((3, 2), k))["table"] for k in (1.0, -2.0)]
    stacked = {"table": jax.tree.map(lambda *a: jnp.stack(a), *lanes)}

    def two_steps(grads):
        body = lambda carry, _: (step(tx, grads, *carry), None)
        return jax.lax.scan(body, (xs, tx.init(xs)), length=2)[0]

    got = jax.jit(jax.vmap(two_steps))(stacked)
    for i, lane in enumerate(lanes):
        want = jax.jit(two_steps)({"table": lane})
        chex.assert_trees_all_close(jax.tree.map(lambda a, i=i: a[i], got), want, rtol=1e-6)


# Indices, shapes and dtypes


def test_the_update_is_rows_and_padding_is_dropped():
    xs, nan = {"table": jnp.ones((5, 2)).at[4].set(jnp.nan)}, jnp.nan
    tx = on_rows(optax.chain(optax.trace(0.9), optax.add_decayed_weights(0.1)))
    rows = table([5, 1, -1, 3, 1, 9], [[nan, 1], [1, 2], [nan, 3], [3, 4], [5, 6], [7, 8]])
    updates, state = tx.update(rows, tx.init(xs), xs)
    assert updates["table"].coalesced and updates["table"].num_rows == 5
    clean, wanted = tx.update(table([1, 3], [[6.0, 8], [3, 4]]), tx.init(xs), xs)
    np.testing.assert_array_equal(updates["table"].to_dense(), clean["table"].to_dense())
    chex.assert_trees_all_equal(state, wanted)


def test_no_rows_change_nothing_but_the_count():
    xs, tx = params(), on_rows(optax.adamw(0.1))
    no_rows = lambda x: SparseRows(jnp.zeros(0, jnp.int32), x[:0], len(x))
    tables = {name: no_rows(xs[name]) for name in ("table", "one_row")}
    after, state = step(tx, {"layer": (jnp.zeros(3), jnp.zeros(())), **tables}, xs)
    for name in tables:
        np.testing.assert_array_equal(after[name], xs[name])
        assert not jnp.any(state[0].mu[name])
    assert state[0].count == 1


def test_tables_of_several_shapes():
    """Among them a vector, a cube, one without rows, and two of the same numbers of rows."""
    shapes = {"vector": (4,), "cube": (4, 1, 3), "none": (0, 2)}
    xs = {k: jnp.ones(shape) for k, shape in shapes.items()}
    ids, inner = jnp.array([1, 1, 0]), optax.sgd(0.1, momentum=0.9)
    rows = {k: SparseRows(ids, jnp.ones((3, *x.shape[1:])), len(x)) for k, x in xs.items()}
    dense = {k: g.to_dense() for k, g in rows.items()}
    got, want = jax.jit(lambda: (step(on_rows(inner), rows, xs), step(inner, dense, xs)))()
    chex.assert_trees_all_close(got, want, rtol=1e-6)


def test_a_gradient_alone():
    tx, x = on_rows(optax.lion(0.1)), jnp.ones((5, 2))
    after, _ = step(tx, table([1], [[1.0, 2]])["table"], x)
    assert jnp.all(after[1] < 1) and jnp.all(after[REST] == 1)


def test_missing_gradients_and_params():
    inner, xs = optax.sgd(0.1, momentum=0.9), {**params(), "none": None}
    tx = on_rows(inner)
    grads = {**row_grads(params()), "layer": (None, jnp.ones(())), "none": None}
    for given in (xs, None):
        updates, state = tx.update(grads, tx.init(xs), given)
        want, wanted = inner.update(to_dense(grads), inner.init(xs), given)
        chex.assert_trees_all_equal((to_dense(updates), state), (want, wanted))
        again, _ = tx.update(grads, state, given)
        for name in ("table", "one_row"):
            np.testing.assert_allclose(again[name].to_dense(), 1.9 * want[name], rtol=1e-6)
    nothing = jax.tree.map(lambda _: None, xs)
    assert tx.update(nothing, tx.init(xs), xs)[0] == nothing


def test_an_update_of_a_missing_gradient():
    """Such as the decay of a parameter that the loss does not read."""
    of_leaf = lambda g, x: -0.5 * x if g is None else -g

    def update(gs, state, params):
        return jax.tree.map(of_leaf, gs, params, is_leaf=lambda g: g is None), state

    tx = on_rows(optax.GradientTransformation(lambda x: optax.EmptyState(), update))
    xs = {"table": jnp.ones((5, 2)), "b": jnp.ones(3)}
    updates, _ = tx.update({**table([1], [[1.0, 2]]), "b": None}, tx.init(xs), xs)
    np.testing.assert_array_equal(updates["b"], [-0.5] * 3)
    np.testing.assert_array_equal(updates["table"].to_dense()[1], [-1, -2])


def test_params_that_are_missing_but_needed():
    tx, xs = on_rows(optax.adamw(0.1)), {"table": jnp.ones((5, 2))}
    with pytest.raises(ValueError, match="params"):
        tx.update(table([1], [[1.0, 2]]), tx.init(xs))


@pytest.mark.parametrize("of_params", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("of_grads", ["bfloat16", "float32"])
def test_state_keeps_its_type(of_params, of_grads):
    cast = lambda tree, dtype: jax.tree.map(lambda a: a.astype(dtype), tree)
    xs = cast(params(), of_params)
    rows = row_grads(xs)
    tables = {name: rows[name].astype(of_grads) for name in ("table", "one_row")}
    grads = {"layer": xs["layer"], **tables}
    for inner in (optax.adamw(0.1), optax.adam(0.1, mu_dtype="bfloat16"), optax.lion(0.1)):
        tx = on_rows(inner)
        first = jax.eval_shape(tx.init, xs)
        updates, state = jax.eval_shape(tx.update, grads, first, xs)
        of_tables = lambda s: [leaf for leaf in jax.tree.leaves(s) if leaf.ndim == 2]
        assert {leaf.shape for leaf in of_tables(first)} == {(5, 2), (1, 3)}
        assert avals(of_tables(state)) == avals(of_tables(first))
        few = {**xs, "table": xs["table"][:4]}
        dense = {**to_dense(grads), "table": grads["table"].values}
        want, _ = jax.eval_shape(inner.update, dense, jax.eval_shape(inner.init, few), few)
        for name in tables:
            assert updates[name].dtype == want[name].dtype


def test_complex_rows():
    xs = {**params(), "table": params()["table"] * (1 + 2j)}
    compare(contrib.split_real_and_imaginary(optax.sgd(0.1, momentum=0.9)), xs)


def test_shapes_that_do_not_fit():
    tx, xs = on_rows(optax.adam(0.1)), {"table": jnp.ones((5, 2))}
    six = table([1], [[1.0, 2]], 6)
    match = r"parameters with .* \(6, 2\) at 'table', got .* \(5, 2\)"
    with pytest.raises(ValueError, match=match):
        tx.update(six, tx.init(xs), {"table": jnp.ones((6, 2))})
    match = r"has shape \(5, 2\), but its gradient \(6, 2\)"
    with pytest.raises(ValueError, match=match):
        tx.update(six, tx.init(xs))
    with pytest.raises(ValueError, match=match):
        tx.update(six, tx.init({"table": jnp.ones((6, 2))}), xs)


# Cost


def test_the_proof_is_made_once():
    calls = []

    def update(updates, state, params=None):
        calls.append(updates["table"].shape)
        return updates, state

    tx = on_rows(optax.GradientTransformation(lambda _: optax.EmptyState(), update))
    for _ in range(3):
        tx.update(table([1, 3], jnp.ones((2, 2))), optax.EmptyState())
    assert len(calls) == 2 + 3
    tx.update(table([1], jnp.ones((1, 2))), optax.EmptyState())
    assert len(calls) == 2 + 3 + 2 + 1
    tx.update({"table": jnp.ones((5, 2))}, optax.EmptyState())
    assert len(calls) == 2 + 3 + 2 + 1 + 1


IN_PLACE = {
    "adamw": (optax.adamw(0.1), 0.05),
    "lion": (optax.lion(0.1), 0.05),
    # On the CPU, XLA scatters 16 bits by way of a copy in 32.
    "adam with a half slot": (optax.adam(0.1, mu_dtype="bfloat16"), 1.05),
}


@pytest.mark.optimized
@pytest.mark.parametrize("name", IN_PLACE)
def test_touched_rows_are_updated_in_place(name):
    inner, memory = IN_PLACE[name]
    tx, x = on_rows(inner), jnp.ones((100_000, 16))
    state = tx.init(x)
    ids, values = jnp.arange(64) % 50, jnp.ones((64, 16))
    one_step = lambda x, state, *rows: step(tx, SparseRows(*rows, len(x)), x, state)
    train = jax.jit(one_step, donate_argnums=(0, 1)).lower(x, state, ids, values).compile()
    assert train.memory_analysis().temp_size_in_bytes < memory * x.nbytes
    where = lambda *trees: [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(trees)]
    before = where(x, state)
    for _ in range(2):
        x, state = train(x, state, ids, values)
        assert where(x, state) == before
