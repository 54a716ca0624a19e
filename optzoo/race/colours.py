"""The colours of the families, in the figures and on the page."""

import colorsys

# Hues in degrees.
HUES = {
    "Adam": 212,
    "Adagrad, RMSProp": 28,
    "SGD, sign": 140,
    "proximal": 285,
    "second-order": 352,
    "distributed": 50,
    "other libraries": 180,
}
# Colours that most readers can tell apart, for a few lines of any family.
APART = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f3c8d", "#666666"]


def colour(family: str, place: int) -> tuple[float, float, float]:
    """The colour of a family's line: the next ones are lighter."""
    hue = HUES.get(family)
    lightness = (0.38, 0.55, 0.68)[place % 3]
    return colorsys.hls_to_rgb((hue or 0) / 360, lightness, 0 if hue is None else 0.75)
