"""The lookups of a loss in sharded tables, found without reading any row."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ..core.compat import trace_state, used_inputs
from ..core.paths import path_name
from .row_sharding import RowSharding


class Call(NamedTuple):
    """One lookup."""

    leaf: int  # the position of the table among the parameters
    ids: Array


class Lookups(NamedTuple):
    """The lookups of a loss in the order of its calls."""

    calls: list[Call]
    run: Callable[[dict[int, Array], Sequence[Array]], Any]  # the loss, given rows


class StandIn:
    """Stands for a sharded table in a loss: it can be looked up, and used in no other way."""

    def __init__(self, name: str, leaf: int, table: Array, s: RowSharding, log: "_Log"):
        self._name, self._leaf, self._log = name, leaf, log
        self.shape, self.dtype = (s.num_rows, *table.shape[1:]), table.dtype
        self.ndim = len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def look_up(self, ids: Any) -> Array:
        """The rows of ids, as :func:`optzoo.lookup` gives them."""
        if trace_state() != self._log.trace_state:
            raise ValueError(
                f"the sharded table '{self._name}' is looked up inside a jit, checkpoint, vmap or "
                "loop of the loss: look its rows up outside, and give them to it"
            )
        return self._log.record(
            Call(self._leaf, ids), (*jnp.shape(ids), *self.shape[1:]), self.dtype
        )

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise TypeError(
            f"'{self._name}' is a table sharded by rows: the loss of sharded_minimize can read it "
            "by optzoo.lookup and optzoo.lookup_sparse only"
        )

    __jax_array__ = __array__ = __getitem__ = __iter__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _refuse
    __matmul__ = __rmatmul__ = __pow__ = __neg__ = _refuse


class _Log:
    def __init__(self, rows: Sequence[Array] | None):
        self.calls, self._rows, self.trace_state = list[Call](), rows, trace_state()

    def record(self, call: Call, shape: Any, dtype: Any) -> Array:
        self.calls.append(call)
        if self._rows is None:
            return jnp.zeros(shape, dtype)
        rows = self._rows[len(self.calls) - 1]
        return rows


def find_lookups(
    loss_fn: Callable[..., Any],
    params: Any,
    shardings: Sequence[RowSharding | None],
    batch: Sequence[Any],
) -> Lookups:
    """The lookups of ``loss_fn(params, *batch)`` in sharded tables.

    Raises:
        ValueError: if ids depend on rows that are looked up.
    """
    paths, treedef = jax.tree_util.tree_flatten_with_path(params)

    def run(rest, rows):
        log = _Log(rows)
        leaves = [
            rest[i] if s is None else StandIn(path_name(path), i, x, s, log)
            for i, ((path, x), s) in enumerate(zip(paths, shardings, strict=True))
        ]
        out = loss_fn(treedef.unflatten(leaves), *batch)
        return out, log.calls

    rest = {i: x for i, ((_, x), s) in enumerate(zip(paths, shardings, strict=True)) if s is None}
    shapes = []

    def shapes_of(rest):
        _, calls = run(rest, None)
        shapes.extend((jnp.shape(c.ids), c.leaf) for c in calls)

    jax.eval_shape(shapes_of, rest)
    rows = [jnp.zeros((*shape, *paths[i][1].shape[1:]), paths[i][1].dtype) for shape, i in shapes]
    ids_of = lambda rows: [c.ids for c in run(rest, rows)[1]]
    used = used_inputs(jax.make_jaxpr(ids_of)(rows).jaxpr)
    if any(used):
        call = shapes[used.index(True)][1]
        raise ValueError(
            f"ids depend on looked-up rows of '{path_name(paths[call][0])}': sharded_minimize reads "
            "all rows before it runs the loss. Use optzoo.sharded_lookup in a step of your own"
        )
    calls = run(rest, rows)[1]
    return Lookups(calls, run)
