"""Every public transformation of optax on row-sparse gradients: it works, or names the remedy."""

import inspect

import chex
import jax
import jax.numpy as jnp
import optax
import optax.contrib
import pytest

from optzoo import SparseRows
from optzoo.core.rows import map_rows
from optzoo.testing.samples import params, row_grads

SGD = optax.sgd(0.1)
ABSTRACT = "Cannot call abstract method"
# What the factories take, by the name of the argument.
ARGUMENTS = {
    "adv_optimizer": optax.sgd(0.01),
    "base_optimizer": SGD,
    "clipping": 0.1,
    "decay": 0.9,
    "eta": 0.1,
    "fast_optimizer": SGD,
    "freeze_mask": False,
    "gamma": 0.5,
    "inner": optax.identity(),
    "l2_norm_clip": 1.0,
    "learning_rate": 0.1,
    "mask": True,
    "max_backtracking_steps": 3,
    "max_consecutive_errors": 2,
    "max_delta": 1.0,
    "max_linesearch_steps": 3,
    "max_norm": 1.0,
    "measure": lambda tree: jax.tree.map(jnp.sum, tree),
    "measure_name": "name",
    "noise_multiplier": 0.1,
    "optimizer": SGD,
    "param_labels": {"table": "label", "layer": ("label", "label"), "one_row": "label"},
    "seed": 0,
    "should_transform_fn": lambda step, **_: step < 10,
    "slow_step_size": 0.5,
    "step_size": 0.5,
    "step_size_fn": lambda step: 0.5,
    "sync_period": 2,
    "threshold": 0.1,
    "transforms": {"label": optax.identity()},
    "tx": optax.identity(),
    "weight_decay": 0.1,
}
SPECIAL = {
    "chain": lambda: optax.chain(optax.identity(), optax.identity()),
    "named_chain": lambda: optax.named_chain(("name", optax.identity())),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.sgd)(0.1),
    "inject_stateful_hyperparams": lambda: optax.inject_stateful_hyperparams(optax.sgd)(
        learning_rate=0.1
    ),
    "snapshot": lambda: optax.snapshot("number", lambda tree: jnp.float32(len(tree))),
    "stateless": lambda: optax.stateless(lambda updates, _: updates),
    "stateless_with_tree_map": lambda: optax.stateless_with_tree_map(lambda g, _: 2 * g),
}
# These copy leaves, select among them, or compute within a row; or their argument does nothing.
WORKS = {
    "apply_if_finite",
    "centralize",
    "chain",
    "conditionally_mask",
    "conditionally_transform",
    "freeze",
    "identity",
    "masked",
    "multi_transform",
    "named_chain",
    "partition",
    "set_to_zero",
    "snapshot",
    "split_real_and_imaginary",
    "stateless",
    "with_extra_args_support",
    "zero_nans",
}


# Outside of jit, too: these choose among ids.
SELECT = {"apply_if_finite", "conditionally_transform", "zero_nans", "partition"}


def factories():
    for module in (optax, optax.contrib):
        for name, factory in vars(module).items():
            if name[0] == "_" or not inspect.isfunction(factory):
                continue
            if "GradientTransformation" in str(inspect.signature(factory).return_annotation):
                yield name, factory


FACTORIES = dict(sorted(factories()))


def make(name):
    if name in SPECIAL:
        return optax.with_extra_args_support(SPECIAL[name]())
    wanted = inspect.signature(FACTORIES[name]).parameters.values()
    needs = lambda p: p.default is p.empty and p.kind is not p.VAR_KEYWORD
    also = ("learning_rate", "weight_decay") if name.startswith(("scale", "add")) else ()
    given = {p.name: ARGUMENTS[p.name] for p in wanted if needs(p) or p.name in also}
    return optax.with_extra_args_support(FACTORIES[name](**given))


def update(name, grads):
    """The updates; of a whole batch of gradients where a transformation wants them."""
    tx, x = make(name), params()
    extra = {}
    loss = lambda tree: sum(jnp.sum(a**2) for a in jax.tree.leaves(tree))
    if name == "lookahead":
        x = optax.LookaheadParams(x, x)
    if name in ("differentially_private_aggregate", "dpsgd"):
        grads = jax.tree.map(lambda a: jnp.stack([a, a]), grads)
    if "linesearch" in name or "lbfgs" in name:
        extra = {"value": loss(x), "grad": grads, "value_fn": loss}
    if "polyak" in name or "momo" in name or name == "reduce_on_plateau":
        extra = {"value": loss(x)}
    return tx.update(grads, tx.init(x), x, **extra)[0]


def test_the_table_has_no_more_names():
    newer = {"freeze", "snapshot"}  # than the oldest version of optax that is supported
    assert set(FACTORIES) | newer >= WORKS | set(SPECIAL)


@pytest.mark.filterwarnings("ignore")  # some are deprecated
@pytest.mark.parametrize("name", FACTORIES)
def test_rows(name):
    grads = row_grads(params())
    if name in WORKS:
        to_dense = lambda tree: map_rows(SparseRows.to_dense, tree)
        both = lambda g: (update(name, g), update(name, to_dense(g)))
        for run in (jax.jit, *[lambda f: f] * (name in SELECT)):
            got, want = run(both)(grads)
            assert isinstance(got["table"], SparseRows)
            chex.assert_trees_all_close(to_dense(got), want, rtol=1e-6)
        return
    hint = r"optzoo\.rows\.densify\(\).*optzoo\.rows\.on_values"
    errors = (TypeError, ValueError, AssertionError)
    with pytest.raises(errors, match=hint):
        jax.eval_shape(lambda g: update(name, g), grads)
    # Outside of jit some methods of arrays have an error of JAX's own, which names no dtype.
    with pytest.raises((*errors, NotImplementedError), match=f"{hint}|{ABSTRACT}"):
        update(name, grads)


@pytest.mark.parametrize("run", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_multi_steps_names_accumulate(run):
    tx, x = optax.MultiSteps(optax.sgd(0.1), 2), params()
    with pytest.raises(
        (TypeError, ValueError), match=r"optzoo\.accumulate\(\.\.\., max_rows=\.\.\.\)"
    ):
        run(lambda g: tx.update(g, tx.init(x), x))(row_grads(x))


@pytest.mark.filterwarnings("ignore")  # it is deprecated
def test_the_norm_of_a_tree_names_the_remedy():
    with pytest.raises(TypeError, match=r"optzoo\.clip_by_global_norm"):
        jax.jit(optax.global_norm)(row_grads(params()))
