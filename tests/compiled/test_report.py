"""What ``compile_report`` says of programs for the CPU; for others: tests/accelerators."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import optzoo
from optzoo.compiled.report import Blocking, Collectives, LargeOperation, Overlap, Placement

pytestmark = pytest.mark.optimized

ROWS, WIDTH = 4096, 8
TABLE = 4 * ROWS * WIDTH  # bytes
report = functools.partial(optzoo.compile_report, device="cpu")
of = lambda *shape, dtype=jnp.float32: jax.ShapeDtypeStruct(shape, dtype)


def loss(params, ids, y):
    return jnp.mean((optzoo.lookup(params["table"], ids) @ params["w"] - y) ** 2)


def report_of(tx, **options):
    params = {"table": of(ROWS, WIDTH), "w": of(WIDTH)}
    batch = of(64, dtype=jnp.int32), of(64)
    step = optzoo.minimize(loss, tx)
    return report(step, params, jax.eval_shape(tx.init, params), *batch, **options)


@pytest.mark.parametrize("kind", [Blocking, Collectives, LargeOperation, Overlap, Placement])
def test_parts_of_a_report_are_values(kind):
    """Equal ones are one in a set, and none can be changed."""
    fields = dict.fromkeys([field.name for field in dataclasses.fields(kind)], 1)
    part = kind(**fields)
    assert {part, kind(**fields)} == {part}
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(part, next(iter(fields)), 2)


def test_a_step_in_place():
    found = report_of(optzoo.lazy_adam(1e-3))
    assert found.num_devices == 1 and found.large == () and found.not_reused == {}
    # The table and two slots, one vector with its slots, the count, two powers and the batch.
    assert found.arguments == 3 * (TABLE + 4 * WIDTH) + 3 * 4 + 2 * 64 * 4
    assert found.reused == found.arguments - 2 * 64 * 4
    assert found.temporaries < TABLE and found.at_least == TABLE
    assert found.estimated_bytes > 0 and found.compile_seconds > 0
    assert str(found).startswith("compiled for cpu, one device, in ")
    assert dataclasses.asdict(found)["collectives"] == ()


def test_estimates_that_are_shown():
    """Those that a compiler makes: not each makes all."""
    found = report(lambda x: x + 1, of(1000))
    shown = {
        "estimated_bytes": (4e6, "4.0 MB read and written"),
        "estimated_flops": (3000.0, "3,000 floating-point operations"),
        "estimated_seconds": (0.5, "5.00e-01 s"),
        "estimated_cycles": (7000, "7,000 cycles"),
    }
    nothing = dict.fromkeys(shown)
    found = dataclasses.replace(found, large=())
    last = lambda **given: str(dataclasses.replace(found, **nothing | given)).splitlines()[-1]
    assert last().strip() == "none"
    for name, (value, words) in shown.items():
        assert last(**{name: value}).strip() == words


def with_many():
    """A report with a dozen of each kind, the largest in the middle."""
    sizes = [10**6 * (n if n < 7 else 30 - n) for n in range(1, 13)]
    return dataclasses.replace(
        report(lambda x: x + 1, of(1000)),
        not_reused={f"lost{size}": size for size in sizes},
        placements=tuple(Placement(0, f"moved{n}", n, n, True, False) for n in sizes),
        large=tuple(LargeOperation("copy", n, False, f"new{n}", ("a.py:1",)) for n in sizes),
        collectives=(Collectives("all-reduce", False, 24, sum(sizes), ("f32",)),),
        blocking=tuple(Blocking("all-reduce", n, ("f32",), f"waits{n}") for n in sizes[:8]),
        overlaps=tuple(Overlap("all-gather", n, 0, (), ("f32",), n) for n in sizes),
    )


def test_ten_of_each_are_shown():
    """Totals first, then the largest ones, those that block before those that do not."""
    found = with_many()
    text, full = str(found), found.full()
    lines = text.splitlines()
    sizes = lambda name, text: [int(n) // 10**6 for n in re.findall(rf"\b{name}(\d+)", text)]
    cycles = lambda text: re.findall(r"all-gather .* (\d+),000,000 cycles", text)
    largest = [*range(23, 17, -1), *range(6, 0, -1)]
    for name in ("lost", "moved", "new"):
        assert (sizes(name, text), sizes(name, full)) == (largest[:10], largest)
    assert sizes("waits", text) == sizes("waits", full) == [23, 22, *largest[6:]]
    assert cycles(text) == ["23", "22"] and list(map(int, cycles(full))) == largest
    totals = [
        "donated and not reused: 12, 144.0 MB",
        "returned in another sharding: 12",
        "new arrays of 0.0 MB or more: 12, 144.0 MB",
        "collectives: 24",
        "  without overlap, outside loops: 8, 66.0 MB",
        "  overlapped: 12, 144.0 MB, 144,000,000 cycles of other operations",
        "donated and not reused:",
    ]
    assert [line for line in lines if line in totals] == totals
    assert lines[-1] == (
        "2 more arguments that are not reused, 2 more arguments in another sharding, 2 more new "
        "arrays, 10 more overlapped collectives: see report.full()"
    )
    assert "report.full()" not in full


def test_an_operation_as_large_as_the_table():
    found = report_of(optzoo.adam(1e-3))
    assert found.temporaries >= TABLE
    assert any("to_dense" in line for line in found.large[0].lines)
    assert found.large[0].lines[0] in str(found)
    assert not found.large[0].in_loop and found.large[0].nbytes == TABLE
    assert report_of(optzoo.adam(1e-3), at_least=2 * TABLE).large == ()


def test_the_smallest_table():
    """Of donated arrays, one of an eighth of the greatest is a table; a smaller one is none."""
    step = jax.jit(lambda tree: [x + 1 for x in tree], donate_argnums=0)
    for size, least in ((999, 8000), (1000, 1000), (1001, 1001)):
        assert report(step, [of(8000), of(size), of(9)]).at_least == 4 * least


def test_the_memory_of_arguments():
    def step(params, ids, unused, *, rate):
        moved = params["w"] - rate
        return {"w": moved, "table": params["table"].at[ids].add(1.0)}, jnp.sum(params["gone"])

    jitted = jax.jit(step, donate_argnames=("params", "unused"))
    params = {"w": jnp.ones(7), "table": of(ROWS, WIDTH), "gone": of(31, 3)}
    found = report(jitted, params, of(5, dtype=jnp.int32), of(100), rate=jnp.float32(2))
    assert found.not_reused == {"params['gone']": 4 * 93, "args[2]": 400}
    assert "donated and not reused: 2" in str(found) and "args[2]" in str(found)
    assert found.reused == TABLE + 4 * 7


def test_a_result_in_the_memory_of_what_it_reads():
    """It is computed as a whole, but no memory of this size is made."""
    step = jax.jit(lambda x, y: (x * 2, y + 1), donate_argnums=(0, 1))
    assert report(step, of(1000), of(1000)).large == ()
    crossed = jax.jit(lambda x, y: (y + 1, x * 2 + jnp.roll(y, 3)), donate_argnums=(0, 1))
    assert report(crossed, of(1000), of(1000)).temporaries > 0
    kept = report(lambda x: x * 2, of(1000))
    assert [(op.nbytes, op.in_loop) for op in kept.large] == [(4000, False)]


def test_operations_in_loops():
    def step(x, y):
        turn = lambda i, x: jnp.sin(x[::-1]) + i
        return jax.lax.fori_loop(0, 5, turn, x), y

    found = report(jax.jit(step, donate_argnums=(0, 1)), of(1000), of(3))
    assert {op.in_loop for op in found.large} == {True}
    assert "in a loop" in str(found)


def test_collectives():
    mesh = Mesh(np.array(optzoo.compiled.devices_of("cpu")[:4]), ("x",))

    @functools.partial(jax.jit, donate_argnums=0)
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=PartitionSpec("x"), out_specs=PartitionSpec("x")
    )
    def step(x):
        mean = lambda i, x: x + jax.lax.pmean(x, "x")
        return jax.lax.fori_loop(0, 3, mean, x) * jax.lax.psum(jnp.sum(x), "x")

    x = jax.ShapeDtypeStruct((64, 2), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("x")))
    found = report(step, x)
    assert found.num_devices == 4 and found.arguments == 4 * 64 * 2 / 4
    shown = {(c.kind, c.in_loop): (c.number, c.nbytes) for c in found.collectives}
    assert shown == {("all-reduce", True): (1, 128), ("all-reduce", False): (1, 4)}
    assert "one of 4 devices" in str(found) and "1 all-reduce" in str(found)


def test_nothing_is_run():
    def step(x):
        jax.debug.callback(lambda: 1 / 0)
        return x + 1

    assert report(step, jnp.ones(3)).results == 12
    tx = optax.adam(1e-3)
    big = {"w": of(2**20, 2**14)}
    update = jax.jit(tx.update, donate_argnums=(0, 1))
    assert report(update, big, jax.eval_shape(tx.init, big)).arguments > 2**37


@pytest.mark.parametrize(
    ("device", "error", "words"),
    [
        ("v9:2x2", ValueError, r"device must be .* got 'v9:2x2'.*v5e: 1x1, 2x2, 2x4, 4x4"),
        ("v5e", ValueError, r"a TPU slice, got 'v5e'"),
        ("gpu", ValueError, "'h100:8'"),
        (3, TypeError, "device must be a string such as 'v5e:4x4', got 3"),
        ("v5e:2x2", ImportError, r"device='v5e:2x2' needs libtpu: pip install 'optzoo\[tpu\]'"),
        ("h100", ImportError, r"needs jax_cuda12_plugin: pip install 'optzoo\[gpu\]'"),
    ],
)
def test_devices_that_are_not_known(device, error, words, monkeypatch):
    from optzoo.compiled import devices

    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: None)
    devices._devices_of.cache_clear()
    with pytest.raises(error, match=words):
        optzoo.compile_report(lambda x: x, jnp.ones(1), device=device)


def test_arguments_on_other_devices(monkeypatch):
    """They would be counted as if they were on one device."""
    from optzoo.compiled import report as module

    here, mesh = jax.devices()[:4], Mesh(np.array(jax.devices()[4:6]), ("x",))
    monkeypatch.setattr(module, "devices_of", lambda name: here)
    x = jax.device_put(jnp.ones(4), NamedSharding(mesh, PartitionSpec("x")))
    words = r"args\[1\]\['w'\] is sharded over devices that are not those of 'cpu': give its shape"
    with pytest.raises(ValueError, match=words):
        report(lambda x, y: x, jnp.ones(1), {"w": x})


def test_steps_that_are_none():
    with pytest.raises(TypeError, match="step must be a function, got 3"):
        report(3)


# Requirements


@functools.cache
def of_eight_devices():
    """Of a parameter that comes back divided, and a state that does not come back as it was."""
    mesh = Mesh(np.array(optzoo.compiled.devices_of("cpu")[:8]), ("x",))
    by = lambda *names: NamedSharding(mesh, PartitionSpec(*names))
    on = lambda spec, *shape: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=spec)

    def step(params, state, batch, *, scale, unused):
        w = jax.lax.with_sharding_constraint(params["w"] + batch.sum(), by("x"))
        large = (state["m"] * scale, state["v"][:4])
        return {"w": w, "b": -params["b"]}, large, batch.mean()

    params = {"w": on(by(), 64, 8), "b": on(by(), 8)}
    state = {"m": on(by("x"), 64, 8), "v": on(by(), 64)}
    jitted = jax.jit(step, donate_argnums=(0, 1))
    return report(jitted, params, state, on(by("x"), 16, 2), scale=on(by()), unused=on(by(), 3))


def test_where_arguments_are():
    found = {p.name: dataclasses.astuple(p) for p in of_eight_devices().placements}
    assert found == {
        "params['b']": (0, "params['b']", 32, 32, True, True),
        "params['w']": (0, "params['w']", 2048, 2048, True, False),
        "state['m']": (1, "state['m']", 2048, 256, True, None),
        "state['v']": (1, "state['v']", 256, 256, True, None),
        "batch": (2, "batch", 128, 16, False, None),
        "scale": ("scale", "scale", 4, 4, False, None),
    }
    text = str(of_eight_devices())
    assert "\nreturned in another sharding: 1\n" in text
    assert "\nreturned in another sharding:\n  params['w']\n" in text


def test_results_of_a_step_of_one_tree():
    step = jax.jit(lambda state, batch: jax.tree.map(lambda x: x + batch.sum(), state))
    found = report(step, {"a": of(8), "b": of(2, 8)}, of(8))
    assert [p.returned for p in found.placements] == [True, True, None]


def test_five_percent_more():
    """Of what is divided by eight, 20 in 100 whole: then a device has 8 * 20 + 80 of 100 parts."""
    found = of_eight_devices()
    [first, *_] = found.placements
    whole = lambda n: dataclasses.replace(first, argument=9, nbytes=n, on_device=n)
    part = dataclasses.replace(first, argument=9, nbytes=8 * 139, on_device=139)
    of = lambda n: dataclasses.replace(found, placements=(part, whole(n)))
    # (139 + n) / (1112 + n) is 1.05 / 8 at n = 8.006...
    assert of(8).require(divided={9: 8})
    with pytest.raises(AssertionError, match="divided"):
        of(9).require(divided={9: 8})


MET = {
    "collectives": {"all-reduce": 64, "all-gather": 0},
    "divided": {2: 8},
    "large": 10,
    "temporaries": 4000,
    "peak": 20_000,
}
UNMET = {
    "donated": (
        {"donated": True},
        "donated: no result reuses the memory of params['w'], 2,048 bytes",
    ),
    "same_shardings": (
        {"same_shardings": True},
        "same_shardings: the result for params['w'] has another sharding",
        "same_shardings: there is no result for state['m']",
    ),
    "divided": (
        {"divided": {1: 8, 2: 8, 0: 1, "scale": 1}},
        "divided: a device has 512 of the 2,304 bytes of argument 1, more than 1/8; "
        "of state['v'] 256 of 256",
    ),
    "collectives": ({"collectives": {}}, "collectives: all-reduce of ", ", none is allowed"),
    "few bytes": (
        {"collectives": {"all-reduce": 3}},
        "collectives: all-reduce of ",
        "bytes, at most 3 are allowed",
    ),
    "large": ({"large": 0}, "large: ", " operations, at most 0 are allowed"),
    "temporaries": ({"temporaries": 0}, "temporaries: ", " bytes, at most 0 are allowed"),
    "peak": ({"peak": 1e3}, "peak: ", "at most 1,000.0 are allowed"),
}


def test_requirements_that_are_met():
    found = of_eight_devices()
    assert found.require(**MET) is found
    assert found.peak == found.arguments + found.results + found.temporaries - found.reused
    assert found.require(peak=found.peak) is found
    with pytest.raises(optzoo.compiled.RequirementError):
        found.require(peak=found.peak - 1)


@pytest.mark.parametrize("name", UNMET)
def test_requirements_that_are_not_met(name):
    given, *words = UNMET[name]
    with pytest.raises(AssertionError, match="the program for 'cpu' is not as required:") as caught:
        of_eight_devices().require(**MET | given)
    assert all(part in str(caught.value) for part in words), str(caught.value)
    [_, *lines] = str(caught.value).splitlines()
    assert all(line.strip().startswith(words[0].partition(":")[0]) for line in lines), lines


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({}, ValueError, "at least one requirement"),
        ({"donated": "yes"}, TypeError, "donated must be"),
        ({"collectives": {"allreduce": 0}}, ValueError, "got 'allreduce'"),
        ({"collectives": {"all-reduce": -1}}, ValueError, "all-reduce.* got -1"),
        ({"divided": {1: 0}}, ValueError, r"divided\[1\] must be"),
        ({"divided": {7: 2}}, ValueError, "divided must name arguments.* got 7"),
        ({"divided": {"unused": 2}}, ValueError, "divided must name arguments.* got 'unused'"),
        ({"peak": "1 GB"}, TypeError, "peak must be"),
        ({"large": -1}, ValueError, "large must be"),
    ],
)
def test_requirements_that_are_refused(given, error, words):
    with pytest.raises(error, match=words):
        of_eight_devices().require(**given)
