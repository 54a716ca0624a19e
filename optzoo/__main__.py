"""The command ``optzoo``."""

import sys
from collections.abc import Sequence

from .core.terminal import until_closed


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand and returns its exit code."""
    return until_closed(lambda: _run(list(sys.argv[1:] if argv is None else argv)))


def _run(argv: list[str]) -> int:
    if argv[:1] == ["race"]:
        try:
            from .race.__main__ import main as race
        except ModuleNotFoundError as error:
            print(error, file=sys.stderr)
            return 2
        return race(argv[1:])
    if argv[:1] == ["list"] and len(argv) <= 2:
        from .registry import listing

        try:
            print(listing(*argv[1:]))
        except ValueError as error:
            print(f"optzoo list: error: {error}", file=sys.stderr)
            return 2
        return 0
    if argv == ["--version"]:
        from . import __version__

        print(f"optzoo {__version__}")
        return 0
    asked = argv[:1] in (["-h"], ["--help"])
    usage = (
        "usage: optzoo race ...   (optzoo race --help)\n       optzoo list [part of a name]\n"
        "       optzoo --version"
    )
    print(usage, file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2


if __name__ == "__main__":
    sys.exit(main())
