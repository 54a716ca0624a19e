"""What the library needs of JAX and optax beyond their stable public API, by one name for each.

``tests/core/test_compat.py`` checks every one of them against the installed versions.
"""

import contextlib
import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.core
from jax import Array, lax

# Primitives that are told the devices when they are lowered, as custom_partitioning must be.
from jax._src.dispatch import prim_requires_devices_during_lowering as _prim_requires_devices
from jax.experimental import layout
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend import random as extend_random
from jax.extend.core import Literal, Primitive, Var
from jax.extend.source_info_util import summarize
from jax.interpreters import ad, batching, mlir, partial_eval
from jax.sharding import NamedSharding, PartitionSpec
from optax._src.base import NO_PARAMS_MSG as NO_PARAMS_MSG  # the message that users know

# Primitives


def make_primitive(
    name: str, f: Callable[..., Array], tangent: Callable[..., Array], batch: Callable[..., Any]
) -> Any:
    """A primitive that computes ``f(*args, **params)``, so that jaxprs show where it is used.

    Args:
        name: of the primitive, in jaxprs.
        f: of two arrays, and of keywords that are static.
        tangent: ``tangent(t, *args, **params)`` is the derivative along ``t``, a tangent of the
            first array. The second one has none.
        batch: ``batch(args, axes, **params)`` gives the result and its batch axis; the axis of an
            array without one is None.
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


def make_replaceable(
    name: str,
    f: Callable[..., Sequence[Array]],
    *,
    types: Callable[..., list[Any] | None] = lambda *avals, **params: None,
    on: Mapping[str, Callable[..., Callable[..., Any]]] | None = None,
    check_others: Callable[..., None] = lambda platforms, **params: None,
) -> Any:
    """A primitive with several results that computes ``f(*args, **params)``.

    It can be found in jaxprs. In derivatives and under ``vmap`` it is the operations of ``f``.

    Args:
        name: of the primitive, in jaxprs.
        f: of arrays, and of keywords that are static.
        types: ``types(*avals, **params)`` are the types of the results, if they are known.
        on: by platforms, such as ``cpu``, what gives the function that takes the place of ``f``
            there: ``on[platform](ctx, **params)``.
        check_others: ``check_others(platforms, **params)`` raises an error if ``f`` may not run on
            other platforms, in the program that is lowered for them.
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
        tangents = [ad.instantiate_zeros(t) for t in tangents]
        return jax.jvp(functools.partial(f, **params), tuple(primals), tuple(tangents))

    def batch(args, axes, **params):
        outs = jax.vmap(functools.partial(f, **params), in_axes=tuple(axes))(*args)
        return outs, (0,) * len(outs)

    primitive.def_abstract_eval(abstract)
    ad.primitive_jvps[primitive] = tangents
    batching.primitive_batchers[primitive] = batch

    def lower_plainly(ctx, *args, **params):
        check_others(ctx.module_context.platforms, **params)
        return mlir.lower_fun(f, multiple_results=True)(ctx, *args, **params)

    mlir.register_lowering(primitive, lower_plainly)
    for platform, make in (on or {}).items():

        def lower(ctx, *args, make=make, **params):
            return mlir.lower_fun(make(ctx, **params), multiple_results=True)(ctx, *args)

        mlir.register_lowering(primitive, lower, platform=platform)
        _prim_requires_devices.add(primitive)
    return primitive


def can_partition(ctx: Any) -> bool:
    """Whether :func:`partitioned_by_first` is possible in the program that is lowered."""
    axes = ctx.module_context.axis_context
    return getattr(axes, "device_assignment", None) is not None or hasattr(axes, "mesh")


def number_of_partitions(ctx: Any) -> int:
    """In how many parts XLA may divide an array of the program that is lowered.

    Inside of ``shard_map`` the axes of the mesh that it took over do not count.
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
    """``f`` on the part of each device, however groups of equally sharded arrays are sharded.

    Args:
        f: of scalars, and of the arrays of each group; gives arrays of each group, elementwise.
        shared: how many scalars there are.
        shapes: of the arrays of each group.
        arrays: how many arguments each group has.
        outs: how many results each group has.
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


# Jaxprs


def is_literal(v: Any) -> bool:
    """Whether an input of an equation is a literal, with its value in ``v.val``."""
    return isinstance(v, Literal)


