"""Names of parameters, patterns of names, and masks."""

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
import optax
from jax.tree_util import GetAttrKey

from .boxes import BoxKey, is_box
from .checks import check_params
from .optimizer import Optimizer, about_of
from .rows import is_sparse_or_none, map_rows

_VALUE, _STACKED = GetAttrKey("value"), GetAttrKey("arrays")
T = TypeVar("T")


class Name(str):
    """The name of a parameter; ``short`` is that without the field of its box, if it has one."""

    short: str | None = None


def path_name(path: Any) -> str:
    """``encoder/layers/0/kernel``, as in the names of TensorFlow's variables.

    A parameter in a box (:mod:`optzoo.core.boxes`) has the name that it has without: nnx gives
    ``init`` its variables and ``update`` their arrays. But a box whose field has a name of its own,
    such as the ``weight`` of a module, is a part of the name. Only the last key of a path can be
    that of a box, so different leaves of a tree have different names. A stack
    (:func:`optzoo.stacked`) has the name of its first member.

    Args:
        path: of :func:`leaves_with_path`, or of JAX.
    """
    path = tuple(path)
    if path and isinstance(key := path[-1], BoxKey) and key.is_name:
        name = Name(_written((*path[:-1], key.field)))
        name.short = path_name(path[:-1]) if path[:-1] else None
        return name
    path = out_of_box(path)
    if found := stacks_of(path):
        path = (*path[: found[-1]], *path[found[-1] + 2 :])
    return Name(_written(path))


def stacks_of(path: Any) -> list[int]:
    """Where a path goes into a stack (:func:`optzoo.stacked`)."""
    is_stack = lambda i: path[i] == _STACKED and members_of(getattr(path[i + 1], "key", None))
    return [i for i in range(len(path) - 1) if is_stack(i)]


def members_of(key: Any) -> tuple[int, ...]:
    """The members of the stack with this key, ``0_2_3``; () if it is no key of a stack.

    That of matrices with owners ends with the names of mesh axes, ``0_2_3__data``.
    """
    members, *axes = key.split("__") if isinstance(key, str) else [""]
    is_key = re.fullmatch(r"\d+(_\d+)*", members) and (axes or "_" in members)
    return tuple(map(int, members.split("_"))) if is_key else ()


