"""The mutants of a file, by the operators of Cosmic Ray and one of our own."""

import ast
import collections
import functools
import hashlib
import pathlib
from typing import NamedTuple

from cosmic_ray import plugins
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Example, Operator

# Cosmic Ray replaces an operator by all others; most of these are errors that any test finds.
_LIKELY = {
    "Add": ("Sub",),
    "Sub": ("Add",),
    "Mul": ("Div", "Add"),
    "Div": ("Mul",),
    "FloorDiv": ("Mul",),
    "Mod": ("FloorDiv",),
    "Pow": ("Mul",),
    "BitOr": ("BitAnd",),
    "BitAnd": ("BitOr",),
    "BitXor": ("BitOr",),
    "LShift": ("RShift",),
    "RShift": ("LShift",),
}
_BINARY = "ReplaceBinaryOperator_"
_GUARD = "strict="  # of zip: it guards the code itself and changes no result
_LEFT_OUT = ("core/ExceptionReplacer",)  # it fails for names with a dot


class DropKeyword(Operator):
    """Leaves a keyword argument of a call out, so that its default applies."""

    def mutation_positions(self, node):
        """The keyword arguments of a call with several arguments."""
        if node.type == "arglist":
            for argument in _keywords(node):
                yield argument.start_pos, argument.end_pos

    def mutate(self, node, index):
        """The arguments without this one, and without the comma behind or before it."""
        at = node.children.index(_keywords(node)[index])
        first = at if at + 1 < len(node.children) else at - 1
        del node.children[first : first + 2]
        return node

    @classmethod
    def examples(cls):
        """As the tests of Cosmic Ray want them."""
        return (Example("f(x, y=1)", "f(x)"),)


def _keywords(arglist):
    named = (c for c in arglist.children if c.type == "argument" and c.children[1] == "=")
    return [c for c in named if c.children[0].value != _GUARD[:-1]]


class Site(NamedTuple):
    """A place in a file, with the operators that can change it: (operator, occurrence)."""

    path: str  # relative to the root
    line: int
    column: int
    name: str  # of the place: the same after changes elsewhere in the file
    choices: tuple[tuple[str, int], ...]


class Mutant(NamedTuple):
    """A change of one place of a file."""

    path: str
    line: int
    before: str  # the line, without indentation
    after: str  # what stands there instead
    code: str  # of the whole file

    @property
    def key(self) -> str:
        """The same after changes elsewhere in the file."""
        return _hash(self.path, self.before, self.after)[:12]


def sites(root: pathlib.Path, path: str) -> list[Site]:
    """All places of a file that an operator can change."""
    code = (root / path).read_text()
    tree, lines = get_ast(code), code.splitlines()
    ignored = _annotations(code)
    places = collections.defaultdict(list)
    for name, operator in _operators().items():
        found = (at for node in ast_nodes(tree) for at in operator.mutation_positions(node))
        for occurrence, (start, _) in enumerate(found):
            if not any(first <= start < last for first, last in ignored):
                places[start].append((name, occurrence))
    seen = collections.Counter()
    result = []
    for (line, column), choices in sorted(places.items()):
        text = lines[line - 1]
        if text[:column].endswith(_GUARD):
            continue
        name = (path, text.strip(), column - len(text) + len(text.lstrip()))
        seen[name] += 1
        result.append(Site(path, line, column, _hash(*name, seen[name]), tuple(choices)))
    return result


def drawn(all_sites: list[Site], number: int, seed: int) -> list[Site]:
    """A sample that changes little when the files do: the first ones in the order of a hash."""
    return sorted(all_sites, key=lambda site: _hash(seed, site.name))[:number]


def mutant(root: pathlib.Path, site: Site) -> Mutant | None:
    """One of the changes of a place, chosen by a hash; None where it is not valid Python."""
    code = (root / site.path).read_text()
    order = sorted(site.choices, key=lambda choice: _hash(site.name, choice[0]))
    for name, occurrence in order:
        changed = mutate_code(code, _operators()[name], occurrence)
        if changed is not None and _compiles(changed):
            return Mutant(site.path, site.line, *_difference(code, changed), changed)
    return None


def statement(code: str, line: int) -> range:
    """The lines of the innermost statement around a line, without the body of that statement."""
    best = range(line, line + 1)
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.stmt) and node.lineno <= line <= node.end_lineno:
            body = getattr(node, "body", None)
            last = body[0].lineno - 1 if body else node.end_lineno
            if line <= max(last, node.lineno):
                best = range(node.lineno, max(last, node.lineno) + 1)
    return best


@functools.cache
def _operators():
    chosen: dict[str, Operator] = {"DropKeyword": DropKeyword()}
    for name in plugins.operator_names():
        kind = plugins.get_operator(name)
        if kind.arguments() or name in _LEFT_OUT:
            continue
        if _BINARY in name:
            before, after = name.rpartition(_BINARY)[2].split("_")
            if after not in _LIKELY.get(before, ()):
                continue
        chosen[name] = kind()
    return chosen


def _annotations(code):
    """Where types stand, which nothing evaluates that matters."""
    places = []
    for node in ast.walk(ast.parse(code)):
        for kind in ("annotation", "returns"):
            found = getattr(node, kind, None)
            if found is not None:
                places.append(
                    ((found.lineno, found.col_offset), (found.end_lineno, found.end_col_offset))
                )
    return places


def _difference(code, changed):
    old, new = code.splitlines(), changed.splitlines()
    same = 0
    while same < min(len(old), len(new)) and old[same] == new[same]:
        same += 1
    end = 0
    while end < min(len(old), len(new)) - same and old[-1 - end] == new[-1 - end]:
        end += 1
    part = lambda lines: " ".join(line.strip() for line in lines[same : len(lines) - end])
    return part(old), part(new)


def _compiles(code):
    try:
        compile(code, "mutant", "exec")
    except SyntaxError:
        return False
    return True


def _hash(*parts):
    return hashlib.sha256(repr(parts).encode()).hexdigest()
