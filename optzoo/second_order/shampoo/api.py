"""Shampoo: a preconditioner for each dimension of a parameter."""

from __future__ import annotations

from typing import Any

import optax
from jax.typing import DTypeLike

from ...core.checks import check_decays, check_not_negative, check_positive
from ...core.numerics import is_number
from ...core.optimizer import recorded
from ...core.paths import check_mask, only_for
from ...rules.leafwise import leafwise, without_state
from ...rules.learning_rate import descend
from ..owners import Owners
from .blocks import Cutting
from .options import (
    Grafting,
    Root,
    RootOptions,
    Scheduled,
    ShampooOptions,
    UpdateOptions,
    check_interval,
)
from .transform import shampoo_transformation


@recorded
def scale_by_shampoo(
    max_matrix_size: int = 768,
    gbar_decay: optax.ScalarOrSchedule = 0.0,
    gbar_weight: optax.ScalarOrSchedule = 1.0,
    mat_gbar_decay: optax.ScalarOrSchedule = 1.0,
    mat_gbar_weight: optax.ScalarOrSchedule = 1.0,
    preconditioner_interval: optax.ScalarOrSchedule = 1,
    statistics_interval: optax.ScalarOrSchedule = 1,
    eps: float = 1e-4,
    alpha: optax.ScalarOrSchedule = 0.5,
    use_iterative_root: bool = False,
    *,
    root: Root | None = None,
    relative_eps: bool = False,
    block_size: int | None = None,
    merge_dims: bool = False,
    skip_vectors: bool = False,
    one_sided: bool = False,
    kl_statistics: bool = False,
    stagger: bool = False,
    grafting: Grafting | None = None,
    grafting_b2: float = 0.999,
    grafting_eps: float = 1e-8,
    momentum: float | None = None,
    nesterov: bool = False,
    start_step: int = 0,
    axis_name: str | None = None,
    owners: str | tuple[str, ...] | None = None,
    exchange_dtype: DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    """The direction of :func:`optzoo.shampoo`, which describes the arguments."""
    options = ShampooOptions(
        Cutting(max_matrix_size, block_size, merge_dims, skip_vectors, one_sided),
        Scheduled(
            gbar_decay, gbar_weight, mat_gbar_decay, mat_gbar_weight,
            preconditioner_interval, statistics_interval, alpha,
        ),
        RootOptions(
            root, use_iterative_root, eps, relative_eps, kl_statistics, stagger, axis_name
        ),
        UpdateOptions(grafting, grafting_b2, grafting_eps, start_step, momentum, nesterov),
        Owners.of(owners, exchange_dtype),
    )  # fmt: skip
    return shampoo_transformation(options)


@recorded
def shampoo(
    learning_rate: optax.ScalarOrSchedule = 1.0,
    max_matrix_size: int = 768,
    gbar_decay: optax.ScalarOrSchedule = 0.0,
    gbar_weight: optax.ScalarOrSchedule = 1.0,
    mat_gbar_decay: optax.ScalarOrSchedule = 1.0,
    mat_gbar_weight: optax.ScalarOrSchedule = 1.0,
    preconditioner_interval: optax.ScalarOrSchedule = 1,
    statistics_interval: optax.ScalarOrSchedule = 1,
    eps: float = 1e-4,
    alpha: optax.ScalarOrSchedule = 0.5,
    use_iterative_root: bool = False,
    *,
    root: Root | None = None,
    relative_eps: bool = False,
    block_size: int | None = None,
    merge_dims: bool = False,
    skip_vectors: bool = False,
    one_sided: bool = False,
    kl_statistics: bool = False,
    stagger: bool = False,
    grafting: Grafting | None = None,
    grafting_b2: float = 0.999,
    grafting_eps: float = 1e-8,
    momentum: float | None = None,
    nesterov: bool = False,
    start_step: int = 0,
    weight_decay: float = 0.0,
    mask: Any = None,
    axis_name: str | None = None,
    owners: str | tuple[str, ...] | None = None,
    exchange_dtype: DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Shampoo, as in ``tf.contrib.opt.ShampooOptimizer``, with extensions for large models.

    For a gradient :math:`g` of rank :math:`n`, with :math:`\Gamma_i(g)` the Gram matrix of its
    slices along dimension :math:`i`, of size :math:`d_i`, and :math:`\times_i` the product along
    that dimension:

    .. math::
        b_t &= \gamma_t\, b_{t-1} + w_t\, g_t \\
        G_{i,t} &= \delta_t\, G_{i,t-1} + v_t K\, \Gamma_i(g_t) && \text{every } K \text{ steps} \\
        H_{i,t} &= (G_{i,t} / d_i + \epsilon I)^{-\alpha / n} && \text{every } S \text{ steps} \\
        x_t &= x_{t-1} - \eta_t\, b_t \times_1 H_{1,t} \times_2 \dots \times_n H_{n,t}

    A dimension larger than ``max_matrix_size`` keeps only the diagonal of :math:`G_i`, which is
    updated at every step and has no :math:`\epsilon`: a diagonal element of zero gives a step of
    zero. The diagonal of a vector is not divided by :math:`d_i`. A scalar is treated as a vector of
    size one. All matrix products are in full precision on every backend.

    Steps are counted from 1, unless ``update`` is given ``global_step``: then the step is
    ``global_step + 1``, as in the original. Until the first refresh at step :math:`S` every
    :math:`H_i` is the identity. A root that is not finite or not accurate is not used: the previous
    root is kept, and ``state.shared["num_failed_roots"]`` counts the failure.

    With ``owners`` each matrix has one owner among the devices along these mesh axes, which also
    stores its state. A step sends all gradients of one shape to the owners by one all-to-all and
    the updates back by another: the number of messages does not depend on the number of layers. The
    state, an ``OwnersState``, contains a stack of the matrices of each shape, padded to a multiple
    of the number of devices: :func:`optzoo.state.slots_like` converts states between numbers of
    devices, and to and from states without owners. Vectors and scalars keep their sharding.

    A row-sparse gradient is converted to a dense one (:func:`optzoo.rules.dense`), unless its row
    dimension has only a diagonal, ``gbar_decay`` is 0 and ``mat_gbar_decay`` is 1: then only the
    touched rows of the parameter and of its slots change, and diagonals are not divided by
    :math:`d_i`.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.shampoo(0.1)
        >>> params = jnp.array([[1.0, 0.0], [0.0, 100.0]])
        >>> updates, state = tx.update(params, tx.init(params), params)
        >>> print(updates + 0)  # both directions move alike, whatever their scale
        [[-0.1414  0.    ]
         [ 0.     -0.1414]]

    Args:
        learning_rate: :math:`\eta`, a number or a schedule.
        max_matrix_size: the largest dimension with a full matrix. It determines shapes:
            ``optax.inject_hyperparams`` needs it among its ``static_args``.
        gbar_decay: :math:`\gamma`, in [0, 1], a number or a schedule.
        gbar_weight: :math:`w`, positive, a number or a schedule.
        mat_gbar_decay: :math:`\delta`, in [0, 1], a number or a schedule. With the number 0 no
            statistics are stored: at a step without new statistics :math:`G_i = 0`.
        mat_gbar_weight: :math:`v`, positive, a number or a schedule.
        preconditioner_interval: :math:`S`, in steps, at least 1, a number or a schedule.
        statistics_interval: :math:`K`, in steps, at least 1, a number or a schedule.
        eps: :math:`\epsilon`, positive. In float32 it has no effect below about 1e-7 of the
            largest eigenvalue.
        alpha: :math:`\alpha`, positive, a number or a schedule; a number unless ``root`` is
            ``"eigh"`` or ``"pseudo_inverse"``.
        use_iterative_root: computes roots by two iterations as the original, which stops the first
            iteration early. :math:`n / (2 \alpha)` must be an integer.
        root: ``"eigh"`` (by eigenvalues); ``"newton"`` (by the coupled Newton iteration, for
            accelerators; :math:`n / \alpha` must be an integer); ``"auto"`` (eigh on the CPU,
            newton elsewhere); ``"pseudo_inverse"`` (by eigenvalues, without the ridge: eigenvalues
            of :math:`G_i / d_i` up to ``eps`` are replaced by zero in the root, so that parameters
            do not move in directions that no gradient had); or None, for the method that
            ``use_iterative_root`` selects.
        relative_eps: whether ``eps`` is relative to the largest eigenvalue.
        block_size: cuts dimensions larger than this, and not larger than ``max_matrix_size``, into
            equal blocks with separate statistics; None: no blocks. It determines shapes, as
            ``max_matrix_size``.
        merge_dims: merges neighbouring dimensions while the product fits in a block and at least
            two dimensions remain: a kernel (3, 3, 64, 128) is treated as a matrix (576, 128).
        skip_vectors: no preconditioner for vectors and scalars.
        one_sided: preconditions only the smallest of the dimensions with a matrix, with :math:`n =
            1`; other dimensions have no diagonal either.
        kl_statistics: :math:`\Gamma_i` is computed from the gradient times the last :math:`H_j` of
            all other dimensions with a matrix, as in KL-Shampoo, and no :math:`G_i` is divided by
            :math:`d_i`.
        stagger: each step refreshes a share of the roots, so that all steps take equally long;
            ``preconditioner_interval`` must be an int above 1.
        grafting: scales each parameter's step to the length of a simpler optimizer's: ``"sgd"``,
            ``"adagrad"``, ``"rmsprop"``, ``"adam"`` (on :math:`b`, with bias correction), or None.
            :func:`optzoo.transforms.graft` does this for any two optimizers.
        grafting_b2: decay of the mean square of RMSProp and Adam, in [0, 1).
        grafting_eps: added to the root of the mean square, at least 0.
        momentum: decay of the sum of the steps, at least 0, applied before the learning rate; None:
            no momentum.
        nesterov: whether to use Nesterov momentum.
        start_step: the last step that is the simpler optimizer's, or :math:`b` without grafting.
        weight_decay: :math:`\lambda`, at least 0: adds :math:`\lambda x_{t-1}` to the direction
            before it is multiplied by the rate. (The decay of the original's ``ShampooW`` is not
            multiplied by the rate: use :func:`optzoo.decoupled_weight_decay` instead.)
        mask: the parameters that decay, a mask such as ``"kernel"`` or ``("kernel", "embedding")``
            (:func:`optzoo.param_groups`); None for all.
        axis_name: the mesh axis of replicas that have the same gradients: each computes a share of
            the roots.
        owners: the mesh axes along which devices share the matrices, a name or a tuple of names;
            None: no owners. The mesh is that of the parameters, or of ``jax.set_mesh``. Inside
            ``shard_map``, where the parameters are replicated, each device has its part of the
            state and needs the gradients of its own matrices only.
        exchange_dtype: dtype in which gradients and updates are sent, such as ``"bfloat16"``; None
            for their own.

    Raises:
        TypeError: if an argument is of the wrong kind.
        ValueError: if an argument is out of its range; if params are needed and missing; at trace
            time, if the order of a root must be an integer and is not.
        NotImplementedError: if an update is differentiated twice. First derivatives are those of
            the formula for every ``root``.

    References:
        Gupta et al., `Shampoo: Preconditioned Stochastic Tensor Optimization
        <https://arxiv.org/abs/1802.09568>`_, 2018; Anil et al., `Scalable Second Order Optimization
        for Deep Learning <https://arxiv.org/abs/2002.09018>`_, 2020 (blocks, grafting, intervals);
        An et al., `ASGO: Adaptive Structured Gradient Optimization
        <https://arxiv.org/abs/2503.20762>`_, 2025 (``one_sided``); Lin et al., `Understanding and
        Improving Shampoo and SOAP via Kullback-Leibler Minimization
        <https://arxiv.org/abs/2509.03378>`_, 2025 (``kl_statistics``). Pseudo-inverse,
        ``one_sided`` and ``kl_statistics`` are as in `facebookresearch/optimizers
        <https://github.com/facebookresearch/optimizers>`_.

    Differences from the original:
        The optimizer counts its steps; with the original's default ``global_step=0`` an interval
        above 1 never ends. Scalars are accepted. ``preconditioner_interval`` may be a schedule.
        Roots that are not finite or not accurate are not used. Row-sparse gradients with
        ``mat_gbar_decay`` other than 1 become dense; the original raises an ``AssertionError``.
        Row-sparse gradients of resource variables, which the original ignores, are used. The
        original's ``ShampooW`` passes its arguments in the wrong order.
    """
    options = ShampooOptions(
        Cutting(max_matrix_size, block_size, merge_dims, skip_vectors, one_sided),
        Scheduled(
            gbar_decay, gbar_weight, mat_gbar_decay, mat_gbar_weight,
            preconditioner_interval, statistics_interval, alpha,
        ),
        RootOptions(
            root, use_iterative_root, eps, relative_eps, kl_statistics, stagger, axis_name
        ),
        UpdateOptions(grafting, grafting_b2, grafting_eps, start_step, momentum, nesterov),
        Owners.of(owners, exchange_dtype),
    )  # fmt: skip
    return _optimizer(options, learning_rate, weight_decay, mask)


@recorded
def blocked_shampoo(
    learning_rate: optax.ScalarOrSchedule = 1e-3,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-6,
    *,
    block_size: int = 512,
    max_matrix_size: int = 8192,
    preconditioner_interval: optax.ScalarOrSchedule = 20,
    statistics_interval: optax.ScalarOrSchedule = 1,
    grafting: Grafting | None = "adam",
    grafting_b2: float = 0.999,
    grafting_eps: float = 1e-8,
    start_step: int = 20,
    alpha: float = 0.5,
    root: Root = "auto",
    one_sided: bool = False,
    kl_statistics: bool = False,
    stagger: bool = False,
    momentum: float | None = None,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    mask: Any = None,
    axis_name: str | None = None,
    owners: str | tuple[str, ...] | None = None,
    exchange_dtype: DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Shampoo for large models: in blocks, grafted, with periodic root updates.

    The recommended form of :func:`optzoo.shampoo`, with other settings:

    .. math::
        b_t &= \beta_1 b_{t-1} + (1 - \beta_1)\, g_t \\
        G_{i,t} &= \beta_2 G_{i,t-1} + (1 - \beta_2)\, \Gamma_i(g_t) \\
        H_{i,t} &= (G_{i,t} + \epsilon\, \lambda_{\max}(G_{i,t})\, I)^{-\alpha / n} \\
        p_t &= b_t \times_1 H_{1,t} \times_2 \dots \times_n H_{n,t} \\
        x_t &= x_{t-1} - \eta_t
            \left(\frac{\lVert a_t \rVert}{\lVert p_t \rVert}\, p_t + \lambda\, x_{t-1}\right)

    for each block of a parameter, where :math:`a_t` is the step of Adam, and the norms are those of
    the whole parameter. The learning rate of a well-tuned Adam is a good first choice. Vectors and
    scalars, which gain little from a preconditioner, take Adam's steps. Small neighbouring
    dimensions are merged.

    For each element of a parameter the state holds about six values: four in the matrices (with
    square blocks), one in :math:`b`, and one in Adam's mean square. :func:`optzoo.slots_dtype`
    halves the memory of all of them except :math:`G`.

    Row-sparse gradients become dense (:func:`optzoo.rules.dense`): use another optimizer for
    embedding tables.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.blocked_shampoo(0.1, block_size=2, start_step=0)
        >>> params = jnp.eye(4, 2)
        >>> state = tx.init(params)
        >>> for _ in range(2):
        ...     updates, state = tx.update(params, state, params)
        >>> print(updates.shape, float(jnp.sum(params * updates)) < 0)  # downhill
        (4, 2) True

    Args:
        learning_rate: :math:`\eta`, a number or a schedule.
        b1: :math:`\beta_1`, in [0, 1).
        b2: :math:`\beta_2`, in [0, 1), for each update of the statistics.
        eps: :math:`\epsilon`, positive, relative to the largest eigenvalue.
        block_size: the largest dimension of a block. Larger blocks precondition better, and cost
            more memory and time. It determines shapes: ``optax.inject_hyperparams`` needs it among
            its ``static_args``, and ``max_matrix_size`` and ``alpha``, too.
        max_matrix_size: larger dimensions, such as those of a vocabulary, have only a diagonal.
        preconditioner_interval: steps between two refreshes of a root, at least 1, a number or a
            schedule.
        statistics_interval: steps between two updates of the statistics, at least 1, a number or a
            schedule.
        grafting: ``"adam"``, ``"rmsprop"``, ``"adagrad"``, ``"sgd"`` or None, as in
            :func:`optzoo.shampoo`.
        grafting_b2: decay of Adam's mean square, in [0, 1).
        grafting_eps: added to the root of the mean square, at least 0.
        start_step: the last step that is Adam's.
        alpha: :math:`\alpha`, positive, the power of the product of all preconditioners. The value
            1 often trains faster if roots are refreshed more often than every 20 steps.
        root: how to compute roots.
        one_sided: preconditions only the smallest dimension with a matrix.
        kl_statistics: computes statistics from the gradient times the roots of the other
            dimensions.
        stagger: each step refreshes a share of the roots; ``preconditioner_interval`` must be an
            int above 1.
        momentum: decay of a sum of the steps, at least 0; None: no momentum.
        nesterov: whether to use Nesterov momentum.
        weight_decay: :math:`\lambda`, multiplied by the learning rate; at least 0.
        mask: which parameters decay.
        axis_name: the mesh axis of replicas that share the computation of the roots.
        owners: the mesh axes along which devices share the matrices, as in :func:`optzoo.shampoo`.
        exchange_dtype: dtype in which gradients and updates are sent.

    Raises:
        TypeError: if an argument is of the wrong kind.
        ValueError: if an argument is out of its range, or if params are needed and missing.
        NotImplementedError: if an update is differentiated twice. First derivatives are those of
            the formula for every ``root``.

    References:
        Anil et al., `Scalable Second Order Optimization for Deep Learning
        <https://arxiv.org/abs/2002.09018>`_, 2020; Agarwal et al., `Disentangling Adaptive
        Gradient Methods from Learning Rates <https://arxiv.org/abs/2002.11803>`_, 2020
        (grafting); Shi et al., `A Distributed Data-Parallel PyTorch Implementation of the
        Distributed Shampoo Optimizer <https://arxiv.org/abs/2309.06497>`_, 2023; the code
        `facebookresearch/optimizers <https://github.com/facebookresearch/optimizers>`_.
    """
    b1, b2 = check_decays(b1=b1, b2=b2)
    check_positive(eps=eps)
    check_interval(preconditioner_interval=preconditioner_interval, stagger=stagger)
    check_interval(statistics_interval=statistics_interval)
    options = ShampooOptions(
        Cutting(
            max_matrix_size,
            block_size,
            merge_dims=True,
            skip_vectors=True,
            one_sided=one_sided,
        ),
        Scheduled(b1, 1 - b1, b2, 1 - b2, preconditioner_interval, statistics_interval, alpha),
        RootOptions(
            root,
            use_iterative_root=False,
            eps=eps,
            relative_eps=True,
            kl_statistics=kl_statistics,
            stagger=stagger,
            axis_name=axis_name,
        ),
        UpdateOptions(grafting, grafting_b2, grafting_eps, start_step, momentum, nesterov),
        Owners.of(owners, exchange_dtype),
    )
    return _optimizer(options, learning_rate, weight_decay, mask)


def _optimizer(
    options: ShampooOptions,
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: float,
    mask: Any,
) -> optax.GradientTransformationExtraArgs:
    """The direction, plus the weight decay if there is one, times the rate."""
    decay = [] if is_number(weight_decay, 0) else [add_decay(weight_decay, mask)]
    return descend(learning_rate, shampoo_transformation(options), *decay)


def add_decay(weight_decay: float, mask: Any) -> optax.GradientTransformationExtraArgs:
    """Adds the parameters of ``mask``, times ``weight_decay``, to the direction."""
    check_not_negative(weight_decay=weight_decay)
    check_mask(mask=mask)
    add = leafwise(lambda g, x, s, t: (g + weight_decay * x, s), needs_params=True)
    return only_for(mask, without_state(add))
