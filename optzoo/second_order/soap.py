"""SOAP: Adam in the eigenbasis of Shampoo's statistics."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.typing import DTypeLike

from ..core.checks import check_decays, check_flags, check_not_negative
from ..core.numerics import (
    common_cycle,
    is_number,
    one_minus_power,
    safe_divide,
    saturating_cast,
    slot_dtype,
    sqrt,
    upcast,
    wide_dtype,
)
from ..core.optimizer import recorded
from ..core.rows import is_rows
from ..rules.frame import Leaf
from ..rules.leafwise import zeros
from ..rules.learning_rate import descend
from ..rules.treewise import treewise
from ..state.types import Exact, NotNegative, Signed
from .bases import by_eigh, by_qr, unchanged
from .owned import in_stacks, with_owners
from .owners import Owners
from .shampoo.api import add_decay
from .shampoo.blocks import Blocks, Cutting, as_stack
from .shampoo.options import check_interval
from .shampoo.products import gram, multiply, others
from .shampoo.refresh import is_due, keep_old, refresh


class SoapSlots(NamedTuple):
    """The slots of SOAP; ``statistics`` and ``basis`` are tuples over the dimensions."""

    m: Signed  # mean of the gradient, in the basis
    v: NotNegative  # mean of its square, in the basis
    statistics: Exact  # means of the second moments; () for a dimension without a basis
    basis: Exact  # their eigenvectors, in columns; () likewise


class KLSoapSlots(NamedTuple):
    """The slots of SOAP with KL statistics."""

    m: Signed
    v: NotNegative
    statistics: Exact
    basis: Exact
    eigenvalues: Exact  # means of squares along the columns of the basis; () without one


# Of KL statistics: the first eigenvalues, and the least.
FIRST_EIGENVALUE, LEAST_EIGENVALUE = 0.1, 4000.0**-2


@dataclasses.dataclass(eq=False)
class SoapOptions:
    """The arguments of ``scale_by_soap``; :func:`optzoo.soap` describes them."""

    b1: Any
    b2: Any
    shampoo_b2: Any
    eps: Any
    cutting: Cutting
    kl_statistics: bool
    stagger: bool
    axis_name: str | None

    def __post_init__(self) -> None:
        check_flags(kl_statistics=self.kl_statistics, stagger=self.stagger)
        self.b1, self.b2 = check_decays(b1=self.b1, b2=self.b2)
        if self.shampoo_b2 is None:
            self.shampoo_b2 = self.b2
        [self.shampoo_b2] = check_decays(shampoo_b2=self.shampoo_b2)
        check_not_negative(eps=self.eps)


class SoapParameter(NamedTuple):
    """One parameter during an update, in at least float32, and in blocks if it has a basis."""

    leaf: Leaf  # as it came
    blocks: Blocks
    g: Array
    slots: Any  # SoapSlots or KLSoapSlots

    @property
    def full(self) -> list[int]:
        """The dimensions that have a basis."""
        blocks = self.blocks
        return [i for i, full in enumerate(blocks.full) if full and blocks.preconditioned]


@recorded
def scale_by_soap(
    b1: float = 0.95,
    b2: float = 0.95,
    shampoo_b2: float | None = None,
    eps: float = 1e-8,
    preconditioner_interval: optax.ScalarOrSchedule = 10,
    *,
    max_matrix_size: int = 10000,
    block_size: int | None = None,
    merge_dims: bool = False,
    one_sided: bool = False,
    skip_vectors: bool = True,
    kl_statistics: bool = False,
    stagger: bool = False,
    axis_name: str | None = None,
    owners: str | tuple[str, ...] | None = None,
    exchange_dtype: DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    """The direction of :func:`optzoo.soap`."""
    check_interval(preconditioner_interval=preconditioner_interval, stagger=stagger)
    cutting = Cutting(
        max_matrix_size, block_size, merge_dims, skip_vectors, one_sided, diagonals=False
    )
    options = SoapOptions(b1, b2, shampoo_b2, eps, cutting, kl_statistics, stagger, axis_name)
    make = functools.partial(_direction, options, preconditioner_interval)
    has_basis = lambda shape: cutting.blocks(shape).preconditioned
    return with_owners(Owners.of(owners, exchange_dtype), make, has_basis)


@recorded
def soap(
    learning_rate: optax.ScalarOrSchedule = 3e-3,
    b1: float = 0.95,
    b2: float = 0.95,
    shampoo_b2: float | None = None,
    eps: float = 1e-8,
    preconditioner_interval: optax.ScalarOrSchedule = 10,
    *,
    max_matrix_size: int = 10000,
    block_size: int | None = None,
    merge_dims: bool = False,
    one_sided: bool = False,
    skip_vectors: bool = True,
    kl_statistics: bool = False,
    stagger: bool = False,
    weight_decay: float = 0.0,
    mask: Any = None,
    axis_name: str | None = None,
    owners: str | tuple[str, ...] | None = None,
    exchange_dtype: DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""SOAP: Adam in the eigenbasis of Shampoo's statistics, as in ``nikhilvyas/SOAP``.

    For a gradient :math:`g` of rank :math:`n`, with :math:`\Gamma_i(g)` the Gram matrix of its
    slices along dimension :math:`i`, and :math:`\times_i` the product along that dimension:

    .. math::
        g'_t &= g_t \times_1 Q_1^\top \times_2 \dots \times_n Q_n^\top \\
        m_t &= \beta_1 m_{t-1} + (1 - \beta_1)\, g'_t \\
        v_t &= \beta_2 v_{t-1} + (1 - \beta_2)\, g_t'^2 \\
        d_t &= \frac{\sqrt{1 - \beta_2^{t-1}}}{1 - \beta_1^{t-1}} \cdot
            \frac{m_t}{\sqrt{v_t} + \hat\epsilon} \times_1 Q_1 \times_2 \dots \times_n Q_n \\
        x_t &= x_{t-1} - \eta_t\, (d_t + \lambda\, x_{t-1}) \\
        G_{i,t} &= \beta_s G_{i,t-1} + (1 - \beta_s)\, \Gamma_i(g_t)

    The columns of :math:`Q_i` are a basis of eigenvectors of :math:`G_i`. The first gradient only
    initializes the basis: its step is zero. After every ``preconditioner_interval`` further steps
    the basis is refreshed at the end of the step, by an iteration that costs less than an
    eigendecomposition:

    .. math::
        Q_i \leftarrow \mathrm{QR}(G_i\, Q_i)

    with the columns sorted by :math:`q^\top G_i\, q`, the largest first. Each new column replaces
    the old column from which it was computed, so :math:`v` does not change; :math:`m` is rotated
    from the old basis to the new one. A basis that is not finite is not used: the previous basis is
    kept, and ``state.shared["num_failed_bases"]`` counts the failure.

    With ``kl_statistics`` the second moments are those of a whitened gradient. With
    :math:`\lambda_i` the mean square along each column of :math:`Q_i`, initially 0.1, and
    :math:`d_i` the size of a dimension:

    .. math::
        w_{i,t} &= g'_t \prod_{j \ne i} \lambda_{j,t-1}^{-1/2} \\
        G_{i,t} &= \beta_s G_{i,t-1} + (1 - \beta_s)\, \Gamma_i(w_{i,t} \times_i Q_i)
            / \prod_{j \ne i} d_j \\
        \lambda_{i,t} &= \beta_s \lambda_{i,t-1} + (1 - \beta_s)\,
            \mathrm{mean}_{j \ne i}\, w_{i,t}^2

    where :math:`G_{i,1} = \Gamma_i(g_1) / \prod_{j \ne i} d_j`, and :math:`\lambda` is at least
    :math:`1 / 4000^2`.

    A dimension above ``max_matrix_size`` has no basis: :math:`Q_i = I`. Parameters without any
    basis, such as vectors and scalars with ``skip_vectors``, take Adam's steps from the first
    gradient on. All matrix products are in full precision on every backend; statistics and bases
    are at least float32.

    For each element of a parameter the state holds about six values, with square blocks: two in the
    statistics, two in the bases, :math:`m` and :math:`v`. If a parameter is cut into blocks,
    :math:`m` and :math:`v` have an axis for the blocks, followed by the axes of a block.

    With ``owners`` each matrix is stored and updated on one device, as :func:`optzoo.shampoo`
    describes.

    Row-sparse gradients become dense (:func:`optzoo.rules.dense`): use another optimizer for
    embedding tables.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.soap(0.1, preconditioner_interval=1)
        >>> params = jnp.array([[1.0, 2.0], [2.0, -1.0]])
        >>> state = tx.init(params)
        >>> for _ in range(2):
        ...     updates, state = tx.update(params, state, params)
        >>> print(float(jnp.sum(params * updates)) < 0)
        True

    Args:
        learning_rate: :math:`\eta`, a number or a schedule.
        b1: :math:`\beta_1`, in [0, 1).
        b2: :math:`\beta_2`, in [0, 1).
        shampoo_b2: :math:`\beta_s`, in [0, 1); None: ``b2``.
        eps: :math:`\hat\epsilon`, at least 0.
        preconditioner_interval: steps between two refreshes of the bases, at least 1, a number or a
            schedule.
        max_matrix_size: the largest dimension with a basis. It determines shapes:
            ``optax.inject_hyperparams`` needs it, and ``block_size``, among its ``static_args``.
        block_size: cuts dimensions larger than this, and not larger than ``max_matrix_size``, into
            equal blocks with separate bases; None: no blocks.
        merge_dims: merges neighbouring dimensions as :func:`optzoo.shampoo` does.
        one_sided: only the smallest of the dimensions up to ``max_matrix_size`` has a basis, as in
            section 7 of the paper. A matrix then needs half the products, and less memory.
        skip_vectors: no basis for vectors and scalars.
        kl_statistics: statistics as in KL-SOAP (see above).
        stagger: each step after the first refreshes a share of the bases, so that all steps take
            equally long; ``preconditioner_interval`` must be an int above 1. Each basis is
            refreshed as often as without ``stagger``, but every step rotates :math:`m`, with two
            more products along each dimension with a basis.
        weight_decay: :math:`\lambda`, multiplied by the learning rate; at least 0.
        mask: the parameters that decay, a mask such as ``"kernel"`` or ``("kernel", "embedding")``
            (:func:`optzoo.param_groups`); None for all.
        axis_name: the mesh axis of replicas that have the same gradients: each computes a share of
            the bases.
        owners: the mesh axes along which devices share the matrices, as in :func:`optzoo.shampoo`;
            None: no owners.
        exchange_dtype: dtype in which gradients and updates are sent; None for their own.

    Raises:
        TypeError: if an argument is of the wrong kind.
        ValueError: if an argument is out of its range, or if params are needed and missing.
        NotImplementedError: if an update is differentiated twice. First derivatives are those of
            the formula; eigenvectors with equal eigenvalues, which have no derivative, do not
            rotate into each other.

    References:
        Vyas et al., `SOAP: Improving and Stabilizing Shampoo using Adam
        <https://arxiv.org/abs/2409.11321>`_, 2024; the code `nikhilvyas/SOAP
        <https://github.com/nikhilvyas/SOAP>`_. Lin et al., `Understanding and Improving Shampoo and
        SOAP via Kullback-Leibler Minimization <https://arxiv.org/abs/2509.03378>`_, 2025;
        ``KLSOAPH`` of `modded-nanogpt <https://github.com/KellerJordan/modded-nanogpt>`_.

    Differences from the original:
        Parameters without a basis move from the first gradient on, in the original from the second.
        Weight decay uses the parameter before the step, from the first step on; the original uses
        the parameter after the step and skips the first step. The default decay is 0; the
        original's is 0.01. Eigenvectors of equal eigenvalues, such as the zeros along the longer
        dimension of a matrix, are not unique: libraries find different ones in the first step, and
        the steps then differ. Dimensions of size one are merged as in :func:`optzoo.shampoo`. There
        is no ``normalize_grads``, and the bias is always corrected. The columns of a basis and
        :math:`v` are not sorted, which does not change the steps. ``KLSOAPH``, which does not sort
        before it decomposes and does not correct the bias, equals this optimizer inside
        :func:`optzoo.hyperball` while the order of the columns does not change.
    """
    decay = [] if is_number(weight_decay, 0) else [add_decay(weight_decay, mask)]
    direction = scale_by_soap(
        b1, b2, shampoo_b2, eps, preconditioner_interval, max_matrix_size=max_matrix_size,
        block_size=block_size, merge_dims=merge_dims, one_sided=one_sided,
        skip_vectors=skip_vectors, kl_statistics=kl_statistics, stagger=stagger,
        axis_name=axis_name, owners=owners, exchange_dtype=exchange_dtype,
    )  # fmt: skip
    return descend(learning_rate, direction, *decay)


