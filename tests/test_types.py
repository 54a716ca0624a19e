"""A type checker accepts what users write: the code of the pages, and the examples."""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
PAGES = ["README.md", *sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("docs/tasks/*.md"))]


def errors(files):
    """The errors of pyrefly, each in one line."""
    command = [str(pathlib.Path(sys.executable).parent / "pyrefly"), "check"]
    command += ["--python-interpreter-path", sys.executable, "--search-path", str(ROOT)]
    command += ["--preset", "default", "--output-format", "min-text", *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=files[0].parent)
    found = [line for line in done.stdout.splitlines() if line.startswith("ERROR")]
    assert bool(found) == bool(done.returncode), done.stderr
    return found


def blocks(folder):
    """The Python code of the pages, each block in a file of its own."""
    for page in PAGES:
        for i, code in enumerate(
            re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)
        ):
            path = folder / f"{pathlib.Path(page).stem}_{i}.py"
            path.write_text(code)
            yield path


def test_the_code_of_the_pages(tmp_path):
    """On the pages there is code of optax, too, whose parameters are a union of all."""
    found = errors([*blocks(tmp_path)])
    assert [line for line in found if "optzoo." in line or "README" in line] == []


def test_a_wrong_argument_is_an_error(tmp_path):
    wrong = "import optzoo\n\noptzoo.adam('0.1')\noptzoo.lookup()\noptzoo.rows.nothing\n"
    (tmp_path / "wrong.py").write_text(wrong)
    lines = [error.split(":")[1] for error in errors([tmp_path / "wrong.py"])]
    assert lines == ["3", "4", "4", "5"]


def test_the_examples_call_optzoo_as_its_types_say():
    """What they ask of libraries without types is not for this test."""
    found = errors([*sorted(ROOT.glob("examples/**/*.py"))])
    assert [line for line in found if "optzoo." in line] == []
