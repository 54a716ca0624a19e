"""Runs all benchmarks and reports the ratios that are worse than the stored ones.

    .venv/bin/python benchmarks/suite.py           some minutes (make bench)
    .venv/bin/python benchmarks/suite.py --full    all, for benchmarks/results (make bench-full)

Ratios are those of contenders in one run, so a busy machine changes them less than times, but they
still have noise: a reported ratio is not a failure.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

HERE = pathlib.Path(__file__).parent
WORSE = 1.15  # a ratio that increased by more than this factor is reported
QUICK = {
    "dense": ["--case", "four", "--rounds", "7"],
    "rows": ["--case", "1M x 64", "--rounds", "7"],
    "small_leaves": ["--case", "100 of 10"],
    "half_slots": ["--skip", "losses", "--rounds", "7"],
}
FULL = {
    "dense": ["--case", "resnet50", "four", "thousand", "transformer"],
    "rows": ["--case", "all"],
    "small_leaves": ["--rounds", "51"],
    "half_slots": [],
    "shampoo": [],
    "ggt": [],
}


def ratios(document: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, float]]:
    """Every ratio in a result, by its path."""
    for key, value in document.items():
        if isinstance(value, dict):
            inside = key.startswith("ratio")
            yield from (
                ratios(value, (*path, key))
                if not inside
                else (("/".join((*path, key, k)), v) for k, v in value.items())
            )
        elif key.startswith("ratio") and isinstance(value, float):
            yield "/".join((*path, key)), value


def main() -> None:
    """Runs the benchmarks and compares the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true")
    full = parser.parse_args().full
    before = {p.stem: json.loads(p.read_text()) for p in (HERE / "results").glob("*.json")}
    with tempfile.TemporaryDirectory() as elsewhere:
        results = HERE / "results" if full else pathlib.Path(elsewhere)
        environment = {**os.environ, "BENCHMARK_RESULTS": str(results)}
        for name, arguments in (FULL if full else QUICK).items():
            print(f"\n# {name}", flush=True)
            command = [sys.executable, str(HERE / f"{name}.py"), *arguments, "--save"]
            subprocess.run(command, check=True, env=environment)
        for name in FULL if full else QUICK:
            now = dict(ratios(json.loads((results / f"{name}.json").read_text())))
            stored = dict(ratios(before.get(name, {})))
            for path in sorted(now.keys() & stored.keys()):
                if now[path] > WORSE * stored[path]:
                    print(f"worse: {name} {path} {stored[path]:.2f} -> {now[path]:.2f}")
    if full:
        subprocess.run([sys.executable, str(HERE / "report.py")], check=True)


if __name__ == "__main__":
    main()
