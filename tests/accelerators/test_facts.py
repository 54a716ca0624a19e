"""The programs of all optimizers, wrappers and methods are those of the record.

A program that is the recorded one, before it is compiled, has the recorded facts: it is compiled
only if it belongs to the sample, which tests the record itself.
"""

import itertools

import pytest

from .facts import cases, promises, record

FACTS, PROGRAMS = record.read(record.FACTS), record.read(record.PROGRAMS)
# With other compilers the numbers are others. Then the sample alone is compiled.
IS_COMPARABLE = FACTS["versions"] == record.versions()
SAMPLE = cases.sample()
TESTED = cases.CASES if IS_COMPARABLE else SAMPLE
MOST = 100  # changed programs that are compiled here; recording compiles any number


@pytest.fixture(scope="module")
def numbers():
    """Of the changed programs, from 1 on."""
    return itertools.count(1)


@pytest.mark.parametrize("key", TESTED)
def test_facts(key, numbers):
    assert key in FACTS, f"{key} is not recorded: {record.COMMAND}"
    case = cases.CASES[key]
    if IS_COMPARABLE and PROGRAMS[key] == record.program_of(case.name, case.target):
        if key not in SAMPLE:
            return
    elif IS_COMPARABLE and next(numbers) > MOST:
        pytest.fail(f"more than {MOST} programs have changed: {record.COMMAND} compiles them all")
    _, _, now = record.anew(key, None)
    found = promises.broken(key, now)
    found += record.differences(FACTS[key], now) if IS_COMPARABLE else []
    assert not found, f"{key}: {'; '.join(found)}. To record it anew: {record.COMMAND}"


def test_the_record_keeps_the_promises():
    found = {key: promises.broken(key, FACTS[key]) for key in cases.CASES if key in FACTS}
    assert not {key: lines for key, lines in found.items() if lines}


V5E = "v5e:2x2"
NARROW = [width for width in cases.WIDTHS if width < 128]
of = lambda case, name: FACTS[f"{case}/{V5E}"][name]


@pytest.mark.parametrize("name", cases.FEW_ROWS)
def test_rows_of_each_width_cost_what_rows_cost(name):
    """In cycles, which the compiler estimates; with a dense gradient they are 40 times as many."""
    most = 4 * of(f"rows/{name}/128", "cycles")
    assert all(of(f"rows/{name}/{width}", "cycles") <= most for width in cases.WIDTHS)


@pytest.mark.parametrize("name", cases.FEW_ROWS)
def test_lines_are_not_padded(name):
    widths = NARROW if name in cases.SOME else [16]
    for width in widths:
        rows, lines = (of(f"{kind}/{name}/{width}", "arguments") for kind in ("rows", "lines"))
        elements = rows * width / 128  # the others are padding
        assert lines <= 1.15 * elements + 20 * cases.ROWS  # with numbers for each row
        dense = of(f"rows/{cases.ADAM}/{width}", "cycles")
        assert of(f"lines/{name}/{width}", "cycles") <= dense / 4


def test_the_record_has_no_other_cases():
    assert {*FACTS} - {"versions"} == {*PROGRAMS} <= {*cases.CASES}


def test_cases_of_one_target_have_one_program():
    """Otherwise some would be compiled each time, although they have not changed."""
    found = dict[tuple[str, str], set[str]]()
    for key, case in cases.CASES.items():
        found.setdefault((case.name, case.target), set()).add(PROGRAMS[key])
    assert not {name: programs for name, programs in found.items() if len(programs) > 1}


def test_the_sample_has_each_optimizer_width_and_device():
    parts = {part for key in SAMPLE for part in key.split("/")}
    assert parts >= {*cases.OPTIMIZERS, *map(str, cases.WIDTHS), *cases.ONE, *cases.FOUR}
