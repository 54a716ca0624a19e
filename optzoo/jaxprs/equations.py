"""Access to jaxprs and their equations, for all supported versions of JAX."""

import contextlib
import operator
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.core
from jax import lax
from jax.extend.core import Literal
from jax.extend.source_info_util import summarize
from jax.interpreters import partial_eval

_LIBRARY = str(pathlib.Path(__file__).parents[1]) + os.sep
_KERAS = os.sep.join(["", "keras", "src", ""])
_REPLACES = str(pathlib.Path(__file__).with_name("taps.py"))  # what replaces equations of the user


def is_literal(v: Any) -> bool:
    """Whether an input of an equation is a literal, with its value in ``v.val``."""
    return isinstance(v, Literal)


def closed_jaxprs(eqn: Any) -> Iterator[tuple[Any, Sequence[Any]]]:
    """The jaxprs inside an equation, such as the branches of a ``cond``, each with its constants.

    For a ``while`` they are its condition and its body.
    """
    if eqn.primitive.name == "while":
        closed = (eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"])
        yield from ((each.jaxpr, each.consts) for each in closed)
        return
    # By what they look like: the names of the parameters differ among primitives and versions.
    for param in eqn.params.values():
        for value in param if isinstance(param, tuple | list) else [param]:
            jaxpr = _jaxpr_in(value)
            if jaxpr is not None:
                yield jaxpr, getattr(value, "consts", ())


def _jaxpr_in(value: Any) -> Any:
    """The jaxpr of a parameter, possibly stored together with constants; or None."""
    jaxpr = getattr(value, "jaxpr", value)
    return jaxpr if hasattr(jaxpr, "eqns") else None


def contains(jaxpr: Any, name: str) -> bool:
    """Whether a jaxpr, including inner ones, has an equation with this primitive."""
    inside = (inner for eqn in jaxpr.eqns for inner, _ in closed_jaxprs(eqn))
    return any(e.primitive.name == name for e in jaxpr.eqns) or any(
        contains(inner, name) for inner in inside
    )


# Evaluation


def evaluate(jaxpr: Any, consts: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """The outputs of a jaxpr, with the name scopes and other settings of its equations."""
    # `jax.extend.core.jaxpr_as_fun` is the public way, but switches `jax_debug_nans` off.
    return jax.core.eval_jaxpr(jaxpr, consts, *values)


def evaluate_equation(jaxpr: Any, eqn: Any, values: Sequence[Any]) -> list[Any]:
    """The outputs of one equation of a jaxpr for the values of its inputs."""
    inputs = {v: x for v, x in zip(eqn.invars, values, strict=True) if not is_literal(v)}
    alone = jaxpr.replace(constvars=[], invars=list(inputs), outvars=eqn.outvars, eqns=[eqn])
    return evaluate(alone, [], list(inputs.values()))


def bind_equation(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """Like :func:`evaluate_equation`, for many equations: without a jaxpr and settings for each."""
    params = eqn.primitive.get_bind_params(eqn.params)
    # Before JAX 0.12 functions come first.
    functions, params = params if isinstance(params, tuple) else ((), params)
    outputs = eqn.primitive.bind(*functions, *values, **params)
    return list(outputs) if eqn.primitive.multiple_results else [outputs]


@contextlib.contextmanager
def scope_of(eqn: Any) -> Iterator[None]:
    """The name scopes and the mesh of an equation, for its replacement."""
    scopes = str(eqn.source_info.name_stack)
    named = jax.named_scope(scopes) if scopes else contextlib.nullcontext()
    with named, eqn.ctx.manager:
        yield


# Change


def map_equations(jaxpr: Any, f: Callable[[Any], Any]) -> Any:
    """The jaxpr with ``f(eqn)`` for every equation, also in inner jaxprs.

    A jaxpr without changes is the same object, so that compiled programs are reused.
    """

    def in_param(value):
        if isinstance(value, tuple | list):
            new = type(value)(map(in_param, value)) if any(map(_jaxpr_in, value)) else value
            return value if all(map(operator.is_, value, new)) else new
        inner = _jaxpr_in(value)
        if inner is None or (new := map_equations(inner, f)) is inner:
            return value
        return value.replace(jaxpr=new) if hasattr(value, "jaxpr") else new

    def in_equation(eqn):
        params = {k: in_param(value) for k, value in eqn.params.items()}
        is_same = all(params[k] is value for k, value in eqn.params.items())
        return f(eqn if is_same else eqn.replace(params=params))

    eqns = list(map(in_equation, jaxpr.eqns))
    return jaxpr if all(map(operator.is_, jaxpr.eqns, eqns)) else jaxpr.replace(eqns=eqns)


def used_inputs(jaxpr: Any) -> list[bool]:
    """For each input of a jaxpr, whether the outputs depend on it."""
    return _without_unused(jaxpr, False)[1]


def needed_part(jaxpr: Any) -> Any:
    """The jaxpr with the same inputs, without equations on which no output depends."""
    return _without_unused(jaxpr, True)[0]


def _without_unused(jaxpr: Any, keep_inputs: bool) -> tuple[Any, list[bool]]:
    # Exported by JAX, but without documentation or a promise to keep it.
    outputs = [True] * len(jaxpr.outvars)
    return partial_eval.dce_jaxpr(jaxpr, outputs, instantiate=keep_inputs)


# Single calls


def has_shardings(eqn: Any) -> bool:
    """Whether a ``jit`` has shardings of its inputs or outputs."""
    given = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    return any(type(s).__name__ != "UnspecifiedValue" for s in given)  # JAX does not export it


def checkpoint_like(eqn: Any, f: Callable[..., Any]) -> Callable[..., Any]:
    """``jax.checkpoint`` of another function, with the settings of an equation."""
    params = eqn.params
    return jax.checkpoint(f, prevent_cse=params["prevent_cse"], policy=params["policy"])


def scan_like(eqn: Any, f: Callable[..., Any], init: Any, xs: Any) -> Any:
    """``jax.lax.scan`` of another function, with the settings of an equation."""
    settings = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    return lax.scan(f, init, xs, **settings)


def scan_sizes(eqn: Any) -> tuple[int, int]:
    """The numbers of inputs of a ``scan`` that are constants and carries."""
    # By the shapes, since the names of the parameters differ among versions: those of the xs and
    # the ys, which come last, have an axis less in the body.
    [(body, _)] = closed_jaxprs(eqn)
    same = lambda outer, inner: sum(
        x.aval.shape == v.aval.shape for x, v in zip(outer, inner, strict=True)
    )
    num_carry = same(eqn.outvars, body.outvars)
    return same(eqn.invars, body.invars) - num_carry, num_carry


# Words


def line_of(eqn: Any) -> str:
    """The line of the user's program that made an equation: ``model.py:12:4 (loss)``."""
    return summarize(eqn.source_info)


def caller_of(eqn: Any) -> str:
    """The line outside of this library and Keras; empty if the library replaced the equation.

    In Keras nearly all operations originate from a few lines, which layers call.
    """
    for line in reversed(summarize(eqn.source_info, num_frames=100).split("\n")):
        if not line.startswith(_LIBRARY) and _KERAS not in line:
            return line
        if line.startswith(_REPLACES):
            break  # before it JAX 0.9 has the lines that called for the gradient
    return ""


def text_of(program: Any) -> str:
    """The text of a result of ``jax.make_jaxpr``, equal in every process."""
    # Without terminal colours and addresses of functions.
    return re.sub(r"0x[0-9a-f]+", "", program.pretty_print(use_color=False, width=100))
