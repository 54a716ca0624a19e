"""Muon: momentum, made nearly orthogonal by Newton-Schulz iterations."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.typing import DTypeLike

from ..core.checks import (
    check_choice,
    check_decays,
    check_finite,
    check_flags,
    check_floating,
    check_not_negative,
    check_size,
    is_array,
)
from ..core.numerics import (
    has_16_bits,
    is_number,
    is_trainable,
    promote_types,
    rounding_cast,
    safe_divide,
    saturating_cast,
    sqrt,
    upcast,
    wide_dtype,
)
from ..core.optimizer import Optimizer, about_of, recorded
from ..core.paths import leaves_with_path, path_name
from ..core.rows import is_rows, is_sparse_or_none
from ..rules.frame import Leaf
from ..rules.leafwise import zeros
from ..rules.learning_rate import descend
from ..rules.treewise import treewise
from ..state.types import Signed
from .owners import Owners
from .shampoo.api import add_decay

AdjustLR = Literal["original", "match_rms_adamw"]
# The steepest polynomial at zero whose iterates stay near one, by Jordan.
JORDAN = (3.4445, -4.7750, 2.0315)
MOST_STEPS = 99  # as in torch
PRECISIONS = ("bfloat16", "float32", "float64")


class MuonSlots(NamedTuple):
    """The slots of Muon."""

    momentum_buffer: Signed  # mean of the gradient


@dataclasses.dataclass(eq=False)
class MuonOptions:
    """The arguments of ``scale_by_muon``; :func:`optzoo.muon` describes them."""

    momentum: Any
    nesterov: bool
    ns_coefficients: Any
    ns_steps: int
    eps: Any
    adjust_lr: AdjustLR
    axes: Any
    iteration_dtype: Any
    owners: Owners | None

    def __post_init__(self) -> None:
        [self.momentum] = check_decays(momentum=self.momentum)
        check_flags(nesterov=self.nesterov)
        self.ns_steps = check_size(1, ns_steps=self.ns_steps)
        if self.ns_steps > MOST_STEPS:
            raise ValueError(f"ns_steps must be at most {MOST_STEPS}, got {self.ns_steps}")
        self.ns_coefficients = _by_step(self.ns_coefficients, self.ns_steps)
        check_not_negative(eps=self.eps)
        check_choice(get_args(AdjustLR), adjust_lr=self.adjust_lr)
        self.axes = _by_rank(self.axes)
        if self.iteration_dtype is not None:
            check_floating(" or None", iteration_dtype=self.iteration_dtype)
            self.iteration_dtype = jnp.dtype(self.iteration_dtype)
            check_choice(PRECISIONS, iteration_dtype=self.iteration_dtype.name)


@recorded
def scale_by_muon(
    momentum: float = 0.95,
    nesterov: bool = True,
    ns_steps: int = 5,
    *,
    ns_coefficients: Sequence[Any] = JORDAN,
    eps: float = 1e-7,
    adjust_lr: AdjustLR = "original",
    axes: str | Sequence[str] = "io",
    iteration_dtype: DTypeLike | None = "bfloat16",
    owners: str | tuple[str, ...] | None = None,
    exchange_dtype: DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    """The direction of :func:`optzoo.muon`."""
    options = MuonOptions(
        momentum, nesterov, ns_coefficients, ns_steps, eps, adjust_lr, axes, iteration_dtype,
        Owners.of(owners, exchange_dtype),
    )  # fmt: skip
    steps = treewise(functools.partial(_update, options), slots=MuonSlots(zeros))

    def init(params):
        _check_axes(options, params)
        return steps.init(params)

    def update(updates, state, params=None, **extra_args):
        _check_axes(options, updates)
        return steps.update(updates, state, params, **extra_args)

    return Optimizer(init, update, about_of(steps))


@recorded
def muon(
    learning_rate: optax.ScalarOrSchedule = 1e-3,
    momentum: float = 0.95,
    nesterov: bool = True,
    ns_steps: int = 5,
    *,
    ns_coefficients: Sequence[Any] = JORDAN,
    eps: float = 1e-7,
    weight_decay: float = 0.1,
    mask: Any = None,
    adjust_lr: AdjustLR = "original",
    axes: str | Sequence[str] = "io",
    iteration_dtype: DTypeLike | None = "bfloat16",
    owners: str | tuple[str, ...] | None = None,
    exchange_dtype: DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Muon: momentum, made nearly orthogonal by Newton-Schulz iterations, as ``torch.optim.Muon``.

    For a matrix :math:`x` with the gradient :math:`g`:

    .. math::
        m_t &= \mu\, m_{t-1} + (1 - \mu)\, g_t \\
        u_t &= (1 - \mu)\, g_t + \mu\, m_t
            \quad\text{with Nesterov, else}\quad u_t = m_t \\
        x_t &= x_{t-1} - \eta_t\, (s\, O(u_t) + \lambda\, x_{t-1})

    :math:`O` replaces the singular values of a matrix by numbers near one. Its :math:`k` iterations
    start at :math:`X = u / \max(\|u\|_F, \epsilon)`, transposed if it has more rows than columns:

    .. math::
        X \leftarrow a\, X + (b\, X X^\top + c\, (X X^\top)^2)\, X

    With the default arguments, singular values above a hundredth of the norm end between 0.68 and
    1.14. The factor :math:`s` depends only on the shape, with :math:`I` inputs and :math:`O`
    outputs:

    .. math::
        s = \sqrt{\max(1, O / I)}
            \quad\text{or, to match AdamW,}\quad s = 0.2\, \sqrt{\max(I, O)}

    Muon is for the matrices of hidden layers. Use AdamW for embeddings, the last layer, biases and
    scales (:func:`optzoo.param_groups`). A parameter that ``axes`` does not describe is an error.

    With ``owners`` each matrix has one owner among the devices along these mesh axes. The owner
    receives the whole :math:`u_t`, computes :math:`O(u_t)` and sends each device its part; the
    momentum keeps the sharding of the parameter. All matrices of one shape are sent by one
    all-to-all and returned by another: the number of messages does not depend on the number of
    layers. Without ``owners`` XLA partitions the products of each matrix.

    Row-sparse gradients become dense (:func:`optzoo.rules.dense`).

    Example:
        >>> import jax.numpy as jnp, optax, optzoo
        >>> params = {"hidden": {"kernel": jnp.ones((2, 3)), "bias": jnp.zeros(3)}}
        >>> tx = optzoo.param_groups({"kernel": optzoo.muon(0.02), ".*": optax.adamw(1e-3)})
        >>> state = tx.init(params)
        >>> updates, state = tx.update(params, state, params)
        >>> print(updates["hidden"]["kernel"].shape)
        (2, 3)

    Args:
        learning_rate: :math:`\eta`, a number or a schedule. With ``adjust_lr="original"`` 0.02 is
            usual, with ``"match_rms_adamw"`` the rate of AdamW.
        momentum: :math:`\mu`, in [0, 1).
        nesterov: use Nesterov momentum.
        ns_steps: :math:`k`, from 1 to 99. It is the static length of a loop:
            ``optax.inject_hyperparams`` needs it among its ``static_args``.
        ns_coefficients: :math:`(a, b, c)`, or one such tuple for each step.
        eps: :math:`\epsilon`, at least 0: the smallest divisor of the matrix.
        weight_decay: :math:`\lambda`, multiplied by the learning rate, not by :math:`s`; at least
            0.
        mask: the parameters that decay, a mask such as ``"kernel"`` or ``("kernel", "embedding")``
            (:func:`optzoo.param_groups`); None for all.
        adjust_lr: the formula of :math:`s`: ``"original"``, or ``"match_rms_adamw"``, with which
            the root mean square of the elements' steps is 0.2 times the rate, similar to AdamW.
        axes: the meaning of the axes of parameters, one letter for each axis: ``i`` inputs, ``o``
            outputs, ``b`` a batch of independent matrices. Axes with the same letter are merged.
            ``"io"`` is the kernel of a dense layer in Flax and Keras; ``"oi"`` that of torch and
            Equinox; ``"iiio"`` a convolution in two dimensions; ``"ioo"`` and ``"iio"`` the
            projections to and from attention heads; ``"bio"`` the layers of a scan, or experts. A
            tuple has one string for each number of axes: ``("io", "iiio")``. ``"o"`` is a vector of
            outputs, whose direction is divided by its root mean square; ``""`` is a scalar.
        iteration_dtype: dtype of the iterations: ``"bfloat16"``, ``"float32"`` or ``"float64"``;
            None for that of the parameter, at least float32. Products in bfloat16 are summed in
            float32 and rounded once; others are in full precision on every backend.
        owners: the mesh axes along which devices share the matrices, a name or a tuple of names;
            None: no owners. The mesh is that of the parameters, or of ``jax.set_mesh``. Inside
            ``shard_map``, where the parameters are replicated, each device computes a share.
        exchange_dtype: dtype in which matrices are sent to their owners and back, such as
            ``"bfloat16"``; None for their own.

    Raises:
        TypeError: if an argument is of the wrong kind.
        ValueError: if an argument is out of its range, or if params are needed and missing; from
            ``init`` and ``update``, if ``axes`` does not describe the axes of a parameter; from
            ``update``, if there is no mesh with the axes of ``owners``.

    References:
        Jordan et al., `Muon: An optimizer for hidden layers in neural networks
        <https://kellerjordan.github.io/posts/muon/>`_, 2024; Liu et al., `Muon is Scalable for LLM
        Training <https://arxiv.org/abs/2502.16982>`_, 2025; ``torch.optim.Muon`` of `PyTorch
        <https://github.com/pytorch/pytorch>`_.

    Differences from the original:
        The last axis of a kernel has the outputs; in torch the first (``axes="oi"``). torch accepts
        matrices only. The momentum of 16-bit parameters is float32. A gradient with a norm above
        2e19 is normalized; in torch the square overflows and the step is zero. The author's code,
        `KellerJordan/Muon <https://github.com/KellerJordan/Muon>`_, has no decay by default, adds
        :math:`\epsilon` to the norm, rounds to bfloat16 after each product and each sum, not once
        for both, uses :math:`s = 1` for convolutions unless the kernel is higher than wide, and
        moves a parameter without a gradient by its momentum. ``optax.contrib.muon`` corrects the
        bias of the two terms of Nesterov momentum by different factors: its directions differ.
    """
    decay = [] if is_number(weight_decay, 0) else [add_decay(weight_decay, mask)]
    direction = scale_by_muon(
        momentum, nesterov, ns_steps, ns_coefficients=ns_coefficients, eps=eps,
        adjust_lr=adjust_lr, axes=axes, iteration_dtype=iteration_dtype, owners=owners,
        exchange_dtype=exchange_dtype,
    )  # fmt: skip
    return descend(learning_rate, direction, *decay)


