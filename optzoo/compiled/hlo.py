"""Parses the text of a compiled XLA program: operations, loops, aliases and source lines."""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

COLLECTIVES = (
    "all-reduce", "all-gather", "all-to-all", "ragged-all-to-all", "reduce-scatter",
    "collective-permute", "collective-broadcast",
)  # fmt: skip
_BITS = {"pred": 8, "token": 0, "opaque": 0}
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\]")
_LAYOUT = re.compile(r"\{[^{}]*\}|/\*.*?\*/")
_OPERATION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = ")
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
_CALLED = re.compile(r"(\w+)=(?:%([\w.\-]+)|\{(%[^{}]*)\})")
_BODIES = ("calls", "to_apply", "body", "condition", "branch_computations", "called_computations")
_BODIES += ("true_computation", "false_computation")
# Their results are in the memory of an operand, or are computed by other operations.
_IN_PLACE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "opt-barrier", "domain"),
    *("while", "conditional", "call", "after-all", "add-dependency"),
    *("scatter", "dynamic-update-slice"),
}
_IN_VMEM = "S(1)}"  # the end of a layout
# The names of fusions that begin and end a collective on TPUs.
_START, _DONE = "async-collective-start", "async-collective-done"
NO_ESTIMATE = 2**62  # at least this number of cycles, without an estimate of the compiler
_SAME = ("get-tuple-element", "bitcast", "copy-done", "opt-barrier")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """An operation of a compiled program."""

    name: str
    opcode: str
    sizes: tuple[int, ...]  # bytes of each array of the result, also where it is only begun
    dtypes: tuple[str, ...]  # of these arrays, such as ``bf16``
    operands: tuple[str, ...]  # names
    attributes: str
    is_root: bool
    moves: str = ""  # of a copy that is begun: "to VMEM" or "from VMEM", the fast memory of a TPU

    @functools.cached_property
    def bodies(self) -> Mapping[str, tuple[str, ...]]:
        """The computations that the operation calls, by the name of the attribute."""
        found = {key: (one or many) for key, one, many in _CALLED.findall(self.attributes)}
        names = lambda text: tuple(name.strip(" %") for name in text.split(","))
        return {key: names(text) for key, text in found.items() if key in _BODIES}

    def attribute(self, pattern: str) -> str | None:
        """The group that a pattern matches in the attributes."""
        found = re.search(pattern, self.attributes)
        return found and found[1]


class Place(NamedTuple):
    """An operation, and whether a loop runs it."""

    operation: Instruction
    in_loop: bool


