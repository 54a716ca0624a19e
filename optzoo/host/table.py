"""Tables on the host, with a cache on the device."""

from __future__ import annotations

import concurrent.futures
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..core.checks import check_choice, check_size, check_transformation
from ..core.meshes import as_typed
from ..core.paths import leaves_with_path, path_name
from ..growing.vocabulary import Vocabulary
from ..sharded.row_sharding import RowSharding
from ..state.fit import StateError
from ..state.sharding import state_sharding
from ..train.minimize import minimize
from .arguments import check_table, exactly, of_one_process, per_table, rows_by_name
from .batch import by_table, check_ids, joined
from .cache_map import Policy
from .cached import Cached, Part
from .folder import Folder
from .row_arrays import RowArrays, find_rows, with_tables


class Stats(NamedTuple):
    """Statistics of a :class:`HostTable` since it was created.

    Example:
        >>> import optzoo
        >>> stats = optzoo.host.Stats(1, 4, 3, 2, 1, 0, 0.0)
        >>> stats.hits / stats.distinct
        0.6666666666666666

    Attributes:
        steps: the number of calls of ``swap``.
        ids: the number of ids of their batches, for all tables.
        distinct: the number of distinct ids of each batch, summed.
        hits: how many of the distinct ids were in the cache.
        rows_in: the number of rows copied from the host.
        rows_out: the number of rows copied to the host.
        seconds_waited: the time that ``ahead`` waited for plans, in seconds.
    """

    steps: int
    ids: int
    distinct: int
    hits: int
    rows_in: int
    rows_out: int
    seconds_waited: float


class _Plan(NamedTuple):
    """The requirements of a step."""

    places: Any
    parts: dict[str, Part]
    forget: list[Callable[[], None]]  # take back what vocabularies have counted


