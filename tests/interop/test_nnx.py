"""``nnx_minimize`` beside a step by hand: ``nnx.split``, ``merge``, ``Optimizer.update``."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import optzoo
from optzoo.interop.nnx import as_pure
from optzoo.state.fit import StateError

ROWS = {"embed/embedding": "require"}  # the table is small
IDS = np.array([[1, 5, 1], [3, 5, 5]])
Y = np.array([[1.0, -1.0, 0.5], [0.0, 2.0, 1.0]], np.float32)


class Model(nnx.Module):
    """With parameters, batch statistics and random keys."""

    def __init__(self, rngs):
        self.embed, self.norm = nnx.Embed(8, 2, rngs=rngs), nnx.BatchNorm(2, epsilon=1.0, rngs=rngs)
        self.dropout, self.out = nnx.Dropout(0.5, rngs=rngs), nnx.Linear(2, 1, rngs=rngs)

    def __call__(self, ids):
        return self.out(self.dropout(self.norm(self.embed(ids))))[..., 0]


def loss(model, ids, y, metrics):
    value = jnp.mean((model(ids) - y) ** 2)
    metrics.update(values=value)
    return value


def make():
    tables, dense = optzoo.lazy_adam(0.1, eps=0.1), optzoo.momentum(0.1, 0.9)
    return optzoo.param_groups({"embed/.*": tables, ".*": dense})


def start(wrt=nnx.Param, tx=None):
    model = Model(nnx.Rngs(0))
    return model, nnx.Optimizer(model, tx or make(), wrt=wrt), nnx.metrics.Average()


@nnx.jit
def by_hand(model, optimizer, ids, y, metrics):
    graphdef, params, rest = nnx.split(model, optimizer.wrt, ...)

    def of_params(params):
        merged, counted = nnx.merge(graphdef, params, rest, copy=True), nnx.clone(metrics)
        value = loss(merged, ids, y, counted)
        return value, (nnx.state(merged, nnx.Not(optimizer.wrt)), nnx.state(counted))

    found, grads = optzoo.value_and_grad(of_params, has_aux=True, sparse=ROWS)(params)
    value, (others, counted) = found
    optimizer.update(model, grads)
    nnx.update(model, others)
    nnx.update(metrics, counted)
    return value


def arrays(*objects):
    of_keys = lambda x: (
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    )
    return jax.tree.map(of_keys, as_pure(nnx.state(objects)))


def close(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7), a, b)


@pytest.fixture(autouse=True)
def ranks():
    with jax.numpy_rank_promotion("allow"):  # for Flax' own
        yield


@pytest.fixture(scope="module")
def wanted():
    """The model, the optimizer and the metric after three steps by hand, and the losses."""
    objects = start()
    with jax.numpy_rank_promotion("allow"):
        losses = [by_hand(*objects[:2], IDS[i % 2], Y[i % 2], objects[2]) for i in range(3)]
    return arrays(*objects), losses


@pytest.mark.parametrize("native", [False, True])
def test_all_variables_are_those_of_a_step_by_hand(wanted, native):
    """Parameters, slots, counts, statistics, random keys and metrics."""
    model, optimizer, metrics = start()
    step = optzoo.nnx_minimize(loss, sparse=ROWS, native=native)
    losses = [step(model, optimizer, IDS[i % 2], Y[i % 2], metrics) for i in range(3)]
    close((arrays(model, optimizer, metrics), losses), wanted)
    slots = optimizer.opt_state.inner_states["group_0"].inner_state[0].slots
    seen = slots.m["embed"]["embedding"][...].any(axis=1)
    np.testing.assert_array_equal(seen, np.isin(np.arange(8), IDS))
    assert int(optimizer.step[...]) == int(model.dropout.rngs.count[...]) == 3


def test_one_trace_for_each_mode():
    """``model.eval()`` changes the program; another batch does not."""
    traces = []

    def counted(model, batch):
        traces.append(len(traces))
        return jnp.mean((model(batch["ids"]) - batch["y"]) ** 2), batch["y"]

    model, optimizer, _ = start(tx=optzoo.gradient_descent(0.1))
    step = optzoo.nnx_minimize(counted, has_aux=True)
    for i in range(2):
        _, aux = step(model, optimizer, {"ids": IDS[i], "y": Y[i]})
        np.testing.assert_array_equal(aux, Y[i])
    assert len(traces) == 1
    model.eval()
    step(model, optimizer, {"ids": IDS[0], "y": Y[0]})
    assert len(traces) == 2
    assert int(model.dropout.rngs.count[...]) == 2


def test_one_object_in_two_places():
    """A source of random keys in the model and in the batch is one."""

    class Noisy(nnx.Module):
        def __init__(self, rngs):
            self.w, self.rngs = nnx.Param(jnp.ones(3)), rngs

    def noisy(model, rngs):
        return jnp.sum(model.w[...] * (model.rngs.normal((3,)) + rngs.normal((3,))))

    rngs = nnx.Rngs(5)
    model, same = Noisy(rngs), nnx.Rngs(5)
    optimizer = nnx.Optimizer(model, optzoo.gradient_descent(1.0), wrt=nnx.Param)
    optzoo.nnx_minimize(noisy)(model, optimizer, rngs)
    np.testing.assert_allclose(model.w[...], 1 - same.normal((3,)) - same.normal((3,)), rtol=1e-6)
    assert int(rngs.default.count[...]) == 2 and model.rngs is rngs


def test_what_is_not_in_wrt_stays():
    """The optimizer's ``wrt`` may be any filter: a function of the path, a list."""
    model, optimizer, metrics = start([lambda path, _: path[0] == "out"], optzoo.adam(0.1))
    before = jax.tree.map(np.array, arrays(model))
    optzoo.nnx_minimize(loss)(model, optimizer, IDS[0], Y[0], metrics)
    after, before = arrays(model)[0], before[0]
    close(after["embed"], before["embed"])
    assert (after["out"]["kernel"] != before["out"]["kernel"]).any()
    assert (after["norm"]["mean"] != before["norm"]["mean"]).all()


