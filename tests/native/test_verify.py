"""Programs that a faulty pass of the native engine would leave behind are found, and not run."""

import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optzoo
from optzoo.core.marks import marking
from optzoo.core.rows import apply_not_none
from optzoo.jaxprs.graph import Value
from optzoo.native import branches as branches_module
from optzoo.native import division as division_module
from optzoo.native import groups as groups_module
from optzoo.native.calls import Call
from optzoo.native.division import Division
from optzoo.native.groups import LeafGroup, read_program
from optzoo.native.rows_groups import RowsGroup
from optzoo.native.verify import Unsound, verify

PARAMS = {"table": jnp.ones((6, 2)), "w": jnp.ones((3, 8)), "v": jnp.ones((2, 12))}
GRADS = {
    "table": optzoo.SparseRows(jnp.array([4, 1, 4]), jnp.ones((3, 2)), 6),
    "w": jnp.full((3, 8), 2.0),
    "v": jnp.full((2, 12), 3.0),
}
TX = optzoo.lazy_adam(0.1)


def program_of(tx=TX, params=PARAMS, grads=GRADS):
    """The program of a step, and by its arrays those that replace them."""
    leaves, treedef = jax.tree.flatten((params, tx.init(params)))

    def step(*leaves):
        params, state = treedef.unflatten(leaves)
        updates, state = tx.update(grads, state, params)
        return jax.tree.leaves((apply_not_none(params, updates), state))

    with marking():
        closed = jax.make_jaxpr(step)(*leaves)
    program = read_program(closed.jaxpr)
    before = program.inputs[len(closed.consts) :]
    return program, dict(zip(before, program.results, strict=True)), before


@pytest.fixture
def divided():
    """A division that is sound; what it is made of may be changed."""
    program, kept, before = program_of()
    nodes = Division(program, kept, before).nodes
    check = lambda: verify(nodes, program.inputs, program.results, "a test")
    check()
    return nodes, check


def call_of(nodes, kind):
    return next(n for n in nodes if isinstance(n, Call) and type(n.parts[0]) is kind)


def without(program):
    """An operation that others need is lost."""
    del program.operations[len(program.operations) // 2]


def made_late(program):
    program.operations.reverse()


def made_twice(program):
    program.operations.append(program.operations[-1])


def of_another_dtype(program):
    op = next(op for op in program.operations if op.ins and op.ins[0].dtype == "float32")
    op.ins = [Value(jax.ShapeDtypeStruct(op.ins[0].shape, jnp.bfloat16), literal=0.0), *op.ins[1:]]


def of_another_shape(program):
    old = next(v for v in program.inputs if v.shape == (3, 8))
    new = next(v for v in program.inputs if v.shape == (2, 12))
    for op in program.operations:
        op.ins = [new if v is old else v for v in op.ins]


def a_result_that_nothing_makes(program):
    program.results = [*program.results, Value(program.results[0].aval)]


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (without, "before it is computed"),
        (made_late, "before it is computed"),
        (made_twice, "is computed again"),
        (of_another_dtype, "bfloat16"),
        (of_another_shape, r"in place of \[\(\(3, 8\)"),
        (a_result_that_nothing_makes, "read by the end before it is computed"),
    ],
)
def test_programs(fault, error):
    program, _, _ = program_of()
    verify(program.operations, program.inputs, program.results, "a test")
    fault(program)
    with pytest.raises(Unsound, match=error):
        verify(program.operations, program.inputs, program.results, "a test")


def an_input_less(call):
    part = call.parts[0]
    del part.ins[-1]


def memory_of_another_shape(call):
    """An output in the memory of an input that is shorter."""
    part = call.parts[0]
    i = next(iter(part.aliases))
    aval = part.ins[i].aval
    part.ins[i].aval = jax.ShapeDtypeStruct((1, *aval.shape[1:]), aval.dtype)
    for op in part.operations:
        op.eqn = op.eqn.replace(invars=[*map(_as_variable, op.ins)])


def _as_variable(v):
    return types.SimpleNamespace(aval=v.aval)


def two_in_one_memory(call):
    part = call.parts[0]
    [first, second, *_] = part.aliases
    part.aliases[second] = part.aliases[first]


def what_it_does_not_make(call):
    call.parts[0].outs[0] = call.parts[0].ins[-1]


