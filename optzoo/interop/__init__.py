"""Conversions from and to other libraries, each imported at its first use."""

import importlib
import typing

if typing.TYPE_CHECKING:
    from . import fbgemm as fbgemm
    from . import keras as keras
    from . import optax as optax
    from . import returnn as returnn
    from . import sparsecore as sparsecore
    from . import tf1 as tf1
    from . import torch as torch

_MODULES = ("fbgemm", "keras", "optax", "returnn", "sparsecore", "tf1", "torch")


def __getattr__(name: str) -> typing.Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")
