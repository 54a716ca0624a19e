"""Records of PyTorch's optimizers and embedding layers, for ``test_torch.py``.

    python tests/golden/make_torch.py

Needs NumPy and PyTorch for the CPU: the record was made with torch 2.13.0, in float64.

``torch.npz`` has the arrays of all cases, and ``meta``, JSON: the version, and for each case its
class and arguments. An optimizer trains one table. Its gradient is that of the sum of
``embedding(ids[t]) * factors[t]``, by ``nn.Embedding`` with ``sparse=True`` where the class takes
that; ids repeat. For the others the gradient is ``factors[t]`` itself, for all
rows. ``NAME/table`` is the table after each step. A bag has ``NAME/out``, and the gradients of the
sum of ``out * factors``: ``NAME/table`` and, with weights, ``NAME/weights``.
"""

import json
import pathlib

import numpy as np
import torch

FILE = pathlib.Path(__file__).with_name("torch.npz")
STEPS, ROWS, WIDTH, IDS = 20, 7, 3, 6
# An epsilon so large that its place matters. With betas of few bits, their powers are exact.
EPS = {"eps": 0.1}
SPARSE = {
    "SparseAdam": ("SparseAdam", {"lr": 0.01}),
    "SparseAdam, eps": ("SparseAdam", {"lr": 0.1, "betas": (0.5, 0.75), **EPS}),
    "Adagrad": ("Adagrad", {"lr": 0.1}),
    "Adagrad, start": ("Adagrad", {"lr": 0.1, "initial_accumulator_value": 0.3, **EPS}),
    "Adagrad, lr_decay": ("Adagrad", {"lr": 0.1, "lr_decay": 0.2}),
    "SGD": ("SGD", {"lr": 0.1}),
    "SGD, momentum": ("SGD", {"lr": 0.1, "momentum": 0.9}),
    "SGD, nesterov": ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
}
DENSE = {
    "Adam": ("Adam", {"lr": 0.1, **EPS}),
    "Adam, weight_decay": ("Adam", {"lr": 0.1, "weight_decay": 0.2, **EPS}),
    "Adam, amsgrad": ("Adam", {"lr": 0.1, "betas": (0.9, 0.8), "amsgrad": True, **EPS}),
    "AdamW": ("AdamW", {"lr": 0.1, **EPS}),
    "SGD, weight_decay": ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.2}),
    "RMSprop": ("RMSprop", {"lr": 0.1, **EPS}),
    "RMSprop, centered": ("RMSprop", {"lr": 0.1, "momentum": 0.9, "centered": True, **EPS}),
    "Adadelta": ("Adadelta", {"lr": 0.5, **EPS}),
    "Adamax": ("Adamax", {"lr": 0.1, **EPS}),
    "NAdam": ("NAdam", {"lr": 0.1, **EPS}),
    "RAdam": ("RAdam", {"lr": 0.1}),
    "RAdam, eps": ("RAdam", {"lr": 0.1, **EPS}),
    "Rprop": ("Rprop", {"lr": 0.1}),
    "ASGD": ("ASGD", {"lr": 0.1}),
}
# The bags are {2, 5, 2}, {}, {0}, {6, 3}: two of a kind, and none.
RAGGED = {"ids": [2, 5, 2, 0, 6, 3], "offsets": [0, 3, 3, 4]}
WHOLE = {"ids": [[2, 5, 2], [6, 6, 6], [6, 1, 4]]}
BAGS = {
    "sum": ({"mode": "sum"}, RAGGED),
    "mean": ({"mode": "mean"}, RAGGED),
    "max": ({"mode": "max"}, RAGGED),
    "weights": ({"mode": "sum"}, {**RAGGED, "weights": [0.5, -1.0, 2.0, 3.0, 0.1, 0.2]}),
    "last offset": (
        {"mode": "mean", "include_last_offset": True},
        {**RAGGED, "offsets": [0, 3, 3, 4, 6]},
    ),
    "padding": ({"mode": "mean", "padding_idx": 6}, RAGGED),
    "whole": ({"mode": "mean"}, WHOLE),
    "whole, sum, padding": ({"mode": "sum", "padding_idx": 6}, WHOLE),
    "whole, mean, padding": ({"mode": "mean", "padding_idx": 6}, WHOLE),
    "whole, max, padding": ({"mode": "max", "padding_idx": 6}, WHOLE),
}


def follow(kind, kwargs, table, ids, factors, *, sparse):
    """The table after each step."""
    layer = torch.nn.Embedding(ROWS, WIDTH, sparse=sparse, _weight=torch.tensor(table))
    optimizer, after = getattr(torch.optim, kind)(layer.parameters(), **kwargs), []
    for t in range(STEPS):
        optimizer.zero_grad()
        rows = layer(torch.tensor(ids[t])) if sparse else layer.weight
        (rows * torch.tensor(factors[t])).sum().backward()
        optimizer.step()
        after.append(layer.weight.detach().numpy().copy())
    return np.stack(after)


def pool(kwargs, inputs, table, factors):
    """The output of a bag and the gradients."""
    sparse = kwargs["mode"] != "max"
    weight = torch.tensor(table)
    layer = torch.nn.EmbeddingBag(ROWS, WIDTH, sparse=sparse, _weight=weight, **kwargs)
    given = {name: torch.tensor(np.array(x)) for name, x in inputs.items()}
    weights = given.get("weights")
    if weights is not None:
        weights.requires_grad_()
    out = layer(given["ids"], given.get("offsets"), per_sample_weights=weights)
    (out * torch.tensor(factors[: len(out)])).sum().backward()
    gradient = layer.weight.grad
    found = {"out": out.detach().numpy()}
    found["table"] = (gradient.to_dense() if gradient.is_sparse else gradient).numpy()
    return found if weights is None else found | {"weights": weights.grad.numpy()}


def main():
    """Makes the record."""
    torch.sparse.check_sparse_tensor_invariants.disable()
    rng = np.random.default_rng(0)
    arrays = {
        "table": rng.normal(size=(ROWS, WIDTH)),
        "ids": rng.integers(0, ROWS - 1, (STEPS, IDS)),
        "sparse factors": rng.normal(size=(STEPS, IDS, WIDTH)),
        "dense factors": rng.normal(size=(STEPS, ROWS, WIDTH)),
        "bag factors": rng.normal(size=(ROWS, WIDTH)),
    }
    for cases, sparse in ((SPARSE, True), (DENSE, False)):
        factors = arrays["sparse factors" if sparse else "dense factors"]
        for name, (kind, kwargs) in cases.items():
            arrays[f"{name}/table"] = follow(
                kind, kwargs, arrays["table"], arrays["ids"], factors, sparse=sparse
            )
    for name, (kwargs, inputs) in BAGS.items():
        for key, x in pool(kwargs, inputs, arrays["table"], arrays["bag factors"]).items():
            arrays[f"{name}/{key}"] = x
    meta = {"torch": torch.__version__, "sparse": SPARSE, "dense": DENSE, "bags": BAGS}
    np.savez_compressed(FILE, meta=json.dumps(meta), **arrays)


if __name__ == "__main__":
    main()
