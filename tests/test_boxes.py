"""Parameters in boxes that name their axes, as those of haliax, Flax and Equinox."""

import dataclasses
import re
import warnings
from typing import Any

import chex
import equinox as eqx
import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optzoo
from optzoo.core.paths import leaves_with_path, map_with_path, path_name, resolve_mask
from optzoo.growing.reset_rows import reset_rows
from optzoo.growing.resize_table import resize_table
from optzoo.interop.tf1 import tf1_variables
from optzoo.interop.tf1.load import load_tf1_state
from optzoo.testing import samples

from .test_meshes import ALL

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # haliax uses names that Equinox will drop
    import haliax as hax


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Named:
    """A box that a user wrote, of a class that optzoo does not know."""

    array: Any
    axes: tuple[str, ...] = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_pytree_node_class
class Keyless:
    """The same, without keys, as pytrees were registered once."""

    def __init__(self, array, axes):
        self.array, self.axes = array, axes

    def tree_flatten(self):
        return (self.array,), self.axes

    @classmethod
    def tree_unflatten(cls, axes, children):
        return cls(*children, axes)


class Embedding(eqx.Module):
    """A module with one array."""

    weight: jax.Array
    names: tuple[str, ...] = eqx.field(static=True)


def haliax_array(x, names):
    return hax.named(x, tuple(map(hax.Axis, names, x.shape)))


# For each class: a box of an array and the names of its axes; these names in a box, or None.
BOXES = {
    "haliax": (haliax_array, lambda box: tuple(axis.name for axis in box.axes)),
    "linen": (nn.Partitioned, lambda box: box.names),
    "linen, logical": (nn.LogicallyPartitioned, lambda box: box.names),
    "nnx": (
        lambda x, names: nnx.Param(x, out_sharding=names, eager_sharding=False),
        lambda box: box.out_sharding,
    ),
    "nnx without names": (lambda x, _: nnx.Param(x), None),
    "equinox": (Embedding, None),
    "own": (Named, None),
    "own without keys": (Keyless, None),
}
NAMES = {"table": ("vocab", "embed"), "kernel": ("embed", "out"), "bias": ("out",)}


def arrays():
    x = {"table": (8, 4), "kernel": (4, 4), "bias": (4,)}
    return {
        k: jnp.cos(jnp.arange(1.0, 1 + np.prod(shape))).reshape(shape) for k, shape in x.items()
    }


def boxed(make):
    return {name: make(x, NAMES[name]) for name, x in arrays().items()}


def program(f, *args):
    """The program of a function of trees, whatever their classes."""
    leaves, treedef = jax.tree.flatten(args)
    jaxpr = jax.make_jaxpr(lambda *xs: jax.tree.leaves(f(*treedef.unflatten(xs))))(*leaves)
    return re.sub(" at 0x[0-9a-f]+", "", str(jaxpr))


# Those that hide parameters from each other.
IN_PARTS = {
    "groups": optzoo.param_groups({"table": ALL["row_wise_adagrad"], ".*": ALL["adam"]}),
    "fragments": optzoo.diloco(ALL["adam"], axis_name=None, fragments=2),
}


@pytest.mark.parametrize("kind", BOXES)
@pytest.mark.parametrize("name", ALL | IN_PARTS)
def test_a_box_holds_an_array_with_its_axes(name, kind):
    """All else is without one; and the programs are those of plain arrays."""
    make, names_in = BOXES[kind]
    tx, params, plain = (ALL | IN_PARTS)[name], boxed(make), arrays()
    is_box = lambda x: isinstance(x, type(params["table"]))
    state, plain_state = tx.init(params), tx.init(plain)
    chex.assert_trees_all_equal(*map(jax.tree.leaves, (state, plain_state)))
    for path, slot in jax.tree_util.tree_leaves_with_path(state, is_leaf=is_box):
        if not is_box(slot):
            continue
        if name in IN_PARTS and kind in ("equinox", "own") and not jax.tree.leaves(slot):
            continue  # the name needs the box
        [array] = jax.tree.leaves(slot)
        [owner] = [k for k in NAMES if jax.tree_util.DictKey(k) in path]
        assert array.ndim == plain[owner].ndim or names_in or kind == "nnx without names", path
        if names_in:
            expected = {0: (), 1: NAMES[owner][:1], plain[owner].ndim: NAMES[owner]}
            wanted = expected.get(array.ndim, (None, *NAMES[owner]))
            if jax.tree_util.GetAttrKey("vc") in path:  # of Adafactor: a number for each column
                wanted = NAMES[owner][1:]
            assert tuple(names_in(slot)) == wanted, path
        elif array.shape != plain[owner].shape:
            assert kind == "nnx without names", path
    if "random" in name and kind in ("equinox", "own"):  # bits by the names, which end in weight
        return
    assert program(tx.update, params, state, params) == program(
        tx.update, plain, plain_state, plain
    )
    updates, new = jax.eval_shape(tx.update, params, state, params)
    chex.assert_trees_all_equal_structs(updates, params)
    chex.assert_trees_all_equal_structs(new, state)


