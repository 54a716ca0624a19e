"""Records of wrappers of modded-nanogpt, for ``test_modded_nanogpt.py``.

    python tests/golden/make_modded_nanogpt.py REPOSITORY

The repository is a clone of https://github.com/KellerJordan/modded-nanogpt (MIT license) with
commit f411b3d. Needs NumPy and PyTorch for the CPU: the record was made with torch 2.13.0. The
scripts there train when they are imported, so what is needed is taken out of them (``FROM``) and
executed as it is, but without ``torch.compile`` and on one process.

``modded_nanogpt.npz`` has ``meta``, JSON: the versions and, for each case, its arguments and the
learning rate of each step. All arrays are in float64, matrices in the layout of torch. For each
matrix ``N`` of a case there are ``CASE/N/init``, ``CASE/N/after`` [step], the parameter after each
step, and its gradients: ``CASE/N/grad`` [step], or, where they depend on the parameter,
``CASE/N/curvature`` and ``CASE/N/target`` [step], of ``curvature * (x - target)``.

- ``muonh``, ``adamh``: steps of constant norm. ``Tensor.bfloat16`` copies, so that the iteration
  is in float64.
- ``klsoaph``: SOAP with KL statistics, with steps of constant norm. ``Tensor.float`` and
  ``torch.float32`` are those of float64. The gradients are such that the columns of no basis change
  their order, which the code does not look for.
- ``cautious``: the decay of ``train_gpt_medium.py``, by the direction of ``torch.optim.SGD`` with
  momentum. Some elements of the parameter and of the gradients are zero.
- ``ema_nesterov``: around ``torch.optim.SGD`` with momentum. ``CASE/N/read`` [step] are the
  parameters of which the gradients are.
- ``muloco``: the outer optimizer of MuLoCo, of one replica, around ``torch.optim.SGD``.
"""

import ast
import contextlib
import json
import pathlib
import subprocess
import sys
import types

import numpy as np
import torch

FILE = pathlib.Path(__file__).with_name("modded_nanogpt.npz")
COMMIT = "f411b3d346aa52d3504324ca93c230fd84c6c07f"
RESULTS = "records/track_3_optimization/results"
FROM = {
    "muonh": (
        f"{RESULTS}/20260430_muonh/train_gpt_simple_muonh.py",
        ["zeropower_via_newtonschulz5", "muon_update", "scale_invariant_update_", "MuonH"],
    ),
    "adamh": (
        f"{RESULTS}/20260430_adamh/6b19a86b-ddfe-476c-9983-2a967bd99ca9.txt",
        ["scale_invariant_update_", "AdamH"],
    ),
    "klsoaph": (
        f"{RESULTS}/20260511_klsoap_h_lr_power_decay/train_gpt_simple_klsoap_h_lr_power_decay.py",
        [
            "_symmetrize",
            "_initial_orthogonal_matrix",
            "project_to_klsoap_basis",
            "project_from_klsoap_basis",
            "init_2d_klsoap_state_",
            "_update_eigen_sqrt_inv_",
            "update_2d_klsoap_preconditioner_",
            "refresh_klsoap_basis_",
            "klsoap_direction",
            "scale_invariant_update_",
            "KLSOAPH",
        ],
    ),
    "cautious": ("train_gpt_medium.py", ["cautious_wd_and_update_inplace"]),
    "ema_nesterov": (
        f"{RESULTS}/20260522_ema_nesterov_muon/4d9e83d4-4e3f-43d3-8aae-e3a9031586be.txt",
        ["EMA_Nesterov"],
    ),
    "muloco": (
        f"{RESULTS}/20260504_muloco_normuonh/train_gpt_simple_muloco_normuonh.py",
        ["NesterovOuterOptimizer"],
    ),
}
ARGUMENTS = {
    "muonh": {"mu": 0.9},
    "adamh": {"betas": [0.9, 0.95], "eps": 1e-8},
    "cautious": {"momentum": 0.9, "weight_decay": 0.5},
    "klsoaph": {
        "beta1": 0.9,
        "beta2": 0.8,
        "shampoo_beta": 0.7,
        "eps": 1e-8,
        "precondition_frequency": 2,
    },
    "ema_nesterov": {
        "momentum": 0.9,
        "lookahead_stepsize": 0.6,
        "lookahead_ema": 0.8,
        "prefill_steps": 2,
        "rest_steps": 7,
    },
    "muloco": {"momentum": 0.9, "outer_lr": 0.7, "outer_momentum": 0.5, "sync_interval": 3},
}
STEPS = 8
RATES = {case: 0.1 * (1 - np.arange(STEPS) / STEPS) for case in ARGUMENTS}
RATES["muloco"] = np.full(STEPS, 0.1)
SHAPES = {"tall": (4, 2), "wide": (2, 4), "square": (3, 3)}
# The second moments of the first gradient have at most one eigenvalue of zero.
NEARLY_SQUARE = {"tall": (4, 3), "wide": (3, 4), "square": (3, 3)}


def taken(repository, case):
    """The functions and classes of a script, by name."""
    path, names = FROM[case]
    show = ["git", "-C", repository, "show", f"{COMMIT}:{path}"]
    text = subprocess.run(show, check=True, capture_output=True, text=True).stdout
    text = text.split("\n" + "=" * 50)[0]  # a log starts with its script
    found = [x for x in ast.parse(text).body if getattr(x, "name", None) in names]
    for node in found:
        node.decorator_list = []
    alone = types.SimpleNamespace(
        get_world_size=lambda: 1, get_rank=lambda: 0, all_gather=lambda *_: None
    )
    scope = {"torch": torch, "Tensor": torch.Tensor, "dist": alone}
    exec(compile(ast.Module(found, []), path, "exec"), scope)
    return types.SimpleNamespace(**{name: scope[name] for name in names})


