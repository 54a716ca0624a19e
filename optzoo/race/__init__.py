"""Compares all optimizers on real data, from the command line or from Python."""

import importlib.util

from ..core.extras import how_to_install

_NEEDED = "jinja2", "matplotlib", "plotly", "rich", "sklearn"
_MISSING = [m for m in _NEEDED if importlib.util.find_spec(m) is None]
if _MISSING:
    raise ModuleNotFoundError(f"optzoo.race needs {', '.join(_MISSING)}: {how_to_install('race')}")

from .problem import Problem as Problem  # noqa: E402 (after the check)
from .problems import PROBLEMS as PROBLEMS  # noqa: E402
from .runner import Settings as Settings  # noqa: E402
from .session import run as run  # noqa: E402
