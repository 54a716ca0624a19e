"""From and to other libraries, each one imported at its first use."""

import importlib
import typing

if typing.TYPE_CHECKING:
    from . import fbgemm as fbgemm
    from . import keras as keras
    from . import returnn as returnn
    from . import sparsecore as sparsecore
    from . import tf1 as tf1


def __getattr__(name: str) -> typing.Any:
    if name not in ("fbgemm", "keras", "returnn", "sparsecore", "tf1"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")
