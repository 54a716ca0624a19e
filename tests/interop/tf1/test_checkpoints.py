"""Training resumes from TensorFlow's checkpoints as it does there, and from ours in TensorFlow."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optzoo
from optzoo.core.paths import path_name
from optzoo.interop.tf1 import files as tf1_files
from optzoo.interop.tf1.load import load_tf1_state
from optzoo.interop.tf1.powers import estimate_exponent, is_integer_exponent
from optzoo.interop.tf1.save import save_tf1_state, tf1_variables
from optzoo.state.tf1_names import TF1Names
from optzoo.state.types import LeafwiseState
from tests import golden
from tests.test_api import imports

from . import cases as tf1_cases
from .cases import CASES, FOLDER, STEPS, THEIRS

OURS = golden.load("ours", FOLDER)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """The folder with TensorFlow's checkpoints."""
    folder = tmp_path_factory.mktemp("theirs")
    shutil.unpack_archive(FOLDER / "checkpoints.zip", folder)
    return folder


def of(record, prefix):
    return golden.Record({}, record.arrays).group(prefix)


def relative_error(got, want):
    """The largest error, relative to each element, or a thousandth of the largest."""
    want = np.asarray(want, np.float64)
    scale = np.maximum(np.abs(want), 1e-3 * np.max(np.abs(want), initial=0.0))
    return float(np.max(np.abs(np.asarray(got) - want) / np.maximum(scale, 1e-30), initial=0.0))


# The inverse roots of matrices. In single precision they are exact relative to their norm: small
# elements beside the diagonal depend on the LAPACK kernels that a processor gets. Here these give
# elements that differ by 1.2e-5, and by 3e-5 and 4e-5 from the root in double precision.
ROOTS = {"ShampooRoots": {"enc/kernel/Shampoo_1", "enc/kernel/Shampoo_3", "enc/bias/Shampoo_1"}}


# Their steps are as long as the whole parameter says. A small element is then a difference of
# larger ones and has their rounding, so it is compared with the largest.
OF_NORMS = {"LAMB", *(name for name in CASES if name.startswith("Adafactor"))}


def assert_close(name, variable, got, want):
    """A variable of a case is that of TensorFlow; a root relative to its norm."""
    if name in OF_NORMS:
        error = np.max(np.abs(got - np.float64(want))) / max(np.max(np.abs(want)), 1e-30)
        assert error < 1e-6, variable
    elif variable in ROOTS.get(name, ()):
        assert np.linalg.norm(got - np.float64(want), 2) < 5e-6 * np.linalg.norm(want, 2), variable
    else:
        assert relative_error(got, want) < 5e-6, variable


def by_name(tree):
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def assert_same(got, want):
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert jax.tree.map(jax.typeof, got) == jax.tree.map(jax.typeof, want)


# ------------------------------------------------------------- against TensorFlow itself
@pytest.mark.optimized  # the last bits count: without multiply-add they are others
@pytest.mark.every_value
@pytest.mark.parametrize("name", CASES)
def test_training_resumes_as_in_tensorflow(name, theirs):
    case, tx = CASES[name], tf1_cases.make(CASES[name])
    empty = jax.tree.map(jnp.zeros_like, tf1_cases.start(case))
    arguments = tf1_cases.load_arguments(name, case)
    params, state = load_tf1_state(tx, empty, theirs / name, **arguments)
    assert jax.tree.map(jax.typeof, state) == jax.tree.map(jax.typeof, tx.init(empty))
    path, params, state = tf1_cases.train(name, STEPS, params, state)
    for variable, ours in by_name(path).items():
        assert_close(name, variable, ours, THEIRS.arrays[f"{name}/path/{variable}"])

    end = of(THEIRS, f"{name}/end")
    if name == "TwoAdams":
        arguments = {"variables": tf1_cases.save_arguments(name, case, theirs)["variables"]}
    arguments = {k: v for k, v in arguments.items() if k != "swapped"}
    saved = tf1_variables(params, state, like=end, **arguments)
    if case.get("restart"):
        assert saved.keys() > end.keys()
    else:
        assert saved.keys() == end.keys()
    for variable in end.keys() - {"flat_grad"}:
        assert_close(name, variable, saved[variable], end[variable])


@pytest.mark.optimized  # the last bits count: without multiply-add they are others
@pytest.mark.parametrize("name", CASES)
def test_tensorflow_resumes_as_we_do(name, theirs):
    case = CASES[name]
    params, state = tf1_cases.train_from_start(name)
    saved = tf1_variables(params, state, **tf1_cases.save_arguments(name, case, theirs))
    if case.get("swapped"):  # the graph's saver put them back
        average = "/ExponentialMovingAverage"
        other = {n: n.removesuffix(average) if n.endswith(average) else n + average for n in saved}
        saved |= {n: saved[other[n]] for n in saved if other[n] in saved}
    restored = of(OURS, f"{name}/restored")
    if case.get("restart"):  # the workers start again
        saved = {variable: saved[variable] for variable in restored}
        params, state = load_tf1_state(tf1_cases.make(case), params, saved)
    assert saved.keys() - {"Variable"} == restored.keys() - {"Variable"}
    for variable, value in restored.items():
        assert saved[variable].dtype == value.dtype and saved[variable].shape == value.shape
        assert_close(name, variable, saved[variable], value)
    path, _, _ = tf1_cases.train(name, STEPS, params, state)
    for variable, ours in by_name(path).items():
        assert_close(name, variable, ours, OURS.arrays[f"{name}/path/{variable}"])


def test_every_optimizer_of_theirs_has_a_checkpoint():
    have = {case["optimizer"] for case in CASES.values()}
    wanted = {
        golden.short_name(entry.original) for entry in optzoo.CATALOG.values() if entry.original
    }
    assert wanted <= have
    wrappers = {"MovingAverage", "VariableClipping", "MultitaskOptimizerWrapper"}
    assert wrappers | {"SyncReplicas", "ElasticAverage", "AGN"} <= have


def test_the_page_has_the_names():
    page = pathlib.Path(__file__).parents[3] / "docs" / "tf1_checkpoints.md"
    assert tf1_cases.table() in page.read_text()


@pytest.mark.parametrize("ending", ["", ".npz"])
def test_what_is_written_is_read_again(ending, theirs, tmp_path):
    tx = tf1_cases.make(CASES["Adam"])
    params, state = load_tf1_state(tx, tf1_cases.start(CASES["Adam"]), theirs / "Adam")
    file = tmp_path / f"mine-5{ending}"
    for _ in range(2):  # also over what is there
        save_tf1_state(file, params, state, optimizer_name="Adam")
    wanted = tf1_files.read(theirs / "Adam")
    got = tf1_files.read(str(file))
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        assert got[name].dtype == value.dtype
        np.testing.assert_array_equal(got[name], value)
    assert_same(load_tf1_state(tx, params, file), (params, state))


