"""Runs of optax that continue here, and runs of optzoo that continue there.

What is expected is optax's own run, without a change of the optimizer.
"""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.core import meta

import optzoo
from optzoo.interop.optax import from_optax, to_optax
from optzoo.state.types import LeafwiseState, nodes_of
from optzoo.testing import samples

from ..selection import chosen_first

HALF, RATE = 5, 0.01
E, NO = {"eps": 0.1}, {"eps": 0.0}  # an epsilon so large that its place matters
SCHEDULE = optax.exponential_decay(0.01, 1, 0.8)
DESCENT = optax.scale_by_learning_rate(RATE)
RMS = {"eps": 0.1, "momentum": 0.9}
# The formulas are the same.
SAME = {
    "adam": (optax.adam(RATE, **E), optzoo.sparse_adamw(RATE, **E)),
    "adamw": (
        optax.adamw(RATE, **E, weight_decay=0.2),
        optzoo.sparse_adamw(RATE, **E, weight_decay=0.2),
    ),
    "schedule": (optax.adam(SCHEDULE, **E), optzoo.sparse_adamw(SCHEDULE, **E)),
    "sgd": (optax.sgd(RATE), optzoo.gradient_descent(RATE)),
    "sgd, schedule": (optax.sgd(SCHEDULE), optzoo.gradient_descent(SCHEDULE)),
    "momentum": (optax.sgd(RATE, 0.9), optzoo.momentum(RATE, 0.9)),
    "nesterov": (
        optax.sgd(RATE, 0.9, nesterov=True),
        optzoo.momentum(RATE, 0.9, nesterov=True),
    ),
    "rmsprop": (optax.rmsprop(RATE, **E), optzoo.rmsprop(RATE, **E, momentum=None)),
    "rmsprop, momentum": (optax.rmsprop(SCHEDULE, **RMS), optzoo.rmsprop(SCHEDULE, **RMS)),
    "rmsprop, centered": (
        optax.rmsprop(RATE, **E, centered=True),
        optzoo.rmsprop(RATE, **E, momentum=None, centered=True),
    ),
    "rmsprop, both": (
        optax.rmsprop(RATE, **RMS, centered=True),
        optzoo.rmsprop(RATE, **RMS, centered=True),
    ),
    "adagrad": (optax.adagrad(RATE, **NO), optzoo.adagrad(RATE)),
    "adagrad_eps": (optax.adagrad(RATE, **NO), optzoo.adagrad_eps(RATE, **NO)),
    "chain": (
        optax.chain(optax.clip(0.5), optax.sgd(RATE, 0.9)),
        optax.chain(optax.clip(0.5), optzoo.momentum(RATE, 0.9)),
    ),
    "groups": (
        optax.partition(
            {"x": optax.adam(SCHEDULE, **E), "y": optax.sgd(RATE, 0.9)}, {"a": "x", "b": "y"}
        ),
        optzoo.param_groups(
            {"a/.*": optzoo.sparse_adamw(SCHEDULE, **E), "b": optzoo.momentum(RATE, 0.9)}
        ),
    ),
    "one of two groups": (
        optax.partition(
            {"x": optax.sgd(RATE, 0.9), "y": optax.sgd(RATE, 0.9)}, {"a": "x", "b": "y"}
        ),
        optzoo.momentum(RATE, 0.9),
    ),
    "masked": (
        optax.masked(optax.sgd(RATE, 0.9), {"a": True, "b": False}),
        optax.masked(optzoo.momentum(RATE, 0.9), {"a": True, "b": False}),
    ),
    "in part of optax": (
        optax.adam(SCHEDULE, **E),
        optzoo.param_groups(
            {"a/.*": optax.adam(SCHEDULE, **E), "b": optzoo.sparse_adamw(SCHEDULE, **E)}
        ),
    ),
    "injected": (
        optax.inject_hyperparams(optax.adam)(SCHEDULE, **E),
        optzoo.sparse_adamw(SCHEDULE, **E),
    ),
    "injected here": (
        optax.adam(SCHEDULE, **E),
        optax.inject_hyperparams(optzoo.sparse_adamw)(SCHEDULE, **E),
    ),
}
if (
    "bias_correction_mu" in inspect.signature(optax.scale_by_amsgrad).parameters
):  # not before optax 0.2.7
    BARE = {"bias_correction_mu": False, "bias_correction_nu": False}
    SAME["amsgrad"] = (
        optax.chain(optax.scale_by_amsgrad(0.9, 0.8, **E, **BARE), DESCENT),
        optzoo.amsgrad(RATE, 0.9, 0.8, **E),
    )