class HostTable:
    """Tables in host memory or in files, with a cache on the device.

    Use it for tables that exceed the memory of a device. In ``params`` and in the optimizer state,
    each table has only the rows of its cache, which are trained like any table, with places in the
    cache as ids. Before each step, :meth:`swap` loads the rows that the batch needs, with their
    slots, and evicts the least used ones. :meth:`ahead` plans this in a thread for the next batch
    while a step runs.

    The result is bit-equal to that of an ordinary table, except for the order of sums over rows,
    such as in a norm of the gradient. With :func:`optzoo.caught_up` it is equal up to rounding;
    rows on the host are caught up in turn, so that none is deferred for longer than the horizon.

    ``tx`` must update each touched row by itself, or by all touched rows of the step: all
    optimizers that are "lazy" or "linear", :func:`optzoo.on_rows`, chains and groups of these, and
    :func:`optzoo.caught_up`. :meth:`init` verifies this.

    With a ``folder`` the rows are in memory-mapped files, and :meth:`flush` writes a checkpoint: if
    the process is killed at any moment, the next one resumes from the last flush. A journal keeps
    the rows that were overwritten since. A crash of the whole machine between two flushes may
    corrupt the folder, so store checkpoints elsewhere, too.

    Example:
        >>> import jax.numpy as jnp, numpy as np, optzoo
        >>> tx = optzoo.lazy_adam(0.1)
        >>> loss = lambda p, ids: jnp.sum(optzoo.lookup(p["table"], ids) ** 2)
        >>> store = optzoo.host.HostTable(np.ones((1000, 2), np.float32), tx, cache_rows=4)
        >>> params, state = store.init()
        >>> params["table"].shape
        (4, 2)
        >>> step = store.minimize(loss)
        >>> batches = [np.array([3, 500]), np.array([999, 3, 7]), np.array([0, 1, 2, 3])]
        >>> for places, ids in store.ahead(batches, ids=lambda batch: batch):
        ...     params, state, value = step(*store.swap(params, state), places)
        >>> params, state = store.flush(params, state)
        >>> [round(float(x), 2) for x in params["table"][[3, 999, 500, 4], 0]]
        [0.7, 0.93, 0.9, 1.0]

    Args:
        rows: a table: a NumPy array, which is changed in place; a JAX array, which is copied; or a
            ``jax.ShapeDtypeStruct``, whose rows are created by ``init``. Or a dict from the names
            of parameters, such as ``"layers/users"``, to these. A single table has the name
            ``"table"``. If the folder has a flush, only shape and dtype are used. With a folder an
            array is copied into its files; the array may be memory-mapped itself.
        tx: a complete optimizer.
        cache_rows: the number of rows of the cache, at least the largest number of distinct ids of
            a batch; or a dict by names.
        policy: which rows are evicted: ``"lfu"`` the least frequently used ones, by the number of
            batches, halved every 1,024 steps; ``"lru"`` the least recently used ones. Both are
            approximate: they scan the cache in turn for rows that are rare or old enough.
        init: a function of an array of ids that returns new rows, as in
            :func:`optzoo.growing.resize_table`: for ``rows`` without values, for rows that a
            vocabulary assigns to another key, and for :meth:`grow`. Or a dict by names, or None for
            zeros.
        vocabulary: a :class:`optzoo.growing.Vocabulary` with as many rows as the table, which maps
            the keys in batches to rows; or a dict by names. A row that is assigned to another key
            is reset, with its slots. The vocabulary is saved by a flush and restored with it.
        sharding: the :class:`optzoo.sharded.RowSharding` of a cache, with ``cache_rows`` as its
            ``num_rows``; or a dict by names.
        mesh: the devices of the step, if there are several.
        folder: a folder for the rows and the last flush; None for the memory of this process.

    Raises:
        TypeError: if an argument has a wrong type.
        ValueError: if an argument is out of range, the names of a dict differ from those of
            ``rows``, an array is read-only, the mesh has devices of several processes, or the
            folder has a flush of other tables.
        RuntimeError: if the folder is open elsewhere.
    """

    def __init__(
        self,
        rows: Any,
        tx: optax.GradientTransformation,
        cache_rows: int | Mapping[str, int],
        *,
        policy: Policy = "lfu",
        init: Any = None,
        vocabulary: Vocabulary | Mapping[str, Vocabulary] | None = None,
        sharding: RowSharding | Mapping[str, RowSharding] | None = None,
        mesh: Mesh | None = None,
        folder: Any = None,
    ):
        check_transformation(tx=tx)
        check_choice(Policy, policy=policy)
        self._single = not isinstance(rows, Mapping)
        self._rows = rows_by_name(rows, in_memory=folder is None)
        self._tx, self._mesh = tx, of_one_process(mesh)
        names = [*self._rows]
        sizes, inits = per_table("cache_rows", cache_rows, names), per_table("init", init, names)
        shardings = per_table("sharding", sharding, names)
        vocabularies = per_table("vocabulary", vocabulary, names)
        self._tables = dict[str, Cached]()
        for name, like in self._rows.items():
            places = check_size(1, cache_rows=sizes.get(name))
            of = {"init": inits.get(name), "vocabulary": vocabularies.get(name)}
            of |= {"sharding": shardings.get(name), "mesh": mesh}
            check_table(name, like, places, **of)
            self._tables[name] = Cached(name, like, places, policy, **of)
        self._where: RowArrays | None = None  # when the state is known
        self._step, self._stats = 0, Stats(0, 0, 0, 0, 0, 0, 0.0)
        self._planned: _Plan | None = None  # for the next swap
        self._following: tuple[Any] | None = None  # the ids of the batch after it
        self._future: concurrent.futures.Future[_Plan] | None = None
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        self._folder = None if folder is None else Folder(folder)
        if self._folder is not None and self._folder.number:
            found = self._folder.flushed["rows"]
            if found != (wanted := {name: table.rows for name, table in self._tables.items()}):
                self._folder.close()
                raise ValueError(
                    f"folder has a flush of tables with {found} rows, but rows has {wanted}: give "
                    "the same tables, or another folder"
                )

    def __repr__(self) -> str:
        sizes = (
            f"'{name}': {table.map.num_places:,} of {table.rows:,} rows"
            for name, table in self._tables.items()
        )
        return f"HostTable({', '.join(sizes)})"

    @property
    def step(self) -> int:
        """The number of swaps since training began; with a folder, over all processes."""
        return self._step

    @property
    def flushes(self) -> int:
        """The number of flushes in the folder; 0 without one."""
        return 0 if self._folder is None else self._folder.number

    def stats(self) -> Stats:
        """Statistics since the store was created."""
        return self._stats

    # Parameters and state

    def init(self, others: Any = None) -> tuple[Any, Any]:
        """Parameters with an empty cache for each table, and the state of the optimizer.

        If the folder has a flush, training resumes from it: all values are those of the flush, and
        only the shapes and dtypes of ``others`` are used. Otherwise training begins, with the rows
        given to the store and with ``others``; with a folder this is its first flush.

        Args:
            others: a dict of all other parameters; None if there are none.

        Raises:
            TypeError: if ``others`` is not a dict.
            StateError: if the flush has other parameters or another optimizer.
            ValueError: if ``tx`` cannot train a cache, with the reason.
            RuntimeError: if the store is already initialized.
        """
        if not self._rows:
            raise RuntimeError(
                "init: the store is already initialized, by init or load: use load, or create "
                "another HostTable, after close if it has a folder"
            )
        params, state = self._empty({} if others is None else others)
        folder, where = self._folder, self._ready()
        if folder is not None and folder.number:
            self._check_kinds(folder.flushed["arrays"], params, state, "the flush in the folder is")
            folder.roll_back()
            params, state = self._placed(params, state, folder.others())
            self._step = folder.flushed["step"]
            for name, table in self._tables.items():
                table.hand = folder.flushed["hands"][name]
                if table.vocabulary is not None:
                    table.vocabulary.restore(folder.flushed["vocabularies"][name])
        else:
            for name, table in self._tables.items():
                table.begin(self._rows[name], params)
            self._commit(params, state, where.others(params, state))
        self._rows = dict[str, Any]()  # so that an array that is in the folder can go
        return params, state

    def load(self, params: Any, state: Any) -> tuple[Any, Any]:
        """Loads parameters and state of ordinary tables; returns them with empty caches.

        Accepts results of :meth:`flush` and of :func:`optzoo.minimize`, restored from any
        checkpoint, and of the imports :func:`optzoo.load_tf1_state` and
        :mod:`optzoo.interop.fbgemm`. Overwrites the rows and slots on the host. With a folder this
        is a flush.

        Args:
            params: the parameters with the whole tables, NumPy or JAX arrays.
            state: the state of ``tx`` for them.

        Raises:
            StateError: if their shapes or dtypes differ from those of this store and ``tx``.
            ValueError: as in :meth:`init`.
        """
        self._take_back()
        fresh, new = self._empty(with_tables(params, dict.fromkeys(self._tables)))
        kinds = _kinds(*self._full(fresh, new))
        self._check_kinds(kinds, params, state, "params and state are", whole=True)
        where = self._ready()
        for name, table in self._tables.items():
            table.take(where.of(name, params, state), self._rows.get(name))
        self._rows = dict[str, Any]()
        fresh, new = self._placed(fresh, new, list(map(np.array, where.others(params, state))))
        for table in self._tables.values():
            table.bring_up(fresh, new)
        self._commit(fresh, new, where.others(fresh, new))
        return fresh, new

    def flush(self, params: Any, state: Any) -> tuple[Any, Any]:
        """Writes the rows of the caches to the host, and returns ordinary parameters and state.

        They are NumPy arrays in the order of the ids, as without a cache: a checkpoint from which
        :func:`optzoo.minimize` or :meth:`load` can resume. The tables are read-only views of those
        on the host: save or copy them before the next step changes them. Rows of
        :func:`optzoo.caught_up` are caught up, in a pass over their table.

        With a folder, all data are on disk when it returns, and a restart resumes from this flush.

        Args:
            params: the current parameters; they remain valid.
            state: the current state; it remains valid.

        Returns:
            The parameters and the state.
        """
        where = self._ready()
        self._take_back()
        for table in self._tables.values():
            table.write_back()
            table.write_cache(params, state)
            table.bring_up(params, state)
        others = [np.array(a) for a in where.others(params, state)]  # the next step donates them
        self._commit(params, state, others)
        views = {name: table.host.views() for name, table in self._tables.items()}
        return where.with_others(*where.replaced(params, state, views), others)

    def read(self, params: Any, state: Any, ids: Any) -> Any:
        """Current rows, for evaluation, from the cache or the host.

        Args:
            params: the current parameters; they remain valid.
            state: the current state; it remains valid.
            ids: integers of any shape; a dict by the names of the tables if there are several. The
                padding id is the number of rows.

        Returns:
            NumPy arrays of shape ``ids.shape + row_shape``; zeros for padding.

        Raises:
            TypeError: if ids are not integers.
            ValueError: if ids are out of range.
        """
        self._ready()
        self._take_back()
        for table in self._tables.values():
            table.write_back()
        given = by_table(ids, [*self._tables], self._single, "ids")
        found = {n: t.read(params, state, given[n]) for n, t in self._tables.items()}
        return found[next(iter(found))] if self._single else found

    def grow(self, params: Any, state: Any, rows: int | Mapping[str, int]) -> None:
        """Increases the number of rows on the host.

        Caches, parameters, state and programs are unchanged.

        New rows are initialized by ``init``, or zero. Vocabularies grow, too. With a folder, call
        :meth:`flush` afterwards: a restart before it has the old number of rows.

        Args:
            params: the current parameters; they remain valid.
            state: the current state; it remains valid.
            rows: the new number of rows; or a dict by names, for some of several tables.

        Raises:
            TypeError: if ``rows`` is not an int.
            ValueError: if ``rows`` is smaller than before.
        """
        self._ready()
        self._take_back()
        sizes = per_table("rows", rows, [*self._tables])
        sizes = {name: check_size(rows=number) for name, number in sizes.items()}
        for name, number in sizes.items():
            if number < (least := self._tables[name].rows):
                raise ValueError(f"rows of '{name}' must be at least {least}, got {number}")
        for name, number in sizes.items():
            table = self._tables[name]
            if number > table.rows:
                table.write_back()
                table.grow(number, params, state)
                if table.vocabulary is not None:
                    table.vocabulary.grow(number)

    def minimize(self, loss_fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """The step of :func:`optzoo.minimize` for these tables.

        It requires row-sparse gradients of the tables (``sparse``): a dense gradient would also
        change rows that are not in the cache. On a mesh it uses the ``mesh`` and the ``tables`` of
        the store.

        Args:
            loss_fn: as in :func:`optzoo.minimize`; its ids are places in the caches.
            **options: options of :func:`optzoo.minimize`; ``sparse`` as a dict, for other
                parameters.

        Raises:
            TypeError: as in :func:`optzoo.minimize`, and if ``sparse`` is not a dict.
            ValueError: as in :func:`optzoo.minimize`; at trace time, if the gradient of a table is
                dense.
        """
        sparse: Any = options.pop("sparse", {})
        if not isinstance(sparse, Mapping):
            raise TypeError(f"sparse must be a dict from patterns of other tables, got {sparse!r}")
        sharded = {exactly(n): t.sharding for n, t in self._tables.items() if t.sharding}
        required: Any = {exactly(n): "require" for n, t in self._tables.items() if not t.sharding}
        if self._mesh is not None:
            options["mesh"] = self._mesh
            options["tables"] = {**(options.get("tables") or {}), **sharded}
        return minimize(loss_fn, self._tx, sparse={**sparse, **required}, **options)

    # Steps

    def ahead(self, batches: Iterable[Any], ids: Callable[[Any], Any]) -> Iterator[Any]:
        """Batches with the places of their ids, each planned while the previous step runs.

        Call :meth:`swap` once for each batch, before its step; it starts the plan of the next batch
        in a thread. An error of a plan is raised by this iterator, when its batch is next. The loop
        may end early: an unused plan is reverted.

        Args:
            batches: an iterable of batches of any type. It is read one batch ahead.
            ids: a function of a batch that returns its ids: an array of integers of any shape, or a
                tuple or a dict of arrays; if there are several tables, a dict of these by their
                names. With a vocabulary it returns keys. The padding id is the number of rows.

        Yields:
            Pairs of the places, in the structure of the ids, and the batch.

        Raises:
            TypeError: if ids are not integers.
            ValueError: if an id is out of range, or a batch has more distinct ids than the cache.
            RuntimeError: if another loop is not finished, or if ``swap`` was not called for a
                batch.
        """
        self._ready()
        if self._pool is not None:
            raise RuntimeError("ahead: another loop of this store is not finished: close it")
        self._take_back()
        batches, end = iter(batches), object()
        with concurrent.futures.ThreadPoolExecutor(1, "host-table") as self._pool:
            try:
                following = next(batches, end)
                while following is not end:
                    batch = following
                    if self._following is None:
                        self._following = (ids(batch),)
                    plan = self._next_plan()
                    following = next(batches, end)
                    self._following = None if following is end else (ids(following),)
                    self._planned = plan
                    yield plan.places, batch
                    if self._planned is not None:
                        raise RuntimeError(
                            "swap was not called for a batch, so its rows are not in the cache: "
                            "call it once for each batch, before the step"
                        )
            finally:
                self._take_back()
                self._following = self._pool = None

    def swap(self, params: Any, state: Any) -> tuple[Any, Any]:
        """Parameters and state with the rows of the last batch of :meth:`ahead`.

        It does not wait for the device. The arrays are donated: use only the returned ones.

        Args:
            params: the current parameters.
            state: the current state.

        Raises:
            RuntimeError: if there is no such batch.
        """
        plan, self._planned = self._planned, None
        if plan is None:
            raise RuntimeError("swap must be called once for each batch of ahead, in its loop")
        for name, part in plan.parts.items():
            params, state = self._tables[name].swap(part, params, state)
        self._stats, self._step = _with(self._stats, plan), self._step + 1
        if self._following is not None and self._pool is not None:
            self._future = self._pool.submit(self._plan, *self._following)
        return params, state

    def close(self) -> None:
        """Closes the folder; the next process resumes from the last flush."""
        self._take_back()
        if self._folder is not None:
            self._folder.close()

    # Plans

    def _next_plan(self) -> _Plan:
        begun, future = time.perf_counter(), self._future
        assert self._following is not None
        # There is none for the first batch, and none that was taken back by a flush.
        plan = self._plan(*self._following) if future is None else future.result()
        self._future = None  # not before: an interrupt leaves it to be taken back
        waited = self._stats.seconds_waited + time.perf_counter() - begun
        self._stats = self._stats._replace(seconds_waited=waited)
        return plan

    def _plan(self, ids: Any) -> _Plan:
        """The requirements of a step with these ids; reads the host after pending writes."""
        for table in self._tables.values():
            table.write_back()
        given = by_table(ids, [*self._tables], self._single, "ids")
        flat, forms, parts = dict[str, Any](), dict[str, Any](), dict[str, Part]()
        reset, forget = dict[str, np.ndarray](), list[Callable[[], None]]()
        try:
            for name, table in self._tables.items():
                of_table, forms[name] = joined(given[name], name)
                if table.vocabulary is not None:
                    found, undo = table.vocabulary.observe_with_undo(of_table)
                    forget.append(undo)
                    of_table, reset[name] = found.rows, found.reset
                flat[name] = check_ids(of_table, table.rows, name)
            for name, table in self._tables.items():
                parts[name] = table.plan(flat[name], reset.get(name, np.zeros(0, np.int32)))
        except BaseException:
            self._undo(_Plan(None, parts, forget))
            raise
        places = {name: forms[name](part.moves.places) for name, part in parts.items()}
        return _Plan(places[next(iter(places))] if self._single else places, parts, forget)

    def _undo(self, plan: _Plan) -> None:
        for name, part in plan.parts.items():
            self._tables[name].undo(part)
        for undo in reversed(plan.forget):
            undo()

    def _take_back(self) -> None:
        """Reverts a plan that was not swapped; it is computed again when needed."""
        plan, self._planned = self._planned, None
        future, self._future = self._future, None
        if future is not None and future.exception() is None:  # which waits
            plan = future.result()
        if plan is not None:
            self._undo(plan)

    # Beginnings and flushes

    def _ready(self) -> RowArrays:
        if self._where is None:
            raise RuntimeError("the store is not initialized: call init or load first")
        return self._where

    def _empty(self, others: Any) -> tuple[Any, Any]:
        """Parameters and state with empty caches; finds the arrays that have rows."""
        if not isinstance(others, Mapping):
            raise TypeError(f"others must be a dict of the other parameters, got {others!r}")
        shapes = {name: table.cache for name, table in self._tables.items()}
        rows = {name: table.rows for name, table in self._tables.items()}
        where = find_rows(self._tx, with_tables(others, shapes), rows)
        if self._mesh is not None:
            others = jax.tree.map(lambda x: _on_mesh(x, self._mesh), others)
        caches = {
            name: jnp.zeros(like.shape, like.dtype, device=self._tables[name].place)
            for name, like in shapes.items()
        }
        params = with_tables(others, caches)
        # Compiled, so that no optimizer sees the values of empty caches.
        options = {}
        if self._mesh is not None:
            options["out_shardings"] = state_sharding(self._tx, params)
        state = jax.jit(self._tx.init, **options)(params)
        self._where = where
        for table in self._tables.values():
            table.know(self._tx, where, params, state, self._folder)
        return params, state

    def _placed(self, params: Any, state: Any, others: list[Any]) -> tuple[Any, Any]:
        """Parameters and state with other values in arrays without rows, on the same devices."""
        where = self._ready()
        old = where.others(params, state)
        place = lambda a, new: jax.device_put(new, a.sharding if self._mesh is not None else None)
        return where.with_others(params, state, list(map(place, old, others)))

    def _full(self, params: Any, state: Any) -> tuple[Any, Any]:
        """The same with the shapes of the whole tables in place of caches."""
        where, whole = self._ready(), dict[str, list[Any]]()
        for name, table in self._tables.items():
            like = lambda a, n=table.rows: jax.ShapeDtypeStruct((n, *a.shape[1:]), a.dtype)
            whole[name] = list(map(like, where.of(name, params, state)))
        return where.replaced(params, state, whole)

    def _check_kinds(
        self, wanted: list[Any], params: Any, state: Any, what: str, *, whole: bool = False
    ) -> None:
        """Raises ``StateError`` unless parameters and state have these names, shapes and dtypes."""
        given = _kinds(*((params, state) if whole else self._full(params, state)))
        if whole:  # what is given has to be what is needed
            wanted, given = given, wanted
        for a, b in itertools.zip_longest(wanted, given):
            if a != b:
                words = lambda x: f"{x[0]} of shape {x[1]} and dtype {x[2]}" if x else "no more"
                raise StateError(
                    f"{what} of another optimizer or other parameters: {words(a)}, but this store "
                    f"has {words(b)}. They must be equal"
                )

    def _commit(self, params: Any, state: Any, others: list[Any]) -> None:
        """Commits all written data as the last flush of the folder."""
        if self._folder is None:
            return
        vocabularies = {
            name: table.vocabulary.state_dict()
            for name, table in self._tables.items()
            if table.vocabulary is not None
        }
        about = {
            "arrays": _kinds(*self._full(params, state)),
            "step": self._step,
            "hands": {name: table.hand for name, table in self._tables.items()},
            "vocabularies": vocabularies,
        }
        self._folder.commit([np.asarray(a) for a in others], about)


def _kinds(params: Any, state: Any) -> list[Any]:
    """The name, the shape and the dtype of each array."""
    found = []
    for tree, of in ((params, "parameter"), (state, "state")):
        for path, x in leaves_with_path(tree):
            found.append([f"{of} '{path_name(path)}'", list(np.shape(x)), str(jnp.result_type(x))])
    return found


def _on_mesh(x: Any, mesh: Mesh) -> Any:
    """An array on the devices of a mesh: unchanged if it is there, otherwise replicated."""
    if getattr(getattr(x, "sharding", None), "mesh", None) == mesh:
        return x
    return jax.device_put(x, as_typed(NamedSharding(mesh, PartitionSpec()), jnp.ndim(x)))


def _with(s: Stats, plan: _Plan) -> Stats:
    """The statistics after the swap of a plan."""
    for part in plan.parts.values():
        missing, distinct = len(part.moves.missing), part.moves.distinct
        s = s._replace(
            ids=s.ids + part.number,
            distinct=s.distinct + distinct,
            hits=s.hits + distinct - missing,
            rows_in=s.rows_in + missing,
            rows_out=s.rows_out + int(np.count_nonzero(part.moves.leaving >= 0)),
        )
    return s._replace(steps=s.steps + 1)
