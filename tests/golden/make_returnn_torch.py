"""Records what RETURNN's updater for torch does into ``returnn_torch.json``.

    python3.11 -m pip install torch==2.14.1 returnn==1.20261022.211313 numpy dm-tree
    python3.11 tests/golden/make_returnn_torch.py

The CPU build of torch is enough. ``README.md`` describes the record.
"""

import json
import pathlib

import numpy as np
import returnn
import torch
from returnn.config import Config
from returnn.torch.updater import Updater

FILE = pathlib.Path(__file__).with_name("returnn_torch.json")
RATES = [0.1, 0.01, 0.01, 0.05, 0.05, 0.02]
EPS = {"epsilon": 0.1}  # so large that its place matters
DECAY = {"weight_decay": 0.1}
BLACKLIST = "weight_decay_modules_blacklist"
OPTIMIZERS = {
    "adam": {"class": "adam"},
    "adam_betas": {"class": "Adam", "betas": [0.8, 0.95], **EPS},
    "adam_l2": {"class": "adam", **DECAY, **EPS},
    "adam_decoupled": {"class": "adam", "decoupled_weight_decay": True, **DECAY},
    "adamw_default_decay": {"class": "torch.optim.AdamW"},
    "adamw": {"class": "adamw", **DECAY, **EPS},
    "adamw_all_modules": {"class": "adamw", **DECAY, BLACKLIST: []},
    "adamw_without_linear": {"class": "adamw", **DECAY, BLACKLIST: ["torch.nn.Linear"]},
    "sgd": {"class": "sgd"},
    "sgd_momentum": {"class": "sgd", "momentum": 0.9},
    "sgd_nesterov_l2": {"class": "SGD", "momentum": 0.9, "nesterov": True, **DECAY},
    "adagrad": {"class": "adagrad"},
    "adagrad_start_l2": {"class": "adagrad", "initial_accumulator_value": 0.3, **EPS, **DECAY},
    "rmsprop": {"class": "rmsprop", **EPS},
    "rmsprop_all": {"class": "rmsprop", "alpha": 0.9, "momentum": 0.9, "centered": True, **DECAY},
    "adadelta": {"class": "adadelta"},
    "adadelta_l2": {"class": "adadelta", "rho": 0.8, **EPS, **DECAY},
    "adamax": {"class": "adamax"},
    "adamax_l2": {"class": "adamax", "betas": [0.8, 0.95], **EPS, **DECAY},
    "nadam": {"class": "nadam"},
    "nadam_l2": {"class": "nadam", "betas": [0.8, 0.95], "momentum_decay": 9.0, **EPS, **DECAY},
    "nadam_decoupled": {"class": "NAdam", "decoupled_weight_decay": True, **DECAY},
    "radam": {"class": "radam"},
    "radam_l2": {"class": "torch.optim.RAdam", "betas": [0.8, 0.95], **EPS, **DECAY},
    "radam_decoupled": {"class": "RAdam", "decoupled_weight_decay": True, **DECAY},
    "radam_never_long": {"class": "radam", "betas": [0.9, 0.0]},
}
SGD, MOMENTUM = OPTIMIZERS["sgd"], OPTIMIZERS["sgd_momentum"]
OTHERS = {
    "clip": {"optimizer": MOMENTUM, "gradient_clip": 0.25},
    "clip_global": {"optimizer": SGD, "gradient_clip_global_norm": 1.5},
    # What torch adds to a norm shows where the norm is small, and Adam moves all the same.
    "clip_tiny": {
        "optimizer": {"class": "adam", "epsilon": 1e-16}, "gradient_clip_global_norm": 1e-6,
    },
    "clip_both": {"optimizer": SGD, "gradient_clip": 0.25, "gradient_clip_global_norm": 0.5},
    "accumulate": {"optimizer": MOMENTUM, "accum_grad_multiple_step": 2},
    "accumulate_clip": {
        "optimizer": OPTIMIZERS["adamw"],
        "accum_grad_multiple_step": 3,
        "gradient_clip": 0.9,
        "gradient_clip_global_norm": 1.0,
    },
    "accumulate_clip_sgd": {
        "optimizer": SGD, "accum_grad_multiple_step": 2, "gradient_clip_global_norm": 1.0,
    },
}  # fmt: skip


class Network(torch.nn.Module):
    """A module of each kind that RETURNN's default treats in its own way."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        self.norm = torch.nn.LayerNorm(2)
        self.embedding = torch.nn.Embedding(2, 2)


FACTORS = {"clip_tiny": 2.0**-20}  # of the gradients


def follow(config, init, grads, factor):
    """All parameters after each step; micro-steps as RETURNN's engine does them."""
    network = Network()
    network.load_state_dict({name: torch.tensor(x) for name, x in init.items()})
    config = {**config, "backend": "torch"}
    updater = Updater(config=Config(config), network=network, device="cpu")
    updater.create_optimizer()
    every, count, after = config.get("accum_grad_multiple_step", 1), 0, []
    for step, rate in enumerate(RATES):
        if count == 0:
            updater.get_optimizer().zero_grad()
        for name, param in network.named_parameters():
            grad = factor * torch.tensor(grads[name][step])
            param.grad = grad if param.grad is None else param.grad + grad
        updater.set_learning_rate(rate)
        count = (count + 1) % every
        if count == 0:
            updater.step()
        flat = [param.detach().numpy().ravel() for param in network.parameters()]
        # The shortest decimals of these float32 numbers.
        after.append([float(str(x)) for x in np.concatenate(flat)])
    return after


def main():
    rng = np.random.default_rng(1)
    draw = lambda shape: (rng.integers(-64, 64, shape) / 64).astype(np.float32)
    shapes = {name: tuple(param.shape) for name, param in Network().named_parameters()}
    init = {name: draw(shape) for name, shape in shapes.items()}
    grads = {name: draw((len(RATES), *shape)) for name, shape in shapes.items()}
    cases = {name: {"optimizer": optimizer} for name, optimizer in OPTIMIZERS.items()} | OTHERS
    record = {
        "returnn": returnn.__long_version__.split("+")[0],
        "torch": torch.__version__,
        "rates": RATES,
        "init": {name: x.tolist() for name, x in init.items()},
        "grads": {name: x.tolist() for name, x in grads.items()},
        "cases": {},
    }
    for name, config in cases.items():
        factor = FACTORS.get(name, 1.0)
        params = follow(config, init, grads, factor)
        record["cases"][name] = {"config": config, "factor": factor, "params": params}
    lines = json.dumps(record).replace('"cases": {', '"cases": {\n').replace("]]}, ", "]]},\n")
    FILE.write_text(lines + "\n")


if __name__ == "__main__":
    main()