@pytest.mark.filterwarnings("ignore:'sharding:DeprecationWarning")  # Flax renames its keys
@pytest.mark.parametrize("key", ["sharding_names", "sharding", "optimizer_sharding"])
def test_nnx_has_other_keys_for_the_same_axes(key):
    """Beside the one of today, as in layers of MaxText that are scanned, or in its place."""
    tx, names = optzoo.ggt(0.1, window=3), ("embed", "out")
    for beside in ({"out_sharding": names}, {}):
        model = nnx.Dict(kernel=nnx.Param(jnp.ones((4, 2))))
        model.kernel = model.kernel.replace(eager_sharding=False, **beside, **{key: names})
        slot = nnx.Optimizer(model, tx, wrt=nnx.Param).opt_state[0].slots.grad_buffer["kernel"]
        found = {v for k, v in slot.get_metadata().items() if "sharding" in k and v}
        assert (slot.shape, found) == ((3, 4, 2), {(None, *names)})


@pytest.mark.parametrize("kind", BOXES)
def test_states_with_boxes_of_hidden_parameters(kind):
    """As optax.partition makes them, and as param_groups did before December 2026."""
    tx, params = IN_PARTS["groups"], boxed(BOXES[kind][0])
    label = lambda path, _: "group_0" if path_name(path).startswith("table") else "group_1"
    txs = {"group_0": ALL["row_wise_adagrad"], "group_1": ALL["adam"]}
    old = optax.partition(txs, lambda tree: map_with_path(label, tree))
    _, saved = old.update(params, old.init(params), params)
    _, want = tx.update(params, tx.init(params), params)
    got = optzoo.state.state_like(saved, jax.eval_shape(tx.init, params))
    chex.assert_trees_all_equal_structs(got, want)
    chex.assert_trees_all_equal(*map(jax.tree.leaves, (got, want)))


@pytest.mark.parametrize("kind", BOXES)
def test_rows_in_boxes(kind):
    """Steps with row-sparse gradients of tables in boxes are those of plain tables."""
    make, _ = BOXES[kind]
    tx = optzoo.slots_dtype(optzoo.row_wise_adagrad(0.1), "bfloat16")
    rows = optzoo.SparseRows(jnp.array([1, 3, 1]), jnp.ones((3, 4)), 8)
    got, want = boxed(make), arrays()
    states = [tx.init(got), tx.init(want)]
    for _ in range(2):
        grads = {**want, "table": rows}
        in_boxes = jax.tree.unflatten(jax.tree.structure(got), [want["bias"], want["kernel"], rows])
        got, states[0] = jax.jit(samples.step_of(tx))(got, states[0], in_boxes)
        want, states[1] = jax.jit(samples.step_of(tx))(want, states[1], grads)
    chex.assert_trees_all_equal(*map(jax.tree.leaves, (got, want)))
    chex.assert_trees_all_equal(*map(jax.tree.leaves, states))


