"""``make mutants``: changes the code in one place, and looks whether a test fails; again and again.

    python -m tests.mutants --number 200 --seed 1 [FILES OR FOLDERS]

The tests of ``make test`` are run, and where they find nothing, the others of ``make test-full``.
The copies of the project, what is recorded and the results are in ``.venv/mutants``.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import json
import os
import pathlib
import queue
import shutil
import signal
import subprocess
import sys
import time
import tomllib

import pytest

from .plugin import TIME_LIMIT
from .record import FULL, LEVELS, QUICK, Record
from .sites import Mutant, drawn, mutant, sites

ROOT = pathlib.Path(__file__).resolve().parents[2]
HOME = pathlib.Path(sys.prefix, "mutants")
EXPLAINED = pathlib.Path(__file__).with_name("explained.toml")
FOUND, SURVIVED, ENDLESS = "found", "survived", "timed out"


def main(argv=None) -> int:
    """Tests mutants; the exit status is 1 if one survives that is not explained."""
    parser = argparse.ArgumentParser(prog="make mutants ARGS=...", description=__doc__)
    parser.add_argument("paths", nargs="*", help="files or folders; all of optzoo/ but the race")
    parser.add_argument("--number", type=int, default=200, help="how many mutants are drawn")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument(
        "--limit", type=float, default=150, help="seconds of tests for each mutant, twice"
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="at the same time")
    parser.add_argument("--again", action="store_true", help="test the survivors again")
    parser.add_argument("--old-record", action="store_true", help="do not record the tests anew")
    args = parser.parse_args(argv)
    files = _files(args.paths or ["optzoo"])
    chosen = drawn([site for file in files for site in sites(ROOT, file)], args.number, args.seed)
    made = [change for site in chosen if (change := mutant(ROOT, site)) is not None]
    results = Results(HOME / "results.jsonl")
    waiting = [
        change
        for change in made
        if (old := results.get(change)) is None or (args.again and old["outcome"] != FOUND)
    ]
    if waiting:
        copies = [_copy(HOME / f"copy{i}") for i in range(args.workers)]
        record = Record.of(copies[0], HOME / "record", old=args.old_record, workers=args.workers)
        _test_all(waiting, record, copies, results, args.limit)
    return _report(made, results)


class Results:
    """A line of JSON for each mutant that was tested; the last one counts."""

    def __init__(self, path: pathlib.Path):
        self._path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self._by_key = {result["key"]: result for result in map(json.loads, lines)}

    def get(self, change: Mutant) -> dict | None:
        """The result of a mutant that was tested before."""
        return self._by_key.get(change.key)

    def add(self, change: Mutant, **result) -> None:
        """Keeps a result at once, so that a run can be interrupted."""
        result = (
            dict(key=change.key, path=change.path, before=change.before, after=change.after)
            | result
        )
        self._by_key[change.key] = result
        with self._path.open("a") as file:
            file.write(json.dumps(result) + "\n")


def _files(paths: list[str]) -> list[str]:
    found = set()
    for path in paths:
        full = ROOT / path
        if not full.exists():
            raise SystemExit(f"there is no {path}: name files or folders in {ROOT}")
        found.update([full] if full.is_file() else full.rglob("*.py"))
    names = sorted(str(file.relative_to(ROOT)) for file in found)
    return [name for name in names if not name.startswith("optzoo/race/")]


def _copy(folder: pathlib.Path) -> pathlib.Path:
    """The project as it is now, to be changed."""
    shutil.rmtree(folder, ignore_errors=True)
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    )  # fmt: skip
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def _test_all(waiting, record, copies, results, limit):
    free = queue.SimpleQueue()
    for copy in copies:
        free.put(copy)

    def test(change: Mutant):
        copy = free.get()
        try:
            return _test(copy, change, record, limit)
        finally:
            free.put(copy)

    with concurrent.futures.ThreadPoolExecutor(len(copies)) as pool:
        tested = {pool.submit(test, change): change for change in waiting}
        for n, done in enumerate(concurrent.futures.as_completed(tested), 1):
            change, result = tested[done], done.result()
            results.add(change, **result)
            place = f"{change.path}:{change.line}"
            what = f"{result['outcome']} {result['level']}"
            print(f"{n}/{len(waiting)} {what:15} {place}", flush=True)


def _test(copy: pathlib.Path, change: Mutant, record: Record, limit: float) -> dict:
    """The quick tests, then the others: a few of each file first, as any finds most mutants."""
    original = (copy / change.path).read_text()
    (copy / change.path).write_text(change.code)
    tests, cut = 0, []
    try:
        for level in LEVELS:
            begun = time.monotonic()
            for chosen in record.rounds(level, change.path, original, change.line):
                left = limit - (time.monotonic() - begun)
                if left < 0:
                    break
                outcome, output = _run(copy, chosen, left, limit)
                tests += len(chosen)
                if outcome != SURVIVED:
                    failed = ("FAILED", "ERROR")
                    by = [line for line in output.splitlines() if line.startswith(failed)]
                    return dict(outcome=outcome, level=level, tests=tests, cut=cut, by=by[:1])
            if time.monotonic() - begun > limit:
                cut.append(level)
    finally:
        (copy / change.path).write_text(original)
    return dict(outcome=SURVIVED, level="", tests=tests, cut=cut)


def _run(copy: pathlib.Path, chosen: list[str], seconds: float, patience: float):
    """No test is begun after some seconds; one that still runs much later is endless."""
    names = copy / "chosen.json"
    names.write_text(json.dumps(chosen))
    files = dict.fromkeys(name.partition("::")[0] for name in chosen)
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "-x", "--tb=no",
         "-p", "tests.mutants.plugin", *files],
        cwd=copy, text=True, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env=dict(os.environ, PYTHONPATH=str(copy),
                 MUTANTS_CHOSEN=str(names), MUTANTS_LIMIT=str(seconds)),
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=seconds + patience)
    except subprocess.TimeoutExpired:
        return ENDLESS, ""
    finally:
        with contextlib.suppress(ProcessLookupError):  # processes that a test started
            os.killpg(process.pid, signal.SIGKILL)
    passed = process.returncode in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    return (SURVIVED if passed or TIME_LIMIT in output else FOUND), output


def _report(changes, results) -> int:
    """A table by folder. A mutant with which tests never end counts as found by their level."""
    reasons = {entry["key"]: entry["reason"] for entry in _explained()}
    table = collections.defaultdict(collections.Counter)
    survivors = []
    for change in changes:
        result = results.get(change)
        kind = result["level"] or result["outcome"]
        if kind == SURVIVED:
            if change.key in reasons:
                kind = "explained"
            else:
                survivors.append(change)
        elif kind == FULL:
            _show(change, f"found by {FULL} tests alone: {result['by']}")
        folder = change.path.split("/")[1]
        table[folder.removesuffix(".py")][kind] += 1
    for change in survivors:
        _show(change, "not found")
    kinds = (*LEVELS, SURVIVED, "explained")
    columns = (*kinds, "found of all", "quick of found")
    print(f"\n{'':14}" + "".join(f"{name:>15}" for name in columns))
    total = collections.Counter()
    for folder, counts in [*sorted(table.items()), ("all", total)]:
        total.update(counts if counts is not total else {})
        found = sum(counts[level] for level in LEVELS)
        shares = (found / max(1, found + counts[SURVIVED]), counts[QUICK] / max(1, found))
        cells = [*(f"{counts[kind]}" for kind in kinds), *(f"{share:.1%}" for share in shares)]
        print(f"{folder:14}" + "".join(f"{cell:>15}" for cell in cells))
    return int(bool(survivors))


def _show(change: Mutant, what: str) -> None:
    print(f"\n{change.key}  {change.path}:{change.line}: {what}")
    print(f"  - {change.before}\n  + {change.after}")


def _explained() -> list[dict]:
    return tomllib.loads(EXPLAINED.read_text()).get("mutant", [])


if __name__ == "__main__":
    sys.exit(main())