def _direction(options: SoapOptions, interval: Any, stacked: bool) -> Any:
    """The transformation of parameters, or of stacks of them."""
    initial = {
        "m": lambda x: _zero_means(options, x),
        "v": lambda x: _zero_means(options, x),
        "statistics": lambda x: _matrices(options, x, _zero_matrix),
        "basis": lambda x: _matrices(options, x, jnp.eye),
    }
    slots: Any = SoapSlots(**initial)
    if options.kl_statistics:
        slots = KLSoapSlots(**initial, eigenvalues=lambda x: _first_eigenvalues(options, x))
    return treewise(
        functools.partial(_update, options, stacked=stacked),
        slots=in_stacks(slots) if stacked else slots,
        shared=lambda: {"num_failed_bases": jnp.zeros([], jnp.int32)},
        shared_varies=not stacked,  # of stacks it is summed over the owners
        scheduled={"preconditioner_interval": interval},
        cycle=common_cycle(interval),
    )


def _zero_means(options: SoapOptions, x: Any) -> Array:
    """``m`` or ``v``: in the shape of the parameter, unless it is cut into blocks."""
    blocks = options.cutting.blocks(jnp.shape(x))
    if blocks.preconditioned and blocks.number > 1:
        return jnp.zeros(blocks.stack(*blocks.sizes), slot_dtype(x))
    return zeros(x)


