"""What ``import optzoo`` brings in: nothing that only some of its functions need."""

import subprocess
import sys

# What the extras and the tests install.
HEAVY = ["flax", "h5py", "hypothesis", "IPython", "keras", "matplotlib", "orbax", "pandas"]
HEAVY += ["pytest", "returnn", "rich", "sklearn", "tensorboard", "tensorflow", "torch"]


def test_nothing_heavy_is_imported():
    code = f"import sys, optzoo; print(*[name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [], "import it in the function that needs it"
