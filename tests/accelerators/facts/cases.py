"""The steps whose programs are recorded."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import optzoo
from optzoo.compiled.report import lowered_for
from optzoo.sharded.row_sharding import SPREAD
from optzoo.testing import samples
from tests.mismatches import WRAPPERS as OF_ONE

ROWS, IDS, STEPS = 1_000_000, 4096, 8  # the rows of a table on each device, and the ids in a step
WIDTHS = (8, 16, 32, 64, 96, 100, 128, 200)
FEW_WIDTHS = (64, 128)
ONE = ("v5e:2x2", "v6e:2x2", "h100")
FOUR = ("v5e:2x2", "v6e:2x2", "h100:4")
LEAVES = (256, 512), (512,), (3, 3, 64, 64)

of = lambda *shape, dtype=jnp.float32: jax.ShapeDtypeStruct(shape, dtype)


class Case(NamedTuple):
    """A step for a device."""

    name: str  # such as "rows/lazy_adam/64"
    device: str
    make: Callable[[str], tuple[Any, tuple[Any, ...]]]  # the step and its arguments for the device

    @property
    def key(self) -> str:
        """Its name in the record."""
        return f"{self.name}/{self.device}"

    @property
    def platform(self) -> str:
        """The kind of the device."""
        return "gpu" if self.device.startswith("h100") else "tpu"

    @property
    def target(self) -> str:
        """What it is lowered for: without kernels the programs of all TPUs are the same.

        Programs for several devices depend on their number.
        """
        number = len(optzoo.compiled.devices_of(self.device))
        return self.device if "native" in self.name else f"{number} {self.platform}"

    def lowered(self) -> Any:
        """The program before it is compiled."""
        step, args = self.make(self.device)
        with _without_locations():
            return lowered_for(step, args, {}, self.device)


@contextlib.contextmanager
def _without_locations() -> Iterator[None]:
    """A program has the source locations of its kernels in it, which change with any line."""
    name = "jax_traceback_in_locations_limit"
    before = getattr(jax.config, name)
    jax.config.update(name, 0)
    try:
        yield
    finally:
        jax.config.update(name, before)


def loss(params, ids, y):
    return jnp.mean((optzoo.lookup(params["table"], ids) @ params["w"] - y) ** 2)


def parameters(width: int, rows: int = ROWS, dtype: Any = jnp.float32) -> dict[str, Any]:
    return {"table": of(rows, width, dtype=dtype), "w": of(width)}


def in_formats(step: Any, args: tuple[Any, ...], device: str) -> tuple[Any, tuple[Any, ...]]:
    """A step compiled by hand, and its arguments in the formats that it needs."""
    at = SingleDeviceSharding(optzoo.compiled.devices_of(device)[0])
    here = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s or at)
    args = jax.tree.map(lambda x: here(x, x.sharding), args)
    return step, jax.tree.map(here, args, optzoo.rows.formats(step, *args))


# One device


def rows(
    tx: Any,
    width: int,
    device: str,
    *,
    in_lines: bool = False,
    size: int = ROWS,
    native: bool = False,
    dtype: Any = jnp.float32,
):
    """A step on a table."""
    del device
    params = parameters(width, size, dtype)
    if in_lines:
        params["table"] = jax.eval_shape(optzoo.rows.to_lines, params["table"])
    args = params, jax.eval_shape(tx.init, params), of(IDS, dtype=jnp.int32), of(IDS)
    return optzoo.minimize(loss, tx, native=native), args


def loop(tx: Any, width: int, device: str):
    """Several steps in one program."""
    step, (*args, ids, y) = rows(tx, width, device)

    def steps(params, state, *batches):
        body = lambda carry, batch: ((new := step(*carry, *batch))[:2], new[2])
        return jax.lax.scan(body, (params, state), batches)

    batches = of(STEPS, *ids.shape, dtype=ids.dtype), of(STEPS, *y.shape)
    steps = jax.jit(optzoo.rows.row_major(steps), donate_argnums=(0, 1))
    return in_formats(steps, (*args, *batches), device)


def dense(tx: Any, device: str):
    """An update of arrays whose gradients are dense."""
    del device
    params = [of(*shape) for shape in LEAVES]

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    args = params, jax.eval_shape(tx.init, params), params
    return jax.jit(step, donate_argnums=(0, 1)), args


# Several devices


def placed(tree: Any, mesh: Mesh, shardings: Any) -> Any:
    """Shapes on a mesh; the tree of specs may be a prefix."""
    at = lambda spec, x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
    return jax.tree.map(
        lambda spec, part: jax.tree.map(functools.partial(at, spec), part), shardings, tree
    )


def mesh_of(device: str, **axes: int) -> Mesh:
    return Mesh(
        np.array(optzoo.compiled.devices_of(device)[:4]).reshape(*axes.values()), tuple(axes)
    )


def sharded(
    tx, width, device, *, axes=None, loss=loss, ids=(IDS,), in_lines=False, size=ROWS, **options
):
    """A step on a table that is sharded by rows."""
    mesh = mesh_of(device, **(axes or {"shard": 4}))
    sharding = optzoo.sharded.RowSharding(size * mesh.shape["shard"], mesh.shape["shard"])
    params = parameters(width, sharding.stored_rows)
    if in_lines:
        params["table"] = jax.eval_shape(optzoo.rows.to_lines, params["table"])
    specs = {"table": sharding.spec, "w": PartitionSpec()}
    params = placed(params, mesh, specs)
    state = jax.eval_shape(tx.init, params)
    state = placed(state, mesh, jax.tree.map(lambda s: s.spec, optzoo.state_sharding(tx, params)))
    batch = of(4 * ids[0], *ids[1:], dtype=jnp.int32), of(4 * ids[0])
    batch = placed(batch, mesh, PartitionSpec(mesh.axis_names))
    step = optzoo.sharded_minimize(loss, tx, mesh, {"table": sharding}, **options)
    return step, (params, state, *batch)


# A recommender: features of an example, numbers of it, and examples on each device.
FEATURES, NUMBERS, EXAMPLES = 32, 13, 2048
IDS_OF_ZIPF = {16: 1760, 64: 456, 8: 3096}  # by devices: distinct ids of an owner, exponent 1.05


def recommender(width: int, is_large: bool) -> dict[str, Any]:
    """The shapes of a network; a large one has three cross layers."""
    all_ = width * (FEATURES + 1)
    sizes = (all_, 1024, 1024, 512, 256, 1) if is_large else (all_, 512, 256, 128, 1)
    layers = lambda *sizes: [of(*pair) for pair in itertools.pairwise(sizes)]
    cross = [(of(all_, 512), of(512, all_))] * 3 if is_large else []
    return {"bottom": layers(NUMBERS, 512, 256, width), "cross": cross, "top": layers(*sizes)}


def loss_of_recommender(params, ids, numbers, clicked):
    x = numbers
    for w in params["bottom"]:
        x = jax.nn.relu(x @ w)
    of_features = optzoo.lookup(params["table"], ids).reshape(len(x), -1)
    x = first = jnp.concatenate([x, of_features], axis=1)
    for down, up in params["cross"]:
        x = first * (x @ down @ up) + x
    for w in params["top"][:-1]:
        x = jax.nn.relu(x @ w)
    return jnp.mean(optax.sigmoid_binary_cross_entropy((x @ params["top"][-1])[:, 0], clicked))


def exchange(device: str, *, is_large: bool, parts: int = 1, width: int = 128):
    """A step of a recommender on 5,000,000 rows, with room for ids by Zipf's law."""
    devices = optzoo.compiled.devices_of(device)
    mesh, n = Mesh(np.array(devices), ("shard",)), len(devices)
    sharding = optzoo.sharded.RowSharding(5_000_000, n)
    # The factor of the capacity that is wanted.
    average = EXAMPLES * FEATURES / n / parts
    room = IDS_OF_ZIPF[n] / parts * (1.08 if parts > 1 else 1)
    factor = (room - SPREAD * average**0.5) / average
    table, by_rows = of(sharding.stored_rows, width), PartitionSpec("shard")
    network = placed(recommender(width, is_large), mesh, PartitionSpec())
    params = {"table": placed(table, mesh, by_rows), **network}
    tx = optzoo.adagrad(0.01)
    state = jax.eval_shape(tx.init, params)
    state = placed(state, mesh, jax.tree.map(lambda s: s.spec, optzoo.state_sharding(tx, params)))
    batch = of(n * EXAMPLES, FEATURES, dtype=jnp.int32), of(n * EXAMPLES, NUMBERS), of(n * EXAMPLES)
    step = optzoo.sharded_minimize(
        loss_of_recommender, tx, mesh, {"table": sharding}, capacity_factor=factor, parts=parts
    )
    return step, (params, state, *placed(batch, mesh, by_rows))


