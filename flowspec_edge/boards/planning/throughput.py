"""The tokens/s of FlowSpec+ on a split, from two of its times: by this the search ranks splits.

A split's round trip takes ``latency``, and holds depth = latency / turn segments.  The tokens that a round
trip yields rise with the depth, and with the draft passes that fit into it, but less than in proportion.  The
tables have what virtual time found for even pipelines of the demonstration model; between their points both
logarithms are interpolated.  They only rank: the best few splits are then run in virtual time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from flowspec_edge.boards.planning.draft_turn import draft_turn
from flowspec_edge.boards.planning.planner import CandidateBoard, SplitProblem
from flowspec_edge.boards.planning.scaling import at_context

DEPTHS = (1.0, 2.0, 4.0, 8.0)
PASSES = (2.0, 4.0, 8.0, 16.0, 32.0)  # draft passes a round trip
# Tokens a round trip, by passes and depth.  A pipeline cannot be deeper than it has passes: there the value
# at the left is repeated.
WITH_HEAD = ((2.12, 2.32, 2.32, 2.32), (2.62, 2.87, 3.04, 3.04), (3.23, 3.66, 3.84, 3.89),
             (3.52, 4.28, 4.56, 4.78), (4.53, 5.36, 5.86, 5.86))
WITH_NGRAM = (1.55, 1.61, 1.69, 1.75)  # a draft takes no pass


@dataclass(frozen=True)
class Throughput:
    """A rate for ``planner.search``: tokens/s of ``at_once`` requests together."""

    problem: SplitProblem
    at_once: int = 1
    _turns: dict[str, tuple[float, float]] = field(default_factory=dict)  # (a turn, a pass) by D0

    def __call__(self, d0: CandidateBoard, slowest: float, latency: float) -> float:
        d0_turn, pass_s = self._turn_and_pass(d0)
        turn = max(slowest, d0_turn)
        round_trip = max(latency, turn * self.at_once)
        depth = round_trip / turn / self.at_once
        passes = round_trip / pass_s / self.at_once if pass_s else np.inf
        return self.at_once * tokens(self.problem.size.planned.by_ngrams, depth, passes) / round_trip

    def _turn_and_pass(self, d0: CandidateBoard) -> tuple[float, float]:
        if d0.name not in self._turns:
            problem = self.problem
            turn = draft_turn(at_context(d0.profile, problem.size, problem.context), 1.0, problem.rows,
                              self.problem.size.planned.kind)
            self._turns[d0.name] = turn.seconds, turn.draft
        return self._turns[d0.name]


def tokens(by_ngrams: bool, depth: float, passes: float) -> float:
    """Return the tokens of a round trip; constant outside the tables' points.

    by_ngrams  by look-up, which takes no pass, instead of passes of a draft head
    """
    x = np.log(max(depth, 1.0))
    if by_ngrams:
        return float(np.exp(np.interp(x, np.log(DEPTHS), np.log(WITH_NGRAM))))
    by_passes = [np.interp(x, np.log(DEPTHS), np.log(row)) for row in WITH_HEAD]
    return float(np.exp(np.interp(np.log(passes), np.log(PASSES), by_passes)))