@pytest.mark.parametrize("kind", [RowsGroup, LeafGroup])
@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (an_input_less, "before it is computed"),
        (memory_of_another_shape, "a native call in place has values of"),
        (two_in_one_memory, "reuses the memory of two inputs"),
        (what_it_does_not_make, "returns a value that it does not compute"),
    ],
)
def test_calls(divided, kind, fault, error):
    nodes, check = divided
    fault(call_of(nodes, kind))
    with pytest.raises(Unsound, match=error):
        check()


def test_leaves_of_one_call_have_the_same_operations(divided):
    nodes, check = divided
    call = call_of(nodes, LeafGroup)
    assert len(call.parts) == 2
    part = call.parts[1]
    part.aliases = dict(zip(part.aliases, [*part.aliases.values()][::-1], strict=True))
    with pytest.raises(Unsound, match="leaves of several operations"):
        check()


def test_arrays_of_one_loop_have_one_size(divided):
    """One of them would be read beyond its end."""
    nodes, check = divided
    part = call_of(nodes, LeafGroup).parts[0]
    part.arrays = [*part.arrays, Value(jax.ShapeDtypeStruct((23,), jnp.float32))]
    with pytest.raises(Unsound, match=r"arrays of \[23, 24\] elements are in one loop"):
        check()


def test_groups_of_codes_have_whole_groups():
    params = jnp.ones((8, 256))
    tx = optzoo.slots_dtype(optzoo.adam(0.1), "int8")
    program, kept, before = program_of(tx, params, params)
    nodes = Division(program, kept, before).nodes
    part = next(n.parts[0] for n in nodes if isinstance(n, Call) and n.parts[0].length)
    part.length //= 2
    with pytest.raises(Unsound, match="elements are in one loop"):
        verify(nodes, program.inputs, program.results, "a test")


def test_a_number_has_one_element(divided):
    nodes, check = divided
    part = call_of(nodes, LeafGroup).parts[0]
    part.scalars[:0] = [part.arrays.pop(0)]
    with pytest.raises(Unsound, match="an array is used as a scalar"):
        check()


def lose_an_operation(found):
    """Of a program, or of the groups that were found in it."""
    found_in = found[1] if isinstance(found, tuple) else found
    for group in found_in if isinstance(found_in, list) else [found_in]:
        del group.operations[0]
    return found


@pytest.mark.parametrize(
    ("place", "name", "tx"),
    [
        (groups_module, "read_program", TX),
        (division_module, "divide_branches", TX),
        (division_module, "find_rows", TX),
        (division_module, "find_grouped_leaves", optzoo.row_wise_lamb(0.1)),
        (groups_module, "find_leaves", TX),
        (
            division_module,
            "find_sums",
            optax.chain(optzoo.clip_by_global_norm(1.0), optzoo.adam(0.1)),
        ),
    ],
)
def test_xla_takes_the_place_of_a_faulty_pass(monkeypatch, place, name, tx):
    """One that loses an operation: with a warning; with ``required`` an error."""
    args = PARAMS, tx.init(PARAMS), GRADS
    updates, state = tx.update(GRADS, args[1], PARAMS)
    expected = apply_not_none(PARAMS, updates), state
    found = getattr(place, name)
    monkeypatch.setattr(place, name, lambda *args: lose_an_operation(found(*args)))
    match = f"which is a bug in optzoo: after {name}, a value is read by"
    with pytest.warns(RuntimeWarning, match=match):
        results = optzoo.native_step(tx)(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), results, expected)
    with (
        pytest.warns(RuntimeWarning, match="bug in optzoo"),
        pytest.raises(ValueError, match="native code for it would be wrong"),
    ):
        optzoo.native_step(tx, required=True)(*args)


def test_a_faulty_branch_is_found_around_it(monkeypatch):
    """What is left of a branch that is not sound is not run, either."""
    tx, found = optax.apply_if_finite(optzoo.adam(0.1), 3), branches_module.inlined_branch
    grads = {name: jnp.full(x.shape, 2.0) for name, x in PARAMS.items()}
    args = PARAMS, tx.init(PARAMS), grads
    updates, state = tx.update(grads, args[1], PARAMS)

    def faulty(moved, op, number, *others):
        program, outside = found(moved, op, number, *others)
        if number == 0:  # the one that keeps the parameters; the other one has native calls
            program.results[0] = Value(program.results[0].aval)
        return program, outside

    monkeypatch.setattr(branches_module, "inlined_branch", faulty)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = optzoo.native_step(tx)(*args)
    assert any("after divide_branches, a value is read" in str(w.message) for w in caught)
    expected = apply_not_none(PARAMS, updates), state
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), results, expected)
