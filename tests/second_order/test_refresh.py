"""When, where and in which batches roots are computed."""

import functools
import itertools
import math
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import optzoo
from optzoo.second_order import eigh
from optzoo.second_order.shampoo import refresh as module
from optzoo.second_order.shampoo.refresh import is_due, refresh
from optzoo.testing.samples import last, run

# The function alone, with a root that is the matrix itself


def stacks(sizes, value):
    """Of ``(n, d)`` each ``n`` matrices of size ``d``, whose elements are all ``value``."""
    return [jnp.full((n, d, d), value, jnp.float32) for n, d in sizes]


def usable_if_positive(a, rank):
    return a, a[:, 0, 0] > 0


def history(sizes, interval, steps, **kwargs):
    """For each step which of the roots are new, per stack; and the sizes of the batches."""
    batches = []

    def root(a, rank):
        batches.append(len(a))
        return usable_if_positive(a, rank)

    def body(old, t):
        matrices, ranks = stacks(sizes, jnp.float32(t)), len(sizes) * [2]
        new, unusable = refresh(matrices, old, ranks, root, step=t, interval=interval, **kwargs)
        return new, ([h[:, 0, 0] == t for h in new], unusable)

    scan = jax.jit(lambda: jax.lax.scan(body, stacks(sizes, 0.0), jnp.arange(1, steps + 1))[1])
    new, unusable = scan()
    assert not np.any(unusable)
    return [np.asarray(fresh) for fresh in new], batches


def test_all_at_once():
    new, batches = history([(2, 2), (3, 2), (1, 3)], 3, 7)
    for fresh in new:
        assert all(np.all(now == (t % 3 == 0)) for t, now in enumerate(fresh, 1))
    assert batches == [5, 1]  # one of each size


def test_at_every_step_there_is_no_condition():
    assert is_due(jnp.int32(3), 1) is True
    old = stacks([(2, 2)], 0.0)
    once = lambda t, interval: refresh(old, old, [2], usable_if_positive, step=t, interval=interval)
    assert "cond[" in str(jax.make_jaxpr(once, static_argnums=1)(1, 2))
    assert "cond[" not in str(jax.make_jaxpr(once, static_argnums=1)(1, 1))


@pytest.mark.parametrize("interval", [1, 3, 2.5, np.float32(3)])
def test_due(interval):
    due = [t for t in range(1, 11) if is_due(t, interval)]
    assert due == [t for t in range(1, 11) if t % interval < 1]


@pytest.mark.parametrize("interval", [2, 4, 20])
def test_in_shares(interval):
    """In each interval every root comes once, and no step makes many."""
    new, batches = history([(4, 2), (2, 3), (5, 2), (1, 4)], interval, 2 * interval, stagger=True)
    for fresh in (np.concatenate([new[0], new[2]], axis=1), new[1], new[3]):
        size = fresh.shape[1]
        assert np.all(np.sum(fresh, axis=1) <= math.ceil(size / interval))
        assert np.all(np.sum(fresh.reshape(2, interval, size), axis=1) == 1)
    assert batches == [math.ceil(size / interval) for size in (9, 2, 1)]


def test_small_batches_take_different_turns():
    new, _ = history([(1, 1), (1, 2), (1, 3), (1, 4)], 4, 8, stagger=True)
    turns = np.concatenate(new, axis=1)
    np.testing.assert_array_equal(turns, np.tile(np.eye(4, dtype=bool), (2, 1)))


def test_ranks_are_batches_of_their_own():
    seen = []

    def root(a, rank):
        seen.append((rank, a.shape))
        return a * rank, a[:, 0, 0] > 0

    matrices = stacks([(1, 2), (2, 2), (3, 2)], 1.0)
    new, _ = jax.jit(lambda old: refresh(matrices, old, [1, 3, 1], root, step=1, interval=1))(
        matrices
    )
    assert sorted(seen) == [(1, (4, 2, 2)), (3, (2, 2, 2))]
    assert [(len(a), a[0, 0, 0]) for a in new] == [(1, 1), (2, 3), (3, 1)]


