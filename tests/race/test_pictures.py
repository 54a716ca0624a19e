"""The pictures of the race in the pages: fresh, and of all optimizers."""

import pathlib
import runpy

import numpy as np

from optzoo.catalog import CATALOG
from optzoo.race import advice, colours, page, plots, session, storage
from optzoo.race.problems import PROBLEMS

from .test_page import document, result

ROOT = pathlib.Path(__file__).parents[2]
PICTURES = runpy.run_path(str(ROOT / "benchmarks" / "race_pictures.py"))


def test_the_pictures_are_fresh():
    assert PICTURES["stale"]() == [], "stale pictures: run make docs"


def test_the_stored_results_are_of_all_optimizers():
    """If not: ``optzoo race``, then ``benchmarks/race_pictures.py``."""
    stored = PICTURES["stored"]()
    ran = {(r["problem"], r["optimizer"]) for r in stored["results"] + stored["skipped"]}
    assert ran >= {(problem, name) for problem in stored["problems"] for name in CATALOG}
    assert all(storage._is_run(r) for r in stored["results"])


def test_the_stored_results_have_a_page():
    stored = PICTURES["stored"]()
    names = {o["name"] for o in page.data(stored)["optimizers"]}
    assert names >= CATALOG.keys()
    dense, tables = (first for first, *_ in advice.advice(stored))
    assert dense.startswith("For dense models start with ")
    assert tables.startswith("For models with embedding tables start with ")


def test_the_stored_facts_are_those_of_the_problems():
    for name, stored in PICTURES["stored"]()["problems"].items():
        facts = session._facts(PROBLEMS[name]())
        assert {key: stored[key] for key in facts} == facts


def test_a_picture_carries_the_hash_of_its_results(tmp_path):
    first, second = (document(result("a", [[loss, loss]])) for loss in (0.1, 0.2))
    plots.draw(first, tmp_path)
    found = plots.source_of(tmp_path / "curves.png")
    assert found == plots.source(first) != plots.source(second)


def many(number):
    """Contenders with curves of their own, half of them in another family."""
    results = [result(f"o{i}", [[0.1 * (i + 1)] * 2]) for i in range(number)]
    for r in results[::2]:
        r["family"] = "second-order"
    return document(*results)


def test_many_optimizers_have_a_row_for_each_family():
    figure = plots.curves(many(10))
    assert len(figure.axes) == 2 and all(len(axes.lines) == 10 for axes in figure.axes)
    for axes, family, names in zip(
        figure.axes, ("Adam", "second-order"), ("13579", "02468"), strict=True
    ):
        legend = axes.get_legend()
        assert legend.get_title().get_text() == family
        assert [t.get_text() for t in legend.get_texts()] == [f"o{i}" for i in names]
    assert len(plots.curves(many(3)).axes) == 1


def test_lines_can_be_told_apart_and_the_best_is_above_the_others():
    order = [3, 0, 7, 16, 1, 12, 5, 9, 2, 14, 4, 17, 6, 10, 8, 15, 11, 13]
    results = [result(f"o{i:02}", [[0.1 * (1 + order.index(i))] * 2]) for i in range(18)]
    [axes] = plots.curves(document(*results)).axes
    assert len({(line.get_color(), str(line._dash_pattern)) for line in axes.lines}) == 18
    ends = [line.get_ydata()[-1] for line in axes.lines]
    assert ends == sorted(ends, reverse=True)
    # The legend has the names in their order, each beside its own line.
    legend = axes.get_legend()
    assert [t.get_text() for t in legend.get_texts()] == [r["optimizer"] for r in results]
    drawn = {line.get_ydata()[-1]: line.get_color() for line in axes.lines}
    colors = [drawn[r["loss"]["mean"]] for r in results]
    assert [line.get_color() for line in legend.get_lines()] == colors


def test_a_legend_names_all_optimizers_of_a_line():
    names = [f"name_of_an_optimizer_{i}" for i in range(4)]
    [axes] = plots.curves(document(*[result(n, [[0.1, 0.2]]) for n in names])).axes
    [text] = [t.get_text() for t in axes.get_legend().get_texts()]
    assert text.replace("\n", " ") == " = ".join(names)
    assert max(map(len, text.split("\n"))) <= 34


def test_coinciding_optimizers_are_one_line():
    [axes] = plots.curves(document(*[result(n, [[0.1, 0.2]]) for n in ("adam", "b")])).axes
    assert [t.get_text() for t in axes.get_legend().get_texts()] == ["b = adam"]
    assert len(axes.lines) == 1


def test_the_lines_of_a_family_differ():
    found = {colours.colour("Adam", i) for i in range(3)}
    assert len(found) == 3 and all(0 <= c <= 1 for each in found for c in each)
    assert np.ptp(colours.colour("unknown", 0)) == 0
