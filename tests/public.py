"""The public names, as the site lists them."""

import pathlib
import runpy

_SITE = runpy.run_path(str(pathlib.Path(__file__).parents[1] / "docs" / "site" / "public.py"))
MODULES = _SITE["MODULES"]  # beside optzoo itself
NAMES = _SITE["names"]()  # optzoo.rows.add: the function
BY_LAST = {name.rpartition(".")[2]: thing for name, thing in NAMES.items()}
home = _SITE["home"]
