"""Reads states of torch's optimizers by name, without importing torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import optax

from ..core.paths import leaves_with_path, path_name, resolve_mask, value_by_name
from ..first_order.adagrad import AdagradSlots
from ..first_order.adam import AdamSlots
from ..first_order.momentum import MomentumSlots
from ..first_order.rmsprop import (
    CenteredRMSPropSlots,
    PlainCenteredRMSPropSlots,
    PlainRMSPropSlots,
    RMSPropSlots,
)
from ..second_order.muon import MuonSlots
from ..state.types import NoSlots
from .fill import Source, fill_state, kind_of, only_count

__all__ = ["from_torch"]

_MEANS = {
    AdamSlots: {"m": "exp_avg", "v": "exp_avg_sq"},
    optax.ScaleByAdamState: {"mu": "exp_avg", "nu": "exp_avg_sq"},
}
_BUFFER = {"momentum": "momentum_buffer"}
_TRACE = {optax.TraceState: {"trace": "momentum_buffer"}}
_CENTERED = {"rms": "square_avg", "mg": "grad_avg"}
# For each class of torch the options of its groups that only it has, and its name of each slot.
_CLASSES: dict[str, tuple[set[str], dict[type, dict[str, str]]]] = {
    "SGD": ({"momentum", "dampening", "nesterov"}, {MomentumSlots: _BUFFER, **_TRACE}),
    "Adam or AdamW": ({"betas", "eps", "weight_decay", "amsgrad"}, _MEANS),
    "Adagrad": ({"lr_decay", "initial_accumulator_value"}, {AdagradSlots: {"accumulator": "sum"}}),
    "RMSprop": (
        {"alpha", "eps", "centered", "momentum"},
        {
            PlainRMSPropSlots: {"rms": "square_avg"},
            RMSPropSlots: {"rms": "square_avg", **_BUFFER},
            PlainCenteredRMSPropSlots: _CENTERED,
            CenteredRMSPropSlots: {**_CENTERED, **_BUFFER},
            optax.ScaleByRmsState: {"nu": "square_avg"},
            optax.ScaleByRStdDevState: {"nu": "square_avg", "mu": "grad_avg"},
            **_TRACE,
        },
    ),
    "Muon": ({"ns_steps", "ns_coefficients"}, {MuonSlots: {"momentum_buffer": "momentum_buffer"}}),
    "SparseAdam": ({"betas", "eps"}, _MEANS),  # and no other: it has to come last
}
_OF_SPARSE_ADAM = {"lr", "initial_lr", "betas", "eps", "maximize", "params", "param_names"}
_KNOWN = {NoSlots, *(kind for _, slots in _CLASSES.values() for kind in slots)}
_RMSPROP = (RMSPropSlots, CenteredRMSPropSlots, PlainRMSPropSlots, PlainCenteredRMSPropSlots)


class _Parameter(NamedTuple):
    """A parameter of torch's optimizer."""

    kind: str  # a key of _CLASSES
    options: Mapping[str, Any]  # of its group
    state: Mapping[str, Any]


