"""Optimizers of rows as custom optimizers of jax-tpu-embedding."""

from __future__ import annotations

import collections
import functools
import importlib
import importlib.metadata
from collections.abc import Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from jax import Array

from ...core.checks import check_not_negative, check_size, check_transformation
from ...core.compat import inline_constant
from ...core.extras import how_to_install
from ...jaxprs.equations import used_inputs
from .rows import RowOptimizer, Shared

_MODULE = "jax_tpu_embedding.sparsecore.lib.nn.embedding_spec"
_HINT = f"{how_to_install('sparsecore')} (wheels exist for Linux only)"


def sparsecore(
    tx: optax.GradientTransformation, *, width: int | None = None, name: str = "optzoo"
) -> Any:
    """An optimizer as a ``CustomOptimizerSpec`` of jax-tpu-embedding, for tables on SparseCore.

    .. code-block:: python

        spec = optzoo.interop.sparsecore.sparsecore(optzoo.lazy_adam(1e-3))
        table = embedding_spec.TableSpec(..., optimizer=spec)
        shared = spec.first_shared()

        # in the training step
        tables = embedding.tpu_sparse_dense_matmul_grad(..., step=shared)
        shared = spec.next_shared(shared)

    SparseCore calls a function for each row that is looked up, with its gradient, its slots and
    scalar hyper-parameters. The spec derives this function from the update of ``tx``:

    * The slots of each row become slot variables, in float32 and of the shape of the table, with
      the initial values of ``tx``.
    * The state that all rows share (counts, running powers, injected hyper-parameters) is
      ``shared``, a :class:`Shared`. It is part of your training state: checkpoint it, and call
      ``next_shared`` once in each step.
    * Values that depend on the shared state only (schedules, bias corrections) are computed once in
      a step, by ``get_hyperparameters(shared)``. jax-tpu-embedding passes its argument ``step``:
      with several specs, a dict of all ``shared`` by their names.

    The new rows are those that ``tx`` computes from a coalesced :class:`optzoo.SparseRows`. The
    spec proves that each row depends only on itself, and that no other row moves:
    :func:`optzoo.adam`, which moves all rows, is an error, and ``on_rows(adam(...))`` is accepted.

    Example:
        >>> import optzoo
        >>> from jax_tpu_embedding.sparsecore.lib.nn import embedding_spec
        >>> spec = optzoo.interop.sparsecore.sparsecore(optzoo.lazy_adam(1e-3))
        >>> print(isinstance(spec, embedding_spec.OptimizerSpec))
        True

    Args:
        tx: any optax transformation that updates each touched row independently.
        width: the number of columns of the table. It is needed only if the elements of a row depend
            on each other, as in :func:`optzoo.row_wise_adagrad`, since SparseCore pads rows.
        name: the name of the spec in the names of variables; unique for each spec of a model.

    Returns:
        A subclass of ``CustomOptimizerSpec`` with the methods ``first_shared(step=0)`` and
        ``next_shared(shared)``.

    Raises:
        ImportError: if jax-tpu-embedding is missing, or older than 0.1.0.
        TypeError: if ``tx`` is not a transformation, or ``width`` is not an int; in
            ``get_hyperparameters``, if its argument is not a ``Shared``.
        ValueError: if ``tx`` does not update each touched row independently; if a slot is not
            float32, does not have the shape of the table, or is initialized from the parameters; if
            ``width`` is needed; if an operation cannot be batched over rows.

    References:
        `jax-tpu-embedding <https://github.com/jax-ml/jax-tpu-embedding>`_. Tested by compilation
        for TPUs and by runs on a CPU: ``docs/sparsecore.md``.
    """
    check_transformation(tx=tx)
    if width is not None:
        check_size(1, width=width)
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"name must be a valid name of a variable, got {name!r}")
    return _spec_class()(RowOptimizer(tx, width), name)


@functools.cache
def _spec_class() -> Any:
    try:
        embedding_spec: Any = importlib.import_module(_MODULE)
    except ImportError as error:
        raise ImportError(
            f"optzoo.interop.sparsecore.sparsecore needs jax-tpu-embedding: {_HINT}"
        ) from error
    if not hasattr(embedding_spec, "CustomOptimizerSpec"):
        raise ImportError(
            f"optzoo.interop.sparsecore.sparsecore needs jax-tpu-embedding 0.1.0 or later, got "
            f"{importlib.metadata.version('jax-tpu-embedding')}, which has no CustomOptimizerSpec: "
            f"{_HINT}"
        )

    class RowOptimizerSpec(embedding_spec.CustomOptimizerSpec):
        """A ``CustomOptimizerSpec`` whose hyper-parameters are computed from a :class:`Shared`."""

        def __init__(self, rows: RowOptimizer, name: str):
            super().__init__(
                learning_rate=1.0,  # not used: the rate is in the function or a hyper-parameter
                custom_computation_fn=_function(rows),
                slot_variable_initializers_tuple=_named(rows.slot_names, rows.initializers()),
                short_name_str=name,
            )
            self._rows = rows

        def first_shared(self, step: Any = 0) -> Shared:
            """The shared state of all rows after ``step`` updates."""
            check_not_negative(step=step)
            return self._rows.first_shared(step)

        def next_shared(self, shared: Shared) -> Shared:
            """The shared state after one more update."""
            return self._rows.next_shared(_as_shared(shared, self.short_name_str))

        def get_hyperparameters(self, step: Any = None) -> tuple[Array, ...]:
            """The scalars of an update, for ``step=shared``."""
            if self._rows.num_scalars == 0:
                return (jnp.float32(0),)  # one at least, as all specs have
            return tuple(self._rows.scalars(_as_shared(step, self.short_name_str)))

    return RowOptimizerSpec


def _as_shared(step: Any, name: str) -> Shared:
    shared = step.get(name) if isinstance(step, Mapping) else step
    if not isinstance(shared, Shared):
        raise TypeError(
            "step must be the result of first_shared() or next_shared(), or a dict of these by "
            f"the names of the specs, with {name!r}; got {step!r}"
        )
    return shared


def _named(names: list[str], values: list[Any]) -> Any:
    """A named tuple with names that are determined at run time."""
    return cast(Any, collections.namedtuple)("SlotVariables", names, rename=True)(*values)


def _function(rows: RowOptimizer) -> Any:
    """``update_row`` as jax-tpu-embedding calls it."""

    def optzoo_update(gradient, row, *rest):
        arguments = gradient, row, *rest
        closed = jax.make_jaxpr(rows.update_row)(*arguments)
        # Version 0.1.0 converts the constants of a jaxpr to arguments, which are never passed.
        constants = map(inline_constant, closed.consts)
        first, *slots = jax.core.eval_jaxpr(closed.jaxpr, list(constants), *arguments)
        # An unused argument would be dropped when the function is lowered.
        used = used_inputs(closed.jaxpr)
        for argument in (a for a, is_used in zip(arguments, used, strict=True) if not is_used):
            first = jnp.where(jnp.zeros(row.shape, bool), argument, first)
        return first, *slots

    return optzoo_update
