"""Init and update of divided states inside of ``shard_map``, on the shares of a device."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from ..core.compat import varying
from ..core.optimizer import Optimizer
from ..core.paths import leaves_with_path, path_name
from ..jaxprs.prove_rows import NotRowWise
from ..jaxprs.shares import prove_shares, run_shares
from .division import Plan


def init_shares(inner: Optimizer, plan: Plan, params: Any) -> Any:
    """The shares of this device of a new state.

    Raises:
        ValueError: if they depend on other shares of parameters except by sums over all.
    """
    shares = (plan.divided(params),)
    make = lambda resize: (plan.resized(params, resize),)
    with _refused():
        proved = prove_shares(inner.init, make, _axes(shares), plan.number, _sizes(params))
        return run_shares(inner.init, shares, proved, plan.axes)


def update_shares(
    inner: Optimizer, plan: Plan, updates: Any, state: Any, params: Any, extra_args: dict[str, Any]
) -> tuple[Any, Any]:
    """The whole updates, and the shares of this device of the new state.

    Raises:
        ValueError: if they depend on other shares except by sums over all, or if the state does not
            match the shares.
    """
    of = lambda change, tree: None if tree is None else change(tree)
    shares = plan.divided(updates), state, of(plan.divided, params)

    def make(resize):
        gs, xs = (of(lambda tree: plan.resized(tree, resize), tree) for tree in (updates, params))
        return gs, jax.eval_shape(inner.init, gs if xs is None else xs), xs

    update = lambda gs, state, xs: inner.update(gs, state, xs, **extra_args)
    sizes = _sizes((updates, state, params))
    with _refused():
        proved = prove_shares(update, make, _axes(shares), plan.number, sizes, kept=2)
        _check_state(jax.eval_shape(inner.init, shares[0] if params is None else shares[2]), state)
        news, state = run_shares(update, shares, proved, plan.axes)
    return plan.whole(news), state


def _check_state(expected: Any, state: Any) -> None:
    """Raises ``ValueError`` if arrays of a state are not shares."""
    pairs = zip(leaves_with_path(expected), jax.tree.leaves(state), strict=False)
    for (path, share), x in pairs:
        if share.shape != jnp.shape(x):
            raise ValueError(
                f"state has '{path_name(path)}' of shape {jnp.shape(x)} inside of shard_map, but "
                f"the share of a device has shape {share.shape}: give shard_map "
                "jax.tree.map(lambda s: s.spec, optzoo.state_sharding(tx, params)) as in_specs "
                "and out_specs of the state"
            )


def _axes(shares: Any) -> frozenset[str]:
    """The mesh axes over which the types of shares vary: none if shard_map does not check them."""
    return frozenset[str]().union(*map(varying, jax.tree.leaves(shares)))


def _sizes(tree: Any) -> set[int]:
    return {size for x in jax.tree.leaves(tree) for size in jnp.shape(x)}


@contextlib.contextmanager
def _refused() -> Iterator[None]:
    """Raises ``ValueError`` for an optimizer that is not verified to be divisible."""
    try:
        yield
    except NotRowWise as error:
        raise ValueError(
            f"inner cannot be divided inside of shard_map: {error.reason}. Call update outside of "
            "shard_map, or exclude this parameter by mask="
        ) from None
