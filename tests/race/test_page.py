"""The summary of a race, and its page: data and structure, without a browser."""

import copy
import html.parser
import json
import math
import re

import numpy as np
import optax
import pytest

from optzoo import race
from optzoo.race import advice, page, report, summary

from .test_race import QUICK, line


def result(optimizer, losses, *, problem="p", reached=(10, 10), seconds=1.0, **more):
    """A made-up result: final losses by rate and seed."""
    of_rate = [np.mean([math.inf if v is None else v for v in row]) for row in losses]
    best = int(np.argmin(of_rate))
    finite = math.isfinite(of_rate[best])
    mean = float(of_rate[best]) if finite else None
    each = {"mean": [2.0, mean], "low": [2.0, mean], "high": [2.0, mean]}
    return {
        "problem": problem,
        "optimizer": optimizer,
        "family": "Adam",
        "arguments": {},
        "fingerprint": "f",
        "rate": [0.1, 1.0, 10.0][best],
        "diverged": not finite,
        "loss": {"mean": mean, "std": 0.0 if finite else None},
        "metrics": {},
        "steps to target": None,
        "steps to target by seed": list(reached),
        "rates": [
            {"rate": rate, "loss": float(m) if math.isfinite(m) else None, "losses": row}
            for rate, m, row in zip([0.1, 1.0, 10.0], of_rate, losses, strict=False)
        ],
        "curve": {"steps": [0, 20], **each},
        "track": None,
        "seconds per step": seconds,
        "seconds per step from": seconds / 2,
        "seconds per step to": seconds * 2,
        "state bytes per parameter": 4.0,
    } | more


def document(*results, targets=None, skipped=(), embeddings=()):
    names = dict.fromkeys(r["problem"] for r in (*results, *skipped))
    facts = lambda p: {"target": (targets or {}).get(p, 0.5), "embeddings": p in embeddings}
    problems = {p: {"about": f"about {p}"} | facts(p) for p in names}
    return {
        "version": "0",
        "machine": {"device": "cpu", "cores": 1, "python": "3", "jax": "0"},
        "settings": {
            "rates": None,
            "num_rates": 7,
            "seeds": 2,
            "timed_stretches": 5,
            "timed_steps": 40,
        },
        "problems": problems,
        "results": list(results),
        "skipped": list(skipped),
        "others": [],
    }


