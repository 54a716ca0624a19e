"""A check for :func:`optzoo.stacked`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ..core.numerics import has_keys
from ..core.paths import leaves_with_path, path_name
from ..state.slots import map_slot_trees
from ..state.stacks import layout_of, unstack
from ..wrappers.stacked import stacked


def check_stacked(
    inner: optax.GradientTransformation,
    params: Any,
    *,
    steps: int = 3,
    missing: bool = False,
    extra_args: Mapping[str, Any] | None = None,
    rtol: float = 1e-5,
    seed: int = 0,
    **options: Any,
) -> None:
    """Checks that an optimizer gives the same values with and without stacks.

    Parameters and gradients are random. The steps update all parameters, and two thirds of them in
    ``optax.masked``.

    Example:
        >>> import jax.numpy as jnp, optax, optzoo
        >>> from optzoo.testing import check_stacked
        >>> params = {"kernel": jnp.ones((2, 3)), "scale": jnp.ones(3), "shift": jnp.ones(3)}
        >>> check_stacked(optax.adam(1e-3), params)
        >>> check_stacked(optax.lamb(1e-3), params)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        AssertionError: with stacks the update of 'scale' is [...] in step 0, without them [...]

    Args:
        inner: the optimizer, as for :func:`optzoo.stacked`.
        params: arrays or ``jax.ShapeDtypeStruct``; their names, shapes and dtypes are used. Those
            of your model, so that masks by name see the names.
        steps: how many steps are run.
        missing: whether the gradient of every second parameter is None in the last step.
            Optimizers of this library take that, those of optax do not.
        extra_args: for ``update``.
        rtol: tolerance relative to the largest value of the array without stacks. Larger for
            parameters in 16 bits.
        seed: of the random values.
        **options: for :func:`optzoo.stacked`, such as ``max_size``.

    Raises:
        AssertionError: if an update or a slot differs; the message has the path of the parameter
            or of the slot, the step and the values. Also if the optimizer fails with stacks only.
        ValueError: if ``options`` let no parameters of ``params`` share a stack.
    """
    options = {**options, "check": False}
    if not layout_of(stacked(optax.trace(0.9), **options).init(params)):
        raise ValueError("params must have parameters that share a stack: none do")
    rng = np.random.default_rng(seed)
    draw = lambda: jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), params)
    x, grads = draw(), [draw() for _ in range(steps)]
    if missing:
        grads[-1] = _where(lambda k: k % 2 == 0, grads[-1], None)
    in_stacks = stacked(inner, **options)
    some = _where(lambda k: k % 3 > 0, jax.tree.map(lambda _: True, params), False)
    for mask in (True, some):
        masked = lambda tx, mask=mask: tx if mask is True else optax.masked(tx, mask)
        want = _run(masked(inner), x, grads, extra_args or {})
        try:
            got = _run(masked(in_stacks), x, grads, extra_args or {})
        except Exception as error:
            raise AssertionError(f"the optimizer fails with stacks only: {error}") from error
        for k, pair in enumerate(zip(got, want, strict=True)):
            _assert_close(k, *pair, rtol)


def _where(marked: Any, tree: Any, other: Any) -> Any:
    """The tree with another value for the leaves whose position is not marked."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef.unflatten([x if marked(k) else other for k, x in enumerate(leaves)])


def _run(
    tx: optax.GradientTransformation, params: Any, grads: list[Any], extra_args: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The updates and the state after each step; the state without its stacks."""
    tx = optax.with_extra_args_support(tx)

    @jax.jit
    def step(g, state, x):
        updates, state = tx.update(g, state, x, **extra_args)
        present = jax.tree.map(lambda u: u is not None, updates, is_leaf=lambda u: u is None)
        add = lambda there, u, x: (x + u).astype(x.dtype) if there else x
        return updates, state, jax.tree.map(add, present, updates, x)

    state, trees = tx.init(params), []
    for g in grads:
        updates, state, params = step(g, state, params)
        trees.append({"update": updates, "state": map_slot_trees(tx, unstack, state)})
    return trees


def _assert_close(step: int, got: dict[str, Any], want: dict[str, Any], rtol: float) -> None:
    for what, in_words in (("update", "the update of"), ("state", "the slot or value")):
        if jax.tree.structure(got[what]) != jax.tree.structure(want[what]):
            raise AssertionError(f"the {what} has another structure with stacks in step {step}")
        leaves = leaves_with_path(want[what])
        for (path, a), b in zip(leaves, jax.tree.leaves(got[what]), strict=True):
            a, b = (_values(array) for array in (a, b))
            atol = rtol * np.max(np.abs(a), initial=0)
            if a.shape != b.shape or not np.allclose(b, a, 0, atol, equal_nan=True):
                raise AssertionError(
                    f"with stacks {in_words} '{path_name(path)}' is {b} in step {step}, without "
                    f"them {a}"
                )


def _values(array: Any) -> np.ndarray:
    is_key = has_keys(array.dtype)
    array = np.asarray(jax.random.key_data(array) if is_key else array)
    return array.astype(np.float64) if jnp.issubdtype(array.dtype, jnp.floating) else array
