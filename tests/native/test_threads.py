"""Native steps through XLA, with pools of several sizes, in processes of their own."""

import pytest

from optzoo.native import engine

from .test_fuzz import WRAPPERS
from .test_safety import run_module
from .threads import OTHERS

pytestmark = pytest.mark.skipif(engine.problem() is not None, reason=str(engine.problem()))


def run(number, *args):
    """What ``threads.py`` prints with a number of threads in XLA's pool."""
    done = run_module("threads", *args, NPROC=str(number))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout.splitlines()


@pytest.mark.parametrize("mode", ["steps", "devices"])
def test_the_number_of_threads_does_not_change_a_bit(mode):
    alone, two, four = (run(number, mode) for number in (1, 2, 4))
    assert len(alone) == {"steps": len(WRAPPERS) + len(OTHERS) + 1, "devices": 1}[mode]
    assert alone == two == four


@pytest.mark.full
def test_memory_stays_flat_while_shapes_change():
    [grown] = run(4, "soak", "10000")
    assert int(grown) < 2**22
