"""The parts of a program that one native loop can compute."""

import copy
import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from ..jaxprs.equations import caller_of
from ..jaxprs.graph import Graph, Operation, Value, inlined, made_of, needed
from ..jaxprs.primitives import PLAIN_CALLS, WITH_DERIVATIVES, Kind
from .elementwise import DTYPES, is_elementwise
from .simplify import simplify

_PARTS = {"slice", "split", "concatenate"}
REDUCTIONS = {"reduce_sum", "reduce_max", "reduce_min"}


@dataclasses.dataclass(eq=False)
class Group:
    """Operations that become one native call, or a part of one."""

    ins: list[Value]
    outs: list[Value]
    operations: list[Operation]
    aliases: dict[int, int]  # an input -> the output that takes its memory
    changes_rows: ClassVar[bool] = False  # whether these inputs are tables with changed rows

    @property
    def shared(self) -> list[Value]:
        """The first inputs, if all groups of a call have the same."""
        return []


@dataclasses.dataclass(eq=False)
class LeafGroup(Group):
    """Arrays of one shape, element by element. The inputs are the scalars and the arrays."""

    scalars: list[Value]
    arrays: list[Value]
    length: int = 0  # of the groups of consecutive elements that share a number, if there are any

    @property
    def shared(self) -> list[Value]:
        """The scalars."""
        return self.scalars

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the arrays, except those with one element for each group."""
        return max((v.shape for v in self.outs), key=math.prod)

    def signature(self) -> Any:
        """Equal for leaves with the same operations, of any shapes."""
        names = {v: f"s{k}" for k, v in enumerate(self.scalars)}
        names |= {v: f"a{k}" for k, v in enumerate(self.arrays)}
        dtypes = [v.dtype for v in self.ins]
        described = _described(self.operations, names)
        outs = [(names[v], v.dtype) for v in self.outs]
        of_groups = [
            self.length > 0 and math.prod(v.shape) < math.prod(self.shape) for v in self.ins
        ]
        return repr((dtypes, described, outs, sorted(self.aliases.items()), self.length, of_groups))


def _described(ops: Sequence[Operation], names: dict[Value, str]) -> list[Any]:
    """The text of operations on values of these names; adds the names of their results."""
    found = []
    for op in ops:
        inside = _described(op.inside, names)
        ins = [names.get(v, v.key) for v in op.ins]
        for v in op.outs:
            names[v] = names[v.meaning] if v.meaning in names else f"v{len(names)}"
        kinds = [v.dtype for v in (*op.ins, *op.outs)]
        found.append((op.name, ins, kinds, op.eqn.params.get("y"), inside))
    return found


def is_a(kind: type[Group]) -> Callable[[Group], bool]:
    """A function that tells whether a group is of this kind."""
    return lambda group: isinstance(group, kind)


def has_lengths(group: Group) -> bool:
    """Whether some arrays have one element for each group of elements of others."""
    return isinstance(group, LeafGroup) and group.length > 0


class AlikeGroups:
    """Groups of one kind that share their operations and scalars, as one call.

    Args:
        parts: the groups.

    Attributes:
        shared: the number of inputs that all groups share, the first ones.
        ins: these, then the other inputs of each group.
        outs: the outputs of each group.
        aliases: an input -> the output that takes its memory, by index.
    """

    def __init__(self, parts: Sequence[Group]):
        self.parts, first = parts, parts[0]
        self.shared = ns = len(first.shared)
        arrays, many = len(first.ins) - ns, len(first.outs)
        self.ins = [*first.ins[:ns], *(v for part in parts for v in part.ins[ns:])]
        self.outs = [v for part in parts for v in part.outs]
        self.aliases = {
            k * arrays + i: k * many + o for k, p in enumerate(parts) for i, o in p.aliases.items()
        }
        self.operations: list[Operation] = [op for part in parts for op in part.operations]

    def each(self, functions: Sequence[Callable[..., Any]]) -> Callable[..., tuple[Any, ...]]:
        """The function of the call by one function for each group."""
        many = len(self.parts[0].ins) - self.shared

        def call(*args):
            scalars, arrays = args[: self.shared], args[self.shared :]
            found = [
                f(*scalars, *arrays[k * many : (k + 1) * many]) for k, f in enumerate(functions)
            ]
            return tuple(x for each in found for x in each)

        return call


class Unsupported(Exception):
    """The reason why some operations cannot become a group.

    Its arguments are the parts of a sentence: words, operations, and lists of these. The names and
    lines of operations are computed when the text is read: this is slow, and few reasons are read.
    """

    def __str__(self) -> str:
        return " ".join(map(_written, self.args))


def _written(part: Any) -> str:
    if isinstance(part, list):
        return ", ".join(map(_written, part))
    if not isinstance(part, Operation):
        return str(part)
    line = caller_of(part.eqn) or part.line
    return f"`{part.name}`" + (f" ({line})" if line else "")


def unknown(op: Operation) -> Unsupported:
    """The error for an operation on rows that the native engine does not support."""
    dtypes = {v.dtype for v in (*op.ins, *op.outs)} - DTYPES
    dtype = [f"the dtype {min(dtypes)} of"] if dtypes else []
    return Unsupported(*dtype, op, "is not supported by the native engine")


def can_reduce(op: Operation) -> bool:
    """Whether native code supports a reduction in its dtype: for integers, maximum and minimum."""
    dtype = op.ins[0].dtype
    return dtype in ("float32", "float64") or (dtype == "int32" and op.name != "reduce_sum")


def read_program(jaxpr: Any) -> Graph:
    """The operations that the results of an open jaxpr need; constants become the first inputs.

    Calls are replaced by their operations, except functions with custom derivatives.
    """
    # From JAX 0.12 on a jaxpr keeps its constants, which may be tracers of the program around.
    jaxpr = jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])
    program = inlined(jaxpr, None, PLAIN_CALLS, WITH_DERIVATIVES)
    simplify(program)
    return program


def each(operations: Iterable[Operation]) -> Iterator[Operation]:
    """Operations and the operations that they replace."""
    for op in operations:
        yield from each(op.inside)
        yield op


def reductions(operations: Iterable[Operation]) -> list[Operation]:
    """The reductions among operations and the operations that they replace."""
    return [op for op in each(operations) if op.name in REDUCTIONS]


def splits(op: Operation) -> tuple[int, int] | None:
    """The last two axes, if a reshape splits the last axis into them or joins them."""
    if op.name != "reshape" or op.eqn.params["dimensions"] is not None:
        return None
    short, long = sorted((op.ins[0].shape, op.outs[0].shape), key=len)
    is_split = len(short) > 1 and len(long) == len(short) + 1 and long[:-2] == short[:-1]
    return (long[-2], long[-1]) if is_split and min(long[-2:]) > 1 else None


def is_known(op: Operation) -> bool:
    """Whether a group of rows supports an operation: each row depends only on the same row."""
    if not {v.dtype for v in (*op.ins, *op.outs)} <= DTYPES:
        return False
    if op.inside:
        return all(map(is_known, op.inside))
    if op.name == "broadcast_in_dim":
        return len(op.ins) == 1
    if op.kind is Kind.MOVE:
        longer = lambda shape: [d for d in shape if d != 1]
        same = longer(op.ins[0].shape) == longer(op.outs[0].shape) or splits(op) is not None
        return same and (op.name != "reshape" or op.eqn.params["dimensions"] is None)
    if op.name == "iota":
        return not op.ins
    if op.name == "slice":
        starts, strides = op.eqn.params["start_indices"], op.eqn.params["strides"]
        is_whole = starts[0] == 0 and op.outs[0].shape[0] == op.ins[0].shape[0]
        return is_whole and (strides is None or set(strides) == {1})
    if op.name == "split":
        return op.params["axis"] > 0
    if op.name == "concatenate":
        return op.eqn.params["dimension"] > 0 and all(0 not in v.shape for v in op.ins)
    if op.name in REDUCTIONS:
        axes, shape = op.eqn.params["axes"], op.ins[0].shape
        is_row = 0 not in axes and math.prod(op.outs[0].shape[1:]) == 1
        if op.ins[0].dtype == "int32":  # of a group in the row
            return len(shape) == 3 and tuple(axes) == (2,) and can_reduce(op)
        return is_row and bool(op.outs[0].shape) and can_reduce(op)
    return is_elementwise(op) and all(_fits(v, op.outs[0]) for v in op.ins)


def _fits(v: Value, out: Value) -> bool:
    """Whether an operand is a scalar or has the shape of the result except for axes of length 1."""
    same = len(v.shape) == len(out.shape)
    return not v.shape or (
        same and all(d in (1, wide) for d, wide in zip(v.shape, out.shape, strict=True))
    )


# Leaves


def find_leaves(
    program: Graph,
    places: Mapping[Value, Value],
    in_place: Collection[Value],
    report: Callable[[Value, Unsupported], None],
) -> tuple[Graph, list[LeafGroup]]:
    """The groups of arrays of one shape that are updated elementwise.

    Args:
        program: without the groups of rows.
        places: the next value of each array of the parameters and the state.
        in_place: the arrays whose next values reuse their memory.
        report: called with results that are in no group, and the reason.

    Returns:
        The program with the groups, and the groups. Some operations are computed twice: in a group,
        and before it for a norm that the group needs.
    """
    fusible = {op for op in program.operations if is_fusible(op)}
    made_by = lambda leaves: {v for leaf in leaves for v in leaf.outs}
    found = _leaves(program, fusible, places, in_place)
    missing, made = {*places.values()} - made_by(found), program.depending(places)
    while missing:
        twice = done_twice(program, fusible, missing)
        more = _leaves(twice, fusible, places, in_place)
        late = missing & made_by(_come_last(twice, more))
        if late == missing:
            program, found = twice, more
            break
        missing = late
    for v in program.results:
        if v.shape and v.maker is not None and v not in made_by(found):
            report(v, _obstacles(v, made, fusible))
    set_makers(program.operations)
    return program, found


def _leaves(
    program: Graph,
    fusible: Collection[Operation],
    places: Mapping[Value, Value],
    in_place: Collection[Value],
) -> list[LeafGroup]:
    """The groups of elementwise operations of the program."""
    made, readers, results = program.depending(places), program.readers(), set(program.results)
    found = []
    for ops in _together(program, fusible):
        inside = set(ops)
        is_read = lambda v, inside=inside: any(r not in inside for r in readers.get(v, ()))
        outs = [v for op in ops for v in op.outs if v in results or is_read(v)]
        leaf = leaf_group(ops, outs, places, in_place)
        given = all(v in places or v not in made for v in leaf.arrays)
        updates = any(v in places for v in leaf.arrays)
        if given and updates and set(outs) <= results:
            found.append(leaf)
    return found


def _come_last(program: Graph, leaves: Iterable[LeafGroup]) -> list[LeafGroup]:
    """The groups ordered after all reads of what they overwrite, so that XLA need not copy it."""
    readers, before = program.readers(), dict[Any, set[Operation]]()
    found = []
    for leaf in leaves:
        key, inside = frozenset(leaf.ins) - {*program.inputs}, set(leaf.operations)
        if key not in before:
            before[key] = set(needed(program.operations, key))
        over = [leaf.ins[i] for i in leaf.aliases]
        if all(op in inside or op in before[key] for v in over for op in readers[v]):
            found.append(leaf)
    return found


def set_makers(operations: Iterable[Operation]) -> None:
    """Makes each operation the maker of its results."""
    for op in operations:
        for v in op.outs:
            v.maker = op


def done_twice(program: Graph, fusible: Collection[Operation], results: Collection[Value]) -> Graph:
    """Duplicates elementwise operations for the other operations that need them.

    Results such as an update and its norm then do not force the elementwise operations before the
    norm.
    """
    before, kept = set(needed(program.operations, results)), set(program.results)
    copies, operations = dict[Value, Value](), list[Operation]()
    for op in program.operations:
        is_fusible = op in fusible
        if not is_fusible:
            is_read = lambda v, op=op: v in copies and (op in before or v not in kept)
            ins = [copies[v] if is_read(v) else v for v in op.ins]
            if ins != op.ins:
                op = copy.copy(op)
                op.ins = ins
        elif op in before:
            operations.append(_copied(op, copies))
        operations.append(op)
    return Graph(program.inputs, needed(operations, program.results), program.results)


def _copied(op: Operation, copies: dict[Value, Value]) -> Operation:
    """A copy of an operation on copies of its operands; adds all of them."""
    inside = [_copied(each, copies) for each in op.inside]
    ins = [copies.get(v, v) for v in op.ins]
    means = lambda v: None if v.meaning is None else copies.get(v.meaning, v.meaning)
    outs = [Value(v.aval, meaning=means(v)) for v in op.outs]
    copies.update(zip(op.outs, outs, strict=True))
    made = Operation(op.name, op.eqn, ins, outs, op.jaxpr, inside, op.call)
    for v in outs:
        v.maker = made
    return made


def _obstacles(
    result: Value, made: Collection[Value], fusible: Collection[Operation]
) -> Unsupported:
    """Reasons why a result is in no group, given the values that depend on parameters and state."""
    follow = lambda v: v.maker.ins if v in made and v.maker is not None else ()
    makers = [v.maker for v in made_of([result], follow) if v in made and v.maker is not None]
    has_arrays = lambda op: any(v.shape for v in (*op.ins, *op.outs))
    by_name = {op.name: op for op in makers if op not in fusible and has_arrays(op)}
    if by_name:
        few = [by_name[name] for name in sorted(by_name)[:4]]
        return Unsupported("operations that are not supported or not elementwise:", few)
    return Unsupported("a result between its operations is needed elsewhere")


def leaf_group(
    ops: list[Operation],
    outs: list[Value],
    places: Mapping[Value, Value],
    in_place: Collection[Value],
    length: int = 0,
) -> LeafGroup:
    """The group of some operations; see :func:`find_leaves`, and ``LeafGroup.length``."""
    scalars, arrays = what_is_read(ops)
    # A table that is read here may be written by a group of rows: it has no next value here.
    now = {places[v]: i for i, v in enumerate(arrays) if v in in_place and v in places}
    aliases = {
        len(scalars) + now[v]: k
        for k, v in enumerate(outs)
        if v in now and v.dtype == arrays[now[v]].dtype
    }
    return LeafGroup([*scalars, *arrays], outs, ops, aliases, scalars, arrays, length)


def what_is_read(ops: Iterable[Operation]) -> tuple[list[Value], list[Value]]:
    """The scalars and the arrays that operations read: arrays of one element may be scalars."""
    own = {v for op in ops for v in op.outs}
    read = dict.fromkeys(v for op in ops for v in op.ins if v not in own)
    is_number = lambda op: op.name == "broadcast_in_dim" and math.prod(op.ins[0].shape) == 1
    numbers = {op.ins[0] for op in filter(is_number, ops)}
    is_scalar = lambda v: v in numbers if v.shape else v.literal is None
    return list(filter(is_scalar, read)), [v for v in read if v.shape and v not in numbers]


def _together(program: Graph, fusible: Collection[Operation]) -> Iterable[list[Operation]]:
    """Groups elementwise operations that share arrays and can run at the same time."""
    stages, parent = _stages(program, fusible), dict[Any, Any]()

    def find(x):
        while parent.setdefault(x, x) is not x:
            x = parent[x]
        return x

    in_turn = [op for op in program.operations if op in fusible]
    for op in in_turn:
        for v in op.ins:
            if v.shape == op.outs[0].shape:
                parent[find((v, stages[op]))] = find((op.outs[0], stages[op]))
    groups: dict[Any, list[Operation]] = {}
    for op in in_turn:
        groups.setdefault(find((op.outs[0], stages[op])), []).append(op)
    return groups.values()


def is_fusible(op: Operation) -> bool:
    """Whether a group of leaves supports an operation: elementwise, on arrays of one shape."""
    if not op.outs or not op.outs[0].shape or not is_known(op):
        return False
    if op.name == "broadcast_in_dim":
        return math.prod(op.ins[0].shape) == 1 < math.prod(op.outs[0].shape) or not op.ins[0].shape
    if any(v.shape not in ((), op.outs[0].shape) for v in op.ins):
        return False
    is_single = lambda each: is_fusible(each) or not each.outs[0].shape
    is_other = op.kind is Kind.MOVE or op.name in _PARTS | REDUCTIONS | {"iota"}
    return not is_other and all(map(is_single, op.inside))


def _stages(program: Graph, fusible: Collection[Operation]) -> dict[Operation, int]:
    """For each operation, the largest number of non-elementwise operations on a path to it.

    Elementwise operations are placed as late as possible, so that those that need the norm of all
    gradients and those that do not are in one stage.
    """
    after: dict[Value, int] = {}
    stages: dict[Operation, int] = {}
    for op in program.operations:
        stages[op] = max((after.get(v, 0) for v in op.ins), default=0)
        more = op not in fusible and any(v.shape for v in op.ins)
        after.update(dict.fromkeys(op.outs, stages[op] + more))
    last = max(after.values(), default=0)
    latest: dict[Value, int] = {}
    for op in reversed(program.operations):
        if op in fusible:
            stages[op] = min(latest.get(v, last) for v in op.outs)
        for v in op.ins:
            latest[v] = min(latest.get(v, last), stages[op])
    return stages
