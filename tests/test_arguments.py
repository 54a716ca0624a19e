"""Every numeric argument of every public factory refuses what is no value for it, by its name."""

import inspect
import types
import typing
from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optzoo
from optzoo.testing import samples

from . import selection
from .mismatches import (
    KINDS,
    METHODS,
    WRAPPERS,
    is_accepted,
    is_promised,
    outcome,
    transformations,
    update,
)
from .public import BY_LAST

NAN, INF = float("nan"), float("inf")
ADAM = optzoo.adam(0.1)
TRANSFORMS = (
    "clip_by_average_norm",
    "clip_by_global_norm",
    "clip_by_norm",
    "zero_if_norm_exceeds",
    "cosine_sign_decay",
    "linear_sign_decay",
    "restart_sign_decay",
    "slots_dtype",
)
# Valid values of the arguments without default.
VALID = {
    "decay_steps": 10,
    "dims": {},
    "dtype": "bfloat16",
    "every": 2,
    "inner": optzoo.adam(),
    "learning_rate": 0.1,
    "lookahead": 0.5,
    "max_norm": 1.0,
    "min_values": 2,
    "momentum": 0.9,
    "step_size": 0.5,
    "weight_decay_per_step": 0.1,
}
# Where infinity means that nothing is clipped.
INFINITE = {("clip_by_norm", "max_norm"), ("clip_by_average_norm", "max_norm"),
            ("zero_if_norm_exceeds", "max_norm")}  # fmt: skip
# None means that no dimension is cut, as in shampoo.
NONE = {("blocked_shampoo", "block_size")}
# The number of iterations depends on it.
PLAIN = {("blocked_shampoo", "alpha")}
NO_NUMBERS = {
    "string": "0.9",
    "list": [0.9],
    "complex": 0.9j,
    "bool": True,
    "array of bool": np.True_,
    "array of complex": jnp.complex64(0.5),
    "array of strings": np.array("0.9"),
    "axes": jnp.full(3, 0.5),
    "an axis": np.full(1, 0.5),
    "NaN": NAN,
    "array of NaN": jnp.float32(NAN),
    "NumPy's NaN": np.float32(NAN),
    "16-bit NaN": jnp.bfloat16(NAN),
    "-inf": -INF,
    "array of -inf": np.float64(-INF),
    "huge": -(10**400),
}


def factories() -> dict[str, Callable]:
    scalings = [name for name in vars(optzoo.transforms) if name.startswith("scale_by")]
    scalings += ["scale"]
    scalings.remove("scale_by_schedule")  # of a function alone
    names = [*optzoo.CATALOG, *optzoo.catalog.WRAPPERS, *scalings, *TRANSFORMS]
    return {name: BY_LAST[name] for name in names}


def kinds(parameter):
    annotation = parameter.annotation
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return set(typing.get_args(annotation)) if is_union else {annotation}


def arguments(wanted) -> list[tuple[str, str]]:
    """The factory and the name of each argument whose annotation holds one of ``wanted``."""
    return [
        (factory, name)
        for factory, f in factories().items()
        for name, parameter in inspect.signature(f, eval_str=True).parameters.items()
        if kinds(parameter) & wanted
    ]


NUMBERS = arguments({float, int})
FLAGS = arguments({bool})


def annotated(factory, name):
    return inspect.signature(factories()[factory], eval_str=True).parameters[name]


def admits_schedule(factory, name):
    return any(typing.get_origin(k) is Callable for k in kinds(annotated(factory, name)))


def admits_none(factory, name):
    return (factory, name) in NONE or type(None) in kinds(annotated(factory, name))


def make(factory, **given):
    f = factories()[factory]
    required = {k: v for k, v in VALID.items() if k in inspect.signature(f).parameters}
    return f(**{**required, **given})


def test_the_arguments_are_found():
    assert len(NUMBERS) > 200 and len(FLAGS) > 20
    for factory in factories():
        make(factory)