@pytest.mark.parametrize("stagger", [False, True])
def test_unusable_roots_keep_the_previous_and_are_counted(stagger):
    matrices, new = stacks([(3, 2), (2, 1)], 1.0), stacks([(3, 2), (2, 1)], 5.0)
    matrices = [a.at[1].set(-1.0) for a in matrices]

    @jax.jit
    def two_steps(h):
        counts = []
        for t in (1, 2):
            h, unusable = refresh(
                matrices, h, [2, 2], usable_if_positive, step=t, interval=2, stagger=stagger
            )
            counts.append(unusable)
        return h, counts

    new, counts = two_steps(new)
    assert counts == ([1, 1] if stagger else [0, 2])
    np.testing.assert_array_equal(new[0][:, 0, 0], [1, 5, 1])
    np.testing.assert_array_equal(new[1][:, 0, 0], [1, 5])


def test_in_chunks(monkeypatch):
    """Seven matrices of four elements, three at a time."""
    monkeypatch.setattr(module, "CHUNK", 12)
    matrices = [jnp.arange(1.0, 17).reshape(4, 2, 2), -jnp.ones((3, 2, 2))]
    old, seen = stacks([(4, 2), (3, 2)], 5.0), []

    def root(a, rank):
        seen.append(a.shape)
        return 2 * a, a[:, 0, 0] > 0

    new, unusable = jax.jit(lambda: refresh(matrices, old, [2, 2], root, step=1, interval=1))()
    np.testing.assert_array_equal(new[0], 2 * matrices[0])
    np.testing.assert_array_equal(new[1], old[1])
    assert unusable == 3 and set(seen) == {(3, 2, 2)}


@pytest.mark.parametrize("stagger", [False, True])
def test_roots_of_several_arrays(stagger, monkeypatch):
    """Tuples of stacks: a root that needs two and gives two, in chunks."""
    monkeypatch.setattr(module, "CHUNK", 8)
    matrices = [(a, 2 * a) for a in stacks([(3, 2), (2, 2)], 3.0)]
    old = [(-a, jnp.zeros(len(a))) for a, _ in matrices]

    def root(pair, rank):
        a, b = pair
        return (a + b, b[:, 0, 0]), jnp.ones(len(a), bool)

    @jax.jit
    def two_steps(h):
        for t in (1, 2):
            h, _ = refresh(matrices, h, [2, 2], root, step=t, interval=2, stagger=stagger)
        return h

    want = [(3 * a, jnp.full(len(a), 6.0)) for a, _ in matrices]
    chex.assert_trees_all_equal(two_steps(old), want)


# In the optimizer


def gradients(steps, shapes=(("a", (3, 2)),)):
    """Stacked over the steps."""

    def wave(i, shape):
        return np.cos(1.7 * i + np.arange(math.prod(shape)) ** 1.3).astype("float32").reshape(shape)

    return {k: np.stack([wave(i + n, s) for i in range(steps)]) for n, (k, s) in enumerate(shapes)}


@functools.cache
def states(**options):
    """Those of nine steps, and the start."""
    tx, grads = optzoo.transforms.scale_by_shampoo(**options), gradients(9)
    return from_the_start(tx, grads, run(tx, grads)[1])


def from_the_start(tx, grads, stacked):
    """The state at the start, and those after each step."""
    start = tx.init(jax.tree.map(lambda g: g[0], grads))
    return [start, *(jax.tree.map(lambda a, k=k: a[k], stacked) for k in range(len(grads["a"])))]


def matrices_are_the_same(one, other):
    return all(jax.tree.leaves(jax.tree.map(np.array_equal, one.slots.H, other.slots.H)))


def third(k):
    return 3.0


@pytest.mark.parametrize("interval", [3, third])
def test_roots_of_the_last_refresh(interval):
    rare, often = states(preconditioner_interval=interval), states()
    for t in range(10):
        chex.assert_trees_all_close(rare[t].slots.H, often[t - t % 3].slots.H, rtol=1e-5, atol=1e-6)
        chex.assert_trees_all_close(rare[t].slots.Gbar, often[t].slots.Gbar, rtol=1e-6)


