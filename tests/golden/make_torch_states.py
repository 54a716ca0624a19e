"""States of PyTorch's optimizers in the middle of a training, for ``interop/test_torch_states.py``.

    python tests/golden/make_torch_states.py

Needs NumPy and PyTorch for the CPU: the record was made with torch 2.14.1, in float32.

``torch_states.npz`` has the arrays of all cases, and ``meta``, JSON: the version, and for each case
its class, its arguments and the ``param_groups`` of its state dict. The parameters are those of a
``Linear`` and of an ``Embedding`` in two groups; those of Muon are the two matrices.
``start/NAME`` and ``gradients/NAME`` [step] are those of all cases. ``CASE/half/NAME`` is the
parameter after 5 steps, ``CASE/state/INDEX/FIELD`` the state there, and ``CASE/path/NAME`` [step]
the parameter after each of the 5 steps that follow.
"""

import json
import pathlib

import numpy as np
import torch

FILE = pathlib.Path(__file__).with_name("torch_states.npz")
HALF, STEPS = 5, 10
SHAPES = {"head.weight": (3, 4), "head.bias": (3,), "table.weight": (5, 2)}
# An epsilon so large that its place matters.
EPS = {"eps": 0.1}
CASES = {
    "SGD": ("SGD", {"lr": 0.01}),
    "SGD, momentum": ("SGD", {"lr": 0.01, "momentum": 0.9}),
    "SGD, nesterov": ("SGD", {"lr": 0.01, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "SGD, dampening": ("SGD", {"lr": 0.01, "momentum": 0.9, "dampening": 0.5}),
    "SGD, maximize": ("SGD", {"lr": 0.01, "momentum": 0.9, "maximize": True}),
    "Adam": ("Adam", {"lr": 0.01, **EPS}),
    "Adam, no eps": ("Adam", {"lr": 0.01, "eps": 0.0}),
    "Adam, weight_decay": ("Adam", {"lr": 0.01, "weight_decay": 0.2, **EPS}),
    "Adam, amsgrad": ("Adam", {"lr": 0.01, "amsgrad": True, **EPS}),
    "AdamW": ("AdamW", {"lr": 0.01, "weight_decay": 0.2, **EPS}),
    "AdamW, no eps": ("AdamW", {"lr": 0.01, "weight_decay": 0.2, "eps": 0.0}),
    "SparseAdam": ("SparseAdam", {"lr": 0.01, **EPS}),
    "Adagrad": ("Adagrad", {"lr": 0.01, "initial_accumulator_value": 0.3, **EPS}),
    "Adagrad, lr_decay": ("Adagrad", {"lr": 0.01, "lr_decay": 0.2, **EPS}),
    "RMSprop": ("RMSprop", {"lr": 0.01, **EPS}),
    "RMSprop, no eps": ("RMSprop", {"lr": 0.01, "eps": 0.0}),
    "RMSprop, momentum": ("RMSprop", {"lr": 0.01, "eps": 0.0, "momentum": 0.9}),
    "RMSprop, centered": (
        "RMSprop", {"lr": 0.01, "eps": 0.0, "centered": True}
    ),
    "RMSprop, all": (
        "RMSprop", {"lr": 0.01, "eps": 0.0, "centered": True, "momentum": 0.9}
    ),
    "Muon": ("Muon", {"lr": 0.01, "weight_decay": 0.2, "adjust_lr_fn": "match_rms_adamw"}),
    "NAdam": ("NAdam", {"lr": 0.01}),
}  # fmt: skip


def run(kind, kwargs, start, gradients):
    """The state dict and the parameters after half of the steps, and the path after them."""
    names = [name for name in SHAPES if kind != "Muon" or len(SHAPES[name]) == 2]
    tensors = {name: torch.nn.Parameter(torch.tensor(start[name])) for name in names}
    groups = [
        {"params": [(name, x) for name, x in tensors.items() if name.startswith(part)]}
        for part in ("head", "table")
    ]
    optimizer, path = getattr(torch.optim, kind)(groups, **kwargs), []
    values = lambda: {name: x.detach().numpy().copy() for name, x in tensors.items()}
    for t in range(STEPS):
        if t == HALF:
            half, saved = values(), optimizer.state_dict()
            saved = {
                "param_groups": json.loads(json.dumps(saved["param_groups"], default=float)),
                "state": {
                    (index, field): torch.as_tensor(value).numpy().copy()
                    for index, fields in saved["state"].items()
                    for field, value in fields.items()
                    if value is not None
                },
            }
        for name, x in tensors.items():
            gradient = torch.tensor(gradients[name][t])
            x.grad = gradient.to_sparse(1) if kind == "SparseAdam" else gradient
        optimizer.step()
        if t >= HALF:
            path.append(values())
    return saved, half, path


def main():
    random = np.random.default_rng(0)
    start = {n: random.normal(size=s).astype(np.float32) for n, s in SHAPES.items()}
    gradients = {n: random.normal(size=(STEPS, *s)).astype(np.float32) for n, s in SHAPES.items()}
    arrays, cases = {}, {}
    for name in SHAPES:
        arrays |= {f"start/{name}": start[name], f"gradients/{name}": gradients[name]}
    for case, (kind, kwargs) in CASES.items():
        saved, half, path = run(kind, kwargs, start, gradients)
        cases[case] = {"class": kind, "kwargs": kwargs, "param_groups": saved["param_groups"]}
        arrays |= {f"{case}/half/{n}": x for n, x in half.items()}
        arrays |= {f"{case}/state/{i}/{field}": x for (i, field), x in saved["state"].items()}
        arrays |= {f"{case}/path/{n}": np.stack([x[n] for x in path]) for n in half}
    meta = {"torch": torch.__version__, "half": HALF, "cases": cases}
    np.savez_compressed(FILE, meta=json.dumps(meta), **arrays)


if __name__ == "__main__":
    main()
