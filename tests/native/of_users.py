"""Random optimizers, such as users write them: native code gives the same elements as XLA, exactly.

    python -m tests.native.of_users 0 100

runs programs 0 to 99, and prints for each kind of native call how many there were. Each program
runs through XLA for several steps, and each of its native calls on guarded memory, where what is
not donated may not be written. All numbers are small integers, so sums in any order are equal.
"""

import collections
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optzoo
from optzoo import SparseRows
from optzoo.native.norms import SumGroup
from optzoo.native.rows_groups import RowsGroup

from .guarded import call_guarded, native_calls

STEPS = 3
WIDTHS = [1, 2, 3, 4, 4, 6, 6, 8, 9, 64, 65, 160, 192]
HEIGHTS = [1, 2, 3, 4, 4, 6, 60]
LARGE = 3000, 128  # ids and width, enough for several threads
LIMIT = 8


def bounded(x):
    """Integers from -8 to 8."""
    is_real = jnp.issubdtype(x.dtype, jnp.floating)
    return jnp.clip(jnp.floor(x), -LIMIT, LIMIT) if is_real else x


def greatest(groups):
    """The greatest magnitude of each group, as slots in 8 bits compute it."""
    bits = jax.lax.bitcast_convert_type(jnp.abs(groups), jnp.int32)
    return jax.lax.bitcast_convert_type(jnp.max(bits, -1, keepdims=True), jnp.float32)


