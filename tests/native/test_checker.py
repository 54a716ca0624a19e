"""The checker accepts the loops over rows that are right, and no others."""

import copy
import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

from optzoo import SparseRows
from optzoo.core.marks import marking
from optzoo.native.checker import check
from optzoo.native.find_rows import find_rows
from optzoo.native.groups import Unsupported, read_program

from .of_users import greatest

ROWS, WIDTH, IDS = 5, 4, 3


def groups_of(f, *, ids=IDS, width=WIDTH, slot=WIDTH):
    """The groups of rows of ``f(g, x, s)``, and why there are no others.

    It gets merged gradients, rows of a table and of a slot; and gives new rows of both.
    """

    def step(table, slots, values, ids):
        g = SparseRows(ids, values, ROWS).coalesce()
        x, s = f(g, g.gather(table), g.gather(slots))
        return g.scatter(table, x), g.scatter(slots, s)

    shape = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    with marking():
        jaxpr = jax.make_jaxpr(step)(
            shape(ROWS, width), shape(ROWS, slot), shape(ids, width),
            jax.ShapeDtypeStruct((ids,), jnp.int32),
        )  # fmt: skip
    program, reasons = read_program(jaxpr.jaxpr), []
    found = find_rows(program, program.inputs[:2], lambda v, why: reasons.append(str(why)))
    return found, reasons


def sum_of(x):
    return jnp.sum(x, -1, keepdims=True)


