"""Names of parameters, and masks by their paths."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
import optax
from jax.tree_util import GetAttrKey

from .lines import Lines
from .optimizer import Optimizer, about_of
from .rows import is_sparse_or_none, map_rows

_BOXED = GetAttrKey("value")
T = TypeVar("T")


def path_name(path: Any) -> str:
    """``encoder/layers/0/kernel``, as in the names of TensorFlow's variables.

    A parameter in a box of Flax has the name that it has without: nnx gives ``init`` its variables
    and ``update`` their arrays. Only the last key of a path can be a box, so different leaves of a
    tree have different names.
    """
    return jax.tree_util.keystr(out_of_box(path), simple=True, separator="/")


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


def check_pattern(argument: str, pattern: Any) -> None:
    """Raises ``TypeError`` or ``ValueError`` unless a pattern is a regular expression."""
    if not isinstance(pattern, str):
        raise TypeError(f"{argument}: a pattern must be a string, got {pattern!r}")
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{argument}: {pattern!r} is not a regular expression: {error}") from error


def patterns_by_name(argument: str, patterns: Iterable[str], tree: Any) -> dict[str, list[str]]:
    """For the name of each leaf the regular expressions that match the whole of it.

    Args:
        argument: what the patterns were given as, for the error.
        patterns: regular expressions.
        tree: parameters or gradients.

    Raises:
        ValueError: if a pattern matches no name, unless ``optax.masked`` or ``optax.partition``
            hides parameters here.
    """
    paths = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_sparse_or_none)
    names = [path_name(path) for path, _ in paths]
    found = {name: [p for p in patterns if re.fullmatch(p, name)] for name in names}
    unused = sorted({*patterns}.difference(*found.values()))
    if unused and names and not hides_leaves(tree):
        raise ValueError(
            f"{argument}: no parameter matches {unused}; the parameters are {[*found]}"
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
    for name, which in arguments.items():
        if which is None or callable(which) or _are_fragments(which):
            continue
        if isinstance(which, str):
            raise TypeError(f"{name} must be a tuple of fragments of paths: ({which!r},)")
        for mark in jax.tree.leaves(which):
            if not isinstance(mark, bool | np.bool_):
                raise TypeError(
                    f"{name} must be a tree of bools, a tuple of fragments of paths or a function "
                    f"of the parameters, got {mark!r} in it"
                )


def resolve_mask(which: Any, tree: Any) -> Any:
    """A tree of bools like ``tree``.

    Args:
        which: a tuple or list of fragments of paths, which marks every parameter whose path
            contains one of them; or a tree of bools, or a prefix of such a tree; or a function
            that returns one, of the tree with a ``ShapeDtypeStruct`` in the place of rows; or
            None, which marks no parameter.
        tree: parameters or gradients.

    Raises:
        TypeError: if the function returns no mask, or a mask holds None.
        ValueError: if no path contains a fragment, unless ``optax.masked`` or ``optax.partition``
            hides parameters here. What a model may lack is for a function to mark.
    """
    if callable(which):
        which = _called(which, tree)
    if which is None or _are_fragments(which):
        return _containing(which or (), tree)
    return jax.tree.map(_fill, which, tree, is_leaf=lambda mark: mark is None)


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


def _containing(fragments: Sequence[str], tree: Any) -> Any:
    """Marks the leaves whose paths contain a fragment, each of which must be in one of them."""
    unused = dict.fromkeys(fragments)
    names = []

    def contains(path, _):
        names.append(path_name(path))
        found = [f for f in fragments if f in names[-1]]
        for fragment in found:
            unused.pop(fragment, None)
        return bool(found)

    marks = jax.tree_util.tree_map_with_path(contains, tree, is_leaf=is_sparse_or_none)
    if unused and names and not hides_leaves(tree):
        raise ValueError(
            "a mask must hold fragments of the parameters' paths, but none contains "
            f"{' or '.join(map(repr, unused))}; the parameters are {names}. Leave that out, or "
            "give a function of the parameters"
        )
    return marks


def resolve_unmasked(which: Any, tree: Any) -> Any:
    """The opposite of :func:`resolve_mask`."""
    return jax.tree.map(lambda mark: not mark, resolve_mask(which, tree))


def _are_fragments(which: Any) -> bool:
    return isinstance(which, tuple | list) and all(isinstance(f, str) for f in which)


def arrays_by_path(tree: Any) -> dict[str, Any]:
    """The arrays of a tree, where they are."""
    return {path_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}
