"""Records of ``torch.optim.Muon`` and of its author's code, for ``test_muon.py``.

    python tests/golden/make_muon.py MUON_FOLDER

The folder is a copy of https://github.com/KellerJordan/Muon at commit 857d1ad. Needs NumPy and
PyTorch for the CPU: the record was made with torch 2.13.0.

``muon.npz`` has ``meta``, JSON: for each case its class (``torch`` or ``author``) and arguments,
and the versions. For each parameter ``N`` of a case there are ``CASE/N/init`` and ``CASE/N/grad``
[step] in float32, and ``CASE/N/ITERATION`` [step], the parameter after each step. The layout is
torch's: outputs first.

Iterations are ``bfloat16``, the class as it is, and ``float32`` and ``float64``, where
``Tensor.bfloat16`` copies and parameters have this dtype. The author's code rounds more often than
torch's: its ``bfloat16`` is by the function of torch, and the case ``author`` has its own for
matrices, ``rounded_more``. In the records in ``bfloat16`` no order of sums in float32 changes a
rounding (``muon_in_numpy.of_torch``): libraries that round at the same places have the same bits.

The author's code adds 1e-7 to the norm. Its gradients are so large that this changes nothing.
"""

import contextlib
import importlib
import json
import pathlib
import sys

import numpy as np
import torch
from muon_in_numpy import JORDAN, Near, of_torch

FILE = pathlib.Path(__file__).with_name("muon.npz")
COMMIT = "857d1ad"
STEPS = 4
SHAPES = {"tall": (7, 3), "wide": (3, 7), "square": (5, 5)}
# Kernels of convolutions, of which the author takes the sides of the last two axes for the factor:
# here these are equal. The second one has more outputs than inputs. And a batch of matrices.
MORE = {"convolution": (3, 2, 2, 2), "tall_convolution": (9, 1, 2, 2), "batch": (2, 5, 3)}
CASES = {
    "defaults": ("torch", {}, SHAPES),
    "plain": ("torch", {"lr": 0.02, "weight_decay": 0.0}, SHAPES),
    "no_nesterov": ("torch", {"lr": 0.02, "nesterov": False}, SHAPES),
    "momentum": ("torch", {"lr": 0.02, "momentum": 0.6}, SHAPES),
    "weight_decay": ("torch", {"lr": 0.1, "weight_decay": 0.8}, SHAPES),
    "coefficients": ("torch", {"lr": 0.02, "ns_coefficients": (2.9713, -3.9021, 1.7713)}, SHAPES),
    "steps": ("torch", {"lr": 0.02, "ns_steps": 2}, SHAPES),
    "eps": ("torch", {"lr": 0.02, "eps": 30.0}, SHAPES),
    "match_rms_adamw": ("torch", {"lr": 0.02, "adjust_lr_fn": "match_rms_adamw"}, SHAPES),
    "author": ("author", {"lr": 0.02}, SHAPES | MORE),
    "author_decay": ("author", {"lr": 0.05, "weight_decay": 0.4, "momentum": 0.8}, SHAPES),
}


@contextlib.contextmanager
def changed(owner, name, value):
    """The attribute of an object, changed for some time."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    yield
    setattr(owner, name, before)


def gradients(rng, shape, kind):
    """Of another size at each step."""
    size = rng.uniform(0.3, 3, size=STEPS) * (2.0**30 if kind == "author" else 1)
    g = rng.normal(size=(STEPS, *shape)) * size.reshape(-1, *[1] * len(shape))
    return g.astype(np.float32)


def matrices(x, kind):
    """The matrices of a parameter."""
    if kind == "author" and x.ndim == 3:
        return list(x)
    return [x.reshape(len(x), -1)]


def is_certain(grads, kind, kwargs):
    """Whether no order of sums changes a rounding."""
    mu, mean, size = kwargs.get("momentum", 0.95), 0.0, 0.0
    arguments = {
        "coefficients": kwargs.get("ns_coefficients", JORDAN),
        "steps": kwargs.get("ns_steps", 5),
        "eps": kwargs.get("eps", 1e-7),
    }
    for g in grads.astype(np.float64):
        mean, size = (mu * a + (1 - mu) * b for a, b in ((mean, g), (size, np.abs(g))))
        u, error = mean, size
        if kwargs.get("nesterov", True):
            u, error = ((1 - mu) * a + mu * b for a, b in ((g, mean), (np.abs(g), size)))
        error = 16 * 2.0**-24 * error  # of less than 16 operations
        try:
            for matrix, its in zip(matrices(u, kind), matrices(error, kind), strict=True):
                of_torch(matrix, its, **arguments)
        except Near:
            return False
    return True


def follow(optimizer, init, grads, dtype, **kwargs):
    """The parameter after each step."""
    x = torch.nn.Parameter(torch.tensor(init, dtype=dtype))
    opt, after = optimizer([x], **kwargs), []
    for g in grads:
        x.grad = torch.tensor(g, dtype=dtype)
        opt.step()
        after.append(x.detach().numpy().copy())
    return np.stack(after)


def by_torch(u, steps):
    """The author's function by that of torch; the factor of the shape is not rounded."""
    its = torch.optim._muon._zeropower_via_newtonschulz
    each = [its(x, JORDAN, steps, 1e-7).to(u.dtype) for x in (u if u.ndim == 3 else [u])]
    return torch.stack(each) if u.ndim == 3 else each[0]


def main():
    """Makes the record."""
    sys.path.insert(0, sys.argv[1])
    author = importlib.import_module("muon")
    classes = {"torch": torch.optim.Muon, "author": author.SingleDeviceMuon}
    in_wide = {"float32": torch.float32, "float64": torch.float64}
    arrays, rng = {}, np.random.default_rng(0)
    for case, (kind, kwargs, shapes) in CASES.items():
        for name, shape in shapes.items():
            init = rng.normal(size=shape).astype(np.float32)
            while not is_certain(grads := gradients(rng, shape, kind), kind, kwargs):
                pass
            run = lambda dtype, init=init, grads=grads, kind=kind, kwargs=kwargs: follow(
                classes[kind], init, grads, dtype, **kwargs
            )
            found = {"init": init, "grad": grads}
            if case == "author" and len(shape) == 2:
                found["rounded_more"] = run(torch.float32)
            with changed(author, "zeropower_via_newtonschulz5", by_torch):
                found["bfloat16"] = run(torch.float32)
            for iteration, dtype in in_wide.items():
                with changed(torch.Tensor, "bfloat16", torch.Tensor.clone):
                    found[iteration] = run(dtype)
            arrays |= {f"{case}/{name}/{key}": x for key, x in found.items()}
    cases = {case: {"class": kind, "kwargs": kwargs} for case, (kind, kwargs, _) in CASES.items()}
    meta = {"torch": torch.__version__, "commit": COMMIT, "cases": cases}
    np.savez_compressed(FILE, meta=json.dumps(meta), **arrays)


if __name__ == "__main__":
    main()
