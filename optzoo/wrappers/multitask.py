"""Skips parameters whose gradient is zero, around any optimizer."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from ..core.gradients import check_gradients
from ..core.optimizer import Optimizer, recorded
from ..core.paths import leaves_with_path, map_with_path, out_of_box, owner_of
from ..core.rows import SparseRows, is_rows, map_rows, update_tree
from ..rules.policies import lazy, linear
from ..state.inner import check_not_around_replicas, fitting, inner_transformation
from ..state.slots import map_slot_trees
from ..state.stacks import layout_of
from ..state.types import AccumulateState, nodes_of


@recorded
def multitask(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    r"""Skips zero gradients, as in ``tf.contrib.opt.MultitaskOptimizerWrapper``.

    .. math::
        (x_t, s_t) = \begin{cases}
            (x_{t-1}, s_{t-1}) & \text{if } g_t = 0 \text{ everywhere} \\
            \text{the update of the inner optimizer} & \text{otherwise} \end{cases}

    for each parameter :math:`x` with its slots :math:`s`. If several tasks are trained in turns,
    the layers that the current task does not use are unchanged: momentum does not move them. State
    that belongs to no single parameter (the step count, the powers of Adam) is updated in every
    step. A row-sparse gradient is zero everywhere if all its rows are zero; an optimizer that does
    not change other rows (:func:`optzoo.rules.lazy`, :func:`optzoo.rules.linear`) then receives no
    rows. For other optimizers, old or new slots are selected in a pass over the table.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.multitask(optzoo.momentum(0.1, 0.9))
        >>> params = jnp.ones(2)
        >>> updates, state = tx.update(jnp.ones(2), tx.init(params), params)
        >>> updates, state = tx.update(jnp.zeros(2), state, params)
        >>> print(updates)  # momentum alone would move on
        [0. 0.]

    Args:
        inner: a complete optimizer, including its learning rate.

    Raises:
        ValueError: in ``init``, if ``inner`` accumulates gradients, is a method for replicas, or
            has stacks of parameters.

    References:
        ``tf.contrib.opt.MultitaskOptimizerWrapper`` of `TensorFlow 1
        <https://github.com/tensorflow/tensorflow>`_.

    Differences from the original:
        The original modifies the inner optimizer in place.
    """
    inner = inner_transformation(inner=inner)

    def is_live(g):
        return g is None or jnp.any((g.values if is_rows(g) else g) != 0)

    def stop(live, u):
        if is_rows(u):
            return u.with_values(stop(live, u.values))
        return u if live is True else jnp.where(live, u, 0)

    def update(updates, state, params=None, **extra_args):
        check_gradients(updates, params, allow_complex=True)
        updates = map_rows(SparseRows.coalesce, updates)
        live = update_tree.map(is_live, updates)
        if inner.about.rows in (lazy, linear):  # without rows it leaves the table as it is
            everywhere = update_tree.map
            updates = everywhere(lambda g, m: g.rows_if(m) if is_rows(g) else g, updates, live)
            live = everywhere(lambda g, m: is_rows(g) or m, updates, live)
        updates, new_state = inner.update(updates, state, params, **extra_args)
        updates = jax.tree.map(stop, live, updates)
        # True for every array of the state that belongs to a live parameter or to none. Shampoo has
        # several arrays for one slot of a parameter: their paths are longer.
        paths = leaves_with_path(live)
        lives = {out_of_box(path): is_live for path, is_live in paths}
        of_owner = lambda path, _: owner_of(path, lives)
        of_slots = lambda slots: map_with_path(of_owner, slots)
        live = map_slot_trees(inner, of_slots, state, lambda _: True)
        keep = lambda live, new, old: new if live is True else jnp.where(live, new, old)
        return updates, jax.tree.map(keep, live, new_state, state)

    def init(params):
        state = inner.init(params)
        check_not_around_replicas("multitask", "each of which has its own gradients", state)
        if any(jax.tree.leaves(node.sums) for node in nodes_of(AccumulateState, state)):
            raise ValueError(
                "multitask is around optzoo.accumulate, whose sums would persist into the next "
                "cycle where a gradient is zero: write accumulate(multitask(tx), every)"
            )
        if layout_of(state) and not layout_of(params):
            raise ValueError(
                "multitask is around optzoo.stacked or an optimizer with owners, whose slots are "
                "not separate for each parameter: leave these out, or exclude all parameters "
                "with the mask of optzoo.stacked"
            )
        return state

    about = inner.about._replace(row_wise=False, deferral=None)
    return fitting(Optimizer(init, update, about))
