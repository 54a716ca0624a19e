"""Training begun in TensorFlow 1 goes on here, and the other way round: its checkpoints."""

import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ...core.paths import path_name
from . import files
from .files import Checkpoint
from .names import (
    GLOBAL_STEP,
    Choices,
    Names,
    OptimizerName,
    exponent,
    is_exponent,
    join,
    parameter_names,
)
from .plan import Plan, concatenate, plan, plan_parameters, split, vector_shapes


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
    partial: bool = False,
) -> tuple[Any, Any]:
    """Reads parameters, slots, beta powers and the step from a checkpoint of TensorFlow 1.

    Args:
        tx: the optimizer, alone or in optax's chains, masks, partitions and this library's
            wrappers.
        params: parameters, or their shapes and dtypes (``jax.ShapeDtypeStruct``).
        checkpoint: the prefix of a checkpoint, such as ``model.ckpt-1000`` (TensorFlow reads it:
            ``pip install 'optzoo[tf1]'``), the path of an ``.npz`` file, or a mapping from names
            to arrays.
        names: what TensorFlow calls a parameter: None for its path here, joined by ``/``; a
            function of that; a dict from ours to TensorFlow's, for those that differ; or a list of
            pairs ``(pattern, replacement)``, which ``re.sub`` applies one after the other.
        optimizer_name: the ``name`` of the optimizer in TensorFlow (``Adam`` for ``w/Adam`` and
            ``w/Adam_1``), or a dict of them by patterns that match TensorFlow's whole names of
            parameters; None to find it in the checkpoint.
        scope: the variable scope in which the optimizer was made (``optimize`` in RETURNN), ``""``
            for none; None to find it in the checkpoint.
        variables: TensorFlow's names of single arrays of the state, by their paths in it:
            ``{"0/slots/m/w": "Variable_1", "0/shared/beta1_power": "beta1_power_2"}``.
        global_step: the number of updates made so far, or the name of the variable that has it;
            None for ``global_step``, and where there is none the beta powers tell.
        swapped: whether a ``swapping_saver`` wrote the checkpoint: averages, or the center, in the
            place of the parameters.
        partial: whether to keep what the checkpoint lacks as ``params`` and ``tx.init`` have it,
            and to ignore what else is in the checkpoint.

    Returns:
        The parameters and the state of ``tx``, from which training goes on.

    Raises:
        FileNotFoundError: if there is no such checkpoint.
        ImportError: if it takes TensorFlow to read it, and that is not installed.
        TypeError: if ``names`` is none of its forms.
        ValueError: if a file is damaged, if names are ambiguous, or if anything is missing, left
            over, or of another shape or dtype: the message lists all of it, nothing is loaded.
            Slots are converted to the dtype that the state keeps them in; parameters are not.
    """
    given, owners = files.read(checkpoint), parameter_names(params, names)
    choices = Choices(optimizer_name, scope, variables or {}, swapped, from_start=True)
    problems, used = _Problems(partial), set[str]()
    new_params = _fill(params, plan_parameters(owners, given, choices), given, problems, used)
    state = tx.init(params if problems.fatal else new_params)
    found = plan(owners, state, given, choices)
    problems.missing += found.problems
    there = {p: n for p, n in found.arrays.items() if n in given or p not in found.optional}
    new_state = _fill(state, there, given, problems, used, convert=True)
    values = _flats(found, new_state, given, problems, used)
    if found.steps:
        of_powers = _step_of_powers(state, found, given, problems)
        step = _step(global_step, given, used)
        if step is None:
            step = of_powers
        if step is None:
            step = next((values[path] for path in _counts(found) if path in values), None)
        if step is None:
            problems.missing.append("the number of updates: say global_step=")
        else:
            values |= dict.fromkeys(found.steps, step)
    problems.missing += [f"a variable for {path} of the state" for path in found.unmapped]
    problems.extra += sorted(given.keys() - used)
    problems.report()
    return new_params, _with(new_state, values)


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

    Args:
        path: the prefix of the checkpoint (TensorFlow writes it), or a path that ends in
            ``.npz``.
        params: the parameters.
        state: the state of their optimizer.
        names: as for :func:`load_tf1_state`.
        optimizer_name: the ``name`` of the optimizer in TensorFlow, as for
            :func:`load_tf1_state`; needed unless ``like`` tells.
        scope: as for :func:`load_tf1_state`.
        variables: as for :func:`load_tf1_state`.
        global_step: the number of updates made so far; None for the state's count.
        swapped: whether to put averages, or the center, in the place of the parameters, as a
            ``swapping_saver``.
        like: a checkpoint of the graph that is to go on. Names and dtypes are taken from it, and
            what is in it only is written again.

    Raises:
        ImportError: if it takes TensorFlow to write it, and that is not installed.
        TypeError: if ``names`` is none of its forms, or ``.npz`` cannot hold a dtype.
        ValueError: if a name is unknown or ambiguous, if the state has arrays that TensorFlow has
            not, if its counts differ, or if a shape is not that in ``like``.
    """
    saved = tf1_variables(
        params,
        state,
        names,
        optimizer_name=optimizer_name,
        scope=scope,
        variables=variables,
        global_step=global_step,
        swapped=swapped,
        like=like,
    )
    files.write(path, saved)


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
    """What :func:`save_tf1_state` writes, by TensorFlow's names; it describes the arguments."""
    given = None if like is None else files.read(like)
    owners = parameter_names(params, names)
    found = plan(owners, state, given, Choices(optimizer_name, scope, variables or {}, swapped))
    if found.unmapped or found.problems:
        raise ValueError(
            f"TensorFlow has no variables for {found.unmapped + found.problems}: optimizers of "
            "other libraries, and what ours keep beyond the originals, cannot be saved"
        )
    saved = dict(given or {})
    arrays, leaves = _by_path(state), _by_path(params)
    dtypes = {name: leaves[path_name(path)].dtype for path, name in owners.items()}
    for path, name in found.parameters.items():
        _put(saved, name, leaves[path], leaves[path].dtype)
    first = dict[str, str]()
    for path, name in found.arrays.items():
        other = first.setdefault(name, path)  # several of ours may share a power
        if other != path and not np.array_equal(arrays[path], arrays[other]):
            raise ValueError(f"{other} and {path} of the state differ, and both are {name}")
        # Slots are of the parameters' dtype there, all other variables float32.
        _put(saved, name, arrays[path], dtypes.get(found.owners.get(path, ""), np.float32))
    for flat in found.flats:
        for name, value in concatenate(flat, arrays).items():
            _put(saved, name, value, value.dtype)
    if found.steps:
        step = _common(found.steps, arrays) if global_step is None else _checked(global_step)
        _put(saved, GLOBAL_STEP, np.asarray(step), np.int64)
    return saved


