"""States of checkpoints of older versions, and of other forms."""

import collections
from pathlib import Path

import chex
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import optzoo
from optzoo.core.boxes import unboxed
from optzoo.state import state_like

from .make_old_states import CASES, boxed, named, plain, step


def nested(arrays):
    """Dicts in dicts, by the parts of the names."""
    tree = {}
    for name, a in arrays.items():
        *folders, last = name.split("|")
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
        node[last] = a
    return tree


OLD = nested(np.load(Path(__file__).parent / "old_states.npz"))


@pytest.mark.parametrize("name", CASES)
def test_a_state_of_an_older_version_goes_on(name):
    """One more step gives what it gave there."""
    make, params = CASES[name]
    tx, saved = make(), OLD[name]
    like = jax.eval_shape(tx.init, params())
    state = state_like(saved["state"], like)
    chex.assert_trees_all_equal_structs(state, like)
    arrays = lambda tree: collections.Counter(
        np.asarray(a).tobytes() for a in jax.tree.leaves(tree)
    )
    assert arrays(saved["state"]) <= arrays(state)
    x, state = jax.tree.map(jnp.asarray, (state_like(saved["params"], params()), state))
    got, _ = step(tx, x, state)
    want = saved["after"]
    if name in ("boxed soap", "boxed shampoo"):  # LAPACK's vectors are others on other machines
        want, _ = step(tx, *unboxed((x, state)))
        got = unboxed(got)
    else:
        got = nested(named(got))
    if "groups" in name:
        # GGT multiplies rounding errors of eigenvalues, which differ between processors, by up to
        # 1 / sqrt(svd_eps): on one processor its steps were 2.5e-6 from those of another.
        bias = lambda tree: jax.tree.leaves(tree.pop("bias"))
        chex.assert_trees_all_close(bias(got), bias(want := dict(want)), rtol=1e-5)
    chex.assert_trees_all_close(got, want, rtol=1e-6)


def test_another_law_is_refused():
    """Deferred rows by other decays must not be caught up by these."""
    saved = OLD["caught_up"]["state"]
    tx = optzoo.caught_up(optzoo.adam(0.1, b2=0.99), mask="table")
    with pytest.raises(ValueError, match=r"shape \(215, 4\) at 'clock/.*/young', but the state"):
        state_like(saved, tx.init(plain()))
    tx = optzoo.caught_up(optzoo.nadam(0.1), mask="table")
    with pytest.raises(ValueError, match=r"saved has .* at 'clock', but the state does not"):
        state_like(saved, tx.init(plain()))


def test_the_numbers_of_a_law_come_from_the_checkpoint():
    tx = optzoo.caught_up(optzoo.adam(0.1, eps=1e-3), mask="table")
    state = state_like(OLD["caught_up"]["state"], jax.eval_shape(tx.init, plain()))
    [clock] = state.clock.values()
    assert clock.numbers.eps == np.float32(1e-8) and clock.since == 0


def changed(change):
    saved = jax.tree.map(np.asarray, OLD["boxed groups"]["state"])
    [key] = [k for k in saved["inner_states"] if k == "kernel"]
    change(saved["inner_states"][key]["inner_state"]["0"])
    return saved


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda adam: adam["slots"].pop("m"),
            r"saved has \['kernel'\] at 'inner_states', but the state does not",
        ),
        (
            lambda adam: adam.update(more=np.ones(2)),
            r"saved has \['kernel'\] at 'inner_states', but the state does not",
        ),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    tx = CASES["boxed groups"][0]()
    with pytest.raises(ValueError, match=message):
        state_like(changed(change), tx.init(boxed()))


def test_arrays_that_do_not_fit_are_refused():
    tx = optzoo.adam(0.1)
    like, saved = tx.init({"w": jnp.ones(2)}), named(tx.init({"w": jnp.ones(3)}))
    with pytest.raises(ValueError, match=r"shape \(3,\) at '0/slots/m/w', but the state has \(2,"):
        state_like(nested(saved), like)
    saved = named(like)
    with pytest.raises(
        ValueError, match=r"saved has \['x'\] at '0/slots/m', but the state does not"
    ):
        state_like(nested(saved | {"0|slots|m|x": np.ones(2)}), like)
    del saved["0|slots|m|w"]
    with pytest.raises(ValueError, match=r"saved has nothing at '0/slots/m'"):
        state_like(nested(saved), like)


def test_groups_that_may_be_exchanged_are_refused():
    """Two groups whose states have counts alone are not told apart by what they hold."""
    tx = optzoo.param_groups({"w": optzoo.gradient_descent(0.1), "b": optzoo.gradient_descent(1.0)})
    like = tx.init({"w": jnp.ones(2), "b": jnp.ones(2)})
    saved = jax.tree.map(np.asarray, {"inner_states": {"w": None, "b": None}})
    one = like.inner_states["group_0"]
    saved["inner_states"] = {"w": one, "b": one}
    with pytest.raises(
        ValueError, match=r"several parts of saved at 'inner_states' match 'group_0'"
    ):
        state_like(saved, like)


@pytest.mark.parametrize("name", ["groups", "boxed int8", "stacked", "boxed caught_up"])
def test_what_orbax_and_flax_restore_without_a_target(name, tmp_path):
    make, params = CASES[name]
    tx = make()
    _, state = step(tx, params(), tx.init(params()))
    with ocp.StandardCheckpointer() as checkpoints:
        checkpoints.save(tmp_path / "state", state)
        checkpoints.wait_until_finished()
        restored = checkpoints.restore(tmp_path / "state")
    chex.assert_trees_all_equal(state_like(restored, state), state)
    raw = flax.serialization.msgpack_restore(flax.serialization.to_bytes(state))
    chex.assert_trees_all_equal(state_like(raw, state), state)
