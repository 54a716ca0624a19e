"""The mutants of a file: places that can be changed, by kind of fault, and the changed code."""

import ast
import bisect
import collections
import functools
import hashlib
import itertools
import pathlib
import re
import threading
from typing import NamedTuple

# Another operator would be an error that any test finds.
_OPERATORS = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/", "+"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
    ast.Pow: ("**", "*"),
    ast.BitOr: ("|", "&"),
    ast.BitAnd: ("&", "|"),
    ast.BitXor: ("^", "|"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
}
_COMPARISONS = {
    ast.Lt: ("<", "<=", ">="),
    ast.LtE: ("<=", "<", ">"),
    ast.Gt: (">", ">=", "<="),
    ast.GtE: (">=", ">", "<"),
    ast.Eq: ("==", "!=", "<=", ">="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
_COMMUTATIVE = (ast.Add, ast.Mult, ast.BitOr, ast.BitAnd, ast.BitXor)
_OPPOSITES = {"all": "any", "any": "all", "min": "max", "max": "min"}
_OPPOSITES |= {"minimum": "maximum", "maximum": "minimum"}
_GUARDS = ("strict", "inline", "stacklevel")  # they change no result
_WITH_DTYPE = ("zeros", "ones", "full", "empty", "array", "asarray", "arange")
_ENDLESS = ("count", "cycle", "repeat", "iter")
_LAST = b"(lambda each: each[-1:] * len(each))"  # the last one in place of each

Edit = tuple[int, int, bytes]  # the bytes from here to there are replaced


class Site(NamedTuple):
    """A place in a file with one kind of fault, and its changes."""

    path: str  # relative to the root
    line: int
    kind: str
    name: str  # of the place: the same after changes elsewhere in the file
    choices: tuple[tuple[Edit, ...], ...]


class Mutant(NamedTuple):
    """A change of one place of a file."""

    path: str
    line: int
    kind: str
    before: str  # the line, without indentation
    after: str  # what stands there instead
    code: str  # of the whole file

    @property
    def key(self) -> str:
        """A key that does not depend on changes elsewhere in the file."""
        return _hash(self.path, self.before, self.after)[:12]


def sites(root: pathlib.Path, path: str) -> list[Site]:
    """All places of a file that can be changed, one for each kind of fault."""
    source = _Source((root / path).read_bytes())
    choices = collections.defaultdict(list)
    for kind, edits in _changes(source, _required(root)):
        choices[min(edits)[0], kind].append(edits)
    seen = collections.Counter()
    result = []
    for (at, kind), found in sorted(choices.items()):
        line, column, text = source.place(at)
        name = (path, text, column, kind)
        seen[name] += 1
        result.append(Site(path, line, kind, _hash(*name, seen[name]), tuple(found)))
    return result


def drawn(all_sites: list[Site], number: int, seed: int) -> list[Site]:
    """A sample with equal numbers of places of each kind, if available, ordered by a hash.

    Small changes of the files change it little.
    """
    by_kind = collections.defaultdict(list)
    for site in sorted(all_sites, key=lambda site: _hash(seed, site.name)):
        by_kind[site.kind].append(site)
    in_turn = itertools.chain(*itertools.zip_longest(*(by_kind[kind] for kind in sorted(by_kind))))
    return list(itertools.islice(filter(None, in_turn), number))


def mutant(root: pathlib.Path, site: Site) -> Mutant | None:
    """One of the changes of a place, chosen by a hash; None if none is valid Python."""
    code = (root / site.path).read_bytes()
    for edits in sorted(site.choices, key=lambda edits: _hash(site.name, edits[0][2])):
        changed = code
        for start, end, new in sorted(edits, reverse=True):
            changed = changed[:start] + new + changed[end:]
        if _compiles(changed):
            before, after = _difference(code.decode(), changed.decode())
            return Mutant(site.path, site.line, site.kind, before, after, changed.decode())
    return None


_PARSER = threading.Lock()  # in several threads that of Python 3.11 may raise a SystemError


def statement(code: str, line: int) -> range:
    """The lines of the innermost statement around a line, without the body of the statement."""
    best = range(line, line + 1)
    with _PARSER:
        tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and node.lineno <= line <= node.end_lineno:
            body = getattr(node, "body", None)
            last = body[0].lineno - 1 if body else node.end_lineno
            if line <= max(last, node.lineno):
                best = range(node.lineno, max(last, node.lineno) + 1)
    return best


class _Source:
    """A file, and the positions of its nodes, in bytes."""

    def __init__(self, code: bytes):
        self.code, self.tree = code, ast.parse(code)
        self._lines = [0, *(found.end() for found in re.finditer(rb"\n", code))]

    def start(self, node) -> int:
        return self._lines[node.lineno - 1] + node.col_offset

    def end(self, node) -> int:
        return self._lines[node.end_lineno - 1] + node.end_col_offset

    def text(self, node) -> bytes:
        return self.code[self.start(node) : self.end(node)]

    def place(self, at: int) -> tuple[int, int, str]:
        """The line number, the column without indentation, and the stripped line."""
        line = bisect.bisect_right(self._lines, at)
        text = self.code[self._lines[line - 1] :].partition(b"\n")[0]
        indented = len(text) - len(text.lstrip())
        return line, at - self._lines[line - 1] - indented, text.decode().strip()

    def replaced(self, node, new: bytes) -> tuple[Edit, ...]:
        return ((self.start(node), self.end(node), new),)

    def between(self, left, right, old: str, new: str) -> tuple[Edit, ...]:
        """Another operator between two operands."""
        gap = self.code[self.end(left) : self.start(right)]
        found = re.search(old.replace(" ", r"\s+").encode(), gap)
        at = self.end(left)
        return ((at + found.start(), at + found.end(), new.encode()),)

    def without(self, call: ast.Call, argument) -> tuple[Edit, ...]:
        """A call without an argument and its comma."""
        arguments = sorted([*call.args, *call.keywords], key=self.start)
        at = arguments.index(argument)
        if at + 1 < len(arguments):
            return ((self.start(argument), self.start(arguments[at + 1]), b""),)
        start = self.end(arguments[at - 1]) if at else self.start(argument)
        return ((start, self.end(call) - 1, b""),)


def _changes(source: _Source, required: dict[str, set[str]]):
    """All changes, with their kinds."""
    for node in _nodes(source.tree):
        yield from _of_values(source, node)
        yield from _of_statements(source, node)
        if isinstance(node, ast.Call):
            yield from _of_calls(source, node, required)
    for a, b in _pairs(source.tree):
        yield "swap", source.replaced(a, b.id.encode()) + source.replaced(b, a.id.encode())


def _children(node):
    """The children of a node except types, f-strings (whose parts have no positions) and guards."""
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            guard = isinstance(child, ast.keyword) and child.arg in _GUARDS
            if (
                isinstance(child, ast.AST)
                and name not in ("annotation", "returns")
                and not isinstance(child, ast.JoinedStr)
                and not guard
            ):
                yield child


def _nodes(node):
    yield node
    for child in _children(node):
        yield from _nodes(child)


def _of_values(source, node):
    match node:
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            old, *others = _OPERATORS[type(op)]
            for new in others:
                yield "operator", source.between(left, right, re.escape(old), new)
        case ast.AugAssign(target=left, op=op, value=right) if type(op) in _OPERATORS:
            old, *others = _OPERATORS[type(op)]
            for new in others:
                yield "operator", source.between(left, right, re.escape(old) + "=", new + "=")
        case ast.UnaryOp(op=ast.USub() | ast.Not() as op, operand=operand):
            kind = "operator" if isinstance(op, ast.USub) else "condition"
            yield kind, ((source.start(node), source.start(operand), b""),)
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            for a, op, b in zip([left, *comparators], ops, comparators, strict=False):
                old, *others = _COMPARISONS[type(op)]
                for new in others[:1] if isinstance(_value(b), str) else others:
                    yield "comparison", source.between(a, b, old, new)
        case ast.BoolOp(op=op, values=values):
            old, new = ("and", "or") if isinstance(op, ast.And) else ("or", "and")
            for a, b in itertools.pairwise(values):
                yield "condition", source.between(a, b, old, new)
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            yield "condition", source.replaced(test, b"not (" + source.text(test) + b")")
        case ast.comprehension(ifs=ifs):
            for test in ifs:
                yield "condition", source.replaced(test, b"True")
        case ast.Constant(value=bool(value)):
            yield "constant", source.replaced(node, str(not value).encode())
        case ast.Constant(value=int(value)):
            yield "constant", source.replaced(node, str(value + 1).encode())
            yield "constant", source.replaced(node, (str(value - 1) if value else "(-1)").encode())
        case ast.Constant(value=float(value)):
            for new in (10 * value, value / 10) if value else (1.0,):
                yield "constant", source.replaced(node, repr(new).encode())


def _of_calls(source, call, required):
    name = _name(call.func)
    if name in _OPPOSITES:
        end = source.end(call.func)
        yield "condition", ((end - len(name), end, _OPPOSITES[name].encode()),)
    if name == "astype" and isinstance(call.func, ast.Attribute):
        yield "dtype", ((source.end(call.func.value), source.end(call), b""),)
    if name == "upcast" and len(call.args) == 1:
        yield "dtype", source.replaced(call, source.text(call.args[0]))
    if name in _WITH_DTYPE and len(call.args) > 1 and "dtype" in _name(call.args[-1]):
        yield "dtype", source.without(call, call.args[-1])
    for argument in call.keywords:
        if argument.arg and argument.arg not in {*_GUARDS, *required.get(name, ())}:
            kind = "dtype" if "dtype" in argument.arg else "argument"
            yield kind, source.without(call, argument)


def _of_statements(source, node):
    match node:
        case ast.For(iter=values) | ast.comprehension(iter=values):
            if not (isinstance(values, ast.Call) and _name(values.func) in _ENDLESS):
                each = b"[*(" + source.text(values) + b")]"
                yield "loop", source.replaced(values, each + b"[1:]")
                yield "loop", source.replaced(values, _LAST + b"(" + each + b")")
            if isinstance(node, ast.For) and len(node.body) > 1:  # the last line behind the loop
                start, end = source.start(node.body[-1]) - 4, source.end(node.body[-1])
                part = source.code[start:end]
                if part.startswith(b"    "):
                    yield "loop", ((start, end, part[4:].replace(b"\n    ", b"\n")),)
        case ast.Lambda(args=ast.arguments(args=arguments, defaults=defaults)):
            for argument, value in zip(reversed(arguments), reversed(defaults), strict=False):
                if _name(value) == argument.arg:  # the last one in place of the one of this round
                    yield "loop", ((source.end(argument), source.end(value), b""),)
        case ast.Break():
            yield "loop", source.replaced(node, b"continue")
        case ast.Continue():
            yield "loop", source.replaced(node, b"break")
        case ast.Expr(value=ast.Call()) | ast.Raise():
            yield "statement", source.replaced(node, b"pass")
        case ast.FunctionDef(decorator_list=decorators) | ast.ClassDef(decorator_list=decorators):
            starts = [source.start(decorator) - 1 for decorator in decorators]
            for start, end in itertools.pairwise([*starts, source.start(node)]):
                yield "statement", ((start, end, b""),)


def _pairs(tree):
    """Two consecutive variables of a function in a statement."""
    for function in _outermost(tree):
        nodes = list(ast.walk(function))
        bound = {node.arg for node in nodes if isinstance(node, ast.arg)}
        bound |= {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        in_any_order = {pair for node in nodes for pair in _commuting(node)}
        groups = collections.defaultdict(list)
        for use, name in _reads(function, function):
            if name.id in bound:
                groups[use].append(name)
        for names in groups.values():
            for a, b in itertools.pairwise(names):
                if a.id != b.id and (a, b) not in in_any_order:
                    yield a, b


def _outermost(node):
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef):
            yield child
        else:
            yield from _outermost(child)


def _reads(node, owner):
    """The names that a statement, a lambda or a comprehension reads, with it and the usage."""
    if isinstance(node, ast.stmt | ast.Lambda | ast.comprehension) or hasattr(node, "generators"):
        owner = node
    for child in _children(node):
        if not isinstance(child, ast.Name):
            yield from _reads(child, owner)
        elif isinstance(child.ctx, ast.Load) and child is not getattr(node, "func", None):
            how = type(node) if isinstance(node, ast.Attribute | ast.Starred) else None
            yield (owner, how), child


def _commuting(node):
    match node:
        case ast.BinOp(left=a, op=op, right=b) if isinstance(op, _COMMUTATIVE):
            yield a, b
        case ast.Compare(left=a, ops=[ast.Eq() | ast.NotEq()], comparators=[b]):
            yield a, b
        case ast.Call(func=f, args=[a, b]) if _name(f) in _OPPOSITES:
            yield a, b


def _value(node):
    return node.value if isinstance(node, ast.Constant) else None


def _name(node) -> str:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


@functools.cache
def _required(root: pathlib.Path) -> dict[str, set[str]]:
    """The arguments without a default, by the names of functions and named tuples."""
    found: dict[str, set[str]] = {}
    for file in (root / "optzoo").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_bytes())):
            match node:
                case ast.FunctionDef(name=name, args=a):
                    by_place = [*a.posonlyargs, *a.args]
                    needed = by_place[: len(by_place) - len(a.defaults)] + [
                        argument
                        for argument, default in zip(a.kwonlyargs, a.kw_defaults, strict=True)
                        if default is None
                    ]
                    names = {argument.arg for argument in needed}
                case ast.ClassDef(name=name, body=body):
                    fields = [x for x in body if isinstance(x, ast.AnnAssign)]
                    names = {_name(field.target) for field in fields if field.value is None}
                case _:
                    continue
            found[name] = found.get(name, names) & names
    return found


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
