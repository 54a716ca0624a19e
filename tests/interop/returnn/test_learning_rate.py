"""The control of the learning rate does what RETURNN's own does."""

import json

import numpy as np
import pytest
from returnn.config import Config
from returnn.learning_rate_control import load_learning_rate_control_from_config

from optzoo.interop.returnn.learning_rate import LearningRateControl

NEWBOB = {"learning_rate": 0.1, "learning_rate_control": "newbob"}
MULTI = {"learning_rate": 0.1, "learning_rate_control": "newbob_multi_epoch"}
CONFIGS = {
    "default": {},
    "constant": {"learning_rate": 0.3, "learning_rate_control": "constant"},
    "list": {"learning_rate": 0.3, "learning_rates": [0.1, 0.2, 0.4]},
    "dict": {**NEWBOB, "learning_rates": {1: 0.01, 4: 0.5, 9: 0.2}},
    "newbob": NEWBOB,
    "newbob_rel": {**NEWBOB, "learning_rate_control": "newbob_rel", "min_learning_rate": 0.02},
    "by_old": {**NEWBOB, "newbob_relative_error_div_by_old": True},
    "threshold": {**NEWBOB, "newbob_relative_error_threshold": 0.05},
    "by_rate": {**NEWBOB, "learning_rate_control_relative_error_relative_lr": True},
    "factors": {
        **NEWBOB,
        "newbob_learning_rate_decay": 0.7,
        "newbob_learning_rate_growth": 1.1,
        "learning_rate_control_min_num_epochs_per_new_lr": 3,
    },
    "new_names": {**NEWBOB, "learning_rate_decay": 0.9, "learning_rate_growth": 1.2},
    "function": {**NEWBOB, "newbob_learning_rate_decay": lambda rate: rate - 0.001},
    "abs": {**NEWBOB, "learning_rate_control": "newbob_abs", "newbob_error_threshold": 0.1},
    "measure": {**NEWBOB, "learning_rate_control_error_measure": "dev_error"},
    "measures": {**NEWBOB, "learning_rate_control_error_measure": ["dev_x", "train_score"]},
    "multi": MULTI,
    "multi_often": {
        **MULTI,
        "newbob_multi_num_epochs": 3,
        "newbob_multi_update_interval": 1,
        "newbob_learning_rate_growth": 1.3,
        "newbob_relative_error_threshold": 0.02,
        "newbob_relative_error_grow_threshold": -0.05,
    },
}


def scores(seed):
    r = np.random.default_rng(seed)
    keys = ["dev_score", "dev_error", "train_score"]
    return {k: float(2 + 3 / (1 + seed) + 0.3 * r.normal()) for k in keys}


@pytest.mark.parametrize("name", CONFIGS)
def test_rates_are_those_of_returnn(name):
    theirs = load_learning_rate_control_from_config(Config(CONFIGS[name]))
    ours, half = LearningRateControl(CONFIGS[name]), LearningRateControl(CONFIGS[name])
    for epoch in range(1, 25):
        if epoch == 12:  # a restart
            half.load_state_dict(json.loads(json.dumps(ours.state_dict())))
            ours = half
        assert ours.rate(epoch) == theirs.get_learning_rate_for_epoch(epoch), epoch
        if epoch != 6:  # one is lost
            ours.report(epoch, scores(epoch))
            theirs.set_epoch_error(epoch, scores(epoch))
    used = {ours.rate(epoch) for epoch in range(1, 25)}
    assert len(used) > 1 or name in ("default", "constant")


@pytest.mark.parametrize(
    "names",
    [
        ["dev_score_output/output_b", "dev_score_output/output_a", "train_score"],
        ["dev_score_output/z", "dev_score_output/y", "dev_a"],
        ["dev_z", "dev_b", "train_score"],
        ["train_score", "a"],
        ["train_score_output", "a"],
        ["z", "y"],
    ],
)
def test_the_score_that_counts_is_that_of_returnn(names):
    theirs = load_learning_rate_control_from_config(Config(NEWBOB))
    ours = LearningRateControl(NEWBOB)
    for epoch in range(1, 9):
        assert ours.rate(epoch) == theirs.get_learning_rate_for_epoch(epoch)
        some = {name: float(np.sin(i + epoch * (i + 1)) + 3) for i, name in enumerate(names)}
        ours.report(epoch, some)
        theirs.set_epoch_error(epoch, some)


def test_a_score_without_a_name():
    control = LearningRateControl(NEWBOB)
    for epoch, score in enumerate([2.0, 1.0, 1.0], start=1):
        assert control.rate(epoch) == 0.1
        control.report(epoch, score)
    assert control.rate(4) == 0.05


def test_scores_of_zero():
    for last, rate in ((0.0, 0.05), (1.0, 0.05), (-1.0, 0.1)):
        control = LearningRateControl({**NEWBOB, "newbob_relative_error_div_by_old": True})
        control.report(1, 0.0)
        control.report(2, last)
        assert control.rate(3) == rate


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"learning_rates": "[0.1] * 3"}, TypeError, "strings are not evaluated"),
        ({"learning_rates": {"1": 0.1}}, TypeError, "map epochs to numbers"),
        ({"learning_rates": [None]}, TypeError, "map epochs to numbers"),
        ({"learning_rate": "fast"}, TypeError, "learning_rate must be a number"),
        ({"learning_rate": -0.1}, ValueError, "learning_rate must be zero or positive"),
        ({"learning_rate_control": "newbop"}, ValueError, "must be one of"),
        ({"newbob_learn_rate_decay": 0.5}, ValueError, "no option 'newbob_learn_rate_decay'"),
        ({"newbob_learning_rate_decay": "0.5"}, TypeError, "a function of the rate"),
        ({"newbob_multi_num_epochs": 0}, ValueError, "newbob_multi_num_epochs must be at least 1"),
        ({"newbob_relative_error_grow_threshold": 0.0}, ValueError, "must be at most newbob"),
    ],
)
def test_bad_options(config, error, message):
    with pytest.raises(error, match=message):
        LearningRateControl(config)


def test_bad_epochs_and_scores():
    control = LearningRateControl(NEWBOB)
    with pytest.raises(ValueError, match="epoch must be at least 1, got 0"):
        control.rate(0)
    with pytest.raises(ValueError, match="dev_score of epoch 1 must be a finite number, got nan"):
        control.report(1, float("nan"))