def test_a_model_in_the_batch_is_not_trained():
    """Such as a teacher, though its variables are parameters, too."""
    model, optimizer, _ = start(tx=optzoo.gradient_descent(0.1))
    teacher = Model(nnx.Rngs(1))
    before = arrays(teacher)[0]["embed"]
    distance = lambda model, teacher, ids: jnp.mean((model(ids) - teacher(ids)) ** 2)
    optzoo.nnx_minimize(distance)(model, optimizer, teacher, IDS[0])
    close(arrays(teacher)[0]["embed"], before)
    assert int(teacher.dropout.rngs.count[...]) == 1


def test_variables_that_the_loss_adds():
    def noted(model, x):
        model.seen = nnx.Intermediate(x)
        return jnp.sum(model(x))

    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optzoo.gradient_descent(0.1), wrt=nnx.Param)
    optzoo.nnx_minimize(noted)(model, optimizer, jnp.ones((1, 2)))
    np.testing.assert_array_equal(model.seen[...], jnp.ones((1, 2)))


def test_extra_args_go_to_the_update():
    model = nnx.Linear(2, 1, use_bias=False, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optzoo.gradient_descent(0.1), wrt=nnx.Param)
    before = jnp.array(model.kernel[...])
    step = optzoo.nnx_minimize(lambda model, x: jnp.sum(model(x)))
    step(model, optimizer, jnp.ones((1, 2)), learning_rate=2.0)
    np.testing.assert_allclose(model.kernel[...], before - 2, rtol=1e-6)


def test_rows_that_rest():
    """Of ``caught_up``: as all rows in each step."""
    table = nnx.Embed(8, 2, rngs=nnx.Rngs(0))
    want, tx = jnp.array(table.embedding[...]), optzoo.momentum(0.1, 0.9)
    rested = optzoo.caught_up(tx, dense=True)
    optimizer = nnx.Optimizer(table, rested, wrt=nnx.Param)
    step = optzoo.nnx_minimize(lambda table, ids: jnp.sum(table(ids) ** 2))
    gradient = jax.grad(lambda x, ids: jnp.sum(x[ids] ** 2))
    state = tx.init(want)
    for ids in (IDS[0], IDS[1], IDS[1]):
        step(table, optimizer, ids)
        updates, state = tx.update(gradient(want, ids), state, want)
        want = want + updates
    params = as_pure(nnx.state(table, nnx.Param))
    params, _ = optzoo.rows.catch_up(params, as_pure(optimizer.opt_state))
    np.testing.assert_allclose(params["embedding"], want, rtol=1e-5)


def test_parameters_to_evaluate():
    """They are found without variables; with them an error says how to get rid of them."""
    table = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    tx = optzoo.moving_average(optzoo.gradient_descent(1.0), 0.5)
    optimizer = nnx.Optimizer(table, tx, wrt=nnx.Param)
    start = jax.tree.map(jnp.array, as_pure(nnx.state(table, nnx.Param)))
    optimizer.update(table, jax.tree.map(jnp.ones_like, nnx.state(table, nnx.Param)))
    params, state = optzoo.nnx_split(table, optimizer)
    got = optzoo.eval_params(params, state)
    jax.tree.map(lambda a, x: np.testing.assert_allclose(a, x - 0.5, rtol=1e-6), got, start)

    remedy = r"use params, state = optzoo\.nnx_split\(model, optimizer\)"
    for state in (nnx.state(optimizer), optimizer):
        with pytest.raises(
            TypeError, match=rf"a state of tx, got an nnx\.(State|Optimizer): .*{remedy}"
        ):
            optzoo.eval_params(params, state)
    for given in (nnx.state(table, nnx.Param), table, params):
        with pytest.raises(StateError, match=f"structure of the averages.*{remedy}"):
            optzoo.eval_params(given, optimizer.opt_state)
    plain = nnx.Optimizer(table, optzoo.adam(0.1), wrt=nnx.Param)
    assert optzoo.eval_params(params, plain.opt_state).keys() == params.keys()


