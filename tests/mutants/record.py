"""Which tests run which lines, and how long each test takes: recorded once, with coverage."""

import collections
import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys

import coverage
import pytest

from .sites import statement

LEVELS = QUICK, FULL = ("quick", "full")  # the tests of `make test`, and the others
_ROUNDS = ((2, 3.0), (12, 25.0))  # tests of each file, and seconds in all; then the others


class Record:
    """What was recorded of a tree."""

    def __init__(self, folder: pathlib.Path):
        self._folder = folder
        tests: dict[str, dict] = json.loads((folder / "tests.json").read_text())
        if failed := [name for name, test in tests.items() if test["failed"]]:
            print("These fail before anything is changed, and are left out:", *failed, sep="\n  ")
        tests = {name: test for name, test in tests.items() if not test["failed"]}
        self._seconds: dict[str, float] = {name: test["seconds"] for name, test in tests.items()}
        self._of_level = {
            level: {name for name, test in tests.items() if test["full"] == (level == FULL)}
            for level in LEVELS
        }
        known = set(self._seconds)
        data = coverage.CoverageData(str(folder / "coverage"))
        data.read()
        self._lines: dict[str, dict[int, set[str]]] = {}
        for file in data.measured_files():
            name = file[file.rindex("/optzoo/") + 1 :] if "/optzoo/" in file else file
            lines = data.contexts_by_lineno(file)
            self._lines[name] = {line: _tests(c) & known for line, c in lines.items()}

    @classmethod
    def of(cls, copy: pathlib.Path, folder: pathlib.Path, *, old: bool, workers: int) -> "Record":
        """The record of a copy of the project; made now if there is none for these files."""
        stamp = folder / "of.txt"
        now = _fingerprint(copy)
        if not stamp.exists() or (stamp.read_text() != now and not old):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            print("recording which tests run which lines ...", flush=True)
            log = folder / "log.txt"
            done = subprocess.run(
                [sys.executable, "-m", "pytest", "-q", "-n", str(workers), "--dist", "worksteal",
                 "-p", "tests.mutants.plugin",
                 "--cov=optzoo", "--cov-context=test", "--cov-report="],
                cwd=copy, check=False, stdout=log.open("w"),
                env=dict(os.environ, PYTHONPATH=str(copy),
                         COVERAGE_FILE=str(folder / "coverage"),
                         MUTANTS_TESTS=str(folder / "tests.json")),
            )  # fmt: skip
            if done.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
                raise SystemExit(f"The tests do not run: see {log}.")
            stamp.write_text(now)
        return cls(folder)

    def rounds(self, level: str, path: str, code: str, line: int) -> list[list[str]]:
        """The tests of a line, of one of LEVELS: the cheapest ones of each file, those near, all.

        A line that is run when the file is imported has all tests that run any line of the file.
        A test that shares a compiled program runs no line of it, so all tests of the same files
        are a last round; where none of them is of the level, all tests of any line of the file.
        """
        lines = self._lines.get(path, {})
        of_any_line = set().union(*lines.values()) or set(self._seconds)
        tests = set().union(*(lines.get(i, ()) for i in statement(code, line))) or of_any_line
        files = {name.partition("::")[0] for name in tests}
        others = {name for name in self._seconds if name.partition("::")[0] in files}
        if not others & self._of_level[level]:
            others = of_any_line
        tests &= self._of_level[level]
        others = (others & self._of_level[level]) - tests
        rounds = []
        for number, seconds in _ROUNDS:
            taken, spent = collections.Counter[str](), 0.0
            rounds.append([])
            for name in sorted(tests, key=self._cost):
                file = name.partition("::")[0]
                if taken[file] < number and spent < seconds:
                    taken[file] += 1
                    spent += self._cost(name)
                    rounds[-1].append(name)
            tests -= set(rounds[-1])
        near = {name for name in tests if _is_near(path, name)}
        rounds += [near, tests - near, others]
        return [sorted(names, key=self._by_file) for names in rounds if names]

    def _cost(self, name):
        return self._seconds.get(name, 0.0)

    def _by_file(self, name):
        return name.partition("::")[0], self._cost(name)


def _is_near(path: str, test: str) -> bool:
    """Whether a test is in a folder, or a file, with the name of the file or of its folder."""
    file = pathlib.PurePath(path)
    parts = pathlib.PurePath(test.partition("::")[0]).with_suffix("").parts
    return bool({file.stem, f"test_{file.stem}", file.parent.name} & set(parts))


def _tests(contexts) -> set[str]:
    """Of contexts such as ``tests/a.py::test_b|call``."""
    return {name.rpartition("|")[0] for name in contexts if name}


def _fingerprint(copy):
    digest = hashlib.sha256()
    for file in sorted([*copy.glob("optzoo/**/*.py"), *copy.glob("tests/**/*.py")]):
        if file.parent.name == "mutants":
            continue
        digest.update(str(file.relative_to(copy)).encode() + file.read_bytes())
    return digest.hexdigest()