def loss_of_bags(params, ids, y):
    return jnp.mean((optzoo.lookup_sparse(params["table"], ids) @ params["w"] - y) ** 2)


def own_step(tx: Any, width: int, device: str):
    """A lookup in a sharded table inside of ``shard_map``."""
    mesh = mesh_of(device, shard=4)
    sharding = optzoo.sharded.RowSharding(4 * ROWS, 4)
    table = of(sharding.stored_rows, width)
    by_rows = PartitionSpec("shard")

    def step(table, ids):
        def loss(table):
            read = optzoo.sharded.lookup(table, ids, sharding)
            return jax.lax.pmean(jnp.mean(read**2), "shard")

        value, grads = optzoo.value_and_grad(loss)(table)
        updates, _ = tx.update(grads, tx.init(table), table)
        return optax.apply_updates(table, updates), value

    specs = {"in_specs": by_rows, "out_specs": (by_rows, PartitionSpec())}
    step = optzoo.rows.row_major(jax.shard_map(step, mesh=mesh, **specs))
    args = placed((table, of(4 * IDS, dtype=jnp.int32)), mesh, (by_rows, by_rows))
    return in_formats(jax.jit(step, donate_argnums=0), args, device)


def replicas(method: str, device: str, *, form: str):
    """A step, a step without exchange, or a round of steps with one, on four replicas."""
    mesh, by_replica = mesh_of(device, replica=4), PartitionSpec("replica")
    tx = optzoo.catalog.DISTRIBUTED[method].make(optzoo.adam(1e-3), 4)

    def step(params, state, x, **when):
        of_one = lambda w: jnp.mean((x @ w) ** 2)
        value, grads = jax.value_and_grad(of_one)(optzoo.replicas.per_replica(params))
        updates, state = tx.update(grads, state, params, **when)
        return optax.apply_updates(params, updates), state, value

    forms = {
        "step": step,
        "quiet": functools.partial(step, exchange=False),
        "round": optzoo.replicas.scan_local_steps(step),
    }
    start = lambda: optzoo.replicas.replicate(w := jnp.zeros((1024, 1024)), tx.init(w), 4)
    args = jax.eval_shape(start)
    specs = optzoo.replicas.replica_specs(*args, PartitionSpec(), by_replica)
    batch = of(4, *((STEPS,) if form == "round" else ()), 32, 1024)
    args = *placed(args, mesh, specs), placed(batch, mesh, by_replica)
    mapped = optzoo.replicas.map_over_replicas(forms[form], mesh=mesh)
    return jax.jit(mapped, donate_argnums=(0, 1)), args


