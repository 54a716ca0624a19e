"""A step of SOAP on eight devices of one process ends."""

import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import optzoo
from optzoo.second_order import eigh

SCRIPT = """
import jax, jax.numpy as jnp, optzoo
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
place, key = NamedSharding(mesh, P("a", "b")), jax.random.key(0)
shapes = {"q": (32, 32), "up": (32, 64), "down": (64, 32)}
normal = lambda shape: jax.device_put(jax.random.normal(key, shape) / 8, place)
params = {f"{name}{i}": normal(shape) for i in range(4) for name, shape in shapes.items()}
tx = optzoo.soap(1e-3, preconditioner_interval=1)

def loss(params, x):
    for i in range(4):
        x = x + x @ params[f"q{i}"]
        x = x + jax.nn.relu(x @ params[f"up{i}"]) @ params[f"down{i}"]
    return jnp.mean(x**2)

@jax.jit
def step(params, state, x):
    updates, state = tx.update(jax.grad(loss)(params, x), state, params)
    return jax.tree.map(jnp.add, params, updates), state

state = jax.jit(tx.init, out_shardings=optzoo.state_sharding(tx, params))(params)
x = jax.device_put(jnp.ones((8, 32)), NamedSharding(mesh, P("a")))
for _ in range(4):
    params, state = jax.block_until_ready(step(params, state, x))
print("done")
"""


def test_decompositions_do_not_wait_for_collectives():
    """Threads that collectives hold are not needed for LAPACK (jaxlib before 0.12)."""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, **flags},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert run.stdout == "done\n", run.stderr[-2000:]


OPTIMIZERS = {
    "soap": optzoo.soap(1e-3),
    "shampoo": optzoo.shampoo(1e-3, root="eigh"),
    "blocked_shampoo": optzoo.blocked_shampoo(1e-3, root="eigh"),
    "ggt": optzoo.ggt(1e-3, window=13),
}


def of_lapack(f, x):
    """The operations of LAPACK in a program for the CPU, with the shapes of their matrices."""
    text = jax.jit(f).lower(x).as_text()
    found = re.findall(r"@lapack_s(\w+)_ffi\(.*? : \(tensor<([\dx]+)xf32>", text)
    return {(name, tuple(map(int, shape.split("x")))) for name, shape in found}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_lapack_has_one_matrix_at_a_time(name, monkeypatch):
    """Also in derivatives, and under vmap. An operation on several matrices waits for threads."""
    monkeypatch.setattr(eigh, "LAPACK_WAITS_FOR_THREADS", True)
    # Of sizes (and a window) that no other test has: JAX keeps what it traced without that line.
    tx, x = OPTIMIZERS[name], {"a": jnp.ones((7, 11)), "b": jnp.ones((7, 11))}
    update = lambda g: tx.update(g, tx.init(x), x)
    derivative = lambda g: jax.jvp(lambda g: jax.tree.leaves(update(g)), (g,), (g,))
    replicas = lambda g: jax.vmap(update)(jax.tree.map(lambda x: jnp.stack([x, x]), g))
    programs = [of_lapack(f, x) for f in (update, derivative, replicas)]
    with_qr = {"geqrf", "orgqr"} if name == "soap" else set()
    assert {kind for kind, _ in programs[0]} == {"syevd"} | with_qr
    assert ("trsm" in {kind for kind, _ in programs[1]}) == (name == "soap")
    for kind, shape in set.union(*programs):
        assert shape[:-2] in ((), (1,)), (kind, shape)
