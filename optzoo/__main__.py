"""The command ``optzoo``."""

import sys
from collections.abc import Sequence

from .race.__main__ import main as race

_COMMANDS = {"race": race}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand; gives its exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv and argv[0] in _COMMANDS:
        return _COMMANDS[argv[0]](argv[1:])
    usage = f"usage: optzoo {{{','.join(_COMMANDS)}}} ...   (optzoo race --help)"
    asked = argv[:1] in (["-h"], ["--help"])
    print(usage, file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2


if __name__ == "__main__":
    sys.exit(main())