@contextlib.contextmanager
def in_float64():
    """``Tensor.bfloat16`` and ``Tensor.float`` copy, and there is no float32."""
    before = torch.Tensor.bfloat16, torch.Tensor.float, torch.float32
    torch.Tensor.bfloat16 = torch.Tensor.float = torch.Tensor.clone
    torch.float32 = torch.float64
    yield
    torch.Tensor.bfloat16, torch.Tensor.float, torch.float32 = before


def parameter(data):
    return torch.nn.Parameter(torch.tensor(data["init"]))


def of_norm(case, code, data):
    """The parameter after each step of MuonH, AdamH or KLSOAPH."""
    x, after = parameter(data), []
    make = {"muonh": "MuonH", "adamh": "AdamH", "klsoaph": "KLSOAPH"}[case]
    opt = getattr(code, make)([x], **ARGUMENTS[case])
    for rate, g in zip(RATES[case], data["grad"], strict=True):
        opt.param_groups[0]["lr"] = float(rate)
        x.grad = torch.tensor(g)
        opt.step()
        after.append(x.detach().numpy().copy())
        if case == "klsoaph":
            for gram, q in zip(opt.state[x]["GG"], opt.state[x]["Q"], strict=True):
                powers = (q.T @ gram @ q).diagonal()
                assert torch.all(powers[:-1] > 1.2 * powers[1:]), powers
    return {"after": after}


def in_order(rng, shape):
    """Gradients of which the second moments have eigenvalues that are far from each other."""
    u, v = (np.linalg.qr(rng.normal(size=(n, n)))[0] for n in shape)
    sizes = 2.0 ** -np.add.outer(np.arange(shape[0]), np.arange(shape[1]))
    middle = np.eye(*shape) * rng.uniform(1, 1.3, size=(STEPS, 1, 1))
    return u @ ((middle + rng.normal(size=(STEPS, *shape)) / 10) * sizes) @ v.T


def of_decay(case, code, data):
    """The parameter after each step with cautious weight decay."""
    x, after = torch.tensor(data["init"]), []
    arguments = ARGUMENTS[case]
    shadow = parameter(data)  # torch's direction with momentum is its step with the rate 1
    opt = torch.optim.SGD([shadow], lr=1.0, momentum=arguments["momentum"])
    for rate, g in zip(RATES[case], data["grad"], strict=True):
        shadow.grad = torch.tensor(g)
        opt.step()
        v = opt.state[shadow]["momentum_buffer"].clone()
        tensors = torch.tensor(arguments["weight_decay"]).double(), torch.tensor(rate)
        code.cautious_wd_and_update_inplace(x, v, *tensors)
        after.append(x.numpy().copy())
    return {"after": after}


def of_lookahead(case, code, data):
    """The parameter after each step, and where each gradient is taken."""
    x, after, read = parameter(data), [], []
    arguments = dict(ARGUMENTS[case])
    inner = torch.optim.SGD([x], lr=RATES[case][0], momentum=arguments.pop("momentum"))
    inner.param_groups[0]["initial_lr"] = inner.param_groups[0]["lr"]
    opt = code.EMA_Nesterov([x], inner, **arguments)
    for rate, target in zip(RATES[case], data["target"], strict=True):
        opt.nesterov_step()
        read.append(x.detach().numpy().copy())
        x.grad = torch.tensor(data["curvature"]) * (x.detach() - torch.tensor(target))
        inner.param_groups[0]["lr"] = float(rate)  # after the gradient, as the script does
        opt.step()
        after.append(x.detach().numpy().copy())
    return {"after": after, "read": read}


def of_outer(case, code, data):
    """The parameter after each local step and, if it is due, the outer step."""
    x, after = parameter(data), []
    arguments = dict(ARGUMENTS[case])
    inner = torch.optim.SGD([x], lr=RATES[case][0], momentum=arguments.pop("momentum"))
    outer = code.NesterovOuterOptimizer([x], **arguments)
    for target in data["target"]:
        x.grad = torch.tensor(data["curvature"]) * (x.detach() - torch.tensor(target))
        inner.step()
        outer.maybe_outer_step()
        after.append(x.detach().numpy().copy())
    return {"after": after}


RUNS = {
    "muonh": of_norm,
    "adamh": of_norm,
    "cautious": of_decay,
    "ema_nesterov": of_lookahead,
    "muloco": of_outer,
    "klsoaph": of_norm,
}


def main():
    """Makes the record."""
    arrays, rng = {}, np.random.default_rng(0)
    for case, run in RUNS.items():
        code = taken(sys.argv[1], case)
        for name, shape in (NEARLY_SQUARE if case == "klsoaph" else SHAPES).items():
            data = {"init": rng.normal(size=shape)}
            if run in (of_norm, of_decay):
                data["grad"] = rng.normal(size=(STEPS, *shape))
            else:
                data["curvature"] = rng.uniform(0.1, 2, size=shape)
                data["target"] = rng.normal(size=(STEPS, *shape))
            if case == "klsoaph":
                data["grad"] = in_order(rng, shape)
            if run is of_decay:
                data["init"][0, 0] = 0.0
                data["grad"][:, -1, -1] = 0.0
            with in_float64():
                found = data | run(case, code, data)
            arrays |= {f"{case}/{name}/{key}": np.asarray(x) for key, x in found.items()}
    cases = {
        case: {"kwargs": kwargs, "rates": list(RATES[case])} for case, kwargs in ARGUMENTS.items()
    }
    meta = {"torch": torch.__version__, "commit": COMMIT, "cases": cases}
    np.savez_compressed(FILE, meta=json.dumps(meta), **arrays)


if __name__ == "__main__":
    main()
