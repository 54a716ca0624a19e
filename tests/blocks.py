"""Runs the Python blocks of pages. It needs nothing but optzoo, as ``make dist`` uses it, too."""

import contextlib
import io
import pathlib
import re
import sys

_BLOCK = re.compile(r"```python\n(.*?)```\n(?:\n```\n(.*?)```)?", re.DOTALL)


def run_blocks(page: pathlib.Path) -> int:
    """Runs block after block, each alone, and returns how many.

    A block that begins with a file's name is written to that file in the current folder. A block
    without a language right after it is what it prints.
    """
    blocks = _BLOCK.findall(page.read_text())
    for code, shown in blocks:
        if name := re.match(r"# (\w+\.py)\n", code):
            pathlib.Path(name[1]).write_text(code)
            continue
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(code, page.name, "exec"), {})
        if shown and shown != printed.getvalue():
            raise AssertionError(f"{page.name} shows {shown!r}, printed is {printed.getvalue()!r}")
    return len(blocks)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print(argument, run_blocks(pathlib.Path(argument)), "blocks")