@pytest.mark.parametrize(("factory", "name"), NUMBERS)
def test_what_is_no_number_is_refused(factory, name):
    bad = dict(NO_NUMBERS)
    if (factory, name) not in INFINITE:
        bad |= {"inf": INF, "array of inf": jnp.float32(INF)}
    if not admits_none(factory, name):
        bad["None"] = None
    if not admits_schedule(factory, name):
        bad["schedule"] = lambda k: 0.5
    for value in bad.values():
        with pytest.raises((TypeError, ValueError), match=rf"^{name} must be "):
            make(factory, **{name: value})


@pytest.mark.parametrize(("factory", "name"), NUMBERS)
def test_what_is_a_number_is_accepted(factory, name):
    default = annotated(factory, name).default
    value = VALID.get(name, 1) if default is inspect.Parameter.empty else default
    if int in kinds(annotated(factory, name)):
        value = VALID.get(name, 1) if value is None else value
        good = [np.int32(value), np.asarray(value), jnp.int32(value)]
    else:
        value = 0.5 if value is None else value
        kinds_of_float = (float, np.float32, np.float64, np.asarray, jnp.asarray, jnp.bfloat16)
        if (factory, name) in PLAIN:
            kinds_of_float = (float, np.float32, np.float64)
        good = [kind(value) for kind in kinds_of_float]
        if value == int(value):
            good.append(int(value))
    good += [lambda k: 0.5] * admits_schedule(factory, name) + [None] * admits_none(factory, name)
    good += [INF] * ((factory, name) in INFINITE)
    for one in good:
        make(factory, **{name: one})


@pytest.mark.parametrize(
    ("factory", "name"),
    [case for case in NUMBERS if int not in kinds(annotated(*case)) and case not in PLAIN],
)
def test_a_traced_value_is_a_scalar(factory, name):
    """As optax.inject_hyperparams gives it."""

    def build(value):
        make(factory, **{name: value})
        return value

    for dtype in (jnp.float32, jnp.bfloat16, jnp.int32):
        jax.eval_shape(build, jax.ShapeDtypeStruct((), dtype))
    for shape, dtype in (((3,), jnp.float32), ((), jnp.complex64), ((), jnp.bool)):
        with pytest.raises((TypeError, ValueError), match=rf"^{name} must be "):
            jax.eval_shape(build, jax.ShapeDtypeStruct(shape, dtype))


@pytest.mark.parametrize(("factory", "name"), [case for case in NUMBERS if admits_schedule(*case)])
def test_a_schedule_returns_a_number(factory, name):
    """An array would be broadcast to the parameters."""
    x = jnp.ones((2, 2))
    for value, must in {
        "[0.5]": r"number, got \[0\.5\]",
        "jnp.ones(1)": r"a scalar, got an array of shape \(1,\)",
        "np.ones((2, 2))": r"a scalar, got an array of shape \(2, 2\)",
        "None": "number, got None",
    }.items():
        tx = make(factory, **{name: lambda step, value=value: eval(value)})
        state = jax.eval_shape(tx.init, x)
        extra = {} if name == "every" else {"global_step": 0}
        update = lambda state, tx=tx, extra=extra: tx.update(x, state, x, **extra)
        with pytest.raises((TypeError, ValueError), match=f"^the schedule of {name} must .*{must}"):
            jax.eval_shape(update, state)


@pytest.mark.parametrize(("factory", "name"), FLAGS)
def test_a_flag_is_true_or_false(factory, name):
    for value in ("False", 2, 0.5, NAN, None, [True], jnp.bool(True)):
        with pytest.raises(TypeError, match=rf"^{name} must be True or False"):
            make(factory, **{name: value})
    for value in (np.False_, 0, 0.0):
        make(factory, **{name: value})


@pytest.mark.parametrize("wrapper", optzoo.catalog.WRAPPERS)
@pytest.mark.parametrize(
    "inner", [None, optzoo.adam, 0.1, {}, "adam", optax.GradientTransformation]
)
def test_a_wrapper_takes_a_transformation(wrapper, inner):
    with pytest.raises(TypeError, match=r"^inner must be an optax transformation"):
        make(wrapper, inner=inner)


