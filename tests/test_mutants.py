"""Which changes of the code `make mutants` makes, and which it draws."""

import collections
import pathlib
import tomllib

import pytest

from .mutants.sites import drawn, mutant, sites, statement

FUNCTION = """
def f(xs, a, b=1, *, c: int = 2):
    return a
"""


@pytest.fixture
def changes(tmp_path):
    """The changes of a code, with their kind: what stands in the place of the lines that differ."""
    (tmp_path / "optzoo").mkdir()

    def changes(code):
        (tmp_path / "optzoo/a.py").write_text(FUNCTION + code + "\n")
        found = collections.defaultdict(set)
        for site in sites(tmp_path, "optzoo/a.py"):
            if site.line > FUNCTION.count("\n"):
                for choice in site.choices:
                    change = mutant(tmp_path, site._replace(choices=(choice,)))
                    if change is not None:
                        found[site.kind].add(change.after)
        return dict(found)

    return changes


@pytest.mark.parametrize(
    ("code", "kind", "expected"),
    [
        ("x = -y", "operator", {"x = y"}),
        ("x = y * z", "operator", {"x = y / z", "x = y + z"}),
        ("x -= y", "operator", {"x += y"}),
        ("x = (y) - (z)", "operator", {"x = (y) + (z)"}),
        ("x = y < z", "comparison", {"x = y <= z", "x = y >= z"}),
        ("x = y >= z > 0", "comparison", {"x = y > z > 0", "x = y < z > 0"}
            | {"x = y >= z >= 0", "x = y >= z <= 0"}),
        ("x = y == z", "comparison", {"x = y != z", "x = y <= z", "x = y >= z"}),
        ("x = y == 'z'", "comparison", {"x = y != 'z'"}),
        ("x = y is not z", "comparison", {"x = y is z"}),
        ("x = y and not z", "condition", {"x = y or not z", "x = y and z"}),
        ("x = y if z else w", "condition", {"x = y if not (z) else w"}),
        ("x = jnp.all(y)", "condition", {"x = jnp.any(y)"}),
        ("x = [y for y in z if y]", "condition", {"x = [y for y in z if True]"}),
        ("x = True", "constant", {"x = False"}),
        ("x = 1", "constant", {"x = 0", "x = 2"}),
        ("x = 0", "constant", {"x = (-1)", "x = 1"}),
        ("x = 1e-8", "constant", {"x = 1e-07", "x = 1e-09"}),
        ("g(x, y=1, z=2)", "argument", {"g(x, z=2)", "g(x, y=1)"}),
        ("g(y=(1),)", "argument", {"g()"}),
        ("f(xs=1, a=2, b=3, c=4)", "argument", {"f(xs=1, a=2, c=4)", "f(xs=1, a=2, b=3)"}),
        ("x = y.astype(z.dtype) + upcast(w)", "dtype",
            {"x = y + upcast(w)", "x = y.astype(z.dtype) + w"}),
        ("x = zeros(3, dtype=z) + ones(4, z.dtype)", "dtype",
            {"x = zeros(3) + ones(4, z.dtype)", "x = zeros(3, dtype=z) + ones(4)"}),
        ("for x in y: x()", "loop", {"for x in [*(y)][1:]: x()",
            "for x in (lambda each: each[-1:] * len(each))([*(y)]): x()"}),
        ("x = [lambda z=z: z for z in iter(w)]", "loop", {"x = [lambda z: z for z in iter(w)]"}),
        ("g(x)", "statement", {"pass"}),
        ("@g\n@h\nclass A: pass", "statement", {""}),
        ("def g(x, y): return h(x, y)", "swap", {"def g(x, y): return h(y, x)"}),
        ("def g(x, y): return h(x=x - y)", "swap", {"def g(x, y): return h(x=y - x)"}),
    ],
)  # fmt: skip
def test_kinds_of_faults(changes, code, kind, expected):
    assert changes(code)[kind] == expected


def test_a_line_behind_its_loop(changes):
    code = "for x in y:\n    a = x\n    g(\n        a\n    )"
    assert "g( a )" in changes(code)["loop"]


@pytest.mark.parametrize(
    ("code", "kinds"),
    [
        ('"""x + 1"""', ()),
        ('x = f"{y + 1} {z:3}"', ()),
        ("def g(x: 1 | 2) -> 1 | 2: return x", ()),
        ("x = zip(y, z, strict=True)", ()),
        ("def g(x, y): return x + y", ("operator",)),  # the same in another order
        ("def g(x, y): return x(y.z)", ()),  # a function and an object
        ("def g(x): return [y for y in x]", ("loop",)),
    ],
)
def test_what_is_no_fault_stays(changes, code, kinds):
    assert changes(code).keys() == {*kinds}


def test_each_kind_is_drawn_as_often(tmp_path):
    (tmp_path / "optzoo").mkdir()
    lines = [f"x{n} = {n} + g(x, y={n})" for n in range(20)]
    (tmp_path / "optzoo/a.py").write_text("\n".join([*lines, "x = zeros(3, dtype=z)"]))
    found = sites(tmp_path, "optzoo/a.py")
    number = collections.Counter(site.kind for site in drawn(found, 31, seed=1))
    assert number == {"argument": 10, "constant": 10, "operator": 10, "dtype": 1}
    assert drawn(found, 10, seed=1) == drawn(found, 31, seed=1)[:10]
    assert drawn(found, 10, seed=1) != drawn(found, 10, seed=2)


def test_the_lines_of_a_statement():
    code = "if a:\n    x = g(\n        y,\n    )\n    z = 1\n"
    assert [statement(code, line) for line in (1, 3, 5)] == [range(1, 2), range(2, 5), range(5, 6)]


def test_each_explained_change_is_listed_once():
    text = pathlib.Path(__file__).with_name("mutants").joinpath("explained.toml").read_text()
    keys = [entry["key"] for entry in tomllib.loads(text)["mutant"]]
    assert sorted({*keys}) == sorted(keys)
