"""Programs as XLA prints them for TPUs, with what CPUs do not have."""

import pathlib
import re

from optzoo.compiled.hlo import Program
from optzoo.compiled.report import (
    Blocking,
    Collectives,
    Overlap,
    _between,
    _blocking,
    _collectives,
    _large,
    _overlaps,
)

TEXT = pathlib.Path(__file__).with_name("tpu.hlo").read_text()
TABLE = 4 * 100 * 64


def test_what_takes_new_memory():
    program = Program(TEXT)
    assert program.aliases == {0: 0, 1: 2}
    found = {
        op.name: (program.new_arrays(op, TABLE), in_loop)
        for op, in_loop in program.operations()
        if program.new_arrays(op, TABLE)
    }
    # The scatter and the kernel lie where their tables lie, one result of the fusion where its
    # argument lies; the other one is half as large.
    assert found == {
        "copy.1": (1, False),
        "copy-start.1": (1, False),
        "all-to-all-start.1": (1, True),
        "all-reduce-start.1": (1, True),
        "packed": (1, False),
        "copy.2": (1, False),
    }
    sizes = {op.name: op.sizes for op, _ in program.operations()}
    assert sizes["fusion.2"] == (TABLE, TABLE // 2) and sizes["while.1"] == (4, TABLE)


COPIES = """HloModule jit_step, is_scheduled=true, input_output_alias={ {}: (0, {}, may-alias) }

%fused (p: f32[64]) -> f32[64] {
  %p = f32[64]{0:T(128)S(1)} parameter(0)
  ROOT %sin = f32[64]{0:T(128)S(1)} sine(%p)
}

ENTRY %main (x: f32[64], y: f32[64]) -> f32[64] {
  %x = f32[64]{0:T(128)} parameter(0), metadata={op_name="x"}
  %y = f32[64]{0:T(128)} parameter(1), metadata={op_name="y"}
  %copy-start = (f32[64]{0:T(128)S(1)}, f32[64]{0:T(128)}, u32[]{:S(2)}) copy-start(%x)
  %slice-start = ((f32[64]{0:T(128)}), f32[32]{0:T(128)S(1)}, s32[]{:S(2)}) slice-start(%y)
  %slice-start.1 = ((f32[64]{0:T(128)}), f32[32]{0:T(128)S(1)}, s32[]{:S(2)}) slice-start(%y)
  %to_host = (f32[64]{0:T(128)S(5)}, f32[64]{0:T(128)}, u32[]{:S(2)}) copy-start(%y)
  %again = (f32[64]{0:T(128)}, f32[64]{0:T(128)}, u32[]{:S(2)}) copy-start(%y)
  %copy-done = f32[64]{0:T(128)S(1)} copy-done(%copy-start)
  %slice-done = f32[32]{0:T(128)S(1)} slice-done(%slice-start)
  %slice-done.1 = f32[32]{0:T(128)S(1)} slice-done(%slice-start.1)
  %joined = f32[64]{0:T(128)S(1)} custom-call(%slice-done, %slice-done.1), TARGET
  %on_host = f32[64]{0:T(128)S(5)} copy-done(%to_host)
  %other = f32[64]{0:T(128)} copy-done(%again)
  %fusion = f32[64]{0:T(128)S(1)} fusion(%copy-done, %joined), kind=kLoop, calls=%fused
  %copy-start.1 = (f32[64]{0:T(128)}, f32[64]{0:T(128)S(1)}, u32[]{:S(2)}) copy-start(%fusion)
  ROOT %copy-done.1 = f32[64]{0:T(128)} copy-done(%copy-start.1)
}
""".replace("TARGET", 'custom_call_target="ConcatBitcast"')


def test_copies_that_begin_and_end_apart():
    """Each is one array, and says which memory it is in; slices that are joined are one, too."""
    found = [(one.operation, one.nbytes, one.of) for one in _large(Program(COPIES), 256)]
    assert found == [
        ("copy to VMEM", 256, "x"),
        ("copy", 256, "y"),
        ("copy", 256, "y"),
        ("custom-call joined", 256, "y"),
        ("fusion fusion", 256, "x"),
        ("copy from VMEM", 256, "x"),
    ]


def test_names_and_lines():
    program = Program(TEXT)
    by_name = {op.name: op for op, _ in program.operations()}
    assert [program.name_in_jax(op) for op in program.parameters] == ["params['t']", "ids", "other"]
    assert program.name_in_jax(by_name["copy.1"]) == "params['t']"
    assert program.name_in_jax(by_name["copy.2"]) == "jit(step)/pallas_call"
    assert program.name_in_jax(by_name["fusion.1"]) == "jit(step)/scatter"
    lines = ("/lib/optzoo/rows.py:31 (scatter)", "/home/me/train.py:7 (<module>)")
    assert program.lines(by_name["fusion.1"]) == lines
    assert program.lines(by_name["fusion.2"]) == ("model.py:12",)
    assert program.lines(by_name["copy.1"]) == ()


FUSED = """HloModule jit_step, is_scheduled=true

%begin (x: f32[8]) -> f32[32] {
  %x = f32[8]{0} parameter(0)
  ROOT %all-gather.1 = f32[32]{0} all-gather(%x), channel_id=7, dimensions={0}
}

%end (y: f32[8], z: f32[32]) -> f32[32] {
  %y = f32[8]{0} parameter(0)
  %z = f32[32]{0} parameter(1)
  %all-gather.2 = f32[32]{0} all-gather(%y), channel_id=7, dimensions={0}
  ROOT %done = f32[32]{0} custom-call(%z, %all-gather.2), custom_call_target="Done"
}

ENTRY %main (a: f32[8]) -> f32[32] {
  %a = f32[8]{0} parameter(0)
  %start.1 = f32[32]{0} fusion(%a), kind=kCustom, calls=%begin
  ROOT %done.1 = f32[32]{0} fusion(%a, %start.1), kind=kCustom, calls=%end
}
"""


def test_a_collective_that_fusions_begin_and_end():
    """It is one, and nothing runs between."""
    assert list(_blocking(Program(FUSED))) == [Blocking("all-gather", 128, ("f32",), "")]
    assert [*_collectives(Program(FUSED))] == [Collectives("all-gather", False, 1, 128, ("f32",))]


OTHER_CORE = """HloModule jit_step, is_scheduled=true

%sum (x: f32[64], y: f32[32]) -> (f32[64], f32[32]) {
  %x = f32[64]{0:T(128)} parameter(0)
  %y = f32[32]{0:T(128)} parameter(1)
  ROOT %all-reduce.4 = (f32[64]{0}, f32[32]{0}) all-reduce(%x, %y), channel_id=1, to_apply=%add
}, execution_thread="sparsecore"

%join (z: f32[8]) -> f32[64] {
  %z = f32[8]{0:T(128)} parameter(0)
  ROOT %all-gather.7 = f32[64]{0:T(128)} all-gather(%z), channel_id=1, dimensions={0}
}, execution_thread="sparsecore"

ENTRY %main (a: f32[64], b: f32[32], c: f32[8]) -> f32[64] {
  %a = f32[64]{0} parameter(0)
  %b = f32[32]{0} parameter(1)
  %c = f32[8]{0} parameter(2)
  %r.start = ((), (), SCRATCH) custom-call-start(), called_computations={%sum}
  %before = f32[64]{0} fusion(%a), kind=kLoop, calls=%product, metadata={op_name="before"}
  %r.update = (TWO, TWO, SCRATCH) custom-call-update(%r.start, %a, %b)
  %beside = f32[64]{0} fusion(%a), kind=kLoop, calls=%product, metadata={op_name="beside"}
  %r.done = TWO custom-call-done(%r.update)
  %g.start = ((), (), SCRATCH) custom-call-start(), called_computations={%join}, NAME
  %g.update = ((f32[8]{0}), f32[64]{0}, SCRATCH) custom-call-update(%g.start, %c)
  ROOT %g.done = f32[64]{0} custom-call-done(%g.update)
}

%product (q: f32[64]) -> f32[64] {
  %q = f32[64]{0} parameter(0)
  ROOT %product.1 = f32[64]{0} multiply(%q, %q)
}
"""
OTHER_CORE = OTHER_CORE.replace("SCRATCH", "(s32[1871872]{0}, s32[259]{0:S(11)})")
OTHER_CORE = OTHER_CORE.replace("TWO", "(f32[64]{0}, f32[32]{0})")
OTHER_CORE = OTHER_CORE.replace("NAME", 'metadata={op_name="last"}')


def test_collectives_of_another_core():
    """As the compiler for tpu7x gives them to SparseCores: all of one channel, with scratch.

    What runs before it has its operands does not run beside it.
    """
    program = Program(OTHER_CORE)
    assert [*_collectives(program)] == [
        Collectives("all-gather", False, 1, 256, ("f32",)),
        Collectives("all-reduce", False, 1, 384, ("f32",)),
    ]
    assert [*_overlaps(program)] == [Overlap("all-reduce", 384, 0, ("beside",), ("f32",), None)]
    assert [*_blocking(program)] == [Blocking("all-gather", 256, ("f32",), "last")]
    arrays = {op.name: program.new_arrays(op, 128) for op, _ in program.operations()}
    made = {name: number for name, number in arrays.items() if number}
    assert made == {"r.start": 2, "before": 1, "beside": 1, "g.start": 1}


BESIDE = """HloModule jit_step, is_scheduled=true

%sum (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %all-reduce.1 = f32[8]{0} all-reduce(%x), channel_id=1, to_apply=%add
  ROOT %copied = f32[8]{0} copy(%all-reduce.1)
}

%body (s: (s32[], f32[8])) -> (s32[], f32[8]) {
  ROOT %s = (s32[], f32[8]{0}) parameter(0)
}

%below (s.1: (s32[], f32[8])) -> pred[] {
  %s.1 = (s32[], f32[8]{0}) parameter(0)
  %limit = s32[] constant(3)
  %i = s32[] get-tuple-element(%s.1), index=0
  ROOT %lt = pred[] compare(%i, %limit), direction=LT
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %async-collective-start = (f32[8]{0}, u32[]) fusion(%a), kind=kCustom, calls=%sum
  %gte = f32[8]{0} get-tuple-element(%async-collective-start), index=0
  %all-gather-start = (f32[8]{0}, f32[32]{0}) all-gather-start(%a), channel_id=2
  %loop = (s32[], f32[8]{0}) while(%tuple), condition=%below, body=%body, metadata={op_name="while"}
  %known = (s32[], f32[8]{0}) while(%tuple), condition=%body, body=%body, BACKEND
  %all-gather-done = f32[32]{0} all-gather-done(%all-gather-start)
  %carried = f32[8]{0} get-tuple-element(%loop), index=1
  %product = f32[8]{0} fusion(%a), kind=kLoop, calls=%body, metadata={op_name="mul"}
  %tuple.1 = (f32[8]{0}) tuple(%gte)
  %passed = f32[8]{0} get-tuple-element(%tuple.1), index=0
  ROOT %async-collective-done = f32[8]{0} fusion(%passed), kind=kCustom, calls=%sum
}
""".replace("BACKEND", 'backend_config={"known_trip_count":{"n":"5"}}')


def test_what_runs_beside_a_collective():
    found = list(_overlaps(Program(BESIDE)))
    assert found == [
        Overlap("all-gather", 4 * 32, 8, ("while", ""), ("f32",), None),
        Overlap("all-reduce", 4 * 8, 8, ("while", "", "mul"), ("f32",), None),
    ]
    assert _between(found[0]) == ("", "8 loop iterations", "2 operations")
    assert list(_blocking(Program(BESIDE))) == []


CYCLES = """HloModule jit_step, is_scheduled=true

%fused (w: f32[8]) -> f32[8] {
  ROOT %w = f32[8]{0} parameter(0)
}

%called (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  ROOT %part = f32[8]{0} fusion(%x), kind=kLoop, calls=%fused, CYCLES(7)
}

%other (y: f32[8]) -> f32[8] {
  %y = f32[8]{0} parameter(0)
  ROOT %part.1 = f32[8]{0} fusion(%y), kind=kLoop, calls=%fused, CYCLES(9)
}

%below (s: f32[8]) -> pred[] {
  ROOT %s = f32[8]{0} parameter(0)
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %all-to-all.1 = bf16[4,8]{1,0} all-to-all(%a), channel_id=1, metadata={op_name="first"}
  %all-to-all-start = ((f32[8]{0}), bf16[2,8]{1,0}) all-to-all-start(%a), channel_id=2
  %before = f32[8]{0} fusion(%a), kind=kLoop, calls=%fused, CYCLES(100)
  %call = f32[8]{0} call(%before), to_apply=%called
  %choice = f32[8]{0} conditional(%i, %a, %a), branch_computations={%called, %other}
  %turns = f32[8]{0} while(%a), condition=%below, body=%called, TURNS
  %unknown = f32[8]{0} while(%a), condition=%below, body=%called
  %no_estimate = f32[8]{0} fusion(%a), kind=kLoop, calls=%fused, CYCLES(9223372036854775807)
  %all-to-all-done = bf16[2,8]{1,0} all-to-all-done(%all-to-all-start)
  %all-reduce-start = f32[8]{0} all-reduce-start(%a), channel_id=3, metadata={op_name="last"}
  %again = f32[8]{0} while(%a), condition=%below, body=%sends
  ROOT %all-reduce-done = f32[8]{0} all-reduce-done(%all-reduce-start)
}

%sends (z: f32[8]) -> f32[8] {
  %z = f32[8]{0} parameter(0)
  ROOT %all-to-all.2 = s32[8]{0} all-to-all(%z), channel_id=4
}
"""
CYCLES = re.sub(r"CYCLES\((\d+)\)", r'backend_config={"estimated_cycles":"\1"}', CYCLES)
CYCLES = CYCLES.replace("TURNS", 'backend_config={"known_trip_count":{"n":"5"}}')


def test_cycles_beside_a_collective():
    """A loop counts its turns, a condition its longest branch."""
    program = Program(CYCLES)
    first, last = _overlaps(program)
    assert first.cycles == 100 + 7 + 9 + 5 * 7 and first.dtypes == ("bf16",)
    assert (last.kind, last.cycles) == ("all-reduce", 0)
    assert _between(first) == ("151 cycles", "5 loop iterations", "6 operations")
    assert list(_blocking(program)) == [Blocking("all-to-all", 64, ("bf16",), "first")]
    of_loops = Collectives("all-to-all", True, 1, 32, ("s32",))
    assert [*_collectives(program)] == [
        Collectives("all-reduce", False, 1, 32, ("f32",)),
        Collectives("all-to-all", False, 2, 96, ("bf16",)),
        of_loops,
    ]
    waiting = Program(CYCLES.replace("%again = f32[8]{0} while", "%again = f32[8]{0} copy"))
    assert [found.of for found in _blocking(waiting)] == ["first", "last"]


def test_turns_that_are_not_known():
    unknown = BESIDE.replace("direction=LT", "direction=NE")
    [gather, _] = _overlaps(Program(unknown))
    assert gather.turns == 5
