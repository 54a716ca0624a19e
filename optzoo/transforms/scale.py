"""Scales gradients, row-sparse ones included, by a number or by a schedule."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

from ..core.checks import check, check_function
from ..core.gradients import check_arrays
from ..core.norms import times
from ..core.numerics import next_count
from ..core.optimizer import recorded
from ..core.rows import rows_tree
from ..core.schedules import at_step


@recorded
def scale(step_size: float) -> optax.GradientTransformation:
    r"""Multiplies all gradients by a number: :math:`g \leftarrow c\, g`.

    Unlike ``optax.scale``, it accepts SparseRows, whose values are scaled, and gradients keep their
    dtype.

    Example:
        >>> import jax.numpy as jnp, optax, optzoo
        >>> tx = optax.chain(
        ...     optzoo.transforms.scale_by_momentum(0.9), optzoo.transforms.scale(-0.1)
        ... )
        >>> updates, state = tx.update(jnp.array([1.0, -2.0]), tx.init(jnp.ones(2)))
        >>> print(updates)
        [-0.1  0.2]

    Args:
        step_size: :math:`c`, finite.

    Raises:
        ValueError: if ``step_size`` is not finite.
    """
    check("finite", lambda c: bool(np.isfinite(c)), step_size=step_size)
    return optax.stateless(lambda updates, _: _scaled(step_size, updates))


@recorded
def scale_by_schedule(step_size_fn: optax.Schedule) -> optax.GradientTransformation:
    r"""Multiplies all gradients by a schedule: :math:`g \leftarrow c_t\, g`.

    Unlike ``optax.scale_by_schedule``, whose state it has, it accepts SparseRows, whose values are
    scaled, and gradients keep their dtype.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.transforms.scale_by_schedule(lambda step: -1.0 / (1 + step))
        >>> rows = optzoo.SparseRows(jnp.array([2]), jnp.ones((1, 2)), 3)
        >>> state = tx.init(jnp.ones((3, 2)))
        >>> for _ in range(2):
        ...     updates, state = tx.update(rows, state)
        >>> print(updates.values)
        [[-0.5 -0.5]]

    Args:
        step_size_fn: :math:`c_t`, a function of the number of updates before this one.

    Raises:
        TypeError: if ``step_size_fn`` is not a function; in ``update``, if it does not return a
            number.
        ValueError: in ``update``, if it returns an array with axes.
    """
    check_function("a function of the step", step_size_fn=step_size_fn)

    def init(params):
        del params
        return optax.ScaleByScheduleState(jnp.zeros([], jnp.int32))

    def update(updates, state, params=None):
        del params
        scaled = _scaled(at_step("step_size_fn", state.count, step_size_fn), updates)
        return scaled, optax.ScaleByScheduleState(next_count(state.count))

    return optax.GradientTransformation(init, update)


def _scaled(factor: Any, updates: Any) -> Any:
    check_arrays(updates)
    return rows_tree.map(lambda g: times(factor, g), updates)