class _Problems:
    """What does not fit, to be told all at once."""

    def __init__(self, partial: bool):
        self.partial = partial
        self.missing: list[str] = []
        self.extra: list[str] = []
        self.fatal: list[str] = []

    def report(self) -> None:
        lines = self.fatal
        if not self.partial:
            lines = [f"missing: {name}" for name in self.missing] + lines
            lines += [f"left over: {name}" for name in self.extra]
        if lines:
            hint = "" if self.fatal else "; partial=True passes over it"
            raise ValueError(
                f"the checkpoint does not fit, nothing is loaded{hint}:\n  " + "\n  ".join(lines)
            )


def _fill(
    tree: Any,
    variables: Mapping[str, str],
    given: Mapping[str, np.ndarray],
    problems: _Problems,
    used: set[str],
    convert: bool = False,
) -> Any:
    """The tree with arrays of the checkpoint, by the names of their paths."""

    def fill(path, old):
        name = variables.get(path_name(path))
        if name is None:
            return old
        used.add(name)
        if name not in given:
            problems.missing.append(f"{name}, for {path_name(path)}")
            return old
        new = given[name]
        if new.shape != jnp.shape(old):
            problems.fatal.append(
                f"shape: {name} is {new.shape} in the checkpoint, {jnp.shape(old)} here"
            )
            return old
        if not _fits(new.dtype, jnp.result_type(old), convert):
            problems.fatal.append(
                f"dtype: {name} is {new.dtype} in the checkpoint, {jnp.result_type(old)} here"
            )
            return old
        return _like(new, old)

    return jax.tree_util.tree_map_with_path(fill, tree)


def _fits(given: Any, wanted: Any, convert: bool) -> bool:
    if given == wanted or not convert:
        return given == wanted
    return jnp.issubdtype(given, jnp.floating)  # slots_dtype, averages, a float stale_counter


