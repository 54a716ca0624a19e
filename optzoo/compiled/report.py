"""Compiles a train step for a device, and reports memory, copies and collectives of the program."""

from __future__ import annotations

import collections
import dataclasses
import math
import re
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from ..core.checks import check_function
from ..core.compat import kept_arguments, result_types
from ..core.terminal import columns
from .devices import devices_of
from .hlo import COLLECTIVES, NO_ESTIMATE, Instruction, Program
from .requirements import Required, RequirementError

# The operations of a schedule that need time.
_COMPUTING = ("fusion", "while", "call", "conditional", "convolution", "dot", "custom-call")
_SMALL = (
    1 / 8
)  # of the largest donated array: smaller arrays are neither tables nor slots of tables
_LISTED = 10  # of each kind, by str


@dataclasses.dataclass(frozen=True)
class LargeOperation:
    """An operation that allocates a result as large as a table or a slot.

    Attributes:
        operation: the operation, such as ``copy``, or the name of a fusion.
        nbytes: the size of its result.
        in_loop: whether it is in a loop.
        of: its name in JAX, such as ``jit(step)/mul``; for a change of layout the argument.
        lines: its source lines, the innermost first.
    """

    operation: str
    nbytes: int
    in_loop: bool
    of: str
    lines: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Collectives:
    """The collective operations of one kind.

    Attributes:
        kind: the kind, such as ``all-reduce``.
        in_loop: whether they are in a loop; each is then counted once.
        number: the number of operations.
        nbytes: the size of all their results on one device.
        dtypes: the dtypes of the elements that are sent, as named by XLA, such as ``bf16``. The
            compiler may send fewer bits than the step computes with, if all consumers need fewer.
    """

    kind: str
    in_loop: bool
    number: int
    nbytes: int
    dtypes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Overlap:
    """An asynchronous collective operation that overlaps with other operations.

    Attributes:
        kind: the kind, such as ``all-reduce``.
        nbytes: the size of its result on one device.
        turns: the number of iterations of the loops between its start and end.
        between: the names in JAX of the operations between its start and end, in the order of the
            schedule; a loop has one name.
        dtypes: the dtypes of the elements that are sent, as in :class:`Collectives`.
        cycles: the compiler's estimate for the operations between start and end; None without
            estimates. Loops with an unknown number of iterations are not included.
    """

    kind: str
    nbytes: int
    turns: int
    between: tuple[str, ...]
    dtypes: tuple[str, ...]
    cycles: int | None


@dataclasses.dataclass(frozen=True)
class Blocking:
    """A collective operation, outside loops, that does not overlap with other operations.

    Attributes:
        kind: the kind, such as ``all-reduce``.
        nbytes: the size of its result on one device.
        dtypes: the dtypes of the elements that are sent, as in :class:`Collectives`.
        of: its name in JAX, such as ``jit(step)/psum``.
    """

    kind: str
    nbytes: int
    dtypes: tuple[str, ...]
    of: str


@dataclasses.dataclass(frozen=True)
class Placement:
    """The placement of an array among the arguments.

    Example:
        >>> import jax, jax.numpy as jnp, optzoo
        >>> report = optzoo.compile_report(lambda x: x + 1, jnp.ones(8), device="cpu")
        >>> print(report.placements)
        (Placement(argument=0, name='x', nbytes=32, on_device=32, donated=False, returned=True),)

    Attributes:
        argument: its argument, by position or keyword.
        name: its name in JAX, such as ``params['w']``.
        nbytes: the size of the whole array.
        on_device: the size of the part on one device.
        donated: whether a result may reuse its memory.
        returned: whether the corresponding result has its sharding; None without such a result.
    """

    argument: int | str
    name: str
    nbytes: int
    on_device: int
    donated: bool
    returned: bool | None


