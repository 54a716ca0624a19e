"""Properties of a transformation, stored with it."""

import enum
import functools
import inspect
import re
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
import numpy as np
import optax

from .short import short

# Stands for the keywords of a transformation that is not of this library.
UNKNOWN = "**"


class About(NamedTuple):
    """Properties of a transformation; by default nothing is known."""

    # The policy for row-sparse gradients, of optzoo.rules: lazy, linear, ... None: unknown.
    rows: Callable[..., Any] | None = None
    # Whether it updates each touched row by itself, and no other. False: it must be proved.
    row_wise: bool = False
    # ``deferral(dense)`` gives the Deferral of the rows that a gradient does not name; with
    # ``dense`` of those whose dense gradient is zero. None if such rows do not change.
    deferral: Callable[[bool], Any] | None = None
    # The keywords that ``update`` reads, and UNKNOWN if there may be more.
    reads: frozenset[str] = frozenset({UNKNOWN})
    # What optzoo.caught_up made; then nothing may change its updates. None for all others.
    deferred: Any = None
    # Of optzoo.divide_states: ``divide(params)`` gives shapes that are divided as their slots.
    divide: Callable[[Any], Any] | None = None

    def with_deferral(self, change: Callable[[bool, Any], Any]) -> "About":
        """The same, with the deferral ``change(dense, deferral)`` if there is one."""
        if (deferral := self.deferral) is None:
            return self
        return self._replace(deferral=lambda dense: change(dense, deferral(dense)))

    def reading(self, *names: str) -> "About":
        """The same, with these keywords added to those that an update reads."""
        return self._replace(reads=self.reads.union(names))


class Call(NamedTuple):
    """The call of a factory that made a transformation."""

    factory: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __repr__(self) -> str:
        parts, named = [], False
        for name, value in self._bound().arguments.items():
            kind = inspect.signature(self.factory).parameters[name].kind
            if kind is inspect.Parameter.VAR_POSITIONAL:
                parts += map(_shown, value)
            elif kind is inspect.Parameter.VAR_KEYWORD:
                parts += [f"{key}={_shown(x)}" for key, x in value.items()]
            else:
                named = named or not isinstance(value, optax.GradientTransformation)
                parts.append(f"{name}={_shown(value)}" if named else _shown(value))
        return f"{self.factory.__name__}({', '.join(parts)})"

    def key(self) -> Any:
        """Equal for calls that make equal transformations; None with incomparable arguments."""
        bound = self._bound()
        bound.apply_defaults()
        try:
            return self.factory, _key(bound.arguments)
        except TypeError:
            return None

    def _bound(self) -> inspect.BoundArguments:
        return inspect.signature(self.factory).bind(*self.args, **self.kwargs)


class Optimizer(optax.GradientTransformationExtraArgs):
    """A transformation with its properties, and the call that made it.

    Transformations made by equal calls are equal, and a pickle stores the call. ``optax.chain`` and
    other wrappers of optax, and ``_replace``, make transformations without known properties.
    """

    about = About()
    call: Call | None = None
    _key: Any = None  # of the call

    def __new__(
        cls, init: Any, update: Any, about: About = about, call: Call | None = None
    ) -> "Optimizer":
        """A transformation with these functions."""
        self = super().__new__(cls, init, update)
        self.about, self.call = about, call
        self._key = None if call is None else call.key()
        return self

    def __repr__(self) -> str:
        return super().__repr__() if self.call is None else repr(self.call)

    def __eq__(self, other: object) -> bool:
        if self._key is None or not isinstance(other, Optimizer):
            return super().__eq__(other)
        return self._key == other._key

    def __ne__(self, other: object) -> bool:  # that of tuples compares functions
        return not self == other

    def __hash__(self) -> int:
        return super().__hash__() if self._key is None else hash(self._key)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.call is None:
            return super().__reduce_ex__(protocol)
        return _call, tuple(self.call)


_P = ParamSpec("_P")
_T = TypeVar("_T", bound=optax.GradientTransformation)


def recorded(factory: Callable[_P, _T]) -> Callable[_P, _T]:
    """A decorator of public factories, whose transformations then store their call."""

    @functools.wraps(factory)
    def make(*args: _P.args, **kwargs: _P.kwargs) -> Any:
        tx = factory(*args, **kwargs)
        with_extra = optax.with_extra_args_support(tx)
        return Optimizer(*with_extra, about_of(tx), Call(make, args, kwargs))

    return make


def _call(factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return factory(*args, **kwargs)


def _shown(value: Any) -> str:
    """The text of an argument: without memory addresses, with types in place of arrays."""
    if isinstance(value, optax.GradientTransformation) and not isinstance(value, Optimizer):
        return _shown(value.init)
    if isinstance(value, (types.FunctionType, types.MethodType)):
        name, _, inside = value.__qualname__.partition(".<locals>")
        name = f"{value.__module__.partition('.')[0]}.{name}" if inside else name
        return f"{name}(...)" if inside else name
    return short(value, _shown)


# Values that are equal, and of one type, make equal transformations. Numbers that are equal may
# differ in their sign, or in their type.
_NUMBERS = (bool, int, float, complex, np.generic)
_VALUES = (str, bytes, type(None), type, np.dtype, enum.Enum, re.Pattern)


def _key(value: Any) -> Any:
    """A hashable, comparable form; raises ``TypeError`` for arrays and similar objects."""
    if isinstance(value, _NUMBERS):
        return type(value), repr(value)
    if isinstance(value, Optimizer) and value._key is not None:
        return value._key
    if isinstance(value, (tuple, list)):
        return type(value), tuple(map(_key, value))
    if isinstance(value, Mapping):
        return type(value), tuple((_key(k), _key(x)) for k, x in value.items())
    if isinstance(value, _VALUES) or type(value).__eq__ is object.__eq__:
        return type(value), value
    raise TypeError(f"{type(value)} is not comparable")


def about_of(tx: Any) -> About:
    """The properties of any transformation."""
    return tx.about if isinstance(tx, Optimizer) else About()


def reads_of(*txs: Any) -> frozenset[str]:
    """The keywords that several transformations read together."""
    return frozenset[str]().union(*(about_of(tx).reads for tx in txs))


def known(tx: optax.GradientTransformation, **facts: Any) -> Optimizer:
    """The same transformation, with additional properties."""
    return Optimizer(tx.init, tx.update, about_of(tx)._replace(**facts))


@jax.tree_util.register_static
class Notes:
    """A keyword of an update in which inner transformations leave notes while it is traced.

    A chain of optax passes it to all members.
    """

    def __init__(self) -> None:
        self.of = list[Any]()


def note(extra_args: Mapping[str, Any], key: str, value: Any) -> None:
    """Adds to the notes in this keyword of an update, if it is given."""
    if key in extra_args:
        extra_args[key].of.append(value)
