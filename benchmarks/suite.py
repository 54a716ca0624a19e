"""Runs all benchmarks and reports the ratios that are worse than the stored ones.

    .venv/bin/python benchmarks/suite.py           some minutes (make bench)
    .venv/bin/python benchmarks/suite.py --full    all, for benchmarks/results (make bench-full)

Ratios of contenders in one run depend less on the load of the machine than times, but are still
noisy: a reported ratio is not a failure. Ratios of native code need llvmlite.
"""

import argparse
import importlib.util
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
# By the name of the result: the script and its arguments.
QUICK = {
    "dense": ["dense.py", "--case", "four", "--rounds", "7"],
    "rows": ["rows.py", "--case", "1M x 64", "--rounds", "7"],
    "small_leaves": ["small_leaves.py", "--case", "100 of 10"],
    "half_slots": ["half_slots.py", "--skip", "losses", "--rounds", "7"],
    "native_rows": ["native.py", "rows", "--case", "1M x 64", "--rounds", "7"],
    "native_dense": ["native.py", "dense", "--only", "momentum", "adam", "ftrl", "--rounds", "7"],
}
FULL = {
    "dense": ["dense.py", "--case", "resnet50", "four", "thousand", "transformer"],
    "rows": ["rows.py", "--case", "all"],
    "small_leaves": ["small_leaves.py", "--rounds", "51"],
    "half_slots": ["half_slots.py"],
    "little_memory_cost": ["little_memory.py", "cost"],
    "little_memory_bytes": ["little_memory.py", "bytes"],
    "shampoo": ["shampoo.py"],
    "ggt": ["ggt.py"],
    "native_rows": ["native.py", "rows"],
    "native_dense": ["native.py", "dense"],
    "native_training": ["native.py", "training"],
    "native_compile": ["native.py", "compile"],
    "native_threads": ["native.py", "threads"],
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
    chosen = FULL if full else QUICK
    if importlib.util.find_spec("llvmlite") is None:
        print("llvmlite is not installed: skipping the benchmarks of native code", flush=True)
        chosen = {name: command for name, command in chosen.items() if "native.py" not in command}
    before = {p.stem: json.loads(p.read_text()) for p in (HERE / "results").glob("*.json")}
    with tempfile.TemporaryDirectory() as elsewhere:
        results = HERE / "results" if full else pathlib.Path(elsewhere)
        environment = {**os.environ, "BENCHMARK_RESULTS": str(results)}
        for name, (script, *arguments) in chosen.items():
            print(f"\n# {name}", flush=True)
            command = [sys.executable, str(HERE / script), *arguments, "--save"]
            subprocess.run(command, check=True, env=environment)
        for name in chosen:
            now = dict(ratios(json.loads((results / f"{name}.json").read_text())))
            stored = dict(ratios(before.get(name, {})))
            for path in sorted(now.keys() & stored.keys()):
                if now[path] > WORSE * stored[path]:
                    print(f"worse: {name} {path} {stored[path]:.2f} -> {now[path]:.2f}")
    if full:
        subprocess.run([sys.executable, str(HERE / "report.py")], check=True)


if __name__ == "__main__":
    main()
