"""The train step: reads rows, differentiates the loss, updates tables and other parameters."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from ..core.checks import check_flags, check_transformation
from ..core.optimizer import about_of
from ..core.paths import leaves_with_path, path_name
from ..core.platforms import first_on_gpus
from ..core.rows import is_rows
from ..core.warn import warn
from ..deferred.optimizer import DeferredOptimizer, final_update
from ..jaxprs.loss import Gradients, Loss, TracedLoss, trace_loss
from ..jaxprs.reads import check_all_read
from ..native.step import Native, check_native, natively
from ..sparse.lookup import check_differentiable, check_no_module, value_and_aux
from ..sparse.wanted import DenseGradientWarning, RowsSetting, Sparse
from ..state.fit import refuse_swapped
from ..state.inner import fitting
from ..state.types import needs_loss
from .refused_rows import check_rows, refused_rows


class Model(NamedTuple):
    """The loss that a step minimizes, and its optimizer."""

    loss_fn: Callable[..., Any]
    tx: optax.GradientTransformationExtraArgs
    has_aux: bool
    rows: RowsSetting
    native: Native

    @classmethod
    def of(
        cls, loss_fn: Any, tx: Any, has_aux: bool, sparse: Any, min_rows: Any, native: Native
    ) -> "Model":
        """The checked model; raises ``TypeError`` or ``ValueError`` for invalid arguments."""
        check_transformation(tx=tx)
        check_flags(has_aux=has_aux)
        rows = RowsSetting.of(sparse, min_rows)
        check_native(native)
        if about_of(tx).deferred is None:
            tx = fitting(tx)
        return cls(loss_fn, tx, has_aux, rows, native)

    @property
    def deferred(self) -> DeferredOptimizer | None:
        """The optimizer, if :func:`optzoo.caught_up` made it."""
        return about_of(self.tx).deferred

    def loss_of(self, treedef: Any, batch: Sequence[Any]) -> Callable[..., tuple[Any, Any]]:
        """A function of the leaves of the parameters: the loss and the auxiliary data."""

        def call(leaves):
            return value_and_aux(self.loss_fn(treedef.unflatten(leaves), *batch), self.has_aux)

        return call

    @staticmethod
    def check(params: Any) -> None:
        """Raises ``TypeError`` if a parameter is not differentiable; ``StateError`` for a state."""
        refuse_swapped(params)
        check_no_module(params)
        for path, x in leaves_with_path(params):
            check_differentiable(x, f"parameter '{path_name(path)}'")

    def apply(
        self,
        params: Any,
        state: Any,
        grads: Any,
        extra_args: Mapping[str, Any],
        *,
        in_loop: bool = False,
    ) -> tuple[Any, Any]:
        """The parameters and the state after the final update of a step.

        ``in_loop`` keeps XLA on GPUs from computing the update of a table after its slots have
        changed, for which it would copy them.
        """

        def apply(params, state):
            updates, after = final_update(self.tx, grads, state, params, extra_args)
            if in_loop:
                # One by one: JAX 0.10 has one type for all results of a barrier in a shard_map.
                updates = jax.tree.map(first_on_gpus, updates)
            return optax.apply_updates(params, updates), after

        try:
            update = functools.partial(self.tx.update, grads, state, params)
            check_all_read(self.tx, update, extra_args)
            return self.run(apply, params, state)
        except Exception as error:
            if "optzoo.SparseRows" in str(error):  # not an error that names a fix
                check_rows(self.tx, grads, state, params, extra_args, error)
            raise

    def run(
        self, f: Callable[[Any, Any], tuple[Any, Any]], params: Any, state: Any
    ) -> tuple[Any, Any]:
        """The next parameters and state, by ``f(params, state)``; as native code if requested."""
        return self.run_and_read(lambda p, s: (f(p, s), ()), params, state)[0]

    def run_and_read(
        self, f: Callable[[Any, Any], tuple[tuple[Any, Any], Any]], params: Any, state: Any
    ) -> tuple[tuple[Any, Any], Any]:
        """Like :meth:`run`, with an additional result of ``f``."""
        # In the order of the donated arguments: JAX pairs buffers by order, and a wrong pair
        # costs a copy of each table.
        if not self.native:
            return f(params, state)
        return natively(f, params, state, required=self.native == "require")

    def read(self, f: Callable[[], Any]) -> Any:
        """The result of ``f()``, which reads rows; as native code if requested."""
        return self.run_and_read(lambda *_: (((), ()), f()), (), ())[1]


class Tables:
    """The tables of a model in a step: how their rows are read and updated.

    In this class they are arrays whose rows are all current. The loss reads them itself.
    """

    # The leaves of which rows are read before the loss runs.
    read_first: frozenset[int] = frozenset()
    # Those of them that the loss can read in no other way.
    sharded: frozenset[int] = frozenset()

    def __init__(self, model: Model, params: Any, state: Any):
        self.model, self.params, self.state = model, params, state
        self.treedef = jax.tree.structure(params)
        self.seen = self.treedef  # the structure that the loss sees
        paths = leaves_with_path(params)
        self.names = [path_name(path) for path, _ in paths]
        self.wanted = model.rows.of_tree(params, [f"'{name}'" for name in self.names])

    def leaves(self) -> list[Array]:
        """The parameters that the loss gets."""
        return jax.tree.leaves(self.params)

    def catch_up(self, loss: Loss) -> frozenset[int]:
        """Catches up the tables that the loss reads as a whole, and returns their indices."""
        return frozenset()

    def tapped(self, traced: TracedLoss, extra_args: Mapping[str, Any]) -> Loss:
        """The loss with taps for lookups, and for gathers if ``tx`` supports row-sparse gradients.

        Raises ``ValueError`` for unsupported reads of a table; reports dense gradients.
        """
        gathers = self.wanted.gathers(traced, self.sharded)
        loss = traced.with_taps(self.read_first, gathers)
        extra_args = self.arguments(jnp.zeros([], jnp.float32), extra_args)  # for its type
        given = traced.looked_up | self.read_first
        update = lambda grads: self.model.tx.update(grads, self.state, self.params, **extra_args)
        asked = gathers - given - self.wanted.required
        refused = refused_rows(update, self.params, given, asked)
        pure = {found.leaf for found in loss.lookups if not loss.uses[found.leaf]}
        for i in sorted(refused.keys() & pure):
            self.wanted.report_dense(i, _NO_ROWS.format(refused[i]))
        if refused:
            loss = traced.with_taps(self.read_first, gathers - refused.keys())
        self.check(loss)
        return loss

    def check(self, loss: Loss) -> None:
        """Raises ``ValueError`` for unsupported reads of a table; reports dense gradients."""
        self.wanted.report(loss)

    def read(self, ids: Sequence[Mapping[int, Array]]) -> list[dict[int, Array]]:
        """For each part of the batch, the rows of its ids, by the index of the table.

        The loss gets these rows.
        """
        return [{} for _ in ids]

    def read_further(self, part: int, rows: Mapping[int, Array]) -> Mapping[int, Array]:
        """The rows of a part of the batch, with rows that did not fit into the first round."""
        return rows

    def update(
        self, found: Sequence[Gradients], extra_args: Mapping[str, Any]
    ) -> tuple[Any, Any, Array]:
        """The parameters, the state and the loss after the update by the gradients of all parts."""
        [of_batch] = found
        grads = self.treedef.unflatten(of_batch.of_leaves)
        params = self.params
        if any(map(is_rows, of_batch.of_leaves)):
            params, grads = first_on_gpus((params, grads))
        extra_args = self.arguments(of_batch.value, extra_args)
        return *self.model.apply(params, self.state, grads, extra_args), of_batch.value

    def arguments(self, value: Any, extra_args: Mapping[str, Any]) -> Mapping[str, Any]:
        """The extra args of the update, with the loss as ``value`` if the optimizer needs it."""
        return {"value": value, **extra_args} if needs_loss(self.state) else extra_args


_NO_ROWS = (
    "{} in tx does not support row-sparse gradients. Use a transformation of optzoo, or "
    "optzoo.on_rows(tx)"
)


def train_step(
    tables: Tables, parts: Sequence[Sequence[Any]], extra_args: Mapping[str, Any]
) -> tuple[Any, Any, Any, list[Any]]:
    """The parameters, the state, the loss, and the auxiliary data of each part, after a step.

    Args:
        tables: how rows are read and updated.
        parts: the parts of the batch, of equal shapes. All are read before the update.
        extra_args: extra args of the update.
    """
    traced = [trace_loss(tables.model.loss_of(tables.seen, x), tables.leaves()) for x in parts]
    first = tables.tapped(traced[0], extra_args)
    caught_up = tables.catch_up(first)
    again = lambda of_part: of_part.with_taps(tables.read_first - caught_up, first.gathers)
    losses = [again(traced[0]) if caught_up else first, *map(again, traced[1:])]
    flat = tables.leaves()
    if tables.read_first:
        _check_ids(losses[0], flat)
        rows = tables.read([loss.ids(flat) for loss in losses])
    else:
        rows = [{}] * len(parts)
    found = list[Gradients]()
    for k, loss in enumerate(losses):
        of_part = rows[k]
        if found and of_part:
            # One loss after the other, so that rows are exchanged beside the loss of another part.
            of_part, before = jax.lax.optimization_barrier((of_part, found[-1].of_rows))
            found[-1] = found[-1]._replace(of_rows=before)
        found.append(loss.differentiate(flat, tables.read_further(k, of_part)))
    params, state, value = tables.update(found, extra_args)
    return params, state, value, [of_part.aux for of_part in found]


def _check_ids(loss: Loss, flat: Sequence[Array]) -> None:
    if loss.ids_depend_on_rows(flat):
        raise ValueError(
            "ids depend on looked-up rows, but rows that are deferred or on other devices are "
            "read before the loss runs: call optzoo.rows.catch_up or optzoo.sharded.lookup and "
            "tx.update in a step of your own"
        )


def report_reads(name: str, sparse: Sparse) -> None:
    """Warns of, or refuses, a table with a sparse gradient all of whose rows must be caught up."""
    if sparse == "allow":
        return
    text = (
        f"the loss does not read table '{name}' by lookups only, so each step catches up all its "
        "rows, in a pass over the table"
    )
    if sparse == "require":
        raise ValueError(f"{text}. With sparse='allow' this is permitted")
    warn(f"{text}. sparse='allow' silences this", DenseGradientWarning)
