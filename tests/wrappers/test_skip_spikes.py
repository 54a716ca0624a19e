"""What is skipped at spikes, by whom the loss comes, and that all devices decide alike."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optzoo
from optzoo import SparseRows
from optzoo.testing import samples
from optzoo.testing.samples import dense_grads, params

SHORT = {"window": 4, "min_values": 2, "deviations": 2.0}
LOSSES = [2.0, 2.5, 2.0, 9.0, 2.25, np.nan, 2.5, -5.0, np.inf, 2.0, 60.0]


def spikes(values, window, least, deviations, correction):
    """The steps that are skipped, by the definition."""
    kept, found = [], []
    for v in values:
        before = kept[-window:]
        usual = len(kept) < least or v <= np.mean(before) + deviations * np.std(
            before, ddof=correction
        )
        found.append(not (np.isfinite(v) and usual))
        kept += [v] if np.isfinite(v) else []
    return found


def run(tx, losses, norms=None):
    """Which steps are skipped, and the last state."""
    norms = np.ones_like(losses) if norms is None else norms

    def step(state, now):
        _, after = tx.update(now[1][None], state, jnp.zeros(1), value=now[0])
        return after, after.num_skipped - state.num_skipped

    x = np.asarray(losses, np.float32), np.asarray(norms, np.float32)
    state, found = jax.jit(lambda x: jax.lax.scan(step, tx.init(jnp.zeros(1)), x))(x)
    return list(np.asarray(found, bool)), state


@pytest.mark.parametrize("correction", [0, 1])
@pytest.mark.parametrize(("window", "least"), [(2, 2), (5, 3), (8, 8), (40, 2)])
@pytest.mark.parametrize("on", ["loss", "norm", ("norm", "loss")])
def test_definition(window, least, correction, on):
    draw = np.random.default_rng([window, correction])
    losses, norms = np.exp(draw.normal(size=(2, 60))).astype(np.float32)
    for values, wrong in ((losses, [np.nan, -np.inf]), (norms, [np.inf, np.nan])):
        values[draw.choice(60, 2, replace=False)] = wrong
    watched = {"loss": losses, "norm": norms}
    arguments = window, least, 1.5, correction
    tx = optzoo.skip_spikes(
        optax.sgd(1.0),
        window=window,
        min_values=least,
        deviations=1.5,
        correction=correction,
        on=on,
    )
    if isinstance(on, str):
        want = spikes(watched[on], *arguments)
    else:  # the values of a step enter together
        both = np.isfinite(losses) & np.isfinite(norms)
        want = np.ones(60, bool)
        of = lambda values: np.array(spikes(values[both], *arguments))
        want[both] = of(losses) | of(norms)
    got, state = run(tx, losses, norms)
    assert 2 < sum(want) < 50
    assert got == list(want) and state.num_skipped == sum(want)


def test_defaults():
    """A level is judged after 63 values, of which those before the last 128 are forgotten."""
    tx = optzoo.skip_spikes(optax.sgd(1.0))
    usual = np.tile([1.0, 1.25], 150)
    for t, is_skipped in ((1, False), (62, False), (63, True), (64, True), (250, True)):
        losses = usual.copy()
        losses[t] = 9.0
        got, _ = run(tx, losses)
        assert got == [is_skipped and k == t for k in range(300)]
    for change in (50, -50):  # a new level is usual soon, and one below is no spike
        losses = np.concatenate([usual, change + usual])
        got, _ = run(tx, losses)
        assert got == spikes(losses, 128, 63, 6.0, 1) and sum(got[:302]) == 2 * (change > 0)


def test_a_skipped_step_leaves_all_as_it_is():
    x = params()
    tx = optzoo.skip_spikes(optax.adam(0.1), **SHORT)
    update, state = jax.jit(tx.update), tx.init(x)
    want = spikes(LOSSES, 4, 2, 2.0, 1)
    assert 3 < sum(want) < 7
    for loss, is_skipped in zip(LOSSES, want, strict=True):
        grads = jax.tree.map(lambda g: g * (1 if np.isfinite(loss) else np.nan), dense_grads(x))  # noqa: B023
        updates, after = update(grads, state, x, value=loss)
        assert after.num_skipped == state.num_skipped + is_skipped
        inner, new = optax.adam(0.1).update(grads, state.inner, x)
        chex.assert_trees_all_close(after.inner, state.inner if is_skipped else new, rtol=1e-6)
        if is_skipped:
            chex.assert_trees_all_equal(after.inner, state.inner)
            chex.assert_trees_all_equal(updates, jax.tree.map(jnp.zeros_like, grads))
        else:
            chex.assert_trees_all_close(updates, inner, rtol=1e-6)
        state = after


def test_of_rows_the_norm_is_that_of_their_sums():
    x = {"table": jnp.zeros((5, 2))}
    tx = optzoo.skip_spikes(optzoo.lazy_adam(0.1), on="norm", **SHORT)
    rows = lambda *values: {
        "table": SparseRows(jnp.array([1, 1, 5]), jnp.array([[v, 0.0] for v in values]), 5)
    }
    state = tx.init(x)
    for values in ((0.5, 0.5, 7), (1.0, 0.5, 7), (-8.0, 9.0, 7), (9.0, 0.5, 7)):
        updates, state = tx.update(rows(*values), state, x)
    np.testing.assert_allclose(state.norms, [1.0, 1.5, 1.0, 9.5])
    assert state.num_skipped == 1 and not np.any(updates["table"].to_dense())


@pytest.mark.parametrize("map_over", ["shard_map", "vmap"])
def test_all_devices_decide_alike(map_over):
    """By the means of their losses and norms: the spike of one device is that of all."""
    tx = optzoo.skip_spikes(optzoo.momentum(0.1, 0.5), **SHORT, axis_name="replica")
    sync = lambda g: jax.lax.pmean(g, "replica")

    def steps(losses, norms):
        x, found = jnp.zeros(1), []
        state = tx.init(x)
        for loss, norm in zip(losses[0], norms[0], strict=True):
            # Every device gives its own gradient; the optimizer gets the sum of them all.
            _, judged = tx.update(norm[None], state, x, value=loss)
            _, state = tx.update(sync(norm[None]), state, x, value=loss)
            found.append(jnp.stack([state.num_skipped, judged.num_skipped]))
        return jnp.stack(found)[None]

    losses = np.ones((2, 6)) * [1.0, 1.25, 1.0, 1.25, 1.0, 1.25]
    losses[1, 3], norms = 4.0, np.ones((2, 6)) * [2.0, 2.5, 2.0, 2.5, 2.0, 2.5]
    norms[0, 5] = 40.0
    if map_over == "shard_map":
        kinds, devices = (AxisType.Auto,), jax.devices()[:2]
        mesh = jax.make_mesh((2,), ("replica",), axis_types=kinds, devices=devices)
        f = jax.shard_map(steps, mesh=mesh, in_specs=P("replica"), out_specs=P("replica"))
    else:
        f = lambda *xs: jax.vmap(steps, axis_name="replica")(*(x[:, None] for x in xs))[:, 0]
    got = np.asarray(jax.jit(f)(losses, norms)).reshape(2, 6, 2)
    np.testing.assert_array_equal(got[..., 0], [[0, 0, 0, 1, 1, 2]] * 2)
    np.testing.assert_array_equal(got[..., 1], [[0, 0, 0, 1, 1, 2]] * 2)


# By whom the loss comes


def loss(p, ids, scale):
    return scale * jnp.mean(optzoo.lookup(p["table"], ids) ** 2) + jnp.sum(p["w"] ** 2)


START = {"table": jnp.arange(1.0, 13).reshape(6, 2), "w": jnp.ones(3)}
BATCHES = [(jnp.array([k, 5 - k, k, 2]), s) for k, s in enumerate([1.0, 1.1, 1.0, 90.0, 1.0])]
OF_LOSS = {"window": 3, "min_values": 2, "deviations": 3.0, "on": "loss"}


def by_hand(tx):
    """The parameters, where the loss is given to an optimizer with dense gradients."""
    x, state = START, tx.init(START)
    for ids, scale in BATCHES:
        value, grads = jax.value_and_grad(lambda p: loss(p, ids, scale))(x)  # noqa: B023
        updates, state = tx.update(grads, state, x, value=value)
        x = optax.apply_updates(x, updates)
    return x


MAKE = {
    "alone": lambda: optzoo.skip_spikes(optzoo.lazy_adam(0.1), **OF_LOSS),
    "in a chain": lambda: optax.chain(optzoo.clip_by_global_norm(1e9), MAKE["dense"]()),
    "dense": lambda: optzoo.skip_spikes(optzoo.adam(0.1), **OF_LOSS),
    "inside": lambda: optzoo.moving_average(MAKE["alone"](), 0.9),
    "of both": lambda: optzoo.skip_spikes(MAKE["alone"](), on="norm"),
    "native": lambda: MAKE["alone"](),
}


def copy(tree):
    return jax.tree.map(jnp.copy, tree)


@pytest.mark.parametrize("name", MAKE)
def test_minimize_gives_the_loss(name):
    tx, x = MAKE[name](), copy(START)
    step, state = optzoo.minimize(loss, tx, sparse="allow", native=name == "native"), tx.init(x)
    for batch in BATCHES:
        x, state, _ = step(x, state, *batch)
    if name in ("dense", "in a chain"):
        chex.assert_trees_all_close(x, by_hand(MAKE["dense"]()), rtol=1e-5)
    else:
        lazy = [optzoo.lazy_adam(0.1), copy(START)]
        train, state = optzoo.minimize(loss, lazy[0]), lazy[0].init(START)
        for k in (0, 1, 2, 4):  # without the spike
            lazy[1], state, _ = train(lazy[1], state, *BATCHES[k])
        chex.assert_trees_all_close(x, lazy[1], rtol=1e-6)


def test_around_deferred_rows():
    """As around the dense optimizer; but a step that keeps track of them refuses it."""
    tx = optzoo.skip_spikes(optzoo.caught_up(optzoo.adam(0.1), mask="table"), **OF_LOSS)
    x, state = START, tx.init(START)

    @jax.jit
    def step(x, state, ids, scale):
        x, state = optzoo.rows.catch_up(x, state)
        value, grads = optzoo.value_and_grad(loss)(x, ids, scale)
        updates, state = tx.update(grads, state, x, value=value)
        return optax.apply_updates(x, updates), state

    for batch in BATCHES:
        x, state = step(x, state, *batch)
    assert state.num_skipped == 1
    x, _ = optzoo.rows.catch_up(x, state)
    chex.assert_trees_all_close(x, by_hand(MAKE["dense"]()), rtol=1e-5)
    with pytest.raises(
        ValueError, match=r"a transformation changes the update of table .* of optzoo\.caught_up"
    ):
        optzoo.minimize(loss, tx)(copy(START), tx.init(START), *BATCHES[0])


def test_minimize_with_a_loss_that_is_given():
    tx, x = MAKE["alone"](), copy(START)
    step, state = optzoo.minimize(loss, tx), tx.init(x)
    x, state, _ = step(x, state, *BATCHES[0], value=jnp.nan)
    assert state.num_skipped == 1
    chex.assert_trees_all_equal(x, START)


@pytest.mark.unique
def test_gathers_stay_sparse():
    """The trial update, which says whether the optimizer takes rows, has a loss too."""
    gather = lambda p, ids, scale: scale * jnp.mean(p["table"][ids] ** 2) + jnp.sum(p["w"] ** 2)
    tx, x = MAKE["alone"](), copy(START)
    step = optzoo.minimize(gather, tx, sparse="require", min_rows=1)
    x, _, _ = step(x, tx.init(x), *BATCHES[0])
    assert np.all(np.asarray(x["table"] == START["table"])[[1, 3, 4]])
    tx, x = optzoo.skip_spikes(optax.adam(0.1), **OF_LOSS), copy(START)  # which takes no rows
    step, state = optzoo.minimize(gather, tx, sparse="allow", min_rows=1), tx.init(x)
    for batch in BATCHES:
        x, state, _ = step(x, state, *batch)
    chex.assert_trees_all_close(x, by_hand(tx), rtol=1e-5)


@pytest.mark.parametrize("where", ["a mesh", "nnx"])
def test_other_steps_give_the_loss(where):
    if where == "nnx":

        class Model(nnx.Module):
            def __init__(self):
                self.table, self.w = nnx.Param(copy(START["table"])), nnx.Param(copy(START["w"]))

        model, tx = Model(), MAKE["alone"]()
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        of_model = lambda m, ids, scale: loss({"table": m.table[...], "w": m.w[...]}, ids, scale)
        step = optzoo.nnx_minimize(of_model)
        for batch in BATCHES:
            step(model, optimizer, *batch)
        got = {"table": model.table[...], "w": model.w[...]}
        state = optimizer.opt_state
    else:
        mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
        tx = MAKE["alone"]()
        got, state = jax.device_put(
            (copy(START), tx.init(START)), jax.sharding.NamedSharding(mesh, P())
        )
        step = optzoo.minimize(lambda p, ids, scale: loss(p, ids, scale), tx, mesh=mesh)
        for batch in BATCHES:
            got, state, _ = step(got, state, *batch)
    want, tx = copy(START), optzoo.lazy_adam(0.1)
    train, after = optzoo.minimize(loss, tx), tx.init(START)
    for k in (0, 1, 2, 4):
        want, after, _ = train(want, after, *BATCHES[k])
    chex.assert_trees_all_close(got, want, rtol=1e-5)
    assert int(jnp.asarray(samples.plain(state).num_skipped[...])) == 1


def test_the_optimizer_inside_gets_the_loss():
    tx = optzoo.skip_spikes(optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau()))
    state = tx.init(jnp.zeros(1))
    _, state = tx.update(jnp.ones(1), state, jnp.zeros(1), value=3.0)
    assert state.inner[1].best_value == 3.0


# Accumulated gradients


@pytest.mark.unique
def test_around_accumulate_and_inside():
    arguments = {"window": 3, "min_values": 2, "deviations": 2.0, "on": "norm"}
    sgd, gs = optzoo.gradient_descent(1.0), [1.0, 1.5, 20.0, 1.0, 1.5, 1.0, 20.0, 1.5]
    each, whole = (
        lambda tx: optzoo.skip_spikes(optzoo.accumulate(tx, 2), **arguments),
        lambda tx: optzoo.accumulate(optzoo.skip_spikes(tx, **arguments), 2),
    )
    for make, want in (
        (each, [0, -2.5, 0, 0, -2.5, 0, 0, -2.5]),  # the third and the seventh are skipped
        (whole, [0, -2.5, 0, -21.0, 0, -2.5, 0, -21.5]),  # of three sums the last are no spikes
    ):
        tx, got = make(sgd), []
        state = tx.init(jnp.zeros(1))
        for g in gs:
            updates, state = tx.update(jnp.array([g]), state, jnp.zeros(1))
            got.append(float(updates[0]))
        assert got == want
    tx = each(sgd)
    with pytest.raises(ValueError, match=r"write accumulate\(skip_spikes\(tx, ...\), every\)"):
        tx.update(jnp.ones(1), tx.init(jnp.zeros(1)), jnp.zeros(1), global_step=0)


# Errors


def refused(error, words, **arguments):
    with pytest.raises(error, match=words):
        optzoo.skip_spikes(optax.sgd(0.1), **arguments)


def test_bad_arguments():
    refused(ValueError, "^window must be at least 2, got 1", window=1)
    refused(ValueError, "^min_values must be at least 2, got 1", min_values=1)
    refused(ValueError, "^min_values must be at most window=8, got 9", window=8, min_values=9)
    refused(ValueError, "^deviations must be positive, got 0", deviations=0)
    refused(ValueError, "^on must be one of loss, norm, got 'gradient'", on="gradient")
    refused(ValueError, r"^on must name 'loss', 'norm' or both, got \(\)", on=())
    refused(ValueError, "^correction must be one of 0, 1, got 2", correction=2)


def test_bad_losses():
    tx, x = optzoo.skip_spikes(optax.sgd(0.1)), jnp.zeros(1)
    update = functools.partial(tx.update, x, tx.init(x), x)
    with pytest.raises(
        ValueError, match=r"called without it: pass update\(\.\.\., value=loss\), or set"
    ):
        update()
    with pytest.raises(ValueError, match=r"^value must be a scalar, got shape \(2,\)"):
        update(value=jnp.ones(2))
    with pytest.raises(TypeError, match=r"^value must be a number, got 'low': it is the loss"):
        update(value="low")
    for kind, value in itertools.product((float, np.float64, jnp.bfloat16, jnp.asarray), (1, 2)):
        with jax.numpy_dtype_promotion("strict"):
            assert update(value=kind(value))[1].losses[0] == value


@pytest.mark.parametrize("dtypes", [("float64", "float32"), ("float32", "bfloat16")])
def test_strict_promotion_of_unlike_gradients(dtypes, x64):
    tx = optzoo.skip_spikes(optax.sgd(0.1), on=("loss", "norm"))
    with x64(True), jax.numpy_dtype_promotion("strict"):
        x = [np.ones(2, dtype) for dtype in dtypes]
        state = jax.eval_shape(tx.init, x)
        after = jax.eval_shape(lambda state: tx.update(x, state, x, value=1.0)[1], state)
        assert samples.avals(after) == samples.avals(state)


def test_description():
    tx = optzoo.skip_spikes(optzoo.adam(0.1))
    state = tx.init(params())
    assert optzoo.slot_names(state) == ("m", "v")
    assert optzoo.get_slot(state, "m")["table"].shape == params()["table"].shape
    assert "m" in str(optzoo.describe(tx, params()))
