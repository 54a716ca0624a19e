"""Which tests are quick, what a test costs, and what a run says while it goes on."""

import json
import os
import re
import types

import pytest

from . import conftest, costs, progress, selection

pytest_plugins = ["pytester"]


@pytest.fixture(autouse=True)
def few_plugins(pytester, monkeypatch):
    """Of the runs inside of tests. What collects garbage takes half a second."""
    names = ("cacheprovider", "unraisableexception", "xdist")
    monkeypatch.setenv("PYTEST_ADDOPTS", " ".join(f"-p no:{name}" for name in names))


@pytest.fixture
def quick(pytester, monkeypatch):
    """The cases of a test that are quick, where a case takes so many seconds."""

    def quick(code, seconds):
        items = pytester.getitems(f"import pytest\n{code}")
        recorded = {"cases": {costs.function_of(items[0].nodeid): seconds}}
        monkeypatch.setattr(costs, "_recorded", lambda: recorded)
        monkeypatch.setattr(selection, "LIMITS", {"full": (0.3, 1.8)})
        selection.select(items)
        return [x.name for x in items if not x.get_closest_marker("full")]

    return quick


FIVE = """
@pytest.mark.parametrize("n", range(5))
def test_a(n):
    pass
"""


@pytest.mark.parametrize(
    ("seconds", "number"), [(0.01, 5), (0.09, 3), (0.15, 2), (0.2, 1), (1.8, 1), (1.9, 0)]
)
def test_so_many_cases_as_the_budget_pays(quick, seconds, number):
    assert quick(FIVE, seconds) == [f"test_a[{n}]" for n in range(number)]


def test_what_is_not_quick_runs_in_ci_or_at_night(pytester, monkeypatch):
    items = pytester.getitems(f"import pytest\n{FIVE}\n@pytest.mark.full\ndef test_b():\n    pass")
    recorded = {"cases": {costs.function_of(items[0].nodeid): 0.09}}
    monkeypatch.setattr(costs, "_recorded", lambda: recorded)
    monkeypatch.setattr(selection, "LIMITS", {"full": (0.1, 0.3), "nightly": (0.3, 0.5)})
    selection.select(items)
    marks = [{mark.name for mark in item.iter_markers()} & {"full", "nightly"} for item in items]
    assert marks == [set(), {"full"}, {"full"}, *[{"full", "nightly"}] * 3]


def test_cases_with_new_values_come_first(quick):
    code = """
@pytest.mark.parametrize("b", ["x", "y"])
@pytest.mark.parametrize("a", [1, 2])
def test_a(a, b):
    pass
"""
    assert quick(code, 0.09) == ["test_a[1-x]", "test_a[1-y]", "test_a[2-x]"]


@pytest.mark.parametrize(
    ("mark", "seconds", "number"), [("every_value", 1.0, 5), ("unique", 9.0, 1), ("full", 0.01, 0)]
)
def test_marks(quick, mark, seconds, number):
    assert len(quick(f"@pytest.mark.{mark}{FIVE}", seconds)) == number


def test_with_every_value_a_combination_of_values_is_left_out(quick):
    code = """
@pytest.mark.every_value
@pytest.mark.parametrize("b", ["x", "y"])
@pytest.mark.parametrize("a", [1, 2])
def test_a(a, b):
    pass
"""
    assert quick(code, 9.0) == ["test_a[1-x]", "test_a[1-y]", "test_a[2-x]"]


def test_values_may_be_objects(quick):
    code = """
@pytest.mark.every_value
@pytest.mark.parametrize("b", [["x"], ["y"]])
@pytest.mark.parametrize("a", [{1}, {2}])
def test_a(a, b):
    pass
"""
    assert quick(code, 9.0) == ["test_a[a0-b0]", "test_a[a0-b1]", "test_a[a1-b0]"]


def test_what_does_not_apply_is_taken_out(pytester, monkeypatch):
    exempt = {"adam": {"test_a[x]": "a reason"}, "ftrl": {"test_a": "a reason"}}
    monkeypatch.setattr(selection, "EXEMPT", exempt)
    items = pytester.getitems("""
import pytest

@pytest.mark.parametrize("b", ["x", "y"])
@pytest.mark.parametrize("entry", ["adam", "ftrl", "lars"])
def test_a(entry, b):
    pass
""")
    out = selection.select(items)
    assert {x.name for x in out} == {"test_a[adam-x]", "test_a[ftrl-x]", "test_a[ftrl-y]"}
    assert {x.name for x in items} == {"test_a[adam-y]", "test_a[lars-x]", "test_a[lars-y]"}


