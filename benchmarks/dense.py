"""Dense steps: every optimizer beside its peers in optax and torch, and the memory's roof.

    .venv/bin/python benchmarks/dense.py [--case resnet50] [--only adam ftrl] [--rounds 11] [--save]

All contenders of an optimizer take turns in one run, in a new order each round, on one core, with
donated arguments. The roof is an axpy in place: 12 bytes for each parameter. An optimizer that must
move more bytes has so much more of it: gradients are read, parameters and slots read and written.
Prints least times in ns per parameter and their ratios. torch is taken along where it is installed.
"""

import argparse
import importlib.util

import harness

harness.pin(1)

import functools  # noqa: E402 (JAX and torch start their threads on the cores they find)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

import optzoo  # noqa: E402

ROOF_BYTES = 12


def resnet50():
    """The shapes of its 161 parameters, 25.6 million; kernels as JAX has them, channels last."""
    shapes, width = [(7, 7, 3, 64), (64,), (64,)], 64
    for blocks, inner in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            convolutions = [(1, 1, width, inner), (3, 3, inner, inner), (1, 1, inner, 4 * inner)]
            if block == 0:
                convolutions.append((1, 1, width, 4 * inner))
            for shape in convolutions:
                shapes += [shape, shape[3:], shape[3:]]
            width = 4 * inner
    return [*shapes, (2048, 1000), (1000,)]


def transformer(layers=12, width=512, words=8000):
    """The shapes of a decoder with 12 layers: 42 million."""
    layer = [(width, 3 * width), (3 * width,), (width, width), (width,), (width,), (width,)]
    layer += [(width, 4 * width), (4 * width,), (4 * width, width), (width,), (width,), (width,)]
    return [(words, width), (1024, width), *layer * layers, (width,), (width,)]


CASES = {
    "resnet50": resnet50(),
    "four": [(2500, 2500)] * 4,
    "thousand": [(1000,)] * 1000,
    "transformer": transformer(),
}

# For each of ours: itself, optax's, and torch's with what makes it foreach or fused.
PEERS = {
    "gradient_descent": (optzoo.gradient_descent(1e-3), optax.sgd(1e-3), ("SGD", {})),
    "momentum": (
        optzoo.momentum(1e-3, 0.9),
        optax.sgd(1e-3, 0.9),
        ("SGD", {"momentum": 0.9}),
    ),
    "adam": (optzoo.adam(1e-3), optax.adam(1e-3), ("Adam", {})),
    "adamw": (
        optzoo.adamw(1e-3, weight_decay=1e-4),
        optax.adamw(1e-3, weight_decay=1e-4),
        ("AdamW", {"weight_decay": 1e-4}),
    ),
    "adagrad": (optzoo.adagrad(1e-2), optax.adagrad(1e-2), ("Adagrad", {})),
    "rmsprop": (optzoo.rmsprop(1e-3), optax.rmsprop(1e-3), ("RMSprop", {})),
    "adadelta": (optzoo.adadelta(1e-3), optax.adadelta(1e-3, 0.95, 1e-8), ("Adadelta", {})),
    "nadam": (optzoo.nadam(1e-3), optax.nadam(1e-3), ("NAdam", {})),
    "adamax": (optzoo.adamax(1e-3), optax.adamax(1e-3), ("Adamax", {})),
    "amsgrad": (
        optzoo.amsgrad(1e-3, eps=1e-8),
        optax.amsgrad(1e-3),
        ("Adam", {"amsgrad": True}),
    ),
    "lars": (optzoo.lars(1e-3), optax.lars(1e-3, 1e-4), None),
}
WITHOUT_PEER = [
    "add_sign", "power_sign", "ftrl", "proximal_adagrad", "proximal_gradient_descent",
    "adagrad_da", "reg_adagrad", "lazy_adam", "momentumw", "neural_optimizer1",
    "grad_variance_scaled", "normalized_sgd", "custom_adam", "row_wise_adagrad",
]  # fmt: skip
FUSED = {"SGD", "Adam", "AdamW", "Adagrad"}


