"""Mistakes in the arguments of updates, for every optimizer, wrapper and distributed method."""

import functools
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optzoo

# No number is twice here, so that a state of other shapes has none of these.
PARAMS = {"a": jnp.ones(5), "table": jnp.ones((7, 3))}
NAN = float("nan")

WRAPPERS = {
    "accumulate": lambda inner: optzoo.accumulate(inner, 2),
    "decoupled_weight_decay": lambda inner: optzoo.decoupled_weight_decay(
        inner, weight_decay_per_step=0.1
    ),
    "cautious_weight_decay": lambda inner: optzoo.cautious_weight_decay(
        inner, weight_decay_per_step=0.1
    ),
    "ema_nesterov": lambda inner: optzoo.ema_nesterov(inner, 0.5),
    "hyperball": lambda inner: optzoo.hyperball(inner, 0.1, {}),
    "moving_average": optzoo.moving_average,
    "ensemble": optzoo.interop.fbgemm.ensemble,
    "multitask": optzoo.multitask,
    "skip_spikes": lambda inner: optzoo.skip_spikes(inner, on="norm"),
    "stacked": lambda inner: optzoo.stacked(inner, check=False),
    "variable_clipping": lambda inner: optzoo.variable_clipping(inner, {}, 1.0),
    "groups": lambda inner: optzoo.param_groups({"table": inner, ".*": optzoo.adam(0.1)}),
    "on_rows": optzoo.on_rows,
    "graft": lambda inner: optzoo.transforms.graft(optzoo.momentum(1.0, 0.9), inner),
}
METHODS = {
    name: functools.partial(method.make, num_replicas=1, axis_name=None)
    for name, method in optzoo.catalog.DISTRIBUTED.items()
}


def transformations():
    """Everything that is called with wrong arguments."""
    found = {name: entry.make() for name, entry in optzoo.CATALOG.items()}
    for name, wrap in {**WRAPPERS, **METHODS}.items():
        found[f"{name}(optax.adam)"] = wrap(optax.adam(0.1))
        found[f"{name}(adam)"] = wrap(optzoo.adam(0.1))
    for options in ({}, {"packed": True}, {"stochastic": True}):
        name = "".join(f", {option}" for option in options)
        found[f"slots_dtype(adam{name})"] = optzoo.slots_dtype(
            optzoo.adam(0.1), "bfloat16", **options
        )
    return found


def update(tx, gradients=PARAMS, state=None, params=PARAMS, **extra_args):
    """Traces one update; without a state from that of the parameters."""
    state = tx.init(PARAMS) if state is None else state
    given = {"global_step": 0, **extra_args}
    jax.eval_shape(lambda g, s, x: tx.update(g, s, x, **given), gradients, state, params)


def eager(tx, gradients=PARAMS, state=None, params=PARAMS, **extra_args):
    """As :func:`update`, but a state and parameters of any kind may be given."""
    given = {"global_step": 0, **extra_args}
    jax.eval_shape(lambda g: tx.update(g, state, params, **given), gradients)


def with_table(table):
    return {**PARAMS, "table": table}


def rows(num_rows):
    return with_table(optzoo.SparseRows(jnp.array([0, 1]), jnp.ones((2, 3)), num_rows))


ARGUMENTS = {
    "learning_rate=(3,)": {"learning_rate": jnp.ones(3)},
    "learning_rate=nan": {"learning_rate": NAN},
    "learning_rate=inf": {"learning_rate": np.float32(np.inf)},
    "learning_rate='0.1'": {"learning_rate": "0.1"},
    "learning_rate={}": {"learning_rate": {"a": 0.1, "table": 0.1}},
    "global_step=-1": {"global_step": -1},
    "global_step=1.5": {"global_step": 1.5},
    "global_step='x'": {"global_step": "x"},
    "global_step=(2,)": {"global_step": np.arange(2)},
    "lr": {"lr": 0.1},
    "learing_rate": {"learing_rate": 0.1},
    "globalstep": {"globalstep": 1},
}
GRADIENTS = {
    "a row as gradient": with_table(jnp.ones(3)),
    "a column as gradient": with_table(jnp.ones((7, 1))),
    "a scalar as gradient": with_table(jnp.ones(())),
    "another shape": with_table(jnp.ones((7, 4))),
    "more axes": with_table(jnp.ones((2, 7, 3))),
    "integer gradient": with_table(jnp.ones((7, 3), int)),
    "bool gradient": with_table(jnp.ones((7, 3), bool)),
    "complex gradient": with_table(jnp.ones((7, 3), jnp.complex64)),
    "fp8 gradient": with_table(jnp.ones((7, 3), jnp.float8_e4m3fn)),
    "rows of a smaller table": rows(6),
    "rows of a larger table": rows(9),
}
DTYPES = {"integer": int, "complex": jnp.complex64, "fp8": jnp.float8_e4m3fn}


