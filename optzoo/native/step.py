"""A step of an optimizer, the update and its addition, as native code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, get_abstract_mesh

from ..core.checks import check_flags, check_transformation
from ..core.compat import has_side_effects
from ..core.marks import marking
from ..core.paths import leaves_with_path, path_name
from ..core.rows import apply_not_none
from ..jaxprs.graph import read

InPlace = Literal["all", "slots"]
Native = bool | Literal["require"]  # whether a step is native, or must be


def native_step(
    tx: optax.GradientTransformation, *, in_place: InPlace = "all", required: bool = False
) -> Callable[..., tuple[Any, Any]]:
    r"""A step of an optimizer as native code, in one pass over the rows or over a leaf.

    It is equivalent to

    .. code-block:: python

        updates, state = tx.update(grads, state, params, **extra_args)
        params = optax.apply_updates(params, updates)

    with the same state, so both can be used in turn, and with the same checkpoints. Parameters with
    a gradient of None, which ``optax.apply_updates`` does not support, are unchanged. XLA's CPU
    compiler makes a loop for each array that it writes, and reads and writes rows in separate
    loops. This function compiles the operations of the update to a single loop: for the rows of a
    table (merge, read, compute, write), and for arrays that are updated elementwise. It also
    compiles norms of whole arrays that an update needs, and the branches of a ``cond``
    (:func:`optzoo.accumulate`, ``optax.apply_if_finite``) with the addition to the parameters; a
    branch with updates of zeros does not access parameters. XLA runs everything else, such as
    matrix operations and loops.

    On TPUs one Pallas kernel reads, computes and writes the rows of a table and its slots, if all
    of them have 32-bit elements and rows of several elements.

    If native code cannot run, XLA computes the step, with the same results up to rounding: on CPUs
    without llvmlite (the extra ``native``) or without Linux, on GPUs, under ``vmap`` and in
    derivatives.

    Use it in a ``jit`` that donates parameters and state. Otherwise they are copied.

    Example:
        >>> import jax, jax.numpy as jnp, optzoo
        >>> tx = optzoo.lazy_adam(0.1)
        >>> step = jax.jit(optzoo.native_step(tx), donate_argnums=(0, 1))
        >>> params = jnp.ones((3, 2))
        >>> grads = optzoo.SparseRows(jnp.array([2]), jnp.full((1, 2), 5.0), 3)
        >>> params, state = step(params, tx.init(params), grads)
        >>> print(params)
        [[1.  1. ]
         [1.  1. ]
         [0.9 0.9]]

    Args:
        tx: any optax transformation.
        in_place: ``"slots"`` if the parameters are not donated: new values of arrays are then
            written to new memory, without a copy of the old values. Rows are always updated in
            place.
        required: whether to raise an error if XLA has to compute a part of the update.

    Raises:
        TypeError: if ``tx`` is not a transformation, or ``required`` is not a bool.
        ValueError: if ``in_place`` has another value; at trace time, if ``state`` is not a state of
            ``tx`` for these parameters, or, with ``required``, if XLA would update some arrays.
        RuntimeError: with ``required``, if native code cannot run, or XLA computes the update: on
            platforms other than CPUs and TPUs, under ``vmap``, in derivatives, and for arrays that
            it divides over devices.

    Warns:
        RuntimeWarning: once, on a CPU where native code cannot run.

    Returns:
        ``step(params, state, grads, **extra_args) -> (params, state)``.
    """
    check_transformation(tx=tx)
    check_flags(required=required)
    if in_place not in ("all", "slots"):
        raise ValueError(f"in_place must be 'all' or 'slots', got {in_place!r}")
    tx = optax.with_extra_args_support(tx)

    def step(params, state, grads, **extra_args):
        def apply(params, state):
            updates, after = tx.update(grads, state, params, **extra_args)
            return (apply_not_none(params, updates), after), ()

        return natively(apply, params, state, in_place=in_place, required=required)[0]

    compiled = jax.jit(step)

    def call(params, state, grads, **extra_args):
        leaves = jax.tree.leaves((params, state, grads, extra_args))
        is_array = lambda x: isinstance(x, jax.Array | np.ndarray | np.generic | float | int)
        is_eager = not any(isinstance(x, jax.core.Tracer) for x in leaves)
        run = compiled if is_eager and all(map(is_array, leaves)) else step
        return run(params, state, grads, **extra_args)

    return call


def check_native(native: Any) -> None:
    """Raises ``ValueError`` unless ``native`` is one of :data:`Native`."""
    if native not in (False, True, "require"):
        raise ValueError(f"native must be False, True or 'require', got {native!r}")


def natively(
    f: Callable[[Any, Any], tuple[tuple[Any, Any], Any]],
    params: Any,
    state: Any,
    *,
    in_place: InPlace = "all",
    required: bool = False,
) -> tuple[tuple[Any, Any], Any]:
    """The results of ``f(params, state)``: the next parameters and state, and another result.

    :func:`native_step` describes ``in_place`` and ``required``. XLA may compute parts of the state
    whose type has an attribute ``left_to_xla``.
    """
    reason = _refusal(required)
    if reason is not None and required:
        raise RuntimeError(f"native code is required: {reason}")
    if reason is not None:
        return f(params, state)
    from .calls import require
    from .division import Division
    from .groups import read_program

    leaves, treedef = jax.tree.flatten((params, state))

    def of_leaves(*leaves):
        with marking():
            return f(*treedef.unflatten(leaves))

    closed, shapes = jax.make_jaxpr(of_leaves, return_shape=True)(*leaves)
    program = read_program(closed.jaxpr)
    is_same = jax.tree.structure(shapes[0]) == treedef
    before = program.inputs[len(closed.consts) :]
    kept = dict(zip(before, program.results, strict=False)) if is_same else None
    of_params = len(jax.tree.leaves(params)) if in_place == "slots" else 0
    has_effects = has_side_effects(closed.jaxpr)
    division = Division(program, kept, before[of_params:], has_effects)
    if required:
        names = list(zip(program.results, _names(shapes[0]), strict=False))
        _check_all(division, names, shapes[0])
        require(division.calls, dict(names))
    if not division.calls:
        return f(params, state)
    known = dict(zip(program.inputs, [*closed.consts, *leaves], strict=True))
    for node in division.nodes:
        node.run(known)
    results = [jnp.asarray(read(known, v)) for v in program.results]
    return jax.tree.structure(shapes).unflatten(results)


def _refusal(required: bool) -> str | None:
    """The reason why the traced program has no native code.

    The platform of the program is known when it is lowered, which raises an error if native code is
    required.
    """
    backend = jax.default_backend()
    if backend not in ("cpu", "tpu") and not required:
        return f"the default backend is {backend}, but native code supports only CPUs and TPUs"
    if AxisType.Explicit in (get_abstract_mesh().axis_types or ()):
        return "native code does not support explicit shardings"
    return None


def _names(shapes: tuple[Any, Any]) -> list[str]:
    """The names of the arrays of parameters and their state."""
    paths = [path for path, _ in leaves_with_path(shapes)]
    words = {0: "params", 1: "state"}
    return [f"{words[path[0].idx]} {path_name(path[1:])}".strip() for path in paths]


def _check_all(division: Any, names: Sequence[tuple[Any, str]], shapes: tuple[Any, Any]) -> None:
    """Raises ``ValueError`` unless native calls make all results that the update changes."""
    from .calls import listed

    is_any = lambda part: getattr(type(part), "left_to_xla", False)
    is_left = lambda part: jax.tree.map(lambda x: is_any(part) or 0 in x.shape, part)
    left = jax.tree.leaves(jax.tree.map(is_left, shapes, is_leaf=is_any))
    found = {
        name: division.reasons[v]
        for (v, name), may_be in zip(names, left, strict=True)
        if v in division.reasons and v.shape and v.maker is not None and not may_be
    }
    if found:
        raise ValueError(listed(found))