def from_torch(
    state_dict: Mapping[str, Any],
    tx: optax.GradientTransformation,
    params: Any,
    names: Sequence[str] | Mapping[str, str] | None = None,
    *,
    transpose: Any = None,
    count: int | None = None,
) -> Any:
    """Converts a state of a torch optimizer to a state of ``tx``, to continue the run.

    Supported are SGD, Adam, AdamW, SparseAdam, Adagrad, RMSprop and Muon.
    ``docs/from_optax_and_torch.md`` lists the corresponding optimizers and arguments.

    Example:
        >>> import jax.numpy as jnp, numpy as np, optzoo
        >>> group = {"lr": 0.1, "momentum": 0.9, "dampening": 0, "nesterov": False, "params": [0]}
        >>> buffer = np.array([[1.0, 2.0, 3.0]])  # or a tensor
        >>> state_dict = {"state": {0: {"momentum_buffer": buffer}}, "param_groups": [group]}
        >>> params, tx = {"head": {"kernel": jnp.ones((3, 1))}}, optzoo.momentum(0.1, 0.9)
        >>> state = optzoo.interop.torch.from_torch(
        ...     state_dict, tx, params, ["head/kernel"], transpose="kernel"
        ... )
        >>> print(optzoo.get_slot(state, "momentum")["head"]["kernel"].T)
        [[1. 2. 3.]]

    Args:
        state_dict: the result of ``optimizer.state_dict()``, with tensors or NumPy arrays.
        tx: the optimizer, alone or in chains, masks, groups and wrappers.
        params: the parameters, or their shapes and dtypes (``jax.ShapeDtypeStruct``).
        names: the names of ``params`` in torch's order, that of ``param_groups``; or a dict from
            these names to torch's, for names that differ. The state has torch's names if its
            optimizer was given ``named_parameters()``; a ``.`` in them corresponds to ``/``. None
            if all names are equal.
        transpose: the matrices that torch stores transposed, such as kernels of ``nn.Linear``: a
            mask (:func:`optzoo.param_groups`) such as ``"kernel"``, ``("head/kernel",
            "out/kernel")`` or a function of the parameters; or a dict from patterns to the order of
            torch's axes, such as ``{"conv/kernel": (2, 3, 1, 0)}``.
        count: the number of updates so far, if torch does not count them, as in SGD; None for 0. A
            schedule of ``tx`` continues from it.

    Returns:
        The state. Slots are converted to the dtypes of ``tx``. Parts that torch does not have, such
        as an average of the parameters, keep the values of ``tx.init``.

    Raises:
        TypeError: if an argument is of the wrong type.
        ValueError: if ``names`` does not fit, if a class or option of torch has no counterpart in
            ``tx``, or if anything is missing, left over, of another shape or dtype: the message
            lists all problems.
    """
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= {*state_dict}:
        raise TypeError("state_dict must be the result of optimizer.state_dict() of torch")
    ours = [path_name(path) for path, _ in leaves_with_path(params)]
    given = _parameters(state_dict, names, ours)
    turned = _axes(transpose, params)
    steps = [int(_array(p.state["step"])) for p in given.values() if "step" in p.state]
    used = {name: {"step"} for name in given}

    def read(name, kind, node):
        if (parameter := given.get(name)) is None:
            raise ValueError(f"'{name}' is in no group of torch: names={names!r}")
        fields = _CLASSES[parameter.kind][1].get(kind)
        if fields is None:
            raise ValueError(f"'{name}' has {kind.__name__}, which {parameter.kind} does not have")
        _check(name, parameter, node)
        slots = {}
        for slot, field in fields.items():
            if parameter.state.get(field) is None:
                raise ValueError(f"'{name}' has no {field} in the state of {parameter.kind}")
            if field in used[name]:
                raise ValueError(f"tx has several {kind.__name__} for '{name}'")
            value = _array(parameter.state[field])
            if parameter.kind == "RMSprop" and field == "momentum_buffer":
                # Here the slot contains the learning rate, with the opposite sign in optax.
                sign = -1 if kind is optax.TraceState else 1
                value = value * sign * float(_array(parameter.options["lr"]))
            if name in turned and value.ndim == len(turned[name]):
                value = value.transpose(turned[name])
            slots[slot] = value
            used[name].add(field)
        step = parameter.state.get("step")
        return Source(slots, None if step is None else int(_array(step)))

    def left_over():
        for name, parameter in given.items():
            full = {field for field, value in parameter.state.items() if value is not None}
            if left := sorted(full - used[name]):
                yield f"left over: {', '.join(left)} of '{name}'"

    return fill_state(
        tx, params, read, known=_KNOWN, count=only_count(steps, count), finish=left_over,
        error="state_dict does not fit tx",
    )  # fmt: skip


def _parameters(
    state_dict: Mapping[str, Any], names: Any, ours: Sequence[str]
) -> dict[str, _Parameter]:
    """Torch's parameters, by the names of ``params``."""
    groups = state_dict["param_groups"]
    keys = [key for group in groups for key in group["params"]]
    name_of = _names(groups, keys, names, ours)
    found = {}
    for i, group in enumerate(groups):
        kind = _kind(i, group)
        for message in _refused(kind, group):
            raise ValueError(f"param_groups[{i}] of {kind} has {message}")
        for key in group["params"]:
            found[name_of[key]] = _Parameter(kind, group, state_dict["state"].get(key, {}))
    return found


