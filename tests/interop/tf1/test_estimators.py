"""Checkpoints with variables in parts: of TensorFlow's estimators, and of optimizers in scopes."""

import importlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optzoo
from optzoo.interop.tf1 import files as tf1_files
from optzoo.interop.tf1 import parts as tf1_parts
from optzoo.interop.tf1 import table
from optzoo.interop.tf1.load import load_tf1_state
from optzoo.interop.tf1.parts import Parts, slot_variable
from optzoo.interop.tf1.save import save_tf1_state, tf1_variables
from tests import golden

from . import estimators
from .estimators import ESTIMATORS, FOLDER, GRAPHS, STEPS

OURS = golden.load("ours", FOLDER)
# Those that differ most come first.
FIRST = ["CombinedParts", "LinearClassifier", "DNNClassifierParts", "V1-2-sharded", "Scope19-11"]
NAMES = [*FIRST, *(name for name in (*ESTIMATORS, *GRAPHS) if name not in FIRST)]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """The folder with TensorFlow's checkpoints."""
    folder = tmp_path_factory.mktemp("estimators")
    shutil.unpack_archive(FOLDER / "checkpoints.zip", folder)
    return folder


def recorded(name, kind):
    """The arrays of TensorFlow after it restored our checkpoint."""
    return golden.Record({}, OURS.arrays).group(f"{name}/{kind}")


def assert_near(got, want):
    """Equal to 1e-6 of each array's largest element."""
    for name, value in want.items():
        difference = np.max(np.abs(np.asarray(got[name]) - value))
        assert difference <= 1e-6 * np.max(np.abs(value)), name


def pieces(stored):
    """The arrays of a file, by their names and slices."""
    found = {}
    for name, value in stored.items():
        of_name = value.values if isinstance(value, Parts) else {None: value}
        found |= {(name, part): array for part, array in of_name.items()}
    return found


def assert_same_variables(stored, want):
    """A file has what TensorFlow had: by ``name``, or by ``name shape slice`` of a part."""
    assert {key.partition(" ")[0] for key in want} == stored.keys()
    for key, value in want.items():
        variable, _, spec = key.partition(" ")
        got = stored[variable]
        if isinstance(got, Parts):
            got = next(a for p, a in got.values.items() if tf1_files._spec(got.shape, p) == spec)
        assert got.dtype == value.dtype and got.shape == value.shape, key
        assert_near({key: got}, {key: value})


# ------------------------------------------------------------- against TensorFlow itself
@pytest.mark.optimized  # the last bits count: without multiply-add they are others
@pytest.mark.every_value
@pytest.mark.parametrize("name", NAMES)
def test_training_resumes_as_in_tensorflow(name, theirs, tmp_path):
    params, state = estimators.load(name, theirs)
    first = STEPS if name in GRAPHS else 0  # the gradients of estimators begin at the checkpoint
    path, params, state = estimators.train(name, first, params, state)
    assert_near(path, estimators.of(name, "path"))
    save_tf1_state(tmp_path / "m", params, state, like=estimators.path_of(name, theirs))
    assert_same_variables(tf1_files.read(tmp_path / "m"), estimators.of(name, "end"))


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_is_saved_as_it_was(name, theirs, tmp_path):
    prefix = estimators.path_of(name, theirs)
    save_tf1_state(tmp_path / "m", *estimators.load(name, theirs), like=prefix)
    got, want = pieces(tf1_files.read(tmp_path / "m")), pieces(tf1_files.read(prefix))
    assert got.keys() == want.keys()
    for key, array in want.items():
        assert got[key].dtype == array.dtype and got[key].shape == array.shape, key
        assert got[key].tobytes() == array.tobytes(), key


@pytest.mark.optimized
@pytest.mark.parametrize("name", NAMES)
def test_tensorflow_resumes_as_we_do(name, theirs, tmp_path):
    params, state = estimators.trained(name, theirs)
    save_tf1_state(tmp_path / "m", params, state, like=estimators.path_of(name, theirs))
    saved = tf1_files.read(tmp_path / "m")
    assert_same_variables(saved, recorded(name, "restored"))
    g = None if name in GRAPHS else estimators.stack(name, recorded(name, "grad"))
    path, *_ = estimators.train(name, STEPS, params, state, g)
    assert_near(path, recorded(name, "path"))


