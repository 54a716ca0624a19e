"""Programs as XLA prints them for TPUs, with what CPUs do not have."""

import pathlib

from optzoo.compiled.hlo import Program
from optzoo.compiled.report import Collectives, _collectives

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
    """It is one."""
    assert [*_collectives(Program(FUSED))] == [Collectives("all-gather", False, 1, 128)]
