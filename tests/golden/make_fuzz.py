"""Runs random cases on the optimizers of TensorFlow 1.15.5, for ``fuzz.py`` to replay.

    python3.7 -m pip install tensorflow==1.15.5 'protobuf<3.21' 'numpy<1.19'
    python3.7 tests/golden/make_fuzz.py --out DIR [--seed 0] [--first 0] [--cases 1500]

A case is a function of its seed and its index alone. It is written as the original computed it in
its own dtype and, unless that is float64, in float64, which shows the original's rounding errors.
``README.md`` describes the format. Only ``main`` needs TensorFlow: ``fuzz.py`` imports ``case_of``.
"""

import argparse
import os

import numpy as np

BATCH = 100  # cases in a file

STEP = {"$global_step": 1}
FALLING = {"$of_step": "0.1 / (1.0 + 0.2 * k)"}


# ------------------------------------------------------------------------------- the settings
def log(low, high, *borders):
    """Positive values over all magnitudes; one time in four a border."""

    def draw(rng):
        if borders and rng.uniform() < 0.25:
            return borders[rng.randint(len(borders))]
        return float(10.0 ** rng.uniform(low, high))

    return draw


def one_of(*values):
    return lambda rng: values[rng.randint(len(values))]


def constant(value):
    return lambda rng: value


def decay(rng):
    """In [0, 1), often near a border."""
    borders = (0.0, 0.1, 0.5, 0.9, 0.99, 0.999)
    if rng.uniform() < 0.5:
        return borders[rng.randint(len(borders))]
    return float(1.0 - 10.0 ** rng.uniform(-5, 0))


def rate(rng):
    return FALLING if rng.uniform() < 0.1 else log(-8, 3, 0.0)(rng)


def tensor(draw):
    """A constant of the variables' dtype, for originals that take no Python numbers in float64."""
    return lambda rng: {"$tensor": float(np.float16(min(draw(rng), 6e4)))}


def sign_decay(rng):
    kind = ("linear", "cosine", "restart")[rng.randint(3)]
    args = {"decay_steps": int(rng.randint(1, 8))}
    if kind != "linear" and rng.uniform() < 0.5:
        args["num_periods"] = float(rng.choice([0.5, 1.0, 2.0]))
    if kind != "linear" and rng.uniform() < 0.5:
        args["zero_after"] = float(rng.choice([0.25, 1.0]))
    return {"$sign_decay": kind, "args": args}


flag = one_of(False, True)
momentum = one_of(0.0, 0.5, 0.9, 0.99, 1.0)
positive = log(-8, 3)
strength = log(-6, 3, 0.0)
size = log(-12, 4)

ADAM = {"learning_rate": rate, "beta1": decay, "beta2": decay, "epsilon": log(-12, 1, 0.0, 1e-30)}
ADAM_GS = dict(ADAM, global_step=constant(STEP))
PENALTIES = {"l1_regularization_strength": strength, "l2_regularization_strength": strength}
SIGN = {"learning_rate": rate, "beta": decay, "sign_decay_fn": sign_decay}
MOMENTUM = {"learning_rate": rate, "momentum": momentum, "use_nesterov": flag}

