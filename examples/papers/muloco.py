"""MuLoCo: with Muon inside, replicas exchange in 2 bits with next to no loss.

Eight replicas train a perceptron on handwritten digits, on their own batches, and exchange every H
steps, with Muon or Adam inside and Nesterov momentum outside (rate 0.7, decay 0.6). What they send
is in float32 or in few bits, without and with error feedback. Each inner optimizer has the rate
that is best in float32, by the mean over eight seeds. The bytes are what a replica sends in a step:
those of the collectives in the compiled program of a round on eight devices, sent in rings.
"""

from typing import Any

import numpy as np
import optax

import optzoo
from optzoo.race.problems import digits

from .diloco import REPLICAS, curves, on_devices

PAPER = "Thérien et al. 2025, [MuLoCo](https://arxiv.org/abs/2505.23725)"
CLAIM = "with Muon inside and error feedback, an exchange in 2 bits loses next to nothing"
PUBLISHED = "language models: next to no loss of performance with 2 bits"

PERIOD, BATCH = 16, 8
INNERS = {
    "Muon": lambda rate: optax.contrib.muon(rate, adam_learning_rate=0.01),
    "Adam": optzoo.adam,
}
WAYS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"exchange_dtype": "bfloat16"},
    "int8": {"exchange_dtype": "int8"},
    "int4": {"exchange_dtype": "int4"},
    "int4, feedback": {"exchange_dtype": "int4", "error_feedback": True},
    "2 bits": {"exchange_dtype": "int2"},
    "2 bits, feedback": {"exchange_dtype": "int2", "error_feedback": True},
}


def method(inner, way):
    """The optimizer for an inner rate."""
    outer = optax.sgd(0.7, momentum=0.6, nesterov=True)
    return lambda rate: optzoo.diloco(
        INNERS[inner](rate), outer, communication_period=PERIOD, **WAYS[way]
    )


def sent(collectives, replicas):
    """What a replica sends in rings, from what the collectives of a program give."""
    rings = {"all-reduce": 2, "all-gather": 1, "all-to-all": 1}
    return sum(rings[c.kind] * c.nbytes * (replicas - 1) / replicas for c in collectives)


def bytes_of_a_step(problem, tx):
    """What a replica sends, for each step."""
    step, args = on_devices(problem, PERIOD, tx)
    report = optzoo.compile_report(step, *args, device="cpu")
    return sent(report.collectives, REPLICAS) / PERIOD


def run(inners=tuple(INNERS), ways=tuple(WAYS), steps=512, rates=(0.003, 0.01, 0.03, 0.1), seeds=8):
    """Validation loss and bytes of each way to send."""
    problem, result = digits(), {}
    for inner in inners:
        best = None
        for way in ways:
            tried = rates if best is None else (best,)
            found = curves(problem, PERIOD, method(inner, way), tried, steps, seeds)
            at = int(np.argmin(np.nan_to_num(found[:, -1], nan=np.inf)))
            best = tried[at]
            result[f"{inner}, {way}"] = {
                "rate": best,
                "bytes of a step": bytes_of_a_step(problem, method(inner, way)(best)),
                "loss": float(found[at, -1]),
                "curve": found[at].tolist(),
            }
    return {"steps": steps, "seeds": seeds, "methods": result}


def holds(result, slack=1.05):
    """Whether with 2 bits and feedback the loss with Muon is at most 5 percent above float32's."""
    of = lambda way: result["methods"][f"Muon, {way}"]["loss"]
    return bool(of("2 bits, feedback") <= slack * of("float32"))


def here(result):
    """One line about the result."""
    cells = []
    for name, r in result["methods"].items():
        inner, _, _ = name.partition(", ")
        whole = result["methods"][f"{inner}, float32"]
        fraction = f" ({whole['bytes of a step'] / r['bytes of a step']:.1f} times fewer bytes)"
        cells.append(f"{name}: {r['loss']:.3f}{fraction if r is not whole else ''}")
    return f"{result['steps']} steps, {result['seeds']} seeds; " + "; ".join(cells)


def draw(result, figure):
    """Loss over bytes, for each inner optimizer."""
    panels = figure.subplots(1, len(INNERS), sharey=True)
    for name, r in result["methods"].items():
        inner, _, way = name.partition(", ")
        axes = panels[list(INNERS).index(inner)]
        megabytes = np.arange(1, len(r["curve"]) + 1) * PERIOD * r["bytes of a step"] / 1e6
        axes.loglog(megabytes, r["curve"], label=way)
        axes.set(xlabel="MB sent by each replica", title=inner)
    panels[0].set_ylabel("validation loss")
    panels[0].legend()
