"""Shampoo: a preconditioner for each dimension of a parameter."""

import functools
import numbers
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from ...core.checks import check, check_decays, check_not_negative, check_positive, check_size
from ...core.numerics import norm, safe_divide, saturating_cast, upcast, wide_dtype
from ...core.paths import check_mask, resolve_mask
from ...core.rows import SparseRows, is_rows
from ...rules.leafwise import leafwise, zeros
from ...rules.learning_rate import scale_by_learning_rate
from ...rules.treewise import Leaf, treewise
from ...state.tf1_names import TF1Names
from ...state.types import Slot
from .blocks import Blocks, cut
from .refresh import is_due, refresh
from .roots import METHODS

GRAFTINGS = (None, "sgd", "adagrad", "rmsprop", "adam")

# In full precision on every backend, as all matrix products here.
_product = functools.partial(jax.lax.dot_general, precision=jax.lax.Precision.HIGHEST)


class ShampooSlots(NamedTuple):
    """What Shampoo keeps; ``Gbar`` and ``H`` are tuples over the dimensions of a parameter."""

    gbar: Slot  # weighted sum of the gradients
    Gbar: Slot  # weighted sums of their second moments; of large dimensions the diagonals only
    H: Slot  # inverse roots of the matrices among those
    graft: Slot  # mean or sum of the squared gradient, where grafting needs one
    momentum: Slot  # decaying sum of the steps, where wanted

    tf1 = TF1Names(
        order=("gbar", ("H", "Gbar"), "graft", "momentum"),
        optional=("H",),
        not_in_tf1={"num_failed_roots": None},
    )


class Work(NamedTuple):
    """One parameter in the course of an update, in float32 at least."""

    leaf: Leaf
    blocks: Blocks
    rows: SparseRows | None  # given if only the listed rows are here
    g: Array
    slots: ShampooSlots

    @property
    def rank(self) -> int:
        """The number of preconditioners."""
        return len(self.blocks.dims)


