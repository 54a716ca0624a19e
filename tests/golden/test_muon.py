"""Muon follows torch and the author's code step by step; ``make_muon.py`` describes the records."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optzoo
from optzoo.testing import samples

from . import muon_in_numpy

ARRAYS = dict(np.load(pathlib.Path(__file__).with_name("muon.npz")))
META = json.loads(str(ARRAYS.pop("meta")))
CASES = META["cases"]
# How the axes of torch are turned to those of JAX, and what these are.
TURNED = {2: ((1, 0), "io"), 3: ((0, 2, 1), "bio"), 4: ((2, 3, 1, 0), "iiio")}
TOLERANCE = {"bfloat16": 1e-6, "float32": 1e-6, "float64": 1e-12}
OURS = {"lr": "learning_rate", "adjust_lr_fn": "adjust_lr"}


def of_case(case, key):
    """What was recorded of each parameter."""
    names = [name.split("/")[1] for name in ARRAYS if name.startswith(f"{case}/")]
    return {name: ARRAYS[f"{case}/{name}/{key}"] for name in dict.fromkeys(names)}


def arguments(case):
    """Our arguments; the author's class has no decay by default."""
    kwargs = CASES[case]["kwargs"]
    usual = {"weight_decay": 0.0} if CASES[case]["class"] == "author" else {}
    return usual | {OURS.get(key, key): value for key, value in kwargs.items()}


def as_in_jax(x, rank):
    """An array in the layout of JAX, perhaps with a first axis for the steps."""
    order = TURNED[rank][0]
    return x.transpose(*range(x.ndim - rank), *(x.ndim - rank + axis for axis in order))


def follow(case, iteration, **more):
    """The parameters after each step, with parameters in the layout of JAX unless told."""
    dtype = "float64" if iteration == "float64" else "float32"
    init, grads = (
        {name: x.astype(dtype) for name, x in of_case(case, key).items()}
        for key in ("init", "grad")
    )
    if turns := "axes" not in more:
        ranks = {name: x.ndim for name, x in init.items()}
        turn = lambda tree: {name: as_in_jax(x, ranks[name]) for name, x in tree.items()}
        init, grads = turn(init), turn(grads)
        more["axes"] = tuple(TURNED[rank][1] for rank in sorted({*ranks.values()}))
    tx = optzoo.muon(**arguments(case), iteration_dtype=iteration, **more)
    got = samples.trajectory(tx, jax.tree.map(jnp.asarray, init), lambda _, g: g, grads)
    return got, turn if turns else lambda tree: tree


def assert_same(got, want, iteration):
    for name, x in want.items():
        np.testing.assert_allclose(got[name], x, rtol=0, atol=TOLERANCE[iteration], err_msg=name)


@pytest.mark.every_value
@pytest.mark.parametrize("iteration", TOLERANCE)
@pytest.mark.parametrize("case", CASES)
def test_records(case, iteration, x64):
    with x64(iteration == "float64"):
        got, turn = follow(case, iteration)
    want = of_case(case, iteration)
    if "tall_convolution" in want:  # its factor is that of the matrix; the author's is one
        init = of_case(case, "init")["tall_convolution"]
        want["tall_convolution"] = init + (want["tall_convolution"] - init) * (9 / 4) ** 0.5
    assert_same(got, turn(want), iteration)


def test_the_layout_of_torch():
    """The same matrices, with outputs first."""
    got, _ = follow("defaults", "bfloat16", axes="oi")
    assert_same(got, of_case("defaults", "bfloat16"), "bfloat16")


def test_the_other_orientation_goes_elsewhere():
    """The factor of a matrix that is not square depends on which side the outputs are."""
    got, _ = follow("plain", "float32", axes="io")
    want = of_case("plain", "float32")
    assert_same({"square": got["square"]}, {"square": want["square"]}, "float32")
    for name in ("tall", "wide"):
        assert np.max(np.abs(got[name] - want[name])) > 1e-3


@pytest.mark.parametrize("name", ["tall", "wide", "square"])
def test_the_author_rounds_more_often(name):
    """After each product and each sum, as NumPy does it: so the steps are other ones."""
    mean, x, got = 0.0, of_case("author", "init")[name].astype(np.float64), []
    rows, columns = x.shape
    for g in of_case("author", "grad")[name].astype(np.float64):
        mean = 0.95 * mean + 0.05 * g
        step = muon_in_numpy.of_author(0.05 * g + 0.95 * mean)
        x = x - 0.02 * muon_in_numpy.to_bfloat16(step * max(1, rows / columns) ** 0.5)
        got.append(x)
    want = ARRAYS[f"author/{name}/rounded_more"]
    np.testing.assert_allclose(np.stack(got), want, rtol=0, atol=1e-6)
    assert np.max(np.abs(of_case("author", "bfloat16")[name] - want)) > 1e-4


def test_all_of_the_records_is_compared():
    keys = {"init", "grad", *TOLERANCE}
    others = {name for name in ARRAYS if name.rpartition("/")[2] not in keys}
    assert others == {f"author/{name}/rounded_more" for name in ("tall", "wide", "square")}
    assert {name.split("/")[0] for name in ARRAYS} == CASES.keys()
