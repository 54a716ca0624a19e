"""Policies: how a rule for arrays is applied to row-sparse gradients."""

from __future__ import annotations

from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import Array

from ..core.lines import on_plain, param_tree
from ..core.numerics import has_16_bits
from ..core.rows import SparseRows


class Rule(Protocol):
    """An optimizer for one array: ``rule(g, x, slots, t, **scheduled) -> (update, new_slots)``.

    ``g`` and ``x`` are the gradient and the parameter (None without params), ``slots`` a named
    tuple of arrays, ``t`` the number of this update: 1, 2, ... Scheduled hyper-parameters and
    powers are keyword arguments. The update may be a function of the new slots, which is called
    with the slots in stored form.

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
        """Returns the update, or a function of the new slots that returns it, and the new slots."""


class RowsRule(Protocol):
    """A :class:`Rule` for a SparseRows gradient; the update may be rows or an array.

    It gets all rows of the slots, in stored form. It passes the slots, or the rows gathered by
    ``jax.tree.map(g.gather, slots)``, to the rule, and does not compute with them.

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
        """Returns the update and the new slots."""


class RowsPolicy(Protocol):
    """A function that converts a rule for arrays to a rule for a SparseRows gradient.

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
        """Returns the rule for rows."""
        ...


def lazy(rule: Rule) -> RowsRule:
    """A policy that updates only touched rows: others keep their parameters and slots.

    The rule gets only these rows, so it must treat each row by itself: a norm or a mean along the
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
        x, few = param_tree.map(g.gather, (x, s))
        u, new = rule(g.values, x, few, t, **scheduled)
        return g.with_values(u).drop_padding(), param_tree.map(g.scatter, s, new)

    return on_rows


def dense(rule: Rule) -> RowsRule:
    """A policy that equals a dense gradient: slots of rows without a gradient decay, and rows move.

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
    """A rule that gets tables in lines as arrays."""
    return on_plain(rule, g.shape) if g.lines else rule


def _whole(g: SparseRows, *like: Any) -> Array:
    """The dense gradient, divided like the parameter and its slots."""
    return g.to_dense(next((a for a in jax.tree.leaves(like) if jnp.shape(a) == g.shape), None))


def touched(rule: Rule) -> RowsRule:
    """A policy that decays the slots of all rows, but moves only touched rows of the parameter.

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
    """A policy for linear rules without slots, which does not merge repeated rows.

    Repeated 16-bit rows are merged, since their sum is computed in float32.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.rules.leafwise(lambda g, x, s, t: (-0.1 * g, s), rows=optzoo.rules.linear)
        >>> rows = optzoo.SparseRows(jnp.array([2, 2]), jnp.ones((2, 1)), 3)
        >>> updates, state = tx.update(rows, tx.init(jnp.ones((3, 1))))
        >>> print(updates.indices)  # repeated rows are not merged: the rule is linear
        [2 2]
    """

    def on_rows(g, x, s, t, **scheduled):
        g = merged_if_short(g)
        u, new = rule(g.values, x, s, t, **scheduled)
        return g.with_values(u), new

    return on_rows


def merged_if_short(g: SparseRows) -> SparseRows:
    """The rows; of 16 bits merged, since the sum of repeated rows is computed in float32."""
    return g.coalesce() if has_16_bits(g.dtype) else g


POLICIES = lazy, linear, dense, touched
ROW_WISE = lazy, linear  # each touched row is updated by itself, and no other
