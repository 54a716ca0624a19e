"""Checks the built site: ``python docs/site/check.py [--site site]``; exits 1 if anything fails."""

import argparse
import json
import pathlib
import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

import public

# Elements whose address the browser loads when the page is opened.
LOADED = {
    "audio": ("src",),
    "embed": ("src",),
    "iframe": ("src",),
    "image": ("href", "xlink:href"),
    "img": ("src", "srcset"),
    "input": ("src",),
    "object": ("data",),
    "script": ("src",),
    "source": ("src", "srcset"),
    "track": ("src",),
    "use": ("href", "xlink:href"),
    "video": ("src", "poster"),
}
RELATIONS = {"stylesheet", "icon", "preload", "modulepreload", "preconnect", "dns-prefetch"}


class Page(HTMLParser):
    """The links, anchors and loaded resources of a page."""

    def __init__(self, text: str):
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = {"", "top"}
        self._in_style = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        """Collects the references of an element."""
        values = {name: value or "" for name, value in attrs}
        self._in_style = tag == "style"
        # The page of the race follows an address with the name of an optimizer by its script.
        self.anchors |= {values[key] for key in ("id", "name", "data-name") if key in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag == "link" and RELATIONS & set(values.get("rel", "").split()):
            self.loads.append(values.get("href", ""))
        for key in LOADED.get(tag, ()):
            if key in values:
                # Only srcset has several, and data: has a comma.
                parts = values[key].split(",") if key == "srcset" else [values[key]]
                self.loads += [part.split()[0] for part in parts if part.split()]
        self.loads += _loaded_by_css(values.get("style", ""))

    def handle_data(self, data):
        """Collects the resources loaded by an inline style sheet."""
        if self._in_style:
            self.loads += _loaded_by_css(data)


class Failure(NamedTuple):
    """A failure: the page, the link or name, and the reason."""

    page: str
    link: str
    why: str


def _loaded_by_css(text: str) -> list[str]:
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    found = re.findall(r"url\(\s*['\"]?([^'\")]+)['\"]?\s*\)", text)
    return found + re.findall(r"@import\s+['\"]([^'\"]+)", text)


def _loaded_by_script(text: str) -> list[str]:
    """Addresses loaded by a script, as far as they are literals."""
    call = r"(?:fetch|import|importScripts|Worker|EventSource)\(\s*[`'\"](\w+:)?//[^`'\"]+"
    assigned = r"\.(?:src|href)\s*=\s*[`'\"](\w+:)?//[^`'\"]+"
    return [match[0] for match in re.finditer(f"{call}|{assigned}", text)]


def check_links(site: pathlib.Path, pages: dict[str, Page]) -> Iterator[Failure]:
    """Every link and anchor resolves; no resource is loaded from another site."""
    for name, page in pages.items():
        for link in page.loads:
            if link.startswith("data:"):
                continue
            if urlsplit(link).scheme or link.startswith("//"):
                yield Failure(name, link, "is loaded from elsewhere")
            elif why := _broken(site, pages, name, link):
                yield Failure(name, link, why)
        for link in page.links:
            if urlsplit(link).scheme or link.startswith("//"):
                continue
            if why := _broken(site, pages, name, link):
                yield Failure(name, link, why)


def _broken(site: pathlib.Path, pages: dict[str, Page], name: str, link: str) -> str:
    """The reason why a link does not resolve; empty if it does."""
    path, anchor = unquote(urlsplit(link).path), unquote(urlsplit(link).fragment)
    file = ((site / name).parent / path).resolve() if path else site.resolve() / name
    file = file / "index.html" if file.is_dir() else file
    if not file.is_file():
        return "does not exist"
    if not file.is_relative_to(site.resolve()):
        return "leads out of the site"
    target = pages.get(str(file.relative_to(site.resolve())))
    if anchor and target is not None and anchor not in target.anchors:
        return "has no such anchor"
    return ""


def check_assets(site: pathlib.Path) -> Iterator[Failure]:
    """Style sheets, scripts and pictures load only existing files of the site."""
    for file in sorted(site.rglob("*")):
        name = str(file.relative_to(site))
        if file.suffix == ".css":
            for link in _loaded_by_css(file.read_text()):
                inside = (file.parent / urlsplit(link).path).is_file()
                if not link.startswith(("data:", "#")) and (urlsplit(link).scheme or not inside):
                    yield Failure(name, link, "is not in the site")
        elif file.suffix == ".js":
            for link in _loaded_by_script(file.read_text()):
                yield Failure(name, link, "is loaded from elsewhere")
        elif file.suffix == ".svg":
            for link in re.findall(r"(?:href|src)=[\"'](\w+:[^\"']+)", file.read_text()):
                if not link.startswith("data:"):
                    yield Failure(name, link, "is loaded from elsewhere")


def check_names(pages: dict[str, Page]) -> Iterator[Failure]:
    """Every public name has a page with its entry."""
    for name in public.names():
        page = pages.get(f"api/{name}.html")
        if page is None:
            yield Failure(f"api/{name}.html", name, "this public name has no page")
        elif name not in page.anchors:
            yield Failure(f"api/{name}.html", name, "this public name has no entry on its page")


def search(site: pathlib.Path, words: str) -> list[str]:
    """The pages that the search of the site finds, by its algorithm: stems, all words."""
    from sphinx.search import languages

    text = (site / "searchindex.js").read_text()
    index = json.loads(text.removeprefix("Search.setIndex(").rstrip(";\n").removesuffix(")"))
    language = languages["en"]
    language = _imported(language) if isinstance(language, str) else language
    language = language({})
    found: set[int] | None = None
    for word in re.findall(r"\w+", words.lower()):
        if word in language.stopwords:
            continue
        places: set[int] = set()
        for terms in (index["terms"], index["titleterms"]):
            hits = terms.get(language.stem(word), [])
            places |= {hits} if isinstance(hits, int) else set(hits)
        found = places if found is None else found & places
    return [index["docnames"][i] for i in sorted(found or ())]


def _imported(path: str):
    import importlib

    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def check_search(site: pathlib.Path) -> Iterator[Failure]:
    """The search finds optimizers by their original name and by that of this library."""
    for words, page in {
        "AdamOptimizer": "api/optzoo.adam",
        "FtrlOptimizer": "api/optzoo.ftrl",
        "lazy_adam": "api/optzoo.lazy_adam",
        "caught_up": "docs/caught_up",
        "embedding": "docs/tasks/train_embeddings",
        "out of memory": "docs/tasks/little_memory",
        "NaN": "docs/tasks/training_diverges",
        "resume": "docs/tasks/resume_tf1",
    }.items():
        if page not in (found := search(site, words)):
            yield Failure("search.html", words, f"finds {found}, but not {page}")


def check_disk(site: pathlib.Path) -> Iterator[Failure]:
    """The search works without a server, and does not find pages that are not part of the guide."""
    options = site / "_static" / "documentation_options.js"
    if not options.exists() or "SHOW_SEARCH_SUMMARY: false" not in options.read_text():
        yield Failure("search.html", "summaries", "are read by a request, which fails from disk")
    for page in search(site, "test"):
        if page.startswith(("tests/", "benchmarks/", "examples/")):
            yield Failure("search.html", page, "is found, but is not part of the guide")


def check_contrast(site: pathlib.Path) -> Iterator[Failure]:
    """Code is readable in both schemes: contrast of 4.5 to 1, as required by WCAG."""
    file = site / "_static" / "pygments.css"
    text = re.sub(r"/\*.*?\*/", "", file.read_text() if file.exists() else "")
    rules = [(s.strip(), body) for s, body in re.findall(r"([^{}]+)\{([^{}]*)\}", text)]
    color = lambda name, body: re.findall(rf"(?<![-\w]){name}:\s*(#[0-9a-fA-F]+)", body)
    page = {}  # of each scheme the background; its rule comes before the others
    for selector, body in rules:
        scheme = "data-theme" in selector
        own = color("background(?:-color)?", body)
        if selector.endswith(".highlight") and own:
            page[scheme] = own[0]
        for found in color("color", body) if scheme in page else []:
            back = (own or [page[scheme]])[0]
            if (ratio := _contrast(found, back)) < 4.5:
                yield Failure("_static/pygments.css", selector, f"has {ratio:.1f} to 1 on {back}")


def _contrast(first: str, second: str) -> float:
    """The contrast of two colours, by the formula of WCAG 2."""

    def luminance(color):
        digits = color[1:] if len(color) == 7 else "".join(2 * c for c in color[1:])
        parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted([luminance(first), luminance(second)])
    return (high + 0.05) / (low + 0.05)


def main() -> int:
    """Prints every failure with its page; returns 1 if there is one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--site", type=pathlib.Path, default=public.ROOT / "site")
    site = parser.parse_args().site
    files = sorted(site.rglob("*.html"))
    if not files:
        print(f"{site} has no pages: run make site")
        return 1
    pages = {str(file.relative_to(site)): Page(file.read_text()) for file in files}
    checks = [check_links(site, pages), check_assets(site), check_names(pages), check_search(site)]
    checks += [check_disk(site), check_contrast(site)]
    failures = [failure for check in checks for failure in check]
    for failure in failures:
        print(f"{failure.page}: {failure.link} {failure.why}")
    links = sum(len(page.links) + len(page.loads) for page in pages.values())
    names = len(public.names())
    print(f"{len(pages)} pages, {links} links, {names} public names, {len(failures)} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