def _names(groups: Any, keys: Sequence[Any], names: Any, ours: Sequence[str]) -> dict[Any, str]:
    """The name in ``params`` of each parameter of torch."""
    if isinstance(names, str) or not (names is None or isinstance(names, Sequence | Mapping)):
        raise TypeError(f"names must be a sequence of names, a dict or None, got {names!r}")
    if names is None or isinstance(names, Mapping):
        if not all("param_names" in g or {*map(type, g["params"])} <= {str} for g in groups):
            raise ValueError(
                "names: state_dict has no param_names, because torch's optimizer was not given "
                "named_parameters(); give the names in the order of its parameters"
            )
        theirs = [name for g in groups for name in g.get("param_names", g["params"])]
        renamed = {name: our for our, name in (names or {}).items()}
        names = [renamed.get(name, name.replace(".", "/")) for name in theirs]
    unknown = sorted({*names} - {*ours})
    if len(names) != len(keys) or len({*names}) != len(names) or unknown:
        raise ValueError(
            f"names must be {len(keys)} different names of parameters, one for each parameter of "
            f"torch, got {[*names]}; the parameters are {[*ours]}"
        )
    return dict(zip(keys, names, strict=True))


def _kind(i: int, group: Mapping[str, Any]) -> str:
    """The name of the class that has these options."""
    for kind, (options, _) in _CLASSES.items():
        if options <= {*group} and (kind != "SparseAdam" or {*group} <= _OF_SPARSE_ADAM):
            return kind
    known = ", ".join(_CLASSES)
    raise ValueError(f"param_groups[{i}] has {sorted(group)}, the options of none of {known}")


def _refused(kind: str, options: Mapping[str, Any]) -> Iterator[str]:
    """Options that no transformation of this library supports."""
    if options.get("maximize"):
        yield (
            "maximize=True, but optimizers of optzoo minimize: negate the loss, and set "
            "maximize=False in the state_dict"
        )
    if options.get("amsgrad"):
        yield "amsgrad=True, but optzoo.amsgrad has no bias correction"
    if options.get("dampening") and options["momentum"]:
        yield f"dampening={options['dampening']}, which optzoo.momentum does not support"


def _check(name: str, parameter: _Parameter, node: Any) -> None:
    """Raises ``ValueError`` if a node does not support the options of torch."""
    options, slots, powers = parameter.options, kind_of(node), getattr(node, "shared", {})
    is_sparse, has_powers = parameter.kind == "SparseAdam", "beta2_power" in powers
    why = None
    if slots in _RMSPROP:
        why = "optzoo.rmsprop inside the root: use optax.rmsprop(eps_in_sqrt=False)"
    elif slots in _MEANS and is_sparse and not has_powers:
        why = "tx after the bias correction, by SparseAdam before it: use optzoo.lazy_adam"
    elif slots in _MEANS and has_powers and not is_sparse:
        why = "tx before the bias correction, by torch after it: use optzoo.sparse_adamw"
    if why and (eps := float(_array(options["eps"]))):
        raise ValueError(
            f"'{name}' has eps={eps}, which is added by {why}, or set eps=0 in the state_dict to "
            "accept the difference"
        )
    for key, beta in zip(("beta1_power", "beta2_power"), options.get("betas", ()), strict=False):
        base = powers.get(key, beta)
        if np.float32(base) != np.float32(_array(beta)):
            raise ValueError(f"'{name}' has betas={options['betas']}, but tx has {base}")


def _axes(transpose: Any, params: Any) -> dict[str, tuple[int, ...]]:
    """The order of torch's axes by the name of the parameter."""
    is_axes = lambda x: isinstance(x, tuple | list)
    if isinstance(transpose, Mapping) and all(map(is_axes, transpose.values())):
        for pattern, axes in transpose.items():
            if sorted(axes) != [*range(len(axes))]:
                raise ValueError(f"transpose: {pattern!r} needs an order of axes, got {axes!r}")
        return {k: tuple(v) for k, v in value_by_name("transpose", transpose, params).items()}
    marks = leaves_with_path(resolve_mask(transpose, params, "transpose"))
    found: dict[str, tuple[int, ...]] = {path_name(path): (1, 0) for path, mark in marks if mark}
    for path, x in leaves_with_path(params):
        if path_name(path) in found and len(x.shape) != 2:
            raise ValueError(
                f"transpose: '{path_name(path)}' has shape {x.shape} and is not a matrix; give a "
                "dict with the order of torch's axes"
            )
    return found


def _array(value: Any) -> np.ndarray:
    """A tensor of torch, or any other array, as a NumPy array."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        if str(value.dtype) == "torch.bfloat16":  # NumPy does not have it
            value = value.float()
        value = value.numpy()
    return np.asarray(value)
