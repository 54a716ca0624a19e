"""Random steps on random trees: native code computes what XLA computes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optzoo
from optzoo import CATALOG, SparseRows
from optzoo.native import engine
from optzoo.state.storage.stored import unpack_state
from optzoo.testing.samples import step_of, with_global_step

pytestmark = pytest.mark.skipif(engine.problem() is not None, reason=str(engine.problem()))

ALL, DRAWS = 120, 3  # programs, and how many times each runs on other values
NAMES = sorted(name for name, entry in CATALOG.items() if entry.family != "second_order")
POLICIES = ["lazy", "dense", "touched", "linear"]
WRAPPERS = {
    "clipped": lambda tx, shapes: optax.chain(optzoo.clip_by_global_norm(1.0), tx),
    "clipped after": lambda tx, shapes: optax.chain(tx, optzoo.clip_by_global_norm(0.1)),
    "averaged": lambda tx, shapes: optzoo.moving_average(tx, 0.9),
    "decayed": lambda tx, shapes: optzoo.decoupled_weight_decay(tx, weight_decay_per_step=0.01),
    "variable_clipping": lambda tx, shapes: optzoo.variable_clipping(
        tx, {k: (len(shape) - 1,) for k, shape in shapes.items() if shape}, 1.0
    ),
    "cautious": lambda tx, shapes: optzoo.cautious_weight_decay(tx, weight_decay_per_step=0.01),
    "ahead": lambda tx, shapes: optzoo.ema_nesterov(tx, 0.5),
    "hyperball": lambda tx, shapes: optzoo.hyperball(
        tx, 0.1, {k: (len(shape) - 1,) for k, shape in shapes.items() if shape}
    ),
    "multitask": lambda tx, shapes: optzoo.multitask(tx),
    "skip_spikes": lambda tx, shapes: optzoo.skip_spikes(tx, on="norm"),
    "groups": lambda tx, shapes: optzoo.param_groups(
        {min(shapes): tx, ".*": optzoo.momentum(0.1, 0.9)}
    ),
    "stacked": lambda tx, shapes: optzoo.stacked(tx),
}
# The update is in a branch. Their arguments: the optimizer, and how many rows a step has of tables.
BRANCHES = {
    "accumulate": lambda tx, sizes: optzoo.accumulate(tx, 2, max_rows=sizes),
    "accumulate finite": lambda tx, sizes: optzoo.accumulate(
        tx if sizes else optax.apply_if_finite(tx, 5), 2, max_rows=sizes
    ),
    "averaged": lambda tx, sizes: optzoo.accumulate(
        optzoo.moving_average(tx, 0.9), 2, use_mean=True, max_rows=sizes
    ),
    "clipped": lambda tx, sizes: optax.chain(
        optzoo.accumulate(tx, 2, max_rows=sizes), optzoo.clip_by_global_norm(0.1)
    ),
    "dense": lambda tx, sizes: optzoo.accumulate(tx, 3),
    "multi_steps": lambda tx, sizes: chain_dense(optax.MultiSteps(tx, 2).gradient_transformation()),
    "finite": lambda tx, sizes: chain_dense(optax.apply_if_finite(tx, 5)),
}


def chain_dense(tx):
    """For what takes no rows."""
    return optax.chain(optzoo.rows.densify(), tx)


ROW_SHAPES = [(), (1,), (3,), (8,), (64,), (65,), (2, 3), (1, 4), (2, 1, 2)]
LEAF_SHAPES = [(), (0,), (1,), (7,), (33,), (4, 5), (3, 32), (2, 3, 4), (3, 0)]
IDS = [0, 1, 2, 19, 100]
NUM_ROWS = [1, 2, 5, 60]
# What else the program does, which decides what XLA may overwrite.
USES = [
    "plain",
    "old params later",
    "params as gradients",
    "one gradient",
    "two steps of one state",
]

# Relative to the value and to the size of the array's values. Steps differ where XLA contracts
# other products and sums, or rounds an update before it adds it: by up to 2.3 spacings here. A
# value of 16 bits is then the neighbour at most: one spacing.
LIMITS = {"float32": 8 * 2.0**-23, "float64": 8 * 2.0**-52, "bfloat16": 2**-7, "float16": 2**-10}


def dtype_of(rng):
    """The dtype of a program, which is drawn first."""
    return rng.choice(["float32", "bfloat16", "float16", "float64"], p=[0.7, 0.1, 0.1, 0.1])


class Case:
    """A random program: an optimizer, a tree of arrays and what is done to them."""

    def __init__(self, seed):
        self.rng = rng = np.random.default_rng(seed)
        pick = lambda choices, **how: choices[rng.choice(len(choices), **how)]
        self.dtype = dtype_of(rng)
        policy = pick(POLICIES)
        self.name = pick([name for name in NAMES if CATALOG[name].rows == policy])
        self.limit = LIMITS[self.dtype]
        tables = [(pick(NUM_ROWS), pick(ROW_SHAPES), pick(IDS)) for _ in range(rng.integers(0, 4))]
        self.tables = {f"t{k}": table for k, table in enumerate(tables)}
        # Of one number of rows and of ids: they share the array of ids.
        self.share = rng.random() < 0.3
        if self.share:
            rows, _, many = pick(tables) if tables else (1, (), 1)
            self.tables = {k: (rows, row, many) for k, (_, row, _) in self.tables.items()}
        number = rng.integers(0 if tables else 1, 5)
        self.use, self.donate = pick(USES), bool(rng.random() < 0.5)
        same = pick(LEAF_SHAPES) if self.use == "one gradient" or rng.random() < 0.3 else None
        self.leaves = {f"a{k}": pick(LEAF_SHAPES) if same is None else same for k in range(number)}
        self.in_place = pick(["all", "slots"])
        self.tx = self.optimizer(pick)

    def optimizer(self, pick):
        tx = with_global_step(CATALOG[self.name].make)()
        kind = self.rng.random()
        if kind < 0.25:
            slots = pick(["float32", "bfloat16", "float16", "int8"])
            if slots == "int8":
                return self.in_8_bits(tx)
            how = {"packed": bool(self.rng.random() < 0.5)}
            how["stochastic"] = slots != "float32" and bool(self.rng.random() < 0.5)
            self.limit = max(self.limit, LIMITS[slots])
            self.name += f" {slots} {how}"
            return optzoo.slots_dtype(tx, slots, **how)
        if kind < 0.5:
            branch = pick(sorted(BRANCHES))
            self.name += f" in a branch: {branch}"
            sizes = {k: max(1, many) for k, (_, _, many) in self.tables.items()}
            return BRANCHES[branch](tx, sizes)
        if kind < 0.8:
            wrapper = pick(sorted(WRAPPERS))
            self.name += f" {wrapper}"
            return WRAPPERS[wrapper](tx, self.shapes())
        return tx

    def in_8_bits(self, tx):
        found = optzoo.slots_dtype(tx, "int8", stochastic=bool(self.rng.random() < 0.5))
        try:
            optax.with_extra_args_support(found).init(self.params())
        except ValueError:  # none of its slots may be in 8 bits
            return tx
        self.name += " int8"
        return found

    def __str__(self):
        told = (self.name, self.dtype, self.use, self.in_place, self.tables, self.leaves)
        return f"{told}, donated: {self.donate}, shared ids: {self.share}"

    def array(self, shape):
        return jnp.asarray(self.rng.normal(size=shape), self.dtype)

    def shapes(self):
        return {k: (n, *row) for k, (n, row, _) in self.tables.items()} | self.leaves

    def params(self):
        return {k: self.array(shape) for k, shape in self.shapes().items()}

    def ids(self, num_rows, many):
        rng = self.rng
        kinds = [
            rng.integers(0, num_rows, many),
            rng.integers(-2, num_rows + 2, many),
            np.minimum(rng.zipf(1.3, many), num_rows) - 1,
            np.full(many, rng.integers(0, num_rows)),
            np.full(many, num_rows),
            rng.choice([-(2**31), 2**31 - 1, -1, 0], many),
        ]
        return jnp.asarray(kinds[rng.integers(len(kinds))], jnp.int32)

    def grads(self):
        found, ids = {k: self.array(shape) for k, shape in self.leaves.items()}, None
        if "finite" in self.name and self.rng.random() < 0.4:
            found = {k: jnp.full_like(x, jnp.inf) for k, x in found.items()}
        if self.use == "one gradient" and found:
            found = dict.fromkeys(found, next(iter(found.values())))
        for k, (num_rows, row, many) in self.tables.items():
            if ids is None or not self.share:
                ids = self.ids(num_rows, many)
            found[k] = SparseRows(ids, self.array((many, *row)), num_rows)
        return found

    def program(self, step):
        """The compiled program around a step."""

        def run(params, state, grads):
            if self.use == "params as gradients":
                grads = grads | {k: params[k] for k in self.leaves}
            if self.share and self.tables:  # one array within the program, too
                ids = grads["t0"].indices
                one = lambda g: SparseRows(ids, g.values, g.num_rows)
                grads = grads | {k: one(grads[k]) for k in self.tables}
            after = step(params, state, grads)
            if self.use == "old params later":
                return after, jax.tree.map(lambda old, new: old + new * old, params, after[0])
            if self.use == "two steps of one state":
                return after, step(params, state, jax.tree.map(lambda g: g, grads))
            return after, None

        return jax.jit(run, donate_argnums=(0, 1) if self.donate else ())


def check_close(case, expected, got):
    assert jax.tree.structure(expected) == jax.tree.structure(got), case
    expected, got = map(unpack_state, (expected, got))  # each slot has a scale of its own
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), case
        if not jnp.issubdtype(a.dtype, jnp.inexact):
            # Steps; or packed slots, of which some may be rounded to a neighbour.
            wrong = np.mean(np.asarray(a) != np.asarray(b)) if a.ndim and a.size > 9 else 0.0
            assert wrong < 0.6, case
            continue
        x, y = (np.asarray(part, np.float64) for part in (a, b))
        finite = x[np.isfinite(x)]
        scale = np.sqrt(np.mean(finite**2)) if finite.size else 0.0
        np.testing.assert_allclose(
            x, y, rtol=case.limit, atol=case.limit * scale, err_msg=str(case)
        )


def values_of(trees):
    """The arrays of trees, those of rows too."""
    is_rows = lambda x: isinstance(x, SparseRows)
    both = lambda x: [x.indices, x.values] if is_rows(x) else [x]
    return [a for x in jax.tree.leaves(trees, is_leaf=is_rows) for a in both(x)]


def copied(tree):
    return jax.tree.map(jnp.copy, tree)


def run(seed):
    case = Case(seed)
    tx = optax.with_extra_args_support(case.tx)
    plain = case.program(step_of(tx))
    native = case.program(optzoo.native_step(tx, in_place=case.in_place))
    params = case.params()
    state = tx.init(params)
    for _ in range(DRAWS):
        grads = case.grads()
        before = copied((params, state, grads))
        got = (
            native(*copied((params, state)), grads) if case.donate else native(params, state, grads)
        )
        # What is not donated is unharmed.
        kept = (grads, before[2]) if case.donate else ((params, state, grads), before)
        for a, b in zip(*map(values_of, kept), strict=True):
            np.testing.assert_array_equal(a, b, err_msg=str(case))
        expected = plain(*before)
        check_close(case, expected, got)
        params, state = expected[0]


@pytest.mark.parametrize("seed", range(ALL))
def test_random_steps(seed, x64):
    with x64(dtype_of(np.random.default_rng(seed)) == "float64"):
        run(seed)


@pytest.mark.parametrize("digits", [2, 8])
@pytest.mark.parametrize("rates", [(0.001, 0.004), (0.001234511, 0.001234514)], ids=["far", "near"])
def test_constants_that_print_alike_are_not_taken_for_each_other(rates, digits):
    each = {str(k): optzoo.momentum(rate, 0.9) for k, rate in enumerate(rates)}
    tx = optax.partition(each, {k: k for k in each})
    params = dict.fromkeys(each, jnp.zeros(4))
    step = optzoo.native_step(tx, required=True)
    with np.printoptions(precision=digits):
        after, _ = jax.jit(step)(params, tx.init(params), dict.fromkeys(each, jnp.ones(4)))
    for k, rate in enumerate(rates):
        np.testing.assert_array_equal(after[str(k)], np.full(4, -np.float32(rate)))
