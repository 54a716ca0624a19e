"""Unlike tables and a dense layer in boxes, trained on meshes and resumed on other devices."""

import contextlib
import functools
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, reshard
from jax.sharding import PartitionSpec as P

import optzoo

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # haliax uses names that Equinox will drop
    import haliax as hax

# The shape, the names of the axes, and how a mesh divides them.
PARAMS = {
    "users": ((64, 4), ("user", "embed"), P("d", None)),
    "items": ((11, 32), ("item", "wide"), P(None, "d")),
    "one": ((1, 8), ("constant", "narrow"), P(None, None)),
    "kernel": ((44, 4), ("features", "out"), P("d", None)),
    "bias": ((4,), ("out",), P(None)),
}
BOXES = {
    "none": lambda x, names: x,
    "linen": lambda x, names: nn.LogicallyPartitioned(x, names),
    "nnx": lambda x, names: nnx.Param(x, out_sharding=names, eager_sharding=False),
    "haliax": lambda x, names: hax.named(x, tuple(map(hax.Axis, names, x.shape))),
}
TX = optax.chain(
    optzoo.clip_by_global_norm(0.5),
    optzoo.param_groups(
        {
            "users": optzoo.caught_up(optzoo.adam(0.1)),
            "items": optzoo.slots_dtype(optzoo.lazy_adam(0.1), "int8"),
            "one": optzoo.row_wise_adagrad(0.1),
            ".*": optzoo.moving_average(optzoo.adam(0.1), 0.9),
        }
    ),
)
STEPS = 4


def arrays():
    draw = np.random.default_rng(0).normal
    of = {name: draw(size=shape).astype("float32") for name, (shape, *_) in PARAMS.items()}
    return of | {"kernel": of["kernel"].astype(jnp.bfloat16)}


def batch(i):
    rng = np.random.default_rng(i)
    ids = {k: rng.integers(0, PARAMS[k][0][0], 8) for k in ("users", "items", "one")}
    return ids, rng.normal(size=(8, 4)).astype("float32")


def loss(params, ids, y):
    whole = lambda x: reshard(x, P()) if jax.typeof(x).sharding.mesh.are_all_axes_explicit else x
    x = dict(zip(sorted(PARAMS), jax.tree.leaves(params), strict=True))
    rows = [whole(optzoo.lookup(x[k], ids[k])) for k in ids]
    out = jnp.concatenate(rows, -1) @ whole(x["kernel"]).astype("float32") + whole(x["bias"])[None]
    return jnp.mean((out - y) ** 2)


def run(params, state, steps):
    step = optzoo.minimize(loss, TX, min_rows=8)
    before = [(x.sharding, x.ndim) for x in jax.tree.leaves((params, state))]
    for i in steps:
        params, state, _ = step(params, state, *batch(i))
        after = [x.sharding for x in jax.tree.leaves((params, state))]
        assert all(a.is_equivalent_to(*b) for a, b in zip(after, before, strict=True))
    return params, state


@functools.cache
def on_one_device():
    params = jax.tree.map(jnp.asarray, arrays())
    return optzoo.rows.catch_up(*run(params, TX.init(params), range(STEPS)))


@contextlib.contextmanager
def on_devices(kind, number, box):
    """The parameters and the state on a mesh that is set."""
    types, devices = (AxisType[kind],), jax.devices()[:number]
    mesh = jax.make_mesh((number,), ("d",), axis_types=types, devices=devices)
    put = lambda name, x: jax.device_put(x, NamedSharding(mesh, PARAMS[name][2]))
    with jax.set_mesh(mesh):
        params = {k: BOXES[box](put(k, x), PARAMS[k][1]) for k, x in arrays().items()}
        yield params, TX.init(params)


@pytest.mark.unique
@pytest.mark.parametrize(
    ("box", "kind", "first", "then"),
    [
        ("linen", "Auto", 2, 4),
        ("nnx", "Explicit", 4, 2),
        ("haliax", "Auto", 4, 2),
        ("none", "Explicit", 2, 4),
    ],
)
@pytest.mark.filterwarnings("ignore:8-bit slots of")  # those of items are whole
def test_a_mixed_model_goes_on_on_other_devices(box, kind, first, then, tmp_path):
    with ocp.StandardCheckpointer() as checkpoints:
        with on_devices(kind, first, box) as (params, state):
            checkpoints.save(tmp_path / "half", run(params, state, range(STEPS // 2)))
            checkpoints.wait_until_finished()
        with on_devices(kind, then, box) as (params, state):
            shapes, places = jax.eval_shape(TX.init, params), optzoo.state_sharding(TX, params)
            of = lambda a, place: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place)
            target = params, jax.tree.map(of, shapes, places)
            got = run(*checkpoints.restore(tmp_path / "half", target), range(STEPS // 2, STEPS))
            got = optzoo.rows.catch_up(*got)
    for a, b in zip(*map(jax.tree.leaves, (got, on_one_device())), strict=True):
        rtol = 2**-8 if a.dtype == jnp.bfloat16 else 1e-5
        np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=rtol, atol=1e-6)
