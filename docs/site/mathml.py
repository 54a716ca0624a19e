"""Formulas as MathML, made when the site is built: no script or font is loaded to show them."""

import html
import re

import latex2mathml.converter
from docutils import nodes


def to_mathml(latex: str, *, block: bool = False) -> str:
    """A formula of LaTeX as a ``math`` element, with its source as title for search and copying.

    Args:
        latex: the formula, without dollar signs.
        block: whether it stands in a line of its own; several lines are aligned at ``&``.
    """
    latex = latex.strip()
    body = latex
    if block and (r"\\" in latex or "&" in latex) and r"\begin" not in latex:
        body = rf"\begin{{aligned}} {latex} \end{{aligned}}"
    # latex2mathml knows no \operatorname with a star, and \mathrm joins what follows it.
    body = re.sub(r"\\operatorname\*", r"\\operatorname", body)
    mathml = latex2mathml.converter.convert(body, display="block" if block else "inline")
    return mathml.replace("<math ", f'<math alttext="{html.escape(latex, quote=True)}" ', 1)


def visit_inline(self, node: nodes.math) -> None:
    """Writes an inline formula."""
    self.body.append(to_mathml(node.astext()))
    raise nodes.SkipNode


def visit_block(self, node: nodes.math_block) -> None:
    """Writes a formula in a line of its own."""
    self.body.append(f'<div class="formula">{to_mathml(node.astext(), block=True)}</div>\n')
    raise nodes.SkipNode


def setup(app) -> dict[str, bool]:
    """Registers the renderer with Sphinx."""
    app.add_html_math_renderer("mathml", (visit_inline, None), (visit_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
