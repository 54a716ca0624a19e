"""Options of reports."""

import re

import jax
import jax.numpy as jnp
import optax

import optzoo

from .effects import SGD, Table, outcome

TABLE = Table()
effect = TABLE.effect


@effect("describe", "axis_name", {"replica": None, "other": "NameError"})
def _(axis_name):
    model = optzoo.model_average(SGD, axis_name="replica")
    return outcome(lambda: optzoo.describe(model, {"w": jnp.ones(3)}, axis_name=axis_name))


def bytes_sent(tx, params, **options):
    """What a step sends: the numbers in the last line of a description."""
    last = str(optzoo.describe(tx, params, **options)).splitlines()[-1]
    return max(int(n.replace(",", "")) for n in re.findall(r"[\d,]*\d", last))


@effect("describe", "num_replicas", {2: True, 8: False})
def _(num_replicas):
    """Whether 4,000 numbers of 8 bits, sent twice, are more than 5,000 bytes of a device."""
    tx = optzoo.diloco(SGD, exchange_dtype="int8")
    return bytes_sent(tx, {"w": jnp.ones(4000)}, num_replicas=num_replicas) > 5000


def described(ids=512, **options):
    """The bytes that a device sends for a table on eight devices."""
    sharding = optzoo.sharded.RowSharding(4096, 8, multiple=1)
    params = {"table": jax.ShapeDtypeStruct((4096, 4), jnp.float32)}
    given = {"tables": {"table": sharding}, "ids": {"table": ids}, **options}
    return bytes_sent(optzoo.lazy_adam(0.1), params, **given)


@effect("describe", "tables", {True: None, False: "ValueError"})
def _(tables):
    """Ids are of tables that are sharded."""
    return outcome(lambda: described(**({} if tables else {"tables": None})))


@effect("describe", "ids", {256: "fewer", 512: "as many", 1024: "more"})
def _(ids):
    return compared(described(ids))


@effect("describe", "capacity_factor", {1.0: "as many", None: "more"})
def _(capacity_factor):
    return compared(described(capacity_factor=capacity_factor))


def compared(sent):
    usual = described()
    return "as many" if sent == usual else "more" if sent > usual else "fewer"


@effect("compile_report", "device", {"cpu": "cpu", "h100": "ImportError"})
def _(device):
    """Without a compiler for the others."""
    try:
        return optzoo.compile_report(jnp.sin, jnp.ones(4), device=device).device
    except Exception as error:
        return type(error).__name__


@effect("compile_report", "at_least", {16: 1, 17: 0})
def _(at_least):
    """How many new arrays are large: a result of four numbers."""
    return len(optzoo.compile_report(jnp.sin, jnp.ones(4), device="cpu", at_least=at_least).large)


@effect("describe", "extra_args", {False: "TypeError", True: None})
def _(extra_args):
    """Of an update that needs a value."""

    def update(updates, state, params=None, *, value, **others):
        return jax.tree.map(lambda u: u * value, updates), state

    tx = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    given = {"value": 1.0} if extra_args else {}
    return outcome(lambda: optzoo.describe(tx, {"w": jnp.ones(3)}, **given))


@effect("compile_report", "kwargs", {False: 16, True: 32})
def _(kwargs):
    """The bytes of the arguments: one or two arrays of four numbers."""
    given = {"more": jnp.ones(4)} if kwargs else {}
    f = lambda x, more=0.0: x + more
    return optzoo.compile_report(f, jnp.ones(4), device="cpu", **given).arguments


def _of_rows(ask, kwargs):
    """What is said of a step that cannot be traced without its argument by name."""
    step = lambda x, *, ids: x.at[ids].set(0.0)
    given = {"ids": jnp.arange(2)} if kwargs else {}
    return outcome(lambda: ask(step, jnp.ones((4, 2)), **given))


@effect("rows.formats", "kwargs", {False: "TypeError", True: None})
def _(kwargs):
    return _of_rows(optzoo.rows.formats, kwargs)


@effect("rows.compiler_options", "kwargs", {False: "TypeError", True: None})
def _(kwargs):
    return _of_rows(optzoo.rows.compiler_options, kwargs)


@effect("cite", "name", {"optzoo": "optzoo", "lazy_adam": "kingma2015adam"})
def _(name):
    """The key of the first entry."""
    return re.match(r"@\w+\{(\w+),", optzoo.cite(name))[1]


test_an_option_has_its_effect = TABLE.test(all_quick=True)