# optzoo keeps the powers of the betas in float32, as TensorFlow.
POWERS = {
    "adam": (optax.adam(RATE, **NO), optzoo.adam(RATE, **NO)),
    "lazy_adam": (optax.adam(RATE, **NO), optzoo.lazy_adam(RATE, **NO)),
    "adamw": (
        optax.adamw(RATE, **NO, weight_decay=0.2),
        optzoo.adamw(RATE, **NO, weight_decay_per_step=0.2 * RATE),
    ),
    "adamax": (optax.adamax(RATE, **NO), optzoo.adamax(RATE, **NO)),
}
# No arguments make them the same; what is read is the same.
OTHER = {
    "adam": (optax.adam(RATE, **E), optzoo.adam(RATE, **E)),
    "nadam": (optax.nadam(RATE, **NO), optzoo.nadam(RATE, **NO)),
    "amsgrad": (optax.amsgrad(RATE, 0.9, 0.8, **NO), optzoo.amsgrad(RATE, 0.9, 0.8)),
    "adagrad": (optax.adagrad(RATE, eps=0.1), optzoo.adagrad(RATE)),
    "adamax": (optax.adamax(RATE, **E), optzoo.adamax(RATE, **E)),
}


def problem(dtype=np.float32):
    random = np.random.default_rng(0)
    make = lambda: {"a": {"w": random.normal(size=(3, 4))}, "b": random.normal(size=4)}
    start, gradients = make(), [make() for _ in range(2 * HALF)]
    cast = lambda tree: jax.tree.map(lambda x: jnp.asarray(x, dtype), tree)
    return cast(start), cast(jax.tree.map(lambda *xs: np.stack(xs), *gradients))


def run(tx, params, state, gradients):
    def step(carry, gradient):
        params, state = carry
        updates, state = tx.update(gradient, state, params)
        return (optax.apply_updates(params, updates), state), None

    return jax.jit(lambda *start: jax.lax.scan(step, start, gradients)[0])(params, state)


def cut(gradients, *ends):
    return jax.tree.map(lambda g: g[slice(*ends)], gradients)


def largest(a, b):
    gaps = jax.tree.map(lambda a, b: float(np.max(np.abs(a - b), initial=0)), a, b)
    return max(jax.tree.leaves(gaps), default=0)


def gap(old, new, dtype=np.float32):
    """How far the changed run ends from optax's own; and the state that goes back, from its."""
    start, gradients = problem(dtype)
    half = run(old, start, old.init(start), cut(gradients, HALF))
    want, state = run(old, *half, cut(gradients, HALF, None))
    params, mine = run(new, half[0], from_optax(half[1], new, start), cut(gradients, HALF, None))
    if nodes_of(optax.ScaleByAdamState, mine):  # which to_optax does not read
        return largest(params, want), 0
    back = to_optax(mine, old, start)
    assert jax.tree.structure(back) == jax.tree.structure(state)
    ignored = lambda s: s._replace(hyperparams={}) if hasattr(s, "hyperparams") else s
    return largest(params, want), largest(ignored(back), ignored(state))


@pytest.mark.unique
@pytest.mark.parametrize("name", chosen_first(SAME, ["groups"]))
def test_the_same_formula(name, x64):
    assert max(gap(*SAME[name])) < 1e-6
    with x64(True):
        assert max(gap(*SAME[name], np.float64)) < 1e-12


@pytest.mark.parametrize("name", POWERS)
def test_the_same_without_epsilon(name, x64):
    assert max(gap(*POWERS[name])) < 1e-6
    with x64(True):
        assert max(gap(*POWERS[name], np.float64)) < 2e-7


@pytest.mark.parametrize("name", OTHER)
def test_other_formulas(name):
    """The page says which are not the same."""
    assert gap(*OTHER[name])[0] > 1e-5


def test_an_epsilon_under_the_root_is_a_part_of_the_sum():
    """As docs/from_optax_and_torch.md says."""
    start, gradients = problem()
    old, new = optax.adagrad(RATE), optzoo.adagrad(RATE)
    params, state = run(old, start, old.init(start), cut(gradients, HALF))
    want, _ = run(old, params, state, cut(gradients, HALF, None))
    state = from_optax(state, new, params)
    sums = jax.tree.map(lambda a: a + 1e-7, optzoo.get_slot(state, "accumulator"))
    state = optzoo.set_slot(state, "accumulator", sums)
    assert largest(run(new, params, state, cut(gradients, HALF, None))[0], want) < 1e-7


