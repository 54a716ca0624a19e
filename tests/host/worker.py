"""Trains a table on the host in a folder, and may kill itself in the middle of something.

``points`` are where: around and inside of all that writes to the folder. Processes are forked
before JAX starts a device, so each costs a training alone.
"""

import argparse
import contextlib
import itertools
import os
import pathlib
import shutil
import signal
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))
import numpy as np

import optzoo
from optzoo.host import arrays, folder, journal

EVERY = 3  # steps between flushes


@contextlib.contextmanager
def points(at):
    """Calls ``at()`` before, in the middle of and after each write to a folder."""
    kept = []

    def patch(owner, name, new):
        old = getattr(owner, name)
        kept.append((owner, name, old))
        setattr(owner, name, new(old))

    def around(old):
        def new(*args, **kwargs):
            at()
            result = old(*args, **kwargs)
            at()
            return result

        return new

    def in_halves(old):
        def new(file, data):
            data = memoryview(data)
            at()
            old(file, data[: len(data) // 2])
            at()
            old(file, data[len(data) // 2 :])
            at()

        return new

    def by_rows(old):
        def new(self, ids, rows):
            half = len(ids) // 2
            old(self, ids[:half], [a[:half] for a in rows])
            at()
            old(self, ids[half:], [a[half:] for a in rows])
            at()

        return new

    patch(journal, "_write", in_halves)
    patch(arrays.Table, "write", by_rows)
    for owner, name in ((folder, "_save"), (folder, "sync"), (folder.os, "replace")):
        patch(owner, name, around)
    patch(folder.Folder, "_sync_tables", around)
    patch(pathlib.Path, "unlink", around)
    try:
        yield
    finally:
        for owner, name, old in reversed(kept):
            setattr(owner, name, old)


def killed_at(number):
    """Kills this process at a point of this number."""
    counter = itertools.count(1)

    def at():
        if next(counter) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    return points(at)


def train(path, steps, expected=None):
    """Trains up to a step, with flushes; what each flush has goes to ``expected``, if given."""
    from tests.host.cases import CACHE, adam, batches, first, loss, others, table

    store = optzoo.host.HostTable(table(), adam(), CACHE, folder=path)
    params, state = store.init(others())
    step = store.minimize(loss)
    data = batches(steps)[store.step :]
    for places, (_, y) in store.ahead(data, ids=first):
        params, state, _ = step(*store.swap(params, state), places, y)
        if store.step % EVERY == 0:
            flushed = store.flush(params, state)
            if expected is not None:
                save(expected, store.step, flushed)
    return store, params, state


def save(expected, step, flushed):
    import jax

    leaves = [np.asarray(a) for a in jax.tree.leaves(flushed)]
    np.savez(expected / f"{step}.npz", *leaves)


def is_as_expected(path, expected):
    """Whether a folder has all of one flush and nothing else; and the flush."""
    import jax

    from tests.host.cases import CACHE, adam, others, table

    store = optzoo.host.HostTable(table(), adam(), CACHE, folder=path)
    got = jax.tree.leaves(store.flush(*store.init(others())))
    with np.load(expected / f"{store.step}.npz") as saved:
        want = [saved[name] for name in saved.files]
    pairs = zip(got, want, strict=True)
    return all(np.asarray(a).tobytes() == b.tobytes() for a, b in pairs), store.step


def forked(call):
    """Runs a function in a process of its own: its exit code, 1 for an error."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = call() or 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=pathlib.Path)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--kills", type=int, nargs="*", default=[])
    parser.add_argument("--random", type=int, default=0)
    args = parser.parse_args()
    expected = args.folder / "expected"
    expected.mkdir()

    def uninterrupted():
        store, params, state = train(args.folder / "whole", args.steps, expected)
        save(expected, "last", store.flush(params, state))
        shutil.copy(expected / "last.npz", expected / f"{args.steps}.npz")

    def start():  # what a folder has before the first flush of a loop
        from tests.host.cases import CACHE, adam, others, table

        store = optzoo.host.HostTable(table(), adam(), CACHE)
        save(expected, 0, store.flush(*store.init(others())))

    assert forked(uninterrupted) == 0 and forked(start) == 0
    rng = np.random.default_rng(0)
    for k in [*args.kills, *(-1 - n for n in range(args.random))]:
        path = args.folder / f"run{k}"

        def killed(path=path, k=k):
            with killed_at(k) if k > 0 else contextlib.nullcontext():
                train(path, args.steps)
            return 3

        if k > 0:
            code = forked(killed)
        else:  # at a moment after it has begun, at which the parent kills it
            child = os.fork()
            if child == 0:
                os._exit(killed())
            while not (path / "flush.json").exists():
                time.sleep(0.001)
            time.sleep(rng.uniform(0, 1.5))
            os.kill(child, signal.SIGKILL)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

        def check(path=path, k=k):
            begun = (path / "flush.json").exists()
            fits, step = is_as_expected(path, expected)
            print(f"kill {k}: a flush {begun}, step {step}, as expected {fits}", flush=True)
            return 0 if fits else 2

        def ends(path=path):
            store, params, state = train(path, args.steps)
            store.flush(params, state)

        done = forked(check), forked(ends), forked(check)
        print(f"kill {k}: ended with {code}, then {done}", flush=True)
        if done != (0, 0, 0) or (k > 0 and code not in (-signal.SIGKILL, 3)):
            sys.exit(f"kill {k} is not as expected")


if __name__ == "__main__":
    main()
