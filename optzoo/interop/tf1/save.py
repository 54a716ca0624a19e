"""Saves parameters and the state of their optimizer as a checkpoint of TensorFlow 1."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...core.lines import from_lines
from ...core.paths import arrays_by_path
from ...state.deferred import check_current
from ...state.storage.stored import unpack_state
from . import files
from .build import build_variables
from .check import check_save
from .files import Checkpoint
from .names import Choices, Names, OptimizerName, name_parameters, regular
from .parts import Parts, Regular, put_together
from .plan import make_plan
from .steps import check_step, step_of_state


def save_tf1_state(
    path: str | os.PathLike[str],
    params: Any,
    state: Any,
    names: Names = None,
    *,
    optimizer_name: OptimizerName = None,
    scope: str | None = None,
    variables: Mapping[str, str] | None = None,
    global_step: int | None = None,
    swapped: bool = False,
    like: Checkpoint | None = None,
) -> None:
    """Writes a checkpoint that ``tf.train.Saver`` of TensorFlow 1 restores.

    If the process is killed, the old or the new checkpoint remains, also where TensorFlow writes
    it, and the next save to the same path removes temporary files. This does not hold for power
    failures.

    Example:
        >>> import tempfile
        >>> import jax.numpy as jnp, numpy as np, optzoo
        >>> tx = optzoo.momentum(0.1, 0.9)
        >>> params = {"w": jnp.ones(2)}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = f"{folder}/model.npz"
        ...     optzoo.save_tf1_state(path, params, tx.init(params), optimizer_name="Momentum")
        ...     print(sorted(np.load(path)))
        ['global_step', 'w', 'w/Momentum']

    Args:
        path: the prefix of the checkpoint (TensorFlow writes it), or a path that ends in ``.npz``.
            Missing folders are created.
        params: the parameters.
        state: the state of their optimizer.
        names: as for :func:`load_tf1_state`.
        optimizer_name: the ``name`` of the optimizer in TensorFlow, as for :func:`load_tf1_state`;
            needed unless ``like`` is given.
        scope: as for :func:`load_tf1_state`.
        variables: as for :func:`load_tf1_state`.
        global_step: the number of updates so far; None for the state's count: the global step of
            replicas, otherwise the outermost count.
        swapped: whether to write averages, or the center, instead of the parameters, as a
            ``swapping_saver``.
        like: a checkpoint of the graph that will continue. Names, dtypes and slices of parts are
            read from it, and other variables are copied.

    Raises:
        ImportError: if writing needs TensorFlow, and it is not installed.
        OSError: if the files cannot be written.
        TypeError: if ``names`` has another form, ``global_step`` is not an int, or ``.npz`` does
            not support a dtype.
        ValueError: if ``path`` is empty or a folder, if a name is unknown or ambiguous, if the
            state has arrays without a variable in TensorFlow, if its outermost counts differ, if
            rows are deferred (:func:`optzoo.rows.catch_up`), if a shape differs from ``like``, or
            if an ``.npz`` file would contain a part of a variable.
    """
    choices = Choices(optimizer_name, scope, variables or {}, swapped)
    saved, file = _build(params, state, names, choices, global_step, like)
    files.write(path, saved if file is None else file.as_stored(saved))


def tf1_variables(
    params: Any,
    state: Any,
    names: Names = None,
    *,
    optimizer_name: OptimizerName = None,
    scope: str | None = None,
    variables: Mapping[str, str] | None = None,
    global_step: int | None = None,
    swapped: bool = False,
    like: Checkpoint | None = None,
) -> dict[str, np.ndarray]:
    """The variables that :func:`save_tf1_state` writes, by name; it describes the arguments.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.adam(0.1)
        >>> params = {"w": jnp.ones(2)}
        >>> print(
        ...     sorted(
        ...         optzoo.interop.tf1.tf1_variables(params, tx.init(params), optimizer_name="Adam")
        ...     )
        ... )
        ['beta1_power', 'beta2_power', 'global_step', 'w', 'w/Adam', 'w/Adam_1']
    """
    choices = Choices(optimizer_name, scope, variables or {}, swapped)
    saved, file = _build(params, state, names, choices, global_step, like)
    stored = saved if file is None else file.as_stored(saved)
    arrays = dict[str, np.ndarray]()
    for name, value in stored.items():
        if isinstance(value, Parts) and not value.is_complete:
            raise ValueError(f"like has {name} in parts: use save_tf1_state, which can write parts")
        arrays[name] = put_together(value) if isinstance(value, Parts) else value
    return arrays


def _build(
    params: Any,
    state: Any,
    names: Names,
    choices: Choices,
    global_step: int | None,
    like: Checkpoint | None,
) -> tuple[dict[str, np.ndarray], Regular | None]:
    """The variables to save, and the checkpoint ``like``, if given."""
    check_current(state, "save_tf1_state")
    params, state = from_lines((params, state))
    owners = name_parameters(params, names)
    # Read.
    file = None if like is None else regular(files.read(like), owners, choices)
    given = {} if file is None else file.variables
    # Plan.
    unpacked = unpack_state(state)
    plan = make_plan(owners, unpacked, file, choices)
    # Check.
    arrays = arrays_by_path(unpacked)
    check_save(plan, arrays, given)
    step = step_of_state(plan.counts, arrays) if global_step is None else check_step(global_step)
    # Build.
    return build_variables(plan, step, given, arrays_by_path(params), arrays), file
