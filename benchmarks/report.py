"""Makes the tables of benchmarks/results.md and figures from the stored results.

    .venv/bin/python benchmarks/report.py    writes the figures to results (make bench-full does)

``make docs`` writes the tables to the page.
"""

import functools
import json
import pathlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

RESULTS = pathlib.Path(__file__).with_name("results")
NO_FUSED_KERNEL = (
    "rmsprop", "rmsprop, momentum=None", "rmsprop, momentum=0.9", "adadelta", "nadam", "adamax"
)  # fmt: skip
IN_WORDS = {"resnet50": "ResNet-50", "four": "four leaves", "thousand": "a thousand leaves"}


@functools.cache
def result(name: str) -> Mapping[str, Any]:
    """A stored result."""
    return json.loads((RESULTS / f"{name}.json").read_text())


# Measured ratios, of least times or of medians as ``kind`` requests.


def _dense(kind: str, case: str = "resnet50", by: str = "optax") -> dict[str, float]:
    found = result("dense")["cases"][case]
    ratios = {name: r[f"ratios of {kind}"] for name, r in found.items()}
    return {name: r[by] for name, r in ratios.items() if by in r}


def _worst(ratios: Mapping[str, float]) -> str:
    name = max(ratios, key=lambda name: ratios[name])
    return f"{ratios[name]:.2f} (`{name}`)"


def _rows(kind: str, case: str, ours: str, other: str) -> str:
    found = result("rows")["cases"][case]
    return _number(found[ours][f"{kind} s"] / found[other][f"{kind} s"])


def _growth(kind: str, ours: str) -> str:
    large, small = (result("rows")["cases"][c] for c in ("4M x 32", "100,000 x 32"))
    return _number(large[ours][f"{kind} s"] / small[ours][f"{kind} s"])


def _small(kind: str, case: str, program: str, what: str, by: str = "optax.adam") -> str:
    found = result("small_leaves")["cases"][case][program]
    key = {"compilation": "all s", "run": {"least": "least run s", "median": "run s"}[kind]}[what]
    return _number(found["stacked adam"][key] / found[by][key])


def _half(key: str) -> str:
    [dense] = [v for k, v in result("half_slots").items() if k.startswith("dense")]
    return _number(dense["packed, at random"][key] / dense["optax.adam"][key])


def _replica(kind: str, name: str) -> str:
    return _number(result("replicas")["one"][name][f"{kind} x"])


def _number(x: float) -> str:
    return f"1/{1 / x:.0f}" if x < 0.05 else f"{x:.2f}"


_LAZY, _PACKED = "lazy_adam", "lazy_adam, packed"
# What is measured, its bound, and the measured value.
GOALS: Sequence[tuple[str, str, Callable[[str], str]]] = (
    ("any dense optimizer against optax's, ResNet-50", "1.03", lambda k: _worst(_dense(k))),
    (
        "the same, all but `rmsprop` with its unused momentum slot",
        "1.03",
        lambda k: _worst({n: r for n, r in _dense(k).items() if n != "rmsprop"}),
    ),
    (
        "the same, geometric mean",
        "0.95",
        lambda k: _number(statistics.geometric_mean(_dense(k).values())),
    ),
    *(
        (
            f"`{name}` against torch foreach",
            "0.50",
            lambda k, name=name: _number(_dense(k, by="torch foreach")[name]),
        )
        for name in NO_FUSED_KERNEL
    ),
    ("`lars` against `optax.lars`", "0.60", lambda k: _number(_dense(k)["lars"])),
    *(
        (
            f"`lazy_adam` {how}rows {case}, 4,096 ids, against {other}",
            most,
            lambda k, case=case, name=name, other=other: _rows(k, case, name, other),
        )
        for case, goals in {"1M x 64": ("0.35", "1/40"), "4M x 32": ("0.45", "1/70")}.items()
        for other, most in zip(("torch SparseAdam", "optax.adam, dense"), goals, strict=True)
        for name, how in {_LAZY: "", _PACKED: "with packed slots, "}.items()
    ),
    ("`lazy_adam`, 4M rows against 100k rows", "2.2", lambda k: _growth(k, _LAZY)),
    (
        "`row_wise_adagrad` against `adagrad`, rows 1M x 64",
        "0.25",
        lambda k: _rows(k, "1M x 64", "row_wise_adagrad", "adagrad"),
    ),
    (
        "1,000 leaves of 10 x 10, `stacked`: trace, lower, compile",
        "0.8",
        lambda k: _small(k, "1,000 of 10 x 10", "update_alone", "compilation"),
    ),
    (
        "the same: an update alone",
        "0.5",
        lambda k: _small(k, "1,000 of 10 x 10", "update_alone", "run"),
    ),
    (
        "the same: in a training loop",
        "0.5",
        lambda k: _small(k, "1,000 of 10 x 10", "training", "run"),
    ),
    (
        "100 leaves of 10, `stacked`, an update alone, against torch fused",
        "0.7",
        lambda k: _small(k, "100 of 10", "update_alone", "run", "torch fused"),
    ),
    (
        "Adam with 16-bit slots, packed, stochastic rounding: time",
        "0.65",
        lambda k: _half(f"{k} ms"),
    ),
    ("the same: bytes of state", "0.5", lambda _: _half("state bytes per parameter")),
    *(
        (
            f"one replica, `{name}`, against the inner optimizer",
            "1.05",
            lambda k, name=name: _replica(k, name),
        )
        for name in ("sync_replicas", "elastic_average, local step", "model_average, local step")
    ),
)


