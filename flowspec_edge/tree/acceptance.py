"""The acceptance rule: follow the target's own tokens through the draft tree.

The target's token after a node is X = argmax(log p + g) (``sampling.rule``; greedy: no noise), whatever was
drafted, so the output is that of plain decoding.  The child with token X is accepted, then its child, and so
on; where no child has X, the round ends and X is the next root.

The probability that the target accepts a draft token is learned while requests run. Neither the draft
model's confidence nor the text look-up's estimate is calibrated on the text at hand: a head may be over- or
underconfident, a look-up is nearly always right in a loop and rarely in sampled prose. Logistic mixing
(Mattern, "Mixing strategies in data compression", DCC 2012) adds their weighted log odds; every verified
parent gives one step of gradient descent on the coding cost.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flowspec_edge.tree.draft_tree import DraftTree, Node


def accepted_path(tree: DraftTree) -> tuple[list[Node], int]:
    """Return the accepted nodes below the root, in order, and the token that follows them.

    No child has that token; it is -1 while the path's end is unverified.  Accepted nodes may be verified, in flight or
    unsent (FlowSpec eq. 2).
    """
    path: list[Node] = []
    node = tree.root
    while node.successor >= 0:
        child = tree.child(node, node.successor)
        if child is None:
            return path, node.successor
        path.append(child)
        node = child
    return path, -1


Case = Literal["both", "draft", "lookup", "unnamed"]
_STEEPEST = 8.0  # log odds of a source are clipped here


class Evidence(NamedTuple):
    """Log scores of an unverified child; -inf if that source did not name it.

    ``parent_expanded`` says whether a draft model expanded its parent.
    """

    draft_score: float
    lookup_score: float
    parent_expanded: bool


class _Weights(NamedTuple):
    bias: float
    draft: float
    lookup: float


# Initial weights and learning rates, fitted to held-out text of the demonstration model that no benchmark
# uses.  Sampled text repeats itself far less than greedy text.
_GREEDY: dict[Case, _Weights] = {
    "both": _Weights(0.5, 0.6, 1.3), "draft": _Weights(0.0, 1.0, 0.0),
    "lookup": _Weights(0.5, 0.0, 1.4), "unnamed": _Weights(-0.5, 0.0, 1.2)}
_SAMPLED: dict[Case, _Weights] = {
    "both": _Weights(-0.2, 0.8, 0.2), "draft": _Weights(0.0, 1.0, 0.0),
    "lookup": _Weights(-1.5, 0.0, 0.8), "unnamed": _Weights(-3.0, 0.0, 0.6)}
_GREEDY_RATE, _SAMPLED_RATE = 0.05, 0.01


class AcceptanceWeights:
    """What requests have learned about one draft model, by whether their texts are drawn without noise."""

    def __init__(self) -> None:
        self._weights = {True: dict(_GREEDY), False: dict(_SAMPLED)}

    def weights(self, greedy: bool) -> dict[Case, _Weights]:
        """Return the weights themselves, which a request that learns replaces."""
        return self._weights[greedy]


class AcceptanceEstimator:
    def __init__(self, greedy: bool, learns: bool = True, weights: AcceptanceWeights | None = None) -> None:
        """Begin with the initial weights, or with those that earlier requests have learned.

        greedy   the text is drawn without noise
        learns   False keeps the initial weights
        weights  to begin with and to improve; None: this request begins anew
        """
        self._weights = (weights if weights and learns else AcceptanceWeights()).weights(greedy)
        self._rate = (_GREEDY_RATE if greedy else _SAMPLED_RATE) if learns else 0.0

    def probability(self, evidence: Evidence) -> float:
        """P(the target accepts the child | it accepted the parent), in (0, 1)."""
        case, draft, lookup = _odds(evidence)
        return _logistic(self._weights[case], draft, lookup)

    def draft_estimates(self, log_confidences: NDArray[np.float64]) -> NDArray[np.float64]:
        """Log of :meth:`probability`, elementwise, for children that only the draft model names."""
        p = np.exp(log_confidences)
        with np.errstate(divide="ignore"):
            odds = np.clip(np.log(p) - np.log1p(-p), -_STEEPEST, _STEEPEST)
        weights = self._weights["draft"]
        return np.asarray(-np.logaddexp(0.0, -np.clip(weights.bias + weights.draft * odds, -30.0, 30.0)))

    def learn(self, evidence: Evidence, accepted: bool) -> None:
        """Learn that the target accepted the parent, and then this child (``accepted``) or another token."""
        case, draft, lookup = _odds(evidence)
        weights = self._weights[case]
        step = self._rate * (accepted - _logistic(weights, draft, lookup))
        self._weights[case] = _Weights(weights.bias + step, weights.draft + step * draft,
                                       weights.lookup + step * lookup)


def _odds(evidence: Evidence) -> tuple[Case, float, float]:
    """Return the weights that apply, and the log odds of both sources; 0 for a source without a score."""
    draft, lookup, parent_expanded = evidence
    if draft > -math.inf:
        if lookup > -math.inf:
            return "both", _log_odds(draft), _log_odds(lookup)
        return "draft", _log_odds(draft), 0.0
    return ("unnamed" if parent_expanded else "lookup"), 0.0, _log_odds(lookup)


def _log_odds(log_p: float) -> float:
    p = math.exp(log_p)
    if not 0 < p < 1:
        return math.copysign(_STEEPEST, p - 0.5)
    return max(-_STEEPEST, min(_STEEPEST, math.log(p / (1 - p))))


def _logistic(weights: _Weights, draft: float, lookup: float) -> float:
    x = weights.bias + weights.draft * draft + weights.lookup * lookup
    return 1 / (1 + math.exp(-max(-30.0, min(30.0, x))))