@dataclasses.dataclass(frozen=True)
class CompileReport:
    """The result of :func:`optzoo.compile_report`. All sizes are bytes of one device.

    Its ``str`` is a table of totals, followed by the ten largest new arrays, collectives and
    arguments that are not reused; :meth:`full` lists all of them. ``dataclasses.asdict`` converts
    it to plain data.

    Example:
        >>> import jax, jax.numpy as jnp, optzoo
        >>> step = jax.jit(lambda x: x + 1, donate_argnums=0)
        >>> optzoo.compile_report(step, jnp.ones(8), device="cpu").arguments
        32

    Attributes:
        device: the given name.
        num_devices: the number of devices of the program.
        arguments: the size of the arguments.
        results: the size of the results.
        reused: the size of the arguments whose memory is reused by results.
        temporaries: the memory that the program needs in addition to arguments and results.
        not_reused: the donated arguments whose memory no result reuses, with their sizes.
        placements: the placement of each array among the arguments that the program reads.
        large: the operations that copy or compute an array as large as a table or a slot, and do
            not reuse the memory of a donated argument that they read.
        at_least: the smallest size of a large result, in bytes.
        collectives: the communication between devices.
        overlaps: the collectives that overlap with other operations of the schedule.
        blocking: the collectives outside loops that do not overlap, because they are synchronous or
            no operation is between their start and end.
        estimated_bytes: the compiler's estimate of bytes read and written; None without one. The
            body of a loop is counted once, as in the other estimates.
        estimated_flops: the estimate of floating-point operations.
        estimated_seconds: the estimate of the time; None without one.
        estimated_cycles: the sum over the operations, estimated only by the compiler for TPUs.
        compile_seconds: the measured compile time on this machine.
        text: the program as printed by XLA.
    """

    device: str
    num_devices: int
    arguments: int
    results: int
    reused: int
    temporaries: int
    not_reused: dict[str, int]
    placements: tuple[Placement, ...]
    large: tuple[LargeOperation, ...]
    at_least: int
    collectives: tuple[Collectives, ...]
    overlaps: tuple[Overlap, ...]
    blocking: tuple[Blocking, ...]
    estimated_bytes: float | None
    estimated_flops: float | None
    estimated_seconds: float | None
    estimated_cycles: int | None
    compile_seconds: float
    text: str = dataclasses.field(repr=False)

    def __str__(self) -> str:
        return "\n".join(_shown(self, _LISTED))

    def full(self) -> str:
        """The text of ``str``, with all arguments, arrays and collectives.

        Example:
            >>> import jax.numpy as jnp, optzoo
            >>> report = optzoo.compile_report(jnp.sin, jnp.ones(8), device="cpu", at_least=1)
            >>> print(report.full() == str(report))  # there are no more than ten of each
            True
        """
        return "\n".join(_shown(self))

    @property
    def peak(self) -> int:
        """The bytes of arguments, temporaries, and results that reuse no arguments."""
        return self.arguments + self.results - self.reused + self.temporaries

    def require(
        self,
        *,
        donated: bool = False,
        same_shardings: bool = False,
        divided: Mapping[int | str, int] | None = None,
        collectives: Mapping[str, float] | None = None,
        large: float | None = None,
        temporaries: float | None = None,
        peak: float | None = None,
    ) -> CompileReport:
        """Raises an error if the program does not meet requirements; returns the report.

        Use it in tests: a new version of JAX, or a change of the step, may silently shard arrays in
        another way or copy them, with the same values.

        Example:
            >>> import jax, jax.numpy as jnp, optzoo
            >>> step = jax.jit(lambda x: x + 1, donate_argnums=0)
            >>> report = optzoo.compile_report(step, jnp.ones(8), device="cpu")
            >>> report.require(donated=True, collectives={}, peak=32).peak
            32
            >>> report.require(peak=31)
            Traceback (most recent call last):
            ...
            optzoo.compiled.requirements.RequirementError: the program for 'cpu' is not as required:
              peak: 32 bytes, at most 31 are allowed

        Args:
            donated: a result must reuse the memory of each donated argument.
            same_shardings: each donated argument must have a corresponding result with the same
                sharding. Results correspond to arguments in order: in a step with the arguments
                ``(params, state, batch)`` and the results ``(params, state, loss)`` the parameters
                and the state; a result that is not a tuple corresponds to the first argument.
            divided: from the position or keyword of an argument to the number of devices over which
                its arrays must be divided: ``{1: 8}`` if a device has an eighth of a state. Five
                percent more are allowed, for small arrays that are replicated.
            collectives: by kind, the largest number of bytes of their results on one device
                (``{"all-reduce": 0}``); other kinds are not allowed. Collectives in a loop are
                counted once.
            large: the largest number of operations in ``report.large``, which allocate an array as
                large as a table or a slot. Dense gradients are included.
            temporaries: the largest number of bytes of temporaries.
            peak: the largest number of bytes of :attr:`peak`.

        Raises:
            RequirementError: an ``AssertionError`` with a line for each requirement that is not
                met.
            ValueError: if there is no requirement, or an argument or a kind of collective
                operations is unknown.
        """
        required = Required(donated, same_shardings, divided, collectives, large, temporaries, peak)
        if found := [*required.unmet(self)]:
            lines = "".join(f"\n  {line}" for line in found)
            raise RequirementError(f"the program for {self.device!r} is not as required:{lines}")
        return self


