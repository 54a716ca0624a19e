"""Warnings that point at a line of the user."""

import sys
import warnings

# The packages whose functions stand between the user's line and the place of a warning.
_BETWEEN = frozenset(
    {"optzoo", "jax", "optax", "flax", "keras", "equinox", "chex", "contextlib", "functools"}
)


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the innermost line outside of this library and of the libraries that call it.

    ``skip_file_prefixes`` of ``warnings.warn`` needs Python 3.12 and source files, which the
    methods made by ``dataclasses`` lack.
    """
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
