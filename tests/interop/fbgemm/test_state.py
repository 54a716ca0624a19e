"""States of FBGEMM's split tables: a training goes from there to here and from here to there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optzoo
from optzoo import create
from optzoo.interop.fbgemm import fbgemm_state_dict, load_fbgemm_state, save_fbgemm_state
from optzoo.testing import samples

from ...golden.fbgemm.follow import FOLDER, by_name, load, run, start, worst
from ...golden.fbgemm.make_continued import CASES, HALF
from ...golden.test_fbgemm import ROUNDING

CONTINUED = dict(np.load(FOLDER / "states" / "continued.npz"))


def of_case(case):
    """What FBGEMM was given, and how it continued."""
    mine = {k.removeprefix(f"{case}/"): v for k, v in CONTINUED.items() if k.startswith(f"{case}/")}
    saved = {k.removeprefix("saved/"): v for k, v in mine.items() if k.startswith("saved/")}
    return saved, {k: v for k, v in mine.items() if not k.startswith("saved/")}


def split_states(meta, arrays, step):
    """The state of FBGEMM's tables after some steps, as ``split_optimizer_states`` has it."""
    names = {"sum": "momentum1"}
    state = {"iter": np.array([step])}
    if "hyper/max_counter" in arrays:
        state["max_counter"] = arrays["hyper/max_counter"][step - 1 : step]
    for n in meta["var_names"]:
        state[f"{n}/weights"] = arrays[f"param/{n}"][step - 1]
    for s in meta["slots"]:
        name = names.get(s["slot"], s["slot"])
        state[f"{s['var']}/{name}"] = arrays[f"slot/{s['name']}"][step - 1]
    return state


def shapes_of(meta):
    of = zip(meta["var_names"], meta["shapes"], strict=True)
    return {n: jax.ShapeDtypeStruct(tuple(shape), meta["dtype"]) for n, shape in of}


@pytest.mark.parametrize("case", CASES)
def test_from_there_to_here(case):
    """A training of FBGEMM is loaded after half of its steps, and makes the others as there."""
    arrays, meta = load(case)
    tx = by_name(meta, arrays)
    begin = load_fbgemm_state(tx, shapes_of(meta), split_states(meta, arrays, HALF))
    found, end = run(tx, meta, arrays, begin, slice(HALF, None))
    rest = {k: v[HALF:] for k, v in arrays.items()}
    assert worst(found, rest) <= ROUNDING[case] + 3e-5
    assert fbgemm_state_dict(*end)["iter"] == [meta["steps"]]


@pytest.mark.parametrize("case", CASES)
def test_from_here_to_there(case, tmp_path):
    """What was saved here after half of the steps continued in FBGEMM as a training there."""
    arrays, meta = load(case)
    saved, continued = of_case(case)
    tx = by_name(meta, arrays)
    begin = start(tx, meta, arrays, meta["dtype"])
    if "max_counter" in saved:
        begin = begin[0], begin[1]._replace(max_counter=jnp.float32(meta["max_counter"]))
    _, (params, state) = run(tx, meta, arrays, begin, slice(HALF))
    save_fbgemm_state(tmp_path / "half.npz", params, state)
    again = dict(np.load(tmp_path / "half.npz"))
    assert again.keys() == saved.keys()
    for key, value in saved.items():
        assert again[key].dtype == value.dtype and again[key].shape == value.shape
        np.testing.assert_allclose(again[key], value, rtol=1e-5, atol=1e-7)
    rest = {k: v[HALF:] for k, v in arrays.items()}
    assert worst(continued, rest) <= ROUNDING[case] + 3e-5
    # And here, from the file.
    found, _ = run(
        tx, meta, arrays, load_fbgemm_state(tx, params, tmp_path / "half.npz"), slice(HALF, None)
    )
    assert worst(found, continued) <= ROUNDING[case] + 3e-5