class Program:
    """A compiled program.

    Attributes:
        aliases: from the number of a result to the number of the parameter whose memory it reuses.
    """

    def __init__(self, text: str):
        lines = text.splitlines()
        self._computations: dict[str, dict[str, Instruction]] = {}
        self._entry, inside = "", dict[str, Instruction]()
        for line in lines:
            if head := _COMPUTATION.match(line):
                inside = self._computations[head[2]] = {}
                self._entry = head[2] if head[1] else self._entry
            elif operation := _operation(line):
                inside[operation.name] = operation
        for inside in self._computations.values():
            inside.update({name: self._with_result(op) for name, op in inside.items()})
        self._inside = {name: ops for ops in self._computations.values() for name in ops}
        self.aliases = _aliases(lines[0])
        self._lines = _Lines(lines)

    def _with_result(self, operation: Instruction) -> Instruction:
        """The start of a collective on another core, such as a SparseCore, with its result."""
        is_begun = operation.opcode == "custom-call-start"
        if not is_begun or not any(part.opcode in COLLECTIVES for part in self.parts(operation)):
            return operation
        body, *_ = itertools.chain(*operation.bodies.values())
        made = _results(self._computations[body])
        sizes, dtypes = zip(*((op.sizes, op.dtypes) for op in made), strict=True)
        return dataclasses.replace(operation, sizes=sum(sizes, ()), dtypes=sum(dtypes, ()))

    @functools.cached_property
    def parameters(self) -> list[Instruction]:
        """The arguments, in order."""
        found = [operation for operation in self.outermost if operation.opcode == "parameter"]
        return sorted(found, key=lambda operation: int(operation.operands[0]))

    @property
    def outermost(self) -> list[Instruction]:
        """The operations outside loops, branches and calls, in the order of the schedule."""
        return list(self._computations[self._entry].values())

    def name_in_jax(self, operation: Instruction) -> str:
        """The name in JAX, such as ``jit(step)/mul``, or ``params['w']`` for a parameter.

        If XLA has inserted the operation, it is the name of the first operand that has a name.
        """
        inside, now = self._inside[operation.name], operation
        while now is not None:
            if name := now.attribute(r'op_name="((?:\\.|[^"])*)"'):
                return name.replace("\\", "")
            now = inside.get(next(iter(now.operands), ""))
        return ""

    def operations(self) -> Iterator[Place]:
        """The executed operations, also of loops, branches and calls, without parts of fusions."""
        yield from self._operations(self._entry, False)

    def _operations(self, name: str, in_loop: bool) -> Iterator[Place]:
        for operation in self._computations[name].values():
            yield Place(operation, in_loop)
            if operation.opcode in ("while", "conditional", "call"):
                inside = in_loop or operation.opcode == "while"
                for body in itertools.chain(*operation.bodies.values()):
                    yield from self._operations(body, inside)

    def parts(self, operation: Instruction) -> Iterator[Instruction]:
        """The operations of a fusion, or of an asynchronous start, such as for another core."""
        if operation.opcode == "fusion" or operation.opcode.endswith("-start"):
            for body in itertools.chain(*operation.bodies.values()):
                for part in self._computations[body].values():
                    yield part
                    yield from self.parts(part)

    def beside(self) -> Iterator[tuple[Instruction, list[Instruction]]]:
        """Asynchronous operations, with the operations between their start and end in the schedule.

        Keys are the starts, including fusions of a TPU, of the outermost computation only. The work
        of another core starts when it receives its operands.
        """
        inside, order = self._computations[self._entry], self.outermost
        for at, operation in enumerate(order):
            if not operation.opcode.endswith("-done") and _DONE not in operation.name:
                continue
            origins = [order.index(op) for op in self._origins(operation, inside)]
            if begun := [i for i in origins if not order[i].opcode.endswith("-update")]:
                yield order[max(begun)], order[max(origins) + 1 : at]

    def _origins(
        self, operation: Instruction, inside: Mapping[str, Instruction]
    ) -> Iterator[Instruction]:
        """The starts that an operation ends, and the operations that pass on its operands.

        These are earlier operands, also through loops.
        """
        seen, waiting = set[str](), list(operation.operands)
        while waiting:
            name = waiting.pop()
            if name in seen or name not in inside:
                continue
            seen.add(name)
            if inside[name].opcode.endswith("-start") or _START in name:
                yield inside[name]
            elif inside[name].opcode.endswith("-update"):
                yield inside[name]
                waiting += inside[name].operands
            elif _DONE in operation.name:
                waiting += inside[name].operands

    def turns(self, loop: Instruction) -> int | None:
        """The trip count of a loop; None if it is unknown."""
        if (known := loop.attribute(r'"known_trip_count":\{"n":"(\d+)"')) is not None:
            return int(known)
        condition = self._computations[loop.bodies["condition"][0]]
        root = next(op for op in condition.values() if op.is_root)
        limits = [
            int(op.operands[0])
            for op in map(condition.get, root.operands)
            if op is not None and op.opcode == "constant"
        ]
        is_count = root.opcode == "compare" and "direction=LT" in root.attributes
        return limits[0] if is_count and len(limits) == 1 else None

    @functools.cached_property
    def has_cycles(self) -> bool:
        """Whether the compiler estimates cycles, as that for TPUs does."""
        return any(self._estimate(op) for op, _ in self.operations())

    def cycles(self, operation: Instruction) -> int:
        """The compiler's estimate of cycles, including called computations; 0 without an estimate.

        For a loop it covers all iterations, and is 0 if their number is unknown.
        """
        if (own := self._estimate(operation)) is not None:
            return own
        if operation.opcode not in ("while", "conditional", "call", "async-start"):
            return 0
        names = itertools.chain(*operation.bodies.values())
        of_bodies = [sum(map(self.cycles, self._computations[name].values())) for name in names]
        if operation.opcode == "conditional":
            return max(of_bodies)
        return sum(of_bodies) * (self.turns(operation) or 0 if operation.opcode == "while" else 1)

    def _estimate(self, operation: Instruction) -> int | None:
        found = operation.attribute(r'"estimated_cycles":"(\d+)"')
        return None if found is None or int(found) >= NO_ESTIMATE else int(found)

    def lines(self, operation: Instruction) -> tuple[str, ...]:
        """The source lines of an operation, the innermost first: ``file.py:12 (function)``."""
        return tuple(self._lines.of(operation))

    def new_arrays(self, operation: Instruction, at_least: int) -> int:
        """The number of arrays of at least this size that an operation allocates.

        Arrays in the memory of an operand are not counted: updates of rows, and results that reuse
        the memory of an argument that the operation reads. Asynchronous operations are counted at
        their start.
        """
        if self._is_in_place(operation):
            return 0
        large = sum(size >= at_least for size in operation.sizes)
        return max(0, large - self._reused.get(operation.name, 0))

    def _is_in_place(self, operation: Instruction) -> bool:
        if operation.opcode == "custom-call":
            return "output_to_operand_aliasing=" in operation.attributes
        if operation.opcode != "fusion":
            # An asynchronous operation allocates its result at its start.
            return operation.opcode in _IN_PLACE or operation.opcode.endswith(("-update", "-done"))
        inside = self._computations[operation.bodies["calls"][0]]
        makers = [self._source(operation, inside) for operation in _results(inside)]
        # A fusion of a TPU may contain others.
        return all(
            self._is_in_place(op) if op.opcode == "fusion" else op.opcode in _UPDATES
            for op in makers
        )

    def _source(self, operation: Instruction, inside: Mapping[str, Instruction]) -> Instruction:
        """The operation whose result an operation passes on."""
        while operation.opcode in _SAME and operation.operands[0] in inside:
            operation = inside[operation.operands[0]]
        return operation

    @functools.cached_property
    def _reused(self) -> dict[str, int]:
        """By operation, the number of its results that reuse the memory of an argument it reads."""
        inside, found = self._computations[self._entry], dict[str, int]()
        for number, result in enumerate(_results(inside)):
            maker = self._source(result, inside)
            read = [self._source(inside[name], inside) for name in maker.operands if name in inside]
            numbers = {int(op.operands[0]) for op in read if op.opcode == "parameter"}
            if self.aliases.get(number) in numbers:
                found[maker.name] = found.get(maker.name, 0) + 1
        return found


