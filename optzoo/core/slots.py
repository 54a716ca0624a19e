"""Which arrays of a state belong to a parameter."""

from typing import Any

import optax

from .paths import is_masked


def are_slots(inner: optax.GradientTransformation, state: Any) -> Any:
    """A tree like a state of ``inner``: whether each array is a slot of a parameter.

    The others (counts, powers, hyper-parameters) belong to the optimizer as a whole.
    """
    return optax.tree.map_params(
        inner.init,
        lambda s: s if is_masked(s) else True,
        state,
        transform_non_params=lambda _: False,
        is_leaf=is_masked,
    )
