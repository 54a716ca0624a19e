"""What ``docs/differences.md`` shows of the asks is what comes out."""

import json
import pathlib
import runpy

import flax
import jax
import optax
import pytest

RUN = runpy.run_path(str(pathlib.Path(__file__).parents[1] / "examples" / "asks" / "run.py"))
STORED = json.loads(RUN["STORED"].read_text())
VERSIONS = {module.__name__: module.__version__ for module in (jax, optax, flax)}


@pytest.mark.parametrize("name", RUN["ASKS"])
def test_what_comes_out(name):
    """With other versions, only optzoo's answers are the same."""
    ask = RUN["load"](name)
    with jax.numpy_rank_promotion("allow"):
        assert ask["with_optzoo"]() == STORED["out"][name]["optzoo"]
        if STORED["versions"] == VERSIONS:
            assert ask["with_optax"]() == STORED["out"][name]["optax"]


def test_all_scripts_are_run():
    scripts = {path.stem for path in RUN["FOLDER"].glob("*.py")} - {"run"}
    assert scripts == set(RUN["ASKS"]) == STORED["out"].keys() and len(scripts) == 12
    for name in scripts:
        ask = RUN["load"](name)
        assert ask["ASKED"] and ask["ANSWERED"].split()[0].strip(",:") in ("yes", "no", "partly")