@pytest.mark.parametrize("kind", BOXES)
def test_names_are_those_of_the_parameters(kind):
    """Patterns match the names of parameters, whatever their boxes."""
    params = {"layer": boxed(BOXES[kind][0]), "head": {"bias": jnp.ones(2)}}
    end = {"equinox": "/weight", "own": "/array"}.get(kind, "")
    of_layer = [f"layer/{name}{end}" for name in sorted(NAMES)]
    names = [path_name(path) for path, _ in leaves_with_path(params)]
    assert sorted(names) == sorted(["head/bias", *of_layer])

    def marked(pattern):
        marks = resolve_mask(pattern, params)
        return sorted(path_name(path) for path, mark in leaves_with_path(marks) if mark)

    assert marked("layer/table") == marked("table") == [f"layer/table{end}"]
    assert marked("layer/.*") == of_layer
    if end:
        assert marked(end[1:]) == of_layer
        assert marked(f"layer/table{end}") == [f"layer/table{end}"]


@jax.tree_util.register_pytree_node_class
class Pair:
    """Two arrays without keys."""

    def __init__(self, *arrays):
        self.arrays = arrays

    def tree_flatten(self):
        return self.arrays, None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


@pytest.mark.parametrize(
    ("tree", "names"),
    [
        ({"a": {"b": jnp.ones(2)}}, ["a/b"]),
        ({"a": [jnp.ones(2)], "b": (jnp.ones(2),)}, ["a/0", "b/0"]),
        (flax.core.FrozenDict({"a": {"b": jnp.ones(2)}}), ["a/b"]),
        (nnx.State({"a": {"b": nnx.Param(jnp.ones(2))}}), ["a/b"]),
        ({"a": Pair(jnp.ones(2), jnp.ones(2)), "b": Pair(jnp.ones(2))}, ["a/0", "a/1", "b"]),
        ({"a": eqx.nn.Linear(2, 3, use_bias=False, key=jax.random.key(0))}, ["a/weight"]),
        ({"a": eqx.nn.LayerNorm(2), "b": None}, ["a/weight", "a/bias"]),
        ({"a": eqx.nn.Embedding(3, 2, key=jax.random.key(0))}, ["a/weight"]),
    ],
    ids=["dicts", "lists", "frozen", "state", "pairs", "linear", "norm", "embedding"],
)
def test_containers_are_no_boxes(tree, names):
    """One entry does not make a dict or a list a box; nor a module with other fields."""
    tree = eqx.filter(tree, eqx.is_array)
    assert [path_name(path) for path, _ in leaves_with_path(tree)] == names
    state = optzoo.row_wise_rmsprop(0.1).init(jax.tree.map(lambda x: x[:, None], tree))
    of_slots = optzoo.get_slot(state, "rms")
    is_module = lambda x: isinstance(x, eqx.nn.Linear)
    for x in filter(is_module, jax.tree.leaves(of_slots, is_leaf=is_module)):
        assert x.weight.shape == (3,)
    marks = lambda pattern: jax.tree.leaves(resolve_mask(pattern, tree, "mask"))
    if names[0] == "a/b":
        with pytest.raises(ValueError, match="no parameter matches"):
            marks("a")


def on_devices(params):
    """Each parameter divided along its axis ``embed``."""
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    axis = lambda name: "d" if name == "embed" else None
    place = lambda name: NamedSharding(mesh, P(*map(axis, NAMES[name])))
    return {
        name: jax.tree.map(lambda x, name=name: jax.device_put(x, place(name)), x)
        for name, x in params.items()
    }


@pytest.mark.parametrize("kind", BOXES)
@pytest.mark.parametrize("name", ALL)
def test_the_state_is_divided_as_without_boxes(name, kind):
    tx, params, plain = ALL[name], on_devices(boxed(BOXES[kind][0])), on_devices(arrays())
    got, want = optzoo.state_sharding(tx, params), optzoo.state_sharding(tx, plain)
    assert jax.tree.leaves(got) == jax.tree.leaves(want)
    chex.assert_trees_all_equal_structs(got, tx.init(params))


