"""Modules and optimizers of Flax NNX: the whole train step, and their arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from ..core.checks import check_flags
from ..core.extras import how_to_install
from ..core.integers import check_integers
from ..core.paths import leaves_with_path, path_name
from ..native.step import Native
from ..sparse.lookup import value_and_aux
from ..sparse.wanted import MIN_ROWS, Sparse
from ..state.fit import StateError
from ..train.minimize import minimize

try:
    from flax import nnx
except ImportError as error:
    raise ImportError(
        f"optzoo's functions for Flax NNX need Flax: {how_to_install('flax')}"
    ) from error

# Values instead of variables. Before Flax 0.12.7 the function has another name.
as_pure = nnx.as_pure if hasattr(nnx, "as_pure") else nnx.pure


def nnx_minimize(
    loss_fn: Callable[..., Any],
    has_aux: bool = False,
    *,
    sparse: Sparse | Mapping[str, Sparse] = "warn",
    min_rows: int = MIN_ROWS,
    native: Native = False,
) -> Callable[..., Any]:
    """A compiled train step for a module and an optimizer of Flax NNX.

    The step is that of :func:`optzoo.minimize`: gradients of tables are SparseRows, and parameters
    and slots are updated in place. It changes the module, the optimizer and other objects in the
    batch, such as ``nnx.Metric``, as ``nnx.jit`` would: parameters, batch statistics, random keys
    and counts.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> from flax import nnx
        >>> rngs = nnx.Rngs(0)
        >>> model = nnx.Sequential(nnx.Embed(20_000, 2, rngs=rngs), nnx.Dropout(0.5, rngs=rngs))
        >>> optimizer = nnx.Optimizer(model, optzoo.lazy_adam(0.1), wrt=nnx.Param)
        >>> step = optzoo.nnx_minimize(lambda model, ids: jnp.mean(model(ids) ** 2))
        >>> loss = step(model, optimizer, jnp.array([3, 14]))
        >>> int(optimizer.step[...]), int(model.layers[1].rngs.count[...])
        (1, 1)

    Args:
        loss_fn: ``loss_fn(model, *batch)`` returns a scalar, or ``(scalar, aux)``.
        has_aux: whether ``loss_fn`` also returns auxiliary data.
        sparse: as in :func:`optzoo.minimize`; patterns match paths such as
            ``"layers/0/embedding"``.
        min_rows: as in :func:`optzoo.minimize`.
        native: as in :func:`optzoo.minimize`.

    Raises:
        ImportError: if Flax is missing.
        TypeError: as :func:`optzoo.minimize`; in the step, if ``model`` is not a module or
            ``optimizer`` is not an ``nnx.Optimizer``; at trace time, if a parameter has no
            gradient.
        ValueError: as :func:`optzoo.minimize`; at trace time, if the loss assigns to a parameter or
            deletes a variable.

    Returns:
        A function ``step(model, optimizer, *batch, **extra_args) -> loss``, or ``(loss, aux)`` if
        ``has_aux``. ``optimizer.wrt`` selects the variables that are parameters. The extra args are
        passed to the update, as those of ``optimizer.update``.
    """
    check_flags(has_aux=has_aux)

    programs = dict[Any, Callable[..., Any]]()  # functools.cache cannot be pickled

    def program(layout: _Layout, tx: Any) -> Callable[..., Any]:
        def loss(params, others, arrays):
            model, objects = layout.merge(params, others)
            value, aux = value_and_aux(loss_fn(model, *layout.batch(objects, arrays)), has_aux)
            others = layout.others_after(params, others, model, objects)
            return value, (aux, others)

        return minimize(loss, tx, True, sparse=sparse, min_rows=min_rows, native=native)

    def step(model, optimizer, *batch, **extra_args):
        _check(model, optimizer)
        leaves, treedef = jax.tree.flatten(batch, is_leaf=_is_object)
        objects = [x for x in leaves if _is_object(x)]
        arrays = [x for x in leaves if not _is_object(x)]
        check_integers(treedef.unflatten([None if _is_object(x) else x for x in leaves]))
        where = _OfModel(nnx.filterlib.to_predicate(optimizer.wrt))
        graphdef, params, others = nnx.split((model, objects), where, ...)
        layout = _Layout(graphdef, where, treedef, tuple(map(_is_object, leaves)))
        if (key := (layout, optimizer.tx)) not in programs:
            programs[key] = program(*key)
        params, state, value, (aux, others) = programs[key](
            as_pure(params.get(0, nnx.State({}))),
            as_pure(optimizer.opt_state),
            as_pure(others),
            arrays,
            **as_pure(extra_args),
        )
        nnx.update((model, objects), nnx.State({0: params}), others)
        _set_values(optimizer.opt_state, state)
        optimizer.step[...] += 1
        return (value, aux) if has_aux else value

    return step


def nnx_split(model: Any, optimizer: Any) -> tuple[Any, Any]:
    """The parameters and the state of an optimizer of Flax NNX, as arrays without variables.

    Pass them to functions of ``params`` and ``state``, such as :func:`optzoo.eval_params`,
    :func:`optzoo.growing.resize_table`, :func:`optzoo.rows.catch_up` and :func:`optzoo.get_slot`;
    :func:`optzoo.nnx_update` writes the results back.

    Example:
        >>> import optzoo
        >>> from flax import nnx
        >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> optimizer = nnx.Optimizer(model, optzoo.momentum(0.1, 0.9), wrt=nnx.Param)
        >>> params, state = optzoo.nnx_split(model, optimizer)
        >>> params["kernel"].shape, optzoo.get_slot(state, "momentum")["kernel"].shape
        ((2, 3), (2, 3))

    Args:
        model: the module.
        optimizer: the ``nnx.Optimizer``. Its ``wrt`` selects the variables that are parameters.

    Raises:
        TypeError: if ``model`` is not a module or ``optimizer`` is not an ``nnx.Optimizer``.
    """
    _check(model, optimizer)
    return as_pure(nnx.state(model, optimizer.wrt)), as_pure(optimizer.opt_state)


def nnx_update(model: Any, optimizer: Any, params: Any, state: Any) -> None:
    """Sets parameters and state of an optimizer of Flax NNX, the inverse of :func:`nnx_split`.

    Arrays may have new shapes, for example those of a table with more rows.

    Example:
        >>> import optzoo
        >>> from flax import nnx
        >>> model, tx = nnx.Embed(4, 2, rngs=nnx.Rngs(0)), optzoo.lazy_adam(0.1)
        >>> optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        >>> params, state = optzoo.nnx_split(model, optimizer)
        >>> grown = optzoo.growing.resize_table(params, state, {"embedding": 8}, tx=tx)
        >>> optzoo.nnx_update(model, optimizer, *grown)
        >>> model.embedding.shape
        (8, 2)

    Args:
        model: the module.
        optimizer: the ``nnx.Optimizer``.
        params: the parameters, as returned by ``nnx_split``.
        state: the state, as returned by ``nnx_split``.

    Raises:
        TypeError: as ``nnx_split``.
        StateError: if parameters or state have another structure; nothing is then set.
    """
    for name, old, new in zip(
        ("params", "state"), nnx_split(model, optimizer), (params, state), strict=True
    ):
        if jax.tree.structure(new) != jax.tree.structure(old):
            raise StateError(
                f"{name} must have the structure that optzoo.nnx_split(model, optimizer) returns"
            )
    nnx.update(model, params)
    _set_values(optimizer.opt_state, state)


@dataclasses.dataclass(frozen=True)
class _OfModel:
    """A filter for the parameters of ``model`` in ``(model, objects)``."""

    is_param: Callable[..., bool]

    def __call__(self, path: Sequence[Any], value: Any) -> bool:
        return path[0] == 0 and self.is_param(path[1:], value)


@dataclasses.dataclass(frozen=True)
class _Layout:
    """The parts of a model and its batch that are not arrays."""

    graphdef: Any
    where: _OfModel
    treedef: Any  # of the batch
    is_object: tuple[bool, ...]  # for each of its leaves

    def merge(self, params: Any, others: Any) -> Any:
        """The model and the objects of the batch."""
        return nnx.merge(self.graphdef, nnx.State({0: params}), others, copy=True)

    def batch(self, objects: Sequence[Any], arrays: Sequence[Any]) -> Any:
        """The batch as it was passed."""
        leaves = {True: iter(objects), False: iter(arrays)}
        return self.treedef.unflatten([next(leaves[x]) for x in self.is_object])

    def others_after(self, params: Any, others: Any, model: Any, objects: Any) -> Any:
        """The variables other than parameters, after the loss; raises ``ValueError``."""
        _, params_after, others_after = nnx.split((model, objects), self.where, ...)
        after = jax.tree.leaves(as_pure(params_after))
        for (path, x), y in zip(leaves_with_path(params), after, strict=True):
            if x is not y:
                raise ValueError(
                    f"the loss assigns to parameter '{path_name(path)}', but the optimizer "
                    "updates it: assign to it outside the step, or exclude it from the "
                    "optimizer's wrt"
                )
        paths = [set(nnx.to_flat_state(state).paths) for state in (others, others_after)]
        if gone := paths[0] - paths[1]:
            name = "/".join(map(str, min(gone, key=str)[1:]))
            raise ValueError(
                f"the loss deletes variable '{name}', which a step does not support: delete it "
                "outside the step"
            )
        return others_after


def _set_values(variables: Any, tree: Any) -> None:
    """Sets variables to the values at the same positions; ``nnx.update`` would split trees."""
    leaves, treedef = jax.tree.flatten(variables, is_leaf=_is_object)
    for variable, value in zip(leaves, treedef.flatten_up_to(tree), strict=True):
        variable.set_value(value)


def _is_object(x: Any) -> bool:
    return isinstance(x, nnx.Pytree | nnx.Variable)


def _check(model: Any, optimizer: Any) -> None:
    if not isinstance(model, nnx.Pytree):
        raise TypeError(
            f"model must be a module of Flax NNX, not a {type(model).__name__}: use "
            "optzoo.minimize for a dict of parameters"
        )
    if not isinstance(optimizer, nnx.Optimizer):
        raise TypeError(
            f"optimizer must be an nnx.Optimizer(model, tx, wrt=nnx.Param), not a "
            f"{type(optimizer).__name__}"
        )
