"""Native calls stay within their arrays: beside each is a page that ends the process if touched."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest

from optzoo.native import engine

from .guarded import MORE, QUICK

pytestmark = pytest.mark.skipif(engine.problem() is not None, reason=str(engine.problem()))
ROOT = pathlib.Path(__file__).parents[2]
LIMIT = 300  # seconds


def run_module(name, *args, **environment):
    """A process that has run a module of this folder, and ended or crashed."""
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", "-m", f"tests.native.{name}", *args],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )


def run_cases(*names):
    """The process that runs these cases of ``guarded.py``."""
    return run_module("guarded", *names)


@pytest.mark.parametrize(
    "names",
    [pytest.param(QUICK, id="quick"), pytest.param(MORE, id="more")],
)
def test_calls_stay_within_their_arrays(names):
    done = run_cases(*sorted(names))
    last = done.stdout.strip().splitlines()[-1:]
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        pytest.fail(f"{last} ended the process by {name}:\n{done.stderr[-3000:]}")
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
    assert last == ["end: 0 failed"]
    assert "warning" not in done.stderr  # of LLVM


@pytest.mark.parametrize("where", ["before", "after"])
def test_the_guard_works(where):
    done = run_cases(where)
    assert done.returncode == -signal.SIGSEGV, (done.returncode, done.stdout, done.stderr)
    assert done.stdout.splitlines() == [f"case: {where}"]