def compile_report(
    step: Callable[..., Any], *args: Any, device: str, at_least: int | None = None, **kwargs: Any
) -> CompileReport:
    """Compiles a train step for a device, which need not be present, and reports on the program.

    .. code-block:: python

        step = optzoo.minimize(loss, tx)
        print(optzoo.compile_report(step, params, tx.init(params), *batch, device="v5e:2x2"))

    Nothing is run, and no array is moved. Memory, copies, aliases and collectives are facts of the
    compiled program; bytes read and written, seconds and cycles are the compiler's estimates.

    A step on several devices needs a mesh of :func:`optzoo.compiled.devices_of`, and arguments with
    shardings over this mesh (``jax.ShapeDtypeStruct(shape, dtype, sharding=...)``). If no argument
    has a sharding, the step is compiled for the first device. A shape may also have a layout
    (``sharding=Format(Layout((0, 1)), ...)`` of ``jax.experimental.layout``). The default is the
    layout that the compiler chooses; in a step of :func:`optzoo.minimize` tables and slots are
    row-major, as in a call (:func:`optzoo.rows.row_major`).

    Example:
        >>> import jax, jax.numpy as jnp, optzoo
        >>> tx = optzoo.momentum(0.1, 0.9)
        >>> loss = lambda params, x: jnp.sum((params["w"] - x) ** 2)
        >>> params = {"w": jax.ShapeDtypeStruct((512, 64), jnp.float32)}
        >>> step = optzoo.minimize(loss, tx)
        >>> state = jax.eval_shape(tx.init, params)
        >>> report = optzoo.compile_report(step, params, state, params["w"], device="cpu")
        >>> report.not_reused, report.collectives
        ({}, ())

    Args:
        step: a function compiled by ``jax.jit``, or a step of optzoo; another function is compiled
            without donation.
        *args: its arguments: arrays, or ``jax.ShapeDtypeStruct`` objects.
        device: ``"cpu"``, a TPU slice such as ``"v5e:4x4"``, ``"h100"`` or ``"h100:8"``.
        at_least: the smallest size of a large result, in bytes; None for the size of the smallest
            donated array that has at least an eighth of the bytes of the largest one.
        **kwargs: further arguments of the step.

    Raises:
        ImportError: if the compiler for the device is not installed (the extras ``tpu`` and
            ``gpu``).
        MemoryError: if the step does not fit into the memory of a device; the message lists the
            largest arguments.
        TypeError: if ``step`` is not a function.
        ValueError: if the device is unknown, or an argument is sharded over other devices.
    """
    return report_of(lowered_for(step, args, kwargs, device), device, at_least)


