"""The source of the site: a copy of the pages, and pages of notebooks and docstrings."""

import base64
import functools
import importlib
import inspect
import json
import pathlib
import re
import tomllib
from typing import Any

import public

import optzoo

ROOT = public.ROOT
NAMES = public.names()
# Pages of the repository that are pages of the site; others are added where links lead to them.
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs/*.md",
    "docs/*/*.md",
    "benchmarks/*.md",
)
PICTURES = ("docs/**/*.png", "docs/**/*.svg", "benchmarks/results/*.png")
CODE = {".py": "python", ".sh": "bash", ".toml": "toml", ".json": "json", ".cff": "yaml"}

# The groups of the reference: title and the modules or folders of the names in it. Directions are
# what optimizers are made of: ``scale_by_adam``.
GROUPS = {
    "First-order optimizers": ["optzoo.first_order"],
    "Proximal optimizers": ["optzoo.proximal"],
    "Second-order optimizers": ["optzoo.second_order"],
    "Directions": [],
    "Wrappers": ["optzoo.wrappers"],
    "Gradients before the optimizer": ["optzoo.transforms"],
    "Row-sparse gradients": ["optzoo.core", "optzoo.sparse", "optzoo.deferred", "optzoo.train"],
    "Native code": ["optzoo.native"],
    "Compiled programs": ["optzoo.compiled"],
    "Sharded tables": ["optzoo.sharded"],
    "Tables that grow": ["optzoo.growing"],
    "Tables on the host": ["optzoo.host"],
    "Replicas": ["optzoo.distributed"],
    "States": ["optzoo.state"],
    "Writing an optimizer": ["optzoo.rules", "optzoo.testing"],
    "By name": [
        *("optzoo.registry", "optzoo.catalog", "optzoo.schedules"),
        *("optzoo.describe", "optzoo.cite"),
    ],
    "From and to other libraries": ["optzoo.interop"],
    "The race": ["optzoo.race"],
}
# The menu: what a user does first, then what there is, then what contributors read.
MENU = {
    "Start": ["colabs/quickstart", "docs/which_one", "docs/functions", "gallery"],
    "Tasks": [
        "docs/tasks/train_embeddings",
        "docs/tasks/growing_tables",
        "docs/tasks/larger_than_the_device",
        "docs/tasks/little_memory",
        "docs/tasks/sparse_weights",
        "docs/tasks/many_replicas",
        "docs/tasks/training_diverges",
        "docs/tasks/resume_tf1",
        "docs/tasks/write_an_optimizer",
    ],
    "From other code": [
        "docs/differences",
        "docs/from_tf1",
        "docs/from_estimator",
        "docs/tf1_checkpoints",
        "docs/from_torch",
        "docs/from_optax_and_torch",
        "docs/flax",
        "docs/trainers",
        "docs/keras",
        "docs/returnn",
        "docs/fbgemm",
        "docs/sparsecore",
    ],
    "Tables": ["docs/rows", "docs/caught_up", "docs/sharded_tables", "docs/ftrl"],
    "Optimizers and replicas": [
        "docs/optimizers",
        "docs/wrappers",
        "docs/second_order",
        "docs/replicas",
        "docs/many_hosts",
        "docs/meshes",
        "docs/divergence",
        "docs/your_own",
    ],
    "Speed and evidence": [
        "docs/performance",
        "docs/native",
        "docs/accelerators",
        "docs/race",
        "docs/papers",
        "docs/reliability",
    ],
    "Reference": ["api/index"],
    "Notebooks": [
        "colabs/from_tf1",
        "colabs/papers",
        "colabs/replicas",
        "colabs/sharded_tables",
        "colabs/sparse_rows",
    ],
    "Project": ["CHANGELOG", "docs/architecture", "CONTRIBUTING"],
}
# Names without a module: data and types.
DATA = {
    "optzoo.CATALOG": "optzoo.catalog",
    "optzoo.catalog.DISTRIBUTED": "optzoo.catalog",
    "optzoo.catalog.WRAPPERS": "optzoo.catalog",
    "optzoo.replicas.ReplicaState": "optzoo.state.types",
    "optzoo.rules.RowsPolicy": "optzoo.rules.policies",
    "optzoo.rules.Rule": "optzoo.rules.policies",
    "optzoo.state.Slot": "optzoo.state.types",
    "optzoo.rules.Exact": "optzoo.state.types",
    "optzoo.rules.NotNegative": "optzoo.state.types",
    "optzoo.rules.Signed": "optzoo.state.types",
    "optzoo.rules.Sum": "optzoo.state.types",
    "optzoo.race.PROBLEMS": "optzoo.race.problems",
    "optzoo.rules.RowsRule": "optzoo.rules.policies",
}
ABOUT = {
    "optzoo.CATALOG": "All optimizers by name: an :class:`optzoo.catalog.Entry` for each.",
    "optzoo.catalog.DISTRIBUTED": "All distributed methods by name: "
    "a :class:`optzoo.catalog.Method` for each.",
    "optzoo.catalog.WRAPPERS": "All wrappers by name: an :class:`optzoo.catalog.Wrapper` for each.",
    "optzoo.race.PROBLEMS": "The built-in problems of the race by name: "
    "an :class:`optzoo.race.Problem` for each.",
}


