"""A folder is as of one flush, whenever the process was killed."""

import contextlib
import itertools
import json
import pathlib
import re
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optzoo
from optzoo.host import journal
from optzoo.host.arrays import Kind
from optzoo.host.folder import Folder
from optzoo.state.fit import StateError

from . import worker
from .cases import (
    CACHE,
    ROWS,
    STEPS,
    WIDTH,
    adam,
    batches,
    cached,
    ordinary,
    others,
    same,
    table,
    train,
)

pytestmark = pytest.mark.optimized


def opened(path, tx=None, cache=CACHE, **options):
    return optzoo.host.HostTable(table(), tx or adam(), cache, folder=path, **options)


@pytest.mark.unique
def test_a_run_continues_in_another_process_with_another_cache(tmp_path):
    *want, losses = ordinary(adam(), data=batches(2 * STEPS))
    store = opened(tmp_path)
    params, state, values = train(store, *store.init(others()), batches(2 * STEPS)[:STEPS])
    same(store.flush(params, state), ordinary(adam(), data=batches(2 * STEPS)[:STEPS])[:2])
    store.close()
    store = opened(tmp_path, cache=2 * CACHE, policy="lru")
    assert (store.step, store.flushes) == (0, 2)
    fresh = jax.tree.map(jnp.zeros_like, others())
    params, state = store.init(fresh)
    assert store.step == STEPS
    params, state, more = train(store, params, state, batches(2 * STEPS)[STEPS:])
    same(store.flush(params, state), tuple(want))
    assert values + more == losses


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_tables_and_slots_in_16_bits(tmp_path, dtype):
    tx, start = optzoo.slots_dtype(adam(), dtype, packed=True), table(dtype=dtype)
    *want, _ = ordinary(tx, start)
    *got, _, store = cached(tx, start, folder=tmp_path)
    same(tuple(got), tuple(want))
    store.close()
    store = optzoo.host.HostTable(start, tx, CACHE, folder=tmp_path)
    same(store.flush(*store.init(others())), tuple(want))


def test_steps_after_the_last_flush_are_lost(tmp_path):
    store = opened(tmp_path)
    params, state, _ = train(store, *store.init(others()))
    want = jax.tree.map(np.array, store.flush(params, state))
    train(store, params, state, batches(9, seed=8))
    assert list(tmp_path.glob("journal.*"))
    store.close()
    store = opened(tmp_path)
    params, state = store.init(others())
    assert not list(tmp_path.glob("journal.*"))
    assert store.step == STEPS
    same(store.flush(params, state), want)


def test_the_array_that_was_given_stays(tmp_path):
    start = table()
    cached(adam(), start, folder=tmp_path)
    same(start, table())
    mapped = np.load(save(tmp_path / "start.npy", start), mmap_mode="r")
    *want, _ = ordinary(adam())
    store = optzoo.host.HostTable(mapped, adam(), CACHE, folder=tmp_path / "other")
    same(store.flush(*train(store, *store.init(others()))[:2]), tuple(want))


def save(path, array):
    np.save(path, array)
    return path


def test_a_mapped_array_without_a_folder(tmp_path):
    mapped = np.load(save(tmp_path / "start.npy", table()), mmap_mode="r+")
    *want, _ = ordinary(adam())
    store = optzoo.host.HostTable(mapped, adam(), CACHE)
    same(store.flush(*train(store, *store.init(others()))[:2]), tuple(want))
    mapped.flush()
    same(np.load(tmp_path / "start.npy"), want[0]["table"])


def snapshots(tmp_path, steps=7):
    """What a kill at each point would leave, and what each flush has."""
    found, counter = [], itertools.count()
    expected = tmp_path / "expected"
    expected.mkdir()

    def at():
        to = tmp_path / f"snapshot{next(counter)}"
        with contextlib.suppress(FileNotFoundError):
            shutil.copytree(tmp_path / "run", to)
            found.append(to)

    with worker.points(at):
        store, params, state = worker.train(tmp_path / "run", steps, expected)
    store.close()
    start = optzoo.host.HostTable(table(), adam(), CACHE)
    worker.save(expected, 0, start.flush(*start.init(others())))
    del params, state
    return found, expected


