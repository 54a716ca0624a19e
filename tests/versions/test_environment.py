"""The Python of an environment: the newest on the PATH on which all packages can be installed."""

import os
import pathlib
import subprocess

import pytest

HERE = pathlib.Path(__file__).parent


def add_python(folder, minor, *, runs=True, installs=True):
    """A program that acts like a Python for the calls of the scripts."""
    folder.mkdir(exist_ok=True)
    path = folder / f"python3.{minor}"
    pip = f"#!/bin/sh\\necho pip on 3.{minor}: $* >&2\\nexit {int(not installs)}\\n"
    path.write_text(
        f"""#!/bin/sh
[ {int(runs)} = 1 ] || exit 127
if [ "$1" = -c ]; then echo {minor} {path}; exit; fi
mkdir -p "$3/bin" && printf '{pip}' > "$3/bin/python" && chmod +x "$3/bin/python"
"""
    )
    path.chmod(0o755)
    return path


def run(script, tmp_path, *args, **environment):
    path = f"{tmp_path / 'a'}:{tmp_path / 'b'}:/usr/bin:/bin"
    # A Python of this machine is older than those of the tests, or fails like them.
    environment = {**os.environ, "PYTHON": "", **environment, "PATH": path}
    command = ["sh", HERE / script, *map(str, args)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def pythons(tmp_path):
    """The newest does not run, the next one has no wheels; a folder may have several."""
    add_python(tmp_path / "a", 96, installs=False)
    add_python(tmp_path / "a", 99, runs=False)
    good = add_python(tmp_path / "a", 95)
    add_python(tmp_path / "b", 95, installs=False)
    add_python(tmp_path / "b", 94)
    return good


def test_newest_first_and_each_version_once(tmp_path, pythons):
    found = run("pythons.sh", tmp_path).stdout.split()
    assert found[:3] == [str(tmp_path / name) for name in ("a/python3.96", pythons, "b/python3.94")]


def test_falls_back_where_the_installation_fails(tmp_path, pythons):
    done = run("environment.sh", tmp_path, tmp_path / "venv", "dev", "-c", "constraints.txt")
    assert done.returncode == 0
    assert f"could not be set up with {tmp_path / 'a/python3.96'}" in done.stderr
    assert done.stdout.splitlines()[-1] == f"setting up {tmp_path / 'venv'} with {pythons}"
    assert done.stderr.splitlines()[-1].startswith("pip on 3.95: -m pip install")
    assert done.stderr.splitlines()[-1].endswith("--editable .[dev] -c constraints.txt")

    (tmp_path / "a").rename(tmp_path / "gone")  # the environment stays what it is
    done = run("environment.sh", tmp_path, tmp_path / "venv", "race")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.startswith("pip on 3.95: ")


def test_a_python_can_be_chosen(tmp_path, pythons):
    chosen = tmp_path / "b/python3.94"
    done = run("environment.sh", tmp_path, tmp_path / "venv", "dev", PYTHON=str(chosen))
    assert done.stdout == f"setting up {tmp_path / 'venv'} with {chosen}\n"

    bad = tmp_path / "a/python3.96"
    done = run("environment.sh", tmp_path, tmp_path / "other", "dev", PYTHON=str(bad))
    assert done.returncode == 1
    assert "name one: PYTHON=" in done.stderr
    assert not (tmp_path / "other").exists()