class Rule:
    """A random rule on rows of (many, width), or on a dense array of that shape.

    Args:
        rng: draws the operations.
        first: the values that it starts with.
        rows: the gradient in rows; None of a dense array.
        tables: the parameters and slots that may be read whole or by other ids.
    """

    def __init__(self, rng, first, rows, tables):
        self.rng, self.rows, self.tables = rng, rows, tables
        self.pool = list(first)

    def pick(self):
        return self.pool[-1] if self.integer(2) else self.pool[self.integer(len(self.pool))]

    def like(self, shape):
        """A value that can be broadcast to a shape."""
        fits = lambda x: all(d in (1, e) for d, e in zip(x.shape, shape, strict=True))
        found = [x for x in self.pool if fits(x)]
        if not found:
            return jnp.ones((), self.pool[0].dtype)
        return found[-1] if self.integer(2) else found[self.integer(len(found))]

    def run(self, turns):
        names = [name for name in dir(self) if name.startswith("op_")]
        names = [names[self.integer(len(names))] for _ in range(8)]  # several turns of some kinds
        for _ in range(turns):
            name = names[self.rng.integers(len(names))]
            made = getattr(self, name)(self.pick())
            if made is not None and 0 < made.shape[1] <= 200:
                self.pool.append(bounded(made))
        return self

    def integer(self, end):
        return int(self.rng.integers(end))

    # Elements

    def op_add(self, x):
        return x + self.like(x.shape)

    def op_sub(self, x):
        return x - self.like(x.shape)

    def op_mul(self, x):
        return x * self.like(x.shape)

    def op_max(self, x):
        return jnp.maximum(x, self.like(x.shape))

    def op_where(self, x):
        return jnp.where(x > self.like(x.shape), x, -x)

    def op_half(self, x):
        return x * 0.5 + 1

    def op_relu(self, x):
        return jax.nn.relu(x) - 1

    def op_integers(self, x):
        flags = (x > 1).astype(["int8", "uint8", "int32", "uint32"][self.integer(4)])
        return (flags + flags).astype(x.dtype) - (x < 0).astype(x.dtype)

    # Parts of a row

    def op_sum(self, x):
        return jnp.sum(x.astype(jnp.float32), -1, keepdims=True).astype(x.dtype)

    def op_greatest(self, x):
        return jnp.max(x, -1, keepdims=True)

    def op_column(self, x):
        at = self.integer(x.shape[1])
        return x[:, at : at + 1]

    def op_slice(self, x):
        start = self.integer(x.shape[1])
        return x[:, start : start + 1 + self.integer(x.shape[1])]

    def op_half_of_row(self, x):
        half = x.shape[1] // 2
        return x[:, self.integer(2) * half :][:, :half] if half else None

    def op_concatenate(self, x):
        both = [jnp.broadcast_to(y, (len(self.pool[0]), y.shape[1])) for y in (x, self.pick())]
        return jnp.concatenate(both, 1)

    def op_roll(self, x):
        return jnp.roll(x, 1 + self.integer(3), 1)

    def op_shift(self, x):
        y = self.like((len(x), 1))
        return jnp.concatenate([jnp.broadcast_to(y, (len(x), 1)), x[:, :-1]], 1)

    def op_reverse(self, x):
        return x[:, ::-1]

    def op_turned(self, x):
        """Other elements of the row."""
        number = [d for d in (2, 3, 4) if x.shape[1] % d == 0]
        if not number:
            return None
        d = number[self.integer(len(number))]
        return jnp.swapaxes(x.reshape(len(x), x.shape[1] // d, d), 1, 2).reshape(x.shape)

    def in_groups(self, x):
        length = [2, 3, 4, 64][self.integer(4)]
        filled = -(-x.shape[1] // length) * length
        more = jnp.zeros((len(x), filled - x.shape[1]), x.dtype)
        return jnp.concatenate([x, more], 1).reshape(len(x), filled // length, length)

    def joined(self, groups):
        return groups.reshape(len(groups), groups.shape[1] * groups.shape[2])

    def op_greatest_of_groups(self, x):
        groups = self.in_groups(x.astype(jnp.float32))
        most = greatest(groups) if self.integer(3) else jnp.max(groups, -1, keepdims=True)
        return self.joined(groups - most)[:, : x.shape[1]].astype(x.dtype)

    def op_sums_of_groups(self, x):
        groups = self.in_groups(x.astype(jnp.float32))
        total = jnp.broadcast_to(jnp.sum(groups, -1, keepdims=True), groups.shape)
        return self.joined(total)[:, : x.shape[1]].astype(x.dtype)

    def op_one_of_each_group(self, x):
        return greatest(self.in_groups(x.astype(jnp.float32)))[..., 0].astype(x.dtype)

    def op_first_of_groups(self, x):
        return self.in_groups(x)[:, :, 0]

    # Of other rows

    def op_column_as_row(self, x):
        return jnp.broadcast_to(x[:, 0][None, :], x.shape) if len(x) == x.shape[1] else None

    def op_transpose(self, x):
        return x.T if len(x) == x.shape[1] else None

    def op_other_rows(self, x):
        return x[::-1] if self.integer(2) else jnp.broadcast_to(x[:1], x.shape)

    def op_all_rows(self, x):
        total = jnp.sum(x.astype(jnp.float32), 0, keepdims=True).astype(x.dtype)
        return jnp.broadcast_to(total, x.shape)

    def op_position(self, x):
        return x + jnp.arange(len(x), dtype=x.dtype)[:, None] % 4

    def op_number_of_column(self, x):
        return x + jnp.arange(x.shape[1], dtype=jnp.int32).astype(x.dtype)[None] % 3

    def op_unknown(self, x):
        return jnp.cumsum(x, 1)

    # Of tables

    def op_number_of_row(self, x):
        if self.rows is None:
            return None
        numbers = jnp.arange(self.rows.num_rows, dtype=jnp.float32)
        return self.rows.gather(numbers)[:, None].astype(x.dtype)

    def op_computed_table(self, x):
        if self.rows is None:
            return None
        made = jax.lax.broadcasted_iota(jnp.float32, (self.rows.num_rows, x.shape[1]), 0)
        made = made + jax.lax.broadcasted_iota(jnp.float32, made.shape, 1)
        kinds = [made, jnp.sum(made, 1, keepdims=True), made[:, :1], made[::-1]]
        return self.rows.gather(bounded(kinds[self.integer(4)])).astype(x.dtype)

    def op_whole_table(self, x):
        if not self.tables:
            return None
        table = self.tables[self.integer(len(self.tables))].astype(x.dtype)
        same = table.shape == x.shape or table.shape == (1, x.shape[1])
        return table if same else jnp.broadcast_to(jnp.max(table), (len(x), 1))

    def op_table_by_other_ids(self, x):
        if self.rows is None or not self.tables:
            return None
        numbers = jnp.arange(self.rows.num_rows, dtype=jnp.int32)[::-1]
        table = self.tables[self.integer(len(self.tables))]
        others = self.rows.with_rows(self.rows.gather(numbers), self.rows.values)
        return others.gather(table).astype(x.dtype)

    def value(self, shape, dtype):
        """A value of a shape, of the dtype of a slot."""
        x = self.like(shape)
        if dtype == "float32" or dtype == "bfloat16":
            return jnp.broadcast_to(x, shape).astype(dtype)
        return jnp.broadcast_to(jnp.where(x > 0, 1, 0), shape).astype(dtype)


class Program:
    """A random optimizer, with parameters and gradients."""

    def __init__(self, seed):
        self.seed, rng = seed, np.random.default_rng([seed, 0])
        pick = lambda of, **how: of[rng.choice(len(of), **how)]
        self.dtype = pick(["float32", "bfloat16"], p=[0.85, 0.15])
        self.num_rows, self.width = pick(HEIGHTS), pick(WIDTHS)
        self.many = pick([0, 1, 2, 19, self.num_rows, self.num_rows, self.width, self.width])
        if rng.random() < 0.02:
            self.num_rows, (self.many, self.width) = 500, LARGE
        self.is_dense, self.merges = bool(rng.random() < 0.25), bool(rng.random() < 0.9)
        self.turns = int(rng.integers(2, 12))
        widths = [self.width, self.width, 1, 2 * self.width, self.width + 1]
        if rng.random() < 0.4 or self.num_rows == 1:  # rows of 128 would be those of lines
            widths = widths[:1]
        dtypes = ["float32", "float32", "bfloat16", "int32", "int8", "bool"]
        self.slots = [(pick(widths), pick(dtypes)) for _ in range(rng.integers(1, 4))]
        self.donate = bool(rng.random() < 0.5)

    def __str__(self):
        return str(self.__dict__)

    def numbers(self, rng, shape, dtype):
        return jnp.asarray(rng.integers(0, 2 if dtype == "bool" else 4, shape), dtype)

    def params(self):
        rng = np.random.default_rng([self.seed, 1])
        return self.numbers(rng, (self.num_rows, self.width), self.dtype)

    def grads(self, step):
        rng = np.random.default_rng([self.seed, 2, step])
        if self.is_dense:
            return self.numbers(rng, (self.num_rows, self.width), self.dtype)
        ids = rng.integers(-1, self.num_rows + 1, self.many)
        values = self.numbers(rng, (self.many, self.width), self.dtype)
        return SparseRows(jnp.asarray(ids, jnp.int32), values, self.num_rows)

    def init(self, params):
        rng = np.random.default_rng([self.seed, 3])
        slots = [self.numbers(rng, (self.num_rows, width), dtype) for width, dtype in self.slots]
        return jnp.zeros((), jnp.int32), slots

    def update(self, g, state, params):
        rng, (count, slots) = np.random.default_rng([self.seed, 4]), state
        if self.is_dense:
            return self.dense(rng, g, count, slots, params)
        g = g.coalesce() if self.merges else g
        rows = [g.gather(a) for a in (params, *slots)] if self.merges else []
        first = [g.values, *(x.astype(self.dtype) for x in rows)]
        first += [jnp.broadcast_to(count % 4, (1, 1)).astype(self.dtype)]
        rule = Rule(rng, first, g, [params, *slots] if rng.random() < 0.4 else [])
        rule.run(self.turns)
        new = []
        for slot in slots if self.merges else []:
            row = rule.value((len(g.values), slot.shape[1]), slot.dtype.name)
            new.append(g.scatter(slot, row) if rng.random() < 0.9 else slot)
        values = rule.value(g.values.shape, self.dtype)
        return g.with_values(values).drop_padding(), (count + 1, new if self.merges else slots)

    def dense(self, rng, g, count, slots, params):
        first = [g, params, *(x.astype(self.dtype) for x in slots)]
        rule = Rule(rng, first, None, []).run(self.turns)
        new = [rule.value(slot.shape, slot.dtype.name) for slot in slots]
        return rule.value(g.shape, self.dtype), (count + 1, new)


def check_equal(expected, got):
    expected, got = np.asarray(expected), np.asarray(got)
    assert (expected.shape, expected.dtype) == (got.shape, got.dtype)
    np.testing.assert_array_equal(got.astype(np.float64), expected.astype(np.float64))


def run(program) -> list[Any]:
    """Raises where native code differs from XLA; the native calls."""
    tx = optax.with_extra_args_support(
        optax.GradientTransformation(program.init, lambda g, s, x=None: program.update(g, s, x))
    )
    params = program.params()
    state = tx.init(params)
    probe, calls = native_calls(tx, params, program.grads(0))
    if not calls:
        return []

    def plain(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for call, (args, outs) in zip(calls, probe(params, state, program.grads(0)), strict=True):
        for at_end, in_place in [(True, True), (False, False)]:
            got = call_guarded(call, args, at_end=at_end, in_place=in_place)
            for a, b in zip(outs, got, strict=True):
                check_equal(a, b)
    step = jax.jit(optzoo.native_step(tx), donate_argnums=(0, 1) if program.donate else ())
    expected, got = (params, state), jax.tree.map(jnp.array, (params, state))
    plain = jax.jit(plain)
    for k in range(STEPS):
        grads = program.grads(k)
        expected = plain(*expected, grads)
        before = None if program.donate else jax.device_get(got)
        after = step(*got, grads)
        if before is not None:
            jax.tree.map(check_equal, before, got)
        got = after
        jax.tree.map(check_equal, expected, got)
    return calls


def main(first, number):
    kinds, failed = collections.Counter(), []
    for seed in range(first, first + number):
        print(f"program {seed}", file=sys.stderr, flush=True)
        program = Program(seed)
        try:
            calls = run(program)
        except Exception as error:
            failed.append(seed)
            print(f"program {seed} differs: {program}: {type(error).__name__}: {error}")
            continue
        names = {RowsGroup: "rows", SumGroup: "sums"}
        kinds.update({names.get(type(call.parts[0]), "leaves") for call in calls} or {"none"})
        if seed % 50 == 49:
            jax.clear_caches()
    print(
        f"{number} programs, {len(failed)} differ: {failed}; native: {dict(sorted(kinds.items()))}"
    )
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
