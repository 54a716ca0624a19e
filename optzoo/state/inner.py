"""Transformations inside of others: what does not belong together is a clear error."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ..core.checks import check_transformation, check_update_arguments
from ..core.gradients import check_gradients
from ..core.optimizer import Optimizer, about_of
from ..core.paths import path_name
from ..core.rows import fits, is_sparse_or_none
from ..jaxprs.equations import used_inputs
from ..jaxprs.reads import note_reads, unread
from .fit import SWAPPED, StateError, find_misfit, kinds_of


def fitting(tx: optax.GradientTransformation) -> Optimizer:
    """The same transformation, with clear errors where its arguments do not belong together.

    If the update fails, or returns a state of another structure or of other shapes, the state is
    compared with that of ``init``, and gradients with parameters; so nothing is traced where all is
    right.

    Raises:
        StateError: in ``update``, if the state does not fit the transformation and the parameters.
        TypeError: if something fails and a parameter or gradient has a dtype that no optimizer of
            this library takes.
        ValueError: in ``update``, if a gradient does not have the shape of its parameter.
    """
    about, tx = about_of(tx), optax.with_extra_args_support(tx)

    def init(params):
        try:
            return tx.init(params)
        except Exception as error:
            if (found := _gradient_error(params, params)) is None:
                raise
            raise found from error

    def update(updates, state, params=None, **extra_args):
        note_reads(extra_args, about.reads)
        with explained(tx, updates, state, params):
            new_updates, new = tx.update(updates, state, params, **extra_args)
        if kinds_of(new) != kinds_of(state):
            found = find_misfit(tx, updates, state, params) or _gradient_error(updates, params)
            if found is not None:
                raise found
        _check_shapes(updates, new_updates)
        return new_updates, new

    return Optimizer(init, update, about)


def _gradient_error(
    updates: Any, params: Any, *, allow_complex: bool = True
) -> TypeError | ValueError | None:
    if not all(hasattr(a, "dtype") for a in jax.tree.leaves((updates, params))):
        return None  # nothing is known
    try:
        # They may be abstract.
        check = functools.partial(check_gradients, allow_complex=allow_complex)
        jax.eval_shape(check, updates, params)
    except (TypeError, ValueError) as error:
        return error
    return None


def _check_shapes(updates: Any, new: Any) -> None:
    """Raises ``ValueError`` if an update has another shape than its gradient: it was broadcast."""
    gs, us = (jax.tree.leaves(tree, is_leaf=is_sparse_or_none) for tree in (updates, new))
    if len(gs) != len(us):
        return
    for i, (g, u) in enumerate(zip(gs, us, strict=True)):
        if g is not None and u is not None and not fits(g, u):
            path, _ = jax.tree_util.tree_leaves_with_path(updates, is_leaf=is_sparse_or_none)[i]
            raise ValueError(
                f"parameter '{path_name(path)}' has a gradient of shape {jnp.shape(g)}, which its "
                f"update, of shape {jnp.shape(u)}, does not have: it must be the parameter's"
            )


@contextlib.contextmanager
def explained(
    tx: Any, updates: Any, state: Any, params: Any, *, dtypes: bool = True
) -> Iterator[None]:
    """If what is done here fails and the state does not fit, that is the error.

    With ``dtypes`` also what is wrong with the dtypes and the shapes of gradients and parameters.
    """
    try:
        yield
    except Exception as error:
        found = find_misfit(tx, updates, state, params)
        found = found or (_gradient_error(updates, params) if dtypes else None)
        of_dtype = _gradient_error(updates, params, allow_complex=False)
        # What a transformation inside found says more, but not where arguments are swapped.
        is_clear = isinstance(error, StateError) or (
            isinstance(error, TypeError) and str(error) == str(of_dtype)
        )
        if found is None or str(found) == str(error) or (is_clear and str(found) != SWAPPED):
            raise
        raise found from error


def inner_transformation(**arguments: Any) -> Optimizer:
    """The transformation that a wrapper was given as an argument, with its mistakes as errors.

    Raises:
        TypeError: if it is no transformation; in ``update``, as
            :func:`optzoo.core.checks.check_update_arguments`, or if nothing in it reads the
            ``learning_rate`` that is given, and it changes parameters.
        StateError: in ``update``, as :func:`fitting`.
    """
    check_transformation(**arguments)
    [(name, tx)] = arguments.items()
    tx = fitting(tx)
    proved = set[Any]()  # so that each structure is traced once more, not each update

    def update(updates, state, params=None, **extra_args):
        check_update_arguments(extra_args)
        rate = None if "learning_rate" in tx.about.reads else extra_args.get("learning_rate")
        if rate is not None and (key := jax.tree.structure((updates, params))) not in proved:
            call = lambda gs, **given: tx.update(gs, state, params, **{**extra_args, **given})
            _check_rate_is_read(name, call, updates, rate)
            proved.add(key)
        return tx.update(updates, state, params, **extra_args)

    return Optimizer(tx.init, update, tx.about._replace(sleepers=None))


def _check_rate_is_read(name: str, update: Any, updates: Any, rate: Any) -> None:
    """Raises ``TypeError`` if the updates of the parameters do not depend on the rate."""
    names, _ = unread(functools.partial(update, updates), {"learning_rate": rate})
    if not names:
        return
    jaxpr = jax.make_jaxpr(lambda gs: update(gs, learning_rate=rate)[0])(updates)
    if any(used_inputs(jaxpr.jaxpr)):  # otherwise the parameters are frozen
        raise TypeError(
            f"update got a learning_rate, but nothing in {name} reads it: take an optimizer of "
            f"optzoo, or make {name} optax.chain(direction, optzoo.scale_by_learning_rate(rate)), "
            "such as with optax.scale_by_adam() as the direction"
        )