def write(source: pathlib.Path) -> None:
    """Writes all pages of the site except the gallery to a folder, with the same paths."""
    for pattern in PICTURES:
        for path in ROOT.glob(pattern):
            _put(source, path.relative_to(ROOT), path.read_bytes())
    waiting = [p for pattern in PAGES for p in sorted(ROOT.glob(pattern))]
    waiting += sorted((ROOT / "colabs").glob("*.ipynb"))
    waiting = [p for p in waiting if p.parent != ROOT / "docs" / "site"]
    known: set[pathlib.Path] = set()
    while waiting:
        path = waiting.pop(0)
        if path not in known:
            known.add(path)
            waiting += _page(source, path)
    _reference(source)
    _index(source, known)


def _put(source: pathlib.Path, path: pathlib.PurePath, content: str | bytes) -> None:
    target = source / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(content.encode() if isinstance(content, str) else content)


def target_of(path: pathlib.Path) -> pathlib.PurePath:
    """The page of the site for a file of the repository, both relative to their roots."""
    inside = path.relative_to(ROOT)
    if inside == pathlib.Path("README.md"):
        return pathlib.PurePath("index.md")
    if inside.suffix == ".ipynb":
        return inside.with_suffix(".md")
    return inside.with_name(inside.name + ".md") if inside.suffix in CODE else inside


def _page(source: pathlib.Path, path: pathlib.Path) -> list[pathlib.Path]:
    """Writes the page of a file; returns the files of the repository to which it links."""
    if path.suffix == ".md":
        text = path.read_text()
    elif path.suffix == ".ipynb":
        text = _notebook(source, path)
    elif path.suffix in CODE:
        inside = path.relative_to(ROOT)
        fence = f"```{CODE[path.suffix]}\n{path.read_text().rstrip()}\n```"
        text = f"---\norphan: true\nnosearch: true\n---\n# {inside}\n\n{fence}\n"
        _put(source, target_of(path), text)
        return []
    else:
        _put(source, path.relative_to(ROOT), path.read_bytes())
        return []
    linked = []

    def rewritten(match: re.Match[str]) -> str:
        link, anchor = match[2], match[3] or ""
        file = (path.parent / link).resolve()
        if file.is_dir() and "://" not in link:  # of a folder there is only its description
            if not (file / "README.md").exists():
                return "]"
            file /= "README.md"
        if "://" in link or not file.is_file() or file.suffix in (".png", ".svg"):
            return match[0]
        linked.append(file)
        climb = "../" * (len(path.relative_to(ROOT).parts) - 1)
        return f"{match[1]}({climb}{target_of(file)}{anchor})"

    text = re.sub(r"(\])\(([^)#\s]+)(#[^)\s]*)?\)", rewritten, text)
    _put(source, target_of(path), text)
    return linked


def _notebook(source: pathlib.Path, path: pathlib.Path) -> str:
    """A notebook with its stored outputs as Markdown; its pictures are written to files."""
    parts = []
    cells = list(enumerate(json.loads(path.read_text())["cells"]))
    for i, cell in sorted(cells, key=lambda numbered: not _is_title(numbered[1])):
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(text)
            continue
        parts.append(f"```python\n{text}\n```")
        for j, output in enumerate(cell["outputs"]):
            data = output.get("data", {})
            if "image/png" in data:
                picture = f"{path.stem}_{i}_{j}.png"
                folder = path.parent.relative_to(ROOT)
                _put(source, folder / picture, base64.b64decode(data["image/png"]))
                parts.append(f"![A picture made by the code above]({picture})")
            elif words := "".join(output.get("text", data.get("text/plain", ""))).rstrip():
                plain = re.sub(r"\x1b\[[0-9;]*m", "", words)
                parts.append(f"````{{container}} output\n```text\n{plain}\n```\n````")
    return "\n\n".join(parts) + "\n"