@pytest.mark.parametrize("every", [2, lambda updates: 2 + updates])
def test_multi_steps(every):
    """With a schedule a cycle has 2, 3, 4, ... steps."""
    start, gradients = problem()
    old = optax.MultiSteps(optax.sgd(SCHEDULE, 0.9), every)
    old = optax.GradientTransformationExtraArgs(old.init, old.update)
    new = optzoo.accumulate(optzoo.momentum(SCHEDULE, 0.9), every, use_mean=True)
    end = 5 if callable(every) else 4
    params, state = run(old, start, old.init(start), cut(gradients, end))
    assert int(state.gradient_step) == 2
    want, whole = run(old, params, state, cut(gradients, end, 9 if callable(every) else 10))
    got, mine = run(
        new,
        params,
        from_optax(state, new, params),
        cut(gradients, end, 9 if callable(every) else 10),
    )
    assert largest(got, want) < 1e-6
    back = to_optax(mine, old, params)
    assert int(back.gradient_step) == int(whole.gradient_step)
    assert largest(back.inner_opt_state, whole.inner_opt_state) < 1e-6
    _, state = run(old, params, state, cut(gradients, 1))
    with pytest.raises(ValueError, match="MultiSteps is within a cycle, after 1 of its steps"):
        from_optax(state, new, params)
    if callable(every):
        _, mine = run(new, params, mine, cut(gradients, 1))
        with pytest.raises(ValueError, match="state is within a cycle of optzoo"):
            to_optax(mine, old, params)


def test_slots_are_copied_into_their_storage():
    """In 16 bits, in lines; a step that donates the new state leaves the old one."""
    table = jnp.asarray(np.random.default_rng(0).normal(size=(300, 16)), jnp.float32)
    old = optax.adam(RATE)
    _, state = old.update(table, old.init(table), table)
    new = optzoo.slots_dtype(optzoo.sparse_adamw(RATE), "bfloat16")
    lines = optzoo.rows.to_lines(table)
    for params in (table, lines):
        mine = from_optax(state, new, params)
        assert jax.tree.structure(mine) == jax.tree.structure(new.init(params))
        m = optzoo.get_slot(optzoo.rows.from_lines(mine), "m")
        np.testing.assert_array_equal(m, state[0].mu.astype(jnp.bfloat16))
    for tx in (new, optzoo.sparse_adamw(RATE)):
        step = jax.jit(lambda s, tx=tx: tx.update(table, s, table)[1], donate_argnums=0)
        step(from_optax(state, tx, table))
    assert float(jnp.sum(state[0].mu)) and int(state[0].count) == 1


def test_slots_are_where_init_has_them():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    table = jnp.arange(16.0).reshape(8, 2)
    _, state = optax.sgd(RATE, 0.9).update(table, optax.sgd(RATE, 0.9).init(table), table)
    params = jax.device_put(table, sharding)
    mine = from_optax(state, optzoo.momentum(RATE, 0.9), params)
    got = optzoo.get_slot(mine, "momentum")
    assert got.sharding.is_equivalent_to(sharding, 2)
    np.testing.assert_array_equal(got, table)


def test_slots_without_a_device_of_their_own_go_to_any_mesh():
    params = {"w": jnp.ones(4)}
    _, state = optax.adam(RATE).update(params, optax.adam(RATE).init(params), params)
    state = jax.device_get(state)
    mine = from_optax(state, optzoo.adam(RATE), params)
    assert not any(x.committed for x in jax.tree.leaves(mine))
    mesh = jax.make_mesh((8,), ("d",))
    step = optzoo.minimize(lambda p, x: jnp.mean(x @ p["w"]), optzoo.adam(RATE), mesh=mesh)
    params, _, _ = step(params, mine, jnp.ones((8, 4)))
    assert len(params["w"].devices()) == 8


def test_parameters_in_boxes():
    """With the state of boxes, and of arrays alone."""
    box = lambda a: meta.Partitioned(a, names=("x", None))
    plain, old, tx = {"w": jnp.ones((3, 2))}, optax.sgd(RATE, 0.9), optzoo.momentum(RATE, 0.9)
    for params in (plain, jax.tree.map(box, plain)):
        _, state = old.update(params, old.init(params), params)
        for like in (plain, jax.tree.map(box, plain)):
            mine = from_optax(state, tx, like)
            assert jax.tree.structure(mine) == jax.tree.structure(tx.init(like))
            assert float(jnp.sum(jax.tree.leaves(optzoo.get_slot(mine, "momentum"))[0])) == 6
            back = to_optax(mine, old, params)
            assert jax.tree.structure(back) == jax.tree.structure(state)
            assert largest(back, state) == 0


