"""The dictionary from raw ids to rows, against a plain dict through random histories."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import optzoo
from optzoo.growing import Vocabulary

IDS = [*range(4), *"abcd"]
# Steps, and what is done after each: nothing, saved and restored, or room for so many more ids.
HISTORY = st.lists(
    st.tuples(
        st.lists(st.sampled_from(IDS), max_size=4),
        st.sampled_from([None, None, None, "save", None, None, None, 0, None, None, 1]),
    ),
    min_size=12,
    max_size=40,
)


class Model:
    """The rules of the docstring, one id at a time."""

    def __init__(self, capacity, admit_after, evict_after):
        self.capacity, self.admit_after, self.evict_after = capacity, admit_after, evict_after
        self.step, self.row_of, self.seen, self.times = 0, {}, {}, {}

    def is_old(self, id_):
        return self.evict_after is not None and self.step - self.seen[id_] >= self.evict_after

    def observe(self, ids):
        self.step += 1
        for id_ in ids:
            if id_ in self.times and self.is_old(id_):
                del self.times[id_]
            if id_ not in self.row_of:
                self.times[id_] = self.times.get(id_, 0) + 1
            self.seen[id_] = self.step
        wanted = [i for i in dict.fromkeys(ids) if self.times.get(i, 0) >= self.admit_after]
        reset, evicted = [], []
        for id_ in wanted:
            free = set(range(1, self.capacity)) - set(self.row_of.values())
            old = sorted((self.seen[i], row, i) for i, row in self.row_of.items() if self.is_old(i))
            if not free and old:
                free = {old[0][1]}
                evicted.append(old[0][2])
                del self.row_of[evicted[-1]]
            if free:
                self.row_of[id_] = min(free)
                reset.append(min(free))
                del self.times[id_]
        return [self.row_of.get(i, 0) for i in ids], reset, evicted, len(wanted) - len(reset)


@pytest.mark.unique
@settings(max_examples=100, deadline=None, derandomize=True)
@given(HISTORY, st.integers(2, 5), st.integers(1, 3), st.none() | st.integers(1, 4))
def test_it_is_a_plain_dict(history, capacity, admit_after, evict_after):
    vocabulary = Vocabulary(capacity, admit_after=admit_after, evict_after=evict_after)
    model = Model(capacity, admit_after, evict_after)
    trained = {}  # by row the id whose gradients are in it
    for ids, then in history:
        vocabulary._purge_at = 4
        found = vocabulary.observe(ids)
        rows, reset, evicted, waiting = model.observe(ids)
        assert found.rows.tolist() == rows
        assert found.reset.tolist() == reset
        assert (found.evicted, found.waiting) == (evicted, waiting)
        # No row holds what was learned for two ids.
        for row in reset:
            trained.pop(row, None)
        for id_, row in zip(ids, rows, strict=True):
            if row:
                assert trained.setdefault(row, id_) == id_
        if then == "save":
            saved = json.loads(json.dumps(vocabulary.state_dict()))
            vocabulary = Vocabulary.from_state_dict(saved)
        elif then is not None:
            vocabulary.grow(vocabulary.capacity + then)
            model.capacity += then
        assert vocabulary.capacity == model.capacity
        assert (len(vocabulary), vocabulary.step) == (len(model.row_of), model.step)
        assert vocabulary.look_up(IDS).tolist() == [model.row_of.get(i, 0) for i in IDS]
        assert [i in vocabulary for i in IDS] == [i in model.row_of for i in IDS]


def test_arrays_of_any_shape():
    vocabulary = Vocabulary(10)
    found = vocabulary.observe(np.array([[7, 5], [7, 9]]))
    assert found.rows.dtype == np.int32
    np.testing.assert_array_equal(found.rows, [[1, 2], [1, 3]])
    np.testing.assert_array_equal(vocabulary.look_up(np.array([9], np.uint8)), [3])
    np.testing.assert_array_equal(vocabulary.look_up([np.int64(5), 7]), [2, 1])
    words = vocabulary.observe(np.array([["7"]])).rows
    np.testing.assert_array_equal(words, [[4]])  # a string is another id than a number
    np.testing.assert_array_equal(vocabulary.observe(np.zeros((2, 0), int)).rows, np.zeros((2, 0)))
    np.testing.assert_array_equal(vocabulary.observe([(1, "a"), (1, "a")]).rows, [5, 5])
    assert repr(vocabulary) == "Vocabulary of 5 ids, with 10 rows"


def test_ids_that_wait_are_forgotten_at_times():
    vocabulary = Vocabulary(10, admit_after=3, evict_after=2)
    for step in range(20):
        vocabulary.observe(np.arange(200) + 1000 * step)
    assert len(vocabulary.state_dict()["waiting_ids"]) < 2 * 1024


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1.5], "got float"),
        (np.array([1.0]), "got float"),
        ([True], "got bool"),
        ([[1]], "got list"),
        ("abc", "put one id into a list"),
        (3, "put one id into a list"),
    ],
)
def test_ids_that_might_be_taken_for_others_are_refused(ids, message):
    vocabulary = Vocabulary(4)
    for call in (vocabulary.observe, vocabulary.look_up):
        with pytest.raises(TypeError, match=message):
            call(ids)
    assert vocabulary.step == 0


def test_nothing_is_counted_when_an_id_turns_out_not_to_be_hashable():
    vocabulary = Vocabulary(4)
    with pytest.raises(TypeError, match="unhashable"):
        vocabulary.observe([1, ([],)])
    assert (vocabulary.step, len(vocabulary)) == (0, 0)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Vocabulary(1), ValueError, "capacity must be at least 2, got 1"),
        (lambda: Vocabulary(4.0), TypeError, "capacity must be an int"),
        (lambda: Vocabulary(4, admit_after=0), ValueError, "admit_after must be at least 1"),
        (lambda: Vocabulary(4, evict_after=0), ValueError, "evict_after must be at least 1"),
        (lambda: Vocabulary(4).grow(3), ValueError, "at least 4, the present capacity, got 3"),
        (lambda: Vocabulary.from_state_dict({}), ValueError, "but lacks"),
    ],
)
def test_arguments_out_of_range(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    "change", [{"ids": [5, 5]}, {"ids": [3]}, {"capacity": 2}], ids=["twice", "both", "too many"]
)
def test_a_state_that_would_share_rows_is_refused(change):
    vocabulary = Vocabulary(4, admit_after=2)
    vocabulary.observe([5, 5, 6, 6, 3])
    state = vocabulary.state_dict()
    assert Vocabulary.from_state_dict(state).state_dict() == state
    seen = state["seen"][: len(change.get("ids", state["ids"]))]
    with pytest.raises(ValueError, match="state is inconsistent"):
        optzoo.growing.Vocabulary.from_state_dict({**state, "seen": seen, **change})


def test_empty_and_full():
    """No id, one, as many as there are rows for, and one more; and when all have become old."""
    vocabulary = Vocabulary(3, evict_after=2)  # row 0 is for ids without a row
    none = vocabulary.observe([])
    assert [len(a) for a in none[:3]] == [0, 0, 0] and none.waiting == 0
    assert len(vocabulary) == 0 and vocabulary.look_up([1, 2]).tolist() == [0, 0]
    assert vocabulary.observe([7]).rows.tolist() == [1]
    assert vocabulary.observe([8, 7]).rows.tolist() == [2, 1]
    full = vocabulary.observe([9, 9])
    assert full.rows.tolist() == [0, 0] and full.reset.size == 0 and full.waiting == 1
    later = vocabulary.observe([9])
    assert later.rows.tolist() == [1] and later.evicted == [7] and len(vocabulary) == 2
    again = Vocabulary.from_state_dict(vocabulary.state_dict())
    assert again.look_up([9, 8, 7]).tolist() == vocabulary.look_up([9, 8, 7]).tolist() == [1, 2, 0]
    vocabulary.observe([])
    vocabulary.observe([])
    assert vocabulary.observe([1, 2, 3]).evicted == [8, 9] and len(vocabulary) == 2


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"step": "x"}, TypeError),
        ({"step": 1.5}, TypeError),
        ({"step": -1}, ValueError),
        ({"step": 0}, ValueError),  # before rows were seen
        ({"seen": None}, TypeError),
        ({"seen": "ab"}, TypeError),
        ({"seen": [1]}, ValueError),  # it would be that of all rows
        ({"seen": [1, 1, 1]}, ValueError),
        ({"seen": [9, 9]}, ValueError),
        ({"seen": [-1, 1]}, ValueError),
        ({"waiting_ids": []}, ValueError),
        ({"waiting_times": [1, 1]}, ValueError),
        ({"waiting_times": ["x"]}, TypeError),
        ({"waiting_seen": None}, TypeError),
        ({"waiting_seen": [9]}, ValueError),
    ],
    ids=str,
)
def test_saved_numbers_of_another_kind(change, error):
    vocabulary = Vocabulary(4, admit_after=2)
    vocabulary.observe([7, 7, 8, 8, 9])
    state = vocabulary.state_dict()
    assert Vocabulary.from_state_dict(state).state_dict() == state
    with pytest.raises(error, match=r"state is inconsistent|state.* must contain only integers"):
        Vocabulary.from_state_dict({**state, **change})


@pytest.mark.parametrize("state", [None, 3, [], "x"])
def test_what_is_no_saved_state(state):
    with pytest.raises(TypeError, match="state must be from"):
        Vocabulary.from_state_dict(state)
