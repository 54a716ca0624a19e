"""What a rule for arrays becomes for row-sparse gradients."""

from __future__ import annotations

from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import Array

from ..core.lines import is_lines, on_plain
from ..core.numerics import has_16_bits
from ..core.rows import SparseRows


class Rule(Protocol):
    """An optimizer for one array: ``rule(g, x, slots, t, **scheduled) -> (update, new_slots)``.

    ``g`` and ``x`` are the gradient and the parameter (None where the caller gave no params),
    ``slots`` a named tuple of arrays, ``t`` the number of this update: 1, 2, ... By keyword come
    the hyper-parameters that may change with the step, and the powers. The update may be a
    function of the new slots: it is then computed from them as they are stored.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> def rule(g, x, slots, t):
        ...     return -jnp.sign(g), slots
        >>> checked: optzoo.rules.Rule = rule
        >>> tx = optzoo.rules.leafwise(checked)
        >>> print(tx.update(jnp.array([3.0, -4.0]), tx.init(jnp.ones(2)))[0])
        [-1.  1.]
    """

    def __call__(self, g: Any, x: Any, slots: Any, t: Any, /, *args: Any, **scheduled: Any) -> Any:
        """The update, or a function of the new slots that gives it; and the new slots."""


class RowsRule(Protocol):
    """A :class:`Rule` for a SparseRows gradient; the update may be rows or an array.

    It takes the slots as they are stored, all rows of them. It hands them to the rule, whole or
    the rows that ``jax.tree.map(g.gather, slots)`` gathers, and does not compute with them.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> rule = optzoo.rules.lazy(lambda g, x, slots, t: (-g, slots))  # a RowsRule
        >>> rows = optzoo.SparseRows(jnp.array([2, 2]), jnp.ones((2, 1)), 3)
        >>> update, slots = rule(rows, jnp.ones((3, 1)), (), 1)
        >>> print((jnp.zeros((3, 1)) + update).ravel())
        [ 0.  0. -2.]
    """

    def __call__(
        self, g: SparseRows, x: Any, slots: Any, t: Any, /, *args: Any, **scheduled: Any
    ) -> Any:
        """The update and the new slots."""


class RowsPolicy(Protocol):
    """What a rule for arrays becomes for a SparseRows gradient.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> def frozen(rule):  # a policy: rows never change
        ...     return lambda g, x, slots, t: (g.with_values(0 * g.values), slots)
        >>> tx = optzoo.rules.leafwise(lambda g, x, slots, t: (-g, slots), rows=frozen)
        >>> rows = optzoo.SparseRows(jnp.array([2]), jnp.ones((1, 1)), 3)
        >>> print(tx.update(rows, tx.init(jnp.ones((3, 1))))[0].values)
        [[0.]]
    """

    def __call__(self, rule: Rule, /) -> RowsRule:
        """The rule for rows."""
        ...


def lazy(rule: Rule) -> RowsRule:
    """Only the touched rows change: the others keep their parameters and slots.

    The rule gets these rows alone, so it must treat each row by itself: a norm or a mean along the
    first axis would depend on the batch.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.rules.leafwise(lambda g, x, s, t: (-g - 1, s), rows=optzoo.rules.lazy)
        >>> rows = optzoo.SparseRows(jnp.array([2]), jnp.ones((1, 1)), 3)
        >>> updates, state = tx.update(rows, tx.init(jnp.ones((3, 1))))
        >>> print((jnp.zeros((3, 1)) + updates).ravel())  # the rule sees row 2 alone
        [ 0.  0. -2.]
    """

    def on_rows(g, x, s, t, **scheduled):
        g = g.coalesce()
        x, few = jax.tree.map(g.gather, (x, s), is_leaf=is_lines)
        u, new = rule(g.values, x, few, t, **scheduled)
        return g.with_values(u).drop_padding(), jax.tree.map(g.scatter, s, new, is_leaf=is_lines)

    return on_rows


def dense(rule: Rule) -> RowsRule:
    """As if the gradient were dense: a row of zeros decays its slots, and moves.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.rules.leafwise(lambda g, x, s, t: (-g - 1, s), rows=optzoo.rules.dense)
        >>> rows = optzoo.SparseRows(jnp.array([2]), jnp.ones((1, 1)), 3)
        >>> updates, state = tx.update(rows, tx.init(jnp.ones((3, 1))))
        >>> print(updates.ravel())  # rows 0 and 1 have a gradient of zero
        [-1. -1. -2.]
    """

    def on_rows(g, x, s, t, **scheduled):
        return _on_plain(rule, g)(_whole(g, x, s), x, s, t, **scheduled)

    return on_rows


def _on_plain(rule: Rule, g: SparseRows) -> Rule:
    """A rule that gets whole arrays, not lines."""
    return on_plain(rule, g.shape) if g.lines else rule


def _whole(g: SparseRows, *like: Any) -> Array:
    """The dense gradient, divided as the parameter and its slots."""
    return g.to_dense(next((a for a in jax.tree.leaves(like) if jnp.shape(a) == g.shape), None))


def touched(rule: Rule) -> RowsRule:
    """The slots decay everywhere, but only the touched rows of the parameter move.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.rules.leafwise(lambda g, x, s, t: (-g - 1, s), rows=optzoo.rules.touched)
        >>> rows = optzoo.SparseRows(jnp.array([2]), jnp.ones((1, 1)), 3)
        >>> updates, state = tx.update(rows, tx.init(jnp.ones((3, 1))))
        >>> print((jnp.zeros((3, 1)) + updates).ravel())
        [ 0.  0. -2.]
    """

    def on_rows(g, x, s, t, **scheduled):
        g = g.coalesce()
        u, new = _on_plain(rule, g)(_whole(g, x, s), x, s, t, **scheduled)
        return g.with_values(g.gather(u)).drop_padding(), new

    return on_rows


def linear(rule: Rule) -> RowsRule:
    """For rules linear in the gradient and without slots: repeated rows need no merging.

    Those of 16 bits are merged all the same: their sum is made in float32.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.rules.leafwise(lambda g, x, s, t: (-0.1 * g, s), rows=optzoo.rules.linear)
        >>> rows = optzoo.SparseRows(jnp.array([2, 2]), jnp.ones((2, 1)), 3)
        >>> updates, state = tx.update(rows, tx.init(jnp.ones((3, 1))))
        >>> print(updates.indices)  # repeated rows are not merged: the rule is linear
        [2 2]
    """

    def on_rows(g, x, s, t, **scheduled):
        g = g.coalesce() if has_16_bits(g.dtype) else g
        u, new = rule(g.values, x, s, t, **scheduled)
        return g.with_values(u), new

    return on_rows


POLICIES = lazy, linear, dense, touched
ROW_WISE = lazy, linear  # each touched row is updated by itself, and no other
