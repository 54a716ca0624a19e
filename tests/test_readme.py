"""The README: its table is the catalogue's (``make readme`` writes it anew), its code runs."""

import pathlib
import re

import pytest

from optzoo import catalog

README = pathlib.Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- optimizers -->\n", "<!-- /optimizers -->"


def with_table(text):
    before, rest = text.split(BEGIN)
    return before + BEGIN + catalog.markdown_table() + END + rest.split(END)[1]


def test_table_is_fresh():
    text = README.read_text()
    assert text == with_table(text), "stale table of optimizers: run make readme"


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", README.read_text(), re.S))
def test_examples_run(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {})


if __name__ == "__main__":
    README.write_text(with_table(README.read_text()))
