"""Compares optzoo with random cases of TensorFlow 1.15.5, which ``make_fuzz.py`` has run.

``python -m tests.golden.fuzz DIR`` replays all cases in ``DIR`` and groups the differences;
``python -m tests.golden.fuzz --case 0:17`` prints a case.
"""

import argparse
import collections
import contextlib
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from . import Record, float32_inside, follow_all, load
from .make_fuzz import case_of

TOGETHER = 20  # cases in one program
FLOATS = re.compile("(init|grad|grad_val)/")
# Half a unit in the last place of 1.
EPS = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}


class Difference(NamedTuple):
    """The first element of an array in which optzoo and the original differ."""

    record: Record
    array: str
    step: int
    place: tuple[int, ...]
    theirs: float
    ours: float
    exact: float  # the original's own run in float64

    @property
    def meta(self) -> dict[str, Any]:
        return self.record.meta

    @property
    def optimizer(self) -> str:
        return self.meta["optimizer"]

    @property
    def kinds(self) -> tuple[str, str]:
        """Whether theirs and ours are nan, inf, zero or else a number."""
        return kind_of(self.theirs), kind_of(self.ours)

    @property
    def finite(self) -> bool:
        """Whether ours is a number."""
        return bool(np.isfinite(self.ours))

    @property
    def zero_settings(self) -> list[str]:
        """The names of the arguments that are 0."""
        return sorted(k for k, v in flat(self.meta["kwargs"]) if v == 0 and v is not False)

    @property
    def events(self) -> list[str]:
        """What is special about the gradients of this element so far."""
        return events(self.gradients, self.meta["dtype"])

    @property
    def gradients(self) -> np.ndarray:
        """The gradients of this element up to this step; of all elements for other slots."""
        init = self.record.arrays["init/" + self.leaf]
        grads = dense_gradients(self.record, self.leaf)[: self.step + 1]
        shape = self.record.arrays[self.array].shape
        is_element = (shape[1:] if self.array.startswith("param/") else shape) == init.shape
        return grads[(slice(None), *self.place)] if is_element else grads

    @property
    def leaf(self) -> str:
        slots = {f"slot/{s['checkpoint_name']}": s["var"] for s in self.meta["slots"]}
        return slots.get(self.array, self.array.split("/")[1])

    def __str__(self) -> str:
        run = f"{self.meta['case']} {self.meta['dtype']} {self.meta['kind']} {self.meta['kwargs']}"
        where = f"{self.array}{list(self.place)} at step {self.step}"
        values = f"theirs {self.theirs:.9g}, ours {self.ours:.9g}, exact {self.exact:.9g}"
        return f"{run}\n    {where}: {values}; gradients {self.gradients.tolist()}"


def kind_of(x: float) -> str:
    return "nan" if np.isnan(x) else "inf" if np.isinf(x) else "zero" if x == 0 else "number"


