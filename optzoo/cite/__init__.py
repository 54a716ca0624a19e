"""Citations of an optimizer, from the references in its docstring."""

from __future__ import annotations

import enum
import inspect
import pkgutil
import re
import unicodedata
from typing import Any

from ..deferred.caught_up import caught_up
from ..registry import factory_of
from ..wrappers.divide_states import divide_states
from ..wrappers.param_groups import param_groups
from ..wrappers.slots_dtype import slots_dtype
from .papers import PAPERS, Paper

# The format of a reference in a docstring, with or without authors and year:
#     Kingma and Ba, `Adam: A Method for Stochastic Optimization <https://...>`_, 2015
#     ``EmbOptimType.ADAM`` of `FBGEMM <https://...>`_
_WORK = re.compile(
    r"(?:(?P<authors>[\w-]+(?: et al\.| and [\w-]+)?), )?"
    r"(?:``(?P<part>[^`]+)`` of )?"
    r"`(?P<title>[^`<]+) <(?P<url>[^>]+)>`_"
    r"(?:, (?P<year>\d{4}))?"
)
# Wrappers that create has no name for, as no original has one.
_OTHERS = {f.__name__: f for f in (caught_up, divide_states, param_groups, slots_dtype)}
# As in CITATION.cff.
_OPTZOO = """@misc{{optzoo,
  author = {{{{The authors of optzoo}}}},
  title = {{{{optzoo}}}},
  note = {{Version {}}},
}}"""
_SMALL_WORDS = {"a", "an", "the", "on", "some", "of", "in"}


def cite(name: str | enum.Enum = "optzoo") -> str:
    """The BibTeX entries of the papers and the code of an optimizer or wrapper.

    They are the references with an address in its docstring, with all authors, and the journal or
    the proceedings.

    Example:
        >>> import optzoo
        >>> print(optzoo.cite("AdamOptimizer"))
        @inproceedings{kingma2015adam,
          author = {Diederik P. Kingma and Jimmy Ba},
          title = {{Adam: A Method for Stochastic Optimization}},
          booktitle = {3rd International Conference on Learning Representations},
          year = {2015},
          eprint = {1412.6980},
          archiveprefix = {arXiv},
          url = {https://arxiv.org/abs/1412.6980},
        }

    Args:
        name: any name that :func:`optzoo.create` accepts, a wrapper such as ``"slots_dtype"``, or
            ``"optzoo"`` for the library itself.

    Returns:
        The entries, with an empty line between them.

    Raises:
        TypeError: if the name is not a string or a member of an enumeration.
        ValueError: if the name is unknown (the message suggests similar names), or if its docstring
            has no reference with an address.
    """
    if name == "optzoo":
        return _OPTZOO.format(pkgutil.resolve_name("optzoo:__version__"))
    factory = _factory(name)
    references = (inspect.getdoc(factory) or "").partition("References:\n")[2]
    references = references.partition("\n\n")[0]
    works = list(_WORK.finditer(" ".join(references.split())))
    if not works:
        raise ValueError(f"{name!r} has no reference to cite; use optzoo.cite() for optzoo itself")
    return "\n\n".join(map(_entry, works))


def _factory(name: Any) -> Any:
    """The factory of :func:`optzoo.create`, or a wrapper, which is not an optimizer by itself."""
    return _OTHERS[name] if isinstance(name, str) and name in _OTHERS else factory_of(name)


def _entry(work: re.Match[str]) -> str:
    authors, part, title, url, year = work.group("authors", "part", "title", "url", "year")
    paper = PAPERS.get(url, Paper((authors or "").replace(" et al.", " and others")))
    kinds = {"journal": "article", "booktitle": "inproceedings"}
    kind = next((kinds[field] for field in kinds if field in paper.venue), "misc")
    fields = {
        "author": paper.authors,
        "title": f"{{{title}}}",
        **paper.venue,
        "year": year,
        **_identifier(url),
        "url": url,
        "note": (part or "").replace("_", r"\_"),
    }
    lines = [f"  {field} = {{{value}}}," for field, value in fields.items() if value]
    return "\n".join([f"@{kind}{{{_key(authors, title, year)},", *lines, "}"])


def _identifier(url: str) -> dict[str, str]:
    """The fields of an archive or a DOI."""
    _, _, number = url.partition("arxiv.org/abs/")
    if number:
        return {"eprint": number, "archiveprefix": "arXiv"}
    _, _, doi = url.partition("doi.org/")
    return {"doi": doi} if doi else {}


def _key(authors: str | None, title: str, year: str | None) -> str:
    """A key in the style of Google Scholar: first author, year, first word of the title."""
    words = re.findall(r"\w+", _ascii(title).lower())
    first = next((word for word in words if word not in _SMALL_WORDS), "")
    if authors is None:
        return "".join(words)
    return f"{_ascii(authors).split()[0].lower()}{year or ''}{first}"


def _ascii(text: str) -> str:
    return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
