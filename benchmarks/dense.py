"""Dense steps: every optimizer compared with optax, torch and the limit of memory bandwidth.

    .venv/bin/python benchmarks/dense.py [--case resnet50] [--only adam ftrl] [--rounds 11] [--save]

All contenders of an optimizer run in turns in random order, on one core, with donated arguments.
The roof is the time of an in-place axpy, which moves 12 bytes per parameter, scaled by the bytes
that the optimizer must move: gradients are read, parameters and slots are read and written. Prints
least times in ns per parameter and their ratios, with ratios of medians in parentheses. torch is
included if installed.
"""

import argparse
import importlib.util

import harness

harness.pin(1)

import functools  # noqa: E402 (JAX and torch start their threads on the cores they find)
import statistics  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

import optzoo  # noqa: E402
from optzoo.testing.samples import with_global_step  # noqa: E402

ROOF_BYTES = 12


def resnet50():
    """The shapes of the 161 parameters of ResNet-50, 25.6 million elements; channels last."""
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
    """The shapes of a decoder with 12 layers and 42 million parameters."""
    layer = [(width, 3 * width), (3 * width,), (width, width), (width,), (width,), (width,)]
    layer += [(width, 4 * width), (4 * width,), (4 * width, width), (width,), (width,), (width,)]
    return [(words, width), (1024, width), *layer * layers, (width,), (width,)]


CASES = {
    "resnet50": resnet50(),
    "four": [(2500, 2500)] * 4,
    "thousand": [(1000,)] * 1000,
    "transformer": transformer(),
}

# For each of our optimizers: itself, that of optax, and name and arguments of that of torch.
PEERS = {
    "gradient_descent": (optzoo.gradient_descent(1e-3), optax.sgd(1e-3), ("SGD", {})),
    "momentum": (
        optzoo.momentum(1e-3, 0.9),
        optax.sgd(1e-3, 0.9),
        ("SGD", {"momentum": 0.9}),
    ),
    "adam": (optzoo.adam(1e-3), optax.adam(1e-3), ("Adam", {})),
    "adamw": (
        optzoo.adamw(1e-3, weight_decay_per_step=1e-4),
        optax.adamw(1e-3, weight_decay=1e-4),
        ("AdamW", {"weight_decay": 1e-4}),
    ),
    "adagrad": (optzoo.adagrad(1e-2), optax.adagrad(1e-2), ("Adagrad", {})),
    "rmsprop": (optzoo.rmsprop(1e-3), optax.rmsprop(1e-3), ("RMSprop", {})),
    "rmsprop, momentum=None": (
        optzoo.rmsprop(1e-3, momentum=None),
        optax.rmsprop(1e-3),
        ("RMSprop", {}),
    ),
    "rmsprop, momentum=0.9": (
        optzoo.rmsprop(1e-3, momentum=0.9),
        optax.rmsprop(1e-3, momentum=0.9),
        ("RMSprop", {"momentum": 0.9}),
    ),
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
OF_CATALOG = {name: e for name, e in optzoo.CATALOG.items() if e.family != "second_order"}
FUSED = {"SGD", "Adam", "AdamW", "Adagrad"}


def arrays(shapes, seed):
    """Parameters, or gradients, of these shapes."""
    random = np.random.default_rng(seed)
    return [random.standard_normal(shape, np.float32) * 0.1 for shape in shapes]


def in_jax(tx, params, grads):
    """``run(k)`` of a transformation, and the properties of its program."""
    return harness.contender(tx, list(map(jnp.asarray, params)), [list(map(jnp.asarray, grads))])


def without_peer(name):
    """The optimizer of the catalogue."""
    entry = OF_CATALOG[name]
    factory = with_global_step(entry.factory) if entry.needs_global_step else entry.factory
    return factory(entry.rate, **entry.required)


def roof(params, grads):
    """A lower bound of the time: an in-place axpy of flat arrays."""
    size = sum(x.size for x in params)
    x, g = jnp.zeros(size), jnp.concatenate([jnp.ravel(g) for g in grads])
    axpy = jax.jit(lambda x, g: x - 1e-3 * g, donate_argnums=0)

    def run(k):
        nonlocal x
        x = axpy(x, g).block_until_ready()

    return run


def measure(name, shapes, rounds):
    """Least and median seconds of each contender, ratios, and properties of the programs."""
    params, grads = arrays(shapes, 0), arrays(shapes, 1)
    tx, of_optax, torchs = PEERS[name] if name in PEERS else (without_peer(name), None, None)
    contenders, about = {"roof": roof(params, grads)}, {}
    for who, transformation in {"optzoo": tx, "optax": of_optax}.items():
        if transformation is not None:
            contenders[who], about[who] = in_jax(transformation, params, grads)
    if torchs is not None and importlib.util.find_spec("torch"):
        kind, kwargs = torchs
        make = functools.partial(harness.of_torch, kind, params, grads, **kwargs)
        contenders["torch foreach"] = make(foreach=True)
        if kind in FUSED:
            contenders["torch fused"] = make(fused=True)
    seconds = harness.take_turns(contenders, rounds)
    moved = 3 * 4 + 2 * about["optzoo"]["state bytes per parameter"]
    result = {"bytes per parameter": moved, "programs": about}
    for kind, of_all in {"least": min, "median": statistics.median}.items():
        result[f"{kind} s"] = {who: of_all(times) for who, times in seconds.items()}
        result[f"ratios of {kind}"] = ratios(result[f"{kind} s"], moved)
    return result


def ratios(seconds, moved):
    """The ratios of our time to that of each other contender, and to the roof."""
    others = {**seconds, "roof": seconds["roof"] * moved / ROOF_BYTES}
    mine = others.pop("optzoo")
    return {who: mine / theirs for who, theirs in others.items()}


def main():
    """Runs, prints and saves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=CASES, nargs="+", default=["resnet50"])
    parser.add_argument(
        "--only", nargs="+", help="default: all on resnet50, otherwise those with peers"
    )
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    results, sizes = {}, {}
    for case in args.case:
        shapes = CASES[case]
        size = sizes[case] = sum(int(np.prod(shape)) for shape in shapes)
        print(f"{case}: {len(shapes)} arrays, {size:,} parameters")
        results[case] = {}
        for name in args.only or {**PEERS, **(OF_CATALOG if case == "resnet50" else {})}:
            result = results[case][name] = measure(name, shapes, args.rounds)
            times = "  ".join(f"{k} {1e9 * v / size:.3f}" for k, v in result["least s"].items())
            medians = result["ratios of median"]
            by = "  ".join(
                f"/{k} {v:.2f} ({medians[k]:.2f})" for k, v in result["ratios of least"].items()
            )
            print(f"  {name:26} {times}   {by}", flush=True)
    if args.save:
        harness.save("dense", {"parameters": sizes, "cases": results})


if __name__ == "__main__":
    main()