# The arguments of each original and how their values are drawn.
SETTINGS = {
    "GradientDescent": {"learning_rate": rate},
    "Momentum": MOMENTUM,
    "Adagrad": {"learning_rate": rate, "initial_accumulator_value": log(-10, 3, 1e-30)},
    "RegAdagrad": {"learning_rate": rate, "initial_accumulator_value": log(-10, 3, 1e-30)},
    "Adadelta": {"learning_rate": rate, "rho": decay, "epsilon": log(-16, 1, 0.0, 1e-30)},
    "RMSProp": {
        "learning_rate": rate,
        "decay": decay,
        "momentum": momentum,
        "epsilon": log(-12, 1, 0.0, 1e-30),
        "centered": flag,
    },
    "LARS": dict(
        MOMENTUM,
        learning_rate=log(-4, 2, 0.0),
        weight_decay=strength,
        eeta=strength,
        epsilon=log(-8, 1, 0.0),
        skip_list=one_of(None, ["v"]),
    ),
    "Adam": ADAM,
    "LazyAdam": ADAM,
    "AdaMax": ADAM,
    "Nadam": ADAM,
    "AdamGS": ADAM_GS,
    "LazyAdamGS": ADAM_GS,
    "AddSign": dict(SIGN, alpha=one_of(0.0, 0.5, 1.0, 3.0, -1.0)),
    "PowerSign": dict(SIGN, base=log(-1, 1.5, 1.0)),
    "Ftrl": dict(
        PENALTIES,
        learning_rate=positive,
        learning_rate_power=one_of(-0.5, -0.5, 0.0, -0.3, -1.0),
        initial_accumulator_value=log(-10, 2, 0.0),
        l2_shrinkage_regularization_strength=strength,
    ),
    "AdagradDA": dict(
        PENALTIES,
        learning_rate=positive,
        initial_gradient_squared_accumulator_value=log(-10, 2, 1e-30),
        global_step=constant(STEP),
    ),
    "ProximalGradientDescent": dict(
        {k: tensor(v) for k, v in PENALTIES.items()}, learning_rate=tensor(log(-4, 2))
    ),
    "ProximalAdagrad": dict(
        {k: tensor(v) for k, v in PENALTIES.items()},
        learning_rate=tensor(log(-4, 2)),
        initial_accumulator_value=log(-10, 2),
    ),
    "Shampoo": {
        "global_step": constant(STEP),
        "learning_rate": log(-4, 1, 0.0),
        "max_matrix_size": one_of(768, 1, 2),
        "gbar_decay": one_of(0.0, 0.5, 0.9, 1.0),
        "gbar_weight": one_of(1.0, 0.1),
        "mat_gbar_decay": one_of(1.0, 0.9, 0.5, 0.0),
        "mat_gbar_weight": one_of(1.0, 0.1),
        "svd_interval": one_of(1, 2),
        "precond_update_interval": one_of(1, 2),
        "epsilon": log(-4, 1),
        "alpha": one_of(0.5, 1.0, 0.25),
    },
    "GGT": {
        "learning_rate": log(-4, 1, 0.0),
        "beta1": decay,
        "window": one_of(1, 2, 4, 10),
        "eps": log(-5, 1, 0.0),
        "svd_eps": log(-6, 1),
        "sigma_eps": log(-3, 1, 0.0),
    },
    "AdamW": dict(ADAM, weight_decay=log(-6, 0, 0.0)),
    "MomentumW": dict(MOMENTUM, weight_decay=log(-6, 0, 0.0)),
    "extend_with_decoupled_weight_decay": {"weight_decay": log(-6, 0, 0.0)},
    "VariableClipping": {"max_norm": size},
    "MovingAverage": {"average_decay": decay, "num_updates": one_of(None, 7)},
    "MultitaskOptimizerWrapper": {},
}
REQUIRED = ("learning_rate", "momentum", "global_step", "weight_decay", "max_norm")
INNER = ("GradientDescent", "Momentum", "Adam", "Adagrad", "RMSProp", "AdaMax", "Adadelta")


def settings(rng, optimizer):
    """Values for the required arguments and for some of the others, as in a golden record."""
    table = SETTINGS[optimizer]
    # The defaults of the proximal ones are Python numbers, which they take in float32 only.
    every = optimizer.startswith("Proximal")
    kept = [k for k in sorted(table) if every or k in REQUIRED or rng.uniform() < 0.7]
    drawn = {k: table[k](rng) for k in kept}
    return {k: v for k, v in drawn.items() if k != "skip_list" or v is not None}


def wrapped(rng, optimizer, shapes):
    """The settings of a wrapper with those of its inner optimizer."""
    kwargs, inner = settings(rng, optimizer), INNER[rng.randint(len(INNER))]
    of_inner = settings(rng, inner)
    if optimizer == "extend_with_decoupled_weight_decay":
        return dict(of_inner, base_optimizer=inner, **kwargs)
    kwargs["opt"] = {"$opt": inner, "kwargs": of_inner}
    if optimizer == "VariableClipping":
        axes = {k: [a for a in range(len(s)) if rng.uniform() < 0.5] for k, s in shapes.items()}
        kwargs["vars_to_clip_dims"] = {"$var_dict": axes}
    return kwargs