COUNTER = {
    "counter_based_regularization": {"learning_rate_mode": "TAIL_ID_LR_INCREASE"},
    "weight_decay_mode": "COUNTER",
}
ALL = {
    "EmbOptimType.EXACT_ROWWISE_ADAGRAD": COUNTER,  # it has more than slots
    "EXACT_SGD": {},
    "EXACT_ADAGRAD": {},
    "EXACT_ROWWISE_ADAGRAD": {"gradient_clipping": True},
    "EMAINPLACE_ROWWISE_ADAGRAD": {},
    "ENSEMBLE_ROWWISE_ADAGRAD": {},
    "EmbOptimType.ADAM": {"extra_optimizer_config": {"use_rowwise_bias_correction": True}},
    "EmbOptimType.LAMB": {},
    "PARTIAL_ROWWISE_ADAM": {},
    "PARTIAL_ROWWISE_LAMB": {},
    "LARS_SGD": {},
    "rowwise_rmsprop_ar": {},
}
TABLES = {"a": jnp.full((3, 4), 0.5), "b": {"c": jnp.ones((2, 8))}}


@pytest.mark.parametrize("name", ALL)
def test_all_optimizers_there_and_back(name):
    """All arrays are other ones than at the start."""
    tx = create(name, **ALL[name])
    params, state = jax.tree.map(lambda a: np.asarray(a) + 3, (TABLES, tx.init(TABLES)))
    renamed = {"a": "first", "b/c": "second"}
    saved = fbgemm_state_dict(params, state, renamed)
    of_all = {"iter", "max_counter"} if ALL[name] is COUNTER else {"iter"}
    assert {key.partition("/")[0] for key in saved} == {"first", "second", *of_all}
    got = load_fbgemm_state(tx, TABLES, saved, renamed.get)
    same = lambda a, b: np.testing.assert_array_equal(a, b)
    jax.tree.map(same, got, (params, state))
    assert jax.tree.structure(got) == jax.tree.structure((params, state))
    dotted = {key.replace("/", "."): value for key, value in saved.items()}
    jax.tree.map(same, load_fbgemm_state(tx, TABLES, dotted, renamed)[1], state)


def test_names_of_get_optimizer_state():
    """Those of torch's optimizers, in a mapping for each table, with the step in each."""
    sums = np.arange(3, dtype=np.float32)
    tx, x = create("EXACT_ROWWISE_ADAGRAD"), {"t": jnp.ones((3, 4))}
    params, state = load_fbgemm_state(tx, x, {"t": {"sum": sums, "iter": np.array([7])}})
    np.testing.assert_array_equal(optzoo.get_slot(state, "accumulator")["t"], sums)
    assert state[0].count == 7 and params is x
    adam = create("EmbOptimType.ADAM")
    means = {"exp_avg": np.ones((3, 4)), "exp_avg_sq": np.full((3, 4), 2.0)}
    _, state = load_fbgemm_state(adam, x, {"iter": 1, "t": means})
    assert (state[0].slots.m["t"] == 1).all() and (state[0].slots.v["t"] == 2).all()


def test_arrays_get_the_dtypes_of_tables_and_state():
    """Not those in which they were saved."""
    tx, rng = create("EXACT_ADAGRAD"), np.random.default_rng(0)
    tables = {"a": jax.ShapeDtypeStruct((3, 4), "bfloat16"), "b": jnp.ones((2, 8))}
    saved = {"iter": np.array([7], np.int64)}
    for name, dtype in (("a", "float32"), ("b", "float16")):
        for part in ("weights", "momentum1"):
            saved[f"{name}/{part}"] = rng.uniform(size=tables[name].shape).astype(dtype)
    saved["a/momentum1"] = saved["a/momentum1"].astype("float16")
    params, state = load_fbgemm_state(tx, tables, saved)
    for part, tree in (("weights", params), ("momentum1", state[0].slots.accumulator)):
        for name, got in tree.items():
            dtype = "bfloat16" if (name, part) == ("a", "weights") else "float32"
            assert got.dtype == dtype
            np.testing.assert_array_equal(got, saved[f"{name}/{part}"].astype(dtype))
    assert state[0].count == 7 and state[0].count.dtype == "int32"