LAYER = {
    **{name: (768, 768) for name in ("query", "key", "value", "out")},
    "up": (768, 3072),
    "down": (3072, 768),
}


def layers(tx: Any, number: int, device: str):
    """An update of the kernels of some layers of a transformer, divided over all devices."""
    devices = optzoo.compiled.devices_of(device)
    mesh = Mesh(np.array(devices), ("data",))
    params = {f"layer_{i}": {k: of(*shape) for k, shape in LAYER.items()} for i in range(number)}
    params = placed(params, mesh, PartitionSpec("data"))
    specs = jax.tree.map(lambda s: s.spec, optzoo.state_sharding(tx, params))
    state = placed(jax.eval_shape(tx.init, params), mesh, specs)

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(step, donate_argnums=(0, 1)), (params, state, params)


DATA_AXES = {1: ("data",), 2: ("x", "y")}


def data_parallel(make: Callable[[Any], Any], device: str, *, axes: int = 1, is_mapped=False):
    """A train step of eight dense layers, of which each device has all parameters."""
    devices, names = np.array(optzoo.compiled.devices_of(device)), DATA_AXES[axes]
    shape = (-1,) if axes == 1 else (4 if devices.size > 4 else 2, -1)
    mesh = Mesh(devices.reshape(shape), names)
    tx = make(names)
    params = {f"layer_{i}": of(1024, 1024) for i in range(8)}
    params = placed(params, mesh, PartitionSpec())
    specs = jax.tree.map(lambda s: s.spec, optzoo.state_sharding(tx, params))
    state = placed(jax.eval_shape(tx.init, params), mesh, specs)
    batch = placed(of(16 * mesh.size, 1024), mesh, PartitionSpec(names))

    def loss(params, x):
        for w in params.values():
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    step = optzoo.minimize(loss, tx, mesh=mesh if is_mapped else None)
    return step, (params, state, batch)