# ------------------------------------------------------------------------ killed processes
def kills(folder, *arguments):
    """What ``kills.py`` counts."""
    command = [sys.executable, "-m", "tests.interop.tf1.kills", folder, *arguments]
    root = pathlib.Path(__file__).parents[3]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(("file", "least"), [("m", 12), ("m.npz", 4)])
def test_a_killed_save_leaves_the_old_or_the_new_checkpoint(file, least, tmp_path):
    counts = kills(tmp_path, file, "steps")
    assert counts["killed"] >= least and counts["old"] and counts["new"]


@pytest.mark.full
@pytest.mark.parametrize("file", ["m", "m.npz"])
def test_kills_at_random_moments(file, tmp_path):
    counts = kills(tmp_path, file, "times", "100")
    assert counts["killed"] == 100 and counts["old"] and counts["new"]


def test_a_checkpoint_is_read_while_another_process_saves(tmp_path):
    assert kills(tmp_path, "m", "reads", "50")["different"] > 1


def test_a_checkpoint_in_several_files_is_replaced(tmp_path):
    prefix = str(tmp_path / "m")
    tf1_files._save_v2(prefix, {"v": np.ones(3)})
    merged = tf1_files._with_data_files(prefix, str(tmp_path), 3)
    assert len(tf1_files._data_files(merged)) == 3
    assert tf1_files.read(merged).keys() == {"v"}
    tf1_files.write(merged, {"w": np.ones(2)})
    assert tf1_files.read(merged).keys() == {"w"}
    names = {"merged.index", "merged.data-00000-of-00001"}
    assert {file.name for file in tmp_path.iterdir()} == names


@pytest.mark.parametrize("ending", ["", ".npz"])
def test_paths_that_cannot_be_written(ending, tmp_path):
    write = lambda path: tf1_files.write(path, {"w": np.zeros(1)})
    (tmp_path / f"folder{ending}").mkdir()
    for path in ("", f"{tmp_path}/", tmp_path / f"folder{ending}"):
        with pytest.raises(ValueError, match=r"path is '.*', which is (empty|a folder): give the"):
            write(path)
    with pytest.raises(TypeError, match=r"path must be a string or a path, got b'm'"):
        write(b"m")
    (tmp_path / "file").write_text("")
    for path in (tmp_path / f"file/m{ending}", f"/dev/null/m{ending}"):
        with pytest.raises(OSError, match=r"path: cannot write the checkpoint '/.*/m"):
            write(path)
    write(tmp_path / f"new/folder/m{ending}")
    assert tf1_files.read(tmp_path / f"new/folder/m{ending}").keys() == {"w"}


def test_errors_of_tensorflow_name_the_path(tmp_path):
    (tmp_path / "m.index").mkdir()
    with pytest.raises(OSError, match=r"path: cannot write the checkpoint '.*/m'"):
        tf1_files.write(tmp_path / "m", {"w": np.zeros(1)})
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        tf1_files._save_v2(str(tmp_path / "file" / "m"), {"w": np.zeros(1)})
    with pytest.raises(ValueError, match=r"names: .* a name for the array with the empty path"):
        tf1_files.write(tmp_path / "n", {"": np.zeros(1)})


# ------------------------------------------------------------------------- damaged files
def test_a_damaged_checkpoint_is_refused(theirs, tmp_path):
    index = (theirs / "Adam.index").read_bytes()
    data = (theirs / "Adam.data-00000-of-00001").read_bytes()
    whole = tf1_files.read(theirs / "Adam")
    prefix = tmp_path / "m"

    def read(index, data):
        (tmp_path / "m.index").write_bytes(index)
        (tmp_path / "m.data-00000-of-00001").write_bytes(data)
        return tf1_files.read(prefix)

    flip = lambda file, k: file[:k] + bytes([file[k] ^ 4]) + file[k + 1 :]
    broken = [(index[:k], data) for k in range(0, len(index), 3)]
    broken += [(index, data[:k]) for k in range(0, len(data), 3)]
    broken += [(index, flip(data, k)) for k in range(len(data))]
    for files in broken:
        with pytest.raises(ValueError, match=f"cannot read the checkpoint '{prefix}'"):
            read(*files)
    refused = 0
    for k in range(len(index)):
        try:
            got = read(flip(index, k), data)
        except ValueError as error:
            assert str(prefix) in str(error)
            refused += 1
        else:  # there is room in it that nobody uses
            jax.tree.map(np.testing.assert_array_equal, got, whole)
    assert refused > len(index) / 2
    read(index, data)
    os.remove(tmp_path / "m.data-00000-of-00001")
    with pytest.raises(ValueError, match=f"cannot read the checkpoint '{prefix}'"):
        tf1_files.read(prefix)
    with pytest.raises(FileNotFoundError, match=r"give its prefix, such as 'model\.ckpt-1000'"):
        tf1_files.read(tmp_path / "another")


def test_a_damaged_npz_is_refused(tmp_path):
    whole = {"w": np.arange(6, dtype=np.float32), "file": np.ones((2, 2)), "n": np.int64(3)}
    path = tmp_path / "a.npz"
    tf1_files.write(path, {k: np.asarray(v) for k, v in whole.items()})
    file = path.read_bytes()
    for k in range(0, len(file), 5):
        path.write_bytes(file[:k])
        with pytest.raises(ValueError, match=r"cannot read the checkpoint '.*a\.npz'"):
            tf1_files.read(path)
        path.write_bytes(file[:k] + bytes([file[k] ^ 1]) + file[k + 1 :])
        try:
            got = tf1_files.read(path)
        except ValueError as error:
            assert "a.npz" in str(error)
        else:  # a date, say
            assert got.keys() == whole.keys()
            for name, value in whole.items():
                np.testing.assert_array_equal(got[name], value)
    with pytest.raises(FileNotFoundError, match=r"b\.npz"):
        tf1_files.read(tmp_path / "b.npz")


def test_tensorflow_is_needed_for_its_own_files_only(monkeypatch, tmp_path, theirs):
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    with pytest.raises(ImportError, match=r"pip install 'optzoo\[tf1\]'"):
        tf1_files.read(theirs / "Adam")
    with pytest.raises(ImportError, match=r"pip install 'optzoo\[tf1\]'"):
        tf1_files.write(tmp_path / "m", {"w": np.zeros(1)})
    tf1_files.write(tmp_path / "m.npz", {"w": np.zeros(1)})
    assert tf1_files.read(tmp_path / "m.npz").keys() == {"w"}
    with pytest.raises(TypeError, match=r"cannot store w of dtype bfloat16"):
        tf1_files.write(tmp_path / "m.npz", {"w": np.zeros(1, jnp.bfloat16)})


# --------------------------------------------------------------- by names, without files
PARAMS = {"enc": {"kernel": jnp.ones((3, 2)), "bias": jnp.zeros(2)}, "w": jnp.arange(4.0)}