def test_roots_in_shares_are_those_of_their_turn():
    """Each block's: that of every step, every third step."""
    options = {"block_size": 2, "eps": 0.1}
    shares, often = (
        [jax.tree.leaves(state.slots.H) for state in states(**options, **more)]
        for more in ({"preconditioner_interval": 3, "stagger": True}, {})
    )
    # Two dimensions of two blocks each, of which the second is padded: shares of two.
    turns = []
    for i, j in itertools.product(range(2), repeat=2):
        roots = [[h[i][j] for h in all_roots] for all_roots in (shares, often)]
        close = [[np.allclose(a, b, rtol=1e-5, atol=1e-6) for b in roots[1]] for a in roots[0]]
        [first, *rest] = [t for t in range(1, 10) if close[t][t]]
        assert rest == list(range(first + 3, 10, 3))
        assert all(close[t][t - (t - first) % 3] for t in range(first, 10))
        turns.append(first)
    assert turns == [1, 1, 2, 2]


def test_schedule_of_refreshes():
    """Evaluated before the step, as all schedules: every 2 steps until the fifth, then every 3."""
    seen = states(preconditioner_interval=lambda k: jnp.where(k < 4, 2, 3))
    new = [not matrices_are_the_same(*pair) for pair in itertools.pairwise(seen)]
    assert [t for t, fresh in enumerate(new, 1) if fresh] == [2, 4, 6, 9]


@pytest.mark.parametrize(
    ("interval", "steps"),
    [(3, {3: 3, 6: 3, 9: 3}), (lambda k: jnp.where(k < 4, 2, 3), {2: 2, 4: 2, 6: 3, 9: 3})],
)
def test_statistics_skip_steps_and_weigh_the_more(interval, steps):
    """They decay only where they are updated."""
    options = {"mat_gbar_weight": 0.5, "mat_gbar_decay": 0.9}
    seen, want = states(statistics_interval=interval, **options), np.zeros((3, 3))
    for t, g in enumerate(gradients(9)["a"], 1):
        if t in steps:
            want = 0.9 * want + 0.5 * steps[t] * g @ g.T
        np.testing.assert_allclose(seen[t].slots.Gbar["a"][0], want, rtol=1e-5, atol=1e-6)


def test_without_memory_a_skipped_step_has_no_statistics():
    """A literal decay of zero: the root is that of epsilon alone, and nothing is kept."""
    grads = gradients(2)
    tx = optzoo.transforms.scale_by_shampoo(statistics_interval=2, mat_gbar_decay=0.0, eps=1e-4)
    updates, states = run(tx, grads)
    np.testing.assert_allclose(updates["a"][0], 100 * grads["a"][0], rtol=1e-4)
    assert not np.any(last(states).slots.Gbar["a"][0])
    second = {"a": grads["a"][1:]}
    want, _ = run(optzoo.transforms.scale_by_shampoo(mat_gbar_weight=2.0), second)
    np.testing.assert_allclose(updates["a"][1:], want["a"], rtol=1e-4, atol=1e-5)


def test_diagonals_know_no_intervals():
    grads = gradients(3)
    tx = optzoo.transforms.scale_by_shampoo(0, statistics_interval=2, preconditioner_interval=5)
    chex.assert_trees_all_equal(run(tx, grads), run(optzoo.transforms.scale_by_shampoo(0), grads))


def test_global_step_drives_everything():
    """It counts as the original does: the steps before this one."""
    grads = gradients(8)
    tx = optzoo.shampoo(
        lambda k: 1.0 / (1 + k),
        preconditioner_interval=3,
        statistics_interval=lambda k: jnp.where(k < 6, 2, 1),
        gbar_decay=lambda k: 1 / (1 + k),
        start_step=5,
    )
    end = {"a": grads["a"][4:]}
    updates, states = run(tx, end, global_step=np.arange(4, 8))
    # The fifth step is a plain one, without statistics or roots; the sixth has both.
    np.testing.assert_allclose(updates["a"][0], -grads["a"][4] / 5, rtol=1e-6)
    mean = grads["a"][4] / 6 + grads["a"][5]
    np.testing.assert_allclose(states[0].slots.gbar["a"][1], mean, rtol=1e-6)
    sums = states[0].slots.Gbar["a"][0]
    gram = lambda k: grads["a"][k] @ grads["a"][k].T
    for got, want in zip(sums, (0, 2 * gram(5), 2 * gram(5) + gram(6)), strict=False):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    seen = [state[0] for state in from_the_start(tx, end, states)]
    assert [matrices_are_the_same(*pair) for pair in itertools.pairwise(seen)] == [1, 0, 1, 1]
    assert seen[-1].count == 4
    # By itself it begins at the first step.
    alone, _ = run(tx, {"a": grads["a"][4:5]})
    np.testing.assert_allclose(alone["a"][0], -grads["a"][4], rtol=1e-6)


