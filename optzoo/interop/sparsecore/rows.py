"""An optimizer as functions of one row of a table."""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from ...core.paths import flatten_with_path, path_name
from ...core.rows import SparseRows
from ...jaxprs.equations import used_inputs
from ...jaxprs.prove_rows import NotRowWise, rows_of_state
from ...jaxprs.prove_shards import NotAlone, prove_alone
from .padded import run_padded
from .split import Split, mixes_elements, split

_NAME = "table"
_WIDTH, _ROWS, _TOUCHED = 13, 17, 3  # of the tables that are traced, and of their gradient


class Shared(NamedTuple):
    """The state that all rows of an optimizer share, before a step.

    Attributes:
        step: the number of updates so far.
        arrays: counts, running powers and similar values.
    """

    step: Array
    arrays: tuple[Array, ...]


class Refused(ValueError):
    """Raised if an optimizer cannot run row by row on SparseCore, with the reason."""

    def __init__(self, reason: str, fix: str = ""):
        text = (
            f"optzoo.interop.sparsecore.sparsecore cannot run this optimizer row by row: {reason}"
        )
        super().__init__(f"{text}. {fix}" if fix else text)


class RowOptimizer:
    """An optimizer whose update of a row depends only on this row and on scalars.

    Attributes:
        slot_names: the names of the arrays that have a row for each row of the table.
    """

    def __init__(self, tx: optax.GradientTransformation, width: int | None):
        self._tx = optax.with_extra_args_support(tx)
        self._width, self._traced_width = width, width or _WIDTH
        paths, self._treedef, self._is_slot = self._prove()
        names, _ = self._divided(self._treedef.unflatten(map(path_name, paths)))
        self.slot_names = _short(names)
        self._check_slots(names)
        self._split = self._split_at(self._traced_width)
        if width is None and mixes_elements(self._split.row):
            raise Refused(
                "the elements of a row depend on each other, and SparseCore pads rows with zeros",
                "Give the number of columns of the table: "
                "optzoo.interop.sparsecore.sparsecore(tx, width=...)",
            )
        self._check_rule()
        self._check_form()

    def initializers(self) -> list[Callable[..., Array]]:
        """For each slot, a function of a random key and the shape of the padded table."""

        def of_slot(i):
            def init(key, shape, dtype=jnp.float32):
                del key
                width = self._known_width(shape[1])
                slots, _ = self._divided(self._tx.init(jnp.zeros((shape[0], width), jnp.float32)))
                return _padded(slots[i], shape).astype(dtype)

            return init

        return [of_slot(i) for i in range(len(self.slot_names))]

    def update_row(self, gradient: Array, row: Array, *rest: Array) -> tuple[Array, ...]:
        """The new row and slots, of shape ``(1, D)``, from gradient, row, slots and scalars."""
        num_slots = len(self.slot_names)
        padded, scalars = (gradient, row, *rest[:num_slots]), rest[num_slots:]
        width = self._known_width(row.shape[1])
        at_width = self._split if width == self._traced_width else self._split_at(width)
        if len(at_width.dtypes) != self.num_scalars:
            raise Refused(
                "the values that it computes once in a step depend on the width of the table"
            )
        needed = scalars[: self.num_scalars]
        try:
            return tuple(run_padded(at_width.row, width, needed, padded))
        except NotRowWise as error:
            raise Refused(error.reason) from None

    def first_shared(self, step: Any) -> Shared:
        """The shared state of all rows before the first update."""
        table = jnp.zeros((1, self._traced_width), jnp.float32)
        _, arrays = self._divided(self._tx.init(table))
        return Shared(jnp.asarray(step, jnp.int32), tuple(arrays))

    def next_shared(self, shared: Shared) -> Shared:
        """The shared state after a step."""
        arrays = self._split.shared([shared.step, *shared.arrays])
        return Shared(shared.step + 1, tuple(arrays))

    def scalars(self, shared: Shared) -> list[Array]:
        """The scalars of this step, in float32."""
        return [a.astype(jnp.float32) for a in self._split.scalars([shared.step, *shared.arrays])]

    @property
    def num_scalars(self) -> int:
        """The number of scalars that a row needs."""
        return len(self._split.dtypes)

    # Proofs and traces

    def _prove(self) -> tuple[list[Any], Any, list[bool]]:
        """The paths, structure and rows of the state; raises an error unless it is row-wise."""
        table = jnp.zeros((_ROWS, self._traced_width), jnp.float32)
        ids = jnp.arange(_TOUCHED)
        rows = SparseRows(ids, jnp.zeros((_TOUCHED, *table.shape[1:]), jnp.float32), _ROWS)
        state = self._tx.init(table)
        extra_args = {"global_step": jnp.int32(0)}
        try:
            _, owners = rows_of_state(self._tx, rows, state, table, extra_args)
        except NotRowWise as error:  # it names parameters, of which there is one
            raise Refused(error.reason.replace("parameter ''", "the table")) from None
        try:
            prove_alone(self._tx, table, {0: _NAME}, extra_args)
        except NotAlone as error:
            raise Refused(
                str(error),
                "Use optzoo.on_rows(...) around the optimizer to update touched rows only, which "
                "gives other values; for Adam this is optzoo.lazy_adam",
            ) from None
        paths, treedef = flatten_with_path(state)
        return [path for path, _ in paths], treedef, [owner is not None for owner in owners]

    def _check_slots(self, names: Sequence[str]) -> None:
        """Raises an error unless each slot can be stored in an array of the shape of the table."""
        table = jax.ShapeDtypeStruct((_ROWS, self._traced_width), jnp.float32)
        slots = lambda x: self._divided(self._tx.init(x))[0]
        jaxpr: Any = jax.make_jaxpr(slots)(table).jaxpr
        for name, v in zip(names, jaxpr.outvars, strict=True):
            shape, dtype = v.aval.shape, v.aval.dtype
            if dtype != jnp.float32:
                raise Refused(f"its slot '{name}' is {dtype}, but SparseCore supports float32 only")
            if shape[1:] not in ((), (1,), table.shape[1:]):
                raise Refused(f"its slot '{name}' has {shape[1:]} elements for each row")
            if any(used_inputs(jaxpr.replace(outvars=[v]))):
                raise Refused(
                    f"its slot '{name}' is initialized from the parameters, which are not available"
                )

    def _check_rule(self) -> None:
        """Raises an error if the rules for SparseRows and for arrays differ on an example."""
        width = self._traced_width
        g, x = (jnp.cos(jnp.arange(i, i + width, dtype=jnp.float32))[None] for i in (0, 1))

        @jax.jit
        def both(g, x):
            _, state = self._tx.update(g, self._tx.init(x), x, global_step=0)
            rows: Any = SparseRows(jnp.zeros(1, jnp.int32), g, num_rows=1)
            done = [self._tx.update(a, state, x, global_step=1) for a in (g, rows)]
            return [(optax.apply_updates(x, u), self._divided(new)[0]) for u, new in done]

        of_array, of_rows = (jax.tree.leaves(result) for result in both(g, x))
        for a, b in zip(of_array, of_rows, strict=True):
            if not jnp.allclose(a, b, rtol=1e-4, atol=1e-5):
                raise Refused("its rules for SparseRows and for arrays differ")

    def _check_form(self) -> None:
        """Raises an error if the function of a row cannot be written without slices."""
        padded = -(-self._traced_width // 8) * 8
        row = jax.ShapeDtypeStruct((1, padded), jnp.float32)
        number = 2 + len(self.slot_names) + self.num_scalars
        jax.eval_shape(self.update_row, *[row] * number)

    def _divided(self, state: Any) -> tuple[list[Any], list[Any]]:
        """The slots of a state, and its other arrays."""
        leaves = list(zip(self._treedef.flatten_up_to(state), self._is_slot, strict=True))
        return [a for a, is_slot in leaves if is_slot], [a for a, is_slot in leaves if not is_slot]

    def _split_at(self, width: int) -> Split:
        """The update of a table of one row."""
        row = jax.ShapeDtypeStruct((1, width), jnp.float32)
        slots, others = self._divided(jax.eval_shape(self._tx.init, row))

        def update(inputs, shared):
            (g, x, *slots), (step, *others) = inputs, shared
            slots, others = iter(slots), iter(others)
            leaves = [next(slots if is_slot else others) for is_slot in self._is_slot]
            state = self._treedef.unflatten(leaves)
            updates, state = self._tx.update(g, state, x, global_step=step)
            slots, others = self._divided(state)
            return [optax.apply_updates(x, updates), *slots], others

        try:
            step = jax.ShapeDtypeStruct((), jnp.int32)
            return split(update, [row, row, *slots], [step, *others])
        except NotRowWise as error:
            raise Refused(error.reason) from None

    def _known_width(self, padded: int) -> int:
        if self._width is not None and self._width > padded:
            raise ValueError(
                f"width must be at most {padded}, that of the table, got {self._width}"
            )
        return padded if self._width is None else self._width


def _padded(a: Array, shape: tuple[int, ...]) -> Array:
    """A slot in the shape of the padded table."""
    if a.ndim == 1:
        a = a[:, None]
    if a.shape[1] == 1:
        return jnp.broadcast_to(a, shape)
    return jnp.pad(a, ((0, 0), (0, shape[1] - a.shape[1]))) if a.shape != shape else a


def _short(names: Sequence[str]) -> list[str]:
    """Names of fields: the last part of each path, or the whole path where these are not unique."""
    last = [re.sub(r"\W", "_", name.rpartition("/")[2]) for name in names]
    whole = [re.sub(r"\W", "_", name) for name in names]
    chosen = [a if last.count(a) == 1 else b for a, b in zip(last, whole, strict=True)]
    return [name if name[:1].isalpha() else f"slot_{name}" for name in chosen]