def _zero_matrix(d: int, dtype: Any) -> Array:
    return jnp.zeros((d, d), dtype)


def _matrices(options: SoapOptions, x: Any, matrix: Callable[..., Array]) -> tuple[Any, ...]:
    """A stack of ``matrix(d)`` for each dimension with a basis."""
    blocks, dtype = options.cutting.blocks(jnp.shape(x)), wide_dtype(x)
    stack = lambda d: jnp.broadcast_to(matrix(d, dtype=dtype), blocks.stack(d, d))
    return tuple(stack(d) if full else () for d, full, _ in blocks.factors)


def _first_eigenvalues(options: SoapOptions, x: Any) -> tuple[Any, ...]:
    """A stack of vectors for each dimension with a basis."""
    blocks, dtype = options.cutting.blocks(jnp.shape(x)), wide_dtype(x)
    stack = lambda d: jnp.full(blocks.stack(d), FIRST_EIGENVALUE, dtype)
    return tuple(stack(d) if full else () for d, full, _ in blocks.factors)


def _update(
    options: SoapOptions,
    leaves: list[Leaf],
    shared: dict[str, Array],
    t: Array,
    *,
    stacked: bool,
    preconditioner_interval: Any,
) -> tuple[list[tuple[Any, Any]], dict[str, Array]]:
    """The rule for :func:`treewise`: all parameters at once, as bases come in batches."""
    works = [_begin(options, leaf, stacked) for leaf in leaves if leaf.g is not None]
    directions, slots = [], []
    for work in works:
        turned = _turned(work, work.g, work.slots.basis, 0)
        d, m, v = _adam(options, work, turned, t)
        directions.append(d)
        find = _kl_statistics if options.kl_statistics else _statistics
        slots.append(work.slots._replace(m=m, v=v, **find(options, work, turned, t)))
    # All reads of the old bases come first, so that the new bases can overwrite them.
    late = _after(directions, t)
    slots, failed = _renewed(options, works, slots, late, preconditioner_interval)
    finished = iter([_end(*parts) for parts in zip(works, directions, slots, strict=True)])
    done = [(None, leaf.slots) if leaf.g is None else next(finished) for leaf in leaves]
    return done, {"num_failed_bases": shared["num_failed_bases"] + failed}


