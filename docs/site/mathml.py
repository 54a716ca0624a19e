"""Formulas as MathML, generated when the site is built: they need no scripts or fonts."""

import html
import re

import latex2mathml.converter
from docutils import nodes
from sphinx.util import logging

logger = logging.getLogger(__name__)


def to_mathml(latex: str, *, block: bool = False) -> str:
    """A LaTeX formula as a ``math`` element, with its source as the title for search and copying.

    Args:
        latex: the formula, without dollar signs.
        block: whether it is a display formula, whose lines are aligned at ``&``.
    """
    latex = latex.strip()
    body = latex.replace("{aligned}", "{align*}")
    outside = re.sub(r"\\begin\{(\w+)\}.*?\\end\{\1\}", "", latex, flags=re.DOTALL)
    if block and (r"\\" in outside or "&" in outside):
        body = rf"\begin{{align*}} {latex} \end{{align*}}"
    mathml = latex2mathml.converter.convert(body, display="block" if block else "inline")
    return mathml.replace("<math ", f'<math alttext="{html.escape(latex, quote=True)}" ', 1)


def _warned(node: nodes.Node, mathml: str) -> str:
    """The formula, with a warning if it contains an unknown LaTeX command."""
    if unknown := re.search(r"<m[ion]>(\\\w+|&)</m[ion]>", mathml):
        logger.warning("unknown command in a formula: %s", unknown[1], location=node)
    return mathml


def visit_inline(self, node: nodes.math) -> None:
    """Writes an inline formula."""
    self.body.append(_warned(node, to_mathml(node.astext())))
    raise nodes.SkipNode


def visit_block(self, node: nodes.math_block) -> None:
    """Writes a display formula."""
    mathml = _warned(node, to_mathml(node.astext(), block=True))
    self.body.append(f'<div class="formula">{mathml}</div>\n')
    raise nodes.SkipNode


def setup(app) -> dict[str, bool]:
    """Registers the renderer with Sphinx."""
    app.add_html_math_renderer("mathml", (visit_inline, None), (visit_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
