"""A step of Shampoo and of SOAP compared with Shampoo's matrix products and optax.adam.

    .venv/bin/python benchmarks/shampoo.py [--block 512] [--rounds 21] [--cores 1] [--save]
    .venv/bin/python benchmarks/shampoo.py --compile [--save]

3.1M parameters: four matrices of 512 x 512, one of 512 x 2048 and one of 2048 x 512. The contenders
run in turns in random order, with donated arguments. *Products* are only the four matrix products
of each block, two for the statistics and two for the direction. A step that refreshes all roots is
timed separately; the mean over 20 steps, one of which refreshes, is computed from the medians of
both kinds of steps. SOAP needs six products, as its direction is rotated to the bases and back. Its
mean is also given for its default, one refresh in 10 steps.

Peers without a package (facebookresearch/optimizers at f606606, google-research/precondition at
239a8cd) were timed earlier on the same shapes, on one core of the same kind; the table has their
ratios to optax.adam and to the products of that run.

With ``--compile``: the time to trace, lower and compile a step for a transformer of 12 layers, 147
parameters with 85M elements.
"""

import argparse

import harness

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--compile", action="store_true")
parser.add_argument("--save", action="store_true")
for name, default in {"block": 512, "rounds": 21, "cores": 1}.items():
    parser.add_argument(f"--{name}", type=int, default=default)
args = parser.parse_args()
if not args.compile:
    harness.pin(args.cores)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

import optzoo  # noqa: E402

SHAPES = [(512, 512)] * 4 + [(512, 2048), (2048, 512)]
NEVER = 10**6
# Milliseconds without refresh and every 20 steps; in that run optax.adam took 2.9 and the products,
# from the speed of a matrix product, 64.
PUBLISHED = {
    "facebookresearch/optimizers, eigh": (162, 187),
    "google-research/precondition, eigh": (97, 123),
    "google-research/precondition, Newton": (82, 212),
}


def normal(seed):
    """Parameters or gradients."""
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in SHAPES]


def products(block):
    """``run(k)`` of only the matrix products, on the same number of blocks."""
    number = sum(m * n for m, n in SHAPES) // block**2
    x, h = (
        jnp.asarray(np.random.default_rng(k).normal(size=(number, block, block))) for k in (0, 1)
    )
    highest = jax.lax.Precision.HIGHEST

    @jax.jit
    def program(x, h):
        dot = lambda which, a, b: jnp.einsum(which, a, b, precision=highest)
        left, right = dot("kij,klj->kil", x, x), dot("kij,kil->kjl", x, x)
        return left, right, dot("kij,kjl->kil", dot("kij,kjl->kil", h, x), h)

    return lambda k: jax.block_until_ready(program(x, h))


def contenders(block):
    """The optimizers by name."""
    plain = dict(max_matrix_size=4096, block_size=block)
    recipe = dict(block_size=block, start_step=0)
    return {
        "optax.adam": optax.adam(1e-3),
        "shampoo, no refresh": optzoo.shampoo(1e-3, preconditioner_interval=NEVER, **plain),
        "shampoo, refresh": optzoo.shampoo(1e-3, **plain),
        "blocked_shampoo, no refresh": optzoo.blocked_shampoo(
            1e-3, preconditioner_interval=NEVER, **recipe
        ),
        "blocked_shampoo, refresh": optzoo.blocked_shampoo(
            1e-3, preconditioner_interval=1, **recipe
        ),
        "blocked_shampoo, staggered": optzoo.blocked_shampoo(
            1e-3, preconditioner_interval=20, stagger=True, **recipe
        ),
        "soap, no refresh": optzoo.soap(1e-3, preconditioner_interval=NEVER, block_size=block),
        "soap, refresh": optzoo.soap(1e-3, preconditioner_interval=1, block_size=block),
    }


def steps():
    """The results for steps."""
    grads = [normal(k) for k in range(4)]
    runs, about = {}, {}
    for name, tx in contenders(args.block).items():
        runs[name], about[name] = harness.contender(tx, normal(9), grads)
    times = harness.take_turns(runs | {"products": products(args.block)}, args.rounds)
    median = {name: 1e3 * float(np.median(t)) for name, t in times.items()}
    for name, every in (("shampoo", 20), ("blocked_shampoo", 20), ("soap", 20), ("soap", 10)):
        rest, refresh = median[f"{name}, no refresh"], median[f"{name}, refresh"]
        median[f"{name}, every {every}"] = ((every - 1) * rest + refresh) / every
    result = {}
    for name, ms in median.items():
        least = 1e3 * min(times[name]) if name in times else None
        result[name] = {
            "median ms": ms,
            "least ms": least,
            "x adam": ms / median["optax.adam"],
            "x products": ms / median["products"],
            **about.get(name, {}),
        }
    for name, times in PUBLISHED.items():
        for kind, ms in zip(("no refresh", "every 20"), times, strict=True):
            ratios = {"x adam": ms / 2.9, "x products": ms / 64}
            result[f"{name}, {kind} (published)"] = ratios
    return result


def transformer():
    """The shapes of a transformer of 12 layers of width 768."""
    d = 768
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    norm = {"scale": f32(d), "bias": f32(d)}
    linear = lambda m, n: {"kernel": f32(m, n), "bias": f32(n)}
    layer = {
        "ln_1": norm,
        "attention": {"qkv": linear(d, 3 * d), "out": linear(d, d)},
        "ln_2": norm,
        "mlp": {"up": linear(d, 4 * d), "down": linear(4 * d, d)},
    }
    return {f"layer_{i}": layer for i in range(12)} | {"ln": norm, "positions": f32(64, d)}


def compiling():
    """The results for compilation."""
    params, result = transformer(), {}
    blocked = {
        "optax.adam": optax.adam(1e-3),
        "blocked_shampoo": optzoo.blocked_shampoo(1e-3),
        "blocked_shampoo, staggered": optzoo.blocked_shampoo(1e-3, stagger=True),
        "blocked_shampoo, Newton": optzoo.blocked_shampoo(1e-3, root="newton"),
        "blocked_shampoo, blocks of 1024": optzoo.blocked_shampoo(1e-3, block_size=1024),
        "shampoo, blocks of 512": optzoo.shampoo(
            1e-3, 4096, preconditioner_interval=20, block_size=512
        ),
    }
    for name, tx in blocked.items():
        _, result[name] = harness.compiled(tx, params, params)
    return result


def main():
    """Runs, prints, and saves."""
    result = compiling() if args.compile else steps()
    for name, row in result.items():
        values = "   ".join(f"{k} {v:.3g}" for k, v in row.items() if v is not None)
        print(f"{name:50} {values}")
    if args.save:
        harness.save("shampoo_compile" if args.compile else "shampoo", {"measured": result})


if __name__ == "__main__":
    main()
