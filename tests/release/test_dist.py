"""What is released: the files in it, its version, and how the texts say that it is installed."""

import contextlib
import hashlib
import json
import pathlib
import re
import tomllib
import zipfile

import hatchling.build
import pytest

import optzoo

from . import conda, contents, dist

ROOT = dist.ROOT
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FOLDERS = ["optzoo", "tests", "docs", "examples", "benchmarks", "colabs", ".github"]
TEXTS = [
    *(path for path in sorted(ROOT.iterdir()) if path.suffix in (".md", ".toml", ".cff")),
    *(
        path
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in (".py", ".md", ".ipynb", ".sh", ".yml", ".toml")
        and path != pathlib.Path(__file__)
    ),
]


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    """The wheel and the sdist, made by the build backend in this process."""
    folder = tmp_path_factory.mktemp("dist")
    with contextlib.chdir(ROOT):
        made = [hatchling.build.build_wheel(str(folder)), hatchling.build.build_sdist(str(folder))]
    return [folder / name for name in made]


def test_what_is_in_them_belongs_there(archives):
    """And all of the library is in both."""
    sources = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "optzoo").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    for archive in archives:
        print(contents.check(archive))
        assert sources <= contents.members(archive).keys()


def test_the_recipe_is_of_the_sdist(archives):
    """What ``make dist`` lets rattler-build read."""
    text = conda.recipe(archives[1])
    assert hashlib.sha256(archives[1].read_bytes()).hexdigest() in text
    assert f'version: "{optzoo.__version__}"' in text and "license: Apache-2.0" in text
    assert [f"    - {each.replace('>=', ' >=')}" in text for each in PROJECT["dependencies"]] == [
        True
    ] * len(PROJECT["dependencies"])


def test_the_wheel_describes_itself(archives):
    with zipfile.ZipFile(archives[0]) as wheel:
        read = lambda name: wheel.read(f"optzoo-{optzoo.__version__}.dist-info/{name}").decode()
        metadata, points = read("METADATA"), read("entry_points.txt")
    assert f"\nVersion: {optzoo.__version__}\n" in metadata
    assert "\nLicense-Expression: Apache-2.0\n" in metadata
    assert "optzoo = optzoo.__main__:main" in points
    needed = [line for line in metadata.splitlines() if line.startswith("Requires-Dist")]
    without_extra = {
        re.match(r"[\w-]+", n.split(": ")[1])[0] for n in needed if "extra ==" not in n
    }
    assert without_extra == {"jax", "jaxlib", "optax", "chex"}


@pytest.mark.parametrize("name", ["optzoo/race/notes.txt", "tests/test_api.py", "optzoo/a.pyc"])
def test_what_does_not_belong_is_found(archives, tmp_path, name):
    bad = tmp_path / archives[0].name
    bad.write_bytes(archives[0].read_bytes())
    with zipfile.ZipFile(bad, "a") as file:
        file.writestr(name, "")
    with pytest.raises(ValueError, match=name):
        contents.check(bad)


def test_the_version_is_in_one_place():
    assert dist.version() == optzoo.__version__
    assert "version" not in PROJECT and "version" in PROJECT["dynamic"]
    sections = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert optzoo.__version__ in sections[:2] and sections[0] in ("Unreleased", optzoo.__version__)


def test_the_date_is_in_the_changelog_alone():
    """A second one, in CITATION.cff or pyproject.toml, could differ."""
    for name in ("CITATION.cff", "pyproject.toml"):
        assert not re.search(r"date-released|\d{4}-\d\d-\d\d", (ROOT / name).read_text()), name


def test_a_release_needs_its_tag_and_a_date(monkeypatch, tmp_path):
    with pytest.raises(SystemExit, match=f"must be v{optzoo.__version__}, got v9"):
        dist.check_tag("v9")
    (tmp_path / "optzoo").mkdir()
    (tmp_path / "optzoo" / "__init__.py").write_text('__version__ = "9.1"\n')
    monkeypatch.setattr(dist, "ROOT", tmp_path)
    (tmp_path / "CHANGELOG.md").write_text("## 9.1 - unreleased\n")
    with pytest.raises(SystemExit, match=r"needs a line '## 9\.1 - YYYY-MM-DD'"):
        dist.check_tag("v9.1")
    (tmp_path / "CHANGELOG.md").write_text("## 9.1 - 2027-01-31\n")
    dist.check_tag("v9.1")


def test_what_is_installed_exists():
    """Every line that installs optzoo names a checkout or the index, and extras that there are."""
    extras, found = PROJECT["optional-dependencies"].keys(), 0
    for path in TEXTS:
        for line in path.read_text().splitlines():
            if "pip install" not in line and "source =" not in line:
                continue
            assert not re.search(r"git\+|github\.com", line), (path, line)
            for named in re.findall(r"(?:optzoo|[\s'\"]\.\.?)\[([\w,]+)\]", line):
                assert set(named.split(",")) <= extras, (path, line)
                found += 1
    assert found > 10


def test_the_address_of_the_repository_is_in_one_place():
    """In [project.urls], as soon as there is one; PyPI's own page follows from the name."""
    known = set(PROJECT.get("urls", {}).values())
    for path in TEXTS:
        addresses = re.findall(
            r"(?:https?|git)://[^\s)\"'>\\]*optzoo[^\s)\"'>\\]*", path.read_text()
        )
        allowed = known if path.name == "pyproject.toml" else ("https://pypi.org/",)
        assert all(address.startswith(tuple(allowed)) for address in addresses), path


@pytest.mark.parametrize("path", sorted((ROOT / "colabs").glob("*.ipynb")), ids=lambda p: p.stem)
def test_notebooks_install_optzoo_first(path):
    first = "".join(json.loads(path.read_text())["cells"][0]["source"])
    assert 'find_spec("optzoo") is None' in first and "%pip install -q {source}" in first
    in_checkout, in_index = re.findall(r"\[[\w,]+\]", first)
    assert in_checkout == in_index


def test_the_workflow_builds_as_make_does_and_stores_no_password():
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    assert "run: make dist PYTHON=python" in text and "id-token: write" in text
    assert "attestations: true" in text and "secrets." not in text and "password:" not in text
    assert "\ndist: " in (ROOT / "Makefile").read_text()
