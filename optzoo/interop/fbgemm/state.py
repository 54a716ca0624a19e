"""Reads and writes states of FBGEMM's split tables by name."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

from ...core.checks import check_transformation
from ...core.lines import from_lines, to_lines_of
from ...core.paths import leaves_with_path, map_with_path, path_name
from ...first_order.adagrad import AdagradSlots
from ...first_order.adam import AdamSlots
from ...first_order.counter_row_wise_adagrad import CounterSlots, MaxCounterState
from ...first_order.global_decay_row_wise_adagrad import GlobalDecaySlots
from ...first_order.partial_row_wise_adam import PartialRowWiseAdamSlots
from ...first_order.row_wise_adagrad import RowWiseAdagradSlots
from ...first_order.row_wise_lamb import PartialRowWiseLAMBSlots, RowWiseLAMBSlots
from ...first_order.row_wise_lars import RowWiseLARSSlots
from ...first_order.row_wise_rmsprop import RowWiseRMSPropSlots
from ...first_order.sparse_adamw import CountedAdamSlots
from ...state.storage.stored import pack_state_like, unpack_state
from ...state.types import LeafwiseState, NoSlots, map_nodes, nodes_of
from ...wrappers.ema_in_place import EMAInPlaceState
from ...wrappers.ensemble import EnsembleState
from ..tf1 import files

Tables = Mapping[str, str] | Callable[[str], str] | None

_COUNTED = {"prev_iter": "prev_iter", "row_counter": "row_counter"}
_MEANS = {"m": "momentum1", "v": "momentum2"}
# FBGEMM's names of the slots of each optimizer.
_NAMES: dict[type, dict[str, str]] = {
    AdagradSlots: {"accumulator": "momentum1"},
    AdamSlots: _MEANS,
    CountedAdamSlots: {**_MEANS, "row_counter": "row_counter"},
    CounterSlots: {"accumulator": "momentum1", **_COUNTED},
    GlobalDecaySlots: {"accumulator": "momentum1", "prev_iter": "prev_iter"},
    NoSlots: {},
    PartialRowWiseAdamSlots: _MEANS,
    PartialRowWiseLAMBSlots: _MEANS,
    RowWiseLAMBSlots: _MEANS,
    RowWiseAdagradSlots: {"accumulator": "momentum1"},
    RowWiseLARSSlots: {"momentum": "momentum1"},
    RowWiseRMSPropSlots: {"rms": "momentum1", "prev_iter": "prev_iter"},
}
# Names of `get_optimizer_state`, which are those of torch's optimizers.
_ALIASES = {
    "sum": "momentum1",
    "exp_avg": "momentum1",
    "momentum_buffer": "momentum1",
    "exp_avg_sq": "momentum2",
    "sparse_ema": "momentum2",
}
_PARTS = {"weights", "momentum1", "momentum2", *_COUNTED, *_ALIASES}
_COUNTING = (LeafwiseState, EMAInPlaceState, EnsembleState)


def load_fbgemm_state(
    tx: optax.GradientTransformation,
    params: Any,
    state_dict: str | os.PathLike[str] | Mapping[str, Any],
    tables: Tables = None,
) -> tuple[Any, Any]:
    """Reads tables, slots and the step from the state of FBGEMM's split tables.

    .. code-block:: python

        names = ["momentum1", "prev_iter", "row_counter"]  # what the optimizer has, in this order
        state_dict = {"iter": module.iter, "max_counter": module.max_counter}
        split = module.split_embedding_weights(), module.split_optimizer_states()
        for table, weights, states in zip(tables, *split):
            state_dict |= {f"{table}/weights": weights}
            state_dict |= {f"{table}/{name}": s for name, s in zip(names, states)}

    Example:
        >>> import jax.numpy as jnp, numpy as np, optzoo
        >>> tx = optzoo.row_wise_adagrad(0.1)
        >>> params = {"items": jnp.zeros((3, 2))}
        >>> saved = {"items/momentum1": np.full(3, 4.0, np.float32), "iter": np.array([1000])}
        >>> params, state = optzoo.interop.fbgemm.load_fbgemm_state(tx, params, saved)
        >>> print(optzoo.get_slot(state, "accumulator")["items"])
        [4. 4. 4.]

    Args:
        tx: an optimizer of :func:`optzoo.interop.fbgemm.fbgemm_optimizer`, or the equivalent
            optimizer of this library, alone or in optax's chains and masks and
            :func:`optzoo.param_groups`.
        params: the tables, or their shapes and dtypes (``jax.ShapeDtypeStruct``).
        state_dict: a mapping as above, or the path of an ``.npz`` file. A key is the name of a
            table and that of the array, joined by ``/`` or ``.``; mappings may be nested. The names
            of ``get_optimizer_state`` are also accepted: ``sum``, ``exp_avg``, ``exp_avg_sq``,
            ``momentum_buffer``, ``sparse_ema``. If no table has ``weights``, ``params`` must be the
            tables.
        tables: FBGEMM's names of the tables by the paths of the parameters, a mapping or a
            function; None if they are equal.

    Returns:
        The tables and the state of ``tx``, from which training resumes.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if anything is missing, left over or of another shape: the message lists all
            problems, and nothing is loaded.
    """
    check_transformation(tx=tx)
    given = _flat(_read(state_dict))
    like, params = params, from_lines(params)
    name_of = _names_of(tables)
    problems: list[str] = []
    used = {"max_counter"} & given.keys()

    def take(key: str, like: Any) -> Any:
        used.add(key)
        if key not in given:
            problems.append(f"missing: {key}")
            return like
        value = given[key]
        if value.shape != like.shape:
            problems.append(f"{key} must have shape {like.shape}, got {value.shape}")
            return like
        return jnp.asarray(value, like.dtype)

    def tree_of(theirs, tree):
        of_leaf = lambda path, a: take(f"{name_of(path_name(path))}/{theirs}", a)
        return map_with_path(of_leaf, tree)

    def with_slots(node):
        names = _slot_names(node)
        slots = {ours: tree_of(theirs, getattr(node.slots, ours)) for ours, theirs in names.items()}
        return node._replace(slots=node.slots._replace(**slots))

    def with_average(node):
        return node._replace(average=tree_of("momentum2", node.average))

    def with_max(node):
        top = given.get("max_counter", np.ones((), np.float32))
        return node._replace(max_counter=jnp.asarray(top, jnp.float32).reshape(()))

    if any(key.endswith("/weights") for key in given):
        params = tree_of("weights", params)
    start = tx.init(params)
    state = unpack_state(start)
    step = jnp.asarray(take("iter", np.zeros((), np.int32)))
    for kind in _COUNTING:
        state = map_nodes(kind, lambda node: node._replace(count=step), state)
    state = map_nodes(LeafwiseState, with_slots, state)
    state = map_nodes(EnsembleState, with_average, state)
    state = map_nodes(MaxCounterState, with_max, state)
    problems += [f"left over: {key}" for key in sorted(given.keys() - used)]
    if problems:
        raise ValueError("state_dict does not fit: " + "; ".join(problems))
    return to_lines_of(like, tx, (params, pack_state_like(start, state)))


def save_fbgemm_state(
    path: str | os.PathLike[str], params: Any, state: Any, tables: Tables = None
) -> None:
    """Writes :func:`optzoo.interop.fbgemm.fbgemm_state_dict` as an ``.npz`` file.

    Example:
        >>> import tempfile
        >>> import jax.numpy as jnp, numpy as np, optzoo
        >>> tx = optzoo.row_wise_adagrad(0.1)
        >>> params = {"items": jnp.ones((3, 2))}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     optzoo.interop.fbgemm.save_fbgemm_state(
        ...         f"{folder}/state.npz", params, tx.init(params)
        ...     )
        ...     print(sorted(np.load(f"{folder}/state.npz")))
        ['items/momentum1', 'items/weights', 'iter']

    Args:
        path: a path that ends in ``.npz``.
        params: the tables.
        state: the state of their optimizer.
        tables: as for :func:`load_fbgemm_state`.

    Raises:
        OSError: if the file cannot be written.
        ValueError: if ``path`` does not end in ``.npz``; as
            :func:`optzoo.interop.fbgemm.fbgemm_state_dict`.
    """
    _check_npz("path", path)
    files.write(path, fbgemm_state_dict(params, state, tables))


def fbgemm_state_dict(params: Any, state: Any, tables: Tables = None) -> dict[str, np.ndarray]:
    """The state of FBGEMM's split tables, to continue training in FBGEMM.

    .. code-block:: python

        for table, weights, states in zip(tables, *split):  # as in load_fbgemm_state
            weights.copy_(torch.tensor(saved[f"{table}/weights"]))
            for name, s in zip(names, states):
                s.copy_(torch.tensor(saved[f"{table}/{name}"]))
        module.iter.fill_(int(saved["iter"][0]))

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.row_wise_adagrad(0.1)
        >>> params = {"items": jnp.ones((3, 2))}
        >>> saved = optzoo.interop.fbgemm.fbgemm_state_dict(params, tx.init(params))
        >>> print({name: array.shape for name, array in saved.items()})
        {'iter': (1,), 'items/weights': (3, 2), 'items/momentum1': (3,)}

    Args:
        params: the tables.
        state: the state of their optimizer.
        tables: as for :func:`load_fbgemm_state`.

    Returns:
        ``weights`` and the slots of each table, such as ``"table/momentum1"``, and ``iter``, with
        ``max_counter`` if the optimizer has it.

    Raises:
        ValueError: if FBGEMM does not have the optimizer of the state, or if its parts counted
            different numbers of updates.
    """
    params, state = from_lines((params, unpack_state(state)))
    name_of = _names_of(tables)
    steps = {int(node.count) for kind in _COUNTING for node in nodes_of(kind, state)}
    if len(steps) != 1:
        raise ValueError(f"state must have one number of updates, got {sorted(steps)}")
    saved = {"iter": np.array([*steps], np.int64)}
    for theirs, tree in [("weights", params), *_trees(state)]:
        for path, a in leaves_with_path(tree):
            saved[f"{name_of(path_name(path))}/{theirs}"] = np.asarray(a)
    for node in nodes_of(MaxCounterState, state):
        saved["max_counter"] = np.asarray(node.max_counter).reshape(1)
    return saved


def _trees(state: Any) -> Iterator[tuple[str, Any]]:
    """FBGEMM's name of each slot, and its tree."""
    for node in nodes_of(LeafwiseState, state):
        for ours, theirs in _slot_names(node).items():
            yield theirs, getattr(node.slots, ours)
    for node in nodes_of(EnsembleState, state):
        yield "momentum2", node.average