# Arguments


def _by_step(coefficients: Any, steps: int) -> tuple[tuple[Any, Any, Any], ...]:
    """Three coefficients for each iteration."""
    must = "ns_coefficients must be three numbers, or a tuple of three for each step"
    if isinstance(coefficients, str) or not hasattr(coefficients, "__len__"):
        raise TypeError(f"{must}, got {coefficients!r}")
    rows = [coefficients] * steps if not any(map(np.ndim, coefficients)) else list(coefficients)
    if wrong := [row for row in rows if np.shape(row) != (3,)]:
        raise ValueError(f"{must}, got {wrong[0]!r}")
    if len(rows) != steps:
        raise ValueError(f"{must}, got {len(rows)} rows for ns_steps={steps}")
    for coefficient in itertools.chain(*rows):
        check_finite(ns_coefficients=coefficient)
    return tuple(map(tuple, rows))


def _by_rank(axes: Any) -> dict[int, str]:
    """The letters of the axes of parameters, by the number of axes."""
    words = [axes] if isinstance(axes, str) else axes
    if not isinstance(words, list | tuple) or not all(isinstance(word, str) for word in words):
        raise TypeError(f"axes must be a string such as 'io', or a tuple of them, got {axes!r}")
    for word in words:
        if not re.fullmatch("([bio]*o[bio]*)?", word):
            raise ValueError(
                "axes must be letters b (a batch), i (inputs) and o (outputs, at least one), got "
                f"{word!r}"
            )
    by_rank = {len(word): word for word in words}
    if not words or len(by_rank) < len(words):
        raise ValueError(f"axes must be one string for each number of axes, got {axes!r}")
    return by_rank