def flat(kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """All arguments, those of an inner optimizer too."""
    for name, value in kwargs.items():
        if isinstance(value, dict) and "kwargs" in value:
            yield from flat(value["kwargs"])
        else:
            yield name, value.get("$tensor", value) if isinstance(value, dict) else value


def events(gradients: np.ndarray, dtype: str) -> list[str]:
    """What is special about gradients in this dtype."""
    limits, size = jnp.finfo(dtype), np.abs(gradients.astype(np.float64))
    found = {
        "nan": np.isnan(size),
        "inf": np.isinf(size),
        "overflow": np.isfinite(size) & (size > float(limits.max) ** 0.5),
        "underflow": (size > 0) & (size < float(limits.tiny) ** 0.5),
        "zeros": np.full(1, not size.any()),
    }
    return [name for name, where in found.items() if where.any()]


def dense_gradients(record: Record, leaf: str) -> np.ndarray:
    """The gradients of a parameter of all steps, repeated rows summed."""
    arrays, steps = record.arrays, record.meta["steps"]
    if f"grad/{leaf}" in arrays:
        return arrays[f"grad/{leaf}"].astype(np.float64)
    total = np.zeros((steps, *arrays[f"init/{leaf}"].shape))
    if f"grad_idx/{leaf}" in arrays:
        ids, values = arrays[f"grad_idx/{leaf}"], arrays[f"grad_val/{leaf}"]
        for step in range(steps):
            np.add.at(total[step], ids[step], values[step].astype(np.float64))
    return total


# ------------------------------------------------------------------------------- the comparison
def replay(records: list[Record]) -> list[dict[str, np.ndarray]]:
    """Our parameters after each step and our last slots, named as in the records."""
    is_wide = [record.meta["dtype"] == "float64" for record in records]
    of_dtype = {}
    for wide in sorted(set(is_wide)):
        with x64(wide):
            chosen = [fed(r) for r, w in zip(records, is_wide, strict=True) if w == wide]
            of_dtype[wide] = iter(follow_all(chosen))
    return [next(of_dtype[wide]) for wide in is_wide]


def fed(record: Record) -> Record:
    """What we compute from, in the dtype of the case."""
    dtype = jnp.dtype(record.meta["dtype"])
    floats = {k: v.astype(dtype) for k, v in record.arrays.items() if FLOATS.match(k)}
    return Record(
        record.meta, floats | {f"grad_idx/{k}": v for k, v in record.group("grad_idx").items()}
    )


@contextlib.contextmanager
def x64(enabled: bool) -> Iterator[None]:
    """Whether float64 is available."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", enabled)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)


def tolerance(record: Record) -> float:
    """Three times the original's rounding error, as its run in float64 shows it.

    Where it is more than a thousandth, something has overflowed or underflowed: that is no
    rounding, and does not count.
    """
    dtype = record.meta["dtype"]
    if dtype == "float64":
        return 1e-5 if float32_inside(record.meta) else 1e-10
    limit = max(16 * EPS[dtype], 1e-3)
    worst = 0.0
    for name, exact in record.group("exact").items():
        theirs = record.arrays[name].astype(np.float64)
        with np.errstate(all="ignore"):
            error = np.abs(theirs - exact) / scale(record, name, theirs)
        worst = max(worst, np.max(error[error < limit], initial=0.0))
    return max(3 * worst, 32 * EPS[dtype])


def smallest(dtype: str) -> float:
    """The smallest positive number; others than float16's flush what is below the normal ones."""
    limits = jnp.finfo(dtype)
    return float(limits.smallest_subnormal if dtype == "float16" else limits.tiny)


def scale(record: Record, name: str, theirs: np.ndarray) -> np.ndarray:
    """What errors are relative to: of a parameter the largest value so far, else the value.

    A function of a matrix mixes its elements: there it is the largest of the array.
    """
    size = np.where(np.isfinite(theirs), np.abs(theirs), 0.0)
    if record.meta["optimizer"] in ("Shampoo", "GGT"):
        size = np.full_like(size, np.max(size, initial=0.0))
    if name.startswith("param/"):
        start = np.abs(record.arrays["init/" + name.split("/")[1]].astype(np.float64))
        size = np.maximum(np.maximum.accumulate(size), start)
    return np.maximum(size, smallest(record.meta["dtype"]))


def compare(record: Record, got: dict[str, np.ndarray]) -> Iterator[Difference]:
    """The first difference in each array, with those at the earliest step first."""
    allowed, found = tolerance(record), []
    for name, ours in got.items():
        if name not in record.arrays:
            continue  # a slot of a variable without a gradient
        theirs, ours = record.arrays[name].astype(np.float64), ours.astype(np.float64)
        exact = record.arrays.get("exact/" + name, np.full(theirs.shape, np.nan))
        assert theirs.shape == ours.shape, (record.meta["case"], name)
        least = record.meta["steps"] * smallest(record.meta["dtype"])
        near = allowed * scale(record, name, theirs) + least
        with np.errstate(all="ignore"):
            off, own = np.abs(ours - exact), np.abs(theirs - exact)
            same = (ours == theirs) | (np.isnan(ours) & np.isnan(theirs))
            same |= np.abs(ours - theirs) <= near
            # At least as exact as the original is.
            same |= (off <= allowed * np.abs(exact) + least) | (np.isfinite(own) & (off <= own))
        places = np.argwhere(~same)
        if len(places):
            place = tuple(int(i) for i in places[0])
            values = (float(a[place]) for a in (theirs, ours, exact))
            step = place[0] if name.startswith("param/") else record.meta["steps"] - 1
            at = place[1:] if name.startswith("param/") else place
            found.append(Difference(record, name, step, at, *values))
    yield from sorted(found, key=lambda d: d.step)


# ---------------------------------------------------------------------- the documented differences
class Documented(NamedTuple):
    """A deliberate difference, as ``docs/differences.md`` has it."""

    reason: str
    applies: Callable[[Difference], bool]


def divides_by_nothing(d: Difference) -> bool:
    """No epsilon, or one that is lost, and squares that are zero or underflow."""
    terms = ("epsilon", "initial_accumulator_value", "initial_gradient_squared_accumulator_value")
    small = any(k in terms and v <= 1e-19 for k, v in flat(d.meta["kwargs"]))
    square = np.abs(d.gradients.astype(np.float64)) ** 2
    is_lost = bool((square < float(jnp.finfo(d.meta["dtype"]).tiny)).any())
    return small and is_lost and not np.isfinite(d.theirs) and d.finite


def infinity_stays(d: Difference) -> bool:
    """Their mean is NaN after an infinity, ours stays infinite."""
    infinite = {"inf", "overflow"} & set(d.events)
    return bool(infinite) and np.isnan(d.theirs) and not np.isnan(d.ours)


def in_16_bits(d: Difference) -> bool:
    """They have no number any more; or a slot of theirs overflows, where ours is in float32."""
    if "16" not in d.meta["dtype"] or {"inf", "nan"} & set(d.events) or not d.finite:
        return False
    saturates = d.meta["dtype"] == "float16" and "overflow" in d.events
    return saturates or not np.isfinite(d.theirs)


def has_no_decay(d: Difference) -> bool:
    """Their decay is 1 in 16 bits, and no epsilon hides that their mean remains zero."""
    settings = dict(flat(d.meta["kwargs"]))
    decays = [v for k, v in settings.items() if k in ("beta1", "beta2", "rho", "decay")]
    lost = "16" in d.meta["dtype"] and max(decays, default=0) >= 1 - EPS[d.meta["dtype"]] / 2
    return lost and settings.get("epsilon", 1.0) <= 1e-19


def nan_stays(d: Difference) -> bool:
    """Their comparison with NaN is false: of |z| > l1 in Ftrl, of a maximum in AdaMax."""
    compares = d.optimizer == "Ftrl" or any("AdaMax" in str(v) for v in d.meta["kwargs"].values())
    return (compares or d.optimizer == "AdaMax") and np.isnan(d.ours) and not np.isnan(d.theirs)


def rounds_a_mean(d: Difference) -> bool:
    """A mean of much larger gradients before: m + (g - m) (1 - b) has the rounding error of m."""
    allowed = 4 * EPS[d.meta["dtype"]] * np.max(np.abs(d.gradients), initial=0.0)
    is_mean = d.array.startswith("slot/") and "Adadelta" not in d.array  # steps are not as large
    return is_mean and abs(d.ours - d.theirs) <= allowed


def decays_rows(d: Difference) -> bool:
    """They decay the rows of all but gradient descent."""
    base = d.meta["kwargs"].get("base_optimizer")
    return base == "GradientDescent" and f"grad_idx/{d.leaf}" in d.record.arrays


def adds_to_infinity(d: Difference) -> bool:
    """The new parameter is our update plus the old one, which is infinite."""
    if not d.array.startswith("param/") or d.step == 0:
        return False
    before = d.record.arrays[d.array][(d.step - 1, *d.place)]
    return bool(np.isinf(before)) and np.isnan(d.ours)


def rounds_to_the_old(d: Difference) -> bool:
    """The slot follows from parameters much smaller than before: update and old one cancel."""
    if d.optimizer != "Ftrl" or not d.array.startswith("slot/"):
        return False
    path = [d.record.arrays[f"init/{d.leaf}"], *d.record.arrays[f"param/{d.leaf}"]]
    sizes = np.abs([float(x[d.place]) for x in path])
    sizes = sizes[np.isfinite(sizes) & (sizes > 0)]
    error = 8 * EPS[d.meta["dtype"]] * np.max(sizes) / np.min(sizes)
    return bool(abs(d.ours - d.theirs) <= error * abs(d.theirs))


def cancels_in_clipping(d: Difference) -> bool:
    """They subtract the excess over the norm, and are left with its rounding error."""
    unclipped = np.max(np.abs(d.gradients[-1:].astype(np.float64)), initial=1.0)
    bound = d.meta["kwargs"].get("max_norm", np.inf)
    error = EPS[d.meta["dtype"]] * unclipped
    near = abs(d.ours - d.theirs) <= 4 * error and abs(d.ours) <= bound
    return d.optimizer == "VariableClipping" and near


def clips_once(d: Difference) -> bool:
    """They subtract the excess of a row once for each of its repeats."""
    repeats = d.meta["kind"] != "sparse" and f"grad_idx/{d.leaf}" in d.record.arrays
    return d.optimizer == "VariableClipping" and repeats


def has_bad_root(d: Difference) -> bool:
    """Statistics that overflow have no root."""
    return d.optimizer == "Shampoo" and not np.isfinite(d.theirs) and d.finite


def is_ill_conditioned(d: Difference) -> bool:
    """Squared gradients so much above epsilon that eigenvalues near it are rounding errors."""
    name = {"Shampoo": "epsilon", "GGT": "svd_eps"}.get(d.optimizer)
    if name is None or "nan" in d.kinds:
        return False
    epsilon = d.meta["kwargs"].get(name, {"epsilon": 1e-4, "svd_eps": 1e-6}[name])
    every = [dense_gradients(d.record, k) for k in d.record.group("init")]
    square = max(np.max(g**2, initial=0.0) for g in every)
    return bool(square * EPS[d.meta["dtype"]] > 1e-3 * epsilon)


def rounds_no_rate(d: Difference) -> bool:
    """For rows of resource variables gradient descent does not round its rate to float32."""
    names = {d.optimizer, d.meta["kwargs"].get("opt", {}).get("$opt")}
    resource = d.meta.get("variables") == "resource" and f"grad_idx/{d.leaf}" in d.record.arrays
    near = abs(d.ours - d.theirs) <= 2 * EPS["float32"] * abs(d.theirs)
    return "GradientDescent" in names and resource and near


DOCUMENTED = [
    Documented("zero divided by zero is zero", divides_by_nothing),
    Documented("infinity stays infinite", infinity_stays),
    Documented("updates are added: the excess is not subtracted", cancels_in_clipping),
    Documented("variable_clipping: repeated rows are clipped once", clips_once),
    Documented("16 bits: computed in float32", in_16_bits),
    Documented("16 bits: a decay is not rounded to 1", has_no_decay),
    Documented("NaN stays NaN", nan_stays),
    Documented("rounding of means of much larger gradients", rounds_a_mean),
    Documented("decoupled_weight_decay: rows of gradient descent decay", decays_rows),
    Documented("updates are added: an infinite parameter becomes NaN", adds_to_infinity),
    Documented("updates are added: rounding of the old parameter", rounds_to_the_old),
    Documented("shampoo: roots that are not finite are not used", has_bad_root),
    Documented("shampoo, ggt: rounding of small eigenvalues", is_ill_conditioned),
    Documented("values as given: the rate of rows of resource variables", rounds_no_rate),
]


# --------------------------------------------------------------------------------- the report
def records(path: pathlib.Path) -> Iterator[Record]:
    """All cases of a file."""
    batch = load(path.stem, path.parent)
    arrays: dict[str, dict[str, np.ndarray]] = collections.defaultdict(dict)
    for name, array in batch.arrays.items():
        case, _, rest = name.partition("/")
        arrays[case][rest] = array
    for meta in batch.meta["cases"]:
        yield Record(meta, arrays[meta["case"]])


class Verdict(NamedTuple):
    """The comparison of one case."""

    group: str  # what the case has in common with others
    first: Difference | None = None  # the earliest difference
    known: bool = True  # whether the group needs no further look


def judge(record: Record, got: dict[str, np.ndarray]) -> Verdict:
    """The verdict on our values of a case."""
    first = next(compare(record, got), None)
    if first is None:
        return Verdict("agree")
    for known in DOCUMENTED:
        if known.applies(first):
            return Verdict(f"documented: {known.reason}", first)
    rows = "rows" if f"grad_idx/{first.leaf}" in record.arrays else "dense"
    words = [first.optimizer, record.meta["dtype"], rows, first.array.split("/")[0]]
    zeros = [f"{name}=0" for name in first.zero_settings]
    return Verdict(" ".join([*words, "->".join(first.kinds), *first.events, *zeros]), first, False)


def main() -> None:
    """Replays files, or prints a case."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", nargs="?", type=pathlib.Path, help="what make_fuzz.py wrote")
    parser.add_argument("--show", type=int, default=1, help="examples of each group")
    parser.add_argument("--case", help="SEED:INDEX of a case to print")
    args = parser.parse_args()
    if args.case:
        case, data = case_of(*map(int, args.case.split(":")))
        print(case, *(f"{name} {value.tolist()}" for name, value in data.items()), sep="\n")
        return
    groups = collections.defaultdict(list)
    for path in sorted(args.folder.glob("*.xz")):
        cases = list(records(path))
        for record in cases:
            if "refused" in record.meta:
                refused = f"the original refuses: {record.meta['optimizer']}"
                groups[True, refused].append(record.meta["case"])
        cases = [record for record in cases if "refused" not in record.meta]
        for first in range(0, len(cases), TOGETHER):
            some = cases[first : first + TOGETHER]
            for record, got in zip(some, replay(some), strict=True):
                verdict = judge(record, got)
                groups[verdict.known, verdict.group].append(verdict.first or record.meta["case"])
            jax.clear_caches()
    for (known, group), cases in sorted(groups.items(), reverse=True):
        print(f"{len(cases):5} {group}")
        for example in cases[: 0 if known else args.show]:
            print(f"      {example}")


if __name__ == "__main__":
    main()