@pytest.mark.parametrize("inner", [None, optzoo.adam, "adam"])
@pytest.mark.parametrize("name", [*METHODS, "on_rows", "on_values"])
def test_others_that_take_a_transformation(name, inner):
    build = {"on_rows": optzoo.on_rows, "on_values": optzoo.rows.on_values, **METHODS}[name]
    with pytest.raises(TypeError, match=r"^inner must be an optax transformation"):
        build(inner)


def test_arguments_of_methods():
    with pytest.raises(TypeError, match=r"^outer must be an optax transformation"):
        optzoo.diloco(ADAM, outer="adam")
    for arguments, name in (((None, ADAM), "direction"), ((ADAM, None), "length")):
        with pytest.raises(TypeError, match=f"^{name} must be an optax transformation"):
            optzoo.transforms.graft(*arguments)
    for staleness, message in ((NAN, "must be a number, got nan"), ("1", "must be a number")):
        with pytest.raises((TypeError, ValueError), match=f"^staleness {message}"):
            optzoo.drop_stale_gradient(ADAM, staleness)
    for staleness in (INF, -1, 2):
        optzoo.drop_stale_gradient(ADAM, staleness)


@pytest.mark.parametrize(
    ("build", "value"),
    [
        (lambda v: optzoo.momentum(0.1, v), 1.5),  # as in TensorFlow
        (optzoo.gradient_descent, -0.1),  # ascent
        (lambda v: optzoo.adam(b1=v), jnp.bfloat16(0.999)),  # one in 16 bits: see check_decays
        (lambda v: optzoo.add_sign(alpha=v), -1.0),
        (lambda v: optzoo.neural_optimizer1(0.1, decrease_factor=v), -0.3),  # as in RETURNN
    ],
)
def test_deliberately_accepted(build, value):
    build(value)


X = {"w": jnp.ones((2, 3))}
# Everything of this library that has an update with extra arguments, around or beside optax's.
UPDATES = {
    "adam": ADAM,
    "ggt": optzoo.ggt(),
    "lars": optzoo.lars(0.1),
    "ftrl": optzoo.ftrl(0.1),
    "shampoo": optzoo.shampoo(),
    "numerics": optzoo.transforms.check_numerics(),
    "groups": optzoo.param_groups({".*": ADAM}),
    "chain": optax.chain(optax.identity(), optzoo.gradient_descent(0.1)),
    "accumulate": optzoo.accumulate(ADAM, 2),
    "decay": optzoo.decoupled_weight_decay(ADAM, weight_decay_per_step=0.1),
    "cautious": optzoo.cautious_weight_decay(ADAM, weight_decay_per_step=0.1),
    "ahead": optzoo.ema_nesterov(ADAM, 0.5),
    "hyperball": optzoo.hyperball(ADAM, 0.1, {}),
    "average": optzoo.moving_average(ADAM),
    "multitask": optzoo.multitask(ADAM),
    "spikes": optzoo.skip_spikes(ADAM, on="norm"),
    "stacked": optzoo.stacked(ADAM),
    "clipping": optzoo.variable_clipping(ADAM, {}, 1.0),
    "dtype": optzoo.slots_dtype(ADAM, "bfloat16"),
}
BAD_ARGUMENTS = [
    ({"lr": 0.1}, r"no argument 'lr': it must be 'learning_rate'"),
    ({"learing_rate": 0.1}, r"no argument 'learing_rate': it must be 'learning_rate'"),
    ({"learningRate": 0.1}, "it must be 'learning_rate'"),
    ({"globalstep": 1}, "it must be 'global_step'"),
    ({"global_steps": 1}, "it must be 'global_step'"),
    ({"learning_rate": jnp.ones(3)}, r"learning_rate must be a scalar, got .* \(3,\): .*groups"),
    ({"learning_rate": {"w": 0.1}}, r"learning_rate must be a number, got .*groups"),
    ({"learning_rate": "0.1"}, "learning_rate must be a number"),
    ({"learning_rate": NAN}, "learning_rate must be a finite number, got nan"),
    ({"learning_rate": np.float32(INF)}, "learning_rate must be a finite number"),
    ({"global_step": -5}, "global_step must be zero or positive, got -5"),
    ({"global_step": np.int32(-1)}, "global_step must be zero or positive"),
    ({"global_step": 1.5}, "global_step must be an integer, got 1.5"),
    ({"global_step": jnp.float32(2)}, "global_step must be an integer"),
    ({"global_step": "x"}, "global_step must be a number, got 'x'"),
    ({"global_step": np.arange(2)}, "global_step must be a scalar"),
]


