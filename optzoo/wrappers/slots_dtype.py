"""Slots in another dtype than the parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from ..core.boxes import map_parameters
from ..core.checks import check_flags, check_floating, check_size
from ..core.lines import in_lines
from ..core.meshes import automatically
from ..core.numerics import is_trainable, promote_types
from ..core.optimizer import Notes, Optimizer, recorded
from ..state.inner import fitting, inner_transformation
from ..state.storage.at_random import DTYPES
from ..state.storage.codes import (
    KINDS,
    divides_groups,
    encoded,
    has_codes,
    sharding_of_codes,
    stored,
    takes_codes,
    warn_of_whole,
)
from ..state.storage.packing import PACKABLE, is_packed, pack
from ..state.storage.stored import ROUNDING, Rounding
from ..state.types import (
    Exact,
    LeafwiseState,
    Slot,
    Sum,
    holds,
    map_nodes,
    nodes_of,
)


@recorded
def slots_dtype(
    inner: optax.GradientTransformation,
    dtype: DTypeLike,
    *,
    stochastic: bool = False,
    packed: bool = False,
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
    r"""Stores the slots of any optimizer of this library in ``dtype``.

    ``slots_dtype(adam(1e-3), "bfloat16", stochastic=True)`` halves the memory of slots. By default
    slots have the dtype of their parameter, or float32 for 16-bit parameters. Arithmetic is always
    in at least float32, and updates keep the dtype of the gradient.

    ``stochastic`` rounds 16-bit slots up or down at random, without bias. Rounding to nearest stops
    slots that change slowly: with ``b2=0.999`` a step changes a mean by a thousandth, less than the
    1/256 that bfloat16 resolves. Slots annotated as ``optzoo.rules.Exact`` stay in at least
    float32: the average of :func:`optzoo.moving_average`, counts of updates, and the statistics of
    Shampoo and SOAP.

    ``"int8"`` needs 8.5 bits per element. Groups of 32 consecutive elements of the last axis share
    a scale :math:`s` of 16 bits, their largest magnitude. Elements :math:`x` of a slot that is
    ``optzoo.rules.Signed`` (a mean or a decaying sum) or ``NotNegative`` (such as a mean of
    squares) are stored as

    .. math::
        q = \operatorname{round}\Big(127\, \frac{2y}{1 + |y|}\Big), \quad y = \frac{x}{s}
        \qquad \text{and} \qquad q = \operatorname{round}\Big(255\, \frac{\sqrt x}{s}\Big),
        \quad s = \max \sqrt x

    where the code of :math:`x > 0` is at least 1 in the second form, because updates are divided by
    such slots. The update is computed from the slots before rounding. Steps are too short for
    elements whose gradients are below 1/250 of the largest one of their group
    (``docs/tasks/little_memory.md``). ``"float8_e4m3fn"`` has the same groups and scales, and
    stores the float8 (4 bits of exponent, 3 of mantissa) nearest to :math:`448 y`, or to :math:`448
    \sqrt x / s` and at least the smallest positive one: elements down to 1/200,000 of the largest
    one keep their magnitude to 6 %, so use it with ``stochastic``. All other slots are unchanged:
    sums over all steps (Adagrad, FTRL), counts, averages, factors of matrices, and slots of arrays
    with one axis or a last axis of fewer than 8 elements. With ``stochastic``, codes are rounded at
    random. The scales of a matrix with at most 128 columns, which may be a table, are stored as
    further columns of its codes, so that a row is read and written with its scales; if its last
    axis is sharded, that of the codes is replicated. :func:`optzoo.get_slot` decodes,
    :func:`optzoo.set_slot` encodes, and :func:`optzoo.state.slots_like` converts a whole state.

    The random bits are a hash of the seed, the number of the update, the path of the parameter and
    the index of the element: runs are reproducible under ``jit``, ``scan`` and ``vmap``, for any
    sharding, with rows or dense gradients. Inside ``shard_map`` indices start at 0 in each shard.
    The structure of the state does not depend on ``stochastic``.

    ``packed`` stores two slots of a parameter, such as ``m`` and ``v`` of Adam, in one array:
    16-bit slots in words of 32 bits, others side by side along the last axis, of shape ``(..., 2 *
    width)``. Words are much faster on the CPU: XLA scatters rows of 16 bits through a float32 copy
    of the whole array, but words in place. Slots side by side halve the number of rows that a
    sparse update looks up, which dominates its time on the CPU (``slots_dtype(lazy_adam(1e-3),
    "float32", packed=True)``); on a TPU two narrow rows share 128 lanes. With dense gradients XLA
    copies packed slots at every step, and if the last axis is sharded, each step moves them between
    devices. Slots without a partner of the same shape are not packed; in 32 and 64 bits, neither
    are slots with fewer than two axes or one column. :func:`optzoo.get_slot` and
    :func:`optzoo.set_slot` access each slot separately.

    With either option and 16 bits, an update is computed from the slots after rounding in bfloat16,
    and before rounding in float16.

    ``init`` creates the slots of ``inner`` and converts them. In ``jax.jit(tx.init)``, the compiler
    omits these larger arrays.

    Random rounding and packing in float32 or float64 have the derivative of the identity. Slots in
    8 bits, or packed in 16 bits, have no derivative: differentiating an update is an error.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.slots_dtype(optzoo.adam(1e-3), jnp.bfloat16)
        >>> state = tx.init(jnp.ones(4))
        >>> print(optzoo.get_slot(state, "m").dtype, optzoo.get_slot(state, "v").dtype)
        bfloat16 bfloat16

    Args:
        inner: an optimizer made by :func:`optzoo.rules.leafwise` or :func:`optzoo.rules.treewise`,
            alone or within optax's chains, masks and wrappers.
        dtype: a floating-point dtype of 16 bits or more, ``"int8"`` or ``"float8_e4m3fn"``; 8 or 16
            bits with ``stochastic``; 16, 32 or 64 with ``packed``.
        stochastic: round at random.
        packed: store two slots in one array. This changes the structure of the state.
        seed: seed of the random bits, an int, at least 0. ``update(..., rounding_seed=n)`` replaces
            it for one step. If ``slots_dtype`` is nested, the outermost seed is used.

    Raises:
        TypeError: if ``dtype`` is not one of these, or the seed is not an int; if an update with
            slots in 8 bits, or packed in 16 bits, is differentiated.
        ValueError: if an option does not support the dtype; in ``init``, if ``inner`` has no slots
            of this library, or none that may have 8 bits; in ``update``, if the state has slots
            packed as complex numbers by an old version, or, with ``stochastic``, if a
            transformation inside does not pass on the keyword arguments of its update.

    References:
        Gupta et al., `Deep Learning with Limited Numerical Precision
        <https://arxiv.org/abs/1502.02551>`_, 2015 (stochastic rounding). Ortiz et al., `FlashOptim:
        Optimizers for Memory Efficient Training <https://arxiv.org/abs/2602.23349>`_, 2026 (8
        bits). The paper's scales are float16; here scales have the same precision, no sign, and six
        bits of exponent: the precision holds for magnitudes down to 1e-14.
    """
    inner = inner_transformation(inner=inner)
    check_flags(stochastic=stochastic, packed=packed)
    store = _storage(dtype, stochastic, packed)
    seed = check_size(seed=seed)

    def init(params):
        state = inner.init(params)
        if not nodes_of(LeafwiseState, state):
            raise ValueError(
                "slots_dtype finds no slots of optzoo in this state; for an optax optimizer use "
                "its own arguments, such as mu_dtype"
            )
        return store(inner, params, state)

    def update(updates, state, params=None, **extra_args):
        if not stochastic or ROUNDING in extra_args:  # that of a slots_dtype around this one
            return inner.update(updates, state, params, **extra_args)
        given = extra_args.get("rounding_seed")
        given = jnp.asarray(seed if given is None else given).astype(jnp.uint32)
        rounding = Rounding(given, Notes())
        updates, state = inner.update(updates, state, params, **extra_args, **{ROUNDING: rounding})
        if len(rounding.notes.of) < len([s for s in nodes_of(LeafwiseState, state) if s.slots]):
            raise ValueError(NOT_PASSED_ON_MSG)
        return updates, state

    of_stored = lambda _, found: found and found._replace(at_random=found.at_random or stochastic)
    about = inner.about.with_deferral(of_stored).reading("rounding_seed")
    if (
        jnp.dtype(dtype).name in KINDS
    ):  # each update would round a row, and none rounds a deferred one
        about = about._replace(deferral=None)
    if (
        stochastic
    ):  # random bits depend on positions of rows, which must be proved to be independent
        about = about._replace(row_wise=False)
    return fitting(Optimizer(init, update, about))


NOT_PASSED_ON_MSG = (
    "a transformation inside optzoo.slots_dtype does not pass on the keyword arguments of its "
    "update, so its slots cannot be rounded at random: put slots_dtype inside it"
)

# The state, of the inner transformation and parameters, in another storage.
_Store = Callable[[Any, Any, Any], Any]


def _storage(dtype: Any, stochastic: bool, packed: bool) -> _Store:
    """The function that stores the slots of a new state; raises ``TypeError`` or ``ValueError``."""
    names = ", ".join(KINDS)
    if (name := jnp.dtype(dtype).name) in KINDS:
        if packed:
            raise ValueError(f"dtype must have 16, 32 or 64 bits with packed, got {dtype!r}")
        return functools.partial(_in_8_bits, name)
    check_floating(f" or one of {names}", dtype=dtype)
    if stochastic and jnp.dtype(dtype) not in DTYPES:
        raise ValueError(
            f"dtype must be one of {names}, bfloat16 and float16 with stochastic, got {dtype!r}"
        )
    if packed and jnp.dtype(dtype) not in PACKABLE:
        raise ValueError(f"dtype must have 16, 32 or 64 bits with packed, got {dtype!r}")
    if jnp.finfo(dtype).bits < 16:
        raise ValueError(f"dtype must have at least 16 bits, or be one of {names}, got {dtype!r}")
    return functools.partial(_in_dtype, dtype, packed)


def _in_dtype(dtype: DTypeLike, packed: bool, inner: Any, params: Any, state: Any) -> Any:
    # Only the start needs a cast: a rule gives each slot back in the dtype it came in.
    wider = state
    if jnp.finfo(dtype).bits > 32:  # 0.1 in float32 is another number
        wide = lambda x: _astype(x, dtype) if is_trainable(x) else x
        wider = inner.init(jax.tree.map(wide, params))
    state = map_nodes(LeafwiseState, functools.partial(_cast, dtype), state, wider)
    if not packed:
        return state
    by_two = lambda s: s._replace(slots=pack(s.slots, dtype))
    return map_nodes(LeafwiseState, by_two, state)


def _astype(x: Any, dtype: DTypeLike) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, dtype)
    return jnp.asarray(x, dtype)


def _cast(dtype: DTypeLike, state: Any, wider: Any) -> Any:
    """The state with slots in ``dtype``, computed from those of ``wider`` if more precise.

    Slots that were created with lower precision, and slots that are not real numbers, are
    unchanged.
    """
    what = holds(state.slots)
    has = lambda a, dtype: promote_types(a.dtype, dtype) == a.dtype

    def cast(name, slots, finer):
        exact = what[name] == Exact
        wanted = promote_types(dtype, jnp.float32) if exact else jnp.dtype(dtype)
        best = jax.tree.map(lambda a, b: a if has(a, b.dtype) else b, slots, finer)
        return jax.tree.map(
            lambda a: a.astype(wanted) if is_trainable(a) and has(a, wanted) else a, best
        )

    slots = state.slots
    return state._replace(slots=slots._make(map(cast, slots._fields, slots, wider.slots)))


def _in_8_bits(name: str, inner: Any, params: Any, state: Any) -> Any:
    del inner
    kinds = KINDS[name]

    def code(state):
        if is_packed(state.slots):
            raise ValueError(
                "inner already stores its slots packed or in 8 bits: use only one slots_dtype"
            )
        trees = map(of_slot, holds(state.slots).values(), state.slots)
        return state._replace(slots=state.slots._make(trees))

    others = {
        f"{type(node.slots).__name__}.{slot}: {_WHY_NOT[what]}"
        for node in nodes_of(LeafwiseState, state)
        for slot, what in holds(node.slots).items()
        if what not in kinds
    }
    undivided = dict[str, None]()
    of_slot = functools.partial(_coded, kinds, undivided)
    state = map_nodes(LeafwiseState, code, state)
    warn_of_whole(undivided)
    # Without parameters, as in optax.tree.map_params, no slot can be missing.
    if has_codes(state) or not others or not jax.tree.leaves(params):
        return state
    raise ValueError(
        f"dtype={name} applies to no slot of inner ({'; '.join(sorted(others))}): use bfloat16, "
        "for sums with stochastic=True"
    )


_WHY_NOT = {
    Sum: "a sum over all steps, which loses single steps in 8 bits",
    Exact: "a count, an average or a factor of a matrix",
    Slot: "annotate a mean or a decaying sum as optzoo.rules.Signed or NotNegative",
}


def _coded(kinds: Any, undivided: dict[str, None], what: Any, slots: Any) -> Any:
    if (kind := kinds.get(what)) is None:
        return slots
    encode_one = _encoder(kind)

    def encode(a):
        # A program gets its warning from state_sharding.
        if isinstance(a, jax.core.Tracer):
            return encode_one(a)
        if not isinstance(a.sharding, NamedSharding):
            return jax.jit(encode_one)(a)  # one program, without intermediate arrays
        codes = jax.eval_shape(encode_one, a)
        if divides_groups(a.sharding, codes):
            undivided[f"parameters of shape {a.shape}"] = None
        # On automatic axes XLA would choose another sharding.
        return jax.jit(encode_one, out_shardings=sharding_of_codes(a.sharding, codes))(a)

    code = in_lines(lambda a: encode(a) if takes_codes(a) else a)
    return map_parameters(code, slots, lines=True)


@functools.cache  # so that arrays of one shape share a program
def _encoder(kind: Any) -> Callable[[Any], Any]:
    return automatically(lambda a: stored(encoded(kind, a)), _specs_of_codes)


def _specs_of_codes(codes: Any, a: Any) -> Any:
    shardings = sharding_of_codes(jax.typeof(a).sharding, codes)
    return jax.tree.map(lambda _, sharding: sharding.spec, codes, shardings)
