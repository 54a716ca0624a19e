"""What is done on some platforms alone."""

from typing import Any

import jax


def first_on_gpus(tree: Any) -> Any:
    """The same; on GPUs all of it is computed before what follows.

    XLA for GPUs would compute it again for each of its uses: with rows that are read from a table
    after others have taken their place, for which it copies the table. On TPUs a barrier costs
    cycles, and arrays that would be parts of fusions.
    """
    barrier = jax.lax.optimization_barrier
    return jax.lax.platform_dependent(tree, cuda=barrier, rocm=barrier, default=lambda same: same)