def _written(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def out_of_box(path: Any) -> Any:
    """The path of a parameter without the field of the box around it."""
    if path and isinstance(path[-1], BoxKey):
        path = path[:-1]
    return path[:-1] if path and path[-1] == _VALUE else path


def leaves_with_path(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[Any]:
    """Pairs of paths and leaves, as of JAX; the path of an array in a box ends with a BoxKey."""
    is_leaf = is_leaf or (lambda _: False)
    of_box = lambda x: not is_leaf(x) and is_box(x, is_leaf)
    stop = lambda x: is_leaf(x) or of_box(x)
    found = []
    for path, x in jax.tree_util.tree_leaves_with_path(tree, is_leaf=stop):
        if not of_box(x):
            found.append((path, x))
            continue
        for keys, child in jax.tree_util.tree_leaves_with_path(x, is_leaf=is_leaf):
            end = keys if len(keys) > 1 else (BoxKey(keys[0]),)
            found.append(((*path, *end), child))
    return found


def flatten_with_path(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[Any, Any]:
    """The pairs of :func:`leaves_with_path`, and the structure of the tree."""
    return leaves_with_path(tree, is_leaf), jax.tree.structure(tree, is_leaf=is_leaf)


def map_with_path(
    f: Callable[..., Any], tree: Any, *rest: Any, is_leaf: Callable[[Any], bool] | None = None
) -> Any:
    """A tree of ``f(path, leaf, *others)``, with the paths of :func:`leaves_with_path`."""
    leaves, treedef = flatten_with_path(tree, is_leaf)
    others = [treedef.flatten_up_to(other) for other in rest]
    return treedef.unflatten([f(*leaf, *xs) for leaf, *xs in zip(leaves, *others, strict=True)])


def owner_of(path: Any, owners: Mapping[Any, Any]) -> Any:
    """The entry of the longest prefix of a path, out of its box; None if there is none.

    A slot has the path of its parameter, or a longer one if it has several arrays for a parameter.
    """
    prefixes = (path[:end] for end in range(len(path), -1, -1))
    return next((owners[prefix] for prefix in prefixes if prefix in owners), None)


def matching(patterns: Iterable[str], names: Iterable[str]) -> dict[str, list[str]]:
    """For each name the patterns that match it: how all functions here choose parameters.

    A pattern is a regular expression. It must match the whole name, such as
    ``encoder/layers/0/kernel``; without a ``/`` in it, the whole last part, ``kernel``. One without
    a ``/`` that matches no last part, such as ``.*layers.*``, must match the whole name. The array
    of a module with one array has the name of the module, too, for patterns that do not match its
    last part: ``embedding`` for ``embedding/weight``.
    """
    names = [*names]
    shorts = {name: getattr(name, "short", None) for name in names}
    # What a pattern is compared with: the first of these in which it matches a name.
    last = lambda name: name.rpartition("/")[2]
    last_parts = {name: {last(name)} for name in names}
    whole = {name: {name, short or name} for name, short in shorts.items()}
    last_of_shorts = {name: {last(short)} if short else set() for name, short in shorts.items()}
    found: dict[str, list[str]] = {name: [] for name in names}
    for pattern in patterns:
        fits, matched = re.compile(pattern).fullmatch, list[str]()
        for spellings in [whole] if "/" in pattern else [last_parts, whole, last_of_shorts]:
            matched = [name for name in found if any(map(fits, spellings[name]))]
            if matched:
                break
        for name in matched:
            found[name].append(pattern)
    return found


def containing(part: str) -> str:
    """A pattern of the names that contain a string."""
    return f"(.*/)?.*{re.escape(part)}.*"


def names_with(argument: str, patterns: Iterable[str]) -> Callable[[Any], Any]:
    """A mask: the parameters in whose whole names ``re.search`` finds one of some patterns.

    Unlike the patterns of :func:`matching`, these may be found in no name.

    Args:
        argument: what the patterns were given as, for the error.
        patterns: regular expressions.

    Raises:
        TypeError: if they are no collection of strings.
        ValueError: if one is no regular expression.
    """
    if isinstance(patterns, str) or not isinstance(patterns, Iterable):
        raise TypeError(f"{argument} must be a list of patterns, got {patterns!r}")
    patterns = tuple(patterns)
    for pattern in patterns:
        check_pattern(argument, pattern)
    return functools.partial(_mark_names, patterns)


def _mark_names(patterns: tuple[str, ...], tree: Any) -> Any:
    marked = lambda path, _: any(re.search(pattern, path_name(path)) for pattern in patterns)
    return map_with_path(marked, tree, is_leaf=is_sparse_or_none)


def check_pattern(argument: str, pattern: Any) -> None:
    """Raises ``TypeError`` or ``ValueError`` unless a pattern is a regular expression."""
    if not isinstance(pattern, str):
        raise TypeError(f"{argument}: a pattern must be a string, got {pattern!r}")
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{argument}: {pattern!r} is not a regular expression: {error}") from error


def patterns_by_name(argument: str, patterns: Iterable[str], tree: Any) -> dict[str, list[str]]:
    """For the name of each leaf the patterns that match it.

    Args:
        argument: what the patterns were given as, for the error.
        patterns: as :func:`matching` takes them.
        tree: parameters or gradients.

    Raises:
        ValueError: if a pattern matches no name, unless ``optax.masked`` or ``optax.partition``
            hides parameters here.
    """
    is_leaf = lambda x: is_sparse_or_none(x) or is_masked(x)
    paths = leaves_with_path(tree, is_leaf=is_leaf)
    # What is hidden here decides, too, whether a pattern is one of last parts.
    of_all = matching(patterns, [path_name(path) for path, _ in paths])
    names = [path_name(path) for path, x in paths if not is_masked(x)]
    found = {name: of_all[name] for name in names}
    unused = sorted({*patterns}.difference(*found.values()))
    if unused and names and len(names) == len(paths):
        raise ValueError(
            f"{argument}: no parameter matches {unused}; the parameters are {[*found]}. A pattern "
            "must match the whole name, or without a '/' in it the whole last part"
        )
    return found


def value_by_name(argument: str, values: Mapping[str, T], tree: Any) -> dict[str, T]:
    """For the name of each leaf that a pattern matches, the value of the pattern.

    Raises:
        ValueError: if two patterns match a name, or as :func:`patterns_by_name`.
    """
    found = patterns_by_name(argument, values, tree)
    for name, patterns in found.items():
        if len(patterns) > 1:
            raise ValueError(f"{argument}: {patterns} all match parameter '{name}'")
    return {name: values[patterns[0]] for name, patterns in found.items() if patterns}


def is_masked(x: Any) -> bool:
    """Whether ``x`` is what ``optax.masked`` puts in the place of a leaf that it hides."""
    return isinstance(x, optax.MaskedNode)


def hides_leaves(tree: Any) -> bool:
    """Whether ``optax.masked`` or ``optax.partition`` shows only a part of the parameters here."""
    return any(map(is_masked, jax.tree.leaves(tree, is_leaf=is_masked)))


def check_mask(**arguments: Any) -> None:
    """Raises ``TypeError`` unless each argument is a mask as :func:`resolve_mask` takes it."""
    for name, mask in arguments.items():
        if mask is None or callable(mask):
            continue
        if (patterns := _patterns(mask)) is not None:
            for pattern in patterns:
                check_pattern(name, pattern)
            continue
        for mark in jax.tree.leaves(mask):
            if not isinstance(mark, bool | np.bool_):
                raise TypeError(
                    f"{name} must be a pattern of names, a tuple of patterns, a tree of bools or "
                    f"a function of the parameters, got {mark!r} in it"
                )


def resolve_mask(mask: Any, tree: Any, argument: str = "mask") -> Any:
    """A tree of bools like ``tree``.

    Args:
        mask: a pattern, or a tuple or list of patterns, of the names of the parameters to mark
            (:func:`matching`); or a tree of bools, or a prefix of such a tree; or a function that
            returns one of these, of the tree with a ``ShapeDtypeStruct`` in the place of rows; or
            None, which marks no parameter.
        tree: parameters or gradients.
        argument: what the mask was given as, for the error.

    Raises:
        TypeError: if the function returns no mask, or a mask holds None.
        ValueError: if a pattern matches no name, unless ``optax.masked`` or ``optax.partition``
            hides parameters here. What a model may lack is for a function to mark.
    """
    if callable(mask):
        mask = _called(mask, tree)
    if mask is None:
        mask = ()
    if (patterns := _patterns(mask)) is not None:
        found = patterns_by_name(argument, patterns, tree)
        marked = lambda path, _: bool(found[path_name(path)])
        return map_with_path(marked, tree, is_leaf=is_sparse_or_none)
    return jax.tree.map(_fill, mask, tree, is_leaf=lambda mark: mark is None)


def _fill(mark: Any, part: Any) -> Any:
    if mark is None and part is not None:  # a function maps a missing gradient to None
        raise TypeError("a mask must hold True or False for each parameter, got None in it")
    return jax.tree.map(lambda _: bool(mark), part, is_leaf=is_sparse_or_none)


def _called(mask: Callable[[Any], Any], tree: Any) -> Any:
    marks = mask(map_rows(lambda g: jax.ShapeDtypeStruct(g.shape, g.dtype), tree))
    if marks is None and tree is not None:
        raise TypeError("a mask that is a function must return a tree of bools, got None")
    check_mask(mask=marks)
    return marks


def resolve_unmasked(mask: Any, tree: Any, argument: str = "mask") -> Any:
    """The opposite of :func:`resolve_mask`."""
    return jax.tree.map(lambda mark: not mark, resolve_mask(mask, tree, argument))


def only_for(mask: Any, tx: optax.GradientTransformation) -> Optimizer:
    """A transformation of the parameters that a mask marks, None for all; the others pass.

    ``update`` must be given the parameters: gradients may be missing, and slots are not.
    """
    mask = True if mask is None else mask
    return _for_marked(lambda params: resolve_mask(mask, params), tx)


def except_for(skip: Any, tx: optax.GradientTransformation) -> Optimizer:
    """As :func:`only_for`, of the parameters that the mask ``skip`` does not mark."""
    return _for_marked(lambda params: resolve_unmasked(skip, params, "skip"), tx)


def _for_marked(marks: Callable[[Any], Any], tx: optax.GradientTransformation) -> Optimizer:
    masked = lambda params: optax.masked(tx, marks(params))

    def init(params: Any) -> Any:
        return masked(params).init(params)

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        check_params(params)
        return masked(params).update(updates, state, params, **extra_args)

    return Optimizer(init, update, about_of(tx))


def _patterns(mask: Any) -> tuple[str, ...] | None:
    """The patterns in a mask; None if it is of another kind."""
    if isinstance(mask, str):
        return (mask,)
    is_patterns = isinstance(mask, tuple | list) and all(isinstance(p, str) for p in mask)
    return tuple(mask) if is_patterns else None


def arrays_by_path(tree: Any) -> dict[str, Any]:
    """The arrays of a tree, where they are."""
    return {path_name(path): x for path, x in leaves_with_path(tree)}