def _is_title(cell: dict[str, Any]) -> bool:
    return cell["cell_type"] == "markdown" and "".join(cell["source"]).startswith("# ")


def module_of(name: str, thing: Any) -> str:
    """The module in which a public name is defined."""
    return DATA.get(name) or public.home(thing) or "optzoo"


def summary(name: str, thing: Any) -> str:
    """One sentence about a public name."""
    text = ABOUT.get(name) or (inspect.getdoc(thing) or "" if name not in DATA else "")
    text = " ".join((text or _comment(name)).split("\n\n")[0].split())
    return re.split(r"(?<=\.) (?=[A-Z])", text)[0]


def _comment(name: str) -> str:
    """The comment above the definition of a type."""
    source = inspect.getsource(importlib.import_module(DATA[name]))
    last = name.rpartition(".")[2]
    found = re.search(rf"((?:^#.*\n)+){last}\b", source, re.MULTILINE)
    return re.sub(r"^# ?", "", found[1], flags=re.MULTILINE).strip() if found else ""


def _reference(source: pathlib.Path) -> None:
    """One page for each public name, one for each group, and one of all groups."""
    names = NAMES
    grouped: dict[str, list[str]] = {title: [] for title in GROUPS}
    for name, thing in names.items():
        module = module_of(name, thing)
        title = next(t for t, homes in GROUPS.items() if module.startswith(tuple(homes)))
        if "optimizers" in title and name.startswith("optzoo.transforms."):
            title = "Directions"
        grouped[title].append(name)
        _put(source, pathlib.PurePath("api", f"{name}.rst"), _entry(name, thing, module))
    groups = []
    for title, members in grouped.items():
        slug = "group-" + title.lower().replace(" ", "-")
        link = lambda name: f":doc:`{name.split('.', 1)[1]} <{name}>`"
        table = _table([(link(m), summary(m, names[m])) for m in members])
        tree = _toctree("", [f"{m.split('.', 1)[1]} <{m}>" for m in members])
        _put(source, pathlib.PurePath("api", f"{slug}.rst"), f"{_title(title)}\n{tree}\n{table}\n")
        groups.append((slug, " · ".join(map(link, members))))
    tree = _toctree("", [slug for slug, _ in groups])
    table = _table([(f":doc:`{slug}`", links) for slug, links in groups])
    text = _title("Reference") + REFERENCE + tree + table
    _put(source, pathlib.PurePath("api/index.rst"), text)


TABLES = {*optzoo.CATALOG, *optzoo.catalog.WRAPPERS, *optzoo.catalog.DISTRIBUTED}
REFERENCE = """
One page for each public name, made from its docstring. Every example is run by the tests. They
show at most four digits of a number:

.. code-block:: python

   import numpy as np

   np.set_printoptions(precision=4, suppress=True)

The conformance tests for your own optimizers are in ``optzoo.testing.contract``; see
:doc:`/docs/your_own`.

"""


def _title(text: str) -> str:
    return f"{text}\n{'=' * len(text)}\n"


def _table(rows: list[tuple[str, str]]) -> str:
    """A list of names and descriptions, which a wide page shows in two columns."""
    lines = ["", ".. rst-class:: names", ""]
    for first, second in rows:
        lines += [first, f"   {second or '-'}", ""]
    return "\n".join(lines) + "\n"


def _toctree(caption: str, pages: list[str]) -> str:
    head = [".. toctree::", "   :hidden:", *([f"   :caption: {caption}"] if caption else []), ""]
    return "\n".join([*head, *(f"   {page}" for page in pages)]) + "\n"


@functools.cache
def when_to_use() -> dict[str, tuple[str, str]]:
    """When to use each optimizer, and when not, as Markdown."""
    lines = tomllib.loads((pathlib.Path(__file__).parent / "when.toml").read_text())
    if lines.keys() != optzoo.CATALOG.keys():
        wrong = ", ".join(sorted(lines.keys() ^ optzoo.CATALOG.keys()))
        raise ValueError(f"when.toml needs one line for each optimizer: see {wrong}")
    return {name: (use, avoid) for name, (use, avoid) in lines.items()}


