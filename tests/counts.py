"""What there is to test with, counted from the files: ``python -m tests.counts``.

Nothing is compiled, and no other test is imported. The table is in docs/reliability.md.
"""

import ast
import functools
import json
import lzma
import pathlib
import tomllib
import zipfile
from collections.abc import Callable, Iterator

import numpy as np

TESTS = pathlib.Path(__file__).parent
GOLDEN = TESTS / "golden"


def _files(pattern: str) -> int:
    return len(list(TESTS.glob(pattern)))


def _meta(path: pathlib.Path) -> dict:
    return json.loads(str(np.load(path)["meta"]))


def _functions(*names: str) -> Iterator[ast.FunctionDef]:
    """All functions in some files."""
    for path in (path for name in names for path in TESTS.parent.glob(name)):
        yield from _functions_in(path)


@functools.cache
def _functions_in(path: pathlib.Path) -> list[ast.FunctionDef]:
    nodes = ast.walk(ast.parse(path.read_text()))
    return [node for node in nodes if isinstance(node, ast.FunctionDef)]


def _tests(*names: str) -> int:
    return sum(function.name.startswith("test_") for function in _functions(*names))


def _clusters() -> int:
    return sum(name.endswith("/meta") for name in np.load(GOLDEN / "distributed.npz").files)


def _graphs() -> int:
    with zipfile.ZipFile(GOLDEN / "checkpoints" / "checkpoints.zip") as file:
        return sum(name.endswith(".index") for name in file.namelist())


def _estimators() -> int:
    with lzma.open(GOLDEN / "estimators" / "theirs.xz") as file:
        meta = json.loads(file.readline())
    return len(meta["graphs"]) + len(meta["estimators"])


def _torch() -> int:
    return sum(len(_meta(GOLDEN / "torch.npz")[kind]) for kind in ("sparse", "dense", "bags"))


def _muon() -> int:
    names = np.load(GOLDEN / "muon.npz").files
    return sum(name.endswith(("/bfloat16", "/float32", "/float64")) for name in names)


def _torchft() -> int:
    published = json.loads((GOLDEN / "torchft" / "published.json").read_text())
    return _files("golden/torchft/*.npz") + len(published)


def _ftrl() -> int:
    paths = (TESTS / "proximal" / "ftrl_records").glob("*.npz")
    return sum(name.endswith("/param") for path in paths for name in np.load(path).files)


def _sparsecore() -> int:
    with lzma.open(TESTS / "interop" / "sparsecore" / "stablehlo.json.xz") as file:
        return len(json.load(file).keys() - {"versions"})


def _random_cases() -> int:
    with lzma.open(GOLDEN / "fuzz_records" / "0-00000.xz") as file:
        return len(json.loads(file.readline())["cases"])


def _programs() -> int:
    facts = TESTS / "accelerators" / "facts" / "facts.json"
    return len(json.loads(facts.read_text()).keys() - {"versions"})


def _with_random_inputs() -> int:
    is_given = lambda node: "given" in {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    return sum(any(map(is_given, f.decorator_list)) for f in _functions("tests/**/*.py"))


def _hundreds(number: int) -> str:
    """Rounded down, so that a new test does not change a page."""
    return f"more than {number // 100 * 100:,}"


# What is counted, the number, and how far it is followed or where it is.
COUNTS: tuple[tuple[str, Callable[[], int | str], str], ...] = (
    (
        "runs of the optimizers of TensorFlow 1.15.5 and RETURNN, and of BERT and T5 there",
        lambda: _files("golden/records/*.xz"),
        "float64: 1e-10 (1e-5 where the original computes a schedule in float32); float32: three "
        "times the rounding error of the original",
    ),
    ("histories of TensorFlow clusters with several workers", _clusters, "2e-6; counts exactly"),
    (
        "checkpoints of TensorFlow graphs, and the training that continued from each",
        _graphs,
        "5e-6, in both directions: TensorFlow also continued from checkpoints of optzoo",
    ),
    (
        "checkpoints of TensorFlow's estimators and of variables in parts, likewise",
        _estimators,
        "1e-6 of the array's largest element, in both directions; saved again, the same bytes",
    ),
    (
        "random cases of TensorFlow 1.15.5 with extreme values",
        _random_cases,
        "stored; `make_fuzz.py` runs thousands of others beside TensorFlow, by hand",
    ),
    (
        "runs of RETURNN's updater for TensorFlow",
        lambda: len(_meta(GOLDEN / "returnn.npz")["cases"]),
        "every option that can be recorded",
    ),
    (
        "runs of RETURNN's updater for torch",
        lambda: len(json.loads((GOLDEN / "returnn_torch.json").read_text())["cases"]),
        "2e-6",
    ),
    (
        "runs of FBGEMM's optimizers for tables",
        lambda: _files("golden/fbgemm/*.npz"),
        "float64: the formulas to 1e-12, and FBGEMM's float32 to its own rounding error",
    ),
    ("runs of torch's optimizers and bags", _torch, "float64: 1e-14 where the formulas are equal"),
    ("runs of FTRL in four libraries", _ftrl, "1e-6"),
    ("runs of the published code of SOAP", lambda: _files("golden/soap/*.npz"), "1e-5"),
    (
        "runs of torch's Muon, and of its author's",
        _muon,
        "1e-6, in bfloat16 too; in float64 1e-12",
    ),
    ("histories of torchft's DiLoCo", _torchft, "1e-8; the published ones exactly"),
    (
        "of the runs above, as programs for SparseCore, run on the CPU",
        _sparsecore,
        "1e-6 of the largest value",
    ),
    (
        "programs for TPU v5e, v6e and H100: memory, copies, collectives, estimates",
        _programs,
        "each change is shown (`make test-accelerators`)",
    ),
    (
        "conformance tests, each on every optimizer",
        lambda: _tests("optzoo/testing/contract.py"),
        "`optzoo.testing.contract`",
    ),
    (
        "properties that hold for random inputs or random histories",
        _with_random_inputs,
        "Hypothesis",
    ),
    (
        "test functions in all; many run on all optimizers",
        lambda: _hundreds(_tests("tests/**/*.py", "optzoo/testing/*.py")),
        "`make test-full`",
    ),
    (
        "changes of the code that no test finds, because no user can observe them",
        lambda: len(tomllib.loads((TESTS / "mutants" / "explained.toml").read_text())["mutant"]),
        "`tests/mutants/explained.toml` has the reasons",
    ),
)


def table() -> str:
    """All counts."""
    lines = ["| what | number | how closely, or where |", "|---|---|---|"]
    for what, count, how in COUNTS:
        number = count()
        shown = number if isinstance(number, str) else f"{number:,}"
        lines.append(f"| {what} | {shown} | {how} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
