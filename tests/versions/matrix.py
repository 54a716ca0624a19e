"""Runs the tests on every Python found, and on every line of JAX: ``make test-matrix``.

There is an environment for each Python on the PATH, with the newest JAX that supports it, and one
for each other line of JAX, on the oldest Python that supports it; lines that no installed Python
supports are skipped. Saved states are then restored from each environment in each (``states.py``).
Finally prints a table; the exit status is 1 if anything failed.

``--only`` selects environments, such as ``python3.13,jax0.9``; ``--states`` skips the tests; other
arguments are passed to pytest. Any Python 3 can run this file, which imports only the standard
library.
"""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
FOLDER = Path(".venv-matrix")
OLDEST = "0.9.0"  # tests/oldest.txt
# Each line of JAX with the oldest Python that has it: 3.11 or 3.12.
LINES = {"0.9": 11, "0.10": 11, "0.11": 12, "0.12": 12}


def main():
    """Sets up all environments, runs everything in each, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--only", metavar="ENVIRONMENTS")
    parser.add_argument("--states", action="store_true")
    arguments, pytest_args = parser.parse_known_args()
    FOLDER.mkdir(exist_ok=True)
    only = arguments.only.split(",") if arguments.only else []
    names = set_up_all(only)
    if unknown := set(only) - names.keys():
        parser.error(f"no environments of these names: {sorted(unknown)}")
    ready = [name for name, is_ready in names.items() if is_ready]
    counts = {name: (0, 0) if arguments.states else test(name, pytest_args) for name in ready}
    states = exchange_states(ready)
    print(f"\n{'environment':12} {'Python':8} {'JAX':10} {'passed':>7} {'failed':>7}  states")
    for name in names:
        if name not in ready:
            print(f"{name:12} could not be set up")
            continue
        python, jax = versions(name)
        passed, failed = counts[name]
        print(f"{name:12} {python:8} {jax:10} {passed:7} {failed:7}  {states[name]}")
    is_good = all(names.values()) and not any(failed for _, failed in counts.values())
    sys.exit(not is_good or any(result != "restored" for result in states.values()))


# Environments


def set_up_all(only):
    """For the name of each environment, whether it could be set up."""
    found = run(["sh", HERE / "pythons.sh"]).stdout
    ready, got, minors = {}, set(), {}
    pythons = found.split("\n")[-2::-1]  # the oldest first
    if not pythons:
        sys.exit("There is no Python >= 3.11 on the PATH.")
    for python in pythons:
        show = "import sys; print(sys.version_info[1])"
        minors[python] = int(run([python, "-c", show]).stdout)
        name = f"python3.{minors[python]}"
        if not only or name in only:
            ready[name] = set_up(name, [python])
        if ready.get(name):
            got.add(versions(name)[1])
    extra = {OLDEST: ["-c", "tests/oldest.txt"]}
    for line in LINES:
        if only or not any(version.startswith(f"{line}.") for version in got):
            extra[line] = [f"{package}=={line}.*" for package in ("jax", "jaxlib")]
    for line, pip_args in extra.items():
        name = f"jax{line}"
        if only and name not in only:
            continue
        oldest = LINES.get(line, 11)
        if new_enough := [python for python in pythons if minors[python] >= oldest]:
            ready[name] = set_up(name, new_enough, *pip_args)
            continue
        print(f"JAX {line} needs Python >= 3.{oldest}, which is not on the PATH", flush=True)
        if only:
            ready[name] = False
    return ready


def set_up(name, pythons, *pip_args):
    """Sets an environment up with the first working Python; returns whether one worked."""
    print(f"setting up {FOLDER / name}", flush=True)
    command = ["sh", HERE / "environment.sh", FOLDER / name, "test", *pip_args]
    errors = []
    for python in pythons:
        done = run(command, PYTHON=python)
        if done.returncode == 0:
            return True
        errors.append(done.stderr)
    print(*errors, sep="\n", flush=True)
    return False


def versions(name):
    """The versions of Python and of JAX in an environment."""
    show = "import sys, jax; print('{}.{}.{}'.format(*sys.version_info), jax.__version__)"
    return run([python_of(name), "-c", show]).stdout.split()


def python_of(name):
    """The Python of an environment."""
    return FOLDER.absolute() / name / "bin" / "python"


# What is run in each


def test(name, pytest_args):
    """The numbers of passed and failed tests."""
    print(f"\n{name}", flush=True)
    command = [
        python_of(name),
        "-m",
        "pytest",
        "-q",
        "-m",
        "not full",
        "--dist",
        "worksteal",
        *pytest_args,
    ]
    done = run(command)
    (FOLDER / f"{name}.log").write_text(done.stdout + done.stderr)
    lines = done.stdout.strip().split("\n")
    print(*[line for line in lines if line.startswith(("FAILED", "ERROR"))], lines[-1], sep="\n")
    count = lambda what: sum(int(n) for n in re.findall(rf"(\d+) {what}\b", lines[-1]))
    failed = count("failed") + count("errors?")
    return count("passed"), failed or int(done.returncode != 0)


def exchange_states(names):
    """For the name of each environment, whether it restored the states of all environments."""
    folders = {name: FOLDER.absolute() / "states" / name for name in names}
    saved = [folder for name, folder in folders.items() if states("save", name, [folder])]
    found = {}
    for name in names:
        is_good = states("restore", name, saved) and len(saved) == len(names)
        found[name] = "restored" if is_good else "FAILED"
    return found


def states(verb, name, folders):
    """Whether states were saved to a folder, or restored from all."""
    print(f"{name}: {verb} states", flush=True)
    done = run([python_of(name), HERE / "states.py", verb, *folders])
    print(done.stdout, done.stderr if done.returncode else "", end="", flush=True)
    return done.returncode == 0


def run(command, **environment):
    """A finished process with its output."""
    return subprocess.run(
        list(map(str, command)),
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


if __name__ == "__main__":
    main()
