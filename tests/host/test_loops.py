"""Loops that end early, errors in a thread, and what a store counts."""

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optzoo
from optzoo.host import cached as host_cached
from optzoo.state.fit import StateError

from .cases import (
    CACHE,
    ROWS,
    WIDTH,
    adam,
    batches,
    first,
    loss,
    ordinary,
    others,
    same,
    table,
    train,
)

pytestmark = pytest.mark.optimized


def begun(tx=None, **options):
    """A new store, its parameters and state."""
    store = optzoo.host.HostTable(table(), tx or adam(), options.pop("cache", CACHE), **options)
    return store, *store.init(others())


@pytest.mark.parametrize("swapped", [True, False])
def test_a_loop_that_is_left(swapped):
    """After a swap, or before it: the plan that is not needed is taken back."""
    *want, _ = ordinary(adam(), data=batches()[:3] + batches()[5:])
    store, params, state = begun()
    step, data = store.minimize(loss), batches()
    for i, (places, (_, y)) in enumerate(store.ahead(data, ids=first)):
        if i == 3 and not swapped:
            break
        params, state, _ = step(*store.swap(params, state), places, y)
        if i == 2 and swapped:
            break
    params, state, _ = train(store, params, state, data[5:])
    same(store.flush(params, state), tuple(want))
    assert store.step == store.stats().steps == 5


def test_an_error_in_a_thread_is_raised_in_the_loop():
    """Before its batch; the batches before it are trained, and the store goes on."""
    *want, _ = ordinary(adam())
    store, params, state = begun()
    step, done = store.minimize(loss), 0
    bad = (np.array([1, ROWS + 1]), np.zeros(2, np.float32))
    with pytest.raises(ValueError, match=r"ids of 'table' must be in \[0, 60\), or 60 for padd"):
        for places, (_, y) in store.ahead([*batches()[:3], bad], ids=first):
            params, state, _ = step(*store.swap(params, state), places, y)
            done += 1
    assert done == 3
    params, state, _ = train(store, params, state, batches()[3:])
    same(store.flush(params, state), tuple(want))


class Interrupted:
    """A future of which the first wait is interrupted."""

    def __init__(self, future):
        self.future, self.calls = future, 0

    def result(self):
        self.calls += 1
        if self.calls == 1:
            raise KeyboardInterrupt
        return self.future.result()

    def exception(self):
        return self.future.exception()


@pytest.mark.unique
def test_an_interrupt_while_a_plan_is_awaited():
    *want, _ = ordinary(adam())
    store, params, state = begun()
    step, data = store.minimize(loss), batches()
    with pytest.raises(KeyboardInterrupt):
        for i, (places, (_, y)) in enumerate(store.ahead(data, ids=first)):
            params, state, _ = step(*store.swap(params, state), places, y)
            if i == 2:
                store._future = Interrupted(store._future)
    same(store.flush(*train(store, params, state, data[3:])[:2]), tuple(want))


BAD = {
    "negative": ([-1, 2], ValueError, r"must be in \[0, 60\).*got -1"),
    "floats": ([1.0], TypeError, "must be integers, got dtype float64"),
    "too many": (range(CACHE + 1), ValueError, "17 distinct ids of 'table', more than cache_rows="),
    "a number": (3, TypeError, "must be arrays, or a tuple or dict of arrays, got 3"),
}


@pytest.mark.parametrize("name", BAD)
def test_ids_that_are_refused(name):
    ids, error, message = BAD[name]
    store, params, state = begun()
    before = store.flush(params, state)
    with pytest.raises(error, match=message):
        next(store.ahead([0], ids=lambda _: ids if name == "a number" else np.array(ids)))
    same(store.flush(params, state), before)


def test_one_table_of_several_that_is_refused_leaves_the_other_as_it_was():
    tables = {"a": table(), "b": table()}
    store = optzoo.host.HostTable(tables, adam(), {"a": 8, "b": 2})
    params, state = store.init({})
    for ids, message in (
        ({"a": np.arange(8), "b": np.arange(3)}, "3 distinct ids of 'b'"),
        ({"a": np.arange(8)}, "ids must be a dict with the names"),
    ):
        with pytest.raises(ValueError, match=message):
            next(store.ahead([ids], ids=lambda batch: batch))
        assert not any(len(t.map.held()) for t in store._tables.values())
    del params, state


