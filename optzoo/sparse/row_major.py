"""Row-major layouts of the tables and slots whose rows a step changes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental.layout import Format, Layout
from jax.sharding import SingleDeviceSharding

from ..core.checks import check_function
from ..core.compat import can_demand_layouts, in_row_major
from ..core.paths import leaves_with_path, path_name
from ..jaxprs.changed_rows import changed_rows
from ..jaxprs.equations import contains
from ..jaxprs.graph import Graph


def row_major(step: Callable[..., Any]) -> Callable[..., Any]:
    """The same step, whose results are row-major where it changes rows of arrays.

    On a TPU an array is stored by columns unless the width of its rows is 1 or a multiple of 128.
    Rows are gathered and scattered row-major, so a step would copy such a table, and each of its
    slots, to that layout and back. With this function the results are row-major: the first step
    converts arrays in other layouts (:func:`optzoo.rows.formats`), and the cost of later steps
    scales with the rows of their gradients. The price is memory: rows are padded to a multiple of
    128 elements.

    :func:`optzoo.minimize` and :func:`optzoo.sharded_minimize` do this themselves. Use this
    function in a step of your own, inside of its ``jit``. It has no effect on CPUs and GPUs, where
    all arrays are row-major; without a TPU and libtpu; and before JAX 0.11.1, where results with a
    required layout cannot reuse the memory of donated arguments.

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
    check_function(step=step)
    inner = jax.jit(step)

    @functools.wraps(step)
    def wrapped(*args, **kwargs):
        leaves, treedef = jax.tree.flatten(inner(*args, **kwargs))
        program = jax.make_jaxpr(inner)(*args, **kwargs)  # the step is not traced again
        origins = changed_rows(Graph.of(program.jaxpr, program.consts))
        in_rows = lambda x, of: x if of is None or not can_be_row_major(x) else in_row_major(x)
        return treedef.unflatten(map(in_rows, leaves, origins))

    return wrapped


