"""The record as tables of docs/accelerators.md and benchmarks/accelerator_facts.md."""

import functools
from collections.abc import Callable, Iterable

import optzoo

from . import cases, record
from .promises import KERNEL

V5E, H100 = "v5e:2x2", "h100"
DENSE = f"rows/{cases.ADAM}"
SHORT = ("lazy_adam", "row_wise_adagrad", "gradient_descent", "adam", cases.ADAM)
READ = functools.cache(lambda: record.read(record.FACTS))


def mega(key: str, name: str) -> str:
    """A number of the record in millions; nothing where there is none."""
    facts = READ()[key]
    return in_millions(facts[name]) if name in facts else ""


def in_millions(x: int) -> str:
    """To three digits, or three places."""
    if x >= 99_950_000:
        return f"{x / 1e6:,.0f}"
    return f"{x / 1e6:#.3g}" if x >= 100_000 else f"{x / 1e6:.3f}" if x else "0"


def table(*lines: Iterable[str]) -> str:
    head, *rest = ([*line] for line in lines)
    shown = "".join(f"| {' | '.join(line)} |\n".replace("  ", " ") for line in (head, *rest))
    first, after = shown.split("\n", 1)
    return f"{first}\n|{'---|' * len(head)}\n{after}"


def by_width(device: str, name: str) -> str:
    """One number of each optimizer at each width."""
    policy = lambda tx: optzoo.CATALOG[tx].rows if tx in optzoo.CATALOG else "dense"
    of = lambda tx: [mega(f"rows/{tx}/{width}/{device}", name) for width in cases.WIDTHS]
    names = [tx for tx in cases.OPTIMIZERS if tx not in cases.WITHOUT_ROWS]
    lines = ([f"`{tx}`", policy(tx), *of(tx)] for tx in names)
    return table(["optimizer", "rows", *map(str, cases.WIDTHS)], *lines)


def some() -> str:
    """Some optimizers at two widths."""
    columns = (V5E, "temporaries"), (V5E, "bytes"), (V5E, "cycles"), (H100, "temporaries")
    of = lambda tx, width: [mega(f"rows/{tx}/{width}/{device}", name) for device, name in columns]
    head = ["optimizer", "width", "v5e: temporaries", "read and written", "cycles"]
    lines = ([f"`{tx}`", str(w), *of(tx, w)] for tx in SHORT for w in cases.FEW_WIDTHS)
    return table([*head, "H100: temporaries"], *lines)


def of_layouts() -> str:
    """One optimizer at each width: by rows, in lines, and what it is compared with."""

    def line(width):
        of = lambda case, *names: [
            mega(key, n) if (key := f"{case}/{width}/{V5E}") in READ() else "" for n in names
        ]
        rows = of("rows/lazy_adam", "arguments", "bytes", "cycles")
        lines = of("lines/lazy_adam", "arguments", "bytes", "cycles")
        return [str(width), *rows, *lines, *of(DENSE, "cycles")]

    head = ["width", "by rows: memory", "read and written", "cycles"]
    head += ["in lines: memory", "read and written", "cycles", "`optax.adam`: cycles"]
    return table(head, *map(line, cases.WIDTHS))


def of_large() -> str:
    """Steps on a large table, by all optimizers that move few rows."""
    what = "arguments", "temporaries", "bytes", "cycles"
    of = lambda name: [mega(f"large/{name}/192/{V5E}", column) for column in what]
    head = ["optimizer", "memory", "temporaries", "read and written", "cycles"]
    return table(head, *([f"`{name}`", *of(name)] for name in sorted(cases.FEW_ROWS)))


def of_kernels() -> str:
    """Bytes of optimizers with a kernel for their rows, and of the same without."""
    names = [name for name, width in cases.NATIVE if width == 64]
    has_kernel = lambda name: KERNEL in READ()[f"native/{name}/64/{V5E}"].get("calls", ())
    columns = lambda name: [mega(f"{kind}/{name}/64/{V5E}", "bytes") for kind in ("rows", "native")]
    lines = [[f"`{name}`", *columns(name)] for name in sorted(names) if has_kernel(name)]
    return table(["optimizer", "by XLA", "with a kernel"], *lines)


def of_arrays() -> str:
    """Updates of arrays with dense gradients."""
    key = lambda tx, device: f"dense/{tx}/{device}"
    of = lambda tx: [
        *(mega(key(tx, V5E), name) for name in ("temporaries", "bytes", "cycles")),
        mega(key(tx, H100), "temporaries"),
    ]
    lines = ([f"`{tx}`", *of(tx)] for tx in cases.OPTIMIZERS if key(tx, V5E) in READ())
    head = ["optimizer", "v5e: temporaries", "read and written", "cycles", "H100: temporaries"]
    return table(head, *lines)


