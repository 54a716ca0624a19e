"""Converts arrays captured by a function, such as hyper-parameters, to arguments."""

from __future__ import annotations

import copy
import dataclasses
import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import Array


def captured(
    f: Callable[..., Any],
) -> tuple[list[Array], Callable[[Sequence[Array]], Callable[..., Any]]]:
    """The arrays that a function has captured, and a function of replacements for them.

    Searches the variables and defaults of a function, the arguments of a partial, the object of a
    method, and dataclasses, tuples, lists and dicts in them.

    Example:
        >>> import jax.numpy as jnp
        >>> rate = jnp.float32(2)
        >>> arrays, with_others = captured(lambda x: rate * x)
        >>> float(arrays[0]), with_others([3.0])(5)
        (2.0, 15.0)
    """
    found = dict[int, Array]()
    _replaced(f, lambda x: found.setdefault(id(x), x), {})

    def with_others(arrays: Sequence[Array]) -> Callable[..., Any]:
        others = dict(zip(found, arrays, strict=True))
        return _replaced(f, lambda x: others[id(x)], {})

    return [*found.values()], with_others


def _replaced(x: Any, change: Callable[[Array], Any], known: dict[int, Any]) -> Any:
    """``x`` with ``change`` applied to each array in it; the same object if nothing changes."""
    if isinstance(x, jax.Array):
        return change(x)
    if id(x) not in known:
        known[id(x)] = x  # for a function that calls itself
        parts = _parts(x)
        new = [_replaced(part, change, known) for part in parts]
        is_changed = any(a is not b for a, b in zip(parts, new, strict=True))
        known[id(x)] = _rebuilt(x, new) if is_changed else x
    return known[id(x)]


def _parts(x: Any) -> list[Any]:
    """The parts of an object of a known type."""
    match x:
        case types.FunctionType():
            cells = [cell.cell_contents for cell in x.__closure__ or () if _is_filled(cell)]
            return [*cells, x.__defaults__, x.__kwdefaults__]
        case types.MethodType():
            return [x.__self__]
        case functools.partial():
            return [x.func, x.args, x.keywords]
        case tuple():
            return [*x]
    if type(x) in (list, dict):
        return [*(x.values() if isinstance(x, dict) else x)]
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return [getattr(x, field.name) for field in dataclasses.fields(x)]
    return []


def _rebuilt(x: Any, parts: list[Any]) -> Any:
    """An object like ``x`` with other parts."""
    match x:
        case types.FunctionType():
            *contents, defaults, keywords = parts
            rest = iter(contents)
            cells = [
                types.CellType(next(rest)) if _is_filled(c) else c for c in x.__closure__ or ()
            ]
            new = types.FunctionType(x.__code__, x.__globals__, x.__name__, defaults, (*cells,))
            new.__kwdefaults__ = keywords
            return new
        case types.MethodType():
            return types.MethodType(x.__func__, parts[0])
        case functools.partial():
            f, args, keywords = parts
            return functools.partial(f, *args, **keywords)
        case tuple():
            new = tuple.__new__(type(x), parts)
            if hasattr(x, "__dict__"):  # what is known of an optimizer
                vars(new).update(vars(x))
            return new
        case list():
            return parts
        case dict():
            return dict(zip(x, parts, strict=True))
    new = copy.copy(x)
    for field, part in zip(dataclasses.fields(x), parts, strict=True):
        object.__setattr__(new, field.name, part)
    return new


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
