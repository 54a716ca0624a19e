"""What ``import optzoo`` brings in: nothing that only some of its functions need."""

import importlib
import subprocess
import sys

import pytest

import optzoo

# What the extras and the tests install.
HEAVY = [
    "flax",
    "h5py",
    "hypothesis",
    "IPython",
    "jinja2",
    "keras",
    "matplotlib",
    "orbax",
    "pandas",
]
HEAVY += ["pytest", "returnn", "rich", "sklearn", "tensorboard", "tensorflow", "torch"]
# Rooms that are imported at the first use of a name of theirs. In native, minimize needs the step.
LATER = {"compiled", "host", "interop", "native", "race", "testing"}
NEEDED = {"optzoo.native", "optzoo.native.step", "optzoo.native.engine"}


@pytest.fixture(scope="module")
def loaded():
    """The modules of a new process after the import."""
    code = "import sys, optzoo; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_nothing_heavy_is_imported(loaded):
    assert loaded.isdisjoint(HEAVY), "import it in the function that needs it"


def test_rooms_for_few_programs_are_imported_later(loaded):
    rooms = {name for name in loaded if name.startswith("optzoo.") and name.split(".")[1] in LATER}
    assert rooms - NEEDED == set(), "list the name in _LATER of optzoo/__init__.py"


def test_modules_of_interop_are_imported_at_their_first_use():
    """Also where another module has imported them before."""
    for name in ("fbgemm", "returnn", "tf1"):
        assert optzoo.interop.__getattr__(name) is importlib.import_module(f"optzoo.interop.{name}")
    with pytest.raises(AttributeError, match="has no attribute 'jax'"):
        optzoo.interop.jax  # noqa: B018


def test_create_knows_the_names_of_rooms_that_are_imported_later():
    code = "import optzoo; optzoo.create('EXACT_SGD'); optzoo.create('nadam_keras')"
    subprocess.run([sys.executable, "-c", code], check=True)