def _begin(options: SoapOptions, leaf: Leaf, stacked: bool) -> SoapParameter:
    """The gradient and the slots in blocks, all in one dtype."""
    g, _, s = leaf
    g, s = jax.tree.map(upcast, (g.to_dense() if is_rows(g) else g, s))
    dtype = wide_dtype(g, *jax.tree.leaves(s))
    g, s = jax.tree.map(lambda a: a.astype(dtype), (g, s))
    blocks = options.cutting.blocks(g.shape[1:] if stacked else g.shape)
    if blocks.preconditioned:
        g = blocks.split(g)
        in_blocks = lambda a: a.reshape(len(g), *blocks.sizes)
        matrices = lambda arrays: jax.tree.map(lambda a: as_stack(a, 2), arrays)
        of_dimensions = {"statistics": matrices(s.statistics), "basis": matrices(s.basis)}
        if options.kl_statistics:
            vectors = jax.tree.map(lambda a: as_stack(a, 1), s.eigenvalues)
            of_dimensions["eigenvalues"] = vectors
        s = s._replace(m=in_blocks(s.m), v=in_blocks(s.v), **of_dimensions)
    return SoapParameter(leaf, blocks, g, s)


def _adam(
    options: SoapOptions, work: SoapParameter, g: Array, t: Array
) -> tuple[Array, Array, Array]:
    """The direction of Adam for ``g`` in the current basis, and the new means ``m`` and ``v``."""
    b1, b2, eps = (jnp.asarray(v, g.dtype) for v in (options.b1, options.b2, options.eps))
    if work.full:  # the first gradient only makes the basis
        g, t = jnp.where(t > 1, g, 0), jnp.maximum(t - 1, 1)
    m = b1 * work.slots.m + (1 - b1) * g
    v = b2 * work.slots.v + (1 - b2) * g**2
    t = t.astype(g.dtype)
    correction = jnp.sqrt(one_minus_power(b2, t)) / one_minus_power(b1, t)
    d = correction * safe_divide(m, sqrt(v) + eps, options.eps)
    return _turned(work, d, work.slots.basis, 1), m, v


