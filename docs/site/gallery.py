"""The gallery: one card for each optimizer, made from the catalogue."""

import html
import json
import pathlib

import jax
import jax.numpy as jnp
import pages
import pictures
import public

import optzoo

TABLE = jax.ShapeDtypeStruct((1000, 64), jnp.float32)
FAMILIES = {
    "first_order": "First order",
    "proximal": "Proximal",
    "second_order": "Second order",
}
HEAD = """# Gallery

One card for each optimizer of the catalogue. The pictures are computed by optzoo when the site is
built: {steps} steps in a curved valley (Rosenbrock's function with a factor of 10). The blue point
is the start, the star the minimum; path and curve are those of the best of {rates} learning rates.
It is one small problem: it shows how an optimizer moves, not which one is best for yours. For that
there is [the race](docs/race.md), with <a href="race/index.html">an interactive page</a> of all
results.

*State* is in bytes for each float32 parameter of a table of {shape}, at default settings. *Step* is
the time of a dense step on the {elements:,} parameters of a ResNet-50 ({device}, {cores} core), and
in brackets relative to the time that the memory needs ([results](benchmarks/results.md)).

"""


def write(source: pathlib.Path, cache: pathlib.Path) -> None:
    """Writes the page, and the picture of each optimizer."""
    folder = source / "_pictures"
    folder.mkdir(parents=True)
    for name in optzoo.CATALOG:
        (folder / f"{name}.svg").write_bytes(pictures.draw(name, cache))
    times = json.loads((pages.ROOT / "benchmarks" / "results" / "dense.json").read_text())
    text = HEAD.format(
        steps=pictures.STEPS,
        rates=len(pictures.RATES),
        shape=" x ".join(f"{n:,}" for n in TABLE.shape),
        elements=times["parameters"]["resnet50"],
        device=times["machine"]["processor"],
        cores=times["machine"]["cores"],
    )
    when = pages.when_to_use()
    for family, title in FAMILIES.items():
        names = [n for n, entry in optzoo.CATALOG.items() if entry.family == family]
        cards = "\n".join(card(n, when[n], times["cases"]["resnet50"].get(n)) for n in names)
        text += f"## {title}\n\n::::{{container}} cards\n{cards}\n::::\n\n"
    (source / "gallery.md").write_text(text)


def state_bytes(entry: optzoo.catalog.Entry) -> str:
    """The bytes of state per parameter of a table."""
    state = optzoo.describe(entry.make(), {"table": TABLE}).state_per_parameter
    return f"{state:.2f}".rstrip("0").rstrip(".") if state >= 0.005 else "0"


def card(name: str, when: tuple[str, str], time: dict | None) -> str:
    """The card of an optimizer, as Markdown."""
    entry = optzoo.CATALOG[name]
    what = (entry.factory.__doc__ or "").splitlines()[0].split(", as in")[0].rstrip(".")
    facts = {
        "When to use it": when[0],
        "When not": when[1],
        "Original": f"`{entry.original}`" if entry.original else "optzoo",
        "Rows": f"{{py:func}}`{entry.rows} <optzoo.rules.{entry.rows}>`",
        "State": f"{state_bytes(entry)} bytes per parameter",
    }
    if time:
        milliseconds, roof = time["median s"]["optzoo"] * 1e3, time["ratios of median"]["roof"]
        facts["Step"] = f"{milliseconds:.1f} ms ({roof:.2f})"
    listed = "\n".join(f"- **{label}** {value}" for label, value in facts.items())
    words = html.escape(f"{name}: path in the valley, loss by step, loss by learning rate")
    return (
        f":::{{container}} card\n[`{name}`](api/{public.by_last_part()[name]}.rst)\n\n{what}\n\n"
        f"![{words}](_pictures/{name}.svg)\n\n{listed}\n:::"
    )