def of_pairs(x, f):
    """A function of the two halves of a row."""
    return f(x.reshape(-1, 2, x.shape[1] // 2)).reshape(x.shape)


def filled(x, beyond=0.0):
    """Rows of 4 elements in groups of 3, of which the last one is filled up."""
    x = jnp.concatenate([x, jnp.broadcast_to(beyond, (len(x), 2))], 1).reshape(-1, 2, 3)
    return (x - greatest(x)).reshape(-1, 6)[:, :4]


ITSELF = {"ids": WIDTH, "width": WIDTH}  # as many ids as columns
RIGHT = {
    "elements": (lambda g, x, s: (x - g.values * s, s + g.values), {}),
    "a sum": (lambda g, x, s: (x - g.values / sum_of(s), s + sum_of(x)), {}),
    "a sum of a sum": (lambda g, x, s: (x - sum_of(x / sum_of(x * x)), s), {}),
    "a column": (lambda g, x, s: (x - x[:, 1:2], s), {}),
    "one element": (lambda g, x, s: (x - s, s + sum_of(g.values)), {"slot": 1}),
    "two slots in one": (
        lambda g, x, s: (x - s[:, 4:], jnp.concatenate([s[:, 4:], s[:, :4] + x], 1)),
        {"slot": 8},
    ),
    "a long slot": (lambda g, x, s: (x, 2 * s), {"slot": 8}),
    "groups": (lambda g, x, s: (of_pairs(x, lambda x: x - greatest(x)), s + 1), {}),
    "groups filled up": (lambda g, x, s: (filled(x), s - x), {}),
    "number of the row": (lambda g, x, s: (x, s + g.gather(jnp.arange(5.0))[:, None]), {}),
    "as many ids as columns": (lambda g, x, s: (x - s.sum(1, keepdims=True), s - 1), ITSELF),
    "one id": (lambda g, x, s: (x - x[:1], s), {"ids": 1}),
}
WRITTEN, OTHERS = "reads already written elements of its row", "reads other rows"
WRONG = {
    "turned": (lambda g, x, s: (jnp.roll(x, 1, 1), s), {}, f"`slice`.* {WRITTEN}"),
    "moved up": (
        lambda g, x, s: (x, jnp.concatenate([x[:, :1], s[:, :-1]], 1)),
        {},
        "its slots have rows of several shapes|already written",
    ),
    "a row and its column": (
        lambda g, x, s: (jnp.concatenate([s, x], 1)[:, :4], s + 1),
        {"slot": 1},
        f"`concatenate`.* {WRITTEN}",
    ),
    "pairs": (
        lambda g, x, s: (s.reshape(-1, 4, 2)[..., 1], s),
        {"slot": 8},
        "reads other elements of its group|several kinds of groups|several shapes",
    ),
    "a column of groups": (
        lambda g, x, s: (of_pairs(x, lambda x: 2 * x) - x[:, :1], s),
        {},
        f"`slice`.* {WRITTEN}",
    ),
    "groups filled up by others": (lambda g, x, s: (filled(x, x[:, :2]), s), {}, WRITTEN),
    "other rows": (lambda g, x, s: (x - x[::-1], s), {}, "`rev`.* is not supported"),
    "the row before": (
        lambda g, x, s: (x - jnp.broadcast_to(x[:, 0][None], x.shape), s),
        ITSELF,
        OTHERS,
    ),
    "all rows": (
        lambda g, x, s: (x - jnp.sum(x, 0, keepdims=True), s),
        {},
        "`reduce_sum`.* is not supported",
    ),
    "sum of a table that is computed": (
        lambda g, x, s: (x + g.gather(sum_of(jnp.ones((5, 4)) * jnp.arange(5.0)[:, None])), s),
        {},
        "`reduce_sum`.* is not over an available row",
    ),
    "column of it, with as many ids as rows": (
        lambda g, x, s: (
            x + g.gather((jnp.arange(5.0)[:, None] + jnp.arange(4.0)[None])[:, :1]),
            s,
        ),
        {"ids": 5},
        OTHERS,
    ),
    "greatest of other groups": (
        lambda g, x, s: (of_pairs(x, lambda x: x - greatest(x)[:, :1]), s),
        {},
        "reads other rows or groups",
    ),
    "unknown": (lambda g, x, s: (jnp.cumsum(x, 1), s), {}, "`cumsum`.* is not supported"),
    "a dtype": (
        lambda g, x, s: ((x > 0).astype("int16").astype("float32"), s),
        {},
        "the dtype int16 of `convert_element_type` .* is not supported",
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_is_accepted(name):
    f, sizes = RIGHT[name]
    found, reasons = groups_of(f, **sizes)
    assert len(found) == 1 and not reasons


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_refused(name):
    f, sizes, why = WRONG[name]
    found, reasons = groups_of(f, **sizes)
    assert not found
    assert reasons
    for reason in reasons:
        assert re.search(why, reason), reason


def changed(rows, name, **params):
    """A group in which the first operation of a name has other parameters."""
    op = next(op for op in rows.operations if op.name == name)
    new = copy.copy(op)
    new.eqn = op.eqn.replace(params={**op.eqn.params, **params})
    for v in new.outs:
        v.maker = new
    operations = [new if each is op else each for each in rows.operations]
    return dataclasses.replace(rows, operations=operations)


def with_parts(rows, change):
    """A group with other parts of rows."""
    of = type("Changed", (type(rows),), {"parts": property(lambda self: change(rows.parts))})
    return of(**{field.name: getattr(rows, field.name) for field in dataclasses.fields(rows)})


FAULTS = {
    "a part of a row is not written": (
        "two slots in one",
        lambda rows: with_parts(rows, lambda parts: parts[:-1]),
        "rows are not written whole",
    ),
    "a part of a row is written twice": (
        "two slots in one",
        lambda rows: with_parts(rows, lambda parts: [*parts, parts[-1]]),
        "rows are not written whole",
    ),
    "parts of a row that overlap": (
        "two slots in one",
        lambda rows: with_parts(rows, lambda parts: [*parts[:-1], parts[-1]._replace(start=2)]),
        "rows are not written whole",
    ),
    "a table is a stream, too": (
        "elements",
        lambda rows: dataclasses.replace(rows, streams=rows.tables[:1]),
        "both by the rows of its ids and in another way",
    ),
    "the ids are a stream, too": (
        "elements",
        lambda rows: dataclasses.replace(rows, streams=[rows.ids]),
        "both by the rows of its ids and in another way",
    ),
    "a table has no pointer": (
        "elements",
        lambda rows: dataclasses.replace(rows, tables=rows.tables[:1]),
        "reads an array as a whole",
    ),
    "a table is written twice": (
        "elements",
        lambda rows: dataclasses.replace(rows, writes=[*rows.writes, rows.writes[0]]),
        "written twice",
    ),
    "other groups": (
        "groups",
        lambda rows: dataclasses.replace(rows, lanes=(4, 2)),
        "one number for each group only",
    ),
    "no groups": (
        "groups",
        lambda rows: dataclasses.replace(rows, lanes=None),
        "`reduce_max`.* is not over an available row",
    ),
    "a slice that begins elsewhere": (
        "two slots in one",
        lambda rows: changed(rows, "slice", start_indices=(0, 2), limit_indices=(3, 6)),
        "already written",
    ),
    "a sum over the rows": (
        "a sum",
        lambda rows: changed(rows, "reduce_sum", axes=(0,)),
        "`reduce_sum`.* is not over an available row",
    ),
    "a broadcast along the rows": (
        "as many ids as columns",
        lambda rows: changed(rows, "broadcast_in_dim", broadcast_dimensions=(1,)),
        "reads other rows",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_in_a_group_are_found(name):
    right, change, why = FAULTS[name]
    f, sizes = RIGHT[right]
    [rows], _ = groups_of(f, **sizes)
    check(rows)
    with pytest.raises(Unsupported, match=why):
        check(change(rows))


def test_positions_of_merged_ids():
    """Native code merges rows at the first position of an id, XLA at another one."""
    f = lambda g, x, s: (x - g.values * jnp.arange(3.0)[:, None], s)
    [rows], _ = groups_of(f)
    assert rows.merged is None  # XLA merges them
    merged = rows.ids.maker.outs[1]
    streams = [v for v in rows.streams if v is not merged]
    with pytest.raises(Unsupported, match=r"reads the positions of merged ids"):
        check(dataclasses.replace(rows, merged=merged, streams=streams))
