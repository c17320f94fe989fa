"""How likely the target takes a drafted token, learned from those that it has judged.

Two sources name children: the draft model, with a confidence, and the look-up in the text, with an
estimate.  Neither is calibrated on the text at hand: a head is too sure of itself or not sure enough, a
look-up is right nearly always in a loop and hardly ever in sampled prose.  The two are joined by
logistic mixing (Mattern, "Mixing strategies in data compression", DCC 2012): the log odds of the
answer are a weighted sum of the log odds of the sources, and after every verified parent the weights
take one step of gradient descent on the coding cost of what happened.

Knows scores and outcomes; does not know trees, where scores come from, or what is done with the
answer.  A request begins with the same weights as every other, so its figures do not depend on
what ran before it.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Case = Literal["both", "drafted", "found", "unnamed"]
_STEEPEST = 8.0  # log odds beyond which a source is not believed


class Evidence(NamedTuple):
    """What is known of a child before the target has spoken.

    drafted    log confidence of the draft model; -inf if it did not name the child, or was not asked
    looked_up  log estimate of the look-up; -inf if it did not name it
    asked      whether the draft model has been asked for its parent's children
    """

    drafted: float
    looked_up: float
    asked: bool


class _Weights(NamedTuple):
    bias: float
    drafted: float
    looked_up: float


# What a request begins with, and how fast it learns: chosen on held-out text of the demonstration
# model that is in no benchmark.  Sampled text repeats itself far less than greedy text does.
_GREEDY: dict[Case, _Weights] = {
    "both": _Weights(0.5, 0.6, 1.3), "drafted": _Weights(0.0, 1.0, 0.0),
    "found": _Weights(0.5, 0.0, 1.4), "unnamed": _Weights(-0.5, 0.0, 1.2)}
_SAMPLED: dict[Case, _Weights] = {
    "both": _Weights(-0.2, 0.8, 0.2), "drafted": _Weights(0.0, 1.0, 0.0),
    "found": _Weights(-1.5, 0.0, 0.8), "unnamed": _Weights(-3.0, 0.0, 0.6)}
_GREEDY_RATE, _SAMPLED_RATE = 0.05, 0.01


class Acceptance:
    """The estimate of one request; :meth:`learn` improves it."""

    def __init__(self, greedy: bool, learns: bool = True) -> None:
        """``greedy``: whether the text is drawn without noise; ``learns``: whether outcomes count."""
        self._weights = dict(_GREEDY if greedy else _SAMPLED)
        self._rate = (_GREEDY_RATE if greedy else _SAMPLED_RATE) if learns else 0.0

    def probability(self, evidence: Evidence) -> float:
        """That the target takes the child, given that it has taken the parent: in (0, 1)."""
        case, drafted, looked_up = _odds(evidence)
        return _logistic(self._weights[case], drafted, looked_up)

    def drafted(self, log_confidences: NDArray[np.float64]) -> NDArray[np.float64]:
        """Log probabilities of children [...] that only the draft model names; the same for each as
        :meth:`probability`, for many at once."""
        p = np.exp(log_confidences)
        with np.errstate(divide="ignore"):
            odds = np.clip(np.log(p) - np.log1p(-p), -_STEEPEST, _STEEPEST)
        weights = self._weights["drafted"]
        return np.asarray(-np.logaddexp(0.0, -np.clip(weights.bias + weights.drafted * odds, -30.0, 30.0)))

    def learn(self, evidence: Evidence, taken: bool) -> None:
        """The target has taken the parent, and this child of it or another token."""
        case, drafted, looked_up = _odds(evidence)
        weights = self._weights[case]
        step = self._rate * (taken - _logistic(weights, drafted, looked_up))
        self._weights[case] = _Weights(weights.bias + step, weights.drafted + step * drafted,
                                       weights.looked_up + step * looked_up)


def _odds(evidence: Evidence) -> tuple[Case, float, float]:
    """Which weights apply, and the log odds of both sources; 0 for one that is silent."""
    drafted, looked_up, asked = evidence
    if drafted > -math.inf:
        if looked_up > -math.inf:
            return "both", _log_odds(drafted), _log_odds(looked_up)
        return "drafted", _log_odds(drafted), 0.0
    return ("unnamed" if asked else "found"), 0.0, _log_odds(looked_up)


def _log_odds(log_p: float) -> float:
    p = math.exp(log_p)
    if not 0 < p < 1:
        return math.copysign(_STEEPEST, p - 0.5)
    return max(-_STEEPEST, min(_STEEPEST, math.log(p / (1 - p))))


def _logistic(weights: _Weights, drafted: float, looked_up: float) -> float:
    x = weights.bias + weights.drafted * drafted + weights.looked_up * looked_up
    return 1 / (1 + math.exp(-max(-30.0, min(30.0, x))))
