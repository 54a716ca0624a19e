"""What optzoo chooses by platform runs here for every platform: alone and in whole updates."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import optzoo
from optzoo import SparseRows, lookup
from optzoo.core.merge import segment_sum
from optzoo.second_order.bases import by_qr
from optzoo.second_order.eigh import decompose
from tests.platforms import HERE, OTHER, choices, on_all, on_platform, uses_in_sources

# The helper


def three(x):
    inner = functools.partial(
        lax.platform_dependent, cpu=lambda x: 2 * x, tpu=lambda x: 3 * x, default=lambda x: 5 * x
    )
    return lax.platform_dependent(
        x, cpu=lambda x: x, tpu=lambda x: x + inner(x), cuda=lambda x: 7 * x, rocm=lambda x: 9 * x
    )


def in_bodies(x):
    """``three(x)`` in the bodies of other transformations, and its derivative."""
    twice = lambda f: lambda c: (c[0] + 1, f(x))
    return {
        "jit": jax.jit(three)(x),
        "vmap": jax.vmap(three)(x),
        "scan": lax.scan(lambda _, y: (0.0, three(y)), 0.0, x)[1],
        "cond": lax.cond(x[0] > 0, three, lambda x: -x, x),
        "while": lax.while_loop(lambda c: c[0] < 2, twice(three), (0, x))[1],
        "checkpoint": jax.checkpoint(three)(x),
        "slope": x * jax.grad(lambda x: jnp.sum(jax.checkpoint(three)(x)))(x),
    }


def test_branches_of_any_platform():
    x = np.array([1.0, 2], "float32")
    factors = {"cpu": 1, "tpu": 4, "cuda": 7, "rocm": 9}
    each = {name: on_platform(in_bodies, name) for name in factors}
    for name, got in jax.jit(lambda x: {k: f(x) for k, f in each.items()})(x).items():
        for case, y in got.items():
            np.testing.assert_array_equal(y, factors[name] * x, err_msg=f"{name}, {case}")
    assert set.union(*(names for names, _ in choices(in_bodies, x))) == factors.keys()
    assert on_all(lambda x: x, x).keys() == {HERE, OTHER}


# Rows

NUM_ROWS, RATE, DECAY = 5, 0.1, 0.9
SHAPES = {
    "scalars": (7, ()),
    "vectors": (7, (2,)),
    "matrices": (7, (2, 3)),
    "one": (1, (2,)),
    "none": (0, (2,)),
}  # how many ids, and the shape of a row
IDS = {
    "repeated": [1, 3, 1, 1, 3, 0, 1],
    "distinct": [4, 0, 3, 1, 2, 5, 5],
    "padded": [5, 4, 5, 0, 5, 4, 0],
    "negative": [-1, 2, -5, 0, 2, -6, -1],
    "too large": [6, 4, 9, 4, 2**31 - 1, 0, 6],
    "nothing": [5, -1, 6, 5, -(2**31), 5, 5],
    "equal": [0] * 7,
}
CLIP = optax.chain(optzoo.clip_by_global_norm(2.0), optzoo.momentum(RATE, DECAY))
OF_EACH = optax.chain(optzoo.transforms.clip_by_norm(2.0), optzoo.gradient_descent(RATE))
FIXED = optax.chain(optzoo.rows.coalesce(deterministic=True), CLIP)


def arrays(shape_of, seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda shape: rng.normal(size=shape).astype("float32")
    return {name: draw(shape_of(*SHAPES[name])) for name in SHAPES}


TABLES = arrays(lambda n, row: (NUM_ROWS, *row))
SUMS = arrays(lambda n, row: (NUM_ROWS, *row), 1)  # the slots
VALUES = arrays(lambda n, row: (n, *row), 2)


def updated(tx, ids, values):
    """The tables after an update by rows; ``tx`` may keep the slots of momentum."""
    grads = {k: SparseRows(ids[: len(v)], v, NUM_ROWS) for k, v in values.items()}
    state = tx.init(TABLES)
    if optzoo.slot_names(state):
        state = optzoo.set_slot(state, "momentum", SUMS)
    return optax.apply_updates(TABLES, tx.update(grads, state, TABLES)[0])


def updates(ids, values):
    return {
        "global": updated(CLIP, ids, values),
        "of each": updated(OF_EACH, ids, values),
        "fixed order": updated(FIXED, ids, values),
        "linear": updated(optzoo.gradient_descent(RATE), ids, values),
        "merged": SparseRows(ids, values["vectors"], NUM_ROWS).coalesce().values,
        "elected": optzoo.core.merge.elect(ids),
    }


def summed(ids, values):
    """By NumPy the dense gradients, and which rows are touched."""
    dense, touched = {k: np.zeros_like(x) for k, x in TABLES.items()}, {}
    for k, v in values.items():
        real = [(i, g) for i, g in zip(ids, v, strict=False) if 0 <= i < NUM_ROWS]
        for i, g in real:
            dense[k][i] += g
        touched[k] = np.isin(np.arange(NUM_ROWS), [i for i, _ in real])
    return dense, touched


def clipped(dense, together):
    norm = lambda arrays: np.sqrt(sum(np.sum(np.square(g)) for g in arrays))
    scale = lambda arrays: min(1.0, 2.0 / max(norm(arrays), 1e-30))
    return {k: g * scale(dense.values() if together else [g]) for k, g in dense.items()}


@functools.cache
def compiled_updates():
    ids = np.zeros(7, np.int32)
    each = on_all(updates, ids, VALUES)
    return jax.jit(lambda *args: {name: f(*args) for name, f in each.items()})


@pytest.mark.unique
@pytest.mark.parametrize("scale", [0.1, 1.0])
@pytest.mark.parametrize("case", IDS)
def test_rows_of_all_kinds(case, scale):
    """A norm counts no padding, and rows move that are touched, whatever their gradient."""
    ids, values = np.array(IDS[case], np.int32), {k: scale * v for k, v in VALUES.items()}
    values["one"], values["vectors"][2] = 0 * values["one"], 0
    dense, touched = summed(ids, values)
    moved = {k: TABLES[k] - RATE * (DECAY * SUMS[k] + g) for k, g in clipped(dense, True).items()}
    lazy = {k: np.where(expand(touched[k], x), moved[k], x) for k, x in TABLES.items()}
    alone = {k: TABLES[k] - RATE * g for k, g in clipped(dense, False).items()}
    linear = {k: TABLES[k] - RATE * g for k, g in dense.items()}
    for got in compiled_updates()(ids, values).values():
        wanted = {"global": lazy, "of each": alone, "fixed order": lazy, "linear": linear}
        for name, want in wanted.items():
            for k, x in got[name].items():
                np.testing.assert_allclose(x, want[k], rtol=1e-5, atol=1e-6, err_msg=name)
        # Each sum once, and zeros beside them.
        total = lambda a: np.sort(np.sum(a, 1)[np.any(a, 1)])
        np.testing.assert_allclose(
            total(got["merged"]), total(dense["vectors"]), rtol=1e-5, atol=1e-6
        )
        elected = got["elected"]
        np.testing.assert_array_equal(ids[elected], ids)
        assert len({*elected.tolist()}) == len({*ids.tolist()})


def expand(mask, x):
    return mask.reshape(-1, *(1,) * (x.ndim - 1))


# Sums over ids that are repeated as those of clicks are


def sums_of(ids, values, table):
    """The sums of the rows of each id, in four ways, and the slope of one of them."""
    merged = SparseRows(ids, values, len(table)).coalesce()
    sums = lambda values: segment_sum(values, ids, len(table))
    return {
        "merged": jnp.zeros_like(table).at[merged.indices].set(merged.values, mode="drop"),
        "added": table + SparseRows(ids, values, len(table)) - table,
        "dense": SparseRows(ids, values, len(table)).to_dense(),
        "segments": sums(values),
        "slope": jax.vjp(sums, values)[1](table)[0],
    }


@pytest.mark.parametrize("dtype", ["int32", "uint32"])
def test_zipf_ids(dtype):
    rng, rows = np.random.default_rng(6), 50
    ids = np.minimum(rng.zipf(1.3, 700) - 1, rows).astype(dtype)  # the last one is padding
    values = rng.normal(size=(700, 3)).astype("float32")
    table = rng.normal(size=(rows, 3)).astype("float32")
    want = np.zeros((rows + 1, 3))
    np.add.at(want, ids, values.astype("float64"))
    slope = np.concatenate([table, np.zeros((1, 3))])[ids]
    each = on_all(sums_of, ids, values, table)
    assert {*each} == {HERE, OTHER, "cuda", "rocm"}
    for platform, got in jax.jit(lambda *a: {k: f(*a) for k, f in each.items()})(
        ids, values, table
    ).items():
        np.testing.assert_array_equal(got.pop("slope"), slope.astype("float32"), platform)
        for name, sums in got.items():
            message = f"{platform}, {name}"
            np.testing.assert_allclose(sums, want[:-1], rtol=1e-5, atol=1e-5, err_msg=message)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sums_of_16_bits_are_rounded_once_on_gpus(dtype):
    rng, rows = np.random.default_rng(7), 5
    ids = rng.integers(0, rows, 700).astype("int32")
    values = jnp.asarray(rng.uniform(size=(700, 4)), dtype)
    table, want = jnp.zeros((rows, 4), dtype), np.zeros((rows, 4))
    np.add.at(want, ids, np.asarray(values, "float64"))

    def sums(ids, values):
        wide = table.astype("float32") + SparseRows(ids, values, rows)
        return sums_of(ids, values, table) | {"wide": wide}

    got = jax.jit(on_platform(sums, "cuda"))(ids, values)
    half = 0.502 * float(jnp.finfo(dtype).eps)
    for name in ("merged", "added", "dense", "segments", "wide"):
        error = 1e-6 if name == "wide" else half
        np.testing.assert_allclose(np.float64(got[name]), want, rtol=error, err_msg=name)


# Deferred rows

DEFERRED = optzoo.caught_up(optzoo.adam(RATE), mask=True)
WEIGHTS = np.random.default_rng(3).normal(size=(7, 2)).astype("float32")
STEP = optzoo.minimize(lambda x, ids: jnp.sum(lookup(x, ids) * WEIGHTS), DEFERRED)


def deferred_step(x, state, ids):
    x, state, _ = STEP(x, state, ids)
    return x, state, optzoo.rows.catch_up(x, state)[0]


def dense_adam(batches):
    """By NumPy the table after each step."""
    x, m, v = TABLES["vectors"].astype(float), 0.0, 0.0
    for t, ids in enumerate(batches, 1):
        g = summed(ids, {"vectors": WEIGHTS})[0]["vectors"]
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        x = x - RATE * np.sqrt(1 - 0.999**t) / (1 - 0.9**t) * m / (np.sqrt(v) + 1e-8)
        yield x


def test_deferred_rows():
    batches = [np.array(IDS[case], np.int32) for case in ("padded", "repeated", "equal", "padded")]
    x = jnp.asarray(TABLES["vectors"])
    start = x, DEFERRED.init(x)
    each = on_all(deferred_step, *start, batches[0])
    run = jax.jit(lambda states, ids: {k: f(*states[k], ids) for k, f in each.items()})
    states = dict.fromkeys(each, start)
    for ids, want in zip(batches, dense_adam(batches), strict=True):
        done = run(states, ids)
        for name, (*_, got) in done.items():
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5, err_msg=name)
        states = {name: state[:2] for name, state in done.items()}


# A step by rows

OF_ROWS = optzoo.momentum(RATE, DECAY)
STEP_OF_ROWS = optzoo.minimize(lambda x, ids: jnp.sum(lookup(x, ids) * WEIGHTS), OF_ROWS)


def step_of_rows(x, state, ids):
    return STEP_OF_ROWS(x, state, ids)[:2]


def test_a_step_by_rows():
    x, sums = TABLES["vectors"].astype(float), np.zeros_like(TABLES["vectors"])
    start = jnp.asarray(TABLES["vectors"]), OF_ROWS.init(TABLES["vectors"])
    first = np.array(IDS["padded"], np.int32)
    each = on_all(step_of_rows, *start, first)
    assert {*each} == {HERE, OTHER, "cuda", "rocm"}
    run = jax.jit(lambda states, ids: {k: f(*states[k], ids) for k, f in each.items()})
    states = dict.fromkeys(each, start)
    for ids in (first, np.array(IDS["repeated"], np.int32)):
        dense, touched = summed(ids, {"vectors": WEIGHTS})
        rows = touched["vectors"]
        sums[rows] = (DECAY * sums + dense["vectors"])[rows]
        x[rows] -= RATE * sums[rows]
        states = run(states, ids)
        for name, (got, _) in states.items():
            np.testing.assert_allclose(got, x, rtol=1e-5, atol=1e-6, err_msg=name)


# Roots

GRADS = np.random.default_rng(4).normal(size=(2, 4, 3)).astype("float32")


def two_steps(root, relative):
    tx = optzoo.shampoo(RATE, root=root, relative_eps=relative, eps=1e-3)

    def run(gs):
        x = jnp.ones(gs.shape[1:])
        return lax.scan(lambda s, g: tx.update(g, s, x)[::-1], tx.init(x), gs)[1]

    return run


@pytest.mark.parametrize("relative", [False, True])
def test_roots(relative):
    auto = two_steps("auto", relative)
    each = on_all(auto, GRADS) | {k: two_steps(k, relative) for k in ("eigh", "newton")}
    got = jax.jit(lambda gs: {k: f(gs) for k, f in each.items()})(GRADS)
    assert len(got) == 4  # a branch for another accelerator needs a comparison here
    close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7)
    close(got[HERE], got["eigh"])
    close(got[OTHER], got["newton"])
    np.testing.assert_allclose(got["newton"], got["eigh"], rtol=1e-3, atol=1e-4)
    # The other branch is not in the program.
    texts = {k: jax.jit(f).lower(GRADS).as_text() for k, f in each.items()}
    loops = {k: text.count(".while") for k, text in texts.items()}
    assert "syevd" in texts[HERE] and "syevd" not in texts[OTHER]
    assert loops[HERE] == loops["eigh"] < loops["newton"] == loops[OTHER]


# Eigenvectors


def decomposed(a):
    """With the vectors, of which each has any sign, as the matrices that they make."""
    values, v = decompose(a)
    return values, jnp.matmul(v * values[:, None], v.mT)


def orthogonal(a):
    """A basis nearer to eigenvectors, and its product with itself."""
    basis, _ = by_qr(a, jnp.broadcast_to(jnp.eye(a.shape[-1]), a.shape))
    return basis, jnp.matmul(basis.mT, basis)


def symmetric():
    drawn = np.random.default_rng(5).normal(size=(2, 257, 257)).astype("float32")
    return drawn + drawn.swapaxes(1, 2)


def test_orthogonal_factors():
    """Above 256 a TPU decomposes one matrix after the other."""
    a = symmetric()
    each = on_all(orthogonal, a)
    assert {*each} == {HERE, OTHER, "tpu"}
    got = jax.jit(lambda a: {k: f(a) for k, f in each.items()})(a)
    for name, (basis, product) in got.items():
        np.testing.assert_allclose(basis, got[HERE][0], atol=1e-5, err_msg=name)
        np.testing.assert_allclose(product, [np.eye(257)] * 2, atol=1e-5, err_msg=name)


def test_eigenvectors():
    """Above 256 an algorithm of TPUs is named, which the CPU does not have."""
    a = symmetric()
    each = on_all(decomposed, a)
    assert {*each} == {HERE, OTHER, "tpu"}
    want = np.linalg.eigvalsh(a.astype("float64"))
    for name, (values, product) in jax.jit(lambda a: {k: f(a) for k, f in each.items()})(a).items():
        np.testing.assert_allclose(values, want, rtol=1e-4, atol=1e-3, err_msg=name)
        np.testing.assert_allclose(product, a, rtol=1e-4, atol=1e-3, err_msg=name)
    for size in (256, 769):
        found = choices(decompose, np.zeros((1, size, size), "float32"))
        assert not any("tpu" in platforms for platforms, _ in found)


# What is above is all there is.


def test_every_choice_runs_for_every_platform():
    """By the lines of the choices in the programs of the tests above."""
    ids, x = np.zeros(7, np.int32), jnp.asarray(TABLES["vectors"])
    made = [
        *choices(updates, ids, VALUES),
        *choices(sums_of, ids, VALUES["vectors"], TABLES["vectors"]),
        *choices(deferred_step, x, DEFERRED.init(x), ids),
        *choices(two_steps("auto", False), GRADS),
        *choices(decomposed, symmetric()),
        *choices(orthogonal, symmetric()),
        *choices(step_of_rows, x, OF_ROWS.init(x), ids),
    ]
    seen = set()
    for platforms, line in made:
        assert ("cuda" in platforms) == ("rocm" in platforms), line  # GPUs of both kinds
        path, _, function = line.replace("\\", "/").rpartition("/optzoo/")[2].partition(" ")
        names = [name for name in function.strip("()").split(".") if name[:1] != "<"]
        seen.add(f"{path.partition(':')[0]} {names[-1]}")
    assert seen == uses_in_sources()
