"""Claims of papers, each tested in one short file; docs/papers.md has what came out.

Each module has ``PAPER``, ``CLAIM`` and ``PUBLISHED``, and four functions: ``run() -> result`` (its
arguments are sizes), ``holds(result)`` (True, False or ``"in part"``), ``here(result)``, one line,
and ``draw(result, figure)``.

    python benchmarks/papers.py [name ...]     runs them, and stores the results
"""

import importlib

NAMES = (
    "deepobs",
    "amsgrad",
    "easgd",
    "ftrl",
    "adagrad",
    "ill_conditioned",
    "diloco",
    "backup_workers",
    "muloco",
    "flashoptim",
)


def load(name):
    """The module of a paper."""
    return importlib.import_module(f"{__name__}.{name}")