def raw(path):
    """All arrays of a folder, rolled back, without a store."""
    folder = Folder(path)
    kinds = [Kind((WIDTH,), np.dtype(np.float32))] * 3
    made = folder.add("table", kinds)
    folder.roll_back()
    arrays = [a.copy() for a in made.arrays], folder.others()
    folder.close()
    return *arrays, folder.flushed["step"]


def test_every_point_at_which_a_process_may_be_killed(tmp_path):
    """Files at each point, opened as after a kill: all of one flush, and nothing of a later one."""
    found, expected = snapshots(tmp_path)
    steps = []
    for path in found:
        if not (path / "flush.json").exists():
            steps.append(None)
            continue
        rows, rest, step = raw(path)
        steps.append(step)
        with np.load(expected / f"{step}.npz") as saved:
            want = sorted((saved[name].tobytes() for name in saved.files), key=len)
        got = sorted((a.tobytes() for a in [*rows, *rest]), key=len)
        assert sorted(got) == sorted(want), path.name
        # Once more: what a kill while it is rolled back leaves.
        assert [a.tobytes() for a in raw(path)[0]] == [a.tobytes() for a in rows]
    begun = steps[steps.index(0) :]
    assert None not in begun and begun == sorted(begun)
    assert {*begun} == {0, 3, 6} and len(found) > 60


def test_a_kill_while_it_is_rolled_back(tmp_path):
    found, expected = snapshots(tmp_path, 5)
    path = max((p for p in found if list(p.glob("journal.*"))), key=lambda p: p.stat().st_mtime_ns)
    counter = itertools.count()
    parts = []

    def at():
        parts.append(tmp_path / f"part{next(counter)}")
        shutil.copytree(path, parts[-1])

    with worker.points(at):
        want, _, step = raw(path)
    assert len(parts) >= 4 and step == 3
    for part in parts:
        same(raw(part)[0], want)
    del expected


def test_records_that_are_torn(tmp_path):
    """A journal that ends anywhere gives the records before; one with other bytes ends there."""
    log, rng = journal.Journal(tmp_path / "journal"), np.random.default_rng(0)
    kinds = {0: [Kind((3,), np.dtype("f4"))]}
    kinds[1] = [Kind((), np.dtype("i2")), Kind((2,), np.dtype("f8"))]
    ends, written = [0], []
    for k in range(4):
        ids = rng.permutation(9)[: k + 1]
        rows = [rng.integers(0, 99, (k + 1, *kind.row)).astype(kind.dtype) for kind in kinds[k % 2]]
        log.append(k % 2, ids, rows)
        ends.append(log.path.stat().st_size)
        written.append((k % 2, ids, rows))
    whole = log.path.read_bytes()

    def check(data, number):
        log.path.write_bytes(data)
        got = list(log.records(kinds))
        assert len(got) == number
        for (n, ids, rows), (of, wanted, values) in zip(got, written, strict=False):
            assert n == of
            np.testing.assert_array_equal(ids, wanted)
            for a, b in zip(rows, values, strict=True):
                np.testing.assert_array_equal(a, b)

    for length in range(len(whole) + 1):
        check(whole[:length], sum(end <= length for end in ends[1:]))
    for at in range(ends[1], len(whole), 7):
        broken = bytearray(whole)
        broken[at] ^= 1
        check(bytes(broken), sum(end <= at for end in ends[1:]))


def test_a_disk_that_is_full(tmp_path, monkeypatch):
    """A record that was not written whole goes away, and those after it are found."""
    log, ids = journal.Journal(tmp_path / "journal"), np.arange(2)
    rows, kinds = [np.ones((2, 3), np.float32)], {0: [Kind((3,), np.dtype("f4"))]}
    log.append(0, ids, rows)
    write, calls = journal._write, []

    def full(file, data):
        calls.append(data)
        if len(calls) == 2:
            raise OSError("no space")
        write(file, data)

    monkeypatch.setattr(journal, "_write", full)
    with pytest.raises(OSError, match="no space"):
        log.append(0, ids, rows)
    monkeypatch.undo()
    log.append(0, ids, rows)
    assert len(list(log.records(kinds))) == 2


