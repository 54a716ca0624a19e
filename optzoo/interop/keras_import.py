"""The import of Keras, at its first use."""

import functools
from types import ModuleType

from ..core.extras import how_to_install

_HINT = (
    f"{how_to_install('keras')}; set the environment variable KERAS_BACKEND=jax before the first "
    "import of keras"
)


@functools.cache
def import_keras() -> ModuleType:
    """Keras 3 on JAX, or an ``ImportError`` with instructions."""
    try:
        import keras
    except ImportError as error:
        raise ImportError(f"Keras optimizers need Keras 3 on JAX: {_HINT}") from error
    if keras.config.backend() != "jax":
        raise ImportError(
            f"Keras optimizers need Keras 3 on JAX, not on {keras.config.backend()}: {_HINT}"
        )
    return keras