# All of them

lazy_adam = lambda: optzoo.lazy_adam(1e-3)
ADAM = "optax.adam"  # with dense gradients, for comparison
OPTIMIZERS = {name: functools.partial(samples.make, e) for name, e in optzoo.CATALOG.items()}
OPTIMIZERS[ADAM] = lambda: optax.chain(optzoo.rows.densify(), optax.adam(1e-3))
# Those of which a step moves the rows that a batch names.
FEW_ROWS = {name: e for name, e in optzoo.CATALOG.items() if e.rows in ("lazy", "linear")}.keys()
NATIVE = [
    *((name, 64) for name in sorted(FEW_ROWS - {"lazy_adam"})),
    *(("lazy_adam", w) for w in WIDTHS),
]
SOME = {"lazy_adam": None, "row_wise_adagrad": None, "gradient_descent": None}.keys()
WITHOUT_ROWS = {name for name, e in optzoo.CATALOG.items() if e.family == "second_order"}

WRAPPERS: dict[str, Callable[[], Any]] = {
    **{name: lambda wrap=wrap: wrap(lazy_adam()) for name, wrap in OF_ONE.items()},
    "ema_in_place": lambda: optzoo.interop.fbgemm.ema_in_place(lazy_adam(), 3),
    "slots_dtype": lambda: optzoo.slots_dtype(lazy_adam(), "bfloat16"),
    "slots_dtype, stochastic, packed": lambda: optzoo.slots_dtype(
        lazy_adam(), "bfloat16", stochastic=True, packed=True
    ),
    "slots_dtype, int8": lambda: optzoo.slots_dtype(lazy_adam(), "int8"),
    "slots_dtype, float32, packed": lambda: optzoo.slots_dtype(lazy_adam(), "float32", packed=True),
    "caught_up": lambda: optzoo.caught_up(optzoo.adam(1e-3)),
    "on_rows": lambda: optzoo.on_rows(optax.adamw(1e-3)),
    "clip_by_global_norm": lambda: optax.chain(optzoo.clip_by_global_norm(1.0), lazy_adam()),
}
IN_24_BITS = lambda: optzoo.master_weights(optzoo.slots_dtype(lazy_adam(), "int8"))
LOOPS = {name: OPTIMIZERS[name] for name in ("lazy_adam", "row_wise_adagrad", "adam")}