def test_what_a_flush_waits_for(tmp_path, monkeypatch):
    """All files are on the disk before the new flush is named."""
    store = opened(tmp_path)
    params, state, _ = train(store, *store.init(others()))
    events = []
    for name in ("sync", "_save"):
        old = getattr(sys.modules["optzoo.host.folder"], name)
        monkeypatch.setattr(
            f"optzoo.host.folder.{name}",
            lambda path, *rest, old=old, name=name: (
                events.append((name, pathlib.Path(path).name)),
                old(path, *rest),
            )[1],
        )
    mapped, replace = np.memmap.flush, Folder.__init__.__globals__["os"].replace
    monkeypatch.setattr(np.memmap, "flush", lambda a: (events.append("map"), mapped(a))[1])
    monkeypatch.setattr(
        "optzoo.host.folder.os.replace", lambda a, b: (events.append("replace"), replace(a, b))[1]
    )
    store.flush(params, state)
    at = events.index("replace")
    assert events[:at].count("map") == 3
    assert ("_save", "others.2") in events[:at] and ("sync", "flush.json.new") in events[:at]
    assert events[at + 1 :] == [("sync", tmp_path.name)]


def test_two_stores_on_one_folder(tmp_path):
    store = opened(tmp_path)
    with pytest.raises(RuntimeError, match="is open in another HostTable"):
        opened(tmp_path)
    store.close()
    opened(tmp_path).close()


OTHER = {
    "rows": (lambda: {"rows": table(ROWS + 1)}, ValueError, r"{'table': 60} rows, but rows has"),
    "width": (lambda: {"rows": table(row=(3,))}, StateError, "the flush in the folder is of anoth"),
    "optimizer": (lambda: {"tx": optzoo.adagrad(0.1)}, StateError, "of another optimizer"),
    "dtype": (lambda: {"rows": table(dtype=np.float16)}, StateError, "dtype float32, but this st"),
}


@pytest.mark.parametrize("name", OTHER)
def test_a_folder_of_something_else(tmp_path, name):
    store = opened(tmp_path)
    want = store.flush(*store.init(others()))
    store.close()
    make, error, message = OTHER[name]
    given = {"rows": table(), "tx": adam(), "cache_rows": CACHE, "folder": tmp_path, **make()}
    with pytest.raises(error, match=message):
        optzoo.host.HostTable(**given).init(others())
    other = {"w": jnp.ones(3)}
    with pytest.raises(StateError, match=r"parameter 'w' of shape \[8\] and dtype float32, but"):
        store = opened(tmp_path)
        store.init(other)
    store.close()
    store = opened(tmp_path)
    same(store.flush(*store.init(others())), want)


def test_a_folder_of_another_version(tmp_path):
    opened(tmp_path).close()
    store = opened(tmp_path)
    store.init(others())
    store.close()
    about = json.loads((tmp_path / "flush.json").read_text())
    (tmp_path / "flush.json").write_text(json.dumps(about | {"format": 99}))
    with pytest.raises(ValueError, match="has the format 99 of another version of optzoo"):
        opened(tmp_path)


def test_a_checkpoint_is_loaded_into_a_folder(tmp_path):
    *want, _ = ordinary(adam(), data=batches(2 * STEPS))
    *half, _ = ordinary(adam(), data=batches(2 * STEPS)[:STEPS])
    cached(adam(), folder=tmp_path)[-1].close()
    store = opened(tmp_path)
    params, state = store.load(*half)
    assert store.flushes == 3
    store.close()
    store = opened(tmp_path)
    params, state = store.init(others())
    params, state, _ = train(store, params, state, batches(2 * STEPS)[STEPS:])
    same(store.flush(params, state), tuple(want))


def run(tmp_path, *flags):
    script = [sys.executable, worker.__file__, "--folder", tmp_path, "--steps=7", *flags]
    done = subprocess.run(list(map(str, script)), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.unique
def test_processes_that_kill_themselves(tmp_path):
    """At a point of the journal, and in the middle of a flush; then they continue."""
    out = run(tmp_path, "--kills", 40, 90)
    assert out.count(f"ended with {-9}, then (0, 0, 0)") == 2


@pytest.mark.full
def test_processes_that_are_killed_at_many_moments(tmp_path):
    out = run(tmp_path, "--kills", *range(3, 150, 7), "--random", 12)
    assert out.count("then (0, 0, 0)") == 33
    steps = {int(step) for step in re.findall(r"step (\d+)", out)}
    assert steps >= {0, 3, 6, 7}
