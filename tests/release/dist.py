"""Builds an sdist and a wheel into dist/ and tries the wheel in a new environment: ``make dist``.

The Python that runs it needs ``build`` and ``twine`` (the extra ``dist``).
"""

import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "release"))

import conda  # noqa: E402 (after the path)
import contents  # noqa: E402

DIST = ROOT / "dist"
RACE = "race --quick --steps 30 --optimizers adam ftrl lazy_adam"  # on every problem of a race
# Where optzoo is, and what of its extras is there.
LOOK = """
import importlib.util, optzoo
extras = [m for m in ("flax", "keras", "matplotlib", "tensorflow") if importlib.util.find_spec(m)]
print("optzoo", optzoo.__version__, "in", optzoo.__file__, "; of the extras:", extras or "none")
assert "site-packages" in optzoo.__file__ and not extras
"""


def version() -> str:
    """The version, from its one place."""
    text = (ROOT / "optzoo" / "__init__.py").read_text()
    return re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)[1]


def check_tag(tag: str) -> None:
    """Raises if a tag is not that of the version, or if the changelog has no date for it."""
    if tag != f"v{version()}":
        raise SystemExit(f"the tag must be v{version()}, got {tag}")
    dated = rf"^## {re.escape(version())} - \d{{4}}-\d\d-\d\d$"
    if not re.search(dated, (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE):
        raise SystemExit(f"CHANGELOG.md needs a line '## {version()} - YYYY-MM-DD'")


def run(*command: object, cwd: pathlib.Path = ROOT) -> None:
    """Runs a command without the variables that could lead to the checkout."""
    print("+", *command, flush=True)
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    subprocess.run([str(part) for part in command], cwd=cwd, env=kept, check=True)


def build() -> pathlib.Path:
    """The wheel, built from the sdist; both are checked."""
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", DIST)
    archives = sorted(DIST.iterdir())
    run(sys.executable, "-m", "twine", "check", "--strict", *archives)
    print(*map(contents.check, archives), sep="\n")
    [wheel] = DIST.glob("*.whl")
    return wheel


def try_wheel(wheel: pathlib.Path, folder: pathlib.Path, race: str) -> None:
    """The README's examples without extras, then the race with its own."""
    run(sys.executable, "-m", "venv", folder / "env")
    programs = folder / "env" / ("Scripts" if os.name == "nt" else "bin")
    pip = (programs / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    run(*pip, wheel)
    run(programs / "python", "-c", LOOK, cwd=folder)
    run(programs / "python", ROOT / "tests" / "blocks.py", ROOT / "README.md", cwd=folder)
    run(programs / "optzoo", "list", "adam", cwd=folder)
    run(*pip, f"{wheel}[race]")
    run(programs / "optzoo", *race.split(), "--out", folder / "race", cwd=folder)


def main() -> None:
    """Runs all of it."""
    parser = argparse.ArgumentParser(description="Builds a release and tries it.")
    parser.add_argument("--tag", help="the tag to release: it must be v and the version")
    parser.add_argument("--race", default=RACE, help="arguments of optzoo (default: %(default)s)")
    args = parser.parse_args()
    if args.tag:
        check_tag(args.tag)
    wheel = build()
    [sdist] = DIST.glob("*.tar.gz")
    recipe = conda.recipe(sdist)
    print(conda.check(recipe))
    (DIST / "recipe.yaml").write_text(recipe)
    with tempfile.TemporaryDirectory() as folder:
        try_wheel(wheel, pathlib.Path(folder), args.race)
    print(f"{wheel.relative_to(ROOT)} works")


if __name__ == "__main__":
    main()
