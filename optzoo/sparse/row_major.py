"""Tables and slots whose rows a step changes keep each row in one piece of memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from ..core.compat import in_row_major
from ..jaxprs.changed_rows import changed_rows
from ..jaxprs.graph import Graph


def row_major(step: Callable[..., Any]) -> Callable[..., Any]:
    """The same step, where the arrays of which it changes some rows come out row-major.

    On a TPU an array is stored by columns unless the width of its rows is 1 or a multiple of 128.
    Rows are gathered and scattered row-major, so a step would copy such a table, and each slot of
    it, to that layout and back. The results of this function are row-major: the first step converts
    them, and each later step costs what the rows of its gradients cost. The price is memory: a row
    takes a multiple of 128 elements.

    :func:`optzoo.minimize` and :func:`optzoo.sharded_minimize` do this already. It is for a step of
    your own, inside of its ``jit``. On CPUs and GPUs all arrays are row-major, and nothing changes.
    Nor does it where no program can be for a TPU, which is neither here nor is libtpu installed,
    and before JAX 0.11.1: there a result whose layout is demanded cannot take the memory of a
    donated argument.

    Example:
        >>> import jax, jax.numpy as jnp, optax, optzoo
        >>> tx = optzoo.lazy_adam(0.1)
        >>> def step(params, state, grads):
        ...     updates, state = tx.update(grads, state, params)
        ...     return optax.apply_updates(params, updates), state
        >>> step = jax.jit(optzoo.rows.row_major(step), donate_argnums=(0, 1))
        >>> params = jnp.ones((3, 2))
        >>> grads = optzoo.SparseRows(jnp.array([2]), jnp.ones((1, 2)), 3)
        >>> params, state = step(params, tx.init(params), grads)
        >>> print(params[2])
        [0.9 0.9]

    Args:
        step: a function of trees of arrays, which returns such a tree.

    Raises:
        TypeError: if ``step`` is not a function.
    """
    if not callable(step):
        raise TypeError(f"step must be a function, got {step!r}")
    inner = jax.jit(step)

    @functools.wraps(step)
    def wrapped(*args, **kwargs):
        leaves, treedef = jax.tree.flatten(inner(*args, **kwargs))
        program = jax.make_jaxpr(inner)(*args, **kwargs)  # the step is not traced again
        return treedef.unflatten(map(_in_rows, leaves, changed_rows(Graph.of(program.jaxpr))))

    return wrapped


def _in_rows(x: Any, has_changed_rows: bool) -> Any:
    return in_row_major(x) if has_changed_rows and can_be_row_major(x) else x


def can_be_row_major(x: Any) -> bool:
    """Whether an array has rows of several elements, and a TPU has such elements.

    Those of 64 bits are split by the compiler for TPUs, which takes no demand of a layout there.
    """
    return x.ndim > 1 and x.size > len(x) and x.dtype.itemsize <= 4