def of_arguments(tx):
    for name, given in ARGUMENTS.items():
        yield name, functools.partial(update, tx, **given)


def of_gradients(tx):
    for name, gradients in GRADIENTS.items():
        yield name, functools.partial(update, tx, gradients)
        yield f"{name}, no params", functools.partial(update, tx, gradients, params=None)


def of_dtypes(tx):
    """Parameters that no optimizer moves, with gradients of float32."""
    for name, dtype in DTYPES.items():
        wrong = with_table(jnp.ones((7, 3), dtype))

        def call(params, wrong=wrong):
            update(tx, PARAMS, tx.init(wrong), params)

        yield f"{name} parameter", functools.partial(call, wrong)
        yield f"{name} parameter, no params", functools.partial(call, None)


def of_states(tx):
    yield "swapped", functools.partial(eager, tx, state=PARAMS, params=tx.init(PARAMS))
    yield "no state", functools.partial(eager, tx, state=None)
    yield "parameters as state", functools.partial(eager, tx, state=PARAMS)
    others = {
        "a chain": optax.chain(optzoo.clip_by_global_norm(1.0), tx),
        "optax.adamw": optax.adamw(0.1),
        "optax.adagrad": optax.adagrad(0.1),
        "adadelta": optzoo.adadelta(0.1),
        "ftrl": optzoo.ftrl(0.1),
        "elastic_average": optzoo.elastic_average(optzoo.adadelta(0.1), 1, axis_name=None),
    }
    own = jax.tree.structure(tx.init(PARAMS))
    for name, other in others.items():
        state = other.init(PARAMS)
        if jax.tree.structure(state) != own:
            yield f"state of {name}", functools.partial(eager, tx, state=state)
    shapes = {
        "a row": jnp.ones(3),
        "a larger table": jnp.ones((9, 3)),
        "no axes": jnp.ones(()),
    }
    for name, table in shapes.items():
        state = tx.init(with_table(table))
        yield f"state of {name}", functools.partial(eager, tx, state=state)
        yield f"state of {name}, no params", functools.partial(eager, tx, state=state, params=None)
    fewer, more = {"a": PARAMS["a"]}, {**PARAMS, "z": jnp.ones(2)}
    for name, params in {"fewer": fewer, "more": more}.items():
        try:
            state = tx.init(params)
        except ValueError:  # a pattern of groups matches nothing
            continue
        yield f"state of {name} parameters", functools.partial(eager, tx, state=state)


# What no shape or dtype that is known tells from what is right: an optimizer without slots knows
# nothing of parameters that it is not given, and its state is that of any parameters; the slots of
# rows have one axis. slots_dtype makes real slots of any parameters.
_WITHOUT_SLOTS = ("gradient_descent", "normalized_sgd", "proximal_gradient_descent")
_OF_ROWS = ("a column as gradient, no params", "another shape, no params")
_ACCEPTED = {
    "counter_row_wise_adagrad": _OF_ROWS,
    "row_wise_adagrad": _OF_ROWS,
    "row_wise_rmsprop": _OF_ROWS,
    # Optimizers of optax take complex numbers, and a group may hold any transformation.
    "multitask(optax.adam)": ("complex parameter",),
    "skip_spikes(optax.adam)": ("complex parameter", "complex parameter, no params"),
    "stacked(optax.adam)": ("complex parameter",),
    "on_rows(optax.adam)": ("complex parameter",),
    "groups(optax.adam)": ("complex parameter", "integer gradient", "bool gradient"),
    "sync_replicas(optax.adam)": ("complex parameter, no params",),
}


def is_accepted(name, case):
    """Whether a call is deliberately accepted."""
    if name in _WITHOUT_SLOTS:
        return case.endswith("no params") or case.startswith("state of")
    if name.startswith("slots_dtype"):
        return case in ("integer parameter, no params", "complex parameter, no params")
    return is_promised(name, case)


def is_promised(name, case):
    """Whether a call must be accepted."""
    return case.startswith(_ACCEPTED.get(name, ("nothing",)))


KINDS = {
    "arguments": of_arguments,
    "gradients": of_gradients,
    "dtypes": of_dtypes,
    "states": of_states,
}


def outcome(call):
    """Whether a call is accepted, or refused by this library or by another; and the error."""
    try:
        call()
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1].filename
        ours = isinstance(error, TypeError | ValueError) and "/optzoo/" in last
        return ("ours" if ours else "foreign"), error
    return "accepted", None