@pytest.mark.parametrize("name", [name for name in GRAPHS if name.startswith("Scope")])
def test_the_rule_gives_the_names_that_tensorflow_gave(name, theirs):
    case, stored = GRAPHS[name], tf1_files.read(theirs / name)
    ((scope, *_),) = case["each"]
    slots = {slot_variable(scope, "bias", slot) for slot in ("Adam", "Adam_1")}
    for parameter, number in (("e/t", case["parts"]), ("e/kernel", 1)):
        for part in range(number):
            slots |= {slot_variable(scope, parameter, s, part) for s in ("Adam", "Adam_1")}
    powers = {tf1_parts.join(scope, f"beta{i}_power") for i in (1, 2)}
    assert stored.keys() == slots | powers | {"bias", "e/t", "e/kernel", "global_step"}


def test_the_page_has_the_rule():
    page = (FOLDER.parents[2] / "docs" / "tf1_checkpoints.md").read_text()
    for scope in ("dnn", "linear", "my_model", "a_longer_model"):
        whole, part = (slot_variable(scope, "w", "Adam", part) for part in (None, 0))
        assert f"| `{scope}` | `{whole}` | `{part}` |\n" in page


@pytest.mark.unique
@pytest.mark.parametrize("name", ["LazyAdam", "Adam"])
def test_tables_of_parts_go_to_sharded_minimize(theirs, tmp_path, name):
    """A table in 11 parts becomes one of 4 shards; a step is that of one device; and back."""
    tx = optzoo.create(name, learning_rate=0.1)
    tx = optzoo.caught_up(tx, mask="e/t") if name == "Adam" else tx
    name = "Scope3-11"
    params, state = load_tf1_state(tx, estimators.start(name), theirs / name)
    loss = lambda p, ids: jnp.mean((p["e/t"][ids] @ p["e/kernel"] + p["bias"][None]) ** 2)
    ids = jnp.arange(8) % 5
    want = optzoo.minimize(loss, tx, min_rows=1)(*jax.tree.map(jnp.copy, (params, state)), ids)[:2]

    mesh = jax.make_mesh((4,), ("shard",), devices=jax.devices()[:4])
    tables = {"e/t": optzoo.sharded.RowSharding(num_rows=12, num_shards=4, multiple=1)}
    params, state = optzoo.growing.resize_table(params, state, {"e/t": 16}, tx=tx)
    params, state = optzoo.sharded.from_order_of_ids((params, state), tables, params)
    place = lambda n: jax.sharding.NamedSharding(mesh, jax.P("shard") if n in tables else jax.P())
    params = {n: jax.device_put(x, place(n)) for n, x in params.items()}
    state = jax.device_put(state, optzoo.state_sharding(tx, params))
    got = optzoo.sharded_minimize(loss, tx, mesh, tables)(params, state, ids)[:2]
    got = jax.device_get(optzoo.sharded.in_order_of_ids(got, tables, params))
    got, want = (optzoo.growing.resize_table(*x, {"e/t": 12}, tx=tx) for x in (got, want))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)
    save_tf1_state(tmp_path / "m", *got, like=theirs / name)
    like, saved = tf1_files.read(theirs / name), tf1_files.read(tmp_path / "m")
    assert pieces(saved).keys() == pieces(like).keys()
    rows = saved["e/t"].values
    np.testing.assert_array_equal(
        np.concatenate([rows[part] for part in sorted(rows)]), got[0]["e/t"]
    )


# ----------------------------------------------------------------- by names, without files
F = lambda *shape: np.ones(shape, np.float32)
ADAGRAD = optzoo.create("Adagrad", learning_rate=0.1)
W = {"w": jnp.zeros((4, 3))}