def goals_table(goals: Sequence[tuple[str, str, Callable[[str], str]]] = GOALS) -> str:
    """The goals and the measured ratios."""
    lines = ["| what | at most | least times | medians |", "|---|---|---|---|"]
    for what, most, measured in goals:
        lines.append(f"| {what} | {most} | {measured('least')} | {measured('median')} |")
    return "\n".join(lines) + "\n"


def dense_table() -> str:
    """Every optimizer on ResNet-50, least times."""
    peers = ("roof", "optax", "torch foreach", "torch fused")
    lines = ["| | ns per parameter | bytes | " + " | ".join(f"/ {p}" for p in peers) + " |"]
    lines.append("|---" * (3 + len(peers)) + "|")
    size = result("dense")["parameters"]["resnet50"]
    for name, r in result("dense")["cases"]["resnet50"].items():
        ratios = [r["ratios of least"].get(p) for p in peers]
        cells = ["" if x is None else f"{x:.2f}" for x in ratios]
        time = 1e9 * r["least s"]["optzoo"] / size
        lines.append(
            f"| `{name}` | {time:.2f} | {r['bytes per parameter']:.0f} | {' | '.join(cells)} |"
        )
    return "\n".join(lines) + "\n"


def cases_table() -> str:
    """Ratios to optax by case, of least times."""
    cases = result("dense")["cases"]
    lines = ["| | " + " | ".join(IN_WORDS.get(c, c) for c in cases) + " |"]
    lines.append("|---" * (1 + len(cases)) + "|")
    for name in _dense("least"):
        cells = [f"{_dense('least', case)[name]:.2f}" for case in cases]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def compile_table() -> str:
    """Seconds to trace, lower and compile, and bytes of state, of all on ResNet-50."""
    lines = ["| | trace s | lower s | compile s | optax: all s | ours: all s |", "|---" * 6 + "|"]
    keys = ("trace s", "lower s", "compile s")
    for name, r in result("dense")["cases"]["resnet50"].items():
        programs = r["programs"]
        if "optax" in programs:
            ours, theirs = ([programs[who][k] for k in keys] for who in ("optzoo", "optax"))
            cells = [f"{x:.2f}" for x in (*ours, sum(theirs), sum(ours))]
            lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def rows_table() -> str:
    """Milliseconds of steps on embedding tables, with peers."""
    cases = {c: result("rows")["cases"][c] for c in ("1M x 64", "4M x 32")}
    lines = ["| ms, least (median) | " + " | ".join(cases) + " |", "|---" * (1 + len(cases)) + "|"]
    for name in cases["1M x 64"]:
        found = [case.get(name) for case in cases.values()]
        ms = lambda t: f"{1e3 * t['least s']:.2f} ({1e3 * t['median s']:.2f})"
        cells = ["" if times is None else ms(times) for times in found]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def small_table() -> str:
    """Many small leaves: seconds to compile, milliseconds to run."""
    lines = ["| | arrays of state | compilation s | run ms, least (median) |", "|---" * 4 + "|"]
    for case, programs in result("small_leaves")["cases"].items():
        for program, found in programs.items():
            title = {"update_alone": "an update alone", "training": "20 steps of training"}[program]
            lines.append(f"| **{case}, {title}** | | | |")
            for name, r in found.items():
                arrays = r.get("arrays of state", "")
                seconds = f"{r['all s']:.2f}" if "all s" in r else ""
                run = f"{1e3 * r['least run s']:.2f} ({1e3 * r['run s']:.2f})"
                lines.append(f"| {name} | {arrays} | {seconds} | {run} |")
    return "\n".join(lines) + "\n"


