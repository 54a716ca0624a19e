"""The examples of trainers, resumed in the middle on another number of devices."""

import pathlib
import runpy
import warnings

import jax
import numpy as np
import pytest

FOLDER = pathlib.Path(__file__).parents[2] / "examples" / "trainers"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_a_run_goes_on_where_it_stopped(path, tmp_path):
    with warnings.catch_warnings(), jax.numpy_rank_promotion("allow"):
        warnings.simplefilter("ignore")  # of the libraries that they import
        main = runpy.run_path(str(path))["main"]
        eight, four = jax.devices(), jax.devices()[:4]
        want = [main(tmp_path / "whole", steps, eight) for steps in (3, 6)]
        got = [main(tmp_path / "parts", *run) for run in ((3, eight), (6, four))]
        once = main(tmp_path / "once", 6, eight)
    np.testing.assert_allclose(got, want, rtol=2e-5)
    np.testing.assert_allclose(once, want[1], rtol=1e-6)
    assert want[1] < want[0]