class Page(html.parser.HTMLParser):
    """The elements and texts of a page; ``data`` is what the script reads."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.texts, self.data, self._is_data = [], [], None, False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._is_data = dict(attrs).get("id") == "data"

    def handle_data(self, data):
        if self._is_data:
            self.data, self._is_data = json.loads(data), False
        else:
            self.texts.append(data)

    def ids(self):
        return [attrs["id"] for _, attrs in self.elements if "id" in attrs]


# ------------------------------------------------------------------------------ the summary
def test_results_that_coincide_are_one():
    a, b = result("ab", [[0.1, 0.3]]), result("b", [[0.1, 0.3]])
    close = copy.deepcopy(a) | {"optimizer": "close"}
    close["curve"]["mean"][1] *= 1 + 0.9 * summary.TOLERANCE
    far = copy.deepcopy(a) | {"optimizer": "far"}
    far["curve"]["high"][1] *= 1 + 1.1 * summary.TOLERANCE
    other_rate = copy.deepcopy(a) | {"optimizer": "rate", "rate": 0.2}
    groups = summary.coinciding(document(a, b, close, far, other_rate), "p")
    names = sorted(sorted(r["optimizer"] for r in group) for group in groups)
    assert names == [["ab", "b", "close"], ["far"], ["rate"]]
    assert summary.contenders(document(a, b)) == [("b", "ab")]
    # Not on a second problem: two contenders.
    more = [result("ab", [[1.0, 1.0]], problem="q"), result("b", [[0.5, 0.5]], problem="q")]
    assert sorted(summary.contenders(document(a, b, *more))) == [("ab",), ("b",)]


def test_diverged_results_coincide_with_none():
    twice = [result(name, [[None, None]]) for name in "ab"]
    assert len(summary.coinciding(document(*twice), "p")) == 2


def test_ranks_by_hand():
    first = result("first", [[0.1, 0.1], [0.2, 0.2]])
    second = result("second", [[0.3, 0.3], [0.15, 0.2]])
    last = result("last", [[None, 0.0], [None, None]])
    found = summary.ranks(document(first, second, last))
    by_name = dict(zip(found.contenders, found.mean, strict=True))
    assert by_name == {("first",): 1, ("second",): 2, ("last",): 3}
    np.testing.assert_array_equal(found.of_problem["p"], found.mean)
    low, high = summary.interval(found.resampled[found.contenders.index(("first",))])
    # A resample of the second seed alone lets the diverged one win.
    assert low == 1 and high == 2


def test_profile_by_hand():
    fast = result("fast", [[0.1, 0.1]], reached=(10, None), seconds=3.0)
    slow = result("slow", [[0.2, 0.2]], reached=(20, 40), seconds=1.0)
    steps = {row["names"][0]: row for row in summary.profile(document(fast, slow), "steps")}
    assert steps["fast"]["ratios"] == [1] and steps["slow"]["ratios"] == [1, 2]
    seconds = {row["names"][0]: row for row in summary.profile(document(fast, slow), "seconds")}
    assert seconds["fast"]["ratios"] == [1.5] and seconds["slow"]["ratios"] == [1, 1]
    assert {row["runs"] for row in steps.values()} == {2}


def test_the_page_has_the_best_lines_first():
    """Which the script draws last, above the others, and names first in the legend."""
    found = document(
        result("slow", [[0.1, 0.1]], reached=(30, 30)),
        result("fast", [[0.9, 0.9]], reached=(10, 10)),
        result("one seed", [[0.2, 0.2]], reached=(10, None)),
        result("none", [[None, None]], reached=(None, None)),
    )
    shown = page.data(found)
    [lines] = [[line["names"] for line in problem["lines"]] for problem in shown["problems"]]
    assert lines == [["slow"], ["one seed"], ["fast"], ["none"]]
    profile = [row["names"] for row in shown["profile"]["steps"]]
    assert profile == [["fast"], ["one seed"], ["slow"], ["none"]]


def test_width_is_of_neighbouring_rates():
    losses = [[0.4, 0.4], [0.3, 0.3], [0.2, 0.2]]
    whole, gap = result("whole", losses), result("gap", [losses[0], [9.0, 9.0], [0.1, 0.1]])
    found = summary.widths(document(whole, gap))
    np.testing.assert_allclose([found["whole",], found["gap",]], [2, 0])


def test_advice_is_computed():
    better = [result("better", [[0.1, 0.2]], problem=p, seconds=9.0) for p in "pq"]
    worse = [result("worse", [[0.3, 0.4]], problem=p, seconds=1.0) for p in "pq"]
    found = document(*better, *worse)
    [[begin, *others]] = advice.advice(found)
    assert begin == "For dense models start with better."
    assert others[0] == (
        "Its ranks are the best on average: 1 of 2 on p and 1 of 2 on q. "
        "Its best learning rate: 0.1."
    )
    assert "at least 95% of the resamples of seeds" in others[1]
    # Of the two, worse is the faster one, and the last on both problems.
    assert others[2].startswith(
        "For the shortest time to the target loss: worse, but it is the last of 2 on p and the "
        "last of 2 on q. It reaches the target in 4 of 4 runs"
    )
    assert "p and q (dense models), with 2 seeds and 1 learning rates" in advice.basis(found)
    assert "No problem has models with embedding tables" in advice.basis(found)
    noisy = [result("noisy", [[0.05, 0.9]], problem=p) for p in "pq"]
    [[_, *others]] = advice.advice(document(*better, *noisy))
    assert "the difference from noisy is not significant." in " ".join(others)


def test_advice_for_embeddings_is_apart_and_names_who_is_last():
    """As the race has it: the best one for dense models is the last one, and slow, on tables."""
    losses = {"soap": (0.1, 0.4), "rows": (0.4, 0.1), "second": (0.2, 0.2), "third": (0.3, 0.3)}
    results = [
        result(name, [[loss, loss]], problem=problem, seconds=17.0 if name == "soap" else 1.0)
        for name, each in losses.items()
        for problem, loss in zip(("model", "table"), each, strict=True)
    ]
    found = document(*results, embeddings=["table"])
    dense, tables = (first for first, *_ in advice.advice(found))
    assert dense == (
        "For dense models start with soap, but it is the last of 4 on table, where a step takes 17 "
        "times as long as with rows."
    )
    assert tables == (
        "For models with embedding tables start with rows, but it is the last of 4 on model."
    )
    for text in (report.markdown(found), "".join(Page(page.write(found, {})).texts)):
        assert dense in text and tables in text
    # A problem of one kind alone gives advice on that kind alone.
    [[only, *_]] = advice.advice(document(*results[1::2], embeddings=["table"]))
    assert only == "For models with embedding tables start with rows."


def test_widest_range_of_rates_is_a_multiple():
    wide = result("wide", [[0.4, 0.4], [0.3, 0.3], [0.2, 0.2]])
    [[_, *others]] = advice.advice(document(wide, result("other", [[9.0, 9.0], [0.1, 0.1]])))
    assert "cannot be tuned: wide" in others[-1]
    assert others[-1].endswith("the largest is on average 100 times the smallest.")


def test_who_has_no_run_on_every_problem_is_not_recommended():
    both = [result("both", [[0.3, 0.3]], problem=p) for p in "pq"]
    other = [result("other", [[0.4, 0.4]], problem=p) for p in "pq"]
    [[begin, *others]] = advice.advice(document(*both, *other, result("one", [[0.1, 0.1]])))
    assert begin == "For dense models start with both."
    assert "1 optimizer without a run on all of p and q not included." in others
    [[none]] = advice.advice(document(both[0], other[1]))
    assert none == "For dense models no optimizer has a finite loss on all of p and q."


def test_equal_curves_share_a_place():
    names = {"a": 0.1, "b": 0.1, "c": 0.2}
    found = document(*[result(name, [[loss, loss]]) for name, loss in names.items()])
    assert summary.places(found, "p") == {"a": 1, "b": 1, "c": 3}
    assert [row["#"] for row in report.table(found, "p")] == ["1", "1", "3"]
    [[begin, *others]] = advice.advice(found)
    assert begin == "For dense models start with a." and "Equal to it on p: b." in others
    assert "Table: 3 optimizers, 2 different curves" in Page(page.write(found, {})).texts


def test_unequal_arguments():
    a = result("a", [[0.1, 0.1]], arguments={"b1": 0.9, "b2": 0.999, "only": 1})
    b = result("b", [[0.1, 0.1]], arguments={"b1": 0.9, "b2": 0.99})
    [found] = summary.unequal_arguments(document(a, b))
    values = [{"value": "0.999", "optimizers": ["a"]}, {"value": "0.99", "optimizers": ["b"]}]
    assert found == {"argument": "b2", "values": values}


def test_the_defaults_of_amsgrad_are_shown():
    found = race.run([line()], ["adam", "amsgrad", "momentum"], settings=QUICK)
    by_name = {r["optimizer"]: r["arguments"] for r in found["results"]}
    assert by_name["adam"]["b2"] == 0.999 and by_name["amsgrad"]["b2"] == 0.99
    assert by_name["momentum"] == {"momentum": 0.9, "nesterov": False}  # 0.9 is the race's
    text = "".join(Page(page.write(found, {})).texts)
    assert "0.99: amsgrad" in text and "0.999: adam" in text


# --------------------------------------------------------------------------------- the page
def test_the_page_of_a_race():
    found = race.run(
        [line(), line(name="aimless", target=None)],
        ["adam", "custom_adam", "momentum"],
        settings=QUICK,
    )
    text = page.write(found, {"a.png": b"\x89PNG"})
    shown = Page(text)
    assert shown.data == json.loads(json.dumps(page.data(found)))
    kinds = ["ranks", "profile", "loss-0", "rates-0", "target-0", "loss-1", "rates-1"]
    assert set(kinds) <= set(shown.ids()) and "target-1" not in shown.ids()
    assert len(shown.ids()) == len(set(shown.ids()))
    assert "adam = custom_adam" in "".join(shown.texts)
    assert [o["name"] for o in shown.data["optimizers"]] == ["adam", "custom_adam", "momentum"]
    assert [len(p["lines"]) for p in shown.data["problems"]] == [2, 2]
    first = next(x for x in shown.data["problems"][0]["lines"] if "adam" in x["names"])
    assert first["names"] == ["adam", "custom_adam"] and len(first["rates"]) == 2
    assert first["seconds from"] <= first["seconds"] <= first["seconds to"]
    # Nothing is loaded from elsewhere; all that has an address is data.
    sources = [a for _, attrs in shown.elements for k, a in attrs.items() if k in ("src", "href")]
    assert sources and all(a.startswith("data:") for a in sources)
    assert "@import" not in text.split("</style>")[0] and "url(" not in text.split("</style>")[0]
    assert text.count("plotly.js v") == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: document(result("only", [[0.1, 0.2]])),
        lambda: document(
            result("one", [[0.1]], reached=(3,)), result("two", [[0.2]], reached=(4,))
        ),
        lambda: document(*[result(n, [[None, None]], reached=(None, None)) for n in "ab"]),
        lambda: document(skipped=[{"optimizer": "o", "problem": "p", "skipped": "reason"}]),
        lambda: document(result("a", [[0.1, 0.2]]), result("b", [[0.1, 0.2]], problem="q")),
        lambda: document(result("a", [[0.0, -1.0]]), result("b", [[0.1, None]])),
        lambda: document(result("a", [[0.1, 0.2]]), targets={"p": None}),
    ],
    ids=["one", "one seed", "diverged", "skipped", "disjoint", "negative", "no target"],
)
def test_small_races_have_a_page(make):
    shown = Page(page.write(make(), {}))
    assert shown.data["optimizers"] == [] or shown.data["ranks"]
    assert "ranks" in shown.ids()


def test_an_interrupted_race_has_a_page(tmp_path):
    def stop(progress):
        if progress.optimizer == "momentum":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        race.run([line()], ["adam", "momentum"], settings=QUICK, out=tmp_path, watch=stop)
    shown = Page((tmp_path / "index.html").read_text())
    assert "Interrupted: 1 of 2 runs are finished." in shown.texts
    assert [o["name"] for o in shown.data["optimizers"]] == ["adam"]


def test_names_are_text():
    nasty = "</script><b>x</b>"
    found = document(result(nasty, [[0.1, 0.2]], problem=nasty))
    shown = Page(page.write(found, {}))
    assert shown.data["optimizers"][0]["name"] == shown.data["problems"][0]["name"] == nasty
    assert nasty in shown.texts
    assert re.sub(r"\s", "", "".join(shown.texts)).count("<b>x</b>") == sum(
        nasty in text for text in shown.texts
    )


# ---------------------------------------------------------------------- optimizers by name
def my_factory(learning_rate=0.3, momentum=0.9):
    """An optimizer of another module."""
    return optax.sgd(learning_rate, momentum)


def needs_more(learning_rate, other):
    return optax.sgd(learning_rate + other)


def rate_alone(learning_rate):
    return learning_rate


def test_optimizers_of_optax_and_of_modules():
    names = ["optax.adamw", "optax.contrib.muon", f"{__name__}:my_factory", "momentum"]
    found = race.run([line()], names, settings=race.Settings(seeds=1, timed_steps=1, num_rates=3))
    assert [r["optimizer"] for r in found["results"]] == names and not found["skipped"]
    assert [r["family"] for r in found["results"]] == ["other libraries"] * 3 + ["SGD, sign"]
    assert found["results"][0]["arguments"]["b2"] == 0.999
    mine = found["results"][2]
    assert mine["arguments"] == {"momentum": 0.9} and 0.3 in [r["rate"] for r in mine["rates"]]


def test_factories_are_the_same_as_their_names():
    names = ["optax.adam", f"{__name__}:my_factory"]
    by_name, by_factory = (
        race.run([line()], given, settings=QUICK)["results"]
        for given in (names, [optax.adam, my_factory])
    )
    assert [r["optimizer"] for r in by_factory] == names
    assert [r["curve"] for r in by_factory] == [r["curve"] for r in by_name]
    [ours] = race.run([line()], ["adam"], settings=QUICK)["results"]
    np.testing.assert_allclose(by_name[0]["curve"]["mean"], ours["curve"]["mean"], rtol=1e-3)


def test_a_changed_factory_is_run_again(tmp_path):
    def run(factory):
        seen = []
        watch = lambda p: seen.append(p.optimizer)
        race.run([line()], [factory], settings=QUICK, out=tmp_path, watch=watch)
        return len(seen) - 1

    first, second = (lambda rate, b=b: optax.sgd(rate, b) for b in (0.5, 0.9))
    assert [run(first), run(first), run(second), run(first)] == [1, 0, 1, 0]


def test_tables_give_other_libraries_dense_gradients():
    problem = race.PROBLEMS["words"]()
    settings = race.Settings(rates=(0.01,), seeds=1, steps=3, timed_steps=1)
    [found] = race.run([problem], ["optax.adam"], settings=settings)["results"]
    assert np.isfinite(found["loss"]["mean"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("ftlr", "did you mean ftrl"),
        ("adan", "did you mean adam"),
        ("optax.adamv", r"did you mean optax\.adam"),
        ("optax.contrib.muonn", r"did you mean optax\.contrib\.muon"),
        ("optax.chain", "cannot be called with only a learning rate|must return an optax"),
        ("nomodule:factory", "'nomodule' cannot be imported"),
        (f"{__name__}:my_factori", "did you mean .*:my_factory"),
        (f"{__name__}:needs_more", "cannot be called with only a learning rate"),
        (f"{__name__}:rate_alone", "must return an optax transformation"),
        (f"{__name__}:math", "must be a function"),
        (0.1, "a name or a function"),
        (optax.adam(0.1), "a name or a function"),
    ],
    ids=lambda x: x if isinstance(x, str) else type(x).__name__,
)
def test_unknown_optimizers_from_python(given, message):
    with pytest.raises(ValueError, match=message):
        race.run([line()], [given], settings=QUICK)


def test_unknown_problems_from_python():
    with pytest.raises(ValueError, match="did you mean digits"):
        race.run(["digit"], ["adam"], settings=QUICK)


def test_two_factories_of_one_name_are_refused():
    first, second = (lambda rate, b=b: optax.sgd(rate, b) for b in (0.5, 0.9))
    with pytest.raises(ValueError, match="rename one of the factories"):
        race.run([line()], [first, second], settings=QUICK)