def lowered_for(
    step: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], device: str
) -> Any:
    """The lowered program of a step for a device, a ``jax.stages.Lowered``."""
    check_function(step=step)
    args, kwargs = _placed((args, kwargs), devices_of(device), device)
    jitted: Any = step if hasattr(step, "lower") else jax.jit(step)
    with warnings.catch_warnings():  # the report says it, with names
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        return jitted.lower(*args, **kwargs)


def report_of(lowered: Any, device: str, at_least: int | None = None) -> CompileReport:
    """Compiles the result of :func:`lowered_for`, and reports on it."""
    begun = time.perf_counter()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise MemoryError(_too_large(error, device, lowered)) from error
    seconds = time.perf_counter() - begun
    text = compiled.as_text()
    program, memory = Program(text), compiled.memory_analysis()
    donated = _donated(lowered, program)
    sizes = [size for size, _ in donated.values()] or [memory.argument_size_in_bytes]
    if at_least is None:
        at_least = max(1, min(size for size in sizes if size >= _SMALL * max(sizes)))
    costs = _costs(compiled)
    estimate = lambda name: value if (value := costs.get(name, 0)) > 0 else None
    cycles = [int(n) for n in re.findall(r'"estimated_cycles":"(\d+)"', text)]
    has_cycles = cycles and max(cycles) < NO_ESTIMATE
    return CompileReport(
        device=device,
        num_devices=_number_of_devices(compiled),
        arguments=memory.argument_size_in_bytes,
        results=memory.output_size_in_bytes,
        reused=memory.alias_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        not_reused={name: size for name, (size, is_reused) in donated.items() if not is_reused},
        placements=tuple(_placements(lowered, compiled, program)),
        large=tuple(_large(program, at_least)),
        at_least=at_least,
        collectives=tuple(_collectives(program)),
        overlaps=tuple(_overlaps(program)),
        blocking=tuple(_blocking(program)),
        estimated_bytes=estimate("bytes accessed"),
        estimated_flops=estimate("flops"),
        estimated_seconds=estimate("optimal_seconds"),
        estimated_cycles=sum(cycles) if has_cycles else None,
        compile_seconds=seconds,
        text=text,
    )


def _placed(tree: Any, devices: list[Any], device: str) -> Any:
    """Shapes on the devices, instead of arrays."""
    here: Callable[[Any], Any] = lambda x: getattr(x, "sharding", None)
    on_devices = lambda x: here(x) is not None and here(x).device_set <= set(devices)
    is_sharded = any(on_devices(x) and len(here(x).device_set) > 1 for x in jax.tree.leaves(tree))
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        if here(x) is not None and len(here(x).device_set) > 1 and not on_devices(x):
            raise ValueError(
                f"{_name(path)} is sharded over devices that are not those of {device!r}: give "
                f"its shape with a sharding over a mesh of optzoo.compiled.devices_of({device!r})"
            )
    first = None if is_sharded else SingleDeviceSharding(devices[0])
    # Of a sharding for one device JAX does not read the kind of memory.
    mesh = Mesh(np.array(devices[:1]), ("device",))
    on_host = NamedSharding(mesh, PartitionSpec(), memory_kind="pinned_host")

    def place(x):
        if not hasattr(x, "shape") or not hasattr(x, "dtype"):
            return x
        sharding = here(x) if on_devices(x) and is_sharded else first
        if not is_sharded and getattr(here(x), "memory_kind", None) == "pinned_host":
            sharding = on_host
        weak = getattr(x, "weak_type", False)
        return jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=_in_layout(x, sharding), weak_type=weak
        )

    return jax.tree.map(place, tree)


def _in_layout(x: Any, sharding: Any) -> Any:
    """The sharding, with the layout of a shape; the layout of an array is that of its device."""
    given = getattr(x, "format", None) if isinstance(x, jax.ShapeDtypeStruct) else None
    layout = getattr(given, "layout", None)
    return sharding if layout is None else Format(layout, sharding)