@pytest.mark.parametrize("name", UPDATES)
def test_arguments_of_updates_are_checked(name):
    tx = UPDATES[name]
    state = tx.init(X)
    for given, message in BAD_ARGUMENTS:
        with pytest.raises((TypeError, ValueError), match=message):
            tx.update(X, state, X, **given)


@pytest.mark.parametrize("name", UPDATES)
def test_other_arguments_of_updates_pass(name):
    tx = UPDATES[name]
    others = {"value": 1.0, "loss_fn": None, "step": 3, "rate": "x", "learning_rate_fn": None}
    others |= {"learning": 1, "global_norm": 2.0}  # only alike

    def update(rate, step):
        given = {"learning_rate": rate, "global_step": step, **others}
        return tx.update(X, tx.init(X), X, **given)

    wanted = jax.eval_shape(lambda: tx.update(X, tx.init(X), X))
    rates = None, 0.1, 1, np.float64(0.1), jnp.bfloat16(0.1), jax.ShapeDtypeStruct((), jnp.float32)
    steps = None, 0, 2, np.int64(2), jnp.uint8(2), jax.ShapeDtypeStruct((), jnp.int32)
    for rate, step in zip(rates, steps, strict=True):
        traced = isinstance(rate, jax.ShapeDtypeStruct)
        got = (
            jax.eval_shape(update, rate, step)
            if traced
            else jax.eval_shape(lambda rate=rate, step=step: update(rate, step))
        )
        assert jax.tree.structure(got) == jax.tree.structure(wanted)


@pytest.mark.parametrize("inner", ["optax.adam", "frozen"])
@pytest.mark.parametrize("name", [*WRAPPERS, *METHODS])
def test_a_learning_rate_that_nothing_reads(name, inner):
    wrap = {**WRAPPERS, **METHODS}[name]
    tx = wrap({"optax.adam": optax.adam(0.1), "frozen": optax.set_to_zero()}[inner])
    call = lambda: update(tx, learning_rate=0.5)
    if inner == "frozen":
        call()
        return
    update(tx, learning_rate=None)
    argument = {"groups": "the group 'table'", "graft": "length"}.get(name, "inner")
    with pytest.raises(TypeError, match=f"learning_rate, but {argument} does not use it"):
        call()
    # The fix that the error names.
    rate = optzoo.transforms.scale_by_learning_rate(0.1)
    update(wrap(optax.chain(optax.scale_by_adam(), rate)), learning_rate=0.5)


TRANSFORMATIONS = transformations()


@pytest.mark.filterwarnings("ignore:Casting")  # of complex numbers, in init
@pytest.mark.parametrize(
    "name",
    selection.chosen_first(
        TRANSFORMATIONS,
        [n for n in TRANSFORMATIONS if n not in optzoo.CATALOG or n in selection.KINDS],
    ),
)
def test_what_does_not_belong_together(name):
    """Other arguments, gradients, parameters or states are refused by an error of this library."""
    wrong = []
    for cases in KINDS.values():
        for case, call in cases(TRANSFORMATIONS[name]):
            got, error = outcome(call)
            accepted = got == "accepted" and is_accepted(name, case)
            refused = got == "ours" and not is_promised(name, case)
            if not (accepted or refused):
                wrong.append((case, got, error))
    assert wrong == []


