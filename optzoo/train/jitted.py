"""Compiled train steps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from ..core.compat import can_demand_layouts, is_tracing
from ..core.integers import check_integers
from ..sparse.row_major import Needs, row_major, to_row_major, with_row_major

_PLACE = (
    "Put all arrays on the devices of the step: for a mesh, jax.device_put(params, "
    "optzoo.sharded.params_sharding(params, mesh, tables)) and jax.device_put(state, "
    "optzoo.state_sharding(tx, params)), with tables={} if none is sharded"
)


class Jitted:
    """``jax.jit`` of ``step(params, state, *batch, **extra_args)``, which donates the first two.

    On a TPU, tables and slots are row-major before and after a step (``rows.row_major``): those in
    another layout are converted first, so that the first step is not compiled for another layout.
    The program is compiled with ``rows.compiler_options``.

    Without x64, JAX truncates 64-bit integers, such as hashed ids, to 32 bits, which would address
    other rows.

    Raises:
        OverflowError: when called with x64 off, if the batch has an integer of NumPy or Python that
            exceeds 32 bits.
    """

    def __init__(
        self,
        step_by: Callable[[Any], Callable[..., Any]],
        measure: Callable[..., Any] | None = None,
    ):
        """Without ``measure`` the step is ``step_by({})``.

        ``measure`` returns sizes for the arguments of a step, and ``step_by`` the step for these
        sizes, which are constants of the program. The first call with arguments of given shapes
        measures them. Before that call, and without arrays, ``step_by`` gets an empty dict.
        """
        functools.update_wrapper(self, step_by({}))
        self._step_by = step_by
        self._measure = measure and jax.jit(measure)
        self._measured: dict[Any, dict[Any, int]] = {}  # by the shapes of the arguments
        self._needs: dict[Any, Needs] = {}  # by the same, and what was measured
        self._jits: dict[Any, Any] = {}  # by what was measured, and the options of the compiler
        self._jit = self._jit_with({}, {})

    def __call__(self, params: Any, state: Any, *batch: Any, **extra_args: Any) -> Any:
        """Runs a step."""
        check_integers(batch)
        args = params, state, *batch
        if self._measure is not None and not is_tracing():
            key = _shapes(args, extra_args)
            if key not in self._measured:
                found = jax.device_get(self._measure(*args, **extra_args))
                self._measured[key] = {k: int(number) for k, number in found.items()}
        jitted, args, kwargs = self._prepared(to_row_major, args, extra_args)
        try:
            return jitted(*args, **kwargs)
        except ValueError as error:
            if "incompatible devices" in str(error):
                error.add_note(_PLACE)
            raise

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """Like ``trace`` of ``jax.jit``."""
        return self._jit.trace(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Like ``lower`` of ``jax.jit``; tables and slots are row-major, as in a call."""
        jitted, args, kwargs = self._prepared(with_row_major, args, kwargs)
        return jitted.lower(*args, **kwargs)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Like ``eval_shape`` of ``jax.jit``."""
        return self._jit.eval_shape(*args, **kwargs)

    def clear_cache(self) -> None:
        """Like ``clear_cache`` of ``jax.jit``."""
        for jitted in self._jits.values():
            jitted.clear_cache()

    def _cache_size(self) -> int:
        return sum(jitted._cache_size() for jitted in self._jits.values())

    def _jit_with(self, measured: Mapping[Any, int], options: Mapping[str, Any]) -> Any:
        key = tuple(measured.items()), tuple(options.items())
        if key not in self._jits:
            step = row_major(self._step_by(measured))
            self._jits[key] = jax.jit(
                step, donate_argnums=(0, 1), compiler_options=dict(options) or None
            )
        return self._jits[key]

    @functools.cached_property
    def _can_demand_layouts(self) -> bool:
        return can_demand_layouts()

    def _prepared(self, f: Callable[[Any], Any], args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
        """The function to call and its arguments; ``f`` converts those read by rows."""
        if not (self._measured or self._can_demand_layouts):
            return self._jit, args, kwargs
        shapes = _shapes(args, kwargs)
        measured = self._measured.get(shapes, {})
        jitted = self._jit_with(measured, {})
        if is_tracing() or not self._can_demand_layouts:
            return jitted, args, kwargs
        key = shapes, tuple(measured.items())
        if key not in self._needs:
            self._needs[key] = Needs.of(jitted.trace(*args, **kwargs))
        needs = self._needs[key]
        leaves, treedef = jax.tree.flatten((args, kwargs))
        for k in needs.by_rows:
            leaves[k] = f(leaves[k])
        return self._jit_with(measured, needs.options(leaves)), *treedef.unflatten(leaves)


def _shapes(args: Any, kwargs: Any) -> Any:
    leaves, treedef = jax.tree.flatten((args, kwargs))
    return treedef, tuple(getattr(x, "shape", ()) for x in leaves)
