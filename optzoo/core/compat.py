"""Access to JAX and optax beyond their stable public API, with one name for each use.

``tests/core/test_compat.py`` checks all of them against the installed versions.
"""

import functools
import importlib.util
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import jaxlib.version
import numpy as np
from jax import Array, lax

# Primitives that are told the devices when they are lowered, as custom_partitioning must be.
from jax._src.core import NamedAxisEffect as _NamedAxisEffect
from jax._src.core import trace_state_clean as _trace_state_clean
from jax._src.dispatch import prim_requires_devices_during_lowering as _prim_requires_devices
from jax.experimental import layout
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend import random as extend_random
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec
from jaxlib.mlir.dialects import sdy
from optax._src.base import NO_PARAMS_MSG as NO_PARAMS_MSG  # the message that users know

# Before jaxlib 0.12 each operation of LAPACK on several matrices waits for the threads of a pool.
# Where collectives or such operations of several devices hold all of them, no device goes on.
LAPACK_WAITS_FOR_THREADS = jaxlib.version.__version_info__ < (0, 12)

# Primitives


def make_primitive(
    name: str, f: Callable[..., Array], tangent: Callable[..., Array], batch: Callable[..., Any]
) -> Any:
    """A primitive that computes ``f(*args, **params)``, whose uses are visible in jaxprs.

    Args:
        name: the name of the primitive, in jaxprs.
        f: a function of two arrays and static keywords.
        tangent: ``tangent(t, *args, **params)`` is the derivative along ``t``, a tangent of the
            first array. The second array is not differentiated.
        batch: ``batch(args, axes, **params)`` returns the result and its batch axis; the axis of an
            unbatched array is None.
    """
    primitive = Primitive(name)
    primitive.def_impl(f)
    # What f gives, with all that JAX keeps in a type: sharding, mesh axes, weak types.
    primitive.def_abstract_eval(
        lambda *avals, **params: (
            jax.make_jaxpr(functools.partial(f, **params))(*avals).jaxpr.outvars[0].aval
        )
    )
    ad.defjvp(primitive, tangent, None)
    batching.primitive_batchers[primitive] = batch
    mlir.register_lowering(primitive, mlir.lower_fun(f, multiple_results=False))
    return primitive


def _lower_grouped(ctx: Any, new: Any, like: Any) -> list[Any]:
    if not getattr(jax.config, "jax_use_shardy_partitioner", True):
        return [new]  # XLA's older partitioner has no groups, and fails at those of Shardy
    group = ctx.module_context.new_channel()  # a number that nothing else has in this program
    for value in (new, like):
        sdy.sharding_group(value, group)
    return [new]


_grouped_p = Primitive("optzoo_placed_as")
_grouped_p.def_impl(lambda new, like: new)
_grouped_p.def_abstract_eval(lambda new, like: new)
ad.defjvp(_grouped_p, lambda t, new, like: t, None)
batching.primitive_batchers[_grouped_p] = lambda args, axes: (args[0], axes[0])
mlir.register_lowering(_grouped_p, _lower_grouped, cacheable=False)  # each with a group of its own


def group_shardings(new: Array, like: Array) -> Array:
    """``new``, which XLA divides over automatic mesh axes like ``like``, of the same shape.

    Equals ``jax.experimental.shard_alike``, which JAX 0.12 removed. If
    ``jax_use_shardy_partitioner`` is off, XLA chooses the sharding.
    """
    return _grouped_p.bind(new, like)


