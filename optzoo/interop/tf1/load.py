"""Loads a checkpoint of TensorFlow 1 into parameters and the state of their optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import optax

from ...core.lines import from_lines, to_lines_of
from ...core.paths import arrays_by_path
from ...state.storage.stored import unpack_state
from . import files
from .build import build_state
from .check import check_load
from .files import Checkpoint
from .names import Choices, Names, OptimizerName, name_parameters, regular
from .plan import make_plan
from .steps import plan_steps


def load_tf1_state(
    tx: optax.GradientTransformation,
    params: Any,
    checkpoint: Checkpoint,
    names: Names = None,
    *,
    optimizer_name: OptimizerName = None,
    scope: str | None = None,
    variables: Mapping[str, str] | None = None,
    global_step: int | str | None = None,
    swapped: bool = False,
    ignore: Sequence[str] = (),
    partial: bool = False,
) -> tuple[Any, Any]:
    """Reads parameters, slots, beta powers and the step from a checkpoint of TensorFlow 1.

    Example:
        >>> import jax.numpy as jnp, numpy as np, optzoo
        >>> tx = optzoo.momentum(0.1, 0.9)
        >>> checkpoint = {"w": [1.0, 2.0], "w/Momentum": [3.0, 4.0]}
        >>> checkpoint = {name: np.array(value, np.float32) for name, value in checkpoint.items()}
        >>> checkpoint["global_step"] = np.array(7)
        >>> params, state = optzoo.load_tf1_state(tx, {"w": jnp.zeros(2)}, checkpoint)
        >>> print(params["w"], optzoo.get_slot(state, "momentum")["w"])
        [1. 2.] [3. 4.]

    Args:
        tx: the optimizer, alone or in optax's chains, masks, partitions and this library's
            wrappers.
        params: the parameters, or their shapes and dtypes (``jax.ShapeDtypeStruct``).
        checkpoint: the prefix of a checkpoint, such as ``model.ckpt-1000``, or a folder, for its
            latest checkpoint (both need TensorFlow: ``pip install '.[tf1]'`` in a clone); the path
            of an ``.npz`` file; or a mapping from names to arrays.
        names: TensorFlow's names of the parameters: None for their paths, joined by ``/``; a
            function of this name; a dict from these names to TensorFlow's, for names that differ;
            or a list of pairs ``(pattern, replacement)``, applied by ``re.sub`` one after the
            other.
        optimizer_name: the ``name`` of the optimizer in TensorFlow (``Adam`` for ``w/Adam`` and
            ``w/Adam_1``), or a dict of these names by patterns that match TensorFlow's whole names
            of parameters; None to find it in the checkpoint.
        scope: the variable scope in which the optimizer was created (``optimize`` in RETURNN),
            ``""`` for none; None to find it in the checkpoint.
        variables: TensorFlow's names of single arrays of the state, by their paths in the state:
            ``{"0/slots/m/w": "Variable_1", "0/shared/beta1_power": "beta1_power_2"}``.
        global_step: the number of updates so far, or the name of its variable; None for the
            variable ``global_step`` or, if it is missing, the number computed from the beta powers.
            For a wrapper such as ``accumulate``, the count of the inner optimizer is computed from
            the beta powers. If step and powers differ, as after a restart of the optimizer, the
            number must be given.
        swapped: whether a ``swapping_saver`` wrote the checkpoint, with averages or the center
            instead of the parameters.
        ignore: the names of variables that may be left over, such as ``["*/moving_mean"]``: ``*``
            matches any string, including ``/``, and ``?`` any character. No other variable may be
            left over or missing.
        partial: whether to keep the values of ``params`` and ``tx.init`` for missing variables and
            to ignore variables that are left over. One warning lists both.

    Warns:
        UserWarning: with ``partial``, if anything is missing or left over.

    Returns:
        The parameters and the state of ``tx``, from which training resumes.

    Raises:
        FileNotFoundError: if there is no such checkpoint.
        ImportError: if reading needs TensorFlow, and it is not installed.
        TypeError: if ``names`` has another form, ``ignore`` is a string, or ``global_step`` is not
            an int.
        ValueError: if a file is damaged or was written by ``tf.train.Checkpoint``, if the beta
            powers are not powers of the betas or contradict the step, if ``partial`` finds nothing,
            if names are ambiguous, or if anything is missing, left over, or of another shape or
            dtype: the message lists all problems, and nothing is loaded. Slots are converted to the
            dtypes of the state; parameters are not converted.
    """
    # Read.
    stored = files.read(checkpoint)
    # Plan. Averages and centers start as copies of the parameters, so the state is made again from
    # the loaded ones. Its structure, its shapes and its betas are the same before.
    choices = Choices(optimizer_name, scope, variables or {}, swapped, is_initial=True)
    like, params = params, from_lines(params)
    start = unpack_state(tx.init(params))
    owners = name_parameters(params, names)
    file = regular(stored, owners, choices)
    plan = make_plan(owners, start, file, choices)
    steps = plan_steps(plan, arrays_by_path(start), file.variables, global_step)
    del start, stored  # before the state is made again
    # Check.
    check_load(plan, steps, file, ignore, partial=partial)
    # Build.
    return to_lines_of(like, tx, build_state(plan, steps, file.variables, params, tx.init))
