"""Draws the pictures of the race in the pages, from stored results.

    .venv/bin/optzoo race --out race          # an hour on two cores
    .venv/bin/python benchmarks/race_pictures.py race

stores the results of this folder, rounded and thinned, in ``results/race.json``; without a folder
the stored results are used. Then it draws ``docs/images/curves.png`` and ``valley.png``. Each
picture stores a hash of the results and of the code that draws it: ``write`` redraws stale pictures
only, and ``tests/race/test_pictures.py`` finds stale ones. ``make docs`` calls ``write``.
"""

import argparse
import json
import pathlib

import numpy as np

from optzoo.race import plots

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "race.json"
IMAGES = ROOT / "docs" / "images"
NAMES = "curves.png", "valley.png"
DIGITS = 5
POINTS = 101


def store(folder):
    """Writes the results of a race, rounded and thinned, without those of other settings."""
    document = json.loads((pathlib.Path(folder) / "results.json").read_text())
    document["others"] = []
    for r in document["results"]:
        r["curve"] = {name: thinned(values) for name, values in r["curve"].items()}
        r["track"] = r["track"] and thinned(r["track"])
    lines = json.dumps(rounded(document), separators=(",", ":")).replace('{"rate":', '\n{"rate":')
    RESULTS.write_text(lines + "\n")


def thinned(values):
    """At most this number of values, evenly spaced, including the first and the last."""
    at = np.linspace(0, len(values) - 1, min(len(values), POINTS))
    return [values[round(i)] for i in at]


def rounded(x):
    """Rounded to the digits that a figure can show."""
    if isinstance(x, dict):
        return {k: rounded(v) for k, v in x.items()}
    if isinstance(x, list):
        return [rounded(v) for v in x]
    return float(f"{x:.{DIGITS}g}") if isinstance(x, float) else x


def stored():
    """The stored results."""
    return json.loads(RESULTS.read_text())


def stale():
    """The pictures that are missing, or made from other results or code."""
    source = plots.source(stored())
    return [
        name
        for name in NAMES
        if not (IMAGES / name).exists() or plots.source_of(IMAGES / name) != source
    ]


def write():
    """Draws the pictures if one is stale."""
    if stale():
        plots.draw(stored(), IMAGES)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", help="a folder of optzoo race")
    if folder := parser.parse_args().folder:
        store(folder)
    write()