def _check_axes(options: MuonOptions, tree: Any) -> None:
    """Raises ``ValueError`` for a parameter or gradient whose axes are not described."""
    for path, x in leaves_with_path(tree, is_leaf=is_sparse_or_none):
        if not is_rows(x) and not (is_array(x) and is_trainable(x)):
            continue
        shape = jnp.shape(x)
        if len(shape) not in options.axes:
            known = " or ".join(repr(word) for word in options.axes.values())
            raise ValueError(
                f"parameter '{path_name(path)}' has shape {shape}, but muon accepts the axes "
                f"{known}: use AdamW for this parameter (optzoo.param_groups), or describe its "
                "axes with the argument axes"
            )


# The update


def _update(
    options: MuonOptions, leaves: list[Leaf], shared: dict[str, Array], t: Array
) -> tuple[list[tuple[Any, Any]], dict[str, Array]]:
    """The rule for :func:`treewise`: all parameters at once, since matrices are sent together."""
    del t
    present = [leaf for leaf in leaves if leaf.g is not None]
    means = [_momentum(options, leaf) for leaf in present]
    directions = _directions(options, [u for u, _ in means])
    pairs = zip(present, directions, means, strict=True)
    finished = iter([(saturating_cast(d, leaf.g.dtype), new) for leaf, d, (_, new) in pairs])
    return [(None, leaf.slots) if leaf.g is None else next(finished) for leaf in leaves], shared


