"""Parameter groups: each parameter is in exactly one."""

import functools
import operator

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import optzoo
from optzoo.testing.samples import avals, dense_grads, plain, step
from optzoo.wrappers.param_groups import param_groups

TXS = {
    "embedding/.*": optzoo.lazy_adam(0.1),
    "bias|scale": optax.sgd(0.5),
    ".*": optzoo.momentum(0.1, 0.9),
}


def params():
    return {
        "embedding": {"table": jnp.arange(10.0).reshape(5, 2)},
        "dense": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)},
        "norm": [{"scale": jnp.ones(3)}, {"scale": jnp.ones(2)}],
    }


def with_rows(x):
    rows = optzoo.SparseRows(jnp.array([3, 1, 3]), jnp.ones((3, 2)), 5)
    return {**dense_grads(x), "embedding": {"table": rows}}


@pytest.mark.parametrize("grads", [dense_grads, with_rows])
def test_each_parameter_has_its_own_optimizer(grads):
    x = params()
    g, tx = grads(x), param_groups(TXS)
    updates, state = jax.jit(tx.update)(g, tx.init(x), x)
    for pattern, path in [
        ("embedding/.*", ("embedding", "table")),
        ("bias|scale", ("dense", "bias")),
        ("bias|scale", ("norm", 1, "scale")),
        (".*", ("dense", "kernel")),
    ]:
        at = functools.partial(functools.reduce, operator.getitem, path)
        want, _ = TXS[pattern].update(at(g), TXS[pattern].init(at(x)), at(x))
        chex.assert_trees_all_close(plain(at(updates)), plain(want), rtol=1e-6)
        assert isinstance(at(updates), type(at(g))) or not isinstance(at(g), optzoo.SparseRows)
    assert avals(state) == avals(tx.init(x))
    assert [*state.inner_states] == [f"group_{i}" for i in range(len(TXS))]


def test_a_group_is_all_that_its_optimizer_sees():
    x = params()
    tx = param_groups({"bias|scale": optzoo.clip_by_global_norm(1.0), ".*": optax.set_to_zero()})
    updates, _ = tx.update(x, tx.init(x), x)
    assert optax.tree.norm(updates) == pytest.approx(1.0)
    assert not updates["embedding"]["table"].any()


def test_extra_arguments_and_missing_gradients():
    x = params()
    tx = param_groups({".*": optzoo.adam_gs(0.1), "bias": optzoo.gradient_descent(1.0)})
    g = {**dense_grads(x), "embedding": {"table": None}}
    updates, _ = tx.update(g, tx.init(x), x, global_step=3, learning_rate=0.25)
    assert updates["embedding"]["table"] is None
    np.testing.assert_allclose(updates["dense"]["bias"], -0.25 * g["dense"]["bias"])
    with pytest.raises(ValueError, match="global_step"):
        tx.update(g, tx.init(x), x)


@pytest.mark.parametrize("pattern", ["dense/kernel", "kernel", "k.*", "dense/k.*", ".*/kernel"])
def test_names(pattern):
    """With a slash the whole path, without one the last part."""
    x, tx = params(), param_groups({pattern: optax.identity(), ".*": optax.set_to_zero()})
    updates, _ = tx.update(x, tx.init(x), x)
    moved = [
        jax.tree_util.keystr(p) for p, u in jax.tree_util.tree_leaves_with_path(updates) if u.any()
    ]
    assert moved == ["['dense']['kernel']"]


def test_a_bare_array_has_no_name():
    tx = param_groups({".*": optax.identity()})
    assert tx.update(jnp.ones(2), tx.init(jnp.ones(2)))[0].all()


def test_the_rest_may_be_empty():
    x = {"kernel": jnp.ones(2)}
    param_groups({"kernel": optax.identity(), ".*": optax.identity()}).init(x)
    param_groups({".*": optax.identity()}).init({})


def test_within_others():
    x, tx = params(), param_groups(TXS)
    state = tx.init(x)
    assert avals(jax.eval_shape(tx.init, x)) == avals(state)
    slots = optax.tree.map_params(tx.init, lambda a: a + 1, state)
    chex.assert_trees_all_equal_structs(slots, state)
    marked = lambda tree: [bool((leaf == 1).all()) for leaf in jax.tree.leaves(tree)]
    assert marked(slots).count(True) == 3  # a momentum and two slots of Adam; counts are not slots

    kernels = jax.tree.map(lambda a: a.ndim == 2, x)
    masked = optax.masked(tx, kernels)  # hides all parameters of one group: no error
    updates, _ = masked.update(dense_grads(x), masked.init(x), x)
    np.testing.assert_array_equal(updates["dense"]["bias"], dense_grads(x)["dense"]["bias"])

    chained = optax.chain(tx, optax.scale(2.0))
    once, _ = tx.update(dense_grads(x), state, x)
    twice, _ = chained.update(dense_grads(x), chained.init(x), x)
    chex.assert_trees_all_close(twice, jax.tree.map(lambda u: 2 * u, once))

    around = optzoo.moving_average(tx, 0.5)
    after, new = step(around, dense_grads(x), x)
    averages = jax.tree.map(lambda a, b: (a + b) / 2, x, after)
    chex.assert_trees_all_close(optzoo.eval_params(after, new), averages, rtol=1e-6)


def test_nnx_optimizer():
    """``init`` gets variables and ``update`` gets arrays: the names are the same."""
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    tx = param_groups({"kernel": optax.sgd(1.0), ".*bias": optax.sgd(2.0, momentum=0.9)})
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    grads = nnx.grad(lambda model: jnp.sum(model(jnp.ones((1, 2)))))(model)
    before = jnp.array(model.kernel[...])
    optimizer.update(model, grads)
    np.testing.assert_array_equal(model.bias[...], [-2.0] * 3)
    np.testing.assert_allclose(model.kernel[...], before - 1, rtol=1e-6)


def test_orbax_round_trip(tmp_path):
    """The patterns, with slashes and stars, are keys of the state."""
    x, tx = params(), param_groups(TXS)
    _, state = step(tx, dense_grads(x), x)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", jax.eval_shape(tx.init, x))
    chex.assert_trees_all_equal(restored, state)


# Bad input


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["embedding/.*", "bias"], r"'dense/kernel' is matched by no pattern; 'norm/0/scale'"),
        (["kernel", "dense/.*", ".*"], r"'dense/kernel' is matched by 'kernel' and 'dense/\.\*'"),
        (
            ["kernle", ".*"],
            r"no parameter matches \['kernle'\]; the parameters are \['dense/",
        ),
        (["embedding", ".*"], r"no parameter matches"),  # not the last part of any path
        (["dense/.*|norm.*", ".*"], None),
    ],
)
def test_each_parameter_needs_exactly_one_pattern(patterns, message):
    tx = param_groups(dict.fromkeys(patterns, optax.identity()))
    if message is None:
        tx.init(params())
        return
    with pytest.raises(ValueError, match=message):
        tx.init(params())
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(tx.init, params())


@pytest.mark.parametrize(
    ("transforms", "error", "message"),
    [
        ([optax.sgd(0.1)], TypeError, "must be a dict of patterns"),
        ({}, ValueError, "must contain at least one pattern"),
        ({0: optax.sgd(0.1)}, TypeError, "pattern must be a string, got 0"),
        ({"kernel": 0.1}, TypeError, "kernel'. must be an optax transformation .*, got 0.1"),
        ({"(kernel": optax.sgd(0.1)}, ValueError, r"'\(kernel' is not a regular expression"),
    ],
)
def test_refuses(transforms, error, message):
    with pytest.raises(error, match=message):
        param_groups(transforms)