def _like(new: Any, old: Any) -> Any:
    """An array where and in the dtype in which the old one is."""
    new = jnp.asarray(new, jnp.result_type(old))
    return jax.device_put(new, old.sharding) if isinstance(old, jax.Array) else new


def _with(tree: Any, values: Mapping[str, Any]) -> Any:
    """The tree with some arrays replaced, by the names of their paths."""
    put = lambda path, old: _like(values.get(path_name(path), old), old)
    return jax.tree_util.tree_map_with_path(put, tree)


def _step(wanted: int | str | None, given: Mapping[str, np.ndarray], used: set[str]) -> int | None:
    """The global step, if the caller or the checkpoint tells."""
    if wanted is not None and not isinstance(wanted, str):
        used.update(name for name in given if name == GLOBAL_STEP)
        return _checked(int(wanted))
    whole = lambda n: given[n].shape == () and jnp.issubdtype(given[n].dtype, jnp.integer)
    name = GLOBAL_STEP if wanted is None else wanted
    found = [n for n in given if (n == name or n.endswith(f"/{name}")) and whole(n)]
    found = [name] if name in found else found
    if wanted is not None and not found:
        raise ValueError(f"global_step: the checkpoint has no whole number called {wanted!r}")
    if len(found) > 1:
        raise ValueError(f"global_step may be any of {found}: say which")
    used.update(found)
    return _checked(int(given[found[0]])) if found else None


def _checked(step: int) -> int:
    if not 0 <= step < 2**31:
        raise ValueError(f"global_step must be in [0, 2**31), got {step}")
    return step


def _step_of_powers(
    state: Any, found: Plan, given: Mapping[str, np.ndarray], problems: _Problems
) -> int | None:
    """The number of updates from ``beta1_power = beta1 ** (n + 1)``; of ``tx`` we know beta1."""
    steps = dict[str, int]()
    for path, base in jax.tree_util.tree_leaves_with_path(state):
        name = found.arrays.get(path_name(path), "")
        if not path_name(path).endswith("_power") or name not in given:
            continue
        number = exponent(given[name], base)
        if number is None:
            continue
        if is_exponent(number):
            steps[name] = round(number) - 1
        else:
            problems.fatal.append(
                f"betas: {name} is {given[name]}, no power of {base}, which tx has; load with the "
                "checkpoint's betas, and go on with others if you like: the state is the same"
            )
    if len(set(steps.values())) > 1:
        return None
    return next(iter(steps.values()), None)


def _counts(found: Plan) -> list[str]:
    """The paths of GGT's own counts."""
    return [join(flat.path, "count") for flat in found.flats]


def _flats(
    found: Plan, state: Any, given: Mapping[str, np.ndarray], problems: _Problems, used: set[str]
) -> dict[str, Any]:
    """What is in GGT's vectors, by path."""
    values, arrays = dict[str, Any](), _by_path(state)
    for flat in found.flats:
        new, wrong = split(flat, arrays, given)
        values |= new
        needed = vector_shapes(flat, arrays)
        problems.fatal += wrong
        problems.missing += [f"{name}, of GGT" for name in needed if name not in given]
        used.update(needed, [flat.flat_grad])
    return values


def _by_path(tree: Any) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {path_name(path): np.asarray(leaf) for path, leaf in leaves}


def _common(paths: list[str], arrays: Mapping[str, np.ndarray]) -> int:
    """The global step of replicas, who count their own steps, too; or the count of all links."""
    of_replicas = [path for path in paths if path.split("/")[-2:] == ["replicated", GLOBAL_STEP]]
    counts = {path: int(arrays[path]) for path in of_replicas[:1] or paths}
    if len(set(counts.values())) > 1:
        raise ValueError(f"the counts of the state differ: {counts}; say global_step=")
    return next(iter(counts.values()))


def _put(saved: dict[str, np.ndarray], name: str, value: np.ndarray, dtype: Any) -> None:
    """Adds a variable, in the shape and dtype of one that is there."""
    old = saved.get(name)
    if old is not None and old.shape != value.shape:
        raise ValueError(f"{name} is {old.shape} in like, {value.shape} here")
    saved[name] = value.astype(dtype if old is None else old.dtype)
