"""The published runs of TensorFlow 1 on quadratic_deep, replayed."""

import numpy as np
import pytest

from optzoo import race
from optzoo.race import published, report

OPTIMIZERS = sorted({run.optimizer for run in published.published_runs()})


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_follows_the_published_runs(optimizer):
    """At every published epoch, and at the end."""
    facts = published.compare(optimizer)
    assert facts["difference"] < 1e-6
    np.testing.assert_allclose(facts["here"], facts["published"], rtol=5e-7)


def test_the_comparison_can_fail():
    """Another order of the examples, or a rate that differs by one part in a thousand, is seen."""
    [run] = [r for r in published.published_runs() if (r.optimizer, r.seed) == ("momentum", 43)]
    rate = 1.001 * run.arguments["learning_rate"]
    for other in (
        run._replace(shuffle="2/44"),
        run._replace(arguments={**run.arguments, "learning_rate": rate}),
        run._replace(hessian=1),
    ):
        [losses] = published.replay([other])
        assert published.difference(run, losses) > 1e-4


def test_race_with_published_runs():
    settings = race.Settings(rates=(0.0158,), seeds=2, steps=14, timed_steps=2)
    document = race.run(["quadratic_deep"], ["gradient_descent", "ftrl"], settings=settings)
    rows = {row["optimizer"]: row for row in report.table(document, "quadratic_deep")}
    assert rows["ftrl"]["published"] == rows["ftrl"]["replayed"] == "-"
    assert rows["gradient_descent"]["published"] == "87.3917 (learning_rate=0.0158)"
    assert rows["gradient_descent"]["replayed"].startswith("87.3917 (differs by ")
    # The race itself takes the same steps: seeds 42 and 43, one epoch is seven steps.
    [result] = [r for r in document["results"] if r["optimizer"] == "gradient_descent"]
    [run] = [
        r for r in published.published_runs() if (r.optimizer, r.seed) == ("gradient_descent", 43)
    ]
    assert result["curve"]["steps"] == list(range(15))
    spread = sorted(result["curve"][key][7] for key in ("low", "high"))
    assert min(abs(loss / run.test[1] - 1) for loss in spread) < 1e-3  # the rate is rounded


def test_at_most_the_known_seeds():
    problem = published.quadratic_deep()
    assert problem.batches(9, 15).shape == (15, 128)
    assert (problem.batches(0, 8)[7] == problem.batches(0, 8)[0]).all()
    with pytest.raises(ValueError, match="at most 10, got 11"):
        race.run(["quadratic_deep"], ["adam"], settings=race.Settings(seeds=11))