def test_groups_and_masks():
    """Tables with different optimizers, beside parameters that FBGEMM does not have."""
    tx = optzoo.param_groups(
        {"a": create("EXACT_ROWWISE_ADAGRAD"), "b/.*": create("EXACT_ADAGRAD", eps=0.1)}
    )
    _, state = tx.update(TABLES, tx.init(TABLES), TABLES)
    saved = fbgemm_state_dict(TABLES, state)
    assert saved["a/momentum1"].shape == (3,) and saved["b/c/momentum1"].shape == (2, 8)
    _, got = load_fbgemm_state(tx, TABLES, saved)
    jax.tree.map(np.testing.assert_array_equal, got, state)


def test_what_does_not_fit_is_listed():
    tx = create("EXACT_ROWWISE_ADAGRAD")
    wrong = {"a/sum": np.ones(4), "a/weights": np.ones((3, 4)), "d/sum": np.ones(2)}
    with pytest.raises(ValueError, match="state_dict does not fit") as caught:
        load_fbgemm_state(tx, TABLES, wrong)
    for part in (
        "missing: b/c/weights",
        "missing: iter",
        "missing: b/c/momentum1",
        "a/momentum1 must have shape (3,), got (4,)",
        "left over: d/momentum1",
    ):
        assert part in str(caught.value)


def test_errors_name_the_fix(tmp_path):
    tx = create("EXACT_SGD")
    with pytest.raises(ValueError, match=r"state_dict must be a file that ends in \.npz"):
        load_fbgemm_state(tx, TABLES, "model.pt")
    with pytest.raises(ValueError, match=r"path must be a file that ends in \.npz"):
        save_fbgemm_state(tmp_path / "model.pt", TABLES, tx.init(TABLES))
    with pytest.raises(FileNotFoundError):
        load_fbgemm_state(tx, TABLES, tmp_path / "none.npz")
    with pytest.raises(TypeError, match="tables must be a mapping, a function or None"):
        fbgemm_state_dict(TABLES, tx.init(TABLES), ["a"])
    for other in (optzoo.adam(), optzoo.nadam()):
        with pytest.raises(ValueError, match="FBGEMM has no optimizer with"):
            fbgemm_state_dict(TABLES, other.init(TABLES))
    groups = {"a": tx.init(TABLES), "b": tx.init(TABLES)._replace(count=jnp.int32(3))}
    with pytest.raises(ValueError, match=r"one number of updates, got \[0, 3\]"):
        fbgemm_state_dict(TABLES, groups)


@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_slots_in_other_storages_have_the_names_of_fbgemm(dtype):
    """Those in 8 bits are saved decoded, and packed ones apart."""
    packed = {"packed": True} if dtype == "bfloat16" else {}
    tx = optzoo.slots_dtype(
        optzoo.interop.fbgemm.fbgemm_optimizer("adam", learning_rate=0.1), dtype, **packed
    )
    params = {"t": jnp.ones((10, 16))}
    rows = optzoo.SparseRows(jnp.array([1, 2]), jnp.linspace(-1, 1, 32).reshape(2, 16), 10)
    params, state = samples.step(tx, {"t": rows}, params)
    saved = optzoo.interop.fbgemm.fbgemm_state_dict(params, state)
    assert saved.keys() == {"iter", "t/weights", "t/momentum1", "t/momentum2"}
    np.testing.assert_array_equal(saved["t/momentum2"], optzoo.get_slot(state, "v")["t"])
    loaded = optzoo.interop.fbgemm.load_fbgemm_state(tx, params, saved)
    jax.tree.map(np.testing.assert_array_equal, loaded, (params, state))