def accumulator(*arguments, **options):
    """The slot that is loaded, its only value."""
    (value,) = set(
        np.ravel(optzoo.get_slot(load_tf1_state(*arguments, **options)[1], "accumulator")["w"])
    )
    return value


def halves(value, *, of=(4, 3)):
    """A variable of which a file has the first or the second half."""
    first, second = ((0, 2), (0, 3)), ((2, 2), (0, 3))
    return {
        "first": Parts(of, {first: value * F(2, 3)}),
        "second": Parts(of, {second: value * F(2, 3)}),
    }


def test_one_part_needs_no_slices():
    """A dict has the names alone."""
    saved = {"w": F(4, 3), "w/t_0/Adagrad": 5 * F(4, 3), "global_step": np.int64(5)}
    assert accumulator(ADAGRAD, W, saved) == 5
    assert accumulator(ADAGRAD, W, saved, scope="dnn") == 5
    for wrong in ("", "linear"):
        with pytest.raises(ValueError, match=r"w/\.\.\.: 1 slots.*\n.*left over: w/t_0/Adagrad"):
            load_tf1_state(ADAGRAD, W, saved, scope=wrong)
    got = tf1_variables(*load_tf1_state(ADAGRAD, W, saved), like=saved)
    assert got.keys() == saved.keys() and got["w/t_0/Adagrad"][0, 0] == 5


def test_a_scope_is_known_by_slots_without_parts():
    """The letters of the scope are those of a parameter without a partitioner."""
    start = {"w": jnp.zeros((4, 3)), "b": jnp.zeros(3)}
    saved = {"w": F(4, 3), "w/t_0/Adagrad": 5 * F(4, 3), "b": F(3), "global_step": np.int64(5)}
    alike = saved | {"dnn/b/Adagrad": 5 * F(3)}
    assert accumulator(ADAGRAD, start, alike) == 5
    with pytest.raises(ValueError, match=r"any of \[\('\?\?\?', 'Adagrad'\), \('linear', "):
        load_tf1_state(ADAGRAD, start, saved | {"linear/b/Adagrad": 5 * F(3)})


def test_two_readings_of_a_name_are_an_error():
    saved = {"w": F(4, 3), "w/t_0/Adagrad": 5 * F(4, 3), "global_step": np.int64(5)}
    twice = saved | {"dnn/w/Adagrad": 6 * F(4, 3)}
    with pytest.raises(
        ValueError, match=r"of w is ambiguous, it may be any of dnn/w/Adagrad and w/t_0/Adagrad"
    ):
        load_tf1_state(ADAGRAD, W, twice)
    other = saved | {"w/part_0/Adagrad": 6 * F(4, 3)}
    either = (
        r"any of \[\('\?\?\?', 'Adagrad'\), \('\?{6}', 'Adagrad'\)\], where \? is any character"
    )
    with pytest.raises(ValueError, match=either):
        load_tf1_state(ADAGRAD, W, other)
    assert accumulator(ADAGRAD, W, other, scope="linear", ignore=["w/t_0/*"]) == 6
    # A parameter that is called as a part is in a scope: w/t_0, or w with scope="dnn".
    start = W | {"w/t_0": jnp.zeros((4, 3))}
    both = saved | {"w/t_0": F(4, 3)}
    with pytest.raises(
        ValueError, match=r"w/t_0/Adagrad is ambiguous, it may be a slot of any of \['w', 'w/t_0'\]"
    ):
        load_tf1_state(ADAGRAD, start, both)
    without_scope = both | {"w/Adagrad": 8 * F(4, 3)}
    assert accumulator(ADAGRAD, start, without_scope, scope="") == 8
    both |= {"dnn/w/t_0/Adagrad": 7 * F(4, 3)}
    assert accumulator(ADAGRAD, start, both, scope="dnn") == 5


