"""Runs the experiments of examples/papers, and stores their results.

    .venv/bin/python benchmarks/papers.py [name ...]     some minutes

Results of other experiments are kept. ``make docs`` writes the tables to benchmarks/results.md and
docs/papers.md.
"""

import json
import pathlib
import sys
import time
from typing import Any

HERE = pathlib.Path(__file__).parent
STORED = HERE / "results" / "papers.json"
LONGEST = 12  # lists longer than this are for pictures, and not stored


def modules() -> dict[str, Any]:
    """The module of each experiment."""
    sys.path.insert(0, str(HERE.parent / "examples"))
    try:
        import papers
    finally:
        sys.path.pop(0)
    return {name: papers.load(name) for name in papers.NAMES}


def stored() -> dict[str, Any]:
    """The stored results."""
    return json.loads(STORED.read_text()) if STORED.exists() else {}


def short(result: Any) -> Any:
    """The result without long lists."""
    if not isinstance(result, dict):
        return result
    is_long = lambda value: isinstance(value, list) and len(value) > LONGEST
    return {key: short(value) for key, value in result.items() if not is_long(value)}


def table() -> str:
    """The claims of the papers, and the results here."""
    lines = ["| paper | claim | published | here | holds |", "|---|---|---|---|---|"]
    results = stored()
    for name, module in modules().items():
        cells = [module.PAPER, module.CLAIM, module.PUBLISHED, module.here(results[name])]
        cells.append(_holds(module, results[name]))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def short_table() -> str:
    """The claims, and whether they hold."""
    lines = ["| paper | claim | holds here |", "|---|---|---|"]
    results = stored()
    for name, module in modules().items():
        lines.append(f"| {module.PAPER} | {module.CLAIM} | {_holds(module, results[name])} |")
    return "\n".join(lines) + "\n"


def _holds(module: Any, result: Any) -> str:
    holds = module.holds(result)
    return {True: "yes", False: "no"}.get(holds, holds)


TABLES = {"papers": table, "papers, short": short_table}


def main() -> None:
    """Runs the named experiments, or all."""
    import jax

    jax.config.update("jax_num_cpu_devices", 8)
    from harness import machine

    results = {"machine": machine(), **stored()}
    for name, module in modules().items():
        if name in (sys.argv[1:] or modules()):
            begin = time.perf_counter()
            result = module.run()
            print(
                f"{name} ({time.perf_counter() - begin:.0f} s): {module.here(result)}", flush=True
            )
            results[name] = short(result)
            STORED.write_text(json.dumps(results | {"machine": machine()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
