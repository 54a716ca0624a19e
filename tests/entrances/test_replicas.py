"""Options of what runs on replicas."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

import optzoo

from .effects import Table, outcome

TABLE = Table()
effect = TABLE.effect

ALONG = {"psum": optzoo.rows.psum, "broadcast": optzoo.replicas.broadcast}
ALONG["per_replica"] = optzoo.replicas.per_replica
for name, collective in ALONG.items():
    home = "rows" if name == "psum" else "replicas"

    @effect(f"{home}.{name}", "axis_name", {"replica": None, "another": "NameError"})
    def _(axis_name, collective=collective):
        f = functools.partial(collective, axis_name=axis_name)
        return outcome(lambda: jax.vmap(f, axis_name="replica")(jnp.ones(3)))


def averaged(axis_name="replica", along="replica", **options):
    """The sum over the replicas of a parameter, taken in the step of each."""
    step = lambda p, s: (jax.lax.psum(p, along), s)
    mapped = optzoo.replicas.map_over_replicas(step, axis_name=axis_name, **options)
    return jax.jit(mapped)(jnp.ones((2, 1)), jnp.zeros((2, 1)))[0]


@effect("replicas.map_over_replicas", "axis_name", {"replica": None, "another": "NameError"})
def _(axis_name):
    return outcome(lambda: averaged(axis_name))


def two_devices(name="replica"):
    return jax.make_mesh((2,), (name,), axis_types=(AxisType.Auto,))


@effect("replicas.map_over_replicas", "mesh", {None: 1, "replica": 2})
def _(mesh):
    """On how many devices the step runs."""
    sums = averaged(mesh=mesh and two_devices(mesh))
    return len(sums.sharding.device_set)


@effect("replicas.map_over_replicas", "check_vma", {True: True, False: False})
def _(check_vma):
    """Whether JAX checks which values differ between the devices."""
    mapped = optzoo.replicas.map_over_replicas(
        lambda p, s: (p, s), mesh=two_devices(), check_vma=check_vma
    )
    return "check_vma=True" in str(jax.make_jaxpr(mapped)(jnp.ones((2, 1)), jnp.zeros((2, 1))))


MODEL = optzoo.model_average(optzoo.gradient_descent(0.1), axis_name="replica")
for name in ("replicate", "resize_replicas"):

    def placed(name, **options):
        """The devices of the parameters of two replicas."""
        params = jnp.ones(3)
        of_one = params, MODEL.init(params)
        if name == "replicate":
            params, _ = optzoo.replicas.replicate(*of_one, 2, **options)
        else:
            of_three = optzoo.replicas.replicate(*of_one, 3)
            params, _ = optzoo.replicas.resize_replicas(MODEL, *of_three, 2, **options)
        return params.sharding

    @effect(f"replicas.{name}", "mesh", {None: 1, "replica": 2})
    def _(mesh, name=name):
        return len(placed(name, mesh=mesh and two_devices(mesh)).device_set)

    @effect(f"replicas.{name}", "axis_name", {"replica": "ValueError", "other": None})
    def _(axis_name, name=name):
        """Of a mesh with the axis ``other``."""
        return outcome(lambda: placed(name, mesh=two_devices("other"), axis_name=axis_name))


@effect(
    "replicas.scan_local_steps",
    "overlap_steps",
    {0: {False, True}, 1: {False, "start", "finish"}},
)
def _(overlap_steps):
    """What the steps of a round of three are told about the exchange."""
    found = set()

    def step(params, state, x, exchange):
        found.add(exchange)
        return params, state, x

    steps = optzoo.replicas.scan_local_steps(step, overlap_steps=overlap_steps)
    steps(jnp.ones(2), (), jnp.ones(3))
    return found


test_an_option_has_its_effect = TABLE.test(all_quick=True)
