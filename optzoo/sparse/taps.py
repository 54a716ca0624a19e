"""Evaluates the jaxpr of a loss with a *tap* for each lookup: an array added to the rows.

A tap of zeros changes no value, and its gradient is that of the rows. :func:`make_plan` finds the
lookups of the leaves of the parameters, :func:`evaluate` adds the taps. A lookup in the body of
another transformation takes its tap from outside, and gives its ids to the outside, through
the arguments and results of that transformation.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..core import compat
from .primitive import bind_lookup, is_lookup, shape_of_table


class Table(NamedTuple):
    """What a variable of a jaxpr is: a leaf of the parameters, or a cast of one."""

    leaf: int  # its position
    casts: tuple[Any, ...] = ()  # to which dtypes in turn


class Lookup(NamedTuple):
    """A lookup that gets a tap."""

    leaf: int
    shape: tuple[int, ...]  # of its ids, after the axes of the loops around it
    dtype: Any  # of its ids
    table: tuple[int, ...]  # the shape of the table
    shard: Any = None  # what is known of it if it is a part of a sharded table

    @property
    def rows(self) -> tuple[int, ...]:
        """The shape of the rows."""
        return (*self.shape, *self.table[1:])


class DenseReads(NamedTuple):
    """What reads leaves of the parameters by no lookup, and has dense gradients."""

    rows: dict[int, str]  # by leaf: a gather of some of its rows, with its line
    others: set[int]  # the leaves that anything else uses

    def add(self, more: "DenseReads", line: str) -> None:
        """Adds those of the body of an equation of this line."""
        # JAX reuses jaxprs, and with them the lines of their first call.
        self.rows.update({leaf: line or inside for leaf, inside in more.rows.items()})
        self.others.update(more.others)


class _Step(NamedTuple):
    """An equation that has to do with tables."""

    lookups: list[Lookup]
    results: list[Table | None]  # which of the outputs are tables
    run: Callable[..., Any]  # (values, copies, taps) -> (outputs, ids)
    plans: Sequence["Plan"] = ()  # of its bodies


class Plan(NamedTuple):
    """Where a jaxpr, with the jaxprs inside of it, has lookups that get taps."""

    jaxpr: Any
    steps: dict[int, _Step]  # by the position of the equation
    results: list[Table | None]  # which of the outputs are tables
    reads: DenseReads

    @property
    def lookups(self) -> list[Lookup]:
        """In the order of the taps."""
        return [found for step in self.steps.values() for found in step.lookups]


def make_plan(jaxpr: Any, tables: Sequence[Table | None]) -> Plan:
    """Finds the lookups; ``tables`` says which inputs of the jaxpr are tables."""
    known = {v: table for v, table in zip(jaxpr.invars, tables, strict=True) if table}
    find = lambda v: None if compat.is_literal(v) else known.get(v)
    steps, reads = {}, DenseReads({}, set())
    for k, eqn in enumerate(jaxpr.eqns):
        inputs = [find(v) for v in eqn.invars]
        step = _step(eqn, inputs) if any(inputs) else None
        if step is None:
            if _reads_some_rows(eqn) and inputs[0] is not None:
                reads.rows[inputs[0].leaf] = compat.line_of(eqn)
            else:
                reads.others.update(table.leaf for table in inputs if table)
            continue
        for plan in step.plans:
            reads.add(plan.reads, compat.line_of(eqn))
        known.update(
            {v: table for v, table in zip(eqn.outvars, step.results, strict=True) if table}
        )
        if step.lookups:
            steps[k] = step
    return Plan(jaxpr, steps, [find(v) for v in jaxpr.outvars], reads)


def _reads_some_rows(eqn: Any) -> bool:
    """Whether an equation gathers whole rows of an array, fewer than there are."""
    if eqn.primitive.name not in ("gather", "dynamic_slice"):
        return False
    x, out = eqn.invars[0].aval, eqn.outvars[0].aval
    return tuple(eqn.params["slice_sizes"]) == (1, *x.shape[1:]) and out.size < x.size


def evaluate(
    plan: Plan,
    consts: Sequence[Any],
    values: Sequence[Any],
    copies: Mapping[int, Array],
    taps: Sequence[Array],
) -> tuple[list[Any], list[Array]]:
    """The outputs of a jaxpr, and the ids of each lookup.

    Args:
        plan: of the jaxpr.
        consts: the values of its constants.
        values: its inputs.
        copies: by their positions the leaves that are looked up: a lookup with a tap reads these,
            so that it does not depend on the inputs. If a leaf is not there, nothing is read.
        taps: for each lookup what to add to its rows; or the rows themselves if nothing is read.
    """
    if not plan.steps:
        return compat.evaluate(plan.jaxpr, consts, values), []
    names = [*plan.jaxpr.constvars, *plan.jaxpr.invars]
    known = dict(zip(names, [*consts, *values], strict=True))
    read = lambda v: v.val if compat.is_literal(v) else known[v]
    ids = []
    for k, eqn in enumerate(plan.jaxpr.eqns):
        inputs = [read(v) for v in eqn.invars]
        if (step := plan.steps.get(k)) is None:
            outputs = compat.evaluate_equation(plan.jaxpr, eqn, inputs)
        else:
            mine = taps[len(ids) : len(ids) + len(step.lookups)]
            with compat.scope_of(eqn):
                outputs, more = step.run(inputs, copies, mine)
            ids += more
        known.update(zip(eqn.outvars, outputs, strict=True))
    return [read(v) for v in plan.jaxpr.outvars], ids


def _step(eqn: Any, inputs: list[Table | None]) -> _Step | None:
    if is_lookup(eqn):
        return _of_lookup(eqn, inputs[0])
    plan = _STEPS.get(compat.function_of(eqn))
    return None if plan is None else plan(eqn, inputs)


def _of_lookup(eqn: Any, table: Table | None) -> _Step | None:
    if table is None or eqn.params["batch_dims"]:
        return None
    aval = eqn.invars[1].aval

    def run(values, copies, taps):
        copy, ids, rows = copies.get(table.leaf), jnp.asarray(values[1], aval.dtype), taps[0]
        if copy is not None:
            rows = bind_lookup(copy, ids, in_lines=eqn.params["in_lines"])
            _check_varying(rows, copy)
            rows = rows + taps[0]
        for dtype in table.casts:
            rows = rows.astype(dtype)
        return [rows], [ids]

    of = shape_of_table(eqn), eqn.params["shard"]
    found = Lookup(table.leaf, aval.shape, aval.dtype, *of)
    return _Step([found], [None], run)


def _check_varying(rows: Array, table: Array) -> None:
    if axes := compat.varying(rows) - compat.varying(table):
        raise ValueError(
            f"the ids differ along the mesh axes {sorted(axes)} but the table does not: its "
            "gradient would be a sum over replicas, which rows cannot express. Make the table "
            "varying with jax.lax.pcast(table, axes, to='varying') and aggregate its rows, "
            "or use shard_map(..., check_vma=False)"
        )


def _of_cast(eqn: Any, inputs: list[Table | None]) -> _Step | None:
    (table,), dtype = inputs, eqn.outvars[0].aval.dtype
    dtypes = eqn.invars[0].aval.dtype, dtype
    if table is None or not all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes):
        return None
    run = lambda values, copies, taps: ([values[0].astype(dtype)], [])
    return _Step([], [table._replace(casts=(*table.casts, dtype))], run)


def _of_jit(eqn: Any, inputs: list[Table | None]) -> _Step | None:
    if compat.has_shardings(eqn):
        return None
    ((jaxpr, consts),) = compat.closed_jaxprs(eqn)
    plan = make_plan(jaxpr, inputs)

    def run(values, copies, taps):
        tables, mine = tuple(inputs), _of_plans(copies, plan)
        return _evaluate_in_jit(jaxpr, tables, consts, values, mine, taps)

    return _Step(plan.lookups, plan.results, run, [plan])


def _in_jit(jaxpr, tables, consts, values, copies, taps):
    return evaluate(make_plan(jaxpr, tables), consts, values, copies, taps)


# By the identity of the jaxpr: the body of a `jit` that is called again is not compiled again.
_evaluate_in_jit = jax.jit(_in_jit, static_argnums=(0, 1))


def _of_checkpoint(eqn: Any, inputs: list[Table | None]) -> _Step:
    ((jaxpr, consts),) = compat.closed_jaxprs(eqn)
    plan = make_plan(jaxpr, inputs)

    def run(values, copies, taps):
        f = lambda *args: evaluate(plan, consts, *args)
        return compat.checkpoint_like(eqn, f)(values, _of_plans(copies, plan), taps)

    return _Step(plan.lookups, plan.results, run, [plan])


def _of_scan(eqn: Any, inputs: list[Table | None]) -> _Step:
    ((jaxpr, consts),) = compat.closed_jaxprs(eqn)
    num_consts, num_carry = compat.scan_sizes(eqn)
    first = num_consts + num_carry
    # A carry that the body returns as it is has the same value in all steps.
    carried = zip(
        inputs[num_consts:first], jaxpr.invars[num_consts:first], jaxpr.outvars, strict=False
    )
    tables = [table if out is v else None for table, v, out in carried]
    xs = [None] * (len(inputs) - first)
    plan = make_plan(jaxpr, [*inputs[:num_consts], *tables, *xs])

    def run(values, copies, taps):
        def body(carry, x):
            mine, taps = x
            outputs, ids = evaluate(
                plan, consts, [*values[:num_consts], *carry, *mine], copies, taps
            )
            return outputs[:num_carry], (outputs[num_carry:], ids)

        carry, xs = values[num_consts:first], values[first:]
        carry, (ys, ids) = compat.scan_like(eqn, body, carry, (xs, taps))
        return [*carry, *ys], ids

    length = eqn.params["length"]
    lookups = [found._replace(shape=(length, *found.shape)) for found in plan.lookups]
    results = [*tables, *[None] * (len(eqn.outvars) - num_carry)]
    return _Step(lookups, results, run, [plan])


def _of_cond(eqn: Any, inputs: list[Table | None]) -> _Step | None:
    if any(map(compat.varying, eqn.invars[1:])):
        return None  # the padding would have another type than the ids
    bodies = list(compat.closed_jaxprs(eqn))
    plans = [make_plan(jaxpr, inputs[1:]) for jaxpr, _ in bodies]
    lookups = [found for plan in plans for found in plan.lookups]
    ends = np.cumsum([len(plan.lookups) for plan in plans])

    def branch(k):
        mine = slice(ends[k] - len(plans[k].lookups), ends[k])

        def run(values, copies, taps):
            # The lookups of the other branches read padding.
            ids = [jnp.full(x.shape, x.table[0], x.dtype) for x in lookups]
            outputs, ids[mine] = evaluate(plans[k], bodies[k][1], values, copies, taps[mine])
            return outputs, ids

        return run

    def run(values, copies, taps):
        index, *values = values
        branches = [branch(k) for k in range(len(plans))]
        return jax.lax.switch(index, branches, values, _of_plans(copies, *plans), taps)

    results = zip(*(plan.results for plan in plans), strict=True)
    results = [one[0] if len(set(one)) == 1 else None for one in results]
    return _Step(lookups, results, run, plans)


def _of_plans(copies: Mapping[int, Array], *plans: Plan) -> dict[int, Array]:
    """The tables that the lookups of some plans read."""
    leaves = {found.leaf for plan in plans for found in plan.lookups}
    return {leaf: copies[leaf] for leaf in sorted(leaves & copies.keys())}


_STEPS = {
    "jax.lax.convert_element_type": _of_cast,
    "jax.jit": _of_jit,
    "jax.checkpoint": _of_checkpoint,
    "jax.lax.scan": _of_scan,
    "jax.lax.cond": _of_cond,
}