def test_names_that_the_caller_gives():
    saved = {"w": F(4, 3), "w/t_0/Adagrad": 5 * F(4, 3), "global_step": np.int64(5)}
    variables = {"0/slots/accumulator/w": "w/t_0/Adagrad"}
    assert accumulator(ADAGRAD, W, saved, variables=variables) == 5
    # A parameter is no slot, whatever its name.
    saved |= {"w/0/x": F(4, 3), "w/0/x/t_0/Adagrad": 6 * F(4, 3)}
    assert accumulator(ADAGRAD, W | {"w/0/x": jnp.zeros((4, 3))}, saved) == 5
    # What is missing is called as the others.
    del saved["w/0/x/t_0/Adagrad"]
    with pytest.raises(ValueError, match=r"missing: w/0/x/t_0/Adagrad, for 0/slots/accumulator/"):
        load_tf1_state(ADAGRAD, W | {"w/0/x": jnp.zeros((4, 3))}, saved)


def test_other_names_are_no_slots():
    saved = {"w": F(4, 3), "w/Adagrad": 5 * F(4, 3), "global_step": np.int64(5)}
    others = {"w/rt_1/Adagrad": F(4, 3), "w/x/Adagrad": F(4, 3), "w/w/part_1/Adagrad": F(4, 3)}
    match = r"fit, .*skip these variables:(\n  left over: w/(rt_1|x|w/part_1)/Adagrad){3}$"
    with pytest.raises(ValueError, match=match):
        load_tf1_state(ADAGRAD, W, saved | others)
    with pytest.raises(ValueError, match=r"shape: w/t_0/Adagrad is \(4,\) in the checkpoint"):
        load_tf1_state(ADAGRAD, W, {"w": F(4, 3), "w/t_0/Adagrad": F(4)}, global_step=5)


def test_scopes_of_the_same_length():
    """They differ in letters: in those that are known."""
    start = {"w": jnp.zeros((4, 3)), "b": jnp.zeros(3)}
    saved = {"w": F(4, 3), "b": F(3), "global_step": np.int64(5)}
    of_b = {"one_large_tower/b/Adagrad": 5 * F(3), "two_large_nets_/b/Adagrad": 6 * F(3)}
    of_w = {"w/_tower/w/part_0/Adagrad": 5 * F(4, 3)}
    assert accumulator(ADAGRAD, start, saved | of_b | of_w, ignore=["two_*"]) == 5
    saved |= of_b | {"w/_nets_/w/part_0/Adagrad": 6 * F(4, 3)} | of_w
    for scope, value in (("one_large_tower", 5), ("two_large_nets_", 6)):
        found = load_tf1_state(ADAGRAD, start, saved, scope=scope, ignore=["*/Adagrad"])[1]
        slot = optzoo.get_slot(found, "accumulator")
        assert slot["w"][0, 0] == value and slot["b"][0] == value


def test_all_parts_are_needed(monkeypatch):
    w, slot = halves(1), halves(5)
    whole = Parts((4, 3), w["first"].values | w["second"].values)
    saved = {"w": whole, "w/t_0/Adagrad": slot["first"], "w/t_1/Adagrad": slot["second"]}
    saved["global_step"] = np.asarray(5)
    monkeypatch.setattr(tf1_files, "read", dict)
    assert accumulator(ADAGRAD, W, saved) == 5
    lost = {name: value for name, value in saved.items() if name != "w/t_1/Adagrad"}
    with pytest.raises(
        ValueError, match=r"1 slots are needed, .* has none\n  left over: w/t_0/Adagrad$"
    ):
        load_tf1_state(ADAGRAD, W, lost)
    exchanged = saved | {"w/t_0/Adagrad": slot["second"], "w/t_1/Adagrad": slot["first"]}
    with pytest.raises(ValueError, match=r"(left over: w/t_\d/Adagrad\s*){2}$"):
        load_tf1_state(ADAGRAD, W, exchanged)
    other = Parts((4, 3), {((0, 1), (0, 3)): F(1, 3)})
    with pytest.raises(ValueError, match=r"(left over: w/t_\d/Adagrad\s*){2}$"):
        load_tf1_state(ADAGRAD, W, saved | {"w/t_0/Adagrad": other})
    with pytest.raises(
        ValueError, match=r"missing: w, for w\n.*has none(\n  left over: w(/t_\d/Adagrad)?){3}$"
    ):
        load_tf1_state(ADAGRAD, W, saved | {"w": w["first"]})
    with pytest.raises(ValueError, match=r"shape: w/t_0/Adagrad, w/t_1/Adagrad is \(4, 3\)"):
        load_tf1_state(ADAGRAD, {"w": jnp.zeros((4, 2))}, saved)


