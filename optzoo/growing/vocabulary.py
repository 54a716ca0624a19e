"""The assignment of raw ids to the rows of a table."""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ..core.checks import check_size


class Observed(NamedTuple):
    """The result of :meth:`optzoo.growing.Vocabulary.observe`."""

    rows: np.ndarray  # integers in the shape of the ids
    reset: np.ndarray  # rows that have another id now: reset them before they are read
    evicted: list[Hashable]  # the ids that had rows in ``reset`` before, and have none now
    waiting: int  # how many ids of this step were seen often enough and found no free row


class Vocabulary:
    """A dictionary, on the host, from raw ids to the rows of a table.

    Assigns rows to ids that occur often enough, and reassigns unused rows to new ids. It holds no
    parameters: use :func:`optzoo.growing.reset_rows` to reset rows, and
    :func:`optzoo.growing.resize_table` to enlarge the table.

    All ids without a row of their own share row 0, which is trained like other rows.

    - **Admission.** An id gets a row in the step of its ``admit_after``-th occurrence. Repeated
      occurrences in a step are counted.
    - **Eviction.** If no row is free, ids that did not occur for ``evict_after`` steps lose their
      rows, least recent first, and only as many as rows are needed. The count of an id without a
      row restarts after as many steps without it.
    - **No free row.** The id has row 0 and is included in ``waiting``. It gets a row at an
      occurrence when a row is free: call :meth:`grow`.

    Example:
        >>> import optzoo
        >>> vocabulary = optzoo.growing.Vocabulary(3, admit_after=2)
        >>> vocabulary.observe(["a", "b", "a"]).rows
        array([1, 0, 1], dtype=int32)
        >>> found = vocabulary.observe(["b", "c"])
        >>> found.rows, found.reset
        (array([2, 0], dtype=int32), array([2], dtype=int32))
        >>> vocabulary.look_up(["a", "d"])
        array([1, 0], dtype=int32)

    Args:
        capacity: the number of rows of the table, at least 2.
        admit_after: the number of occurrences after which an id gets a row, at least 1.
        evict_after: the number of steps without an occurrence after which an id may lose its row,
            at least 1; None to evict no id.

    Raises:
        TypeError: if an argument is not an int.
        ValueError: if an argument is too small.
    """

    def __init__(self, capacity: int, *, admit_after: int = 1, evict_after: int | None = None):
        self._capacity = check_size(2, capacity=capacity)
        self._admit_after = check_size(1, admit_after=admit_after)
        self._evict_after = None if evict_after is None else check_size(1, evict_after=evict_after)
        self._step = 0
        self._row_of = dict[Hashable, int]()
        self._id_of: list[Hashable] = [None]  # by row; that of row 0 is never read
        self._seen = np.zeros(capacity, np.int64)  # by row, the last step
        self._waiting = dict[Hashable, tuple[int, int]]()  # how often, and the last step
        self._purge_at = 1024

    def __len__(self) -> int:
        """The number of ids that have a row."""
        return len(self._row_of)

    def __contains__(self, id_: Hashable) -> bool:
        """Whether an id has a row."""
        return id_ in self._row_of

    def __repr__(self) -> str:
        return f"Vocabulary of {len(self)} ids, with {self._capacity} rows"

    @property
    def capacity(self) -> int:
        """The number of rows of the table."""
        return self._capacity

    @property
    def step(self) -> int:
        """The number of calls of :meth:`observe`."""
        return self._step

    def look_up(self, ids: Any) -> np.ndarray:
        """The rows of ids, without counting them; for evaluation.

        Args:
            ids: a NumPy array of any shape of integers or strings, or a list of hashable objects
                except non-integer numbers.

        Raises:
            TypeError: if an id has another type.

        Returns:
            The rows, in the shape of the ids; 0 for ids without a row.
        """
        flat, shape = _flat(ids)
        return self._rows(flat, shape)

    def observe(self, ids: Any) -> Observed:
        """Counts the ids of one training step and returns their rows.

        Args:
            ids: as in :meth:`look_up`.

        Raises:
            TypeError: as in :meth:`look_up`; nothing is counted in this case.

        Returns:
            The rows, the rows to reset before the step, the evicted ids, and the number of waiting
            ids.
        """
        return self.observe_with_undo(ids)[0]

    def observe_with_undo(self, ids: Any) -> tuple[Observed, Callable[[], None]]:
        """Like :meth:`observe`, with a function that reverts it, to call before any other change.

        Args:
            ids: as in :meth:`look_up`.
        """
        flat, shape = _flat(ids)
        counts = Counter(flat)  # before anything changes: an id may turn out not to be hashable
        before = self._step, len(self._id_of), self._purge_at
        seen, waited = list[tuple[int, int]](), list[tuple[Hashable, Any]]()
        self._step += 1
        admitted = list[Hashable]()
        for id_, times in counts.items():
            row = self._row_of.get(id_)
            if row is not None:
                seen.append((row, int(self._seen[row])))
                self._seen[row] = self._step
                continue
            waited.append((id_, self._waiting.get(id_)))
            earlier, last = self._waiting.get(id_, (0, self._step))
            times += 0 if self._is_old(last) else earlier
            self._waiting[id_] = times, self._step
            if times >= self._admit_after:
                admitted.append(id_)
        rows, evicted = self._free_rows(len(admitted))
        reused = rows[len(rows) - len(evicted) :]
        seen += [(row, int(self._seen[row])) for row in reused]
        for id_, row in zip(admitted, rows, strict=False):
            del self._waiting[id_]
            self._row_of[id_], self._id_of[row], self._seen[row] = row, id_, self._step
        self._purge()

        def undo():
            self._step, used, self._purge_at = before
            for id_, of in waited:
                self._row_of.pop(id_, None)
                self._waiting.pop(id_, None)
                if of is not None:
                    self._waiting[id_] = of
            del self._id_of[used:]
            for id_, row in zip(evicted, reused, strict=True):
                self._row_of[id_], self._id_of[row] = row, id_
            for row, step in seen:
                self._seen[row] = step

        reset = np.array(rows, self._dtype())
        found = Observed(self._rows(flat, shape), reset, evicted, len(admitted) - len(rows))
        return found, undo

    def grow(self, capacity: int) -> None:
        """Increases the capacity; resize the table by :func:`optzoo.growing.resize_table`.

        Args:
            capacity: the new number of rows.

        Raises:
            TypeError: if it is not an int.
            ValueError: if it is smaller than before.
        """
        more = check_size(capacity=capacity) - self._capacity
        if more < 0:
            raise ValueError(
                f"capacity must be at least {self._capacity}, the present capacity, got "
                f"{capacity}: rows that have ids cannot be dropped"
            )
        self._seen = np.pad(self._seen, (0, more))
        self._capacity += more

    def state_dict(self) -> dict[str, Any]:
        """The state of the vocabulary as numbers and lists, for checkpoints.

        If all ids are integers or strings, it can be written by ``json.dumps``.

        Returns:
            A dict for :meth:`from_state_dict`.
        """
        waiting = self._waiting.values()
        return {
            "capacity": self._capacity,
            "admit_after": self._admit_after,
            "evict_after": self._evict_after,
            "step": self._step,
            "ids": self._id_of[1:],  # of the rows 1, 2, ...
            "seen": self._seen[1 : len(self._id_of)].tolist(),
            "waiting_ids": [*self._waiting],
            "waiting_times": [times for times, _ in waiting],
            "waiting_seen": [step for _, step in waiting],
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Vocabulary:
        """Restores a saved vocabulary.

        Args:
            state: a result of :meth:`state_dict`.

        Raises:
            TypeError: if it is not a dict, or has other types in place of integers.
            ValueError: if the dict lacks entries or is inconsistent: an id with two rows, more ids
                than rows, or lists of different lengths.
        """
        if not isinstance(state, Mapping):
            raise TypeError(f"state must be from Vocabulary.state_dict(), got {state!r}")
        if missing := sorted(_KEYS.difference(state)):
            raise ValueError(f"state must be from Vocabulary.state_dict(), but lacks {missing}")
        self = cls(
            state["capacity"], admit_after=state["admit_after"], evict_after=state["evict_after"]
        )
        ids, waiting = (_flat(state[key])[0] for key in ("ids", "waiting_ids"))
        counts = ("seen", "waiting_times", "waiting_seen")
        [self._step] = _integers("step", [state["step"]])
        seen, times, last = (_integers(key, state[key]) for key in counts)
        if len(ids) != len(seen) or not len(waiting) == len(times) == len(last):
            raise ValueError(
                f"state is inconsistent: 'seen' has {len(seen)} steps for {len(ids)} ids, "
                f"'waiting_times' and 'waiting_seen' have {len(times)} and {len(last)} numbers "
                f"for {len(waiting)}. Give the state as it was saved"
            )
        if min([self._step, *seen, *times, *last]) < 0 or max([0, *seen, *last]) > self._step:
            raise ValueError(
                "state is inconsistent: a number is negative, or a step is after the last one, "
                f"{self._step}. Give the state as it was saved"
            )
        self._id_of += ids
        self._row_of = {id_: row for row, id_ in enumerate(ids, 1)}
        self._waiting = dict(zip(waiting, zip(times, last, strict=True), strict=True))
        distinct = len(self._row_of.keys() | self._waiting.keys())
        if len(ids) >= self._capacity or distinct != len(ids) + len(waiting):
            raise ValueError(
                f"state is inconsistent: of {len(ids)} ids with a row and {len(waiting)} waiting "
                f"ids, {distinct} are distinct, for a table of {self._capacity} rows. Give the "
                "state as it was saved"
            )
        self._seen[1 : len(ids) + 1] = seen
        return self

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores a saved state into this vocabulary.

        Args:
            state: a result of :meth:`state_dict`.

        Raises:
            TypeError: as in :meth:`from_state_dict`.
            ValueError: as in :meth:`from_state_dict`, or if ``admit_after`` or ``evict_after``
                differ.
        """
        saved = Vocabulary.from_state_dict(state)
        names = "admit_after", "evict_after"
        mine, others = ([getattr(v, f"_{name}") for name in names] for v in (self, saved))
        if mine != others:
            raise ValueError(
                f"state has (admit_after, evict_after) = {tuple(others)}, but this vocabulary has "
                f"{tuple(mine)}: they must be equal"
            )
        self.__dict__.update(saved.__dict__)

    def _rows(self, flat: list[Any], shape: tuple[int, ...]) -> np.ndarray:
        rows = map(self._row_of.get, flat, itertools.repeat(0))
        return np.fromiter(rows, self._dtype(), len(flat)).reshape(shape)

    def _dtype(self) -> type:
        return np.int32 if self._capacity < 2**31 else np.int64

    def _is_old(self, step: Any) -> Any:
        """Whether an id may be evicted or forgotten, by the step of its last occurrence."""
        return self._evict_after is not None and self._step - step >= self._evict_after

    def _free_rows(self, number: int) -> tuple[list[int], list[Hashable]]:
        """Frees at most this many rows; returns them and the ids that have lost them."""
        used = len(self._id_of)
        rows = list(range(used, min(used + number, self._capacity)))
        self._id_of += [None] * len(rows)
        if len(rows) == number or self._evict_after is None:
            return rows, []
        [old] = np.nonzero(self._is_old(self._seen[1:used]))
        longest = np.argsort(self._seen[1:used][old], kind="stable")[: number - len(rows)]
        reused = (1 + old[longest]).tolist()
        evicted = [self._id_of[row] for row in reused]
        for id_ in evicted:
            del self._row_of[id_]
        return rows + reused, evicted

    def _purge(self) -> None:
        """Removes old waiting ids at intervals: their counts would restart anyway."""
        if len(self._waiting) < self._purge_at:
            return
        waiting = self._waiting.items()
        self._waiting = {k: (n, last) for k, (n, last) in waiting if not self._is_old(last)}
        self._purge_at = max(1024, 2 * len(self._waiting))


_KEYS = frozenset(Vocabulary(2).state_dict())


def _integers(key: str, values: Any) -> list[int]:
    """The integers of an entry of a saved state."""
    try:
        return [operator.index(value) for value in values]
    except TypeError as error:
        raise TypeError(f"state[{key!r}] must contain only integers, got {values!r}") from error


def _flat(ids: Any) -> tuple[list[Any], tuple[int, ...]]:
    """The ids one after another, as Python objects, and their shape.

    Python numbers are equal across types: ``1``, ``1.0`` and ``True`` would share a row.
    """
    if hasattr(ids, "dtype"):
        array = np.asarray(ids)
        flat, shape = array.ravel().tolist(), array.shape
    elif isinstance(ids, str | bytes) or not isinstance(ids, Iterable):
        raise TypeError(f"ids must be an array or a list, got {ids!r}: put one id into a list")
    else:
        flat = list(ids)
        shape = (len(flat),)
    kinds = {type(id_) for id_ in flat}
    if any(issubclass(kind, np.generic) for kind in kinds):
        flat = [id_.item() if isinstance(id_, np.generic) else id_ for id_ in flat]
        kinds = {type(id_) for id_ in flat}
    for kind in kinds:
        if issubclass(kind, bool | float | complex) or kind.__hash__ is None:
            raise TypeError(
                f"ids must be integers, strings or other hashable objects, got {kind.__name__}: "
                "convert them to integers or strings"
            )
    return flat, shape
