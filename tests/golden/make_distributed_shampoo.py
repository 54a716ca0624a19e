"""Records of ``distributed_shampoo`` for ``test_distributed_shampoo.py``.

    python tests/golden/make_distributed_shampoo.py OPTIMIZERS_FOLDER

The folder is a copy of https://github.com/facebookresearch/optimizers at commit f606606. Needs
NumPy and PyTorch for the CPU: the record was made with torch 2.13.0, in float64.

``distributed_shampoo.npz`` has for each parameter ``N`` of a case ``CASE/N/init``, and for all
steps ``CASE/N/grad`` and ``CASE/N/param``, the parameter after each of them. ``meta`` is JSON: the
arguments of the original, ours, and the versions.

All roots are pseudo-inverses, with an epsilon of zero: the other ways of the original to treat an
eigenvalue of zero are its own. Statistics of matrices that are not square have such eigenvalues.
The largest size of a block is 8: nothing is cut, which the original does in another way, and no
dimensions are merged. The numbers are multiples of powers of two, as the original has them in
float32. Where it takes the steps of SGD at first, it scales its mean of the gradients in place by
the rate: the cases with an interval take those of RMSProp.
"""

import importlib
import json
import pathlib
import sys

import numpy as np
import torch

FILE = pathlib.Path(__file__).with_name("distributed_shampoo.npz")
COMMIT = "f60660661194de26d3ee78bae6d15820ff8e583d"
STEPS = 6
SHAPES = {"wide": (3, 8), "tall": (7, 2), "square": (5, 5)}
SMALL_FIRST = {"wide": (3, 8), "square": (5, 5), "cube": (2, 7, 4)}
ONE_SIDE = {2: {0: 0.5, 1: 0.0}, 3: {0: 0.5, 1: 0.0, 2: 0.0}}
BY_RMSPROP = {"grafting_config": "rmsprop"}
# For each: arguments of the optimizer, of its preconditioner, of the pseudo-inverse; what ours has.
CASES = {
    "pseudo_inverse": ({}, {}, {"rank_rtol": 1e-8}, {"eps": 1e-8}, {**SHAPES, "cube": (3, 4, 5)}),
    "tolerance": ({}, {}, {"rank_rtol": 0.2}, {"eps": 0.2}, SHAPES),
    "interval": (
        {"precondition_frequency": 3, "start_preconditioning_step": 3, **BY_RMSPROP},
        {}, {"rank_rtol": 1e-8},
        {"eps": 1e-8, "preconditioner_interval": 3, "start_step": 2, "grafting": "rmsprop"}, SHAPES,
    ),
    "exponent": (
        {}, {"inverse_exponent_override": {2: 0.5}}, {"rank_rtol": 1e-8},
        {"eps": 1e-8, "alpha": 1.0}, SHAPES,
    ),
    "one_sided": (
        {}, {"inverse_exponent_override": ONE_SIDE}, {"rank_rtol": 1e-8},
        {"eps": 1e-8, "one_sided": True}, SMALL_FIRST,
    ),
    "kl": (
        {"grafting_config": None}, {}, {"rank_rtol": 1e-8},
        {"eps": 1e-8, "kl_statistics": True, "grafting": None}, {**SHAPES, "cube": (3, 4, 5)},
    ),
    "kl_exponent": (
        {"grafting_config": None}, {"inverse_exponent_override": {2: 0.5}}, {"rank_rtol": 1e-8},
        {"eps": 1e-8, "alpha": 1.0, "kl_statistics": True, "grafting": None}, SHAPES,
    ),
    "kl_interval": (
        {"precondition_frequency": 2, "start_preconditioning_step": 2, **BY_RMSPROP},
        {}, {"rank_rtol": 1e-8},
        {
            "eps": 1e-8, "preconditioner_interval": 2, "kl_statistics": True, "start_step": 1,
            "grafting": "rmsprop",
        },
        SHAPES,
    ),
    "adam": (
        {"grafting_config": "adam", "use_bias_correction": True, "weight_decay": 0.125},
        {}, {"rank_rtol": 1e-8}, {"eps": 1e-8, "grafting": "adam", "weight_decay": 0.125}, SHAPES,
    ),
}  # fmt: skip


def main():
    sys.path.insert(0, sys.argv[1])
    ds = importlib.import_module("distributed_shampoo")
    rng, arrays, meta = np.random.default_rng(0), {}, {}
    for case, (options, preconditioner, pseudo_inverse, ours, shapes) in CASES.items():
        kind = "RootInvKLShampoo" if "kl_statistics" in ours else "RootInvShampoo"
        config = getattr(ds, f"{kind}PreconditionerConfig")(
            amortized_computation_config=ds.EigenConfig(
                rank_deficient_stability_config=ds.PseudoInverseConfig(**pseudo_inverse)
            ),
            factor_matrix_dtype=torch.float64,
            inv_factor_matrix_dtype=torch.float64,
            **preconditioner,
        )
        grafting = {
            "sgd": ds.SGDPreconditionerConfig(),
            "rmsprop": ds.RMSpropPreconditionerConfig(beta2=0.75, epsilon=2**-7),
            "adam": ds.AdamPreconditionerConfig(beta2=0.75, epsilon=2**-7),
            None: None,
        }[options.get("grafting_config", "sgd")]
        kwargs = {
            "lr": 0.125, "betas": (0.875, 0.9375), "epsilon": 0.0, "use_bias_correction": False,
            "precondition_frequency": 1, "max_preconditioner_dim": 8, **options,
        }  # fmt: skip
        init = {name: rng.normal(size=shape) for name, shape in shapes.items()}
        grads = {name: rng.normal(size=(STEPS, *shape)) for name, shape in shapes.items()}
        params = {name: torch.nn.Parameter(torch.tensor(x)) for name, x in init.items()}
        optimizer = ds.DistributedShampoo(
            params.values(),
            **kwargs | {"grafting_config": grafting},
            preconditioner_config=config,
        )
        after = {name: [] for name in params}
        for t in range(STEPS):
            for name, p in params.items():
                p.grad = torch.tensor(grads[name][t])
            optimizer.step()
            for name, p in params.items():
                after[name].append(p.detach().numpy().copy())
        for name in params:
            arrays[f"{case}/{name}/init"] = init[name]
            arrays[f"{case}/{name}/grad"] = grads[name]
            arrays[f"{case}/{name}/param"] = np.stack(after[name])
        original = {"class": kind, **kwargs, **preconditioner, **pseudo_inverse}
        meta[case] = {"original": original, "ours": ours}
    versions = {"torch": torch.__version__, "commit": COMMIT}
    np.savez_compressed(FILE, meta=json.dumps({"cases": meta, "versions": versions}), **arrays)


if __name__ == "__main__":
    main()
