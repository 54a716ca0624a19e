"""Names of parameters, patterns of names, and masks."""

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
import optax
from jax.tree_util import GetAttrKey

from .lines import Lines
from .optimizer import Optimizer, about_of
from .rows import is_sparse_or_none, map_rows

_BOXED, _STACKED = GetAttrKey("value"), GetAttrKey("arrays")
T = TypeVar("T")


def path_name(path: Any) -> str:
    """``encoder/layers/0/kernel``, as in the names of TensorFlow's variables.

    A parameter in a box of Flax has the name that it has without: nnx gives ``init`` its variables
    and ``update`` their arrays. Only the last key of a path can be a box, so different leaves of a
    tree have different names. A stack (:func:`optzoo.stacked`) has the name of its first member.
    """
    path = out_of_box(path)
    if len(path) > 1 and path[-2] == _STACKED and isinstance(getattr(path[-1], "key", None), tuple):
        path = path[:-2]
    return jax.tree_util.keystr(path, simple=True, separator="/")


def out_of_box(path: Any) -> Any:
    """The path of a parameter without the box of Flax around it, whose field is ``value``."""
    return path[:-1] if path and path[-1] == _BOXED else path


def without_boxes(tx: optax.GradientTransformation) -> Optimizer:
    """The same transformation, which sees arrays in the place of Flax's boxes.

    So its state has none. It is for states with several arrays for one parameter: a variable of nnx
    that holds a tuple of arrays holds a dictionary after an update.
    """
    about, tx = about_of(tx), optax.with_extra_args_support(tx)

    def update(updates, state, params=None, **extra_args):
        boxes = jax.tree.structure(updates, is_leaf=is_sparse_or_none)
        new, state = tx.update(unboxed(updates), state, unboxed(params), **extra_args)
        return boxes.unflatten(jax.tree.leaves(new, is_leaf=is_sparse_or_none)), state

    return Optimizer(lambda params: tx.init(unboxed(params)), update, about)


def unboxed(tree: Any) -> Any:
    """The tree with arrays in the place of Flax's boxes."""
    paths = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_sparse_or_none)
    if all(out_of_box(path) == path for path, _ in paths):
        return tree

    def in_box(x):  # nothing if it is none
        children = jax.tree_util.tree_leaves_with_path(x, is_leaf=lambda child: child is not x)
        is_box = [path for path, _ in children] == [(_BOXED,)] and not isinstance(x, tuple | Lines)
        return [child for _, child in children] if is_box else []

    out = lambda x: next(iter(in_box(x)), x)
    return jax.tree.map(out, tree, is_leaf=lambda x: is_sparse_or_none(x) or bool(in_box(x)))


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
    a ``/`` that matches no last part, such as ``.*layers.*``, must match the whole name.
    """
    last = {name: name.rpartition("/")[2] for name in names}
    found: dict[str, list[str]] = {name: [] for name in last}
    for pattern in patterns:
        fits = re.compile(pattern).fullmatch
        is_of_last = "/" not in pattern and any(map(fits, last.values()))
        for name, part in last.items():
            if fits(part if is_of_last else name):
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
    return jax.tree_util.tree_map_with_path(marked, tree, is_leaf=is_sparse_or_none)


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
    paths = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
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
        return jax.tree_util.tree_map_with_path(marked, tree, is_leaf=is_sparse_or_none)
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


def except_for(skip: Any, tx: optax.GradientTransformation) -> Optimizer:
    """A transformation of the parameters that the mask ``skip`` does not mark; the others pass."""
    masked = optax.masked(tx, lambda tree: resolve_unmasked(skip, tree, "skip"))
    return Optimizer(*masked, about_of(tx))


def _patterns(mask: Any) -> tuple[str, ...] | None:
    """The patterns in a mask; None if it is of another kind."""
    if isinstance(mask, str):
        return (mask,)
    is_patterns = isinstance(mask, tuple | list) and all(isinstance(p, str) for p in mask)
    return tuple(mask) if is_patterns else None


def arrays_by_path(tree: Any) -> dict[str, Any]:
    """The arrays of a tree, where they are."""
    return {path_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}
