"""Tables whose keys come and go, and that become longer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optzoo

from .cases import WIDTH, adam, loss, ordinary, others, same, table, train

pytestmark = pytest.mark.optimized
ROWS, CACHE, STEPS = 14, 10, 14
new_rows = optzoo.sharded.uniform_rows(jax.random.key(0), WIDTH)


def vocabulary():
    return optzoo.growing.Vocabulary(ROWS, admit_after=2, evict_after=3)


def keys(strings=True):
    """Batches of keys that come and go, so that rows get other keys."""
    rng = np.random.default_rng(0)
    found = []
    for step in range(STEPS):
        of = np.minimum(rng.zipf(1.3, 10), 20) + 9 * (step // 2)
        of[:4] = of[4:8]  # twice, so that they are admitted
        found.append((np.array([f"k{i}" for i in of]) if strings else of, np.ones(10, np.float32)))
    return found


def with_reset_rows(tx, data):
    """The ordinary table, whose rows begin anew by ``reset_rows``."""
    v = vocabulary()
    # Compiled, as in a store: XLA rounds some initializers otherwise than one operation by another.
    params = {"table": jax.jit(new_rows)(jnp.arange(ROWS)), **others()}
    state = tx.init(params)
    step = optzoo.minimize(loss, tx)
    reset = jax.jit(functools.partial(optzoo.growing.reset_rows, tx=tx, init=new_rows))
    anew = 0
    for of, y in data:
        found = v.observe(of)
        anew += len(found.evicted)
        if len(found.reset):
            params, state = reset(params, state, {"table": found.reset})
        params, state, _ = step(params, state, found.rows, y)
    assert anew > 5
    return (params, state), v


def begun(tx, cache=CACHE, **options):
    v, shape = vocabulary(), jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    store = optzoo.host.HostTable(shape, tx, cache, init=new_rows, vocabulary=v, **options)
    return store, v, *store.init(others())


TXS = {
    "lazy_adam": adam,
    "int8": lambda: optzoo.slots_dtype(adam(), "int8"),
    "hyperball": lambda: optzoo.hyperball(adam(), 0.1, {"table": (1,)}),
}


@pytest.mark.unique
@pytest.mark.parametrize("name", TXS)
@pytest.mark.parametrize("cache", [CACHE, ROWS])
def test_a_vocabulary_has_the_values_of_reset_rows(name, cache):
    tx = TXS[name]()
    want, v = with_reset_rows(tx, keys())
    store, mine, params, state = begun(tx, cache)
    same(store.flush(*train(store, params, state, keys())[:2]), want)
    assert mine.state_dict() == v.state_dict()


def test_deferred_rows_that_begin_anew():
    tx = optzoo.caught_up(optzoo.adam(0.05), mask="table")
    want, _ = with_reset_rows(tx, keys())
    store, _, params, state = begun(tx)
    got = store.flush(*train(store, params, state, keys())[:2])
    for a, b in zip(*map(jax.tree.leaves, (got, optzoo.rows.catch_up(*want))), strict=True):
        np.testing.assert_allclose(a, b, 1e-5, 1e-5)


@pytest.mark.parametrize("flush_at", sorted(range(STEPS), key=lambda step: step != 5))
def test_a_flush_and_a_loop_that_is_left_take_keys_back(flush_at):
    """The vocabulary is that of the steps that were trained, and the rest is as without."""
    want, v = with_reset_rows(adam(), keys())
    store, mine, params, state = begun(adam())
    step, data = store.minimize(loss), keys()
    for i, (places, (_, y)) in enumerate(store.ahead(data, ids=lambda batch: batch[0])):
        params, state, _ = step(*store.swap(params, state), places, y)
        if i == flush_at:
            store.flush(params, state)
            assert mine.step == i + 1
            saved = mine.state_dict()
            break
    again = optzoo.growing.Vocabulary.from_state_dict(saved)
    for of, _ in data[flush_at + 1 :]:
        again.observe(of)
    params, state, _ = train(store, params, state, data[flush_at + 1 :])
    same(store.flush(params, state), want)
    assert mine.state_dict() == v.state_dict() == again.state_dict()


def test_a_folder_has_the_vocabulary(tmp_path):
    want, v = with_reset_rows(adam(), keys(strings=False))
    store, _, params, state = begun(adam(), folder=tmp_path)
    params, state, _ = train(store, params, state, keys(strings=False)[:6])
    store.flush(params, state)
    train(store, params, state, keys(strings=False)[6:8])  # is lost
    store.close()
    store, mine, params, state = begun(adam(), cache=ROWS, folder=tmp_path)
    assert store.step == mine.step == 6
    params, state, _ = train(store, params, state, keys(strings=False)[6:])
    same(store.flush(params, state), want)
    assert mine.state_dict() == v.state_dict()


@pytest.mark.parametrize("mapped", [False, True])
def test_a_table_grows(tmp_path, mapped):
    """As one that was resized; steps and programs stay."""
    folder = {"folder": tmp_path} if mapped else {}
    data = [(np.arange(i, i + 6), np.ones(6, np.float32)) for i in range(8)]
    later = [(np.arange(i, i + 6), np.ones(6, np.float32)) for i in range(20, 30, 2)]
    tx = optzoo.hyperball(adam(), 0.1, {"table": (1,)})
    params, state, _ = ordinary(tx, table(ROWS), data)
    rows = optzoo.sharded.uniform_rows(jax.random.key(1), WIDTH)
    params, state = optzoo.growing.resize_table(params, state, {"table": 40}, tx=tx, init=rows)
    *want, _ = ordinary(tx, params, later, state=state)
    store = optzoo.host.HostTable(table(ROWS), tx, CACHE, init=rows, **folder)
    params, state, _ = train(store, *store.init(others()), data)
    store.grow(params, state, 40)
    params, state, _ = train(store, params, state, later)
    same(store.flush(params, state), tuple(want))
    with pytest.raises(ValueError, match="rows of 'table' must be at least 40, got 39"):
        store.grow(params, state, 39)
    if mapped:
        store.close()
        store = optzoo.host.HostTable(table(40), tx, CACHE, init=rows, **folder)
        same(store.flush(*store.init(others())), tuple(want))


def test_two_vocabularies_are_restored_from_a_folder(tmp_path):
    rows, keys = {"a": 5, "b": 4}, {"a": np.array([7, 9]), "b": np.array([9, 8])}

    def opened():
        vocabularies = {name: optzoo.growing.Vocabulary(n) for name, n in rows.items()}
        tables = {name: table(n) for name, n in rows.items()}
        store = optzoo.host.HostTable(tables, adam(), 4, vocabulary=vocabularies, folder=tmp_path)
        return store, vocabularies, store.init()

    store, vocabularies, state = opened()
    for name, vocabulary in vocabularies.items():
        vocabulary.observe(keys[name])
    store.flush(*state)
    store.close()
    _, vocabularies, _ = opened()
    for name, vocabulary in vocabularies.items():
        assert vocabulary.look_up(keys[name]).tolist() == [1, 2]


def test_a_size_that_is_refused_leaves_the_other_table_as_it_was():
    tables = {"a": table(5), "b": table(4)}
    store = optzoo.host.HostTable(tables, adam(), 4)
    state = store.init()
    for number, error in ((3, ValueError), (6.5, TypeError)):
        with pytest.raises(error, match="rows"):
            store.grow(*state, {"a": 9, "b": number})
        assert repr(store) == "HostTable('a': 4 of 5 rows, 'b': 4 of 4 rows)"
    store.grow(*state, {"b": 6})
    assert repr(store) == "HostTable('a': 4 of 5 rows, 'b': 4 of 6 rows)"


def test_a_table_that_grew_after_the_last_flush(tmp_path):
    """A restart has the old number of rows, and their values as of the flush."""
    rows = optzoo.sharded.uniform_rows(jax.random.key(1), WIDTH)
    data = [(np.arange(i, i + 6), np.ones(6, np.float32)) for i in (0, 6, 0, 6, 0)]
    store = optzoo.host.HostTable(table(ROWS), adam(), 6, init=rows, folder=tmp_path)
    params, state, _ = train(store, *store.init(others()), data)
    want = jax.tree.map(np.array, store.flush(params, state))
    params, state, _ = train(store, params, state, data)
    store.grow(params, state, 40)
    later = [(np.arange(i, i + 6), np.ones(6, np.float32)) for i in (8, 30, 0)]
    train(store, params, state, [*data, *later])  # rows before and behind, new in the journal
    store.close()
    store = optzoo.host.HostTable(table(ROWS), adam(), 6, init=rows, folder=tmp_path)
    same(store.flush(*store.init(others())), want)


def test_a_table_of_deferred_rows_grows():
    adamw = optzoo.adamw(0.05, weight_decay_per_step=0.01)
    tx = optzoo.caught_up(adamw, mask="table", dense=True)
    data = [(np.arange(i, i + 6), np.ones(6, np.float32)) for i in range(8)]
    later = [(np.arange(i, i + 6), np.ones(6, np.float32)) for i in range(20, 30, 2)]
    params, state, _ = ordinary(tx, table(ROWS), data)
    rows = optzoo.sharded.uniform_rows(jax.random.key(1), WIDTH)
    params, state = optzoo.growing.resize_table(params, state, {"table": 40}, tx=tx, init=rows)
    want = optzoo.rows.catch_up(*ordinary(tx, params, later, state=state)[:2])
    store = optzoo.host.HostTable(table(ROWS), tx, CACHE, init=rows)
    params, state, _ = train(store, *store.init(others()), data)
    store.grow(params, state, 40)
    got = store.flush(*train(store, params, state, later)[:2])
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_allclose(a, b, 1e-5, 1e-5)


def test_a_vocabulary_that_waits_grows_with_its_table():
    store, mine, params, state = begun(adam())
    data = [(np.array([f"{i}"] * 2), np.ones(2, np.float32)) for i in range(ROWS)]
    params, state, _ = train(store, params, state, data[:5])
    store.grow(params, state, ROWS + 8)
    assert mine.capacity == ROWS + 8
    train(store, params, state, data)


def test_an_initializer_of_another_shape():
    shape = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    store = optzoo.host.HostTable(shape, adam(), CACHE, init=lambda ids: jnp.ones((2, 2)))
    with pytest.raises(ValueError, match="init must return rows of shape"):
        store.init(others())


def test_a_vocabulary_is_restored_in_place():
    v = vocabulary()
    v.observe(["a", "a"])
    other = optzoo.growing.Vocabulary(ROWS, admit_after=1, evict_after=3)
    with pytest.raises(ValueError, match=r"state has \(admit_after, evict_after\) = \(2, 3\)"):
        other.restore(v.state_dict())
    again = vocabulary()
    again.restore(v.state_dict())
    assert again.state_dict() == v.state_dict() and len(again) == 1