def _donated(lowered: Any, program: Program) -> dict[str, tuple[int, bool]]:
    """By the name of a donated argument, its size on a device, and whether a result reuses it."""
    taken, found = set(program.aliases.values()), {}
    for i, name, info in _arguments(lowered, program):
        if info.donated:
            nbytes = _nbytes(info) if i is None else sum(program.parameters[i].sizes)
            found[name] = nbytes, i in taken
    return found


def _arguments(lowered: Any, program: Program) -> Iterator[tuple[int | None, str, Any]]:
    """For each array, its number in the program (None if it is not read), its name and aval."""
    numbers = {i: number for number, i in enumerate(kept_arguments(lowered))}
    for i, (path, info) in enumerate(jax.tree_util.tree_leaves_with_path(lowered.args_info)):
        number = numbers.get(i)
        name = "" if number is None else program.name_in_jax(program.parameters[number])
        yield number, name or _name(path), info


def _placements(lowered: Any, compiled: Any, program: Program) -> Iterator[Placement]:
    """The placements of the arguments that the program reads."""
    paths, treedef = jax.tree_util.tree_flatten_with_path(lowered.args_info)
    shardings = treedef.flatten_up_to(compiled.input_shardings)
    results = _results_in_place(lowered, compiled.output_shardings)
    arguments = _arguments(lowered, program)
    for (path, _), sharding, (i, name, info) in zip(paths, shardings, arguments, strict=True):
        if i is not None:
            here = math.prod(sharding.shard_shape(info.shape)) * info.dtype.itemsize
            given = results.get(path)
            returned = given and given.is_equivalent_to(sharding, len(info.shape))
            of = path[1].key if path[0].idx else path[1].idx
            yield Placement(of, name, _nbytes(info), here, info.donated, returned)


def _results_in_place(lowered: Any, shardings: Any) -> dict[Any, Any]:
    """By the path of an argument, the sharding of the corresponding result."""
    args, out = lowered.args_info[0], result_types(lowered)
    is_tuple = type(out) is tuple
    results = zip(out, shardings, strict=True) if is_tuple else [(out, shardings)]
    found, avals = {}, lambda tree: [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]
    for i, (arg, (result, sharding)) in enumerate(zip(args, results, strict=False)):
        same = jax.tree.structure(arg) == jax.tree.structure(result)
        if same and avals(arg) == avals(result):
            paths = jax.tree_util.tree_leaves_with_path(arg)
            place = (jax.tree_util.SequenceKey(0), jax.tree_util.SequenceKey(i))
            parts = jax.tree.structure(arg).flatten_up_to(sharding)
            pairs = zip(paths, parts, strict=True)
            found |= {(*place, *path): part for (path, _), part in pairs}
    return found


def _nbytes(info: Any) -> int:
    return math.prod(info.shape) * info.dtype.itemsize


def _large(program: Program, at_least: int) -> Iterator[LargeOperation]:
    for operation, in_loop in program.operations():
        number = program.new_arrays(operation, at_least)
        if number:
            kind = f"{operation.opcode.removesuffix('-start')} {operation.moves}".rstrip()
            yield LargeOperation(
                f"{kind} {operation.name}" if kind in ("fusion", "custom-call") else kind,
                sum(sorted(operation.sizes)[-number:]),
                in_loop,
                program.name_in_jax(operation),
                program.lines(operation),
            )


def _collectives(program: Program) -> Iterator[Collectives]:
    found = collections.defaultdict(list)
    for _, part, in_loop in _sending(program):
        found[_kind(part) or "", in_loop].append(part)
    for (kind, in_loop), parts in sorted(found.items()):
        size = sum(sum(part.sizes) for part in parts)
        yield Collectives(kind, in_loop, len(parts), size, _dtypes(*parts))


