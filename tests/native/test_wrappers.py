"""Native steps of wrapped optimizers, on rows and on arrays."""

import jax
import optax
import pytest

import optzoo
from optzoo.testing.samples import dense_grads, params, row_grads

from ..selection import chosen_first
from ..wrappers.test_contract import INNER, WRAPPERS
from .test_step import both, check_close

MORE = {
    "accumulate": lambda inner: optzoo.accumulate(inner, 2, max_rows={"table": 4}),
    "apply_if_finite": lambda inner: optax.apply_if_finite(inner, 2),
    "groups": lambda inner: optzoo.param_groups({"table": inner, ".*": optzoo.momentum(0.1, 0.9)}),
    "finite_accumulate": lambda inner: optzoo.accumulate(optax.apply_if_finite(inner, 2), 2),
    "masked": lambda inner: optax.masked(inner, lambda p: jax.tree.map(lambda x: x.ndim > 0, p)),
    "multi_steps": lambda inner: optax.MultiSteps(inner, 2).gradient_transformation(),
    "stacked": lambda inner: optzoo.stacked(inner),
}
INNER = {
    **INNER,
    "gradient_descent": lambda: optzoo.gradient_descent(0.1),  # its repeated rows are not merged
    "normalized_sgd": lambda: optzoo.normalized_sgd(0.1),
}
CASES = {f"{w}-{i}-{d}" for w in {**WRAPPERS, **MORE} for i in INNER for d in ("rows", "arrays")}
# They refuse rows, arrays, or updates of another structure than the gradients.
CASES -= {f"{w}-optax.sgd-rows" for w in {**WRAPPERS, **MORE}}
CASES -= {f"{w}-{i}-rows" for w in ("masked", "multi_steps") for i in INNER}
CASES -= {f"accumulate-{i}-arrays" for i in INNER} | {"apply_if_finite-adam-rows"}
CHOSEN = {f"{w}-lazy_adam-rows" for w in ("accumulate", "groups", "moving_average", "stacked")}
CHOSEN |= {f"{w}-lazy_adam-arrays" for w in ("finite_accumulate", "multi_steps")}
CHOSEN |= {"moving_average-gradient_descent-rows", "moving_average-normalized_sgd-rows"}


@pytest.mark.parametrize("case", chosen_first(sorted(CASES), CHOSEN))
def test_wrapped(case):
    wrapper, inner, kind = case.split("-")
    tx = optax.with_extra_args_support({**WRAPPERS, **MORE}[wrapper](INNER[inner]()))
    x = params()
    if wrapper == "ema_in_place":
        del x["one_row"]  # its rows have no halves
    grads = row_grads(x) if kind == "rows" else dense_grads(x)
    check_close(*both(tx, x, lambda seed: grads, required=wrapper == "accumulate"))