def test_count_continues_a_schedule():
    params = jnp.ones(2)
    tx = optzoo.momentum(lambda count: 1.0 * count, 0.0)
    start = optax.sgd(0.1, 0.9).init(params)
    for count, rate in {None: 0.0, 7: 7.0}.items():
        state = from_optax(start, tx, params, count=count)
        np.testing.assert_array_equal(tx.update(params, state, params)[0], [-rate, -rate])


@pytest.mark.parametrize("slots", ["MovingAverageSlots", "EMANesterovSlots"])
def test_averages_begin_anew(slots):
    start, gradients = problem()
    old, inner = optax.sgd(SCHEDULE, 0.9), optzoo.momentum(SCHEDULE, 0.9)
    params, state = run(old, start, old.init(start), cut(gradients, HALF))
    tx = {
        "MovingAverageSlots": lambda: optzoo.moving_average(inner, 0.9),
        "EMANesterovSlots": lambda: optzoo.ema_nesterov(inner, 0.5, 0.75),
    }[slots]()
    mine = from_optax(state, tx, params)
    is_it = lambda node: type(node.slots).__name__ == slots
    [got], [begin] = (
        list(filter(is_it, nodes_of(LeafwiseState, s))) for s in (mine, tx.init(params))
    )
    assert largest(got, begin) == 0
    trace = optzoo.get_slot(from_optax(state, inner, params), "momentum")
    assert largest(optzoo.get_slot(mine, "momentum"), trace) == 0


@pytest.mark.unique
@pytest.mark.parametrize("name", ["adam", "momentum"])
def test_deferred_rows_are_current(name):
    start, gradients = problem()
    table, gradients = start["a"]["w"], gradients["a"]["w"]
    old, inner = {
        "adam": (optax.adam(SCHEDULE, **NO), optzoo.adam(SCHEDULE, **NO)),
        "momentum": (optax.sgd(SCHEDULE, 0.9), optzoo.momentum(SCHEDULE, 0.9)),
    }[name]
    tx = optzoo.caught_up(inner, dense=name == "momentum")
    params, state = run(old, table, old.init(table), gradients[:HALF])
    ids = np.arange(HALF) % 3  # each step has one of the three rows
    rows = [gradients[HALF + t, i] for t, i in enumerate(ids)]
    few = [jnp.zeros((3, 4)).at[i].set(row) for i, row in zip(ids, rows, strict=True)]
    want, _ = run(old, params, state, jnp.stack(few))
    state = from_optax(state, tx, params)
    for i, row in zip(ids, rows, strict=True):
        params, state = optzoo.rows.catch_up(params, state, jnp.array([i]))
        gradient = optzoo.SparseRows(jnp.array([i]), row[None], 3)
        params, state = samples.step(tx, gradient, params, state)
    params, _ = optzoo.rows.catch_up(params, state)
    assert largest(params, want) < 1e-6


def test_methods_for_replicas_are_refused():
    tx = optzoo.model_average(optzoo.momentum(0.1, 0.9), axis_name=None)
    with pytest.raises(ValueError, match="tx is a method for replicas"):
        from_optax(optax.sgd(0.1, 0.9).init(PARAMS), tx, PARAMS)


