"""The dependencies of an installed package, with versions and licences, as a table of Markdown.

``python tests/release/licences.py optzoo`` in an environment in which it is installed. The release
workflow stores the table beside the wheel.
"""

import re
import sys
from importlib import metadata

from packaging.requirements import Requirement

UNKNOWN = "unknown"


def dependencies(root: str) -> list[metadata.Distribution]:
    """What a package needs, directly or not, without the extras that nothing asks for."""
    found, waiting = dict[str, metadata.Distribution](), [(root, frozenset[str]())]
    seen = set[tuple[str, frozenset[str]]]()
    while waiting:
        name, extras = waiting.pop()
        if (key := (_normal(name), extras)) in seen:
            continue
        seen.add(key)
        found[key[0]] = distribution = metadata.distribution(name)
        for requirement in map(Requirement, distribution.requires or ()):
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": e}) for e in {"", *extras}):
                waiting.append((requirement.name, frozenset(requirement.extras)))
    return [found[name] for name in sorted(found.keys() - {_normal(root)})]


def licence(distribution: metadata.Distribution) -> str:
    """Its expression, its classifiers, or the first line of its text, whichever it has first."""
    about = distribution.metadata
    classifiers = [
        text.rpartition(" :: ")[2]
        for text in about.get_all("Classifier") or ()
        if text.startswith("License ::")
    ]
    text = (about.get("License") or "").strip().partition("\n")[0]
    return about.get("License-Expression") or ", ".join(classifiers) or text or UNKNOWN


def table(root: str) -> str:
    """The lines of the table."""
    rows = [(d.metadata["Name"], d.version, licence(d)) for d in dependencies(root)]
    head = [f"| dependency of {root} | version | licence |", "|---|---|---|"]
    return "\n".join([*head, *(f"| {' | '.join(row)} |" for row in rows)])


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    print(table(sys.argv[1]))