def trained(tx, params=PARAMS, steps=3):
    """Parameters and a state in which no array is as it was."""
    state, update = tx.init(params), jax.jit(tx.update)
    for k in range(steps):
        g = jax.tree.map(lambda x, k=k: np.cos(x + k).astype(x.dtype), params)
        updates, state = update(g, state, params)
        params = jax.tree.map(lambda x, u: x + u, params, updates)
    return params, state


def saved_adam(**renamed):
    params, state = trained(optzoo.adam(0.1))
    saved = tf1_variables(params, state, optimizer_name="Adam")
    return params, state, {renamed.get(n, n): v for n, v in saved.items()}


# Optimizers whose variables have the names of slots.
BY_FIELD = {
    "adam_weight_decay": (optzoo.adam_weight_decay(0.1), {"w/adam_m", "w/adam_v"}),
    "lamb": (optzoo.lamb(0.1), {"w/adam_m", "w/adam_v"}),
    "adafactor": (optzoo.adafactor(0.1, b1=0.9), {"w_slot_m", "w_slot_v"}),
}


@pytest.mark.parametrize("name", BY_FIELD)
@pytest.mark.parametrize("scope", [None, "train"])
def test_variables_with_the_names_of_slots(name, scope):
    """They need no name of an optimizer; of a bfloat16 parameter they are float32."""
    tx, wanted = BY_FIELD[name]
    params, state = trained(tx)
    saved = tf1_variables(params, state, scope=scope)
    within = {n if scope is None else f"{scope}/{n}" for n in wanted}
    assert within <= saved.keys()
    assert_same(load_tf1_state(tx, PARAMS, saved, scope=scope), (params, state))
    again = tf1_variables(params, state, scope=scope, like=saved)
    assert again.keys() == saved.keys()
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    saved = tf1_variables(half, tx.init(half))
    assert saved["w"].dtype == jnp.bfloat16
    assert {saved[n].dtype for n in wanted} == {np.dtype("float32")}


def test_factored_slots_are_numbered_or_have_names():
    """As the checkpoint has them; without one, by the name of the optimizer if that is given."""
    tx = optzoo.adafactor(0.1)
    params, state = trained(tx)
    named = tf1_variables(params, state)
    numbered = tf1_variables(params, state, optimizer_name="Adafactor")
    assert {"enc/kernel_slot_vr", "enc/kernel_slot_vc", "w_slot_v"} < named.keys()
    assert {"enc/kernel/Adafactor", "enc/kernel/Adafactor_1", "w/Adafactor"} < numbered.keys()
    for saved in (named, numbered):
        assert_same(load_tf1_state(tx, PARAMS, saved), (params, state))
        assert tf1_variables(params, state, like=saved).keys() == saved.keys()
    del named["enc/kernel_slot_vc"]
    with pytest.raises(ValueError, match=r"missing: enc/kernel_slot_vc, for slots/vc/enc/kernel"):
        load_tf1_state(tx, PARAMS, named)
    swapped = {**numbered, "enc/kernel/Adafactor": numbered["enc/kernel/Adafactor_1"]}
    with pytest.raises(ValueError, match=r"shape: enc/kernel/Adafactor is \(2,\) in the check"):
        load_tf1_state(tx, PARAMS, swapped)


def test_accumulated_gradients_of_nvidia_are_left_over():
    tx = optzoo.lamb(0.1)
    params, state = trained(tx)
    saved = tf1_variables(params, state)
    more = {"local_step": np.int32(3), "batch_finite": np.array(True)}
    more |= {f"{name}/accum": saved[name] for name in ("w", "enc/kernel", "enc/bias")}
    ignore = ["*/accum", "local_step", "batch_finite"]
    assert_same(load_tf1_state(tx, PARAMS, saved | more, ignore=ignore), (params, state))
    kept = tf1_variables(params, state, like=saved | more)
    assert kept.keys() == saved.keys() | more.keys()


def test_a_released_model_has_no_slots():
    tx = optzoo.adam_weight_decay(0.1)
    params, state = trained(tx)
    saved = tf1_variables(params, state)
    released = {name: value for name, value in saved.items() if "/adam_" not in name}
    with pytest.raises(ValueError, match=r"missing: w/adam_v, for 0/slots/adam_v/w"):
        load_tf1_state(tx, PARAMS, released)
    with pytest.warns(UserWarning, match="missing: w/adam_m"):
        found, new = load_tf1_state(tx, PARAMS, released, partial=True, global_step=0)
    assert_same((found, new), (params, tx.init(params)))


SHORTENED = {"enc/kernel": "K", "enc/bias": "B", "w": "W"}


@pytest.mark.parametrize(
    "names",
    [
        SHORTENED,
        SHORTENED.get,
        [("^enc/", ""), ("^kernel$", "K"), ("^bias$", "B"), ("w", "W")],
    ],
)
def test_names_are_a_dict_a_function_or_patterns(names):
    tx = optzoo.adam(0.1)
    params, state = trained(tx)
    saved = tf1_variables(params, state, names, optimizer_name="Adam")
    assert {"K", "B", "W", "K/Adam", "B/Adam_1", "W/Adam"} < saved.keys()
    assert_same(load_tf1_state(tx, PARAMS, saved, names), (params, state))


def test_wrong_names():
    tx = optzoo.adam(0.1)
    with pytest.raises(ValueError, match=r"no parameter is called \['v'\]; the parameters are"):
        load_tf1_state(tx, PARAMS, {}, {"v": "w"})
    with pytest.raises(ValueError, match=r"names \['w'\] are given to several parameters"):
        load_tf1_state(tx, PARAMS, {}, {"enc/bias": "w"})
    with pytest.raises(TypeError, match="names must be a function"):
        load_tf1_state(tx, PARAMS, {}, ["enc/", ""])


def test_the_error_lists_all_that_does_not_fit():
    *_, saved = saved_adam()
    saved["enc/kernel"] = saved["enc/kernel"].T
    saved["enc/bias"] = saved["enc/bias"].astype(np.float64)
    saved["w/Adam_1"] = saved["w/Adam_1"][:2]
    saved["other"] = np.zeros(2)
    del saved["w"], saved["beta2_power"]
    with pytest.raises(ValueError) as error:
        load_tf1_state(optzoo.adam(0.1), PARAMS, saved)
    assert str(error.value).splitlines() == [
        "the checkpoint does not fit, and nothing was loaded:",
        "  missing: w, for w",
        "  missing: beta2_power, for 0/shared/beta2_power",
        "  dtype: enc/bias is float64 in the checkpoint, but must be float32",
        "  shape: enc/kernel is (2, 3) in the checkpoint, but must be (3, 2)",
        "  shape: w/Adam_1 is (2,) in the checkpoint, but must be (4,)",
        "  left over: other",
    ]
    # Another shape is an error however much is loaded.
    with pytest.raises(ValueError, match=r"w/Adam_1 is \(2,\)"):
        load_tf1_state(optzoo.adam(0.1), PARAMS, saved, partial=True)