def test_no_memory_for_rows_that_are_read(monkeypatch):
    """A plan that fails in the middle changes nothing."""
    store, params, state = begun()
    monkeypatch.setattr(host_cached, "size_of", lambda number: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        next(store.ahead(batches(), ids=first))
    monkeypatch.undo()
    *want, _ = ordinary(adam())
    same(store.flush(*train(store, params, state)[:2]), tuple(want))


def test_swaps_out_of_turn():
    store, params, state = begun()
    with pytest.raises(RuntimeError, match="swap must be called once for each batch"):
        store.swap(params, state)
    loop = store.ahead(batches(), ids=first)
    next(loop)
    with pytest.raises(RuntimeError, match="another loop of this store is not finished"):
        next(store.ahead(batches(), ids=first))
    with pytest.raises(RuntimeError, match="swap was not called for a batch"):
        next(loop)


def test_before_there_are_rows():
    store = optzoo.host.HostTable(table(), adam(), CACHE)
    with pytest.raises(RuntimeError, match="call init or load first"):
        next(store.ahead([], ids=first))


@pytest.mark.parametrize("mapped", [True, False])
def test_a_second_init_is_refused(mapped, tmp_path):
    """The caches would be empty while the store knows of rows in them."""
    folder = {"folder": tmp_path} if mapped else {}
    store = optzoo.host.HostTable(table(), adam(), CACHE, **folder)
    store.init(others())
    with pytest.raises(RuntimeError, match="init: the store is already initialized"):
        store.init(others())


def test_plans_are_made_while_a_step_runs():
    """The next plan is ready before the loop asks for it; a step that is quick waits."""
    store, params, state = begun()
    threads = []

    def ids(batch):
        threads.append(threading.current_thread().name)
        return batch[0]

    for i, _ in enumerate(store.ahead(batches(), ids=ids)):
        params, state = store.swap(params, state)
        if i == 2:
            end = time.monotonic() + 20
            while not store._future.done():
                assert time.monotonic() < end
                time.sleep(0.001)
    assert {*threads} == {"MainThread"}
    assert store.stats().seconds_waited > 0
    assert threading.active_count() == 1 or all(
        not t.name.startswith("host-table") for t in threading.enumerate()
    )


def test_what_is_counted():
    ids = [[0, 1, 1, ROWS], [1, 2, 3], [4, 5, 0], [7, 8, 9]]
    store, params, state = begun(cache=4, policy="lru")
    train(store, params, state, [(np.array(i), np.ones(len(i), np.float32)) for i in ids])
    assert store.stats()._replace(seconds_waited=0) == (4, 13, 11, 2, 9, 5, 0)


DENSE = {
    "average norm": lambda: optax.chain(optzoo.transforms.clip_by_average_norm(1.0), adam()),
    "accumulate rows": lambda: optzoo.accumulate(adam(), 2, max_rows={"table": 9}),
    "adam": lambda: optzoo.adam(0.1),
    "nadam": lambda: optzoo.nadam(0.1),
    "soap": lambda: optzoo.soap(0.1),
    "moving_average": lambda: optzoo.moving_average(adam(), 0.9),
    "accumulate": lambda: optzoo.accumulate(adam(), 2),
    "densify": lambda: optax.chain(optzoo.rows.densify(), optax.adam(0.1)),
    "at random": lambda: optzoo.slots_dtype(adam(), "bfloat16", stochastic=True),
    "ema_nesterov": lambda: optzoo.ema_nesterov(adam(), 0.5),
}


@pytest.mark.parametrize("name", DENSE)
def test_optimizers_that_are_refused(name):
    store = optzoo.host.HostTable(table(), DENSE[name](), CACHE)
    with pytest.raises(ValueError, match=r"tx (cannot train a cache|has optzoo\.acc)") as error:
        store.init(others())
    assert ('it is "dense"' in str(error.value)) == (name == "adam")
    assert ('it is "touched"' in str(error.value)) == (name == "nadam")


def of_values(f):
    """An optimizer that changes the gradient of all touched rows together."""
    change = optax.stateless(lambda updates, _: jax.tree.map(f, updates))
    return optax.chain(optzoo.rows.on_values(change), adam())


MIXED = {
    "cumsum": lambda g: jnp.cumsum(g, 0),
    "the first": lambda g: g - g[:1],
    "sorted": lambda g: jnp.sort(g, 0),
    "the other": lambda g: g[::-1],
}


@pytest.mark.parametrize("name", MIXED)
def test_rows_may_depend_on_others_by_sums_alone(name):
    """A cache has them in another order; and so a gradient has."""
    sums = of_values(lambda g: g / (1 + jnp.sum(jnp.abs(g)) + jnp.max(g)))
    optzoo.host.HostTable(table(), sums, CACHE).init(others())
    with pytest.raises(ValueError, match="tx cannot train a cache of a table on the host: `"):
        optzoo.host.HostTable(table(), of_values(MIXED[name]), CACHE).init(others())


def test_a_dense_gradient_is_refused_when_traced():
    store, params, state = begun()
    step = store.minimize(lambda p, ids: jnp.sum(p["table"][ids]) + jnp.sum(p["table"] ** 2))
    for places, _ in store.ahead(batches(1), ids=first):
        with pytest.raises(ValueError, match="gradient of 'table' is dense"):
            step(*store.swap(params, state), places)


@pytest.mark.parametrize("what", ["shape", "dtype", "optimizer", "other parameter"])
def test_checkpoints_that_do_not_fit(what):
    x = {"table": table(), **others()}
    if what == "shape":
        x["table"] = x["table"][1:]
    if what == "dtype":
        x["table"] = x["table"].astype(jnp.bfloat16)
    if what == "other parameter":
        x["v"] = jnp.ones(3)
    state = (optzoo.adagrad(0.1) if what == "optimizer" else adam()).init(x)
    store = optzoo.host.HostTable(table(), adam(), CACHE)
    if what == "other parameter":
        x.pop("v")
    with pytest.raises(StateError, match="of another optimizer or other parameters"):
        store.load(x, state)


WRONG = {
    "no array": ({"rows": [1.0]}, TypeError, "must be an array or a shape"),
    "integers": ({"rows": np.ones((3, 2), int)}, TypeError, "must have rows of real numbers"),
    "no rows": ({"rows": np.ones((0, 2))}, TypeError, "must have rows of real numbers"),
    "a number": ({"rows": np.float32(1)}, TypeError, "must have rows of real numbers"),
    "no tables": ({"rows": {}}, ValueError, "rows must have a table"),
    "read only": ({"rows": np.broadcast_to(1.0, (3, 2))}, ValueError, "is a read-only array"),
    "lines": ({"rows": "lines"}, TypeError, "is in lines, which a cache does not support"),
    "cache_rows": ({"cache_rows": 0}, ValueError, "cache_rows must be at least 1"),
    "no cache_rows": ({"cache_rows": {}}, TypeError, "cache_rows must be an int"),
    "other names": ({"cache_rows": {"x": 3}}, ValueError, r"cache_rows has the names \['x'"),
    "policy": ({"policy": "fifo"}, ValueError, "policy must be one of lfu, lru"),
    "tx": ({"tx": 3}, TypeError, "tx must be"),
    "init": ({"init": 3}, TypeError, "init must be a function"),
    "vocabulary": ({"vocabulary": 3}, TypeError, "vocabulary must be an optzoo.growing.Vocab"),
    "short vocabulary": (
        {"vocabulary": optzoo.growing.Vocabulary(7)},
        ValueError,
        "vocabulary has 7 rows, but table 'table' has 60",
    ),
    "sharding": (
        {"sharding": optzoo.sharded.RowSharding(CACHE, 2)},
        ValueError,
        "sharding needs a mesh",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_arguments_that_are_refused(name):
    given, error, message = WRONG[name]
    if name == "lines":
        given = {"rows": optzoo.rows.to_lines(jnp.ones((128, 2)))}
    with pytest.raises(error, match=message):
        optzoo.host.HostTable(**{"rows": table(), "tx": adam(), "cache_rows": CACHE, **given})


def test_other_parameters_must_be_a_dict():
    with pytest.raises(TypeError, match="others must be a dict"):
        optzoo.host.HostTable(table(), adam(), CACHE).init(jnp.ones(3))


def test_processes_that_share_a_mesh_are_refused():
    class Device:
        def __init__(self, process):
            self.process_index = process

    class Mesh:
        axis_names, shape, size = ("shard",), {"shard": 2}, 2
        devices = np.array([Device(0), Device(1)])

    from optzoo.host import arguments

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arguments, "check_axes", lambda *_: 2)
        with pytest.raises(ValueError, match="HostTable supports one process only"):
            optzoo.host.HostTable(table(), adam(), CACHE, mesh=Mesh())


def test_memory_on_the_device_is_that_of_the_cache():
    """A table of ten caches: nothing on the device has more rows than the cache has."""
    rows, cache = 40_000, 4_000
    store = optzoo.host.HostTable(np.zeros((rows, WIDTH), np.float32), adam(), cache)
    before = {id(a) for a in jax.live_arrays()}
    params, state = store.init(others())
    data = batches(4, rows=rows, number=1000)
    params, state, _ = train(store, params, state, data)
    new = [a for a in jax.live_arrays() if id(a) not in before]
    assert max(len(a) for a in new if a.ndim) == cache
    whole = 3 * rows * WIDTH * 4
    assert sum(a.nbytes for a in new) < 0.15 * whole