def scale_by_shampoo(
    max_matrix_size: int = 768,
    gbar_decay: optax.ScalarOrSchedule = 0.0,
    gbar_weight: optax.ScalarOrSchedule = 1.0,
    mat_gbar_decay: optax.ScalarOrSchedule = 1.0,
    mat_gbar_weight: optax.ScalarOrSchedule = 1.0,
    svd_interval: optax.ScalarOrSchedule = 1,
    precond_update_interval: optax.ScalarOrSchedule = 1,
    epsilon: float = 1e-4,
    alpha: optax.ScalarOrSchedule = 0.5,
    use_iterative_root: bool = False,
    *,
    root: str | None = None,
    relative_epsilon: bool = False,
    block_size: int | None = None,
    merge_dims: bool = False,
    skip_vectors: bool = False,
    stagger: bool = False,
    grafting: str | None = None,
    grafting_decay: float = 0.999,
    grafting_eps: float = 1e-8,
    momentum: float | None = None,
    nesterov: bool = False,
    start_step: int = 0,
    axis_name: str | None = None,
) -> optax.GradientTransformationExtraArgs:
    """The direction of :func:`optzoo.shampoo`, which describes the arguments."""
    max_matrix_size = check_size(max_matrix_size=max_matrix_size)
    block_size = None if block_size is None else check_size(1, block_size=block_size)
    check("in [0, 1]", lambda v: 0 <= v <= 1, gbar_decay=gbar_decay, mat_gbar_decay=mat_gbar_decay)
    check_positive(gbar_weight=gbar_weight, mat_gbar_weight=mat_gbar_weight)
    check_positive(epsilon=epsilon, alpha=alpha)
    intervals = {"svd_interval": svd_interval, "precond_update_interval": precond_update_interval}
    check("at least 1", lambda v: v >= 1, **intervals)
    [grafting_decay] = check_decays(grafting_decay=grafting_decay)
    check_not_negative(grafting_eps=grafting_eps, momentum=momentum, start_step=start_step)
    if grafting not in GRAFTINGS:
        raise ValueError(f"grafting must be one of {GRAFTINGS}, got {grafting!r}")
    if root not in (None, *METHODS):
        raise ValueError(f"root must be None or one of {tuple(METHODS)}, got {root!r}")
    root = root or ("two_iterations" if use_iterative_root else "eigh")
    if root != "eigh" and not isinstance(alpha, numbers.Real):
        raise TypeError(
            f"alpha must be a plain number for root={root!r}, got {alpha!r}; "
            "optax.inject_hyperparams needs it among its static_args"
        )
    if stagger and not (isinstance(svd_interval, int) and svd_interval > 1):
        raise ValueError(f"svd_interval must be an int above 1 to stagger, got {svd_interval!r}")
    blocks_of = functools.partial(
        cut,
        max_matrix_size=max_matrix_size,
        block_size=block_size,
        merge_dims=merge_dims,
        skip_vectors=skip_vectors,
    )
    squares = grafting in ("adagrad", "rmsprop", "adam")
    rows_can_stay = _statically_equals(gbar_decay, 0) and _statically_equals(mat_gbar_decay, 1)

    def no_statistics(x):
        blocks = blocks_of(jnp.shape(x))
        dtype = wide_dtype(x)  # which a root needs
        shape = lambda d, full: blocks.stack(d, d) if full else blocks.stack(d)
        return tuple(jnp.zeros(shape(*factor), dtype) for factor in blocks.factors)

    def no_roots(x):
        blocks, dtype = blocks_of(jnp.shape(x)), jnp.result_type(x)
        eye = lambda d: jnp.broadcast_to(jnp.eye(d, dtype=dtype), blocks.stack(d, d))
        return tuple(eye(d) if full else () for d, full in blocks.factors)

    def begin(leaf):
        g, _, s = leaf
        blocks, rows = blocks_of(g.shape), None
        of_rows = not blocks.full[0] and blocks.dims[:1] == g.shape[:1]  # not merged
        if is_rows(g) and rows_can_stay and blocks.factors and of_rows:
            rows = g.coalesce()
            g, s = rows.values, _map_rows(rows.gather, s)
            blocks = blocks.of_rows(len(g))
        elif is_rows(g):
            g = g.to_dense()
        g, s = jax.tree.map(upcast, (g, s))
        return Work(leaf, blocks, rows, g, _map_matrices(blocks.unstack, s))

    def end(work, p, new):
        g, _, s = work.leaf
        u, new = saturating_cast(p, g.dtype), _map_matrices(work.blocks.restack, new)
        if work.rows is not None:
            u = work.rows.with_values(u).drop_padding()
            new = _map_rows(work.rows.scatter, s, new)
        return u, jax.tree.map(lambda a, b: saturating_cast(b, a.dtype), s, new)

    def statistics(live, step, weight, decay, interval):
        """The second moments to use now and those to keep, by parameter and dimension."""
        gs = [work.blocks.split(work.g) for work in live]

        def accumulate(old):
            pairs = {}
            for (j, i), a in old.items():
                if a.ndim == 3:
                    new = weight * interval * _gram(gs[j], i)
                else:
                    n = 1 if live[j].rows is not None or live[j].rank == 1 else a.shape[1]
                    new = weight * _squares(gs[j], i) / n
                pairs[j, i] = _average(a, new, decay, mat_gbar_decay)
            return tuple({key: pair[k] for key, pair in pairs.items()} for k in (0, 1))

        old = {(j, i): a for j, work in enumerate(live) for i, a in enumerate(work.slots.Gbar)}
        matrices, diagonals = ({k: a for k, a in old.items() if a.ndim == n} for n in (3, 2))
        due = is_due(step, 1 if _statically_equals(precond_update_interval, 1) else interval)
        if due is True:
            full = accumulate(matrices)
        else:
            full = jax.lax.cond(due, accumulate, lambda old: (old, old), matrices)
        return tuple(a | b for a, b in zip(full, accumulate(diagonals), strict=True))

    def take_root(a, rank, alpha):
        order = _order(rank, alpha, root)
        return METHODS[root](a / a.shape[-1], order, epsilon, relative_epsilon)

    def rule(leaves, shared, t, *, T, alpha, **hyper):
        live = [begin(leaf) for leaf in leaves if leaf.g is not None]
        wide = jnp.result_type(jnp.float32, *(work.g for work in live))
        hyper = {k: jnp.asarray(v, wide) for k, v in hyper.items()}

        used, kept = statistics(
            live,
            T,
            hyper["mat_gbar_weight"],
            hyper["mat_gbar_decay"],
            hyper["precond_update_interval"],
        )
        full = [key for key, a in used.items() if a.ndim == 3]
        new, unusable = refresh(
            [used[key] for key in full],
            [live[j].slots.H[i] for j, i in full],
            [live[j].rank for j, _ in full],
            functools.partial(take_root, alpha=alpha),
            step=T,
            interval=svd_interval if isinstance(svd_interval, int) else hyper["svd_interval"],
            stagger=stagger,
            axis_name=axis_name,
        )
        roots = dict(zip(full, new, strict=True))

        def finish(j, work):
            s, b, gbar = work.slots, work.g, work.slots.gbar
            if work.rows is None:
                weighted = hyper["gbar_weight"] * work.g
                b, gbar = _average(gbar, weighted, hyper["gbar_decay"], gbar_decay)
            p = work.blocks.split(b)
            for i in range(len(s.Gbar)):
                if (j, i) in roots:
                    p = _multiply(p, roots[j, i], i)
                else:
                    q = used[j, i]
                    h = jnp.where(q > 0, jnp.where(q > 0, q, 1) ** (-alpha / work.rank), 0)
                    p = p * jnp.expand_dims(h, [a for a in range(1, p.ndim) if a != 1 + i])
            p = work.blocks.join(p)
            d, v = graft(b, work.g, s.graft, t, hyper)
            if not s.Gbar:
                p = d
            elif grafting is not None:
                p = p * safe_divide(norm(d), norm(p))
            if not _statically_equals(start_step, 0):
                p = jnp.where(start_step < T, p, d)
            m = s.momentum
            if momentum is not None:
                m = momentum * m + p
                p = p + momentum * m if nesterov else m
            dims = range(len(s.Gbar))
            matrices = tuple(kept[j, i] for i in dims), tuple(roots.get((j, i), ()) for i in dims)
            return end(work, p, ShampooSlots(gbar, *matrices, v, m))

        done = iter([finish(j, work) for j, work in enumerate(live)])
        done = [(None, leaf.slots) if leaf.g is None else next(done) for leaf in leaves]
        return done, {"num_failed_roots": shared["num_failed_roots"] + unusable}

    def graft(b, g, v, t, hyper):
        """The step of a simpler optimizer, whose length is taken over."""
        if not squares:
            return b, v
        decay = jnp.asarray(grafting_decay, g.dtype)
        v = v + g**2 if grafting == "adagrad" else decay * v + (1 - decay) * g**2
        if grafting != "adam":
            return safe_divide(b, jnp.sqrt(v) + grafting_eps, grafting_eps), v
        # The sums of the weights so far, which Adam divides by.
        total = lambda decay: jnp.where(decay < 1, -jnp.expm1(t * jnp.log(decay)) / (1 - decay), t)
        b = b / (hyper["gbar_weight"] * total(hyper["gbar_decay"]))
        v_mean = v / ((1 - decay) * total(decay))
        return safe_divide(b, jnp.sqrt(v_mean) + grafting_eps, grafting_eps), v

    none = lambda x: ()
    return treewise(
        rule,
        slots=ShampooSlots(
            zeros,
            no_statistics,
            no_roots,
            zeros if squares else none,
            none if momentum is None else zeros,
        ),
        shared=lambda: {"num_failed_roots": jnp.zeros([], jnp.int32)},
        scheduled={
            "T": lambda k: k + 1,
            "gbar_decay": gbar_decay,
            "gbar_weight": gbar_weight,
            "mat_gbar_decay": mat_gbar_decay,
            "mat_gbar_weight": mat_gbar_weight,
            "svd_interval": svd_interval,
            "precond_update_interval": precond_update_interval,
            "alpha": alpha,
        },
    )