def _statistics(
    options: SoapOptions, work: SoapParameter, turned: Array, t: Array
) -> dict[str, tuple[Any, ...]]:
    """The means of the second moments, updated with this gradient."""
    del turned, t
    decay = jnp.asarray(options.shampoo_b2, work.g.dtype)
    new = list(work.slots.statistics)
    for i in work.full:
        new[i] = decay * new[i] + (1 - decay) * gram(work.g, i)
    return {"statistics": tuple(new)}


def _kl_statistics(
    options: SoapOptions, work: SoapParameter, turned: Array, t: Array
) -> dict[str, tuple[Any, ...]]:
    """The second moments of the gradient divided by the other dimensions' root eigenvalues."""
    decay, basis = jnp.asarray(options.shampoo_b2, work.g.dtype), work.slots.basis
    matrices, eigenvalues = list(work.slots.statistics), list(work.slots.eigenvalues)
    mean = lambda old, new: decay * old + (1 - decay) * new
    for i in work.full:
        number = work.g[0].size // work.g.shape[1 + i]
        scaled = turned
        for j, values in enumerate(work.slots.eigenvalues):
            if j != i and j in work.full:
                scaled = scaled / jnp.expand_dims(jnp.sqrt(values), others(scaled, j))
        whitened = multiply(scaled, basis[i], i, 1)
        first, old, new = (gram(work.g, i) / number, matrices[i], gram(whitened, i) / number)
        matrices[i] = jnp.where(t > 1, mean(old, new), first)
        new = mean(eigenvalues[i], jnp.mean(scaled**2, axis=others(scaled, i)))
        eigenvalues[i] = jnp.where(t > 1, jnp.maximum(new, LEAST_EIGENVALUE), eigenvalues[i])
    return {"statistics": tuple(matrices), "eigenvalues": tuple(eigenvalues)}


