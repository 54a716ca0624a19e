"""What a rule for arrays becomes for row-sparse gradients."""

from collections.abc import Callable
from typing import Any

import jax

# rule(g, x, slots, t, **scheduled) -> update, new slots
#   g, x       the gradient and the parameter (None where the caller gave no params)
#   slots      a named tuple of arrays
#   t          the number of this update: 1, 2, ...
#   scheduled  by name, the hyper-parameters that may change with the step, and the powers
Rule = Callable[..., tuple[Any, Any]]
# The same for a SparseRows gradient; the update may be rows or an array.
RowsRule = Callable[..., tuple[Any, Any]]


def lazy(rule: Rule) -> RowsRule:
    """Only the touched rows live; the slots and parameters of the others stand still."""

    def on_rows(g, x, s, t, **scheduled):
        g = g.coalesce()
        x, few = jax.tree.map(g.gather, (x, s))
        u, new = rule(g.values, x, few, t, **scheduled)
        return g.with_values(u).drop_padding(), jax.tree.map(g.scatter, s, new)

    return on_rows


def dense(rule: Rule) -> RowsRule:
    """As if the gradient were dense: a row of zeros decays its slots, and moves."""
    return lambda g, x, s, t, **scheduled: rule(g.to_dense(), x, s, t, **scheduled)


def touched(rule: Rule) -> RowsRule:
    """The slots decay everywhere, but only the touched rows of the parameter move."""

    def on_rows(g, x, s, t, **scheduled):
        g = g.coalesce()
        u, new = rule(g.to_dense(), x, s, t, **scheduled)
        return g.with_values(g.gather(u)).drop_padding(), new

    return on_rows


def linear(rule: Rule) -> RowsRule:
    """For rules linear in the gradient and without slots: repeated rows need no merging."""

    def on_rows(g, x, s, t, **scheduled):
        u, new = rule(g.values, x, s, t, **scheduled)
        return g.with_values(u), new

    return on_rows