def _sending(program: Program) -> Iterator[tuple[Instruction, Instruction, bool]]:
    """The operations that communicate, their collectives, and whether they are in a loop."""
    fused = set[str | None]()
    for operation, in_loop in program.operations():
        for part in (operation, *program.parts(operation)):
            if _kind(part):
                number = part.attribute(r"channel_id=(\d+)")
                # On TPUs several fusions start, execute and end the collective that each contains.
                is_fused = operation.opcode == "fusion"
                if not is_fused or number is None or number not in fused:
                    yield operation, part, in_loop
                if is_fused:
                    fused.add(number)


def _dtypes(*operations: Instruction) -> tuple[str, ...]:
    return tuple(sorted({dtype for operation in operations for dtype in operation.dtypes}))


def _overlapping(program: Program) -> Iterator[tuple[Instruction, list[Instruction]]]:
    """The start of a collective, and the operations that compute before its end."""
    for begin, between in program.beside():
        if computed := [op for op in between if op.opcode in _COMPUTING]:
            yield begin, computed


def _overlaps(program: Program) -> Iterator[Overlap]:
    for begin, computed in _overlapping(program):
        if sent := [part for part in (begin, *program.parts(begin)) if _kind(part)]:
            loops = [op for op in computed if op.opcode == "while"]
            turns = sum(program.turns(loop) or 0 for loop in loops)
            names = tuple(map(program.name_in_jax, computed))
            cycles = sum(map(program.cycles, computed)) if program.has_cycles else None
            kind, size, dtypes = _kind(sent[0]) or "", sum(sent[0].sizes), _dtypes(sent[0])
            yield Overlap(kind, size, turns, names, dtypes, cycles)


def _blocking(program: Program) -> Iterator[Blocking]:
    apart = {begin.name for begin, _ in _overlapping(program)}
    for operation, part, in_loop in _sending(program):
        if not in_loop and operation.name not in apart:
            of = program.name_in_jax(operation)
            yield Blocking(_kind(part) or "", sum(part.sizes), _dtypes(part), of)


def _kind(operation: Instruction) -> str | None:
    """The kind of a collective; None for the end of an asynchronous one."""
    kind = operation.opcode.removesuffix("-start")
    return kind if kind in COLLECTIVES else None


def _costs(compiled: Any) -> dict[str, float]:
    costs = compiled.cost_analysis()  # some backends return a list, others nothing
    return (costs[0] if isinstance(costs, list) else costs) or {}


def _number_of_devices(compiled: Any) -> int:
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    return max((len(s.device_set) for s in shardings), default=1)


def _too_large(error: Exception, device: str, lowered: Any) -> str:
    """The message about a program that needs more memory than a device has."""
    reason = str(error).partition("\n")[0].partition(": ")[2]
    infos = jax.tree_util.tree_leaves_with_path(lowered.args_info)
    sizes = {_name(path): _nbytes(info) for path, info in infos}
    largest = sorted(sizes, key=lambda name: sizes[name], reverse=True)[:5]
    shown = ", ".join(f"{name} {sizes[name] / 1e9:.3g} GB" for name in largest)
    return (
        f"the step does not fit into the memory of {device!r}: the largest arguments, of all "
        f"devices together, are {shown}. The compiler says: {reason}"
    )


def _name(path: Any) -> str:
    """The name of an argument, such as ``args[0]['table']``."""
    kind, *rest = path
    return f"{'kwargs' if kind.idx else 'args'}{jax.tree_util.keystr(tuple(rest))}"


def _between(overlap: Overlap) -> tuple[str, ...]:
    cycles = "" if overlap.cycles is None else f"{overlap.cycles:,} cycles"
    return cycles, f"{overlap.turns} loop iterations", f"{len(overlap.between)} operations"


def _sent(found: Collectives | Overlap | Blocking) -> tuple[str]:
    return (", ".join(found.dtypes),)


def _by_size(found: Iterable[Any]) -> list[Any]:
    return sorted(found, key=lambda one: -one.nbytes)


def _total(found: Sequence[Any]) -> str:
    size, cycles = sum(one.nbytes for one in found), [getattr(x, "cycles", None) for x in found]
    known = [n for n in cycles if n is not None]
    beside = f", {sum(known):,} cycles of other operations" if known else ""
    return f"{len(found)}, {_mega(size)}{beside}" if found else "none"


