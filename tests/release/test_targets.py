"""The targets in CONTRIBUTING.md are those of the Makefile, pyproject.toml and the workflows."""

import pathlib
import re
import tomllib

ROOT = pathlib.Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()
PAGE = (ROOT / "CONTRIBUTING.md").read_text().split("## What runs what\n")[1].split("\n## ")[0]
# Each target, with what runs it and its extra.
ROWS = {
    target: (by, extra)
    for targets, by, extra in re.findall(r"^\| (`.+?`) \| (.+) \| `(.+)` \|$", PAGE, re.MULTILINE)
    for target in re.findall(r"`(.+?)`", targets)
}


def test_every_target_is_there():
    phony = re.findall(r"^\.PHONY: (.+)$", MAKEFILE, re.MULTILINE)
    assert ROWS.keys() == set(" ".join(phony).split()) - {"clean"}


def test_the_extras_are_those_that_are_installed():
    installed = {extra for _, extra in ROWS.values()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert installed <= project["optional-dependencies"].keys()
    assert installed == set(re.findall(r"/([a-z]+)\.installed", MAKEFILE))


def test_the_nightly_workflow_runs_its_targets():
    workflow = (ROOT / ".github" / "workflows" / "nightly.yml").read_text()
    commands = " ".join(re.findall(r"\bmake ([^\n&}]+)", workflow)).split()
    assert {target for target, (by, _) in ROWS.items() if "nightly" in by} == {
        *filter(ROWS.__contains__, commands)
    }