def test_a_bad_gradient_leaves_the_roots_of_its_leaf():
    grads = gradients(3, (("a", (3, 2)), ("b", (2, 2))))
    tx = optzoo.transforms.scale_by_shampoo(mat_gbar_decay=0.5)
    bad = {**grads, "a": grads["a"].copy()}
    bad["a"][1] = [[np.nan, 1], [2, 3], [4, 5]]
    _, states = run(tx, bad)
    for roots in states.slots.H["a"]:
        np.testing.assert_array_equal(roots[1], roots[0])
        np.testing.assert_array_equal(roots[2], roots[0])
    _, good = run(tx, grads)
    chex.assert_trees_all_equal(last(states).slots.H["b"], last(good).slots.H["b"])
    # Two dimensions, at each step from then on.
    np.testing.assert_array_equal(states.shared["num_failed_roots"], [0, 2, 4])
    assert last(good).shared["num_failed_roots"] == 0


def test_an_eigh_that_lies_leaves_the_roots(monkeypatch):
    x, eigh = {"a": jnp.diag(jnp.array([1.0, 2, 3]))}, jnp.linalg.eigh
    tx = optzoo.transforms.scale_by_shampoo()
    lying = lambda a: (eigh(a)[0], eigh(a)[1][..., ::-1])
    monkeypatch.setattr(jnp.linalg, "eigh", lying)
    updates, state = jax.jit(tx.update)(x, tx.init(x))
    chex.assert_trees_all_equal(updates, x)
    assert state.shared["num_failed_roots"] == 2


# The compiled program


def computations(text):
    """The bodies of the program's functions, and which is the entry."""
    found = re.findall(r"^(ENTRY )?%?([\w.\-]+) [^\n]*\{\n(.*?)^\}", text, re.DOTALL | re.MULTILINE)
    [entry] = [name for is_entry, name, _ in found if is_entry]
    return {name: body for _, name, body in found}, entry


BRANCHES = r"(?:branch_computations=\{[^}]*\}|(?:true|false)_computation=%?[\w.\-]+)"


def always(bodies, name):
    """The text of all that runs at every step: the branches of conditionals do not."""
    body = re.sub(BRANCHES, "", bodies[name])
    called = set(re.findall(r"[\w.\-]+", body)) & (bodies.keys() - {name})
    return body + "".join(always(bodies, other) for other in called)


WORK = {"eigh": "lapack_ssyevd", "newton": r" while\("}


@pytest.mark.optimized
@pytest.mark.parametrize("root", WORK)
@pytest.mark.parametrize("stagger", [False, True])
def test_a_step_without_refresh_has_no_root(root, stagger):
    x = {"a": jnp.ones((4, 2)), "b": jnp.ones(2)}
    tx = optzoo.transforms.scale_by_shampoo(
        root=root, block_size=2, preconditioner_interval=5, stagger=stagger
    )
    text = jax.jit(tx.update).lower(x, tx.init(x)).compile().as_text()
    bodies, entry = computations(text)
    works = lambda name: bool(re.search(WORK[root], always(bodies, name)))
    assert re.search(WORK[root], text) and not works(entry)
    conditionals = re.findall(rf" conditional\(.*? {BRANCHES}(?:, {BRANCHES})?", text)
    assert len(conditionals) == (2 if stagger else 1)  # one for each batch, or one for all
    for conditional in conditionals:
        branches = set(re.findall(r"[\w.\-]+", conditional.split(")", 1)[1])) & bodies.keys()
        assert sorted(map(works, branches)) == [False, True]


@pytest.mark.optimized
def test_every_step_has_its_root_outside_of_conditionals():
    """That is what the test above would find."""
    tx, x = optzoo.transforms.scale_by_shampoo(), jnp.ones((2, 2))
    text = jax.jit(tx.update).lower(x, tx.init(x)).compile().as_text()
    assert re.search(WORK["eigh"], always(*computations(text)))


