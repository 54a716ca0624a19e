"""Runs the Python blocks of pages. It needs nothing but optzoo, as ``make dist`` uses it, too."""

import pathlib
import re
import sys


def run_blocks(page: pathlib.Path) -> int:
    """Runs block after block, each alone, and returns how many.

    A block that begins with a file's name is written to that file in the current folder.
    """
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    for code in blocks:
        if name := re.match(r"# (\w+\.py)\n", code):
            pathlib.Path(name[1]).write_text(code)
        else:
            exec(compile(code, page.name, "exec"), {})
    return len(blocks)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print(argument, run_blocks(pathlib.Path(argument)), "blocks")
