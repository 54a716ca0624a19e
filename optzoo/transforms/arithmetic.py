"""Sums and norms of trees of gradients, row-sparse ones included."""

from __future__ import annotations

import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ..core.gradients import check_arrays
from ..core.norms import global_norm as norm_of_merged
from ..core.numerics import has_derivative, upcast
from ..core.rows import SparseRows, is_rows, map_rows, rows_tree, update_tree
from ..distributed.engine.collectives import AxisName, Replicas


def add(tree: Any, other: Any) -> Any:
    """The sum of two trees of gradients: rows plus rows give rows, an array plus rows an array.

    The counterpart of ``optax.tree.add``, which does not accept SparseRows.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> rows = optzoo.SparseRows(jnp.array([2]), jnp.ones((1, 2)), 3)
        >>> print(optzoo.rows.add({"table": jnp.zeros((3, 2))}, {"table": rows})["table"])
        [[0. 0.]
         [0. 0.]
         [1. 1.]]

    Args:
        tree: gradients.
        other: gradients of the same structure; each leaf may be rows or an array.

    Raises:
        TypeError: if a leaf is not an array.
        ValueError: if the structures of the trees or the shapes of the leaves differ.
    """
    check_arrays((tree, other), abstract=False)
    leaves, treedef = rows_tree.flatten(tree)
    others, structure = rows_tree.flatten(other)
    if structure != treedef:
        raise ValueError(f"other must have the structure of tree, {treedef}, got {structure}")
    for a, b in zip(leaves, others, strict=True):
        if not (is_rows(a) or is_rows(b)) and jnp.shape(a) != jnp.shape(b):
            raise ValueError(
                f"other must have the shapes of tree, got {jnp.shape(b)} for {jnp.shape(a)}"
            )
    return treedef.unflatten(map(operator.add, leaves, others))


def global_norm(updates: Any) -> Array:
    r"""The Euclidean norm of all gradients: :math:`\sqrt{\sum g^2}`, in at least float32.

    The counterpart of ``optax.tree.norm``, which does not accept SparseRows. Rows that share an
    index are summed first, so that the norm is that of the dense gradient.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> rows = optzoo.SparseRows(jnp.array([2, 2]), jnp.array([[1.0], [2.0]]), 4)
        >>> gradients = {"table": rows, "w": jnp.array([4.0])}
        >>> print(optzoo.rows.global_norm(gradients))  # rows that share an index are summed
        5.0

    Args:
        updates: a tree of gradients.

    Raises:
        TypeError: if a leaf is not an array.
    """
    check_arrays(updates, abstract=False)
    merged = map_rows(SparseRows.coalesce, updates)
    return norm_of_merged(rows_tree.leaves(merged))


def psum(tree: Any, axis_name: AxisName = "replica") -> Any:
    """The sum of a tree of gradients over the replicas.

    The counterpart of ``jax.lax.psum``, which does not accept SparseRows. Rows are gathered: the
    result lists those of all replicas, in order. Sums are computed in at least float32 and returned
    in the dtype of each gradient.

    Example:
        >>> import jax, jax.numpy as jnp, optzoo
        >>> add = lambda g: optzoo.rows.psum({"w": g}, "replica")["w"]
        >>> print(jax.vmap(add, axis_name="replica")(jnp.array([1.0, 3.0])))
        [4. 4.]

    Args:
        tree: the gradients of this replica.
        axis_name: the axis, or axes, of the replicas; None for a single replica.

    Raises:
        NameError: if there is no such axis.
    """
    replicas = Replicas(axis_name)
    _ = replicas.size  # raises a clearer error
    wide = lambda a: upcast(jnp.asarray(a)) if has_derivative(a) else jnp.asarray(a)
    sums = replicas.sum(jax.tree.map(wide, map_rows(lambda _: None, tree)))

    def total(g, of_arrays):
        if is_rows(g):
            return replicas.gather_rows(g, True).astype(g.dtype)
        return g if g is None else of_arrays.astype(jnp.result_type(g))

    return update_tree.map(total, tree, sums)
