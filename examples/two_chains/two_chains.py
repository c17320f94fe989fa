"""A strategy outside flowspec_edge: two chains of draft tokens, verified in one segment.

A strategy decides; it never acts. It is asked for a draft pass when D0 is idle, and for a segment when the
first stage has room, and it hears which token the target gives after each row. ``TreeStrategy`` brings the
draft tree, the acceptance rule and the restart after a miss, so two decisions remain.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from flowspec_edge import Parameters, Segment, TreeStrategy


@dataclass(frozen=True)
class TwoChainsParameters(Parameters):
    """``--set two_chains_levels=3``; ``segment`` and others, which all strategies have, are inherited."""

    two_chains_levels: Annotated[int, "levels of the two chains"] = 4


class TwoChains(TreeStrategy):
    name = "two_chains"
    summary = "two chains of EAGLE-2's draft tokens, verified whole, by turns (an example)"
    parameters = TwoChainsParameters  # the names that --set takes
    params: TwoChainsParameters

    @property
    def max_in_flight(self) -> int:
        return 1  # segments: the next one waits for the verdict on this one

    def begin_round(self) -> None:
        """Draft levels of two nodes each below the root, the newest token."""
        levels = self.params.two_chains_levels
        self.expand([self.tree.root], levels=levels, width=2, keep=2 * levels)

    def next_segment(self) -> Segment | None:
        if self.drafting or self.tree.root.number >= 0:  # not drafted yet, or sent already
            return None
        return self.send(self.tree.pop_unsent(self.tree.size), root=True)