def test_parts_that_are_left_over_are_kept(theirs, tmp_path):
    """The parts of a table, and of its slots, that is no parameter here."""
    tx, prefix = optzoo.create("Adam", learning_rate=0.1), theirs / "Scope3-2"
    start = {n: x for n, x in estimators.start("Scope3-2").items() if n != "e/t"}
    params, state = load_tf1_state(tx, start, prefix, ignore=["e/t", "e/t/*"])
    save_tf1_state(tmp_path / "m", params, state, like=prefix)
    got, want = pieces(tf1_files.read(tmp_path / "m")), pieces(tf1_files.read(prefix))
    assert {k: x.tobytes() for k, x in got.items()} == {k: x.tobytes() for k, x in want.items()}


def test_an_npz_file_has_no_parts(theirs, tmp_path):
    params, state = estimators.load("Scope3-2", theirs)
    with pytest.raises(ValueError, match=r"an \.npz file cannot store e/t/t_0/Adam, a part of a"):
        save_tf1_state(tmp_path / "m.npz", params, state, like=theirs / "Scope3-2")
    with pytest.raises(ValueError, match=r"like has e/t/t_0/Adam in parts: use save_tf1"):
        tf1_variables(params, state, like=theirs / "Scope3-2")
    params, state = estimators.load("Scope0-2", theirs)  # slices of one name are one array
    save_tf1_state(tmp_path / "m.npz", params, state, like=theirs / "Scope0-2")
    saved, got = np.load(tmp_path / "m.npz"), tf1_variables(params, state, like=theirs / "Scope0-2")
    assert got.keys() == set(saved) and saved["e/t/Adam"].shape == got["e/t/Adam"].shape == (12, 2)
    np.testing.assert_array_equal(saved["e/t"], params["e/t"])


# --------------------------------------------------------------------------------- ignore=
def test_variables_that_may_be_left_over():
    saved = {"w": F(4, 3), "w/Adagrad": 5 * F(4, 3), "global_step": np.int64(9)}
    more = {"bn/moving_mean": F(3), "a/bn/moving_mean": F(3), "metrics/total": F()}
    ignore = ["*/moving_mean", "metrics/*", "nothing/*"]
    assert accumulator(ADAGRAD, W, saved | more, ignore=ignore) == 5
    with pytest.raises(
        ValueError,
        match=r"ignore and partial=True skip these variables.*\n  left over: metrics/total$",
    ):
        load_tf1_state(ADAGRAD, W, saved | more, ignore=ignore[:1])
    # Patterns match whole names, and letters as they are.
    with pytest.raises(ValueError, match=r"left over: a/bn/moving_mean\n.*bn/moving_mean"):
        load_tf1_state(
            ADAGRAD, W, saved | more, ignore=["moving_mean", "*/MOVING_*", "metrics/?otal"]
        )
    lost = {n: x for n, x in saved.items() if n != "w/Adagrad"} | more
    with pytest.raises(
        ValueError, match=r"partial=True skips these variables:\n  missing: w/\.\.\.: 1 slots"
    ):
        load_tf1_state(ADAGRAD, W, lost, ignore=ignore)
    with pytest.raises(TypeError, match=r"ignore must be a list of names, got 'metrics/\*'"):
        load_tf1_state(ADAGRAD, W, saved, ignore="metrics/*")
    with pytest.warns(UserWarning, match=r"loaded:\n  left over: metrics/total$"):
        load_tf1_state(ADAGRAD, W, saved | more, ignore=ignore[:1], partial=True)
    load_tf1_state(ADAGRAD, W, saved | more, ignore=ignore, partial=True)  # nothing to tell