def test_a_state_of_other_parameters_is_told_by_its_names():
    tx, some, more = optzoo.multitask(optax.adam(0.1)), {"a": 1.0}, {"a": 1.0, "z": 1.0}
    for of_state, params, expected in (
        (some, more, r"parameters with a dict with the keys \['a', 'z'\], got .* \['a'\]"),
        (more, some, r"expected nothing at '0/mu/z', got an array"),  # whose state is known
    ):
        of_state, params = (jax.tree.map(jnp.asarray, tree) for tree in (of_state, params))
        with pytest.raises(ValueError, match=expected):
            tx.update(params, tx.init(of_state), params)


@pytest.mark.parametrize(
    "tx",
    [
        optzoo.interop.fbgemm.counter_row_wise_adagrad(
            0.1, weight_decay=0.1, weight_decay_mode="adagradw"
        ),
        optzoo.sparse_adamw(0.1, weight_decay=0.1),
        optzoo.partial_row_wise_adam(0.1, weight_decay=0.1),
        optzoo.row_wise_adagrad(0.1, weight_decay=0.1),
        optzoo.row_wise_rmsprop(0.1, weight_decay=0.1),
    ],
    ids=[
        "counter_row_wise",
        "sparse_adamw",
        "partial_adam",
        "row_wise_adagrad",
        "row_wise_rmsprop",
    ],
)
def test_a_decay_needs_the_parameters(tx):
    """Those of no other optimizer are optional; the contract has them without a decay."""
    x = jnp.ones((3, 2))
    with pytest.raises(ValueError, match="requires the current value of parameters"):
        tx.update(x, tx.init(x))


DECAYS = {
    name: sorted({"b1", "b2"} & {*inspect.signature(entry.factory).parameters})
    for name, entry in optzoo.CATALOG.items()
}
WITH_DECAYS = [name for name, decays in DECAYS.items() if decays]


@pytest.mark.parametrize("name", WITH_DECAYS)
def test_decays_that_16_bits_round_to_one_are_below_one(name):
    """With a mean that never changes there would be no step, or one of NaN."""
    with jax.disable_jit():
        for decay in DECAYS[name]:
            tx = samples.make(optzoo.CATALOG[name], **{decay: jnp.bfloat16(0.999)})
            x = {"w": jnp.ones((3, 2))}
            g = {"w": jnp.full((3, 2), 2.0)}
            _, state = tx.update(g, tx.init(x), x)  # the first step of SOAP is none
            updates, state = tx.update(g, state, x)
            assert np.all(np.isfinite(updates["w"])), decay
            means = {"m", "v"} & {name.rpartition("/")[2] for name in optzoo.slot_names(state)}
            for mean in means:
                leaves = jax.tree.leaves(optzoo.get_slot(state, mean))
                # A factored parameter has no v.
                assert not leaves or any(np.any(leaf) for leaf in leaves), (decay, mean)


@pytest.mark.parametrize("name", selection.chosen_first(WITH_DECAYS, {"adadelta"}))
def test_decays_in_16_bits_compute_in_32(name):
    x, value = {"w": jnp.linspace(-1.0, 1, 6).reshape(3, 2)}, jnp.bfloat16(0.9)
    found = []
    for given in (value, float(value)):
        tx = samples.make(optzoo.CATALOG[name], **dict.fromkeys(DECAYS[name], given))
        with jax.disable_jit():
            updates, state = tx.update(x, tx.init(x), x)
            found.append((tx.update(x, state, x)[0], updates))
    chex.assert_trees_all_equal(*found)


@pytest.mark.parametrize(
    "wrapper", [optzoo.interop.fbgemm.ema_in_place, optzoo.interop.fbgemm.ensemble]
)
def test_coefficients_of_averages(wrapper):
    inner = optzoo.gradient_descent(0.1)
    for coefficient in (0.0, 1.0):
        wrapper(inner, coefficient=coefficient)
    for coefficient in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match=r"coefficient must be in \[0, 1\], got"):
            wrapper(inner, coefficient=coefficient)
