"""Options of rules that a user writes, of the catalogue, and of what checks optimizers."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, PartitionSpec

import optzoo
from optzoo import CATALOG, SparseRows, rules
from optzoo.catalog import Entry, Method
from optzoo.core.compat import varying
from optzoo.testing import check_stacked, contract, samples

from .effects import SGD, Table, outcome

TABLE = Table()
effect = TABLE.effect


class Slots(NamedTuple):
    a: Any


def treewise(rule, **options):
    """The optimizer of a rule for each leaf."""

    def of_all(leaves, shared, t, **scheduled):
        return [rule(leaf.g, leaf.x, leaf.slots, t, **scheduled) for leaf in leaves], shared

    return rules.treewise(of_all, **options)


def minus_one(g, x, s, t):
    return -g - 1, s


ONE = jnp.ones((3, 1))
for name, make in {"leafwise": rules.leafwise, "treewise": treewise}.items():

    @effect(f"rules.{name}", "slots", {0.0: 0.0, 0.5: 0.5})
    def _(slots, make=make):
        state = make(minus_one, slots=Slots(rules.full(slots))).init(ONE)
        return float(optzoo.get_slot(state, "a")[0, 0])

    @effect(f"rules.{name}", "scheduled", {None: -2.0, 0.5: -0.5})
    def _(scheduled, make=make):
        """The step of a rule with a default rate of 2."""
        given = {} if scheduled is None else {"scheduled": {"rate": scheduled}}
        tx = make(lambda g, x, s, t, rate=2.0: (-rate * g, s), **given)
        return float(tx.update(ONE, tx.init(ONE))[0][0, 0])

    for option in ("needs_params", "needs_global_step"):

        @effect(f"rules.{name}", option, {False: None, True: "ValueError"})
        def _(needed, make=make, option=option):
            tx = make(minus_one, **{option: needed})
            return outcome(lambda: tx.update(ONE, tx.init(ONE)))

    @effect(f"rules.{name}", "cycle", {1: 2**31 - 1, 3: 2**31 - 3})
    def _(cycle, make=make):
        """The count after the greatest one."""
        tx = make(minus_one, cycle=cycle)
        state = tx.init(ONE)._replace(count=jnp.int32(2**31 - 1))
        return int(tx.update(ONE, state)[1].count)


@effect("rules.leafwise", "rows", {rules.lazy: [0.0, -2.0, 0.0], rules.dense: [-1.0, -2.0, -1.0]})
def _(rows):
    tx = rules.leafwise(minus_one, rows=rows)
    updates, _ = tx.update(SparseRows(jnp.array([1]), jnp.ones((1, 1)), 3), tx.init(ONE))
    return (jnp.zeros((3, 1)) + updates)[:, 0].tolist()


@effect("rules.leafwise", "powers", {0.5: [0.5, 0.25], 0.25: [0.25, 0.0625]})
def _(powers):
    """What the rule gets in two steps."""
    tx = rules.leafwise(lambda g, x, s, t, power: (power * g, s), powers={"power": powers})
    first, state = tx.update(ONE, tx.init(ONE))
    return [float(u[0, 0]) for u in (first, tx.update(ONE, state)[0])]


@effect("rules.leafwise", "precompute", {False: [0.5], True: [0.25]})
def _(precompute):
    """Of the rate of a rule, or of its square."""
    squared = {"precompute": lambda t, rate: {"rate": rate**2}} if precompute else {}
    tx = rules.leafwise(lambda g, x, s, t, rate: (rate * g, s), scheduled={"rate": 0.5}, **squared)
    return tx.update(ONE, tx.init(ONE))[0][0].tolist()


def of_shared(leaves, shared, t):
    return [(shared["total"] * leaf.g, leaf.slots) for leaf in leaves], shared


@effect("rules.treewise", "shared", {2.0: 2.0, 3.0: 3.0})
def _(shared):
    tx = rules.treewise(of_shared, shared=lambda: {"total": jnp.float32(shared)})
    return float(tx.update(ONE, tx.init(ONE))[0][0, 0])


@effect("rules.treewise", "shared_varies", {False: set(), True: {"shard"}})
def _(shared_varies):
    """The axes over which the type of the shared array says that it differs."""
    found = set()
    of_one = lambda: {"total": jnp.float32(1)}
    tx = rules.treewise(of_shared, shared=of_one, shared_varies=shared_varies)

    def init(params):
        found.update(varying(tx.init(params).shared["total"]))
        return params

    mesh = jax.make_mesh((2,), ("shard",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("shard")
    mapped = jax.shard_map(init, mesh=mesh, in_specs=spec, out_specs=spec)
    jax.eval_shape(mapped, jnp.ones((4, 1)))
    return found


# The catalogue


def registered(given=None, **about):
    """The entry of an optimizer; its arguments are noted where it is made."""

    def factory(learning_rate, **arguments):
        if given is not None:
            given.append({"learning_rate": learning_rate, **arguments})
        return optzoo.gradient_descent(learning_rate)

    optzoo.registry.register("mine", factory, **about)
    return CATALOG["mine"]


def noted(call, **about):
    """What the factory is given in a call, or the error."""
    given = []
    try:
        registered(given, **about)
        name = outcome(call)
    finally:
        CATALOG.pop("mine", None)
    return name or given[-1]["learning_rate"]


@effect("registry.register", "rows", {"dense": "dense", "lazy": "lazy"})
def _(rows):
    try:
        return registered(rows=rows).rows
    finally:
        CATALOG.pop("mine")


@effect("registry.register", "rate", {0.01: 0.01, 0.5: 0.5})
def _(rate):
    return noted(lambda: CATALOG["mine"].make(), rate=rate)


@effect("registry.register", "original", {None: 0.1, "lib.Mine": float(np.float32(0.1))})
def _(original):
    """The rate, rounded as by an original."""
    return float(noted(lambda: optzoo.create("mine", learning_rate=0.1), original=original))


@effect("registry.register", "about", {False: "TypeError", True: 0.5})
def _(about):
    """A value for an argument without a default."""
    given = {"required": {"size": 1}} if about else {}
    found = []
    try:
        optzoo.registry.register("mine", lambda rate, size: found.append(rate), rate=0.5, **given)
        return outcome(CATALOG["mine"].make) or found[0]
    finally:
        CATALOG.pop("mine", None)


@effect("catalog.Entry.make", "learning_rate", {None: 0.25, 0.5: 0.5})
def _(learning_rate):
    make = Entry(lambda rate: rate, "dense", 0.25, None).make
    return make() if learning_rate is None else make(learning_rate)


@effect("catalog.Entry.make", "kwargs", {False: 0.9, True: 0.5})
def _(kwargs):
    entry = Entry(lambda rate, momentum=0.9: momentum, "dense", 0.25, None)
    return entry.make(**({"momentum": 0.5} if kwargs else {}))


@effect("catalog.Method.make", "kwargs", {False: 1, True: 3})
def _(kwargs):
    method = Method(lambda inner, staleness=1: staleness, None)
    return method.make(SGD, 4, **({"staleness": 3} if kwargs else {}))


@effect("catalog.Entry", "required", {False: "TypeError", True: None})
def _(required):
    given = {"required": {"momentum": 0.9}} if required else {}
    return outcome(Entry(optzoo.momentum, "lazy", 0.1, None, **given).make)


@effect("catalog.Entry", "needs_global_step", {False: "ValueError", True: None})
def _(needs_global_step):
    """Whether the tests of optimizers give one."""
    follows = lambda rate: rules.leafwise(minus_one, needs_global_step=True)
    entry = Entry(follows, "lazy", 0.1, None, needs_global_step=needs_global_step)
    tx = samples.make(entry)
    return outcome(lambda: tx.update(ONE, tx.init(ONE)))


@effect("catalog.Entry", "static", {(): "int32", ("size",): "int"})
def _(static):
    """The type that the factory gets where the tests inject arguments."""
    found = []

    def factory(rate, size=2):
        found.append(type(size).__name__ if isinstance(size, int) else size.dtype.name)
        return optax.sgd(rate)

    contract.inject(Entry(factory, "lazy", 0.1, None, static=static), 0.1).init(ONE)
    return found[-1]


@effect("catalog.Method", "sized", {False: None, True: 3})
def _(sized):
    given = {"sized": {"staleness": lambda num_replicas: num_replicas - 1}} if sized else {}
    method = Method(lambda inner, staleness=None: staleness, None, **given)
    return method.make(SGD, 4)


@effect("create", "kwargs", {0.1: 0.1, 0.5: 0.5})
def _(learning_rate):
    return size_of_step(optzoo.create("gradient_descent", learning_rate=learning_rate))


@effect("ftrl_from", "arguments", {0.1: True, 0.5: False})
def _(learning_rate):
    """Whether the step is that of the rate 0.1."""
    of = lambda rate: size_of_step(optzoo.ftrl_from("keras", learning_rate=rate))
    return of(learning_rate) == of(0.1)


def size_of_step(tx):
    params = jnp.zeros(1)
    return round(-float(tx.update(jnp.ones(1), tx.init(params), params)[0][0]), 6)


# Checks

PAIR = {"a": jnp.ones(3), "b": jnp.ones(3), "c": jnp.ones(3)}
BY_NORM = optax.stateless(lambda u, p: jax.tree.map(lambda a: a / jnp.linalg.norm(a), u))


def from_step(first):
    """Divides by norms, which are others in a stack, from a step on."""

    def update(updates, state, params=None):
        divided, _ = BY_NORM.update(updates, optax.EmptyState())
        late = state >= first
        return jax.tree.map(lambda a, b: jnp.where(late, b, a), updates, divided), state + 1

    return optax.GradientTransformation(lambda params: jnp.int32(0), update)


@effect("testing.check_stacked", "steps", {2: None, 3: "AssertionError"})
def _(steps):
    return outcome(lambda: check_stacked(from_step(2), PAIR, steps=steps))


@effect("testing.check_stacked", "missing", {False: True, True: False})
def _(missing):
    """Whether it passes: optax takes no missing gradients."""
    return outcome(lambda: check_stacked(optax.trace(0.9), PAIR, missing=missing)) is None


@effect("testing.check_stacked", "extra_args", {False: "TypeError", True: None})
def _(extra_args):
    def update(updates, state, params=None, *, value):
        return jax.tree.map(lambda u: u * value, updates), state

    tx = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    given = {"extra_args": {"value": 2.0}} if extra_args else {}
    return outcome(lambda: check_stacked(tx, PAIR, steps=1, **given))


@effect("testing.check_stacked", "rtol", {1e-5: "AssertionError", 1e5: None})
def _(rtol):
    return outcome(lambda: check_stacked(BY_NORM, PAIR, steps=1, rtol=rtol))


@functools.cache
def values_of_seed(seed):
    """The message of an error, which has values."""
    try:
        check_stacked(BY_NORM, PAIR, steps=1, seed=seed)
    except AssertionError as error:
        return str(error)


@effect("testing.check_stacked", "seed", {0: True, 1: False})
def _(seed):
    """Whether the values are those of the seed 0."""
    return values_of_seed(seed) == values_of_seed(0)


@effect("testing.check_stacked", "options", {8: None, 2: "ValueError"})
def _(max_size):
    """No arrays of three elements are stacked."""
    return outcome(lambda: check_stacked(optax.trace(0.9), PAIR, steps=1, max_size=max_size))


@effect("transforms.check_numerics", "what", {"gradient": True, "update": False})
def _(what):
    """Whether the error is about a gradient."""
    tx = optzoo.transforms.check_numerics(what)
    try:
        tx.update({"w": jnp.full(1, jnp.nan)}, tx.init(None))
    except FloatingPointError as error:
        return str(error).startswith("the gradient of parameter 'w' is NaN")


test_an_option_has_its_effect = TABLE.test()
