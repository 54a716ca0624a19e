"""The tables of ``docs/which_one.md``: places in the race, with what each optimizer costs.

Places and times are those of ``results/race.json``; figures for TPUs and GPUs are those of the
compilers for the programs of ``make facts`` (``tests/accelerators/facts/facts.json``).
``make docs`` writes the tables into the page.
"""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from optzoo import describe
from optzoo.catalog import CATALOG
from optzoo.race import summary

ROOT = pathlib.Path(__file__).parents[1]
SHOWN = 12
MATRIX, TABLE = (512, 512), (1_000_000, 64)  # whose state is shown
TPU, GPU = "v5e:2x2", "h100"


def _stored(has_tables):
    """The results of the race on dense models, or on models with embedding tables."""
    document = json.loads((ROOT / "benchmarks" / "results" / "race.json").read_text())
    problems = {p: f for p, f in document["problems"].items() if f["embeddings"] == has_tables}
    results = [r for r in document["results"] if r["problem"] in problems]
    return {**document, "problems": problems, "results": results}


def _facts():
    return json.loads((ROOT / "tests" / "accelerators" / "facts" / "facts.json").read_text())


def _first(document):
    """The best contenders and their mean places."""
    found = summary.ranks(document)
    for i in np.argsort(found.mean)[:SHOWN]:
        yield found.contenders[i], found.mean[i]


def _of(document, name, key):
    """The geometric mean over the problems of a figure of an optimizer."""
    values = [r[key] for r in document["results"] if r["optimizer"] == name and key in r]
    return float(np.exp(np.mean(np.log(values)))) if values else float("nan")


def _names(group):
    first, *others = group
    same = f" (equal here: {', '.join(f'`{name}`' for name in others)})" if others else ""
    return f"`{first}`{same}"


def _state(name, shape):
    """Bytes of state per element of a float32 array."""
    entry, array = CATALOG[name], jax.ShapeDtypeStruct(shape, jnp.float32)
    return f"{describe(entry.make(entry.rate), {'w': array}).state_per_parameter:.2g}"


def _ratio(value, base):
    return "-" if value is None or base is None else f"{value / base:.2f}"


def dense():
    """The table for dense models; costs are relative to those of ``adam``."""
    document, facts = _stored(has_tables=False), _facts()
    lines = [
        "| optimizer | mean place | step on a CPU | state, bytes for a parameter "
        "| bytes a TPU v5e moves in an update | memory of an H100 |",
        "|---|---|---|---|---|---|",
    ]
    moved = lambda name: facts.get(f"dense/{name}/{TPU}", {}).get("bytes")
    seconds = lambda name: _of(document, name, "seconds per step")

    def kept(name):
        fact = facts.get(f"dense/{name}/{GPU}")
        return fact and fact["arguments"] + fact["temporaries"]

    for group, place in _first(document):
        name = group[0]
        cells = [_names(group), f"{place:.1f}", _ratio(seconds(name), seconds("adam"))]
        cells += [_state(name, MATRIX), _ratio(moved(name), moved("adam"))]
        cells += [_ratio(kept(name), kept("adam"))]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def tables():
    """The table for models with embedding tables."""
    document, facts = _stored(has_tables=True), _facts()
    lines = [
        "| optimizer | place | step on a CPU, µs | the same with dense gradients "
        "| state, bytes for a parameter | MB a TPU v5e moves in an update "
        "| temporary MB on an H100 |",
        "|---|---|---|---|---|---|---|",
    ]
    for group, place in _first(document):
        name = group[0]
        tpu, gpu = (facts.get(f"rows/{name}/64/{device}", {}) for device in (TPU, GPU))
        rows = 1e6 * _of(document, name, "seconds per step")
        whole = 1e6 * _of(document, name, "seconds per dense step")
        cells = [_names(group), f"{place:.0f}", f"{rows:,.0f}", f"{whole:,.0f}"]
        cells += [_state(name, TABLE)]
        cells += [f"{tpu['bytes'] / 1e6:,.0f}" if "bytes" in tpu else "-"]
        cells += [f"{gpu['temporaries'] / 1e6:,.0f}" if gpu else "-"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


TABLES = {"which one, dense": dense, "which one, tables": tables}
