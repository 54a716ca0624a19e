"""RETURNN's learning rate control by epochs, on the host."""

from __future__ import annotations

import functools
import itertools
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any

from ...core.checks import check, check_choice, check_not_negative, check_size
from .keys import EPOCH_OPTIONS, UNREAD, near_misses
from .values import number

# They resemble its options, but are the updater's, the engine's or another control's.
_OTHERS = ("learning_rate", "learning_rate_file", "pretrain_learning_rate", *UNREAD)


class LearningRateControl:
    r"""The learning rate of each epoch from the scores of earlier epochs, as in RETURNN.

    .. code-block:: python

        control = LearningRateControl({"learning_rate": 1e-3, "learning_rate_control": "newbob"})
        for epoch in range(1, 21):
            rate = control.rate(epoch)          # for update(..., learning_rate=rate)
            control.report(epoch, score)        # of the development data, lower is better

    ``learning_rate_control`` is one of

    - ``constant``: the rate is unchanged;
    - ``newbob_rel`` (or ``newbob``): the rate is multiplied by ``newbob_learning_rate_decay`` (0.5)
      where :math:`(s_{e-1} - s_{e-2}) / |s_{e-1}|` is above ``newbob_relative_error_threshold``
      (-0.01), otherwise by ``newbob_learning_rate_growth`` (1);
    - ``newbob_abs``: the same with :math:`s_{e-1} - s_{e-2}` and ``newbob_error_threshold``;
    - ``newbob_multi_epoch``: as ``newbob_rel``, with the mean of the last
      ``newbob_multi_num_epochs`` (5) relative differences, every ``newbob_multi_update_interval``
      epochs; the rate grows if it is below ``newbob_relative_error_grow_threshold``.

    ``learning_rates`` sets the rates of some epochs: a list from epoch 1 on, or a dict.
    ``min_learning_rate`` is the lower bound of decays. ``docs/returnn.md`` lists all options.

    Example:
        >>> import optzoo
        >>> control = optzoo.interop.returnn.LearningRateControl(
        ...     {"learning_rate": 0.1, "learning_rate_control": "newbob"}
        ... )
        >>> for epoch, score in [(1, 2.0), (2, 1.0), (3, 1.0)]:
        ...     control.report(epoch, score)
        >>> print(control.rate(3), control.rate(4))  # halved, as the score is no better
        0.1 0.05

    Args:
        config: RETURNN's config, or the part of it about learning rates.

    Raises:
        TypeError: if an option has a wrong type, including ``learning_rates`` as a string, which
            RETURNN would evaluate.
        ValueError: if an option is out of range, or if keys resemble an option.
    """

    def __init__(self, config: Mapping[str, Any]):
        given = {k: v for k, v in config.items() if v is not None}
        if wrong := near_misses(given, EPOCH_OPTIONS, _OTHERS):
            raise ValueError(f"config: {'; '.join(wrong)}")
        real = lambda key, default: number(key, given.get(key, default))
        size = lambda key, default, least: check_size(least, **{key: given.get(key, default)})
        self._first_rate = real("learning_rate", 1.0)
        self._least = real("min_learning_rate", 0.0)
        check_not_negative(learning_rate=self._first_rate, min_learning_rate=self._least)
        self._decay = _factor(given, "learning_rate_decay", 0.5)
        self._growth = _factor(given, "learning_rate_growth", 1.0)
        self._threshold = real("newbob_relative_error_threshold", -0.01)
        self._grow_threshold = real("newbob_relative_error_grow_threshold", self._threshold)
        check(
            f"at most newbob_relative_error_threshold ({self._threshold})",
            lambda v: v <= self._threshold,
            infinite=True,
            newbob_relative_error_grow_threshold=self._grow_threshold,
        )
        self._by_old = bool(given.get("newbob_relative_error_div_by_old", False))
        self._by_rate = bool(given.get("learning_rate_control_relative_error_relative_lr", False))
        self._min_epochs = size("learning_rate_control_min_num_epochs_per_new_lr", 0, 0)
        self._num_epochs = size("newbob_multi_num_epochs", 5, 1)
        self._interval = size("newbob_multi_update_interval", self._num_epochs, 1)
        measure = given.get("learning_rate_control_error_measure", [])
        self._measures = [measure] if isinstance(measure, str) else list(measure)
        absolute = real("newbob_error_threshold", -0.01)
        relative = functools.partial(self._newbob, self._relative_error, self._threshold)
        rules = {
            "constant": self._last_rate,
            "newbob": relative,
            "newbob_rel": relative,
            "newbob_relative": relative,
            "newbob_abs": functools.partial(self._newbob, self._difference, absolute),
            "newbob_multi_epoch": self._newbob_multi_epoch,
        }
        name = given.get("learning_rate_control", "constant")
        check_choice(rules, learning_rate_control=name)
        self._rule = rules[name]
        self._rates: dict[int, float] = _fixed(given.get("learning_rates"))
        self._scores: dict[int, dict[str, float]] = {}

    def rate(self, epoch: int) -> float:
        """The learning rate of an epoch, from 1; epochs must be requested in order."""
        epoch = check_size(1, epoch=epoch)
        if epoch not in self._rates:
            self._rates[epoch] = self._new_rate(epoch)
        return self._rates[epoch]

    def report(self, epoch: int, score: float | Mapping[str, float]) -> None:
        """Reports the scores of an epoch.

        Args:
            epoch: the number of the epoch, from 1.
            score: the score of the development data, lower is better; or a dict of scores by name,
                from which ``learning_rate_control_error_measure`` selects one: by default
                ``dev_score``, or else the first whose name begins with ``dev_``.

        Raises:
            ValueError: if a score is not finite, which indicates that training has diverged.
        """
        scores = dict(score) if isinstance(score, Mapping) else {"dev_score": score}
        for name, value in scores.items():
            if not isinstance(value, numbers.Real) or not math.isfinite(value):
                raise ValueError(
                    f"{name} of epoch {epoch} must be a finite number, got {value!r}: the "
                    "training may have diverged"
                )
        self.rate(epoch)
        self._scores.setdefault(epoch, {}).update({k: float(v) for k, v in scores.items()})

    def state_dict(self) -> dict[str, Any]:
        """All rates and scores so far, as values that JSON can represent."""
        as_text = lambda table: {str(epoch): value for epoch, value in table.items()}
        scores = {epoch: dict(one) for epoch, one in self._scores.items()}
        return {"rates": as_text(self._rates), "scores": as_text(scores)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned."""
        self._rates = {int(epoch): float(rate) for epoch, rate in state["rates"].items()}
        self._scores = {int(epoch): dict(one) for epoch, one in state["scores"].items()}

    # The rules

    def _new_rate(self, epoch: int) -> float:
        n = self._min_epochs
        if n > 1:
            last = [self._rates[e] for e in self._before(epoch)[-n:]]
            if len(set(last)) >= 2 or 0 < len(last) < n:
                return last[-1]
        return self._rule(epoch)

    def _newbob(self, measured: Callable[..., float | None], threshold: float, epoch: int) -> float:
        last = self._before(epoch)[-2:]
        error = measured(*last) if len(last) == 2 else None
        if error is None:
            return self._last_rate(epoch)
        return self._changed(self._last_rate(epoch), error > threshold, error <= threshold)

    def _newbob_multi_epoch(self, epoch: int) -> float:
        rate = self._last_rate(epoch)
        if self._interval > 1 and epoch % self._interval != 1:
            return rate
        last = self._before(epoch)[-self._num_epochs - 1 :]
        errors = [self._relative_error(*pair) for pair in itertools.pairwise(last)]
        known = [e for e in errors if e is not None]
        if not known or len(known) < len(errors):
            return rate
        mean = sum(known) / len(known)
        return self._changed(rate, mean > self._threshold, mean < self._grow_threshold)

    def _changed(self, rate: float, decays: bool, grows: bool) -> float:
        if decays:
            return max(_times(rate, self._decay), self._least)
        return _times(rate, self._growth) if grows else rate

    # The past

    def _before(self, epoch: int) -> list[int]:
        return sorted(e for e in self._rates if e < epoch)

    def _last_rate(self, epoch: int) -> float:
        before = self._before(epoch)
        return self._rates[before[-1]] if before else self._first_rate

    def _difference(self, old: int, new: int) -> float | None:
        """The increase of the score; None if a score is missing or the measures differ."""
        (old_name, old_score), (new_name, new_score) = self._score(old), self._score(new)
        if old_score is None or new_score is None or old_name != new_name:
            return None
        return new_score - old_score

    def _relative_error(self, old: int, new: int) -> float | None:
        difference = self._difference(old, new)
        if difference is None:
            return None
        _, by = self._score(old if self._by_old else new)
        error = difference / abs(by) if by else math.copysign(math.inf, difference)
        if difference == 0:
            return 0.0
        if self._by_rate and self._rates[new] > 0:
            error /= self._rates[new] / self._first_rate
        return error

    def _score(self, epoch: int) -> tuple[str | None, float | None]:
        """The name and the value of the score to use."""
        scores = self._scores.get(epoch)
        if not scores:
            return None, None
        wanted = [name for m in [*self._measures, "dev_score"] for name in (m, f"{m}_output")]
        wanted += sorted(s for s in scores if s.startswith("dev_score_output/output"))
        wanted += sorted(s for s in scores if s.startswith("dev_score_output/"))
        wanted += sorted(s for s in scores if s.startswith("dev_"))
        wanted += ["train_score", "train_score_output", min(scores)]
        name = next(name for name in wanted if name in scores)
        return name, scores[name]


def _factor(given: Mapping[str, Any], name: str, default: float) -> Any:
    """A factor of the rate, or a function of it; its old name begins with ``newbob_``."""
    value = given.get(name, given.get(f"newbob_{name}", default))
    if not callable(value) and not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number or a function of the rate, got {value!r}")
    return value


def _times(rate: float, factor: Any) -> float:
    return float(factor(rate) if callable(factor) else rate * factor)


def _fixed(rates: Any) -> dict[int, float]:
    """The rates in ``learning_rates``, by epoch."""
    if not rates:
        return {}
    if not isinstance(rates, list | tuple | Mapping):
        raise TypeError(
            f"learning_rates must be a list or a dict by epoch, got {rates!r}; strings are not "
            "evaluated"
        )
    by_epoch = rates if isinstance(rates, Mapping) else dict(enumerate(rates, start=1))
    for epoch, rate in by_epoch.items():
        if not isinstance(epoch, int) or not isinstance(rate, numbers.Real):
            raise TypeError(f"learning_rates must map epochs to numbers, got {epoch!r}: {rate!r}")
    return {epoch: float(rate) for epoch, rate in by_epoch.items()}