def test_chosen_cases_come_first_and_exist():
    assert selection.chosen_first("abcd", {"c", "b"}) == ["b", "c", "a", "d"]
    with pytest.raises(ValueError, match="do not exist: \\['e'\\]"):
        selection.chosen_first("abcd", {"e"})


TWO_PROGRAMS = """
import jax
import pytest

@pytest.mark.parametrize("n", [2, 3])
def test_compiles(n):
    for i in range(n):
        jax.jit(lambda x: x * n + i).lower(1.0).compile()

def test_fails():
    assert 1 == 2
"""


def test_all_tests_are_recorded(pytester, monkeypatch):
    monkeypatch.setattr(costs, "RECORD", pytester.path / "costs.json")
    file = pytester.makepyfile(TWO_PROGRAMS).name
    result = pytester.inline_run("--record-costs", plugins=[costs])
    result.assertoutcome(passed=2, failed=1)
    cases = json.loads((pytester.path / "costs.json").read_text())["cases"]
    assert cases.keys() == {f"{file}::test_compiles", f"{file}::test_fails"}


def test_the_mean_of_all_cases_is_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(costs, "RECORD", tmp_path / "costs.json")
    costs._record({f"a.py::test_b[{n}]": costs.Cost(seconds=n) for n in (1.0, 4.0)})
    costs._recorded.cache_clear()
    monkeypatch.setattr(costs, "_small_program", lambda: 2 * costs._recorded()["small program"])
    costs._record({"a.py::test_c": costs.Cost(seconds=4.0)}, is_part=True)  # at half the speed
    costs._recorded.cache_clear()
    try:
        assert costs.expected("a.py::test_b[9]") == 2.5
        assert costs.expected("a.py::test_c") == 2.0
        assert costs.expected("a.py::test_new") == costs._UNKNOWN
    finally:
        costs._recorded.cache_clear()


def test_programs_are_listed_by_file(pytester, capsys):
    pytester.makepyfile(TWO_PROGRAMS)
    pytester.inline_run(plugins=[costs])
    [line] = re.findall(r" +(\S+) +(\d+) +(\d+)  test_programs", capsys.readouterr().out)
    assert line[1] == "5"


def test_cases_of_a_function_and_classes_for_each_optimizer_are_one():
    assert costs.function_of("tests/a.py::test_b[x-y]") == "tests/a.py::test_b"
    of = {costs.function_of(f"tests/a.py::UpdatesTest_{name}::test_b0") for name in ("adam", "sgd")}
    assert of == {"tests/a.py::UpdatesTest::test_b0"}


def test_programs_that_were_read_longest_ago_are_removed(tmp_path, monkeypatch):
    """Another run may have removed some that were there: the last of these leads nowhere."""
    for time, name in enumerate(("old", "new", "newest")):
        (file := tmp_path / f"{name}-cache").write_bytes(bytes(10))
        os.utime(file, (time, time))
    (tmp_path / "gone-cache").symlink_to(tmp_path / "nowhere")
    monkeypatch.setattr(conftest, "PROGRAMS", tmp_path)
    monkeypatch.setattr(conftest, "LIMIT", 20)
    conftest.pytest_sessionstart(types.SimpleNamespace(config=None))  # of no worker
    assert {file.name for file in tmp_path.glob("new*")} == {"new-cache", "newest-cache"}
    assert not (tmp_path / "old-cache").exists()


def test_progress(pytester, monkeypatch, capsys):
    monkeypatch.setattr(progress, "_LAST", pytester.path / "last.json")
    monkeypatch.setattr(progress, "_EVERY", 0.0)
    monkeypatch.setattr(costs, "expected", lambda name: 40.0)
    monkeypatch.setattr(costs, "speed", lambda: 2.0)
    (pytester.path / "last.json").write_text("0.5")
    pytester.makepyfile(TWO_PROGRAMS)

    class Plugin:
        pytest_configure = staticmethod(conftest.pytest_configure)

    pytester.inline_run("-q", plugins=[Plugin()])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "3 tests on one worker, about 0:30"  # 120 s by 2, and half of that
    shown = [line for line in lines if re.match(r"\d of 3 tests, 0:\d\d; about 0:\d\d left", line)]
    assert [line[0] for line in shown] == ["1", "2", "3"]
    assert shown[-1].endswith("about 0:00 left")
    at = lines.index("FAILED test_progress.py::test_fails")
    assert lines.index(shown[1]) < at < lines.index(shown[2])  # at once
    last = (pytester.path / "last.json").read_text()
    assert json.loads(last) != 0.5
    monkeypatch.setattr(costs, "expected", lambda name: 19.0)  # too few seconds to tell
    pytester.inline_run("-q", plugins=[Plugin()])
    assert (pytester.path / "last.json").read_text() == last
