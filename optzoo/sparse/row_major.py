"""Tables and slots whose rows a step changes keep each row in one piece of memory."""

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
    """The same step, where the arrays of which it changes some rows come out row-major.

    On a TPU an array is stored by columns unless the width of its rows is 1 or a multiple of 128.
    Rows are gathered and scattered row-major, so a step would copy such a table, and each slot of
    it, to that layout and back. The results of this function are row-major: the first step converts
    what is not yet (:func:`optzoo.rows.formats`), and each later step costs what the rows of its
    gradients cost. The price is memory: a row takes a multiple of 128 elements.

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

    On a TPU the arrays of which the step changes some rows are best row-major
    (:func:`optzoo.rows.row_major`). The steps of :func:`optzoo.minimize` and
    :func:`optzoo.sharded_minimize` convert those that are not, one by one; a step of your own
    converts all of them in its first program, with both layouts in memory. Arrays that are made,
    restored or moved with these formats need neither:

    .. code-block:: python

        shapes = jax.eval_shape(init), jax.eval_shape(lambda: tx.init(init()))
        of_params, of_state, *_ = optzoo.rows.formats(step, *shapes, *batch)
        params = jax.jit(init, out_shardings=of_params)()
        state = jax.jit(tx.init, out_shardings=of_state)(params)

    Nothing is run. Where layouts are not demanded (:func:`optzoo.rows.row_major`) this gives the
    shardings alone.

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
        step: a function compiled by ``jax.jit``, or a step of optzoo; another function is taken as
            it is.
        *args: its arguments: arrays, or a ``jax.ShapeDtypeStruct`` for each. A shape without a
            sharding is meant for the default device.
        **kwargs: further arguments of the step.

    Returns:
        A tree like ``args``. For an array of which rows are changed it has a ``Format`` of
        ``jax.experimental.layout``, for another one its sharding.

    Raises:
        TypeError: if ``step`` is not a function.
        ValueError: if an argument has a sharding over several devices, and another one has none.
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
                f"args[{path[0].idx}] '{path_name(path[1:])}' has no sharding, and another "
                "argument is on several devices: give its shape with the sharding of the array"
            )
        found[k] = _format(x, sharding)
    return jax.tree.structure(args).unflatten(found)


def compiler_options(step: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """The options of the compiler for a step that changes rows of tables on TPUs.

    The steps of :func:`optzoo.minimize` and :func:`optzoo.sharded_minimize` are compiled with them.
    For a step of your own:

    .. code-block:: python

        step = optzoo.rows.row_major(step)
        options = optzoo.rows.compiler_options(step, params, state, *batch)
        step = jax.jit(step, donate_argnums=(0, 1), compiler_options=options)

    - ``xla_tpu_enable_async_all_to_all``, if the step has an all-to-all, such as those of
      :func:`optzoo.sharded.lookup`: without it a TPU does nothing else while arrays are exchanged.
      The compiler does not have it for slices of v5e of more than 16 chips.
    - ``xla_tpu_experimental_max_padding_gib``, for tables of more than a million rows that are less
      than 128 elements wide: in a loop or a branch, XLA stores an array by columns if by rows its
      padding is large. Then a step with row-major tables (:func:`optzoo.rows.row_major`) copies
      them whole. This allows as much padding as they have, in whole GiB.

    Nothing is run. A function with options can be called in no other function that is compiled.

    Example:
        >>> import jax, jax.numpy as jnp, optzoo
        >>> step = lambda x, ids: x + optzoo.SparseRows(ids, jnp.ones((3, 2)), 6)
        >>> optzoo.rows.compiler_options(step, jnp.ones((6, 2)), jnp.arange(3))  # for a CPU
        {}

    Args:
        step: a function compiled by ``jax.jit``, or a step of optzoo; another function is taken as
            it is.
        *args: its arguments: arrays, or a ``jax.ShapeDtypeStruct`` for each. Those on a TPU have a
            sharding over its devices.
        **kwargs: further arguments of the step.

    Returns:
        For ``jax.jit(..., compiler_options=...)`` or ``lowered.compile(...)``. It is empty for
        other devices. GPUs need no option: there an all-to-all runs beside other operations anyway.

    Raises:
        TypeError: if ``step`` is not a function.
    """
    return _needs(step, args, kwargs).options(jax.tree.leaves((args, kwargs)))


class Needs(NamedTuple):
    """What a step needs of its arguments and of the compiler.

    Attributes:
        by_rows: the leaves of its arguments that need to be row-major, by their positions; and
            whether their rows are changed in a loop or a branch.
        exchanges: whether devices exchange arrays.
    """

    by_rows: Mapping[int, bool]
    exchanges: bool

    @classmethod
    def of(cls, traced: Any) -> Needs:
        """The same of a traced step."""
        graph = Graph.of(traced.jaxpr.jaxpr, traced.jaxpr.consts)
        origins = {of.position: of.is_inside for of in changed_rows(graph) if of is not None}
        by_rows = {k: x for k, x in origins.items() if can_be_row_major(graph.inputs[k].aval)}
        return cls(by_rows, contains(traced.jaxpr.jaxpr, "all_to_all"))

    def options(self, leaves: Sequence[Any]) -> dict[str, Any]:
        """The options of the compiler, for these leaves of the arguments."""
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
    """Whether these arrays are on TPUs that have asynchronous all-to-alls.

    The compiler refuses them on slices of v5e of more than 16 chips (libtpu 0.0.52).
    """
    devices = set().union(*(x.sharding.device_set for x in arrays if _is_on_tpu(x)))
    kinds = {device.device_kind for device in devices}
    return bool(devices) and (len(devices) <= 16 or kinds.isdisjoint({"TPU v5 lite", "TPU v5e"}))


def _padding(x: Any) -> int:
    """The bytes of padding that a row-major array has on a TPU; 0 if it is on no TPU."""
    if not _is_on_tpu(x):
        return 0
    *rows, width = x.sharding.shard_shape(x.shape)
    return math.prod(rows) * (-width % 128) * x.dtype.itemsize


def _needs(step: Callable[..., Any], args: Any, kwargs: Any) -> Needs:
    """What a step needs where its program may be for a TPU; elsewhere nothing."""
    check_function(step=step)
    jitted: Any = step if hasattr(step, "trace") else jax.jit(step)
    traced = jitted.trace(*args, **kwargs)
    return Needs.of(traced) if can_demand_layouts() else Needs({}, False)


def to_row_major(x: Any) -> Any:
    """An array that is row-major; one in another layout is deleted, as if it were donated."""
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
    """A shape in the layout that :func:`to_row_major` makes.

    Arrays stay as they are, and shapes that have a layout, or no sharding.
    """
    if getattr(x, "sharding", None) is None or x.format.layout is not None:
        return x
    at = _format(x, x.sharding)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at, weak_type=x.weak_type)


def _format(x: Any, sharding: Any) -> Format:
    """That of a row-major array."""
    return Format(Layout(tuple(range(x.ndim))), sharding)


def can_be_row_major(x: Any) -> bool:
    """Whether an array has rows of several elements, and a TPU has such elements.

    Those of 64 bits are split by the compiler for TPUs, which takes no demand of a layout there.
    """
    return x.ndim > 1 and x.size > x.shape[0] and x.dtype.itemsize <= 4