def _turned(work: SoapParameter, x: Array, basis: Sequence[Any], axis: int) -> Array:
    """``x`` rotated into the basis (a sum over axis 0 of its matrices), or back (over axis 1)."""
    for i in work.full:
        x = multiply(x, basis[i], i, axis)
    return x


# Bases


def _renewed(
    options: SoapOptions,
    works: Sequence[SoapParameter],
    slots: Sequence[Any],
    t: Array,
    interval: Any,
) -> tuple[list[Any], Array]:
    """The slots, in new bases where a refresh is due, and the number of unusable bases."""

    def renew(old):
        plain = [_turned(work, m, basis, 1) for work, (m, basis) in zip(works, old, strict=True)]
        late = _after(plain, t)
        bases, failed = _bases(options, works, slots, [basis for _, basis in old], late, interval)
        parts = zip(works, plain, bases, strict=True)
        return [(_turned(work, m, basis, 0), basis) for work, m, basis in parts], failed

    old = [(s.m, s.basis) for s in slots]
    due = options.stagger or is_due(t - 1, interval)
    new, failed = renew(old) if due is True else jax.lax.cond(due, renew, keep_old, old)
    pairs = zip(slots, new, strict=True)
    return [s._replace(m=m, basis=basis) for s, (m, basis) in pairs], failed


def _bases(
    options: SoapOptions,
    works: Sequence[SoapParameter],
    slots: Sequence[Any],
    old: Sequence[tuple[Any, ...]],
    t: Array,
    interval: Any,
) -> tuple[list[tuple[Any, ...]], Array]:
    """For each parameter its new bases, and the number of unusable ones.

    By eigenvectors in the first step, then by QR.
    """
    keys = [(j, i) for j, work in enumerate(works) for i in work.full]

    def renewed(find, bases, *, interval=1, stagger=False):
        return refresh(
            [(slots[j].statistics[i], basis) for (j, i), basis in zip(keys, bases, strict=True)],
            bases,
            len(keys) * [0],  # one batch for each size
            lambda pair, rank: find(*pair),
            step=t,
            interval=interval,
            stagger=stagger,
            axis_name=options.axis_name,
        )

    bases = [old[j][i] for j, i in keys]
    if options.stagger:
        # In two conditionals, for the reason that _basis gives.
        first = functools.partial(renewed, by_eigh)
        later = functools.partial(renewed, by_qr, interval=interval, stagger=True)
        bases, failed = jax.lax.cond(t == 1, first, keep_old, bases)
        bases, more = jax.lax.cond(t == 1, keep_old, later, bases)
        failed += more
    else:
        bases, failed = renewed(functools.partial(_basis, t == 1), bases)
    found = dict(zip(keys, bases, strict=True))
    pick = lambda j, bases: tuple(found.get((j, i), basis) for i, basis in enumerate(bases))
    return [pick(j, bases) for j, bases in enumerate(old)], failed


def _basis(is_first: Array, a: Array, old: Array) -> tuple[Array, Array]:
    """By eigenvectors in the first step, then by QR, and a mask of the usable ones."""
    # Two conditionals: where vmap computes both branches, one LAPACK routine comes after the other.
    # At the same time they may deadlock on the CPU.
    first, ok = jax.lax.cond(is_first, by_eigh, unchanged, a, old)
    new, finite = jax.lax.cond(is_first, unchanged, by_qr, a, first)
    return new, ok & finite


def _after(arrays: Sequence[Array], t: Array) -> Array:
    """The count ``t``, with a dependency that delays its uses until the arrays are computed."""
    # The addition does nothing since t is positive, but XLA cannot know it.
    firsts = [a.ravel()[0].astype(t.dtype) for a in arrays if a.size]
    return t + jnp.where(t < 0, sum(firsts), 0)


# The end


def _end(work: SoapParameter, d: Array, new: Any) -> tuple[Any, Any]:
    """The update in the gradient's form and dtype, and the slots as the state stores them."""
    g, _, s = work.leaf
    d = work.blocks.join(d).reshape(g.shape) if work.blocks.preconditioned else d
    as_kept = lambda a, b: saturating_cast(b.reshape(a.shape), a.dtype)
    return saturating_cast(d, g.dtype), jax.tree.map(as_kept, s, new)