PARAMS = {"w": jnp.ones((2, 3)), "v": jnp.ones(2)}
SGD, ADAM, MOMENTUM = optax.sgd(0.1, 0.9), optax.adam(0.1), optzoo.momentum(0.1, 0.9)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (ADAM, MOMENTUM, "'w' has no TraceState for MomentumSlots.*left over: ScaleByAdamState"),
        (optax.sgd(0.1), MOMENTUM, "'v' has no TraceState for MomentumSlots"),
        (SGD, optzoo.gradient_descent(0.1), "left over: TraceState of 'v'"),
        (optax.chain(SGD, SGD), MOMENTUM, "'v' has several TraceState: at 0/0, 1/0"),
        (SGD, optax.chain(MOMENTUM, MOMENTUM), "tx has several MomentumSlots for 'v'"),
        (optax.lion(0.1), MOMENTUM, "ScaleByLionState at '0' of the state has no counterpart"),
        (
            optax.rmsprop(0.1, bias_correction=True),
            optzoo.rmsprop(0.1),
            "ScaleByRmsWithCountState at '0' of the state has no counterpart; the known classes",
        ),
        (optax.rmsprop(0.1), optzoo.rmsprop(0.1), "no TraceState for RMSProp.*momentum=None"),
        (SGD, optzoo.shampoo(0.1), "tx has ShampooSlots, which cannot be filled; the classes"),
        (SGD, optax.lion(0.1), "left over: TraceState of 'v'"),
        (
            optax.chain(optax.scale(-0.1), optax.trace(0.9)),
            MOMENTUM,
            "the trace of 'v' is the last of its chain, so it contains the learning rate",
        ),
        (
            optax.chain(optax.scale_by_rms(), optax.trace(0.9), optax.scale(-0.1)),
            optzoo.rmsprop(0.1),
            "the trace of 'v' precedes the learning rate",
        ),
        (optax.lookahead(SGD, 2, 0.5), MOMENTUM, "LookaheadState.*no counterpart"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(old, new, message):
    params = PARAMS
    if "Lookahead" in message:
        params = optax.LookaheadParams(PARAMS, PARAMS)
    state = old.init(params)
    with pytest.raises(ValueError, match=f"(?s){message}"):
        from_optax(state, new, PARAMS)


def test_arrays_that_do_not_fit_are_refused():
    state = SGD.init(PARAMS)
    with pytest.raises(ValueError, match=r"momentum of 'w' must have shape \(3, 2\), got \(2, 3\)"):
        from_optax(state, MOMENTUM, {**PARAMS, "w": jnp.ones((3, 2))})
    with pytest.raises(ValueError, match="'u' has no TraceState"):
        from_optax(state, MOMENTUM, {**PARAMS, "u": jnp.ones(2)})
    with pytest.raises(ValueError, match="left over: TraceState of 'v'"):
        from_optax(state, MOMENTUM, {"w": PARAMS["w"]})
    spoilt = (optax.TraceState({**PARAMS, "v": jnp.ones(2, jnp.complex64)}), optax.EmptyState())
    with pytest.raises(ValueError, match="'v' must have a real dtype such as float32, got complex"):
        from_optax(spoilt, MOMENTUM, PARAMS)


def test_numbers_of_updates_that_differ_are_refused():
    one, two = (ADAM.init(PARAMS)[0]._replace(count=jnp.int32(n)) for n in (1, 2))
    hidden = (
        {"w": PARAMS["w"], "v": optax.MaskedNode()},
        {"w": optax.MaskedNode(), "v": jnp.ones(2)},
    )
    parts = [s._replace(mu=tree, nu=tree) for s, tree in zip((one, two), hidden, strict=True)]
    with pytest.raises(ValueError, match=r"numbers of updates differ: \[1, 2\]"):
        from_optax(tuple(parts), optzoo.adam(0.1), PARAMS)
    with pytest.raises(ValueError, match=r"numbers of updates differ: \[0, 3\]"):
        from_optax(ADAM.init(PARAMS), optzoo.adam(0.1), PARAMS, count=3)
    with pytest.raises(ValueError, match="count must be at least 0"):
        from_optax(SGD.init(PARAMS), MOMENTUM, PARAMS, count=-1)


@pytest.mark.parametrize(
    ("tx", "optax_tx", "message"),
    [
        (MOMENTUM, ADAM, "fit optax_tx: 'v' has no ScaleByAdamState; .*left over: TraceState"),
        (optzoo.shampoo(0.1), SGD, "state has ShampooSlots, which optax does not have"),
        (optax.chain(MOMENTUM, MOMENTUM), SGD, "'v' has several TraceState: at 0, 1"),
        (MOMENTUM, optax.lion(0.1), "ScaleByLionState at '0' of the state has no counterpart"),
        (
            MOMENTUM,
            optax.chain(optax.scale(-0.1), optax.trace(0.9)),
            "the trace of 'v' is the last of its chain",
        ),
    ],
)
def test_what_does_not_fit_is_not_written(tx, optax_tx, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        to_optax(tx.init(PARAMS), optax_tx, PARAMS)


def test_another_shape_is_not_written():
    with pytest.raises(ValueError, match=r"trace of 'v' must have shape \(3,\), got \(2,\)"):
        to_optax(MOMENTUM.init(PARAMS), SGD, {**PARAMS, "v": jnp.ones(3)})
