"""Records which tests run which lines, by one run of the quick tests with coverage.

A full test is assumed to run the lines of the quick cases of its function, or, without these, of
the tests of its file. ``costs.json`` has the times.
"""

import collections
import hashlib
import itertools
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import coverage
import pytest

from ..costs import expected, function_of
from .sites import statement

LEVELS = QUICK, FULL = ("quick", "full")  # the tests of `make test`, and the others
_FIRST = 3.0  # seconds of the quick tests that are tried first
_FILES = 12  # and their files, at most
_LONGEST = 10.0  # seconds of a test; longer ones are not for mutants


class Record:
    """The record of a tree."""

    def __init__(self, folder: pathlib.Path):
        is_full: dict[str, bool] = json.loads((folder / "tests.json").read_text())
        self._failing = folder / "failing.txt"
        self.failing = set(self._failing.read_text().splitlines())
        if self.failing:
            print("These tests fail without changes:", *sorted(self.failing), sep="\n  ")
        tests = [name for name in is_full if expected(name) <= _LONGEST]
        self._quick = {name for name in tests if not is_full[name]} - self.failing
        self._of_file = _grouped((name for name in tests if is_full[name]), _file)
        data = coverage.CoverageData(str(folder / "coverage"))
        data.read()
        self._lines: dict[str, dict[int, set[str]]] = {}
        for file in data.measured_files():
            name = file[file.rindex("/optzoo/") + 1 :] if "/optzoo/" in file else file
            lines = data.contexts_by_lineno(file)
            self._lines[name] = {line: _tests(c) & self._quick for line, c in lines.items()}

    @classmethod
    def of(cls, copy: pathlib.Path, folder: pathlib.Path, *, old: bool, workers: int) -> "Record":
        """The record of a copy of the project, created if there is none for these files."""
        stamp = folder / "of.txt"
        now = _fingerprint(copy)
        if not stamp.exists() or (stamp.read_text() != now and not old):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            print("recording which lines the quick tests run ...", flush=True)
            log = folder / "log.txt"
            done = subprocess.run(
                [sys.executable, "-m", "pytest", "-q", "-rfE", "--tb=short",
                 "-n", str(workers), "--dist", "worksteal", "-p", "tests.mutants.plugin",
                 "--cov=optzoo", "--cov-context=test", "--cov-report="],
                cwd=copy, check=False, stdout=log.open("w"),
                env=dict(os.environ, PYTHONPATH=str(copy),
                         COVERAGE_FILE=str(folder / "coverage"),
                         MUTANTS_TESTS=str(folder / "tests.json")),
            )  # fmt: skip
            if done.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
                raise SystemExit(f"The tests do not run: see {log}.")
            failing = failed(log.read_text())
            (folder / "failing.txt").write_text("".join(f"{name}\n" for name in failing))
            stamp.write_text(now)
        return cls(folder)

    def leave_out(self, test: str) -> None:
        """Removes a test that fails without changes."""
        self.failing.add(test)
        with self._failing.open("a") as file:
            file.write(f"{test}\n")

    def rounds(self, path: str, code: str, line: int) -> list[tuple[str, list[str]]]:
        """The tests of a line, with their level: some quick ones, other quick ones, full ones.

        A line that runs at import has all tests that run any line of the file. A test that reuses a
        compiled program runs none of its lines, so the tests of the same files are run last.
        """
        lines = self._lines.get(path, {})
        of_any_line = set().union(*lines.values()) or self._quick
        tests = set().union(*(lines.get(i, ()) for i in statement(code, line))) or of_any_line
        files = {_file(name) for name in tests}
        order = _Order(path)
        first = order.first(tests)
        beside = {name for name in self._quick if _file(name) in files} - tests
        then = order.of(tests - set(first)) + order.of(beside)
        functions, of_all = ({function_of(n) for n in some} for some in (tests, self._quick))
        full, others = set(), set()
        for file, names in self._of_file.items():
            for name in set(names) - self.failing:
                function = function_of(name)
                if function in functions or (function not in of_all and file in files):
                    full.add(name)
                elif file in files or order.distance(name) < 2:
                    others.add(name)
        return [(QUICK, first), (QUICK, then), (FULL, order.of(full) + order.of(others))]


class _Order:
    """The order of the tests of a line: by distance, then by cost."""

    def __init__(self, path: str):
        file = pathlib.PurePath(path)
        self._stem, self._folders = file.stem, {*file.parts[1:-1]}

    def distance(self, test: str) -> int:
        """0 for tests of the file, 1 for tests of its folders, 2 for others."""
        parts = {part.removeprefix("test_") for part in pathlib.PurePath(_file(test)[:-3]).parts}
        return 0 if self._stem in parts else 1 if self._folders & parts else 2

    def first(self, tests: set[str]) -> list[str]:
        """A few cheap tests of each file, any of which finds most mutants."""
        files = _grouped(sorted(tests, key=self._of_test), _file)
        in_turn = sorted(files, key=lambda file: self._of_test(files[file][0]))[:_FILES]
        taken, left = set(), _FIRST
        for round_of_files in itertools.zip_longest(*(files[file] for file in in_turn)):
            for name in filter(None, round_of_files):
                if left > 0:
                    taken.add(name)
                    left -= expected(name)
        return [name for file in in_turn for name in files[file] if name in taken]

    def of(self, tests: set[str]) -> list[str]:
        """All tests: a case of each function, then the others, grouped by file."""
        functions = _grouped(sorted(tests, key=self._of_test), function_of)
        one = [cases[0] for cases in functions.values()]
        others = [name for cases in functions.values() for name in cases[1:]]
        return self._by_file(one) + self._by_file(others)

    def _by_file(self, tests):
        files = _grouped(tests, _file)
        cost = lambda file: sum(map(expected, files[file])) / len(files[file])
        in_turn = sorted(files, key=lambda file: (self.distance(file), cost(file)))
        return [name for file in in_turn for name in files[file]]

    def _of_test(self, name):
        return self.distance(name), self._stem not in name.partition("[")[2], expected(name), name


def failed(output: str) -> list[str]:
    """The failed tests in the output of pytest."""
    found = re.findall(r"^(?:FAILED|ERROR) (tests/.*?)(?: - .*)?$", output, re.MULTILINE)
    return list(dict.fromkeys(found))


def _grouped(names, key) -> dict[str, list[str]]:
    found = collections.defaultdict(list)
    for name in names:
        found[key(name)].append(name)
    return found


def _file(test: str) -> str:
    return test.partition("::")[0]


def _tests(contexts) -> set[str]:
    """The tests of coverage contexts such as ``tests/a.py::test_b|call``."""
    return {name.rpartition("|")[0] for name in contexts if name}


def _fingerprint(copy):
    digest = hashlib.sha256()
    for file in sorted([*copy.glob("optzoo/**/*.py"), *copy.glob("tests/**/*.py")]):
        if file.parent.name == "mutants":
            continue
        digest.update(str(file.relative_to(copy)).encode() + file.read_bytes())
    return digest.hexdigest()