_SHARDED = {
    "auto": "`minimize` under plain `jit`",
    "any ids": "`capacity_factor=None`",
    "rounds": "`sharded_minimize`",
}


def sharded_traffic_table() -> str:
    """The bytes that a device sends and stores in a step on tables sharded by rows."""
    found = result("sharded")["traffic"]
    lines = [
        "| | " + " | ".join(f"{n} devices" for n in found) + " |",
        "|---" * (1 + len(found)) + "|",
    ]
    million = lambda x: f"{x / 1e6:.1f}"
    cells = [million(r["has to be sent"]) for r in found.values()]
    lines.append(f"| has to be sent, MB | {' | '.join(cells)} |")
    for key, what in {"sent": "sent, MB", "temporaries": "temporaries, MB"}.items():
        for name, title in _SHARDED.items():
            cells = [million(r[name][key]) for r in found.values()]
            lines.append(f"| {title}: {what} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def sharded_times_table() -> str:
    """Ratios of times of steps on tables sharded by rows."""
    found = result("sharded")
    lines = ["| what | ids | at most | medians |", "|---|---|---|---|"]
    add = lambda *cells: lines.append(f"| {' | '.join(cells)} |")
    goals = {"uniform": "0.45", "zipf 1.2": "0.35"}
    for kind, r in found["processes"].items():
        for name in ("rounds", "any ids"):
            goal = goals[kind] if name == "rounds" else ""
            title = f"2 processes, {_SHARDED[name]} against {_SHARDED['auto']}"
            add(title, kind, goal, f"{r[name]['ratio']:.2f}")
    for kind, r in found["one"].items():
        ratio = f"{r['rounds']['ratio']:.2f}"
        add("1 device, `sharded_minimize` against `minimize`", kind, "1.05", ratio)
    ratio = f"{found['many']['26 tables']['ratio']:.2f}"
    add("4 devices, 26 tables against one with the same rows", "uniform", "1.3", ratio)
    return "\n".join(lines) + "\n"


def sharded_rounds_table() -> str:
    """The rounds that random ids need."""
    found, kinds = result("sharded")["rounds"], list[str]()
    rows = dict[str, dict[str, Any]]()
    for name, r in found.items():
        devices, ids, kind = name.split(", ")
        kinds += [kind] * (kind not in kinds)
        rows.setdefault(f"{devices}, {ids}", {"capacity": r["capacity"]})[kind] = r
    lines = [f"| | capacity | {' | '.join(kinds)} |", "|---" * (2 + len(kinds)) + "|"]
    for name, r in rows.items():
        cells = [f"{r[k]['mean']:.1f} ({r[k]['most']})" for k in kinds]
        lines.append(f"| {name} each | {r['capacity']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


# Native code

_LAZY_GOALS = ("lazy_adam", "adagrad", "ftrl", "momentum", "row_wise_adagrad")


def _native_rows(kind: str, by: str, cases: Sequence[str]) -> dict[str, float]:
    found = result("native_rows")["cases"]
    ratios = {f"{n}, {c}": found[c][n][f"ratios of {kind}"] for c in cases for n in _LAZY_GOALS}
    return {name: r[by] for name, r in ratios.items() if by in r}


def _native_dense(kind: str, by: str) -> dict[str, float]:
    found = result("native_dense")["optimizers"]
    ratios = {name: r[f"ratios of {kind}"] for name, r in found.items()}
    return {name: r[by] for name, r in ratios.items() if by in r}


def _native_compile(_: str) -> dict[str, float]:
    found = result("native_compile")["cases"]
    return {name.replace("`", ""): r["ratios"]["all s"] for name, r in found.items()}


def _native_training(kind: str) -> str:
    [bags] = [r for n, r in result("native_training")["cases"].items() if n.startswith("bags")]
    return _number(bags[f"ratios of {kind}"]["XLA"])


_has_norms = lambda name: name in ("lars", "normalized_sgd") or "row_wise" in name
_FEW, _MANY = ("1M x 64", "4M x 32"), ("1M x 64, 65,536 ids, Zipf",)
NATIVE_GOALS: Sequence[tuple[str, str, Callable[[str], str]]] = (
    ("rows, 4,096 ids, against XLA", "0.30", lambda k: _worst(_native_rows(k, "XLA", _FEW))),
    ("rows, 4,096 ids, against torch", "0.12", lambda k: _worst(_native_rows(k, "torch", _FEW))),
    ("rows, 65,536 ids, against XLA", "0.35", lambda k: _worst(_native_rows(k, "XLA", _MANY))),
    (
        "dense, ResNet-50, against the roof, median of all",
        "1.15",
        lambda k: _number(statistics.median(_native_dense(k, "roof").values())),
    ),
    ("the same, each", "1.35", lambda k: _worst(_native_dense(k, "roof"))),
    (
        "the same, without norms (`lars`, `normalized_sgd`, and those by rows)",
        "1.35",
        lambda k: _worst({n: r for n, r in _native_dense(k, "roof").items() if not _has_norms(n)}),
    ),
    (
        "dense, ResNet-50, against torch fused",
        "1.05",
        lambda k: _worst(_native_dense(k, "torch fused")),
    ),
    ("training step, bags and two layers, against XLA", "0.60", _native_training),
    ("trace, lower, compile, against XLA", "1.00", lambda k: _worst(_native_compile(k))),
)


def native_goals_table() -> str:
    """The goals of native code; for several measurements, the worst."""
    return goals_table(NATIVE_GOALS)


def native_rows_table() -> str:
    """Milliseconds of native steps on tables, and ratios to those of XLA and of torch."""
    cases = result("native_rows")["cases"]
    titles = [f"{case}: ms | / XLA | / torch" for case in cases]
    lines = [f"| least (median) | {' | '.join(titles)} |", "|---" * (1 + 3 * len(cases)) + "|"]
    for name in next(iter(cases.values())):
        cells = []
        for case in cases.values():
            least, median = (case[name][f"{kind} s"]["native"] for kind in ("least", "median"))
            cells.append(f"{1e3 * least:.2f} ({1e3 * median:.2f})")
            cells += [_both(case[name], by) for by in ("XLA", "torch")]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _both(found: Mapping[str, Any], by: str) -> str:
    """A ratio of least times, and of medians."""
    ratios = [found[f"ratios of {kind}"].get(by) for kind in ("least", "median")]
    return "" if ratios[0] is None else "{:.2f} ({:.2f})".format(*ratios)


def native_dense_table() -> str:
    """Native steps on ResNet-50, least times, and seconds of tracing and compilation."""
    peers = {p: f"/ {p}" for p in ("roof", "XLA", "torch foreach", "torch fused")}
    heads = ["ns per parameter", "bytes", "XLA / roof", *peers.values(), "all s", "XLA: all s"]
    lines = ["| | " + " | ".join(heads) + " |", "|---" * (1 + len(heads)) + "|"]
    size = result("native_dense")["parameters"]
    for name, r in result("native_dense")["optimizers"].items():
        least, ratios = r["least s"], r["ratios of least"]
        cells = [f"{1e9 * least['native'] / size:.2f}", f"{r['bytes per parameter']:.0f}"]
        cells.append(f"{least['XLA'] / least['roof']:.2f}")
        cells += [f"{ratios[p]:.2f}" if p in ratios else "" for p in peers]
        keys = ("trace s", "lower s", "compile s")
        cells += [f"{sum(r['programs'][w][k] for k in keys):.2f}" for w in ("native", "XLA")]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def native_training_table() -> str:
    """Milliseconds of whole training steps."""
    cases = result("native_training")["cases"]
    who = list(next(iter(cases.values()))["least s"])
    heads = [*who, "native / XLA"]
    lines = [f"| ms, least (median) | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
    for case, r in cases.items():
        cells = [f"{1e3 * r['least s'][w]:.2f} ({1e3 * r['median s'][w]:.2f})" for w in who]
        lines.append(f"| {case} | {' | '.join([*cells, _both(r, 'XLA')])} |")
    return "\n".join(lines) + "\n"


def native_compile_table() -> str:
    """Seconds to trace, lower and compile, medians."""
    keys = ("trace s", "lower s", "compile s", "all s")
    heads = [*keys, "XLA: all s", "native / XLA"]
    lines = [f"| | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
    for case, r in result("native_compile")["cases"].items():
        cells = [r["native"][k] for k in keys] + [r["XLA"]["all s"], r["ratios"]["all s"]]
        lines.append(f"| {case} | {' | '.join(f'{x:.2f}' for x in cells)} |")
    return "\n".join(lines) + "\n"


def native_threads_table() -> str:
    """Times of the same programs on one core and on two, each in its own process."""
    who = ("native", "XLA", "torch", "copy")
    heads = ["ms, least (median)", "cores", *who, "native / XLA", "native / torch"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for case, by_cores in result("native_threads")["cases"].items():
        for cores, r in by_cores.items():
            cells = [
                f"{1e3 * r['least s'][w]:.2f} ({1e3 * r['median s'][w]:.2f})"
                if w in r["least s"]
                else ""
                for w in who
            ]
            ratios = [_both(r, w) if w in r["least s"] else "" for w in ("XLA", "torch")]
            lines.append(f"| {' | '.join([case, cores, *cells, *ratios])} |")
    return "\n".join(lines) + "\n"


def machine_line(name: str) -> str:
    """The date, the machine and the versions of a measurement."""
    machine = result(name)["machine"]
    versions = ("jax", "jaxlib", "optax", "torch", "numpy", "python")
    with_versions = ", ".join(f"{v} {machine[v]}" for v in versions if v in machine)
    return f"{machine['date']}, {machine['processor']}; {with_versions}.\n"


def _of_seeds(found: Any) -> str:
    """The mean of a form, and the probabilities of Welch's test and of the test of pairs."""
    if isinstance(found, str):
        return found
    wrong = sum(x is None or x > DIVERGED for x in found["losses"])
    if wrong:
        return f"diverges: {wrong} of {len(found['losses'])}"
    if "p" not in found:
        return f"{found['mean']:.3f} ± {found['deviation']:.3f}"
    return f"{found['mean']:.3f} ({found['p']:.2f}, {found['p of pairs']:.2f})"


DIVERGED = 10.0  # a loss that is larger than that of any start


def memory_quality_table() -> str:
    """Losses of each form of slots and weights."""
    problems = {k: v for k, v in result("little_memory_quality").items() if k != "machine"}
    forms = list(problems["text"]["adamw"])
    lines = [f"| loss | {' | '.join(forms)} |", "|---" * (1 + len(forms)) + "|"]
    for problem, optimizers in problems.items():
        for name, found in optimizers.items():
            cells = [_of_seeds(found[form]) for form in forms]
            lines.append(f"| {problem}, `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def memory_cost_table() -> str:
    """Times of a step relative to float32, least (median)."""
    cases = {k: v for k, v in result("little_memory_cost").items() if k != "machine"}
    forms = [form for form in next(iter(cases.values())) if form != "float32"]
    lines = [f"| | float32, ms | {' | '.join(forms)} |", "|---" * (2 + len(forms)) + "|"]
    ratio = lambda r: f"{r['ratio of least']:.2f} ({r['ratio of medians']:.2f})" if r else ""
    for case, found in cases.items():
        cells = [f"{found['float32']['least ms']:.2f}", *(ratio(found.get(f)) for f in forms)]
        lines.append(f"| {case} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def memory_bytes_table() -> str:
    """Bytes per parameter, by choice."""
    lines = ["| choice | weights | state | both | temporaries | `tx` |", "|---" * 6 + "|"]
    for name, found in result("little_memory_bytes")["choices"].items():
        parts = [found["weights"], found["state"], found["weights"] + found["state"]]
        cells = [f"{x:.2f}" for x in parts]
        cells.append(f"{found['temporaries']:.2f}" if "temporaries" in found else "")
        lines.append(f"| {name} | {' | '.join(cells)} | `{found['code']}` |")
    return "\n".join(lines) + "\n"


def second_order_table() -> str:
    """A small transformer by AdamW, Muon, SOAP and Shampoo."""
    found = result("second_order")["contenders"]
    times = {name: row["seconds of a step"] for name, row in found.items()}
    of = lambda x, digits: "not reached" if x is None else f"{x:.{digits}f}"
    lines = ["| optimizer | rate | loss | deviations | steps | a step | time |", "|---" * 7 + "|"]
    for name, row in found.items():
        cells = [
            f"{row['rate']:g}",
            of(row["loss"], 3),
            of(row["deviations"], 1),
            of(row["steps"], 0),
            of(times[name] / times["AdamW"], 2),
            of(row["time"], 2),
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


TABLES = {
    "second order": second_order_table,
    "little memory bytes": memory_bytes_table,
    "little memory quality": memory_quality_table,
    "little memory cost": memory_cost_table,
    "performance machine": lambda: machine_line("dense"),
    "performance goals": goals_table,
    "performance dense": dense_table,
    "performance cases": cases_table,
    "performance compilation": compile_table,
    "performance rows": rows_table,
    "performance small": small_table,
    "performance sharded traffic": sharded_traffic_table,
    "performance sharded times": sharded_times_table,
    "performance sharded rounds": sharded_rounds_table,
    "performance native machine": lambda: machine_line("native_dense"),
    "performance native goals": native_goals_table,
    "performance native rows": native_rows_table,
    "performance native dense": native_dense_table,
    "performance native training": native_training_table,
    "performance native compilation": native_compile_table,
    "performance native cores": native_threads_table,
}


def draw_dense(figure: Any) -> None:
    """Bars of times relative to the roof."""
    found = result("dense")["cases"]["resnet50"]
    names = sorted(found, key=lambda n: found[n]["ratios of least"]["roof"])
    who = {"optzoo": "#0072b2", "optax": "#e69f00", "torch foreach": "#999999"}
    who |= {"torch fused": "#009e73"}
    axes = figure.add_subplot()
    for i, name in enumerate(names):
        r = found[name]
        times = {w: t for w, t in r["least s"].items() if w in who}
        roof = r["least s"]["roof"] * r["bytes per parameter"] / 12
        for j, (w, t) in enumerate(times.items()):
            axes.barh(i + 0.4 - 0.8 * (j + 0.5) / len(times), t / roof, 0.75 / len(times),
                      color=who[w])  # fmt: skip
    for w, colour in who.items():
        axes.barh(0, 0, color=colour, label=w)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.set_xlim(0, 10)
    axes.set_xlabel("least time / time to move its bytes at the speed of an axpy (cut at 10)")
    axes.legend(frameon=False, loc="lower right")


def draw_rows(figure: Any) -> None:
    """Times by the number of rows of the table, and by the number of ids in a step."""
    cases = result("rows")["cases"]
    by_rows = {100_000: "100,000 x 32", 400_000: "400,000 x 32", 1_000_000: "1,000,000 x 32",
               4_000_000: "4M x 32"}  # fmt: skip
    by_ids = {k: f"1M x 64, {k:,} ids" for k in (256, 1024, 16384, 65536)}
    by_ids = dict(sorted({**by_ids, 4096: "1M x 64"}.items()))
    names = ("lazy_adam", "adagrad", "row_wise_adagrad", "torch SparseAdam")
    names += ("torch Adagrad, sparse",)
    for place, (series, label) in enumerate(((by_rows, "rows, x 32"), (by_ids, "ids, 1M x 64"))):
        axes = figure.add_subplot(1, 2, place + 1)
        for name in names:
            if all(name in cases[c] for c in series.values()):
                ms = [1e3 * cases[c][name]["least s"] for c in series.values()]
                axes.loglog([*series], ms, "o-", label=name, markersize=3)
        axes.set_xlabel(label)
        axes.set_ylabel("ms, least")
    figure.axes[0].legend(frameon=False, fontsize=7)


def main() -> None:
    """Writes the figures."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    for name, draw, size in (("dense", draw_dense, (7, 11)), ("rows", draw_rows, (9, 4))):
        figure = Figure(size, layout="constrained")
        FigureCanvasAgg(figure)
        draw(figure)
        figure.savefig(RESULTS / f"{name}.png", dpi=120)
        print(RESULTS / f"{name}.png")


if __name__ == "__main__":
    main()