def _mega(nbytes: float) -> str:
    return f"{nbytes / 1e6:,.1f} MB"


def _shown(report: CompileReport, most: int | None = None) -> Iterator[str]:
    """The lines of a report: totals, then lists with at most ``most`` items each."""
    yield from _totals(report)
    left = []

    def listed(what, found, most=most):
        if more := len(found[most:] if most is not None else ()):
            left.append(f"{more} more {what}")
        return found[:most]

    sizes = sorted(report.not_reused.items(), key=lambda one: -one[1])
    if sizes := listed("arguments that are not reused", sizes):
        yield "donated and not reused:"
        yield from columns([(f"  {name}", _mega(size)) for name, size in sizes])
    moved = [p.name for p in _by_size(report.placements) if p.returned is False]
    if moved := listed("arguments in another sharding", moved):
        yield "returned in another sharding:"
        yield from (f"  {name}" for name in moved)
    if large := listed("new arrays", _by_size(report.large)):
        yield "new arrays:"
    for found in large:
        loop = ", in a loop" if found.in_loop else ""
        yield f"  {found.operation}, {_mega(found.nbytes)}{loop}: {found.of or 'unknown'}"
        yield from (f"    {line}" for line in dict.fromkeys([*found.lines[:1], *found.lines[-1:]]))
    of = lambda found: (f"  {found.kind}", _mega(found.nbytes), *_sent(found))
    if blocking := listed("collectives without overlap", _by_size(report.blocking)):
        yield "collectives without overlap, outside loops:"
        yield from columns([(*of(b), b.of) for b in blocking])
    rest = None if most is None else most - len(blocking)
    beside = listed("overlapped collectives", _by_size(report.overlaps), rest)
    if beside:
        yield "overlapped collectives:"
        yield from columns([(*of(o), *_between(o)) for o in beside])
    if left:
        yield f"{', '.join(left)}: see report.full()"


def _totals(report: CompileReport) -> Iterator[str]:
    of = f"one of {report.num_devices} devices" if report.num_devices > 1 else "one device"
    yield f"compiled for {report.device}, {of}, in {report.compile_seconds:.1f} s"
    sizes = ("arguments", "results", "reused", "temporaries")
    yield from columns([(name, _mega(getattr(report, name))) for name in sizes])
    lost = report.not_reused
    lost_size = f", {_mega(sum(lost.values()))}" if lost else ""
    yield f"donated and not reused: {len(lost) or 'none'}{lost_size}"
    if moved := sum(p.returned is False for p in report.placements):
        yield f"returned in another sharding: {moved}"
    yield f"new arrays of {_mega(report.at_least)} or more: {_total(report.large)}"
    yield f"collectives: {sum(c.number for c in report.collectives) or 'none'}"
    yield from columns(
        [
            (f"  {c.number} {c.kind}", _mega(c.nbytes), *_sent(c), "in a loop" if c.in_loop else "")
            for c in report.collectives
        ]
    )
    if report.blocking:
        yield f"  without overlap, outside loops: {_total(report.blocking)}"
    if report.overlaps:
        yield f"  overlapped: {_total(report.overlaps)}"
    yield "estimates of the compiler:"
    if report.estimated_bytes is not None:
        yield f"  {_mega(report.estimated_bytes)} read and written"
    if report.estimated_flops is not None:
        yield f"  {report.estimated_flops:,.0f} floating-point operations"
    if report.estimated_seconds is not None:
        yield f"  {report.estimated_seconds:.2e} s"
    if report.estimated_cycles is not None:
        yield f"  {report.estimated_cycles:,} cycles"
    estimates = (
        report.estimated_bytes,
        report.estimated_flops,
        report.estimated_seconds,
        report.estimated_cycles,
    )
    if all(value is None for value in estimates):
        yield "  none"