def make_replaceable(
    name: str,
    f: Callable[..., Sequence[Array]],
    *,
    types: Callable[..., list[Any] | None] = lambda *avals, **params: None,
    on: Mapping[str, Callable[..., Callable[..., Any]]] | None = None,
    check_plain: Callable[..., None] = lambda where, **params: None,
) -> Any:
    """A primitive with several results that computes ``f(*args, **params)``.

    It is visible in jaxprs. In derivatives and under ``vmap`` it is replaced by the operations of
    ``f``.

    Args:
        name: the name of the primitive, in jaxprs.
        f: a function of arrays and static keywords.
        types: ``types(*avals, **params)`` returns the types of the results, if they are known.
        on: ``on[platform](ctx, **params)`` returns the function that replaces ``f`` on a platform,
            such as ``cpu``.
        check_plain: ``check_plain(where, **params)`` raises an error if ``f`` itself must not run
            in a context: on other platforms, under ``vmap``, in derivatives.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(lambda *args, **params: jax.jit(functools.partial(f, **params))(*args))

    def abstract(*avals, **params):
        known = types(*avals, **params)
        if known is not None:
            return known
        # All that JAX keeps in a type: sharding, mesh axes, weak types.
        traced = jax.make_jaxpr(functools.partial(f, **params))(*avals)
        return [v.aval for v in traced.jaxpr.outvars]

    def tangents(primals, tangents, **params):
        check_plain("in derivatives", **params)
        tangents = [ad.instantiate_zeros(t) for t in tangents]
        return jax.jvp(functools.partial(f, **params), tuple(primals), tuple(tangents))

    def batch(args, axes, **params):
        check_plain("under vmap", **params)
        outs = jax.vmap(functools.partial(f, **params), in_axes=tuple(axes))(*args)
        return outs, (0,) * len(outs)

    primitive.def_abstract_eval(abstract)
    ad.primitive_jvps[primitive] = tangents
    batching.primitive_batchers[primitive] = batch

    def lower_plainly(ctx, *args, **params):
        check_plain(f"on {', '.join(ctx.module_context.platforms)}", **params)
        return mlir.lower_fun(f, multiple_results=True)(ctx, *args, **params)

    mlir.register_lowering(primitive, lower_plainly)
    for platform, make in (on or {}).items():

        def lower(ctx, *args, make=make, **params):
            return mlir.lower_fun(make(ctx, **params), multiple_results=True)(ctx, *args)

        mlir.register_lowering(primitive, lower, platform=platform)
        _prim_requires_devices.add(primitive)
    return primitive


def _made(*, data: bytes, dtype: Any, shape: tuple[int, ...]) -> tuple[Array]:
    return (jnp.asarray(np.frombuffer(data, dtype).reshape(shape)),)


_constant_p = make_replaceable("optzoo_constant", _made)


def inline_constant(a: Any) -> Array:
    """A constant array as an operation, so that it is not an input of the traced jaxpr."""
    a = np.asarray(a)
    return _constant_p.bind(data=a.tobytes(), dtype=a.dtype, shape=a.shape)[0]


def traced_once(f: Callable[..., Any]) -> Callable[..., Any]:
    """``f``, traced once for each type of its arguments, which are all that it may read.

    Its operations keep the lines of their source. Outside of a trace it is ``f`` itself.
    """
    once = jax.jit(f)

    @functools.wraps(f)
    def call(*args):
        if not is_tracing():
            return f(*args)
        traced = once.trace(*args)
        return _results(traced.jaxpr, traced.out_info, *jax.tree.leaves(args))

    return call


class TracedOnce:
    """A function without arguments, traced once, whose operations keep the lines of their source.

    Args:
        f: the function. It may read arrays of the trace around it.

    Attributes:
        types: the types of its results, with shardings and varying axes.
    """

    def __init__(self, f: Callable[[], Any]):
        self._jaxpr, shapes = jax.make_jaxpr(f, return_shape=True)()
        # The shapes have neither shardings nor varying axes in JAX 0.9.
        self.types = jax.tree.unflatten(jax.tree.structure(shapes), self._jaxpr.out_avals)

    def __call__(self) -> Any:
        """The results of ``f()``."""
        return _results(self._jaxpr, self.types)


def _results(closed: Any, shapes: Any, *leaves: Any) -> Any:
    outs = jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *leaves)
    return jax.tree.unflatten(jax.tree.structure(shapes), outs)


class custom_jvp:
    """``jax.custom_jvp`` whose rule applies in derivatives of any order and in any context.

    JAX 0.10 drops the rules of ``jax.custom_jvp`` in a ``scan`` that is differentiated in reverse
    and then again. It then silently computes the derivative of the function itself: NaN or zero
    where a rule is needed.

    Args:
        f: a function of arrays, or trees of arrays.
        nondiff_argnums: the arguments that are not arrays. The rule gets them first.
    """

    def __init__(self, f: Callable[..., Any], nondiff_argnums: Sequence[int] = ()):
        functools.update_wrapper(self, f)
        self._f, self._static = f, sorted(nondiff_argnums)
        self._rule: Any = None
        self._traced = dict[Any, Any]()

    def __getstate__(self) -> dict[str, Any]:
        """The pickled state, without traced functions."""
        return {**vars(self), "_traced": {}}

    def defjvp(self, rule: Callable[..., Any]) -> None:
        """Sets the rule, ``rule(*static, primals, tangents)``, which returns outputs and tangents.

        Tangents of integers have the dtype ``float0``, as in JAX.
        """
        self._rule = rule

    def __call__(self, *args: Any) -> Any:
        """``f(*args)``."""
        static = [args[i] for i in self._static]
        arrays = tuple(a for i, a in enumerate(args) if i not in self._static)
        leaves, treedef = jax.tree.flatten(arrays)
        if not any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            return self._f(*args)

        def rule(primals, tangents):
            filled = map(_tangent_of, primals, tangents)
            outs, changes = self._rule(*static, *map(treedef.unflatten, (primals, filled)))
            outs, changes = jax.tree.leaves(outs), jax.tree.leaves(changes)
            keep = lambda out, change: change if _has_tangent(out) else None
            return outs, list(map(keep, outs, changes))

        traced = self._of_leaves(treedef, *static).trace(*leaves)
        outs = _custom_jvp_p.bind(*leaves, jaxpr=traced.jaxpr, rule=rule)
        return jax.tree.unflatten(jax.tree.structure(traced.out_info), outs)

    def _of_leaves(self, treedef: Any, *static: Any) -> Any:
        """The function of the leaves of the arrays, which JAX traces once for each type."""
        if (key := (treedef, static)) not in self._traced:

            def of_leaves(*leaves):
                args = list(treedef.unflatten(leaves))
                for i, value in zip(self._static, static, strict=True):
                    args.insert(i, value)
                return self._f(*args)

            self._traced[key] = jax.jit(of_leaves)
        return self._traced[key]


def _has_tangent(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def _tangent_of(primal: Any, tangent: Any) -> Any:
    return np.zeros(np.shape(primal), jax.dtypes.float0) if tangent is None else tangent


_custom_jvp_p: Any = Primitive("optzoo_custom_jvp")
_custom_jvp_p.multiple_results = True


def _evaluate(*args, jaxpr, rule):
    del rule
    return jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, *args)


def _jvp_of_custom_jvp(primals, tangents, *, jaxpr, rule):
    del jaxpr
    given = [
        ad.instantiate_zeros(t) if _has_tangent(x) else None
        for x, t in zip(primals, tangents, strict=True)
    ]
    outs, changes = rule(primals, given)
    return outs, list(map(_tangent_of, outs, changes))


def _batch_of_custom_jvp(args, axes, *, jaxpr, rule):
    axes = tuple(axes)  # None without one
    f = jax.vmap(functools.partial(_evaluate, jaxpr=jaxpr, rule=rule), in_axes=axes)

    def of_batch(primals, tangents):
        along = tuple(None if t is None else axis for t, axis in zip(tangents, axes, strict=True))
        return jax.vmap(rule, in_axes=(axes, along))(tuple(primals), tuple(tangents))

    outs = _custom_jvp_p.bind(*args, jaxpr=jax.make_jaxpr(f)(*args), rule=of_batch)
    return outs, (0,) * len(outs)


_custom_jvp_p.def_impl(_evaluate)
_custom_jvp_p.to_lojax = _evaluate  # JAX 0.12 asks for it where the body has jnp.ldexp, for example
_custom_jvp_p.def_abstract_eval(lambda *avals, jaxpr, rule: jaxpr.out_avals)
ad.primitive_jvps[_custom_jvp_p] = _jvp_of_custom_jvp
batching.primitive_batchers[_custom_jvp_p] = _batch_of_custom_jvp
mlir.register_lowering(_custom_jvp_p, mlir.lower_fun(_evaluate, multiple_results=True))


def can_partition(ctx: Any) -> bool:
    """Whether :func:`partitioned_by_first` is supported in the lowered program."""
    axes = ctx.module_context.axis_context
    return getattr(axes, "device_assignment", None) is not None or hasattr(axes, "mesh")


def number_of_partitions(ctx: Any) -> int:
    """The number of parts into which XLA may divide an array of the lowered program.

    Inside of ``shard_map`` its mesh axes are not included.
    """
    axes = ctx.module_context.axis_context
    if hasattr(axes, "num_devices"):
        return axes.num_devices or 1
    if not hasattr(axes, "mesh"):
        return 1
    sizes = dict(axes.mesh.shape)
    return math.prod(n for name, n in sizes.items() if name not in axes.manual_axes)


def partitioned_by_first(
    f: Callable[..., Any],
    shared: int,
    shapes: Sequence[tuple[int, ...]],
    arrays: Sequence[int],
    outs: Sequence[int],
) -> Callable[..., Any]:
    """Applies ``f`` to the parts of a device, for any sharding of groups of equally sharded arrays.

    Args:
        f: an elementwise function of scalars and the arrays of each group that returns arrays of
            each group.
        shared: the number of scalars.
        shapes: the shapes of the arrays of each group.
        arrays: the number of arguments of each group.
        outs: the number of results of each group.
    """
    firsts = [shared + sum(arrays[:k]) for k in range(len(arrays))]
    names = [" ".join(f"d{k}x{d}" for d in range(len(s))) for k, s in enumerate(shapes)]
    repeated = lambda counts: [
        n for n, count in zip(names, counts, strict=True) for _ in range(count)
    ]
    rule = ", ".join([*[""] * shared, *repeated(arrays)]) + " -> " + ", ".join(repeated(outs))

    def of_outs(infos):
        each = zip(firsts, outs, strict=True)
        return tuple(infos[first].sharding for first, count in each for _ in range(count))

    def partition(mesh, infos, results):
        del results
        everywhere = [NamedSharding(mesh, PartitionSpec())] * shared
        each = zip(firsts, arrays, strict=True)
        of_arrays = [infos[first].sharding for first, count in each for _ in range(count)]
        return mesh, f, of_outs(infos), (*everywhere, *of_arrays)

    partitioned = custom_partitioning(f)
    partitioned.def_partition(
        partition=partition,
        infer_sharding_from_operands=lambda mesh, infos, results: of_outs(infos),
        sharding_rule=rule,
    )
    return partitioned


# Programs


def kept_arguments(lowered: Any) -> list[int]:
    """The indices of the arguments of a lowered function that its program has: those it reads.

    In JAX 0.12, ``jax.stages.Lowered`` has no public name for it.
    """
    return sorted(lowered._lowering.compile_args["kept_var_idx"])


def result_types(lowered: Any) -> Any:
    """The types of the results of a lowered function, as a tree.

    ``lowered.out_info`` has their shardings, but fails for a layout without a sharding.
    """
    return lowered.out_tree.unflatten(lowered._lowering.compile_args["global_out_avals"])


# Layouts

# Before JAX 0.11.1 to demand the layout of a result is an error if an argument is donated.
DEMANDS_LAYOUTS = jax.__version_info__ >= (0, 11, 1)


def may_be_for_tpus() -> bool:
    """Whether programs traced here may be compiled for TPUs, possibly on another machine."""
    return importlib.util.find_spec("libtpu") is not None or jax.default_backend() == "tpu"


def is_tracing() -> bool:
    """Whether a JAX transformation is tracing, so that calls become part of it."""
    return not _trace_state_clean()


def can_demand_layouts() -> bool:
    """Whether layouts of results can be required, and have an effect."""
    return DEMANDS_LAYOUTS and may_be_for_tpus()


def in_row_major(x: Array) -> Array:
    """The array; as a result of a program it is row-major, as it always is on CPUs and GPUs.

    ``jax.export`` refuses programs with a required layout, so none is set where it has no effect.
    """
    if not can_demand_layouts():
        return x
    return layout.with_layout_constraint(x, layout.Layout(tuple(range(x.ndim))))


# Linear algebra


def eigh_by_jacobi(a: Array, **options: Any) -> tuple[Array, Array]:
    """``jnp.linalg.eigh`` by the Jacobi iteration of XLA, which is not available on the CPU."""
    jacobi = lax.linalg.EighImplementation.JACOBI
    vectors, values = lax.linalg.eigh(a, implementation=jacobi, **options)
    return values, vectors


# Types of arrays that refuse arithmetic


def opaque_dtype(name: str, words: int, tag: str) -> Any:
    """A dtype of elements of several 32-bit words, supported by all transformations of JAX.

    ``jax.random.wrap_key_data(words, impl=...)`` and ``jax.random.key_data`` reinterpret the bits.
    Arithmetic raises a TypeError or ValueError with the ``tag``.
    """

    # JAX lets libraries define dtypes of random keys, and no others.
    def refuse(*_: Any) -> Any:
        raise TypeError(f"{name} is not a random key: {tag}")

    return extend_random.define_prng_impl(
        key_shape=(words,),
        seed=refuse,
        split=refuse,
        random_bits=refuse,
        fold_in=refuse,
        name=name,
        tag=tag,
    )


# Types of arrays inside shard_map


def in_same_trace(a: Any, b: Any) -> bool:
    """Whether two arrays belong to the same trace of JAX, or both to none."""
    trace = lambda x: getattr(x, "_trace", None)
    return trace(a) is trace(b)


def has_side_effects(jaxpr: Any) -> bool:
    """Whether a program has side effects, such as printing.

    In JAX, reading the index of a device is an effect, too.
    """
    return any(not isinstance(e, _NamedAxisEffect) for eqn in jaxpr.eqns for e in eqn.effects)


def varying(x: Any) -> frozenset[str]:
    """The mesh axes over which ``x`` may vary inside a checked ``shard_map``.

    ``x`` is an array, the shape or the type of one, or a value of a jaxpr.
    """
    # An attribute of the type: `manual_axis_type` in new versions of JAX, `vma` in older ones.
    is_type = isinstance(x, jax.core.ShapedArray)
    aval = x if is_type else x.aval if hasattr(x, "aval") else jax.typeof(x)
    kind = getattr(aval, "manual_axis_type", None)
    return frozenset(kind.varying if kind is not None else getattr(aval, "vma", ()))


def cast_varying(x: Array, axes: tuple[str, ...]) -> Array:
    """The same values, typed as varying over mesh axes over which they were invariant."""
    return lax.pcast(x, axes, to="varying")


def vary(x: Array, axes: Iterable[str]) -> Array:
    """The same values, typed as varying over at least these mesh axes."""
    missing = tuple(sorted(set(axes) - varying(x)))
    return cast_varying(x, missing) if missing else x


def vary_as(tree: Any, like: Any) -> Any:
    """The same arrays, typed as varying over the mesh axes of all arrays of another tree."""
    axes = frozenset[str]().union(*map(varying, jax.tree.leaves(like)))
    return jax.tree.map(lambda a: vary(a, axes), tree) if axes else tree


def shape_varying(shape: tuple[int, ...], dtype: Any, axes: Iterable[str]) -> Any:
    """The shape of an array that may vary over these mesh axes."""
    axes = frozenset(axes)
    if hasattr(jax.sharding, "ManualAxisType"):
        kind: dict[str, Any] = {"manual_axis_type": jax.sharding.ManualAxisType(varying=axes)}
    else:  # in older versions of JAX
        kind = {"vma": axes}
    return jax.ShapeDtypeStruct(shape, dtype, **kind)


def gather_invarying(tree: Any, axes: str | tuple[str, ...], dimension: int = 0) -> Any:
    """Concatenates the arrays of all devices along mesh axes, typed as invariant."""
    # Before JAX 0.10 it is only a function without a public name.
    if jax.__version_info__ >= (0, 10):
        return lax.all_gather(tree, axes, axis=dimension, tiled=True, to="invarying")
    from jax._src.lax import parallel

    gather = getattr(parallel, "all_gather_invariant")  # noqa: B009 (unknown to the type checker)
    return gather(tree, axes, axis=dimension, tiled=True)
