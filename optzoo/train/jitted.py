"""Compiled train steps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ..core.compat import can_demand_layouts, is_tracing
from ..core.integers import check_integers
from ..sparse.row_major import Needs, row_major, to_row_major, with_row_major


class Jitted:
    """``jax.jit`` of ``step(params, state, *batch, **extra_args)``, which donates the first two.

    On a TPU, tables and slots are row-major before a step as after it (``rows.row_major``): those
    that are not are converted one by one, and the program is the same from the first step on. It
    is compiled with the options of ``rows.compiler_options``.

    Without x64, JAX keeps the lower 32 bits of integers of 64, such as hashes: ids of other rows.

    Raises:
        OverflowError: when called, if the batch has an integer of NumPy or Python that has no 32
            bits, and x64 is off.
    """

    def __init__(self, step: Callable[..., Any]):
        functools.update_wrapper(self, step)
        self._step = row_major(step)
        self._jit = self._jit_with()
        self._jits: dict[Any, Any] = {(): self._jit}  # by the options of the compiler
        self._needs: dict[Any, Needs] = {}  # by the shapes of the arguments

    def __call__(self, params: Any, state: Any, *batch: Any, **extra_args: Any) -> Any:
        """A step."""
        check_integers(batch)
        jitted, args, kwargs = self._prepared(to_row_major, (params, state, *batch), extra_args)
        return jitted(*args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """As that of ``jax.jit``."""
        return self._jit.trace(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """As that of ``jax.jit``; shapes of tables and slots are row-major, as in a call."""
        jitted, args, kwargs = self._prepared(with_row_major, args, kwargs)
        return jitted.lower(*args, **kwargs)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """As that of ``jax.jit``."""
        return self._jit.eval_shape(*args, **kwargs)

    def clear_cache(self) -> None:
        """As that of ``jax.jit``."""
        for jitted in self._jits.values():
            jitted.clear_cache()

    def _cache_size(self) -> int:
        return sum(jitted._cache_size() for jitted in self._jits.values())

    def _jit_with(self, **options: Any) -> Any:
        return jax.jit(self._step, donate_argnums=(0, 1), compiler_options=options or None)

    @functools.cached_property
    def _can_demand_layouts(self) -> bool:
        return can_demand_layouts()

    def _prepared(self, f: Callable[[Any], Any], args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
        """What to call, and the arguments, with ``f`` of those of which the step changes rows."""
        if not self._can_demand_layouts or is_tracing():
            return self._jit, args, kwargs
        leaves, treedef = jax.tree.flatten((args, kwargs))
        shapes = treedef, tuple(map(jnp.shape, leaves))
        if shapes not in self._needs:
            self._needs[shapes] = Needs.of(self._jit.trace(*args, **kwargs))
        needs = self._needs[shapes]
        for k in needs.by_rows:
            leaves[k] = f(leaves[k])
        options = needs.options(leaves)
        key = tuple(options.items())
        if key not in self._jits:
            self._jits[key] = self._jit_with(**options)
        return self._jits[key], *treedef.unflatten(leaves)