def test_a_table_with_more_rows_than_in_the_checkpoint():
    """As those of a sharded table, which fill up the shards."""
    saved = {name: np.ones((3, 2), np.float32) for name in ("w", "w/Momentum")}
    tx, more = optzoo.momentum(0.1, 0.9), {"w": jnp.zeros((8, 2))}
    with pytest.raises(ValueError) as error:
        load_tf1_state(tx, more, saved, global_step=0)
    assert str(error.value).splitlines()[1:] == [
        "  shape: w is (3, 2) in the checkpoint, but must be (8, 2): load 3 rows, and add more "
        "with optzoo.growing.resize_table",
        "  shape: w/Momentum is (3, 2) in the checkpoint, but must be (8, 2)",
    ]
    params, state = load_tf1_state(tx, {"w": jnp.zeros((3, 2))}, saved, global_step=0)
    params, state = optzoo.growing.resize_table(params, state, {"w": 8}, tx=tx)
    np.testing.assert_array_equal(optzoo.get_slot(state, "momentum")["w"][:, 0], [1] * 3 + [0] * 5)


def test_a_part_is_loaded_on_request():
    tx = optzoo.adam(0.1)
    params, state, saved = saved_adam()
    lost = ("w", "w/Adam", "w/Adam_1")
    some = {name: value for name, value in saved.items() if name not in lost} | {"x": np.ones(1)}
    with pytest.raises(
        ValueError, match=r"partial=True skips these variables:\n  missing: w, for w"
    ):
        load_tf1_state(tx, PARAMS, some)
    with pytest.warns(UserWarning) as told:
        new_params, new_state = load_tf1_state(tx, PARAMS, some, partial=True)
    assert [str(one.message).splitlines() for one in told] == [
        [
            "partial=True: missing variables keep the values of params and tx.init, and variables "
            "left over are not loaded:",
            "  missing: w, for w",
            "  missing: w/Adam, for 0/slots/m/w",
            "  missing: w/Adam_1, for 0/slots/v/w",
            "  left over: x",
        ]
    ]
    assert told[0].filename == __file__
    assert_same(new_params, {**params, "w": PARAMS["w"]})
    start = tx.init(PARAMS)[0].slots
    assert_same(new_state[0].slots.m, {**state[0].slots.m, "w": start.m["w"]})
    assert new_state[0].count == 3 and new_state[0].shared == state[0].shared

    # Parameters only: the optimizer starts again, averages included, at what was loaded.
    only = {name: saved[name] for name in ("enc/kernel", "enc/bias", "w")}
    average = optzoo.moving_average(tx, 0.9)
    with pytest.warns(UserWarning, match=r"missing: w/Expo"):
        new_params, new_state = load_tf1_state(average, PARAMS, only, partial=True)
    assert_same(new_params, params)
    assert_same(new_state, average.init(params))


def test_the_slots_of_another_optimizer_are_refused():
    *_, saved = saved_adam()
    missing = r"missing: w/\.\.\.: 1 slots are needed, the checkpoint has Adam \(2\)"
    with pytest.raises(ValueError, match=missing):
        load_tf1_state(optzoo.momentum(0.1, 0.9), PARAMS, saved)
    with pytest.raises(ValueError, match=r"missing: w/Adagrad: 2 slots are needed, .* Adam \(2\)"):
        load_tf1_state(optzoo.adam(0.1), PARAMS, saved, optimizer_name="Adagrad")
    amsgrad = optzoo.amsgrad(0.1)
    with pytest.raises(
        ValueError, match=r"3 slots are needed, .* has none; RETURNN's AMSGrad does not name"
    ):
        load_tf1_state(amsgrad, {"w": jnp.ones(2)}, {"w": np.ones(2, np.float32)})


def test_slots_of_several_optimizers_are_ambiguous():
    tx = optzoo.adam(0.1)
    params, state, saved = saved_adam()
    other = {n.replace("/Adam", "/Nadam"): v + 1 for n, v in saved.items() if "/Adam" in n}
    both = saved | other
    with pytest.raises(
        ValueError, match=r"\[\('', 'Adam'\), \('', 'Nadam'\)\].*optimizer_name \(the second\)"
    ):
        load_tf1_state(tx, PARAMS, both)
    chosen = {"optimizer_name": {".*": "Adam"}, "ignore": ["*/Nadam", "*/Nadam_1"]}
    loaded = load_tf1_state(tx, PARAMS, both, **chosen)
    assert_same(loaded, (params, state))
    with pytest.raises(ValueError, match=r"left over: enc/bias/Nadam"):
        load_tf1_state(tx, PARAMS, both, optimizer_name="Adam")


def test_scopes_are_found():
    tx = optzoo.adam(0.1)
    params, state = trained(tx)
    saved = tf1_variables(params, state, optimizer_name="Adam", scope="optimize")
    assert {"optimize/enc/kernel/Adam_1", "optimize/beta1_power", "w"} < saved.keys()
    assert_same(load_tf1_state(tx, PARAMS, saved), (params, state))
    twice = saved | {n.replace("optimize/", "again/"): v + 0 for n, v in saved.items()}
    with pytest.raises(ValueError, match=r"give scope \(the first part\)"):
        load_tf1_state(tx, PARAMS, twice)
    loaded = load_tf1_state(tx, PARAMS, twice, scope="optimize", ignore=["again/*"])
    assert_same(loaded, (params, state))


def test_slots_of_a_parameter_with_a_longer_name_are_not_taken():
    *_, saved = saved_adam()
    inner = {"kernel": PARAMS["enc"]["kernel"]}  # the checkpoint has enc/kernel, and no kernel
    with pytest.raises(ValueError, match=r"missing: kernel/\.\.\.: 2 slots"):
        load_tf1_state(optzoo.adam(0.1), inner, saved)


def test_powers_of_several_optimizers():
    one, other = optzoo.adam(0.1, b1=0.5), optzoo.adam(0.1, b1=0.8)
    labels = {"enc": "one", "w": "other"}
    tx = optax.partition({"one": one, "other": other}, labels)
    params, state = trained(tx)
    with pytest.raises(ValueError, match=r"is one of several beta1_power: give it by variables="):
        tf1_variables(params, state, optimizer_name="Adam")
    power = "inner_states/other/inner_state/0/shared/beta{}_power"
    second = {power.format(i): f"beta{i}_power_1" for i in (1, 2)}
    saved = tf1_variables(params, state, optimizer_name="Adam", variables=second)
    assert float(saved["beta1_power"]) == 0.5**4 and "beta1_power_1" in saved
    assert_same(load_tf1_state(tx, PARAMS, saved), (params, state))  # each base has one that fits
    assert_same(load_tf1_state(tx, PARAMS, saved, variables=second), (params, state))
    alone = {array: "beta1_power" for array in second}
    with pytest.raises(ValueError, match=r"differ, but both are saved as beta1_power"):
        tf1_variables(params, state, optimizer_name="Adam", variables=alone)
    odd = saved | {"beta1_power": saved["beta1_power_1"] * np.float32(0.9)}
    with pytest.raises(ValueError, match=r"may be any of \['beta1_power', 'beta1_power_1'\]"):
        load_tf1_state(tx, PARAMS, odd)
    with pytest.raises(ValueError, match=r"the state has no arrays \['0/m'\]; it has"):
        load_tf1_state(tx, PARAMS, saved, variables={"0/m": "w/Adam"})
    same = {"inner_states/one/inner_state/0/slots/m/enc/bias": "enc/bias/Adam_1"}
    with pytest.raises(ValueError, match=r"several slots would share a variable"):
        load_tf1_state(tx, PARAMS, saved, variables=same)


