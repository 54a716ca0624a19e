"""The example ends with the same numbers, whether it was stopped in the middle or not."""

import pathlib
import re
import runpy
import sys

import jax
import pytest

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "host_table.py"


@pytest.mark.optimized
def test_a_run_that_is_stopped_in_the_middle(tmp_path, monkeypatch, capsys):
    def run(folder, *flags):
        sizes = "--rows=26000", "--cache-rows=7000", "--steps=8", "--flush-every=3"
        argv = [EXAMPLE.name, f"--folder={tmp_path / folder}", *sizes, *flags]
        monkeypatch.setattr(sys, "argv", argv)
        with jax.numpy_rank_promotion("allow"):
            runpy.run_path(str(EXAMPLE), run_name="__main__")
        return capsys.readouterr().out

    with pytest.raises(SystemExit, match="stopped at step 5, without a flush"):
        run("stopped", "--stop-at=5")
    capsys.readouterr()
    resumed, whole = run("stopped"), run("whole", "--cache-rows=9000")
    assert "begins at step 3" in resumed and "begins at step 0" in whole
    checksum = lambda out: re.search(r"ends at step 8; .* checksum (\w+)", out)[1]
    assert checksum(resumed) == checksum(whole)