def _entry(name: str, thing: Any, module: str) -> str:
    """The page of one public name."""
    short = name.removeprefix("optzoo.")
    lines = [_title(short.replace("_", "\\_") if short.endswith("_") else short)]
    last = name.rpartition(".")[2]
    if last in optzoo.CATALOG:
        entry = optzoo.CATALOG[last]
        original = f"Original: ``{entry.original}``" if entry.original else "Of optzoo"
        card = f"{original} · rows: :func:`optzoo.rules.{entry.rows}` · :doc:`/gallery`"
        card += f" · `its curves in the race <../race/index.html#{last}>`__"
        card += " · :doc:`which one? </docs/which_one>`"
        if entry.original:
            card += " · :doc:`records of the original </tests/golden/README>`"
        picture = f"/_pictures/{last}.svg"
        words = f"{last} in a valley, its loss by step, and its loss by learning rate"
        use, avoid = (text.replace("`", "``") for text in when_to_use()[last])
        lines += [f"**When to use it:** {use}", "", f"**When not:** {avoid}", ""]
        lines += [card, "", f".. image:: {picture}", "   :class: card-picture", f"   :alt: {words}"]
    # The pages of source code lead to the name in any module with names from that file.
    places = {n.rpartition(".")[0] for n, other in NAMES.items() if public.home(other) == module}
    methods = [m for m in vars(thing) if m[0] != "_"] if inspect.isclass(thing) else []
    ends = [last, *(f"{last}.{method}" for method in methods)]
    others = [p for p in sorted(places | {"optzoo"}) if f"{p}.{last}" != name]
    anchors = [f'   <span id="{p}.{end}"></span>' for p in others for end in ends]
    if anchors:
        lines += ["", ".. raw:: html", "", *anchors]
    lines.append("")
    if inspect.isclass(thing):
        lines += [f".. autoclass:: {name}", "   :members:"]
    elif inspect.isfunction(thing):
        lines += [f".. autofunction:: {name}"]
    else:
        lines += [f".. py:data:: {name}", "", f"   {ABOUT.get(name) or _comment(name)}".rstrip()]
        if isinstance(thing, dict):
            lines += _members(name, thing)
    path = module.replace(".", "/")
    path += "/__init__.py" if (ROOT / path).is_dir() else ".py"
    anchor = short.rpartition(".")[2] if public.home(thing) else ""
    page = f"../_modules/{module.replace('.', '/')}.html" + (f"#{anchor}" if anchor else "")
    if public.home(thing):
        lines += ["", f"Source: `{path} <{page}>`__"]
    else:
        lines += ["", f"Source: ``{path}``"]
    if last in TABLES and "References:" in (inspect.getdoc(thing) or ""):
        bibtex = [f"   {line}" if line else "" for line in optzoo.cite(last).splitlines()]
        lines += ["", ".. rubric:: BibTeX", "", f"``optzoo.cite({last!r})``", ""]
        lines += [".. code-block:: bibtex", "", *bibtex]
    return "\n".join(lines) + "\n"


def _members(name: str, table: dict[str, Any]) -> list[str]:
    """The names in a table of the library, with links."""
    full = public.by_last_part()
    link = lambda key: f":doc:`{key} <{full[key]}>`" if key in full else f"``{key}``"
    text = lambda value: inspect.getdoc(getattr(value, "factory", value)) or ""
    return [
        _table([(link(k), text(v).splitlines()[0] if text(v) else "") for k, v in table.items()])
    ]


def _index(source: pathlib.Path, known: set[pathlib.Path]) -> None:
    """Adds the contents of the site to the first page."""
    pages = sorted(str(target_of(path).with_suffix("")) for path in known)
    under = lambda folder: [p for p in pages if p.rpartition("/")[0] == folder]
    folders = sorted({p.rpartition("/")[0] for p in pages} - {"", "docs", "colabs", "docs/tasks"})
    listed = {page for section in MENU.values() for page in section}
    there = {*pages, "gallery", "api/index"}
    top = [p for p in pages if p != "index" and p.rpartition("/")[0] in ("", "docs", "docs/tasks")]
    if wrong := sorted(({*top} | {*under("colabs")} | listed) - (there & listed)):
        raise ValueError(f"MENU of docs/site/pages.py and the pages differ in {', '.join(wrong)}")
    trees = [_toctree(title, section) for title, section in MENU.items()]
    rest = [p for folder in folders for p in under(folder) if not _is_orphan(source, p)]
    for page in rest:
        path = source / f"{page}.md"
        path.write_text("---\norphan: true\nnosearch: true\n---\n" + path.read_text())
    index = source / "index.md"
    block = "".join(f"\n```{{eval-rst}}\n{tree}```\n" for tree in trees)
    index.write_text(index.read_text() + block)


def _is_orphan(source: pathlib.Path, page: str) -> bool:
    return (source / f"{page}.md").read_text().startswith("---\norphan")
