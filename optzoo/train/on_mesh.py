"""The train step on a mesh: tables sharded by rows, everything else data-parallel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from ..core.checks import check_positive, check_size
from ..core.meshes import check_axes, shard_map
from ..core.norms import clipped_by_global_norm
from ..core.optimizer import about_of
from ..core.paths import leaves_with_path, path_name
from ..jaxprs.loss import Gradients
from ..sharded.create_table import check_mesh
from ..sharded.row_sharding import RowSharding, shardings_by_leaf
from ..state.fit import difference, misfit
from ..state.sharding import state_sharding
from .sharded import CapacityFactor, Mapped, MeanGradients, ShardedTables
from .step import Model, Tables, train_step

# Of :func:`optzoo.minimize`.
_DEFAULTS = {
    "tables": None,
    "capacity_factor": "auto",
    "max_norm": None,
    "transport": None,
    "parts": 1,
}


class OnMesh(NamedTuple):
    """The arguments of :func:`optzoo.minimize` for a mesh."""

    mesh: Mesh
    tables: Mapping[str, RowSharding]
    capacity_factor: CapacityFactor
    max_norm: float | None
    transport: DTypeLike | None
    parts: int  # of the batch of a device

    @classmethod
    def of(cls, mesh: Mesh | None, **given: Any) -> OnMesh | None:
        """The checked arguments; None without a mesh, if no argument needs one."""
        if mesh is None:
            for name, value in given.items():
                if value != _DEFAULTS[name]:
                    raise ValueError(f"{name}={value!r} needs a mesh: give mesh=, too")
            return None
        check_axes(mesh, (), "")
        tables = given.pop("tables") or {}
        if not isinstance(tables, Mapping):
            raise TypeError(
                "tables must be a dict from patterns of names to optzoo.sharded.RowSharding, got "
                f"{tables!r}"
            )
        found = cls(mesh, tables, **given)
        factor, max_norm = found.capacity_factor, found.max_norm
        if isinstance(factor, str) and factor != "auto":
            raise ValueError(f"capacity_factor must be a number, 'auto' or None, got {factor!r}")
        check_positive(capacity_factor=1 if factor in (None, "auto") else factor)
        check_positive(max_norm=1 if max_norm is None else max_norm)
        check_size(1, parts=found.parts)
        for sharding in found.tables.values():
            check_mesh(mesh, sharding)
        return found

    def depends_on_batch(self, model: Model) -> bool:
        """Whether the sizes of messages depend on the first batch."""
        is_divided = about_of(model.tx).divide is not None
        return self.capacity_factor == "auto" and bool(self.tables) and not is_divided

    def most(self, model: Model, params: Any, state: Any, batch: Sequence[Any]) -> dict[int, Array]:
        """The result of :meth:`ShardedTables.most`."""
        self._check_batch(batch)
        specs, mapped = self._specs_and_mapped(model, params, state, {})

        def on_device(params, state, batch):
            return ShardedTables(model, mapped, params, state).most(self._parts(batch))

        in_specs = *specs, self._specs(batch)
        return shard_map(on_device, self.mesh, in_specs, P())(params, state, batch)

    def step(
        self,
        model: Model,
        most: Mapping[int, int],
        params: Any,
        state: Any,
        batch: Sequence[Any],
        extra_args: Any,
    ) -> Any:
        """The parameters, the state, the loss and the auxiliary data after a step.

        The auxiliary data has an additional axis, over the devices and the parts of their batches.
        ``most`` determines the size of messages.
        """
        mesh = self.mesh
        self._check_batch(batch)
        if (divide := about_of(model.tx).divide) is not None:
            return self._divided_step(model, divide(params), params, state, batch, extra_args)
        specs, mapped = self._specs_and_mapped(model, params, state, most)

        def on_device(params, state, batch, extra_args):
            tables = ShardedTables(model, mapped, params, state)
            *after, aux = train_step(tables, self._parts(batch), extra_args)
            return *after, _joined(aux)

        return shard_map(
            on_device,
            mesh,
            in_specs=(*specs, self._specs(batch), P()),
            out_specs=(*specs, P(), P(mesh.axis_names)),
        )(params, state, batch, extra_args)

    def _specs_and_mapped(
        self, model: Model, params: Any, state: Any, most: Mapping[int, int]
    ) -> tuple[tuple[Any, Any], Mapped]:
        """The partition specs of parameters and state, and how the step is mapped."""
        if model.deferred is not None:
            model.deferred.check(state)
        shardings = shardings_by_leaf(self.tables, params)
        specs = [P() if s is None else s.spec for s in shardings]
        specs = jax.tree.structure(params).unflatten(specs)
        put = lambda x, spec: jax.ShapeDtypeStruct(
            jnp.shape(x), jnp.result_type(x), sharding=NamedSharding(self.mesh, spec)
        )
        placed = state_sharding(model.tx, jax.tree.map(put, params, specs))
        if jax.tree.structure(state) != jax.tree.structure(placed):
            raise misfit(*(difference(placed, state) or ("slots of these tables", "others")))
        state_specs = jax.tree.map(lambda x: x.spec, placed)
        return (specs, state_specs), self._mapped(shardings, state_specs, most)

    def _divided_step(
        self,
        model: Model,
        shares: Any,
        params: Any,
        state: Any,
        batch: Sequence[Any],
        extra_args: Any,
    ) -> Any:
        """Like :meth:`step`, for :func:`optzoo.divide_states`, whose shapes give the division.

        Each device computes the gradients of its part of the batch, and gets its share of the mean
        gradients. The update is outside of ``shard_map``, divided like the state.
        """
        if self.tables:
            raise ValueError(
                f"tables={dict(self.tables)!r} needs a step inside of shard_map, but "
                "optzoo.divide_states divides the update outside of it: use only one of the two"
            )
        leaves, treedef = jax.tree.flatten(shares)
        specs = [x.sharding.spec if isinstance(x, jax.ShapeDtypeStruct) else P() for x in leaves]
        mapped = self._mapped([None] * len(specs), (), {})

        def on_device(params, batch):
            gradients = MeanGradients(model, mapped, params, specs)
            grads, _, value, aux = train_step(gradients, self._parts(batch), {})
            return grads, value, _joined(aux)

        grads, value, aux = shard_map(
            on_device,
            self.mesh,
            in_specs=(P(), self._specs(batch)),
            out_specs=(treedef.unflatten(specs), P(), P(self.mesh.axis_names)),
        )(params, batch)
        if self.max_norm is not None:
            grads = clipped_by_global_norm(grads, self.max_norm)
        found = Gradients(value, aux, treedef.flatten_up_to(grads), {})
        return *Tables(model, params, state).update([found], extra_args), aux

    def _mapped(
        self,
        shardings: list[RowSharding | None],
        state_specs: Any,
        most: Mapping[int, int],
    ) -> Mapped:
        options = self.capacity_factor, most, self.max_norm, self.transport
        return Mapped(self.mesh, *options, shardings, state_specs)

    def _specs(self, batch: Any) -> Any:
        """The partition specs of a batch."""
        return jax.tree.map(lambda x: P(self.mesh.axis_names) if jnp.ndim(x) else P(), batch)

    def _parts(self, batch: Any) -> list[Any]:
        """The parts of the batch of a device."""
        leaves, treedef = jax.tree.flatten(batch)
        split = lambda x: jnp.split(x, self.parts) if jnp.ndim(x) else [x] * self.parts
        divided = [*map(split, leaves)]
        return [treedef.unflatten([x[k] for x in divided]) for k in range(self.parts)]

    def _check_batch(self, batch: Sequence[Any]) -> None:
        """Raises ``ValueError`` if the batch is not divisible among the devices."""
        number = self.mesh.size * self.parts
        among = f"the {self.mesh.size} devices of the mesh"
        if self.parts > 1:
            among = f"{self.parts} parts on each of the {self.mesh.size} devices of the mesh"
        for i, tree in enumerate(batch):
            for path, x in leaves_with_path(tree):
                if jnp.ndim(x) and len(x) % number:
                    name = f"batch[{i}]" + (f" '{path_name(path)}'" if path else "")
                    raise ValueError(
                        f"{name} has {len(x)} examples, which cannot be divided among {among}: "
                        f"pad the batch to a multiple of {number}"
                    )


def _joined(aux: Sequence[Any]) -> Any:
    """Joins the auxiliary data of all parts of a batch."""
    return jax.tree.map(lambda *xs: jnp.stack([*map(jnp.asarray, xs)]), *aux)
