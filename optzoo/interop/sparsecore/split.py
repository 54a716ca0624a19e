"""Splits an update into what is computed once in a step, and what is computed for each row."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax

from ...core.compat import (
    CALLS,
    closed_jaxprs,
    evaluate_equation,
    inner_jaxprs,
    is_literal,
    line_of,
)
from ...sparse.rowwise_check import NotRowWise, check_operation
from .padded import RowProgram

# Calls that are inlined. The bodies of branches and loops are left as they are.
_INLINED = CALLS - {"cond", "scan", "while"}


class Split(NamedTuple):
    """An update in two parts.

    Attributes:
        scalars: of the shared arrays: the scalars that the rows need, computed once in a step.
        shared: of the shared arrays: these arrays after the step.
        row: of the scalars and the inputs: the outputs for a row.
        dtypes: of the scalars.
    """

    scalars: Callable[[Sequence[Any]], list[Any]]
    shared: Callable[[Sequence[Any]], list[Any]]
    row: RowProgram
    dtypes: tuple[Any, ...]


def split(update: Callable[..., Any], row: Sequence[Any], shared: Sequence[Any]) -> Split:
    """Splits ``update(row_inputs, shared_inputs) -> (row_outputs, shared_outputs)``.

    All four are lists of arrays; ``row`` and ``shared`` are the abstract inputs.

    Raises:
        NotRowWise: if a shared output depends on a row.
    """
    jaxpr, consts, num_outputs = _inlined(update, row, shared)
    inputs, shared_inputs = jaxpr.invars[: len(row)], jaxpr.invars[len(row) :]
    outputs, shared_outputs = jaxpr.outvars[:num_outputs], jaxpr.outvars[num_outputs:]
    of_rows, of_shared = _depending(jaxpr, inputs), _depending(jaxpr, shared_inputs)
    if any(v in of_rows for v in _variables(shared_outputs)):
        raise NotRowWise("what it keeps for all rows together depends on the rows")

    crosses = lambda v: v in of_shared and v not in of_rows and v.aval.shape == ()
    each, crossing = _needed(jaxpr, outputs, crosses)
    once = [eqn for eqn in jaxpr.eqns if not any(v in of_rows for v in eqn.outvars)]
    known = dict(zip(jaxpr.constvars, consts, strict=True))

    def of_step(wanted, values):
        env = known | dict(zip(shared_inputs, values, strict=True))
        for eqn in once:
            env.update(zip(eqn.outvars, _evaluated(jaxpr, eqn, env), strict=True))
        return [_value(v, env) for v in wanted]

    return Split(
        scalars=lambda values: of_step(crossing, values),
        shared=lambda values: of_step(shared_outputs, values),
        row=RowProgram(jaxpr, each, known, inputs, crossing, outputs),
        dtypes=tuple(v.aval.dtype for v in crossing),
    )


def mixes_elements(program: RowProgram) -> bool:
    """Whether an element of a row depends on the others, for rows of shape ``(1, a prime)``."""
    width = program.inputs[0].aval.shape[1]
    try:
        _check_elements(program.equations, {width: "row"})
    except NotRowWise:
        return True
    return any(v.aval.shape != (1, width) for v in program.outputs)


def _check_elements(equations: Sequence[Any], names: dict[int, str]) -> None:
    for eqn in equations:
        for inner in inner_jaxprs(eqn) if eqn.primitive.name in CALLS else ():
            _check_elements(inner.eqns, names)
        check_operation(eqn, names, line_of(eqn))


def _inlined(update: Any, row: Sequence[Any], shared: Sequence[Any]) -> tuple[Any, Any, int]:
    """The jaxpr of an update without calls, its constants, and the number of outputs of a row."""
    closed, (outputs, _) = jax.make_jaxpr(update, return_shape=True)(list(row), list(shared))
    run = lambda *values: _run_inlined(closed.jaxpr, closed.consts, values)
    flat = jax.make_jaxpr(run)(*row, *shared)
    return flat.jaxpr, flat.consts, len(outputs)


def _run_inlined(jaxpr: Any, consts: Sequence[Any], values: Iterable[Any]) -> list[Any]:
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *values], strict=True))
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in _INLINED:
            [(inner, inner_consts)] = closed_jaxprs(eqn)
            outs = _run_inlined(inner, inner_consts, [_value(v, env) for v in eqn.invars])
        else:
            outs = _evaluated(jaxpr, eqn, env)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [_value(v, env) for v in jaxpr.outvars]


def _value(v: Any, env: dict[Any, Any]) -> Any:
    return v.val if is_literal(v) else env[v]


def _variables(vs: Iterable[Any]) -> list[Any]:
    return [v for v in vs if not is_literal(v)]


def _depending(jaxpr: Any, inputs: Sequence[Any]) -> set[Any]:
    """The variables that depend on some of the inputs, and these."""
    found = set(inputs)
    for eqn in jaxpr.eqns:
        if any(v in found for v in _variables(eqn.invars)):
            found.update(eqn.outvars)
    return found


def _needed(
    jaxpr: Any, outputs: Sequence[Any], crosses: Callable[[Any], bool]
) -> tuple[list[Any], list[Any]]:
    """The equations that the outputs need, and the variables that are given instead of computed."""
    wanted, crossing, each = set(), dict[Any, None](), list[Any]()

    def want(vs):
        for v in _variables(vs):
            (crossing.update({v: None}) if crosses(v) else wanted.add(v))

    want(outputs)
    for eqn in reversed(jaxpr.eqns):
        if any(v in wanted for v in eqn.outvars):
            each.insert(0, eqn)
            want(eqn.invars)
    order = [*jaxpr.invars, *(v for eqn in jaxpr.eqns for v in eqn.outvars)]
    return each, [v for v in order if v in crossing]


def _evaluated(jaxpr: Any, eqn: Any, env: dict[Any, Any]) -> list[Any]:
    return evaluate_equation(jaxpr, eqn, [_value(v, env) for v in eqn.invars])
