"""The identity, with a derivative in forward mode only."""

from typing import Any, NoReturn

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ...core.numerics import has_derivative

# A primitive, because the rules of a jax.custom_jvp find no named axis under vmap.
_identity = Primitive("forward_only")


def forward_only(tree: Any) -> Any:
    """The same arrays; ``jax.jvp`` works, and ``jax.grad`` raises ``TypeError``.

    Compiled programs contain no operation for it.
    """
    return jax.tree.map(lambda a: _identity.bind(a) if has_derivative(a) else a, tree)


def _refuse(*_: Any) -> NoReturn:
    raise TypeError(
        "an exchange that depends on the step count is a loop, which has no reverse-mode "
        "derivative (jax.grad, jax.vjp, jax.linearize with a transpose). Pass exchange=True or "
        "exchange=False to update, as optzoo.replicas.scan_local_steps does, or use forward mode "
        "(jax.jvp, jax.jacfwd)"
    )


_identity.def_impl(lambda a: a)
_identity.def_abstract_eval(lambda a: a)
batching.defvectorized(_identity)
mlir.register_lowering(_identity, lambda ctx, a: [a])
ad.deflinear2(_identity, _refuse)
