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
from .rows import is_sparse_or_none, map_rows, update_tree

_VALUE, _STACKED = GetAttrKey("value"), GetAttrKey("arrays")
T = TypeVar("T")


class Name(str):
    """The name of a parameter; ``short`` is the name without the field of its box, if any."""

    short: str | None = None


def path_name(path: Any) -> str:
    """The name of a parameter, such as ``encoder/layers/0/kernel``, as in TensorFlow.

    A box (:mod:`optzoo.core.boxes`) does not change the name of its parameter, since nnx passes
    variables to ``init`` and their arrays to ``update``. But a box whose field has a name, such as
    the ``weight`` of a module, is part of the name. Only the last key of a path can be that of a
    box, so different leaves of a tree have different names. A stack (:func:`optzoo.stacked`) has
    the name of its first member.

    Args:
        path: a path of :func:`leaves_with_path`, or of JAX.
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
    """The positions of the keys of stacks (:func:`optzoo.stacked`) in a path."""
    is_stack = lambda i: path[i] == _STACKED and members_of(getattr(path[i + 1], "key", None))
    return [i for i in range(len(path) - 1) if is_stack(i)]


def members_of(key: Any) -> tuple[int, ...]:
    """The members of the stack with this key, ``0_2_3``; () if it is not a key of a stack.

    The key of matrices with owners ends with the names of mesh axes, ``0_2_3__data``.
    """
    members, *axes = key.split("__") if isinstance(key, str) else [""]
    is_key = re.fullmatch(r"\d+(_\d+)*", members) and (axes or "_" in members)
    return tuple(map(int, members.split("_"))) if is_key else ()


def _written(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def out_of_box(path: Any) -> Any:
    """The path of a parameter without the field of its box."""
    if path and isinstance(path[-1], BoxKey):
        path = path[:-1]
    return path[:-1] if path and path[-1] == _VALUE else path


def leaves_with_path(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[Any]:
    """Pairs of paths and leaves, like JAX; the path of an array in a box ends with a BoxKey."""
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
    """The entry of the longest prefix of a path, without its box; None if there is none.

    A slot has the path of its parameter, or a longer one if it has several arrays.
    """
    prefixes = (path[:end] for end in range(len(path), -1, -1))
    return next((owners[prefix] for prefix in prefixes if prefix in owners), None)


def matching(patterns: Iterable[str], names: Iterable[str]) -> dict[str, list[str]]:
    """For each name, the patterns that match it, as in all functions of this library.

    A pattern is a regular expression. It must match the whole name, such as
    ``encoder/layers/0/kernel``; or, without a ``/``, the whole last part, ``kernel``. A pattern
    without a ``/`` that matches no last part, such as ``.*layers.*``, must match the whole name.
    The array of a module with one array also has the name of the module, for patterns that do not
    match its last part: ``embedding`` for ``embedding/weight``.
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
    """A mask of the parameters in whose names ``re.search`` finds one of several patterns.

    Unlike patterns of :func:`matching`, they need not occur in any name.

    Args:
        argument: the name of the argument with the patterns, for the error.
        patterns: regular expressions.

    Raises:
        TypeError: if they are not a collection of strings.
        ValueError: if one is not a regular expression.
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
    """For the name of each leaf, the patterns that match it.

    Args:
        argument: the name of the argument with the patterns, for the error.
        patterns: as in :func:`matching`.
        tree: parameters or gradients.

    Raises:
        ValueError: if a pattern matches no name, unless ``optax.masked`` or ``optax.partition``
            hides parameters.
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
        ValueError: if two patterns match a name, or as in :func:`patterns_by_name`.
    """
    found = patterns_by_name(argument, values, tree)
    for name, patterns in found.items():
        if len(patterns) > 1:
            raise ValueError(f"{argument}: {patterns} all match parameter '{name}'")
    return {name: values[patterns[0]] for name, patterns in found.items() if patterns}


def is_masked(x: Any) -> bool:
    """Whether ``x`` replaces a leaf hidden by ``optax.masked``."""
    return isinstance(x, optax.MaskedNode)


def hides_leaves(tree: Any) -> bool:
    """Whether ``optax.masked`` or ``optax.partition`` hides some of the parameters."""
    return any(map(is_masked, jax.tree.leaves(tree, is_leaf=is_masked)))


def check_mask(**arguments: Any) -> None:
    """Raises ``TypeError`` unless each argument is a mask for :func:`resolve_mask`."""
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
            (:func:`matching`); or a tree of bools, or a prefix of such a tree; or a function of the
            tree, with a ``ShapeDtypeStruct`` in place of rows, that returns one of these; or None,
            which marks no parameter.
        tree: parameters or gradients.
        argument: the name of the argument with the mask, for the error.

    Raises:
        TypeError: if the function does not return a mask, or a mask has None.
        ValueError: if a pattern matches no name, unless ``optax.masked`` or ``optax.partition``
            hides parameters. Use a function for parameters that a model may lack.
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
        raise TypeError("a mask must have True or False for each parameter, got None")
    return update_tree.map(lambda _: bool(mark), part)


def _called(mask: Callable[[Any], Any], tree: Any) -> Any:
    marks = mask(map_rows(lambda g: jax.ShapeDtypeStruct(g.shape, g.dtype), tree))
    if marks is None and tree is not None:
        raise TypeError("a mask that is a function must return a tree of bools, got None")
    check_mask(mask=marks)
    return marks


def resolve_unmasked(mask: Any, tree: Any, argument: str = "mask") -> Any:
    """The negation of :func:`resolve_mask`."""
    return jax.tree.map(lambda mark: not mark, resolve_mask(mask, tree, argument))


def only_for(mask: Any, tx: optax.GradientTransformation) -> Optimizer:
    """Applies a transformation to the parameters marked by a mask, None for all.

    ``update`` needs the parameters, since gradients may be missing but slots are not.
    """
    mask = True if mask is None else mask
    return _for_marked(lambda params: resolve_mask(mask, params), tx)


def except_for(skip: Any, tx: optax.GradientTransformation) -> Optimizer:
    """Like :func:`only_for`, for the parameters that the mask ``skip`` does not mark."""
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
    """The patterns of a mask; None for other kinds of masks."""
    if isinstance(mask, str):
        return (mask,)
    is_patterns = isinstance(mask, tuple | list) and all(isinstance(p, str) for p in mask)
    return tuple(mask) if is_patterns else None


def arrays_by_path(tree: Any) -> dict[str, Any]:
    """The arrays of a tree, by their paths."""
    return {path_name(path): x for path, x in leaves_with_path(tree)}
