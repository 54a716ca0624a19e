"""Operations on specific platforms."""

from typing import Any

import jax


def first_on_gpus(tree: Any) -> Any:
    """The same tree; on GPUs a barrier computes all of it before later operations.

    XLA for GPUs would compute it again for each of its uses, from rows of a table that have been
    overwritten, for which it copies the table. On TPUs a barrier costs cycles, and arrays that
    would otherwise be fused.
    """
    barrier = jax.lax.optimization_barrier
    return jax.lax.platform_dependent(tree, cuda=barrier, rocm=barrier, default=lambda same: same)
