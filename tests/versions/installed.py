"""Prints the versions of Python and of tested packages, in one line, for CI."""

import platform
from importlib import metadata

PACKAGES = ("jax", "optax", "flax", "orbax-checkpoint")


def installed() -> list[str]:
    """``jax 0.10.2``, and other installed packages."""
    present = {dist.name.lower(): dist.version for dist in metadata.distributions()}
    return [f"{name} {present[name]}" for name in PACKAGES if name in present]


print(platform.python_version(), ", ".join(installed()))