class Averaged(nnx.Module):
    """A table, a parameter that is not trained, and a statistic."""

    def __init__(self):
        self.embed = nnx.Embed(6, 2, rngs=nnx.Rngs(0))
        self.norm = nnx.BatchNorm(2, rngs=nnx.Rngs(0))

    def __call__(self, ids):
        return self.norm(self.embed(ids))


OF_TABLE = lambda path, _: "embed" in path
GROWN = {
    "lazy_adam": lambda: optzoo.moving_average(optzoo.lazy_adam(0.1), 0.9),
    "caught_up": lambda: optzoo.caught_up(optzoo.moving_average(optzoo.adam(0.1), 0.9), mask=True),
    "bfloat16": lambda: optzoo.slots_dtype(optzoo.row_wise_adagrad(0.1), "bfloat16"),
}


@pytest.mark.parametrize("name", GROWN)
def test_a_table_grows_between_steps(name):
    """As one that has all rows from the start; the model's other variables stay."""
    rows = optzoo.sharded.uniform_rows(jax.random.key(0), 2)
    models, step = [], optzoo.nnx_minimize(lambda m, ids: jnp.sum(m(ids) ** 3))
    for grows in (True, False):
        model, tx = Averaged(), GROWN[name]()
        if not grows:
            start = model.embed.embedding[...]
            model.embed.embedding.set_value(jnp.concatenate([start, rows(jnp.arange(6, 9))]))
        optimizer = nnx.Optimizer(model, tx, wrt=OF_TABLE)
        step(model, optimizer, np.array([0, 2, 2]))
        statistic, count = model.norm.mean[...], int(optimizer.step[...])
        if grows:
            params, state = optzoo.nnx_split(model, optimizer)
            assert list(params) == ["embed"]
            grown = optzoo.growing.resize_table(
                params, state, {"embed/embedding": 9}, tx=tx, init=rows
            )
            optzoo.nnx_update(model, optimizer, *grown)
            assert (model.norm.mean[...] == statistic).all() and count == optimizer.step[...] == 1
        step(model, optimizer, np.array([0, 8, 7]))
        models.append(optzoo.nnx_split(model, optimizer))
    one, other = models
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), one, other)


def test_what_is_no_split_of_a_model():
    model, tx = Averaged(), optzoo.momentum(0.1, 0.9)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    params, state = optzoo.nnx_split(model, optimizer)
    before = arrays(model, optimizer)
    with pytest.raises(StateError, match=r"^state must have the structure that optzoo.nnx_split\("):
        optzoo.nnx_update(model, optimizer, params, params)
    with pytest.raises(StateError, match=r"^params must have the structure"):
        optzoo.nnx_update(model, optimizer, state, params)
    with pytest.raises(TypeError, match="model must be a module of Flax NNX"):
        optzoo.nnx_split(params, optimizer)
    with pytest.raises(TypeError, match=r"optimizer must be an nnx.Optimizer\(model, tx, wrt="):
        optzoo.nnx_update(model, tx, params, state)
    close(before, arrays(model, optimizer))


@pytest.mark.parametrize("change", ["resize_table", "reset_rows"])
def test_a_state_of_nnx_in_functions_of_a_state(change):
    """With the types of the state it is taken; without them an error names ``nnx_split``."""
    model, tx = nnx.Embed(6, 2, rngs=nnx.Rngs(0)), optzoo.lazy_adam(0.1)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    rows = {"resize_table": 8, "reset_rows": np.array([1])}[change]
    change = functools.partial(getattr(optzoo.growing, change), tx=tx)
    params, state = optzoo.nnx_split(model, optimizer)
    want = change(params, state, {"embedding": rows})
    got = change(nnx.state(model, nnx.Param), optimizer.opt_state, {"embedding": rows})
    close(jax.tree.leaves(got), jax.tree.leaves(want))
    for wrong in (optimizer, nnx.state(optimizer)):
        with pytest.raises(TypeError, match=r"an nnx\..*optzoo\.nnx_split\(model, optimizer\)"):
            change(params, wrong, {"embedding": rows})