# ----------------------------------------------------------------------- the global step
def counts(state):
    leaves = by_name(state).items()
    return {int(leaf) for name, leaf in leaves if name.split("/")[-1] == "count"}


def test_the_step_is_found():
    tx = optzoo.adam(optax.linear_schedule(0.1, 0.0, 10))
    *_, saved = saved_adam()
    assert counts(load_tf1_state(tx, PARAMS, saved)[1]) == {3}
    assert counts(load_tf1_state(tx, PARAMS, saved, global_step=7)[1]) == {7}
    renamed = {{"global_step": "optimize/step"}.get(n, n): v for n, v in saved.items()}
    assert counts(load_tf1_state(tx, PARAMS, renamed, global_step="step")[1]) == {3}
    for stored, step in ((saved, None), (saved, 7), (renamed, "step")):
        with pytest.raises(ValueError, match=r"left over: other$"):
            load_tf1_state(tx, PARAMS, stored | {"other": np.ones(3)}, global_step=step)
    with pytest.raises(ValueError, match=r"has no integer variable 'steps'"):
        load_tf1_state(tx, PARAMS, renamed, global_step="steps")
    for step in (-1, 2**31, 2**31 + 1):
        with pytest.raises(ValueError, match=rf"global_step must be in \[0, 2\*\*31\), got {step}"):
            load_tf1_state(tx, PARAMS, saved, global_step=step)
    two = saved | {"a/global_step": np.int64(1), "b/global_step": np.int64(2)}
    del two["global_step"]
    with pytest.raises(ValueError, match=r"may be any of \['a/global_step', 'b/global_step'\]"):
        load_tf1_state(tx, PARAMS, {k: np.asarray(v) for k, v in two.items()})


@pytest.mark.parametrize("number", [1, 3, 700, 2000, 50_000])
def test_powers_tell_the_step(number):
    saved = saved_adam()[2]
    del saved["global_step"]
    for name, base in (("beta1_power", 0.9), ("beta2_power", 0.999)):
        power = np.float32(base)
        for _ in range(number):
            power *= np.float32(base)
        saved[name] = np.asarray(power)
    assert counts(load_tf1_state(optzoo.adam(0.1), PARAMS, saved)[1]) == {number}


def test_an_unknown_step_is_an_error():
    params, state = trained(optzoo.momentum(0.1, 0.9))
    saved = tf1_variables(params, state, optimizer_name="Momentum")
    del saved["global_step"]
    with pytest.raises(
        ValueError, match=r"missing: the number of updates: give the argument global_step"
    ):
        load_tf1_state(optzoo.momentum(0.1, 0.9), PARAMS, saved)
    saved = saved_adam()[2]
    del saved["global_step"]
    saved["beta1_power"] = saved["beta1_power"] * np.float32(0.9)  # they differ
    with pytest.raises(
        ValueError, match=r"missing: the number of updates: give the argument global_step"
    ):
        load_tf1_state(optzoo.adam(0.1), PARAMS, saved)


@pytest.mark.parametrize("partial", [False, True])
def test_other_betas_are_refused(partial):
    with pytest.raises(
        ValueError, match=r"betas: beta1_power is 0\.6\d*, which is not a power of 0\.3"
    ):
        load_tf1_state(optzoo.adam(0.1, b1=0.3), PARAMS, saved_adam()[2], partial=partial)


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("value", [2.0, np.nan, np.inf, -0.5, 0.0, 1e-39])
def test_spoilt_powers_are_refused(value, partial):
    *_, saved = saved_adam()
    saved["beta1_power"] = np.asarray(value, np.float32)
    with pytest.raises(ValueError, match=r"nothing was loaded:\n  betas: beta1_power is "):
        load_tf1_state(optzoo.adam(0.1), PARAMS, saved, partial=partial)


@pytest.mark.parametrize("steps", [900, 2000])
@pytest.mark.parametrize(("base", "value"), [(0.0, 0.0), (0.9, 0.0)])
def test_powers_of_zero(base, value, steps):
    """The one of a beta of 0, and of 0.9 after many steps."""
    *_, saved = saved_adam()
    saved |= {"beta1_power": np.float32(value), "beta2_power": np.float32(0.999) ** (steps + 1)}
    saved |= {"global_step": np.int64(steps)}
    saved = {name: np.asarray(x) for name, x in saved.items()}
    assert counts(load_tf1_state(optzoo.adam(0.1, b1=base), PARAMS, saved)[1]) == {steps}
    saved["beta1_power"] = np.asarray(0.25, np.float32)
    with pytest.raises(ValueError, match=r"beta1_power is 0\.25, which is not a power of 0"):
        load_tf1_state(optzoo.adam(0.1, b1=base), PARAMS, saved)


@pytest.mark.parametrize("global_step", [None, "global_step"])
def test_a_step_that_contradicts_the_powers_is_refused(global_step):
    tx, (*_, saved) = optzoo.adam(0.1), saved_adam()
    saved["global_step"] = np.asarray(7)
    match = (
        r"global_step: the checkpoint has 7, but beta1_power is 0\.65\d*, as after 3 updates; give"
    )
    with pytest.raises(ValueError, match=match):
        load_tf1_state(tx, PARAMS, saved, global_step=global_step, partial=True)
    for step in (3, 7):
        assert counts(load_tf1_state(tx, PARAMS, saved, global_step=step)[1]) == {step}


def test_fractional_steps_are_refused():
    tx, (params, state, saved) = optzoo.adam(0.1), saved_adam()
    for step in (1.7, 3.0, np.float32(3), "3", None):
        save = lambda step=step: tf1_variables(
            params, state, optimizer_name="Adam", global_step=step
        )
        if step is None:
            assert save()["global_step"] == 3
        else:
            with pytest.raises(TypeError, match=r"global_step must be an int, got "):
                save()
        if isinstance(step, float | np.floating):
            with pytest.raises(TypeError, match=r"global_step must be an int, got "):
                load_tf1_state(tx, PARAMS, saved, global_step=step)
    for step in (np.int64(3), jnp.int32(3), np.asarray(3)):
        assert counts(load_tf1_state(tx, PARAMS, saved, global_step=step)[1]) == {3}
    with pytest.raises(ValueError, match=r"global_step must be in .*, got True"):
        load_tf1_state(tx, PARAMS, saved, global_step=True)