_UPDATES = ("scatter", "dynamic-update-slice", "parameter")


def _results(inside: Mapping[str, Instruction]) -> list[Instruction]:
    """The operations that compute the results of a computation."""
    root = next(op for op in inside.values() if op.is_root)
    return [inside[name] for name in root.operands] if root.opcode == "tuple" else [root]


def _operation(line: str) -> Instruction | None:
    head = _OPERATION.match(line)
    if head is None:
        return None
    result, rest = _split_type(line[head.end() :])
    opcode, _, rest = rest.partition("(")
    end = _closing(rest, 1)
    inside, attributes = rest[: end - 1], rest[end:]
    operands = re.findall(r"%([\w.\-]+)", inside) or [s for s in inside.split(", ") if s]
    arrays, opcode = _arrays(result), opcode.strip()
    if opcode.endswith("-start") and len(arrays) > len(operands):
        # The results are accompanied by the operands, and by numbers that identify the operation.
        arrays = [(dtype, size) for dtype, size in arrays[len(operands) :] if size > 4]
    dtypes, sizes = tuple(dtype for dtype, _ in arrays), tuple(size for _, size in arrays)
    moves = ""
    if opcode == "copy-start" and _IN_VMEM in result:  # the result precedes the operand
        moves = "to VMEM" if _IN_VMEM in result.partition("]")[2].partition("[")[0] else "from VMEM"
    return Instruction(
        head[2], opcode, sizes, dtypes, tuple(operands), attributes, bool(head[1]), moves
    )


def _split_type(text: str) -> tuple[str, str]:
    """The type of a result, and the text after it."""
    end = _closing(text[1:], 1) + 1 if text.startswith("(") else text.index(" ")
    return text[:end], text[end:].lstrip()


def _closing(text: str, depth: int) -> int:
    """The position where parentheses of a given depth are closed."""
    for at, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return at + 1
    return len(text)


def _arrays(result: str) -> list[tuple[str, int]]:
    """The type of the elements, and the bytes, of each array of a result."""
    arrays = _ARRAY.findall(_LAYOUT.sub("", result))
    return [(dtype, math.ceil(_bits(dtype) * _elements(dims) / 8)) for dtype, dims in arrays]


def _bits(dtype: str) -> int:
    """The bits of an element: the first number in the name of its type, such as 16 in ``bf16``."""
    if dtype in _BITS:
        return _BITS[dtype]
    digits = re.search(r"\d+", dtype)
    return int(digits[0]) if digits else 0


def _elements(dims: str) -> int:
    return math.prod(int(d.lstrip("<=")) for d in dims.split(",") if d)


def _aliases(head: str) -> dict[int, int]:
    found = re.findall(r"\{(\d*)\}: \((\d+), \{\}", head)
    return {int(result or 0): int(parameter) for result, parameter in found}


class _Lines:
    """The source lines of a program, printed with each operation or in separate tables."""

    def __init__(self, lines: list[str]):
        self._tables = {}
        for name in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            rows = {}
            if name in lines:
                after = lines[lines.index(name) + 1 :]
                for line in itertools.takewhile(str.strip, after):
                    number, _, value = line.partition(" ")
                    rows[int(number)] = value
            self._tables[name] = rows

    def of(self, operation: Instruction) -> Iterator[str]:
        if (frame := operation.attribute(r"stack_frame_id=(\d+)")) is not None:
            yield from self._frames(int(frame))
        elif file := operation.attribute(r'source_file="([^"]*)"'):
            line = operation.attribute(r"source_line=(\d+)")
            yield f"{file}:{line}"

    def _frames(self, frame: int) -> Iterator[str]:
        while frame in self._tables["StackFrames"]:
            ids = _fields(self._tables["StackFrames"][frame])
            at = _fields(self._tables["FileLocations"][ids["file_location_id"]])
            file = self._tables["FileNames"][at["file_name_id"]].strip('"')
            function = self._tables["FunctionNames"][at["function_name_id"]].strip('"')
            yield f"{file}:{at['line']} ({function})"
            frame = ids.get("parent_frame_id", 1) - 1  # XLA writes one more, and 1 for none


def _fields(text: str) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", text)}