# Replicas


def map_over_replicas(how, f, x):
    """What each of three replicas computes from the same argument."""
    if how == "vmap":
        return jax.jit(jax.vmap(f, axis_name="r", axis_size=3, in_axes=None))(x)
    if how == "pmap":
        copies = jax.tree.map(lambda a: jnp.broadcast_to(a, (3, *a.shape)), x)
        return jax.pmap(f, axis_name="r", devices=jax.devices()[:3])(copies)
    return jax.tree.map(lambda a: a[None], jax.jit(in_shard_map(f, how == "shard_map"))(x))


def in_shard_map(f, check):
    mesh, spec = Mesh(np.array(jax.devices()[:3]), ("r",)), PartitionSpec()
    return jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check)


# In blocks: of size 2 there are four, of size 3 there is one.
SHAPES = (("a", (4, 2)), ("b", (3,)))
IN_BLOCKS = {"block_size": 3, "eps": 1e-2, "preconditioner_interval": 2}


def steps(**options):
    """The updates of four steps, and the state after them."""
    tx = optzoo.transforms.scale_by_shampoo(**IN_BLOCKS, **options)

    def several(grads):
        state = tx.init(jax.tree.map(lambda g: g[0], grads))
        return jax.lax.scan(lambda s, g: tx.update(g, s)[::-1], state, grads)

    return several


GRADS = gradients(4, SHAPES)


@functools.cache
def alone(root, stagger):
    return jax.jit(steps(root=root, stagger=stagger))(GRADS)


@pytest.mark.parametrize(
    ("how", "root", "stagger"),
    [
        ("vmap", "eigh", False),
        ("vmap", "newton", True),
        ("pmap", "eigh", False),
        ("shard_map", "eigh", False),
        ("shard_map", "newton", True),
        ("unchecked shard_map", "eigh", False),
        ("unchecked shard_map", "newton", True),
    ],
)
def test_replicas_share_the_work(how, root, stagger):
    """Of which three do not divide any batch."""
    several = steps(root=root, stagger=stagger, axis_name="r")
    got, want = map_over_replicas(how, several, GRADS), alone(root, stagger)
    for replica in range(len(jax.tree.leaves(got)[0])):
        mine = jax.tree.map(lambda a, r=replica: a[r], got)
        chex.assert_trees_all_close(mine, want, rtol=1e-6, atol=1e-6)


def shapes_of_eigh(tx, how="unchecked shard_map"):
    """In the program of one replica."""
    x = {name: jnp.ones(shape) for name, shape in SHAPES}
    f = lambda x: tx.update(x, tx.init(x))
    text = str(jax.make_jaxpr(f if how is None else in_shard_map(f, False))(x))
    found = re.findall(r":f32\[([\d,]+)\][^\n]* = eigh\[", text)
    return sorted(tuple(map(int, shape.split(","))) for shape in found)


def test_each_replica_computes_its_share(monkeypatch):
    monkeypatch.setattr(eigh, "LAPACK_WAITS_FOR_THREADS", False)  # or there are loops, too
    all_of = lambda **options: optzoo.transforms.scale_by_shampoo(**IN_BLOCKS, **options)
    assert shapes_of_eigh(all_of(), None) == [(1, 3, 3), (4, 2, 2)]
    assert shapes_of_eigh(all_of(axis_name="r")) == [(1, 3, 3), (2, 2, 2)]
    # In turns of two there is one for each.
    staggered = all_of(axis_name="r", stagger=True)
    assert shapes_of_eigh(staggered) == [(1, 2, 2), (1, 3, 3)]


def test_num_failed_roots_of_replicas_are_counted_once():
    spoilt = GRADS["a"].copy()
    spoilt[2, 3] = np.nan
    got, _ = map_over_replicas("shard_map", steps(axis_name="r"), {**GRADS, "a": spoilt})
    # One of the two blocks is bad, in both dimensions; the roots were refreshed once since.
    np.testing.assert_array_equal(got.shared["num_failed_roots"], 2)
    want, _ = alone("eigh", False)
    np.testing.assert_allclose(got.slots.H["b"][0][0], want.slots.H["b"][0], rtol=1e-6)
