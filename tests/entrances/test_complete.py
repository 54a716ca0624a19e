"""Each option of a public function, class or command has a row; those of factories are elsewhere.

Options are arguments that have a default or are given by name. ``tests/test_options.py`` has those
of factories.
"""

import importlib
import inspect
import pathlib

from optzoo.race.__main__ import _parser

from ..public import NAMES as PUBLIC
from ..test_options import ELSEWHERE, NAMES

# They are observed alike: those of FBGEMM by their own file.
FACTORIES = {*NAMES, "fbgemm_optimizer"}
# Classes of which users make no objects: results and protocols.
NEVER_MADE = {"Description", "compiled.CompileReport", "compiled.Placement", "rules.Rule"}
NEVER_MADE |= {"compiled.RequirementError", "rules.RowsPolicy", "rules.RowsRule", "state.Slot"}


def options_of(call):
    """The names of its options; of a class those of its constructor."""
    try:
        parameters = inspect.signature(call).parameters.items()
    except ValueError:  # a warning
        return []
    by_name = {inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD}
    return [name for name, p in parameters if p.default is not p.empty or p.kind in by_name]


def calls():
    """All functions, classes and methods, by name."""
    for name, thing in PUBLIC.items():
        name = name.removeprefix("optzoo.")
        if inspect.isfunction(thing):
            yield name, thing
        elif inspect.isclass(thing) and name not in NEVER_MADE:
            yield name, thing
            for method, f in vars(thing).items():
                f = getattr(f, "__func__", f)
                if inspect.isfunction(f) and not method.startswith("_"):
                    yield f"{name}.{method}", f


def rows():
    """The rows of all tables."""
    for path in pathlib.Path(__file__).parent.glob("test_*.py"):
        if path.stem != "test_complete":
            yield from importlib.import_module(f"{__package__}.{path.stem}").TABLE


def test_every_option_has_a_row():
    wanted = {(name, option) for name, call in calls() for option in options_of(call)}
    is_elsewhere = lambda name, option: name not in FACTORIES or (name, option) in ELSEWHERE
    wanted = {(n, o) for n, o in wanted if is_elsewhere(n.rpartition(".")[2], o)}
    flags = [flag for action in _parser()._actions for flag in action.option_strings]
    wanted |= {("optzoo race", flag) for flag in flags if flag not in ("-h", "--help")}
    found = list(rows())
    assert len(found) == len(set(found))
    assert set(found) == wanted