@pytest.mark.parametrize("value", [3.5, np.nan, np.inf, 1e10])
def test_counts_that_are_no_whole_numbers_are_refused(value):
    tx = optzoo.ggt(0.1, window=2)
    params, state = trained(tx)
    saved = tf1_variables(params, state)
    saved["global_step_1"] = np.asarray(value, np.float32)
    for found in (saved, {n: v for n, v in saved.items() if n != "global_step"}):
        with pytest.raises(ValueError, match=r"value: global_step_1 is .*, but must be int32"):
            load_tf1_state(tx, PARAMS, found, partial=True)


def test_a_part_of_nothing_is_refused(theirs):
    tx, saved = optzoo.adam(0.1), saved_adam()[2]
    other = {f"other/{n}": value for n, value in saved.items() if n != "global_step"}
    for found in ({}, other, {"global_step": saved["global_step"]}):
        with pytest.raises(
            ValueError, match=r"partial=True: the checkpoint has none of .* the argument names"
        ):
            load_tf1_state(optzoo.momentum(0.1, 0.9), PARAMS, found, partial=True, global_step=3)
    powers = {n: value for n, value in saved.items() if n.endswith("_power")}
    with pytest.raises(
        ValueError, match=r"partial=True: the checkpoint has none of .* the argument names"
    ):
        load_tf1_state(tx, PARAMS, {**other, **powers}, partial=True)
    for ending in (".index", ".data-00000-of-00001"):
        with pytest.raises(
            ValueError, match=r"one file of a checkpoint: give its prefix, '.*Adam'"
        ):
            load_tf1_state(tx, PARAMS, theirs / f"Adam{ending}", partial=True)
    assert load_tf1_state(optax.identity(), {}, {}, partial=True) == ({}, optax.EmptyState())


def test_exponents():
    assert estimate_exponent(0.0, 0.9) is None and estimate_exponent(0.5, 0.0) is None
    assert round(estimate_exponent(0.9**7, 0.9), 6) == 7
    # Rounded many times, a power does not tell the number of its factors any more.
    assert estimate_exponent(0.99999**90_000, 0.99999) is not None
    assert estimate_exponent(0.99999**110_000, 0.99999) is None
    assert [is_integer_exponent(n) for n in (0.0, 0.9, 1.0, 6.9999, 7.01)] == [
        False,
        False,
        True,
        True,
        False,
    ]


@pytest.mark.parametrize("enabled", [False, True])
def test_dtypes_are_those_of_the_parameters(enabled, x64):
    tx = optzoo.adam(0.1)
    with x64(enabled):
        params, state = trained(tx, {"w": jnp.arange(3, dtype=float)}, steps=1)
        saved = tf1_variables(params, state, optimizer_name="Adam")
        dtype = np.float64 if enabled else np.float32
        assert saved["w"].dtype == saved["w/Adam"].dtype == dtype
        assert saved["beta1_power"].dtype == np.float32
        assert_same(load_tf1_state(tx, params, saved), (params, state))


def test_dtypes_are_those_of_like():
    params, state, saved = saved_adam()
    like = saved | {"beta1_power": saved["beta1_power"].astype(np.float64)}
    assert tf1_variables(params, state, like=like)["beta1_power"].dtype == np.float64


def test_arrays_stay_where_they_were():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    sharded = {"w": jax.device_put(jnp.zeros(4), place)}
    tx = optzoo.momentum(0.1, 0.9)
    saved = {"w": np.ones(4, np.float32), "w/Momentum": np.ones(4, np.float32)}
    params, state = load_tf1_state(tx, sharded, saved, global_step=0)
    assert params["w"].sharding == state[0].slots.momentum["w"].sharding == place


@pytest.mark.parametrize("of", [jnp.zeros, jax.ShapeDtypeStruct, np.zeros])
def test_arrays_that_had_no_device_go_to_any_mesh(of):
    like = {"w": of((4,), np.float32)}
    tx = optzoo.momentum(0.1, 0.9)
    saved = {"w": np.ones(4, np.float32), "w/Momentum": np.ones(4, np.float32)}
    params, state = load_tf1_state(tx, like, saved, global_step=0)
    assert not any(x.committed for x in jax.tree.leaves((params, state)))
    step = optzoo.minimize(lambda p, x: jnp.mean(x @ p["w"]), tx, mesh=jax.make_mesh((8,), ("d",)))
    params, _, value = step(params, state, jnp.ones((8, 4)))
    assert float(value) == 4 and len(params["w"].devices()) == 8


def test_counts_that_differ_are_not_saved():
    """An optimizer keeps one count; a chain of two transformations has two."""
    chained = optax.chain(
        optzoo.transforms.scale_by_momentum(0.9), optzoo.transforms.scale_by_learning_rate(0.1)
    )
    params, state = trained(chained)
    state = (state[0], state[1]._replace(count=jnp.int32(9)))
    with pytest.raises(ValueError, match=r"counts of the state differ: .*'1/count': 9"):
        tf1_variables(params, state, optimizer_name="Momentum")
    saved = tf1_variables(params, state, optimizer_name="Momentum", global_step=9)
    assert saved["global_step"] == 9 and saved["global_step"].dtype == np.int64


