"""What holds of a program on any version of the compilers."""

from collections.abc import Iterator

from optzoo.core.compat import DEMANDS_LAYOUTS
from optzoo.core.lines import shape_of_lines
from optzoo.state.storage.codes import nbytes_of_codes

from . import record
from .cases import CASES, FEW_ROWS, IDS, ROWS, Case
from .record import TO_HOST, Facts

# Bytes that a step on few rows may need, or 2 % of its arguments if that is more.
TEMPORARIES = {"gpu": 14_000_000, "tpu": 8_000_000}
# XLA for TPUs brings a table whole to the fast memory of a v5e or v6e if it fits.
FAST_MEMORY = 2**27
KERNEL = "tpu_custom_call"  # how XLA names one
# Their slots have one element for each row, which XLA gathers and scatters for as much as a row;
# or rows are not merged.
LEFT_TO_XLA = {name for name in FEW_ROWS if "row_wise" in name} - {"row_wise_lamb", "row_wise_lars"}
LEFT_TO_XLA |= {"gradient_descent"}
# Their messages have room for any ids.
ONE_ROUND = ("adam, one round", "own step")


def broken(key: str, facts: Facts) -> list[str]:
    """The promises that the facts of a case break."""
    case = CASES[key]
    found = [*_of_all(case, facts)]
    if case.name.startswith("replicas/") and case.name.endswith(", quiet"):
        found += _of_quiet_steps(facts)
    if _moves_few_rows(case) and _is_promised(case):
        found += _of_few_rows(case, facts)
    if case.name.startswith("native/"):
        found += _of_kernels(case, facts)
    return found


def _of_all(case: Case, facts: Facts) -> Iterator[str]:
    if names := facts.get("not_reused"):
        yield f"donated and not reused: {', '.join(names)}"
    if names := [name for name in facts.get("calls", ()) if name in TO_HOST or "callback" in name]:
        yield f"sends data to the host: {', '.join(names)}"


def _of_quiet_steps(facts: Facts) -> Iterator[str]:
    if "sent" in facts:
        yield f"a step without an exchange sends {facts['sent']}"


def _of_few_rows(case: Case, facts: Facts) -> Iterator[str]:
    limit = max(TEMPORARIES[case.platform], 0.02 * facts["arguments"])
    limit *= 2 if case.name.startswith("sharded/") else 1  # with messages
    if "lines" in case.name:  # a few arrays with a line for each id
        width = _width(case)
        if "int8" in case.name:  # rows of codes have their scales beside them
            width = nbytes_of_codes((width,))
        _, lanes = shape_of_lines((ROWS, width))
        limit = max(limit, 10 * 4 * IDS * lanes)
    if facts["temporaries"] > limit:
        yield f"temporaries of {facts['temporaries']:,} bytes, more than {limit:,.0f}"
    table = _nbytes_of_table(case)
    is_brought = case.platform == "tpu" and table <= FAST_MEMORY
    # Slots with one number for each row are small, and may be brought there, too.
    if facts.get("large_bytes", 0) >= 4 * ROWS * _width(case) and not is_brought:
        yield f"{facts['large']} operations as large as a table"
    if (sent := sum(nbytes for _, nbytes in facts.get("sent", {}).values())) > limit:
        yield f"sends {sent:,} bytes"
    # An operation on all rows in the memory of its argument is no large one. The estimate for v6e
    # counts whole tables for what its SparseCores gather and scatter. A step moves whole lines.
    most = (4 if "lines" in case.name else 2) * table
    # The loop of further rounds, which has no turn if all rows fit, counts as the first round.
    most *= 2 if case.name.startswith("sharded/") else 1
    if case.device.startswith("v5e") and not is_brought and facts.get("bytes", 0) >= most:
        yield f"reads and writes {facts['bytes']:,} bytes, as much as all rows"


def _of_kernels(case: Case, facts: Facts) -> Iterator[str]:
    """An optimizer with slots needs half of the bytes at most that it needs without its kernel."""
    _, name, width = case.name.split("/")
    has_kernel = KERNEL in facts.get("calls", ())
    if has_kernel == (name in LEFT_TO_XLA):
        yield "there is a kernel" if has_kernel else "its rows are left to XLA"
    if not (has_kernel and case.device.startswith("v5e") and _is_promised(case)):
        return  # the estimate for v6e counts whole tables
    without = record.read(record.FACTS)[f"rows/{name}/{width}/{case.device}"]["bytes"]
    limit = (0.5 if facts["arguments"] > 1.9 * _nbytes_of_table(case) else 0.7) * without
    if facts["bytes"] > limit:
        yield f"reads and writes {facts['bytes']:,} bytes, and {without:,} without its kernel"


def _moves_few_rows(case: Case) -> bool:
    """Whether a step of the case computes with the rows that the batch names, and no others."""
    kind, name, *_ = case.name.split("/")
    if kind in ("rows", "large", "loop", "lines", "native"):
        return name in FEW_ROWS
    if kind == "wrapper":
        return name == "multitask"  # around lazy_adam
    return kind == "sharded" and name not in ONE_ROUND


def _is_promised(case: Case) -> bool:
    # Before JAX 0.11.1 XLA for TPUs changes the layout of other tables in each step, and back.
    is_by_rows = case.platform == "gpu" or _width(case) % 128 == 0
    return is_by_rows or DEMANDS_LAYOUTS or "lines" in case.name


def _nbytes_of_table(case: Case) -> int:
    width = _width(case)
    return 4 * ROWS * (width if "lines" in case.name else -(-width // 128) * 128)


def _width(case: Case) -> int:
    return int(case.name.split("/")[-1])