SHARDED: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "lazy_adam": (lazy_adam, {}),
    # XLA by itself would store such tables by columns in the loop of the exchange.
    "lazy_adam, 2,000,896 rows": (lazy_adam, {"size": 2_000_896}),
    "gradient_descent": (OPTIMIZERS["gradient_descent"], {}),
    "row_wise_adagrad, max_norm": (OPTIMIZERS["row_wise_adagrad"], {"max_norm": 1.0}),
    "clip_by_global_norm": (WRAPPERS["clip_by_global_norm"], {}),
    "slots_dtype": (WRAPPERS["slots_dtype"], {}),
    "slots_dtype, int8": (WRAPPERS["slots_dtype, int8"], {}),
    "on_rows": (WRAPPERS["on_rows"], {}),
    "caught_up": (WRAPPERS["caught_up"], {}),
    "adam, one round": (OPTIMIZERS["adam"], {"capacity_factor": None}),
    "transport=bfloat16": (lazy_adam, {"transport": jnp.bfloat16}),
    "transport=float16": (lazy_adam, {"transport": jnp.float16}),
    "bags": (lazy_adam, {"loss": loss_of_bags, "ids": (IDS // 4, 4)}),
    "two axes": (lazy_adam, {"axes": {"data": 2, "shard": 2}}),
    "lines": (lazy_adam, {"in_lines": True}),
    "native": (lazy_adam, {"native": True}),
}
LARGE = ("v5e:4x4", "v6e:4x4", "h100:8")
# The optimizers of matrices that are divided over devices, and with how many layers.
OF_LAYERS: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "optax.contrib.muon": (lambda: optax.contrib.muon(0.02), (2,)),
    "muon": (lambda: optzoo.muon(0.02), (2,)),
    "muon, owners": (lambda: optzoo.muon(0.02, owners="data"), (2, 12)),
    "muon, owners, exchange_dtype": (
        lambda: optzoo.muon(0.02, owners="data", exchange_dtype="bfloat16"),
        (12,),
    ),
    "soap, owners": (
        lambda: optzoo.soap(3e-3, max_matrix_size=1024, owners="data"),
        (12,),
    ),
    "blocked_shampoo": (lambda: optzoo.blocked_shampoo(1e-3), (2,)),
    "blocked_shampoo, owners": (lambda: optzoo.blocked_shampoo(1e-3, owners="data"), (2, 12)),
}
# Where each device has all parameters.
SLICES = ("v5e:2x2", "v5e:4x4", "v5p:2x2x4", "v6e:4x4", "tpu7x:2x2x2", "h100:8")
DIVIDED = lambda axes: optzoo.divide_states(optzoo.adam(1e-3), axes)
DATA_PARALLEL: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
    "adam": (lambda _: optzoo.adam(1e-3), {}),
    "adam, divide_states": (DIVIDED, {}),
    "adam, divide_states, mesh=": (DIVIDED, {"is_mapped": True}),
    "adam, divide_states of two axes, mesh=": (DIVIDED, {"is_mapped": True, "axes": 2}),
}
# A table that is sharded over many devices, beside a network.
MANY = ("v5e:4x4", "v5e:8x8", "v6e:8x8", "h100:8")
EXCHANGES = {
    "small": {"is_large": False},
    "large": {"is_large": True},
    "large, two parts": {"is_large": True, "parts": 2},
}
PERIODIC = ("agn", "diloco", "elastic_average", "model_average")


