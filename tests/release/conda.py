"""The recipe for conda-forge: ``make dist`` writes ``dist/recipe.yaml`` for the sdist beside it."""

import hashlib
import pathlib
import tomllib

ROOT = pathlib.Path(__file__).parents[2]
RECIPE = """\
schema_version: 1

context:
  version: "{version}"

package:
  name: optzoo
  version: ${{{{ version }}}}

source:
  url: https://pypi.org/packages/source/o/optzoo/optzoo-${{{{ version }}}}.tar.gz
  sha256: {sha256}

build:
  number: 0
  noarch: python
  script: ${{{{ PYTHON }}}} -m pip install . -vv --no-deps --no-build-isolation
  python:
    entry_points:
      - optzoo = optzoo.__main__:main

requirements:
  host:
    - python {python}.*
    - pip
    - {build}
  run:
    - python {requires_python}
{run}

tests:
  - python:
      imports: [optzoo, optzoo.interop]
      pip_check: true
      python_version: {python}.*
  - script:
      - optzoo --version

about:
  homepage: https://pypi.org/project/optzoo/
  summary: "{summary}"
  license: {license}
  license_file: LICENSE

extra:
  recipe-maintainers: [optzoo]
"""


def recipe(sdist: pathlib.Path) -> str:
    """The recipe; names, versions and dependencies are those of ``pyproject.toml``."""
    about = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = about["project"]
    [build] = about["build-system"]["requires"]
    apart = lambda requirement: requirement.replace(">=", " >=", 1)
    return RECIPE.format(
        version=sdist.name.removeprefix("optzoo-").removesuffix(".tar.gz"),
        sha256=hashlib.sha256(sdist.read_bytes()).hexdigest(),
        python=project["requires-python"].removeprefix(">="),
        requires_python=project["requires-python"],
        build=apart(build),
        run="\n".join(f"    - {apart(each)}" for each in project["dependencies"]),
        summary=project["description"],
        license=project["license"],
    )


def check(text: str) -> str:
    """What rattler-build makes of it, without a channel; raises if it refuses the recipe."""
    from rattler_build import Stage0Recipe

    [variant] = Stage0Recipe.from_yaml(text).render()
    made = variant.recipe
    return f"recipe.yaml: {made.package.name} {made.package.version}"
