"""The pages: what is generated in them is fresh (``make docs`` writes it anew), their code runs."""

import inspect
import pathlib
import re
import runpy
import subprocess
import sys

import jax
import pytest

from optzoo import catalog
from tests import counts
from tests.accelerators.facts.tables import TABLES as FACTS
from tests.blocks import run_blocks
from tests.public import BY_LAST

ROOT = pathlib.Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "tasks").glob("*.md")),
    *sorted((ROOT / "benchmarks").glob("**/*.md")),
]
DIFFERENCES = "Differences from the original:"
# What docs/differences.md says once, for all optimizers.
IN_ALL = re.compile(
    r"(With `eps=0`(, the default)?, an element whose gradients were all zero is unchanged;"
    r"|Rows that share an index are summed; the original makes a step for each)[^.]*\.( |$)"
)


def differences():
    """What the docstrings say of deliberate differences, as a list."""
    found = {}
    for name, thing in sorted(BY_LAST.items()):
        doc = inspect.getdoc(thing) or ""
        if DIFFERENCES in doc:
            text = " ".join(doc.split(DIFFERENCES)[1].split())
            text = re.sub(r":math:`(.*?)`", r"$\1$", text).replace("``", "`")
            text = re.sub(r":func:`optzoo\.(.*?)`", r"`\1`", text)
            if text := IN_ALL.sub("", text).strip():
                found.setdefault(text, []).append(f"`{name}`")
    return "".join(f"- **{', '.join(names)}**: {text}\n" for text, names in found.items())


def optax_and_tf1():
    """What the example prints."""
    return runpy.run_path(str(ROOT / "examples" / "optax_and_tf1.py"))["table"]()


GENERATED = {
    "optimizers": catalog.optimizers_table,
    "distributed": catalog.distributed_table,
    "differences": differences,
    "optax and tf1": optax_and_tf1,
    "counts": counts.table,
    "asks": runpy.run_path(str(ROOT / "examples" / "asks" / "run.py"))["entries"],
    **runpy.run_path(str(ROOT / "benchmarks" / "papers.py"))["TABLES"],
    **runpy.run_path(str(ROOT / "benchmarks" / "which_one.py"))["TABLES"],
    **runpy.run_path(str(ROOT / "benchmarks" / "report.py"))["TABLES"],
    **FACTS,
}


def rewritten(text):
    """The page with its generated parts made anew."""
    for name, make in GENERATED.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        if begin in text:
            before, rest = text.split(begin)
            text = before + begin + make() + end + rest.split(end)[1]
    return text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_are_fresh(page):
    text = page.read_text()
    assert text == rewritten(text), f"stale {page.name}: run make docs"


def test_generated_parts_are_somewhere():
    text = "".join(page.read_text() for page in PAGES)
    assert all(f"<!-- {name} -->" in text for name in GENERATED)


# The contract tests of your_own.md are those of test_contract.py, on another optimizer.
@pytest.mark.parametrize(
    "page", sorted(PAGES, key=lambda page: page.name == "your_own.md"), ids=lambda page: page.name
)
def test_examples_run(page, tmp_path, monkeypatch):
    """Block after block; one that begins with a file's name is that file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    known = dict(catalog.CATALOG)
    try:
        with jax.numpy_rank_promotion("allow"):  # as everywhere but in our tests
            run_blocks(page)
    finally:
        catalog.CATALOG.clear()
        catalog.CATALOG.update(known)
    for tests in tmp_path.glob("test_*.py"):
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tests.name],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout[-3000:]
        assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 50


def test_the_readme_is_short_and_counts_right():
    text = (ROOT / "README.md").read_text()
    originals = sum(entry.original is not None for entry in catalog.CATALOG.values())
    many, others = len(catalog.CATALOG), len(catalog.CATALOG) - originals
    words = " ".join(text.split())
    assert f"Of {many} optimizers, {originals} have an original" in words
    assert f"The other {others} follow papers" in words
    assert f"Against {counts.COUNTS[0][1]()} recorded runs" in words
    assert len(text.splitlines()) <= 115


def test_links_lead_somewhere():
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        for link in re.findall(r"\]\(([^)#]+)", page.read_text()):
            assert link.startswith("https://") or (page.parent / link).exists(), (page.name, link)


if __name__ == "__main__":
    runpy.run_path(str(ROOT / "benchmarks" / "race_pictures.py"))["write"]()
    for page in PAGES:
        page.write_text(rewritten(page.read_text()))