def shampoo(
    learning_rate: optax.ScalarOrSchedule = 1.0,
    max_matrix_size: int = 768,
    gbar_decay: optax.ScalarOrSchedule = 0.0,
    gbar_weight: optax.ScalarOrSchedule = 1.0,
    mat_gbar_decay: optax.ScalarOrSchedule = 1.0,
    mat_gbar_weight: optax.ScalarOrSchedule = 1.0,
    svd_interval: optax.ScalarOrSchedule = 1,
    precond_update_interval: optax.ScalarOrSchedule = 1,
    epsilon: float = 1e-4,
    alpha: optax.ScalarOrSchedule = 0.5,
    use_iterative_root: bool = False,
    *,
    root: str | None = None,
    relative_epsilon: bool = False,
    block_size: int | None = None,
    merge_dims: bool = False,
    skip_vectors: bool = False,
    stagger: bool = False,
    grafting: str | None = None,
    grafting_decay: float = 0.999,
    grafting_eps: float = 1e-8,
    momentum: float | None = None,
    nesterov: bool = False,
    start_step: int = 0,
    weight_decay: float | None = None,
    mask: Any = None,
    axis_name: str | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Shampoo, as in ``tf.contrib.opt.ShampooOptimizer``, and what large models need beyond it.

    For a gradient :math:`g` of rank :math:`n`, with :math:`\Gamma_i(g)` the Gram matrix of its
    slices along dimension :math:`i`, of size :math:`d_i`, and :math:`\times_i` the product along
    that dimension:

    .. math::
        b_t &= \gamma_t\, b_{t-1} + w_t\, g_t \\
        G_{i,t} &= \delta_t\, G_{i,t-1} + v_t K\, \Gamma_i(g_t) && \text{every } K \text{ steps} \\
        H_{i,t} &= (G_{i,t} / d_i + \epsilon I)^{-\alpha / n} && \text{every } S \text{ steps} \\
        x_t &= x_{t-1} - \eta_t\, b_t \times_1 H_{1,t} \times_2 \dots \times_n H_{n,t}

    A dimension larger than ``max_matrix_size`` has only the diagonal of :math:`G_i`, every step and
    without :math:`\epsilon` (an element of zero gives zero; of a vector it is not divided by
    :math:`d_i`). A scalar counts as a vector of one. All matrix products are in full precision on
    every backend.

    Steps count from 1 by themselves, or follow ``update(..., global_step=)``: the original's
    :math:`T` is ``global_step + 1``. Until the first refresh at step :math:`S` every :math:`H_i` is
    the identity. A root that is not finite or not accurate leaves the previous one in place, and is
    counted in ``state.shared["num_failed_roots"]``.

    A row-sparse gradient is as good as its dense one (:func:`optzoo.dense`), unless its row
    dimension has only a diagonal, ``gbar_decay`` is 0 and ``mat_gbar_decay`` is 1: then only the
    touched rows live, and diagonals are not divided by :math:`d_i`.

    Args:
        learning_rate: :math:`\eta`, a number or a schedule.
        max_matrix_size: the largest dimension with a whole matrix. Structural: it cannot be
            injected.
        gbar_decay: :math:`\gamma`, in [0, 1], a number or a schedule.
        gbar_weight: :math:`w`, positive, a number or a schedule.
        mat_gbar_decay: :math:`\delta`, in [0, 1], a number or a schedule. With the number 0 nothing
            is kept: a step without new statistics has :math:`G_i = 0`.
        mat_gbar_weight: :math:`v`, positive, a number or a schedule.
        svd_interval: :math:`S`, in steps, at least 1, a number or a schedule.
        precond_update_interval: :math:`K`, in steps, at least 1, a number or a schedule.
        epsilon: :math:`\epsilon`, positive. Below about 1e-7 of the largest eigenvalue it is lost
            in float32.
        alpha: :math:`\alpha`, positive, a number or a schedule; a number unless ``root`` is
            ``"eigh"``.
        use_iterative_root: roots by two iterations as in the original, which stops the first one
            early. Needs :math:`n / (2 \alpha)` to be an integer.
        root: ``"eigh"`` (by eigenvalues), ``"newton"`` (by the coupled Newton iteration, for
            accelerators; needs :math:`n / \alpha` to be an integer), ``"auto"`` (eigh on the CPU,
            newton elsewhere), or None: what ``use_iterative_root`` says.
        relative_epsilon: whether ``epsilon`` is a share of the largest eigenvalue.
        block_size: cuts dimensions larger than this, and not larger than ``max_matrix_size``, into
            equal blocks, each with statistics of its own; None cuts none. Structural.
        merge_dims: merges neighbouring dimensions as long as they fit in a block and two are
            left: a kernel of shape (3, 3, 64, 128) has those of (576, 128).
        skip_vectors: no preconditioner for vectors and scalars.
        stagger: each step refreshes its share of the roots, so that no step takes longer than the
            others; ``svd_interval`` must be an int above 1.
        grafting: takes the length of each parameter's step from a simpler optimizer: ``"sgd"``,
            ``"adagrad"``, ``"rmsprop"``, ``"adam"`` (on :math:`b`, without bias), or None.
        grafting_decay: of the mean square of RMSProp and Adam, in [0, 1).
        grafting_eps: beside the root of the mean square, at least 0.
        momentum: at least 0: the steps are summed with this decay before the rate; None for none.
        nesterov: look ahead along that sum.
        start_step: until and with this step the simpler optimizer's step itself is taken, or
            :math:`b` without grafting.
        weight_decay: :math:`\lambda`, at least 0: adds :math:`\lambda x_{t-1}` to what is
            multiplied by the rate; None for none. (The original's ``ShampooW``, whose decay is not
            times the rate, is :func:`optzoo.decoupled_weight_decay` around it.)
        mask: which parameters decay: a tree of bools, or a tuple of fragments of their paths; None
            for all.
        axis_name: of replicas that have the same gradients: each computes its share of the roots.

    Raises:
        TypeError: if an argument is of the wrong kind.
        ValueError: if an argument is out of its range; if params are needed and missing; when
            traced, if the order of a root is no integer and has to be one.

    References:
        Gupta et al., `Shampoo: Preconditioned Stochastic Tensor Optimization
        <https://arxiv.org/abs/1802.09568>`_, 2018; Anil et al., `Scalable Second Order
        Optimization for Deep Learning <https://arxiv.org/abs/2002.09018>`_, 2020 (blocks,
        grafting, intervals).

    Differences from the original:
        The step counts by itself; the original's default ``global_step=0`` is a constant, with
        which intervals above 1 never come. Scalars work. ``svd_interval`` may be a schedule.
        Unusable roots are not used. Row-sparse gradients with ``mat_gbar_decay`` other than 1
        become dense instead of an ``AssertionError``; those of resource variables, which the
        original ignores, move as those of others. ``ShampooW`` there passes its arguments on in
        the wrong order.
    """
    direction = scale_by_shampoo(
        max_matrix_size,
        gbar_decay,
        gbar_weight,
        mat_gbar_decay,
        mat_gbar_weight,
        svd_interval,
        precond_update_interval,
        epsilon,
        alpha,
        use_iterative_root,
        root=root,
        relative_epsilon=relative_epsilon,
        block_size=block_size,
        merge_dims=merge_dims,
        skip_vectors=skip_vectors,
        stagger=stagger,
        grafting=grafting,
        grafting_decay=grafting_decay,
        grafting_eps=grafting_eps,
        momentum=momentum,
        nesterov=nesterov,
        start_step=start_step,
        axis_name=axis_name,
    )
    links = [direction, scale_by_learning_rate(learning_rate)]
    if weight_decay is not None:
        links.insert(1, _add_decay(weight_decay, mask))
    return optax.chain(*links)


def blocked_shampoo(
    learning_rate: optax.ScalarOrSchedule = 1e-3,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-6,
    *,
    block_size: int = 512,
    max_matrix_size: int = 8192,
    root_interval: optax.ScalarOrSchedule = 20,
    statistics_interval: optax.ScalarOrSchedule = 1,
    grafting: str | None = "adam",
    grafting_decay: float = 0.999,
    grafting_eps: float = 1e-8,
    start_step: int = 20,
    alpha: float = 0.5,
    root: str = "auto",
    stagger: bool = False,
    momentum: float | None = None,
    nesterov: bool = False,
    weight_decay: float | None = None,
    mask: Any = None,
    axis_name: str | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Shampoo for large models: in blocks, grafted, with roots now and then.

    The one to begin with. It is :func:`optzoo.shampoo` with other settings:

    .. math::
        b_t &= \beta_1 b_{t-1} + (1 - \beta_1)\, g_t \\
        G_{i,t} &= \beta_2 G_{i,t-1} + (1 - \beta_2)\, \Gamma_i(g_t) \\
        H_{i,t} &= (G_{i,t} + \epsilon\, \lambda_{\max}(G_{i,t})\, I)^{-\alpha / n} \\
        p_t &= b_t \times_1 H_{1,t} \times_2 \dots \times_n H_{n,t} \\
        x_t &= x_{t-1} - \eta_t
            \left(\frac{\lVert a_t \rVert}{\lVert p_t \rVert}\, p_t + \lambda\, x_{t-1}\right)

    for each block of a parameter, where :math:`a_t` is the step of Adam, and the norms are those
    of the whole parameter. So the rate of a well-tuned Adam is a good start. Vectors and scalars,
    which have little to gain, take Adam's steps. Neighbouring small dimensions are merged.

    Beside the parameter it keeps, for each of its elements, about four more numbers in the
    matrices (with square blocks), one for :math:`b`, and one for Adam's mean square;
    :func:`optzoo.slots_dtype` halves all of them but :math:`G`.

    Row-sparse gradients become dense (:func:`optzoo.dense`): give tables to another optimizer with
    ``optax.partition``.

    Args:
        learning_rate: :math:`\eta`, a number or a schedule.
        b1: :math:`\beta_1`, in [0, 1).
        b2: :math:`\beta_2`, in [0, 1), for each update of the statistics.
        eps: :math:`\epsilon`, positive, relative to the largest eigenvalue.
        block_size: the largest dimension of a block. Larger blocks precondition better, and cost
            more memory and time. Structural: it cannot be injected.
        max_matrix_size: larger dimensions, such as those of a vocabulary, have only a diagonal.
            Structural.
        root_interval: steps between two refreshes of a root, at least 1, a number or a schedule.
        statistics_interval: steps between two updates of the statistics, at least 1, a number or a
            schedule.
        grafting: ``"adam"``, ``"rmsprop"``, ``"adagrad"``, ``"sgd"`` or None, as in
            :func:`optzoo.shampoo`, as are the rest.
        grafting_decay: of Adam's mean square, in [0, 1).
        grafting_eps: beside its root, at least 0.
        start_step: until and with this step, plain steps of Adam.
        alpha: :math:`\alpha`, positive, the power of all preconditioners together. 1 often trains
            faster, with roots more often than every 20 steps. Structural.
        root: how to compute roots.
        stagger: each step refreshes its share of the roots.
        momentum: a sum of the steps, at least 0; None for none.
        nesterov: look ahead along that sum.
        weight_decay: :math:`\lambda`, at least 0; None for none.
        mask: which parameters decay.
        axis_name: of replicas with the same gradients, which share the work of the roots.

    Raises:
        TypeError: if an argument is of the wrong kind.
        ValueError: if an argument is out of its range, or if params are needed and missing.

    References:
        Anil et al., `Scalable Second Order Optimization for Deep Learning
        <https://arxiv.org/abs/2002.09018>`_, 2020; Agarwal et al., `Disentangling Adaptive
        Gradient Methods from Learning Rates <https://arxiv.org/abs/2002.11803>`_, 2020
        (grafting); Shi et al., `A Distributed Data-Parallel PyTorch Implementation of the
        Distributed Shampoo Optimizer <https://arxiv.org/abs/2309.06497>`_, 2023.
    """
    b1, b2 = check_decays(b1=b1, b2=b2)
    check_positive(eps=eps)
    intervals = {"root_interval": root_interval, "statistics_interval": statistics_interval}
    check("at least 1", lambda v: v >= 1, **intervals)
    if stagger and not (isinstance(root_interval, int) and root_interval > 1):
        raise ValueError(f"root_interval must be an int above 1 to stagger, got {root_interval!r}")
    return shampoo(
        learning_rate,
        max_matrix_size,
        gbar_decay=b1,
        gbar_weight=1 - b1,
        mat_gbar_decay=b2,
        mat_gbar_weight=1 - b2,
        svd_interval=root_interval,
        precond_update_interval=statistics_interval,
        epsilon=eps,
        alpha=alpha,
        root=root,
        relative_epsilon=True,
        block_size=block_size,
        merge_dims=True,
        skip_vectors=True,
        stagger=stagger,
        grafting=grafting,
        grafting_decay=grafting_decay,
        grafting_eps=grafting_eps,
        momentum=momentum,
        nesterov=nesterov,
        start_step=start_step,
        weight_decay=weight_decay,
        mask=mask,
        axis_name=axis_name,
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real)


def _statically_equals(value: Any, number: int) -> bool:
    """Whether ``value`` is known to be this number, as the original asks of its arguments."""
    return _is_number(value) and value == number


def _average(x: Array, new: Array, decay: Array, given: Any) -> tuple[Array, Array]:
    """The weighted average: to use, and to keep. Without decay nothing needs to be kept."""
    if _statically_equals(given, 0):
        return new, x
    total = x + new if _statically_equals(given, 1) else decay * x + new
    return total, total


def _others(x: Array, i: int) -> tuple[int, ...]:
    """The axes but that of the blocks and the ``i``-th of a block."""
    return tuple(axis for axis in range(1, x.ndim) if axis != 1 + i)


def _gram(x: Array, i: int) -> Array:
    """The products of all pairs of slices along axis ``i`` of each block."""
    others = _others(x, i)
    return _product(x, x, ((others, others), ((0,), (0,))))


def _squares(x: Array, i: int) -> Array:
    """The diagonal of that."""
    return jnp.sum(x**2, axis=_others(x, i))


def _multiply(x: Array, h: Array, i: int) -> Array:
    """Each block times its symmetric matrix along axis ``i``."""
    if i == 0:
        return _product(h, x, (((2,), (1,)), ((0,), (0,))))
    return jnp.moveaxis(_product(x, h, (((1 + i,), (1,)), ((0,), (0,)))), -1, 1 + i)


def _order(rank: int, alpha: Any, root: str) -> Any:
    """Of the root for each dimension: the power is ``-alpha / rank``."""
    if root == "eigh":
        return rank / alpha
    order, step = rank / alpha, 2 if root == "two_iterations" else 1
    if abs(order / step - round(order / step)) > 1e-9:
        raise ValueError(
            f"alpha must divide the rank {rank} of a parameter into a multiple of {step} for "
            f"root={root!r}, got {alpha!r}: rank / alpha is {order}"
        )
    return round(order)


def _map_matrices(f: Any, slots: ShampooSlots) -> ShampooSlots:
    """``f`` of the slots that blocks have."""
    return slots._replace(Gbar=jax.tree.map(f, slots.Gbar), H=jax.tree.map(f, slots.H))


def _map_rows(f: Any, *slots: ShampooSlots) -> ShampooSlots:
    """``f`` of the slots that have rows as the parameter has."""
    transposed = lambda *xs: f(*(x.T for x in xs)).T  # the blocks' axis comes first there
    first = transposed(*(s.Gbar[0] for s in slots))
    graft, momentum = (
        jax.tree.map(f, *column) for column in zip(*(s[3:] for s in slots), strict=True)
    )
    new = slots[-1]
    return ShampooSlots(slots[0].gbar, (first, *new.Gbar[1:]), new.H, graft, momentum)


def _add_decay(weight_decay: float, mask: Any) -> optax.GradientTransformationExtraArgs:
    check_not_negative(weight_decay=weight_decay)
    check_mask(mask=mask)
    add = leafwise(lambda g, x, s, t: (g + weight_decay * x, s), needs_params=True)
    return optax.masked(add, lambda tree: resolve_mask(True if mask is None else mask, tree))