def test_slots_of_an_optimizer_of_nnx():
    model = nnx.Embed(6, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optzoo.momentum(0.1, 0.9), wrt=nnx.Param)
    for wrong in (optimizer, nnx.state(optimizer)):
        for f in (lambda state: optzoo.get_slot(state, "momentum"), optzoo.slot_names):
            with pytest.raises(TypeError, match=r"an nnx\..*optzoo\.nnx_split\(model, optimizer\)"):
                f(wrong)
    deferred = optzoo.caught_up(optzoo.adam(0.1), mask=True)
    state = nnx.Optimizer(model, deferred, wrt=nnx.Param).opt_state
    assert optzoo.slot_names(state) == ("m", "v")


def test_deferred_rows_in_variables():
    model, tx = nnx.Embed(6, 2, rngs=nnx.Rngs(0)), optzoo.caught_up(optzoo.adam(0.1), mask=True)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    for f in (optzoo.eval_params, optzoo.rows.catch_up):
        with pytest.raises(TypeError, match=r"got one with nnx.Variable: .*optzoo\.nnx_split\("):
            f(nnx.state(model, nnx.Param), optimizer.opt_state)


def test_ids_of_64_bits_are_named_by_their_place_in_the_batch():
    model = nnx.Embed(6, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optzoo.lazy_adam(0.1), wrt=nnx.Param)
    step = optzoo.nnx_minimize(lambda model, metric, ids: jnp.sum(model(ids["user"])))
    with pytest.raises(OverflowError, match=r"^batch\[1\] 'user' has the integer 1099511627776,"):
        step(model, optimizer, nnx.metrics.Average("x"), {"user": np.array([1, 2**40])})


def test_slots_and_parameters_of_several_arrays():
    """In 8 and 24 bits: a variable of the optimizer holds codes and scales, over several steps."""
    table = nnx.Embed(8, 16, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    tx = optzoo.master_weights(optzoo.slots_dtype(optzoo.lazy_adam(0.1), "int8"))
    optimizer = nnx.Optimizer(table, tx, wrt=nnx.Param)
    params = jax.tree.map(jnp.array, as_pure(nnx.state(table, nnx.Param)))
    state, square = tx.init(params), lambda rows: jnp.sum(rows.astype(jnp.float32) ** 2)
    step = optzoo.nnx_minimize(lambda table, ids: square(table(ids)))
    usual = optzoo.minimize(lambda params, ids: square(params["embedding"][ids]), tx)
    for ids in (IDS[0], IDS[1], IDS[1]):
        step(table, optimizer, ids)
        params, state, _ = usual(params, state, ids)
    close(arrays(table)[0], params)
    found = as_pure(optimizer.opt_state)
    assert jax.tree.structure(found) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, found, state)


def assigns(model, ids, y, metrics):
    model.out.kernel[...] = model.out.kernel[...] / 2
    return loss(model, ids, y, metrics)


def deletes(model, ids, y, metrics):
    value = loss(model, ids, y, metrics)
    del model.norm.mean
    return value


def test_refused():
    model, optimizer, metrics = start()
    step = lambda f: optzoo.nnx_minimize(f)(model, optimizer, IDS[0], Y[0], metrics)
    with pytest.raises(ValueError, match=r"assigns to parameter 'out/kernel'.*wrt"):
        step(assigns)
    with pytest.raises(ValueError, match="deletes variable 'norm/mean'"):
        step(deletes)
    with pytest.raises(TypeError, match="model must be a module of Flax NNX, not a State"):
        optzoo.nnx_minimize(loss)(nnx.state(model), optimizer)
    with pytest.raises(TypeError, match=r"optimizer must be an nnx.Optimizer.* not a Model"):
        optzoo.nnx_minimize(loss)(model, model)
    with pytest.raises(TypeError, match="has_aux must be"):
        optzoo.nnx_minimize(loss, has_aux="no")


def test_a_module_that_holds_more_than_parameters():
    """What the loss changes in it would be lost: ``value_and_grad`` and ``minimize`` refuse it."""
    norm, x = nnx.BatchNorm(2, rngs=nnx.Rngs(0)), jnp.ones((3, 2))
    of_norm = lambda norm, x: jnp.sum(norm(x))
    text = "'mean' of the BatchNorm is not an nnx.Param: use optzoo.nnx_minimize"
    with pytest.raises(TypeError, match=text):
        optzoo.value_and_grad(of_norm)(norm, x)
    tx = optzoo.adam(0.1)
    with pytest.raises(TypeError, match=text):
        optzoo.minimize(of_norm, tx)(norm, tx.init(nnx.state(norm, nnx.Param)), x)
    linear = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    _, grads = optzoo.value_and_grad(lambda linear: jnp.sum(linear(x)))(linear)
    np.testing.assert_allclose(grads.kernel[...], 3 * np.ones((2, 1)))