def _all() -> Iterator[Case]:
    for name, tx in OPTIMIZERS.items():
        for width in WIDTHS if name not in WITHOUT_ROWS else ():
            make = lambda device, tx=tx, width=width: rows(tx(), width, device)
            yield from _on(ONE, f"rows/{name}/{width}", make)
    for name in SOME:
        for width in (width for width in WIDTHS if width % 128):
            make = lambda device, name=name, width=width: rows(
                OPTIMIZERS[name](), width, device, in_lines=True
            )
            yield from _on(ONE, f"lines/{name}/{width}", make)
    for name in sorted(FEW_ROWS - SOME):
        make = lambda device, name=name: rows(OPTIMIZERS[name](), 16, device, in_lines=True)
        yield from _on(ONE[:1], f"lines/{name}/16", make)
    for name in sorted(FEW_ROWS):
        make = lambda device, name=name: rows(OPTIMIZERS[name](), 192, device, size=3 * ROWS)
        yield from _on(ONE[:1], f"large/{name}/192", make)
    for name, width in NATIVE:
        make = lambda device, name=name, width=width: rows(
            OPTIMIZERS[name](), width, device, native=True
        )
        yield from _on(ONE[:2], f"native/{name}/{width}", make)
    for name, tx in OPTIMIZERS.items():
        yield from _on(ONE, f"dense/{name}", lambda device, tx=tx: dense(tx(), device))
    in_8_bits = lambda device: dense(optzoo.slots_dtype(optzoo.adam(1e-3), "int8"), device)
    yield from _on(ONE, "dense/adam, slots_dtype, int8", in_8_bits)
    make = lambda device: rows(WRAPPERS["slots_dtype, int8"](), 64, device, in_lines=True)
    yield from _on(ONE, "lines/slots_dtype, int8/64", make)
    for width in FEW_WIDTHS:
        make = lambda device, width=width: rows(IN_24_BITS(), width, device, dtype=jnp.bfloat16)
        yield from _on(ONE, f"wrapper/master_weights, int8/{width}", make)
        for name, tx in WRAPPERS.items():
            make = lambda device, tx=tx, width=width: rows(tx(), width, device)
            yield from _on(ONE, f"wrapper/{name}/{width}", make)
        for name, tx in LOOPS.items():
            make = lambda device, tx=tx, width=width: loop(tx(), width, device)
            yield from _on(ONE, f"loop/{name}/{width}", make)
        for name, (tx, options) in SHARDED.items():
            make = lambda device, tx=tx, width=width, options=options: sharded(
                tx(), width, device, **options
            )
            yield from _on(FOUR, f"sharded/{name}/{width}", make)
        make = lambda device, width=width: own_step(optzoo.gradient_descent(0.1), width, device)
        yield from _on(FOUR, f"sharded/own step/{width}", make)
    for name, (tx, numbers) in OF_LAYERS.items():
        for number in numbers:
            make = lambda device, tx=tx, number=number: layers(tx(), number, device)
            yield from _on(LARGE, f"layers/{name}/{number}", make)
    for name, (tx, options) in DATA_PARALLEL.items():
        make = lambda device, tx=tx, options=options: data_parallel(tx, device, **options)
        yield from _on(SLICES, f"data_parallel/{name}", make)
    for name, options in EXCHANGES.items():
        make = functools.partial(exchange, **options)
        yield from _on(MANY, f"exchange/{name}", make)
    for method in optzoo.catalog.DISTRIBUTED:
        for form in ("step", "quiet", "round") if method in PERIODIC else ("step",):
            make = functools.partial(replicas, method, form=form)
            yield from _on(("v5e:2x2", "h100:4"), f"replicas/{method}, {form}", make)


def _on(devices: tuple[str, ...], name: str, make: Any) -> Iterator[Case]:
    return (Case(name, device, make) for device in devices)


CASES = {case.key: case for case in _all()}


def sample() -> dict[str, Case]:
    """Each optimizer, width and device at least once, and some of each other kind."""
    with_rows = [name for name in OPTIMIZERS if name not in WITHOUT_ROWS]
    # Eight widths and three devices: in turns all pairs of them.
    turns = [(WIDTHS[i % len(WIDTHS)], ONE[i % len(ONE)]) for i in range(len(with_rows))]
    chosen = [f"rows/{name}/{w}/{d}" for name, (w, d) in zip(with_rows, turns, strict=True)]
    chosen += [f"dense/{name}/h100" for name in sorted(WITHOUT_ROWS)]
    chosen += [key for key in CASES if not key.startswith(("rows", "dense"))][::7]
    return {key: CASES[key] for key in chosen}