def formats(step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The layout and sharding that a step needs of each of its arguments.

    On a TPU, arrays whose rows a step changes should be row-major (:func:`optzoo.rows.row_major`).
    The steps of :func:`optzoo.minimize` and :func:`optzoo.sharded_minimize` convert arrays in other
    layouts one by one; a step of your own converts all of them in its first program, with both
    layouts in memory. Arrays that are created, restored or moved with these formats need no
    conversion:

    .. code-block:: python

        shapes = jax.eval_shape(init), jax.eval_shape(lambda: tx.init(init()))
        of_params, of_state, *_ = optzoo.rows.formats(step, *shapes, *batch)
        params = jax.jit(init, out_shardings=of_params)()
        state = jax.jit(tx.init, out_shardings=of_state)(params)

    Nothing is run. Where layouts are not required (see :func:`optzoo.rows.row_major`), only the
    shardings are returned.

    Example:
        >>> import jax, jax.numpy as jnp, optzoo
        >>> tx = optzoo.lazy_adam(0.1)
        >>> step = optzoo.minimize(lambda x, ids: jnp.sum(optzoo.lookup(x, ids) ** 2), tx)
        >>> params, ids = jnp.ones((6, 2)), jnp.arange(3)
        >>> of_params, of_state, _ = optzoo.rows.formats(step, params, tx.init(params), ids)
        >>> params = jax.device_put(params, of_params)
        >>> state = jax.jit(tx.init, out_shardings=of_state)(params)
        >>> print(optzoo.get_slot(state, "m").shape)
        (6, 2)

    Args:
        step: a function compiled by ``jax.jit``, or a step of optzoo; another function is traced
            unchanged.
        *args: the arguments: arrays, or a ``jax.ShapeDtypeStruct`` for each. A shape without a
            sharding is placed on the default device.
        **kwargs: further arguments of the step.

    Returns:
        A tree like ``args``: a ``Format`` of ``jax.experimental.layout`` for each array whose rows
        are changed, and the sharding of each other array.

    Raises:
        TypeError: if ``step`` is not a function.
        ValueError: if one argument has a sharding over several devices and another argument has no
            sharding.
    """
    by_rows = _needs(step, args, kwargs).by_rows
    leaves = leaves_with_path(args)
    found = [getattr(x, "sharding", None) for _, x in leaves]
    if not any(s is not None and len(s.device_set) > 1 for s in found):
        here = SingleDeviceSharding(jax.devices()[0])
        found = [here if s is None else s for s in found]
    for k, ((path, x), sharding) in enumerate(zip(leaves, found, strict=True)):
        if k not in by_rows:
            continue
        if sharding is None:
            raise ValueError(
                f"args[{path[0].idx}] '{path_name(path[1:])}' has no sharding, but another "
                "argument is on several devices: give the ShapeDtypeStruct the sharding of the "
                "array"
            )
        found[k] = _format(x, sharding)
    return jax.tree.structure(args).unflatten(found)


def compiler_options(step: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """The compiler options for a step that changes rows of tables on TPUs.

    The steps of :func:`optzoo.minimize` and :func:`optzoo.sharded_minimize` are compiled with them.
    For a step of your own:

    .. code-block:: python

        step = optzoo.rows.row_major(step)
        options = optzoo.rows.compiler_options(step, params, state, *batch)
        step = jax.jit(step, donate_argnums=(0, 1), compiler_options=options)

    - ``xla_tpu_enable_async_all_to_all``, if the step has an all-to-all, as in
      :func:`optzoo.sharded.lookup`: without it, a TPU does not compute while arrays are exchanged.
      The compiler does not support it for v5e slices of more than 16 chips.
    - ``xla_tpu_experimental_max_padding_gib``, for tables of more than a million rows that are less
      than 128 elements wide: in a loop or a branch, XLA stores an array by columns if a row-major
      layout has much padding, so that a step with row-major tables (:func:`optzoo.rows.row_major`)
      copies them. The option permits their padding, in whole GiB.

    Nothing is run. A function compiled with options cannot be called in another compiled function.

    Example:
        >>> import jax, jax.numpy as jnp, optzoo
        >>> step = lambda x, ids: x + optzoo.SparseRows(ids, jnp.ones((3, 2)), 6)
        >>> optzoo.rows.compiler_options(step, jnp.ones((6, 2)), jnp.arange(3))  # for a CPU
        {}

    Args:
        step: a function compiled by ``jax.jit``, or a step of optzoo; another function is traced
            unchanged.
        *args: the arguments: arrays, or a ``jax.ShapeDtypeStruct`` for each, which for a TPU has a
            sharding over its devices.
        **kwargs: further arguments of the step.

    Returns:
        A dict for ``jax.jit(..., compiler_options=...)`` or ``lowered.compile(...)``. It is empty
        for other devices. GPUs need no option, since their all-to-alls are asynchronous by default.

    Raises:
        TypeError: if ``step`` is not a function.
    """
    return _needs(step, args, kwargs).options(jax.tree.leaves((args, kwargs)))


class Needs(NamedTuple):
    """The layouts and compiler options that a step needs.

    Attributes:
        by_rows: the indices of the leaves of its arguments that must be row-major, and whether
            their rows are changed in a loop or a branch.
        exchanges: whether devices exchange arrays.
    """

    by_rows: Mapping[int, bool]
    exchanges: bool

    @classmethod
    def of(cls, traced: Any) -> Needs:
        """The needs of a traced step."""
        graph = Graph.of(traced.jaxpr.jaxpr, traced.jaxpr.consts)
        origins = {of.position: of.is_inside for of in changed_rows(graph) if of is not None}
        by_rows = {k: x for k, x in origins.items() if can_be_row_major(graph.inputs[k].aval)}
        return cls(by_rows, contains(traced.jaxpr.jaxpr, "all_to_all"))

    def options(self, leaves: Sequence[Any]) -> dict[str, Any]:
        """The compiler options for these leaves of the arguments."""
        options = dict[str, Any]()
        if self.exchanges and _can_exchange_beside(leaves):
            options["xla_tpu_enable_async_all_to_all"] = "true"
        # Not where no loop or branch changes rows: XLA would pad other arrays, too.
        inside = [leaves[k] for k, is_inside in self.by_rows.items() if is_inside]
        gib = max(map(_padding, inside), default=0) / 2**30
        # By default libtpu 0.0.52 takes columns from a padding of 0.4 GiB on, at width 64.
        if gib > 0.25:
            options["xla_tpu_experimental_max_padding_gib"] = math.ceil(gib)
        return options


def _is_on_tpu(x: Any) -> bool:
    sharding = getattr(x, "sharding", None)
    return sharding is not None and next(iter(sharding.device_set)).platform == "tpu"


def _can_exchange_beside(arrays: Sequence[Any]) -> bool:
    """Whether these arrays are on TPUs that support asynchronous all-to-alls.

    The compiler refuses them on v5e slices of more than 16 chips (libtpu 0.0.52).
    """
    devices = set().union(*(x.sharding.device_set for x in arrays if _is_on_tpu(x)))
    kinds = {device.device_kind for device in devices}
    return bool(devices) and (len(devices) <= 16 or kinds.isdisjoint({"TPU v5 lite", "TPU v5e"}))


def _padding(x: Any) -> int:
    """The bytes of padding of a row-major array on a TPU; 0 on other devices."""
    if not _is_on_tpu(x):
        return 0
    *rows, width = x.sharding.shard_shape(x.shape)
    return math.prod(rows) * (-width % 128) * x.dtype.itemsize


def _needs(step: Callable[..., Any], args: Any, kwargs: Any) -> Needs:
    """The needs of a step whose program may run on a TPU; empty elsewhere."""
    check_function(step=step)
    jitted: Any = step if hasattr(step, "trace") else jax.jit(step)
    traced = jitted.trace(*args, **kwargs)
    return Needs.of(traced) if can_demand_layouts() else Needs({}, False)


def to_row_major(x: Any) -> Any:
    """The array in row-major layout; the original is deleted if it had another layout."""
    is_array = isinstance(x, jax.Array)
    if is_array and (x.is_deleted() or _is_row_major(x)):
        return x
    # An array that may be on any device still may be, or the next step would be compiled again.
    sharding = x.sharding if is_array and x.committed else None
    found = jax.block_until_ready(jax.jit(in_row_major, out_shardings=sharding)(x))
    if is_array:
        x.delete()
    return found


def _is_row_major(x: Any) -> bool:
    return x.format.layout.major_to_minor == tuple(range(x.ndim))


def with_row_major(x: Any) -> Any:
    """The shape with the layout of :func:`to_row_major`.

    Arrays, and shapes that have a layout or no sharding, are returned unchanged.
    """
    if getattr(x, "sharding", None) is None or x.format.layout is not None:
        return x
    at = _format(x, x.sharding)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at, weak_type=x.weak_type)


def _format(x: Any, sharding: Any) -> Format:
    """The format of a row-major array."""
    return Format(Layout(tuple(range(x.ndim))), sharding)


def can_be_row_major(x: Any) -> bool:
    """Whether a TPU can store an array row-major: its rows have several elements of a native type.

    The compiler for TPUs splits 64-bit elements, and then does not accept a required layout.
    """
    return x.ndim > 1 and x.size > x.shape[0] and x.dtype.itemsize <= 4