# ----------------------------------------------------------------------------------- the cases
WRAPPERS = (
    "extend_with_decoupled_weight_decay",
    "VariableClipping",
    "MovingAverage",
    "MultitaskOptimizerWrapper",
)
SHAPES = {"s": (), "v": (5,), "w": (4, 3), "t": (2, 3, 2)}
TABLES = {"e": (6, 4), "b": (5,)}
# The exponents of ten between which gradients of this dtype lie.
EXPONENTS = {
    "float16": (-7, 4.5),
    "bfloat16": (-30, 30),
    "float32": (-30, 30),
    "float64": (-30, 30),
}


def case_of(seed, index):
    """A case and its data: values in float64 that the dtype represents exactly."""
    rng = np.random.RandomState([seed, index])
    optimizer = sorted(SETTINGS)[rng.randint(len(SETTINGS))]
    dtype = str(rng.choice(["float32", "float64", "float16", "bfloat16"], p=[0.5, 0.3, 0.1, 0.1]))
    second_order = optimizer in ("Shampoo", "GGT")
    if optimizer == "Shampoo" or (second_order and dtype != "float64"):
        dtype = "float32"  # others are not supported
    # For rows the two originals compute other settings than for arrays.
    kinds = ["dense", "sparse", "dup"] + ["mixed"] * (optimizer not in ("LARS", "PowerSign"))
    kind = "dense" if optimizer == "GGT" else str(rng.choice(kinds))
    shapes = shapes_of(rng, kind, second_order)
    kwargs = wrapped(rng, optimizer, shapes) if optimizer in WRAPPERS else settings(rng, optimizer)
    if "v" not in shapes:
        kwargs.pop("skip_list", None)  # a name that matches nothing is an error
    case = {
        "case": f"{seed}:{index}",
        "optimizer": optimizer,
        "kwargs": kwargs,
        "kind": kind,
        "dtype": dtype,
        "steps": int(rng.randint(3, 7)),
        "global_step_start": int(rng.choice([0, 0, 0, 1, 100])),
    }
    # Nothing orders GGT's reads and writes of other variables. The sign and Shampoo's rows do
    # not work with these.
    other = optimizer not in ("AddSign", "PowerSign", "Shampoo") and rng.uniform() < 0.3
    if optimizer == "GGT" or other:
        case["variables"] = "resource"
    if optimizer == "RegAdagrad":
        avoid = [k for k in range(case["steps"]) if rng.uniform() < 0.3]
        case["avoid_updating_slots_steps"] = avoid
    return case, data_of(rng, case, shapes)


def shapes_of(rng, kind, second_order):
    """Between one and three variables."""
    pool = {"dense": SHAPES, "mixed": dict(SHAPES, **TABLES)}.get(kind, TABLES)
    names = [k for k in sorted(pool) if not (second_order and k == "s")]
    number = min(len(names), rng.randint(1, 4))
    chosen = [str(k) for k in rng.choice(names, number, replace=False)]
    return {k: pool[k] for k in sorted(chosen)}


