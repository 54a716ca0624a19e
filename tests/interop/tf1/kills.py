"""Kills processes that save checkpoints, and reads what is left.

python -m tests.interop.tf1.kills FOLDER PATH times NUMBER    # each at a random moment
python -m tests.interop.tf1.kills FOLDER PATH steps           # before each change of a file
python -m tests.interop.tf1.kills FOLDER PATH reads NUMBER    # none; reads while another saves

It prints one line of JSON: how many were killed, how many of these left something beside the
checkpoint, and how often the old and the new variables were found. It fails if a checkpoint is
neither the old nor the new one, or if the next save leaves more than a checkpoint.
"""

import itertools
import json
import os
import pathlib
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from optzoo.interop.tf1 import files

# What a save does to files, by the names of Python's audit events. TensorFlow's own writing is not
# among them: it goes to a folder beside the checkpoint.
CHANGES = {"os.mkdir", "os.rename", "os.link", "os.remove", "os.rmdir", "shutil.copyfile"}
SIZE = 300_000


def variables(number: int) -> dict[str, np.ndarray]:
    """A checkpoint that consists of one number."""
    shapes = {"w": SIZE, "w/Adam": SIZE, "beta1_power": ()}
    return {n: np.full(shape, number, np.float32) for n, shape in shapes.items()}


def number_in(path: str) -> int:
    """The number of the checkpoint, by our reader and by TensorFlow's operation."""
    found = files.read(path)
    assert found.keys() == variables(0).keys(), found.keys()
    numbers = {float(x) for value in found.values() for x in np.unique(value)}
    assert len(numbers) == 1, numbers
    if not path.endswith(".npz"):
        tf = files.import_tensorflow()
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            restore = tf.raw_ops.RestoreV2(
                prefix=path,
                tensor_names=list(found),
                shape_and_slices=[""] * len(found),
                dtypes=[tf.float32] * len(found),
            )
            restored = session.run(restore)
        assert {float(x) for value in restored for x in np.unique(value)} == numbers
    return int(numbers.pop())


def in_child(work: Callable[[], Any], seconds: float | None = None) -> tuple[bool, str]:
    """Does it in a process of its own, which is killed after some time if it is still there.

    Returns:
        Whether it was killed, and what ``work`` wrote or returned.
    """
    reader, writer = os.pipe()
    if not (pid := os.fork()):
        try:
            os.write(writer, str(work()).encode())
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
        os._exit(0)
    os.close(writer)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    with open(reader) as stream:
        text = stream.read()
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert killed or os.waitstatus_to_exitcode(status) == 0, status
    return killed, text


def save_until_change(path: str, number: int, change: int) -> None:
    """Saves, and kills itself before this change of a file."""
    seen = itertools.count()

    def hook(event, arguments):
        del arguments
        if event in CHANGES and next(seen) == change:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    files.write(path, variables(number))


def check(path: str, allowed: set[int], found: Counter[str]) -> int:
    """The number of the checkpoint, counted with what lies beside it."""
    folder = pathlib.Path(path).parent
    number = int(in_child(lambda: number_in(path))[1])
    assert number in allowed, (number, allowed)
    found["new" if number == max(allowed) else "old"] += 1
    found["leftovers"] += {f.name for f in folder.iterdir()} != usual(path)
    return number


def usual(path: str) -> set[str]:
    """The names of the files of a checkpoint."""
    name = pathlib.Path(path).name
    endings = ("",) if path.endswith(".npz") else (".index", ".data-00000-of-00001")
    return {name + ending for ending in endings}


def save(path: str, number: int) -> None:
    """Saves without a kill; nothing else is left."""
    in_child(lambda: files.write(path, variables(number)))
    assert {f.name for f in pathlib.Path(path).parent.iterdir()} == usual(path)


def kill_at_changes(path: str) -> Counter[str]:
    """Kills before every change in turn, until a save is finished."""
    found, last = Counter[str](), 0
    save(path, 0)
    for change in itertools.count():
        number = last + 1
        killed, _ = in_child(lambda: save_until_change(path, number, change))  # noqa: B023
        if not killed:
            return found
        found["killed"] += 1
        last = check(path, {last, number}, found)
        if change % 2:  # otherwise the next one finds what this one left
            save(path, last)


def kill_at_times(path: str, times: int) -> Counter[str]:
    """Kills at random moments of an endless row of saves."""
    found, rng = Counter[str](), random.Random(0)
    save(path, 0)
    begin = time.perf_counter()
    save(path, 0)
    duration = time.perf_counter() - begin
    last = 0

    for _ in range(times):
        reader, writer = os.pipe()

        def work(start=last, writer=writer):
            for number in itertools.count(start + 1):
                files.write(path, variables(number))
                os.write(writer, b"%d\n" % number)

        killed, _ = in_child(work, rng.uniform(0, 3 * duration))
        os.close(writer)
        with open(reader) as stream:
            done = [int(line) for line in stream]
        finished = done[-1] if done else last
        found["killed"] += killed
        last = check(path, {finished, finished + 1}, found)
    save(path, last)
    return found


def read_while_saving(path: str, times: int) -> Counter[str]:
    """Reads a checkpoint that another process replaces again and again."""
    save(path, 0)
    if not (saver := os.fork()):
        for number in itertools.count(1):
            files.write(path, variables(number))

    def read():
        seen = set()
        # On a busy machine there may be no new checkpoint for many reads.
        for count in itertools.count(1):
            numbers = {float(x) for value in files.read(path).values() for x in np.unique(value)}
            assert len(numbers) == 1, numbers
            seen |= numbers
            if (count >= times and len(seen) > 1) or count == 100 * times:
                return len(seen)

    try:
        different = int(in_child(read)[1])
    finally:
        os.kill(saver, signal.SIGKILL)
        os.waitpid(saver, 0)
    return Counter({"different": different})


if __name__ == "__main__":
    folder, name, way, *number = sys.argv[1:]
    files.import_tensorflow()
    where = str(pathlib.Path(folder, name))
    ways = {"times": kill_at_times, "steps": kill_at_changes, "reads": read_while_saving}
    print(json.dumps(ways[way](where, *map(int, number))))