def of_steps(kind: str) -> str:
    """Wrappers, loops and sharded tables at two widths; or replicas."""
    gpu = "h100" if kind in ("wrapper", "loop") else "h100:4"
    names = [c.name for c in cases.CASES.values() if c.device == V5E and c.name.startswith(kind)]
    of = lambda name: [
        *(mega(f"{name}/{V5E}", what) for what in ("temporaries", "bytes", "cycles")),
        mega(f"{name}/{gpu}", "temporaries"),
        _sent(f"{name}/{V5E}"),
    ]
    head = ["step", "v5e: temporaries", "read and written", "cycles", "H100: temporaries", "sent"]
    has_sent = gpu == "h100:4"
    lines = ([_in_words(name), *of(name)] for name in names)
    return table(*(line if has_sent else line[:-1] for line in [head, *lines]))


def of_layers() -> str:
    """Updates of the matrices of some layers, divided over all devices."""
    many, gpus = "v5e:4x4", "h100:8"
    names = [c.name for c in cases.CASES.values() if c.device == many and "layers/" in c.name]
    of = lambda name: [
        *(mega(f"{name}/{many}", what) for what in ("temporaries", "bytes", "cycles")),
        _sent(f"{name}/{many}"),
        mega(f"{name}/{gpus}", "temporaries"),
        _sent(f"{name}/{gpus}"),
    ]
    lines = ([_in_words(name), *of(name)] for name in names)
    head = ["optimizer, layers", "v5e: temporaries", "read and written", "cycles", "sent"]
    return table([*head, "H100: temporaries", "sent"], *lines)


def of_exchanges() -> str:
    """A recommender whose table is sharded over many devices."""

    def line(name, device):
        facts = READ()[f"exchange/{name}/{device}"]
        shown = (
            f"{dtype} {in_millions(size)}" + ("" if cycles is None else f": {cycles / 1e3:,.0f}")
            for dtype, size, cycles in facts["exchanges"]
        )
        has_cycles = facts["schedule"] > 0
        schedule = f"{facts['schedule'] / 1e3:,.0f}" if has_cycles else ""
        temporaries = in_millions(facts["temporaries"])
        return [f"`{device}`", name, schedule, temporaries, "; ".join(shown)]

    lines = [line(name, device) for device in cases.MANY for name in cases.EXCHANGES]
    head = ["devices", "network", "thousand cycles", "temporaries"]
    return table([*head, "exchanges of rows: MB, thousand cycles beside"], *lines)


def of_data_parallel() -> str:
    """A step of eight dense layers, whose states are whole and divided."""
    of = lambda key: [mega(key, "arguments"), mega(key, "temporaries"), _sent(key)]
    lines = [
        [f"`{device}`", name.removeprefix("adam, "), *of(f"data_parallel/{name}/{device}")]
        for device in cases.SLICES
        for name in cases.DATA_PARALLEL
    ]
    return table(["devices", "state", "arguments", "temporaries", "sent"], *lines)


def _in_words(name: str) -> str:
    """``sharded/lazy_adam/64`` as ``lazy_adam, 64``."""
    return ", ".join(name.split("/")[1:])


def _sent(key: str) -> str:
    """The collectives of a step, with what they send in millions of bytes if it is much."""
    sent = READ()[key].get("sent", {})
    size = lambda nbytes: f", {in_millions(nbytes)}" if nbytes >= 1000 else ""
    return "; ".join(f"{n} {kind}{size(nbytes)}" for kind, (n, nbytes) in sent.items())


TABLES: dict[str, Callable[[], str]] = {
    "facts, some": some,
    "facts, layouts": of_layouts,
    "facts, large": of_large,
    "facts, kernels": of_kernels,
    "facts, v5e temporaries": lambda: by_width(V5E, "temporaries"),
    "facts, v5e bytes": lambda: by_width(V5E, "bytes"),
    "facts, v5e cycles": lambda: by_width(V5E, "cycles"),
    "facts, H100 temporaries": lambda: by_width(H100, "temporaries"),
    "facts, arrays": of_arrays,
    "facts, wrappers": lambda: of_steps("wrapper"),
    "facts, loops": lambda: of_steps("loop"),
    "facts, sharded": lambda: of_steps("sharded"),
    "facts, replicas": lambda: of_steps("replicas"),
    "facts, layers": of_layers,
    "facts, exchanges": of_exchanges,
    "facts, data-parallel": of_data_parallel,
}
