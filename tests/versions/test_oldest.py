"""``tests/oldest.txt`` has the lower bounds of ``pyproject.toml``, which are then tested."""

import pathlib
import tomllib

from packaging.requirements import Requirement

ROOT = pathlib.Path(__file__).parents[2]
# Of the extras without a line here, sparsecore needs a newer JAX; the others have no tests there.
EXTRAS = ("flax", "keras", "native", "race", "returnn", "test", "tf1")


def test_every_lower_bound_is_installed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = [*project["dependencies"]]
    texts += [text for extra in EXTRAS for text in project["optional-dependencies"][extra]]
    lines = (ROOT / "tests/oldest.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    for needed in map(Requirement, texts):
        bounds = [each.version for each in needed.specifier if each.operator == ">="]
        if needed.marker is None or needed.marker.evaluate():
            for bound in bounds:
                assert f"{pins.get(needed.name)}.".startswith(f"{bound}."), needed
