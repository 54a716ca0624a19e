"""A step of SOAP on eight devices of one process ends."""

import os
import subprocess
import sys

SCRIPT = """
import jax, jax.numpy as jnp, optzoo
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
place, key = NamedSharding(mesh, P("a", "b")), jax.random.key(0)
shapes = {"q": (32, 32), "up": (32, 64), "down": (64, 32)}
normal = lambda shape: jax.device_put(jax.random.normal(key, shape) / 8, place)
params = {f"{name}{i}": normal(shape) for i in range(4) for name, shape in shapes.items()}
tx = optzoo.soap(1e-3)

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
for _ in range(2):
    params, state = jax.block_until_ready(step(params, state, x))
print("done")
"""


def test_decompositions_do_not_wait_for_collectives():
    """Threads that collectives hold are not needed for eigenvectors (jaxlib before 0.12)."""
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