def test_parts_are_of_one_save(theirs, tmp_path, monkeypatch):
    """Another process saves after the index is read and before the parts are."""
    params, state = estimators.load("Scope3-2", theirs)
    save = lambda p: save_tf1_state(tmp_path / "m", p, state, like=theirs / "Scope3-2")
    save(params)
    read_parts, calls = tf1_files._read_parts, []

    def after_a_save(*arguments):
        calls.append(arguments)
        if len(calls) == 1:
            with monkeypatch.context() as patch:
                patch.setattr(tf1_files, "_read_parts", read_parts)
                save(jax.tree.map(lambda x: x + 1, params))
        return read_parts(*arguments)

    monkeypatch.setattr(tf1_files, "_read_parts", after_a_save)
    stored = tf1_files.read(tmp_path / "m")
    assert len(calls) == 2
    np.testing.assert_array_equal(stored["bias"], params["bias"] + 1)
    np.testing.assert_array_equal(tf1_parts.put_together(stored["e/t"]), params["e/t"] + 1)


# ------------------------------------------------------------------------- files of others
def test_the_latest_checkpoint_of_a_folder(theirs, tmp_path):
    for name in ("Scope3-2", "V1-2-sharded"):
        prefix = estimators.path_of(name, theirs)
        (tmp_path / name).mkdir()
        with pytest.raises(FileNotFoundError, match=r"no checkpoint in the folder '.*': its file"):
            tf1_files.read(tmp_path / name)
        (tmp_path / name / "checkpoint").write_text(f'model_checkpoint_path: "{prefix}"')
        got, want = tf1_files.read(tmp_path / name), tf1_files.read(prefix)
        assert pieces(got).keys() == pieces(want).keys()


def test_object_based_checkpoints_are_refused(tmp_path):
    tf = importlib.import_module("tensorflow")
    w, optimizer = tf.Variable(F(2, 2), name="w"), tf.compat.v1.train.AdamOptimizer(0.1)
    optimizer.apply_gradients([(tf.ones([2, 2]), w)])
    prefix = tf.train.Checkpoint(w=w, optimizer=optimizer).write(str(tmp_path / "m"))
    reader = tf.train.load_checkpoint(prefix)
    by_name = {n: reader.get_tensor(n) for n in reader.get_variable_to_dtype_map()}
    for checkpoint, called in ((prefix, f"'{prefix}'"), (by_name, "the checkpoint")):
        with pytest.raises(
            ValueError, match=f"^{called} was written by tf.train.Checkpoint or Keras"
        ):
            load_tf1_state(optzoo.adam(), {"w": jnp.zeros((2, 2))}, checkpoint)


# ---------------------------------------------------------------------------------- tables
def test_slices_of_large_v1_files(tmp_path):
    """Their list of variables is longer than a block usually is."""
    tf = importlib.import_module("tensorflow")
    names = [f"layer_{i}/kernel" for i in range(500) for _ in range(2)]
    specs = ["4 3 0,2:-", "4 3 2,2:-"] * 500
    values = [np.full((2, 3), i, np.float32) for i in range(1000)]
    arguments = {"filename": str(tmp_path / "m"), "tensor_names": names, "shapes_and_slices": specs}
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        session.run(tf.raw_ops.SaveSlices(data=values, **arguments))
    stored = tf1_files.read(tmp_path / "m")
    assert stored.keys() == set(names)
    for i in range(500):
        want = np.repeat(np.float32([[2 * i], [2 * i + 1]]), 2, axis=0) * F(1, 3)
        np.testing.assert_array_equal(tf1_parts.put_together(stored[f"layer_{i}/kernel"]), want)


def test_damaged_tables_are_refused(theirs, tmp_path):
    for name in ("V1-2", "Scope3-2.index"):
        whole = (theirs / name).read_bytes()
        list(table.entries(str(theirs / name)))
        for k in range(len(whole)):
            (tmp_path / "m").write_bytes(whole[:k])
            with pytest.raises((ValueError, IndexError)):
                list(table.entries(str(tmp_path / "m")))
