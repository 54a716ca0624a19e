"""Which ids have places: against what must hold, and which rows leave."""

import numpy as np
import pytest

from optzoo.host import cache_map
from optzoo.host.cache_map import AGE, CacheMap, TooManyIds


def consistent(m):
    held, places = m.held(), m.find(np.arange(m.rows))
    np.testing.assert_array_equal(places[m.id_of[held]], held)
    assert (places >= 0).sum() == len(held)
    assert m.find(np.array([m.rows])) == m.num_places


@pytest.mark.parametrize("policy", ["lfu", "lru"])
@pytest.mark.parametrize("sizes", [(50, 7, 9), (50, 50, 60), (20, 40, 30), (3000, 400, 300)])
def test_every_id_has_a_place(policy, sizes):
    rows, places, number = sizes
    m, rng = CacheMap(rows, places, policy), np.random.default_rng(0)
    for step in range(2 * AGE + 10 if rows < 100 else 300):
        ids = rng.integers(0, rows + 1, number)
        if step % 3:
            ids = np.minimum(rng.zipf(1.2, number) - 1, rows)
        before = m.id_of.copy(), m.find(np.arange(rows))
        wanted = {*ids.tolist()} - {rows}
        try:
            moves = m.plan(ids)
        except TooManyIds as error:
            assert error.args == (len(wanted),) and len(wanted) > places
            np.testing.assert_array_equal(m.id_of, before[0])
            np.testing.assert_array_equal(m.find(np.arange(rows)), before[1])
            continue
        assert moves.distinct == len(wanted) <= places
        real = ids < rows
        np.testing.assert_array_equal(m.id_of[moves.places[real]], ids[real])
        assert (moves.places[~real] == places).all()
        assert moves.missing.tolist() == sorted(i for i in wanted if before[1][i] < 0)
        assert len(set(moves.into.tolist())) == len(moves.into) == len(moves.missing)
        assert wanted.isdisjoint(moves.leaving.tolist())
        np.testing.assert_array_equal(moves.leaving, before[0][moves.into])
        consistent(m)
        if step % 7 == 0:
            m.undo(moves)
            np.testing.assert_array_equal(m.id_of, before[0])
            np.testing.assert_array_equal(m.find(np.arange(rows)), before[1])


@pytest.mark.parametrize("policy", ["lfu", "lru"])
@pytest.mark.parametrize("block", [1, 6, 7, 8])
def test_places_in_blocks(policy, block, monkeypatch):
    """Of which the last is not full, or full, or longer than the cache."""
    monkeypatch.setattr(cache_map, "_BLOCK", block)
    m, rng = CacheMap(50, 7, policy), np.random.default_rng(0)
    for _ in range(200):
        ids = rng.integers(0, 50, rng.integers(1, 8))
        moves = m.plan(ids)
        np.testing.assert_array_equal(m.id_of[moves.places], ids)
        consistent(m)


def used(policy, *batches, rows=20, places=4):
    """The ids that are in a cache after these batches."""
    m = CacheMap(rows, places, policy)
    for ids in batches:
        m.plan(np.array(ids))
    return sorted(m.id_of[:-1].tolist())


def test_the_least_recent_leave():
    assert used("lru", [0, 1, 2, 3], [0], [2, 3], [4]) == [0, 2, 3, 4]
    assert used("lru", [0, 1, 2, 3], [1], [2], [4, 5]) == [1, 2, 4, 5]
    assert used("lru", [0], [1], [2], [3], [0], [4], [5]) == [0, 3, 4, 5]


def test_the_least_frequent_leave():
    assert used("lfu", [0, 1, 2, 3], [0], [2, 3], [4]) == [0, 2, 3, 4]
    assert used("lfu", [0, 0, 0, 1], [1, 2], [1, 2, 3], [4], [5]) == [1, 2, 4, 5]
    assert used("lfu", [0], [0], [0, 1, 2, 3], [2, 3], [4]) == [0, 2, 3, 4]
    assert used("lfu", [0, 1], [0], [2, 3], [2, 3], [4]) != [0, 1, 2, 3]


def test_what_was_frequent_once_leaves():
    """Counts are halved once in ``AGE`` steps."""
    m = CacheMap(20, 4, "lfu")
    for _ in range(100):
        m.plan(np.array([0, 1]))
    for step in range(8 * AGE):
        m.plan(np.array([2 + step % 5]))
    assert {0, 1}.isdisjoint(m.id_of[:-1].tolist())


@pytest.mark.parametrize("steps", range(252, 259))
def test_counts_do_not_overflow(steps):
    """They end at 254; 255 marks rows of the present batch."""
    m = CacheMap(20, 4, "lfu")
    for _ in range(steps):
        m.plan(np.array([0, 0]))
    m.plan(np.array([1, 2, 3]))
    m.plan(np.array([4, 5, 6]))
    assert 0 in m.id_of


def test_places_that_are_dirty():
    m = CacheMap(20, 4, "lru")
    moves = m.plan(np.array([3, 5, 20]))
    m.is_dirty[moves.places[:1]] = True
    assert m.held().tolist() == [0, 1] and m.held(dirty=True).tolist() == [0]
    m.empty()
    assert not len(m.held()) and (m.find(np.arange(20)) == -1).all()


def test_a_longer_table():
    m = CacheMap(4, 3, "lfu")
    m.plan(np.array([0, 1]))
    m.grow(9)
    moves = m.plan(np.array([8, 9, 0]))
    assert moves.places.tolist() == [2, 3, 0]
    consistent(m)


def test_hits_are_as_many_as_of_an_exact_order():
    """The search is not exact; on Zipf's law it finds nearly the best."""
    rows, places, number, rng = 20_000, 2_000, 600, np.random.default_rng(0)
    total = np.cumsum(np.arange(1, rows + 1) ** -1.05)
    batches = [np.searchsorted(total, rng.random(number) * total[-1]) for _ in range(150)]
    exact, last = 0, {}
    for step, ids in enumerate(batches):
        distinct = set(ids.tolist())
        exact += len(distinct & last.keys())
        last |= dict.fromkeys(distinct, step)
        for i in sorted(last.keys() - distinct, key=last.get)[: max(0, len(last) - places)]:
            del last[i]
    hits = {}
    for policy in ("lru", "lfu"):
        m = CacheMap(rows, places, policy)
        hits[policy] = sum(p.distinct - len(p.missing) for p in map(m.plan, batches))
    assert hits["lru"] > 0.97 * exact
    assert hits["lfu"] > 1.05 * exact
