"""The warning about initial values from which an optimizer does not learn."""


class InitialValueWarning(UserWarning):
    """An optimizer cannot train from the initial values of the parameters.

    The first update of FTRL replaces most of them (:func:`optzoo.ftrl_from`). Row-wise LAMB and
    LARS never update rows of zeros, which ``optzoo.growing`` creates without ``init``.

    Example:
        >>> import warnings
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.ftrl_from("keras", learning_rate=0.1)
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     state = tx.init(jnp.ones(2))
        >>> print(caught[0].category.__name__)
        InitialValueWarning
    """
