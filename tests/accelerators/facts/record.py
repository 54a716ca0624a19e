"""The record of what the compilers made of each case, and how a program is compared with it."""

import functools
import hashlib
import importlib.metadata
import json
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from optzoo.compiled.hlo import Program
from optzoo.compiled.report import CompileReport, report_of

from .cases import CASES

Facts = dict[str, Any]
COMMAND = "make facts"
FACTS = pathlib.Path(__file__).with_name("facts.json")
# Apart from the facts, because they change more often: with a part of the library that all use.
PROGRAMS = pathlib.Path(__file__).with_name("programs.json")
PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "optax")

SIZES = ("arguments", "results", "reused", "temporaries")
ESTIMATES = ("bytes", "cycles")
# Operations that send data between the device and its host.
TO_HOST = ("infeed", "outfeed", "send", "recv")
_WIDE = re.compile(r"\b([a-z]+64|c128)\[")  # types of more than 32 bits


def versions() -> dict[str, str]:
    """Of what a program and its facts depend on beside this library."""
    return {name: importlib.metadata.version(name) for name in PACKAGES}


def read(path: pathlib.Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def write(path: pathlib.Path, lines: Mapping[str, Any]) -> None:
    """One line for each entry, so that a difference shows the case."""
    shown = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in lines.items())
    new = path.with_suffix(".new")  # an interruption leaves the old file
    new.write_text("{\n" + ",\n".join(shown) + "\n}\n")
    new.replace(path)


def anew(key: str, known: str | None) -> tuple[str, str, Facts | None]:
    """The program of a case and its facts; None for them if the program is the known one."""
    case = CASES[key]
    if known is not None and known == program_of(case.name, case.target):
        return key, known, None
    lowered = case.lowered()
    report = report_of(lowered, case.device)
    more = facts_of_exchanges(report) if case.name.startswith("exchange/") else {}
    return key, fingerprint(lowered), facts_of(report) | more


@functools.cache
def program_of(name: str, target: str) -> str:
    """The fingerprint of a case."""
    first = next(c for c in CASES.values() if (c.name, c.target) == (name, target))
    return fingerprint(first.lowered())


def fingerprint(lowered: Any) -> str:
    """A hash of a program and of what is donated: with the same compilers it has the same facts."""
    infos = jax.tree_util.tree_leaves_with_path(lowered.args_info)
    donated = [jax.tree_util.keystr(path) for path, info in infos if info.donated]
    return hashlib.sha256((lowered.as_text() + repr(donated)).encode()).hexdigest()[:16]


def facts_of(report: CompileReport) -> Facts:
    """What is recorded of a report; what is none or nothing is left out."""
    found: Facts = {name: _rounded(getattr(report, name)) for name in SIZES}
    found["not_reused"] = sorted(report.not_reused)
    found["large"] = len(report.large)
    found["large_bytes"] = _rounded(sum(operation.nbytes for operation in report.large))
    found["sent"] = {
        f"{c.kind} in a loop" if c.in_loop else c.kind: [c.number, _rounded(c.nbytes)]
        for c in report.collectives
    }
    found["calls"] = sorted(set(_calls(report)))
    found["wide"] = sorted(set(_WIDE.findall(report.text)))
    found |= {name: _rounded(getattr(report, f"estimated_{name}") or 0) for name in ESTIMATES}
    return {name: value for name, value in found.items() if value or name in SIZES}


def facts_of_exchanges(report: CompileReport) -> Facts:
    """The schedule outside of loops: its cycles, and the all-to-alls of rows that run in it."""
    program = Program(report.text)
    found = {"schedule": _rounded(sum(map(program.cycles, program.outermost)))}
    found["exchanges"] = [
        [o.dtypes[0], _rounded(o.nbytes), None if o.cycles is None else _rounded(o.cycles)]
        for o in report.overlaps
        if o.kind == "all-to-all" and o.nbytes >= 1_000_000
    ]
    alone = [b for b in report.blocking if b.kind == "all-to-all" and b.nbytes >= 1_000_000]
    return found | {"exchanges_alone": len(alone)} if alone else found


def _rounded(x: float) -> int:
    """To four digits."""
    return int(float(f"{x:.4g}"))


def _calls(report: CompileReport) -> Iterator[str]:
    """What the program calls: functions outside of it, and the host."""
    for operation, _ in Program(report.text).operations():
        if operation.opcode == "custom-call":
            yield operation.attribute(r'custom_call_target="([^"]*)"') or "unknown"
        elif operation.opcode in TO_HOST:
            yield operation.opcode


def differences(recorded: Facts, now: Facts) -> list[str]:
    """Where facts are not the recorded ones, up to what does not matter."""
    return [
        f"{name}: recorded {_shown(recorded.get(name))}, now {_shown(now.get(name))}"
        for name in dict.fromkeys([*recorded, *now])
        if not _agree(name, recorded.get(name), now.get(name))
    ]


def _agree(name: str, recorded: Any, now: Any) -> bool:
    if name == "sent":
        before, after = recorded or {}, now or {}
        number, size = lambda kinds: {k: n for k, (n, _) in kinds.items()}, lambda x: x[1]
        same = number(before) == number(after)
        return same and all(_close(size(before[k]), size(after[k]), 0.01, 65536) for k in before)
    if name in (*SIZES, "large_bytes"):
        return _close(recorded or 0, now or 0, 0.01, 65536)
    if name in ESTIMATES:
        return _close(recorded or 0, now or 0, 0.05, 0)
    return recorded == now


def _close(a: float, b: float, relative: float, absolute: float) -> bool:
    return abs(a - b) <= relative * max(abs(a), abs(b)) + absolute


def _shown(value: Any) -> str:
    return "none" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
