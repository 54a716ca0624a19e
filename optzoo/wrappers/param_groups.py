"""Parameter groups: an optimizer for each, selected by the names of the parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import optax

from ..core.boxes import marks_of_boxes
from ..core.checks import check_transformation
from ..core.optimizer import About, Optimizer, reads_of, recorded
from ..core.paths import check_pattern, map_with_path, path_name, patterns_by_name
from ..core.rows import is_sparse_or_none
from ..state.inner import fitting, inner_transformation
from ..state.types import GROUP

_REST = ".*"


@recorded
def param_groups(
    transforms: Mapping[str, optax.GradientTransformation],
) -> optax.GradientTransformationExtraArgs:
    """Updates every parameter by the optimizer whose pattern matches its name.

    **Patterns** select parameters by name in all functions of this library. A pattern is a regular
    expression. It must match the whole name of a parameter, whose parts are joined by ``/``, such
    as ``encoder/layers/0/kernel``. A pattern without ``/`` must match the whole last part,
    ``kernel``; if it matches no last part, such as ``.*layers.*``, it must match the whole name.

    A **mask** is a pattern, a tuple of patterns, a tree of bools, or a function of the parameters
    that returns one of these.

    Each parameter must be matched by exactly one pattern. The pattern ``".*"`` is special: it
    selects the parameters that no other pattern matches.

    The groups are those of ``optax.partition``: an optimizer receives ``optax.MaskedNode`` instead
    of the parameters of other groups, so a global norm, for example, is that of its group.
    Row-sparse gradients, missing gradients and extra arguments are passed to the optimizers
    unchanged. In the state the groups are called ``group_0``, ``group_1``, ... in the order of
    ``transforms``: a change of a pattern does not change the structure of the state.

    Example:
        >>> import jax.numpy as jnp, optax, optzoo
        >>> params = {"embed": {"table": jnp.ones((3, 2))}, "out": {"bias": jnp.ones(2)}}
        >>> tx = optzoo.param_groups({
        ...     "embed/.*": optzoo.lazy_adam(1e-3),
        ...     "bias|scale": optzoo.momentum(0.1, 0.9),
        ... })
        >>> sorted(tx.init(params).inner_states)
        ['group_0', 'group_1']

    Args:
        transforms: for each pattern an optax transformation; ``optax.set_to_zero()`` freezes the
            parameters.

    Raises:
        TypeError: if ``transforms`` is not a mapping from strings to transformations; in
            ``update``, if ``learning_rate`` is given and a group that moves its parameters does not
            read it.
        ValueError: if ``transforms`` is empty or a pattern is not a regular expression; in ``init``
            and ``update``, if a parameter is matched by no pattern or by several, or if a pattern
            other than ``".*"`` matches no parameter.
    """
    by_pattern = _checked(transforms)
    txs = by_pattern.values()
    groups = {pattern: f"{GROUP}{i}" for i, pattern in enumerate(by_pattern)}
    partition = optax.partition(
        dict(zip(groups.values(), txs, strict=True)), lambda tree: _labels(groups, tree)
    )
    policies = {tx.about.rows for tx in txs}
    rows = policies.pop() if len(policies) == 1 else None
    about = About(rows, all(tx.about.row_wise for tx in txs), reads=reads_of(*txs))
    return fitting(Optimizer(*partition, about))


def _checked(transforms: Any) -> dict[Any, Optimizer]:
    """The transformations by patterns, checked."""
    if not isinstance(transforms, Mapping):
        raise TypeError(f"transforms must be a dict of patterns, got {transforms!r}")
    if not transforms:
        raise ValueError("transforms must contain at least one pattern, got none")
    for pattern, tx in transforms.items():
        check_pattern("transforms", pattern)
        check_transformation(**{f"transforms[{pattern!r}]": tx})
    return {
        pattern: inner_transformation(**{f"the group {pattern!r}": tx})
        for pattern, tx in transforms.items()
    }


def _labels(patterns: Mapping[str, str], tree: Any) -> Any:
    """The group of each parameter, in a tree like the parameters or gradients."""
    found = patterns_by_name("transforms", [p for p in patterns if p != _REST], tree)
    rest = [_REST] if _REST in patterns else []
    found = {name: matching or rest for name, matching in found.items()}
    wrong = [
        f"{name!r} is matched by " + (" and ".join(map(repr, matching)) or "no pattern")
        for name, matching in found.items()
        if len(matching) != 1
    ]
    if wrong:
        raise ValueError(
            f"each parameter needs exactly one of the patterns {list(patterns)}, but "
            + "; ".join(wrong)
        )
    label = lambda path, _: patterns[found[path_name(path)][0]]
    return marks_of_boxes(map_with_path(label, tree, is_leaf=is_sparse_or_none))