def evaluate(jaxpr: Any, consts: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """The outputs of a jaxpr, with the name scopes and other settings of its equations."""
    # `jax.extend.core.jaxpr_as_fun` is the public way, but switches `jax_debug_nans` off.
    return jax.core.eval_jaxpr(jaxpr, consts, *values)


def evaluate_equation(jaxpr: Any, eqn: Any, values: Sequence[Any]) -> list[Any]:
    """The outputs of one equation of a jaxpr for the values of its inputs."""
    inputs = {v: x for v, x in zip(eqn.invars, values, strict=True) if not is_literal(v)}
    alone = jaxpr.replace(constvars=[], invars=list(inputs), outvars=eqn.outvars, eqns=[eqn])
    return evaluate(alone, [], list(inputs.values()))


def bind_equation(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """The same, for many equations: without a jaxpr around each, and without its settings."""
    params = eqn.primitive.get_bind_params(eqn.params)
    # Before JAX 0.12 functions come first.
    functions, params = params if isinstance(params, tuple) else ((), params)
    outputs = eqn.primitive.bind(*functions, *values, **params)
    return list(outputs) if eqn.primitive.multiple_results else [outputs]


def scope_of(eqn: Any) -> contextlib.AbstractContextManager[Any]:
    """The name scopes in which the equation was made; for what replaces it."""
    scopes = str(eqn.source_info.name_stack)
    return jax.named_scope(scopes) if scopes else contextlib.nullcontext()


def map_equations(jaxpr: Any, f: Callable[[Any], Any]) -> Any:
    """The jaxpr with ``f(eqn)`` for every equation, in the jaxprs inside of equations too."""

    def in_param(value):
        if isinstance(value, tuple | list):
            return type(value)(map(in_param, value)) if any(map(_jaxpr_in, value)) else value
        inner = _jaxpr_in(value)
        if inner is None:
            return value
        new = map_equations(inner, f)
        return value.replace(jaxpr=new) if hasattr(value, "jaxpr") else new

    def in_equation(eqn):
        if not any(inner_jaxprs(eqn)):
            return f(eqn)
        return f(eqn.replace(params={k: in_param(value) for k, value in eqn.params.items()}))

    return jaxpr.replace(eqns=list(map(in_equation, jaxpr.eqns)))


def used_inputs(jaxpr: Any) -> list[bool]:
    """For each input of a jaxpr whether the outputs depend on it."""
    return _without_unused(jaxpr, False)[1]


def needed_part(jaxpr: Any) -> Any:
    """The jaxpr, of the same inputs, without the equations on which no output depends."""
    return _without_unused(jaxpr, True)[0]


def _without_unused(jaxpr: Any, keep_inputs: bool) -> tuple[Any, list[bool]]:
    # Exported by JAX, but without documentation or a promise to keep it.
    outputs = [True] * len(jaxpr.outvars)
    return partial_eval.dce_jaxpr(jaxpr, outputs, instantiate=keep_inputs)


def inner_jaxprs(eqn: Any) -> Iterator[Any]:
    """The jaxprs inside an equation, such as the branches of a ``cond`` or the body of a loop."""
    return (jaxpr for jaxpr, _ in closed_jaxprs(eqn))


def closed_jaxprs(eqn: Any) -> Iterator[tuple[Any, Sequence[Any]]]:
    """As :func:`inner_jaxprs`, each with the values of its constants."""
    # By what they look like: the names of the parameters differ among primitives and versions.
    for param in eqn.params.values():
        for value in param if isinstance(param, tuple | list) else [param]:
            jaxpr = _jaxpr_in(value)
            if jaxpr is not None:
                yield jaxpr, getattr(value, "consts", ())


def _jaxpr_in(value: Any) -> Any:
    """A jaxpr that a parameter is, or that it holds together with constants; or None."""
    jaxpr = getattr(value, "jaxpr", value)
    return jaxpr if hasattr(jaxpr, "eqns") else None


def function_of(eqn: Any) -> str:
    """The public function of JAX that makes such an equation, or the name of the primitive."""
    return _FUNCTIONS.get(eqn.primitive.name, eqn.primitive.name)


_FUNCTIONS = {
    "jit": "jax.jit",
    "checkpoint": "jax.checkpoint",
    "remat": "jax.checkpoint",
    "remat2": "jax.checkpoint",
    "scan": "jax.lax.scan",
    "while": "jax.lax.while_loop",
    "cond": "jax.lax.cond",
    "convert_element_type": "jax.lax.convert_element_type",
    "custom_jvp_call": "jax.custom_jvp",
    "custom_vjp_call": "jax.custom_vjp",
    "shard_map": "jax.shard_map",
    "stop_gradient": "jax.lax.stop_gradient",
}


def has_shardings(eqn: Any) -> bool:
    """Whether a ``jit`` was given shardings of its inputs or outputs."""
    given = (*eqn.params["in_shardings"], *eqn.params["out_shardings"])
    return any(type(s).__name__ != "UnspecifiedValue" for s in given)  # JAX does not export it


def checkpoint_like(eqn: Any, f: Callable[..., Any]) -> Callable[..., Any]:
    """``jax.checkpoint`` of another function, with the settings of the one of an equation."""
    params = eqn.params
    return jax.checkpoint(f, prevent_cse=params["prevent_cse"], policy=params["policy"])


def scan_like(eqn: Any, f: Callable[..., Any], init: Any, xs: Any) -> Any:
    """``jax.lax.scan`` of another function, with the settings of the one of an equation."""
    settings = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    return lax.scan(f, init, xs, **settings)


def scan_sizes(eqn: Any) -> tuple[int, int]:
    """How many of the inputs of a ``scan`` are constants, and how many are its first carry."""
    # By the shapes, since the names of the parameters differ among versions: those of the xs and
    # the ys, which come last, have an axis less in the body.
    (body,) = inner_jaxprs(eqn)
    same = lambda outer, inner: sum(
        x.aval.shape == v.aval.shape for x, v in zip(outer, inner, strict=True)
    )
    num_carry = same(eqn.outvars, body.outvars)
    return same(eqn.invars, body.invars) - num_carry, num_carry


def through_call(
    eqn: Any, inputs: Sequence[bool], f: Callable[[Any, list[bool]], list[bool]]
) -> list[bool] | None:
    """Which results of a call have a property that spreads from its inputs.

    Args:
        eqn: one of ``CALLS``.
        inputs: which of its inputs have it.
        f: of a body and its inputs, gives the same of its results.

    Returns:
        It for each result; None if which body runs, or how often, depends on an input that has it.
    """
    bodies, inputs = list(inner_jaxprs(eqn)), list(inputs)
    if eqn.primitive.name == "cond":
        if inputs[0]:
            return None
        return [any(found) for found in zip(*(f(b, inputs[1:]) for b in bodies), strict=True)]
    if eqn.primitive.name == "scan":
        return _through_loop(bodies[0], inputs, *scan_sizes(eqn), f)
    if eqn.primitive.name == "while":
        of_condition, of_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        condition, body = (eqn.params[name].jaxpr for name in ("cond_jaxpr", "body_jaxpr"))
        outputs = _through_loop(body, inputs[of_condition:], of_body, len(eqn.outvars), f)
        return None if any(f(condition, [*inputs[:of_condition], *outputs])) else outputs
    # Of custom derivatives the first is the function itself. Constants come first.
    return f(bodies[0], inputs[len(inputs) - len(bodies[0].invars) :])


def _through_loop(
    body: Any, inputs: Sequence[bool], first: int, carried: int, f: Callable[..., list[bool]]
) -> list[bool]:
    """Which results of a loop have the property, whose carry begins at input ``first``."""
    inputs, end = list(inputs), first + carried
    while True:
        outputs = f(body, inputs)
        carry = [a or b for a, b in zip(inputs[first:end], outputs[:carried], strict=True)]
        if carry == inputs[first:end]:
            return [*carry, *outputs[carried:]]
        inputs[first:end] = carry


def literals(eqn: Any) -> list[str]:
    """The constants among the operands of an equation, as text."""
    return [str(v.val) for v in eqn.invars if isinstance(v, Literal)]


def line_of(eqn: Any) -> str:
    """The line of the user's program that an equation comes from: ``model.py:12:4 (loss)``."""
    return summarize(eqn.source_info)


def text_of(program: Any) -> str:
    """The text of what ``jax.make_jaxpr`` returned, equal in every process."""
    # Without terminal colours and addresses of functions.
    return re.sub(r"0x[0-9a-f]+", "", program.pretty_print(use_color=False, width=100))


def kept_arguments(lowered: Any) -> list[int]:
    """Which arguments of a lowered function its program has, by position: not those it never reads.

    In JAX 0.12, ``jax.stages.Lowered`` has no public name for it.
    """
    return sorted(lowered._lowering.compile_args["kept_var_idx"])


def turns(eqn: Any) -> int | None:
    """How often a ``scan`` runs its body; None for any other equation."""
    return eqn.params["length"] if eqn.primitive.name == "scan" else None


# Names of primitives, in all versions of JAX


CALLS = {"checkpoint", "closed_call", "cond", "core_call", "custom_jvp_call", "custom_vjp_call"}
CALLS |= {"jit", "remat", "remat2", "scan", "while"}
COLLECTIVES = {"all_gather", "all_gather_invariant", "all_to_all", "pmax", "pmin", "ppermute"}
COLLECTIVES |= {"psum", "psum_invariant", "psum_scatter", "reduce_scatter"}


# Layouts

# Before JAX 0.11.1 to demand the layout of a result is an error if an argument is donated.
DEMANDS_LAYOUTS = jax.__version_info__ >= (0, 11, 1)


def in_row_major(x: Array) -> Array:
    """The array; as a result of a program it is row-major."""
    if not DEMANDS_LAYOUTS:
        return x
    return layout.with_layout_constraint(x, layout.Layout(tuple(range(x.ndim))))


# Linear algebra


def eigh_by_jacobi(a: Array, **options: Any) -> tuple[Array, Array]:
    """``jnp.linalg.eigh`` by the Jacobi iteration of XLA, which the CPU does not have."""
    jacobi = lax.linalg.EighImplementation.JACOBI
    vectors, values = lax.linalg.eigh(a, implementation=jacobi, **options)
    return values, vectors


# Types of arrays that refuse arithmetic


def opaque_dtype(name: str, words: int, tag: str) -> Any:
    """A dtype of elements of some words of 32 bits; all transformations of JAX let it pass.

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


def varying(x: Any) -> frozenset[str]:
    """The mesh axes along which ``x`` may differ inside a checked ``shard_map``.

    ``x`` is an array, the shape of one, or what an equation of a jaxpr reads or makes.
    """
    # An attribute of the type: `manual_axis_type` in new versions of JAX, `vma` in older ones.
    aval = x.aval if isinstance(x, Var | Literal) else jax.typeof(x)
    kind = getattr(aval, "manual_axis_type", None)
    return frozenset(kind.varying if kind is not None else getattr(aval, "vma", ()))


def cast_varying(x: Array, axes: tuple[str, ...]) -> Array:
    """The same values, typed as different along mesh axes along which they were the same."""
    return lax.pcast(x, axes, to="varying")


def vary(x: Array, axes: Iterable[str]) -> Array:
    """The same values, typed as different along at least these mesh axes."""
    missing = tuple(sorted(set(axes) - varying(x)))
    return cast_varying(x, missing) if missing else x


def shape_varying(shape: tuple[int, ...], dtype: Any, axes: Iterable[str]) -> Any:
    """The shape of an array that may differ along these mesh axes."""
    axes = frozenset(axes)
    if hasattr(jax.sharding, "ManualAxisType"):
        kind: dict[str, Any] = {"manual_axis_type": jax.sharding.ManualAxisType(varying=axes)}
    else:  # in older versions of JAX
        kind = {"vma": axes}
    return jax.ShapeDtypeStruct(shape, dtype, **kind)


def gather_invarying(tree: Any, axes: str | tuple[str, ...]) -> Any:
    """The arrays of all devices along mesh axes joined, typed as the same on all of them."""
    # Before JAX 0.10 it is only a function without a public name.
    if jax.__version_info__ >= (0, 10):
        return lax.all_gather(tree, axes, tiled=True, to="invarying")
    from jax._src.lax import parallel

    gather = getattr(parallel, "all_gather_invariant")  # noqa: B009 (unknown to the type checker)
    return gather(tree, axes, tiled=True)
