"""The site is built without a warning, and the check finds nothing, or what was broken."""

import pathlib
import subprocess
import sys

import pytest

TOOLS = pathlib.Path(__file__).parents[1] / "docs" / "site"
pytestmark = pytest.mark.full


def run(tool, *arguments):
    command = [sys.executable, str(TOOLS / tool), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built once."""
    folder = tmp_path_factory.mktemp("site")
    work = TOOLS.parents[1] / "build" / "site"  # the pictures are kept there
    done = run("build.py", "--out", folder / "built", "--work", work)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "WARNING" not in done.stderr
    return folder / "built"


def test_nothing_is_broken(site):
    done = run("check.py", "--site", site)
    assert done.returncode == 0, done.stdout[-3000:]
    assert done.stdout.endswith("0 failures\n")


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ('<a href="no_such_page.html">x</a>', "no_such_page.html there is no such file"),
        ('<a href="gallery.html#nowhere">x</a>', "gallery.html#nowhere there is no such anchor"),
        ('<script src="https://cdn.example.org/x.js"></script>', "is loaded from elsewhere"),
        ('<p style="background: url(//example.org/x.png)">x</p>', "is loaded from elsewhere"),
    ],
)
def test_a_broken_page_is_found(site, change, found):
    page = site / "index.html"
    text = page.read_text()
    try:
        page.write_text(text.replace("</article>", f"{change}</article>"))
        done = run("check.py", "--site", site)
    finally:
        page.write_text(text)
    assert done.returncode == 1
    assert any(
        line.startswith("index.html: ") and found in line for line in done.stdout.split("\n")
    )


def test_a_name_without_a_page_is_found(site):
    page = site / "api" / "optzoo.ftrl.html"
    text = page.read_text()
    try:
        page.unlink()
        done = run("check.py", "--site", site)
    finally:
        page.write_text(text)
    assert done.returncode == 1
    assert "api/optzoo.ftrl.html: optzoo.ftrl this public name has no page" in done.stdout
