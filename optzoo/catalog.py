"""The table of all optimizers, one line each; nothing else lists them."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import optax

from .first_order.adagrad import adagrad
from .first_order.adam import adam, lazy_adam
from .first_order.adamax import adamax
from .first_order.add_sign import add_sign
from .first_order.gradient_descent import gradient_descent
from .first_order.momentum import momentum
from .first_order.rmsprop import rmsprop
from .proximal.ftrl import ftrl


class Entry(NamedTuple):
    """What the rest of the library knows about an optimizer."""

    factory: Callable[..., optax.GradientTransformationExtraArgs]
    rows: str  # what becomes of row-sparse gradients: "lazy", "dense", "touched" or "linear"
    rate: float  # a learning rate that suits small problems; the middle of the race's grid
    original: str  # the class it equals
    l1_of_the_sum: bool = False  # its L1 strength weighs against all gradients so far, not one
    required: Mapping[str, Any] = MappingProxyType({})  # usual values of arguments without default

    def make(self, learning_rate: optax.ScalarOrSchedule | None = None, **kwargs: Any):
        """The optimizer at its usual settings, or at others."""
        rate = self.rate if learning_rate is None else learning_rate
        return self.factory(rate, **{**self.required, **kwargs})

    @property
    def family(self) -> str:
        """The folder it lives in."""
        return self.factory.__module__.split(".")[1]


CATALOG: dict[str, Entry] = {
    "adagrad": Entry(adagrad, "lazy", 0.1, "tf.train.AdagradOptimizer"),
    "adam": Entry(adam, "dense", 0.01, "tf.train.AdamOptimizer"),
    "adamax": Entry(adamax, "lazy", 0.01, "tf.contrib.opt.AdaMaxOptimizer"),
    "add_sign": Entry(add_sign, "touched", 0.1, "tf.contrib.opt.AddSignOptimizer"),
    "ftrl": Entry(ftrl, "lazy", 0.1, "tf.train.FtrlOptimizer", l1_of_the_sum=True),
    "gradient_descent": Entry(gradient_descent, "linear", 0.1, "tf.train.GradientDescentOptimizer"),
    "lazy_adam": Entry(lazy_adam, "lazy", 0.01, "tf.contrib.opt.LazyAdamOptimizer"),
    "momentum": Entry(
        momentum, "lazy", 0.03, "tf.train.MomentumOptimizer", required={"momentum": 0.9}
    ),
    "rmsprop": Entry(rmsprop, "lazy", 0.01, "tf.train.RMSPropOptimizer"),
}


def markdown_table() -> str:
    """The optimizers as the README shows them."""
    lines = ["| optimizer | what it is | original | rows |", "|---|---|---|---|"]
    for name, entry in CATALOG.items():
        summary = (entry.factory.__doc__ or "").split(", as in")[0].strip()
        lines.append(f"| `{name}` | {summary} | `{entry.original}` | {entry.rows} |")
    return "\n".join(lines) + "\n"