# ------------------------------------------------------------------- chains and wrappers
WRAPPED = {
    "clipped": optax.chain(optzoo.clip_by_global_norm(1.0), optzoo.adam(0.1)),
    "schedule of optax": optax.chain(
        optzoo.transforms.scale_by_adam(),
        optax.scale_by_schedule(optax.linear_schedule(-0.1, 0.0, 9)),
    ),
    "masked": optax.masked(optzoo.adam(0.1), {"enc": True, "w": False}),
    "injected": optax.inject_hyperparams(optzoo.adam)(0.1),
    "injected schedule": optax.inject_hyperparams(optzoo.adam)(optax.linear_schedule(0.1, 0.0, 9)),
    "bfloat16 slots": optzoo.slots_dtype(optzoo.adam(0.1), "bfloat16"),
    "packed slots": optzoo.slots_dtype(optzoo.adam(0.1), "bfloat16", packed=True),
    "packed in 32 bits": optzoo.slots_dtype(optzoo.adam(0.1), "float32", packed=True),
    "every gradient": optzoo.accumulate(optzoo.adam(0.1), 1),
    "all": optzoo.moving_average(
        optzoo.multitask(
            optzoo.decoupled_weight_decay(optzoo.adam(0.1), weight_decay_per_step=0.1, mask=("w",))
        ),
        0.9,
    ),
    "parts of one": optax.partition(
        {"a": optzoo.adam(0.1), "b": optzoo.adam(0.01)}, {"enc": "a", "w": "b"}
    ),
    "replicas": optzoo.sync_replicas(optzoo.adam(0.1), 1, axis_name=None),
    "stale": optzoo.drop_stale_gradient(optzoo.adam(0.1), 1, axis_name=None),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_through_chains_and_wrappers(name):
    tx = WRAPPED[name]
    params, state = trained(tx)
    saved = tf1_variables(params, state, optimizer_name="Adam")
    assert ("w/Adam" in saved) == (name != "masked") and saved["enc/bias/Adam"].dtype == np.float32
    if name == "parts of one":  # there is one optimizer in TensorFlow, and one pair of powers
        del saved["beta1_power_1"], saved["beta2_power_1"]
    loaded = load_tf1_state(tx, PARAMS, saved)
    assert_same(loaded[0], params)
    # The next update overwrites what was injected for the last one.
    update = jax.jit(tx.update)
    assert_same(update(params, loaded[1], params), update(params, state, params))
    if name != "parts of one":
        again = tf1_variables(params, state, like=saved)
        assert again.keys() == saved.keys()
        jax.tree.map(np.testing.assert_array_equal, again, saved)


def test_slots_in_8_bits_are_saved_decoded():
    tx = optzoo.slots_dtype(optzoo.adam(0.1), "int8")
    params = {"w": jnp.sin(jnp.arange(64.0)).reshape(4, 16), "b": jnp.ones(16)}
    params, state = trained(tx, params)
    saved = tf1_variables(params, state, optimizer_name="Adam")
    np.testing.assert_array_equal(saved["w/Adam"], optzoo.get_slot(state, "m")["w"])
    assert_same(load_tf1_state(tx, params, saved), (params, state))


def test_stacked_slots_are_saved_one_by_one():
    plain = optzoo.adam(0.1)
    tx = optzoo.stacked(plain)
    params = {name: jnp.arange(3.0) + i for i, name in enumerate("abc")} | {"d": jnp.ones(2)}
    params, state = trained(tx, params)
    assert jax.tree.leaves(state)[1].shape == (3, 3)  # m of a, b and c
    saved = tf1_variables(params, state, optimizer_name="Adam")
    alone = {name: optzoo.get_slot(state, "v")[name] for name in params}
    for name, v in alone.items():
        np.testing.assert_array_equal(saved[f"{name}/Adam_1"], v)
    assert_same(load_tf1_state(tx, params, saved), (params, state))
    loaded = load_tf1_state(plain, params, saved)[1]
    assert_same(optzoo.get_slot(loaded, "v"), alone)


# Beside the sums of gradients, which have no variables: a made-up name for each.
SUMS = {f"sums/{name}": f"accumulated/{name}" for name in ("enc/kernel", "enc/bias", "w")}


def test_an_optimizer_counts_its_own_updates_among_more_steps():
    tx = optzoo.accumulate(optzoo.adam(0.1), 2)
    params, state = trained(tx, steps=7)
    assert state.count == 7 and counts(state.inner) == {3}
    saved = tf1_variables(params, state, optimizer_name="Adam", variables=SUMS)
    assert saved["global_step"] == 7
    assert_same(load_tf1_state(tx, PARAMS, saved, variables=SUMS), (params, state))
    some = {name: value for name, value in saved.items() if name not in SUMS.values()}
    with pytest.warns(UserWarning, match=r"missing: a variable for sums/enc/bias of the state"):
        loaded = load_tf1_state(tx, PARAMS, some, partial=True)[1]
    assert loaded.count == 7 and counts(loaded.inner) == {3}
    del saved["global_step"]  # the powers tell the updates, not the steps
    with pytest.raises(
        ValueError, match=r"missing: the number of updates: give the argument global_step"
    ):
        load_tf1_state(tx, PARAMS, saved, variables=SUMS)


def test_the_number_of_updates_among_more_steps_is_not_guessed():
    tx = optzoo.accumulate(optzoo.momentum(0.1, 0.9), 2)
    params, state = trained(tx, steps=7)
    saved = tf1_variables(params, state, optimizer_name="Momentum", variables=SUMS)
    match = r"missing: the number of updates at \['inner/0/count'\], .* in the argument variables"
    with pytest.raises(ValueError, match=match):
        load_tf1_state(tx, PARAMS, saved, variables=SUMS)
    named = SUMS | {"inner/0/count": "updates"}
    saved |= {"updates": np.float32(3)}
    assert_same(load_tf1_state(tx, PARAMS, saved, variables=named), (params, state))


def test_parameters_may_be_abstract():
    abstract = jax.eval_shape(lambda: PARAMS)
    params, state, saved = saved_adam()
    assert_same(load_tf1_state(optzoo.adam(0.1), abstract, saved), (params, state))


def test_a_single_array_as_parameters():
    tx = optzoo.ggt(0.1, window=2)
    params, state = trained(tx, jnp.arange(3.0))
    saved = tf1_variables(params, state, {"": "w"})
    assert saved["grad_buffer"].shape == (2, 3) and saved["global_step_1"].dtype == np.float32
    new_params, new_state = load_tf1_state(tx, params, saved, {"": "w"})
    np.testing.assert_allclose(new_state[0].shared["gram"], state[0].shared["gram"], rtol=1e-6)
    assert_same(new_params, params)
    assert_same(new_state[0].slots, state[0].slots)
    alone = {n: v for n, v in saved.items() if n != "global_step"}  # GGT counts its updates itself
    assert_same(load_tf1_state(tx, params, alone, {"": "w"})[1][0].count, state[0].count)
    unread = {n: v for n, v in saved.items() if n != "flat_grad"}  # written before it is read
    assert_same(load_tf1_state(tx, params, unread, {"": "w"})[1][0].slots, state[0].slots)
    lost = {n: v for n, v in saved.items() if n != "moment1"}
    with pytest.raises(ValueError, match=r"missing: moment1, for 0/slots/moment1"):
        load_tf1_state(tx, params, lost, {"": "w"})
    with pytest.raises(
        ValueError, match=r"shape: grad_buffer is \(2, 3\) .*, but must be \(4, 3\)"
    ):
        load_tf1_state(optzoo.ggt(0.1, window=4), params, saved, {"": "w"})


def test_concatenated_slots_of_parameters_of_unlike_sizes():
    """As the original: the flat gradients, one after the other; each row of a window, too."""
    tx, sizes = optzoo.ggt(0.1, window=2), {"a": (4,), "b": (3,), "c": (2, 3)}
    params = {name: jnp.zeros(shape) for name, shape in sizes.items()}
    saved = tf1_variables(params, tx.init(params))
    flat = np.arange(26, dtype=np.float32).reshape(2, 13)
    saved |= {"moment1": flat[0], "grad_buffer": flat}
    loaded = load_tf1_state(tx, params, saved)
    slots = loaded[1][0].slots
    for name, (start, end) in {"a": (0, 4), "b": (4, 7), "c": (7, 13)}.items():
        of = flat[:, start:end].reshape(2, *sizes[name])
        np.testing.assert_array_equal(slots.moment1[name], of[0])
        np.testing.assert_array_equal(slots.grad_buffer[name], of)
    again = tf1_variables(*loaded)
    for name in ("moment1", "grad_buffer"):
        np.testing.assert_array_equal(again[name], saved[name])


def test_concatenated_slots_of_workers_may_start_again():
    tx = optzoo.model_average(optzoo.ggt(0.1, window=2), axis_name=None)
    params, state = trained(tx, {"w": jnp.arange(3.0)})
    saved = tf1_variables(params, state)
    assert saved["moment1"].any()
    local = ("moment1", "grad_buffer", "flat_grad", "global_step_1")
    lost = {n: v for n, v in saved.items() if n not in local}
    loaded = load_tf1_state(tx, params, lost)[1]
    assert not loaded.per_replica.inner[0].slots.moment1["w"].any()


def test_no_optimizer_is_imported():
    for path in pathlib.Path(tf1_files.__file__).parent.glob("*.py"):
        of_optzoo = [name for name in imports(path) if name.startswith("optzoo.")]
        assert {name.split(".")[1] for name in of_optzoo} <= {
            "core",
            "state",
            "deferred",
            "interop",
        }, path


def test_names_of_user_defined_slots():
    class Slots(NamedTuple):
        some: Any  # an array for each of two dimensions, not in all graphs
        all: Any  # the same, in all of them
        first: Any

        tf1 = TF1Names(
            slot="Mine",
            order=("first", ("some", "all")),
            optional=("some",),
            not_in_tf1={"sum": lambda slots: slots.first["w"].sum(), "failures": None},
        )

    w = lambda value: np.full(2, value, np.float32)
    slots = Slots({"w": (w(1), w(3))}, {"w": (w(2), w(4))}, {"w": w(0)})
    state = LeafwiseState(jnp.int32(5), slots, {"sum": jnp.float32(0), "failures": jnp.int32(7)})
    tx = optax.GradientTransformation(lambda _: jax.tree.map(jnp.zeros_like, state), None)
    params = {"w": w(1)}
    saved = tf1_variables(params, state)
    assert {n: float(v[0]) for n, v in saved.items() if "/" in n} == {
        "w/Mine": 0,
        "w/Mine_1": 2,
        "w/Mine_2": 4,
    }
    assert saved.keys() == {"w", "w/Mine", "w/Mine_1", "w/Mine_2", "global_step"}
    longer = saved | {f"w/Mine{'_' * bool(i)}{i or ''}": w(10 + i) for i in range(5)}
    assert longer.keys() - saved.keys() == {"w/Mine_3", "w/Mine_4"}
    for given, values in ((saved, [0, 0, 2, 4, 0]), (longer, [11, 13, 12, 14, 10])):
        loaded = load_tf1_state(tx, params, given)[1]
        assert [float(x[0]) for x in jax.tree.leaves(loaded.slots)] == values
        assert loaded.shared == {"sum": 2 * values[-1], "failures": 0} and loaded.count == 5


def test_arrays_that_tensorflow_does_not_have_are_computed():
    tx = optzoo.ggt(0.1, window=2, window_dtype="bfloat16")
    params, state = trained(tx)
    saved = tf1_variables(params, state)
    loaded = load_tf1_state(tx, PARAMS, saved)[1]
    np.testing.assert_allclose(loaded[0].shared["gram"], state[0].shared["gram"], rtol=1e-5)
    assert_same(loaded[0].slots, state[0].slots)


def test_averages_and_parameters_are_swapped():
    tx = optzoo.moving_average(optzoo.adam(0.1), 0.5)
    params, state = trained(tx)
    plain = tf1_variables(params, state, optimizer_name="Adam")
    swapped = tf1_variables(params, state, optimizer_name="Adam", swapped=True)
    np.testing.assert_array_equal(swapped["w"], plain["w/ExponentialMovingAverage"])
    np.testing.assert_array_equal(swapped["w/ExponentialMovingAverage"], plain["w"])
    assert_same(load_tf1_state(tx, PARAMS, swapped, swapped=True), (params, state))


@pytest.mark.parametrize("wrap", [optzoo.elastic_average, optzoo.agn, optzoo.model_average])
def test_workers_start_at_the_center(wrap):
    size = {"num_workers": 1} if wrap is optzoo.elastic_average else {}
    tx = wrap(optzoo.momentum(0.1, 0.9), axis_name=None, **size)
    saved = {"global_step": np.int64(5)}
    for name, value in by_name(PARAMS).items():
        saved |= {f"global_center_variable/{name}": value + 1, f"{name}/Momentum": value + 2}
    params, state = load_tf1_state(tx, PARAMS, {k: np.asarray(v) for k, v in saved.items()})
    above = lambda by: jax.tree.map(lambda x: x + by, PARAMS)
    assert_same(params, above(1))
    assert_same(optzoo.eval_params(params, state), above(1))
    assert state.replicated.global_step == 5 and state.replicated.count == 0
    assert_same(state.per_replica.inner[0].slots.momentum, above(2))
    trained_params, trained_state = trained(tx)
    swapped = tf1_variables(trained_params, trained_state, optimizer_name="Momentum", swapped=True)
    np.testing.assert_array_equal(swapped["w"], trained_state.replicated.center["w"])


def test_arrays_without_a_tensorflow_variable():
    for tx, array in (
        (optax.adam(0.1), "0/mu/w"),
        (optax.MultiSteps(optzoo.adam(0.1), 2).gradient_transformation(), "acc_grads/w"),
        (optax.flatten(optzoo.adam(0.1)), "0/slots/m"),
    ):
        params, state = PARAMS, tx.init(PARAMS)
        with pytest.raises(ValueError, match=rf"TensorFlow has no variables for .*{array}"):
            tf1_variables(params, state, optimizer_name="Adam")
        saved = saved_adam()[2]
        with pytest.raises(ValueError, match=rf"missing: a variable for {array} of the state"):
            load_tf1_state(tx, PARAMS, saved)
    plain, grafted = optzoo.shampoo(0.1), optzoo.shampoo(0.1, grafting="adam")
    start = {"w": jnp.ones(2)}
    saved = tf1_variables(start, plain.init(start), optimizer_name="Shampoo")
    with pytest.raises(ValueError, match=r"missing: w/\.\.\.: 3 or 4 slots"):
        load_tf1_state(grafted, start, saved)


def test_arguments_that_saving_needs(theirs):
    params, state = trained(optzoo.adam(0.1))
    with pytest.raises(ValueError, match=r"optimizer_name must be given for the slots"):
        tf1_variables(params, state)
    with pytest.raises(ValueError, match=r"slots of \['w'\]"):
        tf1_variables(params, state, optimizer_name={"enc/.*": "Adam"})
    like = tf1_variables(params, state, optimizer_name="A") | {"learning_rate": np.float32(0.1)}
    assert tf1_variables(params, state, like=like)["learning_rate"] == np.float32(0.1)
    with pytest.raises(ValueError, match=r"w has shape \(3,\) in like, but \(4,\) in the state"):
        tf1_variables(params, state, like=like | {"w": np.zeros(3)})
    nothing = {n: v for n, v in like.items() if "/A" not in n}
    with pytest.raises(ValueError, match=r"w/\.\.\.: 2 slots are needed, the checkpoint has none"):
        tf1_variables(params, state, like=nothing)