def arrays(shapes, seed):
    """Parameters, or gradients, of these shapes."""
    random = np.random.default_rng(seed)
    return [random.standard_normal(shape, np.float32) * 0.1 for shape in shapes]


def ours(tx, params, grads):
    """A run of a transformation, and the bytes that it must move for each parameter."""
    run, about = harness.contender(
        tx, list(map(jnp.asarray, params)), [list(map(jnp.asarray, grads))]
    )
    return run, 3 * 4 + 2 * about["state bytes per parameter"]


def of_torch(kind, kwargs, params, grads, **how):
    """A run of a torch optimizer."""
    import torch

    torch.set_num_threads(1)
    xs = [torch.nn.Parameter(torch.tensor(x)) for x in params]
    for x, g in zip(xs, grads, strict=True):
        x.grad = torch.tensor(g)
    optimizer = getattr(torch.optim, kind)(xs, lr=1e-3, **kwargs, **how)
    return lambda k: optimizer.step()


def roof(params, grads):
    """The fastest way over parameters and gradients: an axpy in place, of flat arrays."""
    size = sum(x.size for x in params)
    x, g = jnp.zeros(size), jnp.concatenate([jnp.ravel(g) for g in grads])
    axpy = jax.jit(lambda x, g: x - 1e-3 * g, donate_argnums=0)

    def run(k):
        nonlocal x
        x = axpy(x, g).block_until_ready()

    return run


def measure(name, shapes, rounds):
    """Least and median seconds of each contender, and the bytes ours must move per parameter."""
    params, grads = arrays(shapes, 0), arrays(shapes, 1)
    tx, of_optax, torchs = PEERS.get(name) or (optzoo.CATALOG[name].make(), None, None)
    contenders = {"roof": roof(params, grads)}
    contenders["optzoo"], moved = ours(tx, params, grads)
    if of_optax is not None:
        contenders["optax"], _ = ours(of_optax, params, grads)
    if torchs is not None and importlib.util.find_spec("torch"):
        kind, kwargs = torchs
        make = functools.partial(of_torch, kind, kwargs, params, grads)
        contenders["torch foreach"] = make(foreach=True)
        if kind in FUSED:
            contenders["torch fused"] = make(fused=True)
    seconds = harness.take_turns(contenders, rounds)
    found = {
        k: {"least s": min(times), "median s": float(np.median(times))}
        for k, times in seconds.items()
    }
    return {"bytes per parameter": moved, "seconds": found}


def ratios(result):
    """Ours by each other, in least times; and by the roof of the bytes that it must move."""
    least = {k: v["least s"] for k, v in result["seconds"].items()}
    roofs = least.pop("roof") * result["bytes per parameter"] / ROOF_BYTES
    mine = least.pop("optzoo")
    return {"roof": mine / roofs} | {k: mine / v for k, v in least.items()}


def main():
    """Runs, prints and saves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=CASES, nargs="+", default=["resnet50"])
    parser.add_argument("--only", nargs="+", default=[*PEERS, *WITHOUT_PEER])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    results = {}
    for case in args.case:
        shapes = CASES[case]
        size = sum(int(np.prod(shape)) for shape in shapes)
        print(f"{case}: {len(shapes)} arrays, {size:,} parameters")
        results[case] = {}
        for name in args.only:
            result = measure(name, shapes, args.rounds)
            result["ratios"] = ratios(result)
            results[case][name] = result
            times = "  ".join(
                f"{k} {1e9 * v['least s'] / size:.3f}" for k, v in result["seconds"].items()
            )
            by = "  ".join(f"/{k} {v:.2f}" for k, v in result["ratios"].items())
            print(f"  {name:26} {times}   {by}", flush=True)
    if args.save:
        harness.save("dense", {"cases": results})


if __name__ == "__main__":
    main()