@pytest.mark.parametrize("kind", BOXES)
@pytest.mark.parametrize(
    "name", ["adam", "partial_row_wise_adam", "soap", "int8", "stacked", "ggt"]
)
def test_a_run_goes_on_after_its_checkpoint(name, kind, tmp_path):
    """The state of a divided model is restored in the shapes and shardings of ``init``."""
    tx, params = ALL[name], on_devices(boxed(BOXES[kind][0]))
    if name == "stacked":
        params = boxed(BOXES[kind][0])
    step = jax.jit(samples.step_of(tx))
    params, state = step(params, tx.init(params), params)
    with ocp.StandardCheckpointer() as checkpoints:
        checkpoints.save(tmp_path / "step", {"params": params, "state": state})
        checkpoints.wait_until_finished()
        like = lambda a, place: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place)
        shapes = jax.eval_shape(tx.init, params)
        if name != "stacked":
            shapes = jax.tree.map(like, shapes, optzoo.state_sharding(tx, params))
        found = checkpoints.restore(tmp_path / "step", {"params": params, "state": shapes})
    chex.assert_trees_all_equal_structs(found, {"params": params, "state": state})
    got, want = step(found["params"], found["state"], params), step(params, state, params)
    chex.assert_trees_all_equal(*map(jax.tree.leaves, (got, want)))


TABLES = {
    "row_wise_adagrad": optzoo.row_wise_adagrad(0.1),
    "rmsprop": optzoo.rmsprop(0.1),
    "int8": optzoo.slots_dtype(optzoo.lazy_adam(0.1), "int8"),
    "packed": optzoo.slots_dtype(optzoo.lazy_adam(0.1), "bfloat16", packed=True),
    "caught_up": optzoo.caught_up(optzoo.adam(0.1), mask="table"),
    "moving_average": optzoo.moving_average(optzoo.lazy_adam(0.1), 0.9),
    "accumulate": optzoo.accumulate(optzoo.row_wise_adagrad(0.1), 2),
}


def both(kind, tx):
    """Parameters and states, in boxes and without, after a step."""
    for params in (boxed(BOXES[kind][0]), arrays()):
        yield samples.step(tx, params, params, tx.init(params))


def same(got, want):
    chex.assert_trees_all_equal(*map(jax.tree.leaves, (got, want)))


@pytest.mark.parametrize("kind", BOXES)
@pytest.mark.parametrize("name", TABLES)
def test_what_reads_states(name, kind):
    """Averages, growing and resetting tables, deferred rows, and the words about a state."""
    tx = TABLES[name]
    table = "table" + {"equinox": "/weight", "own": "/array"}.get(kind, "")
    runs = list(both(kind, tx))
    for params, state in runs:
        chex.assert_trees_all_equal_structs(state, tx.init(params))
    same(*(optzoo.eval_params(*run) if name != "caught_up" else run for run in runs))
    names = {0: table, 1: "table"}
    rows = jnp.array([2, 5])
    same(*(reset_rows(*run, {names[i]: rows}, tx=tx) for i, run in enumerate(runs)))
    longer = [resize_table(*run, {names[i]: 11}, tx=tx) for i, run in enumerate(runs)]
    same(*longer)
    if kind == "haliax":  # its boxes state the sizes, too
        [box] = [x for x in longer[0][0].values() if x.array.shape[0] == 11]
        assert box.axes == (hax.Axis("vocab", 11), hax.Axis("embed", 4))
        chex.assert_trees_all_equal_structs(tx.init(longer[0][0]), longer[0][1])
    if name == "caught_up":
        same(*(optzoo.rows.catch_up(*run) for run in runs))
    got, want = (optzoo.describe(tx, params) for params, _ in runs)
    assert [(slot.slot, *slot[2:]) for slot in got.slots] == [
        (slot.slot, *slot[2:]) for slot in want.slots
    ]


@pytest.mark.parametrize("kind", BOXES)
def test_files_of_tensorflow_1(kind):
    """The same variables, and the same state again."""
    tx = optzoo.rmsprop(0.1, momentum=0.9)
    names = lambda name: name.removesuffix("/weight").removesuffix("/array")
    (params, state), (plain, of_plain) = both(kind, tx)
    got = tf1_variables(params, state, names, optimizer_name="RMSProp")
    want = tf1_variables(plain, of_plain, optimizer_name="RMSProp")
    assert got.keys() == want.keys()
    chex.assert_trees_all_equal(got, want)
    loaded = load_tf1_state(tx, params, want, names)
    chex.assert_trees_all_equal_structs(loaded, (params, state))
    same(loaded, (plain, of_plain))
