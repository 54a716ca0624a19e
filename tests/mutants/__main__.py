"""``make mutants``: repeatedly changes the code in one place, and checks that a test fails.

    python -m tests.mutants --number 60 --seed 1 [--changed-since REVISION] [FILES OR FOLDERS]

Runs the tests of ``make test``, and if none fails, the others of ``make test-full``, beginning with
the tests of the changed line. Copies of the project, records and results are in ``.venv/mutants``.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import json
import os
import pathlib
import queue
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib

import pytest

from .plugin import TIME_LIMIT
from .record import FULL, LEVELS, QUICK, Record, failed
from .sites import Mutant, drawn, mutant, sites

ROOT = pathlib.Path(__file__).resolve().parents[2]
HOME = pathlib.Path(sys.prefix, "mutants")
EXPLAINED = pathlib.Path(__file__).with_name("explained.toml")
FOUND, SURVIVED, ENDLESS, KNOWN = "found", "survived", "timed out", "explained"


def main(argv=None) -> int:
    """Tests mutants; the exit status is 1 if one survives without an explanation."""
    parser = argparse.ArgumentParser(prog="make mutants ARGS=...", description=__doc__)
    parser.add_argument(
        "paths", nargs="*", help="files or folders; default: optzoo/ except the race"
    )
    parser.add_argument("--number", type=int, default=60, help="number of mutants")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument(
        "--changed-since",
        metavar="REVISION",
        help="draw half of them from lines changed since a revision",
    )
    parser.add_argument(
        "--limit", type=float, default=60, help="time limits of quick and of full tests, in seconds"
    )
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count(), help="number of parallel tests"
    )
    parser.add_argument(
        "--again", action="store_true", help="test again mutants that quick tests did not find"
    )
    parser.add_argument("--old-record", action="store_true", help="do not record the tests again")
    args = parser.parse_args(argv)
    files = _files(args.paths or ["optzoo"])
    chosen = _drawn(files, args.number, args.seed, args.changed_since)
    made = [change for site in chosen if (change := mutant(ROOT, site)) is not None]
    results, reasons = Results(HOME / "results.jsonl"), _reasons()
    waiting = [
        change
        for change in made
        if (old := results.get(change)) is None
        or (args.again and old["level"] != QUICK and change.key not in reasons)
    ]
    if waiting:
        copies = [_copy(HOME / f"copy{i}") for i in range(args.workers)]
        record = Record.of(copies[0], HOME / "record", old=args.old_record, workers=args.workers)
        _test_all(waiting, record, copies, results, args.limit)
    return _report(made, results, reasons)


class Results:
    """A line of JSON for each tested mutant; the last line of a mutant is used."""

    def __init__(self, path: pathlib.Path):
        self._path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self._by_key = {result["key"]: result for result in map(json.loads, lines)}

    def get(self, change: Mutant) -> dict | None:
        """The result of a mutant that was tested before."""
        return self._by_key.get(change.key)

    def add(self, change: Mutant, **result) -> None:
        """Writes a result immediately, so that a run can be interrupted."""
        result = {
            name: getattr(change, name) for name in ("key", "path", "kind", "before", "after")
        } | result
        self._by_key[change.key] = result
        with self._path.open("a") as file:
            file.write(json.dumps(result) + "\n")


def _files(paths: list[str]) -> list[str]:
    found = set()
    for path in paths:
        full = ROOT / path
        if not full.exists():
            raise SystemExit(f"{path} does not exist: give files or folders in {ROOT}")
        found.update([full] if full.is_file() else full.rglob("*.py"))
    names = sorted(str(file.relative_to(ROOT)) for file in found)
    return [name for name in names if not name.startswith("optzoo/race/")]


def _drawn(files, number, seed, revision):
    """Draws from all places; half of them from those changed since a revision, if given."""
    places = [site for file in files for site in sites(ROOT, file)]
    changed = _changed(revision) if revision else set()
    new = drawn([s for s in places if (s.path, s.line) in changed], number // 2, seed)
    return new + drawn([s for s in places if s not in new], number - len(new), seed)


def _changed(revision: str) -> set[tuple[str, int]]:
    """The lines changed or added since a revision."""
    diff = subprocess.run(
        ["git", "diff", "-U0", "--no-color", "--no-ext-diff", "--dst-prefix=b/", revision,
         "--", "optzoo"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    found, path = set(), ""
    for line in diff.splitlines():
        if line.startswith("+++ "):
            path = line.removeprefix("+++ b/")
        elif hunk := re.match(r"@@ \S+ \+(\d+)(?:,(\d+))? @@", line):
            first, number = int(hunk[1]), int(hunk[2] or 1)
            found |= {(path, i) for i in range(first, first + number)}
    return found


def _copy(folder: pathlib.Path) -> pathlib.Path:
    """A copy of the project, to be changed."""
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
            what = f"{result['outcome']} {result['level']}, {result['seconds']:.0f} s"
            print(f"{n}/{len(waiting)} {what:20} {change.kind:10} {place}", flush=True)


def _test(copy: pathlib.Path, change: Mutant, record: Record, limit: float) -> dict:
    """Runs the quick tests, then the others."""
    file, begun = copy / change.path, time.monotonic()
    original, left, tests = file.read_text(), dict.fromkeys(LEVELS, limit), 0
    result = dict(outcome=SURVIVED, level="")
    waiting = record.rounds(change.path, original, change.line)
    while waiting:
        level, chosen = waiting.pop(0)
        before = time.monotonic()
        file.write_text(change.code)
        try:
            outcome, output = _run(copy, chosen, left[level], limit)
            if outcome == FOUND and not failed(output):  # a crash: once more
                outcome, output = _run(copy, chosen, limit, limit)
        finally:
            file.write_text(original)
        left[level] -= time.monotonic() - before
        tests += len(chosen)
        by = failed(output)[:1]
        if outcome == FOUND and level == FULL and _run(copy, by, limit, limit)[0] == FOUND:
            record.leave_out(by[0])  # it fails as well where nothing is changed
            waiting.append((level, chosen[chosen.index(by[0]) + 1 :]))
        elif outcome != SURVIVED:
            result = dict(outcome=outcome, level=level, by=by or output.splitlines()[-1:])
            break
    cut = [level for level in LEVELS if left[level] < 0]
    return result | dict(tests=tests, cut=cut, seconds=round(time.monotonic() - begun, 1))


def _run(copy: pathlib.Path, chosen: list[str], seconds: float, patience: float):
    """Starts no test after a time limit; ends a test that runs much longer as endless."""
    if not chosen or seconds <= 0:
        return SURVIVED, ""
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


def _report(changes, results, reasons) -> int:
    """Tables by folder and by kind. A mutant with endless tests is found by their level."""
    folders, kinds = (collections.defaultdict(collections.Counter) for _ in range(2))
    survivors = []
    for change in changes:
        result = results.get(change)
        how = result["level"] or result["outcome"]
        if how != QUICK and change.key in reasons:
            how = KNOWN
        elif how == SURVIVED:
            survivors.append(change)
            cut = "; not all tests were run" if result["cut"] else ""
            _show(change, f"not found{cut}")
        elif how == FULL:
            _show(change, f"found by {FULL} tests only: {result['by']}")
        folders[change.path.split("/")[1].removesuffix(".py")][how] += 1
        kinds[change.kind][how] += 1
    for table in (folders, kinds):
        _print(table)
    _print({"all": sum(kinds.values(), collections.Counter())})
    return int(bool(survivors))


def _print(table: dict[str, collections.Counter]) -> None:
    """Sorted by the survival of mutants, longest first."""
    outcomes = (*LEVELS, SURVIVED, KNOWN)
    print(
        "\n" + "".join(f"{name:>15}" for name in ("", *outcomes, "found of all", "quick of found"))
    )
    longest = lambda name: [-table[name][how] for how in (SURVIVED, FULL, QUICK)]
    for name in sorted(table, key=longest):
        counts = table[name]
        found = sum(counts[level] for level in LEVELS)
        shares = (found / max(1, found + counts[SURVIVED]), counts[QUICK] / max(1, found))
        cells = [*(f"{counts[how]}" for how in outcomes), *(f"{share:.1%}" for share in shares)]
        print("".join(f"{cell:>15}" for cell in (name, *cells)))


def _show(change: Mutant, what: str) -> None:
    print(f"\n{change.key}  {change.path}:{change.line}: {what}")
    print(f"  - {change.before}\n  + {change.after}")


def _reasons() -> dict[str, str]:
    """The reasons of mutants that no user can observe, by their keys."""
    mutants = tomllib.loads(EXPLAINED.read_text()).get("mutant", [])
    return {entry["key"]: entry["reason"] for entry in mutants}


if __name__ == "__main__":
    sys.exit(main())
