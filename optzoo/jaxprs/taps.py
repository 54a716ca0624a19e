"""Evaluates the jaxpr of a loss with a *tap* for each lookup: an array added to the rows.

A tap of zeros changes no value, and its gradient is that of the rows. :func:`plan_taps` finds the
lookups of the leaves of the parameters, and the gathers of rows that are treated as lookups;
:func:`evaluate` adds the taps. For a lookup in the body of another transformation, the tap is an
additional argument and the ids are an additional result of that transformation.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec

from ..core.compat import varying
from ..core.meshes import EVERYWHERE, in_mesh, mesh_of
from ..core.numerics import rounding_cast
from . import equations
from .gathers import row_gather
from .graph import Graph, Operation, read
from .lookup import bind_lookup, is_lookup, shape_of_table
from .primitives import function_of


class FromLeaf(NamedTuple):
    """A value that is a leaf of the parameters, or a cast of one."""

    leaf: int  # its position
    gathers: bool = False  # whether gathers of its rows are lookups
    casts: tuple[Any, ...] = ()  # to which dtypes in turn
    places: tuple[Operation, ...] = ()  # which change the sharding, in turn

    def of_copy(self, copy: Array) -> Array:
        """A copy of the leaf, sharded like the value."""
        for op in self.places:
            [copy] = op.evaluate([copy])
        return copy


class Lookup(NamedTuple):
    """A lookup that gets a tap."""

    leaf: int
    shape: tuple[int, ...]  # of its ids, after the axes of the loops around it
    dtype: Any  # of its ids
    table: tuple[int, ...]  # the shape of the table
    shard: Any = None  # what is known of it if it is a part of a sharded table
    lines: bool = False  # whether the table is in lines
    spec: PartitionSpec = EVERYWHERE  # how the rows are divided, in their type

    @property
    def rows(self) -> tuple[int, ...]:
        """The shape of the rows."""
        return (*self.shape, *self.table[1:])


class _Step(NamedTuple):
    """An operation with tables as operands."""

    lookups: list[Lookup]
    results: list[FromLeaf | None]  # which of the outputs are tables
    run: Callable[..., Any]  # (values, copies, taps) -> (outputs, ids)


class TapPlan(NamedTuple):
    """The lookups that get taps, in a program and its inner bodies."""

    graph: Graph
    steps: dict[Operation, _Step]
    results: list[FromLeaf | None]  # which of the outputs are tables

    @property
    def lookups(self) -> list[Lookup]:
        """The lookups, in the order of the taps."""
        return [found for step in self.steps.values() for found in step.lookups]


def plan_taps(graph: Graph, tables: Sequence[FromLeaf | None]) -> TapPlan:
    """Finds the lookups; ``tables`` marks the inputs of the program that are tables."""
    known = {v: table for v, table in zip(graph.inputs, tables, strict=True) if table}
    steps = {}
    for op in graph.operations:
        inputs = [known.get(v) for v in op.ins]
        step = _step(op, inputs) if any(inputs) else None
        if step is not None:
            known.update({v: t for v, t in zip(op.outs, step.results, strict=True) if t})
            if step.lookups:
                steps[op] = step
        elif _is_cast_to_bfloat16(op) and op.ins[0].maker in steps:
            steps[op] = _of_cast_of_rows(op)
    return TapPlan(graph, steps, [known.get(v) for v in graph.results])


def evaluate(
    plan: TapPlan, values: Sequence[Any], copies: Mapping[int, Array], taps: Sequence[Array]
) -> tuple[list[Any], list[Array]]:
    """The outputs of a program, and the ids of each lookup.

    Args:
        plan: the plan of the program.
        values: its inputs.
        copies: the leaves that are looked up, by index. A lookup with a tap reads these copies, so
            that it does not depend on the inputs. Leaves without a copy are not read.
        taps: for each lookup, an array to add to its rows; or the rows themselves if the leaf is
            not read.
    """
    known, ids = dict(zip(plan.graph.inputs, values, strict=True)), list[Array]()
    for op in plan.graph.operations:
        operands = [read(known, v) for v in op.ins]
        if (step := plan.steps.get(op)) is None:
            outputs = op.evaluate(operands)
        else:
            mine = taps[len(ids) : len(ids) + len(step.lookups)]
            with equations.scope_of(op.eqn):
                outputs, more = step.run(operands, copies, mine)
            ids += [in_mesh(i, mesh_of(tap)) for i, tap in zip(more, mine, strict=True)]
        known.update(zip(op.outs, outputs, strict=True))
    return [read(known, v) for v in plan.graph.results], ids


def _step(op: Operation, inputs: list[FromLeaf | None]) -> _Step | None:
    if is_lookup(op):
        return _of_lookup(op, inputs[0])
    plan = _STEPS.get(function_of(op.name))
    return None if plan is None else plan(op, inputs)


def _of_lookup(op: Operation, table: FromLeaf | None) -> _Step | None:
    if table is None or op.params["batch_dims"]:
        return None
    aval = op.ins[1].aval

    def run(values, copies, taps):
        copy, ids, rows = copies.get(table.leaf), jnp.asarray(values[1], aval.dtype), taps[0]
        if copy is not None:
            params = {name: op.params[name] for name in ("in_lines", "spec")}
            rows = bind_lookup(table.of_copy(copy), ids, **params)
            _check_varying(rows, copy)
            rows = rows + taps[0]
        for dtype in table.casts:
            rows = rounding_cast(rows, dtype)
        return [rows], [ids]

    found = Lookup(
        table.leaf,
        aval.shape,
        aval.dtype,
        table=shape_of_table(op),
        shard=op.params["shard"],
        lines=op.params["in_lines"] is not None,
        spec=op.outs[0].aval.sharding.spec,
    )
    return _Step([found], [None], run)


def _of_gather(op: Operation, inputs: list[FromLeaf | None]) -> _Step | None:
    table, gather = inputs[0], row_gather(op)
    if table is None or not table.gathers or gather is None:
        return None
    out = op.outs[0].aval

    def run(values, copies, taps):
        copy = copies.get(table.leaf)
        copy = None if copy is None else table.of_copy(copy)
        tap = in_mesh(taps[0], out.sharding.mesh)
        rows, ids = gather.run(copy, values, tap, table.casts)
        return [rows.reshape(out.shape)], [ids]

    # Of a dynamic slice, the result has one more axis.
    spec = out.sharding.spec if gather.shape else EVERYWHERE
    found = Lookup(table.leaf, gather.shape, gather.dtype, op.ins[0].shape, spec=spec)
    return _Step([found], [None], run)


def _check_varying(rows: Array, table: Array) -> None:
    if axes := varying(rows) - varying(table):
        raise ValueError(
            f"the ids vary over the mesh axes {sorted(axes)}, but the table does not: its "
            "gradient would be a sum over replicas, which rows cannot represent. Make the table "
            "varying with jax.lax.pcast(table, axes, to='varying') and aggregate its rows, or "
            "use shard_map(..., check_vma=False)"
        )


def _of_cast(op: Operation, inputs: list[FromLeaf | None]) -> _Step | None:
    (table,), dtype = inputs, op.outs[0].aval.dtype
    dtypes = op.ins[0].aval.dtype, dtype
    if table is None or not all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes):
        return None
    run = lambda values, copies, taps: ([values[0].astype(dtype)], [])
    return _Step([], [table._replace(casts=(*table.casts, dtype))], run)


def _of_place(op: Operation, inputs: list[FromLeaf | None]) -> _Step | None:
    (table,) = inputs
    if table is None:
        return None
    placed = table._replace(places=(*table.places, op))
    return _Step([], [placed], lambda values, *_: (op.evaluate(values), []))


def _is_cast_to_bfloat16(op: Operation) -> bool:
    return op.name == "convert_element_type" and op.outs[0].dtype == "bfloat16"


def _of_cast_of_rows(op: Operation) -> _Step:
    cast = lambda x: rounding_cast(x, op.outs[0].aval.dtype)
    return _Step([], [None], lambda values, copies, taps: ([cast(values[0])], []))


def _of_jit(op: Operation, inputs: list[FromLeaf | None]) -> _Step | None:
    if equations.has_shardings(op.eqn):
        return None
    [body], [(jaxpr, consts)] = op.bodies, equations.closed_jaxprs(op.eqn)
    plan = plan_taps(body.graph, inputs)

    def run(values, copies, taps):
        mine = _of_plans(copies, plan)
        return _evaluate_in_jit(jaxpr, tuple(inputs), [*consts, *values], mine, taps)

    return _Step(plan.lookups, plan.results, run)


def _in_jit(jaxpr, tables, values, copies, taps):
    graph = Graph.of(jaxpr)
    constants = [None] * (len(graph.inputs) - len(tables))
    return evaluate(plan_taps(graph, [*constants, *tables]), values, copies, taps)


# By the identity of the jaxpr: the body of a `jit` that is called again is not compiled again.
_evaluate_in_jit = jax.jit(_in_jit, static_argnums=(0, 1))


def _of_checkpoint(op: Operation, inputs: list[FromLeaf | None]) -> _Step:
    plan = plan_taps(op.bodies[0].graph, inputs)

    def run(values, copies, taps):
        f = lambda *args: evaluate(plan, *args)
        return equations.checkpoint_like(op.eqn, f)(values, _of_plans(copies, plan), taps)

    return _Step(plan.lookups, plan.results, run)


def _of_scan(op: Operation, inputs: list[FromLeaf | None]) -> _Step:
    [body], (num_consts, num_carry) = op.bodies, equations.scan_sizes(op.eqn)
    first = num_consts + num_carry
    # A carry that the body returns as it is has the same value in all turns.
    tables = [
        inputs[i] if body.graph.results[k] is body.graph.inputs[i] else None
        for i, k in body.again.items()
    ]
    xs = [None] * (len(inputs) - first)
    plan = plan_taps(body.graph, [*inputs[:num_consts], *tables, *xs])

    def run(values, copies, taps):
        def turn(carry, x):
            mine, taps = x
            outputs, ids = evaluate(plan, [*values[:num_consts], *carry, *mine], copies, taps)
            return outputs[:num_carry], (outputs[num_carry:], ids)

        carry, xs = values[num_consts:first], values[first:]
        carry, (ys, ids) = equations.scan_like(op.eqn, turn, carry, (xs, taps))
        return [*carry, *ys], ids

    length = op.params["length"]
    more = lambda of: of._replace(shape=(length, *of.shape), spec=PartitionSpec(None, *of.spec))
    lookups = list(map(more, plan.lookups))
    results = [*tables, *[None] * (len(op.outs) - num_carry)]
    return _Step(lookups, results, run)


def _of_cond(op: Operation, inputs: list[FromLeaf | None]) -> _Step | None:
    if any(map(varying, op.ins[1:])):
        return None  # the padding would have another type than the ids
    plans = [plan_taps(body.graph, inputs[1:]) for body in op.bodies]
    lookups = [found for plan in plans for found in plan.lookups]
    ends = np.cumsum([len(plan.lookups) for plan in plans])

    def branch(k):
        mine = slice(ends[k] - len(plans[k].lookups), ends[k])

        def run(values, copies, taps):
            # The lookups of the other branches read padding.
            ids = [jnp.full(x.shape, x.table[0], x.dtype) for x in lookups]
            outputs, ids[mine] = evaluate(plans[k], values, copies, taps[mine])
            return outputs, ids

        return run

    def run(values, copies, taps):
        index, *values = values
        branches = [branch(k) for k in range(len(plans))]
        return jax.lax.switch(index, branches, values, _of_plans(copies, *plans), taps)

    results = zip(*(plan.results for plan in plans), strict=True)
    results = [one[0] if len(set(one)) == 1 else None for one in results]
    return _Step(lookups, results, run)


def _of_plans(copies: Mapping[int, Array], *plans: TapPlan) -> dict[int, Array]:
    """The tables of the lookups of several plans."""
    leaves = {found.leaf for plan in plans for found in plan.lookups}
    return {leaf: copies[leaf] for leaf in sorted(leaves & copies.keys())}


_STEPS = {
    "gather": _of_gather,
    "dynamic_slice": _of_gather,
    "jax.lax.convert_element_type": _of_cast,
    "reshard": _of_place,
    "sharding_constraint": _of_place,
    "jax.jit": _of_jit,
    "jax.checkpoint": _of_checkpoint,
    "jax.lax.scan": _of_scan,
    "jax.lax.cond": _of_cond,
}