def _momentum(options: MuonOptions, leaf: Leaf) -> tuple[Array, MuonSlots]:
    """The input of :math:`O` for one parameter, and its new mean."""
    g = upcast(leaf.g.to_dense() if is_rows(leaf.g) else leaf.g)
    mean = upcast(leaf.slots.momentum_buffer)
    dtype = wide_dtype(g, mean)
    old, new = (jnp.asarray(w, dtype) for w in (options.momentum, 1 - options.momentum))
    g, mean = g.astype(dtype), mean.astype(dtype)
    mean = old * mean + new * g
    kept = saturating_cast(mean, leaf.slots.momentum_buffer.dtype)
    return (new * g + old * mean if options.nesterov else mean), MuonSlots(kept)


def _directions(options: MuonOptions, us: Sequence[Array]) -> list[Array]:
    """The direction of each parameter, computed by its owner if it has one."""
    words = [options.axes[u.ndim] for u in us]
    if options.owners is None:
        return [_direction(options, u, word) for u, word in zip(us, words, strict=True)]
    results, of_word = list(us), collections.defaultdict[str, list[int]](list)
    for i, (u, word) in enumerate(zip(us, words, strict=True)):
        if "i" in word and u.size:
            of_word[word].append(i)
        else:
            results[i] = _direction(options, u, word)
    for word, members in of_word.items():
        # Stacks of matrices: the axes of a batch come first, as one.
        order = sorted(range(len(word)), key=lambda axis, word=word: word[axis] != "b")
        back = sorted(range(len(word)), key=order.__getitem__)
        of_each = word.replace("b", "")
        turned = [us[i].transpose(order) for i in members]
        stacks = [x.reshape(-1, *x.shape[len(word) - len(of_each) :]) for x in turned]
        work = jax.vmap(functools.partial(_direction, options, word=of_each))
        done = options.owners.apply(work, stacks)
        for i, x, d in zip(members, turned, done, strict=True):
            results[i] = d.reshape(x.shape).transpose(back)
    return results


def _direction(options: MuonOptions, u: Array, word: str) -> Array:
    """The nearly orthogonal matrices, times the factor of their shape."""
    if not u.size:
        return u
    sizes = collections.defaultdict[str, list[int]](list)
    # As torch has them: outputs, then inputs.
    order = sorted(range(u.ndim), key=lambda axis: "boi".index(word[axis]))
    for axis in order:
        sizes[word[axis]].append(u.shape[axis])
    outputs, inputs = math.prod(sizes["o"]), math.prod(sizes["i"])
    turned = u.transpose(order)
    x = turned.reshape(*sizes["b"], outputs, inputs)
    x = _orthogonal(options, x.mT).mT if outputs > inputs else _orthogonal(options, x)
    match options.adjust_lr:
        case "original":
            factor = math.sqrt(max(1, outputs / inputs))
        case _:
            factor = 0.2 * math.sqrt(max(outputs, inputs))
    back = sorted(range(u.ndim), key=order.__getitem__)
    return factor * x.astype(u.dtype).reshape(turned.shape).transpose(back)


def _orthogonal(options: MuonOptions, u: Array) -> Array:
    """Newton-Schulz steps on matrices, the last two axes, that have no more rows than columns."""
    dtype = u.dtype if options.iteration_dtype is None else options.iteration_dtype
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ValueError(
            f"iteration_dtype {dtype.name} needs jax.config.update('jax_enable_x64', True) first"
        )
    # Sums are in a wide dtype, and operands of the next product are rounded.
    dtype_of_sums = promote_types(dtype, jnp.float32)
    wide = lambda x: x.astype(dtype_of_sums)
    rounded = lambda x: rounding_cast(x, dtype)
    product = functools.partial(
        jnp.matmul,
        precision=None if has_16_bits(dtype) else jax.lax.Precision.HIGHEST,
        preferred_element_type=dtype_of_sums,
    )

    def step(x, coefficients):
        a, b, c = coefficients
        gram = rounded(product(x, x.mT))
        polynomial = rounded(b * wide(gram) + c * product(gram, gram))
        return rounded(a * wide(x) + product(polynomial, x)), None

    x = wide(rounded(u))
    norm, least = (wide(rounded(n)) for n in (_norm(x), jnp.asarray(options.eps, x.dtype)))
    x = rounded(safe_divide(x, jnp.maximum(norm, least), options.eps))
    coefficients = jnp.asarray(options.ns_coefficients, dtype_of_sums)
    return jax.lax.scan(step, x, tuple(coefficients.T))[0]


def _norm(x: Array) -> Array:
    """The Frobenius norm of each matrix, also where its square would overflow."""
    largest = jax.lax.stop_gradient(jnp.max(jnp.abs(x), axis=(-2, -1), keepdims=True))
    scaled = safe_divide(x, largest)
    return largest * sqrt(jnp.sum(scaled**2, axis=(-2, -1), keepdims=True))
