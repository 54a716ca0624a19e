"""The optimizers of a race: the catalogue, distributed methods, and other libraries."""

import difflib
import functools
import importlib
import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import optax

from ..catalog import CATALOG, DISTRIBUTED, Entry

# Replicas of distributed methods, simulated on one device.
REPLICAS = 8
# The middle of the grid for a factory whose learning rate has no default.
_USUAL_RATE = 0.01
_OPTAX = {"optax": optax, "optax.contrib": optax.contrib}

Factory = Callable[..., optax.GradientTransformation]


class Entrant(NamedTuple):
    """An optimizer with the facts that the race needs."""

    entry: Entry
    family: str
    is_replicated: bool = False
    is_foreign: bool = False  # from another library: its gradients are dense


def entrants() -> dict[str, Entrant]:
    """All optimizers with a short name: the catalogue, and the distributed methods around Adam."""
    adam = CATALOG["adam"]

    def on_replicas(method):
        factory = lambda rate, **kwargs: method.make(adam.make(rate, **kwargs), REPLICAS)
        entry = adam._replace(factory=factory, original=method.original)
        return Entrant(entry, "distributed", is_replicated=True)

    alone = {name: Entrant(entry, _family(name, entry)) for name, entry in CATALOG.items()}
    return alone | {name: on_replicas(method) for name, method in DISTRIBUTED.items()}


def find(optimizers: Iterable[str | Factory]) -> dict[str, Entrant]:
    """The entrants by name.

    Args:
        optimizers: names of :func:`entrants`; names in optax (``"optax.adamw"``,
            ``"optax.contrib.muon"``); ``"module:factory"``; or the factories. A factory's first
            argument is the learning rate, its others have defaults.

    Raises:
        ValueError: if a name is unknown (the message suggests similar names), if two factories have
            the same name, or if the object found is not such a factory.
    """
    known, found, factories = entrants(), dict[str, Entrant](), dict[str, Factory]()
    for given in optimizers:
        if isinstance(given, str) and given in known:
            found[given] = known[given]
            continue
        if isinstance(given, str):
            name, factory = given, _imported(given, known)
        else:
            name, factory = _name_of(given), given
        if factories.setdefault(name, factory) is not factory:
            raise ValueError(f"two optimizers have the name {name!r}: rename one of the factories")
        found[name] = _foreign(name, factory)
    return found


def unknown(what: str, name: Any, known: Iterable[str]) -> ValueError:
    """The error for an unknown name, with similar names."""
    known = list(known)
    near = difflib.get_close_matches(str(name), known, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known)}"
    return ValueError(f"unknown {what} {name!r}; {hint}")


def arguments(entrant: Entrant, given: Any) -> dict[str, Any]:
    """The arguments of a run except the rate: defaults of the factory, and given values."""
    values = {}
    for i, p in enumerate(inspect.signature(entrant.entry.factory).parameters.values()):
        if i and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL):
            values[p.name] = None if p.default is p.empty else p.default
    return {k: _plain(v) for k, v in (values | dict(entrant.entry.required) | given).items()}


def _plain(value: Any) -> Any:
    """A value for JSON."""
    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    return getattr(value, "__name__", None) or repr(value)


def _family(name: str, entry: Entry) -> str:
    """The family of an optimizer, to show or hide many lines of a figure at once."""
    for folder in ("second_order", "proximal"):
        if entry.factory.__module__.startswith(f"optzoo.{folder}."):
            return folder.replace("_", "-")
    if {"b1", "b2"} <= inspect.signature(entry.factory).parameters.keys():
        return "Adam"
    if any(kind in name for kind in ("adagrad", "adadelta", "rmsprop")):
        return "Adagrad, RMSProp"
    return "SGD, sign"


def _imported(name: str, known: Iterable[str]) -> Any:
    module_name, colon, path = name.partition(":")
    if colon:
        try:
            found: Any = importlib.import_module(module_name)
        except ImportError as error:
            raise ValueError(
                f"optimizer {name!r}: {module_name!r} cannot be imported: {error}"
            ) from None
        names, prefix = vars(found), f"{module_name}:"
    elif name.startswith("optax."):
        module_name, _, path = name.rpartition(".")
        found, names, prefix = _OPTAX.get(module_name), (), ""
    else:
        raise unknown("optimizer", name, known)
    try:
        for part in path.split("."):
            found = getattr(found, part)
    except AttributeError:
        near = [f"{prefix}{n}" for n in names if not n.startswith("_")] or list(_optax_factories())
        raise unknown("optimizer", name, near) from None
    return found


def _optax_factories() -> dict[str, Factory]:
    """The functions of optax whose first argument is a learning rate, by name."""
    return {
        f"{prefix}.{name}": value
        for prefix, module in _OPTAX.items()
        for name, value in vars(module).items()
        if inspect.isfunction(value) and _parameters(value)[:1] == ["learning_rate"]
    }


def _parameters(factory: Any) -> Sequence[str]:
    return list(inspect.signature(factory).parameters)


def _name_of(factory: Any) -> str:
    if not callable(factory) or isinstance(factory, type):
        raise ValueError(
            f"an optimizer must be a name or a function of the learning rate, got {factory!r}"
        )
    for name, value in _optax_factories().items():
        if value is factory:
            return name
    for name, entry in CATALOG.items():
        if entry.factory is factory:
            raise ValueError(
                f"give the name {name!r} instead of its factory, to use the default rate of the "
                "catalogue"
            )
    if not hasattr(factory, "__qualname__"):
        raise ValueError(f"a factory must be a function with a name, got {factory!r}")
    return f"{factory.__module__}:{factory.__qualname__}"


def _foreign(name: str, factory: Any) -> Entrant:
    """The entrant of a factory, which is called once as a check."""
    fix = "write a function of the learning rate, and give it as 'module:function'"
    if not callable(factory):
        raise ValueError(f"optimizer {name!r} must be a function, got {factory!r}")
    try:
        first = next(iter(inspect.signature(factory).parameters.values()), None)
        default = None if first is None else first.default
        is_number = isinstance(default, int | float) and not isinstance(default, bool)
        rate = float(default) if is_number and default > 0 else _USUAL_RATE
        tx = factory(rate)
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"{name!r} cannot be called with only a learning rate ({error}): {fix}"
        ) from None
    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        raise ValueError(f"{name!r} must return an optax transformation, got {tx!r}: {fix}")

    @functools.wraps(factory)
    def make(*args, **kwargs):
        return optax.with_extra_args_support(factory(*args, **kwargs))

    return Entrant(Entry(make, "dense", rate, None), "other libraries", is_foreign=True)
