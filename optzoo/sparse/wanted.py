"""Which gradients must be row-sparse, and what happens if one of them is dense."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp

from ..core.checks import check_choice, check_size
from ..core.lines import is_lines, param_tree
from ..core.paths import check_pattern, leaves_with_path, path_name, value_by_name
from ..core.warn import warn
from ..jaxprs.loss import Loss, TracedLoss

Sparse = Literal["warn", "require", "allow"]

# Gathers of fewer rows stay dense: tables of positions or classes, biases read by index. A pass
# over such a table costs little, and a batch often reads most of it.
MIN_ROWS = 16_384


class DenseGradientWarning(UserWarning):
    """The gradient of a table is dense although its rows are read, for the reason given.

    Example:
        >>> import warnings
        >>> import jax.numpy as jnp, optzoo
        >>> tied = lambda table: jnp.sum(optzoo.lookup(table, jnp.array([0])) @ table.T)
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     value, gradient = optzoo.value_and_grad(tied)(jnp.ones((3, 2)))
        >>> print(caught[0].category.__name__, gradient.shape)
        DenseGradientWarning (3, 2)
    """


class RowsSetting(NamedTuple):
    """The arguments ``sparse`` and ``min_rows`` of a step."""

    sparse: Sparse | Mapping[str, Sparse]
    min_rows: int

    @classmethod
    def of(cls, sparse: Any, min_rows: Any) -> RowsSetting:
        """The checked arguments; raises ``TypeError`` or ``ValueError`` for invalid ones."""
        if not isinstance(sparse, Mapping):
            check_choice(Sparse, sparse=sparse)
            return cls(sparse, check_size(1, min_rows=min_rows))
        for pattern, level in sparse.items():
            check_pattern("sparse", pattern)
            check_choice(Sparse, **{f"sparse[{pattern!r}]": level})
        return cls(sparse, check_size(1, min_rows=min_rows))

    def of_tree(self, tree: Any, names: Sequence[str]) -> WantedRows:
        """The requirements on the gradients of the leaves of a tree.

        Args:
            tree: the parameters; the patterns match their paths.
            names: the names of the leaves in errors.
        """
        paths = [path_name(path) for path, _ in leaves_with_path(tree)]
        levels, required = [self.sparse] * len(paths), set[int]()
        if isinstance(self.sparse, Mapping):
            by_path = value_by_name("sparse", self.sparse, tree)
            levels = [by_path.get(path, "warn") for path in paths]
            required = {i for i, level in enumerate(levels) if level == "require"}
        leaves = enumerate(param_tree.leaves(tree))
        sizes = {i: len(x) for i, x in leaves if not is_lines(x) and jnp.ndim(x)}
        large = {i for i, size in sizes.items() if size >= self.min_rows}
        return WantedRows(names, levels, required, large | (required & sizes.keys()), set(sizes))


class WantedRows(NamedTuple):
    """The requirements on the gradients of parameters, by their indices."""

    names: Sequence[str]
    levels: Sequence[Any]  # what to do where rows are read and the gradient is dense: Sparse
    required: set[int]  # those whose gradients must be rows, by a pattern
    large: set[int]  # those of which gathers are lookups
    arrays: set[int]  # those that are arrays with rows, not in lines

    def gathers(self, traced: TracedLoss, sharded: Iterable[int] = ()) -> set[int]:
        """The parameters whose gathers of rows are lookups, and may occur in a loss.

        Args:
            traced: the loss.
            sharded: parameters that can be read by lookups only.
        """
        mine = self.large | {*sharded} | (traced.looked_up & self.arrays)
        return mine & traced.gathered() if mine else mine

    def report(self, loss: Loss) -> None:
        """Warns of dense gradients of tables whose rows are read, or raises ``ValueError``."""
        reasons = dict(loss.dense_tables())
        for i, reason in reasons.items():
            self.report_dense(i, reason)
        for i in sorted(self.required - reasons.keys()):
            if loss.uses[i]:
                raise ValueError(
                    f"the gradient of {self.names[i]} is dense, but sparse requires rows: the "
                    f"loss reads it by {loss.use_of(i)}, not by lookups or gathers of whole rows"
                )

    def report_dense(self, leaf: int, reason: str) -> None:
        """Warns of the dense gradient of a table whose rows are read, or raises an error."""
        level = self.levels[leaf]
        text = f"the gradient of {self.names[leaf]} is dense, although its rows are read: {reason}"
        if level == "require":
            raise ValueError(f"{text}. With sparse='allow' dense gradients are permitted")
        if level == "warn":
            hint = "sparse='allow' silences this warning, sparse='require' makes it an error"
            warn(f"{text}. {hint}", DenseGradientWarning)
