"""The table of dependencies of a release, the pinned actions of the workflows, and SECURITY.md."""

import pathlib
import re

import pytest

import optzoo

from . import licences

ROOT = pathlib.Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def install(folder, name, *lines):
    at = folder / f"{name}-1.0.dist-info"
    at.mkdir()
    text = "\n".join(["Metadata-Version: 2.4", f"Name: {name}", "Version: 1.0", *lines, ""])
    (at / "METADATA").write_text(text)


def test_dependencies_and_their_licences(tmp_path, monkeypatch):
    """Of dependencies too, once each; extras are followed where they are asked for."""
    needs = "Requires-Dist: "
    never = "Requires-Dist: oz_never; python_version < '3'"
    install(tmp_path, "oz_root", f"{needs}oz.b[fast]", f"{needs}oz_no; extra == 'test'", never)
    classifier = "Classifier: License :: OSI Approved :: BSD License"
    install(tmp_path, "oz_b", f"{needs}oz-c; extra == 'fast'", classifier, "License: long\n  text")
    install(tmp_path, "oz_c", f"{needs}oz_d", f"{needs}oz_root", "License-Expression: MIT")
    install(tmp_path, "oz_d", "License: Apache 2.0")
    monkeypatch.syspath_prepend(tmp_path)
    assert licences.table("oz_root").splitlines() == [
        "| dependency of oz_root | version | licence |",
        "|---|---|---|",
        "| oz_b | 1.0 | BSD License |",
        "| oz_c | 1.0 | MIT |",
        "| oz_d | 1.0 | Apache 2.0 |",
    ]


def test_what_is_installed_here():
    rows = licences.table("optax").splitlines()
    assert any(re.fullmatch(r"\| jax \| [\d.]+ \| Apache.* \|", row) for row in rows)
    assert licences.UNKNOWN not in "".join(rows)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned(path):
    """By the hash of a commit, with its tag, and each action by one hash everywhere."""
    pattern = r"uses: ([\w./-]+)@([0-9a-f]{40}) # (v\d+\.\d+\.\d+)(?:;.*)?"
    used = re.findall(r"uses: .*", path.read_text())
    pins = [re.fullmatch(pattern, line) for line in used]
    assert used and all(pins), used
    everywhere = re.findall(pattern, "\n".join(p.read_text() for p in WORKFLOWS))
    assert len({name for name, *_ in everywhere}) == len(set(everywhere))


def test_the_release_has_the_table():
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    assert "python tests/release/licences.py optzoo > licences.md" in text
    assert "path: licences.md" in text


def test_nothing_reads_pickles():
    """As SECURITY.md says; NumPy reads none unless it is asked to."""
    assert "No function of optzoo reads a pickle" in (ROOT / "SECURITY.md").read_text()
    read = r"\b(?:pickle|cloudpickle|dill|joblib|torch)\.loads?\(|allow_pickle=True|Unpickler"
    files = pathlib.Path(optzoo.__file__).parent.rglob("*.py")
    assert [f.name for f in files if re.search(read, f.read_text())] == []