def _slot_names(node: LeafwiseState) -> dict[str, str]:
    names = _NAMES.get(type(node.slots))
    if names is None or node.shared:
        raise ValueError(
            f"state: FBGEMM has no optimizer with {type(node.slots).__name__}"
            f"{' and ' + ', '.join(node.shared) if node.shared else ''}; it has those of "
            "optzoo.interop.fbgemm.fbgemm_optimizer"
        )
    return names


def _names_of(tables: Tables) -> Callable[[str], str]:
    if tables is None:
        return lambda path: path
    if callable(tables):
        return tables
    if not isinstance(tables, Mapping):
        raise TypeError(f"tables must be a mapping, a function or None, got {tables!r}")
    return lambda path: tables.get(path, path)


def _read(state_dict: Any) -> Mapping[str, Any]:
    if isinstance(state_dict, Mapping):
        return state_dict
    _check_npz("state_dict", state_dict)
    return files.read(state_dict)


def _check_npz(name: str, path: Any) -> None:
    if not os.fspath(path).endswith(".npz"):
        raise ValueError(f"{name} must be a file that ends in .npz, got {os.fspath(path)!r}")


def _flat(given: Mapping[str, Any], prefix: str = "") -> dict[str, np.ndarray]:
    """All arrays by table and name, such as ``table/momentum1``."""
    flat: dict[str, np.ndarray] = {}
    for key, value in given.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{name}/")
            continue
        array = np.asarray(value)
        if key in ("iter", "max_counter"):  # of the module; get_optimizer_state has it by table
            flat[key] = array.reshape(())
            continue
        table, part = name[: (cut := max(name.rfind("/"), name.rfind(".")))], name[cut + 1 :]
        if cut > 0 and part in _PARTS:
            name = f"{table}/{_ALIASES.get(part, part)}"
        flat[name] = array
    return flat