def data_of(rng, case, shapes):
    """Start and gradients; a variable without any has no gradient."""
    # The exponents of ten between which gradients lie.
    steps, (low, high) = case["steps"], (-7, 4.5) if case["dtype"] == "float16" else (-30, 30)
    magnitudes = str(rng.choice(["usual", "usual", "elements", "steps", "one"]))
    start = float(rng.choice([1.0, 1.0, 0.0, 10.0 ** rng.uniform(low / 3, high / 3)]))
    without = [k for k in shapes if len(shapes) > 1 and rng.uniform() < 0.1][:1]
    spoilt = rng.uniform() < 0.15
    at_once = 10.0 ** rng.uniform(low, high)
    data = {}
    for name in sorted(shapes):
        shape = shapes[name]
        data["init/" + name] = start * rng.standard_normal(shape)
        if name in without:
            continue
        of_rows = case["kind"] != "dense" and name in TABLES
        if of_rows:
            count = int(rng.randint(0 if rng.uniform() < 0.1 else 1, 5))
            ids = ids_of(rng, shape[0], (steps, count), case["kind"] != "sparse")
            data["grad_idx/" + name] = ids
            shape = (count, *shape[1:])
        g = rng.standard_normal((steps, *shape))
        if magnitudes == "usual":
            g = g * 10.0 ** rng.uniform(-2, 1, g.shape[1:])
        elif magnitudes == "elements":
            g = g * 10.0 ** rng.uniform(low, high, g.shape[1:])
        elif magnitudes == "steps":
            g = g * 10.0 ** rng.uniform(low, high, (steps, *(1,) * (g.ndim - 1)))
        else:
            g = g * at_once
        g = np.where(rng.uniform(size=g.shape) < 0.1, 0.0, g)
        g[rng.uniform(size=steps) < 0.1] = 0.0
        if spoilt:
            wrong = rng.choice([np.nan, np.inf, -np.inf], g.shape)
            g = np.where(rng.uniform(size=g.shape) < 0.5 / max(g[0].size, 1), wrong, g)
        data[("grad_val/" if of_rows else "grad/") + name] = g
    return {k: v if "idx" in k else rounded(v, case["dtype"]) for k, v in data.items()}


def ids_of(rng, num_rows, shape, repeats):
    if repeats:
        return rng.randint(0, num_rows, shape).astype(np.int64)
    rows = [rng.permutation(num_rows)[: shape[1]] for _ in range(shape[0])]
    return np.array(rows, np.int64).reshape(shape)


def rounded(values, dtype):
    """The values that the dtype has, in float64; of bfloat16 those nearer to zero."""
    with np.errstate(over="ignore"):
        if dtype != "bfloat16":
            return np.asarray(values, dtype if dtype == "float16" else np.float32).astype(
                np.float64
            )
        bits = np.asarray(values, np.float32).reshape(-1).view(np.uint32)
    cut = np.where(np.isnan(bits.view(np.float32)), bits, bits & np.uint32(0xFFFF0000))
    return cut.astype(np.uint32).view(np.float32).reshape(np.shape(values)).astype(np.float64)


# --------------------------------------------------------------------------------- the running
def record(seed, index):
    """A case with what the original computes: ``meta`` and arrays as in a golden record."""
    from make_records import run

    case, data = case_of(seed, index)
    # NumPy has no bfloat16 that every version reads.
    stored = "float32" if case["dtype"] == "bfloat16" else case["dtype"]
    arrays = {k: v if "idx" in k else v.astype(stored) for k, v in data.items()}
    try:
        got, slots = run(case, data, case["dtype"])
        if case["dtype"] != "float64":
            twin, _ = run(case, data, "float64")
            arrays.update(("exact/" + k, v) for k, v in twin.items())
    except Exception as error:  # an original that refuses is a result, too
        reason = (str(error).strip() or "?").splitlines()[0][:200]
        return dict(case, refused=f"{type(error).__name__}: {reason}"), arrays
    arrays.update((k, v.astype(stored)) for k, v in got.items())
    return dict(case, slots=slots), arrays


def main():
    """Runs a range of cases."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--cases", type=int, default=1500)
    args = parser.parse_args()
    from make_records import write

    os.makedirs(args.out, exist_ok=True)
    for first in range(args.first, args.first + args.cases, BATCH):
        batch, arrays = [], {}
        for index in range(first, min(first + BATCH, args.first + args.cases)):
            meta, of_case = record(args.seed, index)
            arrays.update((f"{meta['case']}/{k}", v) for k, v in of_case.items())
            batch.append(meta)
        write(os.path.join(args.out, f"{args.seed}-{first:05}.xz"), {"cases": batch}, arrays)
        print(f"{len(batch)} cases from {args.seed}:{first}", flush=True)


if __name__ == "__main__":
    main()
