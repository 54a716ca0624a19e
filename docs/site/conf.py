"""The configuration of Sphinx. build.py runs it; nothing is loaded from other sites."""

import ast
import inspect
import pathlib
import pkgutil
import re
import sys
import textwrap

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import pages
import public
from docutils import nodes
from sphinx import addnodes
from sphinx.domains.python import PyObject
from sphinx.transforms.post_transforms import SphinxPostTransform

import optzoo

project = "optzoo"
author = "the authors of optzoo"
version = release = optzoo.__version__
extensions = [
    "myst_parser",
    "mathml",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
html_theme = "furo"
html_title = "optzoo"
html_static_path = ["static"]
html_css_files = ["optzoo.css"]
html_math_renderer = "mathml"
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False
html_search_scorer = str(pathlib.Path(__file__).with_name("scorer.js"))
html_show_search_summary = False  # a browser reads no pages for it from disk
html_theme_options = {"navigation_with_keys": True}
pygments_style = "a11y-light"
pygments_dark_style = "monokai"

myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 4
myst_dmath_double_inline = True
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the signature is written as in the source, below
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
napoleon_attr_annotations = False
napoleon_custom_sections = ["Differences from the original"]
maximum_signature_line_length = 88
viewcode_line_numbers = True
nitpicky = True
nitpick_ignore_regex = [(r"py:.*", r"(?!optzoo\.).*")]

NAMES = public.names()
BY_LAST = public.by_last_part()
# Of these a bare name in a page becomes a link; of all others ``optzoo.name`` does.
TABLES = pages.TABLES


def signature(app, what, name, thing, options, given, returned):
    """The signature of a function as in its source, without expanded aliases."""
    if not inspect.isfunction(thing):
        return None
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(thing))).body[0]
    except (OSError, SyntaxError):
        return None
    if not isinstance(tree, ast.FunctionDef):
        return None
    arguments = ast.unparse(tree.args)
    if what == "method":
        arguments = re.sub(r"^(self|cls)(, |$)", "", arguments)
    result = ast.unparse(tree.returns).strip("'\"") if tree.returns else ""
    return f"({arguments})", result


def skip(app, what, name, thing, would_skip, options):
    """Skips the fields of named tuples, whose docstrings are empty."""
    return True if type(thing).__name__ == "_tuplegetter" else None


def resolve(app, env, node, content):
    """Resolves names in modules of optzoo to the public name of the same object."""
    target = node.get("reftarget", "")
    domain = env.domains["py"]
    for name in (target, BY_LAST.get(target.rpartition(".")[2])):
        if name in domain.objects and target.startswith("optzoo."):
            return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", name, node, content)
    # What is not public stays text; a name that does not exist is an error.
    try:
        pkgutil.resolve_name(target)
    except (ImportError, AttributeError):
        return None
    return content if target.count(".") > 1 else None


class NamesToLinks(SphinxPostTransform):
    """Links code such as ``optzoo.adam``, or ``adam`` in a page, to the page of the name."""

    default_priority = 5  # before references are resolved

    def run(self, **kwargs):
        """Replaces literals that are a public name or the path of a page."""
        here = self.env.docname
        for literal in list(self.document.findall(nodes.literal)):
            if literal.parent is None or _inside(literal, nodes.reference, nodes.title):
                continue
            if isinstance(literal.parent, addnodes.pending_xref):
                continue
            text = literal.astext()
            name = text if text in NAMES else BY_LAST[text] if text in TABLES else ""
            page = text.removesuffix(".md") if text.startswith("docs/") else ""
            if name and here != f"api/{name}":
                self.link(literal, f"api/{name}")
            elif page and page in self.env.found_docs:
                self.link(literal, page)

    def link(self, literal, page):
        """Puts a link around a literal."""
        uri = self.app.builder.get_relative_uri(self.env.docname, page)
        reference = nodes.reference("", "", internal=True, refuri=uri)
        literal.replace_self(reference)
        reference += literal


def _inside(node, *kinds):
    while node.parent is not None:
        node = node.parent
        if isinstance(node, kinds):
            return True
    return False


def setup(app):
    """Connects the functions above."""
    for field in PyObject.doc_field_types:
        if field.name == "variable":
            field.label = "Attributes"
    app.connect("autodoc-process-signature", signature)
    app.connect("autodoc-skip-member", skip)
    app.connect("missing-reference", resolve)
    app.add_post_transform(NamesToLinks)
